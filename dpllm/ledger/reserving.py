"""How runs are charged before they start: one, or all runs of a tuning group, or none of them.

Comes in: a ledger, and the events of runs that have not started. Goes out: reservations, or a refusal that writes nothing.
Must not decide what fits: admission.py does.

Choosing among the runs of a group costs nothing beyond their total, as long as the choice looks at nothing but what they
released. A choice by an un-noised figure of private evaluation data is outside it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.records import Fingerprint
from dpllm.ledger.values import Account, Reservation, RunRequest, check_name
from dpllm.privacy.accounting import Event, compose, count_releases, epsilon, finite

if TYPE_CHECKING:
    from dpllm.ledger.ledger import Ledger

# What decides whether a run fits; a rival's entry of one of these kinds makes a check stale.
DECIDING = frozenset({"budget", "reserve", "reconcile", "import", "data"})


def reserve_all(
    ledger: Ledger,
    dataset: str,
    requests: Sequence[RunRequest],
    *,
    group: str | None = None,
    records: Fingerprint | None = None,
    derived_from: str | None = None,
    once: bool = False,
) -> list[Reservation]:
    """Charges whole runs before the first of them starts, or refuses them all and writes nothing.

    All have one unit and relation; ``group`` names those of a sweep. Where one asks to be ``final``, all of them are together.
    The name ``dataset`` stands for ``records``; a subset or a changed copy is charged to the dataset that it is ``derived_from``.
    With ``once``, they must be the first to be charged for any of these ``records``.

    Raises:
        BudgetExceeded: The budget does not admit all of them, or the account is closed by a final reservation.
        Refused: Another unit or relation than before, or a chain that was tampered with.
        ConfigError: An event is malformed or pays for too few steps, or the group has runs already.

    Guarantee:
        The check and the charge are one transaction: however many processes reserve at once, what they reserve together
        is within the budget, nothing joins a final reservation, and of a group either every run has its place or none has.
    """
    check_name(dataset)
    [(unit, relation)] = {(one.unit, one.relation) for one in requests}
    costs = [_cost(dataset, one) for one in requests]
    requests = [replace(one, final=any(one.final for one in requests)) for one in requests]
    ledger.refuse_if_tampered()

    def admitting() -> Account:
        if once and records is not None:
            ledger.records.refuse_released(records)
        account = ledger.account(ledger.records.charged_to(dataset, derived_from))
        ledger.same_unit(account.dataset, unit, relation)
        if group in account.groups():
            raise ConfigError(
                f"tuning group {group!r} has its runs already, and they were fixed together. Resume the sweep, or start another."
            )
        if why := admission.refusal(account, requests):
            raise BudgetExceeded(why, dataset=account.dataset, reason="over_budget")
        return account

    # Composition can take seconds and the write lock stops everyone else, so it is computed first, for the dataset as it was
    # ``seen``. Where a rival was quicker it is computed again under the lock: outside, rivals could be quicker without end.
    with ledger.chain.moment() as seen:
        account = admitting()
    with ledger.chain.writing():
        since = [entry.kind for entry in ledger.chain.since(seen) if entry.dataset in (account.dataset, dataset)]
        if once or not DECIDING.isdisjoint(since):  # copies have other names
            account = admitting()
        ledger.records.register(dataset, records, derived_from)
        return [_enter(ledger, dataset, account, one, cost, group) for one, cost in zip(requests, costs, strict=True)]


def _enter(
    ledger: Ledger, dataset: str, account: Account, one: RunRequest, cost: float, group: str | None
) -> Reservation:
    claim = Reservation(
        entry=secrets.token_hex(8),  # random, so that an entry means no other run in another ledger
        dataset=account.dataset,
        run=one.run,
        num_steps=one.num_steps,
        epsilon=cost,
        delta=one.delta,
        unit=one.unit,
        relation=one.relation,
        group=group,
        flaw=one.flaw,
        final=one.final,
    )
    facts = {key: value for key, value in asdict(claim).items() if value is not None}
    seq = ledger.chain.append("reserve", claim.dataset, {**facts, "event": one.event.to_json(), "data": dataset})
    ledger.store.rows("INSERT INTO progress VALUES (?, ?, 0, ?)", claim.entry, seq, time.time())
    return claim


def use_reservation(
    ledger: Ledger, entry: str, *, dataset: str, event: Event, num_steps: int, records: Fingerprint | None = None
) -> Reservation:
    """The place of a run that was reserved before, as one of a group, for the account ``dataset``.

    Raises:
        Refused: Another run has begun with it, it is closed, or it was reserved for something else or other records.
        ConfigError: This ledger has no such reservation.
    """
    ledger.refuse_if_tampered()
    one = ledger.run(entry)
    claim = one.reservation
    if one.state != "reserved" or one.steps:
        raise Refused(
            f"reservation {entry} of run {claim.run!r} is {one.state} after {one.steps} of {claim.num_steps} steps, so no run "
            "can begin with it. Resume the run that did, or start another sweep, which reserves its own."
        )
    if (claim.dataset, one.event, claim.num_steps) != (dataset, event, num_steps):
        raise Refused(
            f"reservation {entry} was made for other data, noise, sampling rate or steps than this run has, and what runs must "
            "be what is accounted. Put recipe and data back as they were, or start another sweep."
        )
    registered = ledger.records.of_account(dataset)
    if records is not None and registered and records.digest not in registered:
        raise Refused(
            f"data.train no longer holds the records that reservation {entry} was made for, so its steps would be charged to "
            "other people's data. Put the file of that time back, or start another sweep."
        )
    return claim


def group_total(account: Account, name: str) -> dict[str, Any]:
    """What all runs of a tuning group come to, in full, at the budget's delta or else the largest that a run states.

    Guarantee:
        The runs were fixed before the first of them, so that their composition by PLD holds for all of them together.
    """
    runs = account.groups()[name]
    delta = account.budget.delta if account.budget else max(run.reservation.delta for run in runs)
    total = epsilon(compose([run.event for run in runs]), delta, runs[0].reservation.relation)
    return {"name": name, "runs": len(runs), "epsilon": total, "delta": delta}


def comes_to(account: Account, spent: float, group: str | None) -> dict[str, Any]:
    """What run.json and the card say of an account whose runs come to epsilon ``spent`` by PLD, and of a group of them."""
    budget, share = account.budget, admission.used(account)
    if account.flaws():
        share, spent = None, math.inf
    return {
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta, "order": budget.order} if budget else None,
        "final": account.final,
        "used": None if share is None else finite(share),
        "spent_epsilon": finite(spent),
        "imported": len(account.imports),
        "group": group_total(account, group) if group is not None else None,
    }


def _cost(dataset: str, one: RunRequest) -> float:
    paid = count_releases(one.event)
    if not 0 <= one.num_steps <= paid:
        raise ConfigError(
            f"the event pays for {paid} steps of a run on {dataset!r} that has {one.num_steps}: "
            "what runs must be what is accounted. Build both from one Plan."
        )
    alone = epsilon(one.event, one.delta, one.relation)
    if math.isinf(alone):
        raise Refused(
            f"no finite epsilon can be certified at delta {one.delta:g}, so nothing can be charged."
            " Raise privacy.delta or privacy.noise_multiplier."
        )
    return alone
