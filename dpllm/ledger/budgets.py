"""What people enter into the ledger: budgets, exceptions, and runs that were made elsewhere.

Comes in: a ledger, and who wants what, and why. Goes out: entries of the chain. Each of them is made once and stays.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import get_args

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.ledger import Ledger
from dpllm.ledger.records import Fingerprint
from dpllm.ledger.values import Account, Budget, check_name, check_person
from dpllm.privacy.accounting import Event, Relation, epsilon
from dpllm.privacy.parts import imported_delta


def set_budget(ledger: Ledger, dataset: str, budget: Budget, *, records: Fingerprint | None = None) -> Budget:
    """Fixes what all runs on ``dataset`` may spend; its owner may correct it as long as nothing is spent.

    With ``records``, what the name stands for, it protects copies from now on. Its order follows from its other values, so that
    no result can have chosen it.

    Raises:
        ConfigError: A value is out of range.
        Refused: Another budget is set, by somebody else or with something spent; runs with another unit or relation are
            reserved, or a final one; or the data are those of another dataset.
    """
    wanted = replace(budget, epsilon=float(budget.epsilon), delta=float(budget.delta), order=None)
    check_budget(dataset, wanted)
    ledger.refuse_if_tampered()
    with ledger.chain.writing():
        account = ledger.account(dataset)
        if account.dataset != dataset:
            why = f"dataset {dataset!r} derives from {account.dataset!r}, to which it is charged. Set the budget of that one."
            raise Refused(why, dataset=dataset, reason="derived")
        if account.budget is None:
            ledger.same_unit(dataset, wanted.unit, wanted.relation)
            wanted = _beside_imports(account, wanted)
        else:
            wanted = _corrected(account, account.budget, wanted)
        if wanted != account.budget:
            wanted = replace(wanted, order=admission.order_of(wanted))
            ledger.chain.append("budget", dataset, asdict(wanted))
        if records is not None:
            ledger.records.register(dataset, records, None)
    return wanted


def _corrected(account: Account, present: Budget, wanted: Budget) -> Budget:
    # What init chooses by itself does not make the same wish another budget.
    asked = replace(wanted, by=present.by, reason=present.reason, order=present.order)
    if account.used and asked.import_delta <= present.import_delta:
        asked = replace(asked, import_delta=present.import_delta)
    if asked == present:
        return present
    if wanted.by != present.by or account.used:
        raise Refused(
            f"dataset {account.dataset!r} has a budget already: {present}. Only {present.by or 'its owner'} may correct it, and "
            "nobody once a run is reserved or imported: a budget that can be raised limits nothing. Keep it, or keep new data "
            "under a new name.",
            dataset=account.dataset,
            reason="budget_set",
        )
    return wanted


def _beside_imports(account: Account, wanted: Budget) -> Budget:
    """A budget of an account that may have runs or imports, whose delta it sets aside."""
    if account.final:
        why = f"dataset {account.dataset!r} was closed for good by a final run, so there is nothing left to limit."
        raise Refused(why, dataset=account.dataset, reason="closed")
    imported = admission.delta_imported(account)
    if not imported < wanted.delta:
        raise Refused(
            f"dataset {account.dataset!r}: imported runs spent a delta of {imported:g}, and {wanted.delta:g} for everything "
            "together leaves no room beside it. Set a larger --delta, or use other data.",
            dataset=account.dataset,
            reason="over_budget",
        )
    return replace(wanted, import_delta=max(wanted.import_delta, imported))


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
    epsilon(event, 1e-5, relation)  # refuses what is malformed, and what no accountant can add up later
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
    if not (budget.unit.strip() and bounded and budget.relation in get_args(Relation)):
        raise ConfigError(
            f"a budget of epsilon {budget.epsilon:g} at delta {budget.delta:g} (for imports {budget.import_delta:g}) per "
            f"{budget.unit!r} under {budget.relation!r} bounds nothing. Give epsilon > 0, 0 <= import delta < delta < 1, a unit, "
            f"and one of the relations {', '.join(get_args(Relation))}."
        )
