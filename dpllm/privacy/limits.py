"""Upper bounds on membership tests, and a guarantee in other terms: rates, areas, Gaussian mu, epsilon without sampling.

Comes in: an event and a neighbouring relation, or an epsilon and a delta. Goes out: upper bounds. Imports dp-accounting, numpy
and scipy only when it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from typing import Any

from pydantic import Field

from dpllm.privacy.events import Event
from dpllm.privacy.parts import Parts, parts_of
from dpllm.privacy.privacy_loss import MOST_EXPONENT, Relation, deltas_at, inverse, privacy_loss
from dpllm.records import NotNegative, Record, Share

FPRS = (0.001, 0.01)
SMALLEST_DELTA = 1e-10  # below it, round-off of a composed distribution is as large as delta
INTERVAL = 1e-3  # of the privacy loss: wider than for a stated epsilon, and still an upper bound
NUM_EPSILONS = 512
POINTS = 25
DECADES = 3  # from a false-positive rate of 0.1 % to 100 %
RATES = tuple(float(f"{10 ** (DECADES * (place / (POINTS - 1) - 1)):.6g}") for place in range(POINTS))
"""False-positive rates at which the curve is computed; 0.1 %, 1 % and 10 % are among them."""


class MechanismLimits(Record):
    """Upper bounds on any membership test, from every (epsilon, delta) of the event at once."""

    auc: Share | None
    """Largest area under the ROC curve."""
    gdp_mu: NotNegative | None
    """Smallest mu of a Gaussian mechanism whose delta is at least this event's wherever that is at least 1e-10; a summary."""
    tpr_at_fpr_0_001: Share | None = Field(alias="tpr_at_fpr_0.001")
    """Largest true-positive rate at a false-positive rate of 0.1%."""
    tpr_at_fpr_0_01: Share | None = Field(alias="tpr_at_fpr_0.01")
    """Largest true-positive rate at a false-positive rate of 1%."""


def most_recognised(epsilon: float, delta: float, rate: float) -> float:
    """The largest true-positive rate of any test of an (epsilon, delta)-DP release at a false-positive rate."""
    shrink, grow = math.exp(-epsilon), math.exp(min(epsilon, 700.0))  # e^710 overflows a float
    return min(1.0, grow * rate + delta, 1.0 - shrink * (1.0 - delta - rate))


def attacker_limits(epsilon: float, delta: float) -> dict[str, float]:
    """Upper bounds on any membership attack on an (epsilon, delta)-DP release; epsilon >= 0 or infinite, delta in [0, 1].

    Returns:
        `tpr_at_fpr_0.01`, `tpr_at_fpr_0.001`: the largest true positive rate, at most 1 and
            min(e^eps FPR + delta, 1 - e^-eps (1 - delta - FPR)).
        `auc`: the largest area under the ROC curve, 1 - (1 - delta)^2 / (1 + e^eps). The area above that curve is the area under
            the trade-off of FNR against FPR: two triangles, each with a base of 1 - delta on an axis and its tip at FPR = FNR =
            (1 - delta) / (1 + e^eps).

    References:
        Kairouz, Oh and Viswanath 2015, "The Composition Theorem for Differential Privacy".
    """
    shrink = math.exp(-epsilon)
    limits = {f"tpr_at_fpr_{rate}": most_recognised(epsilon, delta, rate) for rate in reversed(FPRS)}
    return {**limits, "auc": 1.0 - (1.0 - delta) ** 2 * shrink / (1.0 + shrink)}


def attacker_limits_of(event: Event, relation: Relation) -> dict[str, float | None]:
    """Upper bounds on any membership attack, from every (epsilon, delta) of an event at once; tighter than from one pair.

    Returns:
        `tpr_at_fpr_0.001`, `tpr_at_fpr_0.01`, `auc`: upper bounds, as ``attacker_limits``. Each pair (epsilon, delta(epsilon))
            gives two lines above the ROC curve. The minimum of all lines at 512 values of epsilon is a concave polygon above the
            curve, whose area is computed exactly.
        `gdp_mu`: the smallest mu for which N(mu, 1) against N(0, 1) has at least the delta of this event at each of these
            epsilons with delta >= 1e-10; None if no mu has. It is a summary, comparable between mechanisms. It does not prove
            mu-GDP, which would need every epsilon, and which Poisson sampling does not satisfy in the far tail for mu below
            1/sigma. Nor is it the central limit approximation, which is smaller.

    References:
        Dong, Roth and Su 2022, "Gaussian Differential Privacy", corollary 1 (profile of mu-GDP). Gomez et al. 2025,
        "(epsilon, delta) Considered Harmful: Best Practices for Reporting Differential Privacy Guarantees" (arXiv
        2503.10945), on reporting mu. Kairouz, Oh and Viswanath 2015 (the lines).
    """
    if parts_of(event) == Parts():
        return {**{f"tpr_at_fpr_{fpr}": fpr for fpr in FPRS}, "auc": 0.5, "gdp_mu": 0.0}
    epsilons, deltas = profile(event, relation)
    return {**roc_limits(epsilons, deltas), "gdp_mu": _gaussian_mu(epsilons, deltas)}


def roc_limits(epsilons: Sequence[float], deltas: Sequence[float]) -> dict[str, float | None]:
    """True-positive rates and area of the polygon above the ROC curve that pairs of (epsilon, delta) give."""
    lines = [(0.0, 1.0)]
    for epsilon, delta in zip(epsilons, deltas, strict=True):
        shrink = math.exp(-epsilon)
        lines.append((shrink, 1.0 - shrink * (1.0 - delta)))
        if epsilon < 700.0:
            lines.append((1.0 / shrink, delta))
    tprs = {f"tpr_at_fpr_{fpr}": min(slope * fpr + start for slope, start in lines) for fpr in FPRS}
    return {**tprs, "auc": _area(lines)}


def _area(lines: list[tuple[float, float]]) -> float:
    """The area under the lower envelope of rising lines on [0, 1], piece by piece."""
    envelope: list[tuple[float, float, float]] = []  # where a line starts to be the lowest, slope, height at 0
    for slope, start in sorted(set(lines), key=lambda line: (-line[0], line[1])):
        while envelope:
            since, other_slope, other_start = envelope[-1]
            if slope == other_slope:
                break  # parallel, and not lower
            since_here = (start - other_start) / (other_slope - slope)
            if since_here > since:
                envelope.append((since_here, slope, start))
                break
            envelope.pop()  # the flatter line is lower wherever this one would have been the lowest
        else:
            envelope.append((0.0, slope, start))
    ends = [min(since, 1.0) for since, _, _ in envelope[1:]] + [1.0]
    area = 0.0
    for (since, slope, start), end in zip(envelope, ends, strict=True):
        if end > since:
            area += (end - since) * (start + slope * (since + end) / 2)
    return area


@lru_cache(maxsize=8)
def profile(event: Event, relation: Relation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """512 epsilons up to where delta reaches 1e-10, or its minimum if that is larger, and an upper bound on delta at each."""
    try:
        loss = privacy_loss(parts_of(event), relation, INTERVAL)
        far = _far(lambda delta: inverse(loss, delta))
        if far > MOST_EXPONENT:  # a 50,000th of it is fine enough, and fast
            loss = privacy_loss(parts_of(event), relation, far * INTERVAL / 50)
        epsilons = [far * i / (NUM_EPSILONS - 1) for i in range(NUM_EPSILONS)]
        return tuple(epsilons), tuple(deltas_at(loss, epsilons).tolist())
    except OverflowError:
        return (0.0,), (1.0,)


def _far(epsilon_at: Callable[[float], float]) -> float:
    """The epsilon at the smallest delta of interest, or at the smallest delta with a finite epsilon."""
    far = epsilon_at(SMALLEST_DELTA)
    low, high = math.log(SMALLEST_DELTA), math.log1p(-1e-9)
    for _ in range(0 if math.isfinite(far) else 40):
        middle = (low + high) / 2
        epsilon = epsilon_at(math.exp(middle))
        if math.isfinite(epsilon):
            high, far = middle, epsilon
        else:
            low = middle
    return max(far, 1e-3) if math.isfinite(far) else 1e-3


def _gaussian_mu(epsilons: Sequence[float], deltas: Sequence[float]) -> float | None:
    import numpy as np

    eps, delta = np.asarray(epsilons), np.asarray(deltas)
    kept = delta >= SMALLEST_DELTA * (1 - 1e-6)  # the last one equals the limit up to rounding, which must not decide
    eps, delta = eps[kept], delta[kept]
    if not len(delta):
        return 0.0
    if delta[-1] > 1.001 * SMALLEST_DELTA and len(delta) == len(epsilons):
        return None  # delta never falls this low, and no Gaussian mechanism has such a floor
    low, high = np.zeros_like(eps), np.full_like(eps, 1e3)
    if (_gaussian_delta(eps, high) < delta).any():
        return None
    for _ in range(60):
        middle = (low + high) / 2
        short = _gaussian_delta(eps, middle) < delta
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return float(high.max())


def _gaussian_delta(eps: Any, mu: Any) -> Any:
    """Delta of N(mu, 1) against N(0, 1), for numbers or arrays."""
    import numpy as np
    from scipy.special import log_ndtr, ndtr

    return ndtr(mu / 2 - eps / mu) - np.exp(eps + log_ndtr(-mu / 2 - eps / mu))


def trade_off(event: Event, relation: Relation) -> tuple[tuple[float, float], ...]:
    """Pairs of a false-positive rate, from ``RATES``, and the largest true-positive rate of any membership test.

    The second is rounded up to four digits, so that accountants which differ in the last bits give the same.

    Guarantee:
        Upper bounds, from the (epsilon, delta) of the event at 512 epsilons at once; see ``attacker_limits_of``.

    References:
        Kairouz, Oh and Viswanath 2015, "The Composition Theorem for Differential Privacy" (the lines).
    """
    pairs = list(zip(*profile(event, relation), strict=True))
    tops = ((rate, min(most_recognised(epsilon, delta, rate) for epsilon, delta in pairs)) for rate in RATES)
    return tuple((rate, min(1.0, max(0.0, rounded_up(top)))) for rate, top in tops)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of N(mu, 1) against N(0, 1) at delta in (0, 1).

    References:
        Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy", theorem 8.
    """
    from scipy import optimize

    def excess(epsilon: float) -> float:
        return float(_gaussian_delta(epsilon, mu)) - delta

    return float(optimize.brentq(excess, 0.0, 1e4, xtol=1e-12)) if mu > 0 and excess(0.0) > 0 else 0.0


def rounded_up(value: float, digits: int = 4) -> float:
    """Rounds up to some significant digits, so that an upper bound stays one."""
    return _rounded(value, digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 4) -> float:
    """Rounds down to some significant digits, so that a lower bound stays one."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> float:
    number = Decimal(repr(value))
    if not number.is_finite() or number == 0:
        return value
    return float(number.quantize(Decimal(1).scaleb(number.adjusted() - digits + 1), rounding=rounding))
