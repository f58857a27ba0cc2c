"""Forward passes that train nothing: which rows may be read together, and the loss of held-out text.

Comes in: a model as transformers builds it; tokenised examples. Goes out: how many rows may share a pass, and a model that
remembers no earlier pass; nats per target token, and the share of tokens that the model ranks first. These two are computed from
data, so they are private unless the evaluation data are declared public; the caller decides where they may go.

Where its type is longrope or dynamic, a rotary embedding takes its frequencies by the largest position of what is read together,
so that a short row beside a long one is read as if it were long. Read alone, a row decides for itself.
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

# Types of rotary embeddings that look at no length. Any other, also one that comes later, is taken to look at it.
_STEADY = {"default", "linear", "yarn", "llama3", "proportional", "axial"}
_SCALES = {"llama_4_scaling_beta", "long_mscale"}  # of attention, by position
_ENDS = ("original_max_position_embeddings", "max_position_embeddings")
# After how many tokens attention is masked or scaled in another way.
_WINDOWS = {"sliding_window", "sliding_window_size", "window_size", "attention_window", "attention_window_size"}
_WINDOWS |= {"local_attention", "attention_chunk_size", "floor_scale"}


def rows_at_once(model: nn.Module, rows: int, tokens: int, *, windows: bool = False) -> int:
    """How many of ``rows`` may be read together: 1 where the longest, of up to so many tokens, would decide about the others.

    The model remembers no pass from here on, see ``without_memory``.

    Args:
        model: Its configuration says what changes with the length.
        rows: In one forward pass, at most.
        tokens: Of the longest row that there may be, what is written behind it included.
        windows: Also where a window or a scale of attention begins, which no row decides for another, but kernels may.
    """
    without_memory(model)
    config: Any = getattr(model, "config", None)
    known: dict[str, Any] = config.get_text_config().to_dict() if config is not None else {}
    ropes = known.get("rope_parameters") or {}
    begins = [known.get(name) for name in _WINDOWS] if windows else []
    for rope in [ropes] if "rope_type" in ropes else ropes.values():  # one, or one for each kind of layer
        if rope and (rope["rope_type"] not in _STEADY or _SCALES & rope.keys()):
            ends = [rope.get(_ENDS[0]), *(known.get(name) for name in _ENDS)]
            begins += [end for end in ends if end] or [1]
    return 1 if any(isinstance(begin, int) and 0 < begin < tokens for begin in begins) else rows


def without_memory(model: nn.Module) -> None:
    """Lets every rotary embedding of type dynamic begin each pass as a new one would, in place.

    transformers keeps the frequencies of the longest pass so far (seen in 5.23), so that a row would be read by those before it,
    alone or not. Can go when they are computed anew in each pass.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        known = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any("dynamic" in str(kind) for kind in known) and _as_new not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_as_new, with_kwargs=True)


def _as_new(rope: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Of the kind of layer that is asked for alone: what another has just taken is still to be seen (``selfcheck``)."""
    layer = named.get("layer_type", inputs[2] if len(inputs) > 2 else None)
    kind = f"{layer}_" if layer else ""
    if (grown := getattr(rope, f"{kind}max_seq_len_cached", None)) is not None and grown != rope.original_max_seq_len:
        first, now = (getattr(rope, f"{kind}{name}") for name in ("original_inv_freq", "inv_freq"))
        setattr(rope, f"{kind}inv_freq", first.to(now.device).clone())
        setattr(rope, f"{kind}max_seq_len_cached", rope.original_max_seq_len)


class HeldOut(NamedTuple):
    """What one pass over held-out text shows."""

    loss: float  # mean negative log-likelihood, in nats per target token
    # Share of target tokens to which the model gives the highest logit, in [0, 1]; None where two answers are compared.
    accuracy: float | None
    tokens: int  # target tokens
    reward_accuracy: float | None = None  # see ``rewards.compared``
    reward_margin: float | None = None


def contiguous_head(model: Any) -> RemovableHandle | contextlib.nullcontext[None]:
    """Gives the output head a copy of what it reads, until the handle's ``with`` block ends or the model goes.

    The last states of a batch are a slice, and torch's product on a CPU then copies the weights for each row; what that takes
    stands in benchmarks/NOTES.md.
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

    Of ``world`` processes each scores its share. All make the same number of forward passes, because a sharded model is
    gathered by all of them in each. The model is put into eval mode and back. A sequence has the same loss in any company, but
    for rounding: where the longest of a batch would decide about the others, each is read alone.
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
