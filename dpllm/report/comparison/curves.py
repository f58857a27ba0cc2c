"""Utility and leakage against epsilon, each run a point with its interval.

Comes in: the JSON value of a comparison. Goes out: PNG files. Runs with a guarantee stand at their epsilon; runs without stand at
the right end, beyond a break of the axis, because no epsilon is theirs. Must not read any file or decide what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.audit.summary import PRIMARY_ATTACK
from dpllm.canvas import COLOURS, INK, new_figure, save, style
from dpllm.report.claim import Json
from dpllm.report.comparison.axis import Axis, axis_of, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the groups of canaries, from the fewest copies to the most: lightness orders them, markers tell them apart in print.
SHADES = ("#56B4E9", "#0072B2", "#CC79A7", "#D55E00", "#222222")
MARKERS = ("o", "s", "^", "D", "v")
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


Panel = Callable[["Axes", Json, Axis], None]


def _draw(values: Json, panels: Sequence[Panel], path: Path) -> bool:
    if not panels:
        return False
    axis = axis_of(values["runs"])
    figure, axes = new_figure(len(panels), (5.2 * len(panels), 3.9))
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, values, axis)
        scale(ax, axis)
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
