"""The figures of a comparison as text: measures are rows, the base model and the runs are columns.

Comes in: the JSON value of a comparison. Goes out: rows, a table for the terminal, a page of Markdown for people who were not
there. Bounds are rounded up, measured figures to the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.card.claim import Json
from dpllm.statement import formatting

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100
"""Columns of a terminal that a table of up to five runs fits."""
BASE = "base model"
MEASURES: dict[str, tuple[str, int | None, float]] = {
    "loss": ("Held-out loss (nats per token)", 3, 1.0),
    "perplexity": ("Held-out perplexity", None, 1.0),
    "accuracy": ("Next token right (%)", 1, 100.0),
    "bleu": ("BLEU", 2, 1.0),
    "rouge_l": ("ROUGE-L (F1, %)", 1, 100.0),
}

SECTIONS = {"privacy": "Privacy", "utility": "Utility", "leakage": "Leakage", "cost": "Cost"}
PICTURES = {
    "utility.png": "Held-out loss against epsilon",
    "leakage.png": "Success of the attacks against epsilon",
    "comparison.png": "Utility and leakage of the compared runs",
}
PRIVATE = "Private: holds un-noised figures. Do not publish."
PUBLIC = "Public and released figures only."


@dataclass(frozen=True)
class Cell:
    """One figure, and in a few characters how sure it is or what it is out of."""

    value: str
    note: str = ""

    def line(self) -> str:
        """Both on one line."""
        return f"{self.value} ({self.note})" if self.note else self.value


@dataclass(frozen=True)
class Row:
    """One measure of the base model (the first cell) and of each run."""

    section: str
    measure: str
    cells: tuple[Cell, ...]


EMPTY = Cell("-")


def headings(values: Json) -> list[str]:
    """Of the columns: the base model, then each run with what it promises."""
    return [BASE, *(f"{run['name']}: {promise(run)}" for run in values["runs"])]


def promise(run: Json) -> str:
    """What a run promises, in two or three words."""
    privacy = run["privacy"]
    if not privacy["enabled"]:
        return "no DP"
    return f"epsilon {formatting.bound(privacy['epsilon'])}" if privacy["guarantee"] else "no guarantee"


def rows(values: Json) -> tuple[Row, ...]:
    """Every measure that at least one column has."""
    runs = values["runs"]
    found = [_privacy(runs), _ledger(runs)]
    found += [_utility(measure, values) for measure in MEASURES]
    found.append(_bound(runs))
    attacks = list(dict.fromkeys(name for run in runs for name in run["leakage"].get("attacks", {})))
    found += [_attack(name, runs) for name in attacks]
    found += [_tpr(PRIMARY_ATTACK, runs)] if PRIMARY_ATTACK in attacks else []
    groups = {group for run in runs for group in run["leakage"].get("exposure", {})}
    ordered = sorted(groups, key=int, reverse=True)
    found += [_exposure(group, runs) for group in ordered]
    found += [_extraction(group, runs) for group in ordered]
    found.append(_row("leakage", "The audit's verdict", EMPTY, runs, _verdict))
    found += _cost(runs)
    return tuple(row for row in found if any(cell != EMPTY for cell in row.cells))


def table(values: Json, caption: str) -> Table:
    """The rows as a table for the terminal: figures above, how sure they are below."""
    from rich import box
    from rich.table import Table

    shown = rows(values)
    made = Table(title="Runs side by side", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("", overflow="fold", max_width=22)
    for name in headings(values):
        made.add_column(name.replace(": ", "\n").replace("epsilon ", "eps "), justify="right", overflow="fold")
    section = ""
    for row in shown:
        if section and row.section != section:
            made.add_section()
        section = row.section
        cells = [f"{cell.value}\n{cell.note.replace(' to ', '-')}" if cell.note else cell.value for cell in row.cells]
        made.add_row(row.measure, *cells)
    return made


def _row(section: str, measure: str, base: Cell, runs: list[Json], show: Callable[[Json], Cell | None]) -> Row:
    return Row(section, measure, (base, *(show(run) or EMPTY for run in runs)))


def _privacy(runs: list[Json]) -> Row:
    deltas = list(dict.fromkeys(run["privacy"]["delta"] for run in runs if "epsilon" in run["privacy"]))
    one = len(deltas) == 1

    def show(run: Json) -> Cell:
        privacy = run["privacy"]
        if not privacy["guarantee"]:
            return Cell("no guarantee")
        note = "" if one else f"delta {formatting.number_text(privacy['delta'])}"
        return Cell(formatting.bound(privacy["epsilon"]), note)

    label = f"Epsilon at delta {formatting.number_text(deltas[0])}" if one else "Epsilon"
    return _row("privacy", label, EMPTY, runs, show)


def _ledger(runs: list[Json]) -> Row:
    def show(run: Json) -> Cell | None:
        ledger = run["privacy"].get("ledger")
        if not ledger or ledger["epsilon"] is None:
            return None
        budget = "no budget" if ledger["budget"] is None else f"of {formatting.number_text(ledger['budget'])}"
        return Cell(formatting.bound(ledger["epsilon"]), budget)

    return _row("privacy", "Ledger's total after it", EMPTY, runs, show)


def _utility(measure: str, values: Json) -> Row:
    label, decimals, factor = MEASURES[measure]

    def show(part: Json) -> Cell | None:
        found = part["utility"].get(measure)
        if found is None or found["value"] is None:
            return None
        limits = found["interval"]
        digits = _decimals(found["value"]) if decimals is None else decimals
        scaled = None if limits is None or None in limits else [factor * limit for limit in limits]
        note = formatting.interval(scaled, digits) if scaled else ""
        return Cell(formatting.measured(factor * found["value"], digits), note)

    return _row("utility", label, show(values["base"]) or EMPTY, values["runs"], show)


def _decimals(value: float) -> int:
    """For four significant digits, at most two decimals."""
    return 2 if value < 100 else 1 if value < 1000 else 0


def _bound(runs: list[Json]) -> Row:
    def show(run: Json) -> Cell | None:
        found = run["leakage"].get("epsilon_lower_bound")
        return found and Cell(formatting.measured(found["value"]), f"ceiling {formatting.measured(found['ceiling'])}")

    known = [run["leakage"]["epsilon_lower_bound"]["alpha"] for run in runs if run["leakage"]]
    sure = formatting.percent(1 - known[0]) if known else ""
    return _row("leakage", f"Epsilon lower bound ({sure} sure)", EMPTY, runs, show)


def _attack(name: str, runs: list[Json]) -> Row:
    def show(run: Json) -> Cell | None:
        seen = run["leakage"].get("attacks", {}).get(name)
        if seen is None:
            return None
        return Cell(
            formatting.measured(seen["auc"]), formatting.interval(seen["auc_interval"]) if seen["auc_interval"] else ""
        )

    return _row("leakage", f"AUC, {name} attack, {_copies(_group(name, runs))}", EMPTY, runs, show)


def _tpr(name: str, runs: list[Json]) -> Row:
    def show(run: Json) -> Cell | None:
        seen = run["leakage"].get("attacks", {}).get(name)
        if seen is None or seen["tpr_at_1_percent_fpr"] is None:
            return None
        limits = seen["tpr_at_1_percent_fpr_interval"]
        note = formatting.interval([100 * limit for limit in limits], 1) if limits else ""
        return Cell(formatting.measured(100 * seen["tpr_at_1_percent_fpr"], 1), note)

    return _row("leakage", f"TPR at 1% FPR (%), {name} attack", EMPTY, runs, show)


def _exposure(group: str, runs: list[Json]) -> Row:
    seen = [run["leakage"]["exposure"][group] for run in runs if group in run["leakage"].get("exposure", {})]
    bases = list(dict.fromkeys(formatting.measured(one["base_mean"]) for one in seen))
    null = formatting.measured(seen[0]["null_mean"])
    base = Cell(bases[0]) if len(bases) == 1 else EMPTY  # each run planted canaries of its own

    def show(run: Json) -> Cell | None:
        one = run["leakage"].get("exposure", {}).get(group)
        return one and Cell(formatting.measured(one["mean"]))

    return _row("leakage", f"Exposure in bits, {_copies(group)} (no memory: {null})", base, runs, show)


def _extraction(group: str, runs: list[Json]) -> Row:
    def show(run: Json) -> Cell | None:
        one = run["leakage"].get("extraction", {}).get(group)
        return one and Cell(f"{one['tuned']} of {one['inserted']}")

    seen = [run["leakage"]["extraction"][group] for run in runs if group in run["leakage"].get("extraction", {})]
    base = Cell("0") if seen and not any(one["base"] for one in seen) else EMPTY
    return _row("leakage", f"Canaries extracted, {_copies(group)}", base, runs, show)


def _verdict(run: Json) -> Cell | None:
    return Cell(run["leakage"]["verdict"].replace("_", " ")) if run["leakage"] else None


def _cost(runs: list[Json]) -> list[Row]:
    def row(label: str, key: str, show: Callable[[Any], str]) -> Row:
        def cell(run: Json) -> Cell | None:
            value = run["cost"][key]
            return None if value is None else Cell(show(value))

        return _row("cost", label, EMPTY, runs, cell)

    return [
        row("Seconds in all", "seconds", lambda value: formatting.measured(value, 1)),
        row("Steps", "steps", formatting.count),
        row("Seconds per step, all included", "seconds_per_step", lambda value: formatting.measured(value, 3)),
        row("Peak memory (GiB)", "peak_memory_bytes", lambda value: formatting.measured(value / 2**30)),
    ]


def _group(name: str, runs: list[Json]) -> str:
    known = [run["leakage"]["attacks"][name] for run in runs if name in run["leakage"].get("attacks", {})]
    return str(known[0]["group"])


def _copies(group: str) -> str:
    return "1 copy" if group == "1" else f"{group} copies"


def caption(values: Json) -> list[str]:
    """What must be said beside the table, in sentences."""
    lines = [PUBLIC if values["public"] else PRIVATE]
    for run in values["runs"]:
        privacy = run["privacy"]
        if privacy["enabled"] and not privacy["guarantee"]:
            lines.append(f"{run['name']} gives no guarantee: {str(privacy['reason']).rstrip('. ')}.")
        if run["status"] != "completed":
            lines.append(f"{run['name']} is {run['status']}.")
    return lines


def markdown(values: Json, pictures: Sequence[str]) -> str:
    """The page."""
    lines = ["# Runs side by side", "", " ".join(caption(values)), ""]
    shown = rows(values)
    for section, title in SECTIONS.items():
        part = [row for row in shown if row.section == section]
        if part:
            lines += [f"## {title}", "", *_as_table(headings(values), part), ""]
        if section == "privacy":
            lines += _together(values)
        if section == "utility" and part:
            lines += [*_picture("utility.png", pictures), _intervals(values), ""]
        if section == "leakage" and part:
            lines += _picture("leakage.png", pictures)
    lines += _picture("comparison.png", pictures)
    if values["left_out"]:
        lines += [
            "## Left out",
            "",
            "These may not be published:",
            "",
            *(f"- {line}" for line in values["left_out"]),
            "",
        ]
    if values["differences"]:
        names = [run["name"] for run in values["runs"]]
        lines += ["## Settings that differ", "", _line(["key", *names]), "|---|" + "---|" * len(names)]
        lines += [_line([key, *(row[name] for name in names)]) for key, row in values["differences"].items()]
        lines += [""]
    if values["public"]:
        lines += ["Times are measured and carry no noise: a side channel that no guarantee here covers.", ""]
    return "\n".join(lines)


def _together(values: Json) -> list[str]:
    found = values["together"]
    if found is None:
        return []
    stated = f"epsilon {formatting.bound(found['epsilon'])} at delta {formatting.number_text(found['delta'])}"
    line = f"The {found['runs']} runs with a guarantee come to {stated} together"
    line += (
        ", fixed before the first of them as one tuning group. "
        if found["fixed_together"]
        else ", if they were fixed before the first of them; the ledger says what holds otherwise. "
    )
    return [line + "A page with figures of several models tells of all of them.", ""]


def _intervals(values: Json) -> str:
    sure = formatting.percent(values["confidence"])
    measures = [one for part in (values["base"], *values["runs"]) for one in part["utility"].values()]
    if not any(one["interval"] for one in measures):
        return (
            "No intervals: the losses of single evaluation examples were not computed (dpllm compare does, unless told "
            "--no-intervals)."
        )
    return (
        f"In brackets: {sure} intervals, by drawing the evaluation examples anew. They do not cover the randomness of training: "
        "another run of the same recipe may lie outside. Below some fifty examples they are too narrow."
    )


def _picture(name: str, pictures: Sequence[str]) -> list[str]:
    return [f"![{PICTURES[name]}]({name})", ""] if name in pictures else []


def _as_table(headings: Sequence[str], part: Sequence[Row]) -> list[str]:
    lines = [_line(["", *headings]), "|---|" + "---:|" * len(headings)]
    return lines + [_line([row.measure, *(cell.line() for cell in row.cells)]) for row in part]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(formatting.cell(cell) for cell in cells) + " |"
