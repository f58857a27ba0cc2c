"""Nothing but clipped sums of this step reaches an update, and what cannot be clipped is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from cases import MODES, built, ragged
from test_head import Products
from tiny_models import FROZEN, Toy
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, all-linear", "gpt2, last block", "llama, last block and tied head"])
def test_no_parameter_requires_a_gradient_in_the_backward_pass(name: str, mode: str) -> None:
    checks.no_weight_gradients(built(name), mode)


def test_autograd_multiplies_no_weight_gradient() -> None:
    """An ordinary backward pass has one product of the shape of each weight; the engine's has one for each unit."""
    net, some = tm.build("llama", FROZEN, intermediate_size=29, head_dim=12), tm.units([(9,), (5,), (7,)])
    weights = Counter(tuple(p.shape) for p in tm.trainable(net).values() if p.dim() == 2)
    engine = tm.make_engine(net)
    (one,) = tm.batches(some, engine)
    with Products() as ordinary, engine._attention.of(one):
        engine.losses(one).sum().backward()
    net.zero_grad()
    with Products() as ours:
        engine.clipped_sum([one])
    for shape, count in weights.items():
        assert ordinary.all.count(shape) == count
        assert ours.all.count(shape) == count * len(some)


def test_what_went_through_accelerate_is_refused() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    net = Toy()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([net.layer.weight], lr=1.0))
    checks.refused(lambda: engine_on(net, optimizer), "is wrapped by accelerator.prepare")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_wrapped_for_data_parallelism_is_refused() -> None:
    wrapped = object.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Toy()
    checks.refused(
        lambda: engine_on(wrapped, torch.optim.SGD([wrapped.module.layer.weight])), "DistributedDataParallel"
    )


def engine_on(net: nn.Module, optimizer: Any) -> tm.StepEngine:
    return tm.engine_of(net, optimizer, tm.schedule(), tm.plan(), noise_entropy=1)


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
