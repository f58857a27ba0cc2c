"""Entries of the ledger: budgets, reservations, exceptions, and runs that were made elsewhere.

Comes in: a ledger, and a request with a name and a reason; or whole runs before they start: one, or all runs of a tuning group.
Goes out: permanent entries of the chain, or a refusal that writes nothing; a ``Reservation``. ``admission`` decides what fits.
Must not know what a step computes.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.ledger import Ledger
from dpllm.ledger.records import Fingerprint
from dpllm.ledger.values import Account, Budget, Claim, RunRequest, check_name, check_person
from dpllm.privacy.accounting import Event, Relation, count_releases, epsilon
from dpllm.privacy.parts import imported_delta


def set_budget(ledger: Ledger, dataset: str, budget: Budget, *, records: Fingerprint | None = None) -> Budget:
    """Sets the budget of all runs on ``dataset``; its owner may correct it until something is spent.

    With ``records``, the data of that name, it covers copies from now on. The order follows from the other values, so no result
    can have influenced it.

    Raises:
        ConfigError: A value is out of range.
        Refused: Another budget is set, by another owner or with something spent; runs with another unit or relation, or a
            final run, are reserved; or the records are those of another dataset.
    """
    new = replace(budget, epsilon=float(budget.epsilon), delta=float(budget.delta), order=None)
    check_budget(dataset, new)
    ledger.refuse_if_tampered()
    with ledger.chain.writing():
        account = ledger.account(dataset)
        if account.dataset != dataset:
            problem = f"dataset {dataset!r} derives from {account.dataset!r}, which is charged for it. Set that budget."
            raise Refused(problem, dataset=dataset, reason="derived")
        if account.budget is None:
            ledger.same_unit(dataset, new.unit, new.relation)
            new = _setting_imports_aside(account, new)
        else:
            new = _corrected(account, account.budget, new)
        if new != account.budget:
            new = replace(new, order=admission.order_of(new))
            ledger.chain.append("budget", dataset, asdict(new))
        if records is not None:
            ledger.records.register(dataset, records, None)
    return new


def _corrected(account: Account, current: Budget, new: Budget) -> Budget:
    # Values that ledger init chooses by itself do not make an equal request another budget.
    comparable = replace(new, by=current.by, reason=current.reason, order=current.order)
    if account.used and comparable.import_delta <= current.import_delta:
        comparable = replace(comparable, import_delta=current.import_delta)
    if comparable == current:
        return current
    if new.by != current.by or account.used:
        raise Refused(
            f"dataset {account.dataset!r} has a budget already: {current}. Only {current.by or 'its owner'} may correct it, and "
            "nobody once a run is reserved or imported: a budget that can be raised limits nothing. Keep it, or keep new data "
            "under a new name.",
            dataset=account.dataset,
            reason="budget_set",
        )
    return new


def _setting_imports_aside(account: Account, new: Budget) -> Budget:
    if account.final:
        problem = f"dataset {account.dataset!r} was closed for good by a final run, so there is nothing left to limit."
        raise Refused(problem, dataset=account.dataset, reason="closed")
    imported = admission.delta_imported(account)
    if not imported < new.delta:
        raise Refused(
            f"dataset {account.dataset!r}: imported runs spent a delta of {imported:g}, so {new.delta:g} for everything "
            "together leaves nothing for runs. Set a larger --delta, or use other data.",
            dataset=account.dataset,
            reason="over_budget",
        )
    return replace(new, import_delta=max(new.import_delta, imported))


def import_run(
    ledger: Ledger, dataset: str, *, event: Event, run: str, unit: str, relation: Relation, by: str, reason: str
) -> None:
    """Enters a run that was made elsewhere on ``dataset``. It is a fact, so it is entered even if it exceeds the budget.

    ``event`` is an ``Imported`` if no more is known.

    Raises:
        Refused: Its unit or relation differs from the dataset's.
        ConfigError: The event is malformed, or nobody is named.
    """
    check_person("a run made elsewhere is entered", by, reason)
    check_name(dataset)
    if not unit.strip() or relation not in get_args(Relation):
        raise ConfigError(f"an import needs a unit, and one of the relations {', '.join(get_args(Relation))}.")
    if relation == "label_changed" and imported_delta(event):
        raise ConfigError("epsilons of labels add up only without a delta. Enter one that holds with --delta 0.")
    epsilon(event, 1e-5, relation)  # refuses events that are malformed or that no accountant can compose later
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
                f"the budget of dataset {account.dataset!r} was set by {account.budget.by or 'nobody named'!r}, and nobody else "
                "may except it from privacy. Ask for an exception, or set privacy.enabled: true.",
                dataset=account.dataset,
                reason="not_owner",
            )
        ledger.chain.append("exception", account.dataset, {"by": by, "reason": reason})


def adopt(ledger: Ledger, by: str, reason: str) -> None:
    """Binds a ledger to its present place; the chain records who did so.

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


def reserve_all(
    ledger: Ledger,
    dataset: str,
    requests: Sequence[RunRequest],
    *,
    group: str | None = None,
    records: Fingerprint | None = None,
    derived_from: str | None = None,
    once: bool = False,
) -> list[Claim]:
    """Charges whole runs before the first of them starts, or refuses them all and writes nothing.

    All runs have one unit and relation; ``group`` names the runs of a sweep. If one asks to be ``final``, all are final together.
    ``records`` are the data of ``dataset``; a subset or a changed copy is charged to the dataset that it is ``derived_from``.
    With ``once``, no earlier run may have been charged for any of these ``records``.

    Raises:
        BudgetExceeded: The budget does not admit all of them, or a final reservation closed the account.
        Refused: The unit or relation differs from earlier runs, or the chain was tampered with.
        ConfigError: An event is malformed or pays for too few steps, or the group has runs already.

    Guarantee:
        The check and the charge are one transaction: however many processes reserve at once, their reservations together
        are within the budget, nothing joins a final reservation, and either all runs of a group are reserved or none.
    """
    check_name(dataset)
    [(unit, relation)] = {(request.unit, request.relation) for request in requests}
    costs = [_cost(dataset, request) for request in requests]
    final = any(request.final for request in requests)
    requests = [replace(request, final=final) for request in requests]
    ledger.refuse_if_tampered()

    def admitting_account() -> Account:
        if once and records is not None:
            ledger.records.refuse_released(records)
        account = ledger.account(ledger.records.charged_to(dataset, derived_from))
        ledger.same_unit(account.dataset, unit, relation)
        if group in account.groups():
            raise ConfigError(
                f"tuning group {group!r} has its runs already, and they were fixed together. Resume the sweep, or start another."
            )
        if problem := admission.refusal(account, requests):
            raise BudgetExceeded(problem, dataset=account.dataset, reason="over_budget")
        return account

    # Composition can take seconds and the write lock blocks everyone else, so it is computed first. If another process reserved
    # meanwhile, it is computed again under the lock: outside the lock, that could repeat without end.
    with ledger.chain.moment():
        length, account = ledger.chain.length, admitting_account()
    with ledger.chain.writing():
        if ledger.chain.length != length:
            account = admitting_account()
        ledger.records.register(dataset, records, derived_from)
        return [
            _append(ledger, dataset, account.dataset, request, cost, group)
            for request, cost in zip(requests, costs, strict=True)
        ]


def _append(ledger: Ledger, dataset: str, account: str, request: RunRequest, cost: float, group: str | None) -> Claim:
    claim = Claim(
        entry=secrets.token_hex(8),  # random, so it names no run of another ledger
        dataset=account,
        run=request.run,
        num_steps=request.num_steps,
        epsilon=cost,
        delta=request.delta,
        unit=request.unit,
        relation=request.relation,
        group=group,
        flaw=request.flaw,
        final=request.final,
    )
    facts = {key: value for key, value in asdict(claim).items() if value is not None}
    seq = ledger.chain.append("reserve", account, {**facts, "event": request.event.to_json(), "data": dataset})
    ledger.store.rows("INSERT INTO progress VALUES (?, ?, 0, ?)", claim.entry, seq, time.time())
    return claim


def use_reservation(
    ledger: Ledger, entry: str, *, dataset: str, event: Event, num_steps: int, records: Fingerprint | None = None
) -> Claim:
    """The claim of a run that was reserved earlier in a group, on the account ``dataset``.

    Raises:
        Refused: Another run has begun with it, it is closed, or it was made for another plan or other records.
        ConfigError: This ledger has no such reservation.
    """
    ledger.refuse_if_tampered()
    run = ledger.run(entry)
    claim = run.reservation
    if run.state != "reserved" or run.steps:
        raise Refused(
            f"reservation {entry} of run {claim.run!r} is {run.state} after {run.steps} of {claim.num_steps} steps, so no run "
            "can begin with it. Resume the run that began with it, or start another sweep, which reserves its own."
        )
    if (claim.dataset, run.event, claim.num_steps) != (dataset, event, num_steps):
        raise Refused(
            f"reservation {entry} was made for other data, noise, sampling rate or steps than this run has, and a run must be "
            "the one that is accounted. Put recipe and data back as they were, or start another sweep."
        )
    registered = ledger.records.of_account(dataset)
    if records is not None and registered and records.digest not in registered:
        raise Refused(
            f"data.train no longer holds the records that reservation {entry} was made for, so its steps would be charged to "
            "other people's data. Restore the earlier file, or start another sweep."
        )
    return claim


def _cost(dataset: str, request: RunRequest) -> float:
    num_steps = request.parts * count_releases(request.event)
    if not 0 <= request.num_steps <= num_steps:
        raise ConfigError(
            f"the event pays for {num_steps} steps of a run on {dataset!r} that has {request.num_steps}: "
            "a run must be the one that is accounted. Build both from one Plan."
        )
    cost = epsilon(request.event, request.delta, request.relation)
    if math.isinf(cost):
        raise Refused(
            f"no finite epsilon can be certified at delta {request.delta:g}, so nothing can be charged."
            " Raise privacy.delta or privacy.noise_multiplier."
        )
    return cost


@dataclass(frozen=True)
class Reservation:
    """The reservation of one run, which is charged step by step.

    Without differential privacy, and in every process but the first, there is no ledger, and calls do nothing.
    """

    entry: str | None = None
    ledger: Ledger | None = None

    def charge(self, step: int) -> None:
        """Records that step ``step``, counted from 1, is about to be taken; refuses a step that is not reserved or was taken."""
        if self.ledger is not None and self.entry is not None:
            self.ledger.charge(self.entry, step)

    def finish(self, status: Literal["completed", "interrupted"], manifest: str | None = None) -> None:
        """Closes the reservation, with a digest of the files that were written."""
        if self.ledger is not None and self.entry is not None:
            self.ledger.finish(self.entry, status, manifest)

    def close(self) -> None:
        """Closes the ledger."""
        if self.ledger is not None:
            self.ledger.close()

    def to_json(self, delta: float | None) -> dict[str, Any] | None:
        """The account for run.json, at the budget's delta or else ``delta``; None without differential privacy."""
        if self.ledger is None or delta is None or self.entry is None:
            return None
        ledger, claim = self.ledger, self.ledger.run(self.entry).reservation
        account = ledger.account(claim.dataset)
        spent = ledger.spent(claim.dataset, None if account.budget else delta)
        return {
            "dataset": claim.dataset,
            "entry": claim.entry,
            "head": ledger.head(),
            **admission.account_totals(account, spent, claim.group),
        }
