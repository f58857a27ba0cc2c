"""The axis of epsilon: where each run stands, and the break before the runs that have none.

Comes in: the runs of a comparison. Goes out: places in decades, ticks. Knows no measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpllm.canvas import INK
from dpllm.report.claim import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAP = 0.3  # decades between the largest epsilon and the runs without, and between neighbours there
DODGE = 0.03  # of the axis, between runs above one tick


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


def scale(ax: Axes, axis: Axis) -> None:
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
