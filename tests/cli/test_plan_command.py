"""``dpllm plan``: quick, without torch, complete beside a refusal, the same for people and machines."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import fresh, give_budget, write_recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.cli import main
from dpllm.cli.plan import dump, largest_batch
from dpllm.ledger import open_ledger
from dpllm.privacy.schedule import Schedule
from dpllm.run.directory import RunDir
from dpllm.statement.formatting import percent_bound


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> tuple[str, str]:
    assert main(["plan", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    return " ".join(printed.out.replace("│", " ").split()), printed.err


def value(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == code
    return dict(json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")))


LIGHT = {
    "json": ["--json"],
    "table": [],
    "calibrated": ["--privacy.noise_multiplier", "null", "--privacy.epsilon", "3"],
}


@pytest.mark.parametrize("how", LIGHT)
def test_plan_loads_no_torch(recipe: Path, how: str) -> None:
    give_budget(recipe.parent, 30.0)
    run, loaded, seconds = fresh("plan", recipe, *LIGHT[how])
    assert (run.returncode, loaded) == (0, []), run.stderr
    assert seconds < 6.0  # of processor time; twice the bar of three seconds, for a busy machine


@pytest.mark.full
def test_the_shape_of_an_8b_model_is_planned_in_seconds(recipe: Path) -> None:
    shape = Path(__file__).resolve().parents[2] / "recipes" / "configs" / "Llama-3.1-8B"
    run, _, seconds = fresh("plan", recipe, "--model", "--model.name_or_path", shape, "--data.max_length", 2048)
    assert run.returncode == 0, run.stderr
    assert seconds < 20.0  # of processor time; twice the bar of ten seconds, for a busy machine


@pytest.mark.parametrize("steps", [1000, 100_000])
def test_an_epsilon_out_of_reach_is_refused_at_once(recipe: Path, steps: int) -> None:
    changes = "--privacy.noise_multiplier", "null", "--privacy.epsilon", "1e-4", "--privacy.delta", "1e-6"
    run, _, seconds = fresh("plan", recipe, *changes, "--train.steps", steps, "--train.batch_size", 25)
    assert run.returncode == 2
    assert "epsilon 0.0001 at delta" in run.stderr
    assert "not reachable" in run.stderr
    assert seconds < 10.0  # of processor time


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "[" / "]"  # its path holds [/], which closes a tag that rich never saw opened
    path = write_recipe(folder, dataset="[/] :bug:")
    tiny.write_rows(folder / "rows.jsonl", [{"text": f"[/b] {tiny.sentence(number)}"} for number in range(50)])
    give_budget(folder, 8.0)  # of other data: what a ledger holds of these is named
    out, _ = answer(capsys, 0, path)
    assert "[/] :bug:: epsilon 0.0000 at delta" in out
    assert "[/]/recipe.yaml" in out.replace(" ", "")
    assert "[/b]" in answer(capsys, 0, folder / "recipe.yaml", "--data.public=true")[0]


def test_the_table_and_json_agree(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = value(capsys, 0, recipe)
    assert (plan["dataset_size"], plan["num_steps"], plan["noise_multiplier"]) == (50, 3, 2.0)
    assert (plan["refusals"], plan["ledger"]) == ([], None)
    assert plan["largest_batch"] == 13
    out, err = answer(capsys, 0, recipe)
    for words in (
        f"{plan['epsilon']:.4f} (target 8)",
        f"pld {plan['epsilon']:.4f}, rdp {plan['accountants']['rdp']:.4f}",
        "the data of one privacy unit are replaced by nothing",
        f"TPR at 1% FPR {percent_bound(plan['limits']['tpr_at_fpr_0.01'])}",
        "B = 5 units expected, at most 13 in 99.9% of the steps",
        "sampling rate q 0.100000",
        "nothing is spent, and no budget is set",
    ):
        assert words in out, words
    assert err == ""


def test_the_one_number_of_a_budget_is_shown(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    give_budget(recipe.parent, 30.0)
    outlook = value(capsys, 0, recipe)["ledger"]
    assert (outlook["used"], outlook["spent"]) == (0.0, None)
    assert outlook["could_follow"] > 1
    out, _ = answer(capsys, 0, recipe)
    assert f"notes: 0% of epsilon 30 used, {100 * outlook['used_after']:.3g}% with this run" in out
    assert f"{outlook['could_follow']} more like it fit" in out
    last = value(capsys, 0, recipe, "--final")["ledger"]
    assert (last["used"], last["final"]) == (None, True)
    assert "it is final" in answer(capsys, 0, recipe, "--final")[0]


def test_a_refusal_comes_after_everything_computed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    give_budget(recipe.parent, 0.01)
    out, err = answer(capsys, 3, recipe)
    assert "noise multiplier sigma 2" in out
    assert "0% of epsilon 0.01 used; this run is refused" in out
    assert err.startswith("dpllm plan: ")
    assert err.count("\n") == 1
    plan = value(capsys, 3, recipe)
    assert plan["refusals"] == [{"exit_code": 3, "message": plan["ledger"]["refusal"]}]
    assert plan["num_steps"] == 3
    with open_ledger(str(recipe.parent / "ledger.sqlite")) or pytest.fail("no ledger") as book:
        assert book.refusals() == {}  # planning is not trying


def test_every_refusal_has_its_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDir(recipe.parent / "run").make()
    (recipe.parent / "run" / "config.yaml").write_text("")
    out, err = answer(capsys, 3, recipe, "--train.batch_size", 51, "--privacy.delta", 0.5)
    assert [line.startswith("dpllm plan: ") for line in err.splitlines()] == [True] * 3
    assert "50 without canary slots" in out
    out, err = answer(capsys, 2, recipe)
    assert "--overwrite" in err
    assert "epsilon" in out


def test_a_baseline_has_a_schedule_and_no_promise(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = ("--privacy.enabled", "false", "--data.public", "true")
    plan = value(capsys, 0, recipe, *public)
    assert plan["num_steps"] == 3
    assert "epsilon" not in plan
    out, _ = answer(capsys, 0, recipe, *public)
    assert "No differential privacy" in out
    assert "B = 5 units expected" in out


def test_advice_is_shown_and_refuses_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weak = ("--privacy.noise_multiplier", 0.3, "--privacy.epsilon", 500)
    out, err = answer(capsys, 0, recipe, *weak)
    assert "Advice: epsilon" in out
    assert err == ""
    assert any("below 0.5" in text for text in value(capsys, 0, recipe, *weak)["advice"])


def test_what_cannot_be_certified_is_null() -> None:
    assert json.loads(dump({"epsilon": math.inf, "curves": [(1.0, math.nan)]})) == {
        "epsilon": None,
        "curves": [[1.0, None]],
    }


def test_a_model_is_counted_from_its_configuration(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.parent / "base"
    tiny.model().config.save_pretrained(folder)
    passes = ("--data.max_length", 64, "--train.tokens_per_pass", 512)
    arguments = (recipe, "--model", "--model.name_or_path", folder, *passes)
    model = value(capsys, 0, *arguments)["model"]
    assert model["memory"]["total"] == sum(size for name, size in model["memory"].items() if name != "total")
    out, _ = answer(capsys, 0, *arguments)
    assert f"{model['trainable']:,} of {model['total']:,}" in out
    assert "with 512 tokens in one forward pass: weights" in out
    assert not {"flops", "seconds_per_step", "seconds", "speed"} & model.keys()  # memory alone is forecast


def test_what_the_model_refuses_is_among_the_refusals(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.parent / "base"
    tiny.model().config.save_pretrained(folder)
    out, err = answer(capsys, 2, recipe, "--model", "--model.name_or_path", folder)  # max_length 512, 128 positions
    assert "128 positions" in err
    assert "An estimate of memory" in out
    out, err = answer(capsys, 2, recipe, "--model", "--model.name_or_path", "absent")
    assert "no configuration" in err
    assert "noise multiplier sigma" in out
    _, err = answer(capsys, 3, recipe, "--model", "--model.name_or_path", folder, "--privacy.epsilon", "1e-3")
    assert "above the target privacy.epsilon" in err


@pytest.mark.parametrize(
    ("arguments", "advice"), [(["--train.stepz", "2"], "did you mean steps"), (["--device", "h100"], "Type both")]
)
def test_wrong_arguments_are_one_line(recipe: Path, capsys: Any, arguments: list[str], advice: str) -> None:
    out, err = answer(capsys, 2, recipe, *arguments)
    assert err.startswith("dpllm plan: ")
    assert advice in err
    assert (err.count("\n"), out) == (1, "")


@pytest.mark.parametrize("public", [True, False])
def test_an_example_is_of_public_data_only(recipe: Path, capsys: pytest.CaptureFixture[str], public: bool) -> None:
    shown, _ = answer(capsys, 0, recipe, "--data.public", str(public).lower())
    assert "read as text: text" in shown
    first = tiny.sentence(0)
    assert (f"learned: {first}<eos>" in shown) == public
    assert (first in shown) == public
    assert ("<text><eos>" in shown) != public


@settings(derandomize=True, deadline=None, max_examples=50)
@given(size=st.integers(2, 5000), data=st.data())
def test_the_largest_batch_is_exceeded_once_in_a_thousand_steps_at_most(size: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, size))
    largest = largest_batch(Schedule(size, 0, batch, batch / size, 10))
    tail = stats.binom(size, batch / size)
    assert tail.sf(largest) <= 1e-3 + 1e-12
    assert largest == 0 or tail.sf(largest - 1) > 1e-3 - 1e-12
