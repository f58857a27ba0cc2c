"""Held-out loss and accuracy.

Comes in: a model and tokenised examples. Goes out: nats per target token, and the share of tokens that the model ranks
first. Both are computed from data, so they are private unless the evaluation data are declared public; the caller decides
where they may go.

Shape suffixes: R sequences, T tokens, V vocabulary.
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
from dpllm.model.longest import rows_at_once
from dpllm.privacy.loss import Autocast, TokenLosses, in_eval_mode
from dpllm.privacy.packing import lay_out
from dpllm.privacy.schedule import PADDED
from dpllm.progress import tell
from dpllm.text.data import TokenSequence, Unit


class HeldOut(NamedTuple):
    """What one pass over held-out text shows."""

    loss: float  # mean negative log-likelihood, in nats per target token
    # Share of target tokens to which the model gives the highest logit, in [0, 1]; None of preference pairs, whose chosen answers
    # have the loss and the tokens.
    accuracy: float | None
    tokens: int  # target tokens
    reward_accuracy: float | None = None  # share of pairs whose chosen answer has the higher implicit reward, in [0, 1]
    reward_margin: float | None = None  # mean difference of the implicit rewards


def contiguous_head(model: Any) -> RemovableHandle | contextlib.nullcontext[None]:
    """Gives the output head a copy of what it reads, until the handle's ``with`` block ends or the model goes.

    The last states of a batch are a slice, and torch's product on a CPU then copies the weights for each row; what that takes
    stands in docs/measurements.md.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return contextlib.nullcontext()
    handle: RemovableHandle = head.register_forward_pre_hook(lambda _, read: tuple(one.contiguous() for one in read))
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
    mine = sorted(sequences[rank::world], key=lambda sequence: len(sequence.input_ids))
    sums_3 = torch.zeros(3, dtype=torch.float64)
    token_losses = TokenLosses(model, device, autocast)
    batch_size = rows_at_once(model, batch_size, max(map(len, (one.input_ids for one in sequences)), default=0))
    longest_share = math.ceil(len(sequences) / world)
    with in_eval_mode(model):
        for start in range(0, longest_share, batch_size):
            tell("Evaluating", start, longest_share)
            units = [Unit((sequence,)) for sequence in mine[start : start + batch_size]]
            batch = lay_out(units, PADDED, pad_id=0).to(device)
            nll_M, hit_M = token_losses(batch, hits=True)
            assert hit_M is not None
            sums_3 += torch.tensor([float(nll_M.double().sum()), batch.targets.count, int(hit_M.sum())])
    if world > 1:
        sums_3 = torch.tensor(processes.totals(*sums_3.tolist()), dtype=torch.float64)
    nats, learned, hits = sums_3
    return HeldOut(float(nats / learned), float(hits / learned), int(learned))
