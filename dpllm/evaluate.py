"""Held-out loss and accuracy.

Comes in: a model and tokenised examples. Goes out: nats per target token, and the share of tokens that the model ranks
first. Both are computed from data, so they are private unless the evaluation data are declared public; the caller decides
where they may go.

Shape suffixes: R sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import distributed, nn

from dpllm.data import TokenSequence, Unit
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.sampling import collate


class HeldOut(NamedTuple):
    """What one pass over held-out text shows.

    Attributes:
        loss: Mean negative log-likelihood, in nats per target token.
        accuracy: Share of target tokens to which the model gives the highest logit, in [0, 1].
        tokens: Number of target tokens.
    """

    loss: float
    accuracy: float
    tokens: int


def held_out_loss(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    batch_size: int,
    device: torch.device,
    autocast: Callable[[], torch.autocast | object],
    rank: int = 0,
    world: int = 1,
) -> HeldOut:
    """Mean negative log-likelihood per target token, and next-token accuracy, in one pass.

    All ranks make the same number of forward passes, because a sharded model is gathered by all of them in each.

    Args:
        model: Any causal LM; put into eval mode and back.
        sequences: Tokenised examples.
        batch_size: Sequences in one forward pass.
        device: The model's.
        autocast: Makes the context of the forward pass.
        rank: This process; each scores its share.
        world: Number of processes.

    Returns:
        Both over the target tokens of all sequences, and their number.
    """
    mine = sorted(sequences[rank::world], key=lambda sequence: len(sequence.input_ids))
    training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    longest_share = math.ceil(len(sequences) / world)
    # Not inference_mode: what a sharded model gathers first under it could never be used in a backward pass.
    with torch.no_grad(), autocast():  # type: ignore[attr-defined]
        for start in range(0, longest_share, batch_size):
            units = [Unit((sequence,)) for sequence in mine[start : start + batch_size]]
            batch = collate(units, pad_id=0, dummy_rows=0 if units else 1).to(device)
            logits_RTV = model(
                input_ids=batch.input_ids_RT, attention_mask=batch.attention_mask_RT, use_cache=False
            ).logits
            tokens_R = batch.loss_mask_RT.sum(dim=1)
            loss_R = sequence_losses(logits_RTV, batch.input_ids_RT, batch.loss_mask_RT, tokens_R.float().clamp(min=1))
            hit_RT = (logits_RTV[:, :-1].argmax(dim=-1) == batch.input_ids_RT[:, 1:]) & batch.loss_mask_RT[:, 1:]
            sums = (loss_R.double() * tokens_R).sum(), tokens_R.double().sum(), hit_RT.sum().double()
            totals += torch.stack(sums).cpu()
    model.train(training)
    if world > 1:
        on_device = totals.float().to(device) if device.type == "mps" else totals.to(device)
        distributed.all_reduce(on_device)
        totals = on_device.cpu().double()
    return HeldOut(float(totals[0] / totals[1]), float(totals[2] / totals[1]), int(totals[1]))
