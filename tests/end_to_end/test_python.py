"""dpllm from a notebook: recipes as dicts, rows that the program holds, callbacks of the Trainer, short words for each value."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import tiny
import torch
import yaml
from accelerate import PartialState
from running import NUM_ROWS, SENTINEL, STEPS, Place, charged, done, make_place, refused, rows
from safetensors.torch import load_file
from transformers import TrainerCallback

import dpllm
from dpllm.errors import ConfigError
from dpllm.telemetry.live import Callbacks


class Listening(TrainerCallback):
    """Remembers what it is told, and asks to stop after some step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[Any] = []
        self.stop_after = stop_after

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(("begin", state.global_step, state.max_steps, sorted(more)))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
        self.calls.append(("log", sorted(logs), sorted(more)))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(("step", state.global_step, sorted(more)))
        control.should_training_stop = state.global_step == self.stop_after

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(("end", state.global_step, sorted(more)))


def as_dict(recipe: Path) -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load(recipe.read_text("utf-8"))
    del result["data"]["train"]
    return result


def test_rows_in_memory_train_as_a_file_does_and_callbacks_see_released_values_alone(
    tmp_path: Path, base: Path
) -> None:
    seed = {"privacy.insecure_seed": 5}
    from_file = make_place(tmp_path / "file", base, seed)
    dpllm.train(from_file.recipe)
    held = make_place(tmp_path / "held", base, seed)
    recipe, listening = as_dict(held.recipe), Listening()
    before = yaml.safe_dump(recipe)
    table = pd.DataFrame(rows())
    assert dpllm.plan(recipe, train=table).plan == dpllm.plan(from_file.recipe).plan
    assert not (held.root / "run-rows").exists()  # planning keeps no copy
    run = dpllm.train(recipe, train=table, callbacks=[listening])
    assert yaml.safe_dump(recipe) == before  # the caller's own
    left, right = (load_file(place.run / "export" / "adapter_model.safetensors") for place in (from_file, held))
    assert all((left[name] == right[name]).all() for name in left)
    of_steps = [
        (("log", ["learning_rate"], []), ("step", step + 1, [])) for step in range(STEPS)
    ]  # a known seed: no epsilon
    calls = [("begin", 0, STEPS, []), *itertools.chain(*of_steps), ("end", STEPS, [])]
    assert listening.calls == calls
    assert (run.status, charged(held)) == ("completed", (1, STEPS))
    for value in (run, dpllm.plan(recipe, train=table), dpllm.load_recipe(from_file.recipe)):
        assert len(repr(value)) < 600
        assert SENTINEL not in repr(value)
    assert "<td" in run._repr_html_()
    assert "already holds a run" in dpllm.plan(recipe, train=table)._repr_html_()


def test_a_callback_stops_the_run_after_its_step_and_what_was_taken_is_charged(tmp_path: Path, base: Path) -> None:
    place = make_place(tmp_path, base)
    listening = Listening(stop_after=2)
    run = dpllm.train(place.recipe, callbacks=[listening])
    assert listening.calls[1] == ("log", ["epsilon_consumed", "learning_rate"], [])
    assert (run.status, run.record.steps_taken) == ("interrupted", 2)
    assert charged(place) == (1, 2)
    with pytest.raises(ConfigError, match="TrainerCallback"):
        dpllm.train(place.recipe, callbacks=[print], resume=True)  # type: ignore[list-item]
    assert dpllm.train(place.recipe, resume=True).status == "completed"


def test_rows_in_memory_need_a_name_in_the_ledger(tmp_path: Path, base: Path) -> None:
    place = make_place(tmp_path, base)
    recipe = as_dict(place.recipe)
    del recipe["privacy"]["dataset"]
    with pytest.raises(ConfigError, match="dataset"):
        dpllm.plan(recipe, train=rows(NUM_ROWS))
    assert not list(tmp_path.glob("*-rows"))


@pytest.mark.parametrize("wrong", [None, 3, ["recipe.yaml"], {"train": {"steps": 0}}, {}])
def test_what_is_no_recipe_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        dpllm.load_recipe(wrong)


def test_rows_that_are_given_are_private_whatever_the_recipe_says_of_its_own(tmp_path: Path, base: Path) -> None:
    own = tiny.write_rows(tmp_path / "own.jsonl", rows(10, start=900))
    public = {"data.public": True, "data.eval_public": True, "data.eval": str(own)}
    place = make_place(tmp_path, base, public)
    for recipe in (place.recipe, dpllm.load_recipe(place.recipe), yaml.safe_load(place.recipe.read_text("utf-8"))):
        result = dpllm.plan(recipe, train=rows(), eval=rows(10, start=500)).config.data
        assert (result.public, result.eval_public) == (False, False)
    result = dpllm.plan(as_dict(place.recipe), train=rows()).config.data  # without data.train it speaks of these rows
    assert (result.public, result.eval_public) == (True, True)


def test_callbacks_leave_the_state_of_accelerate_alone_and_are_told_the_recipe(tmp_path: Path, base: Path) -> None:
    place = make_place(tmp_path, base, {"train.learning_rate": 0.0123})
    state = PartialState()
    before, state.device = dict(vars(state)), torch.device("meta")  # say a GPU
    try:
        made = Callbacks([Listening()], dpllm.load_recipe(place.recipe))
        assert PartialState().device == torch.device("meta")
    finally:
        vars(state).update(before)
    assert (made._settings.learning_rate, made._settings.to_dict()["output_dir"]) == (0.0123, str(place.run))


@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_a_run_that_lies_there_is_planned_as_another_one_like_it(finished: Place, name: str) -> None:
    planned = json.loads(done("plan", finished.run / name, "--json").out)
    assert planned["refusals"] == []
    assert planned["epsilon"] == finished.json("plan.json")["epsilon"]
    assert planned["ledger"]["after"] > planned["ledger"]["spent"] > 0
    assert "already holds a run" in refused("plan", finished.recipe)


def test_a_run_that_a_callback_stops_compares_the_ranks_weights(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Mock()
    monkeypatch.setattr("dpllm.model.processes.check_same_weights", check)
    dpllm.train(make_place(tmp_path, base).recipe, callbacks=[Listening(stop_after=2)])
    assert [call.args[1] for call in check.call_args_list] == [2]


def test_an_error_in_a_callbacks_last_call_leaves_a_completed_run(tmp_path: Path, base: Path) -> None:
    place, fails = make_place(tmp_path, base), Listening()
    fails.on_train_end = Mock(side_effect=OSError("my own file"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="my own file"):
        dpllm.train(place.recipe, callbacks=[fails])
    assert place.json("run.json")["status"] == "completed"
    assert not list((place.run / "private" / "cache").rglob("tokens*"))


def test_an_epsilon_that_is_lowered_to_the_budget_is_named(tmp_path: Path, base: Path) -> None:
    place = make_place(tmp_path, base, {"privacy.fit_budget": True})
    terms = ("--epsilon", 4, "--delta", 1e-3, "--by", "alice", "--reason", "a test", "--ledger", place.ledger)
    done("ledger", "init", "notes", *terms)
    result = dpllm.plan(place.recipe)
    assert result.plan is not None
    assert result.plan.epsilon < 4 < result.plan.target_epsilon
    for words in (str(result), result._repr_html_(), " ".join(done("plan", place.recipe).out.split())):
        assert "epsilon is lowered to" in words.replace("│", "").replace("  ", " ")
    assert "Ledger: notes: 0% of epsilon 4 used" in str(result)
    assert not dpllm.plan(dpllm.load_recipe(place.recipe, {"privacy.noise_multiplier": 20.0})).lowered


def test_a_printed_recipe_holds_no_address_of_the_ledger(tmp_path: Path, base: Path) -> None:
    place = make_place(tmp_path, base, {"privacy.ledger": "postgresql://alice:s3cret@host/ledger"})
    recipe = dpllm.load_recipe(place.recipe)
    assert "s3cret" not in repr(recipe) + str(recipe)
