"""Found by attacking the engine: each of these once moved the sum by several C, trained a weight unclipped, or crashed."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tm
import torch
from test_engine import Packed, refusal
from tiny_models import LORA, Toy
from torch import Tensor, nn

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.packing import lay_out


class Flip(Packed):
    """In training, a row's hidden states turn on what the first token of the pass is."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        sign = 1.0 if not self.training else torch.sign(x_RTd[0, 0, 0]).item()
        return self.layer(sign * x_RTd)


class Capacity(Packed):
    """In training, only so many tokens of a pass get through: beyond them the layer is skipped, as experts do."""

    limit = 10

    def hidden(self, x_RTd: Tensor) -> Tensor:
        chosen_RT = x_RTd[..., 0] > 0
        place_RT = chosen_RT.flatten().cumsum(0).view(chosen_RT.shape)
        passes_RT = ~chosen_RT | (place_RT <= self.limit) | torch.tensor(not self.training)
        return self.layer(x_RTd) * passes_RT[..., None]


class LargeCapacity(Capacity):
    """More than the ragged rows of the check can fill, less than a full pass."""

    limit = 20


@pytest.mark.parametrize("coupled", [Flip, Capacity, LargeCapacity])
def test_rows_that_meet_in_training_mode_only_are_refused(coupled: type[Packed]) -> None:
    assert "with the other rows in the batch" in refusal(coupled())


def test_a_logical_batch_that_ends_inside_a_unit_is_refused() -> None:
    engine = tm.make_engine(Packed(), tm.plan(0.05), tokens=16)
    first, _ = tm.batches(tm.units([(5, 9, 4)]), engine)
    with pytest.raises(Refused, match="ends in the middle of a unit"):
        engine.clipped_sum([first])
    others = lay_out(tm.units([(5,), (4,)]), engine.packing, 0)
    with pytest.raises(Refused, match="followed by a pass of other units"):
        engine.clipped_sum([first, others])


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


class Odd(nn.Module):
    """Owns a parameter beside an inner layer, which no rule understands."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x_RTd: Tensor) -> Tensor:
        return self.inner(x_RTd) * self.scale


class With(Toy):
    """One more layer behind the toy's own, called with ``more`` than its input."""

    def __init__(self, name: str, layer: nn.Module, *more: Any) -> None:
        super().__init__()
        self.add_module(name, layer)
        self.more = lambda x_RTd: layer(x_RTd, *more)

    def hidden(self, x_RTd: Tensor) -> Tensor:
        result = self.more(self.layer(x_RTd))
        return result[0] if isinstance(result, tuple) else result


def test_a_refused_layer_is_named_and_the_model_is_left_as_it_was() -> None:
    net = With("odd", Odd())
    with pytest.raises(Refused, match=r"odd \(Odd\) trains parameters of its own"):
        tm.make_engine(net)
    net.odd.scale.requires_grad_(False)
    assert tm.make_engine(net).self_check(tm.VOCABULARY).error <= 1e-5


class Choosing(nn.Module):
    """Its forward pass has an argument that functorch's path cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x_RTd: Tensor, power: int) -> Tensor:
        return x_RTd * self.weight**power


def test_a_rule_that_does_not_fit_its_layer_is_a_refusal_that_names_it() -> None:
    message = refusal(With("choosing", Choosing(), 2))
    assert "choosing (Choosing) trains, but the rule" in message
    assert "argument" not in message  # the error's own words stay out: they may quote a token


class Pair(nn.Linear):
    """Returns a tuple, as routers do."""

    def forward(self, x_RTd: Tensor) -> Any:
        return super().forward(x_RTd), None


def test_a_layer_that_returns_several_things_is_refused_by_what_it_returns() -> None:
    assert "pair (Pair) trains, takes 1 tensors and returns a tuple" in refusal(With("pair", Pair(8, 8)))


def test_two_adapters_on_one_embedding_are_scaled_each_by_its_own() -> None:
    from peft import LoraConfig

    net = tm.build("llama", {**LORA, "target_modules": ["embed_tokens"]})
    net.add_adapter("other", LoraConfig(r=3, lora_alpha=9, target_modules=["embed_tokens"]))
    net.base_model.set_adapter(["default", "other"])
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("lora_" in name)
    assert tm.make_engine(net).self_check(tm.VOCABULARY).error <= 1e-5


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


class NoGradient(Toy):
    def hidden(self, x_RTd: Tensor) -> Tensor:
        return 0.0 * self.layer(x_RTd)


def test_a_model_without_gradients_is_refused_in_words() -> None:
    assert "has the norm 0.0 to 0.0" in refusal(NoGradient())
