"""Shows a comparison: a table for the terminal and for a page, and a picture of the loss over epsilon.

Comes in: the figures of a comparison, as comparison.json holds them. Goes out: text and a PNG file. Bounds are rounded up,
measured figures to the nearest. A run without a guarantee has no epsilon: its loss is a horizontal line.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.files import write_whole
from dpllm.records import Json
from dpllm.statement.formatting import bound, cell, count, estimate, measured, number_text, percent, proven

if TYPE_CHECKING:
    from rich.table import Table

EMPTY = "-"
DP, NONE, BASE, INK = "#0072B2", "#D55E00", "#777777", "#222222"
"""Colours of Okabe and Ito's palette, which people with any kind of colour vision can tell apart."""


def promise(run: Mapping[str, Any]) -> str:
    """The epsilon of a run, or the reason why it has none, in one or two words."""
    if run["epsilon"] is not None:
        return bound(run["epsilon"])
    return "no guarantee" if run["private"] else "no DP"


def _estimate(value: float, limits: list[float] | None, decimals: int = 2) -> str:
    return estimate(value, limits, decimals) if limits else measured(value, decimals)


MEASURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "private": ("Epsilon", promise),  # a key of every run, and not of the base model
    "delta": ("Delta", lambda run: number_text(run["delta"])),
    "loss": ("Held-out loss (nats per token)", lambda run: measured(run["loss"], 3)),
    "perplexity": ("Held-out perplexity", lambda run: measured(run["perplexity"])),
    "accuracy": ("Next token right (%)", lambda run: measured(100 * run["accuracy"], 1)),
    "reward_accuracy": ("Chosen answer rewarded more (%)", lambda run: measured(100 * run["reward_accuracy"], 1)),
    "reward_margin": ("Margin of rewards", lambda run: measured(run["reward_margin"], 3)),
    "bleu": ("BLEU", lambda run: _estimate(run["bleu"]["value"], run["bleu"]["interval"], 1)),
    "verdict": ("The audit's verdict", lambda run: run["verdict"].replace("_", " ")),
    "epsilon_lower_bound": (
        "Epsilon lower bound",
        lambda run: f"{proven(run['epsilon_lower_bound'])} (of {measured(run['epsilon_lower_bound_ceiling'])})",
    ),
    "auc": ("AUC of its attack", lambda run: _estimate(run["auc"], run["auc_interval"])),
    "canaries_planted": ("Canaries extracted", lambda run: f"{run['canaries_extracted']} of {run['canaries_planted']}"),
    "steps": ("Steps", lambda run: count(run["steps"])),
    "seconds": ("Seconds in all", lambda run: measured(run["seconds"], 1)),
    "peak_memory_bytes": ("Peak memory (GiB)", lambda run: measured(run["peak_memory_bytes"] / 2**30)),
}
"""Key of a figure -> its label, and a function that formats it."""


def rows(values: Json) -> dict[str, list[str]]:
    """Label -> cells, for every measure of at least one column. The columns are the base model and the runs."""
    columns = [values["base"], *values["runs"]]
    rows = {
        label: [show(column) if column.get(key) is not None else EMPTY for column in columns]
        for key, (label, show) in MEASURES.items()
    }
    return {label: cells for label, cells in rows.items() if set(cells) != {EMPTY}}


def notes(values: Json) -> list[str]:
    """The sentences below the table."""
    private = "Private: holds un-noised figures. Do not publish."
    lines = ["Public and released figures only." if values["public"] else private]
    for run in values["runs"]:
        if run["private"] and run["no_guarantee"]:
            lines.append(f"{run['name']} gives no guarantee: {run['no_guarantee'].rstrip('. ')}.")
        if run["status"] != "completed":
            lines.append(f"{run['name']} is {run['status']}.")
    if group := values["group"]:
        stated = f"epsilon {bound(group['epsilon'])} at delta {number_text(group['delta'])}"
        lines.append(f"The {group['runs']} runs of tuning group {group['name']} come to {stated} together.")
    elif sum(run["epsilon"] is not None for run in values["runs"]) > 1:
        lines.append("Runs on the same people add up: dpllm ledger show has their total.")
    bounded = [run for run in values["runs"] if run.get("epsilon_lower_bound") is not None]
    if bounded:
        sure = sorted({percent(run["epsilon_lower_bound_confidence"]) for run in bounded})
        lines.append(
            f"Lower bounds hold with {' or '.join(sure)} confidence; in brackets, the most that such an audit can show."
        )
    if scored := values["scored"]:
        lines.append(
            f"BLEU as in the E2E challenge, without regard to case: {count(scored['prompts'])} prompts, "
            f"each with all its references ({count(scored['references'])} in all); a beam search of "
            f"{scored['protocol']['beams']} for at most {scored['num_tokens']} tokens."
        )
    return lines


def table(values: Json) -> Table:
    """The table for the terminal, with intervals below the figures; five runs fit into 100 characters."""
    from rich import box
    from rich.table import Table

    caption = " ".join(notes(values))
    grid = Table(title="Runs side by side", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("", overflow="fold", max_width=22)
    for name in ("base model", *(run["name"] for run in values["runs"])):
        grid.add_column(name, justify="right", overflow="fold")
    for label, cells in rows(values).items():
        grid.add_row(label, *(text.replace(" (", "\n(").replace(" to ", "-") for text in cells))
    return grid


def page(values: Json, picture: bool) -> str:
    """The table and its notes as a page of Markdown."""
    columns = ["base model", *(run["name"] for run in values["runs"])]
    lines = ["# Runs side by side", "", *notes(values), "", _line(["", *columns]), "|---|" + "---:|" * len(columns)]
    lines += [*(_line([label, *cells]) for label, cells in rows(values).items()), ""]
    if picture:
        lines += ["![Held-out loss over epsilon](comparison.png)", ""]
    if values["left_out"]:
        lines += ["## Left out", "", "These may not be published:", "", *(f"- {line}" for line in values["left_out"])]
        lines += [""]
    if values["differences"]:
        lines += ["## Settings that differ", "", _line(["key", *columns[1:]]), "|---|" + "---|" * len(values["runs"])]
        lines += [*(_line([key, *settings]) for key, settings in values["differences"].items()), ""]
    if values["public"]:
        lines += ["Times are measured and carry no noise: a side channel that no guarantee here covers.", ""]
    return "\n".join(lines)


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def draw(values: Json, path: Path) -> bool:
    """Draws the held-out loss over epsilon, on white for light and dark pages. Returns False if no run has both figures."""
    runs = [run for run in values["runs"] if "loss" in run]
    points = sorted((run["epsilon"], run["loss"]) for run in runs if run["epsilon"] is not None)
    if not points:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(picture)
    ax = picture.subplots()
    epsilons = sorted({epsilon for epsilon, _ in points})
    of_each = [[loss for epsilon, loss in points if epsilon == at] for at in epsilons]
    ax.plot(epsilons, [sum(losses) / len(losses) for losses in of_each], color=DP, linewidth=1.2, alpha=0.5)
    ax.plot(*zip(*points, strict=True), "o", color=DP)
    for epsilon, loss in points:
        ax.annotate(f"{loss:.2f}", (epsilon, loss), (0, 7), textcoords="offset points", ha="center", color=INK)
    across = {"base model": values["base"].get("loss")}
    for run in runs:
        if run["epsilon"] is None:
            across[f"{run['name']}: no guarantee" if run["private"] else "no DP"] = run["loss"]
    for name, loss in across.items():
        if loss is not None:
            ax.axhline(loss, color=BASE if name == "base model" else NONE, linestyle="--")
            ax.text(1.01, loss, f"{name}\n{loss:.2f}", transform=ax.get_yaxis_transform(), va="center", color=INK)
    ax.set_xscale("log")
    ax.set_xticks(epsilons, [bound(epsilon, 3) for epsilon in epsilons])
    ax.minorticks_off()
    ax.margins(0.12)
    ax.set_xlabel("epsilon (logarithmic)")
    ax.set_ylabel("held-out loss, nats per target token")
    ax.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    picture.savefig(content, format="png", metadata={"Software": None})
    write_whole(path, content.getvalue())
    return True
