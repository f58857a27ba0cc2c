"""What pictures share: a white ground with a frame, so that they read on light and dark pages, quiet axes, one way to save.

Comes in: sizes and axes. Goes out: figures and files. Knows no figure of any run.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any kind of colour vision tell apart; the lightness differs too.
COLOURS = {"base": "#777777", "baseline": "#D55E00", "dp": "#0072B2"}
INK = "#222222"
FRAME = "#999999"


def new_figure(panels: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure of some panels side by side; ``size`` in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.06)
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white", edgecolor=FRAME, linewidth=1.5)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def style(ax: Axes, title: str, unit: str) -> None:
    """Title on the left, unit at the axis, quiet lines behind the figures."""
    ax.set_facecolor("white")
    ax.set_title(title, fontsize=11, loc="left", color=INK)
    ax.set_ylabel(unit, fontsize=9, color=INK)
    ax.tick_params(labelsize=9, colors=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e5e5e5", linewidth=0.8)


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png", edgecolor=figure.get_edgecolor(), metadata={"Software": None})
    write_whole(path, content.getvalue())
