"""How many units a Poisson draw brings, and how many physical batches they fill.

Comes in: the recipe and its schedule. Goes out: a ``Batches`` value, from public numbers alone. Must not see data, and must
not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpllm.privacy.schedule import Schedule, padded_lengths
from dpllm.recipe.config import RunConfig

QUANTILE = 0.999


@dataclass(frozen=True)
class Batches:
    """Sizes of a step's batches, for one process.

    Attributes:
        expected: B, the mean of the logical batch, in units.
        largest: The smallest number of units that a step exceeds with probability 0.1% at most.
        sequences_per_unit: With how many sequences one unit is counted.
        physical_size: Sequences in one forward pass; None, as the next three, where a run finds it at its start.
        physical_expected: Physical batches of a logical batch of ``expected`` units.
        physical_largest: The same for ``largest`` units.
        dummy_rows: Rows of nobody in a step, expected, where rows are of every padded length: half a physical batch less one
            row for each.
        assumption: In words, what is counted.
    """

    expected: int
    largest: int
    sequences_per_unit: int
    physical_size: int | None
    physical_expected: int | None
    physical_largest: int | None
    dummy_rows: float | None
    assumption: str


def batches_of(config: RunConfig, schedule: Schedule) -> Batches:
    """Counts a step's units and physical batches.

    The logical batch is Binomial(N, q): its quantile at 99.9% is exact. A unit is counted with one sequence, or with
    ``data.max_examples_per_unit`` where all its rows are drawn together, which is the most it may bring unless rows are cut
    into chunks. A unit that is longer than a physical batch has physical batches of its own.
    """
    from scipy import stats

    whole = config.data.sampling == "unit" and config.data.max_examples_per_unit is not None
    per_unit = (config.data.max_examples_per_unit or 1) if whole else 1
    chunked = config.data.long_examples == "chunk"
    longer = ", and more where a row longer than data.max_length is cut into chunks" if chunked else ""
    one = f"one sequence {'a row' if config.data.sampling == 'example' else 'a unit'}"
    named = config.train.physical_batch_size
    size = None if named == "auto" else named
    largest = int(stats.binom.ppf(QUANTILE, schedule.dataset_size, schedule.sampling_rate))

    def physical(units: int) -> int | None:
        if size is None:
            return None
        return units * math.ceil(per_unit / size) if per_unit > size else math.ceil(units / (size // per_unit))

    return Batches(
        expected=schedule.expected_batch_size,
        largest=largest,
        sequences_per_unit=per_unit,
        physical_size=size,
        physical_expected=physical(schedule.expected_batch_size),
        physical_largest=physical(largest),
        dummy_rows=len(padded_lengths(config.data.max_length)) * (size - 1) / 2 if size else None,
        assumption=(f"at most {per_unit} rows of a unit, one sequence each" if whole else one) + longer,
    )
