"""What a comparison shows, refuses, and where it may lie."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cards
import pytest
from comparing import EVENT, Json, change_audit, make_run, measured_audit, without_pictures, write_held_out
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import dpllm
from dpllm.cli import main
from dpllm.comparison import rows, values
from dpllm.comparison.compare import Comparison, compare
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.privacy.accounting import compose, stated
from dpllm.run.directory import RunDir
from dpllm.statement.privacy_record import Extraction

INF = math.inf
FILES = {"comparison.json", "comparison.md", "comparison.png", "utility.png", "leakage.png"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDir]:
    return [make_run(tmp_path / "baseline", INF), make_run(tmp_path / "dp", 3.0)]


@pytest.fixture
def four(tmp_path: Path) -> list[RunDir]:
    names = {"eps-8": 8.0, "eps-1": 1.0, "none": INF, "eps-3": 3.0}
    return [make_run(tmp_path / name, epsilon, held_out=True) for name, epsilon in names.items()]


def shown(result: Comparison) -> dict[str, list[str]]:
    return {row.measure: [cell.line() for cell in row.cells] for row in result.rows}


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def numbers(value: Any) -> set[float]:
    """Every number of a JSON value, and what stands in a key."""
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, int | float):
        return {float(value)}
    if isinstance(value, str):
        return {float(text) for text in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", value)}
    if isinstance(value, dict):
        return {number for pair in value.items() for part in pair for number in numbers(part)}
    return {number for part in value for number in numbers(part)}


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_each_figure_stands_in_its_own_column(runs: list[RunDir]) -> None:
    result = compare(runs)
    table = shown(result)  # the base model, the run with privacy, the one without
    assert table["Held-out loss (nats per token)"] == ["3.912", "2.354", "1.954"]
    assert table["Held-out perplexity"] == ["50.00", "10.53", "7.06"]
    assert table["Epsilon at delta 1e-05"] == ["-", "3", "no guarantee"]
    assert table["Ledger's total after it"] == ["-", "3.51 (no budget)", "-"]
    assert table["Exposure in bits, 16 copies (no memory: 1.44)"] == ["1.41", "4.93", "8.70"]
    assert table["Canaries extracted, 1 copy"] == ["0", "14 of 99", "29 of 99"]
    assert table["AUC, calibrated attack, 1 copy"] == ["-", "0.67 (0.61 to 0.72)", "0.86 (0.80 to 0.91)"]
    assert table["TPR at 1% FPR (%), calibrated attack"] == ["-", "14.3 (7.1 to 21.4)", "30.0 (15.0 to 45.0)"]
    assert table["Epsilon lower bound (95% sure)"] == ["-", "0.86 (ceiling 2.76)", "1.80 (ceiling 2.76)"]
    assert table["Steps"] == ["-", "100", "100"]
    assert "Peak memory (GiB)" not in table  # not recorded
    assert result.values["runs"][0]["utility"]["loss"]["interval"] is None
    assert "No intervals" in (result.output / "comparison.md").read_text()


def test_bounds_of_several_confidences_each_say_their_own(tmp_path: Path) -> None:
    made = [make_run(tmp_path / str(number), 3.0) for number in range(2)]
    for run, alpha in zip(made, (0.025, 0.05), strict=True):
        change_audit(run, epsilon_lower_bound={"alpha": alpha, "value": 0.5})
    assert shown(compare(made))["Epsilon lower bound"][1:] == [
        "0.50 (97.5% sure, ceiling 2.76)",
        "0.50 (95% sure, ceiling 2.76)",
    ]


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
    assert result.differences == {"train.seed": {"a": 0, "b": 1}}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "first" / "run", tmp_path / "second" / "run"]
    made = [make_run(folder, epsilon) for folder, epsilon in zip(folders, (1.0, 3.0), strict=True)]
    for run, digest in zip(made, "ab", strict=True):
        own = {"adapter_model.safetensors": digest * 64}
        record = json.loads(run.run.read_text())
        listed = {f"export/{name}": value for name, value in own.items()}
        write_json(run.run, {**record, "manifest": {**record["manifest"], **listed}})
        write_json(run.export / "audit" / "audit.json", {**measured_audit(3.0, own)})
        promise = json.loads(run.plan.read_text())
        write_json(run.plan, {**promise, "epsilon": 3.0})
    assert [run["name"] for run in compare(made).values["runs"]] == ["first/run", "second/run"]


def test_every_number_of_the_page_is_a_rounding_of_one_in_the_json(four: list[RunDir]) -> None:
    result = compare(four)
    written = json.loads((result.output / "comparison.json").read_text())
    del written["rows"], written["columns"]  # the text itself
    known = numbers(written) | {100 * number for number in numbers(written)}
    page = (result.output / "comparison.md").read_text()
    texts = re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])", page.replace(",", ""))
    assert len(texts) > 80
    for text in texts:
        unit = 10.0 ** -len(text.partition(".")[2]) if "e" not in text else 0.0
        assert any(abs(float(text) - number) <= unit * 1.0001 for number in known), text
    assert written["runs"][1]["utility"]["loss"]["value"] == pytest.approx(1.954 + 0.4)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> values.Figures:
    """The figures of two runs, of which the first can be given any."""
    folder = tmp_path_factory.mktemp("rounding")
    return compare([make_run(folder / name, 3.0) for name in "ab"], folder / "out").figures


@given(
    loss=st.floats(0.0, 20.0),
    auc=st.floats(0.0, 1.0),
    low=st.floats(0.0, 1.0),
    epsilon=st.floats(0.01, 50.0),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_rounding_shows_what_is_there_and_never_less_epsilon(
    one: values.Figures, loss: float, auc: float, low: float, epsilon: float
) -> None:
    statement = one.sides[0].statement
    assert statement.audit is not None
    attack = statement.audit.attacks["loss"].model_copy(update={"auc": auc, "auc_interval": (low, auc)})
    audit = statement.audit.model_copy(update={"attacks": {"loss": attack}})
    side = replace(one.sides[0], statement=statement.model_copy(update={"epsilon": epsilon, "audit": audit}))
    measured = replace(one, sides=[side], utility=[{"loss": values.Figure(value=loss)}])
    found = {row.measure: row.cells[1].line() for row in rows.rows(measured)}
    assert float(found["Epsilon at delta 1e-05"]) >= epsilon
    assert float(found["Epsilon at delta 1e-05"]) <= 1.002 * epsilon
    assert abs(float(found["Held-out loss (nats per token)"]) - loss) <= 5.0001e-4
    first, _, rest = found["AUC, loss attack, 1 copy"].partition(" (")
    assert abs(float(first) - auc) <= 5.0001e-3
    assert abs(float(rest.split(" to ")[0]) - low) <= 5.0001e-3


@pytest.mark.parametrize("width", [100, 140])
def test_the_table_of_five_runs_fits_a_terminal(tmp_path: Path, width: int) -> None:
    epsilons = {"eps-0.5": 0.5, "eps-1": 1.0, "eps-3": 3.0, "eps-8": 8.0, "eps-inf": INF}
    result = compare([make_run(tmp_path / name, epsilon, held_out=True) for name, epsilon in epsilons.items()])
    console = Console(file=io.StringIO(), width=width)
    console.print(result.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    for row in result.rows:
        for cell in row.cells:
            assert cell.value in text  # in one piece
            assert cell.note.replace(" to ", "-") in text
    assert "Do not publish" in text


def test_runs_with_a_guarantee_are_added_up(four: list[RunDir], tmp_path: Path) -> None:
    result = compare(four)
    together = result.values["together"]
    assert together["runs"] == 3
    assert together["epsilon"] == pytest.approx(stated(compose([EVENT] * 3), 1e-5, "zero_out")[0])
    assert together["fixed_together"] is False
    assert "if they were fixed" in (result.output / "comparison.md").read_text()
    sweep = [make_run(tmp_path / "sweep" / f"eps-{e:g}", e, group="s-1") for e in (1.0, 3.0)]
    assert compare(sweep).values["together"]["fixed_together"] is True
    assert compare([four[1], four[2]]).values["together"] is None


# --- intervals -------------------------------------------------------------------------------------------------------


def test_intervals_come_from_losses_by_example(four: list[RunDir]) -> None:
    found = compare(four).values
    for run in found["runs"]:
        low, high = run["utility"]["loss"]["interval"]
        assert low < run["utility"]["loss"]["value"] < high
        assert high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.15)  # 400 examples with a spread of 0.5
        assert math.exp(low) == pytest.approx(run["utility"]["perplexity"]["interval"][0])
    assert found["base"]["utility"]["loss"]["interval"] is not None


def test_losses_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    made = [make_run(tmp_path / "a", 3.0, held_out=True), make_run(tmp_path / "b", INF)]
    write_held_out(made[1], 0.5, weights={"adapter_model.safetensors": "f" * 64})
    found = compare(made).values["runs"]
    assert found[0]["utility"]["loss"]["interval"] is not None
    assert found[1]["utility"]["loss"] == {"value": 1.954, "interval": None}


def test_a_bootstrap_covers_the_mean() -> None:
    import numpy as np

    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        tokens = generator.integers(5, 20, 120)
        losses = tokens * generator.normal(2.0, 0.7, 120)
        low, high = values.ratio(losses.tolist(), tokens.tolist()) or (0, 0)
        hits += low <= 2.0 <= high
    assert 180 <= hits <= 199  # 95 % of 200; outside with probability below 1e-4 for a sound interval
    assert values.ratio([1.0], [1.0]) is None
    assert values.ratio([], []) is None
    seen = Extraction.model_construct(tuned=0, inserted=0)
    assert values.extracted(seen).interval is None
    assert values.extracted(seen.model_copy(update={"inserted": 10})).interval == pytest.approx([0, 0.3085], abs=1e-4)


# --- where it lies ---------------------------------------------------------------------------------------------------


def test_files_are_private_and_nothing_is_exported(runs: list[RunDir]) -> None:
    baseline, dp = runs
    exported = files(baseline.export), files(dp.export)
    result = compare(runs)
    assert result.output == dp.private / "compare"
    assert files(result.output) == FILES == {path.name for path in result.files}
    assert result.output.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in result.files)
    assert (files(baseline.export), files(dp.export)) == exported


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("place", ["baseline/export", "dp/export/audit", "dp/private/../export/x", "other/export"])
def test_output_in_a_published_directory_is_refused(
    runs: list[RunDir], tmp_path: Path, place: str, public: bool
) -> None:
    make_run(tmp_path / "other", 1.0)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="export/"):
        compare(runs, output=tmp_path / place, public=public)
    assert files(tmp_path) == before


def test_the_python_form_writes_the_same(runs: list[RunDir], tmp_path: Path) -> None:
    baseline, dp = (run.root for run in runs)
    other = make_run(tmp_path / "more", 8.0).root
    written = dpllm.DPComparison(baseline_dir=baseline, dp_dir=str(dp)).generate_report(tmp_path / "one")
    assert {path.name for path in written} == FILES
    assert all(path.parent == tmp_path / "one" and path.stat().st_size > 0 for path in written)
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0
    several = dpllm.DPComparison(baseline_dir=str(baseline), dp_dir=[dp, other])
    several.generate_report(str(tmp_path / "several"))
    assert len(json.loads((tmp_path / "several" / "comparison.json").read_text())["runs"]) == 3
    with pytest.raises(ConfigError, match="needs at least two runs"):
        dpllm.DPComparison(dp_dir=dp).generate_report()
    with pytest.raises(AttributeError, match="no attribute"):
        _ = dpllm.Comparison


def test_import_dpllm_stays_light() -> None:
    code = "import sys, dpllm; print([n for n in ('torch', 'numpy', 'pydantic') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_no_comparison_is_refused(runs: list[RunDir], tmp_path: Path) -> None:
    baseline, dp = runs
    with pytest.raises(ConfigError, match="a comparison needs at least two runs"):
        compare([dp])
    with pytest.raises(ConfigError, match="named twice"):
        compare([dp, baseline, RunDir(tmp_path / "baseline" / ".." / "dp")])
    with pytest.raises(ConfigError, match="both were trained without differential privacy"):
        compare([baseline, dp, make_run(tmp_path / "second", INF)])
    with pytest.raises(ConfigError, match="holds no run"):
        compare([baseline, RunDir(tmp_path)])
    shutil.copytree(dp.root, tmp_path / "copy")
    with pytest.raises(ConfigError, match="has the same weights as"):
        compare([baseline, dp, RunDir(tmp_path / "copy")])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required"),
        (["dp", "baseline", "--tasks", "-1"], "cannot be negative"),
        (["dp", "absent"], "holds no run"),
    ],
)
def test_the_command_says_what_is_wrong(
    runs: list[RunDir],
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs[0].root.parent)
    try:
        code = main(["compare", *arguments])
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    assert code == 2
    assert words in capsys.readouterr().err


def test_the_command_compares_without_a_model(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dpllm.comparison.tasks", None)  # which loads models
    assert main(["compare", *(str(run.root) for run in runs), "--no-intervals"]) == 0
    assert "Written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sections": {"model": {"name_or_path": "org/other"}}}, "model.name_or_path"),
        ({"sections": {"model": {"dtype": "bfloat16"}}}, "model.dtype"),
        ({"sections": {"data": {"train": "org/other"}}}, "data.train"),
        ({"sections": {"data": {"eval": "org/other"}}}, "data.eval"),
        ({"sections": {"data": {"max_length": 64}}}, "data.max_length"),
        ({"sections": {"audit": {"canaries": {"groups": {1: 100}}}}}, "audit.canaries.groups.1"),
        ({"sections": {"audit": {"canaries": {"digits": 6}}}}, "audit.canaries"),
        ({"record": {"model": {**cards.record()["model"], "commit": "5c"}}}, "model.commit"),
        ({"summary": {"eval_tokens": 3}}, "eval_tokens"),
        ({"audit": False}, "dpllm audit"),
        ({"artifacts": {"adapter_model.safetensors": "ff" * 32}}, "other weights"),
        ({"record": {"status": "refused"}}, "refused"),
    ],
)
def test_runs_of_another_model_or_data_or_without_an_audit_are_refused(
    tmp_path: Path, changes: Json, words: str
) -> None:
    others = [make_run(tmp_path / "baseline", INF), make_run(tmp_path / "eps-1", 1.0)]
    with pytest.raises(ConfigError, match=re.escape(words)):
        compare([*others, make_run(tmp_path / "dp", 3.0, **changes)])


def test_other_settings_are_listed(tmp_path: Path) -> None:
    dp = make_run(tmp_path / "dp", 3.0, {"train": {"steps": 150}, "data": {"public_size": 4000}})
    result = compare([make_run(tmp_path / "baseline", INF), dp])
    assert result.differences["train.steps"] == {"baseline": 100, "dp": 150}
    assert result.differences["data.public_size"] == {"baseline": None, "dp": 4000}
    assert result.differences["privacy.enabled"] == {"baseline": False, "dp": True}
    assert not {"output_dir", "privacy.epsilon"} & result.differences.keys()  # nothing reads the baseline's
    assert "| train.steps | 150 | 100 |" in (result.output / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("run.json", "status"), ("run.json", "manifest")),
        *(("plan.json", "canary_commitment"), ("export/audit/audit.json", "attacks")),
    ],
)
@pytest.mark.parametrize("public", [False, True])
def test_a_damaged_file_is_named_as_one(runs: list[RunDir], name: str, key: str, public: bool) -> None:
    path = runs[1].root / name
    value = json.loads(path.read_text())
    del value[key]
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="damaged"):
        compare(runs, public=public)


# --- what may be missing ---------------------------------------------------------------------------------------------


def test_without_canaries_and_evaluation_privacy_and_cost_are_compared(tmp_path: Path) -> None:
    sections = {"audit": {"canaries": None}}
    nothing = {"eval_loss_before": None, "eval_loss_after": None, "eval_tokens": None}
    made = {"baseline": INF, "dp": 3.0}
    result = compare([make_run(tmp_path / name, e, sections, audit=False, summary=nothing) for name, e in made.items()])
    assert {row.section for row in result.rows} == {"privacy", "cost"}


@pytest.mark.parametrize("old", [True, False], ids=["written by an older version", "private"])
@pytest.mark.parametrize("rows_public", [True, False])
def test_what_a_run_took_is_published_of_public_rows_alone(tmp_path: Path, old: bool, rows_public: bool) -> None:
    took = {"duration_seconds": 61.5, "peak_memory_bytes": 2**30}
    sections = {"data": {"train": "a.jsonl", "eval": "b.jsonl", "public": rows_public, "eval_public": rows_public}}
    nothing = dict.fromkeys(took) if not (old or rows_public) else took
    made = [
        make_run(tmp_path / name, epsilon, sections, nothing, summary={} if old else took)
        for name, epsilon in (("one", 3.0), ("two", 8.0))
    ]
    for public in (True, False):
        measures = {row.measure for row in compare(made, public=public).rows}
        assert ({"Seconds in all", "Peak memory (GiB)"} <= measures) is (rows_public or not public)
        assert "Steps" in measures


def test_a_broken_guarantee_shows_no_epsilon(tmp_path: Path) -> None:
    dp = make_run(tmp_path / "dp", 3.0, record={"guarantee": {"holds": False, "reason": "the noise was seeded"}})
    result = compare([make_run(tmp_path / "baseline", INF), dp])
    assert shown(result)["Epsilon"] == ["-", "no guarantee", "no guarantee"]
    assert "epsilon" not in result.values["runs"][0]["privacy"]
    page = (result.output / "comparison.md").read_text()
    assert "dp gives no guarantee: the noise was seeded." in page
    assert "dp: no guarantee" in page


def test_an_audit_that_contradicts_takes_the_epsilon_away(runs: list[RunDir]) -> None:
    change_audit(runs[1], epsilon_lower_bound={"value": 3.4}, verdict="falsified", verdict_reason="found")
    assert shown(compare(runs))["Epsilon"][1] == "no guarantee"


def test_an_interrupted_run_is_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "baseline", INF), make_run(tmp_path / "dp", 3.0, record={"status": "interrupted"})]
    assert "dp is interrupted." in " ".join(rows.caption(compare(runs).figures))


def test_a_group_in_which_no_coin_said_in_is_compared(runs: list[RunDir]) -> None:
    """Of four candidates all stay out in one run of sixteen; nothing can then be measured, and nothing may break."""
    nothing = {"mean": None, "maximum": None, "base_mean": None, "p_value": None, "inserted": 0}
    change_audit(runs[1], every={"exposure": nothing, "extraction": {"inserted": 0, "tuned": 0, "base": 0}})
    result = compare(runs)
    assert files(result.output) == FILES
    assert {cells[1] for name, cells in shown(result).items() if "Exposure" in name} == {"not measured"}


def test_a_loss_beyond_all_numbers_has_no_perplexity(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "baseline", INF, summary={"eval_loss_after": 1e4}), make_run(tmp_path / "dp", 3.0)]
    found = compare(runs).values["runs"][1]["utility"]
    assert found["loss"]["value"] == 1e4
    assert found["perplexity"]["value"] is None
