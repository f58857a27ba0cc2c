"""Computes attention row by row in a pass that concatenates rows.

Comes in: a model of transformers that uses its attention interface; the rows of a pass. Goes out: the same model, which attends
within rows during a ``with`` block and has its own attention otherwise.

Each row is computed by itself, in a shape that depends on its own length: one call for each row or, on a GPU in low precision,
one call of FlashAttention for ragged rows, which gives a row the same bits whatever the other rows.

Shape suffixes: H heads, M tokens of a pass, L tokens of a row, d of a head.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig

from dpllm.errors import NotBatchInvariant
from dpllm.privacy.packing import Pass, Segment, sent

_VARLEN: Callable[..., Any] | None = None
_VARLEN_OPTIONS: frozenset[str] = frozenset()
with contextlib.suppress(ImportError):  # before torch 2.10
    from torch.nn.attention import varlen

    _VARLEN = varlen.varlen_attn
    _VARLEN_OPTIONS = frozenset(inspect.signature(varlen.varlen_attn).parameters)

# Rows of one call, including empty ones: FlashAttention splits a row's queries if rows times heads are fewer than the GPU's
# multiprocessors.
MANY_ROWS = 256
NAME = "dpllm_packed"  # registered with transformers
# Arguments that transformers passes to every attention and that change nothing within a row without a cache.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})
HARMLESS |= {"is_causal", "return_dict", "logits_to_keep", "num_items_in_batch", "position_embeddings", "layer_idx"}
HARMLESS |= {"output_router_logits"}


class Layout:
    """The rows of the running pass."""

    def __init__(self, rows: Sequence[Segment], longest: int) -> None:
        """Rows from the first token on, without gaps; ``longest`` is the public maximum of their tokens."""
        self.rows, self.longest = rows, max([longest, *(row.stop - row.start for row in rows)])
        self._boundaries: Tensor | None = None

    def boundaries(self, tokens: int, device: torch.device) -> Tensor:
        """Starts of the rows and of the pieces of padding after them, then the end repeated.

        There are so many that a kernel that splits its work by their number never splits.
        """
        if self._boundaries is None or self._boundaries.device != device:
            stop = self.rows[-1].stop if self.rows else 0
            starts = [*(row.start for row in self.rows), *range(stop, tokens, self.longest)]
            starts += [tokens] * (1 + max(0, MANY_ROWS - len(starts)))
            self._boundaries = sent(starts, torch.int32, device)
        return self._boundaries


_layouts: list[Layout] = []  # innermost last; checkpointing also reads it in the backward pass


class RowAttention:
    """Switches the attention of a model; one object per model."""

    def __init__(self, model: nn.Module) -> None:
        """Finds every configuration from which a layer reads its attention."""
        configs = {id(config): config for module in model.modules() for config in _configs(module)}
        self._configs = list(configs.values())

    @contextlib.contextmanager
    def of(self, batch: Pass) -> Iterator[None]:
        """Attends within the rows of a pass, forward and backward; an example by itself keeps the model's own attention."""
        if batch.position_ids_1M is None:
            yield
            return
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = NAME
        _layouts.append(Layout(batch.rows, batch.longest))
        try:
            yield
        finally:
            _layouts.pop()
            for config, original in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = original


def _configs(module: nn.Module) -> Iterator[PretrainedConfig]:
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig):
        yield config
        for name in config.sub_configs:
            if isinstance(inner := getattr(config, name, None), PretrainedConfig):
                yield inner


def attends_by_interface(model: nn.Module) -> bool:
    """Whether a model uses transformers' attention interface, according to its classes; other models read rows one by one."""
    classes = {type(module) for module in model.modules()}
    return any(getattr(kind, "_supports_attention_backend", False) for kind in classes)


class Options(NamedTuple):
    """Attention settings of a layer."""

    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


def by_rows(
    module: nn.Module,
    query_1HMd: Tensor,
    key_1HMd: Tensor,
    value_1HMd: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' attention interface: returns (1, M, H, d) and no weights.

    Raises:
        NotBatchInvariant: The model passes an argument that this attention would ignore.
    """
    options = Options(**{name: arguments.pop(name) for name in Options._fields if arguments.get(name) is not None})
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in HARMLESS)
    if unknown or attention_mask is not None or not _layouts:
        rejected = ", ".join(unknown) or "a mask"
        raise NotBatchInvariant(
            f"{type(module).__name__} passes {rejected} to its attention, which is not supported in a pass, so its rows could "
            "not be kept apart."
        )
    layout, kind = _layouts[-1], query_1HMd.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # the planner runs on shapes alone
        dtype = torch.get_autocast_dtype(kind)
        query_1HMd, key_1HMd, value_1HMd = (part.to(dtype) for part in (query_1HMd, key_1HMd, value_1HMd))
    if ragged_here(query_1HMd, value_1HMd, options):
        return at_once(query_1HMd, key_1HMd, value_1HMd, layout, options), None
    pieces, end = [], 0
    for start, end, _ in layout.rows:
        query_1HLd, key_1HLd, value_1HLd = (part[:, :, start:end] for part in (query_1HMd, key_1HMd, value_1HMd))
        pieces.append(attend(query_1HLd, key_1HLd, value_1HLd, options))
    padding = query_1HMd.shape[2] - end
    pieces.append(query_1HMd.new_zeros(1, query_1HMd.shape[1], padding, value_1HMd.shape[3]))
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def attend(query_1HLd: Tensor, key_1HLd: Tensor, value_1HLd: Tensor, options: Options) -> Tensor:
    """Causal attention of one row, shape (1, H, L, d); keys and values may have fewer heads."""
    length, groups = query_1HLd.shape[2], query_1HLd.shape[1] // key_1HLd.shape[1]
    if groups > 1:
        key_1HLd, value_1HLd = (part.repeat_interleave(groups, dim=1) for part in (key_1HLd, value_1HLd))
    window = options.sliding_window or length
    by_torch = partial(
        functional.scaled_dot_product_attention,
        query_1HLd,
        key_1HLd,
        value_1HLd,
        scale=options.scaling,
        dropout_p=options.dropout,
    )
    if options.softcap is None and window >= length:
        return by_torch(is_causal=True)
    place_L = torch.arange(length, device=query_1HLd.device)
    behind_LL = place_L[:, None] - place_L
    kept_LL = (behind_LL >= 0) & (behind_LL < window)
    if options.softcap is None:
        return by_torch(attn_mask=kept_LL)
    scale = query_1HLd.shape[3] ** -0.5 if options.scaling is None else options.scaling
    product_1HLL = query_1HLd.float() @ key_1HLd.float().transpose(2, 3)
    scores_1HLL = torch.tanh(product_1HLL * scale / options.softcap) * options.softcap
    scores_1HLL = scores_1HLL.masked_fill(~kept_LL, torch.finfo(scores_1HLL.dtype).min)
    weights_1HLL = scores_1HLL.softmax(dim=-1, dtype=torch.float32).to(value_1HLd.dtype)
    return functional.dropout(weights_1HLL, options.dropout) @ value_1HLd


def ragged_here(query: Tensor, value: Tensor, options: Options) -> bool:
    """Whether FlashAttention can compute rows of different lengths in one call here."""
    wide = query.shape[-1]
    return (
        query.is_cuda
        and _VARLEN is not None
        and options.softcap is None
        and options.dropout == 0.0
        and query.dtype in (torch.bfloat16, torch.float16)
        and wide == value.shape[-1]
        and wide <= 256
        and wide % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def at_once(query_1HMd: Tensor, key_1HMd: Tensor, value_1HMd: Tensor, layout: Layout, options: Options) -> Tensor:
    """Causal attention of all rows in one call, (1, M, H, d), which never splits a row's keys depending on the other rows."""
    assert _VARLEN is not None
    tokens, groups = query_1HMd.shape[2], query_1HMd.shape[1] // key_1HMd.shape[1]
    settings: dict[str, Any] = {"scale": options.scaling, "window_size": (-1, 0)}
    if options.sliding_window is not None:
        settings["window_size"] = (options.sliding_window - 1, 0)  # preceding tokens that a token sees
    if "num_splits" in _VARLEN_OPTIONS:
        settings["num_splits"] = 1
    if groups > 1 and "enable_gqa" in _VARLEN_OPTIONS:
        settings["enable_gqa"] = True
    elif groups > 1:
        key_1HMd, value_1HMd = (part.repeat_interleave(groups, dim=1) for part in (key_1HMd, value_1HMd))
    query_MHd, key_MHd, value_MHd = (part[0].transpose(0, 1) for part in (query_1HMd, key_1HMd, value_1HMd))
    starts = layout.boundaries(tokens, query_1HMd.device)
    output_MHd = _VARLEN(query_MHd, key_MHd, value_MHd, starts, starts, layout.longest, layout.longest, **settings)
    output_1MHd: Tensor = output_MHd.unsqueeze(0)
    return output_1MHd


AttentionInterface.register(NAME, by_rows)
