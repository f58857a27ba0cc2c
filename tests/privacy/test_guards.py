"""What is refused before anything runs, and what a record must admit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import recipe
from torch import nn

from dpllm.errors import Refused
from dpllm.privacy.guards import check_model
from dpllm.run.promise import check_modes

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """A module with one named child, and a head."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self.add_module(name, child)
        self.head = nn.Linear(2, 2)
        self.requires_grad_(False)
        self.head.requires_grad_(True)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)])
def test_batch_norm_is_refused_even_frozen(layer: nn.Module) -> None:
    with pytest.raises(Refused, match="between is a batch norm"):
        check_model(Net("between", layer))


def test_dora_is_refused() -> None:
    net = Net("lora_magnitude_vector", nn.Linear(2, 2))
    net.requires_grad_(True)
    with pytest.raises(Refused, match="DoRA"):
        check_model(net)


def test_dropout_of_the_adapter_is_refused_where_it_would_couple_units() -> None:
    adapter = {"method": "lora", "dropout": 0.1}
    for privacy in ({}, {"insecure_seed": 0}):
        with pytest.raises(Refused, match=r"adapter\.dropout is 0\.1, .* Set adapter\.dropout: 0"):
            check_modes(recipe(adapter=adapter, privacy=privacy))
    check_modes(recipe(adapter=adapter, privacy={"enabled": False}))
    check_modes(recipe(adapter={**adapter, "dropout": 0}))
    check_modes(recipe(adapter={"method": "frozen"}))


@pytest.mark.parametrize(
    ("privacy", "words"),
    [({"enabled": False}, "without differential privacy"), ({"insecure_seed": 0}, "seeded by the user")],
)
def test_what_leaves_no_guarantee_is_said(privacy: dict[str, Any], words: str) -> None:
    reason = recipe(privacy=privacy).flaw
    assert reason is not None
    assert words in reason


def test_private_evaluation_is_named_and_leaves_the_guarantee() -> None:
    assert (recipe().flaw, recipe().deviations) == (None, [])
    config = recipe(data={"train": "a.jsonl", "eval": "b.jsonl"})
    assert config.flaw is None
    assert len(config.deviations) == 1
    assert recipe(data={"train": "a.jsonl", "eval": "b.jsonl", "eval_public": True}).deviations == []


def test_importing_the_guards_sets_what_cublas_reads_once() -> None:
    """Where somebody has chosen another workspace, it stays."""
    program = (
        "import importlib, os; from dpllm.privacy import guards; name = 'CUBLAS_WORKSPACE_CONFIG'; print(os.environ[name]); "
        "os.environ[name] = ':16:8'; importlib.reload(guards); print(os.environ[name])"
    )
    env = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == [":4096:8", ":16:8"]
