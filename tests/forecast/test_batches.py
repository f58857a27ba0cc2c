"""What a step brings: the quantile is Binomial's, and the physical batches are those that the sampler makes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.forecast.table import batches_of
from dpllm.privacy.plan import Schedule
from dpllm.recipe.config import RunConfig
from dpllm.recipe.derived import schedule_of


def recipe(data: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return tm.recipe(data=data or {}, train={"steps": 10, "batch_size": 20, "physical_batch_size": 4, **train})


@settings(derandomize=True, deadline=None, max_examples=50)
@given(size=st.integers(2, 5000), data=st.data())
def test_the_largest_batch_is_exceeded_once_in_a_thousand_steps_at_most(size: int, data: st.DataObject) -> None:
    from scipy import stats

    batch = data.draw(st.integers(1, size))
    sizes = batches_of(recipe(batch_size=batch), schedule_of(recipe(batch_size=batch), size))
    tail = stats.binom(size, batch / size)
    assert tail.sf(sizes.largest) <= 1e-3 + 1e-12
    assert sizes.largest == 0 or tail.sf(sizes.largest - 1) > 1e-3 - 1e-12
    assert sizes.expected == batch


@settings(derandomize=True, deadline=None, max_examples=10)
@given(units=st.integers(20, 200), rows=st.integers(1, 4), physical=st.integers(4, 12), seed=st.integers(0, 2**30))
def test_physical_batches_are_those_that_the_sampler_makes(units: int, rows: int, physical: int, seed: int) -> None:
    """On average over draws of units whose lengths are spread evenly."""
    import numpy as np

    longest = 128

    from dpllm.privacy.sampling import physical_batches
    from dpllm.text.data import TokenSequence, Unit

    def unit(tokens: int) -> Unit:
        return Unit((TokenSequence((1,) * tokens, (False,) + (True,) * (tokens - 1), tokens - 1),) * rows)

    data = {"unit": "author", "max_examples_per_unit": rows, "max_length": longest}
    config = recipe(data, batch_size=units, physical_batch_size=physical)
    sizes = batches_of(config, Schedule(100 * units, 0, units, 0.01, 10))
    generator, made, padding = np.random.default_rng(seed), [], []
    for _ in range(60):
        drawn = [
            unit(max(2, int(length))) for length in np.ceil(generator.uniform(0, longest, generator.poisson(units)))
        ]
        batches = physical_batches(range(len(drawn)), drawn, sizes.shapes, 0)
        made.append(len(batches))
        padding.append(sum(int((batch.unit_R < 0).sum()) for batch in batches))
    # Units that do not fit beside each other leave rows empty, which the forecast does not count.
    assert sizes.physical_expected <= np.mean(made) * 1.1 + 1
    if rows == 1:
        assert np.mean(made) == pytest.approx(sizes.physical_expected, rel=0.1)
        assert np.mean(padding) == pytest.approx(sizes.padding_rows, rel=0.2, abs=1.5)


def test_the_assumption_says_what_is_counted() -> None:
    def words(**data: Any) -> tuple[int, str]:
        sizes = batches_of(recipe(data), Schedule(1000, 0, 20, 0.02, 10))
        return sizes.sequences_per_unit, sizes.assumption

    assert words() == (1, "one sequence a unit")
    assert words(unit="author", max_examples_per_unit=3) == (3, "at most 3 rows of a unit, one sequence each")
    assert words(unit="author", max_examples_per_unit=3, sampling="example") == (1, "one sequence a row")
    assert "cut into chunks" in words(long_examples="chunk")[1]


def test_auto_leaves_the_physical_batches_open() -> None:
    from dpllm.forecast.table import _physical

    open_, fixed = (
        batches_of(recipe(physical_batch_size=size), Schedule(1000, 0, 20, 0.02, 10)) for size in ("auto", 4)
    )
    assert (open_.physical_size, open_.physical_expected, open_.padding_rows) == (None, None, None)
    assert (open_.expected, open_.largest) == (fixed.expected, fixed.largest)
    assert "found when training starts (auto)" in _physical(open_)
    assert f"about {fixed.physical_expected:.0f} a step, of at most 4 sequences" in _physical(fixed)


def test_the_smoke_recipe_by_hand() -> None:
    sizes = batches_of(recipe(batch_size=128, physical_batch_size=32), Schedule(3790, 600, 128, 128 / 3790, 60))
    assert sizes.largest == 164
