"""Only clipped sums of this step reach an update; what cannot be clipped is refused, and what a record must admit is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import MODES, Shapes, built, ragged
from tiny_models import FROZEN, Toy, recipe
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpllm.privacy.guards import check_model
from dpllm.run.promise import check_modes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt2, last block", "llama, last block and tied head"])
def test_no_parameter_requires_a_gradient_in_the_backward_pass(name: str, mode: str) -> None:
    checks.no_weight_gradients(built(name), mode)


def test_autograd_multiplies_no_weight_gradient() -> None:
    """An ordinary backward pass has one product of the shape of each weight; the engine's has one for each unit."""
    net, some = tm.build("llama", FROZEN, intermediate_size=29, head_dim=12), tm.units([(9,), (5,), (7,)])
    weights = Counter(tuple(p.shape) for p in tm.trainable(net).values() if p.dim() == 2)
    engine = tm.make_engine(net)
    (one,) = tm.batches(some, engine)
    with Shapes() as ordinary, engine._attention.of(one):
        engine.losses(one).sum().backward()
    net.zero_grad()
    with Shapes() as ours:
        engine.clipped_sum([one])
    for shape, count in weights.items():
        assert ordinary.products.count(shape) == count
        assert ours.products.count(shape) == count * len(some)


def engine_on(net: nn.Module, optimizer: Any) -> tm.StepEngine:
    return tm.engine_of(net, optimizer, tm.schedule(), tm.plan(), noise_entropy=1)


def test_what_went_through_accelerate_is_refused() -> None:
    net = Toy()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([net.layer.weight], lr=1.0))
    checks.refused(lambda: engine_on(net, optimizer), "is wrapped by accelerator.prepare")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_wrapped_for_data_parallelism_is_refused() -> None:
    wrapped = object.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Toy()
    optimizer = torch.optim.SGD([wrapped.module.layer.weight])
    checks.refused(lambda: engine_on(wrapped, optimizer), "DistributedDataParallel")


def test_hooks_are_not_put_in_twice() -> None:
    net = Toy()
    engine = tm.make_engine(net)
    again = torch.optim.SGD([net.layer.weight], lr=1.0)
    checks.refused(lambda: engine_on(net, again), "already has per-sample gradient hooks")
    engine.close()
    engine_on(net, again).close()


@pytest.mark.parametrize("setting", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_an_embedding_that_reads_other_rows_tokens_is_refused(setting: dict[str, Any]) -> None:
    net = Toy()
    net.embed = nn.Embedding(tm.VOCABULARY, 8, **setting)
    checks.refused(lambda: tm.clipped_sum(tm.make_engine(net), ragged()), "scale_grad_by_freq or max_norm")


def test_what_trains_outside_the_optimizer_and_the_reverse_are_refused() -> None:
    net = Toy(bias=True)
    outside = torch.optim.SGD([net.layer.weight], lr=1.0)
    checks.refused(lambda: engine_on(net, outside), "layer.bias is missing")
    frozen = torch.optim.SGD([net.layer.weight, net.layer.bias, net.head.weight], lr=1.0)
    checks.refused(lambda: engine_on(net, frozen), "it holds one that is not trainable")


def with_layer(name: str, layer: nn.Module) -> nn.Module:
    net = Toy()
    net.add_module(name, layer)
    return net


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)])
def test_batch_norm_is_refused_even_frozen(layer: nn.Module) -> None:
    net = with_layer("between", layer.requires_grad_(False))
    checks.refused(lambda: check_model(net), "between is a batch norm")


def test_dora_is_refused() -> None:
    checks.refused(lambda: check_model(with_layer("lora_magnitude_vector", nn.Linear(2, 2))), "DoRA")


def test_dropout_of_the_adapter_is_refused_where_it_would_couple_units() -> None:
    adapter = {"method": "lora", "dropout": 0.1}
    for privacy in ({}, {"insecure_seed": 0}):
        config = recipe(adapter=adapter, privacy=privacy)
        checks.refused(lambda config=config: check_modes(config), "Set adapter.dropout: 0")
    check_modes(recipe(adapter=adapter, privacy={"enabled": False}))
    check_modes(recipe(adapter={**adapter, "dropout": 0}))
    check_modes(recipe(adapter={"method": "frozen"}))


def test_what_leaves_no_guarantee_is_said() -> None:
    assert "without differential privacy" in str(recipe(privacy={"enabled": False}).flaw)
    assert "seeded by the user" in str(recipe(privacy={"insecure_seed": 0}).flaw)


def test_private_evaluation_is_named_and_leaves_the_guarantee() -> None:
    assert (recipe().flaw, recipe().deviations) == (None, [])
    config = recipe(data={"train": "a.jsonl", "eval": "b.jsonl"})
    assert (config.flaw, len(config.deviations)) == (None, 1)
    assert recipe(data={"train": "a.jsonl", "eval": "b.jsonl", "eval_public": True}).deviations == []


def test_importing_the_guards_sets_what_cublas_reads_once() -> None:
    """Where somebody has chosen another workspace, it stays."""
    program = (
        "import importlib, os; from dpllm.privacy import guards; name = 'CUBLAS_WORKSPACE_CONFIG'; print(os.environ[name]); "
        "os.environ[name] = ':16:8'; importlib.reload(guards); print(os.environ[name])"
    )
    env = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == [":4096:8", ":16:8"]
