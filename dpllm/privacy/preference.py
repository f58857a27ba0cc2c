"""Losses of preference pairs: two answers to one prompt, one of which was preferred.

Comes in: the losses of a pass's tokens, now and before training. Goes out: one loss for each pair. Rows 2i and 2i + 1 of a pass
are the chosen and the rejected answer of one pair; both belong to one unit, and a pass holds both or neither.

    h(pair) = beta [log pi(chosen) / pi_ref(chosen) - log pi(rejected) / pi_ref(rejected)]

is the margin of its implicit rewards. The gradient of a loss l(h) is l'(h) times a difference of the two rows' gradients: a
weighted sum with weights that depend on both rows' log-likelihoods. Autograd knows these when the backward pass begins, so one
pass suffices.

Shape suffixes: R rows, T tokens, P = R / 2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from dpllm.errors import Refused
from dpllm.privacy.loss import row_sums
from dpllm.privacy.packing import Pass


@dataclass(frozen=True)
class PairLoss:
    """Computes the losses of pairs from their rows.

    With a flip probability q, ``dpo`` and ``ipo`` are debiased: the loss is [(1 - q) l(h) - q l(-h)] / (1 - 2 q), whose mean over
    the coin of a randomised label is l(h) of the true label. The debiased dpo loss has no lower bound: its weight sigma(-h) + q /
    (1 - 2 q) never reaches 0. ``cdpo`` is (1 - q) l(h) + q l(-h), which is biased but bounded.

    Guarantee:
        The loss of a pair and its gradient depend only on the two rows of that pair, on public numbers and on the model. Nothing
        is averaged over pairs.

    References:
        Rafailov et al. 2023, Direct Preference Optimization, equation 7 (l = -log sigma(h)). Azar et al. 2023, A General
        Theoretical Paradigm to Understand Learning from Human Preferences, equation 17 (ipo: l = (h / beta - 1 / (2 beta))^2).
        Chowdhury et al. 2024, Provably Robust DPO, equation 12 (the debiased loss). Mitchell 2023, A note on DPO with noisy
        preferences (cdpo).
    """

    objective: Literal["dpo", "cdpo", "ipo"] = "dpo"
    beta: float = 0.1  # > 0
    flip: float = 0.0  # q in [0, 1/2)

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of l(h) and l(-h)."""
        if self.objective == "cdpo":
            return 1 - self.flip, self.flip
        return (1 - self.flip) / (1 - 2 * self.flip), -self.flip / (1 - 2 * self.flip)

    def margins(self, nll_R: Tensor, reference_R: Tensor) -> Tensor:
        """The margin h of each pair, float64, from the negative log-likelihoods of all rows now and before, in nats."""
        gain_P2 = (reference_R.double() - nll_R.double()).view(-1, 2)
        return self.beta * (gain_P2[:, 0] - gain_P2[:, 1])

    def __call__(self, nll_M: Tensor, batch: Pass) -> Tensor:
        """loss_P of the pairs of a pass, in float64; one zero without pairs.

        Raises:
            Refused: The rows are not pairs of one unit each.
        """
        owners = [row.unit for row in batch.rows]
        if owners[::2] != owners[1::2]:
            raise Refused(
                "the rows of a pass are not whole preference pairs, so one pair would be clipped as two, or with rows of "
                "others. Make units that hold both answers of each pair."
            )
        if not owners:
            return row_sums(nll_M, ())
        margin_P = self.margins(row_sums(nll_M.double(), batch.rows), batch.reference_R)
        weight, flipped_weight = self.weights
        loss_P = weight * self._loss(margin_P)
        if flipped_weight:
            loss_P = loss_P + flipped_weight * self._loss(-margin_P)
        return loss_P

    def _loss(self, margin_P: Tensor) -> Tensor:
        if self.objective == "ipo":
            return (margin_P / self.beta - 1 / (2 * self.beta)).square()
        # One by one: a kernel over several computes the last ones by other instructions.
        return -torch.stack([functional.logsigmoid(margin) for margin in margin_P.unbind()])
