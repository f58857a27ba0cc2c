"""The ledger: that its chain is whole, holds the head that the card states and the run with this very event.

Comes in: what a card says of its ledger, and a ledger (a file, an export of one, a PostgreSQL URL) or none. Goes out: checks.
Nothing is written, and no place on the network is taken from the files that are verified.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.errors import DpllmError
from dpllm.files import digest
from dpllm.ledger import admission
from dpllm.ledger.chain import Chain, Entry, read_export, verify_export
from dpllm.ledger.store import Postgres, SQLite, Store, default_path
from dpllm.ledger.values import account_of, event_of
from dpllm.privacy import renyi
from dpllm.privacy.events import Event, RepeatAndSelect, RunEvent, count_releases
from dpllm.privacy.parts import parts_of
from dpllm.records import Json
from dpllm.statement import state
from dpllm.statement.privacy_record import Budget, Composed
from dpllm.statement.released import Statistics
from dpllm.statement.run_files import LedgerRecord, RunRecord, read_run
from dpllm.verification import costs
from dpllm.verification.costs import Promised
from dpllm.verification.values import (
    Check,
    Published,
    Wrong,
    asserted,
    check_regular,
    differences,
    listed,
    read_object,
    verified,
)

_NAME = "ledger"
_URL = ("postgresql://", "postgres://")
MOST_LEDGER = 2**30


@dataclass(frozen=True)
class _Chain:
    """A ledger at one moment."""

    entries: Sequence[Entry]
    steps: dict[str, int]
    where: str


def check(export: Published) -> Iterator[Check]:
    """What the card says of the budget."""
    composed, terms = export.record.composed, export.record.plan
    if composed is None:
        if export.ledger is not None and terms is not None:
            raise Wrong(
                "a ledger was given, but the card names no entry in any. Ask the card's author which run this is."
            )
        yield asserted(_NAME, "the card names none, so no total over several runs is stated.")
        return
    if terms is None:
        raise Wrong("the card names a ledger entry but no event for it. Write it again: dpllm card RUN.")
    where = export.ledger if export.ledger is not None else ledger_of(export)
    record = None if export.run is None else read_run(export.run)
    yield from charged(composed, terms, export.record.statistics, export.record.steps.taken, where, record)


def _files(chain: _Chain, name: str, record: RunRecord) -> Check:
    """The manifest in run.json is the one with which the run's entry was closed."""
    ends = [entry.facts for entry in chain.entries if entry.kind == "commit" and entry.facts["entry"] == name]
    closed = [facts["manifest"] for facts in ends if "manifest" in facts]
    if not closed:
        return asserted("ledger: files", f"{chain.where} was not told which files the run wrote.")
    if closed[-1] != digest(record.manifest):
        raise Wrong(f"{chain.where} knows other files of this run than run.json lists. Restore run.json and the files.")
    return verified("ledger: files", f"{chain.where} knows the files that run.json lists.")


def charged(
    composed: Composed,
    terms: Promised,
    statistics: Statistics | None,
    taken: int,
    where: str | None,
    record: RunRecord | None = None,
) -> Iterator[Check]:
    """What is said of the ledger, against itself and, where it is known, against the ledger; so many steps have to be charged."""
    yield _coherent(composed, terms)
    if where is None:
        yield asserted(
            _NAME,
            f"entry {composed.entry} of dataset {composed.dataset} and its total are what the author says. Whoever has the "
            "ledger, or an export of it, can check: --ledger FILE.",
        )
        return
    chain = chain_at(where, {"hash": composed.head, "count": composed.entries})
    yield _entry(chain, composed, terms, taken)
    yield _total(chain, composed, terms)
    if record is not None:
        yield _files(chain, str(composed.entry), record)
    if statistics is not None:
        yield _released(chain, statistics)


def released(statistics: Statistics, where: str) -> Check:
    """Statistics that name no head: each has an entry in this ledger, that is charged.

    Raises:
        Wrong: The ledger cannot be read, was tampered with, or has none.
    """
    return _released(chain_at(where, None), statistics)


def _of_facts(composed: Composed, terms: Promised, **figures: Any) -> Composed:
    """What follows from a ledger that says of the run what is stated, but for what was found."""
    head = {"count": composed.entries, "hash": composed.head}
    return state.composed(LedgerRecord.pick(composed.to_json(), **{"head": head, **figures}), terms.delta)


def _coherent(composed: Composed, terms: Promised) -> Check:
    """What has to hold whatever the ledger says."""
    problems: list[object] = []
    problems += differences(composed.to_json(), _of_facts(composed, terms).to_json(), tolerance=0.0)
    budget, spent, used = composed.budget, composed.spent_epsilon, composed.used
    if used is not None and (budget is None or composed.final):
        problems.append("used belongs to a budget without a final run")
    # One run alone cannot cost more than all of them.
    if composed.delta == terms.delta and spent is not None and spent < terms.epsilon * (1 - 1e-3):
        problems.append("the total is less than this entry alone")
    if budget is not None and used is not None and used < _least_share(budget, terms.event) * (1 - 1e-3):
        problems.append("the share of the budget is less than this entry uses alone")
    if problems:
        raise Wrong(f"{listed(problems)}. {costs.again(terms)}")
    return verified("ledger: total", "is not less than this entry alone, and is consistent with the stated budget.")


def _least_share(budget: Budget, event: Event) -> float:
    """What an event alone uses of a budget of which nothing is set aside for imports."""
    whole = renyi.allowance(budget.epsilon, budget.delta, budget.order)
    if whole <= 0 or "rdp" not in costs.bounded(event):
        return math.inf
    return admission.divergence(event, budget.order) / whole


def ledger_of(export: Published) -> str | None:
    """The ledger that the recipe of a run names, if it is a file that is there; the recipe may be a stranger's.

    A run that has no private/ was copied, and is not in the default ledger of this machine.
    """
    if export.run is None:
        return None
    named = export.run.load_config().privacy.ledger
    if named is None and not export.run.private.is_dir():
        return None
    path = default_path() if named is None else Path(named)
    return str(path) if path.exists() else None


def chain_at(where: str, head: Json | None) -> _Chain:
    """A ledger's chain, whole, which contains ``head`` if one is given; Wrong where it cannot be read."""
    try:
        return _open(where, head)
    except (DpllmError, sqlite3.Error, OSError) as error:
        raise Wrong(f"the ledger cannot be read ({error}). Name another with --ledger FILE, or restore it.") from None


def _open(where: str, head: Json | None) -> _Chain:
    if where.startswith(_URL):
        name, value = where, _read(Postgres(where, read_only=True))
    else:
        path = Path(where).resolve()
        beside = [path.with_name(f"{path.name}-{end}") for end in ("wal", "shm", "journal")]
        for one in (path, *filter(os.path.lexists, beside)):
            check_regular(os.lstat(one), one, MOST_LEDGER)  # SQLite would wait for ever at a pipe
        name, value = path.name, _read(SQLite(path, read_only=True)) if _stored(path) else read_object(path)
    entries = read_export(value, Path(name))
    if problems := verify_export(value, head):
        raise Wrong(f"{name}: {problems[0]} Do not trust what it says of this run.")
    return _Chain(entries, value["progress"], name)


def _stored(path: Path) -> bool:
    """Whether SQLite can read it, which alone closes a ledger in use without ending the locks of this process."""
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as db:
        try:
            db.execute("PRAGMA schema_version")
        except sqlite3.DatabaseError:
            return False
    return True


def _read(store: Store) -> Json:
    with closing(store):
        return Chain(store).export()


def _entry(chain: _Chain, composed: Composed, terms: Promised, taken: int) -> Check:
    """The run's own entry pays for its event."""
    name = str(composed.entry)
    reserved = {e.facts["entry"]: e for e in chain.entries[: composed.entries] if e.kind == "reserve"}
    if name not in reserved or reserved[name].dataset != composed.dataset:
        raise Wrong(
            f"{chain.where} has no entry {name} of dataset {composed.dataset} before the stated head, so it was charged to "
            "another ledger. Name that one."
        )
    facts = reserved[name].facts
    if parts_of(event_of(reserved[name])) != parts_of(terms.event):
        raise Wrong(f"entry {name} of {chain.where} was reserved for an event other than the card's.")
    if (facts["unit"], facts["relation"]) != (terms.unit, terms.neighbouring_relation):
        raise Wrong(f"entry {name} of {chain.where} is about a unit or relation other than the card's.")
    executed = chain.steps.get(name, 0)
    # The best of several runs is one release: how many steps there were would say how many runs.
    if executed < (1 if isinstance(terms.event, RepeatAndSelect) else taken):
        raise Wrong(f"{chain.where} charged {executed} steps for this run, but the card states more.")
    steps = f"; {executed} steps were charged" if isinstance(terms.event, RunEvent) else ""
    return verified("ledger: entry", f"{composed.entry} of {chain.where} was reserved for exactly this event{steps}.")


def _released(chain: _Chain, shown: Statistics) -> Check:
    """Each statistic has an entry of its own, all of it charged, before the stated head or after it."""
    reserved = {
        entry.facts["entry"]: (entry.dataset, entry.facts["unit"], entry.facts["relation"], event_of(entry))
        for entry in chain.entries
        if entry.kind == "reserve"
    }
    account = shown.dataset, shown.unit, shown.neighbouring_relation
    wrong = [
        release.statistic
        for release in shown.releases
        if reserved.get(release.entry) != (*account, release.event)
        or chain.steps.get(str(release.entry), 0) < count_releases(release.event)
    ]
    if wrong or len({release.entry for release in shown.releases}) < len(shown.releases):
        raise Wrong(
            f"{chain.where} has no entry of its own that is charged for {listed(wrong or ['each release'])}. Name their "
            "ledger."
        )
    return verified("ledger: statistics", f"{chain.where} charged each of {len(shown.releases)} releases by itself.")


def _total(chain: _Chain, composed: Composed, terms: Promised) -> Check:
    """The total as it was at the stated head."""
    entries = [entry for entry in chain.entries[: composed.entries] if entry.dataset == composed.dataset]
    # No figure depends on runs that ended, and steps matter of reconciled runs only: the chain has those.
    account = account_of(composed.dataset, [entry for entry in entries if entry.kind != "commit"], {})
    delta = composed.budget.delta if composed.budget else terms.delta
    spent = math.inf if account.flaws() else costs.together(account.events(), delta, terms.neighbouring_relation)
    own = next(run.reservation for run in account.runs if run.reservation.entry == composed.entry)
    fresh = _of_facts(composed, terms, **admission.comes_to(account, spent, own.group))
    if problems := costs.differing(composed.to_json(), fresh.to_json(), terms, "ledger"):
        raise Wrong(f"at the stated head of {chain.where}, {listed(problems)}. {costs.again(terms)}")
    later = len(chain.entries) - composed.entries
    return verified(
        _NAME,
        f"{chain.where}: the chain is unbroken and contains the stated head, where the total of dataset {composed.dataset} "
        f"was {spent:.6g}{f'; {later} entries came later' if later else ''}.",
    )
