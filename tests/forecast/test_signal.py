"""Noise per unit of signal is what a simulation shows, and the suggestion is within 10% of the best with the most steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.forecast import signal
from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan, make_plan
from dpllm.recipe.config import RunConfig


def plan(num_units: int = 5000, epsilon: float = 4.0, data: dict[str, Any] | None = None, **train: Any) -> Plan:
    value = {
        "model": {"name_or_path": "some/model"},
        "data": {"train": "rows.jsonl", **(data or {})},
        "privacy": {"epsilon": epsilon, "delta": 1e-5},
        "train": {"steps": 100, "batch_size": 100, **train},
        "output_dir": "run",
    }
    return make_plan(RunConfig.model_validate(value), num_units)


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(steps=800, batch_size=32)


def test_noise_per_signal_is_the_ratio_in_the_sum_of_all_updates(seed: int) -> None:
    sigma, norm, batch, steps, coordinates = 0.8, 0.3, 50, 40, 20_000
    generator = np.random.default_rng(seed)
    noise = sum(sigma * norm * generator.standard_normal(coordinates) / batch for _ in range(steps))
    ratio = np.std(noise) / (steps * norm)
    assert ratio == pytest.approx(signal.noise_per_signal(sigma, batch, steps), rel=0.04)  # 8 standard errors


@settings(derandomize=True, deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), steps=st.integers(1, 3000), extra=st.integers(0, 10_000))
def test_candidates_keep_the_compute_and_the_limits(size: int, steps: int, extra: int) -> None:
    from types import SimpleNamespace

    schedule = SimpleNamespace(dataset_size=size + extra, expected_batch_size=size, num_steps=steps)
    options = signal.candidates(SimpleNamespace(schedule=schedule))  # type: ignore[arg-type]
    assert (size, steps) in options
    assert [batch for batch, _ in options] == sorted({batch for batch, _ in options})
    for batch, count in options:
        assert batch <= size + extra
        assert count >= min(signal.MIN_STEPS, steps)
        assert abs(batch * count - size * steps) <= batch / 2
        assert batch == size or math.log2(batch).is_integer()


def test_other_numbers_are_the_same_mechanism(small: Plan) -> None:
    own = small.schedule
    same = signal.with_numbers(small.event, own.sampling_rate, small.noise_multiplier, own.num_steps)
    assert same == small.event
    grouped = plan(data={"unit": "author", "max_examples_per_unit": 3, "sampling": "example"}, batch_size=50, steps=60)
    other = signal.with_numbers(grouped.event, 0.02, 1.5, 7)
    assert other["event"]["group_size"] == 3
    assert accounting.count_releases(other) == 7


def test_a_choice_keeps_the_promise(small: Plan) -> None:
    for batch, steps in [(64, 400), (500, 51), (8, 3200)]:
        choice = signal.choose(small, batch, steps)
        event = signal.with_numbers(small.event, batch / 5000, choice.noise_multiplier, steps)
        exact = accounting.epsilon(event, small.delta, small.neighbouring_relation)
        assert 0.99 * small.epsilon <= exact <= small.epsilon
        assert choice.noise_per_signal == choice.noise_multiplier / (batch * math.sqrt(steps))


def test_one_evaluation_says_what_a_calibration_would(small: Plan) -> None:
    choice = signal.choose(small, 256, 100)
    assert signal.noisier(small, 256, 100, than=0.98 * choice.noise_per_signal)
    assert not signal.noisier(small, 256, 100, than=1.02 * choice.noise_per_signal)


def test_at_fixed_compute_noise_falls_with_the_batch(small: Plan) -> None:
    options = [option for option in signal.candidates(small) if option[0] >= 8]
    noise = [signal.choose(small, *option).noise_per_signal for option in options]
    assert noise == sorted(noise, reverse=True)
    assert noise[0] > 2 * noise[-1]


def test_the_suggestion_is_the_smallest_batch_near_the_best(small: Plan) -> None:
    found = signal.suggest(small)
    options = signal.candidates(small)
    assert (found.least_noise.batch_size, found.least_noise.num_steps) == options[-1]
    assert found.own == signal.own_choice(small)
    place = options.index((found.suggested.batch_size, found.suggested.num_steps))
    limit = signal.NEAR_BEST * found.least_noise.noise_per_signal
    assert found.suggested.noise_per_signal <= limit * 1.005
    assert signal.choose(small, *options[place - 1]).noise_per_signal > limit * 0.995
    assert found.suggested.num_steps >= signal.MIN_STEPS


def test_a_batch_that_is_best_is_its_own_suggestion() -> None:
    found = signal.suggest(plan(steps=50, batch_size=512))
    assert found.suggested == found.own == found.least_noise
