"""Error rates and epsilon: what rates prove where every trial is a training run.

Comes in: counts of right and wrong guesses, or scores. Goes out: a bound on epsilon. Knows neither models nor texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv

from dpllm.auditing.bounds import checked

# A legend of shapes: P positives, N negatives.

ASSUMES = "each trial is a training run of its own, its threshold chosen without these trials"


@dataclass(frozen=True)
class Rates:
    """Guesses at a threshold, counted: members that were recognised or missed, others that were accused or not."""

    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int


@dataclass(frozen=True)
class RateBound:
    """A lower bound on epsilon at ``delta``, 0 where nothing is shown; the upper limits of the rates that give it."""

    value: float
    assumes: str
    alpha: float
    delta: float
    rates: Rates
    fnr_upper: float
    fpr_upper: float


def rate_limits(rates: Rates, alpha: float) -> tuple[float, float]:
    """Upper limits of the false negative and the false positive rate that both hold with probability 1 - alpha."""
    fnr = upper_limit(rates.false_negatives, rates.true_positives, alpha / 2)
    fpr = upper_limit(rates.false_positives, rates.true_negatives, alpha / 2)
    return float(fnr), float(fpr)


def epsilon_from_rates(rates: Rates, *, delta: float, alpha: float) -> RateBound:
    """Epsilon from the error rates at one threshold, in both directions.

    Guarantee:
        P[value > epsilon] <= alpha for every (epsilon, delta)-DP mechanism, if each count is of independent training
        runs, members and others on neighbouring data, and the threshold was chosen without them. Both directions rest
        on the same two limits, so looking at both costs nothing.

    Args:
        rates: Counts at the threshold.
        delta: The claim's delta, in [0, 1].
        alpha: In (0, 1/2).

    References:
        Kairouz, Oh and Viswanath 2015 (the region of error rates that (epsilon, delta) allows); Jagielski, Ullman and
        Oprea 2020, "Auditing Differentially Private Machine Learning" (the limits put into it).

    Raises:
        ValueError: Alpha or delta is out of range, or a count is negative.
    """
    if not 0 < alpha < 0.5 or not 0 <= delta <= 1:
        raise ValueError(f"alpha must lie in (0, 1/2) and delta in [0, 1], got {alpha} and {delta}")
    counts = (rates.true_positives, rates.false_negatives, rates.false_positives, rates.true_negatives)
    if min(counts) < 0:
        raise ValueError(f"a count of trials cannot be negative, got {counts}")
    fnr, fpr = rate_limits(rates, alpha)
    value = float(_epsilon(np.array([fnr, fpr]), np.array([fpr, fnr]), delta).max())
    return RateBound(value, ASSUMES, alpha, delta, rates, fnr, fpr)


def many_runs(positives: ArrayLike, negatives: ArrayLike, *, delta: float, alpha: float) -> RateBound:
    """A lower bound on epsilon from many training runs, with one score of each.

    Every second run of either kind chooses the threshold, where the bound from those runs is largest; the others are
    counted at it.

    Guarantee:
        That of ``epsilon_from_rates``, if all runs of a kind are alike and independent.

    Args:
        positives: Shape (P,), from runs with the canary; higher = more likely a member; finite.
        negatives: Shape (N,), from runs without.
        delta: The claim's delta, in [0, 1].
        alpha: In (0, 1/2).

    Raises:
        ValueError: Fewer than two runs of a kind, a score that is not a finite number, or alpha or delta out of range.
    """
    positive_P, _ = checked(positives, np.ones(np.shape(positives), dtype=bool))
    negative_N, _ = checked(negatives, np.zeros(np.shape(negatives), dtype=bool))
    if min(len(positive_P), len(negative_N)) < 2:
        raise ValueError(
            f"half of the runs choose a threshold; got {len(positive_P)} with and {len(negative_N)} without"
        )
    # A threshold that was chosen on the runs it is counted on would fit their noise, and the guarantee would be gone.
    tried_P, tried_N = np.sort(positive_P[::2]), np.sort(negative_N[::2])
    cuts = np.concatenate((tried_P, tried_N))
    below_P, below_N = np.searchsorted(tried_P, cuts, side="right"), np.searchsorted(tried_N, cuts, side="right")
    fnr = upper_limit(below_P, len(tried_P) - below_P, alpha / 2)
    fpr = upper_limit(len(tried_N) - below_N, below_N, alpha / 2)
    found = np.maximum(_epsilon(fnr, fpr, delta), _epsilon(fpr, fnr, delta))
    rates = count(positive_P[1::2], negative_N[1::2], float(cuts[found.argmax()]))
    return epsilon_from_rates(rates, delta=delta, alpha=alpha)


def count(positives: ArrayLike, negatives: ArrayLike, threshold: float) -> Rates:
    """Counts where a score above the threshold, and not one that equals it, is called a member."""
    above_P, above_N = np.asarray(positives) > threshold, np.asarray(negatives) > threshold
    return Rates(int(above_P.sum()), int((~above_P).sum()), int(above_N.sum()), int((~above_N).sum()))


def upper_limit(events: ArrayLike, others: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """The largest rates that are not refuted at level alpha by so few events among events and others.

    References:
        Clopper and Pearson 1934.
    """
    known = np.asarray(others) > 0
    limit = betaincinv(np.asarray(events) + 1.0, np.where(known, others, 1.0), 1 - alpha)
    return np.where(known, limit, 1.0)


def _epsilon(first: NDArray[np.float64], second: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """log((1 - delta - first) / second), 0 where it is less: 1 - FNR <= e^eps FPR + delta and its mirror image."""
    return np.log(np.maximum((1 - delta - first) / second, 1.0))
