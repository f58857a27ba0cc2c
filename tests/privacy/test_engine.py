"""The update is (clipped sum + noise) / B and nothing else; what the engine cannot bound, it refuses."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from cases import MODES
from tiny_models import CPU, FROZEN, LORA, Toy
from torch import Tensor, nn
from torch.nn import functional

from dpllm.errors import Refused
from dpllm.privacy.noise import GaussianNoise

KEY = 2**77 + 5


def update(net: nn.Module, some: list, promise: Any, **arguments: Any) -> Tensor:
    """What one step subtracts from the parameters, at learning rate 1."""
    engine = tm.make_engine(net, promise, noise_entropy=KEY, **arguments)
    before = torch.cat([p.detach().flatten().clone() for p in engine.parameters.values()])
    engine.step(tm.batches(some, engine))
    after = torch.cat([p.detach().flatten() for p in engine.parameters.values()])
    return (before - after).double()


def test_nobody_clips_to_another_norm_than_the_noise_was_made_for() -> None:
    engine = tm.make_engine(Toy())
    with pytest.raises(AttributeError):
        engine.max_grad_norm = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, 3, 14])
def test_the_update_is_clipped_sum_plus_noise_over_the_expected_batch_size(size: int) -> None:
    """B = 10 whether the logical batch has 0, 3 or 14 units."""
    net, some = Toy(), tm.units([(4 + number,) for number in range(size)])
    promise = tm.plan(0.03, 0.8)
    gradient_UP = tm.brute_force(net, some) if some else torch.zeros(1, 64, dtype=torch.float64)
    norm_U = gradient_UP.norm(dim=1, keepdim=True)
    total_P = (gradient_UP * (0.03 / norm_U).clamp(max=1.0)).nan_to_num().sum(dim=0)
    expected_P = (total_P + 0.8 * 0.03 * GaussianNoise(KEY, CPU).draw(64).double()) / 10
    torch.testing.assert_close(update(net, some, promise), expected_P, rtol=1e-4, atol=1e-7)


def test_every_trainable_coordinate_moves_and_nothing_else_does() -> None:
    net = tm.build("llama")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    update(net, [], tm.plan())
    for name, p in net.named_parameters():
        assert bool((p != before[name]).all()) == p.requires_grad
        assert torch.equal(p, before[name]) != p.requires_grad
        assert p.grad is None


@pytest.mark.parametrize("mode", MODES)
def test_long_gradients_are_counted_by_layer(mode: str) -> None:
    """Each unit once, however many rows and passes it has."""
    some = tm.units([(5,), (9, 4, 6), (7,), (12,)])
    net = tm.build("llama")
    gradient_UP = tm.brute_force(net, some)
    norm_GU = torch.stack([gradient_UP[:, place].norm(dim=1) for place in checks.layers(net)])
    bound = float(norm_GU.median()) * len(norm_GU) ** 0.5 * 1.001
    expected = tuple((norm_GU > bound / len(norm_GU) ** 0.5).sum(dim=1).tolist())
    assert 0 < sum(expected) < norm_GU.numel()
    engine = tm.make_engine(net, tm.plan(bound), mode=mode, loss_scale=1024.0)
    for tokens in (tm.ALONE, 16, 64):
        assert engine.clipped_sum(tm.batches(some, tokens))[1].clipped_by_layer == expected
    assert engine.clipped_sum([])[1].clipped_by_layer == (0,) * len(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_trains_must_be_float32(dtype: torch.dtype) -> None:
    net = Toy()
    net.layer.to(dtype)
    with pytest.raises(Refused, match=r"layer\.weight trains in"):
        tm.make_engine(net)


def refusal(net: nn.Module, **arguments: Any) -> str:
    with pytest.raises(Refused) as caught:
        tm.make_engine(net, **arguments).self_check(tm.VOCABULARY)
    return str(caught.value)


class Unused(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


class Bypassed(Toy):
    def hidden(self, x_RTd: Tensor) -> Tensor:
        return functional.linear(x_RTd, self.layer.weight)


class Tied(Toy):
    """A trainable head that is also the embedding; the embedding is looked up functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)
        self.head.requires_grad_(True)
        self.embed.weight = self.head.weight

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.head(functional.embedding(input_ids, self.head.weight)))


class Packed(Toy):
    """Has no attention, so that a pass of many rows can run it."""

    _supports_attention_backend = True

    def forward(self, input_ids: Tensor, position_ids: Any = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids)


class CoupledInTraining(Packed):
    """Couples rows in training mode only, as batch norm does: an evaluation shows nothing."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        y_RTd = self.layer(x_RTd)
        return y_RTd - 0.5 * y_RTd.mean(dim=(0, 1), keepdim=True) if self.training else y_RTd


class Running(Packed):
    """A buffer that private rows move, and that shifts later rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def hidden(self, x_RTd: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x_RTd.detach().mean(dim=(0, 1))
        return self.layer(x_RTd - self.average)


class TimeMajor(Packed):
    """The layer reads tokens first, rows second."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (Unused, "spare.weight"),
        (Bypassed, "layer.weight"),
        (Tied, "off by"),
        (CoupledInTraining, "other rows in the batch"),
        (Running, "average"),
        (TimeMajor, "layer trains and receives tokens in another shape"),
    ],
)
def test_the_self_check_refuses_what_clipping_would_not_bound(broken: type[Toy], named: str) -> None:
    assert re.search(named, refusal(broken()))


def test_the_self_check_names_the_one_layer_that_is_wrong() -> None:
    class Two(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(8, 8, bias=False)

        def hidden(self, x_RTd: Tensor) -> Tensor:
            return self.layer(x_RTd) + 1e-2 * functional.linear(x_RTd, self.second.weight) + self.second(1e-2 * x_RTd)

    message = refusal(Two())
    assert "second.weight" in message


def with_rope(kind: str) -> Any:
    """A Llama whose frequencies follow the largest position that it reads, where that is beyond 16."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    parameters = {
        "rope_type": kind,
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        **factors,
    }
    return tm.build("llama", LORA, max_position_embeddings=64 if kind == "longrope" else 16, rope_parameters=parameters)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_row_reads_the_same_in_every_pass(kind: str) -> None:
    """With it, one long row changed the other rows' gradients, unclipped: 20 neighbours moved the sum by 1.006 C."""
    engine = tm.make_engine(with_rope(kind), tm.plan(0.05), longest=64)
    assert engine.self_check(tm.VOCABULARY).error <= 1e-4
    some = tm.units([(60,), (20,), (9, 4), (17,), (12,)])
    alone = [tm.clipped_sum(engine, [item]) for item in some]
    assert torch.equal(tm.clipped_sum(engine, some), sum(alone))
    assert torch.equal(tm.clipped_sum(engine, some[::-1]), sum(alone))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_of_examples_by_themselves_it_is_refused(kind: str) -> None:
    """Each is as long as it is, and what the one before has left in a buffer would decide about the next."""
    with pytest.raises(Refused, match="inv_freq"):
        tm.make_engine(with_rope(kind), tokens=tm.ALONE, longest=64).self_check(tm.VOCABULARY)
    tm.make_engine(with_rope(kind), tokens=tm.ALONE, longest=16).self_check(tm.VOCABULARY)


def test_a_trainable_parameter_without_a_gradient_stops_the_step() -> None:
    engine = tm.make_engine(Unused())
    with pytest.raises(Refused, match=r"spare\.weight trains, but"):
        engine.step(tm.batches(tm.units([(5,)]), engine))


def state(net: nn.Module) -> dict[str, Any]:
    return {
        "weights": {name: tensor.clone() for name, tensor in net.state_dict().items()},
        "buffers": {name: tensor.clone() for name, tensor in net.named_buffers()},
        "training": {name: module.training for name, module in net.named_modules()},
        "grads": [p.grad for p in net.parameters()],
        "hooks": {
            name: (len(module._forward_hooks), len(module._backward_hooks), len(module._forward_pre_hooks))
            for name, module in net.named_modules()
        },
        "requires": [p.requires_grad for p in net.parameters()],
    }


@pytest.mark.parametrize("adapter", [LORA, FROZEN], ids=["lora", "frozen"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_self_check_leaves_no_trace(family: str, adapter: dict[str, Any]) -> None:
    net = tm.build(family, adapter)
    if adapter is LORA:
        with torch.no_grad():
            for name, p in net.named_parameters():
                if "lora_B" in name:
                    p.zero_()  # as it starts
    net.get_input_embeddings().eval()  # a module that stays in eval mode
    engine = tm.make_engine(net, tm.plan(0.2))
    some = tm.units([(9, 4), (7,)])
    sum_before, before = tm.clipped_sum(engine, some), state(net)
    assert engine.self_check(tm.VOCABULARY).error <= 1e-4
    after = state(net)
    for key in ("weights", "buffers"):
        assert all(torch.equal(value, after[key][name]) for name, value in before[key].items())
    for key in ("training", "grads", "hooks", "requires"):
        assert before[key] == after[key]
    assert torch.equal(tm.clipped_sum(engine, some), sum_before)  # and it works, with its own C


def test_a_refused_self_check_leaves_the_weights() -> None:
    net = CoupledInTraining()
    before = copy.deepcopy(net.state_dict())
    refusal(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("tokens", [tm.ALONE, tm.TOKENS, 1024])
@pytest.mark.parametrize("longest", [2, 3, 90])
def test_the_self_check_runs_at_any_length(longest: int, tokens: int) -> None:
    net = tm.build("gpt2", FROZEN, n_positions=90, max_position_embeddings=90)
    engine = tm.make_engine(net, longest=longest, tokens=tokens)
    assert engine.self_check(tm.VOCABULARY).error <= 1e-4
