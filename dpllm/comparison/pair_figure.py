"""The picture of two runs: held-out loss, canary exposure and extraction, without and with differential privacy.

Comes in: the JSON value of a comparison. Goes out: a PNG file. Must not read any file or decide what is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.card.claim import Json
from dpllm.comparison import rows
from dpllm.comparison.figure_style import COLOURS, INK, new_figure, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"base": "base model", "baseline": "without DP", "dp": "with DP"}
WIDTH = 0.38
Sides = dict[str, Json]


def fits(values: Json) -> bool:
    """Whether these are a run without and one with differential privacy."""
    return sorted(run["privacy"]["enabled"] for run in values["runs"]) == [False, True]


def draw(values: Json, path: Path) -> bool:
    """Draws loss, exposure and extraction of two runs.

    Args:
        values: Of a comparison that ``fits``.
        path: PNG file to write.

    Returns:
        Whether there was anything to draw.
    """
    runs = {"dp" if run["privacy"]["enabled"] else "baseline": run for run in values["runs"]}
    seen = {side: run["leakage"] for side, run in runs.items() if run["leakage"]}
    groups = sorted({group for leakage in seen.values() for group in leakage["exposure"]}, key=int)
    parts = {"base": values["base"], **runs}
    loss = {side: part["utility"]["loss"]["value"] for side, part in parts.items() if "loss" in part["utility"]}
    if not loss and not groups:
        return False
    panels = 3 if groups else 1
    width = max(4.2, 0.8 + 1.3 * len(groups))  # inches: the counts above neighbouring bars must not touch
    figure, axes = new_figure(panels, (width * panels, 3.9))
    _loss(axes[0], loss)
    if groups:
        _exposure(axes[1], seen, groups)
        _extraction(axes[2], seen, groups)
        handles = [*axes[1].containers, *axes[1].get_lines()]
        promise = rows.promise(runs["dp"])
        labels = [NAMES[side] if side == "baseline" else f"{NAMES[side]}: {promise}" for side in _order(seen)]
        labels.append("a model with no memory of the canaries")
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, path)
    return True


def _order(seen: Sides) -> list[str]:
    return [side for side in ("baseline", "dp") if side in seen]


def _loss(ax: Axes, loss: dict[str, float]) -> None:
    style(ax, "Held-out loss", "nats per target token")
    shown = [side for side in NAMES if side in loss]
    bars = ax.bar([NAMES[s] for s in shown], [loss[s] for s in shown], 0.6, color=[COLOURS[s] for s in shown])
    ax.bar_label(bars, fmt="%.2f", fontsize=9, padding=2, color=INK)
    ax.margins(y=0.15)
    if not shown:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.text(0.5, 0.5, "not measured, or not to be shown", ha="center", transform=ax.transAxes, color=INK)


def _exposure(ax: Axes, seen: Sides, groups: list[str]) -> None:
    style(ax, "Canary exposure", "mean bits")
    for side in _order(seen):
        means = [seen[side]["exposure"].get(group, {}).get("mean") for group in groups]  # None: all coins said out
        bars = ax.bar(_places(side, seen, groups), [mean or 0.0 for mean in means], WIDTH, color=COLOURS[side])
        patch = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line must not cross a number
        labels = ["none" if mean is None else f"{mean:.1f}" for mean in means]
        ax.bar_label(bars, labels, fontsize=9, padding=3, color=INK, bbox=patch)
    null = next(leakage["exposure"][groups[0]]["null_mean"] for leakage in seen.values())
    ax.axhline(null, color=INK, linestyle="--", linewidth=1.2, zorder=2)
    ax.margins(y=0.15)
    _groups(ax, groups)


def _extraction(ax: Axes, seen: Sides, groups: list[str]) -> None:
    style(ax, "Canaries extracted", "share of those planted")
    for side in _order(seen):
        found = [seen[side]["extraction"].get(group, {"tuned": 0, "inserted": 0}) for group in groups]
        heights = [got["tuned"] / max(1, got["inserted"]) for got in found]
        bars = ax.bar(_places(side, seen, groups), heights, WIDTH, color=COLOURS[side])
        ax.bar_label(bars, [f"{got['tuned']}/{got['inserted']}" for got in found], fontsize=8, padding=2, color=INK)
    ax.set_ylim(0, 1.12)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    _groups(ax, groups)


def _places(side: str, seen: Sides, groups: list[str]) -> list[float]:
    shift = 0.0 if len(seen) == 1 else WIDTH / 2 * (-1 if side == "baseline" else 1)
    return [place + shift for place in range(len(groups))]


def _groups(ax: Axes, groups: list[str]) -> None:
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlabel("copies of each canary", fontsize=9, color=INK)
