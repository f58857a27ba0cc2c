"""A sweep plans what ``dpllm plan`` would plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from dpllm.errors import ConfigError, DataError
from dpllm.forecast.sweep import parse_sweeps, sweep
from dpllm.recipe.config import load_config
from dpllm.run.promise import decide


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.write_rows(tmp_path / "rows.jsonl", [{"text": tiny.sentence(number)} for number in range(300)])
    value = {
        "model": {"name_or_path": "some/model"},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "privacy": {"epsilon": 4.0, "ledger": str(tmp_path / "ledger.sqlite")},
        "train": {"steps": 20, "batch_size": 30},
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def test_what_to_sweep_is_read_as_yaml() -> None:
    assert parse_sweeps(["privacy.epsilon=1,2.5", "privacy.clipping=flat,automatic"]) == {
        "privacy.epsilon": [1, 2.5],
        "privacy.clipping": ["flat", "automatic"],
    }
    assert parse_sweeps(["data.public-size=null,4000"]) == {"data.public_size": [None, 4000]}


@pytest.mark.parametrize(
    "bad", ["privacy.epsilon", "privacy.epsilon=", "=1,2", "privacy.epsilon=[1", "train.steps=1,,2"]
)
def test_a_sweep_without_values_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="names no values"):
        parse_sweeps([bad])


def test_a_key_is_swept_once_and_within_reason() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse_sweeps(["train.steps=1,2", "train.steps=3"])
    with pytest.raises(ConfigError, match="225 combinations"):
        parse_sweeps([f"{key}={','.join(map(str, range(1, 16)))}" for key in ("train.steps", "train.batch_size")])


def test_every_combination_is_what_plan_would_say(recipe: Path) -> None:
    sweeps = {"privacy.epsilon": [2.0, 4.0], "train.batch_size": [30, 60]}
    points = sweep(recipe, {"train.steps": 25}, sweeps)
    assert [point.values for point in points] == [(2.0, 30), (2.0, 60), (4.0, 30), (4.0, 60)]
    for point in points:
        overrides = {"train.steps": 25, **dict(zip(sweeps, point.values, strict=True))}
        plan = decide(load_config(recipe, overrides)).plan
        assert plan is not None
        assert (point.epsilon, point.noise_multiplier) == (plan.epsilon, plan.noise_multiplier)
        assert (point.sampling_rate, point.num_steps) == (plan.schedule.sampling_rate, 25)
        assert point.noise_per_signal == pytest.approx(plan.noise_multiplier / (point.batch_size * 5))
        assert point.refusal is None


def test_a_combination_that_would_be_refused_is_shown_as_such(recipe: Path) -> None:
    points = sweep(recipe, {}, {"train.batch_size": [30, 301]})
    assert points[0].refusal is None
    assert "train.batch_size 301" in str(points[1].refusal)
    assert points[1].noise_multiplier is None


def test_epsilon_of_given_noise_is_shown_above_the_target_too(recipe: Path) -> None:
    points = sweep(recipe, {}, {"privacy.noise_multiplier": [0.5, 5.0]})
    assert points[0].epsilon is not None
    assert points[0].epsilon > 4
    assert "above the target" in str(points[0].refusal)
    assert points[1].refusal is None


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        ({"privacy.epsilonn": [1]}, "did you mean epsilon"),
        ({"privacy.epsilon": [1, -1]}, "privacy.epsilon"),
        ({"privacy.enabled": [False]}, "gives none"),
    ],
)
def test_a_wrong_key_is_the_usual_error(recipe: Path, sweeps: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(recipe, {}, sweeps)


def test_data_that_cannot_be_read_are_the_usual_error(recipe: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        sweep(recipe, {"data.train": "absent.jsonl"}, {"privacy.epsilon": [1]})
