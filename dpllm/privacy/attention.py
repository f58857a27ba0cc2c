"""Attention row by row, inside a pass in which rows lie one after the other.

Comes in: a model of transformers, whose attention goes through its attention interface; the rows of a pass. Goes out: the same
model, which for the time of a ``with`` block attends within rows. Everywhere else it has its own attention.

A row is computed in a shape that follows from its own length, and from how many neighbours have the same one: that their number
changes no bit is what ``selfcheck`` shows for every length.

Shape suffixes: H heads, M tokens of a pass, L tokens of a row, n neighbouring rows of equal length, d of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig

from dpllm.errors import Refused
from dpllm.privacy.packing import Pass, Segment

NAME = "dpllm_packed"  # as transformers knows it
# What transformers hands to every attention and what changes nothing within a row without a cache.
HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}
)
HARMLESS |= {"return_dict", "logits_to_keep", "num_items_in_batch", "position_embeddings", "layer_idx"}

_rows: list[
    Sequence[Segment]
] = []  # of the pass that runs, innermost last; checkpointing reads it again in the backward pass


class RowAttention:
    """Switches a model's attention; made once for each model."""

    def __init__(self, model: nn.Module) -> None:
        """Finds every configuration that a layer reads its attention from."""
        configs = {id(config): config for module in model.modules() for config in _configs(module)}
        self._configs = list(configs.values())

    @contextlib.contextmanager
    def of(self, some: Pass) -> Iterator[None]:
        """Attention within the rows of a pass, in its forward and backward pass; its own for an example by itself."""
        if some.position_ids_1M is None:
            yield
            return
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = NAME
        _rows.append(some.rows)
        try:
            yield
        finally:
            _rows.pop()
            for config, own in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = own


def _configs(module: nn.Module) -> Iterator[PretrainedConfig]:
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig):
        yield config
        for name in config.sub_configs:
            if isinstance(inner := getattr(config, name, None), PretrainedConfig):
                yield inner


def by_rows(
    module: nn.Module,
    query_1HMd: Tensor,
    key_1HMd: Tensor,
    value_1HMd: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention interface expects of an attention: (1, M, H, d), and no weights.

    Raises:
        Refused: The model asks for something that is not computed here; it would be ignored.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    if unknown or attention_mask is not None or not _rows:
        what = ", ".join(unknown) or "a mask"
        raise Refused(f"{type(module).__name__} asks its attention for {what}, which rows of one pass cannot have.")
    rows, end = _rows[-1], query_1HMd.shape[2]
    pieces, at = [], 0
    for start, count, length in runs(rows):
        stop = start + count * length
        q, k, v = (
            one[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1)
            for one in (query_1HMd, key_1HMd, value_1HMd)
        )
        row_nHLd = attend(q, k, v, scaling, sliding_window, softcap, dropout)
        pieces.append(row_nHLd.transpose(1, 2).flatten(0, 1))
        at = stop
    if end > at:
        pieces.append(query_1HMd.new_zeros(end - at, query_1HMd.shape[1], value_1HMd.shape[3]))
    return torch.cat(pieces).unsqueeze(0), None


def runs(rows: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """(start, rows, tokens of each) of neighbouring rows of equal length."""
    found: list[tuple[int, int, int]] = []
    for row in rows:
        length = row.stop - row.start
        if found and found[-1][2] == length:
            start, count, _ = found[-1]
            found[-1] = (start, count + 1, length)
        else:
            found.append((row.start, 1, length))
    return found


def attend(
    query_nHLd: Tensor,
    key_nHLd: Tensor,
    value_nHLd: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention of rows of equal length, shape (n, H, L, d); keys and values may have fewer heads."""
    length, groups = query_nHLd.shape[2], query_nHLd.shape[1] // key_nHLd.shape[1]
    if groups > 1:
        key_nHLd, value_nHLd = (one.repeat_interleave(groups, dim=1) for one in (key_nHLd, value_nHLd))
    windowed = sliding_window is not None and length > sliding_window
    if softcap is None and not windowed:
        return functional.scaled_dot_product_attention(
            query_nHLd, key_nHLd, value_nHLd, is_causal=True, scale=scaling, dropout_p=dropout
        )
    place_L = torch.arange(length, device=query_nHLd.device)
    kept_LL = place_L[:, None] >= place_L
    if windowed:
        kept_LL &= place_L[:, None] - place_L < sliding_window
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query_nHLd, key_nHLd, value_nHLd, attn_mask=kept_LL, scale=scaling, dropout_p=dropout
        )
    scale = query_nHLd.shape[3] ** -0.5 if scaling is None else scaling
    scores_nHLL = torch.tanh(query_nHLd @ key_nHLd.transpose(2, 3) * scale / softcap) * softcap
    scores_nHLL = scores_nHLL.masked_fill(~kept_LL, torch.finfo(scores_nHLL.dtype).min)
    weights_nHLL = scores_nHLL.softmax(dim=-1, dtype=torch.float32).to(value_nHLd.dtype)
    return functional.dropout(weights_nHLL, dropout) @ value_nHLd


AttentionInterface.register(NAME, by_rows)
