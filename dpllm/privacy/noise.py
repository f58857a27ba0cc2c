"""Secret randomness: Gaussian noise in float32, and the uniform variates of Poisson sampling.

Comes in: a secret key, made by ``os_entropy``. Goes out: noise and uniform variates. The key is never a user's seed
(``privacy.insecure_seed`` aside, which ends the guarantee), is not logged and is not stored. Must not know what is drawn
for.
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

PHILOX_KEY_BITS, CHACHA20_KEY_BITS = 128, 256
CHUNK = 2**18  # variates made at once, each from 64 bits eight times over: about 50 MB of working memory


def os_entropy(bits: int = PHILOX_KEY_BITS) -> int:
    """That many secret bits from the operating system."""
    return secrets.randbits(bits)


def key_bits(secure: bool) -> int:
    """The length of a key of the generator that ``privacy.secure_noise`` chooses."""
    return CHACHA20_KEY_BITS if secure else PHILOX_KEY_BITS


class ChaCha20Stream:
    """Bytes and uniform variates from the keystream of ChaCha20.

    Every call takes a nonce of its own: four bytes of ``purpose`` and eight of the call's number. Its blocks are counted
    from zero. No part of the keystream is therefore used twice, and no counter wraps: a call may take 256 GiB.

    Guarantee:
        Whoever does not know the key cannot tell the bytes from independent uniform ones, under the assumption that
        ChaCha20 is a pseudorandom function. Streams of other keys or purposes are independent in the same sense.

    References:
        Nir and Langley 2018, RFC 8439, sections 2.3 and 2.4.
    """

    def __init__(self, key: int, purpose: bytes) -> None:
        """Keys the stream.

        Args:
            key: A secret integer below 2**256.
            purpose: Four bytes; streams with different ones share no block although they share a key.
        """
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
    """A stream of independent standard normal variates.

    Guarantee:
        Each coordinate of each draw is an independent N(0, 1) variate, rounded to float32, under the assumption that the
        generator's output is indistinguishable from random. Continuous Gaussian noise in floating point is an
        approximation which the theorem does not cover (Mironov 2012; Jin et al. 2022); cards say so.

    By default, on a CPU, the stream is numpy's Philox4x64 with the whole 128-bit key. torch's own CPU generator is not
    used: it keeps the lowest 32 bits of its seed only (seeds 5 and 5 + 2^32 give the same stream), so that its noise could
    be searched for. On a GPU it is torch's Philox4x32 with 63 bits of the key. Neither Philox is proven to be
    cryptographic.

    With ``secure`` (``privacy.secure_noise``) it is ChaCha20 with a 256-bit key, on the CPU whatever the device. Each
    variate is (z1 + z2 + z3 + z4) / 2 of independent z by Box and Muller's transform in float64, no two of them from the
    same pair of uniform variates; only the sum is rounded to float32. To go back from a noised value to the uniform
    variates that made it, which is how floating-point attacks tell two candidate inputs apart, eight of them must be
    guessed together. This blunts such attacks. It is no discrete mechanism: which float32 numbers a noised sum can be
    still depends on the sum, and the theorem does not cover that either. No variate is larger than 17.2, where a normal
    one would be with a probability below 1e-65.

    References:
        Box and Muller 1958, A Note on the Generation of Random Normal Deviates. Mironov 2012, On Significance of the Least
        Significant Bits for Differential Privacy. Holohan and Braghin 2021, Secure Random Sampling in Differential
        Privacy (arXiv 2107.10138), section 4. Jin et al. 2022, Are We There Yet? Timing and Floating-Point Attacks on
        Differential Privacy Systems.
    """

    def __init__(self, entropy: int, device: torch.device, *, secure: bool = False) -> None:
        """Keys the stream.

        Args:
            entropy: A secret integer of 128 bits, or of 256 with ``secure``.
            device: Where the noise goes.
            secure: ChaCha20 and sums of four variates.
        """
        self._device = device
        self._secure = ChaCha20Stream(entropy, b"nois") if secure else None
        if secure:
            return
        self._cpu = np.random.Generator(np.random.Philox(key=entropy))
        self._gpu = None if device.type == "cpu" else torch.Generator(device).manual_seed(entropy % 2**63)

    def draw(self, size: int) -> Tensor:
        """A float32 vector of ``size`` standard normal variates on the stream's device."""
        if self._secure is not None:
            return _sums_of_four(self._secure, size).to(self._device)
        if self._gpu is not None:
            return torch.randn(size, generator=self._gpu, device=self._device, dtype=torch.float32)
        return torch.from_numpy(self._cpu.standard_normal(size, dtype=np.float32))


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


def _sums_of_four(stream: ChaCha20Stream, size: int) -> Tensor:
    noise = np.empty(size, dtype=np.float32)
    for start in range(0, size, CHUNK):
        part = noise[start : start + CHUNK]
        half = -(-len(part) // 2)
        radius, angle = stream.uniform(8 * half).reshape(2, 4, half)
        radius = np.sqrt(-2.0 * np.log1p(-radius))  # 1 - u lies in (0, 1], so the logarithm is finite
        angle *= 2.0 * math.pi
        # A pair's cosine and its sine are independent; they go into two different sums, row by row.
        cosines = (radius * np.cos(angle)).sum(axis=0)
        sines = (radius * np.sin(angle)).sum(axis=0)
        part[:] = 0.5 * np.concatenate([cosines, sines])[: len(part)]
    return torch.from_numpy(noise)
