"""A wrong command costs one clear line: nothing that lay there is lost, nothing is spent; and folders of any name get a card."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from running import SENTINEL, Place, contents, done, dpllm_, edit_json, make_place, refused, rows

import dpllm
from dpllm.canaries import canaries
from dpllm.ledger import Budget, Ledger, budgets
from dpllm.text.tokens import Lengths

Change = dict[str, Any]
WRONG, REFUSED = 2, 3


def test_more_canaries_than_verify_reads_are_refused_before_anything_is_spent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant trains, and no card can then hold the audit."""
    canaries_of = {"audit.canaries": {"groups": {1: 6}, "references": 100}}
    recipe = make_place(place.root / "many", place.base, canaries_of).recipe
    for limit, smaller in (("MOST_CANARIES", 105), ("MOST_TOKENS", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(canaries, limit, smaller)
            assert "no card could state the audit" in refused("train", recipe)
    with monkeypatch.context() as patch:
        patch.setattr(canaries, "MOST_CANARIES", 106)
        done("train", recipe)


def budget(place: Place) -> Change:
    with Ledger(place.ledger) as book:
        budgets.set_budget(book, "small", Budget(1.0, 1e-3, "example", "zero_out", by="Ada", reason="a test"))
    return {"privacy.dataset": "small", "privacy.delta": 1e-3}


def experts(place: Place) -> dict[str, Any]:
    moe = tiny.save_model(place.root / "moe", "mixtral")
    return {"model.name_or_path": str(moe), "adapter": {"method": "frozen", "last_blocks": 1}}


def beyond(place: Place) -> Change:
    return {"model.name_or_path": str(tiny.save_model(place.root / "small", vocab_size=100))}


def no_template(place: Place) -> Change:
    turns = [{"role": "user", "content": SENTINEL}, {"role": "assistant", "content": "Yes."}]
    tiny.write_rows(place.train, [{"messages": turns}] * 30)
    return {"model.name_or_path": str(tiny.save_model(place.root / "plain", chat_template=None))}


def of_nobody(place: Place) -> Change:
    turns = [{"role": "user", "content": SENTINEL}, {"role": SENTINEL, "content": "Yes."}]
    tiny.write_rows(place.train, [{"messages": turns[:1]}] * 20 + [{"messages": turns}] * 10)
    return {}


def empty_folder(place: Place) -> Change:
    (place.root / "empty").mkdir()
    return {"model.name_or_path": str(place.root / "empty")}


def without_a_unit(place: Place) -> Change:
    tiny.write_rows(place.train, [{**row, "who": None if n == 7 else "a"} for n, row in enumerate(rows())])
    return {"data.unit": "who", "data.max_examples_per_unit": 2}


def foreign_ledger(place: Place) -> Change:
    return {"privacy.ledger": str(tiny.write_rows(place.root / "notes.jsonl", rows(1)))}


def without_text(place: Place) -> Change:
    tiny.write_rows(place.train, [*rows(20), {"body": SENTINEL}])
    return {}


LONG_CANARY = {"audit.canaries": {"groups": {1: 4}}, "data.max_length": 32}
CASES: dict[str, tuple[Change | Callable[[Place], Change], int, str]] = {
    "misspelt key": ({"privacy.epsilom": 3}, WRONG, r"privacy\.epsilom: unknown key; did you mean epsilon\?"),
    "epsilon zero": ({"privacy.epsilon": 0}, WRONG, r"privacy\.epsilon: .*greater than 0"),
    "DoRA": ({"adapter.use_dora": True}, WRONG, r"adapter\.use_dora: the magnitude of DoRA"),
    "epsilon out of reach": ({"privacy.epsilon": 1e-9, "privacy.delta": 1e-12}, WRONG, r"epsilon"),
    "missing file": ({"data.train": "absent.jsonl"}, WRONG, r"absent\.jsonl: no such file"),
    "missing model": ({"model.name_or_path": "./absent"}, WRONG, r"model\.name_or_path './absent'"),
    "row without text": (without_text, WRONG, r"row 21 has no text in column 'text'"),
    "empty folder": (empty_folder, WRONG, r"empty: holds no config\.json"),
    "no chat template": (no_template, WRONG, r"plain: has no chat template"),
    "unknown role": (of_nobody, WRONG, r"row 21 has a message whose role is not one of .*assistant"),
    "null unit": (without_a_unit, WRONG, r"row 8 has no value in column 'who'"),
    "no such layer": ({"adapter.target_modules": ["c_attn"]}, WRONG, r"matches no layer.*q_proj"),
    "tokens that the model lacks": (beyond, WRONG, r"tokenizer has \d{3} tokens but the model only 100 embeddings,"),
    "foreign ledger": (foreign_ledger, WRONG, r"ledger .*notes\.jsonl"),
    "batch larger than the data": ({"train.batch_size": 41}, REFUSED, r"train\.batch_size 41 is larger .*\(40 "),
    "delta of 1/N": ({"privacy.delta": 1 / 40}, REFUSED, r"privacy\.delta 0\.025 is not below 1/N"),
    "noise below the target": ({"privacy.noise_multiplier": 0.3}, REFUSED, r"above the target privacy\.epsilon"),
    "experts that train": (experts, REFUSED, r"belongs to a router or an expert"),
    "canary that does not fit": (LONG_CANARY, WRONG, r"does not fit into data\.max_length"),
    "learning rate": ({"train.learning_rate": 1e30}, WRONG, r"train\.learning_rate 1e\+30 would move every weight"),
    "no privacy on private data": ({"privacy.enabled": False}, REFUSED, r"not declared public.*data\.public: true"),
    "budget": (budget, REFUSED, r"0% of epsilon 1 used, and this run would use another [\d.]+%"),
}


def changed(name: str, place: Place) -> tuple[int, str]:
    change, code, words = CASES[name]
    place.write(change(place) if callable(change) else change)
    return code, words


@pytest.mark.parametrize("name", CASES)
def test_replacing_a_run_by_a_wrong_one_loses_nothing(
    name: str, finished: Place, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.root)
    shutil.copytree(finished.run, place.run)
    with Ledger(place.ledger) as book:
        budgets.set_budget(book, "another", Budget(1.0, 1e-5, "example", "zero_out", by="Ada", reason="a test"))
    code, words = changed(name, place)
    before, head = contents(place.run), place.head()
    message = refused("train", place.recipe, "--overwrite", code=code)
    assert re.search(words, message), message
    assert (contents(place.run), place.head()) == (before, head)


@pytest.mark.parametrize(
    "name",
    ["misspelt key", "missing model", "row without text", "foreign ledger", "epsilon out of reach", "delta of 1/N"],
)
def test_plan_says_the_same_and_writes_nothing(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.root)
    code, words = changed(name, place)
    before = contents(place.root)
    message = refused("plan", place.recipe, code=code)
    assert "\n" not in message.strip()
    assert re.search(words, message), message
    assert contents(place.root) == before


def test_a_token_more_than_the_model_knows_does_no_harm_where_no_row_holds_it(place: Place) -> None:
    """Gemma 3's tokenizer has one for images."""
    tokenizer = tiny.tokenizer()
    base = tiny.save_model(place.root / "images", vocab_size=len(tokenizer))
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(base)
    place.write({"model.name_or_path": str(base)})
    done("train", place.recipe)


def test_a_refused_run_says_so_and_makes_room_for_a_right_one(place: Place) -> None:
    place.write({"train.batch_size": 41})
    assert dpllm_("train", place.recipe).code == REFUSED
    record = place.json("run.json")
    assert (record["status"], record["guarantee"]["holds"]) == ("refused", False)
    assert "train.batch_size 41" in record["guarantee"]["reason"]
    assert not (place.run / "export").exists()
    assert not place.ledger.exists()
    refused("card", place.run)
    place.write()
    done("train", place.recipe)


def test_a_directory_that_holds_a_run_is_refused(finished: Place) -> None:
    before, head = contents(finished.run), finished.head()
    message = refused("train", finished.recipe)
    assert "already holds a run" in message
    assert all(way in message for way in ("--resume", "--overwrite", "--output_dir"))
    assert (contents(finished.run), finished.head()) == (before, head)


@pytest.mark.parametrize("part", ["private", "export"])
def test_folders_of_somebody_else_are_not_deleted(place: Place, part: str) -> None:
    (place.run / part).mkdir(parents=True)
    (place.run / part / "diary.txt").write_text("mine")
    assert "--output_dir" in refused("train", place.recipe)
    assert (place.run / part / "diary.txt").read_text() == "mine"


def test_other_files_in_the_output_directory_survive(place: Place) -> None:
    place.run.mkdir()
    (place.run / "notes.txt").write_text("mine")
    done("train", place.recipe)
    done("train", place.recipe, "--overwrite")
    assert (place.run / "notes.txt").read_text() == "mine"


def test_data_that_cannot_be_read_make_no_readable_copies(place: Place) -> None:
    place.write({"train.batch_size": 41})
    folder = place.root / "folder"
    tiny.write_rows(folder / "train.jsonl", rows())
    assert dpllm_("train", place.recipe, "--data.train", folder).code == REFUSED
    private = place.run / "private"
    assert (private.stat().st_mode & 0o077) == 0
    assert all(path.is_relative_to(private) for path in place.run.rglob("*cache*"))


# --- a run of which a file was changed since; which files: tests/run/test_open_run.py --------------------------------


@pytest.mark.parametrize("name", ["plan.json", "export/adapter_model.safetensors", "private/canaries.json"])
def test_a_changed_file_stops_every_command_that_may_read_it(copy: Place, name: str) -> None:
    run = copy.run
    if name == "plan.json":
        edit_json(run / name, epsilon=99.0)
    else:
        (run / name).write_bytes((run / name).read_bytes()[:-1] + b"x")
    other = Path(shutil.copytree(run, copy.root / "other"))
    before = contents(copy.root)
    commands: list[tuple[object, ...]] = [("audit", run), ("audit", run, "--members"), ("card", run)]
    commands += [("compare", run, other), ("push", run, "a/b", "--dry-run")]
    if not name.startswith("private/"):
        commands += [("generate", run), ("merge", run), ("synthesize", run, "--rows", 3)]
    for command in commands:
        assert f"{name} is not what the run wrote" in refused(*command)
    assert contents(copy.root) == before


# --- names of folders, and rows that are too long --------------------------------------------------------------------


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
