"""Runs on data with released statistics: control codes from describe to card, and one ledger and one card for both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from published import carry, failing, read
from running import CANARIES, Place, done, make_place, refused, rows, train_until

from dpllm.recipe.config import load_config
from dpllm.text import data, layouts
from dpllm.text.data import each_row
from dpllm.text.tokens import encode_units
from dpllm.verification.verify import verify

CODES = ["visit", "age"]
SHARES = "visit=home,clinic;age=old,young"


def coded(count: int, start: int) -> list[dict[str, Any]]:
    kinds = [{"visit": visit, "age": age} for visit in ("home", "clinic") for age in ("old", "young", None)]
    return [row | kinds[number % len(kinds)] for number, row in enumerate(rows(count, start))]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """Described, and trained until its third step failed."""
    place = make_place(tmp_path_factory.mktemp("coded"), base)
    tiny.write_rows(place.train, coded(40, 0))
    held_out = tiny.write_rows(place.root / "data" / "eval.jsonl", coded(8, 500))
    changes = {"data.control": CODES, "data.eval": str(held_out), "audit.canaries": CANARIES}
    place.write({**changes, "train.checkpoint_every": 1})
    released = place.root / "describe.json"
    done("describe", place.recipe, "--epsilon", 4, "--shares", SHARES, "--output", released)
    with pytest.MonkeyPatch.context() as patch:
        train_until(patch, 3, place.recipe)
    return place


@pytest.fixture(scope="module")
def finished(stopped: Place) -> Place:
    """The same run, with other codes or data refused first."""
    assert "data.control differs" in refused("train", stopped.recipe, "--resume", "--data.control", "[visit]", code=3)
    held = stopped.train.read_bytes()
    stopped.train.write_bytes(held.replace(b'"home"', b'"away"', 1))
    assert "holds other units" in refused("train", stopped.recipe, "--resume", code=3)
    stopped.train.write_bytes(held)
    done("train", stopped.recipe, "--resume")
    return stopped


def test_the_joint_distribution_is_released_by_the_names_that_are_asked_for(stopped: Place) -> None:
    (record,) = json.loads((stopped.root / "describe.json").read_text("utf-8"))["releases"]
    assert record["statistic"] == layouts.shares_of(CODES)
    assert set(record["value"]) == {"home;old", "home;young", "clinic;old", "clinic;young", "other"}
    assert abs(sum(record["value"].values()) - 40) <= 10 * record["error_95"]  # noise of OpenDP's own


def test_held_out_loss_is_that_of_the_texts_behind_their_lines(finished: Place) -> None:
    config = load_config(finished.recipe)
    table = data.load_table(config.data.eval or "", config.data, "train", finished.root / "cache")
    units = encode_units(each_row(table.rows), table.format, tiny.tokenizer(), config.data)
    learned = sum(sum(sequence.loss_mask) for unit in units for sequence in unit.sequences)
    shown = sum(len(sequence.input_ids) for unit in units for sequence in unit.sequences)
    assert finished.json("private/summary.json")["eval_tokens"] == learned < shown - 20 * len(units)


def test_the_run_is_audited_published_and_verified(finished: Place) -> None:
    done("audit", finished.run)
    done("card", finished.run, "--describe", finished.root / "describe.json")
    verification = verify(finished.run)
    assert not verification.failed, [check for check in verification.checks if check.status == "failed"]
    saved = load_config(finished.run / "config.yaml").data
    assert (saved.control, saved.format) == (CODES, "text")
    assert "shares of visit;age" in finished.card


def test_the_tuned_model_is_asked_by_a_line(finished: Place) -> None:
    done("generate", finished.run, "--prompt", layouts.code_line(CODES, ["home", "old"]), "--max-new-tokens", 4)


# --- statistics and a run on the same data ---------------------------------------------------------------------------


ASKED = ("--epsilon", 0.5, "--units", "--shares", "text=a,b", "--lengths", "4,8,16,32", "--at", ".5,.9")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """Described, trained, and with a card that shows both; read only."""
    place = make_place(tmp_path_factory.mktemp("described"), base)
    done("describe", place.recipe, *ASKED, "--output", place.root / "describe.json")
    done("train", place.recipe)
    done("card", place.run, "--describe", place.root / "describe.json")
    return place


@pytest.fixture
def export(shown: Place, tmp_path: Path) -> Path:
    """A copy of its export, to be changed."""
    return Path(shutil.copytree(shown.run / "export", tmp_path / "export"))


def test_the_card_of_a_described_run_verifies(shown: Place) -> None:
    verification = verify(shown.run)
    assert not verification.failed, [check for check in verification.checks if check.status == "failed"]
    names = {check.name for check in verification.checks if check.status == "verified"}
    assert {"statistics", "ledger: statistics", "ledger", "run"} <= names
    block = read(shown.run / "export")
    parts = block["statistics"]
    assert len(parts["releases"]) == 4
    assert block["composed"]["spent_epsilon"] > block["plan"]["epsilon"], "the ledger holds both"
    assert block["composed"]["spent_epsilon"] == pytest.approx(parts["with_run"], rel=1e-6)


def changed(block: Any, **release: Any) -> Any:
    first, *rest = block["statistics"]["releases"]
    return {**block, "statistics": {**block["statistics"], "releases": [{**first, **release}, *rest]}}


@pytest.mark.parametrize("forged", ["entry", "value"])
def test_what_is_forged_consistently_is_seen_by_ledger_or_run(shown: Place, tmp_path: Path, forged: str) -> None:
    value = read(shown.run / "export")["statistics"]["releases"][0]["value"]
    release: Any = {"entry": "0" * 16} if forged == "entry" else {"value": {"units": value["units"] + 1}}
    run = Path(shutil.copytree(shown.run, tmp_path / "forged"))
    carry(run / "export", changed(read(run / "export"), **release))
    assert failing(run) == ({"run", "ledger"} if forged == "entry" else {"run"})


def test_an_entry_counts_once(export: Path, shown: Place) -> None:
    block = read(export)
    second = block["statistics"]["releases"][1]["entry"]
    carry(export, changed(block, entry=second))
    assert failing(export, ledger=str(shown.ledger)) == {"ledger"}
