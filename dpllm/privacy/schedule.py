"""How often whom: N, B, q and T, and what else follows from public numbers alone, whether or not a run is private.

Comes in: the recipe and the public number of privacy units. Goes out: a ``Schedule``, lengths of rows, slots. Must not see data
and must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from dpllm.errors import ConfigError, Refused
from dpllm.recipe.audit import AuditConfig
from dpllm.recipe.config import DataConfig, RunConfig


@dataclass(frozen=True)
class Schedule:
    """How often whom: the part of a run that does not depend on whether it is private.

    Attributes:
        dataset_size: N, the public number of what is sampled, canary slots included: privacy units, or, with
            ``data.sampling: example``, their rows after the cap of ``max_examples_per_unit``.
        canary_slots: How many of the N are held by candidate canaries: see ``canaries.num_slots``.
        expected_batch_size: B, the public divisor of the summed gradient, in the same things as N.
        sampling_rate: q = B / N; each of the N joins every logical batch independently with this probability.
        num_steps: T, the number of logical steps.
    """

    dataset_size: int
    canary_slots: int
    expected_batch_size: int
    sampling_rate: float
    num_steps: int


def make_schedule(config: RunConfig, num_units: int) -> Schedule:
    """Derives N, q and T, in integers and exact fractions, from the public number of privacy units without canaries.

    Raises:
        Refused: The logical batch is larger than the dataset.
        ConfigError: A canary of more rows than one unit may bring.
    """
    slots = num_slots(config.audit, config.data)
    size = num_units + slots
    batch = config.train.batch_size
    if batch > size:
        raise Refused(
            f"train.batch_size {batch} is larger than the dataset ({size} privacy units), so that the sampling rate would "
            f"exceed 1. Set train.batch_size to {max(1, size // 10)} or less, or bring more data."
        )
    # Exact: int(epochs / q) in floating point is often off by one.
    steps = config.train.steps or math.ceil(Fraction(str(config.train.epochs)) * size / batch)
    return Schedule(size, slots, batch, sampling_rate=batch / size, num_steps=steps)


def group_rate(schedule: Schedule, bands: int) -> float:
    """The rate q' = b B / N, with which a member of the group whose turn it is joins; B / N, where there is one group."""
    return bands * schedule.expected_batch_size / schedule.dataset_size


def group_size_of(data: DataConfig) -> int:
    """How many of what is sampled are protected together."""
    return data.max_examples_per_unit or 1 if data.sampling == "example" else 1


def padded_lengths(max_length: int) -> list[int]:
    """The lengths to which rows are padded, ascending: a few parts of the longest allowed, in multiples of eight."""
    # Few, because in each step the last physical batch of each length is filled up with rows of nobody.
    eighths = (1, 2, 3, 4, 6, 8)
    return sorted({min(max_length, 8 * -(-max_length * part // 64)) for part in eighths})


def padded_length(tokens: int, max_length: int) -> int:
    """The length to which a unit is padded whose longest row has so many tokens: it follows from that number alone."""
    for length in padded_lengths(max_length):
        if tokens <= length:
            return length
    raise ValueError(f"a row of {tokens} tokens is longer than the {max_length} allowed")


def num_slots(audit: AuditConfig, data: DataConfig) -> int:
    """Slots in N: every candidate holds its own, whatever its coin says, and a gradient canary one.

    Where whole units are drawn, a candidate is one unit that brings all of its repetitions, and holds one slot. Where rows
    are drawn, each repetition holds one. More repetitions than one unit may bring are a ConfigError.
    """
    groups, most = audit.canaries.groups if audit.canaries else {}, data.max_examples_per_unit
    if most is not None and max(groups, default=0) > most:
        raise ConfigError(
            f"audit.canaries.groups: a canary is one {data.unit}, and of {max(groups)} repetitions only "
            f"data.max_examples_per_unit ({most}) could train. Lower the repetitions in audit.canaries.groups, or raise "
            "data.max_examples_per_unit."
        )
    return sum(slots_each(group, data) * number for group, number in groups.items()) + audit.gradient_canaries


def slots_each(group: int, data: DataConfig) -> int:
    """Slots that one candidate of so many repetitions holds."""
    return group if data.unit == "example" or data.sampling == "example" else 1
