"""The trackers themselves, offline: what a run hands over arrives under the names of the recipe, in the private folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from accelerate import PartialState

from dpllm.recipe.config import TelemetryConfig
from dpllm.telemetry.live import Trackers


def hand_over(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    hand_over("wandb", tmp_path / "kept", capsys)
    (log,) = (tmp_path / "kept").glob("wandb/offline-run-*/*.wandb")
    content, deadline = b"", time.monotonic() + 60
    # Its service writes a little after finish.
    while b"epsilon_consumed" not in content and time.monotonic() < deadline:
        content = log.read_bytes()
        time.sleep(0.1)
    for word in ("clinic-notes", "first", "doses", "ward-seven", "epsilon_consumed"):
        assert word.encode() in content
    for word in (str(tmp_path), "pytest"):
        assert word.encode() not in content
    assert os.listdir(tmp_path) == ["kept"]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    hand_over("tensorboard", tmp_path / "kept", capsys)
    events = EventAccumulator(str(tmp_path / "kept" / "clinic-notes"))
    events.Reload()
    assert [event.value for event in events.Scalars("epsilon_consumed")] == [0.25, 0.5]
    assert os.listdir(tmp_path) == ["kept"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    hand_over("mlflow", tmp_path / "kept", capsys)
    experiment = mlflow.get_experiment_by_name("clinic-notes")
    (run,) = mlflow.tracking.MlflowClient().search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.data.tags["group"]) == ("first", "doses")
    assert run.data.metrics == {"epsilon_consumed": 0.5}
    assert run.data.params == {"adapter": "lora", "stated_epsilon": "8.0"}
    assert str(tmp_path) not in str(dict(run.data.tags))
