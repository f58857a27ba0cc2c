"""Per-example loss, each example divided by its own tokens only.

Comes in: logits and masks. Goes out: one loss for each sequence. ``outputs.loss`` of transformers is a mean over the
tokens of the whole batch, which couples examples: with it, one long neighbour moved the clipped sum by 2.2 C.

Shape suffixes: R sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def sequence_losses(logits_RTV: Tensor, input_ids_RT: Tensor, loss_mask_RT: Tensor, denominator_R: Tensor) -> Tensor:
    """Negative log-likelihood of each sequence's targets over its example's number of targets.

    Args:
        logits_RTV: Model output; position t predicts token t + 1.
        input_ids_RT: Token ids.
        loss_mask_RT: True where a token is a target; position 0 never is.
        denominator_R: Target tokens of the whole example (its chunks add up to the example's mean).

    Returns:
        loss_R in nats, float32. Row r depends on row r of the inputs alone (in low precision, up to rounding).
    """
    targets_RT = input_ids_RT[:, 1:]
    nll_RT = functional.cross_entropy(
        logits_RTV[:, :-1].float().flatten(0, 1), targets_RT.flatten(), reduction="none"
    ).view(targets_RT.shape)
    # where, not a product: a padded position may hold an infinite loss, and 0 * inf is nan.
    nll_RT = torch.where(loss_mask_RT[:, 1:], nll_RT, torch.zeros_like(nll_RT))
    return nll_RT.sum(dim=1) / denominator_R
