"""The picture of one run: a panel for each figure that is there, for its owner's eyes alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from comparing import make_run
from matplotlib.image import imread

from dpllm.cli import main
from dpllm.comparison.curve import draw
from dpllm.files import RunPaths


def run_of(root: Path, steps: int, *, epsilon: float = 3.0, **values: Any) -> RunPaths:
    run = make_run(root, epsilon, audit=False)
    line = {"units": 4, "clipped": 3, "loss": 2.5, "norm": 1.5, **values}
    lines = [json.dumps({**line, "step": step}) for step in range(1, steps + 1)]
    # A step that drew nobody, a held-out loss, and a line that a killed process left.
    lines += ['{"step": 9, "units": 0, "clipped": 0, "loss": null, "norm": null}', '{"step": 1, "lo']
    run.metrics.write_text("\n".join(['{"step": 1, "eval_loss": 2.0, "eval_accuracy": 0.5}', *lines]))
    return run


@pytest.mark.parametrize(
    ("panels", "steps", "epsilon", "values"),
    [
        (3, 1, 3.0, {}),
        (3, 60, 3.0, {}),
        (2, 5, 3.0, {"norm": None}),  # of an earlier version
        (1, 5, math.inf, {"norm": None}),  # without clipping
        (2, 5, 3.0, {"loss": None}),  # diverged
    ],
)
def test_there_is_a_panel_for_each_figure_and_no_empty_one(
    tmp_path: Path, panels: int, steps: int, epsilon: float, values: dict[str, Any]
) -> None:
    run = run_of(tmp_path / "run", steps, epsilon=epsilon, **values)
    path, drawn = draw(run)
    picture = imread(path)
    assert (path.parent, path.stat().st_mode & 0o077, drawn) == (run.private, 0, steps)
    assert picture.shape[:2] == (390 * panels, 1200)
    for panel in range(panels):
        part = picture[390 * panel : 390 * (panel + 1), ..., :3]
        assert (part.std(axis=2) > 0.2).sum() > 100  # something in colour


def test_a_run_without_private_figures_is_refused_and_no_figure_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", 5)
    assert main(["curve", str(run.root)]) == 0
    said = capsys.readouterr().out
    assert str(run.private / "curve.png") in said
    assert not any(figure in said for figure in ("2.5", "1.5", "75"))
    for place in (run.root, run.root / "export"):
        run.metrics.unlink(missing_ok=True)
        assert main(["curve", str(place)]) == 2
    assert "no private figure" in capsys.readouterr().err
