"""Secret randomness: Gaussian noise on a lattice, and the uniform variates of Poisson sampling.

Comes in: a secret key, made by ``os_entropy``. Goes out: noise and uniform variates. The key is never a user's seed
(``privacy.insecure_seed`` aside, which ends the guarantee), is not logged and is not stored. Must not know what is drawn
for.

Sums in floating point are no real numbers: which float32 values a sum plus noise can reach depends on the sum, and tells it
(Mironov 2012). So everything that is released here is a multiple of one ``spacing``, a power of two: each unit's clipped
contribution is rounded to it, sums of such multiples are exact in float64 in any order, the noise is rounded to it, and the
two are added exactly.

Shape suffixes: P coordinates.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from dpllm.privacy.plan import spacing_of

PHILOX_KEY_BITS, CHACHA20_KEY_BITS = 128, 256
CHUNK = 2**20  # variates made at once: 8 MB each of several temporaries


def os_entropy(bits: int = PHILOX_KEY_BITS) -> int:
    """That many secret bits from the operating system."""
    return secrets.randbits(bits)


def key_bits(secure: bool) -> int:
    """The length of a key of the generator that ``privacy.secure_noise`` chooses."""
    return CHACHA20_KEY_BITS if secure else PHILOX_KEY_BITS


class ChaCha20Stream:
    """Bytes and uniform variates from the keystream of ChaCha20, keyed by a secret integer below 2**256.

    Every call takes a nonce of its own: four bytes of ``purpose`` and eight of the call's number. Its blocks are counted
    from zero. No part of the keystream is therefore used twice, and no counter wraps: a call may take 256 GiB.

    Guarantee:
        Whoever does not know the key cannot tell the bytes from independent uniform ones, under the assumption that
        ChaCha20 is a pseudorandom function. Streams of other keys or purposes are independent in the same sense.

    References:
        Nir and Langley 2018, RFC 8439, sections 2.3 and 2.4.
    """

    def __init__(self, key: int, purpose: bytes) -> None:
        """Streams with a different ``purpose``, of four bytes, share no block although they share a key."""
        self._key = key.to_bytes(CHACHA20_KEY_BITS // 8, "little")
        self._purpose = purpose
        self._calls = 0

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        nonce = self._purpose + self._calls.to_bytes(8, "little")
        self._calls += 1
        return keystream(self._key, nonce, 0).update(bytes(size))

    def uniform(self, size: int) -> npt.NDArray[np.float64]:
        """``size`` independent multiples of 2**-53, uniform in [0, 1)."""
        words = np.frombuffer(self.take(8 * size), dtype="<u8")
        return np.asarray((words >> np.uint64(11)) * 2.0**-53)


def keystream(key: bytes, nonce: bytes, first_block: int) -> CipherContext:
    """ChaCha20 as RFC 8439 has it: 32 bytes of key, 12 of nonce, a block counter of 32 bits."""
    return Cipher(ChaCha20(key, first_block.to_bytes(4, "little") + nonce), mode=None).encryptor()


class GaussianNoise:
    """Gaussian noise on a lattice, from a stream of independent standard normal variates.

    Guarantee:
        ``add_to`` turns a vector of multiples of the spacing into what the Gaussian mechanism with real numbers would release,
        rounded to the spacing: a multiple v plus a real number x, rounded, is v plus x rounded. So what it returns is a
        post-processing of N(v, scale^2), and the theorem holds for it as it stands, if x is normal.

        What is left is how x is made: the generator's bits are assumed to be indistinguishable from random ones, and x is a
        float64 and no real number. Variates have 52 random bits of mantissa or more, so within eight standard deviations
        neighbouring ones lie at most 2^-47 scale apart (tails beyond 8.5 have a probability below 2^-55), while the spacing
        is at least 2^-31 scale: at least 2^16 variates are rounded to each point of the lattice, the same for every v, and
        its probability differs from the exact one by a share of about 2^-16 at most. No set of points that can be reached
        follows v, as it does without a lattice; the exact alternatives (Canonne, Kamath and Steinke 2020) cost more than a
        step does.

    By default, on a CPU, the stream is numpy's Philox4x64 with the whole 128-bit key. torch's own CPU generator is not
    used: it keeps the lowest 32 bits of its seed only (seeds 5 and 5 + 2^32 give the same stream), so that its noise could
    be searched for. On a GPU it is torch's Philox4x32 with 63 bits of the key. Neither Philox is proven to be
    cryptographic. With ``secure`` (``privacy.secure_noise``) it is ChaCha20 with a 256-bit key, on the CPU whatever the
    device, through Box and Muller's transform.

    References:
        Mironov 2012, On Significance of the Least Significant Bits for Differential Privacy (the attack; rounding to a
        lattice, there for Laplace noise). Holohan and Braghin 2021, Secure Random Sampling in Differential Privacy. Canonne,
        Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy. Box and Muller 1958, A Note on the
        Generation of Random Normal Deviates.
    """

    def __init__(self, entropy: int, device: torch.device, *, secure: bool = False) -> None:
        """``entropy`` is a secret integer of 128 bits, or of 256 with ``secure`` (ChaCha20)."""
        self.device = device
        self._secure = ChaCha20Stream(entropy, b"nois") if secure else None
        if secure:
            return
        self._cpu = np.random.Generator(np.random.Philox(key=entropy))
        self._gpu = None if device.type == "cpu" else torch.Generator(device).manual_seed(entropy % 2**63)

    def draw(self, size: int) -> Tensor:
        """A float64 vector of ``size`` standard normal variates on the stream's device."""
        if self._secure is not None:
            return _normal(self._secure, size).to(self.device)
        if self._gpu is not None:
            return torch.randn(size, generator=self._gpu, device=self.device, dtype=torch.float64)
        return torch.from_numpy(self._cpu.standard_normal(size))

    def add_to(self, sum_P: Tensor, scale: float) -> None:
        """Adds noise of standard deviation ``scale`` > 0, rounded to its lattice, in place.

        ``sum_P`` holds float64 multiples of ``spacing_of(scale)``, below 2^52 of them.
        """
        spacing = spacing_of(scale)
        for part in torch.split(sum_P, CHUNK):
            noise = (self.draw(len(part)) * (scale / spacing)).round_()
            part.add_(noise, alpha=spacing)  # two multiples of a power of two: exact


def uniform_stream(entropy: int, *, secure: bool = False) -> ChaCha20Stream | PhiloxStream:
    """The stream of Poisson sampling: uniform variates in [0, 1) with 53 bits; ``entropy`` as in ``GaussianNoise``."""
    return ChaCha20Stream(entropy, b"samp") if secure else PhiloxStream(entropy)


class PhiloxStream:
    """Uniform variates from numpy's Philox4x64; passes the usual statistical batteries, not proven cryptographic."""

    def __init__(self, key: int) -> None:
        """Keys the stream with 128 secret bits."""
        self._generator = np.random.Generator(np.random.Philox(key=key))

    def uniform(self, size: int) -> npt.NDArray[np.float64]:
        """``size`` independent multiples of 2**-53, uniform in [0, 1)."""
        return self._generator.random(size)


def _normal(stream: ChaCha20Stream, size: int) -> Tensor:
    half = -(-size // 2)
    radius, angle = stream.uniform(2 * half).reshape(2, half)
    radius = np.sqrt(-2.0 * np.log1p(-radius))  # 1 - u lies in (0, 1], so the logarithm is finite
    angle *= 2.0 * math.pi
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size])
