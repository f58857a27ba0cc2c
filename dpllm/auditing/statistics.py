"""Statistics: how well scores, or words alone, separate members from non-members, with intervals.

Comes in: scores, or the texts of both sides. Goes out: areas under the curve, true positive rates, exposure and tests, each with
its uncertainty. A higher score means "more likely a member"; this direction is fixed in advance and never reversed. If words
alone separate the two sides, the sides differ in kind, and a separation by a model's scores does not show membership. Must not
know models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, sparse, special, stats

from dpllm.canaries.texts import Canary
from dpllm.statement.audit import CONTROL_LEVEL

# A legend of shapes: P positives, N negatives, Q references, D texts, W words.

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number and an interval that covers it with the stated confidence."""

    value: float
    low: float
    high: float

    @property
    def above_half(self) -> bool:
        """Of an area: whether the interval lies above 1/2, so that the first side ranks higher by more than chance."""
        return self.low > 0.5


def estimate_fields(name: str, estimate: Estimate | None) -> dict[str, Any]:
    """An estimate as two fields of a report; None where nothing could be estimated."""
    interval = [estimate.low, estimate.high] if estimate else None
    return {name: estimate.value if estimate else None, f"{name}_interval": interval}


def exposure(scores: ArrayLike, reference_scores: ArrayLike) -> Floats:
    """Exposure in bits: log2 Q - log2 of the rank among Q references, from log2(Q / (Q + 1)) to log2 Q.

    A canary that ties with a reference is ranked after it, so ties never look like memorisation.

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
        Uniform (or conservative) on [0, 1] if all the scores are exchangeable, as they are if nothing was learned.
    """
    first, second = np.asarray(scores, dtype=np.float64), np.asarray(other_scores, dtype=np.float64)
    if not len(first) or not len(second):
        return None
    if len(np.unique(np.concatenate((first, second)))) == 1:
        return 1.0
    return float(stats.mannwhitneyu(first, second, alternative="greater").pvalue)


def auc(positives: ArrayLike, negatives: ArrayLike, confidence: float = 0.95) -> Estimate | None:
    """Area under the ROC curve: P[member above non-member] + P[tie] / 2, with an interval; None where a side is empty.

    The interval is the union of two. DeLong's uses the variance of the sample, with Student's quantile for its degrees of
    freedom, on the logit scale so that it stays inside [0, 1]; a dozen scores that each beat nearly all others show too
    little variance. Newcombe's instead contains the areas that a curve of the usual shape, with the variance of that area,
    could have; it ignores that one side may vary more than the other. If the sample shows no variance (perfect separation,
    all scores equal, one score on a side), the interval is distribution-free, over min(P, N) disjoint pairs: exact at 0
    and 1, Hoeffding's elsewhere.

    Guarantee:
        None by a theorem. In simulations with independent Gaussian scores, where one side varies half as much to twice as
        much as the other, a 95% interval covers in 94% or more: 12 against 508, 50 against 50, 97 against 603, for areas
        from .5 to .99.

    Args:
        positives: Shape (P,).
        negatives: Shape (N,).
        confidence: Confidence of the two-sided interval, in (0, 1).

    References:
        DeLong, DeLong and Clarke-Pearson 1988; Sun and Xu 2014 for midranks in O(n log n); Brunner and Munzel 2000 for the
        degrees of freedom; Newcombe 2006, "Confidence intervals for an effect size measure based on the Mann-Whitney
        statistic. Part 2", method 5; Hoeffding 1963, section 5.
    """
    positive_P, negative_N = np.asarray(positives, dtype=np.float64), np.asarray(negatives, dtype=np.float64)
    num_p, num_n = len(positive_P), len(negative_N)
    if not num_p or not num_n:
        return None
    beaten_P, beating_N = placements(positive_P, negative_N)
    value, miss = float(beaten_P.mean()), 1 - confidence
    of_p = of_n = 0.0
    if num_p > 1 and num_n > 1:
        of_p, of_n = float(beaten_P.var(ddof=1)) / num_p, float(beating_N.var(ddof=1)) / num_n
    variance = of_p + of_n
    if variance <= 1e-18 or not 0 < value < 1:
        return Estimate(value, *_pairs_interval(value, min(num_p, num_n), miss))
    freedom = variance**2 / (of_p**2 / (num_p - 1) + of_n**2 / (num_n - 1))
    quantile = float(special.stdtrit(freedom, 1 - miss / 2))
    low, high = logit_interval(value, quantile * math.sqrt(variance))
    lowest, highest = _areas(value, num_p, num_n, float(special.ndtri(1 - miss / 2)))
    return Estimate(value, min(low, lowest), max(high, highest))  # each covers where the other fails, see above


def placements(positive_P: Floats, negative_N: Floats) -> tuple[Floats, Floats]:
    """Each positive's share of negatives below it, and each negative's share of positives above it; ties count half."""
    num_p, num_n = len(positive_P), len(negative_N)
    both = stats.rankdata(np.concatenate((positive_P, negative_N)))
    beaten_P: Floats = (both[:num_p] - stats.rankdata(positive_P)) / num_n
    beating_N: Floats = 1 - (both[num_p:] - stats.rankdata(negative_N)) / num_p
    return beaten_P, beating_N


def logit_interval(value: float, reach: float) -> tuple[float, float]:
    """The interval of a share that extends by ``reach`` on either side, mapped to the logit scale."""
    width = reach / (value * (1 - value))
    low, high = special.expit(special.logit(value) + np.array([-width, width]))
    return float(low), float(high)


def hoeffding(pairs: int, miss: float) -> float:
    """Hoeffding's bound: the mean of ``pairs`` independent numbers in [0, 1] deviates by more with probability <= ``miss``."""
    return math.sqrt(math.log(2 / miss) / (2 * pairs))


def tpr_at_fpr(
    positives: ArrayLike,
    negatives: ArrayLike,
    fpr: float = 0.01,
    confidence: float = 0.95,
) -> Estimate | None:
    """True positive rate at the threshold that lets at most floor(fpr N) negatives pass.

    Scores that tie with the threshold do not pass. The interval is for the rate at the threshold that lets a share ``fpr``
    of all possible negatives pass, of which the given negatives are a sample: two of their order statistics bracket that
    threshold, and Clopper and Pearson's limit is taken at each. With few negatives (at 95%, fewer than 396 at 1% and 3,975
    at 0.1%) the threshold may lie above them all, and the lower limit is 0.

    Guarantee:
        The interval covers with probability ``confidence`` or more, whatever the two distributions are, ties and jumps
        included, if the negatives are independent draws from one and the positives from the other. It is a union bound: for
        Gaussian scores about 1.1 to 1.6 times as wide as a normal approximation that knows the curve.

    Args:
        positives: Shape (P,).
        negatives: Shape (N,).
        fpr: In (0, 1).
        confidence: Confidence of the two-sided interval, in (0, 1).

    Returns:
        None without positives, or with fewer than 1 / fpr negatives: below 100 at 1 %, 1,000 at 0.1 %.

    References:
        Clopper and Pearson 1934; David and Nagaraja 2003, "Order Statistics", section 7.1, for quantiles between order
        statistics; combining the two by a union bound is ours.
    """
    positive_P, negative_N = np.asarray(positives, dtype=np.float64), np.sort(np.asarray(negatives, dtype=np.float64))
    num_p, num_n = len(positive_P), len(negative_N)
    if num_n < math.ceil(1 / fpr - 1e-9) or not num_p:
        return None
    # thresholds[N - k] lets k negatives pass: k = -1 is a threshold above all scores, k = N one below them all.
    thresholds = np.concatenate(([-np.inf], negative_N, [np.inf]))

    def caught(passing: int) -> int:
        return int((positive_P > thresholds[num_n - passing]).sum())

    # The threshold is an estimate too and uses part of the error probability.
    min_rank, max_rank, miss_low, miss_high = _threshold_ranks(num_n, fpr, 1 - confidence)
    low = 1 - float(upper_limit(num_p - caught(min_rank), caught(min_rank), miss_low))
    high = float(upper_limit(caught(max_rank), num_p - caught(max_rank), miss_high))
    return Estimate(caught(math.floor(fpr * num_n + 1e-9)) / num_p, low, high)


def upper_limit(events: ArrayLike, non_events: ArrayLike, alpha: float) -> Floats:
    """Upper confidence limits, at level 1 - alpha, of the rates of events, from counts of events and non-events.

    References:
        Clopper and Pearson 1934.
    """
    has_others = np.asarray(non_events) > 0
    limit = special.betaincinv(np.asarray(events) + 1.0, np.where(has_others, non_events, 1.0), 1 - alpha)
    return np.where(has_others, limit, 1.0)


def fit_slope(x: Floats, y: Floats) -> float:
    """The least-squares slope of ``y`` on ``x``, both of one shape; 1 if ``x`` does not vary."""
    spread = float(((x - x.mean()) ** 2).sum()) if len(x) else 0.0
    if spread <= 1e-12 * max(1, len(x)):
        return 1.0
    return float(((x - x.mean()) * (y - y.mean())).sum() / spread)


def _areas(value: float, num_p: int, num_n: int, quantile: float) -> tuple[float, float]:
    """The smallest and largest areas whose distance from ``value`` is at most ``quantile`` of their standard deviations."""
    half = (num_p + num_n) / 2 - 1

    def gap(area: float) -> float:
        # The variance for exponential scores, after Hanley and McNeil; Newcombe replaces both sizes by their mean.
        shape = 1 + half * ((1 - area) / (2 - area) + area / (1 + area))
        return (area - value) ** 2 - quantile**2 * area * (1 - area) * shape / (num_p * num_n)

    return float(optimize.brentq(gap, 0.0, value)), float(optimize.brentq(gap, value, 1.0))


def _threshold_ranks(num_n: int, fpr: float, miss: float) -> tuple[int, int, float, float]:
    """Numbers of passing negatives whose thresholds bracket the true one, and what remains of ``miss`` for each limit.

    The probability that ``min_rank`` negatives or fewer lie at or above the true threshold, or that more than ``max_rank``
    lie above it, is subtracted from ``miss``.
    """
    # A large share, because the limits of the rate depend only on the logarithm of what remains for them.
    share, side_miss, count_N = 0.75, miss / 2, np.arange(num_n + 1)
    at_most, above = special.bdtr(count_N, num_n, fpr), special.bdtrc(count_N, num_n, fpr)
    min_rank = int((at_most <= share * side_miss).sum()) - 1
    if min_rank < 0:  # the lower limit is 0 and cannot fail
        side_miss = miss
    max_rank = int((above > share * side_miss).sum())
    miss_low = side_miss - float(at_most[min_rank] if min_rank >= 0 else 0)
    return min_rank, max_rank, miss_low, side_miss - float(above[max_rank])


def _pairs_interval(value: float, pairs: int, miss: float) -> tuple[float, float]:
    """Interval for an AUC that needs no variance, from the number of disjoint (member, non-member) pairs."""
    # That all pairs have the same order has probability at most AUC^pairs (or (1 - AUC)^pairs).
    reach = 1 - (miss / 2) ** (1 / pairs) if value in (0.0, 1.0) else hoeffding(pairs, miss)
    return max(0.0, value - reach), min(1.0, value + reach)


# Words alone.

FOLDS = 5
FEWEST_TEXTS = 20
"""Minimum texts of each side; with fewer, a fold holds too few to compare."""
# The classifiers share training rows, so the AUCs of the folds are correlated, and the variance of their mean exceeds that of
# K independent ones by the factor (1/K + test/training) / (1/K): Nadeau and Bengio's correction. In simulations without any
# difference the mean varies 1.6 to 2.0 times as much as without correlation.
_INFLATION = 1 + FOLDS / (FOLDS - 1)
_WORD = re.compile(r"\w+|[^\w ]|  +")  # words, any other single sign, line breaks, and runs of two or more spaces


def blind(texts_in: Sequence[str], texts_out: Sequence[str], confidence: float = 0.95) -> Estimate | None:
    """AUC of a cross-validated naive Bayes classifier over a text's words, its length, its first and its last word.

    The area is that of the first side above the second; each text is scored by a classifier that was trained without its
    fold. Folds are stratified and drawn with a fixed seed. An area is computed within each fold and averaged, because the
    scores of different classifiers have no common scale. None with fewer than 20 texts on a side.

    Guarantee:
        Where all texts are exchangeable, the area is ``above_half`` with probability about (1 - confidence) / 2 or less. This is
        shown by simulation, not by a theorem: see the tests.

    Args:
        texts_in: One text for each privacy unit.
        texts_out: Likewise.
        confidence: Confidence of the interval, in (0, 1).

    References:
        Das, Zhang and Tramer 2024, "Blind baselines beat membership inference attacks for foundation models"; Nadeau and
        Bengio 2003, "Inference for the generalization error", for the correlation between folds.
    """
    if min(len(texts_in), len(texts_out)) < FEWEST_TEXTS:
        return None
    present_DW = _presence([*texts_in, *texts_out])
    first_D = np.arange(len(texts_in) + len(texts_out)) < len(texts_in)
    draw = np.random.default_rng(0)
    fold_D = np.concatenate([draw.permutation(len(side)) % FOLDS for side in (texts_in, texts_out)])
    areas, variances = [], []
    for fold in range(FOLDS):
        test_D = fold_D == fold
        score_D = present_DW @ _weights(present_DW, first_D & ~test_D, ~first_D & ~test_D)
        beaten_P, beating_N = placements(score_D[test_D & first_D], score_D[test_D & ~first_D])
        areas.append(float(beaten_P.mean()))
        variances.append(float(beaten_P.var(ddof=1) / len(beaten_P) + beating_N.var(ddof=1) / len(beating_N)))
    value, variance, miss = float(np.mean(areas)), _INFLATION * float(np.sum(variances)) / FOLDS**2, 1 - confidence
    if variance <= 1e-18 or not 0 < value < 1:
        reach = hoeffding(min(len(texts_in), len(texts_out)), miss)
        return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))
    return Estimate(value, *logit_interval(value, special.ndtri(1 - miss / 2) * math.sqrt(variance)))


def _features(text: str) -> set[str]:
    """The words and signs of a text; also its length, first and last word, under names with a space, which no word contains."""
    tokens = _WORD.findall(text)
    ends = (f"first {tokens[0]}", f"last {tokens[-1]}") if tokens else ("empty text",)
    return {*tokens, *ends, f"length {round(4 * math.log2(1 + len(text)))}"}


def _presence(texts: Sequence[str]) -> sparse.csr_array:
    column: dict[str, int] = {}
    rows = [[column.setdefault(name, len(column)) for name in sorted(_features(text))] for text in texts]
    ends = np.cumsum([0, *(len(row) for row in rows)])
    indices = np.array([index for row in rows for index in row], dtype=np.int64)
    return sparse.csr_array((np.ones(len(indices)), indices, ends), shape=(len(texts), len(column)))


def _weights(present_DW: sparse.csr_array, in_D: NDArray[np.bool_], out_D: NDArray[np.bool_]) -> Floats:
    """Log-ratio of each word's frequency on the first side to that on the second.

    1 / (number of training texts) is added to both frequencies, so a word that was never seen has weight 0, however many
    texts each side has.
    """
    smoothing = 1 / (in_D.sum() + out_D.sum())
    often_in_W = in_D.astype(np.float64) @ present_DW / in_D.sum()
    often_out_W = out_D.astype(np.float64) @ present_DW / out_D.sum()
    result: Floats = np.log(often_in_W + smoothing) - np.log(often_out_W + smoothing)
    return result


def words_control(canaries: Sequence[Canary]) -> dict[str, Any] | None:
    """AUC of ``blind`` on the canaries, its interval at ``CONTROL_LEVEL``, and ``succeeds``; None: too few of a side."""
    sides = [[canary.text for canary in canaries if canary.inserted is coin] for coin in (True, False)]
    separates = blind(sides[0], sides[1], confidence=1 - CONTROL_LEVEL)
    if separates is None:
        return None
    return {"auc": separates.value, "interval": [separates.low, separates.high], "succeeds": separates.above_half}
