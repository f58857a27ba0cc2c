"""Attacks: how well the score table separates members from the rest.

Comes in: scores. Goes out: exposure, AUC, true positive rates and extraction counts, each with its uncertainty. A
higher score means "more likely a member"; that direction is decided in advance and never turned round. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from dpllm.audit.table import CanaryScores

# A legend of shapes: P positives, N negatives, Q references.

Floats = NDArray[np.float64]


def ratio(table: Iterable[CanaryScores]) -> Floats:
    """How much likelier the secret became: sum of log p_tuned - log p_base, in nats."""
    return np.array([row.tuned_log_prob - row.base_log_prob for row in table], dtype=np.float64)


def loss(table: Iterable[CanaryScores]) -> Floats:
    """How likely the secret is: sum of log p_tuned, in nats."""
    return np.array([row.tuned_log_prob for row in table], dtype=np.float64)


def base_loss(table: Iterable[CanaryScores]) -> Floats:
    """How likely it was before training, in nats: no attack but the control, which must find nothing."""
    return np.array([row.base_log_prob for row in table], dtype=np.float64)


def slope(candidates: Iterable[CanaryScores]) -> float:
    """How much of a secret's log-probability before training is left after it: the slope of tuned on base; 1 if unknown.

    A model that hardly moved has a slope near 1, one that learned to write digits anew a slope near 0. It is fitted on all
    candidates alike, whatever their coins, so that a score made with it depends on coins through the model only.
    """
    rows = list(candidates)
    return fit_slope(base_loss(rows), loss(rows))


def fit_slope(before: Floats, after: Floats) -> float:
    """The least-squares slope of ``after`` on ``before``, both of one shape; 1 where ``before`` does not vary."""
    spread = float(((before - before.mean()) ** 2).sum()) if len(before) else 0.0
    if spread <= 1e-12 * max(1, len(before)):
        return 1.0
    return float(((before - before.mean()) * (after - after.mean())).sum() / spread)


def calibrated(table: Iterable[CanaryScores], slope: float) -> Floats:
    """What the base model's log-probability does not explain: sum of log p_tuned - slope * log p_base, in nats.

    The best use of the base as a control variate: ``ratio`` for a slope of 1, ``loss`` for one of 0, and never noisier
    than both.

    References:
        Watson et al. 2022, "On the Importance of Difficulty Calibration in Membership Inference Attacks" (a reference
        model's score is subtracted); the slope is ours.
    """
    rows = list(table)
    return loss(rows) - slope * base_loss(rows)


ATTACKS: dict[str, Callable[[Iterable[CanaryScores]], Floats]] = {"ratio": ratio, "loss": loss}
"""Membership scores by name; higher = more likely a member."""


@dataclass(frozen=True)
class Estimate:
    """A number and an interval that covers it with the stated confidence."""

    value: float
    low: float
    high: float


def exposure(scores: ArrayLike, reference_scores: ArrayLike) -> Floats:
    """Exposure in bits: log2 Q - log2 of the rank among Q references.

    A canary that ties with a reference is ranked behind it, so ties never look like memorisation. Ranges from
    log2(Q / (Q + 1)) to log2 Q.

    Args:
        scores: Shape (P,), higher = likelier.
        reference_scores: Shape (Q,), of canaries that were never inserted, from the same generator.

    References:
        Carlini et al. 2019, "The Secret Sharer", exposure estimated by sampling.
    """
    reference_Q = np.sort(np.asarray(reference_scores, dtype=np.float64))
    count = len(reference_Q)
    at_least_P = count - np.searchsorted(reference_Q, np.asarray(scores, dtype=np.float64), side="left")
    result: Floats = np.log2(count) - np.log2(1 + at_least_P)
    return result


def exposure_null_mean(num_references: int) -> float:
    """Mean exposure, in bits, of a canary that the model never saw: 1 / ln 2 = 1.4427 for many references.

    Exactly log2 Q - log2((Q + 1)!) / (Q + 1), because the rank is uniform on 1..Q+1 (ties only lower it).
    """
    return math.log2(num_references) - math.lgamma(num_references + 2) / math.log(2) / (num_references + 1)


def rank_sum_p_value(scores: ArrayLike, other_scores: ArrayLike) -> float | None:
    """One-sided Mann-Whitney test that ``scores`` are higher; None where a side is empty.

    Guarantee:
        Uniform (or conservative) on [0, 1] if all the scores are exchangeable, as they are where nothing was learned.
    """
    first, second = np.asarray(scores, dtype=np.float64), np.asarray(other_scores, dtype=np.float64)
    if not len(first) or not len(second):
        return None
    if len(np.unique(np.concatenate((first, second)))) == 1:
        return 1.0
    return float(stats.mannwhitneyu(first, second, alternative="greater").pvalue)


def auc(positives: ArrayLike, negatives: ArrayLike, confidence: float = 0.95) -> Estimate | None:
    """Area under the ROC curve: P[member above non-member] + P[tie] / 2, with an interval.

    The interval is DeLong's, taken on the logit scale so that it stays inside [0, 1] and covers near the ends. Where
    the sample shows no variance (perfect separation, all equal, one score on a side) that interval would be a point; a
    distribution-free one over min(P, N) disjoint pairs is given instead: exact at 0 and 1, Hoeffding's elsewhere.

    Args:
        positives: Shape (P,).
        negatives: Shape (N,).
        confidence: Of the two-sided interval.

    Returns:
        None where a side is empty.

    References:
        DeLong, DeLong and Clarke-Pearson 1988; Sun and Xu 2014 for midranks in O(n log n); Hoeffding 1963, section 5.
    """
    positive_P, negative_N = np.asarray(positives, dtype=np.float64), np.asarray(negatives, dtype=np.float64)
    num_p, num_n = len(positive_P), len(negative_N)
    if not num_p or not num_n:
        return None
    # Each positive's share of negatives below it, and each negative's share of positives above it.
    both = stats.rankdata(np.concatenate((positive_P, negative_N)))
    beaten_P = (both[:num_p] - stats.rankdata(positive_P)) / num_n
    beating_N = 1 - (both[num_p:] - stats.rankdata(negative_N)) / num_p
    value = float(beaten_P.mean())
    miss = 1 - confidence
    variance = 0.0
    if num_p > 1 and num_n > 1:
        variance = float(beaten_P.var(ddof=1) / num_p + beating_N.var(ddof=1) / num_n)
    if variance <= 1e-18 or not 0 < value < 1:
        return Estimate(value, *_pairs_interval(value, min(num_p, num_n), miss))
    width = stats.norm.ppf(1 - miss / 2) * math.sqrt(variance) / (value * (1 - value))
    low, high = special.expit(special.logit(value) + np.array([-width, width]))
    return Estimate(value, float(low), float(high))


def tpr_at_fpr(
    positives: ArrayLike, negatives: ArrayLike, fpr: float = 0.01, confidence: float = 0.95
) -> Estimate | None:
    """True positive rate at the threshold that lets at most floor(fpr N) negatives pass.

    Scores that tie with the threshold do not pass. The interval is Clopper and Pearson's, given the threshold.

    Returns:
        None without positives, or with fewer negatives than ``fewest_negatives``.
    """
    positive_P, negative_N = np.asarray(positives, dtype=np.float64), np.sort(np.asarray(negatives, dtype=np.float64))
    if len(negative_N) < fewest_negatives(fpr) or not len(positive_P):
        return None
    allowed = math.floor(fpr * len(negative_N) + 1e-9)
    caught = int((positive_P > negative_N[len(negative_N) - 1 - allowed]).sum())
    interval = stats.binomtest(caught, len(positive_P)).proportion_ci(confidence, method="exact")
    return Estimate(caught / len(positive_P), float(interval.low), float(interval.high))


def fewest_negatives(fpr: float) -> int:
    """With fewer, not one negative stands for the rate: 100 at 1 %, 1,000 at 0.1 %."""
    return math.ceil(1 / fpr - 1e-9)


def members(rows: Iterable[CanaryScores]) -> list[CanaryScores]:
    """The candidates whose coin said in."""
    return [row for row in rows if row.inserted]


def held_out(rows: Iterable[CanaryScores]) -> list[CanaryScores]:
    """The candidates whose coin said out, and references."""
    return [row for row in rows if not row.inserted]


def extraction(rows: Sequence[CanaryScores]) -> dict[str, int]:
    """How many secrets greedy decoding gives away: of those inserted, and of those held out as the control."""
    inside, outside = members(rows), held_out(rows)
    return {
        "inserted": len(inside),
        "tuned": sum(row.tuned_greedy for row in inside),
        "base": sum(row.base_greedy for row in inside),
        "held_out": len(outside),
        "held_out_tuned": sum(row.tuned_greedy for row in outside),
    }


def _pairs_interval(value: float, pairs: int, miss: float) -> tuple[float, float]:
    """Interval for an AUC that needs no variance, from the number of disjoint (member, non-member) pairs."""
    # All pairs in the same order has probability at most AUC^pairs (or (1 - AUC)^pairs).
    exact, hoeffding = 1 - (miss / 2) ** (1 / pairs), math.sqrt(math.log(2 / miss) / (2 * pairs))
    reach = exact if value in (0.0, 1.0) else hoeffding
    return max(0.0, value - reach), min(1.0, value + reach)
