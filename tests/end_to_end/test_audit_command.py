"""``dpllm audit`` as it is typed: what it prints and writes, and one message for each mistake."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import tiny
import yaml
from running import SENTINEL, Answer, Place, contents, done, dpllm_, make_place, rows

from dpllm.audit import canaries
from dpllm.audit.run import ATTACKS
from dpllm.audit.whitebox import mechanism
from dpllm.rundir import RunDir


@pytest.fixture
def copy(finished: Place, tmp_path: Path) -> Place:
    """The finished run, to be damaged."""
    shutil.copytree(finished.root, tmp_path / "copy")
    return Place(tmp_path / "copy", finished.base)


def refused(*arguments: object) -> str:
    """The one line on standard error of a command with a mistake."""
    answer: Answer = dpllm_("audit", *arguments)
    assert answer.code == 2, (answer.code, answer.err)
    assert answer.err.startswith("dpllm audit: ")
    assert answer.err.count("\n") == 1
    assert not answer.out
    return answer.err


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in ("completion", "choice", "personal")])
def test_every_attack_runs_alone(finished: Place, name: str) -> None:
    before = contents(finished.run)
    answer = done("audit", finished.run, "--attack", name, "--json")
    assert json.loads(answer.out)
    assert SENTINEL not in answer.out
    assert contents(finished.run) == before


def test_an_attack_on_personal_details_needs_some(finished: Place) -> None:
    assert "kind: pii" in refused(finished.run, "--attack", "personal")


def test_the_mechanism_of_a_run_is_written_beside_its_audit(copy: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(mechanism.audit_mechanism, steps=20, canaries=300, pairs=1)
    monkeypatch.setattr(mechanism, "audit_mechanism", quick)
    found = json.loads(done("audit", copy.run, "--mechanism", "--json").out)
    written = copy.json("export/audit/mechanism.json")
    assert written == {"schema_version": written["schema_version"], **found}
    assert written["verdict"] == "consistent"


@pytest.mark.parametrize("which", ["recipe", "run"])
def test_leakage_is_about_artificial_sentences(finished: Place, which: str) -> None:
    before = contents(finished.run)
    found = json.loads(done("audit", getattr(finished, which), "--leakage", "--json").out)
    assert found["raw"]["span_auc"] > found["noised"]["span_auc"]
    assert "federated" in found["statement"]
    assert contents(finished.run) == before


def test_keys_of_a_recipe_can_be_overridden_before_training(finished: Place) -> None:
    message = refused(finished.recipe, "--leakage", "--adapter.method", "frozen", "--adapter.r", "null")
    assert "adapter" in message


def test_real_rows_are_scored_in_private(copy: Place) -> None:
    tiny.write_rows(copy.train, rows(60))
    tiny.write_rows(copy.root / "data" / "eval.jsonl", rows(60, start=500))
    recipe = yaml.safe_load((copy.run / "config.yaml").read_text())
    recipe["data"] |= {name: str(copy.root / "data" / f"{name}.jsonl") for name in ("train", "eval")}
    (copy.run / "config.yaml").write_text(yaml.safe_dump(recipe))
    published = contents(copy.run / "export")
    answer = done("audit", copy.run, "--members")
    assert SENTINEL not in answer.out
    found = copy.json("private/audit_members.json")
    assert found["word"] in ("membership inference", "distribution shift")
    assert "not covered" in found["note"]
    assert contents(copy.run / "export") == published


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shadows", "0"], "--shadows 0"),
        (["--members", "rows.jsonl"], "Type --members alone"),
        (["--base", "gpt2"], "--base is for a model trained elsewhere"),
        (["--epsilon", "3"], "--epsilon is for a model trained elsewhere"),
        (["--attack", "losss"], "Did you mean loss?"),
        (["--attack", "telepathy"], "Type one of"),
        (["--train.steps", "3"], "audited as it was trained"),
        (["--twin", "nowhere"], "holds no run"),
    ],
)
def test_mistakes_with_a_run_are_one_message(finished: Place, arguments: list[str], words: str) -> None:
    assert words in refused(finished.run, *arguments)


def test_mistakes_without_a_run_are_one_message(finished: Place, tmp_path: Path) -> None:
    assert "holds no run" in refused(tmp_path)
    assert "Type --members FILE --non-members FILE" in refused(tmp_path, "--members")
    planted = tmp_path / "planted.jsonl"
    planted.write_text('{"coins": "independent"}\n')
    assert "--attack needs a run" in refused(tmp_path, "--canaries", planted, "--attack", "loss")
    assert "Type one of the two" in refused(tmp_path, "--canaries", planted, "--members", planted)


def test_canaries_of_another_run_are_refused(copy: Place, tmp_path: Path, base: Path) -> None:
    stranger = canaries.plan_canaries(RunDir(copy.run).load_config().audit.canaries)
    canaries.save(stranger, RunDir(copy.run).canaries)
    before = contents(copy.run / "export")
    assert "committed to before training" in refused(copy.run)
    assert contents(copy.run / "export") == before


def test_settings_of_the_test_are_fixed_before_training(copy: Place) -> None:
    text = (copy.run / "config.yaml").read_text()
    (copy.run / "config.yaml").write_text(text.replace("alpha: 0.05", "alpha: 0.4"))
    assert "fixed before training" in refused(copy.run)


def test_canaries_that_were_never_planted_give_no_verdict(tmp_path: Path, base: Path) -> None:
    place = make_place(tmp_path / "none", base, {"audit.canaries": {"groups": {1: 3}, "references": 100}})
    run = RunDir(place.run)
    config = canaries.CanaryConfig(groups={1: 3}, references=100)
    plan = canaries.plan_canaries(config)
    while any(canary.inserted for canary in plan.canaries):
        plan = canaries.redraw_coins(plan)
    run.private.mkdir(parents=True)
    canaries.save(plan, run.canaries)
    done("train", place.recipe)
    assert "every coin said out" in refused(place.run)
    assert not (run.export / "audit").exists()
