"""Fixtures of the ledger: every test that takes ``ledger`` or ``place`` runs against SQLite and against PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ledger_stores
import pytest

from dpllm.ledger import Ledger


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[ledger_stores.Server]:
    """A PostgreSQL server of this test process."""
    why = ledger_stores.missing()
    if why:
        pytest.skip(why)
    with ledger_stores.running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ledger_stores.Place]:
    """Where an empty ledger lies, in each kind of store."""
    if request.param == "sqlite":
        yield ledger_stores.Place(str(tmp_path / "new" / "ledger.sqlite"))
        return
    server: ledger_stores.Server = request.getfixturevalue("postgres_server")
    yield ledger_stores.Place(server.new_schema())


@pytest.fixture
def ledger(place: ledger_stores.Place) -> Iterator[Ledger]:
    """An empty ledger, in each kind of store."""
    with place.open() as opened:
        yield opened
