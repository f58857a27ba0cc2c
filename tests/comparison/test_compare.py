"""What a comparison shows, refuses, and where it may lie."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from pathlib import Path

import cards
import pytest
from comparing import Json, change_audit, make_run, measured_audit, without_pictures, write_tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import dpllm
from dpllm.cli import main
from dpllm.comparison import shown
from dpllm.comparison.compare import Comparison, compare
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.run.directory import RunDir

INF = math.inf
FILES = {"comparison.json", "comparison.md", "comparison.png"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDir]:
    return [make_run(tmp_path / "baseline", INF), make_run(tmp_path / "dp", 3.0)]


@pytest.fixture
def four(tmp_path: Path) -> list[RunDir]:
    epsilons = {"eps-8": 8.0, "eps-1": 1.0, "none": INF, "eps-3": 3.0}
    return [make_run(tmp_path / name, epsilon) for name, epsilon in epsilons.items()]


def table(result: Comparison) -> dict[str, list[str]]:
    return shown.rows(result.values)


def notes(result: Comparison) -> str:
    return " ".join(shown.notes(result.values))


def page(result: Comparison) -> str:
    return (result.output / "comparison.md").read_text()


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_each_figure_stands_in_its_own_column(runs: list[RunDir]) -> None:
    result = compare(runs)
    # The base model, the run with privacy, the one without; and no memory, which was not recorded.
    assert table(result) == {
        "Epsilon": ["-", "3", "no DP"],
        "Delta": ["-", "1e-05", "-"],
        "Held-out loss (nats per token)": ["3.912", "2.354", "1.954"],
        "Held-out perplexity": ["50.00", "10.53", "7.06"],
        "The audit's verdict": ["-", "consistent", "no claim"],
        "Epsilon lower bound": ["-", "0.85 (of 2.76)", "1.80 (of 2.76)"],
        "AUC of its attack": ["-", "0.67 (0.61 to 0.72)", "0.86 (0.80 to 0.91)"],
        "Canaries extracted": ["-", "20 of 119", "43 of 119"],
        "Steps": ["-", "100", "100"],
        "Seconds in all": ["-", "61.5", "61.5"],
    }
    assert "95% confidence" in notes(result)
    assert json.loads((result.output / "comparison.json").read_text()) == {"schema_version": 1, **result.values}
    assert "(comparison.png)" in page(result)


def test_scores_of_what_was_written_stand_with_their_protocol(runs: list[RunDir]) -> None:
    for run, score in zip(runs, (67.6, 60.2), strict=True):
        write_tasks(run, {"value": score, "interval": [score - 5, score + 5]}, {"value": 2.3, "interval": None})
    result = compare(runs)
    assert table(result)["BLEU"] == ["2.3", "60.2 (55.2 to 65.2)", "67.6 (62.6 to 72.6)"]
    assert "2 prompts, each with all its references (9 in all); a beam search of 5 for at most" in notes(result)
    write_tasks(runs[0], {"value": 60.0, "interval": None}, None, prompts=3)  # of other prompts: nothing to compare
    assert "BLEU" not in table(compare(runs))


def test_runs_may_come_in_any_order(four: list[RunDir]) -> None:
    result = compare(four)
    assert [run["name"] for run in result.values["runs"]] == ["eps-1", "eps-3", "eps-8", "none"]
    assert result.output == four[1].private / "compare"
    assert compare(four[::-1]).values == result.values
    without = compare([run for run in four if run.root.name != "none"])
    assert [run["name"] for run in without.values["runs"]] == ["eps-1", "eps-3", "eps-8"]


def test_equal_epsilons_are_runs_of_their_own(tmp_path: Path) -> None:
    result = compare([make_run(tmp_path / name, 3.0, {"train": {"seed": seed}}) for seed, name in enumerate("ab")])
    assert [run["name"] for run in result.values["runs"]] == ["a", "b"]
    assert result.values["differences"] == {"train.seed": [0, 1]}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = []
    for digest in "ab":
        weights_of_run = {"adapter_model.safetensors": digest * 64}
        runs.append(make_run(tmp_path / digest / "run", 3.0, artifacts=weights_of_run))
        write_json(runs[-1].audit_dir(True) / "audit.json", measured_audit(3.0, weights_of_run))
    assert [run["name"] for run in compare(runs).values["runs"]] == ["run (1)", "run (2)"]


def test_every_number_of_the_page_is_a_rounding_of_one_in_the_json(four: list[RunDir]) -> None:
    result = compare(four)
    written = (result.output / "comparison.json").read_text()
    numbers = {float(text) for text in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", written)}
    rounded = numbers | {100 * number for number in numbers}
    texts = re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])", page(result).replace(",", ""))
    assert len(texts) > 40
    for text in texts:
        unit = 10.0 ** -len(text.partition(".")[2]) if "e" not in text else 0.0
        assert any(abs(float(text) - number) <= unit * 1.0001 for number in rounded), text
    assert result.values["runs"][1]["loss"] == pytest.approx(1.954 + 0.4)


@given(loss=st.floats(0.0, 20.0), auc=st.floats(0.0, 1.0), low=st.floats(0.0, 1.0), epsilon=st.floats(0.01, 50.0))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_figures_round_to_the_nearest_and_epsilon_upwards(loss: float, auc: float, low: float, epsilon: float) -> None:
    run = {"private": True, "epsilon": epsilon, "loss": loss, "auc": auc, "auc_interval": [low, auc]}
    cells = {label: row[1] for label, row in shown.rows({"base": {}, "runs": [run]}).items()}
    assert epsilon <= float(cells["Epsilon"]) <= 1.002 * epsilon
    assert abs(float(cells["Held-out loss (nats per token)"]) - loss) <= 5.0001e-4
    estimate, _, interval = cells["AUC of its attack"].partition(" (")
    assert abs(float(estimate) - auc) <= 5.0001e-3
    assert abs(float(interval.split(" to ")[0]) - low) <= 5.0001e-3


@pytest.mark.parametrize("width", [100, 140])
def test_the_table_of_five_runs_fits_a_terminal(tmp_path: Path, width: int) -> None:
    epsilons = {"eps-0.5": 0.5, "eps-1": 1.0, "eps-3": 3.0, "eps-8": 8.0, "eps-inf": INF}
    result = compare([make_run(tmp_path / name, epsilon) for name, epsilon in epsilons.items()])
    console = Console(file=io.StringIO(), width=width)
    console.print(result.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    for cells in table(result).values():
        for part in " (".join(cells).replace(" to ", "-").split(" ("):
            assert part in text  # in one piece
    assert "Do not publish" in text


def test_what_several_runs_come_to_is_the_ledgers_to_say(four: list[RunDir], tmp_path: Path) -> None:
    assert "dpllm ledger show has their total" in notes(compare(four))
    assert "total" not in notes(compare([four[1], four[2]]))
    sweep = [make_run(tmp_path / "sweep" / f"eps-{e:g}", e, group="s-1") for e in (1.0, 3.0)]
    together = compare(sweep)
    assert together.values["group"]["epsilon"] == 9.1
    assert "The 2 runs of tuning group s-1 come to epsilon 9.1 at delta 1e-05 together." in page(together)
    assert compare([*sweep, four[0]]).values["group"] is None


def test_files_are_private_and_nothing_is_exported(runs: list[RunDir]) -> None:
    exported = [files(run.export) for run in runs]
    result = compare(runs)
    assert result.output == runs[1].private / "compare"
    assert files(result.output) == FILES == {path.name for path in result.files}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (result.output, *result.files))
    assert [files(run.export) for run in runs] == exported


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("place", ["baseline/export", "dp/private/../export/x", "other/export"])
def test_output_in_a_published_folder_is_refused(runs: list[RunDir], tmp_path: Path, place: str, public: bool) -> None:
    make_run(tmp_path / "other", 1.0)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="export/"):
        compare(runs, output=tmp_path / place, public=public)
    assert files(tmp_path) == before


def test_the_python_form_writes_the_same(runs: list[RunDir], tmp_path: Path) -> None:
    comparison = dpllm.compare([run.root for run in runs], tmp_path / "output")
    assert comparison.values == compare(runs).values
    assert repr(comparison).startswith("Comparison in ")


def test_runs_that_cannot_be_compared_are_refused(runs: list[RunDir], tmp_path: Path) -> None:
    baseline, dp = runs
    shutil.copytree(dp.root, tmp_path / "copy")
    refused = {
        "at least two runs": [dp],
        "so they are one run": [dp, baseline, RunDir(tmp_path / "baseline" / ".." / "dp")],
        "both were trained without differential privacy": [baseline, dp, make_run(tmp_path / "second", INF)],
        "has the same weights as": [baseline, dp, RunDir(tmp_path / "copy")],
        "holds no run": [baseline, RunDir(tmp_path)],
    }
    for reason, compared in refused.items():
        with pytest.raises(ConfigError, match=reason):
            compare(compared)


def test_the_command_compares_without_a_model_and_names_what_is_wrong(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs[0].root.parent)
    monkeypatch.setitem(sys.modules, "dpllm.comparison.tasks", None)  # which loads models
    assert main(["compare", "baseline", "dp"]) == 0
    assert "Written to" in capsys.readouterr().out
    for words, named in ((["dp", "baseline", "--tasks", "-1"], "--tasks -1"), (["dp", "absent"], "absent")):
        assert main(["compare", *words]) == 2
        assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sections": {"model": {"name_or_path": "org/other"}}}, "model.name_or_path"),
        ({"sections": {"model": {"dtype": "bfloat16"}}}, "model.dtype"),
        ({"sections": {"data": {"train": "org/other"}}}, "data.train"),
        ({"sections": {"data": {"eval": "org/other"}}}, "data.eval"),
        ({"sections": {"data": {"max_length": 64}}}, "data.max_length"),
        ({"sections": {"audit": {"canaries": {"groups": {1: 100}}}}}, "audit.canaries.groups"),
        ({"sections": {"audit": {"canaries": {"digits": 6}}}}, "audit.canaries"),
        ({"record": {"model": {**cards.record()["model"], "commit": "5c"}}}, "model.commit"),
        ({"summary": {"eval_tokens": 3}}, "eval_tokens"),
        ({"audit": False}, "dpllm audit"),
        ({"artifacts": {"adapter_model.safetensors": "ff" * 32}}, "other weights"),
        ({"record": {"status": "refused"}}, "refused"),
    ],
)
def test_runs_of_another_model_or_without_an_audit_are_refused(tmp_path: Path, changes: Json, named: str) -> None:
    others = [make_run(tmp_path / "baseline", INF), make_run(tmp_path / "eps-1", 1.0)]
    with pytest.raises(ConfigError, match=re.escape(named)):
        compare([*others, make_run(tmp_path / "dp", 3.0, **changes)])


def test_other_settings_are_listed(tmp_path: Path) -> None:
    dp = make_run(tmp_path / "dp", 3.0, {"train": {"steps": 150}, "data": {"public_size": 4000}})
    result = compare([make_run(tmp_path / "baseline", INF), dp])
    differences = result.values["differences"]  # the run with privacy, the one without
    assert differences["train.steps"] == [150, 100]
    assert differences["data.public_size"] == [4000, None]
    assert differences["privacy.enabled"] == [True, False]
    assert not {"output_dir", "privacy.epsilon"} & differences.keys()  # nothing reads the baseline's
    assert "| train.steps | 150 | 100 |" in page(result)


@pytest.mark.parametrize(
    ("name", "key"),
    [("run.json", "manifest"), ("plan.json", "canary_commitment"), ("export/audit/audit.json", "attacks")],
)
@pytest.mark.parametrize("public", [False, True])
def test_a_damaged_file_is_named_as_one(runs: list[RunDir], name: str, key: str, public: bool) -> None:
    path = runs[1].root / name
    value = json.loads(path.read_text())
    del value[key]
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="damaged"):
        compare(runs, public=public)


def test_without_canaries_and_evaluation_privacy_and_cost_are_compared(tmp_path: Path) -> None:
    sections = {"audit": {"canaries": None}}
    nothing = {"eval_loss_before": None, "eval_loss_after": None, "eval_tokens": None}
    epsilons = {"baseline": INF, "dp": 3.0}
    result = compare(
        [make_run(tmp_path / name, e, sections, audit=False, summary=nothing) for name, e in epsilons.items()]
    )
    assert list(table(result)) == ["Epsilon", "Delta", "Steps", "Seconds in all"]


@pytest.mark.parametrize("old", [True, False], ids=["written by an older version", "private"])
@pytest.mark.parametrize("rows_public", [True, False])
def test_what_a_run_took_is_published_of_public_rows_alone(tmp_path: Path, old: bool, rows_public: bool) -> None:
    cost = {"duration_seconds": 61.5, "peak_memory_bytes": 2**30}
    sections = {"data": {"train": "a.jsonl", "eval": "b.jsonl", "public": rows_public, "eval_public": rows_public}}
    nothing = dict.fromkeys(cost) if not (old or rows_public) else cost
    summary = {} if old else cost
    runs = [make_run(tmp_path / f"{epsilon:g}", epsilon, sections, nothing, summary) for epsilon in (3.0, 8.0)]
    for public in (True, False):
        measures = table(compare(runs, public=public)).keys()
        assert ({"Seconds in all", "Peak memory (GiB)"} <= measures) is (rows_public or not public)
        assert "Steps" in measures


def test_a_broken_guarantee_shows_no_epsilon(tmp_path: Path) -> None:
    dp = make_run(tmp_path / "dp", 3.0, record={"guarantee": {"holds": False, "reason": "the noise was seeded"}})
    result = compare([make_run(tmp_path / "baseline", INF), dp])
    assert table(result)["Epsilon"] == ["-", "no guarantee", "no DP"]
    assert result.values["runs"][0]["epsilon"] is None
    assert "dp gives no guarantee: the noise was seeded." in page(result)


def test_an_audit_that_contradicts_takes_the_epsilon_away(runs: list[RunDir]) -> None:
    change_audit(runs[1], epsilon_lower_bound={"value": 3.4}, verdict="falsified", verdict_reason="found")
    assert table(compare(runs))["Epsilon"][1] == "no guarantee"


def test_a_group_in_which_no_coin_said_in_is_compared(runs: list[RunDir]) -> None:
    """Of four candidates all stay out in one run of sixteen; nothing can then be measured, and nothing may break."""
    nothing = {"mean": None, "maximum": None, "base_mean": None, "p_value": None, "inserted": 0}
    change_audit(runs[1], every={"exposure": nothing, "extraction": {"inserted": 0, "tuned": 0, "base": 0}})
    result = compare(runs)
    assert files(result.output) == FILES
    assert table(result)["Canaries extracted"] == ["-", "-", "43 of 119"]


def test_a_loss_beyond_all_numbers_has_no_perplexity_and_an_interrupted_run_is_named(tmp_path: Path) -> None:
    baseline = make_run(tmp_path / "baseline", INF, summary={"eval_loss_after": 1e4})
    result = compare([baseline, make_run(tmp_path / "dp", 3.0, record={"status": "interrupted"})])
    assert result.values["runs"][1]["loss"] == 1e4
    assert "perplexity" not in result.values["runs"][1]
    assert "dp is interrupted." in notes(result)
