"""Canaries of whole runs: what is planned is planted, and what gradient canaries keep, publish and are checked by."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tiny
from pyarrow import parquet
from running import CANARIES, Json, Place, done, dpllm_, edit_json, make_place, refused, rows, unverified

from dpllm.auditing.run import figures
from dpllm.canaries import canaries
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.noise import GaussianNoise
from dpllm.recipe.config import load_config
from dpllm.recipe.sections import CanaryConfig
from dpllm.run import build
from dpllm.run.directory import RunDir
from dpllm.run.promise import plan_of
from dpllm.statement.audit import read_audit

NUM_CANARIES = 60
SETTINGS = {"audit.canaries": CANARIES, "audit.gradient_canaries": NUM_CANARIES, "train.steps": 6}


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A private run with gradient canaries, from training to card; read only."""
    place = make_place(tmp_path_factory.mktemp("planted"), base, SETTINGS)
    place.does("train", "audit", "card")
    return place


def test_they_are_units_of_the_plan_and_nothing_else_of_it_changes(planted: Place) -> None:
    promised, config = planted.json("plan.json"), load_config(planted.recipe)
    assert promised["canary_slots"] == 20 + 4 * 4 + NUM_CANARIES
    without = config.model_copy(update={"audit": config.audit.model_copy(update={"gradient_canaries": 0})})
    more_data = json.loads(json.dumps(plan_of(without, promised["dataset_size"] - 20 - 4 * 4).to_json()))
    for name in ("epsilon", "noise_multiplier", "sampling_rate", "delta", "event"):
        assert more_data[name] == promised[name]


def test_what_each_step_showed_is_kept_in_private_and_scores_are_published(planted: Place) -> None:
    run = RunDir(planted.run)
    assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
    proj_TM = np.load(run.projections)
    assert proj_TM.shape == (6, NUM_CANARIES)
    assert np.isfinite(proj_TM).all()
    published = parquet.read_table(run.export / "audit" / "gradient.parquet")
    assert set(published.column_names) == {"inserted", "score", "squares", "total", "weights", "steps", "pairs"}
    assert tuple(published["inserted"].to_pylist()) == canaries.load(run.canaries).gradient_coins
    everything = b"".join(path.read_bytes() for path in run.export.rglob("*") if path.is_file())
    assert canaries.load(run.canaries).gradient_key.encode() not in everything


def test_the_card_says_what_they_show_and_what_they_do_not(planted: Place) -> None:
    card = planted.card
    record = planted.json("export/privacy.json")["audit"]["gradient"]
    expected = record["weights"]["expected_epsilon"]
    for words in (
        f"noise of {record['noise']:.3f} C (",
        f"where {record['noise_planned']:.3f} C was planned;",
        "An observer of the noised sums of 6 steps",
        "whoever holds only the weights sees less",
        f"Expected to be visible in the final weights is ε {expected:.2f}",
    ):
        assert words in card
    assert expected < planted.json("plan.json")["epsilon"]


def test_how_far_the_weights_went_is_measured_on_the_weights_themselves(planted: Place) -> None:
    """Beside the projections of a second process that reads the export: B begins at zero, and A at what the seed draws."""
    run = RunDir(planted.run)
    first_M, last_M = np.load(run.along)
    assert np.isfinite(last_M).all()
    published = parquet.read_table(run.export / "audit" / "gradient.parquet")
    np.testing.assert_allclose(np.array(published["weights"]), first_M - last_M)
    assert float(np.abs(first_M - last_M).max()) > 0
    moved = np.load(run.projections).astype(float).sum(axis=0)
    assert np.corrcoef(first_M - last_M, moved)[0, 1] > 0.3  # descent, by Adam at a falling rate


TABLE = Path("export/audit/gradient.parquet")


def edited(planted: Place, folder: Path, **columns: Any) -> Path:
    """A copy of the run whose table of gradient canaries has other columns; a function makes one of what stands there."""
    run = Path(shutil.copytree(planted.run, folder / "run"))
    table = parquet.read_table(run / TABLE)
    written = {name: table[name] for name in table.column_names}
    for name, values in columns.items():
        values = values(np.array(table[name])) if callable(values) else values
        written[name] = pyarrow.array([values] * table.num_rows if np.isscalar(values) else values)
    parquet.write_table(pyarrow.table(written), run / TABLE, use_compliant_nested_type=False)
    return run


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"squares": lambda column: column * 1.3}, "gradient"),
        ({"score": "0.25"}, "something other than numbers"),
        ({"weights": lambda column: column[::-1]}, "gradient"),
        ({"note": "a patient"}, "other columns than dpllm writes"),
        ({"score": lambda column: [[0.5] * 1000] * len(column)}, "gradient.parquet has other columns"),
        ({"steps": 10**9}, "counts other steps"),
        ({"pairs": 1}, "counts other steps"),
        ({"steps": 5, "pairs": 0}, "counts other steps"),
    ],
    ids=["an edit", "text", "the weights", "a column more", "lists", "steps", "pairs", "both"],
)
def test_verify_sees_a_table_that_was_edited(planted: Place, tmp_path: Path, columns: Json, message: str) -> None:
    assert message in unverified(edited(planted, tmp_path, **columns) / "export", "--json")


def test_verify_computes_them_again_but_for_more_steps_than_it_can_and_misses_a_table_that_is_gone(
    planted: Place, tmp_path: Path
) -> None:
    export = Path(shutil.copytree(planted.run / "export", tmp_path / "export"))
    done("verify", export)
    edit_json(export / "privacy.json", steps={**planted.json("export/privacy.json")["steps"], "planned": 10**7})
    assert "more steps or bands are stated" in unverified(export, "--json")
    shutil.copy(planted.run / "export" / "privacy.json", export)
    (export / "audit" / "gradient.parquet").unlink()
    unverified(export)


def test_coins_are_compared_with_those_that_the_run_committed_to(planted: Place, tmp_path: Path) -> None:
    for run, status in ((planted.run, "verified"), (edited(planted, tmp_path, inserted=np.logical_not), "failed")):
        checks = json.loads(dpllm_("verify", run, "--json").out)["checks"]
        assert status in {check["status"] for check in checks if check["name"] == "audit: canaries"}


@pytest.mark.parametrize("damage", ["nan", "fewer steps", "no weights", "empty weights"])
def test_a_file_of_canaries_that_is_damaged_or_missing_is_refused(planted: Place, tmp_path: Path, damage: str) -> None:
    run = RunDir(shutil.copytree(planted.run, tmp_path / "run"))
    projections = np.load(run.projections)
    if damage == "no weights":
        run.along.unlink()
    elif damage == "empty weights":
        run.along.write_bytes(b"")
    else:
        np.save(run.projections, np.full_like(projections, np.nan) if damage == "nan" else projections[:-1])
    path = run.along if "weights" in damage else run.projections
    assert path.name in refused("audit", run.root)


def test_a_run_without_privacy_holds_their_slots_and_plants_none(place: Place) -> None:
    place.write({**SETTINGS, "privacy.enabled": False, "data.public": True})
    done("train", place.recipe)
    assert not RunDir(place.run).projections.exists()
    done("audit", place.run)
    assert "gradient" not in place.json("private/audit/audit.json")


def test_a_resumed_run_goes_on_with_the_same_vectors_and_coins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = StepEngine.step, []

    def stop(engine: StepEngine, *batches: Any) -> Any:
        calls.append(engine.canaries)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, *batches)

    monkeypatch.setattr(StepEngine, "step", stop)
    place.write({**SETTINGS, "train.checkpoint_every": 1})
    assert dpllm_("train", place.recipe).code == 1
    run = RunDir(place.run)
    before, coins = np.load(run.projections), run.canaries.read_bytes()
    assert np.isnan(before[3:]).all()
    began = np.load(run.along)[0]
    done("train", place.recipe, "--resume")
    after = np.load(run.projections)
    np.testing.assert_array_equal(after[:3], before[:3])
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(np.load(run.along)[0], began)
    assert np.isfinite(np.load(run.along)).all()
    assert run.canaries.read_bytes() == coins
    assert (calls[0]._sign_KM == calls[-1]._sign_KM).all()
    done("audit", place.run)


@pytest.mark.parametrize(
    ("noise", "changes"),
    [
        (0.5, {"audit.gradient_canaries": 200, "train.steps": 8}),
        (1.0, {"audit.gradient_canaries": 200, "train.steps": 8}),
        (0.2, {"audit.canaries": None}),
    ],
    ids=["half the noise", "all of it", "without canaries of text"],
)
def test_too_little_noise_is_falsified_by_what_is_measured_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, noise: float, changes: Json
) -> None:
    draw = GaussianNoise.draw
    monkeypatch.setattr(GaussianNoise, "draw", lambda stream, size: draw(stream, size) * noise)
    place.write({**SETTINGS, **changes})
    done("train", place.recipe)
    answer = dpllm_("audit", place.run)
    report = place.json("export/audit/audit.json")
    assert report["gradient"]["noise_refuted"] == (noise < 1)
    assert answer.code == (4 if noise < 1 else 0)
    if noise < 1:
        assert report["verdict"] == "falsified"
        assert "too little was added, or the same twice" in report["verdict_reason"]
        assert dpllm_("card", place.run).code in (0, 4)
        assert "falsified" in place.card


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """What a run may carry that is published: gradient canaries, and no text; read only."""
    place = make_place(tmp_path_factory.mktemp("alone"), base, {**SETTINGS, "audit.canaries": None})
    done("train", place.recipe)
    done("train", place.recipe, "--output_dir", place.root / "again")
    for run in (place.run, place.root / "again"):
        done("audit", run)
    done("card", place.run)
    return place


def test_without_canaries_of_text_the_mechanism_is_audited_and_the_weights_hold_none(alone: Place) -> None:
    plan = canaries.load(RunDir(alone.run).canaries)
    assert plan.canaries == ()
    assert alone.json("plan.json")["canary_slots"] == NUM_CANARIES
    record = alone.json("export/privacy.json")["audit"]
    assert (record["attacks"], record["exposure"], record["extraction"]) == ({}, {}, {})
    assert record["gradient"]["canaries"] == NUM_CANARIES
    assert record["verdict"] in {"consistent", "inconclusive"}
    assert "nothing was asked of the weights" in record["verdict_reason"]
    assert all(words in alone.card for words in ("No canary of text was planted", "| Audit of the training steps | "))
    assert not any(words in alone.card for words in ("| Lower bound on ε |", "seen to work: None"))
    assert "0 failed" in done("verify", alone.run, "--ledger", alone.ledger).out
    shown = figures(read_audit(alone.run / "export" / "audit" / "audit.json"))
    assert shown["dp_audit_epsilon_lower_bound"] is None
    assert done("compare", alone.run, alone.run.parent / "again").code == 0


def test_no_text_on_the_command_line_means_no_vectors_either_unless_they_are_asked_for(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = "model: {name_or_path: m}\ndata: {train: x.jsonl}\ntrain: {steps: 1}\noutput_dir: o\n"
    recipe.write_text(text + "audit: {canaries: {}, gradient_canaries: 9}\n")

    def vectors(**keys: object) -> int:
        return load_config(recipe, {f"audit.{key}": value for key, value in keys.items()}).audit.gradient_canaries

    assert vectors() == 9
    assert vectors(canaries=None) == 0
    assert vectors(canaries=None, gradient_canaries=5) == vectors(gradient_canaries=5, canaries=None) == 5
    recipe.write_text(text + "audit: {canaries: null, gradient_canaries: 9}\n")
    assert vectors() == 9


# --- canaries of text, planned before training -----------------------------------------------------------------------


FEW = {"groups": {1: 12, 2: 3}, "references": 100, "digits": 12}


@pytest.fixture
def planned(place):
    """A directory in which canaries are planned and nothing has run, as for a run that has the texts of another."""
    place.write({"audit.canaries": FEW})
    manifest(place).parent.mkdir(mode=0o700, parents=True)
    canaries.save(canaries.plan_canaries(CanaryConfig(**FEW)), manifest(place))
    return place


def manifest(place):
    return place.run / "private" / "canaries.json"


@pytest.mark.parametrize("command", ["plan", "train"])
def test_secrets_in_prompts_are_refused_where_rows_have_none_before_anything_is_drawn(place, command):
    place.write({"audit.canaries": {**FEW, "place": "prompt"}})
    assert "rows of format text have no prompt" in refused(command, place.recipe)
    assert not manifest(place).exists()
    assert not place.ledger.exists()


def test_training_plants_what_was_planned_and_never_twice(planned):
    plan = canaries.load(manifest(planned))
    # What was planned outlives a refusal.
    assert dpllm_("train", planned.recipe, "--privacy.noise_multiplier", "0.01").code == 3
    assert done("plan", planned.recipe).code == 0
    done("train", planned.recipe)
    assert canaries.load(manifest(planned)) == plan
    assert planned.json("plan.json")["canary_commitment"] == plan.commitment
    assert stat.S_IMODE(manifest(planned).stat().st_mode) == 0o600
    # One that replaces it has texts and coins of its own, one that goes on has the same.
    run = RunDir(planned.run)
    config = run.load_config()
    assert build.draw_canaries(config, run, True, None, None) == plan
    assert build.draw_canaries(config, run, False, None, None).commitment != plan.commitment


def test_canaries_that_the_recipe_did_not_plan_stay_and_nothing_is_charged(planned):
    first, *others = planned.json("private/canaries.json")["canaries"]
    altered = [{**first, "inserted": not first["inserted"]}, *others]
    for recipe, canary_list, words in (
        ({"audit.canaries": {**FEW, "digits": 11}}, [first, *others], "planned for another recipe"),
        ({}, [first, *others], "something else"),
        ({"audit.canaries": FEW}, altered, "does not match its own commitment"),
    ):
        planned.write(recipe)
        edit_json(manifest(planned), canaries=canary_list)
        before = manifest(planned).read_bytes()
        assert words in refused("train", planned.recipe)
        assert manifest(planned).read_bytes() == before
        assert not planned.ledger.exists()


def plant(place, kind, **changes):
    """Trains with canaries of a kind."""
    section = {"kind": kind, "groups": {1: 12, 3: 3}, "references": 100, "tokens": 4}
    place.write({"audit.canaries": section, **changes})
    done("train", place.recipe)
    plan = canaries.load(manifest(place))
    assert (plan.kind, len(plan.canaries), len(plan.references)) == (kind, 15, 100)
    assert place.json("plan.json")["canary_commitment"] == plan.commitment
    published = "".join(path.read_text(errors="replace") for path in place.run.rglob("*") if public(place, path))
    assert not any(canary.carrier in published for canary in (*plan.canaries, *plan.references))
    return plan


def public(place, path):
    return path.is_file() and not path.is_relative_to(place.run / "private")


def test_tokens_of_the_base_model_are_trained_on_and_audited(place):
    plan = plant(place, "random_tokens")
    assert place.json("plan.json")["canary_slots"] == 12 + 9
    assert plan.settings == {"groups": {"1": 12, "3": 3}, "references": 100, "tokens": 4}
    audited = json.loads(done("audit", place.run, "--json").out)["canaries"]
    assert (audited["kind"], audited["commitment"]) == (plan.kind, plan.commitment)


@pytest.mark.full
def test_new_tokens_are_trained_on_and_audited_with_a_head_that_trains_or_not(base, tmp_path):
    place = make_place(tmp_path / "head", base)
    few = {"kind": "new_tokens", "groups": {1: 40}, "references": 100}
    place.write({"audit.canaries": few, "model.name_or_path": "builtin:tiny"})
    done("train", place.recipe)
    report = json.loads(done("audit", place.run, "--json").out)
    assert report["canaries"]["kind"] == canaries.load(manifest(place)).kind == "new_tokens"
    place.write({"audit.canaries": few, "model.name_or_path": "builtin:tiny", "adapter.modules_to_save": ["lm_head"]})
    done("train", place.recipe, "--overwrite")
    assert canaries.load(manifest(place)).kind == "new_tokens"


@pytest.mark.full
def test_where_people_are_the_unit_a_canary_is_one_of_them(place):
    lines = [{**row, "person": number % 13} for number, row in enumerate(rows())]
    tiny.write_rows(place.train, lines)
    unit = {"data.unit": "person", "data.max_examples_per_unit": 4}
    plant(place, "random_tokens", **unit)
    plan = place.json("plan.json")
    assert (plan["canary_slots"], plan["dataset_size"], plan["unit"]) == (15, 13 + 15, "person")
    assert "belong to one person" in refused("plan", place.recipe, "--data.max_examples_per_unit", "2")
