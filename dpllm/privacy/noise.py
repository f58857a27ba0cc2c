"""Gaussian noise in float32, from entropy of the operating system.

Comes in: a secret key. Goes out: noise. The key is never a user's seed, is not logged and is not stored.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor


def os_entropy() -> int:
    """128 secret bits from the operating system."""
    return secrets.randbits(128)


class GaussianNoise:
    """A stream of independent standard normal variates.

    Guarantee:
        Each coordinate of each draw is an independent N(0, 1) variate, rounded to float32, under the assumption that the
        generator's output is indistinguishable from random. Continuous Gaussian noise in floating point is an
        approximation which the theorem does not cover (Mironov 2012; Jin et al. 2022); cards say so.

    On a CPU the stream is numpy's Philox4x64 with the whole 128-bit key. torch's own CPU generator is not used: it keeps
    the lowest 32 bits of its seed only (seeds 5 and 5 + 2^32 give the same stream), so that its noise could be searched
    for. On a GPU it is torch's Philox4x32 with 63 bits of the key.
    """

    def __init__(self, entropy: int, device: torch.device) -> None:
        """Keys the stream with a secret 128-bit integer."""
        self._device = device
        self._cpu = np.random.Generator(np.random.Philox(key=entropy))
        self._gpu = None if device.type == "cpu" else torch.Generator(device).manual_seed(entropy % 2**63)

    def draw(self, size: int) -> Tensor:
        """A float32 vector of ``size`` standard normal variates on the stream's device."""
        if self._gpu is not None:
            return torch.randn(size, generator=self._gpu, device=self._device, dtype=torch.float32)
        return torch.from_numpy(self._cpu.standard_normal(size, dtype=np.float32))
