"""Gradient canaries: known vectors that coins plant in the summed gradient, and what the release shows of each.

Comes in: a secret key, coins, the canaries that a step drew. Goes out: a summed gradient with their contributions, and one number
for each canary of what was released. A step without one pays nothing. Knows no data.

Shape suffixes: M canaries, K coordinates of each, P trainable coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpllm.errors import Refused
from dpllm.privacy.clipping import AUTOMATIC_GAMMA, FUNCTIONS

BEFORE_CLIPPING = 1000.0  # C, a canary's gradient before it is clipped, so that a step without clipping shows
CHUNK = 2**20  # coordinates looked at together


class GradientCanaries:
    """M orthogonal unit vectors v_j: signs, drawn with a secret key, on coordinates j, j + M, j + 2 M, ... of P.

    Guarantee:
        What a canary adds to a sum is its gradient, 1000 C v_j, clipped by the very function that clips units, and rounded
        towards zero to the lattice: at most C in norm. So a canary is one more unit, whose slot is sampled like any other.
        ``project`` looks at what was released alone. The signs do not depend on the data, so what the data of the first step add
        to a projection has mean zero over the signs; later gradients may also answer to what earlier steps released.

    References:
        Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning" (canaries in gradient space); Andrew et
        al. 2024, "One-shot Empirical Privacy Estimation for Federated Learning" (many of them in one run).
    """

    def __init__(self, key: int, coins: Sequence[bool], size: int, clipping: str, device: torch.device) -> None:
        """Draws the vectors; Refused for more canaries than coordinates.

        Args:
            key: 128 secret bits.
            coins: Shape (M,); a canary whose coin says out is never added.
            size: P.
            clipping: The Plan's clipping function.
            device: Where sums lie.
        """
        self._coins, self._width = tuple(coins), len(coins)
        self._each = size // self._width
        if not self._each:
            raise Refused(
                f"audit.gradient_canaries is {self._width}, but only {size} coordinates train, so the canaries could not be "
                f"told apart. Set audit.gradient_canaries to {size // 16} or less."
            )
        signs = np.random.Generator(np.random.Philox(key=key)).integers(0, 2, self._each * self._width, dtype=np.int8)
        self._sign_KM = torch.from_numpy(2 * signs - 1).view(self._each, self._width).to(device)
        self._clip = FUNCTIONS[clipping]

    def add_to(self, sum_P: Tensor, drawn: Sequence[int], max_grad_norm: float, spacing: float) -> None:
        """Adds those of the drawn canaries whose coins said in to ``sum_P``, float64 multiples of ``spacing``, in units of it."""
        planted = [canary for canary in drawn if self._coins[canary]]
        if not planted:
            return
        longest = BEFORE_CLIPPING * max(max_grad_norm, AUTOMATIC_GAMMA)  # beside gamma, a small C would shorten it
        before = torch.full((1, 1), longest, dtype=torch.float64)
        length = float(before * self._clip(before, max_grad_norm))
        each = math.floor(length / math.sqrt(self._each) / spacing)
        chosen = torch.tensor(planted, device=sum_P.device)
        self._grid(sum_P)[:, chosen] += each * self._sign_KM[:, chosen].double()

    def project(self, released_P: Tensor) -> Tensor:
        """proj_M: along each canary's vector, in float64 on the CPU; noise of standard deviation s stays N(0, s^2)."""
        total_M = torch.zeros(self._width, dtype=torch.float64, device=released_P.device)
        rows = max(1, CHUNK // self._width)
        parts = torch.split(self._grid(released_P), rows), torch.split(self._sign_KM, rows)
        for part_RM, sign_RM in zip(*parts, strict=True):
            total_M += (part_RM * sign_RM).sum(dim=0)
        return (total_M / math.sqrt(self._each)).cpu()

    def along(self, parameters: Iterable[Tensor]) -> Tensor:
        """proj_M of the weights themselves, in the order in which sums hold them."""
        return self.project(torch.cat([parameter.detach().flatten() for parameter in parameters]))

    def _grid(self, flat_P: Tensor) -> Tensor:
        return flat_P[: self._each * self._width].view(self._each, self._width)
