"""The clipping functions: what multiplies a unit's gradient, by which name, and how a card says so. Knows no torch.

Comes in: norms. Goes out: factors. A new one is a function, a name and its words here, and a line in ``tests/checks.by_hand``.

Shape suffix: U units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

AUTOMATIC_GAMMA = 0.01
Clipping = Literal["flat", "automatic"]


def flat(norm_U: Tensor, max_grad_norm: float) -> Tensor:
    """Factor = min(1, C / norm): gradients longer than C are shortened to C (Abadi et al. 2016, algorithm 1).

    Guarantee:
        factor * norm <= C.
    """
    return (max_grad_norm / norm_U).clamp(max=1.0)


def automatic(norm_U: Tensor, max_grad_norm: float) -> Tensor:
    """Factor = C / (norm + gamma), gamma = 0.01: nearly every gradient gets the length C, so there is no threshold to tune.

    C then scales the update as the learning rate does (with Adam, hardly at all).

    Guarantee:
        factor * norm = C norm / (norm + gamma) <= C, for any gamma > 0.

    References:
        Bu et al. 2023, Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, equation 4.1.
    """
    return max_grad_norm / (norm_U + AUTOMATIC_GAMMA)


FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "flat": flat,
    "automatic": automatic,
}
_WHOLE = ", over all trained parameters together"
WORDS: dict[str, str] = {
    "flat": f"{_WHOLE} (flat clipping), was scaled down to an L2 norm of at most C",
    "automatic": f"{_WHOLE}, was multiplied by C / (its L2 norm + 0.01) (automatic clipping), so that its norm was below C",
}
"""What each does to a gradient, behind "The gradient of each row"."""
