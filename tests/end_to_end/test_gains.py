"""What a run may start from and train by beside the defaults: a frozen first factor, momentum, an adapter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ledger_stores import adopt
from running import Place, calls, charged, done, dpllm_, edit_json, train_until
from safetensors.torch import load_file, save_file

from dpllm.errors import ConfigError
from dpllm.files import digest, sha256
from dpllm.model import adapters, loading
from dpllm.privacy.engine import StepEngine
from dpllm.recipe.config import load_config
from dpllm.run import base_model, checkpoint


def test_a_frozen_first_factor_is_published_as_it_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that goes on where another random start would be drawn."""
    place.write({"adapter.lora_a": "frozen", "train.checkpoint_every": 1})
    started = loading.build(load_config(place.recipe), torch.device("cpu")).state_dict()
    train_until(monkeypatch, 3, place.recipe)
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda _: manual_seed(1))
    assert "adapter.lora_a" in dpllm_("train", place.recipe, "--resume", "--adapter.lora_a", "trained").err
    done("train", place.recipe, "--resume")
    place.does("card", "merge")
    done("verify", place.run / "export")
    weights = load_file(place.run / "export" / "adapter_model.safetensors")
    for name, value in weights.items():
        assert value.equal(started[name.replace(".weight", ".default.weight")]) == (".lora_A." in name), name
    trained = sum(value.numel() for name, value in weights.items() if ".lora_B." in name)
    assert place.json("run.json")["model"]["trainable_parameters"] == trained
    assert "lora_a frozen" in place.card


def test_momentum_goes_on_where_it_stopped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write({"train.optimizer": "sgd", "train.momentum": 0.9, "train.checkpoint_every": 1})
    train_until(monkeypatch, 3, place.recipe)
    optimizers = calls(monkeypatch, checkpoint, "load_resume", lambda run, net, optimizer: optimizer)

    def remembered(*_: Any) -> list[bool]:
        return [bool(state["momentum_buffer"].any()) for state in optimizers[0].state.values()]

    momentum = calls(monkeypatch, StepEngine, "step", remembered)
    done("train", place.recipe, "--resume")
    assert [group["momentum"] for group in optimizers[0].param_groups] == [0.9]
    assert momentum[0]
    assert all(momentum[0])


# --- from an adapter that was trained before -------------------------------------------------------------------------


def disown(place: Place) -> Path:
    """The adapter, which says nothing of its privacy any more."""
    folder = place.root / "start" / "export"
    for name in ("privacy.json", "README.md"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def started(finished: Place, tmp_path: Path) -> Place:
    """The finished run's ledger and recipe, and its adapter to start from in ``start/export``."""
    place = Place(tmp_path / "place", finished.base)
    place.root.mkdir()
    shutil.copytree(finished.run / "export", place.root / "start" / "export")
    shutil.copytree(finished.root / "data", place.root / "data")
    shutil.copy(finished.ledger, place.ledger)
    adopt(place.ledger)
    place.write({"model.adapter": str(place.root / "start" / "export")})
    return place


def refusal(place: Place, *more: object, commands: tuple[str, ...] = ("plan", "train")) -> str:
    """What each of the commands says, with the same exit code."""
    answers = [dpllm_(command, place.recipe, *more) for command in commands]
    assert {answer.code for answer in answers} <= {2, 3}, answers
    assert len({(answer.code, answer.err.split(": ", 1)[1]) for answer in answers}) == 1, answers
    return " ".join(answers[0].err.split())


def test_a_run_starts_with_the_weights_of_the_adapter_and_states_what_both_cost(started: Place) -> None:
    folder = started.root / "start" / "export"
    saved = load_file(folder / "adapter_model.safetensors")
    net = loading.build(load_config(started.recipe), torch.device("cpu"))
    begins = net.state_dict()
    assert all(value.equal(begins[name.replace(".weight", ".default.weight")]) for name, value in saved.items())
    assert any(bool(value.any()) for name, value in saved.items() if ".lora_B." in name)
    done("train", started.recipe)
    block = json.loads((folder / "privacy.json").read_text("utf-8"))
    report, own = started.json("run.json")["lineage"], started.json("plan.json")["epsilon"]
    assert (report["base"]["name"], report["base"]["adapter"]) == ("start/export", True)
    assert report["base"]["entry"] == block["composed"]["entry"]
    assert report["base"]["files_digest"] == digest(block["files"])
    assert own < report["composed"]["epsilon"] <= own + block["plan"]["epsilon"]
    done("card", started.run)
    done("verify", started.run / "export")
    text = started.card
    assert "| Adapter that training started from: `start/export`" in text
    assert report["base"]["files_digest"] in text
    assert "its own privacy statement" not in text  # of the base model, which has none
    # A third generation: the first one's adapter is needed no more.
    shutil.rmtree(started.root / "start")
    done("merge", started.run)
    third = ("--model.adapter", started.run / "export", "--output_dir", started.root / "third")
    done("train", started.recipe, *third)
    record = json.loads((started.root / "third" / "run.json").read_text("utf-8"))
    assert [item["adapter"] for item in (record["lineage"]["base"], *record["lineage"]["ancestors"])] == [True, True]
    assert record["lineage"]["composed"]["epsilon"] > report["composed"]["epsilon"]


def test_an_adapter_without_a_statement_is_of_unknown_data(started: Place) -> None:
    folder = disown(started)
    done("train", started.recipe)
    record = started.json("run.json")
    base = record["lineage"]["base"]
    assert (base["guarantee"], base["dataset"], base["adapter"]) == (False, None, True)
    assert base["files_digest"] == digest({name: sha256(folder / name) for name in base_model.ADAPTER})
    assert record["guarantee"]["holds"] is True
    deviation = "start/export, from which this model was made, states no"
    assert any(note.startswith(deviation) for note in record["deviations"])
    done("card", started.run)
    done("verify", started.run / "export")
    assert "On which data the first was trained is not known." in started.card
    assert "None of this was done on the dataset" not in started.card


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--adapter.r", 4), "has r 2, and adapter.r is 4"),
        (("--adapter.alpha", 4), "Type --adapter.alpha 32"),
        (("--adapter.use_rslora", "true"), "Type --adapter.use_rslora False"),
        (("--model.name_or_path", "builtin:tiny"), "Type --model.name_or_path tiny-base"),
        (("--model.adapter", "nowhere"), "holds no adapter_config.json"),
    ],
)
def test_an_adapter_of_other_numbers_is_refused(started: Place, changes: tuple[Any, ...], says: str) -> None:
    before = charged(started)
    assert says in refusal(started, *changes)
    assert charged(started) == before


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "IA3", "has peft_type IA3, which a recipe cannot"),
        ("alpha_pattern", {"q_proj": 4}, "has alpha_pattern {'q_proj': 4}, which"),
        ("init_lora_weights", "pissa", "has init_lora_weights pissa, which"),
        ("use_dora", True, "has use_dora True, which"),
        ("of_a_later_version", 1, "has of_a_later_version 1, which"),
        ("r", True, "has r True, and adapter.r is 2"),
        ("lora_alpha", "32", "has lora_alpha '32', and adapter.alpha is"),
        ("base_model_name_or_path", ["x"], "has base_model_name_or_path ['x'], and"),
        ("init_lora_weights", "gaussian", None),
        ("base_model_name_or_path", None, None),
    ],
)
def test_settings_that_mean_another_function_are_refused(started: Place, key: str, value: Any, says: str) -> None:
    edit_json(disown(started) / "adapter_config.json", **{key: value})
    if says is None:
        assert base_model.of_base(load_config(started.recipe)) is not None
    else:
        with pytest.raises(ConfigError, match=re.escape(says)):
            base_model.of_base(load_config(started.recipe))


def test_damaged_weights_are_refused(started: Place) -> None:
    folder = started.root / "start" / "export"
    net = loading.build(load_config(started.recipe), torch.device("cpu"))
    weights = folder / "adapter_model.safetensors"
    tensors, content = load_file(weights), weights.read_bytes()
    for damaged in (b"", b"garbage", content[:-100], None):
        weights.unlink() if damaged is None else weights.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot be read .* Use an undamaged copy"):
            adapters.start_from(net, folder)
    name, tensor = max(tensors.items())
    for broken in (tensor * float("nan"), tensor / 0, tensor.to(torch.int8), tensor.to(torch.cfloat)):
        save_file({**tensors, name: broken}, weights)
        with pytest.raises(ConfigError, match=f"{name} has a value that is not finite"):
            adapters.start_from(net, folder)
    save_file(tensors, weights)
    adapters.start_from(net, folder, sha256(weights))


@pytest.mark.parametrize("stated", [True, False])
def test_weights_exchanged_after_they_were_judged_are_refused(
    started: Place, stated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, before = started.root / "start" / "export" / "adapter_model.safetensors", charged(started)
    if not stated:
        disown(started)

    def exchange(*_: Any) -> None:
        save_file({name: value + 0.25 for name, value in load_file(weights).items()}, weights)

    calls(monkeypatch, loading, "build", exchange)
    assert "its weights changed while the run was starting" in refusal(started, commands=("train",))
    assert charged(started) == before


def test_an_adapter_of_other_layers_is_refused(started: Place) -> None:
    message = refusal(started, "--adapter.target_modules", "[q_proj, v_proj]", commands=("train",))
    assert "--adapter.target_modules '[down_proj, gate_proj, k_proj" in message


def test_changed_weights_and_pickle_are_refused(started: Place) -> None:
    folder = started.root / "start" / "export"
    weights = folder / "adapter_model.safetensors"
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    assert "adapter_model.bin of the adapter export is not the file" in refusal(started)
    weights.rename(folder / "kept")
    assert "wrote as safetensors: other files may run code" in refusal(started)
    (folder / "adapter_model.bin").unlink()
    (folder / "kept").rename(weights)
    save_file({name: value + 1 for name, value in load_file(weights).items()}, weights)
    assert "adapter_model.safetensors of the adapter export is not the file" in refusal(started)


def test_a_resumed_run_started_from_the_adapter_that_it_names(started: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    started.write({"model.adapter": str(started.root / "start" / "export"), "train.checkpoint_every": 1})
    train_until(monkeypatch, 3, started.recipe)
    folder = started.root / "start" / "export"
    block = (folder / "privacy.json").rename(started.root / "kept")
    card = (folder / "README.md").rename(started.root / "card")
    assert "no longer holds the files" in refusal(started, "--resume", commands=("train",))
    block.rename(folder / "privacy.json")
    card.rename(folder / "README.md")
    done("train", started.recipe, "--resume")
    assert started.json("run.json")["lineage"]["base"]["adapter"] is True
