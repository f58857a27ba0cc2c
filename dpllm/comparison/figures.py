"""The pictures of a comparison: utility and leakage against epsilon.

Comes in: the figures of a comparison. Goes out: PNG files. Runs with a guarantee stand at their epsilon; runs without stand at
the right end, beyond a break of the axis, because no epsilon is theirs. Must not read any file or decide what is compared.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.comparison.compared_runs import Side
from dpllm.comparison.rows import copies
from dpllm.comparison.values import UTILITY, Figure, Figures, Measure, extracted
from dpllm.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

# Okabe and Ito's palette, which people with any kind of colour vision tell apart; the lightness differs too.
COLOURS = {"base": "#777777", "baseline": "#D55E00", "dp": "#0072B2"}
INK = "#222222"
FRAME = "#999999"
# Of the groups of canaries, from the fewest copies to the most: lightness orders them, markers tell them apart in print.
SHADES = ("#56B4E9", "#0072B2", "#CC79A7", "#D55E00", "#222222")
MARKERS = ("o", "s", "^", "D", "v")
GAP = 0.3  # decades between the largest epsilon and the runs without, and between neighbours there
DODGE = 0.03  # of the axis, between runs above one tick


@dataclass(frozen=True)
class Axis:
    """Where each run stands, in decades of epsilon, beside others above one tick; beyond the break from ``end`` on."""

    places: tuple[float, ...]
    above: tuple[float, ...]
    ticks: dict[float, str]
    end: float | None
    last: float


@dataclass(frozen=True)
class Mark:
    """One point: its place, the tick above which it stands, value and interval, and whether an epsilon is its own."""

    place: float
    tick: float
    value: float
    interval: tuple[float, float] | None
    promised: bool


Panel = Callable[["Axes", Figures, Axis], None]


def draw(figures: Figures, folder: Path) -> list[str]:
    """Draws what there is to draw; returns the names of the files."""
    shown = [n for n, side in enumerate(figures.sides) if figures.utility[n] or side.statement.audit]  # others: no mark
    some = [figures.sides[n] for n in shown], [figures.utility[n] for n in shown]
    figures = replace(figures, sides=some[0], utility=some[1])
    measured = {name for found in figures.utility for name in found}
    utility = [_utility(name, one) for name, one in UTILITY.items() if one.panel and name in measured]
    leakage: list[Panel] = [_auc, _extraction] if any(side.statement.audit for side in figures.sides) else []
    loss = utility[:1] if "loss" in measured else []
    drawn = []
    for name, panels in {"comparison": [*loss, *leakage], "utility": utility, "leakage": leakage}.items():
        if panels:
            columns = min(2, len(panels))  # at 800 pixels wide, a page of more cannot be read
            picture, axis = blank(columns, -(-len(panels) // columns), (4.4, 3.5)), axis_of(figures.sides)
            for ax in picture.axes[len(panels) :]:
                ax.remove()
            for ax, panel in zip(picture.axes, panels, strict=True):
                panel(ax, figures, axis)
                _scale(ax, axis)
            write(picture, folder / f"{name}.png")
            drawn.append(f"{name}.png")
    return drawn


def blank(columns: int, rows: int, size: tuple[float, float]) -> Picture:
    """Panels, each of ``size`` in inches; a white ground with a frame reads on light and dark pages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.06)
    whole = (size[0] * columns, size[1] * rows)
    picture = Picture(figsize=whole, dpi=150, layout=layout, facecolor="white", edgecolor=FRAME, linewidth=1.5)
    FigureCanvasAgg(picture)
    picture.subplots(rows, columns)
    return picture


def write(picture: Picture, path: Path, *, mode: int = 0o666) -> None:
    """As a PNG file; the same picture gives the same bytes."""
    content = io.BytesIO()
    picture.savefig(content, format="png", edgecolor=picture.get_edgecolor(), metadata={"Software": None})
    write_whole(path, content.getvalue(), mode=mode)


def style(ax: Axes, title: str, unit: str) -> None:
    """How every panel looks."""
    ax.set_facecolor("white")
    ax.set_title(title, fontsize=11, loc="left", color=INK)
    ax.set_ylabel(unit, fontsize=9, color=INK)
    ax.tick_params(labelsize=9, colors=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e5e5e5", linewidth=0.8)


def axis_of(sides: Sequence[Side]) -> Axis:
    """Where the runs stand; runs with one epsilon stand side by side."""
    finite = [max(side.epsilon, 1e-3) for side in sides if side.epsilon is not None]
    last = math.log10(max(finite)) if finite else 0.0
    span = last - math.log10(min(finite)) if finite else 0.0
    step = max(GAP, 0.22 * span)
    dodge = DODGE * (span + 2 * step)
    above: list[float] = []
    places: list[float] = []
    ticks: dict[float, str] = {}
    end = None
    for side in sides:
        epsilon = side.epsilon
        if epsilon is None:
            label = "no\nguarantee" if side.private else "no DP"
            free = last + step if end is None else max(above) + 0.8 * step
        else:
            label = f"{epsilon:.2g}" if epsilon < 99.5 else f"{epsilon:.0f}"
            free = math.log10(max(epsilon, 1e-3))
        place = next((other for other, text in ticks.items() if text == label), free)
        if epsilon is None and end is None:
            end = place
        ticks[place] = label
        above.append(place)
        near = above.count(place) - 1
        places.append(place + dodge * ((near + 1) // 2) * (1 if near % 2 else -1))
    return Axis(tuple(places), tuple(above), ticks, end, last)


def _scale(ax: Axes, axis: Axis) -> None:
    """Ticks at the epsilons, and a break before the runs that have none."""
    lowest, highest = min(axis.places), max(axis.places)
    margin = max(0.12, 0.09 * (highest - lowest))
    ax.set_xlim(lowest - margin, highest + margin)
    ax.set_xticks(list(axis.ticks), list(axis.ticks.values()))
    promised = axis.end is None or axis.last < axis.end
    ax.set_xlabel("epsilon (logarithmic)" if promised else "", fontsize=9, color=INK)
    if axis.end is None or lowest >= axis.end:
        return
    middle, across = (axis.last + axis.end) / 2, ax.get_xaxis_transform()
    width = 0.012 * (highest - lowest + 2 * margin)
    ax.plot(
        [middle - width, middle + width], [0, 0], color="white", linewidth=3, transform=across, clip_on=False, zorder=5
    )
    for shift in (-width, width):
        ends = [middle + shift - width / 2, middle + shift + width / 2]
        ax.plot(ends, [-0.022, 0.022], color=INK, linewidth=1, transform=across, clip_on=False, zorder=6)


def _utility(name: str, measure: Measure) -> Panel:
    assert measure.panel is not None
    (title, unit, form), factor = measure.panel, measure.factor

    def panel(ax: Axes, figures: Figures, axis: Axis) -> None:
        style(ax, title, unit)
        _points(ax, _marks(figures, axis, [found.get(name) for found in figures.utility], factor), form)
        base = figures.base.get(name)
        if base and base.value is not None:
            _line(ax, factor * base.value, f"base model\n{form.format(factor * base.value)}")

    return panel


def _auc(ax: Axes, figures: Figures, axis: Axis) -> None:
    audits = [side.statement.audit for side in figures.sides]
    attacks = [audit.attacks.get(PRIMARY_ATTACK) if audit else None for audit in audits]
    group = next((attack.group for attack in attacks if attack), 1)
    style(ax, f"Membership inference, canaries planted {'once' if group == 1 else f'{group} times'}", "AUC")
    found = [Figure(value=one.auc, interval=one.auc_interval) if one else None for one in attacks]
    _points(ax, _marks(figures, axis, found), "{:.2f}")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.4), min(1.04, max(high, 0.7)))
    _line(ax, 0.5, "guessing")


def _extraction(ax: Axes, figures: Figures, axis: Axis) -> None:
    from matplotlib.ticker import PercentFormatter

    style(ax, "Canaries extracted", "share of those planted")
    seen = [side.statement.audit.extraction if side.statement.audit else {} for side in figures.sides]
    groups = sorted({group for one in seen for group in one}, key=int)
    ends: list[tuple[float, str, str]] = []
    highest = 0.25
    for index, group in enumerate(groups):
        shift = 0.025 * (max(axis.places) - min(axis.places)) * (index - (len(groups) - 1) / 2)
        shares = [extracted(one[group]) if group in one else None for one in seen]
        marks = _marks(figures, axis, shares, shift=shift)
        colour, marker = SHADES[index % len(SHADES)], MARKERS[index % len(MARKERS)]
        _points(ax, marks, None, colour, marker)
        highest = max([highest, *(mark.interval[1] for mark in marks if mark.interval)])
        if marks:
            ends.append((max(marks, key=lambda mark: mark.place).value, copies(group), colour))
    ax.set_ylim(-0.03 * highest, 1.08 * highest)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    # Each series is named to the right of its last point; names that would touch are moved apart.
    (low, high), place = ax.get_ylim(), -1.0
    for value, name, colour in sorted(ends, key=lambda end: end[0]):
        place = max((value - low) / (high - low), place + 0.065)
        ax.text(1.01, place, name, transform=ax.transAxes, color=colour, fontsize=9, va="center", clip_on=False)


def _marks(
    figures: Figures, axis: Axis, found: Sequence[Figure | None], factor: float = 1.0, shift: float = 0.0
) -> list[Mark]:
    """The points of the runs of which something was found."""
    marks = []
    for side, place, tick, one in zip(figures.sides, axis.places, axis.above, found, strict=True):
        if one is not None and one.value is not None:
            low, high = one.interval or (None, None)
            interval = None if low is None or high is None else (factor * low, factor * high)
            marks.append(Mark(place + shift, tick + shift, factor * one.value, interval, side.statement.guarantee))
    return marks


def _points(
    ax: Axes, marks: Sequence[Mark], form: str | None, colour: str | None = None, marker: str | None = None
) -> None:
    """Points with their intervals; the means at each epsilon are joined, and values are written where ``form`` says how."""
    ticks = sorted({mark.tick for mark in marks})
    above = {tick: [mark for mark in marks if mark.tick == tick] for tick in ticks}
    joined = [(tick, sum(mark.value for mark in some) / len(some)) for tick, some in above.items() if some[0].promised]
    if joined:
        ax.plot(*zip(*joined, strict=True), color=colour or COLOURS["dp"], linewidth=1.2, alpha=0.5, zorder=2)
    for mark in marks:
        ink = colour or COLOURS["dp" if mark.promised else "baseline"]
        shape = marker or ("o" if mark.promised else "s")
        if mark.interval is not None:
            low, high = mark.interval
            ax.errorbar(
                mark.place, mark.value, [[max(0.0, mark.value - low)], [max(0.0, high - mark.value)]], fmt="none", ecolor=ink,
                elinewidth=1.4, capsize=3, zorder=3,
            )  # fmt: skip
        ax.plot([mark.place], [mark.value], marker=shape, markersize=6.5, color=ink, linestyle="none", zorder=4)
    for tick, some in above.items():
        if form is None:
            break
        values = [mark.value for mark in some]
        ends = dict.fromkeys((form.format(min(values)), form.format(max(values))))
        top = max(max(mark.value, mark.interval[1] if mark.interval else mark.value) for mark in some)
        ax.annotate(
            " to ".join(ends), (tick, top), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9, color=INK,
            zorder=7, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip
    ax.margins(y=0.2)
    ax.autoscale_view()


def _line(ax: Axes, value: float, name: str) -> None:
    """A dashed line across, with its name to the right of it."""
    ax.axhline(value, color=COLOURS["base"], linestyle="--", linewidth=1.3, zorder=1)
    low, high = ax.get_ylim()
    room = 0.06 * (max(high, value) - min(low, value))
    ax.set_ylim(min(low, value - room), max(high, value + room))
    ax.annotate(
        name, (1.01, value), xycoords=("axes fraction", "data"), fontsize=9, color="#555555", va="center",
        annotation_clip=False,
    )  # fmt: skip
