"""Gaussian noise on a lattice: independent from step to step, or banded.

Comes in: a secret key, made by ``stream.os_entropy``; never a user's seed (``privacy.insecure_seed`` aside, which ends the
guarantee), not logged and not stored. Goes out: sums with noise.

Sums in floating point are no real numbers: which float32 values a sum plus noise can reach depends on the sum, and tells it
(Mironov 2012). So everything that is released here is a multiple of one ``spacing``, a power of two: each unit's clipped
contribution is rounded to it, sums of such multiples are exact in float64 in any order, the noise is rounded to it, and the
two are added exactly.

Shape suffixes: P coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpllm.privacy.plan import spacing_of
from dpllm.privacy.stream import CHUNK, SecretStream


class GaussianNoise:
    """Gaussian noise on a lattice, from a stream of independent standard normal variates.

    Guarantee:
        ``add_to`` turns a vector of multiples of the spacing into what the Gaussian mechanism with real numbers would release,
        rounded to the spacing: a multiple v plus a real number x, rounded, is v plus x rounded. So what it returns is a
        post-processing of N(v, scale^2), and the theorem holds for it as it stands, if x is normal.

        What is left is how x is made: the stream is assumed to be indistinguishable from a random one, and x is a float64 and
        no real number. A set of points that follows v could be told apart, so the points must be dense, also those of a pair
        of variates, which share a radius. Angles lie at most 2^-51 apart and radii at most 2^-43, out to 11 standard deviations
        (beyond them the probability is below 2^-87), and the spacing is at least 2^-31 scale: at least 2^12 radii and 2^16
        angles are rounded to each square of the lattice, the same for every v. Radii of 53 random bits, as libraries make them,
        would lie further apart than the lattice beyond 5.8 standard deviations (one pair in 2^24). The exact alternatives
        (Canonne, Kamath and Steinke 2020) cost more than a step does.

    The stream is AES-256 in counter mode with 256 bits of the operating system, on the CPU. On a GPU, unless ``secure``
    (``privacy.secure_noise``), it is torch's Philox4x32 with 63 bits: it passes the usual statistical batteries, is not proven
    to be cryptographic, and its pairs have radii of 53 bits.

    References:
        Mironov 2012, On Significance of the Least Significant Bits for Differential Privacy (the attack; rounding to a
        lattice, there for Laplace noise). Holohan and Braghin 2021, Secure Random Sampling in Differential Privacy (the
        attack on pairs of Box and Muller's transform).
    """

    def __init__(self, entropy: int, device: torch.device, *, secure: bool = False) -> None:
        """``entropy`` is a secret integer below 2**256."""
        self.device = device
        self._stream = SecretStream(entropy, b"nois")
        on_device = device.type != "cpu" and not secure
        self._gpu = torch.Generator(device).manual_seed(entropy % 2**63) if on_device else None
        self.generator = "philox_gpu" if on_device else "aes256_ctr"

    def draw(self, size: int) -> Tensor:
        """A float64 vector of ``size`` standard normal variates on the stream's device."""
        if self._gpu is not None:
            return torch.randn(size, generator=self._gpu, device=self.device, dtype=torch.float64)
        noise_N = np.empty(size)
        self._stream.normal(noise_N)
        return torch.from_numpy(noise_N).to(self.device)

    def add_to(self, sum_P: Tensor, scale: float) -> None:
        """Adds noise of standard deviation ``scale`` > 0, rounded to its lattice, in place.

        ``sum_P`` holds float64 multiples of ``spacing_of(scale)``, below 2^52 of them.
        """
        spacing = spacing_of(scale)
        for part in torch.split(sum_P, CHUNK):
            noise = (self.draw(len(part)) * (scale / spacing)).round_()
            part.add_(noise, alpha=spacing)  # two multiples of a power of two: exact


class BandedNoise:
    """Noise that takes back a part of earlier steps' noise: n_t = (s z_t - sum over j = 1..b-1 of c_j n_{t-j}) / c_0.

    Guarantee:
        What ``add_to`` returns is a post-processing of the matrix mechanism C G + s Z, C lower triangular Toeplitz with
        ``coefficients``, G_t the vector of step t, a multiple of the spacing, and Z independent standard normal: n_t is rounded
        to the spacing before it is added, and what is kept is n_t as it was added. So n_{t-j} = r_{t-j} - G_{t-j} exactly, for
        what was released then, and r_t is (C G + s Z)_t - sum over j of c_j r_{t-j}, over c_0, rounded: a function of the
        mechanism's row and of earlier releases alone. What is left is what is left of ``GaussianNoise``, and the rounding of that
        sum in float64. Kept in float32, n_t would no longer be what was added, and c_j G could be read off the difference.

        Buffers are secret: they would let a reader take the noise off. They are never stored; a resumed run begins without any,
        which ``dpllm.privacy.banded`` counts. The scale must stay the same from step to step.
    """

    def __init__(self, noise: GaussianNoise, coefficients: Sequence[float]) -> None:
        """``coefficients`` are c_0, ..., c_{b-1}; of ``noise`` every step takes fresh variates."""
        self.device, self.generator = noise.device, noise.generator
        self._noise, self._coefficients = noise, tuple(coefficients)
        # n_{t-1}, n_{t-2}, ..., b - 1 at most, in units of the spacing; the first steps make room for them.
        self._past: list[Tensor] = []

    def forget(self) -> None:
        """Empties the buffers."""
        self._past = []

    def add_to(self, sum_P: Tensor, scale: float) -> None:
        """Adds the noise of one step in place; see ``GaussianNoise.add_to``."""
        spacing, (first, *later) = spacing_of(scale), self._coefficients
        full = len(self._past) == len(later)
        # The oldest is read, piece by piece, before it is written over.
        newest_P = self._past[-1] if full and later else torch.empty_like(sum_P)
        past = [torch.split(one_P, CHUNK) for one_P in self._past]
        for place, (part, new) in enumerate(zip(torch.split(sum_P, CHUNK), torch.split(newest_P, CHUNK), strict=True)):
            noise = self._noise.draw(len(part)) * (scale / spacing)
            for weight, chunks in zip(later, past, strict=False):
                noise.sub_(chunks[place], alpha=weight)
            new.copy_(noise.div_(first).round_())
            part.add_(new, alpha=spacing)
        self._past = [newest_P, *self._past][: len(later)]
