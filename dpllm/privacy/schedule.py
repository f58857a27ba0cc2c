"""What is sampled and how often: units, and N, B, q, T and shapes of batches, which follow from public numbers alone.

Comes in: public numbers, the number of privacy units among them. Goes out: a ``Schedule``, shapes of physical batches, whether or
not a run is private. Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from itertools import combinations
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpllm.errors import Refused

MOST_LENGTHS = 6  # of physical batches: the self-check runs each
PARTS = 16  # of max_length, among whose ends lengths are chosen, in multiples of eight


@dataclass(frozen=True)
class TokenSequence:
    """One sequence as the model reads it."""

    input_ids: tuple[int, ...]  # at most ``max_length``
    loss_mask: tuple[
        bool, ...
    ]  # True where the token is a target, predicted from the tokens before it; never at position 0
    denominator: int  # target tokens of the whole example, of which this may be one chunk
    reference: float = 0.0  # of an answer of a preference pair: minus its log-likelihood before training, in nats


@dataclass(frozen=True)
class Unit:
    """Everything that one privacy unit brings; it is sampled, clipped and bounded as a whole.

    Of preference pairs, the chosen and the rejected answer of each follow one another.
    """

    sequences: tuple[TokenSequence, ...]


@dataclass(frozen=True)
class Schedule:
    """How often whom: the part of a run that does not depend on whether it is private."""

    dataset_size: (
        int  # N, public: units, canary slots included; with ``data.sampling: example``, their rows after the cap
    )
    canary_slots: int  # how many of the N are held by candidate canaries: see ``recipe.derived.num_slots``
    expected_batch_size: int  # B, the public divisor of the summed gradient, in the same things as N
    sampling_rate: float  # q = B / N, with which each of the N joins every logical batch independently
    num_steps: int  # T, logical steps


def make_schedule(
    num_units: int, batch: int, steps: int | None, epochs: float | None = None, *, slots: int = 0
) -> Schedule:
    """Derives N, q and T, in integers and exact fractions; Refused where the logical batch is larger than the dataset.

    Args:
        num_units: Privacy units without canaries, >= 1.
        batch: B, >= 1.
        steps: T; None: as many as ``epochs`` take, expected passes over the data.
        epochs: > 0.
        slots: Of canaries.
    """
    size = num_units + slots
    if batch > size:
        raise Refused(
            f"train.batch_size {batch} is larger than the dataset ({size} privacy units), so the sampling rate would exceed 1. "
            f"Set train.batch_size below it; a tenth, {max(1, size // 10)}, is usual."
        )
    # Exact: int(epochs / q) in floating point is often off by one.
    steps = steps or math.ceil(Fraction(str(epochs)) * size / batch)
    return Schedule(size, slots, batch, sampling_rate=batch / size, num_steps=steps)


def group_rate(schedule: Schedule, bands: int) -> float:
    """The rate q' = b B / N, with which a member of the group whose turn it is joins; B / N, where there is one group."""
    return bands * schedule.expected_batch_size / schedule.dataset_size


class Shape(NamedTuple):
    """Of a physical batch; both numbers follow from public ones alone."""

    length: int  # tokens to which its rows are padded
    rows: int  # padding rows included

    def __str__(self) -> str:
        """Such as 16 x 128."""
        return f"{self.rows} x {self.length}"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what ``str`` makes of it; a ValueError from anything else."""
        rows, length = map(int, text.split(" x "))
        if rows < 1 or length < 2:
            raise ValueError(f"{text} is not a shape")
        return cls(length, rows)

    @property
    def lower(self) -> Shape:
        """With the next smaller power of two of rows."""
        return self._replace(rows=2 ** max(0, (self.rows - 1).bit_length() - 1))


def pairwise(rows: int) -> int:
    """The most rows, of at most so many, that hold whole preference pairs; at least those of one."""
    return max(2, rows - rows % 2)


@lru_cache(maxsize=64)
def shapes_of(
    rows: int, batch: int, max_length: int, *, each: int = 1, fixed: int = 256, pairs: bool = False
) -> tuple[Shape, ...]:
    """The shapes of physical batches that make a step cheapest, by ascending length; the last holds rows of ``max_length``.

    In each step the last physical batch of each length is filled up with padding rows, and every row is padded to the next
    length: many tall shapes waste rows, and few waste tokens. Of the lengths in the data nothing is known that may decide a
    shape, so they are taken as spread evenly up to ``max_length``; for any others the shapes are as right, and a little slower.

    Args:
        rows: In one physical batch, at most.
        batch: B, expected units of a step.
        max_length: Tokens of the longest row allowed.
        each: Rows of a unit, at most.
        fixed: What a forward and backward pass costs before its first token, in tokens.
        pairs: Rows are answers of preference pairs, which are never cut, so that there is an even number of them.
    """
    rows = pairwise(rows) if pairs else rows
    step = 8 * max(1, math.ceil(max_length / (8 * PARTS)))
    ends = [0, *range(step, max_length, step), max_length]
    least = min(each, rows)

    @cache
    def cheapest(shorter: int, length: int) -> tuple[float, Shape]:
        tail = _tail(batch * each * (length - shorter) / max_length)
        heights = {*range(1, min(rows, 64) + 1), *(int(64 * 1.1**power) for power in range(100)), least, rows}
        most = max(least, min(rows, len(tail)))  # more than there ever are cost more
        heights = {pairwise(n) for n in heights} if pairs else heights
        return min(
            (float(tail[::n].sum()) * (n * length + fixed), Shape(length, n)) for n in heights if least <= n <= most
        )

    # What rows of up to ``end`` tokens cost with the shapes of one list; one more length in each round.
    found: dict[int, tuple[float, tuple[Shape, ...]]] = {0: (0.0, ())}
    for _ in range(MOST_LENGTHS):
        longer = dict(found)
        for before, end in combinations(ends, 2):
            if before in found:
                (cost, shapes), (more, shape) = found[before], cheapest(before, end)
                longer[end] = min(longer.get(end, (math.inf, ())), (cost + more, (*shapes, shape)))
        found = longer
    return found[max_length][1]


def _tail(mean: float) -> npt.NDArray[np.float64]:
    """P(n > k) of a Poisson variable n, for k = 0, 1, ...: every h-th of them add up to the expectation of ceil(n / h)."""
    most = math.ceil(mean + 10 * math.sqrt(mean) + 10)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
    mass = np.exp(np.arange(most + 1) * math.log(mean) - mean - logs)
    return np.asarray(mass[::-1].cumsum()[::-1][1:])


def shape_for(tokens: int, shapes: Sequence[Shape]) -> Shape:
    """That of the physical batch in which a unit lies whose longest row has so many tokens: it follows from that number alone."""
    for shape in shapes:
        if tokens <= shape.length:
            return shape
    raise ValueError(f"a row of {tokens} tokens is longer than the {shapes[-1].length} allowed")
