"""Layer rules: from a layer's input and the gradient of its output to every row's gradient of its parameters.

Comes in: one call of one layer in one backward pass. Goes out: parts of gradients, each in the cheapest exact form. To make
another kind of layer fast, write one function and one line in ``RULES``; a layer without a rule goes through Opacus' functorch
path, which is exact and slow. A wrong rule does not train: the self-check compares every run's model with autograd.

Shape suffixes: R rows of a physical batch, T tokens, d inputs, p outputs, V vocabulary, K pairs of a row and a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from peft.tuners.lora.layer import Embedding as LoraEmbedding
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dpllm.errors import Refused

Mode = Literal["auto", "per_sample", "ghost"]
WIDE = 16_384  # outputs of a layer that is a head over a vocabulary


@dataclass(frozen=True)
class Form:
    """In which form gradients of dense weights are kept; the choice rests on public numbers alone."""

    # Both forms are exact, but not to the same last bits: if the choice followed the physical batch, a long row would change how
    # the rows beside it are rounded, which where terms cancel is more than C.
    max_length: int  # tokens of the longest row allowed
    mode: Mode = "auto"  # tests force the other two


@dataclass(frozen=True)
class Dense:
    """Every row's gradient, materialised in float32: (R, *parameter.shape)."""

    gradient_R: Tensor


@dataclass(frozen=True)
class Product:
    """Row r's gradient is left[r].T @ right[r], not yet multiplied; tokens are dimension 1."""

    left_RTi: Tensor
    right_RTj: Tensor


@dataclass(frozen=True)
class Rows:
    """Row r's gradient is zero but for the vectors ``values[r, t]`` at the indices ``ids[r, t]`` of one dimension."""

    ids_RT: Tensor
    values_RTd: Tensor
    columns: bool = False  # the indices count columns of the parameter, not rows


Part = Dense | Product | Rows
Parts = Iterator[tuple[Tensor, Part]]
Trains = Callable[[Any], bool]
Rule = Callable[[Any, Tensor, Tensor, Trains, "Form"], Parts]


def product(left_RTi: Tensor, right_RTj: Tensor, form: Form) -> Part:
    """The gradient of a dense weight: materialised, or kept as two factors (ghost clipping).

    Factors cost R T (i + j) numbers until the norm is known, and float64 arithmetic on R T^2 (i + j) of them for it; a
    materialised gradient costs R i j numbers in float32, and no more arithmetic than a weight gradient without privacy.
    ``auto`` keeps factors where they hold less than half as much, which implies 2 T^2 <= i j (Li et al. 2021), and always
    for a head over a vocabulary.
    """
    if form.mode == "ghost" or (form.mode == "auto" and _factors_pay(left_RTi, right_RTj, form.max_length)):
        return Product(left_RTi, right_RTj)
    return Dense(multiplied(left_RTi, right_RTj))


def multiplied(left_RTi: Tensor, right_RTj: Tensor) -> Tensor:
    """left[r].T @ right[r] of every row, accumulated and returned in float32."""
    low = left_RTi.dtype == right_RTj.dtype and left_RTi.dtype in (torch.bfloat16, torch.float16)
    # Products of such numbers are exact in float32, so nothing is gained by widening them first.
    if low and left_RTi.is_cuda:
        return torch.bmm(left_RTi.transpose(1, 2), right_RTj, out_dtype=torch.float32)
    return left_RTi.float().transpose(1, 2) @ right_RTj.float()


def linear(
    layer: Any, input_RTd: Tensor, backprop_RTp: Tensor, trains: Trains, form: Form, *, transposed: bool = False
) -> Parts:
    """nn.Linear, LoRA's A and B among them; ``transposed`` where the weight is stored so."""
    if input_RTd.dim() != 3:
        input_RTd, backprop_RTp = input_RTd.flatten(1, -2), backprop_RTp.flatten(1, -2)
    if trains(layer.weight):
        left, right = (input_RTd, backprop_RTp) if transposed else (backprop_RTp, input_RTd)
        yield layer.weight, product(left, right, form)
    if trains(layer.bias):
        yield layer.bias, Dense(backprop_RTp.sum(dim=1, dtype=torch.float32))


conv1d = partial(linear, transposed=True)  # transformers' Conv1D (GPT-2)


def embedding(layer: nn.Embedding, ids_RT: Tensor, backprop_RTd: Tensor, trains: Trains, form: Form) -> Parts:
    """nn.Embedding: only the vectors that a row looked up have a gradient."""
    _check_embedding(layer)
    if trains(layer.weight):
        if layer.padding_idx is not None:  # its vector has no gradient
            backprop_RTd = backprop_RTd * (ids_RT != layer.padding_idx).unsqueeze(-1)
        yield layer.weight, Rows(ids_RT, backprop_RTd.float())


def scaled_embedding(layer: Any, ids_RT: Tensor, backprop_RTd: Tensor, trains: Trains, form: Form) -> Parts:
    """Gemma's nn.Embedding, whose output is multiplied by ``embed_scale``."""
    return embedding(layer, ids_RT, backprop_RTd.float() * float(layer.embed_scale), trains, form)


def lora_embedding(layer: Any, ids_RT: Tensor, backprop_RTd: Tensor, trains: Trains, form: Form) -> Parts:
    """LoRA on an embedding, y = base(ids) + (A.T[ids] @ B.T) scale: parameters that no inner layer of peft calls."""
    _check_embedding(layer.get_base_layer())
    scale = float(getattr(layer.get_base_layer(), "embed_scale", 1.0))
    for name in layer.active_adapters:
        a_rV, b_dr = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
        if not (trains(a_rV) and trains(b_dr)):
            continue
        scaled_RTd = backprop_RTd.float() * (scale * layer.scaling[name])
        yield b_dr, product(scaled_RTd, a_rV.detach().T[ids_RT], form)
        values_RTr = scaled_RTd @ b_dr.detach()
        if (padding := layer.get_base_layer().padding_idx) is not None:
            values_RTr = values_RTr * (ids_RT != padding).unsqueeze(-1)
        yield a_rV, Rows(ids_RT, values_RTr, columns=True)


def layer_norm(layer: nn.LayerNorm, input: Tensor, backprop: Tensor, trains: Trains, form: Form) -> Parts:
    """nn.LayerNorm."""
    shape = layer.normalized_shape
    if trains(layer.weight):
        normed = functional.layer_norm(input.float(), shape, None, None, layer.eps)
        yield layer.weight, Dense(_over_tokens(backprop.float() * normed, shape))
    if trains(layer.bias):
        yield layer.bias, Dense(_over_tokens(backprop.float(), shape))


def rms_norm(layer: Any, input: Tensor, backprop: Tensor, trains: Trains, form: Form) -> Parts:
    """nn.RMSNorm and transformers' classes: y = w x / rms(x), or (1 + w) x / rms(x), which has the same gradient."""
    shape = tuple(layer.weight.shape)
    eps = layer.variance_epsilon if hasattr(layer, "variance_epsilon") else layer.eps
    if trains(layer.weight):
        normed = functional.rms_norm(input.float(), shape, None, eps)
        yield layer.weight, Dense(_over_tokens(backprop.float() * normed, shape))


def by_functorch(layer: nn.Module, input: Tensor, backprop: Tensor, trains: Trains, form: Form) -> Parts:
    """Any other layer without inner layers: its own forward pass once more for every row, differentiated by functorch."""
    gradients = ft_compute_per_sample_gradient(layer, [input], backprop.to(next(layer.parameters()).dtype))
    for parameter, gradient_R in gradients.items():
        if trains(parameter):
            yield parameter, Dense(gradient_R.detach().float())


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    Conv1D: conv1d,
    nn.Embedding: embedding,
    LoraEmbedding: lora_embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
}
# Every model of transformers brings classes of its own; they are known by the end of their names.
RULES_BY_NAME: dict[str, Rule] = {"RMSNorm": rms_norm, "ScaledWordEmbedding": scaled_embedding, "FalconLinear": linear}


def rule_of(layer: nn.Module, name: str) -> Rule:
    """The rule for a layer that owns trainable parameters, or a refusal where functorch does not take it either."""
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


def _factors_pay(left_RTi: Tensor, right_RTj: Tensor, tokens: int) -> bool:
    i, j = left_RTi.shape[2], right_RTj.shape[2]
    if max(i, j) >= WIDE:
        return min(i, j) > 64  # an adapter of a head is no head
    held = tokens * (i * left_RTi.element_size() + j * right_RTj.element_size()) + 16 * tokens**2  # bytes
    return 2 * held <= 4 * i * j


def _over_tokens(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(R, tokens and heads, *shape) -> (R, *shape)."""
    return gradient.flatten(1, -1 - len(shape)).sum(dim=1)


def _check_embedding(layer: nn.Embedding) -> None:
    if layer.scale_grad_by_freq or layer.max_norm is not None:
        raise Refused(
            "an embedding with scale_grad_by_freq or max_norm depends on the tokens of other rows, so clipping would not bound "
            "one unit. Use a base model without them."
        )
