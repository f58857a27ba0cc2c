"""The findings of an audit as rows, with one wording for the card and for the terminal.

Comes in: parts of an audit from privacy.json or audit.json. Goes out: rows of a label, a value and its meaning; tables of attacks
and of secrets. Plain text: must not know Markdown or the width of a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dpllm.statement.audit import Attack, Bound, Controls, Exposure, Extraction
from dpllm.statement.audit_bounds import GradientAudit
from dpllm.statement.formatting import (
    bound,
    by_number,
    count,
    estimate,
    interval,
    measured,
    number_text,
    p_value,
    percent,
    percent_bound,
    proven,
    share,
)

NO_LIMIT = "no limit"


class Row(NamedTuple):
    """One finding."""

    label: str
    value: str
    meaning: str


class Table(NamedTuple):
    """Findings of one kind."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def findings(
    lower: Bound, controls: Controls, gradient: GradientAudit | None, *, beside: str, thing: str, planned: int
) -> list[Row]:
    """What the audit proves, what it could have proved, and whether it can be trusted.

    Args:
        lower: The lower bound.
        controls: Controls of the audit.
        gradient: Results of gradient canaries; None: there were none.
        beside: The end of the sentence about the bound: what else is known about epsilon.
        thing: What is sampled: row or unit.
        planned: Number of planned steps.
    """
    at = f" at δ = {number_text(lower.delta)}"
    right, guessed = count(lower.correct or 0), count(lower.best_guesses or 0)
    guesses = f"{count(lower.num_canaries)} canaries, {right} of {guessed} guesses right"
    tells = "tells" if controls.base_separates else "does not tell"
    checked = f"The base model, which never saw the canaries, {tells} the planted ones from the others."
    if controls.words:
        tell = "tell" if controls.words.succeeds else "do not tell"
        checked += f" Words alone, without any model, {tell} them apart (AUC {measured(controls.words.auc)})."
    works = "The attack was seen to work nowhere, so finding nothing means nothing."
    if controls.positive:
        works = f"The attack was seen to work: {controls.positive}."
    rows = [
        Row(
            "Lower bound on ε",
            f"{proven(lower.value)} with {percent(1 - lower.alpha)} confidence{at}",
            f"({lower.method}; {guesses}){beside}.",
        ),
        Row(
            "What the audit could have shown at most",
            f"{measured(lower.ceiling)}.",
            "A perfect attack on these canaries certifies no more.",
        ),
        Row("Controls", checked, works),
    ]
    if not lower.num_canaries:
        rows = [Row("Controls", "No canary of text was planted, so nothing was asked of the weights.", works)]
    return rows + (_gradient(gradient, thing, planned) if gradient else [])


def _gradient(audit: GradientAudit, thing: str, planned: int) -> list[Row]:
    steps = count(audit.steps) + (f" of {count(planned)}" if audit.steps < planned else "")
    ceiling = f"at most {measured(audit.ceiling)}; AUC {measured(audit.auc)}, {interval(audit.auc_interval)}"
    rows = [
        Row(
            "Gradient canaries",
            f"{count(audit.canaries)} known vectors of length C were each planted in the summed gradients, or left out, by a "
            f"fair coin, and were sampled, clipped and noised like any {thing}. An observer of the noised sums of {steps} steps "
            f"who knew the vectors could prove ε ≥ {proven(audit.epsilon_lower_bound)} with {percent(1 - audit.alpha)} "
            f"confidence ({ceiling}).",
            "That tests the mechanism, not what the weights remember: whoever holds only the weights sees less.",
        ),
        Row(
            "Measured on them",
            f"noise of {measured(audit.noise, 3)} C ({interval(audit.noise_interval, 3)}) where "
            f"{measured(audit.noise_planned, 3)} C was planned;",
            f"drawn {measured(audit.drawn)} times each (standard error {measured(audit.drawn_standard_error)}) where "
            f"{measured(audit.drawn_planned)} was planned.",
        ),
    ]
    if (weights := audit.weights) is not None:
        ceiling = f"at most {measured(weights.ceiling)}; AUC {measured(weights.auc)}, {interval(weights.auc_interval)}"
        rows.insert(
            1,
            Row(
                "The same in the weights",
                f"whoever holds the weights before and after the run, and saw no step, could prove ε ≥ "
                f"{proven(weights.epsilon_lower_bound)} with {percent(1 - weights.alpha)} confidence ({ceiling}).",
                f"Expected to be visible in the final weights is ε {measured(weights.expected_epsilon)}, by the last-iterate "
                "comparison, a heuristic and no bound: of that an audit with so many vectors finds a part.",
            ),
        )
    return rows


def attacks(named_attacks: Iterable[tuple[str, Attack]], *, claimed: bool = True) -> Table:
    """Membership attacks on groups of canaries, with the limits that epsilon sets if a guarantee is ``claimed``."""
    rows: list[tuple[str, ...]] = []
    sure = 0.0
    for name, attack in named_attacks:
        sure, limits = attack.confidence, attack.limits if claimed else None
        rate, between = share(attack.tpr_at_1_percent_fpr), attack.tpr_at_1_percent_fpr_interval
        rows.append(
            (
                name,
                str(attack.group),
                estimate(attack.auc, attack.auc_interval),
                bound(limits.auc) if limits else NO_LIMIT,
                rate + (f" ({share(between[0])} to {share(between[1])})" if between else ""),
                percent_bound(limits.tpr_at_fpr_0_01) if limits else NO_LIMIT,
                f"{attack.positives}, {attack.negatives}",
            )
        )
    rates = "True positives at 1% false positives (interval)"
    area = f"AUC ({percent(sure)} interval)"
    return Table(("Attack", "Canary copies", area, "ε allows", rates, "ε allows", "Planted, not planted"), rows)


def secrets(exposure: Mapping[str, Exposure], extraction: Mapping[str, Extraction]) -> Table:
    """Exposure and extraction of planted secrets, by number of copies."""
    rows: list[tuple[str, ...]] = []
    for group in by_number(exposure):
        exposed, extracted = exposure[group], extraction[group]
        rows.append(
            (
                group,
                str(exposed.inserted),
                *map(measured, (exposed.mean, exposed.null_mean, exposed.base_mean)),
                p_value(exposed.p_value),
                measured(exposed.maximum),
                f"{extracted.tuned} of {extracted.inserted}",
                f"{extracted.base} of {extracted.inserted}",
                f"{extracted.held_out_tuned} of {extracted.held_out}",
            )
        )
    ranks = ("Mean exposure (bits)", "Expected of no memory", "Base model", "p-value", "Largest")
    counts = ("Planted, extracted", "Planted, extracted from the base model", "Left out, extracted")
    return Table(("Canary copies", "Planted", *ranks, *counts), rows)
