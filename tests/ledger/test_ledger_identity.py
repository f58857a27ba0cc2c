"""A copy of a ledger is no second budget: it is refused until somebody adopts it by name."""

import json
import os
import platform
import shutil
from pathlib import Path

import pytest
from ledger_stores import Place, budget, request, reserve

from dpllm.cli import main
from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger, budgets


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        budgets.set_budget(ledger, "notes", budget(8.0))
        reserve(ledger)
    return path


def test_a_copy_is_refused_until_it_is_adopted_by_name(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copy(original, original.with_name("second.sqlite")))
    with Ledger(copy) as ledger:
        head = ledger.head()
        for write in (reserve, lambda book: budgets.set_budget(book, "other", budget(1.0))):
            with pytest.raises(Refused, match=f"is a copy of {original}.*dpllm ledger adopt --ledger {copy}"):
                write(ledger)
        with pytest.raises(Refused, match="is a copy"):
            ledger.charge(ledger.runs("notes")[0].reservation.entry, 1)
        assert "is a copy" in (ledger.outlook("notes", [request()]).refusal or "")  # so says the plan of a run
        assert ledger.head() == head
        assert ledger.verify() == []
    for reading in ("show", "verify", "export"):
        assert main(["ledger", reading, "--ledger", str(copy)]) == 0
    capsys.readouterr()
    assert main(["ledger", "adopt", "--ledger", str(copy), "--by", "bob", "--reason", "new disk"]) == 0
    with Ledger(copy) as ledger:
        reserve(ledger)
        adopted = next(entry for entry in ledger.history() if entry.kind == "adopt")
        assert (adopted.facts["by"], adopted.facts["reason"]) == ("bob", "new disk")
        assert ledger.datasets() == ["notes"]
        assert ledger.verify(head) == []


@pytest.mark.parametrize("how", ["renamed", "linked", "restored", "renamed and restored"])
def test_a_file_that_is_the_same_is_no_copy(original: Path, how: str) -> None:
    path = original.with_name("elsewhere.sqlite")
    if how.startswith("renamed"):
        original.rename(path)
        if how == "renamed and restored":
            with Ledger(path) as ledger:
                reserve(ledger)
            shutil.copy(path, original)
            shutil.move(original, path)
    elif how == "linked":
        path.symlink_to(original)
    else:
        backup = shutil.copy(original, path)
        original.unlink()
        path = Path(shutil.move(backup, original))
    with Ledger(path) as ledger:
        reserve(ledger)


def test_a_second_name_of_the_file_is_refused_as_long_as_there_are_two(original: Path) -> None:
    """SQLite keeps a journal for each name: what is reserved by one is not seen by the other, and is lost."""
    second = original.with_name("second.sqlite")
    os.link(original, second)
    with Ledger(second) as ledger, pytest.raises(Refused, match="is a copy"):
        reserve(ledger)
    with Ledger(original) as ledger:
        reserve(ledger)
    original.unlink()
    with Ledger(second) as ledger:
        reserve(ledger)
        assert len(ledger.runs("notes")) == 3


def test_a_ledger_of_before_is_bound_at_its_first_write(original: Path) -> None:
    Place(str(original)).edit("DELETE FROM meta WHERE key = 'place'")
    copy = shutil.copy(original, original.with_name("second.sqlite"))
    with Ledger(original) as ledger:
        assert ledger.verify() == []
        reserve(ledger)
    with Ledger(shutil.copy(original, copy)) as ledger, pytest.raises(Refused, match="is a copy"):
        reserve(ledger)


@pytest.mark.parametrize(
    ("changes", "copied"),
    [
        ({}, False),
        ({"host": "elsewhere"}, False),  # another node that mounts the same file system, or another name of the server
        ({"path": "/mnt/b"}, False),  # mounted there
        ({"file": "0"}, False),  # restored from a backup
        ({"device": "0"}, False),  # the file system got another number at the machine's start
        ({"device": "0", "path": "/mnt/b"}, True),  # the same number in another file system, by chance
        ({"volume": "0"}, False),
        (
            {"device": "0", "volume": "0", "host": "elsewhere"},
            True,
        ),  # a copy at the same path, with the same number by chance
        ({"file": "0", "host": "elsewhere"}, True),
        ({"file": "0", "path": "/mnt/b"}, True),
    ],
)
def test_what_is_the_same_place(ledger: Ledger, place: Place, changes: dict[str, str], copied: bool) -> None:
    budgets.set_budget(ledger, "notes", budget(8.0))
    bound = {**ledger.store.identity, **changes}
    place.edit(f"UPDATE meta SET value = '{json.dumps(bound)}' WHERE key = 'place'")
    with place.open() as again:
        if copied:
            with pytest.raises(Refused, match="is a copy"):
                reserve(again)
        else:
            reserve(again)


@pytest.mark.parametrize("first", ["renamed", "put back"])
def test_of_a_renamed_ledger_and_a_copy_in_its_old_place_one_is_refused(original: Path, first: str) -> None:
    renamed = original.rename(original.with_name("elsewhere.sqlite"))
    if first == "renamed":
        with Ledger(renamed) as ledger:
            reserve(ledger)
    shutil.copy(renamed, original)
    good, other = (renamed, original) if first == "renamed" else (original, renamed)
    with Ledger(good) as ledger, Ledger(other) as second:
        if first == "put back":
            reserve(ledger)
        with pytest.raises(Refused, match="is a copy"):
            reserve(second)


def test_a_database_that_was_copied_to_another_machine_is_a_copy(
    ledger: Ledger, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both call themselves localhost."""
    budgets.set_budget(ledger, "notes", budget(8.0))
    bound = {**ledger.store.identity, "file": "0"}
    place.edit(f"UPDATE meta SET value = '{json.dumps(bound)}' WHERE key = 'place'")
    monkeypatch.setattr(platform, "node", lambda: "another machine")
    with place.open() as again, pytest.raises(Refused, match="is a copy"):
        reserve(again)


@pytest.mark.parametrize("value", ["x", "[]", "{}", "null", '{"file": 3}'])
def test_a_place_that_cannot_be_read_is_an_error_of_ours(original: Path, value: str) -> None:
    Place(str(original)).edit(f"UPDATE meta SET value = '{value}' WHERE key = 'place'")
    with Ledger(original) as ledger, pytest.raises(ConfigError, match="where it belongs cannot be read"):
        reserve(ledger)


def test_an_export_shows_no_path(original: Path) -> None:
    with Ledger(original) as ledger:
        assert os.path.dirname(original) not in json.dumps(ledger.chain.export())
