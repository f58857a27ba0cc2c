"""The pictures of planning: a sweep, and four ways of composition.

Comes in: points of a sweep, or a comparison. Goes out: a PNG file on an opaque white ground, so that it reads on light and dark
pages alike. Must not read any file or compute any cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.canvas import INK, new_figure, save, style
from dpllm.errors import ConfigError
from dpllm.planning.composition import Comparison
from dpllm.planning.sweep import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any kind of colour vision tell apart, without its yellow, which white hides.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HIGHEST = 1e5  # times the stated epsilon: curves leave the picture above that


def draw_sweep(keys: Sequence[str], points: Sequence[Point], path: Path) -> None:
    """Draws noise, or epsilon where the noise was given, and noise per unit of signal over the last key.

    Args:
        keys: The swept keys, in the order of each point's values.
        points: Of a sweep; those without figures are left out.
        path: PNG file to write.
    """
    figure, (left, right) = new_figure(2, (9.0, 4.0))
    points = [replace(point, values=tuple(map(_one_value, point.values))) for point in points]
    shown = [point for point in points if point.noise_multiplier is not None and point.epsilon is not None]
    values = list(dict.fromkeys(point.values[-1] for point in points))
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values)
    places = {value: value if numeric else place for place, value in enumerate(values)}
    groups = list(dict.fromkeys(point.values[:-1] for point in shown))
    given = len({point.noise_multiplier for point in shown}) == 1 < len({point.epsilon for point in shown})
    for index, group in enumerate(groups):
        mine = [point for point in shown if point.values[:-1] == group]
        at = [places[point.values[-1]] for point in mine]
        label = ", ".join(f"{key} {value}" for key, value in zip(keys[:-1], group, strict=True))
        line = _line(index) | {"label": label} | ({} if numeric else {"linestyle": "none"})
        left.plot(at, [point.epsilon if given else point.noise_multiplier for point in mine], **line)
        right.plot(at, [point.noise_per_signal for point in mine], **line)
    if given:
        style(left, "Epsilon at the recipe's delta", "epsilon (no unit)")
    else:
        style(left, "Noise multiplier", "sigma (noise over C)")
    style(right, "Noise per unit of signal", "sigma / (B sqrt T)")
    _log_scale(right, [point.noise_per_signal or 1.0 for point in shown])
    for ax in (left, right):
        _ticks(ax, places, numeric)
        ax.set_xlabel(f"{keys[-1]}{_unit(keys[-1])}", fontsize=9, color=INK)
    if len(keys) > 1:
        columns = min(len(groups), 4)
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
    _save(figure, path)


def draw_comparison(comparison: Comparison, delta: float, described: str, path: Path) -> None:
    """Draws epsilon over steps by naive and strong composition, RDP and PLD.

    Args:
        comparison: The curves.
        delta: At which they are given.
        described: The mechanism in a few words.
        path: PNG file to write.
    """
    figure, (ax,) = new_figure(1, (7.2, 4.0))
    curves: dict[str, Sequence[float] | None] = {
        "naive composition": comparison.naive,
        "strong composition (2010)": comparison.strong,
        "RDP, the moments accountant": comparison.rdp,
        "PLD, which dpllm states": comparison.pld,
    }
    ends: list[tuple[float, str, str]] = []
    for index, (name, values) in enumerate(curves.items()):
        if values is None:
            continue
        colour = COLOURS[(1, 2, 3, 0)[index]]
        width = 2.4 if name.startswith("PLD") else 1.8
        ax.plot(
            comparison.num_steps,
            values,
            color=colour,
            linewidth=width,
            linestyle=("-.", ":", "--", "-")[index],
            label=name,
        )
        last = values[-1]
        ends.append((last, _written(last), colour))
    style(ax, f"Epsilon by four ways of composition: {described}", f"epsilon at delta {delta:g}")
    ax.set_xlabel("steps T", fontsize=9, color=INK)
    if comparison.num_steps[-1] > 1:
        _log_scale(ax, comparison.num_steps, axis="x")
    finite = [value for values in curves.values() if values for value in values if 0 < value < float("inf")]
    if finite and max(finite) > 20 * min(finite):
        _log_scale(ax, finite)
        ax.set_ylim(top=min(ax.get_ylim()[1], HIGHEST * comparison.pld[-1]))
    _label_ends(ax, comparison.num_steps[-1], ends)
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    _save(figure, path)


def _label_ends(ax: Axes, at: int, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes each curve's last value to its right; labels that would touch are moved apart."""
    low, high = ax.get_ylim()
    transform = ax.transData + ax.transAxes.inverted()
    heights = [float(transform.transform((at, min(max(value, low), high)))[1]) for value, _, _ in ends]
    place = -1.0
    for index in sorted(range(len(ends)), key=heights.__getitem__):
        place = max(heights[index], place + 0.05)
        ax.text(1.01, place, ends[index][1], transform=ax.transAxes, color=ends[index][2], fontsize=9, va="center")


def _written(value: float) -> str:
    if value < 100:
        return f"{value:#.3g}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _one_value(value: Any) -> Any:
    """A list or a mapping is one value on an axis."""
    return value if isinstance(value, (int, float, str)) else str(value)


def _line(index: int) -> dict[str, Any]:
    count = len(COLOURS)
    return {
        "color": COLOURS[index % count],
        "marker": MARKERS[index % count],
        "linestyle": ("-", "--", ":", "-.")[index // count % 4],
        "markersize": 5,
        "linewidth": 1.6,
    }


def _ticks(ax: Axes, places: dict[Any, Any], numeric: bool) -> None:
    from matplotlib.ticker import NullLocator

    if numeric and len(places) > 1 and max(places.values()) >= 4 * min(places.values()):
        ax.set_xscale("log")
    ax.set_xticks(list(places.values()), [str(value) for value in places])
    ax.xaxis.set_minor_locator(NullLocator())


def _log_scale(ax: Axes, values: Sequence[float], axis: str = "y") -> None:
    """A logarithmic axis with numbers written out, at 1, 2 and 5 where few powers of ten are in sight."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    few = bool(values) and max(values) < 200 * min(values)
    if axis == "x":
        ax.set_xscale("log")
    else:
        ax.set_yscale("log")
    scale = ax.xaxis if axis == "x" else ax.yaxis
    scale.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 1e7 else f"{value:.0e}"))
    scale.set_minor_formatter(NullFormatter())


def _unit(key: str) -> str:
    names = {
        "train.batch_size": " (units)",
        "train.physical_batch_size": " (sequences)",
        "train.steps": " (steps)",
        "train.epochs": " (passes over the data)",
    }
    return names.get(key, "")


def _save(figure: Figure, path: Path) -> None:
    try:
        save(figure, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: no picture can be written there ({error.strerror}). Type another --figure."
        ) from None
