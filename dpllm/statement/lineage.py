"""Lineage: what a run and the models before it promise together.

Comes in: the statement of what the run starts from (``parents.py``), its account in the ledger, its Plan. Goes out: the value
that run.json and the card have under ``lineage``, or a refusal. Must not import torch or read any row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting
from dpllm.privacy.events import Imported
from dpllm.privacy.parts import added
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig
from dpllm.statement.fields import Ancestor, ComposedLineage, Lineage
from dpllm.statement.labels import Labels
from dpllm.statement.parents import Base

if TYPE_CHECKING:
    from dpllm.ledger import Ledger, Run
    from dpllm.privacy.events import Event
    from dpllm.privacy.plan import Plan
    from dpllm.privacy.privacy_loss import Relation
    from dpllm.statement.inference import Promised


class Own(NamedTuple):
    """What is composed with the models before it, where there is no Plan."""

    event: Event
    delta: float
    unit: str
    neighbouring_relation: Relation


def compose_with_base(
    base: Base | None,
    config: RunConfig,
    *,
    dataset: str,
    derived_from: str | None,
    book: Ledger | None,
    plan: Plan | Own | None,
    labels: Labels | None = None,
) -> Lineage | None:
    """Judges a run by its base model's statement, and composes the two where they are about the same data.

    Args:
        base: Of ``parents.of_base``.
        config: The recipe.
        dataset: The name of its data in the ledger.
        derived_from: The dataset that is charged instead, where the recipe declares one.
        book: The ledger that the recipe names; None where there is none yet.
        labels: Of its own pairs, where they were flipped at the source.
        plan: The promise; None without differential privacy, or where only refusals are asked for.

    Returns:
        None without a block. ``dataset`` is the common one; ``composed`` is of this run and every guaranteed one before it on
        the same dataset, or None for ``reason``; ``excepted`` says who permitted what would be refused.

    Raises:
        Refused: The run would continue a model with differential privacy on the same data without it, or outside the
            ledger that holds their budget, and nobody excepted it; or the ledger contradicts the block.

    Guarantee:
        ``composed`` bounds what all these runs together reveal about one unit of the common dataset: each is an adaptive
        composition of sampled Gaussian sums, whose parameters must have been fixed before any result was seen.

    References:
        Dwork, Rothblum and Vadhan 2010, "Boosting and Differential Privacy", section 3 (a mechanism may read what came
        before it); Doroshenko et al. 2022 (PLD). Against parameters chosen later: Rogers et al. 2016, "Privacy Odometers
        and Filters".
    """
    if base is None:
        return None
    account = book.records.charged_to(dataset, derived_from) if book else derived_from or dataset
    mine = [parent for parent in (base.statement, *base.ancestors) if parent.dataset == account]
    _refuse_contradictions(base, book)
    excepted = _permission(base, config, mine, account, book)
    composed, reason = together(mine, plan, derived.deviations(config)[0])
    if base.statement.dataset is None:
        reason = f"nothing says on which data {base.statement.name} was trained"
    elif not mine and labels and labels.dataset in (one.dataset for one in base.labels):
        reason = f"their pairs are different data, of the same {labels.dataset}, whose total stands beside the labels"
    return Lineage(
        base=base.statement,
        ancestors=base.ancestors,
        same_dataset=bool(mine),
        dataset=account if mine else None,
        composed=composed,
        reason=reason,
        excepted=excepted,
    )


def of_labels(labels: Labels | None, base: Base | None, book: Ledger | None) -> Labels | None:
    """The labels of a run with the total of their account: what the ledger, their record and the models before it know."""
    if labels is None:
        return None
    held = 0.0
    if book and (run := _held(book, labels.entry)) and run.reservation.dataset == labels.dataset:
        held = added(*book.account(labels.dataset).events())
    return labels.with_account(held, base.labels if base else ())


def why_not(lineage: Lineage | None) -> str | None:
    """Why a run's own guarantee does not hold because of the models before it; None if it does."""
    if lineage is None or not lineage.same_dataset:
        return None
    for parent in (lineage.base, *lineage.ancestors):
        if not parent.guarantee and parent.dataset == lineage.dataset:
            start = "the adapter that it started from" if lineage.base.adapter else "its base model"
            same = f"which was trained on the same dataset ({lineage.dataset}) without a guarantee"
            return f"{start} goes back to {parent.name}, {same}"
    return None


def deviations(lineage: Lineage | None) -> list[str]:
    """What the card must name: who excepted what, and models before this one that promise nothing for their own data."""
    if lineage is None:
        return []
    notes = [lineage.excepted] if lineage.excepted else []
    for parent in (lineage.base, *lineage.ancestors):
        if not parent.guarantee and not (lineage.same_dataset and parent.dataset == lineage.dataset):
            notes.append(
                f"{parent.name}, from which this model was made, states no differential privacy guarantee for the data it was "
                "trained on: these weights may reveal them; a guarantee of this run is about this run's own training data, "
                "and only as far as they are not among those"
            )
    return list(dict.fromkeys(notes))


def _refuse_contradictions(base: Base, book: Ledger | None) -> None:
    parent = base.statement
    if (run := _held(book, parent.entry)) is None:
        return
    other_data = run.reservation.dataset != parent.dataset
    if other_data or (parent.event is not None and run.event != parent.event):
        raise Refused(
            f"the privacy block of {parent.name} names entry {parent.entry} of the ledger, which is about "
            f"{'another dataset' if other_data else 'another event'}: one of the two was changed. Take a copy that dpllm verify "
            "passes.",
            dataset=run.reservation.dataset,
            reason="lineage",
        )


def _held(book: Ledger | None, entry: str | int | None) -> Run | None:
    """The run that a ledger has under an entry; None where it has none."""
    if book is None or not isinstance(entry, str):
        return None
    try:
        return book.run(entry)
    except ConfigError:
        return None


def _permission(base: Base, config: RunConfig, mine: list[Ancestor], account: str, book: Ledger | None) -> str | None:
    """Who permitted this continuation; None where nobody has to. Refused where somebody has to and nobody did."""
    guaranteed = [parent for parent in mine if parent.guarantee]
    if not config.privacy.enabled:
        if not guaranteed:
            return None
        what = f"continuing {guaranteed[0].name} on dataset {account!r} without differential privacy"
        refusal = (
            f"privacy.enabled: false would continue {guaranteed[0].name}, which was trained on dataset {account!r} with "
            "differential privacy, on the same data without it: its guarantee would be gone, and no figure would show it. Set "
            "privacy.enabled: true, or let whoever answers for the data record an exception: "
            f"dpllm ledger except {account} --by NAME --reason WHY."
        )
        return _exception(what, refusal, "no_privacy", account, book)
    outside = [parent for parent in guaranteed if _held(book, parent.entry) is None]
    elsewhere = base.budgeted and base.statement in outside
    if not elsewhere and (book is None or book.budget(account) is None or _entered(outside, book, account)):
        return None
    entry = outside[0].entry
    what = f"continuing {outside[0].name} on the budgeted dataset {account!r} outside the ledger that holds its entry"
    enter = f"enter what it cost with dpllm ledger import {account}, " if not elsewhere else ""
    refusal = (
        f"{outside[0].name} was trained on dataset {account!r}, which has a budget, and its entry {entry} is not in this "
        "recipe's ledger: the two runs would be booked apart, and neither would show what both cost. Set privacy.ledger to "
        f"the ledger that holds the entry, {enter}or let the budget's owner record an exception: "
        f"dpllm ledger except {account} --by NAME --reason WHY."
    )
    return _exception(what, refusal, "outside_ledger", account, book)


def _entered(outside: list[Ancestor], book: Ledger, account: str) -> bool:
    """Whether the ledger holds an import for each of these runs: the same event, or an epsilon and delta as large."""
    imports = list(book.account(account).imports)
    for parent in outside:
        for event in imports:
            told = isinstance(event, Imported) and all(
                getattr(event, key) >= getattr(parent, key) for key in ("epsilon", "delta")
            )
            if told or event == parent.event:
                imports.remove(event)
                break
        else:
            return False
    return True


def _exception(what: str, refusal: str, reason: str, account: str, book: Ledger | None) -> str:
    """Who permitted this; or the refusal where nobody did."""
    found = book.account(account).permission if book else None
    if found is None:
        raise Refused(refusal, dataset=account, reason=reason)
    return f"{what} was permitted by {found['by']} on {found['at'][:10]} ({found['reason']})"


def together(
    mine: Sequence[Ancestor], own: Plan | Own | Promised | None, broken: str | None = None
) -> tuple[ComposedLineage | None, str | None]:
    """Epsilon of a run and of those before it on the same data, at its delta; or why there is none.

    Args:
        mine: What the models before it state that learnt the same data.
        own: What the run itself promises; None: nothing.
        broken: Why it gives no guarantee all the same.
    """
    if not mine:
        return None, "the runs are on different datasets: each statement is about its own data"
    if own is None or broken:
        return None, f"this run gives no guarantee: {broken or 'nothing was planned'}"
    if not all(parent.guarantee for parent in mine):
        return None, "a run before this one on the same dataset has no guarantee, so both together have none"
    for key, value in (("unit", own.unit), ("neighbouring_relation", own.neighbouring_relation)):
        if other := next((parent for parent in mine if getattr(parent, key) != value), None):
            label = key.replace("_", " ")
            return None, f"{other.name} was protected by another {label} ({getattr(other, key)}, here {value})"
    known = [parent.event for parent in mine if parent.event is not None]
    if len(known) < len(mine):
        return None, "a run before this one on the same dataset does not say what it released"
    event = accounting.compose([own.event, *known])
    try:
        epsilon, name = accounting.stated(event, own.delta, own.neighbouring_relation)
    except Refused:
        return None, "no accountant knows every part of what the runs released"
    if not math.isfinite(epsilon):
        return None, f"no finite epsilon can be certified at delta {own.delta:g} for all runs together"
    accountant = f"dp-accounting {name.upper()} {accounting.versions()['version']}"
    return ComposedLineage(epsilon=epsilon, delta=own.delta, accountant=accountant), None
