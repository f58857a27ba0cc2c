"""The hash chain: entries in order, detection of edits, and an export that an auditor can check.

Comes in: a store, or an export. Goes out: links, and contradictions. Must not know how budgets admit runs.

A copy of a ledger would be a second budget. So the first write records the ledger's place, outside the chain, so that exports
show no path; dpllm then refuses to write to a copy. This finds mistakes: it does not stop anyone who edits the file, and a cloned
machine looks like the original.
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
# Kind of an entry -> fields that its payload must have.
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
    """One link as stored: ``payload`` is JSON, and ``hash`` covers all other fields."""

    seq: int
    kind: str
    dataset: str
    payload: str
    prev_hash: str
    hash: str

    @property
    def facts(self) -> Mapping[str, Any]:
        """The parsed payload, which must not be changed; refused if it cannot be read."""
        return _facts(self.payload, self.seq)

    def expected_hash(self) -> str:
        """SHA-256 of the previous link's hash and this row in canonical JSON; empty for a row that dpllm never writes."""
        texts = (self.kind, self.dataset, self.payload, self.prev_hash)
        if type(self.seq) is not int or not all(type(text) is str for text in texts):
            return ""
        # Each hash enters the next one, so an edit of one link shows unless all later hashes are recomputed.
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
            f"entry {seq} of the ledger cannot be read, so what is left of any budget is unknown. Restore the ledger "
            "from a backup.",
            reason="tampered",
        ) from None
    return facts


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces; equal values have equal texts."""
    return _ENCODER.encode(value)


def broken(entries: Sequence[Entry], last_seq: int = 0, previous: str = GENESIS) -> list[str]:
    """Problems of links that should follow link number ``last_seq``, whose hash is ``previous``."""
    problems = []
    for number, entry in enumerate(entries, start=last_seq + 1):
        if (entry.seq, entry.prev_hash, entry.hash) != (number, previous, entry.expected_hash()):
            problems.append(f"entry {number} was changed or removed: its hash does not match.")
        previous = entry.hash
    return problems or [f"entry {entry.seq} says nothing that dpllm writes." for entry in entries if _malformed(entry)]


def _malformed(entry: Entry) -> bool:
    """Whether dpllm never writes such a link, although its hash is right."""
    try:
        needed, facts = KINDS[entry.kind], entry.facts
        counts = [facts[name] for name in needed & {"steps", "num_steps"}]
        return not (needed <= facts.keys() and isinstance(facts["at"], str) and all(type(n) is int for n in counts))
    except (Refused, KeyError, TypeError):  # in an export, the kind or the payload may not be text
        return True


def contradictions(entries: Sequence[Entry], executed: Mapping[str, int], head: dict[str, Any] | None) -> list[str]:
    """Contradictions between a consistent chain and the executed steps of its runs, or an earlier head."""
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
    """The entries of one store. Each link is read once, checked and kept, so no decision uses an unchecked row."""

    def __init__(self, store: Store) -> None:
        """Reads nothing yet."""
        self.store = store
        self._links: list[Entry] = []
        self._index: dict[tuple[str, str], list[Entry]] = {}  # dataset and kind -> links
        self._holds = 0

    def stored(self, condition: str = "", *values: object) -> list[Entry]:
        """Links as stored, unchecked."""
        columns = ", ".join(Entry._fields)
        rows = self.store.rows(f"SELECT {columns} FROM entries {condition} ORDER BY seq", *values)
        return [Entry._make(row) for row in rows]

    def of(self, dataset: str, *kinds: str) -> list[Entry]:
        """Links of a dataset, of all or of these kinds, oldest first; refused if anything but dpllm changed the chain."""
        self._follow()
        return sorted(entry for kind in kinds or KINDS for entry in self._index.get((dataset, kind), ()))

    def datasets(self) -> list[str]:
        """Every dataset name in the chain, sorted."""
        self._follow()
        return sorted({dataset for dataset, kind in self._index if kind != "adopt"})

    @property
    def length(self) -> int:
        """The number of links, within ``moment`` or ``writing``."""
        return len(self._links)

    def numbered(self, seq: int) -> Entry | None:
        """The link with this number; None if there is none."""
        self._follow()
        return self._links[seq - 1] if 0 < seq <= len(self._links) else None

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Inside, all reads see the same links."""
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
        """Reads and checks new links; rereads the last known link, which reveals cuts and rewriting."""
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
        """A transaction in which nobody else writes; reads first what others wrote, and is undone if it fails.

        Raises:
            Refused: This is a copy of a ledger that belongs elsewhere, and the call is not ``adopting`` it.
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
        """Adds a link, within ``writing``, with this machine's time in UTC; returns its number.

        Raises:
            ConfigError: No process could read the link again.
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
        """Hash of the last link and number of links, as stored."""
        last = self.store.rows("SELECT seq, hash FROM entries WHERE seq = (SELECT MAX(seq) FROM entries)")
        return {"hash": last[0][1] if last else GENESIS, "count": last[0][0] if last else 0}

    def verify(self, head: dict[str, Any] | None = None) -> list[str]:
        """Compares every stored link, and the steps of all runs, with the chain; see ``Ledger.verify``."""
        with self.store.read():  # one snapshot of all tables
            stored = self.stored()
            executed = dict(self.store.rows("SELECT entry, steps FROM progress"))
            missing = self.store.missing_guards()
        length = len(self._links)
        if stored[:length] == self._links:  # these links were checked before
            problems = broken(stored[length:], length, self._last_hash())
        else:
            problems = broken(stored) or ["the chain is another than this process read before."]
        problems += [f"guard {name} is missing." for name in missing]
        if problems:
            return problems
        self._keep(stored[length:])
        return contradictions(self._links, executed, head)

    def refuse(self, problems: list[str]) -> None:
        """Refuses if there is any problem."""
        if problems:
            raise Refused(
                f"ledger {self.store.location} was changed by something other than dpllm, so what is left "
                f"of any budget is unknown: {problems[0]} Restore it from a backup.",
                reason="tampered",
            )

    def export(self) -> dict[str, Any]:
        """The whole chain and the steps of every run, as JSON; without fingerprints and their key."""
        with self.store.read():
            entries = [entry._asdict() for entry in self.stored()]
            progress = dict(self.store.rows("SELECT entry, steps FROM progress ORDER BY seq"))
            value = {"entries": entries, "progress": progress, "head": self.head()}
            return {"kind": "dpllm ledger", "version": SCHEMA_VERSION, **value}


def read_export(value: dict[str, Any], path: Path) -> list[Entry]:
    """The links of an export.

    Raises:
        ConfigError: The value is not an export of a ledger, or has another version.
    """
    try:
        is_export = (value["kind"], value["version"]) == ("dpllm ledger", SCHEMA_VERSION)
        if not is_export or not isinstance(value["progress"], dict) or set(value["head"]) != {"hash", "count"}:
            raise ValueError
        return _links(value)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: is not an export of a ledger of version {SCHEMA_VERSION}. Make one with dpllm ledger export --output FILE."
        ) from None


def verify_export(value: dict[str, Any], head: dict[str, Any] | None = None) -> list[str]:
    """Problems of an export that ``read_export`` accepts; its chain must contain ``head``."""
    entries = _links(value)
    if problems := broken(entries):
        return problems
    if value["head"]["count"] != len(entries) or (entries and value["head"]["hash"] != entries[-1].hash):
        return ["its head is not that of its last entry: entries were cut off."]
    return contradictions(entries, value["progress"], head)


def _links(value: dict[str, Any]) -> list[Entry]:
    return [Entry(**{name: row[name] for name in Entry._fields}) for row in value["entries"]]


def is_bound(store: Store) -> bool:
    """Whether the recorded place is the ledger's present one; False also after it was renamed, mounted elsewhere or restored.

    Raises:
        Refused: This is a copy of a ledger that belongs elsewhere.
        ConfigError: The recorded place cannot be read.
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
            "the same data. If that one is still in use, set privacy.ledger to it. If it moved here for good, type: dpllm ledger "
            f"adopt --ledger {store.location} --by NAME --reason WHY."
        )
    return bound == identity


def _same_file(bound: LedgerIdentity, identity: LedgerIdentity) -> bool:
    """Whether both are the same file: a renamed or remounted file keeps its number; a restored backup keeps host and path.

    At the same path of another host, the file system must be the same too: numbers repeat on new volumes.
    """
    if bound["file"] != identity["file"]:
        return False
    if bound["path"] == identity["path"]:
        return bound["volume"] == identity["volume"] or bound["host"] == identity["host"]
    # Another file at the recorded path would be taken for a restored backup. And if both paths are hard links to this file, each
    # has its own journal and SQLite reads only one of them: reservations by the other name would be lost.
    if bound["device"] != identity["device"]:
        return False
    if not (identity["device"] and bound["host"] == identity["host"] and os.path.exists(bound["path"])):
        return True
    # The same name in the same directory, which is mounted in two places.
    (folder, name), (other_folder, other_name) = os.path.split(bound["path"]), os.path.split(identity["path"])
    return name == other_name and os.path.samefile(folder, other_folder)


def bind(store: Store) -> None:
    """Records the ledger's present place as the one where it belongs."""
    if store.rows("SELECT 1 FROM meta WHERE key = 'place'"):
        store.rows("UPDATE meta SET value = ? WHERE key = 'place'", json.dumps(store.identity))
    else:
        store.rows("INSERT INTO meta VALUES ('place', ?)", json.dumps(store.identity))
