"""Whole runs charged before they start: one, or all runs of a tuning group, or none of them; and what one run then holds.

Comes in: a ledger, and runs that have not started. Goes out: claims, or a refusal that writes nothing; a ``Reservation``.
What fits is for ``admission`` to say. Must not know what a step does.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.ledger import Ledger
from dpllm.ledger.records import Fingerprint
from dpllm.ledger.values import Account, Claim, RunRequest, check_name
from dpllm.privacy.accounting import count_releases, epsilon
from dpllm.privacy.events import Event


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
    [(unit, relation)] = {(request.unit, request.relation) for request in requests}
    costs = [_cost(dataset, request) for request in requests]
    final = any(request.final for request in requests)
    requests = [replace(request, final=final) for request in requests]
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

    # Composition can take seconds, and the write lock stops everyone else, so it is computed first. Where a rival was quicker, it
    # is computed again under the lock: outside, rivals could be quicker without end.
    with ledger.chain.moment():
        seen, account = ledger.chain.length, admitting()
    with ledger.chain.writing():
        if ledger.chain.length != seen:
            account = admitting()
        ledger.records.register(dataset, records, derived_from)
        return [
            _enter(ledger, dataset, account.dataset, request, cost, group)
            for request, cost in zip(requests, costs, strict=True)
        ]


def _enter(ledger: Ledger, dataset: str, account: str, request: RunRequest, cost: float, group: str | None) -> Claim:
    claim = Claim(
        entry=secrets.token_hex(8),  # random, so that an entry means no other run in another ledger
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
    """The place of a run that was reserved before, as one of a group, for the account ``dataset``.

    Raises:
        Refused: Another run has begun with it, it is closed, or it was reserved for something else or other records.
        ConfigError: This ledger has no such reservation.
    """
    ledger.refuse_if_tampered()
    run = ledger.run(entry)
    claim = run.reservation
    if run.state != "reserved" or run.steps:
        raise Refused(
            f"reservation {entry} of run {claim.run!r} is {run.state} after {run.steps} of {claim.num_steps} steps, so no run "
            "can begin with it. Resume the run that did, or start another sweep, which reserves its own."
        )
    if (claim.dataset, run.event, claim.num_steps) != (dataset, event, num_steps):
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


def _cost(dataset: str, request: RunRequest) -> float:
    paid = count_releases(request.event)
    if not 0 <= request.num_steps <= paid:
        raise ConfigError(
            f"the event pays for {paid} steps of a run on {dataset!r} that has {request.num_steps}: "
            "what runs must be what is accounted. Build both from one Plan."
        )
    alone = epsilon(request.event, request.delta, request.relation)
    if math.isinf(alone):
        raise Refused(
            f"no finite epsilon can be certified at delta {request.delta:g}, so nothing can be charged."
            " Raise privacy.delta or privacy.noise_multiplier."
        )
    return alone


@dataclass(frozen=True)
class Reservation:
    """What one run has reserved, and charges step by step.

    Without differential privacy, and in other processes than the first, there is no ledger, and calls do nothing.
    """

    entry: str | None = None
    ledger: Ledger | None = None

    def charge(self, step: int) -> None:
        """Writes down that step ``step``, counted from 1, is about to be taken; refuses what was not reserved, or is taken."""
        if self.ledger is not None and self.entry is not None:
            self.ledger.charge(self.entry, step)

    def finish(self, status: Literal["completed", "interrupted"], manifest: str | None = None) -> None:
        """Closes the reservation, with a digest of what was written."""
        if self.ledger is not None and self.entry is not None:
            self.ledger.finish(self.entry, status, manifest)

    def close(self) -> None:
        """Closes the ledger."""
        if self.ledger is not None:
            self.ledger.close()

    def to_json(self, delta: float | None) -> dict[str, Any] | None:
        """What is said of the ledger, at its budget's delta or else this one; None without differential privacy."""
        if self.ledger is None or delta is None or self.entry is None:
            return None
        ledger, claim = self.ledger, self.ledger.run(self.entry).reservation
        account = ledger.account(claim.dataset)
        spent = ledger.spent(claim.dataset, None if account.budget else delta)
        return {
            "dataset": claim.dataset,
            "entry": claim.entry,
            "head": ledger.head(),
            **admission.comes_to(account, spent, claim.group),
        }
