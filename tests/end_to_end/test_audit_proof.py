"""The audit of whole runs of the embedded model: what is memorised is shown, and what privacy hides is not claimed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from running import Json, Place, done, make_place

from dpllm.auditing.run import audit
from dpllm.canaries import canaries
from dpllm.recipe.sections import CanaryConfig
from dpllm.run import build
from dpllm.run.directory import RunDir

pytestmark = pytest.mark.full  # in small: test_audit_statistics.py, test_audit_command.py
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


def test_with_privacy_nothing_is_claimed_that_is_not_there(tmp_path: Path, base: Path, seed: int) -> None:
    bounds = []
    for repeat in range(20):
        changes = {"privacy.epsilon": 1.0, "privacy.delta": 1e-5, "train.steps": 20, "adapter": {"method": "lora"}}
        place = trained(tmp_path / str(repeat), base, 1000 * seed + repeat, changes)
        report = audit(RunDir(place.run)).to_json()
        assert report["verdict"] in ("consistent", "inconclusive")
        bounds.append(report["epsilon_lower_bound"]["value"])
    assert sum(value > 1 for value in bounds) <= 1


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
