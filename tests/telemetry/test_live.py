"""What a run shows while it goes on, without training one: when, to whom, and what happens when nobody can be told.

tests/end_to_end/test_telemetry_runs.py reads what tensorboard got.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import cards
import pytest
from accelerate import PartialState, tracking
from metrics_text import Series, series, telemetry_config

from dpllm.files import write_json
from dpllm.recipe.config import TelemetryConfig
from dpllm.run.directory import RunDir
from dpllm.run.promise import plan_of
from dpllm.telemetry import live, metrics
from dpllm.telemetry.live import Telemetry, Trackers, publish_audit
from dpllm.telemetry.metrics import label


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """In the place of wandb's tracker: it remembers what it was called with, and its ``return_value`` what it got."""
    tracker = Mock(requires_logging_directory=False)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", tracker)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return tracker


def begin_wandb() -> Trackers:
    return Trackers(TelemetryConfig(trackers=["wandb"]), "notes-lora", Path("nowhere"), {"a": 1, "b": None})


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("fails", ["start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_fails_ends_nothing_and_shows_no_password(
    wandb: Mock, fails: str, error: Any, capsys: Any
) -> None:
    getattr(wandb.return_value, fails).side_effect = error("no answer of https://alice:s3cret@mlflow.example/api")
    trackers = begin_wandb()
    for step in (1, 2):
        trackers.log({"x": 0.5, "y": None}, step)
    trackers.finish()
    message = capsys.readouterr().err
    assert message.startswith("dpllm: the tracker wandb failed")
    assert message.count("\n") == 1
    assert "https://mlflow.example/api" in message
    assert "s3cret" not in message
    assert wandb.return_value.method_calls[-1][0] == fails


def test_wandb_sends_nothing_by_itself(wandb: Mock) -> None:
    trackers = begin_wandb()
    trackers.log({"x": 0.5, "y": None}, 3)
    trackers.log({"y": None}, 4)
    trackers.finish()
    wandb.assert_called_once_with("dpllm", name="notes-lora", dir="nowhere", settings=ANY)
    settings = wandb.call_args.kwargs["settings"]
    assert (settings["console"], settings["x_disable_meta"]) == ("off", True)
    sent = [call.start(), call.store_init_configuration({"a": 1}), call.log({"x": 0.5}, step=3), call.finish()]
    assert wandb.return_value.method_calls == sent


@pytest.fixture
def prepared(tmp_path: Path, wandb: Mock) -> SimpleNamespace:
    """A run that is about to begin, with the record that it would leave if its process were killed."""
    (tmp_path / "collector").mkdir()
    config = telemetry_config(tmp_path, textfile=str(tmp_path / "collector"), trackers=["wandb"])
    plan = plan_of(config, 500)
    run = RunDir(tmp_path / "run")
    run.make()
    write_json(run.plan, {**plan.to_json(), "canary_commitment": None})
    finished = cards.record()
    killed = cards.record(
        status="interrupted",
        guarantee={"holds": False, "reason": "its process was killed"},
        ledger={**finished["ledger"], "dataset": "notes", "entry": "0f0f"},
        model={**finished["model"], "name_or_path": "model"},
        steps_taken=None,
        steps_planned=plan.schedule.num_steps,
    )
    write_json(run.run, killed)
    return SimpleNamespace(config=config, run=run)


def begun(p: SimpleNamespace, **options: Any) -> Telemetry:
    telemetry = Telemetry(p.config, p.run, **options)
    telemetry.begin(0, 0.0, base_holds=True)
    return telemetry


def shown(p: SimpleNamespace) -> Series:
    samples: Series = {}
    for file in sorted((p.run.root.parent / "collector").glob("*.prom")):
        of_file = series(file.read_bytes())
        assert not of_file.keys() & samples.keys()
        samples |= of_file
    return samples


def a_step(telemetry: Telemetry, number: int) -> None:
    private = {"step": number, "loss": 765.4321, "units": 1000, "clipped": 987}
    telemetry.step(number, 0.5, 1e-3, private)


def test_a_run_that_is_killed_leaves_its_last_file(prepared: SimpleNamespace) -> None:
    telemetry = begun(prepared)
    model, names = (("model", "run"),), (("dataset", "notes"), ("run_id", "0f0f"))
    assert shown(prepared)["dp_training_state", (*model, ("state", "running"))] == 1
    telemetry._due = 0.0
    a_step(telemetry, 1)
    samples = shown(prepared)  # and no more calls: it was killed
    assert samples["dp_training_step", model] == 1
    assert samples["dp_training_epsilon_consumed", tuple(sorted({*model, *names}))] == 0.5
    # The ledger's own are shown by dpllm ledger metrics.
    hidden = ("ledger", "reservation", "private", "clip")
    assert not [name for name, _ in samples if any(word in name for word in hidden)]


def test_files_are_written_every_few_seconds(prepared: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    telemetry = begun(prepared)
    steps = []
    for number in range(1, 101):  # ten seconds of steps
        clock[0] += 0.1
        a_step(telemetry, number)
        steps.append(shown(prepared)["dp_training_step", (("model", "run"),)])
    assert len(set(steps)) <= 1 + 10 / live.INTERVAL_SECONDS
    assert max(steps) > 50


def test_a_full_disk_is_told_once(prepared: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(metrics, "write", Mock(side_effect=OSError(28, "No space left on device")))
    with begun(prepared) as telemetry:
        for number in (1, 2):
            telemetry._due = 0.0
            a_step(telemetry, number)
        prepared.run.run.unlink()
        telemetry.end()
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_trackers_get_no_path_and_nothing_private(prepared: SimpleNamespace, wandb: Mock, tmp_path: Path) -> None:
    with begun(prepared) as telemetry:
        a_step(telemetry, 1)
        telemetry.evaluated(1, 3.25, 0.5)  # of private data
    options, calls = wandb.call_args.kwargs, wandb.return_value.method_calls
    assert options.pop("dir") == str(prepared.run.private / "trackers")  # where wandb writes, and does not send
    assert [name for name, *_ in calls] == ["start", "store_init_configuration", "log", "finish"]
    assert calls[2] == call.log({"epsilon_consumed": 0.5, "learning_rate": 1e-3}, step=1)
    sent = f"{options} {calls}"
    assert str(tmp_path) not in sent
    assert not {"765.4321", "987", "0.987", "1000", "3.25"} & set(re.findall(r"[\d.]+", sent))


def test_only_the_main_process_shows_anything(prepared: SimpleNamespace, wandb: Mock) -> None:
    with begun(prepared, main=False) as telemetry:
        a_step(telemetry, 1)
        telemetry.end()
    assert shown(prepared) == {}
    wandb.assert_not_called()


@pytest.mark.parametrize(("insecure", "base_holds"), [(3, True), (None, False)], ids=["seeded", "by its base"])
def test_a_run_without_a_guarantee_states_no_epsilon(
    prepared: SimpleNamespace, wandb: Mock, insecure: int | None, base_holds: bool
) -> None:
    privacy = prepared.config.privacy.model_copy(update={"insecure_seed": insecure})
    telemetry = Telemetry(prepared.config.model_copy(update={"privacy": privacy}), prepared.run)
    telemetry.begin(0, 0.0, base_holds=base_holds)
    telemetry._due = 0.0
    a_step(telemetry, 1)
    names = {name for name, _ in shown(prepared)}
    assert not names & {"dp_stated_epsilon", "dp_training_epsilon_consumed", "dp_gradient_clip_fraction"}
    assert "dp_noise_multiplier" in names
    assert wandb.return_value.method_calls[-1] == call.log({"learning_rate": 1e-3}, step=1)


@pytest.mark.parametrize(("insecure", "public", "shown_"), [(None, False, True), (3, False, False), (3, True, True)])
def test_evaluations_tell_of_private_data_only_through_weights_with_a_guarantee(
    prepared: SimpleNamespace, wandb: Mock, insecure: int | None, public: bool, shown_: bool
) -> None:
    """Public evaluation data do not make public what an unprotected model learned from private data."""
    config = prepared.config
    data = config.data.model_copy(update={"public": public, "eval": "held_out.jsonl", "eval_public": True})
    privacy = config.privacy.model_copy(update={"insecure_seed": insecure})
    prepared.config = config.model_copy(update={"data": data, "privacy": privacy})
    telemetry = begun(prepared)
    telemetry.evaluated(1, 2.5, 0.25)
    evaluation = call.log({"eval_loss": 2.5, "eval_accuracy": 0.25}, step=1)
    assert (evaluation in wandb.return_value.method_calls) == shown_


def test_datasets_of_two_places_are_two_series() -> None:
    name = label("/home/alice/notes")
    assert name != label("/home/alice/old/notes")
    assert name.startswith("notes-")
    assert "alice" not in name
    assert label("notes") == "notes"


def test_a_damaged_record_ends_nothing(prepared: SimpleNamespace, capsys: Any) -> None:
    write_json(prepared.run.run, {"status": "completed"})
    publish_audit(prepared.run, prepared.config, {})
    assert "metrics could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("project", ["../../elsewhere", "/tmp/x", "", ".hidden"])
def test_a_project_is_a_name_and_no_path(project: str) -> None:
    with pytest.raises(ValueError, match="project"):
        TelemetryConfig(project=project)


def hand_over(name: str, folder: Path, capsys: Any) -> None:
    PartialState(cpu=True)
    folder.mkdir()
    settings = TelemetryConfig(
        trackers=[name], project="clinic-notes", run_name="first", group="doses", entity="ward-seven"
    )
    trackers = Trackers(settings, "notes-lora", folder, {"stated_epsilon": 8.0, "adapter": "lora"})
    for step in (1, 2):
        trackers.log({"epsilon_consumed": step / 4, "eval_loss": None}, step)
    trackers.finish()
    assert "failed" not in capsys.readouterr().err


def test_wandb_gets_the_names_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    hand_over("wandb", tmp_path / "private", capsys)
    (log,) = (tmp_path / "private").glob("wandb/offline-run-*/*.wandb")
    content, deadline = b"", time.monotonic() + 60
    # Its service writes a little after finish.
    while b"epsilon_consumed" not in content and time.monotonic() < deadline:
        content = log.read_bytes()
        time.sleep(0.1)
    for word in ("clinic-notes", "first", "doses", "ward-seven", "epsilon_consumed"):
        assert word.encode() in content
    for word in (str(tmp_path), "pytest"):
        assert word.encode() not in content
    assert os.listdir(tmp_path) == ["private"]


def test_mlflow_gets_the_names_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    hand_over("mlflow", tmp_path / "private", capsys)
    experiment = mlflow.get_experiment_by_name("clinic-notes")
    (run,) = mlflow.tracking.MlflowClient().search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.data.tags["group"]) == ("first", "doses")
    assert run.data.metrics == {"epsilon_consumed": 0.5}
    assert run.data.params == {"adapter": "lora", "stated_epsilon": "8.0"}
    assert str(tmp_path) not in str(dict(run.data.tags))
