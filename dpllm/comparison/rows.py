"""The figures of a comparison as text: measures are rows, the base model and the runs are columns.

Comes in: the figures of a comparison. Goes out: rows, a table for the terminal, a page of Markdown for people who were not
there. Bounds are rounded up, measured figures to the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.comparison.compared_runs import Side
from dpllm.comparison.values import CONFIDENCE, UTILITY, Figure, Figures, Together, cost, shown_attacks
from dpllm.statement.fields import Composed
from dpllm.statement.formatting import bound, cell, count, interval, measured, number_text, percent
from dpllm.statement.privacy_record import Attack, Audit, Bound

if TYPE_CHECKING:
    from rich.table import Table

_Part = TypeVar("_Part")
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
COST: dict[str, tuple[str, Callable[[float], Cell]]] = {
    "seconds": ("Seconds in all", lambda value: Cell(measured(value, 1))),
    "steps": ("Steps", lambda value: Cell(count(int(value)))),
    "seconds_per_step": ("Seconds per step, all included", lambda value: Cell(measured(value, 3))),
    "peak_memory_bytes": ("Peak memory (GiB)", lambda value: Cell(measured(value / 2**30))),
}


def headings(sides: Sequence[Side]) -> list[str]:
    """Of the columns: the base model, then each run with what it promises."""
    return ["base model", *(f"{side.name}: {promise(side)}" for side in sides)]


def promise(side: Side) -> str:
    """What a run promises, in two or three words."""
    if side.epsilon is not None:
        return f"epsilon {bound(side.epsilon)}"
    return "no guarantee" if side.private else "no DP"


def copies(group: str) -> str:
    """A group of canaries in words."""
    return "1 copy" if group == "1" else f"{group} copies"


def rows(figures: Figures) -> tuple[Row, ...]:
    """Every measure that at least one column has."""
    found = [*_privacy(figures.sides), *_utility(figures), *_leakage([side.statement.audit for side in figures.sides])]
    costs = [cost(side) for side in figures.sides]
    found += [_row("cost", label, [one[key] for one in costs], show) for key, (label, show) in COST.items()]
    return tuple(row for row in found if set(row.cells) != {EMPTY})


def _row(
    section: str, measure: str, parts: Sequence[_Part | None], show: Callable[[_Part], Cell], base: Cell = EMPTY
) -> Row:
    """What each run has of it is shown; None: nothing."""
    return Row(section, measure, (base, *(EMPTY if part is None else show(part) for part in parts)))


def _privacy(sides: Sequence[Side]) -> list[Row]:
    deltas = list(dict.fromkeys(side.statement.terms.delta for side in sides if side.statement.guarantee))
    one_delta = len(deltas) == 1

    def epsilon(side: Side) -> Cell:
        if not side.statement.guarantee:
            return Cell("no guarantee")
        terms = side.statement.terms
        return Cell(bound(terms.epsilon), "" if one_delta else f"delta {number_text(terms.delta)}")

    def total(composed: Composed) -> Cell:
        budget = f"of {number_text(composed.budget.epsilon)}" if composed.budget else "no budget"
        return EMPTY if composed.spent_epsilon is None else Cell(bound(composed.spent_epsilon), budget)

    label = f"Epsilon at delta {number_text(deltas[0])}" if one_delta else "Epsilon"
    totals = [side.statement.composed for side in sides]
    return [_row("privacy", label, sides, epsilon), _row("privacy", "Ledger's total after it", totals, total)]


def _utility(figures: Figures) -> list[Row]:
    found = []
    for measure, (label, decimals, factor, _) in UTILITY.items():

        def show(one: Figure, decimals: int | None = decimals, factor: float = factor) -> Cell:
            if one.value is None:
                return EMPTY
            digits = (2 if one.value < 100 else 1 if one.value < 1000 else 0) if decimals is None else decimals
            limits = [factor * limit for limit in one.interval or () if limit is not None]
            return Cell(measured(factor * one.value, digits), interval(limits, digits) if len(limits) == 2 else "")

        base = show(figures.base[measure]) if measure in figures.base else EMPTY
        found.append(_row("utility", label, [one.get(measure) for one in figures.utility], show, base))
    return found


def _leakage(audits: Sequence[Audit | None]) -> list[Row]:
    """The rows of the audits, one for each run; None: it has none."""
    known = [audit for audit in audits if audit]
    sure = {f"{percent(1 - audit.epsilon_lower_bound.alpha)} sure" for audit in known}

    def bounded(one: Bound) -> Cell:
        if not one.num_canaries:
            return EMPTY
        note = f"ceiling {measured(one.ceiling)}"
        return Cell(measured(one.value), note if len(sure) == 1 else f"{percent(1 - one.alpha)} sure, {note}")

    def auc(one: Attack) -> Cell:
        return Cell(measured(one.auc), interval(one.auc_interval) if one.auc_interval else "")

    def tpr(one: Attack) -> Cell:
        rate, limits = one.tpr_at_1_percent_fpr, one.tpr_at_1_percent_fpr_interval
        shown = interval([100 * limit for limit in limits], 1) if limits else ""
        return EMPTY if rate is None else Cell(measured(100 * rate, 1), shown)

    label = "Epsilon lower bound" + (f" ({min(sure)})" if len(sure) == 1 else "")
    found = [_row("leakage", label, [audit.epsilon_lower_bound if audit else None for audit in audits], bounded)]
    for name, first in {name: one for audit in reversed(known) for name, one in shown_attacks(audit).items()}.items():
        attacks = [audit.attacks.get(name) if audit else None for audit in audits]
        found.append(_row("leakage", f"AUC, {name} attack, {copies(str(first.group))}", attacks, auc))
    primary = [audit.attacks.get(PRIMARY_ATTACK) if audit else None for audit in audits]
    found.append(_row("leakage", f"TPR at 1% FPR (%), {PRIMARY_ATTACK} attack", primary, tpr))
    for group in sorted({group for audit in known for group in audit.exposure}, key=int, reverse=True):
        seen = [audit.exposure.get(group) if audit else None for audit in audits]
        null = next(one.null_mean for one in seen if one)
        bases = {measured(one.base_mean) for one in seen if one}
        base = Cell(*bases) if len(bases) == 1 else EMPTY  # each run planted canaries of its own
        label = f"Exposure in bits, {copies(group)} (no memory: {measured(null)})"
        found.append(_row("leakage", label, seen, lambda one: Cell(measured(one.mean)), base))
    for group in sorted({group for audit in known for group in audit.extraction}, key=int, reverse=True):
        got = [audit.extraction.get(group) if audit else None for audit in audits]
        base = EMPTY if any(one.base for one in got if one) else Cell("0")
        label = f"Canaries extracted, {copies(group)}"
        found.append(_row("leakage", label, got, lambda one: Cell(f"{one.tuned} of {one.inserted}"), base))
    verdicts = [audit.verdict if audit else None for audit in audits]
    return [*found, _row("leakage", "The audit's verdict", verdicts, lambda one: Cell(one.replace("_", " ")))]


def table(figures: Figures) -> Table:
    """The rows as a table for the terminal, up to five runs in 100 columns: figures above, how sure they are below."""
    from rich import box
    from rich.table import Table

    said = " ".join(caption(figures))
    made = Table(title="Runs side by side", caption=said, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("", overflow="fold", max_width=22)
    for name in headings(figures.sides):
        made.add_column(name.replace(": ", "\n").replace("epsilon ", "eps "), justify="right", overflow="fold")
    section = ""
    for row in rows(figures):
        if section and row.section != section:
            made.add_section()
        section = row.section
        cells = [f"{one.value}\n{one.note.replace(' to ', '-')}" if one.note else one.value for one in row.cells]
        made.add_row(row.measure, *cells)
    return made


def caption(figures: Figures) -> list[str]:
    """What must be said beside the table, in sentences."""
    private = "Private: holds un-noised figures. Do not publish."
    lines = ["Public and released figures only." if figures.public else private]
    for side in figures.sides:
        if side.private and side.no_guarantee:
            lines.append(f"{side.name} gives no guarantee: {side.no_guarantee.rstrip('. ')}.")
        if side.record.status != "completed":
            lines.append(f"{side.name} is {side.record.status}.")
    if scored := figures.scored:
        lines.append(
            f"BLEU as in the E2E challenge, without regard to case: {count(scored['prompts'])} prompts, "
            f"each with all its references ({count(scored['references'])} in all); a beam search of "
            f"{scored['protocol']['beams']} for at most {scored['num_tokens']} tokens."
        )
    return lines


def markdown(figures: Figures, pictures: Sequence[str]) -> str:
    """The page."""

    def picture(name: str) -> list[str]:
        return [f"![{PICTURES[name]}]({name})", ""] if name in pictures else []

    shown, columns = rows(figures), headings(figures.sides)
    lines = ["# Runs side by side", "", " ".join(caption(figures)), ""]
    for section, title in SECTIONS.items():
        part = [row for row in shown if row.section == section]
        if part:
            lines += [f"## {title}", "", _line(["", *columns]), "|---|" + "---:|" * len(columns)]
            lines += [*(_line([row.measure, *(one.line() for one in row.cells)]) for row in part), ""]
        if section == "privacy" and figures.together:
            lines += [_together(figures.together), ""]
        if section == "utility" and part:
            lines += [*picture("utility.png"), _intervals(figures), ""]
        if section == "leakage" and part:
            lines += picture("leakage.png")
    lines += picture("comparison.png")
    if figures.left_out:
        lines += ["## Left out", "", "These may not be published:", "", *(f"- {line}" for line in figures.left_out)]
        lines += [""]
    if figures.differences:
        names = [side.name for side in figures.sides]
        lines += ["## Settings that differ", "", _line(["key", *names]), "|---|" + "---|" * len(names)]
        lines += [*(_line([key, *row]) for key, row in figures.differences.items()), ""]
    if figures.public:
        lines += ["Times are measured and carry no noise: a side channel that no guarantee here covers.", ""]
    return "\n".join(lines)


def _together(found: Together) -> str:
    stated = f"epsilon {bound(found.epsilon)} at delta {number_text(found.delta)}"
    group = "fixed before the first of them as one tuning group."
    other = "if they were fixed before the first of them; the ledger says what holds otherwise."
    return (
        f"The {found.runs} runs with a guarantee come to {stated} together, {group if found.fixed_together else other} "
        "A page with figures of several models tells of all of them."
    )


def _intervals(figures: Figures) -> str:
    if not any(one.interval for part in (figures.base, *figures.utility) for one in part.values()):
        return (
            "No intervals: the losses of single evaluation examples were not computed (dpllm compare does, unless told "
            "--no-intervals)."
        )
    return (
        f"In brackets: {percent(CONFIDENCE)} intervals, by drawing the evaluation examples anew. They do not cover the "
        "randomness of training: another run of the same recipe may lie outside. Below some fifty examples they are too narrow."
    )


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"
