"""The ledger of an organisation: the same tables, guards and transactions in a PostgreSQL database.

Comes in: a ``postgresql://`` URL. Goes out: rows. Needs psycopg (extra ``postgres``).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dpllm.errors import ConfigError
from dpllm.ledger.store import GUARDS, ONLY_GROWS, TABLES

SCHEMA_VERSION = "2"  # that of SQLite's schema; the first one for PostgreSQL
LOCK = 0x6470_6C6C_6D  # "dpllm": the advisory lock under which the schema is made


BITS = {"INSERT": 4, "DELETE": 8, "UPDATE": 16, "TRUNCATE": 32}  # pg_trigger.tgtype; 1 is FOR EACH ROW, 2 is BEFORE


def _guards() -> dict[str, tuple[str, str, str, int]]:
    """Name of each trigger: its table, its moment, the body of its function, and its type."""
    guards = {}
    for name, (table, moment, when) in GUARDS.items():
        back = "OLD" if moment == "DELETE" else "NEW"
        body = f"BEGIN IF {when} THEN RAISE EXCEPTION '{ONLY_GROWS}'; END IF; RETURN {back}; END"
        guards[name] = (table, moment, body, 3 | BITS[moment])
    for table in sorted(TABLES):  # no trigger of a row fires for TRUNCATE
        body = f"BEGIN RAISE EXCEPTION '{ONLY_GROWS}'; END"
        guards[f"{table}_truncate"] = (table, "TRUNCATE", body, 2 | BITS["TRUNCATE"])
    return guards


def _schema() -> list[str]:
    guards = []
    for name, (table, moment, body, kind) in _guards().items():
        each = "ROW" if kind & 1 else "STATEMENT"
        guards += [
            f"CREATE FUNCTION dpllm_{name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$",
            f"CREATE TRIGGER {name} BEFORE {moment} ON {table} FOR EACH {each} EXECUTE FUNCTION dpllm_{name}()",
        ]
    return [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE entries (seq BIGINT PRIMARY KEY, kind TEXT NOT NULL, dataset TEXT NOT NULL, payload TEXT NOT NULL, "
        "prev_hash TEXT NOT NULL, hash TEXT NOT NULL)",
        "CREATE TABLE progress (entry TEXT PRIMARY KEY, seq BIGINT NOT NULL, steps BIGINT NOT NULL, "
        "updated_at DOUBLE PRECISION NOT NULL)",
        "CREATE TABLE records (seq BIGINT PRIMARY KEY, fingerprint TEXT NOT NULL, nonce TEXT NOT NULL, "
        "hashes BYTEA NOT NULL)",
        "CREATE TABLE refusals (dataset TEXT NOT NULL, reason TEXT NOT NULL, number BIGINT NOT NULL, "
        "PRIMARY KEY (dataset, reason))",
        f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}')",
        f"INSERT INTO meta VALUES ('fingerprint_key', '{secrets.token_hex(32)}')",
        *guards,
    ]


class Postgres:
    """The ledger in a schema of a PostgreSQL database: the first one of the connection's search path."""

    def __init__(self, url: str) -> None:
        """Connects; makes the tables if absent.

        Args:
            url: ``postgresql://user@host/database``, without a password: a recipe is copied into the run directory. libpq
                takes passwords from PGPASSWORD or ~/.pgpass.

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
                "privacy.ledger holds a password, and the recipe is copied into the run directory. Take it out of the URL, and "
                "set PGPASSWORD or ~/.pgpass."
            )
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "a ledger in PostgreSQL needs psycopg, which is not installed. Type: pip install 'dpllm[postgres]'"
            ) from None
        self._errors = psycopg.Error
        try:
            self._db = psycopg.connect(url, autocommit=True)
        except psycopg.Error as error:
            raise self.unusable(_first_line(error)) from None
        try:
            self.rows("SET synchronous_commit = on")
            self.rows("SET lock_timeout = '60s'")
            self._create()
        except BaseException:
            self._db.close()
            raise

    def _create(self) -> None:
        with self._transaction("BEGIN ISOLATION LEVEL READ COMMITTED", f"SELECT pg_advisory_xact_lock({LOCK})"):
            # of several processes that meet an empty database, one makes the tables
            where = "WHERE table_schema = current_schema()"
            tables = {name for (name,) in self.rows(f"SELECT table_name FROM information_schema.tables {where}")}
            if not TABLES & tables:
                for statement in _schema():
                    self.rows(statement)
            elif not tables >= TABLES:
                raise self.unusable("it holds tables of another program")
            version = self.rows("SELECT value FROM meta WHERE key = 'schema_version'")
            if version != [(SCHEMA_VERSION,)]:
                raise self.unusable(f"its schema version is {version}, and this dpllm knows {SCHEMA_VERSION}")

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
        """A transaction that sees one moment."""
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
        """Names of the triggers that are gone, switched off or replaced."""
        rows = self.rows(
            "SELECT tgname, relname, prosrc, tgtype FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid "
            "JOIN pg_proc p ON p.oid = tgfoid WHERE relnamespace = current_schema()::regnamespace "
            "AND NOT tgisinternal AND tgenabled IN ('O', 'A') AND tgqual IS NULL"
        )
        there = {name: (table, body, kind) for name, table, body, kind in rows}
        return sorted(
            name for name, (table, _, body, kind) in _guards().items() if there.get(name) != (table, body, kind)
        )

    def unusable(self, why: object) -> ConfigError:
        """The error for a ledger that cannot be used."""
        return ConfigError(
            f"ledger {self.location}: {why}. Without it no budget can be kept, so nothing runs. Set privacy.ledger to a database "
            "that this user may write to, or to a file."
        )

    def close(self) -> None:
        """Closes the connection."""
        self._db.close()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
