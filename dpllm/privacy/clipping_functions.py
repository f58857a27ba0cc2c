"""The clipping functions: what multiplies a unit's gradient, by which name, and how a card says so. Knows no torch.

Comes in: norms. Goes out: factors. A new one is a function, a name and its words here, and a line in ``tests/checks.by_hand``.

Shape suffixes: U units, G groups of parameters that are clipped together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

AUTOMATIC_GAMMA = 0.01
Clipping = Literal["flat", "automatic", "per_layer", "adaptive"]


def flat(norm_GU: Tensor, max_grad_norm: float) -> Tensor:
    """Factor = min(1, C / norm): gradients longer than C are shortened to C (Abadi et al. 2016, algorithm 1).

    Guarantee:
        factor * norm <= C.
    """
    return (max_grad_norm / norm_GU).clamp(max=1.0)


def automatic(norm_GU: Tensor, max_grad_norm: float) -> Tensor:
    """Factor = C / (norm + gamma), gamma = 0.01: nearly every gradient gets the length C, so there is no threshold to tune.

    C then scales the update as the learning rate does (with Adam, hardly at all).

    Guarantee:
        factor * norm = C norm / (norm + gamma) <= C, for any gamma > 0.

    References:
        Bu et al. 2023, Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, equation 4.1.
    """
    return max_grad_norm / (norm_GU + AUTOMATIC_GAMMA)


def per_layer(norm_GU: Tensor, max_grad_norm: float) -> Tensor:
    """factor_g = min(1, C_g / norm_g) for each of G layers by itself, with C_g = C / sqrt(G).

    Guarantee:
        The norm over all layers is at most sqrt(sum over g of C_g^2) = C.

    References:
        McMahan et al. 2018, Learning Differentially Private Recurrent Language Models, section 2.3; He et al. 2023,
        Exploring the Limits of Differentially Private Deep Learning with Group-wise Clipping.
    """
    return flat(norm_GU, max_grad_norm / len(norm_GU) ** 0.5)


# adaptive is flat clipping at a C that moves from step to step: see ``plan.AdaptiveClipping``.
FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "flat": flat,
    "automatic": automatic,
    "per_layer": per_layer,
    "adaptive": flat,
}
_WHOLE = ", over all trained parameters together"
WORDS: dict[str, str] = {
    "flat": f"{_WHOLE} (flat clipping), was scaled down to an L2 norm of at most C",
    "automatic": f"{_WHOLE}, was multiplied by C / (its L2 norm + 0.01) (automatic clipping), so that its norm was below C",
    "per_layer": " was scaled down layer by layer, each of the L trained layers to an L2 norm of at most C / sqrt(L), so that "
    "over all trained parameters together it was at most C",
    "adaptive": f"{_WHOLE}, was scaled down to an L2 norm of at most C_t (adaptive clipping)",
}
"""What each does to a gradient, behind "The gradient of each row"; of adaptive clipping the card says more."""
