"""A ledger to verify with is read and nothing else, whoever made it, and no place is contacted that the files name."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ledger_stores
import pytest
from cards import audit, config, make_run, plan, record
from ledger_stores import reserve
from published import opened

from dpllm.card.card import write_card
from dpllm.errors import ConfigError
from dpllm.ledger import store
from dpllm.ledger.ledger import Ledger
from dpllm.run.directory import RunDir
from dpllm.verification import check_ledger
from dpllm.verification.values import Check, Published, Wrong

ENDLESS = "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) SELECT"
HEAD = {"hash": "0" * 64, "count": 0}


def published(root: Path, ledger: str) -> Published[Any]:
    page = write_card(make_run(root, config(privacy={"ledger": ledger}), plan(), record(), audit()))
    return opened(page.parent, run=RunDir(root))


def last(result: Published[Any]) -> Check:
    return list(check_ledger.check(result))[-1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with one reservation."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        reserve(ledger)
    return tmp_path / "ledger.sqlite"


def test_a_ledger_in_use_keeps_its_locks(tmp_path: Path) -> None:
    """Of this process; another one that closes the file as the last would delete its WAL, and what was charged in that."""
    path = tmp_path / "ledger.sqlite"
    look = f"from dpllm.ledger import Ledger\nwith Ledger({str(path)!r}) as ledger: print(ledger.head()['count'])"
    with Ledger(path) as ledger:
        reserve(ledger)
        check_ledger._open(str(path), HEAD)
        subprocess.run([sys.executable, "-c", look], check=True, capture_output=True)
        reserve(ledger)
        seen = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout
        assert int(seen) == ledger.head()["count"]


@pytest.mark.parametrize("url", ["postgresql://evil@host/x", "postgres://evil@host/x", "http://evil/x"])
def test_a_database_that_a_recipe_names_is_not_contacted(tmp_path: Path, url: str, monkeypatch: Any) -> None:
    def contacted(*_: object, **__: object) -> None:
        raise AssertionError("contacted")

    page = published(tmp_path / "run", "nothing.sqlite")
    recipe = tmp_path / "run" / "config.yaml"
    recipe.write_text(recipe.read_text().replace("nothing.sqlite", url))
    monkeypatch.setattr(store.Postgres, "__init__", contacted)
    check = last(page)
    assert (check.name, check.status) == ("ledger", "asserted")
    assert "--ledger" in check.detail


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal"])
@pytest.mark.parametrize("by_recipe", [True, False])
def test_a_pipe_is_no_ledger_and_nobody_waits_for_it(path: Path, tmp_path: Path, name: str, by_recipe: bool) -> None:
    release = published(tmp_path / "run", str(path if by_recipe else tmp_path / "nothing"))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(Wrong, match="not a regular file"):
        last(release if by_recipe else replace(release, ledger=str(path)))


def test_a_ledger_is_read_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    path = folder / "ledger.sqlite"
    with Ledger(path) as ledger:
        claim = reserve(ledger)
        ledger.charge(claim.entry, 1)
        head = ledger.head()  # the chain says the steps of a short run at each one
        assert check_ledger._open(str(path), head).steps == {claim.entry: 1}  # of a ledger in use, the last step too
    before = {item.name: item.read_bytes() for item in folder.iterdir()}
    assert len(check_ledger._open(str(path), head).entries) == head["count"]
    assert {item.name: item.read_bytes() for item in folder.iterdir()} == before
    with pytest.raises(Wrong, match="lacks an earlier head"):
        check_ledger._open(str(path), {**head, "hash": "1" * 64})


@pytest.mark.parametrize(
    "change",
    [
        f"DROP TABLE progress; CREATE VIEW progress AS {ENDLESS} 'x' AS entry, n AS seq, n AS steps, n AS updated_at FROM more",
        "DROP TABLE entries; CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, dataset TEXT NOT NULL, "
        "payload TEXT AS (hex(zeroblob(900000000))), prev_hash TEXT NOT NULL, hash TEXT NOT NULL)",
    ],
    ids=["view", "column"],
)  # fmt: skip
def test_a_ledger_that_computes_without_end_is_refused_at_once(path: Path, tmp_path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    started = time.monotonic()
    with pytest.raises(Wrong, match="the ledger cannot be read"):
        last(published(tmp_path / "run", str(path)))
    assert time.monotonic() - started < 5


def test_a_trigger_of_a_stranger_never_runs(path: Path) -> None:
    with Ledger(path) as ledger:
        head = ledger.head()
    endless = f"DELETE FROM meta WHERE key IN ({ENDLESS} n FROM more)"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE TRIGGER t AFTER UPDATE ON meta BEGIN {endless}; END")
        db.commit()
    check_ledger._open(str(path), head)


@pytest.mark.parametrize("name", ["file", "export"])
def test_a_ledger_of_an_earlier_version_is_refused_by_name(path: Path, tmp_path: Path, name: str) -> None:
    with Ledger(path) as ledger:
        value = ledger.chain.export()
    if name == "file":
        with closing(sqlite3.connect(path)) as db:
            db.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
            db.commit()
    else:
        del value["version"]
        path.unlink()
        path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(Wrong, match=r"the ledger cannot be read .*version 5"):
        last(published(tmp_path / "run", str(path)))


def test_work_on_a_file_has_a_bound(path: Path) -> None:
    for words, query in (("interrupted", f"{ENDLESS} count(*) FROM more"), ("readonly", "DELETE FROM refusals")):
        with pytest.raises(ConfigError, match=words), closing(store.SQLite(path, read_only=True)) as opened:
            opened.rows(query)


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_a_database_without_a_ledger_stays_empty(place: ledger_stores.Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="entries"):
        check_ledger._open(place.location, HEAD)
    with closing(store.Postgres(place.location, read_only=True)) as opened:
        assert opened.rows("SELECT 1 FROM information_schema.tables WHERE table_schema = current_schema()") == []
    with Ledger(store.Postgres(place.location)) as ledger:
        reserve(ledger)
        assert len(check_ledger._open(place.location, ledger.head()).entries) == ledger.head()["count"]
