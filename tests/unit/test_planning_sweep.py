"""A sweep plans what ``dpllm plan`` would plan, and its figure is a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from dpllm.config import load_config
from dpllm.errors import ConfigError, DataError
from dpllm.planning.figure import draw_comparison, draw_sweep
from dpllm.planning.outlook import decide
from dpllm.planning.sweep import Point, parse_sweeps, sweep


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
        ({"privacy.enabled": [False]}, "makes none"),
    ],
)
def test_a_wrong_key_is_the_usual_error(recipe: Path, sweeps: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(recipe, {}, sweeps)


def test_data_that_cannot_be_read_are_the_usual_error(recipe: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        sweep(recipe, {"data.train": "absent.jsonl"}, {"privacy.epsilon": [1]})


def point(*values: Any, noise: float | None = 1.0, epsilon: float = 1.0) -> Point:
    size = values[-1] if isinstance(values[-1], int) else 10
    return Point(values, epsilon, noise, 0.1, 10, size, noise and noise / size, None if noise else "refused")


@pytest.mark.parametrize(
    "points",
    [
        [point(e, b, noise=b / 100 / e) for e in range(1, 13) for b in (64, 128, 256)],
        [point(name, noise=value) for name, value in (("flat", 1.0), ("automatic", 1.2))],
        [point(1.0, 64), point(1.0, 128, noise=None)],
        [point(64, noise=None)],
        [point(5)],
        [point(0.5, noise=1.0, epsilon=3.0), point(2.0, noise=1.0, epsilon=1.0)],
        [point(None), point(4000)],
    ],
)
def test_every_sweep_can_be_drawn(points: list[Point], tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "sweep.png"
    draw_sweep([f"section.key{index}" for index in range(len(points[0].values))], points, path)
    assert_is_picture(path)
    assert [warning for warning in recwarn if "igure" in str(warning.message) or "lyph" in str(warning.message)] == []


def test_a_comparison_can_be_drawn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    from dpllm.planning.composition import Comparison

    for index, found in enumerate(
        (
            Comparison((1, 5, 60), (3.4, 20.0, 300.0), (179.0, 2000.0, float("inf")), (4.3, 5.5, 9.6), (3.4, 4.4, 8.0)),
            Comparison((1,), (1.0,), (2.0,), None, (1.0,)),
            Comparison((1, 9), (50.0, 90.0), (1e70, 1e81), (60.0, 80.0), (50.0, 60.0)),
            Comparison((1, 2), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
        )
    ):
        path = tmp_path / f"{index}.png"
        draw_comparison(found, 1e-5, "q 0.02", path)
        assert_is_picture(path)
    assert list(recwarn) == []


def assert_is_picture(path: Path) -> None:
    """A PNG on an opaque white ground within a frame, with something on it."""
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 800
    corners = pixels[[9, 9, -10, -10], [9, -10, 9, -10]]
    assert (corners == 1).all()
    assert (pixels[..., 3] == 1).all()
    assert pixels.std() > 0.02
    assert [other.name for other in path.parent.iterdir() if other.name.startswith(".")] == []
