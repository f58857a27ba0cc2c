"""Poisson sampling over privacy units.

Comes in: the Schedule and secret entropy. Goes out: which units join a step. Every rank draws the same logical batch from the
same secret stream and takes its own share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpllm.privacy.noise import SecretStream
from dpllm.privacy.schedule import Schedule, group_rate


@dataclass(frozen=True)
class CyclicSchedule:
    """Which group has its turn in which step, for banded noise; by default there is one group."""

    bands: int = 1  # b, how many groups
    key: int = 0  # 256 secret bits, drawn once for a run, from which each slot's group follows
    first_step: int = 0  # steps that were charged before the first draw, by earlier attempts


def groups(turns: CyclicSchedule, num_slots: int) -> npt.NDArray[np.int64]:
    """group_N: of each slot, uniform in 0..b-1 and independent of the others and of what the slots hold.

    From a ``SecretStream``, which is the same in every version, so that a resumed run finds each slot where it was.
    """
    uniform_N = SecretStream(turns.key, b"grup").uniform(num_slots)
    return np.asarray(uniform_N * turns.bands, dtype=np.int64)


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

    def __init__(self, schedule: Schedule, num_slots: int, entropy: int, turns: CyclicSchedule | None = None) -> None:
        """``entropy`` is as of ``GaussianNoise``, and the same on every rank; slots are those of units and of canaries."""
        self._turns = turns or CyclicSchedule()
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
