"""Per-example loss, each example divided by its own tokens only.

Comes in: logits and masks. Goes out: one loss for each sequence. ``outputs.loss`` of transformers is a mean over the
tokens of the whole batch, which couples examples: with it, one long neighbour moved the clipped sum by 2.2 C.

Only targets are computed on, those of one row at a time, so that no product has a shape that follows another row. Logits of
the model's own precision are held once, and what is wider, or longer than a chunk, never exists. ``fused_loss.py`` does
without the logits too.

Shape suffixes: R sequences, T tokens, V vocabulary, N targets, n targets of one chunk, M = R T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpllm.errors import Refused

CHUNK = {"cuda": 2**26}  # numbers of a chunk's logits; public, and the same for every batch
CHUNK_ELSEWHERE = 2**25  # fewer make products slow on a CPU, more make nothing faster (measured)
WITHOUT_PRODUCTS = 8  # the part of it that is computed on at once where logits exist: what fits a cache is faster


class Targets(NamedTuple):
    """What a batch has to predict, and from where.

    Attributes:
        rows: R.
        tokens: T.
        count_R: How many there are in each row.
        position_N: Where each is predicted, counted over all rows: one before the target.
        target_N: The token to predict.
    """

    rows: int
    tokens: int
    count_R: list[int]
    position_N: Tensor
    target_N: Tensor

    @classmethod
    def of(cls, input_ids_RT: Tensor, loss_mask_RT: Tensor) -> Targets:
        """Reads them off the masks.

        Args:
            input_ids_RT: Token ids.
            loss_mask_RT: True where a token is a target; position 0 never is.
        """
        rows, tokens = input_ids_RT.shape
        if input_ids_RT.is_meta:  # shapes without values: as many as there can be
            position_N = torch.arange(rows * tokens, device=input_ids_RT.device)
            return cls(rows, tokens, [tokens] * rows, position_N, input_ids_RT.flatten())
        position_N = functional.pad(loss_mask_RT[:, 1:], (0, 1)).flatten().nonzero().flatten()
        count_R = loss_mask_RT[:, 1:].sum(dim=1).tolist()
        return cls(rows, tokens, count_R, position_N, input_ids_RT.flatten()[position_N + 1])

    def chunks(self, vocabulary: int, parts: int = 1) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """(position_n, target_n, where among N): the targets of one row, in parts no longer than the vocabulary allows.

        Args:
            vocabulary: V.
            parts: Into how many the usual number of targets is cut again.
        """
        size = max(1, chunk_tokens(vocabulary, self.position_N.device) // parts)
        first = 0
        for count in self.count_R:
            for start in range(first, first + count, size):
                part = slice(start, min(start + size, first + count))
                yield self.position_N[part], self.target_N[part], part
            first += count

    def check(self, shape: torch.Size) -> None:
        """Refuses what has not one vector for each of R x T positions."""
        if shape[:-1] != (self.rows, self.tokens):
            raise Refused(
                f"the model returned {tuple(shape[:-1])} positions for {(self.rows, self.tokens)} tokens, so that nobody "
                "could tell which token a position predicts. Use a base model without virtual tokens and without packing."
            )


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Targets whose logits are computed on at once: at least 1."""
    return max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // vocabulary)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which losses are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def sequence_losses(logits_RTV: Tensor, input_ids_RT: Tensor, loss_mask_RT: Tensor, denominator_R: Tensor) -> Tensor:
    """Negative log-likelihood of each sequence's targets over its example's number of targets.

    Holds the logits once and, in the backward pass, their gradient once, both in the precision of the logits.

    Args:
        logits_RTV: Model output; position t predicts token t + 1.
        input_ids_RT: Token ids.
        loss_mask_RT: True where a token is a target; position 0 never is.
        denominator_R: Target tokens of the whole example (its chunks add up to the example's mean).

    Returns:
        loss_R in nats, float32, or float64 for float64 logits. Row r depends on row r of the inputs alone (in low
        precision, up to rounding).

    Raises:
        Refused: There is not one vector of logits for each token.
    """
    return example_means(token_losses(logits_RTV, Targets.of(input_ids_RT, loss_mask_RT)), denominator_R)


def token_losses(logits_RTV: Tensor, targets: Targets) -> Tensor:
    """nll_RT in nats: at each position that predicts a target its negative log-likelihood, and zero at all others.

    What stands at other positions, infinities and nan among it, plays no part.

    Raises:
        Refused: There is not one vector of logits for each token.
    """
    targets.check(logits_RTV.shape)
    nll_M: Tensor = _FromLogits.apply(logits_RTV.flatten(0, 1), targets)  # type: ignore[no-untyped-call]
    return nll_M.view(targets.rows, targets.tokens)


def example_means(nll_RT: Tensor, denominator_R: Tensor) -> Tensor:
    """loss_R: the sum over a row's positions, divided by the number of targets of its own example."""
    return nll_RT.sum(dim=1) / denominator_R


def log_likelihood_(logits_nV: Tensor, target_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood; leaves exp(logits - top) in the place of the logits.

    Returns:
        nll_n1, top_n1 and total_n1, the sum of what is left: softmax = what is left / total.
    """
    top_n1 = logits_nV.amax(dim=1, keepdim=True)
    logits_nV.sub_(top_n1)
    chosen_n1 = logits_nV.gather(1, target_n.unsqueeze(1))
    total_n1 = logits_nV.exp_().sum(dim=1, keepdim=True)
    return total_n1.log() - chosen_n1, top_n1, total_n1


def minus_one_(softmax_nV: Tensor, target_n: Tensor) -> None:
    """From the softmax to the gradient of nll with respect to the logits, in place."""
    softmax_nV[torch.arange(len(target_n), device=target_n.device), target_n] -= 1.0


class _FromLogits(torch.autograd.Function):
    """nll_M from logits_MV; of the backward pass, only a maximum and a sum for each target is kept beside the logits."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets: Targets) -> Tensor:
        nll_M = logits_MV.new_zeros(len(logits_MV), dtype=wide(logits_MV.dtype))
        top_N1 = nll_M.new_empty(len(targets.position_N), 1)
        total_N1 = torch.empty_like(top_N1)
        for position_n, target_n, part in targets.chunks(logits_MV.shape[1], WITHOUT_PRODUCTS):
            logits_nV = logits_MV[position_n].to(nll_M.dtype)
            nll_n1, top_N1[part], total_N1[part] = log_likelihood_(logits_nV, target_n)
            nll_M[position_n] = nll_n1.squeeze(1)
        ctx.save_for_backward(logits_MV, top_N1, total_N1)
        ctx.targets = targets
        return nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        logits_MV, top_N1, total_N1 = ctx.saved_tensors
        gradient_MV = torch.zeros_like(logits_MV)
        for position_n, target_n, part in ctx.targets.chunks(logits_MV.shape[1], WITHOUT_PRODUCTS):
            part_nV = logits_MV[position_n].to(top_N1.dtype).sub_(top_N1[part]).exp_().div_(total_N1[part])
            minus_one_(part_nV, target_n)
            gradient_MV[position_n] = part_nV.mul_(incoming[0][position_n].unsqueeze(1)).to(gradient_MV.dtype)
        return gradient_MV, None
