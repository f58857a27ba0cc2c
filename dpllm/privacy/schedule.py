"""What is sampled and how often: units, and N, B, q, T and the shape of passes, which follow from public numbers alone.

Comes in: public numbers, the number of privacy units among them. Goes out: a ``Schedule`` and a ``Packing``, whether or
not a run is private. Must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from dpllm.errors import Refused

Clipping = Literal["flat", "automatic"]
"""The clipping functions by their names; see ``clipping.FUNCTIONS``."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence as the model reads it."""

    input_ids: tuple[int, ...]  # at most ``max_length``
    # True where the token is a target, predicted from the tokens before it; never at position 0.
    loss_mask: tuple[bool, ...]
    denominator: int  # target tokens of the whole example, of which this may be one chunk
    reference: float = 0.0  # of an answer of a preference pair: minus its log-likelihood before training, in nats


@dataclass(frozen=True)
class Unit:
    """Everything that one privacy unit brings; it is sampled, clipped and bounded as a whole."""

    sequences: tuple[
        TokenSequence, ...
    ]  # of pairs of answers, the chosen and the rejected one of each follow one another


@dataclass(frozen=True)
class Schedule:
    """How often whom: the part of a run that does not depend on whether it is private."""

    # N, public: units, canary slots included; with ``data.sampling: example``, their rows after the cap.
    dataset_size: int
    canary_slots: int  # how many of the N are held by candidate canaries: see ``run.promise.num_slots``
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


LARGEST_PASS = 2**20  # tokens that may be asked for


@dataclass(frozen=True)
class Packing:
    """The one shape of a pass: how many tokens, and what may lie in it. All of it follows from public numbers."""

    tokens: int  # M, a multiple of what kernels compute at once
    most_units: int  # in one pass
    held_numbers: int  # coordinates of a unit's gradient that are held until its norm is known; see ``gradients``
    targets: int  # of one product of the output head
    max_length: int  # tokens of the longest row allowed
    rows_each: int = 1  # of an example: 2 of a preference pair, which is never cut
    multiple: int = 32  # M is one
    # Each example by itself, in the model's own attention, as long as it is; ``tokens`` is then unused.
    alone: bool = False

    @property
    def room(self) -> int:
        """Tokens that units may take: the last of a pass is padding."""
        return self.tokens - 1

    @property
    def last_position(self) -> int:
        """Of padding, so that the largest position is the same in every pass."""
        return self.max_length - 1

    def half(self) -> Packing | None:
        """About half as many tokens; None where the longest example would not fit."""
        tokens = self.multiple * math.ceil(self.tokens / 2 / self.multiple)
        fits = tokens > self.rows_each * self.max_length and tokens < self.tokens
        return replace(self, tokens=tokens) if fits and not self.alone else None

    def __str__(self) -> str:
        """Such as 512 tokens."""
        return "one example" if self.alone else f"{self.tokens:,} tokens"


# Rows under one another, padded to the longest of them: for whoever needs no bits that are the same in any company.
PADDED = Packing(tokens=0, most_units=1, held_numbers=0, targets=128, max_length=0, alone=True)
