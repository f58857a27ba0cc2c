"""Advice comes where a setting is likely to hurt, with a reason and what to type, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dpllm.forecast import signal
from dpllm.forecast.advice import advise
from dpllm.privacy.plan import make_plan
from dpllm.recipe.config import RunConfig, load_config
from dpllm.text import data as dpllm_data

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
E2E_ROWS = 42_061  # of the training set


def recipe(privacy: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "some/model"},
            "data": {"train": "rows.jsonl"},
            "privacy": {"epsilon": 8.0, **(privacy or {})},
            "train": {"steps": 60, "batch_size": 128, **train},
            "output_dir": "run",
        }
    )


def advice(config: RunConfig, num_units: int = 3790, released: dict[str, float] | None = None) -> list[str]:
    return advise(config, make_plan(config, num_units), released)


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    assert "Type --" in found[0]
    return found[0]


@pytest.mark.parametrize("name", ["smoke/clinic", "lora/e2e", "frozen/e2e"])
def test_the_recipes_that_are_shipped_get_none(name: str, tmp_path: Path) -> None:
    config = load_config(RECIPES / f"{name}.yaml", {} if "smoke" in name else {"privacy.delta": "auto"})
    size = dpllm_data.count_units(config.data, tmp_path) if "smoke" in name else E2E_ROWS
    assert advice(config, size) == []


def test_a_weak_epsilon() -> None:
    config = recipe({"epsilon": 10.0, "noise_multiplier": 0.505}, batch_size=64)
    assert make_plan(config, 3790).epsilon < 10
    assert not any("is weak" in text for text in advice(config))
    config = recipe({"epsilon": 30.0, "noise_multiplier": 0.505}, steps=400)
    assert make_plan(config, 3790).epsilon > 10
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
    plan = make_plan(config, 4000)
    text = next(text for text in advise(config, plan) if "too small" in text)
    size, steps = map(int, re.search(r"batch_size (\d+) --train.steps (\d+)", text).groups())  # type: ignore[union-attr]
    assert abs(size * steps - 16 * 1600) <= size
    mended = recipe({"epsilon": 3.0}, batch_size=size, steps=steps)
    better = make_plan(mended, 4000)
    assert signal.own_choice(better).noise_per_signal < signal.own_choice(plan).noise_per_signal / 1.4
    assert not any("too small" in text for text in advise(mended, better))


def test_steps_that_the_budget_does_not_reward() -> None:
    config = recipe({"epsilon": 1.0}, batch_size=400, steps=3000)
    text = next(text for text in advice(config, 4000) if "hardly rewarded" in text)
    assert "--train.steps 1500" in text
    full = signal.own_choice(make_plan(config, 4000))
    half = signal.own_choice(make_plan(recipe({"epsilon": 1.0}, batch_size=400, steps=1500), 4000))
    assert half.noise_per_signal < 1.1 * full.noise_per_signal  # as it says
    rewarded = recipe({"epsilon": 8.0}, batch_size=128, steps=200)
    assert not any("hardly rewarded" in text for text in advice(rewarded, 4000))


RELEASED = {"unclipped_fraction": 0.5, "max_grad_norm": 0.1}


@pytest.mark.parametrize(
    ("norm", "released", "words"),
    [
        (0.1, RELEASED, None),
        (0.19, RELEASED, None),
        (0.21, RELEASED, "2.1 times the 0.1"),
        (0.04, RELEASED, "shortens most gradients"),
        (0.1, {**RELEASED, "unclipped_fraction": 0.25}, "too small.*noised clip fraction of 0.75"),
        (0.1, {**RELEASED, "unclipped_fraction": 1.03}, "too large.*noised clip fraction of 0.00"),
        (0.1, {**RELEASED, "unclipped_fraction": 0.31}, None),
    ],
)
def test_a_clipping_norm_far_from_what_was_released(norm: float, released: dict[str, float], words: str | None) -> None:
    found = advice(recipe({"max_grad_norm": norm}), released=released)
    if words is None:
        assert found == []
    else:
        text = only(found)
        assert re.search(words, text)
        assert "adaptive gate" in text  # the second run depends on the first


def test_nothing_is_said_of_clipping_without_a_released_figure() -> None:
    assert advice(recipe({"max_grad_norm": 1000.0})) == []
