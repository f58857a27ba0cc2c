"""Canaries planned before training, of every kind: what was planned is planted, and none of it is lost or known before."""

from __future__ import annotations

import json
import stat

import pytest
import tiny
from running import done, dpllm_, edit_json, make_place, refused, rows

from dpllm.canaries import canaries
from dpllm.recipe.sections import CanaryConfig
from dpllm.run import build
from dpllm.run.directory import RunDir

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
