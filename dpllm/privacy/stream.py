"""Secret streams of random numbers, and the groups of units that follow from one.

Comes in: a secret key, made by ``os_entropy``. Goes out: words, uniform and normal variates, groups. Imports torch only where
normal variates are made: ``dpllm verify`` finds the groups of gradient canaries again.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

KEY_BITS = 256
CHUNK = 2**17  # variates made at once: what is held meanwhile stays in the cache
ENDS = 2.0**-12  # of the unit interval, where a radius is computed from more bits


def os_entropy() -> int:
    """A secret key of 256 bits from the operating system."""
    return secrets.randbits(KEY_BITS)


class SecretStream:
    """Words and variates from AES-256 in counter mode (NIST SP 800-38A, 6.5), keyed by a secret integer below 2**256.

    The counter begins at ``purpose``, four bytes, and twelve bytes of zero, so that streams of one key and different purposes
    share no block before 2**96 of them are used.

    Guarantee:
        Whoever does not know the key cannot tell n words from independent uniform ones, under the assumption that AES-256 is
        a pseudorandom permutation; as its blocks never repeat, they differ from random ones with probability below
        n^2 2^-131: 2^-57 for the 2^37 words of a large run.
    """

    def __init__(self, key: int, purpose: bytes) -> None:
        """A stream of its own for each key and purpose."""
        secret = key.to_bytes(KEY_BITS // 8, "little")
        self._cipher = Cipher(AES(secret), CTR(purpose + bytes(12))).encryptor()
        self._zeros = memoryview(bytes(8 * CHUNK))
        self._words = np.empty(CHUNK + 2, dtype="<i8")  # the library wants room for one more block

    def words(self, size: int) -> npt.NDArray[np.int64]:
        """The next ``size`` words of 64 bits."""
        return np.frombuffer(self._cipher.update(bytes(8 * size)), dtype="<i8")

    def uniform(self, size: int) -> npt.NDArray[np.float64]:
        """``size`` independent multiples of 2**-53, uniform in [0, 1)."""
        return np.asarray((self.words(size).view(np.uint64) >> np.uint64(11)) * 2.0**-53)

    def normal(self, out_N: npt.NDArray[np.float64]) -> None:
        """Fills a vector of any length with independent standard normal variates; ``GaussianNoise`` says how densely they lie.

        Pairs are r cos(a) and r sin(a) with r^2 = -2 log(u) (Box and Muller 1958): one word for the angle a, one for u. Where u
        is near 0 or 1, another word makes it finer.
        """
        for part in np.split(out_N, range(CHUNK, len(out_N), CHUNK)):
            pairs = np.empty(len(part) + 1) if len(part) % 2 else part
            self._fill(pairs)
            if pairs is not part:
                part[:] = pairs[:-1]

    def _fill(self, pairs_N: npt.NDArray[np.float64]) -> None:
        import torch  # which ``dpllm verify``, who draws no noise, does without

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
        """log(u) where u = 1/2 + word 2^-64 is near 0 or 1, with 64 more bits behind those of the word."""
        low = words < 0
        distance = np.where(low, words + 2**62 + 2**62, 2**62 - 1 - words + 2**62)  # from that end, in 2^-64
        more = self.words(len(words)).view(np.uint64) * 2.0**-64 + 2.0**-65
        v = (distance + more) * 2.0**-64
        return np.asarray(np.where(low, np.log(v), np.log1p(-v)))


@dataclass(frozen=True)
class Turns:
    """Which group has its turn in which step, for banded noise; by default there is one group."""

    bands: int = 1  # b, how many groups
    key: int = 0  # 256 secret bits, drawn once for a run, from which each slot's group follows
    first_step: int = 0  # steps that were charged before the first draw, by earlier attempts


def groups(turns: Turns, num_slots: int) -> npt.NDArray[np.int64]:
    """group_N: of each slot, uniform in 0..b-1 and independent of the others and of what the slots hold.

    From a ``SecretStream``, which is the same in every version, so that a resumed run finds each slot where it was.
    """
    uniform_N = SecretStream(turns.key, b"grup").uniform(num_slots)
    return np.asarray(uniform_N * turns.bands, dtype=np.int64)
