"""How one run went: loss, clipped share and gradient norms of its steps, as a picture for its owner's eyes alone.

Comes in: private/metrics.jsonl, private/summary.json and the Plan of a run. Goes out: private/curve.png. Must not print a figure.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpllm.comparison.figures import COLOURS, INK, blank, style, write
from dpllm.errors import ConfigError
from dpllm.files import RunPaths, read_json
from dpllm.statement.run_files import read_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = dict[int, float | None]
"""Step -> value; None where there is none."""
PARTS = 20
"""Of a run, over each of which a thick line is the mean: what a few units show jumps from step to step."""


def draw(run: RunPaths) -> tuple[Path, int]:
    """Draws a panel for each figure that the run has; returns the picture's path, and of how many steps it is.

    Raises:
        ConfigError: No step is written down there.
    """
    lines = list(_private_lines(run))
    steps = {line["step"]: line for line in lines if line.get("units")}  # of one that was taken again, the last
    if not steps:
        raise ConfigError(
            f"{run.root}: has no steps in private/metrics.jsonl, so there is nothing to draw: training has not started, or this "
            "is an export, which has no private figures. Type the directory of a run that trained."
        )
    plan, summary = read_plan(run) if run.plan.exists() else None, run.private / "summary.json"
    ends = read_json(summary) if summary.exists() else {}
    held_out: Series = {0: ends.get("eval_loss_before")} | {line["step"]: line.get("eval_loss") for line in lines}
    held_out |= {max(steps): ends.get("eval_loss_after")}
    losses: Series = {step: line["loss"] for step, line in steps.items()}
    known = {"Loss, nats per token": (losses, held_out, "o", "held-out rows")}
    if plan is not None and plan.sampling == "unit" and plan.unit != "example":
        known = {
            "Loss of a unit, its rows added up": (losses, {}, "", ""),
            "Loss of held-out rows": (held_out, {}, "", ""),
        }
    if plan is not None:
        share: Series = {step: 100 * line["clipped"] / line["units"] for step, line in steps.items()}
        norms = {step: line.get("norm") for step, line in steps.items()}  # earlier versions wrote none
        bounds: Series = dict.fromkeys(steps, plan.max_grad_norm)
        known["Units whose gradient is longer than C, %"] = (share, {}, "", "")
        known["Norm of a unit's gradient before clipping"] = (norms, bounds, "--", "C")
    panels = {title: panel for title, panel in known.items() if _points(panel[0])}
    picture = blank(1, len(panels), (8.0, 2.6))
    for ax, (title, (own, beside, mark, name)) in zip(picture.axes, panels.items(), strict=True):
        style(ax, title, "")
        _plot(ax, _points(own))
        if points := _points(beside):
            ax.plot(*zip(*points, strict=True), mark, color=COLOURS["baseline"], label=name)
        ax.legend(fontsize=9, frameon=False)
        if title.endswith("%"):
            ax.set_ylim(-4, 104)
    picture.axes[-1].set_xlabel("step", fontsize=9, color=INK)
    path = run.private / "curve.png"
    write(picture, path, mode=0o600)
    return path, len(steps)


def _points(series: Series) -> list[tuple[int, float]]:
    return [(step, value) for step, value in series.items() if value is not None]


def _plot(ax: Axes, points: list[tuple[int, float]]) -> None:
    """Every step, and the mean over parts of the run."""
    from matplotlib.ticker import MaxNLocator

    at, values = np.array(points).T
    width = len(values) // PARTS
    ax.plot(
        at,
        values,
        ".-",
        color=COLOURS["dp"],
        linewidth=1,
        alpha=0.35 if width > 1 else 1,
        label="each step",
    )
    if width > 1:
        mean = np.convolve(values, np.full(width, 1 / width), "valid")
        ax.plot(at[width // 2 :][: len(mean)], mean, color=COLOURS["dp"], linewidth=2, label=f"mean of {width} steps")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _private_lines(run: RunPaths) -> Iterator[dict[str, Any]]:
    """What a run wrote down of its steps and evaluations, un-noised; a line that a killed process left unfinished is none."""
    for line in run.metrics.read_text(encoding="utf-8").splitlines() if run.metrics.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)
