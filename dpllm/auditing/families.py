"""The trade-off curve of a mechanism, and the epsilon of a Gaussian one.

Comes in: the event that a plan accounts for. Goes out: what no test that tells "in" from "out" can beat. Knows neither
models nor texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize
from scipy.special import log_ndtr, ndtr

from dpllm.privacy.events import Event, Terms, normal_form
from dpllm.privacy.limits import profile
from dpllm.privacy.privacy_loss import Relation

# A legend of shapes: E pairs of epsilon and delta.

TradeOff = Callable[[float], float]
"""True positive rate in [0, 1] -> the smallest false positive rate that goes with it: convex and rising."""
_LARGEST_EPSILON = 1e4


def profile_trade_off(epsilons: Sequence[float], deltas: Sequence[float]) -> TradeOff:
    """The curve that pairs of (epsilon, delta) allow together: a polygon below that of any mechanism with all of them.

    Args:
        epsilons: At least 0, one or more.
        deltas: In [0, 1], one for each.

    References:
        Kairouz, Oh and Viswanath 2015: FPR >= e^-eps (TPR - delta) and FPR >= 1 - delta - e^eps (1 - TPR).
    """
    epsilon_E, delta_E = np.asarray(epsilons, dtype=np.float64), np.asarray(deltas, dtype=np.float64)
    gentle_E, steep_E = np.exp(-epsilon_E), np.exp(np.minimum(epsilon_E, 700.0))

    def smallest_fpr(tpr: float) -> float:
        highest = np.maximum(gentle_E * (tpr - delta_E), 1 - delta_E - steep_E * (1 - tpr)).max()
        return float(np.clip(highest, 0.0, 1.0))

    return smallest_fpr


def event_trade_off(event: Event, relation: Relation) -> TradeOff:
    """The curve of an event as the accountant knows it, the worse of both directions.

    Args:
        event: What was released, see ``dpllm.privacy.events``.
        relation: The neighbouring relation.

    Raises:
        Refused: No accountant knows every part of the event.
    """
    terms = normal_form(event)
    return profile_trade_off(*(([0.0], [0.0]) if terms == Terms() else profile(terms, relation)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of N(mu, 1) against N(0, 1) at delta in (0, 1).

    References:
        Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy", theorem 8.
    """

    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta)

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, _LARGEST_EPSILON, xtol=1e-12))
