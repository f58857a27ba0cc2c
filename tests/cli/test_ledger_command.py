"""``dpllm ledger``: what people type, what they are told, and one line and an exit code for everything that is wrong."""

import json
from pathlib import Path

import pytest
from commands import fresh, write_recipe
from ledger_stores import EVENT, TERMS, Place, budget, request, reserve

from dpllm.cli import main
from dpllm.ledger import Ledger, budgets
from dpllm.privacy.accounting import dp_sgd_event

BUDGET = ["--epsilon", "8", "--delta", "1e-5", "--unit", "patient", "--by", "alice", "--reason", "study 7"]
WHO = ["--by", "bob", "--reason", "because"]
PLAN = {"event": EVENT.to_json(), "num_steps": 4, "unit": "patient", "neighbouring_relation": "zero_out"}
HOSTILE = "[/b] $x_{ [red]*?"


@pytest.fixture
def command(place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
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


def test_the_way_of_a_budget(command, place: Place):
    code, out = command("init", "notes", *BUDGET)
    assert code == 0
    assert "epsilon 8 at delta 1e-05 per patient under zero_out, set by alice (study 7)" in out
    assert "0% of epsilon 8 used; dpllm plan RECIPE says how many runs like it fit." in out
    assert "It replaces: epsilon 8 at" in command("init", "notes", *BUDGET, "--epsilon", "9")[1]  # nothing was spent
    assert "It replaces: epsilon 9 at" in command("init", "notes", *BUDGET)[1]
    with place.open() as ledger:
        entry = reserve(ledger, run="first-run").entry
        ledger.charge(entry, 1)
        used = f"{100 * ledger.used('notes'):.3g}% of epsilon 8 used; "
        more = ledger.outlook("notes", [request()]).could_follow
    _, out = command("show", "notes")
    assert f"{used}{more + 1} more like run first-run fit." in out
    assert "1/4" in out
    assert "chain unbroken" in out
    assert "has this budget already" in command("init", "notes", *BUDGET)[1]
    assert command("init", "notes", *BUDGET, "--epsilon", "9")[0] == 3
    code, out = command("reconcile", entry, *WHO)
    assert (code, "returned to the budget" in out) == (0, True)
    assert command("reconcile", entry, *WHO)[0] == 3
    code, out = command("import", "notes", "--epsilon", "0.5", "--unit", "patient", *WHO)
    assert (code, "entered. " in out, "% of epsilon 8 used" in out) == (0, True, True)
    code, out = command("import", "notes", "--epsilon", "9", "--unit", "patient", *WHO)
    assert "every further run will be refused" in out
    _, out = command("show")
    assert "Refused: notes: budget_set 1" in out
    assert "(imported)" in out


def test_the_way_of_a_final_run(command, place: Place):
    assert "only one run or sweep that is --final" in command("init", "notes", *BUDGET, "--epsilon", "0.05")[1]
    with place.open() as ledger:
        entry = reserve(ledger, event=dp_sgd_event(1.0, 400.0, 4), final=True).entry
        spent = ledger.spent("notes")
    assert f"closed by a final reservation: exactly epsilon {spent:.4f}" in command("show", "notes")[1]
    code, out = command("import", "notes", "--epsilon", "0.1", *WHO)
    assert (code, "which exceeds the budget" in out) == (0, True)
    code, out = command("reconcile", entry, *WHO)
    assert (code, "stays in the total" in out) == (0, True)
    assert command("init", "notes", *BUDGET)[0] == 3


def test_an_import_is_in_the_unit_of_the_budget_and_must_be_countable(command, tmp_path: Path):
    command("init", "notes", *BUDGET)
    assert command("import", "notes", "--epsilon", "0.25", *WHO)[0] == 0
    assert "0.250" in command("show")[1]
    for name, event in (("tiny", {"type": "gaussian", "noise_multiplier": 1e-160}), ("deep", None)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(event) if event else '{"a":' * 5000 + "1" + "}" * 5000)
        assert command("import", "notes", "--event", path, *WHO)[0] == 2
    assert command("show")[1].count("imported") >= 1


def test_an_import_that_would_end_an_unused_budget_is_said_before_it_is_entered(command, place: Place):
    command("init", "notes", *BUDGET)
    code, out = command("import", "notes", "--epsilon", "1", "--delta", "1e-6", *WHO)
    assert (code, "--import-delta 1e-06" in out) == (2, True)
    assert command("init", "notes", *BUDGET, "--import-delta", "1e-6")[0] == 0
    assert command("import", "notes", "--epsilon", "1", "--delta", "1e-6", *WHO)[0] == 0
    with place.open() as ledger:
        reserve(ledger)
    code, out = command("import", "notes", "--epsilon", "1", "--delta", "1e-6", *WHO)  # by now it is a fact
    assert (code, "every further run will be refused" in out) == (0, True)


def test_a_delta_is_compared_with_the_data(command, recipe: Path):
    terms = ["--epsilon", "8", "--by", "alice", "--reason", "study 7", "--data", recipe.parent / "rows.jsonl"]
    code, out = command("init", "notes", *terms, "--delta", "0.02")
    assert (code, "not below 1/N" in out, "Type --delta 0.002 or less" in out) == (3, True, True)
    assert "Beware" in command("init", "notes", *terms, "--delta", "0.003")[1]
    assert "Beware" not in command("init", "notes", *terms, "--delta", "0.002")[1]


def test_nothing_is_made_for_a_budget_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledger = tmp_path / "ledger.sqlite"
    for wrong in (["--epsilon", "-8"], ["--delta", "2"], ["--data", tmp_path / "absent.jsonl"]):
        assert main(["ledger", "init", "notes", *BUDGET, *map(str, wrong), "--ledger", str(ledger)]) == 2
        assert "Budget(" not in capsys.readouterr().err
        assert not ledger.exists()


def test_what_is_shown_is_one_object(command):
    command("init", "notes", *BUDGET, "--import-delta", "1e-7")
    command("import", "notes", "--epsilon", "1", "--delta", "1e-7", *WHO)
    printed = {action: json.loads(command(action, "--json")[1]) for action in ("show", "verify")}
    shown = printed["show"]["datasets"]["notes"]
    assert shown["budget"]["epsilon"] == 8
    assert [entry["event"]["epsilon"] for entry in shown["imports"]] == [1]
    assert any("Budget: epsilon 8" in line for line in shown["says"])
    assert printed["verify"]["problems"] == []
    assert printed["verify"]["head"] == printed["show"]["head"]


def test_exceptions_are_the_owners(command):
    command("init", "notes", *BUDGET)
    assert command("except", "notes", *WHO)[0] == 3
    code, out = command("except", "notes", "--by", "alice", "--reason", "the baseline")
    assert (code, "permitted by alice" in out) == (0, True)
    assert "Exception: training without differential privacy" in command("show")[1]


def test_an_export_is_verified_and_its_events_are_imported(command, place: Place, tmp_path: Path, capsys):
    command("init", "notes", *BUDGET)
    with place.open() as ledger:
        reserve(ledger)
        head, spent = ledger.head(), ledger.spent("notes")
    export = tmp_path / "export.json"
    assert command("export", "--output", export)[0] == 0
    assert json.loads(command("export")[1])["head"] == head
    assert main(["ledger", "verify", "--file", str(export)]) == 0
    assert main(["ledger", "verify", "--file", str(export), "--head", f"{'0' * 64}:1"]) == 4
    elsewhere = str(tmp_path / "other.sqlite")
    event = tmp_path / "event.json"
    for name, value in (("an event", EVENT.to_json()), ("plan.json", PLAN)):
        event.write_text(json.dumps(value))
        assert main(["ledger", "import", name, "--event", str(event), *WHO, "--ledger", elsewhere]) == 0
        with Ledger(Path(elsewhere)) as imported:
            assert imported.spent(name) == pytest.approx(spent)
    edited = export.read_text().replace("study 7", "study 8")
    export.write_text(edited)
    assert main(["ledger", "verify", "--file", str(export)]) == 4
    capsys.readouterr()
    assert command("verify", "--head", f"{head['hash']}:{head['count']}")[0] == 0
    code, out = command("verify", "--head", f"{'0' * 64}:{head['count']}")
    assert (code, "lacks an earlier head" in out) == (4, True)
    assert "Only a head copied elsewhere" in command("verify")[1]


@pytest.mark.parametrize(
    ("plan", "typed", "code"),
    [
        ({}, (), 0),
        ({}, ("--unit", "patient", "--relation", "zero_out"), 0),
        ({}, ("--unit", "user"), 2),
        ({}, ("--relation", "add_or_remove_one"), 2),
        ({"unit": "example"}, (), 3),  # the account is per patient
        ({"neighbouring_relation": "add_or_remove_one"}, (), 3),
        ({"unit": None}, (), 2),
        ({"event": None}, (), 2),
    ],
)
def test_a_plan_is_imported_by_its_own_unit_and_relation(command, tmp_path: Path, plan, typed, code: int):
    """Entered by the budget's unit, a run per example would count as one that protects whole patients."""
    command("init", "notes", *BUDGET)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, **plan}))
    assert command("import", "notes", "--event", path, *typed, *WHO)[0] == code


def test_an_edit_is_exit_code_4_for_verify_and_3_for_everything_else(command, place: Place):
    command("init", "notes", *BUDGET)
    with place.open() as ledger:
        reserve(ledger)
    place.edit("UPDATE entries SET payload = '[]' WHERE seq = 1")
    code, out = command("verify")
    assert (code, "entry 1 was changed" in out) == (4, True)
    for words in (
        ["show"],
        ["init", "more", *BUDGET],
        ["except", "notes", *WHO],
        ["import", "notes", "--epsilon", "1", *WHO],
        ["reconcile", "a", *WHO],
    ):
        assert command(*words)[0] == 3, words
    assert command("export")[0] == 0  # so that an edited chain can be looked at


def test_names_are_shown_as_they_are(command, place: Place):
    with place.open() as ledger:
        budgets.set_budget(ledger, HOSTILE, budget(8.0))
        reserve(ledger, HOSTILE, run="run [/x] \x1b[2J\n$y^{ \udcff")
        budgets.except_from_privacy(ledger, HOSTILE, "alice", "[/i] \x07")
        budgets.import_run(ledger, "more [bold]", event=EVENT, run="[/]", by="[/]", reason="[/]", **TERMS)
        reserve(ledger, "more [bold]")
    for words in (["show"], ["show", HOSTILE]):
        code, out = command(*words)
        assert code == 0
        assert "\x1b" not in out
        assert "\x07" not in out
        assert HOSTILE in out


INIT, IMPORT = ["init", "n", *BUDGET], ["import", "known", *WHO]
WRONG_HEADS = ("abc", f"{'0' * 64}:0", f"{'1' * 64}:²", "x" * 5000)
BAD = {  # command -> exit code and what the message names
    "no such ledger": (["show"], 2, "no ledger there yet"),
    "no such dataset": (["show", "nobody"], 2, "'nobody'"),
    "export nowhere": (["export", "--output", "/proc/no/where.json"], 2, "--output"),
    **{f"epsilon {value}": ([*INIT, "--epsilon", value], 2, "bounds nothing") for value in ("nan", "0")},
    **{f"delta {value}": ([*INIT, "--delta", value], 2, "delta") for value in ("1", "inf")},
    "import delta": ([*INIT, "--import-delta", "1e-5"], 2, "delta"),
    "absent data": ([*INIT, "--data", "absent.jsonl"], 2, "absent.jsonl"),
    **{f"name {name!a}": (["init", name, *BUDGET], 2, "dataset name") for name in (" ", "a\nb", "\udcff")},
    "empty unit": ([*INIT, "--unit", ""], 2, "unit"),
    "nobody": ([*INIT, "--by", " "], 2, "named person"),
    "no reason": (["except", "n", "--by", "a", "--reason", ""], 2, "named person"),
    "no such entry": (["reconcile", "nothing", *WHO], 2, "no reservation"),
    "import of nothing": (IMPORT, 2, "--event FILE"),
    "import of two": ([*IMPORT, "--epsilon", "1", "--event", "x"], 2, "--event FILE"),
    "import of nan": ([*IMPORT, "--epsilon", "nan"], 2, "imported epsilon"),
    "import of all delta": ([*IMPORT, "--epsilon", "1", "--delta", "1"], 2, "imported delta"),
    "import of another unit": ([*IMPORT, "--epsilon", "1", "--unit", "visit"], 3, "visit"),
    **{f"import of {name}": ([*IMPORT, "--event", name], 2, name) for name in ("absent.json", "list.json")},
    "import of an odd event": ([*IMPORT, "--event", "odd.json"], 2, "malformed"),
    **{f"verify {name}": (["verify", "--file", name], 2, name) for name in ("absent.json", "odd.json")},
    **{f"head {head[:4]}": (["verify", "--head", head], 2, "--head") for head in WRONG_HEADS},
    "head of a run": (["verify", "--head", "odd.json"], 2, "dpllm verify RUN"),
    **{f"ledger {name[:9]}": (["show", "--ledger", name], 2, "ledger") for name in ("mysql://x", ".")},
    "ledger with a password": (["show", "--ledger", "postgresql://a:b@c/d"], 2, "password"),
    **{f"new ledger {name[:9]}": ([*INIT, "--ledger", name], 2, "ledger") for name in ("x" * 5000, "/proc/no/where")},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_one_line_and_an_exit_code(name, tmp_path: Path, monkeypatch, capsys):
    words, code, named = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("odd.json").write_text('{"type": "free", "ledger": 3}')
    if name != "no such ledger":
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            reserve(ledger, "known")
    location = [] if "--ledger" in words else ["--ledger", "ledger.sqlite"]
    assert main(["ledger", *words, *location]) == code
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1


def test_the_command_imports_no_torch(tmp_path: Path):
    location = ["--ledger", tmp_path / "ledger.sqlite"]
    for words in (["init", "n", *BUDGET], ["show"], ["metrics"]):
        run, loaded, _ = fresh("ledger", *words, *location)
        assert (run.returncode, loaded) == (0, []), words
