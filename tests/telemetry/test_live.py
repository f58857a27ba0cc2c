"""What a run shows while it goes on, without training one: when, to whom, and what happens when nobody can be told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cards
import pytest
from accelerate import tracking
from metrics_text import Series, series, telemetry_config

from dpllm.files import write_json
from dpllm.recipe.config import TelemetryConfig
from dpllm.run.directory import RunDir
from dpllm.run.promise import plan_of
from dpllm.telemetry import live, metrics
from dpllm.telemetry.live import Telemetry, Trackers, publish_audit
from dpllm.telemetry.metrics import label

# --- trackers --------------------------------------------------------------------------------------------------------


class Stub:
    """A tracker that remembers, in place of wandb."""

    name, requires_logging_directory = "wandb", False
    made: list[Stub]
    fail: str | None = None
    error: BaseException = RuntimeError("the tracker is down")

    def __init__(self, project: str, **options: Any) -> None:
        self.calls: list[Any] = [("init", project, options)]
        Stub.made.append(self)

    def _say(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fail == call[0]:
            raise self.error

    def start(self) -> None:
        self._say("start")

    def store_init_configuration(self, values: Any) -> None:
        self._say("about", values)

    def log(self, values: Any, step: int) -> None:
        self._say("log", step, values)

    def finish(self) -> None:
        self._say("finish")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stub]]:
    Stub.made, Stub.fail = [], None
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Stub)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    yield Stub
    Stub.fail = None


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("fails", ["start", "about", "log", "finish"])
def test_a_tracker_that_fails_ends_nothing(
    stub: type[Stub],
    fails: str,
    error: type[BaseException],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub.fail = fails
    monkeypatch.setattr(stub, "error", error("the tracker is down"))
    trackers = Trackers(TelemetryConfig(trackers=["wandb"]), "notes-lora", Path("nowhere"), {"a": 1, "b": None})
    for step in (1, 2):
        trackers.log({"x": 0.5, "y": None}, step)
    trackers.finish()
    message = capsys.readouterr().err
    assert message.startswith("dpllm: the tracker wandb failed")
    assert message.count("\n") == 1
    assert [call[0] for call in stub.made[0].calls][-1] == fails


def test_wandb_sends_nothing_by_itself(stub: type[Stub]) -> None:
    trackers = Trackers(TelemetryConfig(trackers=["wandb"]), "notes-lora", Path("nowhere"), {"a": 1, "b": None})
    trackers.log({"x": 0.5, "y": None}, 3)
    trackers.log({"y": None}, 4)
    trackers.finish()
    first, *later = stub.made[0].calls
    assert first[1:] == ("dpllm", {"name": "notes-lora", "dir": "nowhere", "settings": first[2]["settings"]})
    assert first[2]["settings"]["console"] == "off"
    assert first[2]["settings"]["x_disable_meta"] is True
    assert later == [("start",), ("about", {"a": 1}), ("log", 3, {"x": 0.5}), ("finish",)]


# --- a run, without training -----------------------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path) -> SimpleNamespace:
    """A run that is about to begin, with the record that it would leave if its process were killed."""
    (tmp_path / "collector").mkdir()
    config = telemetry_config(tmp_path, textfile=str(tmp_path / "collector"), trackers=["wandb"])
    plan = plan_of(config, 500)
    run = RunDir(tmp_path / "run")
    run.make()
    write_json(run.plan, {**plan.to_json(), "canary_commitment": None})
    finished = cards.record()
    record = {
        **finished,
        "status": "interrupted",
        "guarantee": {"holds": False, "reason": "its process was killed"},
        "ledger": {**finished["ledger"], "dataset": "notes", "entry": "0f0f"},
        "model": {**finished["model"], "name_or_path": "model"},
        "steps_taken": None,
        "steps_planned": plan.schedule.num_steps,
    }
    write_json(run.run, record)
    return SimpleNamespace(config=config, run=run)


def begun(p: SimpleNamespace, **more: Any) -> Telemetry:
    telemetry = Telemetry(p.config, p.run, **more)
    telemetry.begin(0, 0.0, base_holds=True)
    return telemetry


def shown(p: SimpleNamespace) -> Series:
    samples: Series = {}
    for file in sorted((p.run.root.parent / "collector").glob("*.prom")):
        of_file = series(file.read_bytes())
        assert not of_file.keys() & samples.keys()
        samples |= of_file
    return samples


def a_step(telemetry: Telemetry, number: int, **changes: Any) -> None:
    private = {"step": number, "loss": 765.4321, "units": 1000, "clipped": 987, **changes}
    telemetry.step(number, 0.5, 1e-3, private)


def test_a_run_that_is_killed_leaves_its_last_file(prepared: SimpleNamespace, stub: type[Stub]) -> None:
    telemetry = begun(prepared)
    model, names = (("model", "run"),), (("dataset", "notes"), ("run_id", "0f0f"))
    assert shown(prepared)["dp_training_state", (("model", "run"), ("state", "running"))] == 1
    telemetry._due = 0.0
    a_step(telemetry, 1)
    samples = shown(prepared)  # and no more calls: it was killed
    assert samples["dp_training_step", model] == 1
    assert samples["dp_training_epsilon_consumed", tuple(sorted({*model, *names}))] == 0.5
    # The ledger's own are shown by dpllm ledger metrics.
    hidden = ("ledger", "reservation", "private", "clip")
    assert not [name for name, _ in samples if any(word in name for word in hidden)]


def test_files_are_written_every_few_seconds_at_most(
    prepared: SimpleNamespace, stub: type[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    prepared: SimpleNamespace, stub: type[Stub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "write", Mock(side_effect=OSError(28, "No space left on device")))
    with begun(prepared) as telemetry:
        for number in (1, 2):
            telemetry._due = 0.0
            a_step(telemetry, number)
        prepared.run.run.unlink()
        telemetry.end()
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_trackers_get_no_path_and_nothing_private(prepared: SimpleNamespace, stub: type[Stub], tmp_path: Path) -> None:
    with begun(prepared) as telemetry:
        a_step(telemetry, 1)
        telemetry.evaluated(1, 3.25, 0.5)  # of private data
    calls = stub.made[0].calls
    assert calls[0][2].pop("dir") == str(prepared.run.private / "trackers")  # where wandb writes, and does not send
    assert [call[0] for call in calls] == ["init", "start", "about", "log", "finish"]
    assert calls[3][1:] == (1, {"epsilon_consumed": 0.5, "learning_rate": 1e-3})
    assert str(tmp_path) not in json.dumps(calls[:4])
    assert not {"765.4321", "987", "0.987", "1000", "3.25"} & set(json.dumps(calls).replace(",", " ").split())


def test_only_the_main_process_shows_anything(prepared: SimpleNamespace, stub: type[Stub]) -> None:
    with begun(prepared, main=False) as telemetry:
        a_step(telemetry, 1)
        telemetry.end()
    assert shown(prepared) == {}
    assert stub.made == []


@pytest.mark.parametrize(("insecure", "base_holds"), [(3, True), (None, False)], ids=["seeded", "by its base"])
def test_a_run_without_a_guarantee_states_no_epsilon(
    prepared: SimpleNamespace, stub: type[Stub], insecure: int | None, base_holds: bool
) -> None:
    privacy = prepared.config.privacy.model_copy(update={"insecure_seed": insecure})
    telemetry = Telemetry(prepared.config.model_copy(update={"privacy": privacy}), prepared.run)
    telemetry.begin(0, 0.0, base_holds=base_holds)
    telemetry._due = 0.0
    a_step(telemetry, 1)
    names = {name for name, _ in shown(prepared)}
    assert not names & {"dp_stated_epsilon", "dp_training_epsilon_consumed", "dp_gradient_clip_fraction"}
    assert "dp_noise_multiplier" in names
    assert stub.made[0].calls[-1] == ("log", 1, {"learning_rate": 1e-3})


@pytest.mark.parametrize(("insecure", "public", "shown_"), [(None, False, True), (3, False, False), (3, True, True)])
def test_evaluations_tell_of_private_data_only_through_weights_with_a_guarantee(
    prepared: SimpleNamespace, stub: type[Stub], insecure: int | None, public: bool, shown_: bool
) -> None:
    """Public evaluation data do not make public what an unprotected model learned from private data."""
    config = prepared.config
    data = config.data.model_copy(update={"public": public, "eval": "held_out.jsonl", "eval_public": True})
    privacy = config.privacy.model_copy(update={"insecure_seed": insecure})
    prepared.config = config.model_copy(update={"data": data, "privacy": privacy})
    telemetry = begun(prepared)
    telemetry.evaluated(1, 2.5, 0.25)
    assert (("log", 1, {"eval_loss": 2.5, "eval_accuracy": 0.25}) in stub.made[0].calls) == shown_


def test_datasets_of_two_places_are_two_series() -> None:
    one, two = label("/home/alice/notes"), label("/home/alice/old/notes")
    assert one != two
    assert "alice" not in one
    assert one.startswith("notes-")
    assert label("notes") == "notes"


def test_a_damaged_record_ends_nothing(prepared: SimpleNamespace, stub: type[Stub], capsys: Any) -> None:
    write_json(prepared.run.run, {"status": "completed"})
    publish_audit(prepared.run, prepared.config, {})
    assert "metrics could not be written" in capsys.readouterr().err


def test_the_message_of_a_tracker_that_failed_holds_no_password(
    stub: type[Stub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.fail = "start"
    monkeypatch.setattr(stub, "error", RuntimeError("no answer of https://alice:s3cret@mlflow.example/api"))
    Trackers(TelemetryConfig(trackers=["wandb"]), "notes-lora", Path("nowhere"), {})
    message = capsys.readouterr().err
    assert "https://mlflow.example/api" in message
    assert "s3cret" not in message


@pytest.mark.parametrize("project", ["../../elsewhere", "/tmp/x", "a/b", "", ".hidden"])
def test_a_project_is_a_name_and_no_path(project: str) -> None:
    with pytest.raises(ValueError, match="project"):
        TelemetryConfig(project=project)
