"""How many units a Poisson draw brings, and how many physical batches they fill.

Comes in: the recipe and its schedule. Goes out: a ``Batches`` value, from public numbers alone. Must not see data, and must
not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.privacy.schedule import Schedule, Shape, physical_batches_expected
from dpllm.recipe.config import RunConfig
from dpllm.recipe.derived import rows_of_one, shapes_for

QUANTILE = 0.999
FIXED = 64  # as of ``shapes_of``, where the size of the model is not known


@dataclass(frozen=True)
class Batches:
    """Sizes of a step's batches, for one process.

    Attributes:
        expected: B, the mean of the logical batch, in units.
        largest: The smallest number of units that a step exceeds with probability 0.1% at most.
        sequences_per_unit: With how many sequences one unit is counted.
        physical_size: Sequences in one forward pass, at most; None, as the next three, where a run finds it at its start.
        shapes: Of physical batches, as (tokens, rows): see ``schedule.shapes_of``.
        physical_expected: Physical batches of a step, expected where lengths are spread evenly up to ``data.max_length``.
        padding_rows: Of these, rows that fill them up and learn nothing.
        assumption: In words, what is counted.
    """

    expected: int
    largest: int
    sequences_per_unit: int
    physical_size: int | None
    shapes: tuple[Shape, ...] | None
    physical_expected: float | None
    padding_rows: float | None
    assumption: str


def batches_of(config: RunConfig, schedule: Schedule) -> Batches:
    """Counts a step's units and physical batches.

    The logical batch is Binomial(N, q): its quantile at 99.9% is exact. A unit is counted with one sequence, or with
    ``data.max_examples_per_unit`` where all its rows are drawn together, which is the most it may bring unless rows are cut
    into chunks. A unit that is longer than a physical batch has physical batches of its own.
    """
    from scipy import stats

    per_unit, batch = rows_of_one(config.data), schedule.expected_batch_size
    chunked = config.data.long_examples == "chunk"
    longer = ", and more where a row longer than data.max_length is cut into chunks" if chunked else ""
    one = f"one sequence {'a row' if config.data.sampling == 'example' else 'a unit'}"
    whole = config.data.sampling == "unit" and config.data.max_examples_per_unit is not None
    named = config.train.physical_batch_size
    shapes = None if named == "auto" else shapes_for(config, schedule, FIXED)(named)
    each = physical_batches_expected(shapes, batch, each=per_unit) if shapes else []
    rows = sum(number * shape.rows for number, shape in zip(each, shapes or (), strict=True))
    return Batches(
        expected=batch,
        largest=int(stats.binom.ppf(QUANTILE, schedule.dataset_size, schedule.sampling_rate)),
        sequences_per_unit=per_unit,
        physical_size=None if named == "auto" else named,
        shapes=shapes,
        physical_expected=sum(each) if shapes else None,
        padding_rows=rows - batch * per_unit if shapes else None,
        assumption=(f"at most {per_unit} rows of a unit, one sequence each" if whole else one) + longer,
    )
