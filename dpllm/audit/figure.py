"""The audit as a picture: exposure by group, and how far members' scores lie from the rest.

Comes in: the score table. Goes out: a PNG file. Nothing is shown that the table does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpllm.audit import attacks
from dpllm.audit.table import CanaryScores, by_group

# Okabe and Ito's palette: told apart with any kind of colour vision, and in grey by lightness.
_OUT_COLOUR = "#56B4E9"
_IN_COLOURS = ("#E69F00", "#D55E00", "#882255", "#000000")


def draw(table: Sequence[CanaryScores], path: Path) -> None:
    """Draws exposure (left) and membership scores (right).

    Args:
        table: Candidates and references.
        path: A png file; its folder exists.
    """
    groups = by_group(table)
    references = groups.pop(0)
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    _draw_exposure(left, groups, references)
    _draw_scores(right, groups, references)
    figure.suptitle("What the trained model gives away about its canaries")
    # No software tag, so that the same scores give the same bytes.
    figure.savefig(path, metadata={"Software": None})


def _draw_exposure(axes: Any, groups: dict[int, list[CanaryScores]], references: Sequence[CanaryScores]) -> None:
    known = attacks.loss(references)
    jitter = np.random.default_rng(0)
    for place, rows in enumerate(groups.values()):
        sides = ((-0.2, attacks.held_out(rows), _OUT_COLOUR, "s"), (0.2, attacks.members(rows), _IN_COLOURS[1], "o"))
        for shift, side, colour, marker in sides:
            bits = attacks.exposure(attacks.loss(side), known)
            across = place + shift + jitter.uniform(-0.12, 0.12, len(bits))
            axes.plot(across, bits, marker, color=colour, markersize=3.5, alpha=0.55, markeredgewidth=0)
            if len(bits):
                ends = (place + shift - 0.17, place + shift + 0.17)
                axes.hlines(bits.mean(), *ends, color="black", linewidth=1.8, zorder=3)
    for colour, marker, name in ((_OUT_COLOUR, "s", "held out"), (_IN_COLOURS[1], "o", "inserted")):
        axes.plot([], [], marker, color=colour, label=name)
    axes.plot([], [], "-", color="black", linewidth=1.8, label="mean")
    null, top = attacks.exposure_null_mean(len(references)), math.log2(len(references))
    axes.axhline(null, color="black", linestyle="--", linewidth=1, label=f"mean if nothing is learned: {null:.2f}")
    axes.axhline(top, color="black", linestyle=":", linewidth=1, label=f"largest measurable: {top:.2f}")
    axes.set_xticks(range(len(groups)), [f"{group}x" for group in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(-0.4, top * 1.06)
    axes.set_xlabel("repetitions where inserted")
    axes.set_ylabel("exposure (bits)")
    axes.set_title(f"Exposure against {len(references):,} references", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)


def _draw_scores(axes: Any, groups: dict[int, list[CanaryScores]], references: Sequence[CanaryScores]) -> None:
    outside = [row for rows in groups.values() for row in attacks.held_out(rows)] + list(references)
    series = [(f"never inserted ({len(outside):,})", attacks.ratio(outside), _OUT_COLOUR)]
    for place, (group, rows) in enumerate(groups.items()):
        inside = attacks.members(rows)
        colour = _IN_COLOURS[min(place, len(_IN_COLOURS) - 1)]
        series.append((f"inserted {group}x ({len(inside):,})", attacks.ratio(inside), colour))
    everything = np.concatenate([values for _, values, _ in series])
    bins = np.histogram_bin_edges(everything, bins=40)
    for place, (name, values, colour) in enumerate(series):
        if not len(values):
            continue
        weights = np.full(len(values), 100 / len(values))
        if place == 0:
            axes.hist(values, bins, weights=weights, color=colour, alpha=0.6, label=name)
        else:
            line = {"color": colour, "linewidth": 1.8, "linestyle": ("-", "--", "-.", ":")[(place - 1) % 4]}
            axes.hist(values, bins, weights=weights, histtype="step", label=name, **line)
    axes.set_xlabel("membership score: log p(tuned) - log p(base) of the secret (nats)")
    axes.set_ylabel("share of canaries (%)")
    axes.set_title("Membership score", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
