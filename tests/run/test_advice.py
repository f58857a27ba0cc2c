"""Advice comes where a setting is likely to hurt, with a reason and what to type, and nowhere else.

Noise per unit of signal is what a simulation shows, and the suggested batch is within 10% of the best with the most steps.
"""

import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_models as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.errors import ConfigError
from dpllm.privacy.plan import Plan
from dpllm.privacy.schedule import Schedule
from dpllm.recipe.config import RunConfig, load_config
from dpllm.recipe.sections import AuditConfig
from dpllm.run.advice import MIN_STEPS, NEAR_BEST, _larger_batches, advise, check_learning_rate, noise_per_signal
from dpllm.run.promise import plan_of

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
E2E_ROWS = 42_061  # of the training set


def recipe(privacy: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return tm.recipe(privacy={"epsilon": 8.0, **(privacy or {})}, train={"steps": 60, "batch_size": 128, **train})


def advice(config: RunConfig, num_units: int = 3790) -> list[str]:
    return advise(config, plan_of(config, num_units))


def only(result: list[str]) -> str:
    assert len(result) == 1, result
    assert "Type --" in result[0]
    return result[0]


@pytest.mark.parametrize("name", ["smoke/clinic", "lora/e2e", "frozen/e2e"])
def test_the_recipes_that_are_shipped_get_none(name: str, tmp_path: Path) -> None:
    """But for the smallest, which is made to be audited and not to be published."""
    smoke = "smoke" in name
    config = load_config(RECIPES / f"{name}.yaml", {} if smoke else {"privacy.delta": "auto"})
    size = tiny.count_units(config.data, tmp_path) if smoke else E2E_ROWS
    assert [text.split(" occupy")[0] for text in advice(config, size)] == ["text canaries"] * smoke


def test_many_canaries_of_text_cost_noise_and_gradient_canaries_are_none_of_them() -> None:
    def with_canaries(**audit: Any) -> RunConfig:
        return recipe().model_copy(update={"audit": AuditConfig(**audit)})

    few, many = ({"canaries": {"groups": {1: number}}} for number in (420, 3790))
    for audit in (few, {"gradient_canaries": 3790}):
        assert not any("text canaries" in text for text in advice(with_canaries(**audit)))
    assert any("3790 of the N = 7580 slots (50%)" in text for text in advice(with_canaries(**many)))


def signal(plan: Plan) -> float:
    return noise_per_signal(plan.noise_multiplier, plan.schedule)


@pytest.mark.parametrize(
    ("data", "own"), [({}, 16), ({"unit": "author", "max_examples_per_unit": 3, "sampling": "example"}, 4)]
)
def test_a_batch_too_small_for_its_noise_and_the_advice_mends_it(data: dict[str, Any], own: int) -> None:
    """The batch that it names is near the best of the same compute, and the one before it is not."""

    def planned(size: int, steps: int) -> tuple[RunConfig, Plan]:
        config = tm.recipe(data=data, privacy={"epsilon": 3.0}, train={"batch_size": size, "steps": steps})
        return config, plan_of(config, 4000)

    config, plan = planned(own, 25600 // own)
    text = next(text for text in advise(config, plan) if "too small" in text)
    size, steps = map(int, re.search(r"batch_size (\d+) --train.steps (\d+)", text).groups())  # type: ignore[union-attr]
    assert abs(size * steps - 25600) <= size
    fixed, better = planned(size, steps)
    assert signal(better) < signal(plan) / 1.4
    assert not any("too small" in text for text in advise(fixed, better))
    best = signal(planned(512, 50)[1])
    assert signal(better) <= 1.02 * NEAR_BEST * best
    assert signal(planned(size // 2, 2 * steps)[1]) > 0.98 * NEAR_BEST * best


def test_noise_per_signal_is_the_ratio_in_the_sum_of_all_updates(seed: int) -> None:
    sigma, norm, batch, steps, coordinates = 0.8, 0.3, 50, 40, 20_000
    generator = np.random.default_rng(seed)
    noise = sum(sigma * norm * generator.standard_normal(coordinates) / batch for _ in range(steps))
    ratio = np.std(noise) / (steps * norm)
    schedule = Schedule(1000, 0, batch, batch / 1000, steps)
    assert ratio == pytest.approx(noise_per_signal(sigma, schedule), rel=0.04)  # 8 standard errors


@settings(derandomize=True, deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), steps=st.integers(1, 3000), extra=st.integers(0, 10_000))
def test_larger_batches_keep_the_compute_and_the_limits(size: int, steps: int, extra: int) -> None:
    for item in _larger_batches(Schedule(size + extra, 0, size, size / (size + extra), steps)):
        batch, count = item.expected_batch_size, item.num_steps
        assert math.log2(batch / size).is_integer()
        assert size < batch <= size + extra
        assert item.sampling_rate == batch / item.dataset_size
        assert count >= MIN_STEPS
        assert abs(batch * count - size * steps) <= batch / 2


@pytest.mark.parametrize(
    ("train", "named", "refused"),
    [
        ({"optimizer": "adamw", "learning_rate": 0.003}, False, False),
        ({"optimizer": "adamw", "learning_rate": 1.0}, True, False),
        ({"optimizer": "adamw", "learning_rate": 1e30}, False, True),
        ({"optimizer": "sgd", "learning_rate": 1.0}, False, False),  # of a noise of about .006 in each weight
        ({"optimizer": "sgd", "learning_rate": 100.0}, True, False),
        ({"optimizer": "sgd", "learning_rate": 1e30}, False, True),
    ],
)
def test_a_learning_rate_that_diverges_is_named_and_one_that_replaces_every_weight_refused(
    train: dict[str, Any], named: bool, refused: bool
) -> None:
    config = recipe(**train)
    plan = plan_of(config, 1000)
    assert any("diverge" in text and "--train.learning_rate" in text for text in advise(config, plan)) == named
    refusal = pytest.raises(ConfigError, match=r"train\.learning_rate .* epsilon would be spent and nothing learned")
    with refusal if refused else nullcontext():
        check_learning_rate(config, plan)


def test_a_weak_epsilon_hardly_any_noise_and_a_delta_near_to_one_over_n() -> None:
    config = recipe({"epsilon": 10.0, "noise_multiplier": 0.505}, batch_size=64)
    assert plan_of(config, 3790).epsilon < 10
    assert not any("is weak" in text for text in advice(config))
    config = recipe({"epsilon": 30.0, "noise_multiplier": 0.505}, steps=400)
    assert plan_of(config, 3790).epsilon > 10
    assert any("is weak" in text and "--privacy.epsilon 8" in text for text in advice(config))
    text = only(advice(recipe({"noise_multiplier": 0.499}, batch_size=64, steps=50)))
    assert "noise multiplier 0.499" in text
    assert "--train.batch_size 128" in text
    assert advice(recipe({"noise_multiplier": 0.5}, batch_size=64, steps=50)) == []
    assert advice(recipe({"delta": 0.1 / 4000}), 4000) == []
    text = only(advice(recipe({"delta": 0.2 / 4000}), 4000))
    assert "0.2 times 1/N" in text
    assert "auto (here 2e-05)" in text
