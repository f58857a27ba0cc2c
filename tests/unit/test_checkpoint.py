"""A checkpoint is whole or refused, and holds no randomness."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dpllm.checkpoint import load_resume, save_resume, weight_hashes
from dpllm.errors import ConfigError, Refused
from dpllm.rundir import RunDir, read_json


def pair(seed: int, *, names: tuple[str, ...] = ("a", "b")) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
    net["a"].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return net, optimizer


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.make()
    save_resume(run, *pair(1), 7, "entry-1", 0.3)
    return run


def test_what_is_saved_comes_back(run: RunDir) -> None:
    saved, moments = pair(1)
    net, optimizer = pair(2)
    frozen = net["a"].bias.clone()
    state = load_resume(run, net, optimizer)
    assert (state["step"], state["entry"], state["max_grad_norm"]) == (7, "entry-1", 0.3)
    for (name, old), new in zip(saved.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(old, new) == (name != "a.bias")
    assert torch.equal(net["a"].bias, frozen)
    assert repr(optimizer.state_dict()) == repr(moments.state_dict())


@pytest.mark.parametrize("name", ["trainable.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", ["truncated", "edited", "removed", "empty"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(run: RunDir, name: str, damage: str) -> None:
    path = run.resume / name
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes({"truncated": content[:-10], "edited": flipped, "empty": b""}[damage])
    net, optimizer = pair(2)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(Refused, match=r"truncated or was edited.*--overwrite"):
        load_resume(run, net, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_damaged_state_is_refused(run: RunDir) -> None:
    path = run.resume / "state.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ConfigError, match="damaged"):
        load_resume(run, *pair(2))
    path.write_text(json.dumps({"step": 7, "entry": "entry-1"}))
    with pytest.raises(Refused):
        load_resume(run, *pair(2))


def test_a_checkpoint_of_other_layers_is_refused(run: RunDir) -> None:
    with pytest.raises(Refused, match="trains other layers than the recipe"):
        load_resume(run, *pair(2, names=("a", "c")))


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        load_resume(RunDir(tmp_path), *pair(2))


def test_the_state_names_the_hashes_of_what_lies_beside_it(run: RunDir) -> None:
    state = read_json(run.resume / "state.json")
    for key, name in (("trainable", "trainable.safetensors"), ("optimizer", "optimizer.pt")):
        assert state[key] == hashlib.sha256((run.resume / name).read_bytes()).hexdigest()


def test_a_checkpoint_holds_no_seed_and_no_generator_state(run: RunDir) -> None:
    assert {path.name for path in run.resume.iterdir()} == {"state.json", "trainable.safetensors", "optimizer.pt"}
    known = {"schema_version", "step", "entry", "trainable", "optimizer", "max_grad_norm"}
    assert set(read_json(run.resume / "state.json")) == known
    moments = torch.load(run.resume / "optimizer.pt", weights_only=True)
    assert set(moments) == {"state", "param_groups"}
    assert {key for state in moments["state"].values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_new_checkpoint_replaces_the_old_one_whole(run: RunDir) -> None:
    (run.resume / "stray").write_text("x")
    save_resume(run, *pair(3), 8, None, float("inf"))
    assert not (run.resume / "stray").exists()
    assert [path.name for path in run.private.iterdir()] == ["resume"]
    state = load_resume(run, *pair(2))
    assert state["step"] == 8
    assert "max_grad_norm" not in state  # a run without differential privacy clips at no norm


def test_weight_hashes_are_of_the_weight_files_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    assert weight_hashes(tmp_path) == {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
