"""The picture of a comparison: it exists, on white ground, and no run stands at an epsilon that is not its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from comparing import make_run
from matplotlib.axes import Axes
from matplotlib.image import imread

from dpllm.comparison.compare import compare

INF = math.inf
PRIVATE = {"data": {"train": "notes.jsonl", "eval": "held-out.jsonl", "public": False, "eval_public": False}}
BROKEN = {"guarantee": {"holds": False, "reason": "the noise was seeded"}}
NOTHING = {"eval_loss_before": None, "eval_loss_after": None, "eval_tokens": None}


@pytest.mark.parametrize("epsilons", [(1.0, 3.0, 8.0, INF), (3.0, INF), (2.0, 2.0, 2.0, 90.0)], ids=str)
def test_a_picture_is_there_and_white_at_the_edge(tmp_path: Path, epsilons: tuple[float, ...]) -> None:
    result = compare([make_run(tmp_path / f"run-{n}", e) for n, e in enumerate(epsilons)])
    picture = imread(result.output / "comparison.png")
    height, width = picture.shape[:2]
    assert height > 400
    assert width > 600
    assert picture[2, 2, :3].min() == 1.0  # opaque white, on dark pages too
    assert picture[..., 3].min() == 1.0
    assert (picture[..., :3].std(axis=2) > 0.2).sum() > 100  # something in colour


def test_a_run_without_a_guarantee_stands_at_no_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    across: list[tuple[str, float]] = []
    monkeypatch.setattr(Axes, "annotate", lambda self, text, point, *_, **__: drawn.append((text, *point)))
    monkeypatch.setattr(Axes, "text", lambda self, x, y, name, **_: across.append((name, y)))
    runs = {"broken": (2.0, BROKEN), "eight": (8.0, {}), "three": (3.0, {}), "plain": (INF, {})}
    compare([make_run(tmp_path / name, epsilon, record=record) for name, (epsilon, record) in runs.items()])
    assert drawn == [("2.35", 3.0, pytest.approx(2.354)), ("2.10", 8.0, pytest.approx(2.104))]
    assert across == [
        ("base model\n3.91", 3.912),
        ("broken: no guarantee\n2.55", pytest.approx(2.554)),
        ("no DP\n1.95", 1.954),
    ]


@pytest.mark.parametrize(
    ("changes", "public"),
    [({"summary": NOTHING}, False), ({"sections": PRIVATE}, True), ({"record": BROKEN}, False)],
    ids=["no losses", "withheld", "no guarantee"],
)
def test_what_is_not_there_or_not_shown_is_not_drawn(tmp_path: Path, changes: dict[str, Any], public: bool) -> None:
    runs = [make_run(tmp_path / f"{epsilon:g}", epsilon, **changes) for epsilon in (3.0, 8.0)]
    assert [path.name for path in compare(runs, public=public).files] == ["comparison.json", "comparison.md"]
