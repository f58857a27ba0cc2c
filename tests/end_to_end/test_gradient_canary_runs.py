"""Gradient canaries in whole runs: what is kept, published, checked again, and what a broken engine is told."""

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
from pyarrow import parquet
from running import Place, done, dpllm_, make_place

from dpllm.canaries import canaries
from dpllm.privacy.engine import Engine
from dpllm.privacy.noise import GaussianNoise
from dpllm.recipe.config import load_config
from dpllm.recipe.derived import plan_of
from dpllm.run.directory import RunDir

CANARIES = 60
SETTINGS = {
    "audit.canaries": {"groups": {1: 20, 4: 4}, "references": 100, "digits": 12},
    "audit.gradient_canaries": CANARIES,
    "train.steps": 6,
}


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A private run with gradient canaries, from training to card; read only."""
    place = make_place(tmp_path_factory.mktemp("planted"), base, SETTINGS)
    done("train", place.recipe)
    done("audit", place.run)
    done("card", place.run)
    return place


def test_they_are_units_of_the_plan_and_nothing_else_of_it_changes(planted: Place) -> None:
    promised, config = planted.json("plan.json"), load_config(planted.recipe)
    assert promised["canary_slots"] == 20 + 4 * 4 + CANARIES
    without = config.model_copy(update={"audit": config.audit.model_copy(update={"gradient_canaries": 0})})
    more_data = json.loads(json.dumps(plan_of(without, promised["dataset_size"] - 20 - 4 * 4).to_json()))
    for name in ("epsilon", "noise_multiplier", "sampling_rate", "delta", "event"):
        assert more_data[name] == promised[name]


def test_what_each_step_showed_is_kept_in_private_and_scores_are_published(planted: Place) -> None:
    run = RunDir(planted.run)
    assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
    proj_TM = np.load(run.projections)
    assert proj_TM.shape == (6, CANARIES)
    assert np.isfinite(proj_TM).all()
    published = parquet.read_table(run.export / "audit" / "gradient.parquet")
    assert set(published.column_names) == {"inserted", "score", "squares", "total", "steps", "pairs"}
    assert tuple(published["inserted"].to_pylist()) == canaries.load(run.canaries).gradient_coins
    everything = b"".join(path.read_bytes() for path in run.export.rglob("*") if path.is_file())
    assert canaries.load(run.canaries).gradient_key.encode() not in everything


def test_the_card_says_what_they_show_and_what_they_do_not(planted: Place) -> None:
    card = (planted.run / "export" / "README.md").read_text("utf-8")
    found = planted.json("export/privacy.json")["audit"]["gradient"]
    assert f"measured noise {found['noise']:.3f} C of {found['noise_planned']:.3f} C planned" in card
    assert "Whoever saw the noised sum of each of 6 steps" in card
    assert "who holds the weights alone sees less" in card


def test_verify_computes_them_again_and_sees_an_edit(planted: Place, tmp_path: Path) -> None:
    export = shutil.copytree(planted.run / "export", tmp_path / "export")
    assert dpllm_("verify", export).code == 0
    path = export / "audit" / "gradient.parquet"
    table = parquet.read_table(path)
    column = pyarrow.array(np.array(table["squares"]) * 1.3)
    parquet.write_table(table.set_column(table.column_names.index("squares"), "squares", column), path)
    answer = dpllm_("verify", export, "--json")
    assert answer.code == 4
    assert "gradient" in answer.out


@pytest.mark.parametrize("change", ["text", "more", "missing"])
def test_verify_refuses_a_table_that_holds_something_else(planted: Place, tmp_path: Path, change: str) -> None:
    export = shutil.copytree(planted.run / "export", tmp_path / "export")
    path = export / "audit" / "gradient.parquet"
    table = parquet.read_table(path)
    if change == "text":
        table = table.set_column(1, "score", pyarrow.array(["0.25"] * table.num_rows))
    elif change == "more":
        table = table.append_column("note", pyarrow.array(["a patient"] * table.num_rows))
    parquet.write_table(table, path)
    if change == "missing":
        path.unlink()
    assert dpllm_("verify", export).code == 4


def test_coins_other_than_those_committed_to_are_seen_beside_the_run(planted: Place, tmp_path: Path) -> None:
    run = shutil.copytree(planted.run, tmp_path / "run")
    assert "audit: canaries" not in failures(run)
    path = run / "export" / "audit" / "gradient.parquet"
    table = parquet.read_table(path)
    turned = pyarrow.array([not coin for coin in table["inserted"].to_pylist()])
    parquet.write_table(table.set_column(table.column_names.index("inserted"), "inserted", turned), path)
    assert "audit: canaries" in failures(run)


def failures(run: Path) -> set[str]:
    found = json.loads(dpllm_("verify", run, "--json").out)
    return {one["name"] for one in found["checks"] if one["status"] == "failed"}


@pytest.mark.parametrize("column", ["squares", "total", "score"])
def test_other_scores_than_those_that_the_run_kept_are_seen_beside_it(
    planted: Place, tmp_path: Path, column: str
) -> None:
    run = shutil.copytree(planted.run, tmp_path / "run")
    path = run / "export" / "audit" / "gradient.parquet"
    table = parquet.read_table(path)
    longer = pyarrow.array(np.array(table[column]) * 4)
    parquet.write_table(table.set_column(table.column_names.index(column), column, longer), path)
    assert "audit: canaries" in failures(run)


@pytest.mark.parametrize("change", [{"steps": 10**9}, {"pairs": 1}, {"steps": 5, "pairs": 0}])
def test_other_numbers_of_steps_than_the_run_took_are_refused(
    planted: Place, tmp_path: Path, change: dict[str, int]
) -> None:
    export = shutil.copytree(planted.run / "export", tmp_path / "export")
    path = export / "audit" / "gradient.parquet"
    table = parquet.read_table(path)
    for name, value in change.items():
        column = pyarrow.array([value] * table.num_rows)
        table = table.set_column(table.column_names.index(name), name, column)
    parquet.write_table(table, path)
    answer = dpllm_("verify", export)
    assert answer.code == 4
    assert "counts other steps" in answer.out


def test_a_table_that_unpacks_to_more_than_its_rows_is_refused(planted: Place, tmp_path: Path) -> None:
    export = shutil.copytree(planted.run / "export", tmp_path / "export")
    path = export / "audit" / "gradient.parquet"
    table = parquet.read_table(path)
    lists = pyarrow.array([[0.5] * 1000] * table.num_rows)
    table = table.set_column(table.column_names.index("score"), "score", lists)
    parquet.write_table(table, path, use_compliant_nested_type=False)
    answer = dpllm_("verify", export)
    assert answer.code == 4
    assert "gradient.parquet holds" in answer.out


@pytest.mark.parametrize("damage", ["all missing", "shorter", "no file"])
def test_projections_that_are_not_those_of_the_run_are_refused(planted: Place, tmp_path: Path, damage: str) -> None:
    run = RunDir(shutil.copytree(planted.run, tmp_path / "run"))
    found = np.load(run.projections)
    if damage == "no file":
        run.projections.unlink()
    else:
        np.save(run.projections, found[:-1] if damage == "shorter" else np.full_like(found, np.nan))
    answer = dpllm_("audit", run.root, "--scores-only")
    assert answer.code == 2
    assert "Restore" in answer.err


def test_a_run_without_privacy_holds_their_slots_and_plants_none(place: Place) -> None:
    place.write({**SETTINGS, "privacy.enabled": False, "data.public": True})
    done("train", place.recipe)
    assert not RunDir(place.run).projections.exists()
    done("audit", place.run)
    assert "gradient" not in json.loads((place.run / "private" / "audit" / "audit.json").read_text())


def test_a_resumed_run_goes_on_with_the_same_vectors_and_coins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine.step, []

    def stop(engine: Engine, *batches: Any) -> Any:
        calls.append(engine.canaries)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, *batches)

    monkeypatch.setattr(Engine, "step", stop)
    place.write({**SETTINGS, "train.checkpoint_every": 1})
    assert dpllm_("train", place.recipe).code == 1
    run = RunDir(place.run)
    before, coins = np.load(run.projections), run.canaries.read_bytes()
    assert np.isnan(before[3:]).all()
    done("train", place.recipe, "--resume")
    after = np.load(run.projections)
    np.testing.assert_array_equal(after[:3], before[:3])
    assert np.isfinite(after).all()
    assert run.canaries.read_bytes() == coins
    assert (calls[0]._sign_KM == calls[-1]._sign_KM).all()
    done("audit", place.run)


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_half_the_noise_is_falsified_by_what_is_measured_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    draw = GaussianNoise.draw
    monkeypatch.setattr(GaussianNoise, "draw", lambda stream, size: draw(stream, size) * noise)
    place.write({**SETTINGS, "audit.gradient_canaries": 200, "train.steps": 8})
    done("train", place.recipe)
    answer = dpllm_("audit", place.run)
    found = json.loads((place.run / "export" / "audit" / "audit.json").read_text())
    assert found["gradient"]["noise_refuted"] == (noise < 1)
    assert answer.code == (4 if noise < 1 else 0)
    if noise < 1:
        assert found["verdict"] == "falsified"
        assert "too little was added, or the same twice" in found["verdict_reason"]
        assert dpllm_("card", place.run).code in (0, 4)
        assert "falsified" in (place.run / "export" / "README.md").read_text("utf-8")
