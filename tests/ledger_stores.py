"""A real PostgreSQL server for the tests of the ledger, and what both stores need alike.

Comes in: the programs of Debian's package ``postgresql``. Goes out: URLs of empty databases.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.ledger import Budget, Ledger, RunRequest, budgets, open_ledger
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy import renyi
from dpllm.privacy.accounting import compose, dp_sgd_event, epsilon
from dpllm.privacy.events import Event

ADMIN = "tester"
START_SECONDS = 60

EVENT = dp_sgd_event(1.0, 40.0, 4)  # cheap to account: epsilon is about 0.16
DELTA = 1e-5
TERMS = {"unit": "patient", "relation": "zero_out"}


def request(**changes: Any) -> RunRequest:
    return RunRequest(**{"event": EVENT, "delta": DELTA, **TERMS, "num_steps": 4, "run": "a", **changes})


def reserve(ledger: Ledger, dataset: str = "notes", **changes: Any):
    options = {name: changes.pop(name) for name in ("records", "derived_from") if name in changes}
    return reserve_all(ledger, dataset, [request(**changes)], **options)[0]


def budget(value: float, **changes: Any) -> Budget:
    return Budget(value, **{"delta": DELTA, **TERMS, "by": "alice", "reason": "study 7", **changes})


def room_for(runs: int, event: Event = EVENT) -> Budget:
    """A budget that holds so many runs in any order, and not one more."""

    def fit(value: float) -> float:
        order = renyi.filter_order(value, DELTA)
        return renyi.allowance(value, DELTA, order) / renyi.rdp(event, order)

    low, high = 1e-3, 100.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if fit(middle) < runs + 0.5 else (low, middle)
    assert int(fit(high)) == runs
    return budget(high)


def adopt(path: Path) -> None:
    """Says of a ledger that a test copied that it belongs where it lies, as if it had always been there."""
    with Ledger(path) as ledger:
        budgets.adopt(ledger, "the tests", "copied")


def cost_of(runs: int, delta: float = DELTA) -> float:
    return epsilon(compose([EVENT] * runs), delta, "zero_out")


@dataclass
class Place:
    """Where one ledger lies, and how someone would edit it who goes round dpllm."""

    location: str

    @property
    def kind(self) -> str:
        return "postgres" if "://" in self.location else "sqlite"

    def open(self) -> Ledger:
        opened = open_ledger(self.location)
        assert opened is not None
        return opened

    def raw(self, *statements: str) -> list[Any]:
        if self.kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self.location, isolation_level=None)) as db:
                return [db.execute(statement).fetchall() for statement in statements][-1]
        import psycopg

        with psycopg.connect(self.location, autocommit=True) as db:
            cursors = [db.execute(statement) for statement in statements]
            return cursors[-1].fetchall() if cursors[-1].description else []

    def edit(self, *statements: str) -> None:
        """Edits with all guards out of the way, and puts them back."""
        if self.kind == "sqlite":
            guards = self.raw("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
            self.raw(*(f"DROP TRIGGER {name}" for name, _ in guards), *statements, *(sql for _, sql in guards))
        else:
            tables = ("entries", "progress", "records", "refusals", "meta")
            self.raw(
                *(f"ALTER TABLE {table} DISABLE TRIGGER USER" for table in tables),
                *statements,
                *(f"ALTER TABLE {table} ENABLE TRIGGER USER" for table in tables),
            )


def start(place: Place, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Runs code in a process of its own, with ``place``, ``arguments`` and ``claim`` at hand."""
    head = f"""
import os, sys
from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Budget, RunRequest, open_ledger, budgets
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.events import Gaussian, PoissonSampled, SelfComposed
location, arguments = sys.argv[1], sys.argv[2:]
claim = RunRequest(event={EVENT!r}, delta={DELTA}, unit="patient", relation="zero_out", num_steps=4, run="child")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", head + code, place.location, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def outputs(workers: list[subprocess.Popen[str]]) -> list[str]:
    """What each process printed; fails if one did."""
    results = [worker.communicate() for worker in workers]
    assert [(worker.returncode, error) for worker, (_, error) in zip(workers, results, strict=True)] == [
        (0, error) for _, error in results
    ], results
    return [out for out, _ in results]


def missing() -> str | None:
    """Why there is no server to test with; None if there is."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed: pip install 'psycopg[binary]'"
    if _programs() is None:
        return "no PostgreSQL server: apt-get install postgresql"
    if os.geteuid() == 0 and not (shutil.which("setpriv") and _has_user("postgres")):
        return "PostgreSQL does not run as root, and there is no user postgres to run it as"
    return None


def _programs() -> Path | None:
    paths = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if paths:
        return paths[-1].parent
    program = shutil.which("initdb")
    return Path(program).parent if program and shutil.which("postgres") else None


def _has_user(name: str) -> bool:
    import pwd

    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


class Server:
    """One PostgreSQL server on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dpllm-pg-", dir="/tmp"))  # a socket's path has at most 107 bytes
        self._as: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self.root, "postgres", "postgres")
            self._as = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self.root.chmod(0o755)  # the tests connect as another user of the system
        programs = _programs()
        assert programs is not None
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={ADMIN}", "--no-sync"]
        self._run(programs / "initdb", *options, "-D", self.root / "data")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = {"listen_addresses": "127.0.0.1", "port": self.port}
        settings |= {"unix_socket_directories": self.root, "max_connections": 60, "fsync": "on"}
        command = [*self._as, str(programs / "postgres"), "-D", str(self.root / "data")]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._log = open(self.root / "log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd="/")
        self._wait()

    def _run(self, *command: object) -> None:
        subprocess.run([*self._as, *map(str, command)], check=True, capture_output=True, cwd="/")

    def url(self, database: str) -> str:
        return f"postgresql://{ADMIN}@127.0.0.1:{self.port}/{database}"

    def _wait(self) -> None:
        import psycopg

        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self.root / "log").read_text()) from None
                time.sleep(0.05)

    def new_database(self) -> str:
        import psycopg

        name = "t" + secrets.token_hex(6)
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def new_schema(self) -> str:
        """The URL of an empty schema, which is made more quickly than a database."""
        import psycopg

        name = "t" + secrets.token_hex(6)
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {name}")
        return self.url("postgres") + f"?options=-csearch_path%3D{name}"

    def drop(self, url: str) -> None:
        import psycopg

        name = url.rpartition("/")[2]
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # "fast": ends the sessions that are still there
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)


@contextlib.contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.stop()
