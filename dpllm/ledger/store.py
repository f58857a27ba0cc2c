"""Where the ledger lies: tables that only grow, and transactions that are on disk when they return.

Comes in: SQL with ``?`` for values. Goes out: rows. One class for SQLite and one, in postgres.py, for PostgreSQL. Must
not know what an entry means.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from dpllm.errors import ConfigError

# Guards by name: the table, the moment, and when it is refused.
GUARDS = {
    "entries_insert": ("entries", "INSERT", "NEW.seq <> (SELECT COALESCE(MAX(seq), 0) + 1 FROM entries)"),
    "entries_update": ("entries", "UPDATE", "true"),
    "entries_delete": ("entries", "DELETE", "true"),
    "progress_insert": (
        "progress",
        "INSERT",
        "NEW.steps <> 0 OR EXISTS (SELECT 1 FROM progress WHERE entry = NEW.entry)",
    ),
    "progress_update": (
        "progress",
        "UPDATE",
        "NEW.entry <> OLD.entry OR NEW.seq <> OLD.seq OR NEW.steps <> OLD.steps + 1",
    ),
    "progress_delete": ("progress", "DELETE", "true"),
    "records_insert": ("records", "INSERT", "EXISTS (SELECT 1 FROM records WHERE seq = NEW.seq)"),
    "records_update": ("records", "UPDATE", "true"),
    "records_delete": ("records", "DELETE", "true"),
    "refusals_insert": (
        "refusals",
        "INSERT",
        "NEW.number <> 1 OR EXISTS (SELECT 1 FROM refusals WHERE dataset = NEW.dataset AND reason = NEW.reason)",
    ),
    "refusals_update": ("refusals", "UPDATE", "NEW.number < OLD.number"),
    "refusals_delete": ("refusals", "DELETE", "true"),
    "meta_insert": ("meta", "INSERT", "EXISTS (SELECT 1 FROM meta WHERE key = NEW.key)"),
    "meta_update": ("meta", "UPDATE", "OLD.key = 'fingerprint_key'"),
    "meta_delete": ("meta", "DELETE", "true"),
}
ONLY_GROWS = "the ledger only grows"
IN_1 = [name for name in GUARDS if name.startswith(("entries", "progress"))]
TABLES = {"meta", "entries", "progress", "records", "refusals"}


class Store(Protocol):
    """One open ledger, for one thread."""

    location: str

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement."""

    def write(self) -> AbstractContextManager[None]:
        """A transaction in which nobody else writes; on disk when it ends, undone if it fails."""

    def read(self) -> AbstractContextManager[None]:
        """A transaction that sees one moment."""

    def missing_guards(self) -> list[str]:
        """Names of the triggers that are gone, switched off or replaced."""

    def unusable(self, why: object) -> ConfigError:
        """The error for a ledger that cannot be used."""

    def close(self) -> None:
        """Closes it."""


def default_path() -> Path:
    """Where the ledger lies unless the recipe names another: the user's data directory."""
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "dpllm" / "ledger.sqlite"


def _guard(name: str) -> str:
    table, moment, when = GUARDS[name]
    return (
        f"CREATE TRIGGER {name} BEFORE {moment} ON {table} WHEN {when} BEGIN SELECT RAISE(ABORT, '{ONLY_GROWS}'); END"
    )


def _migrations() -> list[list[str]]:
    """The statements that lead to each schema version from the one before it."""
    return [
        [
            "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
            "CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, dataset TEXT NOT NULL, "
            "payload TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL)",
            "CREATE TABLE progress (entry TEXT PRIMARY KEY, seq INTEGER NOT NULL, steps INTEGER NOT NULL, "
            "updated_at REAL NOT NULL)",
            "INSERT INTO meta VALUES ('schema_version', '1')",
            *(_guard(name) for name in IN_1),
        ],
        [
            "CREATE TABLE records (seq INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, nonce TEXT NOT NULL, "
            "hashes BLOB NOT NULL)",
            "CREATE TABLE refusals (dataset TEXT NOT NULL, reason TEXT NOT NULL, number INTEGER NOT NULL, "
            "PRIMARY KEY (dataset, reason))",
            f"INSERT INTO meta VALUES ('fingerprint_key', '{secrets.token_hex(32)}')",
            "UPDATE meta SET value = '2' WHERE key = 'schema_version'",
            # Made anew, so that their text can be compared.
            *(f"DROP TRIGGER {name}" for name in IN_1),
            *(_guard(name) for name in GUARDS),
        ],
    ]


class SQLite:
    """The ledger in one file."""

    def __init__(self, path: Path) -> None:
        """Opens the file; makes it, readable by its owner only, and its directories if absent.

        Args:
            path: On a local disk; the locks of SQLite do not hold on most network file systems.

        Raises:
            ConfigError: The path cannot be written, or holds something other than a ledger.
        """
        self.path = Path(path)
        self.location = str(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise self.unusable(error.strerror) from error
        self._db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
        try:
            self.rows("PRAGMA journal_mode = WAL")
            self.rows("PRAGMA synchronous = FULL")
            self._migrate()
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise self.unusable(error) from error
            raise

    def _migrate(self) -> None:
        scripts = _migrations()
        if self._version() == len(scripts):
            return
        with self.write():  # of several processes that open a new file, one finds it empty
            for statement in (statement for script in scripts[self._version() :] for statement in script):
                self.rows(statement)

    def _version(self) -> int:
        tables = {name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return 0
        if not {"meta", "entries", "progress"} <= tables:
            raise self.unusable("it is the database of another program")
        version = [value for (value,) in self.rows("SELECT value FROM meta WHERE key = 'schema_version'")]
        known = len(_migrations())
        if not (len(version) == 1 and version[0].isdigit() and 1 <= int(version[0]) <= known):
            raise self.unusable(f"its schema version is {version}, and this dpllm knows up to {known}")
        return int(version[0])

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement."""
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self.unusable(error) from error

    def write(self) -> AbstractContextManager[None]:
        """A transaction in which nobody else writes."""
        return self._transaction("BEGIN IMMEDIATE")

    def read(self) -> AbstractContextManager[None]:
        """A transaction that sees one moment."""
        return self._transaction("BEGIN")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self.rows(begin)
        try:
            yield
            self.rows("COMMIT")
        except BaseException:
            self._db.rollback()
            raise

    def missing_guards(self) -> list[str]:
        """Names of the triggers that are gone or replaced."""
        there = dict(self.rows("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
        return sorted(name for name in GUARDS if there.get(name) != _guard(name))

    def unusable(self, why: object) -> ConfigError:
        """The error for a ledger that cannot be used."""
        return ConfigError(
            f"ledger {self.location}: {why}. Without it no budget can be kept, so nothing runs. Set "
            "privacy.ledger to a ledger of dpllm, or a new file, on a local disk."
        )

    def close(self) -> None:
        """Closes the file."""
        self._db.close()
