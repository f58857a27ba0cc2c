"""``dpllm audit`` as it is typed: what it prints and writes, and one message for each mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from running import SENTINEL, Place, as_trained, contents, done, dpllm_, edit_recipe, make_place, refused, rows

from dpllm.auditing import shadows
from dpllm.canaries import canaries
from dpllm.errors import ConfigError
from dpllm.privacy.plan import Plan
from dpllm.recipe.sections import CanaryConfig
from dpllm.run import build
from dpllm.run.directory import RunDir, manifest_of, open_run
from dpllm.text.data import load_held_out, load_table
from dpllm.text.prompts import keep_rows


def test_real_rows_are_scored_in_private(copy: Place) -> None:
    tiny.write_rows(copy.train, rows(60))
    tiny.write_rows(copy.root / "data" / "eval.jsonl", rows(60, start=500))
    edit_recipe(copy.run, "data", **{name: str(copy.root / "data" / f"{name}.jsonl") for name in ("train", "eval")})
    run, config = RunDir(copy.run), RunDir(copy.run).load_config()
    run.rows.unlink()  # as if it had trained on these
    tables = load_table(config.data.train, config.data, "train", run.private), load_held_out(config.data, run.private)
    keep_rows(run.rows, config.data, *tables)
    record = copy.json("run.json") | {"manifest": manifest_of(run, config, ended=True)}
    run.run.write_text(json.dumps(record), encoding="utf-8")
    published = contents(copy.run / "export")
    answer = done("audit", copy.run, "--members")
    assert SENTINEL not in answer.out
    report = copy.json("private/audit_members.json")
    assert report["word"] in ("membership inference", "distribution shift")
    assert "not covered" in report["note"]
    assert contents(copy.run / "export") == published


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shadows", "0"], "--shadows 0"),
        (["--base", "gpt2"], "--base is for a model trained elsewhere"),
        (["--epsilon", "3"], "--epsilon is for a model trained elsewhere"),
        (["--train.steps", "3"], "audited as it was trained"),
        (["--twin", "nowhere"], "holds no run"),
        (["--members", "--twin", "run"], "two separate audits"),
        (["--members", "--shadows", "2"], "two separate audits"),
    ],
)
def test_mistakes_with_a_run_are_one_message(finished: Place, arguments: list[str], words: str) -> None:
    assert words in refused("audit", finished.run, *arguments)


def test_mistakes_without_a_run_are_one_message(finished: Place, tmp_path: Path) -> None:
    assert "holds no run" in refused("audit", tmp_path)
    planted = tmp_path / "planted.jsonl"
    planted.write_text('{"coins": "independent"}\n')
    assert "two separate audits" in refused("audit", tmp_path, "--canaries", planted, "--members")
    assert "holds no run" in refused("audit", tmp_path / "absent")
    assert "holds no run" in refused("audit", finished.recipe)
    assert "is a part of a run" in refused("audit", finished.run / "export")
    assert f"Type: dpllm audit {finished.run}" in refused("audit", finished.root)
    assert f"Type: dpllm audit {finished.run}" in refused("audit", finished.run / "config.yaml")
    adapter = tmp_path / "adapter"
    shutil.copytree(finished.run / "export", adapter)
    assert "is a model trained elsewhere" in refused("audit", adapter, "--base", "builtin:tiny")


def test_audits_at_the_same_time_are_all_counted(copy: Place) -> None:
    path = copy.run / "private" / "audits.jsonl"
    path.write_bytes(b"\xff not a line that was written here\n" + path.read_bytes())
    report = json.loads(done("audit", copy.run, "--json").out)
    assert report["audits_run"] == 3


def test_a_run_goes_on_with_the_canaries_it_began_with(copy: Place) -> None:
    run, config = RunDir(copy.run), RunDir(copy.run).load_config()
    own = canaries.load(run.canaries)
    assert build.draw_canaries(config, run, True, None, torch.device("cpu")) == own
    canaries.save(canaries.redraw_coins(own), run.canaries)
    with pytest.raises(ConfigError, match=r"canaries\.json is not what the run wrote"):
        open_run(run, goes_on=True)  # as a resume begins


def test_canaries_that_were_never_planted_give_no_verdict(tmp_path: Path, base: Path) -> None:
    changes = {"audit.canaries": {"groups": {1: 3}, "references": 100}, "privacy.noise_multiplier": 2.0}
    place = make_place(tmp_path / "none", base, changes)
    run = RunDir(place.run)
    config = CanaryConfig(groups={1: 3}, references=100)
    plan = canaries.plan_canaries(config)
    while any(canary.inserted for canary in plan.canaries):
        plan = canaries.redraw_coins(plan)
    run.private.mkdir(parents=True)
    canaries.save(plan, run.canaries)
    done("train", place.recipe)
    assert "every coin said out" in refused("audit", place.run)
    assert not (run.export / "audit").exists()


def twin_of(baseline: Place, folder: Path, **changes: object) -> Path:
    """A copy of the run without privacy whose audit says something else."""
    shutil.copytree(baseline.run, folder)
    path = folder / "private" / "audit" / "audit.json"
    report = json.loads(path.read_text())
    controls = {**report["controls"], "positive": "AUC 0.99", **changes}
    path.write_text(json.dumps({**report, "controls": controls}))
    return folder


def test_a_twin_is_a_control_that_stays_private(copy: Place, baseline: Place, tmp_path: Path) -> None:
    done("audit", copy.run, "--twin", twin_of(baseline, tmp_path / "twin"))
    report, published = copy.json("private/audit/audit.json"), copy.json("export/audit/audit.json")
    assert report["controls"]["twin"] == "AUC 0.99 of a run without privacy"
    assert report["controls"]["positive"]
    assert not report["published"]
    # What needs no twin is published all the same: a falsified claim would be, and this audit counts.
    assert published["controls"]["twin"] is None
    assert published["published"]
    assert published["epsilon_lower_bound"] == report["epsilon_lower_bound"]
    assert published["audits_run"] == report["audits_run"] == 2
    exported = b"".join(contents(copy.run / "export").values())
    assert b"of a run without privacy" not in exported


def test_a_twin_on_which_the_attack_fails_is_said(copy: Place, baseline: Place, tmp_path: Path) -> None:
    done("audit", copy.run, "--twin", twin_of(baseline, tmp_path / "twin", positive=None))
    report = copy.json("private/audit/audit.json")
    assert report["controls"]["twin"] == ""
    assert report["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_separates": True}, "controls failed"),
        ({"words": {"auc": 0.9, "interval": [0.8, 0.95], "succeeds": True}}, "controls failed"),
    ],
)
def test_a_twin_that_proves_nothing_is_refused(
    copy: Place, baseline: Place, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    assert words in refused("audit", copy.run, "--twin", twin_of(baseline, tmp_path / "twin", **changes))


def test_what_is_no_twin_is_refused(copy: Place, baseline: Place, tmp_path: Path) -> None:
    assert "was trained with differential privacy" in refused("audit", copy.run, "--twin", copy.run)
    twin = twin_of(baseline, tmp_path / "twin")
    recipe = yaml.safe_load((twin / "config.yaml").read_text())
    recipe["train"]["steps"] += 1
    (twin / "config.yaml").write_text(yaml.safe_dump(recipe))
    as_trained(twin)
    assert "section train" in refused("audit", copy.run, "--twin", twin)


def test_a_twin_of_other_data_is_published_only_where_both_are_public(
    copy: Place, baseline: Place, tmp_path: Path
) -> None:
    ours = copy.run / "config.yaml"
    ours.write_text(ours.read_text().replace("public: false", "public: true"))
    as_trained(copy.run)
    assert "not the one that the ledger was told" in dpllm_("audit", copy.run).err
    edit_recipe(copy.run, "privacy", ledger=str(tmp_path / "gone.sqlite"))
    twin = twin_of(baseline, tmp_path / "twin")
    done("audit", copy.run, "--twin", twin)
    assert copy.json("export/audit/audit.json")["published"]
    theirs = twin / "config.yaml"
    recipe = yaml.safe_load(theirs.read_text())
    for data in ({"train": "other.jsonl"}, {"public": False}):
        theirs.write_text(yaml.safe_dump({**recipe, "data": {**recipe["data"], **data}}))
        as_trained(twin)
        done("audit", copy.run, "--twin", twin)
        assert copy.json("export/audit/audit.json")["controls"]["twin"] is None
        assert copy.json("private/audit/audit.json")["controls"]["twin"]


def test_what_training_fixed_has_to_be_there(copy: Place) -> None:
    """Without the tests of the Plan they could be chosen by what the scores show."""
    edit_recipe(copy.run, "privacy", ledger=str(copy.run / "gone.sqlite"))
    plan, record = copy.json("plan.json"), copy.json("run.json")
    loose = Plan.checked({**plan, "audit": None})
    (copy.run / "plan.json").write_text(json.dumps(loose.to_json()), encoding="utf-8")
    record["manifest"]["plan.json"] = loose.digest
    (copy.run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert "fixes no tests" in refused("audit", copy.run)
    (copy.run / "private" / "canaries.json").unlink()
    assert "canaries.json: is missing" in refused("audit", copy.run)


def test_shadows_stand_in_the_report(copy: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"shadows": 2, "attacks": {}, "many_runs": {"value": None}}
    monkeypatch.setattr(shadows, "train_shadows", lambda *_: ("one", "two"))
    monkeypatch.setattr(shadows, "score_shadows", lambda *_: None)
    monkeypatch.setattr(shadows, "summarise_shadows", lambda *_, **__: results)
    answer = done("audit", copy.run, "--shadows", "2")
    assert "lira" in answer.out
    assert copy.json("export/audit/audit.json")["shadows"] == results
