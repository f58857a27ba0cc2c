"""How runs are charged before they start: one, or all runs of a tuning group, or none of them.

Comes in: a ledger, and the events of runs that have not started. Goes out: reservations, or a refusal that writes nothing.
Must not decide what fits: admission.py does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.chain import canonical
from dpllm.ledger.values import Account, Reservation, Sealed, check_name, seal_content
from dpllm.privacy.accounting import Event, Relation, count_releases, stated

if TYPE_CHECKING:
    from dpllm.ledger.fingerprint import Fingerprint
    from dpllm.ledger.ledger import Ledger


@dataclass(frozen=True)
class Wanted:
    """One run that asks for its place.

    Attributes:
        event: All that it will release.
        delta: At which it states its own epsilon.
        num_steps: Logical batches to execute, no more than ``event`` pays for.
        run: Its name, for people.
    """

    event: Event
    delta: float
    num_steps: int
    run: str


@dataclass(frozen=True)
class Group:
    """The runs of one sweep, fixed together before the first of them.

    Attributes:
        name: In the ledger.
        by: Who answers for the list that they seal, where the budget is planned.
    """

    name: str
    by: str


def reserve_all(
    book: Ledger,
    dataset: str,
    wanted: Sequence[Wanted],
    *,
    unit: str,
    relation: Relation,
    group: Group | None = None,
    config_hash: str | None = None,
    extends: str | None = None,
    records: Fingerprint | None = None,
    derived_from: str | None = None,
) -> list[Reservation]:
    """Charges whole runs before the first of them starts, or refuses them all and writes nothing.

    Args:
        book: The ledger.
        dataset: Name of the data in it.
        wanted: The runs.
        unit: The privacy unit.
        relation: The neighbouring relation.
        group: Whose runs they are; None for a single run.
        config_hash: Of the resolved recipe.
        extends: The reservation whose lost steps a single run makes up.
        records: What the name stands for.
        derived_from: The dataset of which ``dataset`` is a subset or a changed copy; it is charged.

    Returns:
        One reservation for each run, in their order.

    Raises:
        BudgetExceeded: The gate does not admit all of them.
        Refused: Another unit or relation than before, or a chain that was tampered with.
        ConfigError: An event is malformed or pays for too few steps, or the group has runs already.

    Guarantee:
        The check and the charge are one transaction: however many processes reserve at once, what they reserve together
        is within the budget, and of a group either every run has its place or none has.
    """
    check_name(dataset)
    alone = [_cost(dataset, one, relation) for one in wanted]
    book.refuse_if_tampered()
    while True:
        # Composition can take seconds and the write lock stops everyone else, so it is computed for the dataset as
        # it was ``seen``, and the lock is held only to look whether that still holds.
        with book.chain.moment():
            seen = book.chain.length()
            name = book.records.charged_to(dataset, derived_from)
            book.same_unit(name, unit, relation)
            account = book.account(name)
            _check_place(book, account, group, extends)
            if why := _refusal(account, wanted, group, extends):
                raise BudgetExceeded(why, dataset=name, reason="over_budget")
        gate = account.budget.gate if account.budget else None
        label = group.name if group else None
        claims = [
            # Random, so that an entry means no other run in another ledger.
            Reservation(
                secrets.token_hex(8), name, one.run, one.num_steps, cost, one.delta, unit, relation, config_hash,
                extends, gate, label,
            )
            for one, cost in zip(wanted, alone, strict=True)
        ]  # fmt: skip
        with book.chain.writing():
            if book.outdated(seen, name, dataset):
                continue
            if gate == "planned" and account.sealed is None:
                by, reason = (group.by, f"tuning group {group.name}") if group else ("the run itself", "a list of one")
                listed = [Sealed(one.event, one.num_steps) for one in wanted]
                book.chain.append("seal", name, seal_content(listed, by, reason))
            book.records.register(dataset, records, derived_from)
            for claim, one in zip(claims, wanted, strict=True):
                facts = {key: value for key, value in asdict(claim).items() if key != "group" or value is not None}
                seq = book.chain.append("reserve", name, {**facts, "event": one.event, "data": dataset})
                book.store.rows("INSERT INTO progress VALUES (?, ?, 0, ?)", claim.entry, seq, time.time())
        return claims


def use_reservation(
    book: Ledger, entry: str, *, dataset: str, event: Event, num_steps: int, records: Fingerprint | None = None
) -> Reservation:
    """The place of a run that was reserved before, as one of a group.

    Args:
        book: The ledger.
        entry: Of the reservation.
        dataset: The account that the run would be charged to.
        event: All that the run will release.
        num_steps: Logical batches to execute.
        records: On which it trains.

    Raises:
        Refused: Another run has begun with it, it is closed, or it was reserved for something else or other records.
        ConfigError: This ledger has no such reservation.
    """
    book.refuse_if_tampered()
    one = book.run(entry)
    claim = one.reservation
    if one.state != "reserved" or one.steps:
        raise Refused(
            f"reservation {entry} of run {claim.run!r} is {one.state} after {one.steps} of {claim.num_steps} steps, so no run "
            "can begin with it. Resume the run that did, or start another sweep, which reserves its own."
        )
    if (claim.dataset, one.whole(), claim.num_steps) != (dataset, canonical(event), num_steps):
        raise Refused(
            f"reservation {entry} was made for other data, noise, sampling rate or steps than this run has, and what runs must "
            "be what is accounted. Put recipe and data back as they were, or start another sweep."
        )
    registered = book.records.of_account(dataset)
    if records is not None and registered and records.digest not in registered:
        raise Refused(
            f"data.train no longer holds the records that reservation {entry} was made for, so its steps would be charged to "
            "other people's data. Put the file of that time back, or start another sweep."
        )
    return claim


def _cost(dataset: str, one: Wanted, relation: Relation) -> float:
    """What a run costs alone, at its own delta."""
    paid = count_releases(one.event)
    if not 0 <= one.num_steps <= paid:
        raise ConfigError(
            f"the event pays for {paid} steps of a run on {dataset!r} that has {one.num_steps}: "
            "what runs must be what is accounted. Build both from one Plan."
        )
    alone = stated(one.event, one.delta, relation)[0]
    if alone == float("inf"):
        raise Refused(
            f"no finite epsilon can be certified at delta {one.delta:g}, so nothing can be charged."
            " Raise privacy.delta or privacy.noise_multiplier."
        )
    return alone


def _check_place(book: Ledger, account: Account, group: Group | None, extends: str | None) -> None:
    first = book.reservation(extends) if extends is not None else None
    if first and first.dataset != account.dataset:
        raise ConfigError(
            f"reservation {extends!r} is not charged to {account.dataset!r}, so no lost steps of it can be made up."
        )
    if first and first.group is not None:
        raise Refused(
            f"run {first.run!r} is one of tuning group {first.group!r}, whose runs were fixed together before the first, and the "
            "cards of the others state what all of them come to: lost steps cannot be made up. Resume without them."
        )
    if group and any(run.reservation.group == group.name for run in account.runs):
        raise ConfigError(
            f"tuning group {group.name!r} has its runs already, and they were fixed together. Resume the sweep, or start another."
        )


def _refusal(account: Account, wanted: Sequence[Wanted], group: Group | None, extends: str | None) -> str | None:
    if group:
        return admission.group_refusal(account, [Sealed(one.event, one.num_steps) for one in wanted])
    (one,) = wanted
    return admission.refusal(account, one.event, one.num_steps, extends=extends is not None)
