"""Whatever a run is killed in, the ledger has every step that was ever noised, and at most one more for each kill."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import faults
import pytest
from programs import run_program
from running import Json, Place, done, dpllm_, refused, train_until

from dpllm.ledger import Ledger
from dpllm.privacy import accounting, events
from dpllm.privacy.noise import GaussianNoise
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir


def reservations(place: Place) -> dict[str, int]:
    """Each reservation of a place's ledger, and the steps that are charged to it."""
    with Ledger(place.ledger) as ledger:
        assert ledger.verify() == []
        entries = [link.facts["entry"] for link in ledger.history("notes") if link.kind == "reserve"]
        return {entry: ledger.run(entry).steps for entry in entries}


def epsilon_of(place: Place, count: int) -> float:
    plan = place.json("plan.json")
    return accounting.epsilon(
        events.read({**plan["event"], "count": count}), plan["delta"], plan["neighbouring_relation"]
    )


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.full)])
def test_runs_killed_at_random_moments_are_covered_by_the_ledger(
    kills: int, tmp_path: Path, base: Path, seed: int
) -> None:
    """One test for all that is promised of the same runs, so that no process kills them a second time."""
    attempts, places = kill_and_resume(tmp_path, base, kills, seed)
    killed_as_often_as_asked_and_in_every_phase(attempts, kills)
    in_the_exact_case_one_step_is_charged_and_not_noised(attempts, places[0])
    for place in places:
        attempts_of_run = [attempt for attempt in attempts if attempt["run"] == place.root.name]
        the_ledger_has_every_noised_step_and_at_most_one_more_for_each_kill(attempts_of_run, place)
        the_run_is_complete_and_its_epsilon_covers_what_was_noised(place)
        the_adapter_loads_and_nothing_half_written_is_left(place)


def kill_and_resume(root: Path, base: Path, kills: int, seed: int) -> tuple[list[Json], list[Place]]:
    """Every attempt, and the places in which the runs lie."""
    run_program(faults.__file__, root, base, kills, seed, timeout=900)
    attempts = json.loads((root / "attempts.json").read_text())
    return attempts, [Place(root / name, base) for name in {attempt["run"]: 0 for attempt in attempts}]


def noised(place: Place) -> Counter[tuple[str, int]]:
    """How often each step of each reservation was noised, as the children wrote down before they had the noise."""
    log = place.root / "noise.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return Counter((entry, int(step)) for _, entry, step in (line.split() for line in lines))


def killed_as_often_as_asked_and_in_every_phase(attempts: list[Json], kills: int) -> None:
    assert sum(attempt["killed"] for attempt in attempts) >= kills
    assert {attempt["hit"] for attempt in attempts} >= set(faults.TARGETS.values())
    assert kills < 50 or sum(attempt["killed"] and attempt["aim"] == "moment" for attempt in attempts) >= 10


def in_the_exact_case_one_step_is_charged_and_not_noised(attempts: list[Json], place: Place) -> None:
    """Killed between the charge and the update of step 3; resumed, it takes the five steps that remain of eight."""
    assert [attempt["aim"] for attempt in attempts[:2]] == ["itself", "none"]
    assert [attempt["killed"] for attempt in attempts[:2]] == [True, False]
    ((entry, steps),) = reservations(place).items()
    assert steps == faults.STEPS
    assert noised(place) == Counter({(entry, step): 1 for step in (1, 2, 4, 5, 6, 7, 8)})
    assert attempts[1]["seen"].count("+step") == faults.STEPS - 3
    assert any("charged steps were lost" in note for note in place.json("run.json")["deviations"])


def the_ledger_has_every_noised_step_and_at_most_one_more_for_each_kill(attempts: list[Json], place: Place) -> None:
    charged, updates = reservations(place), noised(place)
    assert set(updates.values()) <= {1}  # no step of a reservation is noised twice
    for entry, step in updates:
        assert step <= charged[entry]
    assert 0 <= sum(charged.values()) - len(updates) <= sum(attempt["killed"] for attempt in attempts)


def the_run_is_complete_and_its_epsilon_covers_what_was_noised(place: Place) -> None:
    record, plan = place.json("run.json"), place.json("plan.json")
    assert (record["status"], record["steps_taken"]) == ("completed", plan["num_steps"])
    assert record["guarantee"]["holds"] is True
    charged, updates = reservations(place), noised(place)
    assert charged[record["ledger"]["entry"]] == plan["num_steps"] == faults.STEPS
    for entry in charged:
        assert epsilon_of(place, sum(name == entry for name, _ in updates)) <= plan["epsilon"]
    assert epsilon_of(place, len(updates)) <= record["ledger"]["spent_epsilon"]


def the_adapter_loads_and_nothing_half_written_is_left(place: Place) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place.base), place.run / "export")
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    run = RunDir(place.run)
    if run.checkpoints():  # killed between run.json and their removal: whoever types --resume is told, and they go
        assert "the run is complete" in refused("train", place.recipe, "--resume")
    assert not run.checkpoints()
    assert not list(run.root.glob(".export.*"))


def test_a_run_killed_before_it_removes_its_checkpoints_is_complete_and_loses_them_on_resume(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write({"train.steps": 2, "train.checkpoint_every": 1})

    def die(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: (die if path == run.resume else remove)(path, **more))
    run = RunDir(place.run)
    dpllm_("train", place.recipe)
    monkeypatch.undo()
    assert (place.json("run.json")["status"], len(run.checkpoints())) == ("completed", 2)
    assert "the run is complete" in refused("train", place.recipe, "--resume")
    assert not run.checkpoints()


TOTAL = 8


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each noised sum."""
    seen: list[int] = []
    draw = GaussianNoise.draw

    def drawing(stream: GaussianNoise, size: int) -> Any:
        seen.append(size)
        return draw(stream, size)

    monkeypatch.setattr(GaussianNoise, "draw", drawing)
    return seen


def twin(place: Place, name: str) -> tuple[Path, Path]:
    """A copy of the run directory with a recipe of its own, and the same ledger."""
    run = place.root / name
    shutil.copytree(place.run, run)
    recipe = place.root / f"{name}.yaml"
    for path, source in ((recipe, place.recipe), (run / "config.yaml", run / "config.yaml")):
        path.write_text(source.read_text().replace(f"{place.run}\n", f"{run}\n"))
    return run, recipe


def test_resuming_one_checkpoint_twice_never_takes_more_steps_than_are_charged(
    place: Place, monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    place.write({"train.steps": TOTAL, "train.checkpoint_every": 1})
    train_until(monkeypatch, 4, place.recipe)
    (_, second), (third_run, third) = twin(place, "second"), twin(place, "third")
    assert (len(updates), list(reservations(place).values())) == (3, [4])  # the step that failed stays charged

    train_until(monkeypatch, 2, place.recipe, "--resume")  # step 5, and step 6 fails
    assert (len(updates), list(reservations(place).values())) == (4, [6])

    done("train", second, "--resume")  # from the checkpoint of step 3: only steps 7 and 8 are left
    assert (len(updates), list(reservations(place).values())) == (6, [TOTAL])

    answer = dpllm_("train", third, "--resume")  # nothing is left
    assert answer.code in (0, 3), answer.err
    assert (len(updates), list(reservations(place).values())) == (6, [TOTAL])
    record = json.loads((third_run / "run.json").read_text())
    assert record["status"] != "completed" or any("5 charged steps were lost" in note for note in record["deviations"])


def test_a_ledger_that_was_replaced_by_an_older_copy_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    place.write({"train.steps": TOTAL, "train.checkpoint_every": 1})
    older = place.root / "older.sqlite"
    save = checkpoint.save_resume

    def copying(*arguments: Any) -> None:
        if arguments[-1].step == 2:  # its chain has the same head, and two steps less
            source, target = sqlite3.connect(place.ledger), sqlite3.connect(older)
            source.backup(target)
            source.close()
            target.close()
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save_resume", copying)
    train_until(monkeypatch, 5, place.recipe)
    for content in (older.read_bytes(), b""):
        for path in place.root.glob("ledger.sqlite*"):
            path.unlink()
        place.ledger.write_bytes(content)
        assert "replaced by an older copy" in refused("train", place.recipe, "--resume", code=3)
        assert len(updates) == 4
