"""Poisson sampling over privacy units.

Comes in: the Schedule and secret entropy. Goes out: which units join a step. Every rank draws the same logical batch from the
same secret stream and takes its own share.
"""

from __future__ import annotations

import numpy as np

from dpllm.privacy.schedule import Schedule, group_rate
from dpllm.privacy.stream import SecretStream, Turns, groups


class PoissonSampler:
    """Draws logical batches.

    Guarantee:
        In each draw every one of ``num_slots`` slots joins independently with probability ``schedule.sampling_rate``,
        up to the 53-bit resolution of the uniform variates, which are those of a cryptographic ``SecretStream``.
        With ``turns``, step i draws from group i mod b alone, at b times that rate.

    References:
        Abadi et al. 2016, Deep Learning with Differential Privacy, section 3; Zhu and Wang 2019, Poisson Subsampled
        Renyi Differential Privacy.
    """

    def __init__(self, schedule: Schedule, num_slots: int, entropy: int, turns: Turns | None = None) -> None:
        """``entropy`` is as of ``GaussianNoise``, and the same on every rank; slots are those of units and of canaries."""
        self._turns = turns or Turns()
        self._rate = group_rate(schedule, self._turns.bands)
        self._group_N = groups(self._turns, num_slots)
        self._step = self._turns.first_step
        self._num_slots = num_slots
        self._stream = SecretStream(entropy, b"samp")

    def draw(self) -> list[int]:
        """Indices of the slots that join the next logical batch; possibly none."""
        # A coin for every slot, also where it is not its turn: ranks stay at the same place of the stream.
        joins = self._stream.uniform(self._num_slots) < self._rate
        joins &= self._group_N == self._step % self._turns.bands
        self._step += 1
        return [int(index) for index in np.flatnonzero(joins)]
