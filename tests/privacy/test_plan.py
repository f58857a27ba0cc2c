"""The Plan is the promise: the mechanism's keys make it, nothing else touches it, and its epsilon can be recomputed."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_models import recipe

from dpllm.errors import BudgetExceeded, Refused
from dpllm.privacy import accounting, events, renyi
from dpllm.privacy.limits import attacker_limits_of
from dpllm.privacy.plan import CURVE_DELTAS, Mechanism, Plan, auto_delta, resolved_delta
from dpllm.privacy.renyi import Fit
from dpllm.records import NotAStatement
from dpllm.run.promise import plan_of, schedule_of

N = 500


def plan(num_units: int = N, **sections: Any) -> Plan:
    privacy = {"noise_multiplier": 1.0, "epsilon": 20.0, **sections.pop("privacy", {})}
    return plan_of(recipe(privacy=privacy, **sections), num_units)


@pytest.fixture(scope="module")
def base() -> Plan:
    return plan()


def test_knobs_that_are_no_part_of_the_mechanism_leave_the_plan_equal(base: Plan) -> None:
    learning = {"learning_rate": 0.5, "optimizer": "sgd", "lr_scheduler": "cosine", "warmup": 0.3}
    passes = {"tokens_per_pass": 2048, "precision": "bf16", "seed": 99, "eval_every": 2, "checkpoint_every": 1}
    sections = {
        "train": {**learning, **passes},
        "model": {"gradient_checkpointing": True, "dtype": "bfloat16", "quantization": "4bit"},
        "privacy": {"ledger": "elsewhere", "dataset": "other"},
        "data": {"max_length": 32, "long_examples": "chunk"},
        "adapter": {"method": "frozen", "last_blocks": 1},
    }
    for name, values in sections.items():
        assert plan(**{name: values}) == base, name


def test_the_mechanisms_keys_change_the_plan(base: Plan) -> None:
    privacy = {"noise_multiplier": 1.1, "max_grad_norm": 0.5, "delta": 1e-5, "clipping": "automatic"}
    by_author = {"unit": "author", "max_examples_per_unit": 2}
    for sections in (
        {"train": {"batch_size": 11}},
        {"train": {"steps": 6}},
        *({"privacy": {name: value}} for name, value in privacy.items()),
        {"data": {"public_size": N + 1}},
        {"data": by_author},
        {"data": {**by_author, "sampling": "example"}},
        {"audit": {"canaries": {"groups": {1: 20}}}},
        {"num_units": N + 1},
    ):
        assert plan(**sections) != base, sections


def test_a_plan_is_frozen(base: Plan) -> None:
    with pytest.raises(ValidationError):
        base.max_grad_norm = 2.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        base.schedule.num_steps = 2  # type: ignore[misc]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(size=st.integers(1, 10**7), batch=st.integers(1, 4096), hundredths=st.integers(1, 10_000))
def test_steps_are_exact(size: int, batch: int, hundredths: int) -> None:
    """T = ceil(epochs N / B) in whole numbers; int(epochs / q) in floating point loses or gains a step."""
    batch = min(batch, size)
    schedule = schedule_of(recipe(train={"batch_size": batch, "steps": None, "epochs": hundredths / 100}), size)
    assert schedule.num_steps == -(-hundredths * size // (100 * batch))
    assert schedule.sampling_rate == batch / size
    assert schedule.expected_batch_size == batch


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 10**9))
def test_automatic_delta_is_a_tenth_of_1_over_n_rounded_down_to_a_digit(size: int) -> None:
    delta = auto_delta(size)
    assert Fraction(1, 20 * size) <= Fraction(repr(delta)) <= Fraction(1, 10 * size)
    assert len(f"{delta:e}".split("e")[0].rstrip("0").rstrip(".")) == 1


@pytest.mark.parametrize("delta", [1 / N * (1 + 1e-12), 0.5])
def test_a_delta_of_1_over_n_or_more_is_refused(delta: float) -> None:
    with pytest.raises(Refused, match="1/N"):
        plan(privacy={"delta": delta})


def test_a_refused_delta_names_the_slots_of_canaries_and_then_advises_fewer() -> None:
    """60 people and 1,015 slots: more data would make it worse."""
    with pytest.raises(Refused, match=r"1,015.*audit\.canaries\.groups"):
        resolved_delta("auto", 1e-3, 1075, canary_slots=1015)
    assert resolved_delta("auto", 1e-3, 60) <= 1e-3
    with pytest.raises(Refused) as refusal:
        resolved_delta("auto", 1e-3, 1075)
    assert "canaries" not in str(refusal.value)


def test_every_canary_holds_its_slots_before_any_coin_is_tossed() -> None:
    """N comes from the recipe alone: a Plan is given no canary plan, hence no coin."""
    made = plan(audit={"canaries": {"groups": {1: 20, 4: 5}}})
    assert made.schedule.canary_slots == 40
    assert made.schedule.dataset_size == N + 40
    assert made.schedule.sampling_rate == 10 / (N + 40)
    assert made.delta == auto_delta(N + 40)


def test_the_relation_follows_from_how_the_size_became_public() -> None:
    assert plan().neighbouring_relation == "zero_out"
    declared = plan(data={"public_size": N})
    assert declared.neighbouring_relation == "add_or_remove_one"
    assert declared.epsilon == plan().epsilon


def test_the_event_is_the_mechanism_that_runs(base: Plan) -> None:
    schedule = base.schedule
    assert base.event == accounting.dp_sgd_event(schedule.sampling_rate, base.noise_multiplier, schedule.num_steps)
    assert accounting.count_releases(base.event) == schedule.num_steps
    assert math.isfinite(base.epsilon)


CALIBRATED = {"noise_multiplier": None, "epsilon": 4.0}
ROWS = {"unit": "author", "max_examples_per_unit": 4, "sampling": "example"}


def test_with_example_sampling_the_guarantee_is_for_all_rows_of_a_unit() -> None:
    made = plan(data=ROWS, privacy=CALIBRATED)
    schedule = made.schedule
    assert made.sampling == "example"
    assert made.event == accounting.dp_sgd_event(schedule.sampling_rate, made.noise_multiplier, schedule.num_steps, 4)
    assert events.step_of(made.event).group_size == 4
    assert 3.9 <= made.epsilon <= 4.0
    assert made.noise_multiplier > plan(data={**ROWS, "sampling": "unit"}, privacy=CALIBRATED).noise_multiplier
    assert made.accountants.keys() == {"pld"}
    assert accounting.count_releases(made.event) == schedule.num_steps
    one = plan(data={**ROWS, "max_examples_per_unit": 1}, privacy=CALIBRATED)
    assert one.noise_multiplier == plan(privacy=CALIBRATED).noise_multiplier


def test_what_is_counted_is_what_is_sampled(tmp_path: Path) -> None:
    """Rows after the cap with example sampling, units without it."""
    rows = [{"text": f"row {number}", "author": author} for number, author in enumerate("aaaaabbc")]
    data = {**ROWS, "train": str(tiny.write_rows(tmp_path / "rows.jsonl", rows))}
    for sampling, expected in (("unit", 3), ("example", 4 + 2 + 1)):
        assert tiny.count_units(recipe(data={**data, "sampling": sampling}).data, tmp_path) == expected


def test_the_plan_says_its_epsilon_by_other_accountants_and_deltas_and_what_an_attacker_can_do(base):
    stored = json.loads(json.dumps(base.to_json(), allow_nan=False))
    again = accounting.epsilon(events.read(stored["event"]), stored["delta"], stored["neighbouring_relation"])
    assert again == stored["epsilon"] == base.epsilon
    assert stored["expected_batch_size"] / stored["dataset_size"] == stored["sampling_rate"]
    assert stored["accountants"] == accounting.epsilon_by_accountant(base.event, base.delta, base.neighbouring_relation)
    assert stored["accountants"]["pld"] == base.epsilon
    assert stored["limits"] == attacker_limits_of(base.event, base.neighbouring_relation)
    assert [delta for delta, _ in stored["curve"]] == list(CURVE_DELTAS) == [1e-4, 1e-5, 1e-6, 1e-7, 1e-8]
    assert [value for _, value in stored["curve"]] == sorted(value for _, value in stored["curve"])
    for delta, value in stored["curve"]:
        assert value == accounting.epsilon(base.event, delta, base.neighbouring_relation)


ORDER = 3.0


def filter_with(share: float) -> Fit:
    """What is left, as a share of what the noise of the target costs."""
    return Fit(ORDER, share * renyi.rdp(plan(privacy=CALIBRATED).event, ORDER))


def test_noise_is_the_larger_of_what_meets_the_target_and_what_fits_the_filter() -> None:
    config, tight = recipe(privacy=CALIBRATED), filter_with(0.6)
    usual, fitted = plan_of(config, N), plan_of(config, N, fit=tight)
    assert plan_of(config, N, fit=filter_with(1.5)) == usual
    assert usual.noise_multiplier < fitted.noise_multiplier < 2 * usual.noise_multiplier
    assert fitted.epsilon < usual.epsilon
    assert renyi.rdp(fitted.event, ORDER) <= tight.allowance
    rate, steps = fitted.schedule.sampling_rate, fitted.schedule.num_steps
    less = accounting.dp_sgd_event(rate, fitted.noise_multiplier - 1e-4, steps)
    assert renyi.rdp(less, ORDER) > tight.allowance


def test_a_filter_that_is_used_up_is_fitted_by_no_noise() -> None:
    config = recipe(privacy=CALIBRATED)
    assert plan_of(config, N, fit=filter_with(1e-4)).noise_multiplier > 2 * plan_of(config, N).noise_multiplier
    for left in (0.0, -math.inf):
        with pytest.raises(BudgetExceeded, match="no amount of noise"):
            plan_of(config, N, fit=Fit(ORDER, left))


def test_noise_that_the_recipe_sets_is_left_for_the_ledger_to_judge() -> None:
    config = recipe(privacy={"noise_multiplier": 1.0, "epsilon": 20.0})
    assert plan_of(config, N, fit=Fit(ORDER, -1.0)) == plan_of(config, N)


def test_a_filter_cannot_count_a_mixture() -> None:
    with pytest.raises(Refused, match="sampling: unit"):
        plan_of(recipe(privacy=CALIBRATED, data=ROWS), N, fit=Fit(ORDER, 1.0))


def test_a_budgets_delta_must_be_below_one_over_n_too() -> None:
    with pytest.raises(Refused, match=r"the dataset's budget, 0\.02 is not below 1/N.* dpllm ledger init"):
        plan_of(recipe(), 50, largest_delta=0.02)
    assert plan_of(recipe(), 50, largest_delta=0.01).delta <= 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_epsilon": math.nan},
        {"delta": 0.5},
        {"dataset_size": 3},
        {"canary_slots": 10**6},
        {"coefficients": (1.0,)},
        {"coefficients": (1.0, 0.5)},
        {"coefficients": (0.8, 0.6), "unit": "patient", "sampling": "example", "max_examples_per_unit": 3},
        {"noise_multiplier": 0.0},
        {"max_grad_norm": -1.0},
        {"unit": "patient", "sampling": "example"},  # would be planned as if each brought one row
        {"unit": "patient", "sampling": "example", "max_examples_per_unit": 0},
        {"neighbouring_relation": "zero_out_public_graph"},  # nobody is named
        {
            "neighbouring_relation": "zero_out_public_graph",
            "unit": "people",
            "max_examples_per_unit": 2,
        },  # drawn together
    ],
)
def test_a_mechanism_of_no_promise_is_none(wrong: dict[str, Any], base: Plan) -> None:
    good = {name: getattr(base, name) for name in Mechanism.model_fields}
    Mechanism.model_validate({**good, "unit": "patient", "sampling": "example", "max_examples_per_unit": 3})
    with pytest.raises(ValidationError):
        Mechanism.model_validate({**good, **wrong})


@pytest.mark.parametrize(
    ("name", "value"), [("dataset_size", 10**400), ("num_steps", 10**18), ("noise_multiplier", 1e300)]
)
def test_numbers_that_no_float_or_event_holds_are_no_plan(base: Plan, name: str, value: float) -> None:
    with pytest.raises(NotAStatement):
        Plan.checked({**base.to_json(), name: value})


def test_hardly_any_noise_is_above_the_target() -> None:
    with pytest.raises(Refused, match="above the target"):
        plan(privacy={"noise_multiplier": 1e-6}, train={"steps": 1000})
