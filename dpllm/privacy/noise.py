"""Gaussian noise on a lattice, independent or banded across steps, and the secret streams of all randomness.

Comes in: a secret key from ``os_entropy``, never logged or stored, and never a user's seed (except ``privacy.insecure_seed``,
which voids the guarantee). Goes out: words, uniform and normal variates, sums with noise. Imports torch only to make normal
variates: ``dpllm verify`` recomputes the groups of gradient canaries.

Floating-point numbers are not real numbers: the float32 values that a sum plus noise can reach depend on the sum, and reveal it
(Mironov 2012). So everything released here is a multiple of one ``spacing``, a power of two: each unit's clipped contribution is
rounded to it, sums of such multiples are exact in float64 in any order, the noise is rounded to it, and the two are added
exactly.

Shape suffixes: P coordinates.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from dpllm.errors import Refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEY_BITS = 256
CHUNK = 2**17  # variates made at a time, so that temporaries stay in the cache
ENDS = 2.0**-12  # width of both ends of the unit interval, where a radius gets more bits
LATTICE_BITS = 30  # the noise's standard deviation is 2^30 to 2^31 times the spacing of the lattice
SLACK = 1e-6  # by which rounding may lengthen a clipped gradient, over C; see ``clipping.PerUnitClipper``


def os_entropy() -> int:
    """A secret key of 256 bits from the operating system."""
    return secrets.randbits(KEY_BITS)


class SecretStream:
    """Words and variates from AES-256 in counter mode (NIST SP 800-38A, 6.5), keyed by a secret integer below 2**256.

    The counter begins at ``purpose``, four bytes, and twelve bytes of zero, so that streams of one key and different purposes
    share no block until 2**96 blocks are used.

    Guarantee:
        Without the key, n words cannot be distinguished from independent uniform ones if AES-256 is a pseudorandom permutation.
        Because its blocks never repeat, there is an additional advantage of at most n^2 2^-131: 2^-57 for the 2^37 words of a
        large run.
    """

    def __init__(self, key: int, purpose: bytes) -> None:
        """Each key and purpose gives its own stream."""
        secret = key.to_bytes(KEY_BITS // 8, "little")
        self._cipher = Cipher(AES(secret), CTR(purpose + bytes(12))).encryptor()
        self._zeros = memoryview(bytes(8 * CHUNK))
        self._words = np.empty(CHUNK + 2, dtype="<i8")  # the library needs room for one more block

    def words(self, size: int) -> npt.NDArray[np.int64]:
        """The next ``size`` words of 64 bits."""
        return np.frombuffer(self._cipher.update(bytes(8 * size)), dtype="<i8")

    def uniform(self, size: int) -> npt.NDArray[np.float64]:
        """``size`` independent multiples of 2**-53, uniform in [0, 1)."""
        return np.asarray((self.words(size).view(np.uint64) >> np.uint64(11)) * 2.0**-53)

    def normal(self, out_N: npt.NDArray[np.float64]) -> None:
        """Fills a vector of any length with independent standard normal variates; ``GaussianNoise`` states their density.

        Pairs are r cos(a) and r sin(a) with r^2 = -2 log(u) (Box and Muller 1958): one word for the angle a, one for u. If u is
        near 0 or 1, another word refines it.
        """
        for part in np.split(out_N, range(CHUNK, len(out_N), CHUNK)):
            pairs = np.empty(len(part) + 1) if len(part) % 2 else part
            self._fill(pairs)
            if pairs is not part:
                part[:] = pairs[:-1]

    def _fill(self, pairs_N: npt.NDArray[np.float64]) -> None:
        import torch  # not needed by ``dpllm verify``, which draws no noise

        size, half = len(pairs_N), len(pairs_N) // 2
        self._cipher.update_into(self._zeros[: 8 * size], self._words.view(np.uint8))  # type: ignore[arg-type]
        words = self._words[:size]
        np.multiply(words, 2.0**-64, out=pairs_N)  # in [-1/2, 1/2)
        u, angle = pairs_N[:half], torch.from_numpy(pairs_N[half:])
        u += 0.5
        near_end = np.flatnonzero((u < ENDS) | (u > 1 - ENDS))
        np.log(u, out=u)
        if len(near_end):
            u[near_end] = self._log_near_an_end(words[near_end])
        radius = torch.from_numpy(u).mul_(-2.0).sqrt_()
        sine = torch.sin(angle.mul_(2.0 * math.pi)).mul_(radius)
        radius.mul_(angle.cos_())
        angle.copy_(sine)

    def _log_near_an_end(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """log(u) for u = 1/2 + word 2^-64 near 0 or 1, with 64 more bits after those of the word."""
        low = words < 0
        distance = np.where(low, words + 2**62 + 2**62, 2**62 - 1 - words + 2**62)  # from that end, in 2^-64
        extra = self.words(len(words)).view(np.uint64) * 2.0**-64 + 2.0**-65
        v = (distance + extra) * 2.0**-64
        return np.asarray(np.where(low, np.log(v), np.log1p(-v)))


def noise_scale(noise_multiplier: float, max_grad_norm: float, coordinates: int) -> float:
    """The standard deviation s of the noise: ``noise_multiplier`` times the most that one unit can move the sum on the lattice.

    Raises:
        Refused: The lattice would be as coarse as C.
    """
    # A unit's clipped gradient has norm at most C (1 + 1e-6), and rounding it to the lattice moves each of P coordinates by at
    # most one spacing, which is at most 2^-30 s. So s = sigma (C (1 + 1e-6) + 2^-30 s sqrt(P)), solved for s. For a million
    # coordinates and sigma 1, it is C (1 + 2e-6).
    rounding = 2.0**-LATTICE_BITS * noise_multiplier * math.sqrt(coordinates)
    if rounding >= 0.5:
        raise Refused(
            f"a noise multiplier of {noise_multiplier:g} over {coordinates:,} coordinates would need rounding as coarse as the "
            "gradients themselves. Lower privacy.noise_multiplier, or train fewer parameters."
        )
    return noise_multiplier * max_grad_norm * (1 + SLACK) / (1 - rounding)


def spacing_of(scale: float) -> float:
    """Spacing of the lattice for noise of this standard deviation: the power of two in (2^-31, 2^-30] times it."""
    return math.ldexp(1.0, math.floor(math.log2(scale)) - LATTICE_BITS)


class GaussianNoise:
    """Gaussian noise on a lattice, from a stream of independent standard normal variates.

    Guarantee:
        ``add_to`` turns a vector of multiples of the spacing into what the Gaussian mechanism with real numbers would release,
        rounded to the spacing: a multiple v plus a real number x, rounded, is v plus x rounded. So its result is a
        post-processing of N(v, scale^2), and the theorem applies as it stands if x is normal.

        What remains is how x is made: the stream is assumed to be indistinguishable from a random one, and x is a float64, not a
        real number. If the set of possible points depended on v, it would reveal v. So the points must be dense, also for a pair
        of variates, which share a radius. Adjacent angles differ by at most 2^-51 and adjacent radii by at most 2^-43, out to 11
        standard deviations (beyond, the probability is below 2^-87), and the spacing is at least 2^-31 scale: at least 2^12 radii
        and 2^16 angles are rounded to each square of the lattice, the same for every v. Radii of 53 random bits, as in other
        libraries, would be further apart than the lattice beyond 5.8 standard deviations (one pair in 2^24). Exact alternatives
        (Canonne, Kamath and Steinke 2020) cost more than a training step.

    The stream is AES-256 in counter mode with 256 bits from the operating system, on the CPU. On a GPU, unless ``secure``
    (``privacy.secure_noise``) is set, it is torch's Philox4x32 with a key of 63 bits, which passes the usual statistical
    batteries but is not known to be cryptographically secure, and whose pairs have radii of 53 bits.

    References:
        Mironov 2012, On Significance of the Least Significant Bits for Differential Privacy (the attack; rounding to a lattice,
        for Laplace noise). Holohan and Braghin 2021, Secure Random Sampling in Differential Privacy (the attack on pairs of Box
        and Muller's transform).
    """

    def __init__(self, entropy: int, device: torch.device, *, secure: bool = False) -> None:
        """``entropy`` is a secret integer below 2**256."""
        import torch

        self.device = device
        self._stream = SecretStream(entropy, b"nois")
        on_device = device.type != "cpu" and not secure
        self._gpu = torch.Generator(device).manual_seed(entropy % 2**63) if on_device else None
        self.generator = "philox_gpu" if on_device else "aes256_ctr"

    def draw(self, size: int) -> Tensor:
        """A float64 vector of ``size`` standard normal variates on the stream's device."""
        import torch

        if self._gpu is not None:
            return torch.randn(size, generator=self._gpu, device=self.device, dtype=torch.float64)
        noise_N = np.empty(size)
        self._stream.normal(noise_N)
        return torch.from_numpy(noise_N).to(self.device)

    def add_to(self, sum_P: Tensor, scale: float) -> None:
        """Adds noise of standard deviation ``scale`` > 0, rounded to its lattice, in place.

        ``sum_P`` holds float64 multiples of ``spacing_of(scale)``, each of fewer than 2^52 spacings.
        """
        import torch

        spacing = spacing_of(scale)
        for part in torch.split(sum_P, CHUNK):
            noise = (self.draw(len(part)) * (scale / spacing)).round_()
            part.add_(noise, alpha=spacing)  # two multiples of a power of two: exact


class BandedNoise:
    """Noise that cancels a part of earlier steps' noise: n_t = (s z_t - sum over j = 1..b-1 of c_j n_{t-j}) / c_0.

    Guarantee:
        ``add_to`` returns a post-processing of the matrix mechanism C G + s Z, where C is lower triangular Toeplitz with
        ``coefficients``, G_t is the vector of step t in multiples of the spacing, and Z is independent standard normal. n_t is
        rounded to the spacing before it is added, and stored as added. So n_{t-j} = r_{t-j} - G_{t-j} exactly, where r is what
        was released, and r_t is ((C G + s Z)_t - sum over j of c_j r_{t-j}) / c_0, rounded: a function of the mechanism's row
        and earlier releases alone. The remaining assumptions are those of ``GaussianNoise``, and the float64 rounding of that
        sum. If n_t were stored in float32, it would differ from what was added, and the difference would reveal c_j G.

        Buffers are secret: with them, the noise could be subtracted. They are never saved; a resumed run begins with empty ones,
        which ``dpllm.privacy.banded`` accounts for. The scale must be the same in all steps.
    """

    def __init__(self, noise: GaussianNoise, coefficients: Sequence[float]) -> None:
        """``coefficients`` are c_0, ..., c_{b-1}; every step draws fresh variates from ``noise``."""
        self.device, self.generator = noise.device, noise.generator
        self._noise, self._coefficients = noise, tuple(coefficients)
        # n_{t-1}, n_{t-2}, ..., at most b - 1, in units of the spacing; allocated during the first steps.
        self._past: list[Tensor] = []

    def forget(self) -> None:
        """Empties the buffers."""
        self._past = []

    def add_to(self, sum_P: Tensor, scale: float) -> None:
        """Adds the noise of one step in place; see ``GaussianNoise.add_to``."""
        import torch

        spacing, (first, *later) = spacing_of(scale), self._coefficients
        full = len(self._past) == len(later)
        # The oldest is read, piece by piece, before it is overwritten.
        newest_P = self._past[-1] if full and later else torch.empty_like(sum_P)
        past = [torch.split(past_P, CHUNK) for past_P in self._past]
        for place, (part, new) in enumerate(zip(torch.split(sum_P, CHUNK), torch.split(newest_P, CHUNK), strict=True)):
            noise = self._noise.draw(len(part)) * (scale / spacing)
            for weight, chunks in zip(later, past, strict=False):
                noise.sub_(chunks[place], alpha=weight)
            new.copy_(noise.div_(first).round_())
            part.add_(new, alpha=spacing)
        self._past = [newest_P, *self._past][: len(later)]
