"""Storage of the ledger: append-only tables, and transactions that are on disk when they return.

Comes in: SQL with ``?`` for values. Goes out: rows. One class for an SQLite file, one for a PostgreSQL database (psycopg, extra
``postgres``). Must not know the meaning of entries.
"""

from __future__ import annotations

import os
import platform
import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import parse_qsl, urlsplit

from dpllm.errors import ConfigError, Refused
from dpllm.files import make_lockable

SCHEMA_VERSION = 5
TABLES = {  # table -> columns
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "entries": "seq {integer} PRIMARY KEY, kind TEXT NOT NULL, dataset TEXT NOT NULL, payload TEXT NOT NULL, "
    "prev_hash TEXT NOT NULL, hash TEXT NOT NULL",
    "progress": "entry TEXT PRIMARY KEY, seq {integer} NOT NULL, steps {integer} NOT NULL, updated_at {real} NOT NULL",
    "records": "seq {integer} PRIMARY KEY, fingerprint TEXT NOT NULL, nonce TEXT NOT NULL, hashes {blob} NOT NULL",
    "refusals": "dataset TEXT NOT NULL, reason TEXT NOT NULL, number {integer} NOT NULL, PRIMARY KEY (dataset, reason)",
}
# table -> conditions under which an INSERT and an UPDATE are refused; every DELETE is refused.
_REFUSED = {
    "entries": ("NEW.seq <> (SELECT COALESCE(MAX(seq), 0) + 1 FROM entries)", "true"),
    "progress": (
        "NEW.steps <> 0 OR EXISTS (SELECT 1 FROM progress WHERE entry = NEW.entry)",
        "NEW.entry <> OLD.entry OR NEW.seq <> OLD.seq OR NEW.steps <> OLD.steps + 1",
    ),
    "records": ("EXISTS (SELECT 1 FROM records WHERE seq = NEW.seq)", "true"),
    "refusals": (
        "NEW.number <> 1 OR EXISTS (SELECT 1 FROM refusals WHERE dataset = NEW.dataset AND reason = NEW.reason)",
        "NEW.number < OLD.number",
    ),
    "meta": ("EXISTS (SELECT 1 FROM meta WHERE key = NEW.key)", "OLD.key = 'fingerprint_key'"),
}
# Name of a guard -> its table, the guarded statement, and the condition under which it is refused.
GUARDS = {
    f"{table}_{moment.lower()}": (table, moment, when)
    for table, (insert, update) in _REFUSED.items()
    for moment, when in (("INSERT", insert), ("UPDATE", update), ("DELETE", "true"))
}
PATIENCE = 60  # seconds that a process waits for the write lock
ONLY_GROWS = "the ledger only grows"
# Limits for an untrusted file: bytes of one value, steps of SQLite's virtual machine.
MOST_VALUE, MOST_WORK = 2**26, 2 * 10**8
LOCK = 0x6470_6C6C_6D  # "dpllm": PostgreSQL's advisory lock for creating the schema
BITS = {"INSERT": 4, "DELETE": 8, "UPDATE": 16, "TRUNCATE": 32}  # pg_trigger.tgtype; 1 is FOR EACH ROW, 2 is BEFORE


def default_path() -> Path:
    """The ledger's path unless the recipe names another: in the user's data directory."""
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "dpllm" / "ledger.sqlite"


def check_place(path: Path) -> None:
    """Refuses, with a ConfigError, a path that cannot be a file; opens nothing, since closing it would drop SQLite's locks."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))
    folder = existing if existing != path else path.absolute().parent
    problem = ""
    if os.path.isdir(path):
        problem = f"is a directory; name a file in it, such as {path / 'ledger.sqlite'}"
    elif not folder.is_dir():
        problem = f"{folder} is a file, so nothing can be stored under it"
    elif existing == path and not os.path.isfile(path):
        problem = "is not a regular file"
    elif not os.access(existing, os.R_OK | os.W_OK) or not os.access(folder, os.W_OK | os.X_OK):
        problem = "this user may not write there"
    if problem:
        raise _unusable(path, problem)


def _unusable(path: object, problem: object) -> ConfigError:
    return ConfigError(
        f"ledger {path}: {problem}. Without it no budget can be kept, so nothing runs. Set privacy.ledger to a ledger of "
        "dpllm, or a new file, on a local disk."
    )


def _create(tables: Iterable[str], **types: str) -> list[str]:
    """Statements that create the tables of a new ledger, its fingerprint key and its version."""
    statements = [f"CREATE TABLE {table} ({TABLES[table].format(**types)})" for table in tables]
    values = {"fingerprint_key": secrets.token_hex(32), "schema_version": SCHEMA_VERSION}
    return [*statements, *(f"INSERT INTO meta VALUES ('{key}', '{value}')" for key, value in values.items())]


def _check_version(store: Store) -> None:
    versions = [value for (value,) in store.rows("SELECT value FROM meta WHERE key = 'schema_version'")]
    if versions != [str(SCHEMA_VERSION)]:
        raise store.unusable(f"it has version {', '.join(versions)}, and this dpllm reads version {SCHEMA_VERSION}")


class LedgerIdentity(TypedDict):
    """The place of a ledger, by which copies are recognised."""

    path: str  # resolved path of the file; in PostgreSQL database and schema
    host: str
    device: str  # number of the file system, which may change when the machine starts
    volume: str  # identifier of the file system, which most keep; "" where there is none
    file: str  # inode number; in PostgreSQL server, database and table


class SQLite:
    """The ledger in one file, for one thread."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Opens the file, which may be untrusted if ``read_only``; else makes it if absent, readable by its owner only.

        It must be on a local disk: SQLite's locks do not work on most network file systems.

        Raises:
            ConfigError: The path cannot be written, or holds something other than a ledger of this version.
        """
        self.location = str(path)
        if read_only:
            self._open_read_only(path)
            return
        check_place(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_lockable(path)
            self._path, self._file = path.absolute(), os.stat(path)
            self.identity = LedgerIdentity(
                path=str(path.resolve()),
                host=platform.node(),
                device=str(self._file.st_dev),
                volume=str(os.statvfs(path).f_fsid) if hasattr(os, "statvfs") else "",
                file=str(self._file.st_ino),
            )
            self._db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self.unusable(getattr(error, "strerror", error)) from error
        try:
            self.rows("PRAGMA journal_mode = WAL")
            # NORMAL, usual with a WAL, could lose the last charges in a power failure, although their steps were released.
            self.rows("PRAGMA synchronous = FULL")
            self._make()
        except BaseException:
            self._db.close()
            raise

    def _open_read_only(self, path: Path) -> None:
        # A ledger that is not in use has no -wal file, and SQLite would make one to read it.
        mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
        ticks = iter(range(MOST_WORK // 100_000))
        self._db.set_progress_handler(lambda: next(ticks, None) is None, 100_000)
        try:
            for table in ("meta", "entries", "progress"):
                expected = _create([table], integer="INTEGER", real="REAL")[0]
                # A view or a computed column could run forever, and so could pages that link to one another.
                texts = self.rows("SELECT sql FROM sqlite_master WHERE name = ?", table)
                if [" ".join(str(text).split()) for (text,) in texts] != [expected]:
                    raise self.unusable(f"its table {table} is not as dpllm makes it")
                if self.rows(f"PRAGMA quick_check({table})") != [("ok",)]:
                    raise self.unusable("it is damaged")
            _check_version(self)
        except BaseException:
            self._db.close()
            raise

    def _make(self) -> None:
        if self._made():
            return
        with self.write():
            if self._made():  # another process was first
                return
            for statement in _create(TABLES, integer="INTEGER", real="REAL", blob="BLOB"):
                self.rows(statement)
            for name in GUARDS:
                self.rows(self._guard(name))

    def _made(self) -> bool:
        tables = {name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and not tables.issuperset(("meta", "entries", "progress")):
            raise self.unusable("it is the database of another program")
        if tables:
            _check_version(self)
        return bool(tables)

    @staticmethod
    def _guard(name: str) -> str:
        table, moment, when = GUARDS[name]
        refuse = f"BEGIN SELECT RAISE(ABORT, '{ONLY_GROWS}'); END"
        return f"CREATE TRIGGER {name} BEFORE {moment} ON {table} WHEN {when} {refuse}"

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement."""
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self.unusable(error) from error

    def write(self) -> AbstractContextManager[None]:
        """A transaction in which nobody else writes; on disk when it ends, undone if it fails.

        Raises:
            Refused: The file is no longer at its path, so writes would be lost.
        """
        try:
            in_place = os.path.samestat(os.stat(self._path), self._file)
        except OSError:
            in_place = False
        if not in_place:
            raise Refused(
                f"ledger {self.location}: its file was deleted, moved or replaced while it was in use, so new charges would be "
                "lost. Put that very file back and continue with --resume; if it is gone, restore a backup, and start again "
                "with --overwrite."
            )
        return self._transaction(self._take_turn)

    def read(self) -> AbstractContextManager[None]:
        """A transaction that reads one snapshot."""
        return self._transaction(lambda: self.rows("BEGIN"))

    def _take_turn(self) -> None:
        """Waits for the write lock; retries more often the longer it waits. SQLite's own back-off does the opposite."""
        began, waited = time.monotonic(), 0.0
        self.rows("PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    self._db.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    waited = time.monotonic() - began
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or waited > PATIENCE:
                        raise self.unusable(error) from error
                time.sleep(0.005 / (1 + 400 * waited))
        finally:
            self.rows(f"PRAGMA busy_timeout = {PATIENCE * 1000}")

    @contextmanager
    def _transaction(self, begin: Callable[[], object]) -> Iterator[None]:
        begin()
        try:
            yield
            self.rows("COMMIT")
        except BaseException:
            self._db.rollback()
            raise

    def missing_guards(self) -> list[str]:
        """Names of the triggers that are missing or replaced."""
        triggers = dict(self.rows("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
        return sorted(name for name in GUARDS if triggers.get(name) != self._guard(name))

    def unusable(self, problem: object) -> ConfigError:
        """The error for a ledger that cannot be used."""
        return _unusable(self.location, problem)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()


class Postgres:
    """The ledger in a PostgreSQL database, in the first schema of the connection's search path; for one thread."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        """Connects to ``postgresql://user@host/database``; makes the tables if absent, unless ``read_only``.

        The URL must not hold a password, since recipes are copied into run directories; libpq reads PGPASSWORD or ~/.pgpass.

        Raises:
            ConfigError: The URL holds a password, psycopg is missing, the server cannot be reached, or the tables are
                those of another program or version.
        """
        self.location = url
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise self.unusable(error) from None
        if parts.password is not None or any("password" in key for key, _ in parse_qsl(parts.query)):
            raise ConfigError(
                "privacy.ledger holds a password, and the recipe is copied into the run directory. Remove it from the URL, and "
                "set PGPASSWORD or ~/.pgpass."
            )
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "a ledger in PostgreSQL needs psycopg, which is not installed. Type: pip install 'psycopg[binary]'"
            ) from None
        self._errors = psycopg.Error
        try:
            self._db = psycopg.connect(url, autocommit=True)
        except psycopg.Error as error:
            raise self.unusable(_first_line(error)) from None
        try:
            self.rows("SET synchronous_commit = on")
            self.rows(f"SET lock_timeout = '{PATIENCE}s'")
            if read_only:
                self.rows("SET default_transaction_read_only = on")
            else:
                self._create()
                self.identity = self._find_identity()
        except BaseException:
            self._db.close()
            raise

    def _find_identity(self) -> LedgerIdentity:
        path, number = self.rows(
            "SELECT current_database() || '/' || current_schema(), concat_ws(':', system_identifier, "
            "(SELECT oid FROM pg_database WHERE datname = current_database()), 'entries'::regclass::oid) FROM pg_control_system()"
        )[0]
        host = self._db.info.host
        if host.startswith("/") or host in ("localhost", "127.0.0.1", "::1"):  # names that every machine has
            host = platform.node()
        return LedgerIdentity(path=path, host=f"{host}:{self._db.info.port}", device="", volume="", file=number)

    def _create(self) -> None:
        with self._transaction("BEGIN ISOLATION LEVEL READ COMMITTED", f"SELECT pg_advisory_xact_lock({LOCK})"):
            # If several processes open an empty database, one makes the tables.
            where = "WHERE table_schema = current_schema()"
            tables = {name for (name,) in self.rows(f"SELECT table_name FROM information_schema.tables {where}")}
            if tables.isdisjoint(TABLES):
                for statement in _create(TABLES, integer="BIGINT", real="DOUBLE PRECISION", blob="BYTEA"):
                    self.rows(statement)
                for name, (table, moment, body, kind) in self._guards().items():
                    call = f"FOR EACH {'ROW' if kind & 1 else 'STATEMENT'} EXECUTE FUNCTION dpllm_{name}()"
                    self.rows(f"CREATE FUNCTION dpllm_{name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$")
                    self.rows(f"CREATE TRIGGER {name} BEFORE {moment} ON {table} {call}")
            elif not tables.issuperset(TABLES):
                raise self.unusable("it holds tables of another program")
            _check_version(self)

    @staticmethod
    def _guards() -> dict[str, tuple[str, str, str, int]]:
        """Name of a trigger -> its table, its statement, the body of its function, and its type."""
        guards = {}
        for name, (table, moment, when) in GUARDS.items():
            returned = "OLD" if moment == "DELETE" else "NEW"
            body = f"BEGIN IF {when} THEN RAISE EXCEPTION '{ONLY_GROWS}'; END IF; RETURN {returned}; END"
            guards[name] = (table, moment, body, 3 | BITS[moment])
        for table in TABLES:  # row triggers do not fire for TRUNCATE
            body = f"BEGIN RAISE EXCEPTION '{ONLY_GROWS}'; END"
            guards[f"{table}_truncate"] = (table, "TRUNCATE", body, 2 | BITS["TRUNCATE"])
        return guards

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement, with ``?`` for values."""
        try:
            cursor = self._db.execute(statement.replace("?", "%s") if values else statement, values or None)
            return cursor.fetchall() if cursor.description else []
        except self._errors as error:
            raise self.unusable(_first_line(error)) from error

    def write(self) -> AbstractContextManager[None]:
        """A transaction in which nobody else writes; others may read."""
        return self._transaction("BEGIN ISOLATION LEVEL READ COMMITTED", "LOCK TABLE entries IN EXCLUSIVE MODE")

    def read(self) -> AbstractContextManager[None]:
        """A transaction that reads one snapshot."""
        return self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    @contextmanager
    def _transaction(self, *begin: str) -> Iterator[None]:
        try:
            for statement in begin:
                self.rows(statement)
            yield
            self.rows("COMMIT")
        except BaseException:
            if not self._db.closed:
                self._db.rollback()
            raise

    def missing_guards(self) -> list[str]:
        """Names of the triggers that are missing, disabled or replaced."""
        rows = self.rows(
            "SELECT tgname, relname, prosrc, tgtype FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid "
            "JOIN pg_proc p ON p.oid = tgfoid WHERE relnamespace = current_schema()::regnamespace "
            "AND NOT tgisinternal AND tgenabled IN ('O', 'A') AND tgqual IS NULL"
        )
        triggers = {name: (table, body, kind) for name, table, body, kind in rows}
        expected = {name: (table, body, kind) for name, (table, _, body, kind) in self._guards().items()}
        return sorted(name for name in expected if triggers.get(name) != expected[name])

    def unusable(self, problem: object) -> ConfigError:
        """The error for a ledger that cannot be used."""
        return ConfigError(
            f"ledger {self.location}: {problem}. Without it no budget can be kept, so nothing runs. Set privacy.ledger to a "
            "database that this user may write to, or to a file."
        )

    def close(self) -> None:
        """Closes the connection."""
        self._db.close()


Store = SQLite | Postgres


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
