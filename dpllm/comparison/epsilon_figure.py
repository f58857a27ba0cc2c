"""Utility and leakage against epsilon, each run a point with its interval.

Comes in: the JSON value of a comparison. Goes out: PNG files. Runs with a guarantee stand at their epsilon; runs without stand at
the right end, beyond a break of the axis, because no epsilon is theirs. Must not read any file or decide what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.card.claim import Json
from dpllm.comparison.figure_style import COLOURS, INK, new_figure, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the groups of canaries, from the fewest copies to the most: lightness orders them, markers tell them apart in print.
SHADES = ("#56B4E9", "#0072B2", "#CC79A7", "#D55E00", "#222222")
MARKERS = ("o", "s", "^", "D", "v")
GAP = 0.3  # decades between the largest epsilon and the runs without, and between neighbours there
DODGE = 0.03  # of the axis, between runs above one tick
UTILITY = {
    "loss": ("Held-out loss", "nats per target token", "{:.2f}", 1.0),
    "accuracy": ("Next token right", "%", "{:.1f}", 100.0),
    "bleu": ("BLEU", "", "{:.1f}", 1.0),
    "rouge_l": ("ROUGE-L", "F1, %", "{:.1f}", 100.0),
}
IN_FIGURE = ("loss", "bleu", "rouge_l")


@dataclass(frozen=True)
class Mark:
    """One point: its place, the tick above which it stands, value and interval, and whether an epsilon is its own."""

    place: float
    tick: float
    value: float
    interval: tuple[float, float] | None
    promised: bool


def draw_utility(values: Json, path: Path) -> bool:
    """Draws the held-out loss, and BLEU and ROUGE-L where they are known; returns whether there was anything to draw."""
    known = [measure for measure in IN_FIGURE if any(measure in run["utility"] for run in values["runs"])]
    return _draw(values, [_utility(measure) for measure in known], path)


def draw_leakage(values: Json, path: Path) -> bool:
    """Draws AUC and extraction; returns whether there was anything to draw."""
    audited = any(run["leakage"] for run in values["runs"])
    return _draw(values, [_auc, _extraction] if audited else [], path)


def draw_both(values: Json, path: Path) -> bool:
    """Draws loss, AUC and extraction side by side; returns whether there was anything to draw."""
    panels: list[Panel] = [_utility("loss")] if any("loss" in run["utility"] for run in values["runs"]) else []
    panels += [_auc, _extraction] if any(run["leakage"] for run in values["runs"]) else []
    return _draw(values, panels, path)


@dataclass(frozen=True)
class Axis:
    """Where each run stands.

    Attributes:
        places: One for each run, in decades of epsilon.
        above: The tick of each.
        ticks: Place -> label.
        end: The first place beyond the break; None where every run has an epsilon.
        last: The largest epsilon's place.
    """

    places: tuple[float, ...]
    above: tuple[float, ...]
    ticks: dict[float, str]
    end: float | None
    last: float


Panel = Callable[["Axes", Json, Axis], None]


def _draw(values: Json, panels: Sequence[Panel], path: Path) -> bool:
    if not panels:
        return False
    axis = axis_of(values["runs"])
    figure, axes = new_figure(len(panels), (5.2 * len(panels), 3.9))
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, values, axis)
        _scale(ax, axis)
    save(figure, path)
    return True


def _utility(measure: str) -> Panel:
    title, unit, form, factor = UTILITY[measure]

    def panel(ax: Axes, values: Json, axis: Axis) -> None:
        style(ax, title, unit)
        marks = _marks(values["runs"], axis, lambda run: _scaled(run["utility"].get(measure), factor))
        _points(ax, marks, form)
        base = _scaled(values["base"]["utility"].get(measure), factor)
        if base is not None:
            _line(ax, base[0], f"base model\n{form.format(base[0])}", axis)

    return panel


def _auc(ax: Axes, values: Json, axis: Axis) -> None:
    attacks = [run["leakage"]["attacks"].get(PRIMARY_ATTACK, {}) for run in values["runs"] if run["leakage"]]
    group = next((attack["group"] for attack in attacks if attack), 1)
    style(ax, f"Membership inference, canaries planted {'once' if group == 1 else f'{group} times'}", "AUC")

    def seen(run: Json) -> tuple[float, tuple[float, float] | None] | None:
        attack = run["leakage"].get("attacks", {}).get(PRIMARY_ATTACK)
        if attack is None or attack["auc"] is None:
            return None
        limits = attack["auc_interval"]
        return attack["auc"], (limits[0], limits[1]) if limits else None

    _points(ax, _marks(values["runs"], axis, seen), "{:.2f}")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.4), min(1.04, max(high, 0.7)))
    _line(ax, 0.5, "guessing", axis)


def _extraction(ax: Axes, values: Json, axis: Axis) -> None:
    from matplotlib.ticker import PercentFormatter

    style(ax, "Canaries extracted", "share of those planted")
    groups = sorted({group for run in values["runs"] for group in run["leakage"].get("extraction", {})}, key=int)
    ends: list[tuple[float, float, str, str]] = []
    highest = 0.25
    for index, group in enumerate(groups):

        def seen(run: Json, group: str = group) -> tuple[float, tuple[float, float] | None] | None:
            got = run["leakage"].get("extraction", {}).get(group)
            if got is None or got["share"] is None:
                return None
            return got["share"], (got["interval"][0], got["interval"][1])

        shift = 0.025 * (max(axis.places) - min(axis.places)) * (index - (len(groups) - 1) / 2)
        marks = _marks(values["runs"], axis, seen, shift)
        colour, marker = SHADES[index % len(SHADES)], MARKERS[index % len(MARKERS)]
        _points(ax, marks, None, colour, marker)
        highest = max([highest, *(mark.interval[1] for mark in marks if mark.interval)])
        if marks:
            last = max(marks, key=lambda mark: mark.place)
            ends.append((last.value, last.place, "1 copy" if group == "1" else f"{group} copies", colour))
    ax.set_ylim(-0.03 * highest, 1.08 * highest)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _label_ends(ax, ends)


def _scaled(found: Json | None, factor: float) -> tuple[float, tuple[float, float] | None] | None:
    if found is None or found["value"] is None:
        return None
    limits = found["interval"]
    known = limits is not None and None not in limits
    return factor * found["value"], (factor * limits[0], factor * limits[1]) if known else None


def _marks(
    runs: Sequence[Json],
    axis: Axis,
    seen: Callable[[Json], tuple[float, tuple[float, float] | None] | None],
    shift: float = 0.0,
) -> list[Mark]:
    marks = []
    for run, place, tick in zip(runs, axis.places, axis.above, strict=True):
        found = seen(run)
        if found is not None:
            marks.append(Mark(place + shift, tick + shift, *found, run["privacy"]["guarantee"]))
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


def _line(ax: Axes, value: float, name: str, axis: Axis) -> None:
    """A dashed line across, with its name to the right of it."""
    ax.axhline(value, color=COLOURS["base"], linestyle="--", linewidth=1.3, zorder=1)
    low, high = ax.get_ylim()
    room = 0.06 * (max(high, value) - min(low, value))
    ax.set_ylim(min(low, value - room), max(high, value + room))
    ax.annotate(
        name, (1.01, value), xycoords=("axes fraction", "data"), fontsize=9, color="#555555", va="center",
        annotation_clip=False,
    )  # fmt: skip


def _label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names each series to the right of its last point; names that would touch are moved apart."""
    low, high = ax.get_ylim()
    place = -1.0
    for value, _, name, colour in sorted(ends):
        place = max((value - low) / (high - low), place + 0.065)
        ax.text(1.01, place, name, transform=ax.transAxes, color=colour, fontsize=9, va="center", clip_on=False)


def axis_of(runs: Sequence[Json]) -> Axis:
    """Where the runs stand; runs with one epsilon stand side by side."""
    epsilons = [run["privacy"].get("epsilon") if run["privacy"]["guarantee"] else None for run in runs]
    finite = [max(epsilon, 1e-3) for epsilon in epsilons if epsilon is not None]
    last = math.log10(max(finite)) if finite else 0.0
    span = last - math.log10(min(finite)) if finite else 0.0
    step = max(GAP, 0.22 * span)
    dodge = DODGE * (span + 2 * step)
    above: list[float] = []
    places: list[float] = []
    ticks: dict[float, str] = {}
    end = None
    for run, epsilon in zip(runs, epsilons, strict=True):
        if epsilon is None:
            label = "no DP" if not run["privacy"]["enabled"] else "no\nguarantee"
            free = last + step if end is None else max(above) + 0.8 * step
            place = next((other for other, text in ticks.items() if text == label), free)
            end = place if end is None else end
            ticks[place] = label
        else:
            label = f"{epsilon:.2g}" if epsilon < 99.5 else f"{epsilon:.0f}"
            place = next((other for other, text in ticks.items() if text == label), math.log10(max(epsilon, 1e-3)))
            ticks.setdefault(place, label)
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
    if axis.end is None or min(axis.places) >= axis.end:
        return
    middle, across = (axis.last + axis.end) / 2, ax.get_xaxis_transform()
    width = 0.012 * (highest - lowest + 2 * margin)
    ax.plot(
        [middle - width, middle + width], [0, 0], color="white", linewidth=3, transform=across, clip_on=False, zorder=5
    )
    for shift in (-width, width):
        ends = [middle + shift - width / 2, middle + shift + width / 2]
        ax.plot(ends, [-0.022, 0.022], color=INK, linewidth=1, transform=across, clip_on=False, zorder=6)
