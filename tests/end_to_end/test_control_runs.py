"""A run whose texts stand behind control codes, from describe to card: it stops, goes on, is evaluated, audited and asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
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
    place.write(
        {
            "data.control": CODES,
            "data.eval": str(tiny.write_rows(place.root / "data" / "eval.jsonl", coded(8, 500))),
            "train.checkpoint_every": 1,
            "audit.canaries": CANARIES,
        }
    )
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
