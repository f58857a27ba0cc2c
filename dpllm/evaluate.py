"""Held-out loss.

Comes in: a model and tokenised examples. Goes out: nats per target token. The figure is computed from data, so it is
private unless the evaluation data are declared public; the caller decides where it may go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import distributed, nn

from dpllm.data import TokenSequence, Unit
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.sampling import collate


def held_out_loss(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    batch_size: int,
    device: torch.device,
    autocast: Callable[[], torch.autocast | object],
    rank: int = 0,
    world: int = 1,
) -> tuple[float, int]:
    """Mean negative log-likelihood per target token.

    Args:
        model: Any causal LM; put into eval mode and back.
        sequences: Tokenised examples.
        batch_size: Sequences in one forward pass.
        device: The model's.
        autocast: Makes the context of the forward pass.
        rank: This process; each scores its share.
        world: Number of processes.

    Returns:
        Loss in nats per target token over all sequences, and the number of target tokens.
    """
    mine = sorted(sequences[rank::world], key=lambda sequence: len(sequence.input_ids))
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode(), autocast():  # type: ignore[attr-defined]
        for start in range(0, len(mine), batch_size):
            units = [Unit((sequence,)) for sequence in mine[start : start + batch_size]]
            batch = collate(units, pad_id=0).to(device)
            logits = model(input_ids=batch.input_ids_RT, attention_mask=batch.attention_mask_RT, use_cache=False).logits
            tokens_R = batch.loss_mask_RT.sum(dim=1)
            loss_R = sequence_losses(logits, batch.input_ids_RT, batch.loss_mask_RT, tokens_R.float())
            totals += torch.stack([(loss_R.double() * tokens_R).sum(), tokens_R.double().sum()]).cpu()
    model.train(training)
    if world > 1:
        on_device = totals.float().to(device) if device.type == "mps" else totals.to(device)
        distributed.all_reduce(on_device)
        totals = on_device.cpu().double()
    return float(totals[0] / totals[1]), int(totals[1])
