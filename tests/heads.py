"""Losses by the book, and a toy model with a named head: what tests of losses without logits compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import tiny_models as tm
import torch
from torch import Tensor, nn

from dpllm.privacy.attention import RowAttention, attends_by_interface
from dpllm.privacy.loss import TokenLosses, row_sums
from dpllm.privacy.packing import Pass, lay_out
from dpllm.privacy.selfcheck import has_experts

VOCABULARY = tm.VOCABULARY


def ragged(tokens: int = tm.TOKENS, seed: int = 0) -> Pass:
    """All rows in one pass: one after the other, or, where it has no number of tokens, padded under one another."""
    return lay_out(tm.units(tm.RAGGED, seed), tm.packing(tokens), 0)


def ways(net: nn.Module) -> list[Pass]:
    """The passes of these rows that a model can run."""
    packed = attends_by_interface(net) and not has_experts(net)
    return [ragged(tm.ALONE), *([ragged()] if packed else [])]


def logits(net: nn.Module, piece: Pass) -> Tensor:
    """logits_MV of a pass, as the model itself computes them."""
    positions = {} if piece.position_ids_1M is None else {"position_ids": piece.position_ids_1M}
    with RowAttention(net).of(piece):
        return net(input_ids=piece.input_ids_1M, use_cache=False, **positions).logits.flatten(0, 1)


def plain(net: nn.Module, piece: Pass, autocast: Any = contextlib.nullcontext, seed: int = 0) -> Tensor:
    """loss_R of the ragged rows by the book: log-softmax of all logits, targets picked one by one."""
    with autocast():
        logits_MV = logits(net, piece)
    kind = torch.float64 if logits_MV.dtype == torch.float64 else torch.float32
    scores_MV, loss_R = logits_MV.to(kind).log_softmax(dim=-1), []
    sequences = [sequence for unit in tm.units(tm.RAGGED, seed) for sequence in unit.sequences]
    for row, sequence in zip(piece.rows, sequences, strict=True):
        targets = [target for target, learned in enumerate(sequence.loss_mask) if learned]
        chosen = [scores_MV[row.start + target - 1, sequence.input_ids[target]] for target in targets]
        loss_R.append(-torch.stack(chosen).sum() / sequence.denominator)
    return torch.stack(loss_R)


def losses(scorer: TokenLosses, net: nn.Module, piece: Pass) -> Tensor:
    """loss_R as the engine forms it."""
    with RowAttention(net).of(piece):
        return row_sums(scorer(piece).nll_M, piece.rows) / piece.denominator_R


def gradients(loss_R: Tensor, net: nn.Module) -> Tensor:
    """Of the rows weighted differently, so that rows which changed places would show."""
    weight_R = torch.linspace(1.0, 2.0, len(loss_R), dtype=loss_R.dtype)
    parts = torch.autograd.grad((weight_R * loss_R).sum(), list(tm.trainable(net).values()))
    return torch.cat([gradient.flatten() for gradient in parts])


class Headed(tm.Toy):
    """A toy that names its head, as transformers' models do; ``logits`` makes its logits from the head and what it reads."""

    def __init__(
        self, logits: Callable[[nn.Module, Tensor], Tensor] = lambda head, hidden_RTd: head(hidden_RTd)
    ) -> None:
        super().__init__()
        self.logits = partial(logits, self.head)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.logits(self.hidden(self.embed(input_ids))))
