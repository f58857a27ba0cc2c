"""The hash chain: what was entered, in which order, and how an edit shows.

Comes in: a store. Goes out: links, and what contradicts them. Must not know what decides about a budget.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpllm.errors import Refused
from dpllm.ledger.store import Store

GENESIS = "0" * 64
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
BUDGET = {"epsilon", "delta", "unit", "relation"}
# Every kind of entry, and what its payload must say.
KINDS = {
    "budget": BUDGET,
    "gate": BUDGET | {"gate", "order"},
    "seal": {"runs"},
    "reserve": BUDGET | {"entry", "run", "num_steps", "event"},
    "commit": {"entry", "steps", "status"},
    "reconcile": {"entry", "steps", "by", "reason"},
    "import": {"run", "event", "unit", "relation"},
    "exception": {"by", "reason"},
    "data": {"records", "commitment", "derived_from"},
}


@dataclass(frozen=True)
class Entry:
    """One link: ``payload`` is JSON as stored, ``hash`` covers all the rest."""

    seq: int
    kind: str
    dataset: str
    payload: str
    prev_hash: str
    hash: str

    def content(self) -> dict[str, Any]:
        """What the payload says.

        Raises:
            Refused: It is not readable.
        """
        return dict(self.facts)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The same, read once; not to be changed."""
        try:
            facts = json.loads(self.payload)
            if not isinstance(facts, dict):
                raise ValueError
        except (TypeError, ValueError, RecursionError):
            raise Refused(
                f"entry {self.seq} of the ledger is not readable, so what is left of any budget is unknown. Restore the ledger "
                "from a backup.",
                reason="tampered",
            ) from None
        return facts

    def expected_hash(self) -> str:
        """SHA-256 of the previous link's hash and of this row in canonical JSON; empty for a row that dpllm never writes."""
        texts = (self.kind, self.dataset, self.payload, self.prev_hash)
        if type(self.seq) is not int or not all(type(text) is str for text in texts):
            return ""
        row = [self.seq, self.kind, self.dataset, self.payload]
        return hashlib.sha256((self.prev_hash + canonical(row)).encode()).hexdigest()


def link(seq: int, kind: str, dataset: str, content: dict[str, Any], prev_hash: str) -> Entry:
    """The next link, stamped with the time of this machine in UTC."""
    payload = canonical({**content, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    entry = Entry(seq, kind, dataset, payload, prev_hash, "")
    return Entry(seq, kind, dataset, payload, prev_hash, entry.expected_hash())


def broken(entries: Sequence[Entry], after: int = 0, previous: str = GENESIS) -> list[str]:
    """What is wrong with links that should follow link number ``after``, whose hash is ``previous``."""
    problems = []
    for number, entry in enumerate(entries, start=after + 1):
        if (entry.seq, entry.prev_hash, entry.hash) != (number, previous, entry.expected_hash()):
            problems.append(f"entry {number} was changed or removed: its hash does not match.")
        previous = entry.hash
    return problems or [text for entry in entries for text in _malformed(entry)]


def _malformed(entry: Entry) -> list[str]:
    """A link whose hash holds, but which dpllm would not have written."""
    try:
        needed = KINDS[entry.kind]
        good = needed <= entry.facts.keys() and isinstance(entry.facts["at"], str)
        good = good and all(type(entry.facts[name]) is int for name in needed & {"steps", "num_steps"})
    except (Refused, KeyError):
        good = False
    return [] if good else [f"entry {entry.seq} says nothing that dpllm writes."]


def contradictions(entries: Sequence[Entry], executed: Mapping[str, int], head: dict[str, Any] | None) -> list[str]:
    """Where the steps of runs, or an earlier head, do not go with links that are in order among themselves."""
    problems = []
    if head and head.get("count"):
        count = head["count"]
        known = type(count) is int and 0 < count <= len(entries)
        if not known or entries[count - 1].hash != head.get("hash"):
            problems.append(f"the chain lacks an earlier head, of {count} entries.")
    limits = {entry.facts["entry"]: entry.facts["num_steps"] for entry in entries if entry.kind == "reserve"}
    problems += [f"run {name} lost its reservation." for name in executed if name not in limits]
    for entry in entries:
        if entry.kind in ("reserve", "commit", "reconcile"):
            name, least = entry.facts["entry"], 0 if entry.kind == "reserve" else entry.facts["steps"]
            steps = executed.get(name, -1)
            if type(steps) is not int or name not in limits or not least <= steps <= limits[name]:
                problems.append(f"entry {entry.seq} contradicts the steps that its run has charged.")
    return problems


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces; two equal values have one text."""
    return _ENCODER.encode(value)


class Chain:
    """The entries of one store. A link is read once, checked, and kept: what decides is never an unchecked row."""

    def __init__(self, store: Store) -> None:
        """Nothing is read yet."""
        self.store = store
        self._links: list[Entry] = []
        self._rows: list[tuple[Any, ...]] = []  # the same as they are stored
        self._index: dict[tuple[str, str], list[Entry]] = {}
        self._names: dict[str, int] = {}  # dataset -> how many links
        self._holds = 0

    # --- reading ---------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All links as they are stored, unchecked."""
        return self._read("")

    def stored(self, kind: str) -> list[Entry]:
        """Links of one kind as they are stored, unchecked."""
        return self._read("WHERE kind = ?", kind)

    def _read(self, where: str, *values: object) -> list[Entry]:
        return [Entry(*row) for row in self._select(where, *values)]

    def _select(self, where: str, *values: object) -> list[tuple[Any, ...]]:
        columns = "seq, kind, dataset, payload, prev_hash, hash"
        return self.store.rows(f"SELECT {columns} FROM entries {where} ORDER BY seq", *values)

    def of(self, dataset: str, *kinds: str) -> list[Entry]:
        """Links of a dataset and of these kinds, oldest first.

        Raises:
            Refused: The chain was changed by something else.
        """
        self._follow()
        found = [self._index.get((dataset, kind), []) for kind in kinds]
        return sorted((entry for part in found for entry in part), key=lambda entry: entry.seq)

    def knows(self, dataset: str) -> bool:
        """Whether any link is about this dataset."""
        self._follow()
        return self._names.get(dataset, 0) > 0

    def datasets(self) -> list[str]:
        """Every name of which a link speaks."""
        self._follow()
        return sorted(name for name, number in self._names.items() if number)

    def length(self) -> int:
        """How many links there are."""
        self._follow()
        return len(self._links)

    def since(self, length: int) -> list[Entry]:
        """Links after the first ``length``."""
        self._follow()
        return self._links[length:]

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
        added = self._read("WHERE seq >= ?", max(length, 1))
        if added[:1] != self._links[-1:] and length:
            self.refuse([f"entry {length} was changed or removed: its hash does not match."])
        added = added[1:] if length else added
        self.refuse(broken(added, length, self._links[-1].hash if length else GENESIS))
        for entry in added:
            self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self._links.append(entry)
        self._rows.append((entry.seq, entry.kind, entry.dataset, entry.payload, entry.prev_hash, entry.hash))
        self._index.setdefault((entry.dataset, entry.kind), []).append(entry)
        self._names[entry.dataset] = self._names.get(entry.dataset, 0) + 1

    # --- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction in which nobody else writes, after reading what others wrote; undone if it fails."""
        length = None
        try:
            with self.store.write():
                self._catch_up()
                length = len(self._links)
                self._holds += 1
                try:
                    yield
                finally:
                    self._holds -= 1
        except BaseException:
            while length is not None and len(self._links) > length:
                entry = self._links.pop()
                self._rows.pop()
                self._index[entry.dataset, entry.kind].pop()
                self._names[entry.dataset] -= 1
            raise

    def head(self) -> dict[str, Any]:
        """Hash of the last link and number of links, as they are stored."""
        last = self.store.rows("SELECT seq, hash FROM entries WHERE seq = (SELECT MAX(seq) FROM entries)")
        return {"hash": last[0][1] if last else GENESIS, "count": last[0][0] if last else 0}

    def append(self, kind: str, dataset: str, content: dict[str, Any]) -> int:
        """Adds a link, within ``writing``; returns its number."""
        previous = self._links[-1].hash if self._links else GENESIS
        entry = link(len(self._links) + 1, kind, dataset, content, previous)
        row = (entry.seq, kind, dataset, entry.payload, entry.prev_hash, entry.hash)
        self.store.rows("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", *row)
        self._keep(entry)
        return entry.seq

    # --- checking --------------------------------------------------------------------------------------------------

    def verify(self, head: dict[str, Any] | None = None) -> list[str]:
        """Compares every stored link, and the steps of all runs, with the chain; see ``Ledger.verify``."""
        with self.store.read():  # all tables of one moment
            rows = self._select("")
            executed = dict(self.store.rows("SELECT entry, steps FROM progress"))
            missing = self.store.missing_guards()
        length = len(self._links)
        if rows[:length] == self._rows:  # what is equal to a link that was checked is checked
            added = [Entry(*row) for row in rows[length:]]
            problems = broken(added, length, self._links[-1].hash if length else GENESIS)
        else:
            added = []
            problems = broken([Entry(*row) for row in rows]) or ["the chain is another than this process read before."]
        problems += [f"guard {name} is missing." for name in missing]
        if problems:
            return problems
        for entry in added:
            self._keep(entry)
        return contradictions(self._links, executed, head)

    def refuse_if_tampered(self) -> None:
        """Checks everything.

        Raises:
            Refused: The chain was changed by something else.
        """
        self.refuse(self.verify())

    def refuse(self, problems: list[str]) -> None:
        """Raises a refusal if there is any problem."""
        if problems:
            raise Refused(
                f"ledger {self.store.location} was changed by something other than dpllm, so what is left "
                f"of any budget is unknown: {problems[0]} Restore it from a backup.",
                reason="tampered",
            )
