"""Forward passes that train nothing: which rows may be read together, and the loss of held-out text.

Comes in: a model as transformers builds it; tokenised examples. Goes out: how many rows may share a pass, and a model that
keeps nothing from earlier passes; nats per target token, and the share of target tokens that the model ranks first. The last two
are computed from data, so they are private unless the evaluation data are public; the caller decides where they may go.

A rotary embedding of type longrope or dynamic chooses its frequencies by the largest position in the pass, so a short row
beside a long one is read as if it were long. A row that is read alone is not affected.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dpllm.model import processes
from dpllm.privacy.loss import Autocast, TokenLosses, in_eval_mode
from dpllm.privacy.packing import lay_out
from dpllm.privacy.schedule import PADDED, TokenSequence, Unit
from dpllm.progress import tell

# Rotary embeddings that do not depend on the length. Any other type, also a future one, is assumed to depend on it.
_STEADY = {"default", "linear", "yarn", "llama3", "proportional", "axial"}
_SCALES = {"llama_4_scaling_beta", "long_mscale"}  # of attention, by position
_ENDS = ("original_max_position_embeddings", "max_position_embeddings")
# Settings that say after how many tokens attention is masked or scaled differently.
_WINDOWS = {"sliding_window", "sliding_window_size", "window_size", "attention_window", "attention_window_size"}
_WINDOWS |= {"local_attention", "attention_chunk_size", "floor_scale"}


def rows_at_once(model: nn.Module, rows: int, tokens: int, *, windows: bool = False) -> int:
    """How many rows may share a forward pass: 1 if the longest, of up to ``tokens``, would change how the others are read.

    From here on the model keeps nothing between passes, see ``without_memory``.

    Args:
        model: Its configuration tells what depends on the length.
        rows: How many the caller would like in one forward pass.
        tokens: Of the longest possible row, including what is generated after it.
        windows: Also 1 if an attention window or scale begins within ``tokens``: kernels may round differently from there on.
    """
    without_memory(model)
    config: Any = getattr(model, "config", None)
    settings: dict[str, Any] = config.get_text_config().to_dict() if config is not None else {}
    ropes = settings.get("rope_parameters") or {}
    begins = [settings.get(name) for name in _WINDOWS] if windows else []
    for rope in [ropes] if "rope_type" in ropes else ropes.values():  # one, or one for each kind of layer
        if rope and (rope["rope_type"] not in _STEADY or _SCALES & rope.keys()):
            ends = [rope.get(_ENDS[0]), *(settings.get(name) for name in _ENDS)]
            begins += [end for end in ends if end] or [1]
    return 1 if any(isinstance(begin, int) and 0 < begin < tokens for begin in begins) else rows


def without_memory(model: nn.Module) -> None:
    """Makes every rotary embedding of type dynamic begin each pass as if it were new, in place.

    transformers keeps the frequencies of the longest pass so far (seen in 5.23), so earlier rows would change how a row is
    read. Can go when it computes them anew in each pass.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        types = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any("dynamic" in str(kind) for kind in types) and _as_new not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_as_new, with_kwargs=True)


def _as_new(rope: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Resets only the requested kind of layer: the self-check still has to see what another kind has just changed."""
    layer = named.get("layer_type", inputs[2] if len(inputs) > 2 else None)
    kind = f"{layer}_" if layer else ""
    if (grown := getattr(rope, f"{kind}max_seq_len_cached", None)) is not None and grown != rope.original_max_seq_len:
        first, now = (getattr(rope, f"{kind}{name}") for name in ("original_inv_freq", "inv_freq"))
        setattr(rope, f"{kind}inv_freq", first.to(now.device).clone())
        setattr(rope, f"{kind}max_seq_len_cached", rope.original_max_seq_len)


class HeldOut(NamedTuple):
    """Figures of one pass over held-out text."""

    loss: float  # mean negative log-likelihood, in nats per target token
    # Share of target tokens to which the model gives the highest logit, in [0, 1]; None if pairs of answers are compared.
    accuracy: float | None
    tokens: int  # target tokens
    reward_accuracy: float | None = None  # see ``rewards.compared``
    reward_margin: float | None = None


def contiguous_head(model: Any) -> RemovableHandle | contextlib.nullcontext[None]:
    """Makes the output head's input contiguous until the handle's ``with`` block ends or the model is freed.

    The last states of a batch are a slice, for which torch on a CPU copies the weights once for each row; benchmarks/NOTES.md
    has the times.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return contextlib.nullcontext()
    handle: RemovableHandle = head.register_forward_pre_hook(lambda _, read: tuple(part.contiguous() for part in read))
    return handle


def held_out_loss(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    batch_size: int,
    device: torch.device,
    autocast: Autocast,
    rank: int = 0,
    world: int = 1,
) -> HeldOut:
    """Loss and accuracy over the target tokens of all sequences, ``batch_size`` of them in one forward pass.

    Each of ``world`` processes scores its share. All make the same number of forward passes, because all of them gather a
    sharded model in each. The model is put into eval mode and back. The other sequences of a batch change a sequence's loss by
    rounding only: if the longest would change how the others are read, each is read alone.
    """
    share = sorted(sequences[rank::world], key=lambda sequence: len(sequence.input_ids))
    sums_3 = torch.zeros(3, dtype=torch.float64)
    token_losses = TokenLosses(model, device, autocast)
    longest = max((len(sequence.input_ids) for sequence in sequences), default=0)
    batch_size = rows_at_once(model, batch_size, longest)
    longest_share = math.ceil(len(sequences) / world)
    with in_eval_mode(model):
        for start in range(0, longest_share, batch_size):
            tell("Evaluating", start, longest_share)
            units = [Unit((sequence,)) for sequence in share[start : start + batch_size]]
            batch = lay_out(units, PADDED, pad_id=0).to(device)
            nll_M, hit_M = token_losses(batch, hits=True)
            assert hit_M is not None
            sums_3 += torch.tensor([float(nll_M.double().sum()), batch.targets.count, int(hit_M.sum())])
    if world > 1:
        sums_3 = torch.tensor(processes.totals(*sums_3.tolist()), dtype=torch.float64)
    nats, learned, hits = sums_3
    return HeldOut(float(nats / learned), float(hits / learned), int(learned))
