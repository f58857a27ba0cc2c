"""Poisson sampling over privacy units.

Comes in: the Schedule and secret entropy. Goes out: the units that join a step. Every rank draws the same logical batch from the
same secret stream, and takes its own share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpllm.privacy.noise import SecretStream
from dpllm.privacy.schedule import Schedule, group_rate


@dataclass(frozen=True)
class CyclicSchedule:
    """Assigns each step of banded noise to one group of units; by default there is one group."""

    bands: int = 1  # b, number of groups
    key: int = 0  # 256 secret bits, drawn once for a run, that determine each slot's group
    first_step: int = 0  # steps charged before the first draw, by earlier attempts


def groups(turns: CyclicSchedule, num_slots: int) -> npt.NDArray[np.int64]:
    """group_N: the group of each slot, uniform in 0..b-1, independent of other slots and of the data.

    It comes from a ``SecretStream``, which is the same in every version, so a resumed run keeps each slot's group.
    """
    uniform_N = SecretStream(turns.key, b"grup").uniform(num_slots)
    return np.asarray(uniform_N * turns.bands, dtype=np.int64)


class PoissonSampler:
    """Draws logical batches.

    Guarantee:
        In each draw, each of ``num_slots`` slots joins independently with probability ``schedule.sampling_rate``, up to the
        53-bit resolution of the uniform variates, which come from a cryptographic ``SecretStream``. With ``turns``, step i draws
        from group i mod b only, at b times that rate.

    References:
        Abadi et al. 2016, Deep Learning with Differential Privacy, section 3; Zhu and Wang 2019, Poisson Subsampled
        Renyi Differential Privacy.
    """

    def __init__(self, schedule: Schedule, num_slots: int, entropy: int, turns: CyclicSchedule | None = None) -> None:
        """``entropy`` is as in ``GaussianNoise``, and the same on every rank; units and canaries have slots."""
        self._turns = turns or CyclicSchedule()
        self._rate = group_rate(schedule, self._turns.bands)
        self._group_N = groups(self._turns, num_slots)
        self._step = self._turns.first_step
        self._num_slots = num_slots
        self._stream = SecretStream(entropy, b"samp")

    def draw(self) -> list[int]:
        """Indices of the slots that join the next logical batch; possibly none."""
        # A coin for every slot, even out of turn, so that all ranks stay at the same position in the stream.
        joins = self._stream.uniform(self._num_slots) < self._rate
        joins &= self._group_N == self._step % self._turns.bands
        self._step += 1
        return [int(index) for index in np.flatnonzero(joins)]
