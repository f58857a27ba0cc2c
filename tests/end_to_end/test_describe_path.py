"""Statistics and a run on the same data: one ledger, one card, and a verification that sees what is changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from published import carry, failing, read
from running import Place, done, make_place

from dpllm.verification.verify import verify

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
def test_what_is_forged_consistently_is_seen_by_ledger_or_run(shown: Place, forged: str) -> None:
    value = read(shown.run / "export")["statistics"]["releases"][0]["value"]
    release: Any = {"entry": "0" * 16} if forged == "entry" else {"value": {"units": value["units"] + 1}}
    run = shown.root / "forged"
    shutil.copytree(shown.run, run)
    try:
        carry(run / "export", changed(read(run / "export"), **release))
        assert failing(run) == ({"run", "ledger"} if forged == "entry" else {"run"})
    finally:
        shutil.rmtree(run)


def test_an_entry_counts_once(export: Path, shown: Place) -> None:
    block = read(export)
    second = block["statistics"]["releases"][1]["entry"]
    carry(export, changed(block, entry=second))
    assert failing(export, ledger=str(shown.ledger)) == {"ledger"}
