"""The privacy budget of each dataset, across all runs: one SQLite file that only grows.

Comes in: events and budgets. Goes out: reservations, refusals, history. A run reserves its whole event before the
first gradient, charges every step before it is applied, and finishes with what was executed. Knows nothing about
models or training.

Guarantee:
    On a file that only dpllm writes, all events ever reserved for a dataset, together, have an epsilon of at most the
    budget's at the budget's delta. A reservation counts in full whether its run completed, stopped or crashed.
    Concurrent processes cannot overspend, and no reservation executes more steps than it paid for, nor one step
    twice.

    The ledger binds the code of dpllm. It does not stop someone who trains without it, gives the same data another
    name, deletes the file or rewrites it whole: the hash chain shows an edit in the middle, but a chain that was cut
    or computed afresh only contradicts a head that was copied elsewhere, as run.json does. The epsilon of several
    runs assumes that no run's parameters were chosen after seeing the result of an earlier one.

References:
    Rogers et al. 2016, "Privacy Odometers and Filters: Pay-as-you-Go Composition", on what an adaptive choice of
    later runs would cost.
"""

import hashlib
import json
import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.privacy.accounting import Event, Relation, compose, count_releases, epsilon

Status = Literal["completed", "interrupted", "refused"]

SCHEMA_VERSION = "1"
GENESIS = "0" * 64
TRIGGERS = {
    "entries_insert": """BEFORE INSERT ON entries
        WHEN NEW.seq <> (SELECT COALESCE(MAX(seq), 0) + 1 FROM entries)""",
    "entries_update": "BEFORE UPDATE ON entries",
    "entries_delete": "BEFORE DELETE ON entries",
    "progress_insert": """BEFORE INSERT ON progress
        WHEN NEW.steps <> 0 OR EXISTS (SELECT 1 FROM progress WHERE entry = NEW.entry)""",
    "progress_update": """BEFORE UPDATE ON progress
        WHEN NEW.entry <> OLD.entry OR NEW.seq <> OLD.seq OR NEW.steps <> OLD.steps + 1""",
    "progress_delete": "BEFORE DELETE ON progress",
}
# Steps come too often for the chain: progress counts them, and they enter it at commit.
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL,
    dataset TEXT NOT NULL, payload TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS progress (entry TEXT PRIMARY KEY, seq INTEGER NOT NULL,
    steps INTEGER NOT NULL, updated_at REAL NOT NULL);
INSERT OR IGNORE INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}');
{
    "".join(
        f"CREATE TRIGGER IF NOT EXISTS {name} {when} BEGIN SELECT RAISE(ABORT, 'the ledger only grows'); END;"
        for name, when in TRIGGERS.items()
    )
}
COMMIT;
"""


@dataclass(frozen=True)
class Budget:
    """What all runs on one dataset may spend together."""

    epsilon: float
    delta: float
    unit: str
    relation: Relation


@dataclass(frozen=True)
class Reservation:
    """One run's claim; `epsilon` at `delta` is what this run costs alone."""

    entry: str
    dataset: str
    run: str
    num_steps: int
    epsilon: float
    delta: float
    unit: str
    relation: Relation
    config_hash: str | None


@dataclass(frozen=True)
class Entry:
    """One link of the chain: a budget, a reserve or a commit; `payload` is JSON as stored."""

    seq: int
    kind: str
    dataset: str
    payload: str
    prev_hash: str
    hash: str

    def content(self) -> dict[str, Any]:
        """What the payload says."""
        return dict(json.loads(self.payload))

    def expected_hash(self) -> str:
        """SHA-256 of the previous link's hash and of this row in canonical JSON."""
        row = [self.seq, self.kind, self.dataset, str(self.payload)]  # str: a forged row may hold bytes
        return hashlib.sha256((self.prev_hash + _canonical(row)).encode()).hexdigest()


def default_path() -> Path:
    """Where the ledger lies unless the recipe names another: the user's data directory."""
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "dpllm" / "ledger.sqlite"


class Ledger:
    """The ledger in one file, for one thread; close it or use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        """Opens the file; makes it, readable by its owner only, and its directories if absent.

        Args:
            path: on a local disk; the locks of SQLite do not hold on most network file systems.

        Raises:
            ConfigError: the path cannot be written, or holds something other than a ledger.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise self._unusable(error.strerror) from error
        self._db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
        try:
            self._sql("PRAGMA journal_mode = WAL")
            self._sql("PRAGMA synchronous = FULL")
            tables = {name for (name,) in self._sql("SELECT name FROM sqlite_master")}
            if not tables:
                self._db.executescript(SCHEMA)
            elif not {"meta", "entries", "progress"} <= tables:
                raise self._unusable("it is the database of another program")
            version = self._sql("SELECT value FROM meta WHERE key = 'schema_version'")
            if version != [(SCHEMA_VERSION,)]:
                raise self._unusable(f"its schema version is {version}, not {SCHEMA_VERSION}")
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise self._unusable(error) from error
            raise

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def set_budget(self, dataset: str, epsilon: float, delta: float, unit: str, relation: Relation) -> None:
        """Fixes, once, what all runs on `dataset` may spend; the same budget again is no change.

        Raises:
            ConfigError: a value is out of range.
            Refused: another budget is set, or runs with another unit or relation are reserved.
        """
        wanted = Budget(float(epsilon), float(delta), unit, relation)
        bounded = 0 < wanted.epsilon < float("inf") and 0 < wanted.delta < 1
        if not (dataset and unit and bounded and relation in get_args(Relation)):
            raise ConfigError(
                f"{wanted} for dataset {dataset!r} bounds nothing. Give names for dataset and unit, epsilon > 0, "
                f"0 < delta < 1 and one of the relations {', '.join(get_args(Relation))}."
            )
        with self._transaction():
            present = self.budget(dataset)
            if present == wanted:
                return
            if present is not None:
                raise Refused(
                    f"dataset {dataset!r} has a budget already: {present}. A budget that can be "
                    "raised later limits nothing. Keep it, or keep new data under a new name."
                )
            self._same_unit(dataset, unit, relation)
            self._append("budget", dataset, asdict(wanted))

    def budget(self, dataset: str) -> Budget | None:
        """The budget of `dataset`; None where none was set, and runs are charged without limit."""
        for content in self._contents(dataset, "budget"):
            return Budget(**{name: content[name] for name in Budget.__dataclass_fields__})
        return None

    def reserve(
        self,
        dataset: str,
        *,
        event: Event,
        delta: float,
        unit: str,
        relation: Relation,
        num_steps: int,
        run: str,
        config_hash: str | None = None,
    ) -> Reservation:
        """Charges a whole run before it starts, or refuses it and writes nothing.

        Args:
            dataset: name of the data in this ledger.
            event: all that the run will release.
            delta: at which the run states its own epsilon.
            unit: the privacy unit.
            relation: the neighbouring relation.
            num_steps: logical batches to execute, no more than `event` pays for.
            run: name of the run, for people.
            config_hash: of the resolved recipe.

        Raises:
            BudgetExceeded: all events of this dataset with this one exceed its budget.
            Refused: another unit or relation than before, or a chain that was tampered with.
            ConfigError: the event is malformed, or pays for fewer steps than `num_steps`.

        Guarantee:
            The check and the charge are one transaction: however many processes reserve at once, what they reserve
            together is within the budget.
        """
        paid = count_releases(event)
        if not 0 <= num_steps <= paid:
            raise ConfigError(
                f"the event pays for {paid} steps of a run on {dataset!r} that has {num_steps}: "
                "what runs must be what is accounted. Build both from one Plan."
            )
        alone = epsilon(event, delta, relation)
        if alone == float("inf"):
            raise Refused(
                f"no finite epsilon can be certified at delta {delta:g}, so nothing can be charged."
                " Raise privacy.delta or privacy.noise_multiplier."
            )
        name = secrets.token_hex(8)  # random, so that it means no other run in another ledger
        terms = (num_steps, alone, delta, unit, relation, config_hash)
        claim = Reservation(name, dataset, run, *terms)
        while True:
            # Composition takes seconds and the write lock stops everyone else, so it is computed for the dataset as
            # it was `seen`, and the lock is held only to look whether that still holds. A refusal needs no lock: the
            # ledger grows, so it stays right.
            seen = self._position(dataset)
            self._refuse_if_tampered()
            self._same_unit(dataset, unit, relation)
            self._refuse_if_over(dataset, event)
            with self._transaction():
                if self._position(dataset) != seen:
                    continue
                seq = self._append("reserve", dataset, {**asdict(claim), "event": event})
                self._sql("INSERT INTO progress VALUES (?, ?, 0, ?)", claim.entry, seq, time.time())
            return claim

    def charge(self, entry: str, step: int) -> None:
        """Records that step number `step`, counted from 1, is about to be applied.

        Raises:
            Refused: `step` is not the next one, was not reserved, or the run is finished.
            ConfigError: this ledger has no such reservation.

        Guarantee:
            Of several processes that resume one reservation, one is let through for each step.
        """
        with self._transaction():
            claim, steps = self._unfinished(entry)
            if step != steps + 1:
                raise Refused(
                    f"step {step} of run {claim.run!r} cannot be charged: {steps} are, and each is "
                    "released once, in order. Another process may be training this run: stop it, "
                    f"and resume from step {steps + 1}."
                )
            if step > claim.num_steps:
                raise Refused(
                    f"run {claim.run!r} reserved {claim.num_steps} steps, so step {step} is not "
                    "paid for. Reserve a new run for more steps."
                )
            done = "UPDATE progress SET steps = ?, updated_at = ? WHERE entry = ?"
            self._sql(done, step, time.time(), entry)

    def steps(self, entry: str) -> int:
        """Steps charged so far, each of which may have been released.

        Raises:
            ConfigError: this ledger has no such reservation.
        """
        return self._claim(entry)[1]

    def finish(self, entry: str, status: Status) -> None:
        """Enters into the chain how many steps were executed; "interrupted" can be resumed.

        Raises:
            Refused: the run is completed or refused already.
            ConfigError: this ledger has no such reservation.
        """
        with self._transaction():
            claim, steps = self._unfinished(entry)
            content = {"entry": entry, "steps": steps, "status": status}
            self._append("commit", claim.dataset, content)

    def spent(self, dataset: str, delta: float | None = None, planned: tuple[Event, Relation] | None = None) -> float:
        """Epsilon of everything ever reserved for `dataset`, composed by PLD.

        Args:
            dataset: name of the data in this ledger.
            delta: by default the budget's, or else the largest that a run stated.
            planned: a run that is not reserved, counted in as if it were.
        """
        runs = self._contents(dataset, "reserve")
        events = [run["event"] for run in runs] + ([planned[0]] if planned else [])
        if not events:
            return 0.0
        if delta is None:
            budget = self.budget(dataset)
            delta = budget.delta if budget else max(run["delta"] for run in runs)
        relation = runs[0]["relation"] if runs else planned[1] if planned else "zero_out"
        return epsilon(compose(events), delta, relation)

    def runs(self, dataset: str) -> list[tuple[Reservation, int, str]]:
        """Each reservation of `dataset`, the steps charged to it, and how it ended."""
        ended = {content["entry"]: content["status"] for content in self._contents(dataset, "commit")}
        claims = [self._claim(content["entry"]) for content in self._contents(dataset, "reserve")]
        return [(claim, steps, ended.get(claim.entry, "running or crashed")) for claim, steps in claims]

    def remaining(self, dataset: str) -> float | None:
        """Budget less spent; None without a budget. Composed, a run may cost less than alone."""
        budget = self.budget(dataset)
        return None if budget is None else max(0.0, budget.epsilon - self.spent(dataset))

    def datasets(self) -> list[str]:
        """Every dataset with a budget or a reservation."""
        return [name for (name,) in self._sql("SELECT DISTINCT dataset FROM entries ORDER BY 1")]

    def history(self, dataset: str) -> list[Entry]:
        """All links of the chain that concern `dataset`, oldest first."""
        return self._entries("WHERE dataset = ?", dataset)

    def head(self) -> dict[str, Any]:
        """Hash of the last link and number of links: copy it where this file's writers are not."""
        last = self._entries("WHERE seq = (SELECT MAX(seq) FROM entries)")
        return {"hash": last[0].hash if last else GENESIS, "count": last[0].seq if last else 0}

    def verify(self, head: dict[str, Any] | None = None) -> list[str]:
        """Recomputes the chain and compares the progress with it.

        Args:
            head: an earlier `head()`; a chain that was cut or rewritten no longer contains it.

        Returns:
            The problems, each in a sentence; empty where everything holds.
        """
        with self._transaction("BEGIN"):  # entries and progress of one moment
            entries = self._entries()
            executed = dict(self._sql("SELECT entry, steps FROM progress"))
            triggers = self._sql("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        previous, problems = GENESIS, []
        for number, link in enumerate(entries, start=1):
            if (link.seq, link.prev_hash, link.hash) != (number, previous, link.expected_hash()):
                problems.append(f"entry {number} was changed or removed: its hash does not match.")
            previous = link.hash
        if head and head["count"] and head["hash"] not in [e.hash for e in entries]:
            problems.append(f"the chain lacks an earlier head, of {head['count']} entries.")
        problems += [f"guard {name} is missing." for name in {*TRIGGERS} - {n for (n,) in triggers}]
        if problems:
            return problems
        reserved = {link.content()["entry"] for link in entries if link.kind == "reserve"}
        problems += [f"run {name} lost its reservation." for name in executed.keys() - reserved]
        for link in entries:
            content = link.content()
            least = content["steps"] if link.kind == "commit" else 0
            most = content["num_steps"] if link.kind == "reserve" else sys.maxsize
            if link.kind != "budget" and not least <= executed.get(content["entry"], -1) <= most:
                problems.append(f"entry {link.seq} contradicts the steps that its run has charged.")
        return problems

    def _sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from error

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        self._sql(begin)
        try:
            yield
            self._sql("COMMIT")
        except BaseException:
            self._db.rollback()
            raise

    def _unusable(self, why: object) -> ConfigError:
        return ConfigError(
            f"ledger {self.path}: {why}. Without it no budget can be kept, so nothing runs. Set "
            "privacy.ledger to a ledger of dpllm, or a new file, on a local disk."
        )

    def _entries(self, where: str = "", *values: object) -> list[Entry]:
        columns = "seq, kind, dataset, payload, prev_hash, hash"
        rows = self._sql(f"SELECT {columns} FROM entries {where} ORDER BY seq", *values)
        return [Entry(*row) for row in rows]

    def _append(self, kind: str, dataset: str, content: dict[str, Any]) -> int:
        head = self.head()
        payload = _canonical({**content, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        entry = Entry(head["count"] + 1, kind, dataset, payload, head["hash"], "")
        row = (entry.seq, kind, dataset, payload, entry.prev_hash, entry.expected_hash())
        self._sql("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", *row)
        return entry.seq

    def _contents(self, dataset: str, kind: str) -> list[dict[str, Any]]:
        links = self._entries("WHERE dataset = ? AND kind = ?", dataset, kind)
        return [link.content() for link in links]

    def _position(self, dataset: str) -> int:
        where = "dataset = ? AND kind IN ('budget', 'reserve')"
        rows = self._sql(f"SELECT COALESCE(MAX(seq), 0) FROM entries WHERE {where}", dataset)
        return int(rows[0][0])

    def _claim(self, entry: str) -> tuple[Reservation, int]:
        rows = self._sql("SELECT payload, steps FROM progress JOIN entries USING (seq) WHERE entry = ?", entry)
        content = json.loads(rows[0][0]) if rows else {}
        if content.get("entry") != entry:
            raise ConfigError(
                f"ledger {self.path} has no reservation {entry!r}, so its steps cannot be charged. "
                "Set privacy.ledger to the ledger that the run was started with."
            )
        claim = Reservation(**{name: content[name] for name in Reservation.__dataclass_fields__})
        return claim, rows[0][1]

    def _unfinished(self, entry: str) -> tuple[Reservation, int]:
        claim, steps = self._claim(entry)
        for commit in self._contents(claim.dataset, "commit"):
            if commit["entry"] == entry and commit["status"] != "interrupted":
                raise Refused(
                    f"run {claim.run!r} is {commit['status']}, so no step of it can be charged. "
                    "Start a new run, which reserves its own steps."
                )
        return claim, steps

    def _refuse_if_tampered(self) -> None:
        problems = self.verify()
        if problems:
            raise Refused(
                f"ledger {self.path} was changed by something other than dpllm, so what is left "
                f"of any budget is unknown: {problems[0]} Restore the file from a backup."
            )

    def _same_unit(self, dataset: str, unit: str, relation: Relation) -> None:
        for kind in ("budget", "reserve"):
            for past in self._contents(dataset, kind):
                if (past["unit"], past["relation"]) != (unit, relation):
                    raise Refused(
                        f"dataset {dataset!r} is accounted per {past['unit']!r} under "
                        f"{past['relation']!r}; epsilon per {unit!r} under {relation!r} is another "
                        "quantity and does not add to it. Set data.unit and data.public_size as "
                        "in its earlier runs."
                    )

    def _refuse_if_over(self, dataset: str, event: Event) -> None:
        budget = self.budget(dataset)
        if budget is None:
            return
        past = [run["event"] for run in self._contents(dataset, "reserve")]

        def cost(events: list[Event]) -> float:
            return epsilon(compose(events), budget.delta, budget.relation)

        together = cost([*past, event])
        if together > budget.epsilon:
            requested, spent = cost([event]), cost(past)
            raise BudgetExceeded(
                f"dataset {dataset!r}: this run requests epsilon {requested:.4f}; {spent:.4f} is "
                f"spent and {max(0.0, budget.epsilon - spent):.4f} remains of {budget.epsilon:.4f} "
                f"at delta {budget.delta:g}; together they come to {together:.4f}. "
                "Lower privacy.epsilon, train fewer steps, or use other data."
            )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
