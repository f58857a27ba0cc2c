"""What is sampled and how often: units, and N, B, q, T and the shape of passes, all derived from public numbers.

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
"""Names of the clipping functions; see ``clipping.FUNCTIONS``."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence as the model reads it."""

    input_ids: tuple[int, ...]  # at most ``max_length``
    # True where the token is a target, predicted from the tokens before it; never at position 0.
    loss_mask: tuple[bool, ...]
    denominator: int  # number of target tokens in the whole example, of which this may be one chunk
    reference: float = 0.0  # of an answer of a preference pair: minus its log-likelihood before training, in nats


@dataclass(frozen=True)
class Unit:
    """All data of one privacy unit; it is sampled, clipped and bounded as a whole."""

    sequences: tuple[
        TokenSequence, ...
    ]  # of pairs of answers, the chosen and the rejected one of each follow one another


@dataclass(frozen=True)
class Schedule:
    """Sizes, sampling rate and steps: the part of a run that does not depend on whether it is private."""

    # N, public: units including canary slots; with ``data.sampling: example``, their rows after the cap.
    dataset_size: int
    canary_slots: int  # how many of the N belong to candidate canaries: see ``run.promise.num_slots``
    expected_batch_size: int  # B, the public divisor of the summed gradient, in the same units as N
    sampling_rate: float  # q = B / N, the probability that each of the N joins a logical batch, independently
    num_steps: int  # T, logical steps


def make_schedule(
    num_units: int, batch: int, steps: int | None, epochs: float | None = None, *, slots: int = 0
) -> Schedule:
    """Derives N, q and T with integers and exact fractions; Refused if the logical batch is larger than the dataset.

    Args:
        num_units: Privacy units without canaries, >= 1.
        batch: B, >= 1.
        steps: T; None: derived from ``epochs``, the expected number of passes over the data.
        epochs: > 0.
        slots: Number of canary slots.
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
    """The rate q' = b B / N at which members of the group whose turn it is join a step; B / N with one group."""
    return bands * schedule.expected_batch_size / schedule.dataset_size


LARGEST_PASS = 2**20  # maximum tokens of a pass that a user may set


@dataclass(frozen=True)
class Packing:
    """The shape of all passes: number of tokens, and limits on their content. It depends on public numbers alone."""

    tokens: int  # M, a multiple of ``multiple``
    most_units: int  # in one pass
    held_numbers: int  # coordinates of a unit's gradient held until its norm is known; see ``gradients``
    targets: int  # targets in one product of the output head
    max_length: int  # tokens of the longest row allowed
    rows_each: int = 1  # rows of an example: 2 for a preference pair, which is never split
    multiple: int = 32  # tokens that kernels compute at once
    # Each example gets its own pass of its own length, with the model's own attention; ``tokens`` is then unused.
    alone: bool = False

    @property
    def room(self) -> int:
        """Tokens available to units: the last token of a pass is padding."""
        return self.tokens - 1

    @property
    def last_position(self) -> int:
        """Position of padding, so that the largest position is the same in every pass."""
        return self.max_length - 1

    def half(self) -> Packing | None:
        """A packing with about half as many tokens; None if the longest example would not fit."""
        tokens = self.multiple * math.ceil(self.tokens / 2 / self.multiple)
        fits = tokens > self.rows_each * self.max_length and tokens < self.tokens
        return replace(self, tokens=tokens) if fits and not self.alone else None

    def __str__(self) -> str:
        """The size, such as "512 tokens"."""
        return "one example" if self.alone else f"{self.tokens:,} tokens"


# Stacked rows, padded to the longest: for uses that do not need batch-invariant bits.
PADDED = Packing(tokens=0, most_units=1, held_numbers=0, targets=128, max_length=0, alone=True)
