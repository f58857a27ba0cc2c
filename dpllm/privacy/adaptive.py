"""Adaptive clipping: C follows a quantile of the gradient norms, which is itself released with noise.

Comes in: the noise multiplier that the accountant knows, and a step's noisy count. Goes out: the two noise multipliers
that together cost the same, and the next C. Numbers only; this module must not see data and must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpllm.errors import Refused

RANGE = math.log(1e6)  # how far C may move from the first, in factors of e


@dataclass(frozen=True)
class AdaptiveClipping:
    """How C moves, and what noise the count carries.

    Each step releases two sums over one Poisson sample: the gradients clipped at C_t, with noise sigma_g C_t, and the
    count of (b - 1/2), b = 1 for a gradient no longer than C_t, with noise sigma_b. One unit moves the first by at most
    C_t and the second by at most 1/2.

    Guarantee:
        Both together are one Gaussian sum of sensitivity 1 and noise multiplier sigma, 1/sigma^2 = 1/sigma_g^2 +
        1/(2 sigma_b)^2, subsampled once. C_t is computed from earlier releases alone, so it is public; it is never 0.

    Attributes:
        quantile: gamma in (0, 1), the share of gradients that should not be clipped.
        learning_rate: eta_C > 0 of the geometric update.
        count_noise_multiplier: sigma_b, the standard deviation of the noise on the count of units.
        gradient_noise_multiplier: sigma_g, the standard deviation of the noise on the gradients over C_t.

    References:
        Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping, theorem 1 and algorithm 1.
    """

    quantile: float
    learning_rate: float
    count_noise_multiplier: float
    gradient_noise_multiplier: float

    def next_norm(self, max_grad_norm: float, noisy_fraction: float, first_norm: float) -> float:
        """C_{t+1} = C_t exp(-eta_C (noisy fraction of unclipped gradients - gamma)), within 1e-6 to 1e6 of the first C.

        At C = 0 there would be no noise, and beyond the range of floating point no guarantee.
        """
        exponent = -self.learning_rate * (noisy_fraction - self.quantile)
        moved = max_grad_norm * math.exp(min(max(exponent, -RANGE), RANGE))
        return min(max(moved, first_norm * math.exp(-RANGE)), first_norm * math.exp(RANGE))


def adaptive_clipping(
    noise_multiplier: float,
    expected_batch_size: int,
    quantile: float,
    learning_rate: float,
    count_noise_multiplier: float | None = None,
) -> AdaptiveClipping:
    """Splits the noise between gradients and count.

    Args:
        noise_multiplier: sigma of both together, which is accounted.
        expected_batch_size: B, in units.
        quantile: See ``AdaptiveClipping``.
        learning_rate: See ``AdaptiveClipping``.
        count_noise_multiplier: sigma_b; None: the larger of B / 20 (Andrew et al.) and 2 sigma, with which the gradients'
            noise grows by 3.3% at most.

    Raises:
        Refused: 2 sigma_b <= sigma: the count alone would cost more than both may.
    """
    sigma_b = count_noise_multiplier or max(expected_batch_size / 20, 2 * noise_multiplier)
    left = noise_multiplier**-2 - (2 * sigma_b) ** -2
    if left <= 0:
        raise Refused(
            f"privacy.adaptive.count_noise_multiplier {sigma_b:g} is not above half the noise multiplier "
            f"{noise_multiplier:g}, so that the count of clipped gradients alone would spend the budget. Set it to null."
        )
    return AdaptiveClipping(quantile, learning_rate, sigma_b, left**-0.5)
