"""What no attacker can exceed: the same guarantee in the words of a membership test.

Comes in: an epsilon and a delta, or a whole event. Goes out: true positive rates, areas under the ROC curve, a Gaussian mu.
Imports an accountant only when it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dpllm.privacy.events import Event
from dpllm.privacy.parts import Parts, parts_of, require
from dpllm.privacy.privacy_loss import Relation, privacy_loss

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FPRS = (0.001, 0.01)
SMALLEST_DELTA = 1e-10  # below it, round-off in a composed distribution is as large as delta
INTERVAL = 1e-3  # of the privacy loss: wider than for a stated epsilon, and an upper bound all the same
NUM_EPSILONS = 512


def attacker_limits(epsilon: float, delta: float) -> dict[str, float]:
    """What no membership attack on an (epsilon, delta)-DP release can exceed: epsilon >= 0 or infinite, delta in [0, 1].

    Returns:
        `tpr_at_fpr_0.01`, `tpr_at_fpr_0.001`: the largest true positive rate, at most 1 and
            min(e^eps FPR + delta, 1 - e^-eps (1 - delta - FPR)).
        `auc`: the largest area under the ROC curve, 1 - (1 - delta)^2 / (1 + e^eps). What is above that curve is the
            area under the trade-off of FNR against FPR: two triangles, each with a base of 1 - delta on an axis and
            its tip at FPR = FNR = (1 - delta) / (1 + e^eps).

    References:
        Kairouz, Oh and Viswanath 2015, "The Composition Theorem for Differential Privacy".
    """
    shrink, grow = math.exp(-epsilon), math.exp(min(epsilon, 700.0))  # e^710 is too large a float
    limits = {
        f"tpr_at_fpr_{fpr}": min(1.0, grow * fpr + delta, 1.0 - shrink * (1.0 - delta - fpr)) for fpr in reversed(FPRS)
    }
    return {**limits, "auc": 1.0 - (1.0 - delta) ** 2 * shrink / (1.0 + shrink)}


def attacker_limits_of(event: Event, relation: Relation) -> dict[str, float | None]:
    """What no membership attack can exceed, from every (epsilon, delta) of an event at once: tighter than from one.

    Returns:
        `tpr_at_fpr_0.001`, `tpr_at_fpr_0.01`, `auc`: upper bounds, as ``attacker_limits``. Each pair (epsilon, delta(epsilon))
            puts two lines above the ROC curve. The smallest of all lines at 512 values of epsilon is a concave polygon
            that lies above the curve, and its area is computed exactly.
        `gdp_mu`: the smallest mu for which the Gaussian mechanism N(mu, 1) against N(0, 1) has at least the delta of this
            event at each of these epsilons with delta >= 1e-10; None where no mu has. It is a summary, and comparable
            between mechanisms. It is not a proof of mu-GDP: that would take every epsilon, and Poisson sampling has
            none in the far tail below its own 1/sigma. It is not the central limit approximation either, which lies below.

    Raises:
        ConfigError: PLD does not know the event; Refused: no accountant knows every part of it.

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
    """The true positive rates and the area under the polygon that pairs of (epsilon, delta) put above the ROC curve."""
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
                break  # parallel and not lower
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


def profile(event: Event, relation: Relation) -> tuple[list[float], list[float]]:
    """512 epsilons up to where delta is 1e-10, or the least it gets to, and an upper bound on delta at each.

    Raises as ``attacker_limits_of`` does.
    """
    require(event, "pld")
    try:
        loss = privacy_loss(parts_of(event), relation, INTERVAL)
        far = _far(lambda delta: float(loss.get_epsilon_for_delta(delta)))
        epsilons = [far * i / (NUM_EPSILONS - 1) for i in range(NUM_EPSILONS)]
        return epsilons, [min(1.0, max(0.0, float(delta))) for delta in loss.get_delta_for_epsilon(epsilons)]
    except OverflowError:
        return [0.0], [1.0]


def _far(epsilon_at: Callable[[float], float]) -> float:
    """The epsilon at the smallest delta that matters, or at the smallest that has one."""
    found = epsilon_at(SMALLEST_DELTA)
    low, high = math.log(SMALLEST_DELTA), math.log1p(-1e-9)
    for _ in range(0 if math.isfinite(found) else 40):
        middle = (low + high) / 2
        here = epsilon_at(math.exp(middle))
        if math.isfinite(here):
            high, found = middle, here
        else:
            low = middle
    return max(found, 1e-3) if math.isfinite(found) else 1e-3


def _gaussian_mu(epsilons: Sequence[float], deltas: Sequence[float]) -> float | None:
    import numpy as np

    eps, delta = np.asarray(epsilons), np.asarray(deltas)
    eps, delta = eps[delta >= SMALLEST_DELTA], delta[delta >= SMALLEST_DELTA]
    if not len(delta):
        return 0.0
    if delta[-1] > 1.001 * SMALLEST_DELTA and len(delta) == len(epsilons):
        return None  # delta never falls so low: no Gaussian mechanism has such a floor
    low, high = np.zeros_like(eps), np.full_like(eps, 1e3)
    if (_gaussian_delta(eps, high) < delta).any():
        return None
    for _ in range(60):
        middle = (low + high) / 2
        short = _gaussian_delta(eps, middle) < delta
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return float(high.max())


def _gaussian_delta(eps: NDArray[np.float64], mu: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np
    from scipy.special import log_ndtr, ndtr

    return ndtr(mu / 2 - eps / mu) - np.exp(eps + log_ndtr(-mu / 2 - eps / mu))  # type: ignore[no-any-return]
