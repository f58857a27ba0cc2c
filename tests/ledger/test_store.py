"""What was entered stays: edits, cuts and reordering are found, and what is no ledger is one clear error."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from ledger_stores import EVENT, TERMS, Place, reserve, room_for

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Ledger, budgets, default_path, open_ledger
from dpllm.ledger.chain import GENESIS, Entry, canonical, verify_export
from dpllm.ledger.records import fingerprint
from dpllm.ledger.store import GUARDS, SQLite

ROWS = [{"text": f"record {n}"} for n in range(50)]


@pytest.fixture
def full_ledger(ledger: Ledger) -> Ledger:
    """Budget, data, run, commit, exception, import and a refusal."""
    records = fingerprint(ROWS, ["text"], ledger.records.key())
    budgets.set_budget(ledger, "notes", room_for(1), records=records)
    first = reserve(ledger)
    ledger.charge(first.entry, 1)
    ledger.finish(first.entry, "interrupted")
    budgets.except_from_privacy(ledger, "notes", "alice", "a baseline")
    budgets.import_run(ledger, "notes", event=EVENT, run="x", by="a", reason="b", **TERMS)
    with pytest.raises(BudgetExceeded), ledger.counting():
        reserve(ledger)
    return ledger


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = '{}'", "DELETE FROM entries",
        "INSERT INTO entries SELECT seq + 100, kind, dataset, payload, prev_hash, hash FROM entries",
        "UPDATE progress SET steps = 0", "UPDATE progress SET steps = 3", "DELETE FROM progress",
        "UPDATE records SET nonce = 'x'", "DELETE FROM records", "UPDATE refusals SET number = 0",
        "DELETE FROM refusals", "UPDATE meta SET value = 'x' WHERE key = 'fingerprint_key'", "DELETE FROM meta",
    ],
)  # fmt: skip
def test_every_table_only_grows(full_ledger: Ledger, place: Place, statement):
    with pytest.raises(Exception, match="only grows"):
        place.raw(statement)
    assert full_ledger.verify() == []


@pytest.mark.parametrize("table", ["entries", "progress", "records", "refusals", "meta"])
def test_no_row_is_replaced_and_no_table_emptied(full_ledger: Ledger, place: Place, table):
    if place.kind == "sqlite":
        with pytest.raises(sqlite3.IntegrityError):
            place.raw(f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}")
    else:
        with pytest.raises(Exception, match="only grows"):
            place.raw(f"TRUNCATE {table}")
    assert full_ledger.verify() == []


EDITS = [
    "UPDATE entries SET payload = replace(payload, '40.0', '99.0') WHERE seq = 3",
    "UPDATE entries SET payload = payload || ' ' WHERE seq = 2",
    "UPDATE entries SET dataset = 'other' WHERE seq = 2", "UPDATE entries SET kind = 'note' WHERE seq = 3",
    "UPDATE entries SET hash = prev_hash WHERE seq = 2", "DELETE FROM entries WHERE seq = 1",
    "DELETE FROM entries WHERE seq = 3", "DELETE FROM entries WHERE seq >= 3", "DELETE FROM entries",
    "UPDATE progress SET steps = 0", "UPDATE progress SET steps = 40", "DELETE FROM progress",
    "UPDATE entries SET seq = seq + 100", "UPDATE entries SET seq = 99 - seq", "UPDATE records SET nonce = 'x'",
    "UPDATE records SET fingerprint = nonce", "DELETE FROM records",
    "UPDATE meta SET value = '00ff' WHERE key = 'fingerprint_key'", "DELETE FROM meta WHERE key = 'fingerprint_key'",
]  # fmt: skip


@pytest.mark.parametrize("statement", EDITS)
def test_tampering_is_found_and_nothing_more_is_reserved(full_ledger: Ledger, place: Place, statement):
    head = full_ledger.head()
    assert full_ledger.verify() == full_ledger.verify(head) == []
    place.edit(statement)
    assert full_ledger.verify()
    with place.open() as fresh:
        assert fresh.verify()
        with pytest.raises(Refused, match="changed by something other than dpllm"):
            reserve(fresh, "other")
    if "records" not in statement and "meta" not in statement:  # which each process checks once
        with pytest.raises(Refused, match="changed by something other than dpllm"):
            reserve(full_ledger, "other")


def test_forged_types_are_found_and_crash_nothing(place: Place):
    if place.kind != "sqlite":
        pytest.skip("columns of PostgreSQL have types")
    with place.open() as ledger:
        reserve(ledger)
        reserve(ledger)
    forged = [f"UPDATE entries SET {name} = x'00ff' WHERE seq = 1" for name in ("payload", "dataset", "kind", "hash")]
    forged += ["UPDATE entries SET prev_hash = x'00' WHERE seq = 2", "UPDATE progress SET steps = 'many'"]
    content = Path(place.location).read_bytes()
    for statement in forged:
        for old in Path(place.location).parent.glob("*"):
            old.unlink()
        Path(place.location).write_bytes(content)
        place.edit(statement)
        with place.open() as ledger:
            assert ledger.verify(), statement
            with pytest.raises(Refused):
                reserve(ledger)


def _rewrite(place: Place, change) -> None:
    """Computes the whole chain anew, with ``change`` applied to every (kind, payload)."""
    previous, statements = GENESIS, []
    for seq, kind, dataset, payload in place.raw("SELECT seq, kind, dataset, payload FROM entries ORDER BY seq"):
        kind, payload = change(kind, payload)
        link = Entry(seq, kind, dataset, payload, previous, "")
        quoted = payload.replace("'", "''")
        statements.append(
            f"UPDATE entries SET kind = '{kind}', payload = '{quoted}', prev_hash = '{previous}', "
            f"hash = '{link.expected_hash()}' WHERE seq = {seq}"
        )
        previous = link.expected_hash()
    place.edit(*statements)


def test_a_chain_computed_afresh_contradicts_earlier_heads_and_this_process(full_ledger: Ledger, place: Place):
    heads = [{"hash": link.hash, "count": link.seq} for link in full_ledger.history()]
    _rewrite(place, lambda kind, payload: (kind, payload.replace('"epsilon":0.2', '"epsilon":0.9')))
    with pytest.raises(Refused):
        reserve(full_ledger)
    assert full_ledger.verify() == ["the chain is another than this process read before."]
    with place.open() as fresh:  # as the docstring of the package says: no head from elsewhere, no contradiction
        assert fresh.verify() == []
        for head in heads:
            assert fresh.verify(head)


@pytest.mark.parametrize("payload", ["[]", "null", "{", "{}", '{"at": 3}', "[" * 5000])
def test_a_chain_computed_afresh_over_nonsense_is_found(full_ledger: Ledger, place: Place, payload):
    _rewrite(place, lambda kind, old: (kind, payload if kind == "reserve" else old))
    with place.open() as fresh:
        assert "nothing that dpllm writes" in fresh.verify()[0]
        with pytest.raises(Refused):
            reserve(fresh)
        with pytest.raises(Refused):
            fresh.account("notes")


def test_a_wrong_head_is_found(full_ledger: Ledger):
    head = full_ledger.head()
    wrong = [{**head, "count": head["count"] - 1}, {**head, "count": 99}, {**head, "count": -1}, {"count": 1}]
    for other in [*wrong, {"hash": "0" * 64, "count": 2}, {"hash": head["hash"], "count": "many"}]:
        assert full_ledger.verify(other)
    assert full_ledger.verify({"hash": GENESIS, "count": 0}) == []


@pytest.mark.parametrize("name", sorted(GUARDS))
def test_missing_and_blunted_guards_are_found(ledger: Ledger, place: Place, name):
    table, moment, _ = GUARDS[name]
    if place.kind == "sqlite":
        place.raw(f"DROP TRIGGER {name}")
        assert f"guard {name} is missing." in ledger.verify()
        place.raw(f"CREATE TRIGGER {name} BEFORE {moment} ON {table} WHEN 0 BEGIN SELECT 1; END")
    else:
        place.raw(f"ALTER TABLE {table} DISABLE TRIGGER {name}")
        assert f"guard {name} is missing." in ledger.verify()
        place.raw(f"ALTER TABLE {table} ENABLE TRIGGER {name}")
        assert ledger.verify() == []
        back = "BEGIN RETURN NEW; END"
        place.raw(f"CREATE OR REPLACE FUNCTION dpllm_{name}() RETURNS trigger LANGUAGE plpgsql AS '{back}'")
    assert f"guard {name} is missing." in ledger.verify()
    with pytest.raises(Refused, match="guard"):
        reserve(ledger)


def test_every_link_hangs_on_the_one_before(ledger: Ledger):
    reserve(ledger)
    reserve(ledger)
    links = ledger.history("notes")
    assert links[0].prev_hash == GENESIS
    assert links[1].prev_hash == links[0].hash == links[0].expected_hash()
    assert ledger.head() == {"hash": links[1].hash, "count": 2}
    assert json.loads(links[0].payload)["num_steps"] == 4
    assert canonical({"b": 1, "a": 2}) == '{"a":2,"b":1}'


def test_an_export_shows_edits_cuts_and_other_heads(full_ledger: Ledger):
    head = full_ledger.head()
    value = full_ledger.chain.export()
    assert verify_export(value) == verify_export(value, head) == []
    assert verify_export(value, {"hash": "0" * 64, "count": 1})
    last = value["entries"][-1]
    for edited in (
        {**value, "entries": value["entries"][:-1]},
        {**value, "entries": []},
        {**value, "entries": value["entries"][::-1]},
        {**value, "entries": [*value["entries"][:-1], {**last, "payload": "{}"}]},
        {**value, "entries": [*value["entries"][:-1], {**last, "payload": 3}]},
        {**value, "progress": {}},
        {**value, "progress": dict.fromkeys(value["progress"], 0)},
        {**value, "progress": {**value["progress"], "more": 1}},
    ):
        assert verify_export(edited)


def test_the_file_is_private_and_durable(tmp_path: Path):
    with Ledger(tmp_path / "new" / "ledger.sqlite") as ledger:
        if os.name == "posix":
            assert stat.S_IMODE((tmp_path / "new" / "ledger.sqlite").stat().st_mode) == 0o600
        assert ledger.store.rows("PRAGMA journal_mode") == [("wal",)]
        assert ledger.store.rows("PRAGMA synchronous") == [(2,)]
        assert ledger.store.rows("PRAGMA busy_timeout") == [(60_000,)]


def test_a_second_connection_of_one_process_does_not_end_the_locks_of_the_first(tmp_path: Path):
    """Another process that closes the file as the last one deletes its WAL, and charges in that would be lost."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as first, Ledger(path):
        reserve(first)
        look = f"from dpllm.ledger import Ledger\nwith Ledger({str(path)!r}) as ledger: print(ledger.head()['count'])"
        subprocess.run([sys.executable, "-c", look], check=True, capture_output=True)
        reserve(first)
        seen = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout
        assert int(seen) == first.head()["count"]


def test_the_server_is_asked_for_durability(postgres_server):
    url = postgres_server.new_database()
    with open_ledger(url) as ledger:
        assert ledger.store.rows("SHOW synchronous_commit") == [("on",)]
        assert ledger.store.rows("SHOW fsync") == [("on",)]
    postgres_server.drop(url)


def test_what_cannot_be_a_ledger_is_one_clear_error(tmp_path: Path):
    (tmp_path / "text").write_text("not a database, " * 100)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        db.execute("CREATE TABLE songs (title)")
    for version in (3, 99):
        with Ledger(tmp_path / f"{version}.sqlite") as ledger:
            ledger.store.rows(f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'")
        with pytest.raises(ConfigError, match=f"it has version {version}"):
            SQLite(tmp_path / f"{version}.sqlite", read_only=True)
    for name in ("text", ".", "text/below", "other.sqlite", "3.sqlite", "99.sqlite", "x" * 300):
        with pytest.raises(ConfigError, match=r"privacy\.ledger") as error:
            open_ledger(str(tmp_path / name))
        assert str(tmp_path) in str(error.value)
        assert "\n" not in str(error.value)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        assert [row[0] for row in db.execute("SELECT name FROM sqlite_master")] == ["songs"]
    for url in ("mysql://host/db", "postgresql+psycopg://host/db", "http://x"):
        with pytest.raises(ConfigError, match="unknown kind"):
            open_ledger(url)


def test_a_database_that_cannot_be_a_ledger_is_one_clear_error(postgres_server):
    import psycopg

    url = postgres_server.new_database()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE entries (title TEXT)")
    newer = postgres_server.new_database()
    with open_ledger(newer) as ledger:
        ledger.store.rows("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    for wrong in (url, newer, url + "0", "postgresql://nobody@/x?host=/nowhere", "postgresql://[", url + "?songs=1"):
        with pytest.raises(ConfigError, match=r"privacy\.ledger") as error:
            open_ledger(wrong)
        assert "\n" not in str(error.value)
    for made in (url, newer):
        postgres_server.drop(made)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@host/db",
        "postgresql://me:@host/db",
        "postgresql://host/db?password=secret",
        "postgresql://host/db?p%61ssword=secret",
        "postgres://host/db?sslpassword=secret",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="holds a password") as error:
        open_ledger(url)
    assert "secret" not in str(error.value)


def test_without_psycopg_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'psycopg\[binary\]'"):
        open_ledger("postgresql://host/db")


def test_a_database_that_sets_another_isolation_level_changes_nothing(postgres_server):
    import psycopg

    url = postgres_server.new_database()
    with psycopg.connect(url, autocommit=True) as db:
        name = url.rpartition("/")[2]
        db.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    place = Place(url)
    with place.open() as one, place.open() as two:
        for ledger in (one, two, one):
            reserve(ledger)
        assert one.verify() == two.verify() == []
    postgres_server.drop(url)


def test_a_file_damaged_in_the_middle_is_an_error_of_ours(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        for _ in range(20):
            reserve(ledger)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises((ConfigError, Refused)), Ledger(path) as ledger:
        reserve(ledger)


def test_default_path_is_in_the_users_data_directory(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_path() == tmp_path / ".local" / "share" / "dpllm" / "ledger.sqlite"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_path() == tmp_path / "data" / "dpllm" / "ledger.sqlite"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_path() == tmp_path / "Library" / "Application Support" / "dpllm" / "ledger.sqlite"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("APPDATA", str(tmp_path / "roaming"))
    assert default_path() == tmp_path / "roaming" / "dpllm" / "ledger.sqlite"


@pytest.mark.parametrize("payload", [[], {}, 7, None])
def test_an_export_whose_payload_is_no_text_says_nothing_and_crashes_nobody(payload: object) -> None:
    entry = {"seq": 1, "kind": "budget", "dataset": "d", "payload": payload, "prev_hash": GENESIS, "hash": ""}
    value = {"kind": "dpllm ledger", "entries": [entry], "progress": {}, "head": {"hash": "", "count": 1}}
    assert verify_export(value)
