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
from dpllm.statement.formatting import bound, cell, count, interval, measured, number_text, percent

if TYPE_CHECKING:
    from rich.table import Table

# Label, decimals (None: four significant digits, at most two decimals) and factor.
UTILITY: dict[str, tuple[str, int | None, float]] = {
    "loss": ("Held-out loss (nats per token)", 3, 1.0),
    "perplexity": ("Held-out perplexity", None, 1.0),
    "accuracy": ("Next token right (%)", 1, 100.0),
    "bleu": ("BLEU", 2, 1.0),
    "nist": ("NIST", 2, 1.0),
    "rouge_l": ("ROUGE-L (%)", 1, 100.0),
    "cider": ("CIDEr", 2, 1.0),
}
SECTIONS = {"privacy": "Privacy", "utility": "Utility", "leakage": "Leakage", "cost": "Cost"}
PICTURES = {
    "utility.png": "Held-out loss against epsilon",
    "leakage.png": "Success of the attacks against epsilon",
    "comparison.png": "Utility and leakage of the compared runs",
}


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
COST: dict[str, tuple[str, Callable[[Any], Cell]]] = {
    "seconds": ("Seconds in all", lambda value: Cell(measured(value, 1))),
    "steps": ("Steps", lambda value: Cell(count(value))),
    "seconds_per_step": ("Seconds per step, all included", lambda value: Cell(measured(value, 3))),
    "peak_memory_bytes": ("Peak memory (GiB)", lambda value: Cell(measured(value / 2**30))),
}


def headings(values: Json) -> list[str]:
    """Of the columns: the base model, then each run with what it promises."""
    return ["base model", *(f"{run['name']}: {promise(run)}" for run in values["runs"])]


def promise(run: Json) -> str:
    """What a run promises, in two or three words."""
    privacy = run["privacy"]
    if not privacy["enabled"]:
        return "no DP"
    return f"epsilon {bound(privacy['epsilon'])}" if privacy["guarantee"] else "no guarantee"


def copies(group: str) -> str:
    """A group of canaries in words."""
    return "1 copy" if group == "1" else f"{group} copies"


def rows(values: Json) -> tuple[Row, ...]:
    """Every measure that at least one column has."""
    runs = values["runs"]
    found = [*_privacy(runs), *_utility(values), *_leakage([run["leakage"] for run in runs])]
    found += [_row("cost", label, [run["cost"][key] for run in runs], show) for key, (label, show) in COST.items()]
    return tuple(row for row in found if set(row.cells) != {EMPTY})


def _row(section: str, measure: str, parts: Sequence[Any], show: Callable[[Any], Cell], base: Cell = EMPTY) -> Row:
    """What each run has of it is shown; None: nothing."""
    return Row(section, measure, (base, *(EMPTY if part is None else show(part) for part in parts)))


def _privacy(runs: list[Json]) -> list[Row]:
    terms = [run["privacy"] for run in runs]
    deltas = list(dict.fromkeys(one["delta"] for one in terms if "epsilon" in one))
    one_delta = len(deltas) == 1

    def epsilon(one: Json) -> Cell:
        if not one["guarantee"]:
            return Cell("no guarantee")
        return Cell(bound(one["epsilon"]), "" if one_delta else f"delta {number_text(one['delta'])}")

    def total(ledger: Json) -> Cell:
        budget = "no budget" if ledger["budget"] is None else f"of {number_text(ledger['budget'])}"
        return Cell(bound(ledger["epsilon"]), budget)

    label = f"Epsilon at delta {number_text(deltas[0])}" if one_delta else "Epsilon"
    ledgers = [one.get("ledger") for one in terms]
    known = [ledger if ledger and ledger["epsilon"] is not None else None for ledger in ledgers]
    return [_row("privacy", label, terms, epsilon), _row("privacy", "Ledger's total after it", known, total)]


def _utility(values: Json) -> list[Row]:
    found = []
    for measure, (label, decimals, factor) in UTILITY.items():

        def show(one: Json | None, decimals: int | None = decimals, factor: float = factor) -> Cell:
            if one is None or one["value"] is None:
                return EMPTY
            value, limits = one["value"], one["interval"]
            digits = (2 if value < 100 else 1 if value < 1000 else 0) if decimals is None else decimals
            known = limits is not None and None not in limits
            note = interval([factor * limit for limit in limits], digits) if known else ""
            return Cell(measured(factor * value, digits), note)

        base, *runs = (part["utility"].get(measure) for part in (values["base"], *values["runs"]))
        found.append(_row("utility", label, runs, show, show(base)))
    return found


def _leakage(audits: list[Json]) -> list[Row]:
    """The rows of the audits, one for each run and empty where there is none."""
    attacks, exposure, extraction = (
        [audit.get(part, {}) for audit in audits] for part in ("attacks", "exposure", "extraction")
    )
    bounds = [audit.get("epsilon_lower_bound") for audit in audits]
    sure = {f"{percent(1 - one['alpha'])} sure" for one in bounds if one}

    def bounded(one: Json) -> Cell:
        note = f"ceiling {measured(one['ceiling'])}"
        return Cell(measured(one["value"]), note if len(sure) == 1 else f"{percent(1 - one['alpha'])} sure, {note}")

    label = "Epsilon lower bound" + (f" ({min(sure)})" if len(sure) == 1 else "")
    found = [_row("leakage", label, bounds, bounded)]
    for name in dict.fromkeys(name for one in attacks for name in one):
        seen = [one.get(name) for one in attacks]
        group = next(one["group"] for one in seen if one)
        found.append(_row("leakage", f"AUC, {name} attack, {copies(str(group))}", seen, _auc))
    primary = [one.get(PRIMARY_ATTACK) for one in attacks]
    found.append(_row("leakage", f"TPR at 1% FPR (%), {PRIMARY_ATTACK} attack", primary, _tpr))
    groups = sorted({group for one in exposure for group in one}, key=int, reverse=True)
    found += [_exposure(group, [one.get(group) for one in exposure]) for group in groups]
    found += [_extraction(group, [one.get(group) for one in extraction]) for group in groups]
    verdicts = [audit.get("verdict") for audit in audits]
    return [*found, _row("leakage", "The audit's verdict", verdicts, lambda verdict: Cell(verdict.replace("_", " ")))]


def _auc(one: Json) -> Cell:
    return Cell(measured(one["auc"]), interval(one["auc_interval"]) if one["auc_interval"] else "")


def _tpr(one: Json) -> Cell:
    rate, limits = one["tpr_at_1_percent_fpr"], one["tpr_at_1_percent_fpr_interval"]
    if rate is None:
        return EMPTY
    return Cell(measured(100 * rate, 1), interval([100 * limit for limit in limits], 1) if limits else "")


def _exposure(group: str, seen: list[Json | None]) -> Row:
    known = [one for one in seen if one]
    label = f"Exposure in bits, {copies(group)} (no memory: {measured(known[0]['null_mean'])})"
    bases = {measured(one["base_mean"]) for one in known}
    base = Cell(*bases) if len(bases) == 1 else EMPTY  # each run planted canaries of its own
    return _row("leakage", label, seen, lambda one: Cell(measured(one["mean"])), base)


def _extraction(group: str, seen: list[Json | None]) -> Row:
    known = [one for one in seen if one]
    base = Cell("0") if known and not any(one["base"] for one in known) else EMPTY
    label = f"Canaries extracted, {copies(group)}"
    return _row("leakage", label, seen, lambda one: Cell(f"{one['tuned']} of {one['inserted']}"), base)


def table(values: Json, shown: Sequence[Row]) -> Table:
    """The rows as a table for the terminal, up to five runs in 100 columns: figures above, how sure they are below."""
    from rich import box
    from rich.table import Table

    said = " ".join(caption(values))
    made = Table(title="Runs side by side", caption=said, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("", overflow="fold", max_width=22)
    for name in headings(values):
        made.add_column(name.replace(": ", "\n").replace("epsilon ", "eps "), justify="right", overflow="fold")
    section = ""
    for row in shown:
        if section and row.section != section:
            made.add_section()
        section = row.section
        cells = [f"{one.value}\n{one.note.replace(' to ', '-')}" if one.note else one.value for one in row.cells]
        made.add_row(row.measure, *cells)
    return made


def caption(values: Json) -> list[str]:
    """What must be said beside the table, in sentences."""
    private = "Private: holds un-noised figures. Do not publish."
    lines = ["Public and released figures only." if values["public"] else private]
    for run in values["runs"]:
        privacy = run["privacy"]
        if privacy["enabled"] and not privacy["guarantee"]:
            lines.append(f"{run['name']} gives no guarantee: {str(privacy['reason']).rstrip('. ')}.")
        if run["status"] != "completed":
            lines.append(f"{run['name']} is {run['status']}.")
    if scored := values["scored"]:
        lines.append(
            f"BLEU, NIST, ROUGE-L and CIDEr as in the E2E challenge, without regard to case: {count(scored['prompts'])} prompts, "
            f"each with all its references ({count(scored['references'])} in all); a beam search of "
            f"{scored['protocol']['beams']} for at most {scored['num_tokens']} tokens."
        )
    return lines


def markdown(values: Json, shown: Sequence[Row], pictures: Sequence[str]) -> str:
    """The page."""

    def picture(name: str) -> list[str]:
        return [f"![{PICTURES[name]}]({name})", ""] if name in pictures else []

    lines = ["# Runs side by side", "", " ".join(caption(values)), ""]
    for section, title in SECTIONS.items():
        part = [row for row in shown if row.section == section]
        if part:
            lines += [f"## {title}", "", _line(["", *headings(values)]), "|---|" + "---:|" * len(headings(values))]
            lines += [*(_line([row.measure, *(one.line() for one in row.cells)]) for row in part), ""]
        if section == "privacy" and values["together"]:
            lines += [_together(values["together"]), ""]
        if section == "utility" and part:
            lines += [*picture("utility.png"), _intervals(values), ""]
        if section == "leakage" and part:
            lines += picture("leakage.png")
    lines += picture("comparison.png")
    if values["left_out"]:
        lines += ["## Left out", "", "These may not be published:", "", *(f"- {line}" for line in values["left_out"])]
        lines += [""]
    if values["differences"]:
        names = [run["name"] for run in values["runs"]]
        lines += ["## Settings that differ", "", _line(["key", *names]), "|---|" + "---|" * len(names)]
        lines += [_line([key, *(row[name] for name in names)]) for key, row in values["differences"].items()]
        lines += [""]
    if values["public"]:
        lines += ["Times are measured and carry no noise: a side channel that no guarantee here covers.", ""]
    return "\n".join(lines)


def _together(found: Json) -> str:
    stated = f"epsilon {bound(found['epsilon'])} at delta {number_text(found['delta'])}"
    group = "fixed before the first of them as one tuning group."
    other = "if they were fixed before the first of them; the ledger says what holds otherwise."
    return (
        f"The {found['runs']} runs with a guarantee come to {stated} together, {group if found['fixed_together'] else other} "
        "A page with figures of several models tells of all of them."
    )


def _intervals(values: Json) -> str:
    measures = [one for part in (values["base"], *values["runs"]) for one in part["utility"].values()]
    if not any(one["interval"] for one in measures):
        return (
            "No intervals: the losses of single evaluation examples were not computed (dpllm compare does, unless told "
            "--no-intervals)."
        )
    return (
        f"In brackets: {percent(values['confidence'])} intervals, by drawing the evaluation examples anew. They do not cover the "
        "randomness of training: another run of the same recipe may lie outside. Below some fifty examples they are too narrow."
    )


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"
