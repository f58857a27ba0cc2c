"""Renyi differential privacy at one order: an event's cost, a budget's allowance, and the noise that still fits.

Comes in: events, an order, a budget. Goes out: Renyi divergences and the sums that a filter compares. Imports dp-accounting only
to compute.

Why one order: composed privacy-loss distributions are valid for runs that were all fixed in advance. If a later run depends on
the results of earlier ones, the sum of Renyi divergences at one order, chosen before the first run and never changed, still
bounds the total.

References:
    Feldman and Zrnic 2021, "Individual Privacy Accounting via a Renyi Filter" (arXiv 2008.11193), theorem 4.5.
    Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy" (arXiv 2004.00010).
    Mironov, Talwar and Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism".
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dpllm.privacy import selection
from dpllm.privacy.bounded_range import zcdp
from dpllm.privacy.events import BELOW_ONE, Event, number
from dpllm.privacy.parts import Parts, SampledSums, dp_event_of, parts_of, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# 1.1 to 11 in tenths, then whole numbers: what filter_order considers.
ORDERS = tuple(n / 10 for n in range(11, 110)) + tuple(float(n) for n in range(11, 65))
MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 0.05, 1e4  # the range of calibration
LEAST = 2.0**-40  # minimum divergence of a sampled sum: next to 1, a float has few digits of less, none at q < 1e-8
SUM = 1e30  # an order so large that a release of known epsilon costs that epsilon and conversion costs nothing


@dataclass(frozen=True)
class Fit:
    """The remainder of a Renyi filter."""

    order: float  # alpha > 1, the filter's only one
    allowance: float  # the total Renyi divergence at that order left for further runs


def rdp(event: Event, order: float) -> float:
    """An upper bound on the Renyi divergence of `event` at one order alpha > 1; infinite if no finite bound is known.

    It is infinite for an event that imports a delta above 0, whose worst case has no finite divergence.

    Raises:
        ConfigError: a malformed event, an order of 1 or less, or an event that "rdp" does not support.
    """
    number("order", order, 1.0)
    require(event, "rdp")
    parts = parts_of(event)
    return math.inf if any(part.delta for part in parts.bounds) else divergence(parts, order)


def divergence(parts: Parts, order: float) -> float:
    """The divergence of parts that "rdp" supports, without their imported deltas, which the caller has to account for."""
    total = math.fsum(part.times * _sampled(part._replace(times=1), order) for part in parts.sampled)
    if parts.selected:
        # The bound on a selection minimises over several orders of one run: with this order alone it would be much larger.
        total += float(_curve(Parts(selected=parts.selected), (*_orders(), order))[-1])
    return total + _others(parts, order)


def allowance(epsilon: float, delta: float, order: float) -> float:
    """The largest Renyi divergence at `order` > 1 that implies (epsilon, delta)-DP; below 0 if none does.

    References:
        Canonne, Kamath and Steinke 2020, proposition 12 (the difference between a Renyi divergence and epsilon).
    """
    number("epsilon", epsilon, 0.0)
    number("delta", delta, 0.0, BELOW_ONE)
    number("order", order, 1.0)
    return epsilon - (math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def filter_order(epsilon: float, delta: float) -> float:
    """The order of a budget's filter, one of ``ORDERS``; it depends on the budget alone, so no result can influence it.

    A Gaussian mechanism's divergence is proportional to the order, so most runs would fit at the largest allowance / order. The
    divergence of subsampled steps with little noise grows faster, which favours a smaller order: hence the power 1.8. Among the
    powers that ``scripts/figure_gates.py`` tries, it has the smallest worst-case loss against an order chosen in hindsight.
    """
    return max(ORDERS, key=lambda order: max(0.0, allowance(epsilon, delta, order)) / order**1.8)


def smallest_noise_multiplier(event_of: Callable[[float], Event], fit: Fit) -> float:
    """The smallest noise multiplier, in steps of 1e-4 from 0.05 to 1e4, whose event fits; infinite if none does.

    The cost never increases with it.
    """
    if fit.allowance <= 0:
        return math.inf
    grid = range(round(MIN_NOISE_MULTIPLIER * 1e4), round(MAX_NOISE_MULTIPLIER * 1e4) + 1)
    place = bisect_left(grid, True, key=lambda sigma: rdp(event_of(sigma / 1e4), fit.order) <= fit.allowance)
    return grid[place] / 1e4 if place < len(grid) else math.inf


def rdp_epsilon(parts: Parts, delta: float) -> float:
    """Epsilon at `delta` from Renyi divergences at all of dp-accounting's default orders; see ``accounting.epsilon``.

    At worst, an imported run is randomised response that reveals everything with probability delta (Kairouz et al. 2015). So
    imported deltas reduce the delta at which the rest is stated.
    """
    from dp_accounting.rdp import compute_epsilon

    remaining = delta - sum(part.delta * part.times for part in parts.bounds)
    if remaining <= 0:
        return math.inf
    orders = _orders()
    with _quiet():
        return float(compute_epsilon(orders, _curve(parts, orders), remaining)[0])


@lru_cache(maxsize=65_536)
def _sampled(part: SampledSums, order: float) -> float:
    """The divergence of one sum; at a fractional order, the smaller of dp-accounting's bound and one from integer orders.

    dp-accounting sums the absolute values of an alternating series: at orders below 2 that can be twice the divergence, or fail
    to converge, which gives infinity. But (alpha - 1) times the divergence is the logarithm of a moment, which is 0 at order 1
    and convex in alpha, so between two integer orders, which are finite sums, it lies below the straight line.
    """
    from dp_accounting.rdp import RdpAccountant

    with _quiet():
        bound = float(RdpAccountant([order]).compose(dp_event_of(Parts((part,)))).rdp[0])
    bound = max(bound, LEAST if part.probability < 1 else 0.0)
    if float(order).is_integer():
        return bound
    below = math.floor(order)
    moments = [(n - 1) * _sampled(part, float(n)) if n > 1 else 0.0 for n in (below, below + 1)]
    line = ((below + 1 - order) * moments[0] + (order - below) * moments[1]) / (order - 1)
    return max(0.0, min(bound, line))


@lru_cache(maxsize=64)
def _curve(parts: Parts, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """The divergence at each order, without imported deltas."""
    import numpy as np
    from dp_accounting.rdp import RdpAccountant

    with _quiet():
        curve: NDArray[np.float64] = RdpAccountant(orders).compose(dp_event_of(Parts(parts.sampled))).rdp
    curve = np.maximum(curve, LEAST * sum(part.times for part in parts.sampled if part.probability < 1))
    for best in parts.selected:  # a mean of moments is at most the largest of them
        one_run = np.max([_curve(option, orders) for option in best.options], axis=0)
        curve = curve + best.times * selection.renyi(one_run, np.array(orders), best.mean, best.distribution)
    curve = curve + np.array([_others(parts, order) for order in orders])
    return curve


def _orders() -> tuple[float, ...]:
    """The orders of dp-accounting's conversion to epsilon."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    return tuple(map(float, DEFAULT_RDP_ORDERS))


def _others(parts: Parts, order: float) -> float:
    """The divergence of parts without a dp-accounting event, without imported deltas."""
    pure = sum(part.times * _pure(part.epsilon, order) for part in parts.bounds)
    return pure + sum(part.times * min(order * zcdp(part.range, 1), _pure(part.range, order)) for part in parts.draws)


def _pure(epsilon: float, order: float) -> float:
    """The divergence of randomised response, the largest of any (epsilon, 0)-DP mechanism; at most eps and alpha eps^2/2."""
    if order == SUM:
        return epsilon  # which the terms below would round
    # log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1), with p = e^eps / (1 + e^eps)
    log_p, log_rest = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    yes = order * log_p + (1 - order) * log_rest
    no = order * log_rest + (1 - order) * log_p
    return min(epsilon, max(0.0, (yes + math.log1p(math.exp(no - yes))) / (order - 1)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences dp-accounting 0.6.0, which logs every order whose series does not converge; infinity is a valid bound there."""
    absl = logging.getLogger("absl")
    before, absl.disabled = absl.disabled, True
    try:
        yield
    finally:
        absl.disabled = before
