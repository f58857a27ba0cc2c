"""``dpllm audit`` as it is typed: what it prints and writes, one message for each mistake, and what whole runs show."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import running
import tiny
import torch
import yaml
from published import edit
from running import SENTINEL, Json, Place, as_trained, contents, done, dpllm_, edit_recipe, make_place, refused, rows

from dpllm.auditing import shadows
from dpllm.auditing.run import audit
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
    running.edit_json(run.run, manifest=manifest_of(run, config, ended=True))
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
        (["--positive-control", "nowhere"], "holds no run"),
        (["--members", "--positive-control", "run"], "--members and --positive-control ask for two separate audits"),
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
    controls = baseline.json("private/audit/audit.json")["controls"]
    running.edit_json(
        folder / "private" / "audit" / "audit.json", controls={**controls, "positive": "AUC 0.99", **changes}
    )
    return folder


def test_a_twin_is_a_control_that_stays_private(copy: Place, baseline: Place, tmp_path: Path) -> None:
    done("audit", copy.run, "--positive-control", twin_of(baseline, tmp_path / "twin"))
    report, published = copy.json("private/audit/audit.json"), copy.json("export/audit/audit.json")
    assert (report["controls"]["twin"], report["published"]) == ("AUC 0.99 of a run without privacy", False)
    assert report["controls"]["positive"]
    # What needs no twin is published all the same: a falsified claim would be, and this audit counts.
    assert (published["controls"]["twin"], published["published"]) == (None, True)
    assert published["epsilon_lower_bound"] == report["epsilon_lower_bound"]
    assert published["audits_run"] == report["audits_run"] == 2
    exported = b"".join(contents(copy.run / "export").values())
    assert b"of a run without privacy" not in exported


def test_a_twin_on_which_the_attack_fails_is_said(copy: Place, baseline: Place, tmp_path: Path) -> None:
    done("audit", copy.run, "--positive-control", twin_of(baseline, tmp_path / "twin", positive=None))
    report = copy.json("private/audit/audit.json")
    assert (report["controls"]["twin"], report["verdict"]) == ("", "inconclusive")


def test_what_is_no_twin_or_proves_nothing_is_refused(copy: Place, baseline: Place, tmp_path: Path) -> None:
    by_words = {"words": {"auc": 0.9, "interval": [0.8, 0.95], "succeeds": True}}
    for number, changes in enumerate(({"base_separates": True}, by_words)):
        twin = twin_of(baseline, tmp_path / str(number), **changes)
        assert "controls failed" in refused("audit", copy.run, "--positive-control", twin)
    assert "was trained with differential privacy" in refused("audit", copy.run, "--positive-control", copy.run)
    twin = twin_of(baseline, tmp_path / "twin")
    recipe = yaml.safe_load((twin / "config.yaml").read_text())
    recipe["train"]["steps"] += 1
    (twin / "config.yaml").write_text(yaml.safe_dump(recipe))
    as_trained(twin)
    assert "section train" in refused("audit", copy.run, "--positive-control", twin)


def test_a_twin_of_other_data_is_published_only_where_both_are_public(
    copy: Place, baseline: Place, tmp_path: Path
) -> None:
    edit(copy.run / "config.yaml", "public: false", "public: true")
    as_trained(copy.run)
    assert "not the one that the ledger recorded" in dpllm_("audit", copy.run).err
    edit_recipe(copy.run, "privacy", ledger=str(tmp_path / "gone.sqlite"))
    twin = twin_of(baseline, tmp_path / "twin")
    done("audit", copy.run, "--positive-control", twin)
    assert copy.json("export/audit/audit.json")["published"]
    theirs = twin / "config.yaml"
    recipe = yaml.safe_load(theirs.read_text())
    for data in ({"train": "other.jsonl"}, {"public": False}):
        theirs.write_text(yaml.safe_dump({**recipe, "data": {**recipe["data"], **data}}))
        as_trained(twin)
        done("audit", copy.run, "--positive-control", twin)
        assert copy.json("export/audit/audit.json")["controls"]["twin"] is None
        assert copy.json("private/audit/audit.json")["controls"]["twin"]


def test_what_training_fixed_has_to_be_there(copy: Place) -> None:
    """Without the tests of the Plan they could be chosen by what the scores show."""
    edit_recipe(copy.run, "privacy", ledger=str(copy.run / "gone.sqlite"))
    loose = Plan.checked({**copy.json("plan.json"), "audit": None})
    (copy.run / "plan.json").write_text(json.dumps(loose.to_json()), encoding="utf-8")
    running.edit_json(copy.run / "run.json", manifest={**copy.json("run.json")["manifest"], "plan.json": loose.digest})
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


# --- whole runs of the embedded model: what is memorised is shown, what privacy hides is not claimed -----------------


ONCE, REPEATED = 200, 12
CANARIES = {"groups": {1: ONCE, 16: REPEATED}, "digits": 4, "references": 300}
RECIPE = {
    "model.name_or_path": "builtin:tiny",
    "adapter": {"method": "lora", "r": 64, "alpha": 64},
    "data.max_length": 96,
    "train.batch_size": 64,
    "train.learning_rate": 0.01,
    "train.steps": 200,
    "audit.canaries": CANARIES,
}


def trained(root: Path, base: Path, seed: int, changes: Mapping[str, Any]) -> Place:
    """A run whose canaries, coins and noise follow from a seed."""
    place = make_place(root, base, {**RECIPE, "privacy.insecure_seed": seed, **changes})
    plan = canaries.plan_canaries(CanaryConfig(**CANARIES), generator=random.Random(seed))
    run = RunDir(place.run)
    run.private.mkdir(parents=True)
    canaries.save(plan, run.canaries)
    done("train", place.recipe)
    return place


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path, seed: int) -> tuple[Place, Json]:
    """A run without privacy, drawn from the seed as well, and its audit."""
    changes = {"privacy.enabled": False, "privacy.insecure_seed": None, "data.public": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(data_home))
        patch.setattr(build, "os_entropy", lambda: random.Random(seed).getrandbits(128))  # which rows are drawn
        place = trained(tmp_path_factory.mktemp("plain"), base, seed, changes)
        return place, audit(RunDir(place.run)).to_json()


@pytest.mark.full
def test_without_privacy_everything_is_found(plain: tuple[Place, Json]) -> None:
    _, report = plain
    assert report["verdict"] == "no_claim"
    assert report["repeated"]["16"]["attacks"]["calibrated"]["auc"] > 0.9
    count = report["extraction"]["16"]
    assert count["tuned"] == count["inserted"] > 0 == count["base"]
    # 200 candidates could show 3.35.
    assert report["epsilon_lower_bound"]["ceiling"] > 3.3
    assert report["epsilon_lower_bound"]["value"] > 2
    assert report["attacks"]["calibrated"]["auc"] > 0.9
    assert report["controls"]["positive"]
    assert not report["controls"]["base_separates"]
    assert count["held_out_tuned"] == 0


@pytest.mark.full
def test_with_privacy_nothing_is_claimed_that_is_not_there(tmp_path: Path, base: Path, seed: int) -> None:
    bounds = []
    for repeat in range(20):
        changes = {"privacy.epsilon": 1.0, "privacy.delta": 1e-5, "train.steps": 20, "adapter": {"method": "lora"}}
        place = trained(tmp_path / str(repeat), base, 1000 * seed + repeat, changes)
        report = audit(RunDir(place.run)).to_json()
        assert report["verdict"] in ("consistent", "inconclusive")
        bounds.append(report["epsilon_lower_bound"]["value"])
    assert sum(value > 1 for value in bounds) <= 1


@pytest.mark.full
def test_a_twin_without_privacy_is_a_positive_control_and_keeps_the_report_private(
    plain: tuple[Place, Json], tmp_path: Path, base: Path, seed: int
) -> None:
    """A claim so strong that not even repeated canaries are seen."""
    place = trained(tmp_path / "dp", base, seed + 8, {"privacy.epsilon": 0.05, "privacy.delta": 1e-6})
    report = audit(RunDir(place.run), positive_control=RunDir(plain[0].run)).to_json()
    assert "of a run without privacy" in report["controls"]["positive"]
    assert report["verdict"] == "consistent"
    assert place.json("export/audit/audit.json")["verdict"] == "inconclusive"
    assert place.json("private/audit/audit.json")["verdict"] == "consistent"
