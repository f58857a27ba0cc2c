"""Advice comes where a setting is likely to hurt, with a reason and what to type, and nowhere else.

Noise per unit of signal is what a simulation shows, and the suggestion is within 10% of the best with the most steps.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.forecast import advice as forecast
from dpllm.forecast.advice import advise
from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan
from dpllm.recipe.audit import AuditConfig
from dpllm.recipe.config import RunConfig, load_config
from dpllm.recipe.derived import plan_of
from dpllm.text import data as dpllm_data

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
E2E_ROWS = 42_061  # of the training set


def recipe(privacy: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return tm.recipe(privacy={"epsilon": 8.0, **(privacy or {})}, train={"steps": 60, "batch_size": 128, **train})


def advice(config: RunConfig, num_units: int = 3790) -> list[str]:
    return advise(config, plan_of(config, num_units))


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    assert "Type --" in found[0]
    return found[0]


@pytest.mark.parametrize("name", ["smoke/clinic", "lora/e2e", "frozen/e2e"])
def test_the_recipes_that_are_shipped_get_none(name: str, tmp_path: Path) -> None:
    """But for the smallest, which is made to be audited and not to be published."""
    smoke = "smoke" in name
    config = load_config(RECIPES / f"{name}.yaml", {} if smoke else {"privacy.delta": "auto"})
    size = dpllm_data.count_units(config.data, tmp_path) if smoke else E2E_ROWS
    assert [text.split(" occupy")[0] for text in advice(config, size)] == ["text canaries"] * smoke


def test_many_canaries_of_text_cost_noise_and_gradient_canaries_are_none_of_them() -> None:
    def with_canaries(**audit: Any) -> RunConfig:
        return recipe().model_copy(update={"audit": AuditConfig(**audit)})

    few, many = ({"canaries": {"groups": {1: number}}} for number in (420, 3790))
    for audit in (few, {"gradient_canaries": 3790}):
        assert not any("text canaries" in text for text in advice(with_canaries(**audit)))
    found = next(text for text in advice(with_canaries(**many)) if "text canaries" in text)
    assert "3790 of the N = 7580 slots (50%)" in found
    plan = plan_of(with_canaries(**many), 3790)
    without = plan_of(recipe({"epsilon": plan.epsilon, "delta": plan.delta}), 3790)
    # Half of each batch is canaries, and the noise is calibrated to a smaller rate.
    ratio = 2 * plan.noise_multiplier / without.noise_multiplier
    assert ratio > 1
    assert f"is {ratio:.2g} times" in found


def test_a_weak_epsilon() -> None:
    config = recipe({"epsilon": 10.0, "noise_multiplier": 0.505}, batch_size=64)
    assert plan_of(config, 3790).epsilon < 10
    assert not any("is weak" in text for text in advice(config))
    config = recipe({"epsilon": 30.0, "noise_multiplier": 0.505}, steps=400)
    assert plan_of(config, 3790).epsilon > 10
    assert any("is weak" in text and "--privacy.epsilon 8" in text for text in advice(config))


def test_hardly_any_noise() -> None:
    text = only(advice(recipe({"noise_multiplier": 0.499}, batch_size=64, steps=50)))
    assert "noise multiplier 0.499" in text
    assert "--train.batch_size 128" in text
    assert advice(recipe({"noise_multiplier": 0.5}, batch_size=64, steps=50)) == []


def test_a_delta_near_to_one_over_n() -> None:
    assert advice(recipe({"delta": 0.1 / 4000}), 4000) == []
    text = only(advice(recipe({"delta": 0.2 / 4000}), 4000))
    assert "0.2 times 1/N" in text
    assert "auto (here 2e-05)" in text


def test_a_batch_too_small_for_its_noise_and_the_advice_mends_it() -> None:
    config = recipe({"epsilon": 3.0}, batch_size=16, steps=1600)
    plan = plan_of(config, 4000)
    text = next(text for text in advise(config, plan) if "too small" in text)
    size, steps = map(int, re.search(r"batch_size (\d+) --train.steps (\d+)", text).groups())  # type: ignore[union-attr]
    assert abs(size * steps - 16 * 1600) <= size
    fixed = recipe({"epsilon": 3.0}, batch_size=size, steps=steps)
    better = plan_of(fixed, 4000)
    assert forecast.own_choice(better).noise_per_signal < forecast.own_choice(plan).noise_per_signal / 1.4
    assert not any("too small" in text for text in advise(fixed, better))


def test_steps_that_the_budget_does_not_reward() -> None:
    config = recipe({"epsilon": 1.0}, batch_size=400, steps=3000)
    text = next(text for text in advice(config, 4000) if "hardly pay off" in text)
    assert "--train.steps 1500" in text
    full = forecast.own_choice(plan_of(config, 4000))
    half = forecast.own_choice(plan_of(recipe({"epsilon": 1.0}, batch_size=400, steps=1500), 4000))
    assert half.noise_per_signal < 1.1 * full.noise_per_signal  # as it says
    rewarded = recipe({"epsilon": 8.0}, batch_size=128, steps=200)
    assert not any("hardly pay off" in text for text in advice(rewarded, 4000))


# --- noise per unit of signal ------------------------------------------------------------------------------------------


def plan(num_units: int = 5000, epsilon: float = 4.0, data: dict[str, Any] | None = None, **train: Any) -> Plan:
    train = {"steps": 100, "batch_size": 100, **train}
    return plan_of(tm.recipe(data=data or {}, privacy={"epsilon": epsilon, "delta": 1e-5}, train=train), num_units)


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(steps=800, batch_size=32)


def test_noise_per_signal_is_the_ratio_in_the_sum_of_all_updates(seed: int) -> None:
    sigma, norm, batch, steps, coordinates = 0.8, 0.3, 50, 40, 20_000
    generator = np.random.default_rng(seed)
    noise = sum(sigma * norm * generator.standard_normal(coordinates) / batch for _ in range(steps))
    ratio = np.std(noise) / (steps * norm)
    assert ratio == pytest.approx(forecast.noise_per_signal(sigma, batch, steps), rel=0.04)  # 8 standard errors


@settings(derandomize=True, deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), steps=st.integers(1, 3000), extra=st.integers(0, 10_000))
def test_candidates_keep_the_compute_and_the_limits(size: int, steps: int, extra: int) -> None:
    from types import SimpleNamespace

    schedule = SimpleNamespace(dataset_size=size + extra, expected_batch_size=size, num_steps=steps)
    options = forecast.candidates(SimpleNamespace(schedule=schedule, bands=1))  # type: ignore[arg-type]
    assert (size, steps) in options
    assert [batch for batch, _ in options] == sorted({batch for batch, _ in options})
    for batch, count in options:
        assert batch <= size + extra
        assert count >= min(forecast.MIN_STEPS, steps)
        assert abs(batch * count - size * steps) <= batch / 2
        assert batch == size or math.log2(batch).is_integer()


def test_other_numbers_are_the_same_mechanism(small: Plan) -> None:
    own = small.schedule
    same = forecast.with_numbers(small.event, own.sampling_rate, small.noise_multiplier, own.num_steps)
    assert same == small.event
    grouped = plan(data={"unit": "author", "max_examples_per_unit": 3, "sampling": "example"}, batch_size=50, steps=60)
    other = forecast.with_numbers(grouped.event, 0.02, 1.5, 7)
    assert other.event.group_size == 3
    assert accounting.count_releases(other) == 7


def test_a_choice_keeps_the_promise(small: Plan) -> None:
    for batch, steps in [(64, 400), (500, 51), (8, 3200)]:
        choice = forecast.choose(small, batch, steps)
        event = forecast.with_numbers(small.event, batch / 5000, choice.noise_multiplier, steps)
        exact = accounting.epsilon(event, small.delta, small.neighbouring_relation)
        assert 0.99 * small.epsilon <= exact <= small.epsilon
        assert choice.noise_per_signal == choice.noise_multiplier / (batch * math.sqrt(steps))


def test_one_evaluation_says_what_a_calibration_would(small: Plan) -> None:
    choice = forecast.choose(small, 256, 100)
    assert forecast.noisier(small, 256, 100, than=0.98 * choice.noise_per_signal)
    assert not forecast.noisier(small, 256, 100, than=1.02 * choice.noise_per_signal)


def test_at_fixed_compute_noise_falls_with_the_batch(small: Plan) -> None:
    options = [option for option in forecast.candidates(small) if option[0] >= 8]
    noise = [forecast.choose(small, *option).noise_per_signal for option in options]
    assert noise == sorted(noise, reverse=True)
    assert noise[0] > 2 * noise[-1]


def test_the_suggestion_is_the_smallest_batch_near_the_best(small: Plan) -> None:
    found = forecast.suggest(small)
    options = forecast.candidates(small)
    place = options.index((found.batch_size, found.num_steps))
    limit = forecast.NEAR_BEST * forecast.choose(small, *options[-1]).noise_per_signal
    assert found.noise_per_signal <= limit * 1.005
    assert forecast.choose(small, *options[place - 1]).noise_per_signal > limit * 0.995
    assert found.num_steps >= forecast.MIN_STEPS


def test_a_batch_that_is_best_is_its_own_suggestion() -> None:
    best = plan(steps=50, batch_size=512)
    assert forecast.candidates(best)[-1] == (512, 50)
    assert forecast.suggest(best) == forecast.own_choice(best)


def test_a_learning_rate_that_diverges_is_named() -> None:
    large = recipe(optimizer="adamw", learning_rate=1000.0)
    assert any("--train.learning_rate" in text and "diverge" in text for text in advise(large, plan_of(large, 1000)))
    usual = recipe(optimizer="adamw", learning_rate=0.003)
    assert not any("diverge" in text for text in advise(usual, plan_of(usual, 1000)))
