"""A run from a folder of any name gets its card; one that could not is refused by ``plan``; and so is one that learns nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from running import Place, done, make_place, refused, rows

import dpllm
from dpllm.ledger import Ledger
from dpllm.text.tokens import Lengths

NAMES = ("data (1)", "notes [2024]", "🎉 #1")
MORE = (" ", "100%", "q?", "a\\b", "\u3000👨\u200d👩", "~")


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)], ids=ascii)
def test_a_folder_of_any_name_trains_and_gets_its_card(tmp_path: Path, base: Path, name: str) -> None:
    """Its name stood on the card as the last part of a path, which no ledger knows, after the run was charged."""
    folder, model = tmp_path / name, tmp_path / "models" / name
    tiny.write_rows(folder / f"{name}.jsonl", rows())
    shutil.copytree(base, model)
    place = make_place(tmp_path / "place", base)
    run, ledger = tmp_path / "runs" / name, folder / "ledger.sqlite"
    changes = {"privacy.dataset": None, "privacy.ledger": str(ledger), "train.steps": 1, "output_dir": str(run)}
    place.write({**changes, "data.train": str(folder), "model.name_or_path": str(model)})
    assert done("plan", place.recipe, "--json")
    done("train", place.recipe)
    done("card", run)
    done("verify", run)


@pytest.mark.parametrize("key", ["data.train", "privacy.dataset", "output_dir", "card.contact"])
def test_what_no_card_can_hold_is_refused_by_plan(place: Place, key: str) -> None:
    bad = "<!-- dpllm:privacy -->"
    changes = {"privacy.dataset": None, key: str(place.root / bad) if key != "card.contact" else bad}
    if key == "data.train":
        tiny.write_rows(place.root / bad / "train.jsonl", rows())
        changes[key] = str(place.root / bad / "train.jsonl")
    for command in ("plan", "train"):
        assert "card" in refused(command, place.write(changes))
    assert not place.ledger.exists()


@pytest.mark.parametrize(
    "name", ["two\nlines", "\u202eturned", "/home/alice/notes", "~/notes", "<script>", "class=1/notes"]
)
def test_a_name_that_the_ledger_or_a_card_cannot_show_is_refused_by_plan(place: Place, name: str) -> None:
    assert "name" in refused("plan", place.write({"privacy.dataset": name}))


LONG = {"prompt": "seven plums " * 100, "completion": "yes"}
SHORT = {"prompt": "Anna", "completion": "bought plums"}


def seen(place: Place, *words: object) -> str:
    """What a terminal shows of a command."""
    master, slave = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(dpllm.__file__).parents[1])}
    command = [sys.executable, "-m", "dpllm", *map(str, words)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    result = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(master, 2**16):
            result += part
    os.close(master)
    assert process.wait() == 0, result.decode()
    return result.decode()


@pytest.mark.parametrize("public", [False, True])
def test_a_run_that_learns_nothing_is_refused_before_it_is_reserved_and_leaves_no_trace(
    place: Place, public: bool
) -> None:
    tiny.write_rows(place.train, [LONG] * 40)
    place.write({"data.max_length": 64, "data.public": public})
    terms = ("--epsilon", 90, "--delta", 1e-2, "--by", "alice", "--reason", "a test", "--ledger", place.ledger)
    done("ledger", "init", "notes", *terms)
    before = place.head()
    message = refused("train", place.recipe)
    assert "no row has a token left to learn" in message
    assert "plums" not in message
    with Ledger(place.ledger) as ledger:
        assert (ledger.head(), ledger.refusals()) == (before, {})
    assert [path for path in place.run.rglob("*") if path.is_file()] == []
    tiny.write_rows(place.train, [LONG] * 39 + [SHORT])
    done("train", place.recipe)


@pytest.mark.full
def test_rows_that_are_cut_are_told_on_a_terminal_and_nowhere_else(place: Place) -> None:
    tiny.write_rows(place.train, [LONG] * 30 + [SHORT] * 10)
    place.write({"data.max_length": 64, "train.steps": 1})
    for command in ("plan", "train"):
        assert "more than half of the rows" not in " ".join(done(command, place.recipe).out.split())
        shutil.rmtree(place.run, ignore_errors=True)
        assert "more than half of the rows" in " ".join(seen(place, command, place.recipe).split())
    assert place.json("private/summary.json")["units_at_max_length"] == 30
    assert "max_length" not in (place.run / "run.json").read_text()


@pytest.mark.parametrize(
    ("texts", "long", "lost", "words"),
    [
        ([(9, True)] * 4, "truncate", 0, ""),
        ([(10, True)] * 4, "truncate", 0, ""),  # fills it, and is whole
        ([(11, True)] * 3 + [(9, True)], "truncate", 0, "ends are cut off"),
        ([(11, True)] * 2 + [(9, True)] * 2, "truncate", 0, ""),  # half
        ([(11, True)] * 4, "chunk", 0, ""),
        ([(9, False)] * 3 + [(9, True)], "chunk", 3, "not a token left to learn"),
        ([(11, False)] * 2 + [(11, True), (9, True)], "truncate", 2, "ends are cut off"),
    ],
)
def test_more_than_half_of_the_rows_are_told(texts: list[tuple[int, bool]], long: str, lost: int, words: str) -> None:
    counted, data = Lengths(), tiny.reads(10, long)
    for text in texts:
        counted.add([text], data)
    counted.check(data)
    assert (counted.lost, counted.full) == (lost, sum(tokens >= 10 for tokens, _ in texts))
    assert words in counted.warning(data)
    assert bool(words) == bool(counted.warning(data))
