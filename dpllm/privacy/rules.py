"""Layer rules: compute every unit's gradient of a layer's parameters from the layer's input and output gradient.

Comes in: one call of one layer in one backward pass, with all tokens of the pass concatenated. Goes out: parts of gradients, from
which ``gradients`` forms each unit's. To make another kind of layer fast, add one function and one line in ``RULES``; a layer
without a rule uses Opacus' functorch path, which is exact but slow. A wrong rule never trains: the self-check compares every
run's model with autograd.

Shape suffixes: M tokens of a pass, U units, d inputs, p outputs, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from peft.tuners.lora.layer import Embedding as LoraEmbedding
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dpllm.errors import Refused
from dpllm.privacy.packing import Segment


@dataclass(frozen=True)
class Product:
    """A unit's gradient is left.T @ right over its own tokens: (M, ..., i) and (M, ..., j)."""

    left_Mi: Tensor
    right_Mj: Tensor


@dataclass(frozen=True)
class Summed:
    """A unit's gradient is the sum over its own tokens: (M, *parameter.shape)."""

    values_M: Tensor


@dataclass(frozen=True)
class LookedUp:
    """A unit's gradient is the sum of its own tokens' vectors, each at its index; zero elsewhere."""

    ids_M: Tensor
    values_Md: Tensor
    columns: bool = False  # the indices count columns of the parameter, not rows


@dataclass(frozen=True)
class Formed:
    """Every unit's gradient: (U, *parameter.shape)."""

    gradient_U: Tensor


Part = Product | Summed | LookedUp | Formed
Parts = Iterator[tuple[Tensor, Part]]
Trains = Callable[[Any], bool]
Rule = Callable[[Any, Tensor, Tensor, Trains, Sequence[Segment]], Parts]


def linear(
    layer: Any, input: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment], *, transposed: bool = False
) -> Parts:
    """nn.Linear, including LoRA's A and B; ``transposed`` if the weight is stored transposed."""
    input_Md, backprop_Mp = input.flatten(0, 1), backprop.flatten(0, 1)
    if trains(layer.weight):
        yield layer.weight, Product(input_Md, backprop_Mp) if transposed else Product(backprop_Mp, input_Md)
    if trains(layer.bias):
        yield layer.bias, Summed(backprop_Mp)


conv1d = partial(linear, transposed=True)  # transformers' Conv1D (GPT-2)


def embedding(layer: nn.Embedding, ids: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment]) -> Parts:
    """nn.Embedding: only the vectors that a unit looks up have a gradient."""
    _check_embedding(layer)
    ids_M, values_Md = ids.flatten(), _flat(backprop).float()
    if trains(layer.weight):
        if layer.padding_idx is not None:  # the padding vector has no gradient
            values_Md = values_Md * (ids_M != layer.padding_idx).unsqueeze(1)
        yield layer.weight, LookedUp(ids_M, values_Md)


def scaled_embedding(layer: Any, ids: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment]) -> Parts:
    """Gemma's nn.Embedding, whose output is multiplied by ``embed_scale``."""
    return embedding(layer, ids, backprop.float() * float(layer.embed_scale), trains, units)


def lora_embedding(layer: Any, ids: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment]) -> Parts:
    """LoRA on an embedding, y = base(ids) + (A.T[ids] @ B.T) scale: its parameters belong to no inner layer of peft."""
    _check_embedding(layer.get_base_layer())
    scale = float(getattr(layer.get_base_layer(), "embed_scale", 1.0))
    ids_M = ids.flatten()
    for name in layer.active_adapters:
        a_rV, b_dr = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
        if not (trains(a_rV) and trains(b_dr)):
            continue
        scaled_Md = _flat(backprop).float() * (scale * layer.scaling[name])
        yield b_dr, Product(scaled_Md, a_rV.detach().T[ids_M])
        values_Mr = scaled_Md @ b_dr.detach()
        if (padding := layer.get_base_layer().padding_idx) is not None:
            values_Mr = values_Mr * (ids_M != padding).unsqueeze(1)
        yield a_rV, LookedUp(ids_M, values_Mr, columns=True)


def layer_norm(layer: nn.LayerNorm, input: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment]) -> Parts:
    """nn.LayerNorm."""
    shape = layer.normalized_shape
    if trains(layer.weight):
        normed = functional.layer_norm(input.float(), shape, None, None, layer.eps)
        yield layer.weight, Summed((backprop.float() * normed).flatten(0, 1))
    if trains(layer.bias):
        yield layer.bias, Summed(backprop.float().flatten(0, 1))


def rms_norm(layer: Any, input: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment]) -> Parts:
    """nn.RMSNorm and transformers' classes: y = w x / rms(x), or (1 + w) x / rms(x), which has the same gradient."""
    shape = tuple(layer.weight.shape)
    eps = layer.variance_epsilon if hasattr(layer, "variance_epsilon") else layer.eps
    if trains(layer.weight):
        normed = functional.rms_norm(input.float(), shape, None, eps)
        yield layer.weight, Summed((backprop.float() * normed).flatten(0, 1))


def by_functorch(layer: nn.Module, input: Tensor, backprop: Tensor, trains: Trains, units: Sequence[Segment]) -> Parts:
    """Any other layer without inner layers: repeats its forward pass for each unit, differentiated by functorch."""
    dtype = next(layer.parameters()).dtype
    input_M, backprop_M = input.flatten(0, 1), backprop.flatten(0, 1).to(dtype)
    by_unit = [
        ft_compute_per_sample_gradient(
            layer, [input_M[unit.start : unit.stop][None]], backprop_M[unit.start : unit.stop][None]
        )
        for unit in units
    ]
    for parameter in layer.parameters():
        if trains(parameter):
            formed = [gradients[parameter][0].detach().float() for gradients in by_unit]
            yield parameter, Formed(torch.stack(formed) if formed else parameter.new_zeros(0, *parameter.shape))


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    Conv1D: conv1d,
    nn.Embedding: embedding,
    LoraEmbedding: lora_embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
}
# Models of transformers define their own classes; the end of the name identifies them.
RULES_BY_NAME: dict[str, Rule] = {"RMSNorm": rms_norm, "ScaledWordEmbedding": scaled_embedding, "FalconLinear": linear}


def rule_of(layer: nn.Module, name: str) -> Rule:
    """The rule for a layer that owns trainable parameters; Refused if functorch does not support it either."""
    if rule := RULES.get(type(layer)):
        return rule
    for ending, rule in RULES_BY_NAME.items():
        if type(layer).__name__.endswith(ending):
            return rule
    if next(layer.children(), None) is None:
        with contextlib.suppress(NotImplementedError):  # of buffers
            prepare_layer(layer)
            return by_functorch
    raise Refused(
        f"{name} ({type(layer).__name__}) trains parameters of its own, for which no rule computes per-example gradients, so "
        "they could not be clipped. Train other layers: change adapter.target_modules, or see CONTRIBUTING.md, 'A layer rule'."
    )


def _flat(values: Tensor) -> Tensor:
    """(M, last): all tokens of a pass, concatenated."""
    return values.reshape(-1, values.shape[-1])


def _check_embedding(layer: nn.Embedding) -> None:
    if layer.scale_grad_by_freq or layer.max_norm is not None:
        raise Refused(
            "an embedding with scale_grad_by_freq or max_norm depends on the tokens of other rows, so clipping would not bound "
            "one unit. Use a base model without them."
        )
