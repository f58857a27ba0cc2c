"""What the engine cannot bound, it refuses; some of these once moved the sum by several C, or trained a weight unclipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from cases import MODES
from peft import LoraConfig
from tiny_models import FROZEN, LORA, Made, Packed, Toy
from torch import Tensor, nn
from torch.nn import functional

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.packing import lay_out


def test_nobody_clips_to_another_norm_than_the_noise_was_made_for() -> None:
    with pytest.raises(AttributeError):
        tm.make_engine(Toy()).max_grad_norm = 2.0  # type: ignore[misc]


def test_every_trainable_coordinate_moves_and_nothing_else_does() -> None:
    net = tm.build("llama")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    tm.make_engine(net, tm.plan()).step([])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_trains_must_be_float32(dtype: torch.dtype) -> None:
    net = Toy()
    net.layer.to(dtype)
    with pytest.raises(Refused, match=r"layer\.weight trains in"):
        tm.make_engine(net)


# --- what the self-check refuses -----------------------------------------------------------------------------------------


class With(Toy):
    """One more layer behind the toy's own, called with ``more`` than its input."""

    def __init__(self, name: str, layer: nn.Module, *more: Any) -> None:
        super().__init__()
        self.add_module(name, layer)
        self.more = lambda x_RTd: layer(x_RTd, *more)

    def hidden(self, x_RTd: Tensor) -> Tensor:
        result = self.more(self.layer(x_RTd))
        return result[0] if isinstance(result, tuple) else result


class Tied(Toy):
    """A trainable head that is also the embedding; the embedding is looked up functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)
        self.head.requires_grad_(True)
        self.embed.weight = self.head.weight

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.head(functional.embedding(input_ids, self.head.weight)))


def with_second(make: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    net = Made(make)
    net.second = nn.Linear(8, 8, bias=False)
    return net


def partly_bypassed(net: Any, x_RTd: Tensor) -> Tensor:
    return net.layer(x_RTd) + 1e-2 * functional.linear(x_RTd, net.second.weight) + net.second(1e-2 * x_RTd)


def coupled(net: Any, x_RTd: Tensor) -> Tensor:
    """In training mode only, as batch norm does: an evaluation shows nothing."""
    y_RTd = net.layer(x_RTd)
    return y_RTd - 0.5 * y_RTd.mean(dim=(0, 1), keepdim=True) if net.training else y_RTd


def flipped(net: Any, x_RTd: Tensor) -> Tensor:
    """In training, a row's hidden states turn on what the first token of the pass is."""
    return net.layer(x_RTd * torch.sign(x_RTd[0, 0, 0]) if net.training else x_RTd)


def of_capacity(limit: int) -> Callable[[Any, Tensor], Tensor]:
    """In training, only so many tokens of a pass get through: beyond them the layer is skipped, as experts do."""

    def hidden(net: Any, x_RTd: Tensor) -> Tensor:
        chosen_RT = x_RTd[..., 0] > 0
        place_RT = chosen_RT.flatten().cumsum(0).view(chosen_RT.shape)
        passes_RT = ~chosen_RT | (place_RT <= limit) | torch.tensor(not net.training)
        return net.layer(x_RTd) * passes_RT[..., None]

    return hidden


class Running(Packed):
    """A buffer that private rows move, and that shifts later rows."""

    def __init__(self) -> None:
        super().__init__(self.moved)
        self.register_buffer("average", torch.zeros(8))

    @staticmethod
    def moved(net: Any, x_RTd: Tensor) -> Tensor:
        if net.training:
            net.average = 0.9 * net.average + 0.1 * x_RTd.detach().mean(dim=(0, 1))
        return net.layer(x_RTd - net.average)


class Choosing(nn.Module):
    """Its forward pass has an argument that functorch's path cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x_RTd: Tensor, power: int) -> Tensor:
        return x_RTd * self.weight**power


class Pair(nn.Linear):
    """Returns a tuple, as routers do."""

    def forward(self, x_RTd: Tensor) -> Any:
        return super().forward(x_RTd), None


BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a layer that nobody calls": (lambda: with_second(lambda net, x_RTd: net.layer(x_RTd)), "second.weight"),
    "a layer passed by": (lambda: Made(lambda net, x_RTd: functional.linear(x_RTd, net.layer.weight)), "layer.weight"),
    "a layer passed by in part": (lambda: with_second(partly_bypassed), "second.weight"),
    "an embedding that is looked up functionally": (Tied, "off by"),
    "rows that meet in training": (lambda: Packed(coupled), "other rows in the batch"),
    "rows that turn on the first token": (lambda: Packed(flipped), "with the other rows in the batch"),
    "experts of a small capacity": (lambda: Packed(of_capacity(10)), "with the other rows in the batch"),
    # More than the ragged rows of the check can fill, less than a full pass.
    "experts of a large capacity": (lambda: Packed(of_capacity(20)), "with the other rows in the batch"),
    "a buffer that rows move": (Running, "average"),
    "tokens first, rows second": (
        lambda: Packed(lambda net, x_RTd: net.layer(x_RTd.transpose(0, 1)).transpose(0, 1)),
        "layer trains and receives tokens in another shape",
    ),
    "a layer of several results": (
        lambda: With("pair", Pair(8, 8)), "pair (Pair) trains, takes 1 tensors and returns a tuple",
    ),
    "a rule that does not fit": (lambda: With("choosing", Choosing(), 2), "choosing (Choosing) trains, but the rule"),
    "no gradient": (lambda: Made(lambda net, x_RTd: 0.0 * net.layer(x_RTd)), "has the norm 0.0 to 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_self_check_refuses_what_clipping_would_not_bound_and_leaves_the_weights(name: str) -> None:
    make, words = BROKEN[name]
    net = make()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(Refused) as refusal:
        tm.make_engine(net).self_check(tm.VOCABULARY)
    assert words in str(refusal.value)
    assert "argument" not in str(refusal.value)  # an error's own words stay out: they may quote a token
    assert all(map(torch.equal, net.parameters(), before))


def with_rope(kind: str) -> Any:
    """A Llama whose frequencies follow the largest position that it reads, where that is beyond 16."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    return tm.build("llama", LORA, max_position_embeddings=64 if kind == "longrope" else 16, rope_parameters=rope)


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


def state(net: nn.Module) -> list[Any]:
    hooks = ("_forward_hooks", "_backward_hooks", "_forward_pre_hooks")
    modules = [(module.training, *(len(getattr(module, name)) for name in hooks)) for module in net.modules()]
    return [modules, [(p.requires_grad, p.grad) for p in net.parameters()]]


@pytest.mark.parametrize("adapter", [LORA, FROZEN], ids=["lora", "frozen"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_self_check_leaves_no_trace(family: str, adapter: dict[str, Any]) -> None:
    net = tm.build(family, adapter)
    for name, p in net.named_parameters():
        if "lora_B" in name:
            p.data.zero_()  # as it starts
    net.get_input_embeddings().eval()  # a module that stays in eval mode
    engine = tm.make_engine(net, tm.plan(0.2))
    some = tm.units([(9, 4), (7,)])
    sum_before, before = tm.clipped_sum(engine, some), state(net)
    tensors = copy.deepcopy([*net.state_dict().values(), *net.buffers()])
    assert engine.self_check(tm.VOCABULARY).error <= 1e-4
    assert all(map(torch.equal, [*net.state_dict().values(), *net.buffers()], tensors))
    assert state(net) == before
    assert torch.equal(tm.clipped_sum(engine, some), sum_before)  # and it works, with its own C


@pytest.mark.parametrize("tokens", [tm.ALONE, 1024])
@pytest.mark.parametrize("longest", [2, 90])
def test_the_self_check_runs_at_any_length(longest: int, tokens: int) -> None:
    net = tm.build("gpt2", FROZEN, n_positions=90, max_position_embeddings=90)
    assert tm.make_engine(net, longest=longest, tokens=tokens).self_check(tm.VOCABULARY).error <= 1e-4


def test_two_adapters_on_one_embedding_are_scaled_each_by_its_own() -> None:
    net = tm.build("llama", {**LORA, "target_modules": ["embed_tokens"]})
    net.add_adapter("other", LoraConfig(r=3, lora_alpha=9, target_modules=["embed_tokens"]))
    net.base_model.set_adapter(["default", "other"])
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("lora_" in name)
    assert tm.make_engine(net).self_check(tm.VOCABULARY).error <= 1e-5


# --- what an engine, a sum or a step refuses -----------------------------------------------------------------------------


class Odd(nn.Module):
    """Owns a parameter beside an inner layer, which no rule understands."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x_RTd: Tensor) -> Tensor:
        return self.inner(x_RTd) * self.scale


def test_a_refused_layer_is_named_and_the_model_is_left_as_it_was() -> None:
    net = With("odd", Odd())
    with pytest.raises(Refused, match=r"odd \(Odd\) trains parameters of its own"):
        tm.make_engine(net)
    net.odd.scale.requires_grad_(False)
    assert tm.make_engine(net).self_check(tm.VOCABULARY).error <= 1e-5


def test_a_logical_batch_that_ends_inside_a_unit_is_refused() -> None:
    engine = tm.make_engine(Packed(lambda net, x_RTd: net.layer(x_RTd)), tm.plan(0.05), tokens=16)
    first, _ = tm.batches(tm.units([(5, 9, 4)]), engine)
    with pytest.raises(Refused, match="ends in the middle of a unit"):
        engine.clipped_sum([first])
    others = lay_out(tm.units([(5,), (4,)]), engine.packing, 0)
    with pytest.raises(Refused, match="followed by a pass of other units"):
        engine.clipped_sum([first, others])


def test_a_trainable_parameter_without_a_gradient_stops_the_step() -> None:
    engine = tm.make_engine(with_second(lambda net, x_RTd: net.layer(x_RTd)))
    with pytest.raises(Refused, match=r"second\.weight trains, but"):
        engine.step(tm.batches(tm.units([(5,)]), engine))


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_what_starts_to_train_later_stops_the_step(in_optimizer: bool) -> None:
    net = Toy()
    engine = tm.make_engine(net)
    net.head.weight.requires_grad_(True)
    if in_optimizer:
        engine._optimizer.add_param_group({"params": [net.head.weight]})
    before = net.head.weight.detach().clone()
    with pytest.raises(Refused, match="trainable parameters changed since the engine was made"):
        engine.step(tm.batches(tm.units([(5,)]), engine))
    assert torch.equal(net.head.weight, before)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"modules_to_save": ["nothing"]}, "matches no layer"),
        ({"modules_to_save": ["layers"]}, "which holds other layers"),
        ({"modules_to_save": ["q_proj"]}, "also gets an adapter"),
        ({"target_modules": "[unclosed"}, "matches no layer that LoRA knows"),
    ],
)
def test_layers_that_cannot_be_named_so_are_one_clear_line(adapter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tm.build("llama", {**LORA, **adapter})
