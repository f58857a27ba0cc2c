"""What a run spends is in the ledger before the step is taken, and stays there however the run ends or is replaced."""

from __future__ import annotations

from typing import Any

import pytest
from running import Place, charged, done, refused, train_until

from dpllm.ledger import Ledger
from dpllm.privacy.engine import StepEngine


def test_an_error_in_a_step_leaves_a_record_and_the_charge(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    train_until(monkeypatch, 1, place.recipe)
    record = place.json("run.json")
    assert (record["status"], record["guarantee"]["holds"]) == ("interrupted", False)
    assert "RuntimeError" in record["guarantee"]["reason"]
    assert charged(place) == (1, 1)


def test_every_step_is_charged_before_it_is_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step = [], StepEngine.step

    def look(engine: StepEngine, *batches: Any) -> Any:
        seen.append(charged(place)[1])
        return step(engine, *batches)

    monkeypatch.setattr(StepEngine, "step", look)
    done("train", place.recipe)
    assert seen == [1, 2, 3, 4]


def test_overwriting_keeps_what_was_spent_even_in_the_run_directory(place: Place) -> None:
    inside = Place(place.run, place.base)  # its ledger lies in the run directory
    place.write({"privacy.ledger": str(inside.ledger), "output_dir": str(place.run)})
    done("train", place.recipe)
    with Ledger(inside.ledger) as ledger:
        first = ledger.spent("notes")
    outlook = done("plan", place.recipe, "--output_dir", place.root / "second").out
    assert f"epsilon {first:.4f} at delta" in " ".join(outlook.replace("│", " ").split())
    done("train", place.recipe, "--overwrite")
    assert charged(inside)[0] == 2
    with Ledger(inside.ledger) as ledger:
        assert ledger.spent("notes") > first
    assert place.json("run.json")["ledger"]["spent_epsilon"] > first


@pytest.mark.parametrize("part", ["private", "export", "private/deeper"])
def test_a_ledger_where_a_new_run_would_delete_it_is_refused(place: Place, part: str) -> None:
    assert "Keep it elsewhere" in refused("train", place.recipe, "--privacy.ledger", place.run / part / "ledger.sqlite")
    assert not place.run.exists()
