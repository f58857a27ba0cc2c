"""The hash chain: what was entered, in which order, how an edit shows, and its export, which an auditor can check.

Comes in: a store, or an export. Goes out: links, and what contradicts them. Must not know what decides about a budget.

A copy of a ledger would be a second budget. So the first write notes where the ledger belongs, beside the chain: an export shows
no path, and dpllm writes nowhere else. This finds mistakes: it does not stop somebody who edits the file, and a cloned machine
looks like the first one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dpllm.errors import ConfigError, Refused
from dpllm.ledger.store import SCHEMA_VERSION, LedgerIdentity, Store

GENESIS = "0" * 64
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
BUDGET = {"epsilon", "delta", "unit", "relation"}
# Every kind of entry, and what its payload must say.
KINDS = {
    "budget": BUDGET | {"order"},
    "reserve": BUDGET | {"entry", "run", "num_steps", "event", "final"},
    "commit": {"entry", "steps", "status"},
    "reconcile": {"entry", "steps", "by", "reason"},
    "import": {"run", "event", "unit", "relation"},
    "exception": {"by", "reason"},
    "data": {"records", "commitment", "derived_from"},
    "adopt": {"by", "reason"},
}


class Entry(NamedTuple):
    """One link as it is stored: ``payload`` is JSON, ``hash`` covers all the rest."""

    seq: int
    kind: str
    dataset: str
    payload: str
    prev_hash: str
    hash: str

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the payload says, not to be changed; refused where it is not readable."""
        return _facts(self.payload, self.seq)

    def expected_hash(self) -> str:
        """SHA-256 of the previous link's hash and of this row in canonical JSON; empty for a row that dpllm never writes."""
        texts = (self.kind, self.dataset, self.payload, self.prev_hash)
        if type(self.seq) is not int or not all(type(text) is str for text in texts):
            return ""
        # As each hash enters the next one, an edit of one link shows unless all that follow are computed anew.
        row = [self.seq, self.kind, self.dataset, self.payload]
        return hashlib.sha256((self.prev_hash + canonical(row)).encode()).hexdigest()


@lru_cache(maxsize=65_536)
def _facts(payload: str, seq: int) -> dict[str, Any]:
    try:
        facts = json.loads(payload)
        if not isinstance(facts, dict):
            raise ValueError
    except (TypeError, ValueError, RecursionError):
        raise Refused(
            f"entry {seq} of the ledger is not readable, so what is left of any budget is unknown. Restore the ledger "
            "from a backup.",
            reason="tampered",
        ) from None
    return facts


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces; two equal values have one text."""
    return _ENCODER.encode(value)


def broken(entries: Sequence[Entry], last_seq: int = 0, previous: str = GENESIS) -> list[str]:
    """What is wrong with links that should follow link number ``after``, whose hash is ``previous``."""
    problems = []
    for number, entry in enumerate(entries, start=last_seq + 1):
        if (entry.seq, entry.prev_hash, entry.hash) != (number, previous, entry.expected_hash()):
            problems.append(f"entry {number} was changed or removed: its hash does not match.")
        previous = entry.hash
    return problems or [f"entry {entry.seq} says nothing that dpllm writes." for entry in entries if _malformed(entry)]


def _malformed(entry: Entry) -> bool:
    """Whether a link whose hash holds is one that dpllm would not have written."""
    try:
        needed, facts = KINDS[entry.kind], entry.facts
        counts = [facts[name] for name in needed & {"steps", "num_steps"}]
        return not (needed <= facts.keys() and isinstance(facts["at"], str) and all(type(n) is int for n in counts))
    except (Refused, KeyError, TypeError):  # of an export: a kind or a payload that is no text
        return True


def contradictions(entries: Sequence[Entry], executed: Mapping[str, int], head: dict[str, Any] | None) -> list[str]:
    """Where the steps of runs, or an earlier head, do not go with links that are in order among themselves."""
    problems = []
    if head and head.get("count"):
        count = head["count"]
        in_range = type(count) is int and 0 < count <= len(entries)
        if not in_range or entries[count - 1].hash != head.get("hash"):
            problems.append(f"the chain lacks an earlier head, of {count} entries.")
    limits = {entry.facts["entry"]: entry.facts["num_steps"] for entry in entries if entry.kind == "reserve"}
    problems += [f"run {name} lost its reservation." for name in executed if name not in limits]
    for entry in entries:
        if entry.kind in ("reserve", "commit", "reconcile"):
            name, min_steps = entry.facts["entry"], 0 if entry.kind == "reserve" else entry.facts["steps"]
            steps = executed.get(name, -1)
            if type(steps) is not int or name not in limits or not min_steps <= steps <= limits[name]:
                problems.append(f"entry {entry.seq} contradicts the steps that its run has charged.")
    return problems


class Chain:
    """The entries of one store. A link is read once, checked, and kept: what decides is never an unchecked row."""

    def __init__(self, store: Store) -> None:
        """Nothing is read yet."""
        self.store = store
        self._links: list[Entry] = []
        self._index: dict[tuple[str, str], list[Entry]] = {}  # dataset and kind -> links
        self._holds = 0

    def stored(self, condition: str = "", *values: object) -> list[Entry]:
        """Links as they are stored, of which nothing is checked."""
        columns = ", ".join(Entry._fields)
        rows = self.store.rows(f"SELECT {columns} FROM entries {condition} ORDER BY seq", *values)
        return [Entry._make(row) for row in rows]

    def of(self, dataset: str, *kinds: str) -> list[Entry]:
        """Links of a dataset, of all or of these kinds, oldest first; refused where something else changed the chain."""
        self._follow()
        return sorted(entry for kind in kinds or KINDS for entry in self._index.get((dataset, kind), ()))

    def datasets(self) -> list[str]:
        """Every name of which a link speaks."""
        self._follow()
        return sorted({dataset for dataset, kind in self._index if kind != "adopt"})

    @property
    def length(self) -> int:
        """How many links there are, within ``moment`` or ``writing``."""
        return len(self._links)

    def numbered(self, seq: int) -> Entry | None:
        """The link of this number, if there is one."""
        self._follow()
        return self._links[seq - 1] if 0 < seq <= len(self._links) else None

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Inside, all links are those of one moment."""
        self._follow()
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def _follow(self) -> None:
        if not self._holds:
            self._catch_up()

    def _catch_up(self) -> None:
        """Reads and checks what was added since; that the last known link still stands shows cuts and rewriting."""
        length = len(self._links)
        added = self.stored("WHERE seq >= ?", max(length, 1))
        if length:
            if added[:1] != self._links[-1:]:
                self.refuse([f"entry {length} was changed or removed: its hash does not match."])
            del added[0]
        self.refuse(broken(added, length, self._last_hash()))
        self._keep(added)

    def _last_hash(self) -> str:
        return self._links[-1].hash if self._links else GENESIS

    def _keep(self, added: Sequence[Entry]) -> None:
        self._links += added
        for entry in added:
            self._index.setdefault((entry.dataset, entry.kind), []).append(entry)

    @contextmanager
    def writing(self, *, adopting: bool = False) -> Iterator[None]:
        """A transaction in which nobody else writes, after reading what others wrote; undone if it fails.

        Raises:
            Refused: This is a copy of a ledger that belongs elsewhere, and nobody is ``adopting`` it.
        """
        before = None
        try:
            with self.store.write():
                if adopting or not is_bound(self.store):
                    bind(self.store)
                self._catch_up()
                before = list(self._links)
                self._holds += 1
                try:
                    yield
                finally:
                    self._holds -= 1
        except BaseException:
            if before is not None:
                self._links, self._index = [], {}
                self._keep(before)
            raise

    def append(self, kind: str, dataset: str, content: dict[str, Any]) -> int:
        """Adds a link, within ``writing``, with the time of this machine in UTC; returns its number.

        Raises:
            ConfigError: It is one that no process could read again.
        """
        payload = canonical({**content, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        entry = Entry(len(self._links) + 1, kind, dataset, payload, self._last_hash(), "")
        entry = entry._replace(hash=entry.expected_hash())
        if _malformed(entry):
            raise ConfigError(f"the ledger cannot hold {payload} as {kind}. Give steps as integers.")
        self.store.rows("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", *entry)
        self._keep([entry])
        return entry.seq

    def head(self) -> dict[str, Any]:
        """Hash of the last link and number of links, as they are stored."""
        last = self.store.rows("SELECT seq, hash FROM entries WHERE seq = (SELECT MAX(seq) FROM entries)")
        return {"hash": last[0][1] if last else GENESIS, "count": last[0][0] if last else 0}

    def verify(self, head: dict[str, Any] | None = None) -> list[str]:
        """Compares every stored link, and the steps of all runs, with the chain; see ``Ledger.verify``."""
        with self.store.read():  # all tables of one moment
            stored = self.stored()
            executed = dict(self.store.rows("SELECT entry, steps FROM progress"))
            missing = self.store.missing_guards()
        length = len(self._links)
        if stored[:length] == self._links:  # what is equal to a link that was checked is checked
            problems = broken(stored[length:], length, self._last_hash())
        else:
            problems = broken(stored) or ["the chain is another than this process read before."]
        problems += [f"guard {name} is missing." for name in missing]
        if problems:
            return problems
        self._keep(stored[length:])
        return contradictions(self._links, executed, head)

    def refuse(self, problems: list[str]) -> None:
        """Raises a refusal if there is any problem."""
        if problems:
            raise Refused(
                f"ledger {self.store.location} was changed by something other than dpllm, so what is left "
                f"of any budget is unknown: {problems[0]} Restore it from a backup.",
                reason="tampered",
            )

    def export(self) -> dict[str, Any]:
        """The whole chain and the steps of every run, as JSON; neither fingerprints nor their key."""
        with self.store.read():
            entries = [entry._asdict() for entry in self.stored()]
            progress = dict(self.store.rows("SELECT entry, steps FROM progress ORDER BY seq"))
            value = {"entries": entries, "progress": progress, "head": self.head()}
            return {"kind": "dpllm ledger", "version": SCHEMA_VERSION, **value}


def read_export(value: dict[str, Any], path: Path) -> list[Entry]:
    """The links of an export.

    Raises:
        ConfigError: It is none, or one of another version.
    """
    try:
        is_export = (value["kind"], value["version"]) == ("dpllm ledger", SCHEMA_VERSION)
        if not is_export or not isinstance(value["progress"], dict) or set(value["head"]) != {"hash", "count"}:
            raise ValueError
        return _links(value)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: is no export of a ledger of version {SCHEMA_VERSION}. Make one with dpllm ledger export --output FILE."
        ) from None


def verify_export(value: dict[str, Any], head: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with an export that ``read_export`` accepts, whose chain must contain ``head``; empty if nothing is."""
    entries = _links(value)
    if problems := broken(entries):
        return problems
    if value["head"]["count"] != len(entries) or (entries and value["head"]["hash"] != entries[-1].hash):
        return ["its head is not that of its last entry: entries were cut off."]
    return contradictions(entries, value["progress"], head)


def _links(value: dict[str, Any]) -> list[Entry]:
    return [Entry(**{name: row[name] for name in Entry._fields}) for row in value["entries"]]


def is_bound(store: Store) -> bool:
    """Whether the ledger's place is written down as it is now; False also if it was renamed, mounted or restored since.

    Raises:
        Refused: It is a copy of one that belongs elsewhere.
        ConfigError: What is written down is no place.
    """
    rows = store.rows("SELECT value FROM meta WHERE key = 'place'")
    if not rows:
        return False
    identity = store.identity
    try:
        bound: LedgerIdentity = json.loads(rows[0][0])
        same_path = (bound["host"], bound["path"]) == (identity["host"], identity["path"])
        is_same_place = _same_file(bound, identity) or same_path
    except (ValueError, LookupError, TypeError):
        raise store.unusable("where it belongs cannot be read") from None
    if not is_same_place:
        raise Refused(
            f"ledger {store.location} is a copy of {bound['path']} on {bound['host']!r}, and two copies would be two budgets for "
            "the same data. If that one is still used, set privacy.ledger to it. If it moved here for good, type: dpllm ledger "
            f"adopt --ledger {store.location} --by NAME --reason WHY."
        )
    return bound == identity


def _same_file(bound: LedgerIdentity, identity: LedgerIdentity) -> bool:
    """A file that was renamed, or mounted elsewhere, keeps its number; a backup that was put back keeps host and path."""
    if bound["file"] != identity["file"] or bound["path"] == identity["path"]:
        return bound["file"] == identity["file"]
    # Another file where this one was before would be taken for a backup that was put back. And this very file has a journal for
    # each of two hard links, of which SQLite reads one: what was reserved by the other name would be lost.
    if bound["device"] != identity["device"]:
        return False
    if not (identity["device"] and bound["host"] == identity["host"] and os.path.exists(bound["path"])):
        return True
    # One name in one directory, which is mounted in two places.
    (folder, name), (other_folder, other_name) = os.path.split(bound["path"]), os.path.split(identity["path"])
    return name == other_name and os.path.samefile(folder, other_folder)


def bind(store: Store) -> None:
    """Writes down that the ledger belongs where it lies now."""
    if store.rows("SELECT 1 FROM meta WHERE key = 'place'"):
        store.rows("UPDATE meta SET value = ? WHERE key = 'place'", json.dumps(store.identity))
    else:
        store.rows("INSERT INTO meta VALUES ('place', ?)", json.dumps(store.identity))
