"""Pictures of comparisons: they exist, on white ground, and every run has its place."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comparing import make_run

from dpllm.comparison import figures, values
from dpllm.comparison.compare import compare
from dpllm.comparison.figures import axis_of

INF = math.inf
BROKEN = {"guarantee": {"holds": False, "reason": "the noise was seeded"}}


def run(epsilon: float | None, private: bool = True) -> Any:
    return SimpleNamespace(epsilon=epsilon, private=private)


@pytest.mark.parametrize(
    "epsilons",
    [(1.0, 3.0, 8.0, INF), (3.0, INF), (2.0, 2.0, 2.0, 90.0)],
    ids=str,
)
def test_pictures_are_there_and_white_at_the_edge(tmp_path: Path, epsilons: tuple[float, ...]) -> None:
    from matplotlib.image import imread

    result = compare([make_run(tmp_path / f"run-{n}", e, held_out=True) for n, e in enumerate(epsilons)])
    for name in ("comparison.png", "utility.png", "leakage.png"):
        picture = imread(result.output / name)
        height, width = picture.shape[:2]
        assert height > 400
        assert width > 600
        assert picture[10, 10, :3].min() == 1.0  # opaque white inside the frame, on dark pages too
        assert picture[..., 3].min() == 1.0
        assert picture[0, width // 2, :3].max() < 0.9  # the frame
        assert (picture[..., :3].std(axis=2) > 0.2).sum() > 100  # something in colour


def test_epsilons_keep_their_order_and_the_rest_stands_beyond_the_break() -> None:
    axis = axis_of([run(1.0), run(3.0), run(8.0), run(None, False), run(None)])
    assert list(axis.places) == sorted(axis.places)
    assert axis.places[1] == pytest.approx(math.log10(3))
    assert axis.end == axis.places[3] > axis.last
    assert list(axis.ticks.values()) == ["1", "3", "8", "no DP", "no\nguarantee"]
    assert min(b - a for a, b in zip(axis.places, axis.places[1:], strict=False)) > 0.2


def test_equal_epsilons_stand_side_by_side_under_one_tick() -> None:
    axis = axis_of([run(3.0), run(2.9991), run(3.0), run(8.0)])
    assert len(set(axis.places)) == 4
    assert len(axis.ticks) == 2
    assert len(set(axis.above[:3])) == 1


def test_a_run_without_a_guarantee_stands_at_no_epsilon(tmp_path: Path) -> None:
    result = compare([make_run(tmp_path / "a", 3.0, record=BROKEN), make_run(tmp_path / "b", 8.0)])
    sides = result.figures.sides
    places = dict(zip([side.name for side in sides], axis_of(sides).places, strict=True))
    assert places["a"] > places["b"] == pytest.approx(math.log10(8))


def test_without_losses_only_leakage_is_drawn(tmp_path: Path) -> None:
    nothing = {"eval_loss_before": None, "eval_loss_after": None, "eval_tokens": None}
    result = compare([make_run(tmp_path / f"{e:g}", e, summary=nothing) for e in (1.0, 3.0)])
    assert [path.name for path in result.files if path.suffix == ".png"] == ["comparison.png", "leakage.png"]


def test_what_may_not_be_shown_is_not_drawn(tmp_path: Path) -> None:
    private = {"data": {"train": "notes.jsonl", "eval": "held-out.jsonl", "public": False, "eval_public": False}}
    runs = [make_run(tmp_path / "a", 3.0, private), make_run(tmp_path / "b", INF, private)]
    result = compare(runs, public=True)
    assert [path.name for path in result.files if path.suffix == ".png"] == ["comparison.png", "leakage.png"]


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    nothing = {"eval_loss_before": None, "eval_loss_after": None, "eval_tokens": None}
    runs = [make_run(tmp_path / f"{e:g}", e, {"audit": {"canaries": None}}, summary=nothing) for e in (3.0, INF)]
    assert [path.name for path in compare(runs).files] == ["comparison.json", "comparison.md"]


def test_a_run_of_which_nothing_is_shown_has_no_place_on_the_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, withheld = (
        SimpleNamespace(epsilon=epsilon, private=True, statement=SimpleNamespace(audit=None, guarantee=True))
        for epsilon in (8.0, None)
    )
    loss = {"loss": values.Figure(value=1.0, interval=(0.9, 1.1))}
    seen: list[Any] = []
    monkeypatch.setattr(figures, "axis_of", lambda sides: (seen.append(sides), axis_of(sides))[1])
    found: Any = values.Figures([one, withheld], {}, [loss, {}], None, {}, True)
    assert figures.draw(found, tmp_path) == ["comparison.png", "utility.png"]
    assert seen == [[one], [one]]
