"""The pictures of a comparison: utility and leakage against epsilon, and of a run with and one without privacy, bars.

Comes in: the JSON value of a comparison. Goes out: PNG files. Runs with a guarantee stand at their epsilon; runs without stand at
the right end, beyond a break of the axis, because no epsilon is theirs. Must not read any file or decide what is compared.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.card.claim import Json
from dpllm.comparison.rows import copies, promise
from dpllm.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any kind of colour vision tell apart; the lightness differs too.
COLOURS = {"base": "#777777", "baseline": "#D55E00", "dp": "#0072B2"}
INK = "#222222"
FRAME = "#999999"
# Of the groups of canaries, from the fewest copies to the most: lightness orders them, markers tell them apart in print.
SHADES = ("#56B4E9", "#0072B2", "#CC79A7", "#D55E00", "#222222")
MARKERS = ("o", "s", "^", "D", "v")
GAP = 0.3  # decades between the largest epsilon and the runs without, and between neighbours there
DODGE = 0.03  # of the axis, between runs above one tick
UTILITY = {
    "loss": ("Held-out loss", "nats per target token", "{:.2f}", 1.0),
    "bleu": ("BLEU", "", "{:.1f}", 1.0),
    "rouge_l": ("ROUGE-L", "%", "{:.1f}", 100.0),
}
BARS = {"base": "base model", "baseline": "without DP", "dp": "with DP"}
BAR = 0.38


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


Panel = Callable[["Axes", Json, Axis], None]


def draw(values: Json, folder: Path) -> list[str]:
    """Draws what there is to draw; returns the names of the files."""
    runs = values["runs"]
    utility = [_utility(measure) for measure in UTILITY if any(measure in run["utility"] for run in runs)]
    leakage = [_auc, _extraction] if any(run["leakage"] for run in runs) else []
    loss = utility[:1] if any("loss" in run["utility"] for run in runs) else []
    pictures = {
        "comparison.png": _against_epsilon(values, [*loss, *leakage]),
        "utility.png": _against_epsilon(values, utility),
        "leakage.png": _against_epsilon(values, leakage),
    }
    if sorted(run["privacy"]["enabled"] for run in runs) == [False, True]:
        pictures["comparison.png"] = _bars(values)
    for name, figure in pictures.items():
        if figure is not None:
            content = io.BytesIO()
            figure.savefig(content, format="png", edgecolor=figure.get_edgecolor(), metadata={"Software": None})
            write_whole(folder / name, content.getvalue())
    return [name for name, figure in pictures.items() if figure is not None]


def _new_figure(panels: int, width: float) -> tuple[Figure, Any]:
    """Panels side by side, each so many inches wide; a white ground with a frame reads on light and dark pages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.06)
    size = (width * panels, 3.9)
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white", edgecolor=FRAME, linewidth=1.5)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _style(ax: Axes, title: str, unit: str) -> None:
    ax.set_facecolor("white")
    ax.set_title(title, fontsize=11, loc="left", color=INK)
    ax.set_ylabel(unit, fontsize=9, color=INK)
    ax.tick_params(labelsize=9, colors=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e5e5e5", linewidth=0.8)


# --- against epsilon -------------------------------------------------------------------------------------------------


def _against_epsilon(values: Json, panels: Sequence[Panel]) -> Figure | None:
    if not panels:
        return None
    axis = axis_of(values["runs"])
    figure, axes = _new_figure(len(panels), 5.2)
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, values, axis)
        _scale(ax, axis)
    return figure


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


def _utility(measure: str) -> Panel:
    title, unit, form, factor = UTILITY[measure]

    def panel(ax: Axes, values: Json, axis: Axis) -> None:
        _style(ax, title, unit)
        found = [run["utility"].get(measure, {}) for run in values["runs"]]
        _points(ax, _marks(values, axis, [(one.get("value"), one.get("interval")) for one in found], factor), form)
        base = values["base"]["utility"].get(measure, {}).get("value")
        if base is not None:
            _line(ax, factor * base, f"base model\n{form.format(factor * base)}")

    return panel


def _auc(ax: Axes, values: Json, axis: Axis) -> None:
    attacks = [run["leakage"].get("attacks", {}).get(PRIMARY_ATTACK, {}) for run in values["runs"]]
    group = next((attack["group"] for attack in attacks if attack), 1)
    _style(ax, f"Membership inference, canaries planted {'once' if group == 1 else f'{group} times'}", "AUC")
    found = [(attack.get("auc"), attack.get("auc_interval")) for attack in attacks]
    _points(ax, _marks(values, axis, found), "{:.2f}")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.4), min(1.04, max(high, 0.7)))
    _line(ax, 0.5, "guessing")


def _extraction(ax: Axes, values: Json, axis: Axis) -> None:
    from matplotlib.ticker import PercentFormatter

    _style(ax, "Canaries extracted", "share of those planted")
    groups = sorted({group for run in values["runs"] for group in run["leakage"].get("extraction", {})}, key=int)
    ends: list[tuple[float, str, str]] = []
    highest = 0.25
    for index, group in enumerate(groups):
        got = [run["leakage"].get("extraction", {}).get(group, {}) for run in values["runs"]]
        shift = 0.025 * (max(axis.places) - min(axis.places)) * (index - (len(groups) - 1) / 2)
        marks = _marks(values, axis, [(one.get("share"), one.get("interval")) for one in got], shift=shift)
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
    values: Json, axis: Axis, found: Sequence[tuple[Any, Any]], factor: float = 1.0, shift: float = 0.0
) -> list[Mark]:
    """The points of the runs whose value is known; of each a value and its interval were found."""
    marks = []
    for run, place, tick, (value, limits) in zip(values["runs"], axis.places, axis.above, found, strict=True):
        if value is not None:
            known = limits is not None and None not in limits
            interval = (factor * limits[0], factor * limits[1]) if known else None
            marks.append(Mark(place + shift, tick + shift, factor * value, interval, run["privacy"]["guarantee"]))
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


# --- a run with and one without --------------------------------------------------------------------------------------


def _bars(values: Json) -> Figure | None:
    """Loss, exposure and extraction of two runs."""
    runs = {"dp" if run["privacy"]["enabled"] else "baseline": run for run in values["runs"]}
    seen = {side: runs[side]["leakage"] for side in ("baseline", "dp") if runs[side]["leakage"]}
    groups = sorted({group for leakage in seen.values() for group in leakage["exposure"]}, key=int)
    parts = {"base": values["base"], "baseline": runs["baseline"], "dp": runs["dp"]}
    loss = {side: part["utility"]["loss"]["value"] for side, part in parts.items() if "loss" in part["utility"]}
    if not loss and not groups:
        return None
    width = max(4.2, 0.8 + 1.3 * len(groups))  # inches: the counts above neighbouring bars must not touch
    figure, axes = _new_figure(3 if groups else 1, width)
    _loss_bars(axes[0], loss)
    if groups:
        _exposure_bars(axes[1], seen, groups)
        _extraction_bars(axes[2], seen, groups)
        handles = [*axes[1].containers, *axes[1].get_lines()]
        labels = [BARS[side] if side == "baseline" else f"{BARS[side]}: {promise(runs['dp'])}" for side in seen]
        labels.append("a model with no memory of the canaries")
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _loss_bars(ax: Axes, loss: dict[str, float]) -> None:
    _style(ax, "Held-out loss", "nats per target token")
    bars = ax.bar([BARS[side] for side in loss], list(loss.values()), 0.6, color=[COLOURS[side] for side in loss])
    ax.bar_label(bars, fmt="%.2f", fontsize=9, padding=2, color=INK)
    ax.margins(y=0.15)
    if not loss:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.text(0.5, 0.5, "not measured, or not to be shown", ha="center", transform=ax.transAxes, color=INK)


def _exposure_bars(ax: Axes, seen: dict[str, Json], groups: list[str]) -> None:
    _style(ax, "Canary exposure", "mean bits")
    means = {  # None: all coins said out
        side: [leakage["exposure"].get(group, {}).get("mean") for group in groups] for side, leakage in seen.items()
    }
    heights = {side: [mean or 0.0 for mean in row] for side, row in means.items()}
    labels = {side: ["none" if mean is None else f"{mean:.1f}" for mean in row] for side, row in means.items()}
    patch = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line must not cross a number
    _grouped_bars(ax, heights, labels, groups, fontsize=9, padding=3, bbox=patch)
    null = next(leakage["exposure"][groups[0]]["null_mean"] for leakage in seen.values())
    ax.axhline(null, color=INK, linestyle="--", linewidth=1.2, zorder=2)
    ax.margins(y=0.15)


def _extraction_bars(ax: Axes, seen: dict[str, Json], groups: list[str]) -> None:
    _style(ax, "Canaries extracted", "share of those planted")
    none = {"tuned": 0, "inserted": 0}
    found = {side: [leakage["extraction"].get(group, none) for group in groups] for side, leakage in seen.items()}
    heights = {side: [got["tuned"] / max(1, got["inserted"]) for got in row] for side, row in found.items()}
    labels = {side: [f"{got['tuned']}/{got['inserted']}" for got in row] for side, row in found.items()}
    _grouped_bars(ax, heights, labels, groups, fontsize=8, padding=2)
    ax.set_ylim(0, 1.12)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])


def _grouped_bars(
    ax: Axes, heights: dict[str, list[float]], labels: dict[str, list[str]], groups: list[str], **text: Any
) -> None:
    shifts = {"baseline": -BAR / 2, "dp": BAR / 2} if len(heights) > 1 else dict.fromkeys(heights, 0.0)
    for side, row in heights.items():
        bars = ax.bar([place + shifts[side] for place in range(len(groups))], row, BAR, color=COLOURS[side])
        ax.bar_label(bars, labels[side], color=INK, **text)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlabel("copies of each canary", fontsize=9, color=INK)
