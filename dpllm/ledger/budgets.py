"""What people enter into the ledger: budgets, sealed lists, exceptions, and runs that were made elsewhere.

Comes in: a ledger, and who wants what, and why. Goes out: entries of the chain. Each of them is made once and stays.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import get_args

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.ledger import Ledger
from dpllm.ledger.records import Fingerprint
from dpllm.ledger.values import Account, Budget, Gate, Sealed, check_name, check_person, seal_content
from dpllm.privacy import renyi
from dpllm.privacy.accounting import Event, Relation, count_releases, stated
from dpllm.privacy.parts import imported_delta


def set_budget(ledger: Ledger, dataset: str, budget: Budget, *, records: Fingerprint | None = None) -> Budget:
    """Fixes what all runs on ``dataset`` may spend; its owner may correct it as long as nothing is sealed or spent.

    With ``records``, what the name stands for, it protects copies from now on. Its order is as wanted where nothing of the
    dataset has been released yet; otherwise, and where none is wanted, it follows from epsilon and delta.

    Raises:
        ConfigError: A value is out of range.
        Refused: Another budget is set, by somebody else or with something sealed or spent; runs with another unit or relation
            are reserved; a planned budget where runs came first; or the data are those of another dataset.
    """
    wanted = replace(budget, epsilon=float(budget.epsilon), delta=float(budget.delta))
    check_budget(dataset, wanted)
    ledger.refuse_if_tampered()
    with ledger.chain.writing():
        used = ledger.account(dataset)
        if used.dataset != dataset:
            raise Refused(
                f"dataset {dataset!r} derives from {used.dataset!r}, whose budget it is charged to. Set the budget of "
                f"{used.dataset!r}.",
                dataset=dataset,
                reason="derived",
            )
        if used.budget is None:
            ledger.same_unit(dataset, wanted.unit, wanted.relation)
        else:
            wanted = _corrected(used, used.budget, wanted)
        if wanted != used.budget:
            if used.runs or used.imports:
                wanted = _after_results(used, wanted)
            if wanted.gate == "adaptive" and wanted.order is None:
                order = renyi.filter_order(wanted.epsilon, admission.conversion_delta(wanted))
                if wanted.relation == "label_changed":  # whose epsilons are known, and add up whatever is chosen
                    order = renyi.SUM
                wanted = replace(wanted, order=order)
                if admission.filter_allowance(wanted) <= 0 and not (used.runs or used.imports):
                    raise ConfigError(
                        f"epsilon {wanted.epsilon:g} at delta {wanted.delta:g} is less than a Renyi filter can promise, so that "
                        "it would admit nothing. Type --planned RECIPE ..., or a larger --epsilon."
                    )
            ledger.chain.append("budget", dataset, asdict(wanted))
        if records is not None:
            ledger.records.register(dataset, records, None)
    return wanted


def _corrected(used: Account, present: Budget, wanted: Budget) -> Budget:
    """The budget that there is where the wish is the same, or the wish where its owner may still correct it."""
    # What init chooses by itself does not make the same wish another budget.
    asked = replace(wanted, by=present.by, reason=present.reason, order=present.order)
    if (used.runs or used.imports) and asked.import_delta <= present.import_delta:
        asked = replace(asked, import_delta=present.import_delta)
    if asked == present:
        return present
    if wanted.by != present.by or used.runs or used.imports or used.sealed is not None:
        raise Refused(
            f"dataset {used.dataset!r} has a budget already: {present}. Only "
            f"{present.by or 'its owner'} may correct it, and nobody once a run is sealed, reserved or imported: a "
            "budget that can be raised limits nothing. Keep it, or keep new data under a new name.",
            dataset=used.dataset,
            reason="budget_set",
        )
    return wanted


def _after_results(used: Account, wanted: Budget) -> Budget:
    """A budget that is set when runs or imports came first: adaptive, at an order that no result can have chosen."""
    if wanted.gate == "planned":
        raise Refused(
            f"dataset {used.dataset!r} has runs already, and a run planned after seeing their results needs another "
            "rule than a list sealed in advance. Leave out --planned.",
            dataset=used.dataset,
            reason="late",
        )
    imported = admission.delta_imported(used)
    if not imported < wanted.delta:
        raise Refused(
            f"dataset {used.dataset!r}: imported runs spent a delta of {imported:g}, and {wanted.delta:g} for everything "
            "together leaves no room beside it. Set a larger --delta, or use other data.",
            dataset=used.dataset,
            reason="over_budget",
        )
    wanted = replace(wanted, import_delta=max(wanted.import_delta, imported))
    return replace(wanted, order=None)


def seal(ledger: Ledger, dataset: str, runs: list[Sealed], by: str, reason: str) -> float:
    """Fixes the list of all runs of a planned budget, before the first of them; returns ``admission.planned_epsilon``.

    Raises:
        Refused: No planned budget, a list or a run is there already, or the list exceeds the budget.
        ConfigError: The list is empty, an event is malformed, or nobody is named.
    """
    check_person("a list of runs is sealed", by, reason)
    if not runs:
        raise ConfigError("a list without runs would admit none. Name the recipes of all runs.")
    if not all(0 < run.num_steps <= count_releases(run.event) for run in runs):
        raise ConfigError("a sealed run needs steps, and an event that pays for them. Build both from one Plan.")
    ledger.refuse_if_tampered()
    while True:  # composed outside the lock, as in reserving.py
        with ledger.chain.moment() as seen:
            account = ledger.account(dataset)
        budget, name = account.budget, account.dataset
        if budget is None or budget.gate != "planned" or account.sealed is not None or account.runs:
            why = "has its list already" if account.sealed is not None else "has runs already, which are its list"
            if budget is None:
                why = "has no budget"
            elif budget.gate != "planned":
                why = "has an adaptive budget, which needs no list"
            raise Refused(
                f"dataset {name!r} {why}, so no list can be sealed. dpllm ledger show {name} says what is.",
                dataset=name,
                reason="sealed",
            )
        if over := admission.over_plan(account, budget, runs):
            raise BudgetExceeded(over, dataset=name, reason="over_budget")
        with ledger.chain.writing():
            if ledger.outdated(seen, name, dataset):
                continue
            ledger.chain.append("seal", name, seal_content(runs, by, reason))
        return admission.planned_epsilon(account, budget, runs)


def import_run(
    ledger: Ledger, dataset: str, *, event: Event, run: str, unit: str, relation: Relation, by: str, reason: str
) -> None:
    """Enters what was spent on ``dataset`` elsewhere. A fact is not refused, also where it exceeds the budget.

    ``event`` is an ``Imported`` where no more is known.

    Raises:
        Refused: Its unit or relation is another than this dataset's.
        ConfigError: The event is malformed, or nobody is named.
    """
    check_person("a run made elsewhere is entered", by, reason)
    check_name(dataset)
    if not unit.strip() or relation not in get_args(Relation):
        raise ConfigError(f"an import needs a unit, and one of the relations {', '.join(get_args(Relation))}.")
    if relation == "label_changed" and imported_delta(event):
        raise ConfigError("epsilons of labels add up where none has a delta. Enter one that holds with --delta 0.")
    stated(event, 1e-5, relation)  # refuses what is malformed, and what no accountant can add up later
    ledger.refuse_if_tampered()
    with ledger.chain.writing():
        name = ledger.records.account_name(dataset)
        ledger.same_unit(name, unit, relation)
        content = {"run": run, "event": event.to_json(), "unit": unit, "relation": relation, "by": by, "reason": reason}
        ledger.chain.append("import", name, content)


def except_from_privacy(ledger: Ledger, dataset: str, by: str, reason: str) -> None:
    """Permits training without differential privacy on ``dataset``; every later card says so.

    Raises:
        Refused: The budget has another owner.
        ConfigError: Nobody is named.
    """
    check_person("an exception is recorded", by, reason)
    check_name(dataset)
    ledger.refuse_if_tampered()
    with ledger.chain.writing():
        account = ledger.account(dataset)
        if account.budget is not None and account.budget.by != by:
            raise Refused(
                f"the budget of dataset {account.dataset!r} was set by {account.budget.by or 'nobody named'!r}, who alone may "
                "except it from privacy. Ask for an exception, or set privacy.enabled: true.",
                dataset=account.dataset,
                reason="not_owner",
            )
        ledger.chain.append("exception", account.dataset, {"by": by, "reason": reason})


def adopt(ledger: Ledger, by: str, reason: str) -> None:
    """Binds a ledger to the place where it lies now, which the chain records.

    Raises:
        Refused: The chain was tampered with.
        ConfigError: Nobody is named.
    """
    check_person("a ledger is adopted", by, reason)
    ledger.chain.refuse(ledger.verify())
    with ledger.chain.writing(adopting=True):
        ledger.chain.append("adopt", "", {"by": by, "reason": reason})


def check_budget(dataset: str, budget: Budget) -> None:
    """Refuses a budget that limits nothing."""
    check_name(dataset)
    bounded = 0 < budget.epsilon < float("inf") and 0 < budget.delta < 1 and 0 <= budget.import_delta < budget.delta
    known = budget.relation in get_args(Relation) and budget.gate in get_args(Gate)
    ordered = budget.order is None or 1 < budget.order < float("inf")
    if not (budget.unit.strip() and bounded and known and ordered):
        raise ConfigError(
            f"a budget of epsilon {budget.epsilon:g} at delta {budget.delta:g} (for imports {budget.import_delta:g}) per "
            f"{budget.unit!r} under {budget.relation!r}, gate {budget.gate!r}, bounds nothing. Give epsilon > 0, 0 <= import "
            f"delta < delta < 1, a unit, one of the relations {', '.join(get_args(Relation))}, and the gate planned or adaptive."
        )
