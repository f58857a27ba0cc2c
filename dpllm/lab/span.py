"""The span check: which tokens have inputs that lie in the row space of a layer's gradient.

Comes in: a model with LoRA, a batch, gradients of its first adapters. Goes out: two scores for each candidate token, and
how they rank the batch's own. Knows neither Plans nor engines.

Shape suffixes: K candidate tokens, L positions, D inputs of a layer, G rows of a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpllm.auditing.attacks import placements
from dpllm.errors import ConfigError
from dpllm.privacy.sampling import PhysicalBatch
from dpllm.text.data import Unit

Floats = NDArray[np.float64]

RANK_TOLERANCE = 1e-5  # of the largest singular value: what float32 leaves of a zero
SAME = 1e-4  # relative difference of two inputs that are the same
CHUNK = 2**24  # numbers of candidate inputs held at once


def first_adapters(net: nn.Module, batch: PhysicalBatch) -> list[str]:
    """Names of the A matrices that read what the first adapter reads, if that depends on single tokens."""
    adapters: dict[str, nn.Module] = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and ".lora_A." in f".{name}" and module.weight.requires_grad
    }
    if not adapters:
        raise ConfigError(
            "the model has no LoRA adapter that trains, so the span check has no gradient to read: with frozen-layer "
            "fine-tuning the first layers do not train. Use adapter.method: lora."
        )
    seen = _inputs(net, adapters, batch.input_ids_RT)
    first = next(iter(seen))
    other_ids = batch.input_ids_RT.clone()
    other_ids[:, 0] = (other_ids[:, 0] + 1) % vocabulary_of(net)
    mixed = _inputs(net, {first: adapters[first]}, other_ids)[first]
    if not _same(seen[first][:, 1:], mixed[:, 1:]):
        raise ConfigError(
            f"{first} reads tokens that attention has mixed, so the span check of the first block does not apply to it. Put "
            "adapters on the first block's attention: adapter.target_modules: auto."
        )
    return [name for name, input in seen.items() if input.shape == seen[first].shape and _same(input, seen[first])]


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= SAME * max(float(one.norm()), 1e-30)


class _StopForward(Exception):
    """Enough was seen of a forward pass."""


def _inputs(net: nn.Module, layers: dict[str, nn.Module], ids: Tensor, *, stop: bool = False) -> dict[str, Tensor]:
    """What each layer reads, in the order of the calls, without dropout."""
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, arguments[0].detach().float())
            if stop:
                raise _StopForward

        return hook

    handles = [layer.register_forward_pre_hook(look(name)) for name, layer in layers.items()]
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), contextlib.suppress(_StopForward):
            net(input_ids=ids, use_cache=False)
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    return seen


def positional(net: nn.Module, layer: str, batch: PhysicalBatch) -> bool:
    """Whether one token is read differently at different positions (learned positions, added to the embedding)."""
    if batch.input_ids_RT.shape[1] < 2:
        return False
    ids = batch.input_ids_RT[:1, :1].expand(1, 2)
    input_RLD = _inputs(net, {layer: net.get_submodule(layer)}, ids, stop=True)[layer]
    return not _same(input_RLD[:, 0], input_RLD[:, 1])


def tokens_of(units: Sequence[Unit], positional: bool) -> tuple[set[int], int]:
    """Tokens before the last target of their sequence, which alone have part in a loss; and b."""
    inputs = set()
    for unit in units:
        for sequence in unit.sequences:
            last = max(position for position, target in enumerate(sequence.loss_mask) if target)
            inputs |= {(token, at if positional else 0) for at, token in enumerate(sequence.input_ids[:last])}
    return {token for token, _ in inputs}, len(inputs)


def vocabulary_of(net: nn.Module) -> int:
    """Rows of the input embedding."""
    get: Any = net.get_input_embeddings
    return int(get().weight.shape[0])


def choose_candidates(
    members: set[int], vocabulary: int, others: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """The batch's tokens and some others of the vocabulary, in ascending order.

    Raises:
        ConfigError: There is no other token.
    """
    rest = np.setdiff1d(np.arange(vocabulary), sorted(members))
    if not len(rest):
        raise ConfigError("the batch holds every token of the vocabulary, so none can be told from others. Take fewer.")
    chosen = generator.choice(rest, min(others, len(rest)), replace=False)
    return np.sort(np.concatenate([np.array(sorted(members)), chosen]))


def row_space(rows_GD: Tensor) -> Tensor:
    """An orthonormal basis of the span of the rows, by rows."""
    _, values, basis = torch.linalg.svd(rows_GD, full_matrices=False)
    kept: Tensor = basis[values > RANK_TOLERANCE * values.max()] if len(values) else basis
    return kept


def span_scores(
    net: nn.Module, layer: str, tokens: NDArray[np.int64], length: int, gradients: Sequence[Tensor]
) -> list[tuple[Floats, Floats]]:
    """(span_K, energy_K) for each gradient: the best over positions, of inputs of length one."""
    reader = {layer: net.get_submodule(layer)}
    device = next(net.parameters()).device
    bases = [row_space(gradient) for gradient in gradients]
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in gradients]
    width = gradients[0].shape[1]
    for chunk in torch.split(torch.tensor(tokens), max(1, CHUNK // (length * width))):
        ids = chunk.to(device)[:, None].expand(-1, length)
        input_KLD = _inputs(net, reader, ids, stop=True)[layer].double().cpu()
        input_KLD = input_KLD / input_KLD.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        for gradient, basis, (span, energy) in zip(gradients, bases, found, strict=True):
            span.append((input_KLD @ basis.T).square().sum(dim=-1).amax(dim=1))
            energy.append((input_KLD @ gradient.T).square().sum(dim=-1).amax(dim=1))
    return [(torch.cat(span).numpy(), torch.cat(energy).numpy()) for span, energy in found]


def ranked(score_K: Floats, member_K: NDArray[np.bool_]) -> tuple[float, float]:
    """Rank AUC with ties counted half, and the share of members among as many highest scores (ties at random)."""
    beaten_P, _ = placements(score_K[member_K], score_K[~member_K])
    order = np.lexsort((np.random.default_rng(0).permutation(len(score_K)), -score_K))
    return float(beaten_P.mean()), float(member_K[order[: len(beaten_P)]].mean())
