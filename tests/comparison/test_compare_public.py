"""A public comparison holds nothing that may not be published, and says what it leaves out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from comparing import change_audit, make_run, without_pictures, write_tasks

from dpllm.comparison.compare import Comparison, compare
from dpllm.files import write_json
from dpllm.run.directory import RunDir

INF = math.inf
SECRET = 1.98765  # of all figures that must not show
MARKS = ("1.98765", "1.9876", "1.9877", "1.988", "7.2984", "7.298", "198.77")
PRIVATE = {"data": {"train": "notes.jsonl", "eval": "held-out.jsonl", "public": False, "eval_public": False}}
PUBLIC_EVALUATION = {"data": {"train": "notes.jsonl", "eval": "held-out.jsonl", "public": False, "eval_public": True}}
BUDGET = {"epsilon": 20.0, "delta": 1e-5, "order": 3.2}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


def plant(run: RunDir) -> None:
    figures = {"eval_loss_before": SECRET, "eval_loss_after": SECRET, "eval_tokens": 15023}
    write_json(run.private / "summary.json", figures)
    write_tasks(run, {"value": 100 * SECRET, "interval": None})


def plant_audit(run: RunDir) -> None:
    change_audit(run, {"attacks": {"auc": SECRET / 2}}, epsilon_lower_bound={"value": SECRET})


def written(result: Comparison) -> str:
    return (result.output / "comparison.json").read_text() + (result.output / "comparison.md").read_text()


def test_private_evaluation_and_the_baseline_stay_out(tmp_path: Path) -> None:
    epsilons = {"none": INF, "eps-1": 1.0, "eps-8": 8.0}
    runs = [make_run(tmp_path / name, epsilon, PRIVATE) for name, epsilon in epsilons.items()]
    for run in runs:
        plant(run)
    plant_audit(runs[0])
    assert "1.988" in written(compare(runs))  # the sentinels are seen where all is shown
    result = compare(runs, public=True)
    text = written(result)
    assert [mark for mark in (*MARKS, "0.99") if mark in text] == []
    for name in epsilons:
        assert f"{name}: held-out figures, because not every run declares" in text
    assert "none: the audit, because it was trained without differential privacy, on data that are not public" in text
    assert result.values["runs"][0]["auc"]  # of a run with privacy
    assert "auc" not in result.values["runs"][2]
    assert "Do not publish" not in text
    assert str(tmp_path) not in text


def test_public_evaluation_shows_released_weights_only(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "none", INF, PUBLIC_EVALUATION), make_run(tmp_path / "eps-3", 3.0, PUBLIC_EVALUATION)]
    for run in runs:
        write_json(run.private / "summary.json", {"eval_loss_after": SECRET})
    plant(runs[0])
    plant_audit(runs[0])
    record = json.loads(runs[0].run.read_text())
    record["metrics"]["public"]["eval_loss_after"] = SECRET  # run.json holds it, and a stranger may not rely on that
    write_json(runs[0].run, record)
    result = compare(runs, public=True)
    assert [mark for mark in (*MARKS, "0.99") if mark in written(result)] == []
    dp, none = result.values["runs"]
    assert dp["loss"] == pytest.approx(1.954 + 0.4)
    assert "loss" not in none
    assert result.values["base"]["loss"] == 3.912


def test_a_run_without_a_guarantee_counts_as_unprotected(tmp_path: Path) -> None:
    broken = {"guarantee": {"holds": False, "reason": "the noise was seeded"}}
    runs = [make_run(tmp_path / "a", 3.0, PUBLIC_EVALUATION, broken), make_run(tmp_path / "b", 8.0, PUBLIC_EVALUATION)]
    plant(runs[0])
    result = compare(runs, public=True)
    assert not {"loss", "bleu"} & result.values["runs"][0].keys()
    assert any(line.startswith("a: held-out figures, because it gives no g") for line in result.values["left_out"])
    assert [mark for mark in MARKS if mark in written(result)] == []


def test_public_data_leave_nothing_out(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "none", INF), make_run(tmp_path / "eps-3", 3.0)]
    result = compare(runs, public=True)
    assert result.values["left_out"] == []
    private = compare(runs).values
    assert {**result.values, "public": False} == private
    assert result.output == runs[1].root / "comparison"
    assert result.output.stat().st_mode & 0o077 == 0o055


def test_a_budget_overrules_a_declaration(tmp_path: Path) -> None:
    """Whoever writes data.public: true is not always who set the budget."""
    dp = make_run(tmp_path / "eps-3", 3.0)
    record = json.loads(dp.run.read_text())
    write_json(dp.run, {**record, "ledger": {**record["ledger"], "budget": BUDGET}})
    none = make_run(tmp_path / "none", INF)
    plant_audit(none)
    result = compare([dp, none], public=True)
    assert not {"loss", "auc"} & result.values["runs"][1].keys()
    assert "0.99" not in written(result)


def test_one_undeclared_evaluation_set_is_enough(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", 3.0, PRIVATE), make_run(tmp_path / "b", 8.0, PUBLIC_EVALUATION)]
    result = compare(runs, public=True)
    assert not any("loss" in run for run in result.values["runs"])


def test_places_are_not_named(tmp_path: Path) -> None:
    path = str(tmp_path / "secret-place" / "ledger.sqlite")
    reason = {"guarantee": {"holds": False, "reason": f"{path} was replaced"}}
    named = make_run(tmp_path / "a", 3.0, {"privacy": {"ledger": path, "dataset": "ward 7"}}, reason)
    text = written(compare([named, make_run(tmp_path / "b", 8.0, {"train": {"steps": 7}})], public=True))
    assert "ledger.sqlite was replaced" in text
    assert "train.steps" in text
    assert "secret-place" not in text
    assert "ward 7" not in text
