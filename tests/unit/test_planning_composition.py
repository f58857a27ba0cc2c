"""Four ways of composition: all are monotone, PLD is lowest, and the formulas are the theorems'."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.config import RunConfig
from dpllm.planning import composition
from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan, make_plan


def plan(sigma: float, batch: int, steps: int, data: dict[str, object] | None = None) -> Plan:
    value = {
        "model": {"name_or_path": "some/model"},
        "data": {"train": "rows.jsonl", **(data or {})},
        "privacy": {"epsilon": 1e6, "delta": 1e-5, "noise_multiplier": sigma},
        "train": {"steps": steps, "batch_size": batch},
        "output_dir": "run",
    }
    return make_plan(RunConfig.model_validate(value), 5000)


@pytest.fixture(scope="module", params=[(0.8, 100, 150), (4.0, 50, 2000), (2.0, 5000, 20)], ids=str)
def compared(request: pytest.FixtureRequest) -> tuple[Plan, composition.Comparison]:
    made = plan(*request.param)
    return made, composition.compare(made, points=9)


def test_more_steps_cost_more_by_every_way(compared: tuple[Plan, composition.Comparison]) -> None:
    _, found = compared
    assert found.num_steps[0] == 1
    for curve in (found.naive, found.strong, found.rdp, found.pld):
        assert curve is not None
        assert len(curve) == len(found.num_steps)
        assert list(curve) == sorted(curve)


def test_pld_is_lowest(compared: tuple[Plan, composition.Comparison]) -> None:
    _, found = compared
    assert found.rdp is not None
    for pld, *others in zip(found.pld, found.naive, found.strong, found.rdp, strict=True):
        assert pld <= min(others) + 1e-9


def test_the_last_point_is_what_the_plan_states(compared: tuple[Plan, composition.Comparison]) -> None:
    made, found = compared
    assert found.num_steps[-1] == made.schedule.num_steps
    assert made.epsilon - 1e-6 <= found.pld[-1] <= made.epsilon + 2e-3
    assert found.rdp is not None
    assert found.rdp[-1] == pytest.approx(made.accountants["rdp"], rel=1e-6)


def test_naive_composition_adds_up(compared: tuple[Plan, composition.Comparison]) -> None:
    made, found = compared
    assert found.naive[0] == pytest.approx(found.pld[0], abs=1e-9)
    steps = found.num_steps[-1]
    one = accounting.epsilon({**made.event, "count": 1}, made.delta / steps, made.neighbouring_relation)
    assert found.naive[-1] == pytest.approx(steps * one, rel=2e-3)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(one=st.floats(1e-4, 5.0), steps=st.integers(1, 10_000), delta=st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_strong_composition_is_the_theorem(one: float, steps: int, delta: float) -> None:
    asked: list[float] = []

    def single(at: float) -> float:
        asked.append(at)
        return one

    slack = delta / 2
    wanted = math.sqrt(2 * steps * math.log(1 / slack)) * one + steps * one * (math.exp(one) - 1)
    assert composition.strong(single, steps, delta) == pytest.approx(wanted, rel=1e-9)
    assert asked == [delta / (2 * steps)]
    assert steps * asked[0] + slack == pytest.approx(delta)  # the deltas of all steps and the slack


def test_strong_composition_pays_where_one_step_costs_little() -> None:
    found = composition.compare(plan(20.0, 50, 20_000), points=4)
    assert found.strong[-1] < found.naive[-1]


def test_a_mixture_has_no_rdp_curve() -> None:
    data = {"unit": "author", "max_examples_per_unit": 3, "sampling": "example"}
    found = composition.compare(plan(2.0, 50, 30, data), points=3)
    assert found.rdp is None
    assert found.pld[-1] <= found.naive[-1]


@settings(derandomize=True, deadline=None)
@given(most=st.integers(1, 10**6), points=st.integers(1, 60))
def test_steps_are_spread_from_one_to_all(most: int, points: int) -> None:
    found = composition.spread(most, points)
    assert (found[0], found[-1]) == (1, most)
    assert list(found) == sorted(set(found))
    assert len(found) <= points + 2
