"""The Plan is the promise: the mechanism's keys make it, nothing else touches it, and its epsilon can be recomputed."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import recipe

from dpllm.errors import Refused
from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan, auto_delta, make_plan, make_schedule

N = 500


def plan(num_units: int = N, **sections: Any) -> Plan:
    privacy = {"noise_multiplier": 1.0, "epsilon": 20.0, **sections.pop("privacy", {})}
    return make_plan(recipe(privacy=privacy, **sections), num_units)


@pytest.fixture(scope="module")
def base() -> Plan:
    return plan()


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"physical_batch_size": 3}},
        {"train": {"precision": "bf16"}},
        {"train": {"seed": 99}},
        {"train": {"eval_every": 2, "checkpoint_every": 1}},
        {"train": {"learning_rate": 0.5, "optimizer": "sgd", "lr_scheduler": "cosine", "warmup": 0.3}},
        {"model": {"gradient_checkpointing": True, "dtype": "bfloat16", "quantization": "4bit"}},
        {"privacy": {"grad_sample_mode": "per_sample"}},
        {"privacy": {"grad_sample_mode": "opacus_ghost"}},
        {"privacy": {"ledger": "elsewhere", "dataset": "other"}},
        {"data": {"max_length": 32, "long_examples": "chunk"}},
        {"adapter": {"method": "frozen", "last_blocks": 1}},
    ],
    ids=str,
)
def test_knobs_that_are_no_part_of_the_mechanism_leave_the_plan_equal(base: Plan, sections: dict[str, Any]) -> None:
    assert plan(**sections) == base


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"batch_size": 11}},
        {"train": {"steps": 6}},
        {"privacy": {"noise_multiplier": 1.1}},
        {"privacy": {"max_grad_norm": 0.5}},
        {"privacy": {"delta": 1e-5}},
        {"data": {"public_size": N + 1}},
        {"data": {"unit": "author", "max_examples_per_unit": 4}},
        {"audit": {"canaries": {"groups": {1: 20}}}},
        {"num_units": N + 1},
    ],
    ids=str,
)
def test_the_mechanisms_keys_change_the_plan(base: Plan, sections: dict[str, Any]) -> None:
    assert plan(**sections) != base


def test_a_plan_is_frozen(base: Plan) -> None:
    with pytest.raises(FrozenInstanceError):
        base.max_grad_norm = 2.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        base.schedule.num_steps = 2  # type: ignore[misc]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(size=st.integers(1, 10**7), batch=st.integers(1, 4096), hundredths=st.integers(1, 10_000))
def test_steps_are_exact(size: int, batch: int, hundredths: int) -> None:
    """T = ceil(epochs N / B) in whole numbers; int(epochs / q) in floating point loses or gains a step."""
    batch = min(batch, size)
    schedule = make_schedule(recipe(train={"batch_size": batch, "steps": None, "epochs": hundredths / 100}), size)
    assert schedule.num_steps == -(-hundredths * size // (100 * batch))
    assert schedule.sampling_rate == batch / size
    assert schedule.expected_batch_size == batch


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 10**9))
def test_automatic_delta_is_a_tenth_of_1_over_n_rounded_down_to_a_digit(size: int) -> None:
    delta = auto_delta(size)
    assert Fraction(1, 20 * size) <= Fraction(repr(delta)) <= Fraction(1, 10 * size)
    assert len(f"{delta:e}".split("e")[0].rstrip("0").rstrip(".")) == 1


@pytest.mark.parametrize("delta", [1 / N * (1 + 1e-12), 2 / N, 0.5])
def test_a_delta_of_1_over_n_or_more_is_refused(delta: float) -> None:
    with pytest.raises(Refused, match="1/N"):
        plan(privacy={"delta": delta})


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(Refused, match="batch_size 501"):
        plan(train={"batch_size": N + 1})
    assert plan(train={"batch_size": N, "steps": 1}).schedule.sampling_rate == 1.0


def test_too_little_noise_for_the_target_is_refused() -> None:
    with pytest.raises(Refused, match="above the target"):
        plan(privacy={"noise_multiplier": 0.5, "epsilon": 0.5})


def test_calibrated_noise_meets_the_target_and_is_not_wasteful() -> None:
    made = plan(privacy={"noise_multiplier": None, "epsilon": 2.0})
    assert 1.9 <= made.epsilon <= 2.0
    recomputed = accounting.epsilon(made.event, made.delta, made.neighbouring_relation)
    assert recomputed == made.epsilon


def test_every_canary_holds_its_slots_before_any_coin_is_tossed() -> None:
    """N comes from the recipe alone: make_plan is given no canary plan, hence no coin."""
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
    assert accounting.count_releases(base.event) == base.schedule.num_steps
    assert base.event == accounting.dp_sgd_event(
        base.schedule.sampling_rate, base.noise_multiplier, base.schedule.num_steps
    )
    assert math.isfinite(base.epsilon)


def test_plan_json_is_enough_to_recompute_epsilon(base: Plan) -> None:
    stored = json.loads(json.dumps(base.to_json()))
    again = accounting.epsilon(stored["event"], stored["delta"], stored["neighbouring_relation"])
    assert again == stored["epsilon"] == base.epsilon
    for key in (
        "dataset_size",
        "sampling_rate",
        "num_steps",
        "expected_batch_size",
        "unit",
        "max_grad_norm",
        "clipping",
    ):
        assert key in stored
    assert stored["expected_batch_size"] / stored["dataset_size"] == stored["sampling_rate"]
