"""The picture of a comparison: held-out loss, canary exposure and extraction, without and with differential privacy.

Comes in: the figures of a comparison. Goes out: a PNG file. Must not read any file or decide what is compared.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.report.claim import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which people with any kind of colour vision tell apart; the lightness differs too.
COLOURS = {"base": "#999999", "baseline": "#D55E00", "dp": "#0072B2"}
NAMES = {"base": "base model", "baseline": "without DP", "dp": "with DP"}
INK = "#222222"
WIDTH = 0.38


def draw(values: Json, stated: str, path: Path) -> None:
    """Draws the figures of a comparison.

    Args:
        values: ``loss`` and ``groups`` as ``compare`` makes them.
        stated: What the run with differential privacy promises, in two or three words.
        path: PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = sorted(values["groups"], key=int)
    panels = 3 if groups else 1
    width = max(4.2, 0.8 + 1.3 * len(groups))  # inches: the counts above neighbouring bars must not touch
    figure = Figure(figsize=(width * panels, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _loss(axes[0], values["loss"])
    if groups:
        _exposure(axes[1], values, groups)
        _extraction(axes[2], values, groups)
        handles = [*axes[1].containers, *axes[1].get_lines()]
        labels = [NAMES["baseline"], f"{NAMES['dp']}: {stated}", "a model with no memory of the canaries"]
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", metadata={"Software": None})
    os.replace(temporary, path)


def _loss(ax: Axes, loss: Json) -> None:
    _style(ax, "Held-out loss", "nats per target token")
    shown = {side: value for side, value in loss.items() if value is not None}
    bars = ax.bar([NAMES[side] for side in shown], list(shown.values()), 0.6, color=[COLOURS[side] for side in shown])
    ax.bar_label(bars, fmt="%.2f", fontsize=9, padding=2, color=INK)
    ax.margins(y=0.15)
    if not shown:
        ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes, color=INK)


def _exposure(ax: Axes, values: Json, groups: list[str]) -> None:
    _style(ax, "Canary exposure", "mean bits")
    for side, shift in (("baseline", -WIDTH / 2), ("dp", WIDTH / 2)):
        means = [values["groups"][group][side]["exposure"]["mean"] for group in groups]  # None: all coins said out
        places = [place + shift for place in range(len(groups))]
        bars = ax.bar(places, [mean or 0.0 for mean in means], WIDTH, color=COLOURS[side])
        patch = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line must not cross a number
        labels = ["none" if mean is None else f"{mean:.1f}" for mean in means]
        ax.bar_label(bars, labels, fontsize=9, padding=3, color=INK, bbox=patch)
    null = values["groups"][groups[0]]["dp"]["exposure"]["null_mean"]
    ax.axhline(null, color=INK, linestyle="--", linewidth=1.2, zorder=2)
    ax.margins(y=0.15)
    _groups(ax, groups)


def _extraction(ax: Axes, values: Json, groups: list[str]) -> None:
    _style(ax, "Canaries extracted", "share of those planted")
    for side, shift in (("baseline", -WIDTH / 2), ("dp", WIDTH / 2)):
        seen = [values["groups"][group][side]["extraction"] for group in groups]
        heights = [got["tuned"] / max(1, got["inserted"]) for got in seen]
        places = [place + shift for place in range(len(groups))]
        bars = ax.bar(places, heights, WIDTH, color=COLOURS[side])
        ax.bar_label(bars, [f"{got['tuned']}/{got['inserted']}" for got in seen], fontsize=8, padding=2, color=INK)
    ax.set_ylim(0, 1.12)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    _groups(ax, groups)


def _groups(ax: Axes, groups: list[str]) -> None:
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlabel("copies of each canary", fontsize=9)


def _style(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, fontsize=11, loc="left", color=INK)
    ax.set_ylabel(unit, fontsize=9)
    ax.tick_params(labelsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e5e5e5", linewidth=0.8)
