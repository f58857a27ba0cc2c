"""Losses by the book, and a toy model with a named head: what tests of losses without logits compare with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import tiny_models as tm
import torch
from torch import Tensor, nn

from dpllm.privacy.sampling import PhysicalBatch, collate

VOCABULARY = tm.VOCABULARY


def ragged(dummies: int = 1) -> PhysicalBatch:
    return collate(tm.units(tm.RAGGED), 0, 8 + dummies)


def plain(net: nn.Module, batch: PhysicalBatch, autocast: Any = contextlib.nullcontext) -> Tensor:
    """loss_R by the book: log-softmax of all logits, targets picked one by one."""
    with autocast():
        logits_RTV = net(input_ids=batch.input_ids_RT, use_cache=False).logits
    kind = torch.float64 if logits_RTV.dtype == torch.float64 else torch.float32
    scores_RTV = logits_RTV.to(kind).log_softmax(dim=-1)
    rows = []
    for row, mask_T in enumerate(batch.loss_mask_RT):
        places = mask_T.nonzero().flatten()
        chosen = scores_RTV[row, places - 1, batch.input_ids_RT[row, places]]
        rows.append(-chosen.sum() / batch.denominator_R[row].to(kind))
    return torch.stack(rows)


def gradients(loss_R: Tensor, net: nn.Module) -> Tensor:
    """Of the rows weighted differently, so that rows which changed places would show."""
    weight_R = torch.linspace(1.0, 2.0, len(loss_R), dtype=loss_R.dtype)
    found = torch.autograd.grad((weight_R * loss_R).sum(), list(tm.trainable(net).values()))
    return torch.cat([gradient.flatten() for gradient in found])


class Headed(tm.Toy):
    """A toy that names its head, as transformers' models do."""

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, hidden_RTd: Tensor) -> Tensor:
        return self.head(hidden_RTd)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.logits(self.hidden(self.embed(input_ids))))
