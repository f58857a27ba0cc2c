"""Private selection of the best of a random number of runs: the number of runs, and the cost of releasing the best.

Comes in: the privacy loss of one run, the mean and distribution of the number of runs. Goes out: the privacy loss of releasing
only the best run, and the number of runs for a uniform value. Imports dp-accounting only to compute.

Guarantee:
    Let K be drawn from a truncated negative binomial distribution of shape eta and parameter gamma (1, 2, ...; eta 0 is
    logarithmic, eta 1 geometric) with mean m, and let K fresh runs of a mechanism each release a value from a totally
    ordered set. If delta(.) bounds the hockey-stick divergences of one run in both directions, those of the largest value are at
    most m delta(epsilon - c), with

        c = (eta + 1) log min_h max(1 + (1 - gamma) / gamma * delta(h), gamma + (1 - gamma) (e^h + delta(h))).

    Proof. With f(x) = E[x^K] the best value has the density q(y) f'(Q(at most y)), and likewise p f'(P) for a neighbour. Since f'
    is m gamma^(eta + 1) (gamma + (1 - gamma) Q(above y))^-(eta + 1), the quotient f'(Q) / f'(P) is the (eta + 1)-th power of
    (gamma + (1 - gamma) P(above y)) / (gamma + (1 - gamma) Q(above y)). P(above y) is at most e^h Q(above y) + delta(h) for every
    h, which gives a quotient of two lines in Q(above y). It is monotone, so its maximum is at 0 or 1, and e^c bounds it. Then q
    f'(Q) - e^epsilon p f'(P) is at most f'(Q) (q - e^(epsilon - c) p), and f' is at most f'(1) = m.

References:
    In the manner of Papernot and Steinke 2022, "Hyperparameter Tuning with Renyi Differential Privacy" (arXiv 2110.03620),
    and Koskela, Redberg and Wang 2024, "Privacy Profiles for Private Selection" (arXiv 2402.06701).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SHAPES = {"logarithmic": 0.0, "geometric": 1.0}  # eta, of the truncated negative binomial
MAX_MEAN_RUNS = 10_000  # maximum mean number of runs
NUM_HEIGHTS = 4096  # number of values of h tried


@lru_cache(maxsize=64)
def gamma_of(mean: float, distribution: str) -> float:
    """The parameter gamma in (0, 1] of the distribution with this mean >= 1; it falls as the mean rises."""
    if mean == 1:
        return 1.0
    if distribution == "geometric":
        return 1 / mean
    from scipy.optimize import brentq

    # With x = log(1 / gamma) the mean is (e^x - 1) / x, which increases in x.
    return math.exp(
        -float(brentq(lambda x: math.expm1(x) / x - mean, min(1e-12, mean - 1), 2 * math.log(mean) + 2, xtol=1e-15))
    )


def cost(
    delta_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    largest_epsilon: float,
    mean: float,
    distribution: str,
) -> float:
    """The cost that selection adds to epsilon: c in the guarantee.

    Args:
        delta_of: delta of one run at increasing epsilons >= 0, in both directions.
        largest_epsilon: an epsilon beyond which delta hardly falls.
        mean: mean number of runs, >= 1.
        distribution: one of ``SHAPES``.
    """
    import numpy as np

    gamma = gamma_of(mean, distribution)
    h = np.linspace(0.0, largest_epsilon, NUM_HEIGHTS)
    delta = delta_of(h)
    with np.errstate(over="ignore"):
        ratio = np.maximum(1 + (1 - gamma) / gamma * delta, gamma + (1 - gamma) * (np.exp(h) + delta))
    return (SHAPES[distribution] + 1) * math.log(float(np.min(ratio)))


def profile(delta: NDArray[np.float64], epsilon: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """An upper bound on the divergences of the best run, from delta(epsilon - c); convex in e^epsilon, and 1 at its origin."""
    import numpy as np

    bound, order = np.minimum(1.0, mean * delta), np.exp(epsilon)
    # Divergences are convex in e^epsilon and 1 at 0. Where mean * delta is above the tangent from there, the tangent is a bound.
    slope = (bound - 1) / order
    touch = int(np.argmin(slope))
    return np.where(np.arange(len(bound)) < touch, 1 + slope[touch] * order, bound)


def renyi(
    curve: NDArray[np.float64], orders: NDArray[np.float64], mean: float, distribution: str
) -> NDArray[np.float64]:
    """The Renyi divergence of the best run at each order, from that of one run (Papernot and Steinke 2022, theorem 2)."""
    import numpy as np

    eta = SHAPES[distribution]
    extra = (1 + eta) * float(np.min((1 - 1 / orders) * curve - math.log(gamma_of(mean, distribution)) / orders))
    return curve + math.log(mean) / (orders - 1) + extra


def chance(runs: int, mean: float, distribution: str) -> float:
    """The probability of exactly ``runs`` runs, >= 1."""
    ratio = 1 - gamma_of(mean, distribution)
    if not ratio:
        return float(runs == 1)
    if distribution == "geometric":
        return (1 - ratio) * ratio ** (runs - 1)
    return ratio**runs / (runs * -math.log1p(-ratio))


def draw(mean: float, distribution: str, uniform: float) -> int:
    """Draws a number of runs, >= 1.

    Args:
        mean: >= 1.
        distribution: one of ``SHAPES``.
        uniform: secret, in [0, 1), from the operating system's entropy.
    """
    runs, total = 1, chance(1, mean, distribution)
    while total <= uniform:
        next_chance = chance(runs + 1, mean, distribution)
        if next_chance <= 1e-18:  # due to rounding, the sum may stay below a uniform value close to 1
            break
        runs, total = runs + 1, total + next_chance
    return runs
