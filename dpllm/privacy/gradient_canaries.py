"""Gradient canaries: known vectors, added to the summed gradient by coin flips, and their projections in the release.

Comes in: a secret key, coins, the canaries that a step drew. Goes out: a summed gradient with their contributions, and the
projection of the release on each canary. A step without canaries costs nothing extra. Must not know the data.

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

BEFORE_CLIPPING = 1000.0  # C, length of a canary's gradient before clipping: shows a step without clipping
CHUNK = 2**20  # coordinates projected at a time


class GradientCanaries:
    """M orthogonal unit vectors v_j: signs, drawn with a secret key, on coordinates j, j + M, j + 2 M, ... of P.

    Guarantee:
        A canary adds its gradient, 1000 C v_j, clipped by the same function as units and rounded towards zero to the lattice: at
        most C in norm. So a canary is one more unit, whose slot is sampled like any other. ``project`` reads only what was
        released. The signs do not depend on the data, so the data of the first step add to a projection with mean zero over the
        signs; later gradients may also depend on earlier releases.

    References:
        Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning" (canaries in gradient space); Andrew et
        al. 2024, "One-shot Empirical Privacy Estimation for Federated Learning" (many of them in one run).
    """

    def __init__(self, key: int, coins: Sequence[bool], size: int, clipping: str, device: torch.device) -> None:
        """Draws the vectors; Refused for more canaries than coordinates.

        Args:
            key: Secret key of 128 bits.
            coins: Shape (M,); a canary whose coin says out is never added.
            size: P.
            clipping: The Plan's clipping function.
            device: The device of the sums.
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
        """Adds the drawn canaries whose coins said in to ``sum_P``, which counts multiples of ``spacing`` in float64."""
        planted = [canary for canary in drawn if self._coins[canary]]
        if not planted:
            return
        longest = BEFORE_CLIPPING * max(max_grad_norm, AUTOMATIC_GAMMA)  # automatic clipping then gives about C
        before = torch.full((1, 1), longest, dtype=torch.float64)
        length = float(before * self._clip(before, max_grad_norm))
        magnitude = math.floor(length / math.sqrt(self._each) / spacing)
        chosen = torch.tensor(planted, device=sum_P.device)
        self._grid(sum_P)[:, chosen] += magnitude * self._sign_KM[:, chosen].double()

    def project(self, released_P: Tensor) -> Tensor:
        """proj_M: the projection on each canary's vector, float64 on the CPU; noise of standard deviation s stays N(0, s^2)."""
        total_M = torch.zeros(self._width, dtype=torch.float64, device=released_P.device)
        rows = max(1, CHUNK // self._width)
        parts = torch.split(self._grid(released_P), rows), torch.split(self._sign_KM, rows)
        for part_RM, sign_RM in zip(*parts, strict=True):
            total_M += (part_RM * sign_RM).sum(dim=0)
        return (total_M / math.sqrt(self._each)).cpu()

    def along(self, parameters: Iterable[Tensor]) -> Tensor:
        """proj_M of the weights themselves, given in the order of the sums."""
        return self.project(torch.cat([parameter.detach().flatten() for parameter in parameters]))

    def _grid(self, flat_P: Tensor) -> Tensor:
        return flat_P[: self._each * self._width].view(self._each, self._width)
