"""``dpllm ledger``: what people type, what they are told, and one line and an exit code for everything that is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import write_recipe
from ledger_stores import EVENT, TERMS, Place, budget, reserve

from dpllm.cli import main
from dpllm.errors import Refused
from dpllm.ledger import Ledger, budgets
from dpllm.ledger.values import Sealed
from dpllm.privacy.accounting import dp_sgd_event

BUDGET = ["--epsilon", "8", "--delta", "1e-5", "--unit", "patient", "--by", "alice", "--reason", "study 7"]
WHO = ["--by", "bob", "--reason", "because"]
PLANNED = [*BUDGET, "--planned"]


@pytest.fixture
def say(place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Types a command on the ledger; returns exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def typed(*words: object) -> tuple[int, str]:
        code = main(["ledger", *map(str, words), "--ledger", place.location])
        out, err = capsys.readouterr()
        if code:
            assert err.count("\n") == 1, err
            assert err.startswith("dpllm ledger: ")
        return code, out + err

    return typed


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, noise_multiplier=4.0, ledger=None)


def test_the_way_of_a_planned_budget(say, place: Place):
    code, out = say("init", "notes", *PLANNED)
    assert code == 0
    assert "epsilon 8 at delta 1e-05 per patient under zero_out, planned, set by alice (study 7)" in out
    assert "after which none follows" in out
    with place.open() as ledger:
        entry = reserve(ledger).entry
        ledger.charge(entry, 1)
    _, out = say("show", "notes")
    assert "1/4" in out
    assert "chain unbroken" in out
    assert "This figure gates" in out
    assert "Sealed list: 1 runs, of which 1 reserved" in out
    assert "has this budget already" in say("init", "notes", *PLANNED)[1]
    assert say("init", "notes", *BUDGET)[0] == 3  # a budget that was used keeps its kind
    assert say("init", "notes", *PLANNED, "--epsilon", "9")[0] == 3
    code, out = say("reconcile", entry[:8], *WHO)
    assert (code, "stays in the total" in out) == (0, True)
    assert say("reconcile", entry, *WHO)[0] == 3
    _, out = say("show")
    assert "is shown for comparison" in out
    assert "Refused: notes: budget_set 2" in out
    code, out = say("history", "notes")
    assert [word for word in ("budget", "seal", "reserve", "reconcile") if word not in out] == []
    assert "by bob: because" in out


def test_what_is_sealed_and_waits_is_shown(say, place: Place):
    say("init", "notes", *PLANNED)
    with place.open() as ledger:
        runs = [Sealed(EVENT, 4), Sealed(dp_sgd_event(0.5, 30.0, 3), 3)]
        together = budgets.seal(ledger, "notes", runs, "alice", "two")
        reserve(ledger, run="first-run")
        with pytest.raises(Refused, match=r"1 have not run: q 0\.5, sigma 30, 3 steps"):
            reserve(ledger, event=dp_sgd_event(0.5, 29.0, 3), num_steps=3)
    _, out = say("show")
    assert (
        f"2 runs, of which 1 reserved; together with what was imported epsilon {together:.3f}. This figure gates" in out
    )
    assert say("reconcile", "first-run", *WHO)[0] == 0  # by the name of the run


def test_an_import_is_in_the_unit_of_the_budget_and_must_be_countable(say, tmp_path: Path):
    say("init", "notes", *BUDGET)
    assert say("import", "notes", "--epsilon", "0.25", *WHO)[0] == 0
    assert "0.250" in say("show")[1]
    for name, event in (("tiny", {"type": "gaussian", "noise_multiplier": 1e-160}), ("deep", None)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(event) if event else '{"a":' * 5000 + "1" + "}" * 5000)
        assert say("import", "notes", "--event", path, *WHO)[0] == 2
    assert say("show")[1].count("imported") >= 1


def test_an_import_that_would_end_an_unused_budget_is_said_before_it_is_entered(say, place: Place):
    say("init", "notes", *BUDGET)
    code, out = say("import", "notes", "--epsilon", "1", "--delta", "1e-6", *WHO)
    assert (code, "--import-delta 1e-06" in out) == (2, True)
    assert say("init", "notes", *BUDGET, "--import-delta", "1e-6")[0] == 0
    assert say("import", "notes", "--epsilon", "1", "--delta", "1e-6", *WHO)[0] == 0
    with place.open() as ledger:
        reserve(ledger)
    code, out = say("import", "notes", "--epsilon", "1", "--delta", "1e-6", *WHO)  # by now it is a fact
    assert (code, "every further run will be refused" in out) == (0, True)


def test_a_delta_is_compared_with_the_data(say, recipe: Path):
    terms = ["--epsilon", "8", "--by", "alice", "--reason", "study 7", "--data", recipe.parent / "rows.jsonl"]
    code, out = say("init", "notes", *terms, "--delta", "0.02")
    assert (code, "not below 1/N" in out, "Type --delta 0.002 or less" in out) == (3, True, True)
    assert "Beware" in say("init", "notes", *terms, "--delta", "0.003")[1]
    assert "Beware" not in say("init", "notes", *terms, "--delta", "0.002")[1]


def test_nothing_is_made_for_a_budget_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledger = tmp_path / "ledger.sqlite"
    for wrong in (["--epsilon", "-8"], ["--delta", "2"], ["--data", tmp_path / "absent.jsonl"]):
        assert main(["ledger", "init", "notes", *BUDGET, *map(str, wrong), "--ledger", str(ledger)]) == 2
        assert "Budget(" not in capsys.readouterr().err
        assert not ledger.exists()


def test_the_way_of_an_adaptive_budget(say, place: Place):
    code, out = say("init", "notes", *BUDGET)
    assert code == 0
    assert "adaptive at order 3.2" in out
    assert re.search(r"Epsilon [1-7]\.\d+ remains for runs in any order", out)
    assert "It replaces: epsilon 8 at" in say("init", "notes", *PLANNED)[1]  # nothing was spent
    assert "It replaces: epsilon 8 at" in say("init", "notes", *BUDGET)[1]
    with place.open() as ledger:
        entry = reserve(ledger).entry
    code, out = say("reconcile", entry, *WHO)
    assert (code, "returned to the budget" in out) == (0, True)
    code, out = say("import", "notes", "--epsilon", "0.5", "--unit", "patient", *WHO)
    assert (code, "the total is now epsilon" in out) == (0, True)
    code, out = say("import", "notes", "--epsilon", "9", "--unit", "patient", *WHO)
    assert "every further run will be refused" in out
    _, out = say("show")
    assert "This figure gates." in out
    assert "(imported)" in out


def test_recipes_are_sealed_and_their_data_recognised(say, place: Place, recipe: Path):
    code, out = say("init", "notes", *BUDGET, "--unit", "example", "--planned", recipe, recipe)
    assert (code, "2 runs sealed" in out) == (0, True)
    with place.open() as ledger:
        assert len(ledger.account("notes").sealed) == 2
        assert [entry.kind for entry in ledger.history()] == ["budget", "data", "seal"]
    assert say("seal", "notes", recipe, *WHO)[0] == 3
    code, out = say("init", "copy", *BUDGET, "--unit", "example", "--data", recipe.parent / "rows.jsonl")
    assert (code, "these very records" in out) == (3, True)
    code, out = say("seal", "other", recipe, *WHO)
    assert (code, "privacy.dataset is 'notes'" in out) == (2, True)


def test_sealing_asks_nothing_that_only_a_run_can_know(say, place: Place, recipe: Path):
    """Evaluation data may lie on another machine, and a parent in the ledger that is named, not in the default one."""
    text = yaml.safe_load(recipe.read_text("utf-8"))
    text["data"]["eval"] = "elsewhere.jsonl"
    text["privacy"] |= {"derived_from": "notes", "dataset": None, "ledger": None}
    recipe.write_text(yaml.safe_dump(text), encoding="utf-8")
    say("init", "notes", *PLANNED, "--unit", "example")
    code, out = say("seal", "notes", recipe, *WHO)
    assert (code, "1 runs sealed" in out) == (0, True)


def test_what_is_shown_is_one_object(say):
    say("init", "notes", *BUDGET, "--import-delta", "1e-7")
    say("import", "notes", "--epsilon", "1", "--delta", "1e-7", *WHO)
    found = {action: json.loads(say(action, "--json")[1]) for action in ("show", "history", "verify")}
    shown = found["show"]["datasets"]["notes"]
    assert shown["budget"]["epsilon"] == 8
    assert [entry["event"]["epsilon"] for entry in shown["imports"]] == [1]
    assert any("Budget: epsilon 8" in line for line in shown["says"])
    assert [entry["entry"] for entry in found["history"]["entries"]] == ["budget", "import"]
    assert found["verify"]["problems"] == []
    assert found["verify"]["head"] == found["show"]["head"]


def test_exceptions_are_the_owners(say):
    say("init", "notes", *BUDGET)
    assert say("except", "notes", *WHO)[0] == 3
    code, out = say("except", "notes", "--by", "alice", "--reason", "the baseline")
    assert (code, "permitted by alice" in out) == (0, True)
    assert "Exception: training without differential privacy" in say("show")[1]


def test_export_verify_and_import_again(say, place: Place, tmp_path: Path, capsys):
    say("init", "notes", *BUDGET)
    with place.open() as ledger:
        reserve(ledger)
        head, spent = ledger.head(), ledger.spent("notes")
    export = tmp_path / "export.json"
    assert say("export", "--output", export)[0] == 0
    assert json.loads(say("export")[1])["head"] == head
    assert main(["ledger", "verify", "--file", str(export)]) == 0
    assert main(["ledger", "verify", "--file", str(export), "--head", f"{'0' * 64}:1"]) == 4
    other = str(tmp_path / "other.sqlite")
    assert main(["ledger", "import", "notes", "--from", str(export), *WHO, "--ledger", other]) == 0
    with Ledger(Path(other)) as taken:
        assert taken.spent("notes") == pytest.approx(spent)
        assert taken.history()[0].facts["unit"] == "patient"
    assert main(["ledger", "import", "notes", "--from", str(export), *WHO, "--unit", "visit", "--ledger", other]) == 2
    event = tmp_path / "event.json"
    event.write_text(json.dumps(dp_sgd_event(0.02, 0.8, 150).to_json()))
    assert main(["ledger", "import", "more", "--event", str(event), *WHO, "--ledger", other]) == 0
    edited = export.read_text().replace("study 7", "study 8")
    export.write_text(edited)
    assert main(["ledger", "verify", "--file", str(export)]) == 4
    assert main(["ledger", "import", "notes", "--from", str(export), *WHO, "--ledger", other]) == 4
    capsys.readouterr()
    run_json = tmp_path / "run.json"
    run_json.write_text(json.dumps({"ledger": {"head": head}}))
    assert say("verify", "--head", run_json)[0] == 0
    assert say("verify", "--head", f"{head['hash']}:{head['count']}")[0] == 0
    code, out = say("verify", "--head", f"{'0' * 64}:{head['count']}")
    assert (code, "lacks an earlier head" in out) == (4, True)
    assert "shows only against a head copied elsewhere" in say("verify")[1]


def test_an_edit_is_exit_code_4_for_verify_and_3_for_everything_else(say, place: Place):
    say("init", "notes", *BUDGET)
    with place.open() as ledger:
        reserve(ledger)
    place.edit("UPDATE entries SET payload = '[]' WHERE seq = 1")
    code, out = say("verify")
    assert (code, "entry 1 was changed" in out) == (4, True)
    for words in (
        ["show"],
        ["init", "more", *BUDGET],
        ["except", "notes", *WHO],
        ["import", "notes", "--epsilon", "1", *WHO],
        ["reconcile", "a", *WHO],
    ):
        assert say(*words)[0] == 3, words
    code, out = say("history")
    assert (code, "not readable" in out) == (0, True)
    assert say("export")[0] == 0


def test_a_late_order_is_one_line_whatever_is_typed(say, place: Place):
    say("init", "notes", *BUDGET)
    with place.open() as ledger, ledger.chain.writing():
        (first,) = ledger.chain.of("notes", "budget")
        ledger.chain.append("budget", "notes", {**first.facts, "late": True})
    who = (
        ["init", "more", *BUDGET],
        ["reconcile", "a", *WHO],
        ["adopt", *WHO],
        ["import", "notes", "--epsilon", "1", *WHO],
    )
    for words in (["show"], ["history"], ["verify"], ["export"], ["metrics"], *who):
        code, out = say(*words)
        assert (code, "late: true" in out) == (3, True), words


HOSTILE = "[/b] $x_{ [red]*?"


def test_names_are_shown_as_they_are(say, place: Place):
    with place.open() as ledger:
        budgets.set_budget(ledger, HOSTILE, budget(8.0))
        reserve(ledger, HOSTILE, run="run [/x] \x1b[2J\n$y^{ \udcff")
        budgets.except_from_privacy(ledger, HOSTILE, "alice", "[/i] \x07")
        budgets.import_run(ledger, "more [bold]", event=EVENT, run="[/]", by="[/]", reason="[/]", **TERMS)
        reserve(ledger, "more [bold]")
    for words in (["show"], ["history"], ["show", HOSTILE]):
        code, out = say(*words)
        assert code == 0
        assert "\x1b" not in out
        assert "\x07" not in out
        assert HOSTILE in out


BAD = {
    "no such ledger": (["show"], 2, "no ledger there yet"),
    "no such dataset": (["show", "nobody"], 2, "knows no dataset"),
    "no such history": (["history", "nobody"], 2, "knows no dataset"),
    "export nowhere": (["export", "--output", "/proc/no/where.json"], 2, "--output"),
    "epsilon nan": (["init", "n", *BUDGET, "--epsilon", "nan"], 2, "bounds nothing"),
    "epsilon 0": (["init", "n", *BUDGET, "--epsilon", "0"], 2, "bounds nothing"),
    "delta 1": (["init", "n", *BUDGET, "--delta", "1"], 2, "bounds nothing"),
    "delta inf": (["init", "n", *BUDGET, "--delta", "inf"], 2, "delta"),
    "import delta": (["init", "n", *BUDGET, "--import-delta", "1e-5"], 2, "delta"),
    "import delta alone": (["init", "n", *BUDGET, "--planned", "--import-delta", "1e-6"], 2, "--planned"),
    "too small for a filter": (["init", "n", *BUDGET, "--epsilon", "0.01"], 2, "--planned"),
    "absent recipe": (["init", "n", *BUDGET, "--planned", "absent.yaml"], 2, "absent.yaml"),
    "absent data": (["init", "n", *BUDGET, "--data", "absent.jsonl"], 2, "absent.jsonl"),
    "empty name": (["init", " ", *BUDGET], 2, "dataset name"),
    "name of two lines": (["init", "a\nb", *BUDGET], 2, "dataset name"),
    "name that is no text": (["init", "\udcff", *BUDGET], 2, "dataset name"),
    "empty unit": (["init", "n", *BUDGET, "--unit", ""], 2, "unit"),
    "nobody": (["init", "n", *BUDGET, "--by", " "], 2, "named person"),
    "no reason": (["except", "n", "--by", "a", "--reason", ""], 2, "named person"),
    "nothing to seal": (["seal", "known", "absent.yaml", *WHO], 2, "absent.yaml"),
    "no such entry": (["reconcile", "nothing", *WHO], 2, "no reservation"),
    "import of nothing": (["import", "known", *WHO], 2, "what was spent"),
    "import of two": (["import", "known", "--epsilon", "1", "--event", "x", *WHO], 2, "what was spent"),
    "import of nan": (["import", "known", "--epsilon", "nan", *WHO], 2, "imported epsilon"),
    "import of all delta": (["import", "known", "--epsilon", "1", "--delta", "1", *WHO], 2, "imported delta"),
    "import of another unit": (["import", "known", "--epsilon", "1", "--unit", "visit", *WHO], 3, "another quantity"),
    "import of no file": (["import", "known", "--event", "absent.json", *WHO], 2, "absent.json"),
    "import of no event": (["import", "known", "--event", "list.json", *WHO], 2, "list.json"),
    "import of an odd event": (["import", "known", "--event", "odd.json", *WHO], 2, "unknown or malformed"),
    "import of no export": (["import", "known", "--from", "odd.json", *WHO], 2, "no export"),
    "verify no file": (["verify", "--file", "absent.json"], 2, "absent.json"),
    "verify no export": (["verify", "--file", "odd.json"], 2, "no export"),
    "verify no head": (["verify", "--head", "abc"], 2, "--head"),
    "verify a head of no entries": (["verify", "--head", f"{'0' * 64}:0"], 2, "--head"),
    "verify a head of words": (["verify", "--head", f"{'0' * 64}:²"], 2, "--head"),
    "verify a long head": (["verify", "--head", "x" * 5000], 2, "--head"),
    "verify a run without": (["verify", "--head", "odd.json"], 2, "no head"),
    "ledger of another kind": (["show", "--ledger", "mysql://x"], 2, "unknown kind"),
    "ledger that is a directory": (["show", "--ledger", "."], 2, "ledger"),
    "ledger with a password": (["show", "--ledger", "postgresql://a:b@c/d"], 2, "holds a password"),
    "ledger with a long name": (["init", "n", *BUDGET, "--ledger", "x" * 5000], 2, "ledger"),
    "ledger nowhere": (["init", "n", *BUDGET, "--ledger", "/proc/no/where"], 2, "ledger"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_one_line_and_an_exit_code(name, tmp_path: Path, monkeypatch, capsys):
    words, wanted, text = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("odd.json").write_text('{"type": "free", "ledger": 3}')
    if name != "no such ledger":
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            reserve(ledger, "known")
    if "--ledger" not in words:
        words = [*words, "--ledger", "ledger.sqlite"]
    assert main(["ledger", *words]) == wanted
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_the_command_imports_no_torch(tmp_path: Path):
    code = """
import sys
from dpllm.cli import main
path = sys.argv[1]
budget = ["--epsilon", "8", "--delta", "1e-5", "--reason", "x", "--by", "a"]
assert main(["ledger", "init", "n", *budget, "--ledger", path]) == 0
for action in ("show", "history", "verify", "export", "metrics"):
    assert main(["ledger", action, "--ledger", path]) == 0
assert not {"torch", "transformers", "datasets", "opacus", "accelerate"} & set(sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "ledger.sqlite")]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
