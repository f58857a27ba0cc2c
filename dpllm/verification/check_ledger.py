"""Checks that a ledger's chain is unbroken, contains the head that a record states, and was charged for exactly this event.

Comes in: a release, and a ledger (a file, an export of one, a PostgreSQL URL) or none. Goes out: checks. Writes nothing, and
takes no network address from the files that are verified.
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
from dpllm.ledger.chain import Chain, read_export, verify_export
from dpllm.ledger.chain import Entry as ChainEntry
from dpllm.ledger.store import Postgres, SQLite, Store, default_path
from dpllm.ledger.values import account_of, event_of
from dpllm.privacy import accounting, renyi
from dpllm.privacy.events import Event
from dpllm.privacy.parts import parts_of
from dpllm.records import Json
from dpllm.statement import state
from dpllm.statement.privacy_record import Budget, Composed
from dpllm.statement.released import Entry
from dpllm.statement.run_files import LedgerRecord, read_run
from dpllm.verification import check_promise, values
from dpllm.verification.values import Check, Published, Wrong

_NAME = "ledger"
_URL = ("postgresql://", "postgres://")
MOST_LEDGER = 2**30


@dataclass(frozen=True)
class _Chain:
    """A ledger at one moment."""

    entries: Sequence[ChainEntry]
    steps: dict[str, int]
    where: str

    def reserved(self, length: int | None = None) -> dict[str, ChainEntry]:
        """Reservations among the first ``length`` entries, by name."""
        return {entry.facts["entry"]: entry for entry in self.entries[:length] if entry.kind == "reserve"}


def check(release: Published[Any]) -> Iterator[Check]:
    """Checks what a release states about the ledger: whether it is consistent and, given a ledger, whether it agrees."""
    promise, composed, statistics = release.promise, release.promise.composed, release.promise.statistics
    terms = promise.terms
    if composed is None and (terms is not None or promise.reason is not None):
        if release.ledger is not None and terms is not None:
            raise Wrong("a ledger was given, but the record names no entry in any. Ask its author which this is.")
        yield values.asserted(_NAME, "none is named, so no total over several releases is stated.")
        return
    entries = statistics.entries() if statistics else []
    if composed is not None:
        if terms is None:
            raise Wrong(f"a ledger entry is named, but no event for it. {release.again}")
        yield _consistent_total(release, composed)
        account = composed.dataset, terms.unit, terms.neighbouring_relation
        own_entry = Entry(str(composed.entry), *account, terms.event, promise.steps)
    elif not entries:
        return
    location = ledger_of(release)
    if location is None:
        names = [f"{entry.name} of dataset {entry.dataset}" for entry in ([own_entry] if composed else entries)]
        yield values.asserted(
            _NAME,
            f"entry {values.listed(names)} and what it says are the author's word. Whoever has the ledger, or an export of it, "
            "can check: --ledger FILE.",
        )
        return
    chain = chain_at(location, {"hash": composed.head, "count": composed.entries} if composed else None)
    if composed is not None:
        yield charged(chain, "ledger: entry", [own_entry], release.again, composed.entries)
        yield _total(chain, release, composed)
        if release.run is not None:
            yield _manifest(chain, own_entry.name, read_run(release.run).manifest)
    if entries:
        yield charged(chain, "ledger: statistics", entries, release.again)


def charged(chain: _Chain, line: str, entries: Sequence[Entry], advice: str, length: int | None = None) -> Check:
    """Checks that the chain has a separate entry for each of ``entries``, before ``length`` if given, and charged its event."""
    reserved = chain.reserved(length)
    for due in entries:
        name, entry = f"{chain.where}: entry {due.name}", reserved.get(due.name)
        if entry is None or entry.dataset != due.dataset:
            raise Wrong(
                f"{chain.where} has no entry {due.name} of dataset {due.dataset} before the stated head. Name another ledger."
            )
        steps, unit_and_relation = chain.steps.get(due.name, 0), (entry.facts["unit"], entry.facts["relation"])
        same_event = parts_of(event_of(entry)) == parts_of(due.event)
        rules = {
            f"{name} was reserved for an event other than the stated one": same_event,
            f"{name} is about another unit or relation": unit_and_relation == (due.unit, due.relation),
            f"{name} was charged for {steps} steps, and more are stated": steps >= due.steps,
        }
        values.hold(rules, advice)
    if len({due.name for due in entries}) < len(entries):
        raise Wrong(f"{chain.where} has no entry of its own for each of {len(entries)} releases. {advice}")
    names = values.listed([due.name for due in entries])
    return values.verified(line, f"{chain.where} was charged for exactly {names}, each by itself.")


def _manifest(chain: _Chain, name: str, manifest: Json) -> Check:
    commits = [entry.facts for entry in chain.entries if entry.kind == "commit" and entry.facts["entry"] == name]
    digests = [facts["manifest"] for facts in commits if "manifest" in facts]
    if not digests:
        return values.asserted("ledger: files", f"{chain.where} was not told which files the run wrote.")
    if digests[-1] != digest(manifest):
        raise Wrong(f"{chain.where} knows other files of this run than run.json lists. Restore run.json and the files.")
    return values.verified("ledger: files", f"{chain.where} knows the files that run.json lists.")


def _composed_with(composed: Composed, delta: float, **figures: Any) -> Composed:
    """The statement that follows from a ledger that agrees with ``composed`` except in ``figures``."""
    head = {"count": composed.entries, "hash": composed.head}
    return state.composed(LedgerRecord.pick(composed.to_json(), **{"head": head, **figures}), delta)


def _consistent_total(release: Published[Any], composed: Composed) -> Check:
    terms: Any = release.promise.terms
    wrong = list(values.differences(composed.to_json(), _composed_with(composed, terms.delta).to_json(), tolerance=0.0))
    budget, spent, used = composed.budget, composed.spent_epsilon, composed.used
    min_share = _share_of_entry(budget, terms.event) * (1 - 1e-3) if budget and used is not None else 0.0
    values.hold(
        {
            values.listed(wrong): not wrong,
            "used belongs to a budget without a final run": used is None or (budget is not None and not composed.final),
            # A single run cannot cost more than all runs together.
            "the total is less than this entry alone": composed.delta != terms.delta
            or spent is None
            or spent >= terms.epsilon * (1 - 1e-3),
            "the share of the budget is less than this entry uses alone": (used or 0.0) >= min_share,
        },
        release.again,
    )
    return values.verified(
        "ledger: total", "is not less than this entry alone, and is consistent with the stated budget."
    )


def _share_of_entry(budget: Budget, event: Event) -> float:
    """The share of a budget that the event uses alone, if nothing is set aside for imports."""
    allowance = renyi.allowance(budget.epsilon, budget.delta, budget.order)
    if allowance <= 0 or "rdp" not in check_promise.bounded(event):
        return math.inf
    return admission.divergence(event, budget.order) / allowance


def _total(chain: _Chain, release: Published[Any], composed: Composed) -> Check:
    terms: Any = release.promise.terms
    entries = [entry for entry in chain.entries[: composed.entries] if entry.dataset == composed.dataset]
    # No figure depends on whether a run has ended, and steps matter for reconciled runs only, which are in the chain.
    account = account_of(composed.dataset, [entry for entry in entries if entry.kind != "commit"], {})
    delta = composed.budget.delta if composed.budget else terms.delta
    spent = (
        math.inf
        if account.flaws()
        else accounting.epsilon(accounting.compose(account.events()), delta, terms.neighbouring_relation)
    )
    reservation = next(run.reservation for run in account.runs if run.reservation.entry == composed.entry)
    computed = _composed_with(composed, terms.delta, **admission.account_totals(account, spent, reservation.group))
    if problems := check_promise.differing(composed.to_json(), computed.to_json(), terms, "composed"):
        raise Wrong(f"at the stated head of {chain.where}, {values.listed(problems)}. {release.again}")
    later = len(chain.entries) - composed.entries
    return values.verified(
        _NAME,
        f"{chain.where}: the chain is unbroken and contains the stated head, where the total of dataset {composed.dataset} "
        f"was {spent:.6g}{f'; {later} entries came later' if later else ''}.",
    )


def ledger_of(release: Published[Any]) -> str | None:
    """Location of the ledger: the user's, or the file that the run's recipe names, which may come from a stranger.

    A run without private/ is a copy, so it is not in the default ledger of this machine.
    """
    if release.ledger is not None or release.run is None:
        return release.ledger
    named = release.run.load_config().privacy.ledger
    if named is None and not release.run.private.is_dir():
        return None
    path = default_path() if named is None else Path(named)
    return str(path) if path.exists() else None


def chain_at(location: str, head: Json | None) -> _Chain:
    """A ledger's unbroken chain, which contains ``head`` if given; raises Wrong if it cannot be read or verified."""
    try:
        return _open(location, head)
    except (DpllmError, sqlite3.Error, OSError) as error:
        raise Wrong(f"the ledger cannot be read ({error}). Name another with --ledger FILE, or restore it.") from None


def _open(location: str, head: Json | None) -> _Chain:
    if location.startswith(_URL):
        name, value = location, _read(Postgres(location, read_only=True))
    else:
        path = Path(location).resolve()
        companions = [path.with_name(f"{path.name}-{end}") for end in ("wal", "shm", "journal")]
        for file in (path, *filter(os.path.lexists, companions)):
            values.check_regular(os.lstat(file), file, MOST_LEDGER)  # SQLite would wait forever on a pipe
        name, value = path.name, _read(SQLite(path, read_only=True)) if _is_sqlite(path) else values.read_object(path)
    entries = read_export(value, Path(name))
    if problems := verify_export(value, head):
        raise Wrong(f"{name}: {problems[0]} Do not trust what it says of this run.")
    return _Chain(entries, value["progress"], name)


def _is_sqlite(path: Path) -> bool:
    """Whether SQLite can read the file; only SQLite can close a ledger in use without releasing this process's locks."""
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as db:
        try:
            db.execute("PRAGMA schema_version")
        except sqlite3.DatabaseError:
            return False
    return True


def _read(store: Store) -> Json:
    with closing(store):
        return Chain(store).export()
