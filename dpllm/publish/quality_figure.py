"""The figures of a synthetic data set as one picture, which is private: some of them read private rows.

Comes in: figures by name, and what membership tests found, of ``dpllm.publish.quality``. Goes out: a PNG file.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpllm.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, float | None]
# Okabe and Ito's palette, by whose rows they are of.
COLOURS = {"synthetic": "#0072B2", "released": "#E69F00", "training": "#D55E00", "evaluation": "#777777"}
MOST_CODES = 8


def draw(figures: Figures, membership: Mapping[str, Any] | None, path: Path) -> None:
    """Draws lengths, control codes, repetition, replay, labels and membership; the file is for its owner's eyes alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 11), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 2).T.flat
    _lengths(axes[0], figures)
    _bars(axes[1], figures, ("share of ",), "Control codes (%)")
    _bars(axes[2], figures, ("distinct ", "exact "), "Repetition: n-grams that differ, rows that are equal (%)")
    labels = [name for name in figures if name.endswith((": accuracy", ": macro F1"))]
    _marks(axes[3], "Labels from synthetic (TSTR) and real rows (TRTR) (%)", figures, labels)
    repeated = [name for name in figures if name.startswith("with ")]
    _marks(axes[4], "Synthetic rows that repeat a real one (%)", figures, repeated)
    areas: dict[str, float | None] = {}
    attacks, found = (membership["attacks"], membership["reproduced"]) if membership else ({}, {})
    for group, one in sorted(attacks.items(), key=lambda item: int(item[0])):
        name = "planted {}x ({tuned} of {inserted} secrets found)".format(group, **found[group])
        areas |= {name: one["auc"]} | dict(
            zip((f"{name}, low", f"{name}, high"), one["auc_interval"] or (), strict=False)
        )
        areas |= {f"planted {group}x, most that the claim allows": one["limits"]["auc"]} if one["limits"] else {}
    told = [name for name in areas if not name.endswith((", low", ", high"))]
    _marks(axes[5], "Planted canaries told from others: AUC (%, guessing: 50)", areas, told)
    if told:
        axes[5].axvline(50, color=COLOURS["evaluation"], linestyle="--", linewidth=1)
    for ax in axes:
        ax.title.set_fontsize(11)
        ax.tick_params(labelsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        if not ax.has_data():
            ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes, color=COLOURS["evaluation"])
            ax.set(xticks=[], yticks=[])
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    write_whole(path, content.getvalue(), mode=0o600)


def _lengths(ax: Axes, figures: Figures) -> None:
    ax.set_title("Length in tokens: middle 90% and half, median")
    sides = [side for side in reversed(COLOURS) if figures.get(f"tokens, quantile 0.5: {side}") is not None]
    for place, side in enumerate(sides):
        at = {q: figures.get(f"tokens, quantile {q}: {side}") for q in ("0.05", "0.25", "0.5", "0.75", "0.95")}
        for low, high, width in (("0.05", "0.95", 1.5), ("0.25", "0.75", 8.0)):
            if (left := at[low]) is not None and (right := at[high]) is not None:
                ax.plot([left, right], [place] * 2, color=COLOURS[side], linewidth=width, solid_capstyle="butt")
        ax.plot(
            figures[f"tokens, quantile 0.5: {side}"] or 0.0,
            place,
            "o",
            color="white",
            markeredgecolor=COLOURS[side],
            markersize=9,
        )
    ax.set_yticks(range(len(sides)), sides)
    ax.set_ylim(-0.6, len(sides) - 0.4)


def _bars(ax: Axes, figures: Figures, beginnings: tuple[str, ...], title: str) -> None:
    """Figures whose names begin so; of each the bars of all kinds of rows side by side."""
    ax.set_title(title)
    known = {tuple(name.rsplit(": ", 1)): value for name, value in figures.items() if name.startswith(beginnings)}
    names = list(dict.fromkeys(name for name, _ in known))[:MOST_CODES]
    sides = [side for side in COLOURS if any((name, side) in known for name in names)]
    for place, side in enumerate(sides):
        values, width = (
            [100 * (np.nan if (found := known.get((name, side))) is None else found) for name in names],
            0.8 / len(sides),
        )
        at = np.arange(len(names)) + (place - (len(sides) - 1) / 2) * width
        ax.bar_label(ax.bar(at, values, 0.9 * width, color=COLOURS[side], label=side), fmt="%.0f", fontsize=7)
    shown = [name.removeprefix(beginnings[0]) for name in names]
    turned: Any = {"rotation": 20, "ha": "right"} if sum(map(len, shown)) > 60 else {}
    ax.set_xticks(range(len(names)), shown, **turned)
    if sides:
        ax.legend(fontsize=8, frameon=False)


def _marks(ax: Axes, title: str, figures: Figures, names: Sequence[str]) -> None:
    """Figures one below the other, with their intervals where they have some."""
    ax.set_title(title)
    known = [(name, value) for name in names if (value := figures[name]) is not None]
    for place, (name, share) in enumerate(reversed(known)):
        value, low, high = (100 * (figures.get(name + end, share) or 0.0) for end in ("", ", low", ", high"))
        side = next((side for side in COLOURS if side in name), "synthetic")
        side = "training" if "TRTR" in name else "evaluation" if "commonest" in name or "allows" in name else side
        ax.errorbar(
            value, place, xerr=[[abs(value - low)], [abs(high - value)]], fmt="o", color=COLOURS[side], capsize=3
        )
        ax.annotate(f"{value:.1f}", (value, place), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    ax.set_yticks(range(len(known)), [name for name, _ in known][::-1])
    if known:
        ax.set(xlim=(-3, 105), ylim=(-0.5, len(known)))
        ax.grid(axis="x", color="#e5e5e5", linewidth=0.8)
