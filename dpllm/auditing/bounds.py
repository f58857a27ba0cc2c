"""Lower bounds on epsilon: from one audited run, or from many.

Comes in: one score for each canary of a repetition group, and the coins; or one score of each of many runs. Goes out: a
number that exceeds the true epsilon with probability at most alpha. Must not know models or texts.

Each guess has a weight from 1 to K, larger for more extreme scores, and the statistic of a test is W, the sum of the weights of
all right guesses. W also adds up the right guesses of K tests of weight 1, of which the second guesses twice as many canaries as
the first, and the last one r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft, optimize
from scipy.special import gammaln

from dpllm.auditing.statistics import upper_limit
from dpllm.statement.audit_bounds import OneRunBound, Side

# A legend of shapes: M candidates, K weights, W outcomes of a sum of weights, F frequencies; P runs with a canary, N without.

LARGEST_EPSILON = 64.0
"""The largest bound that the search returns."""
_TOLERANCE = 1e-9
_WEIGHTS = 8  # K: doubling it raises bounds by 0.5% and doubles the time


class Outcome(NamedTuple):
    """A way to guess and its result: of r guesses ``correct`` were right, and their weights add up to ``weight``."""

    side: Side
    guesses: int
    correct: int
    weight: int


def p_value(num_canaries: int, counts_K: tuple[int, ...], weight: int, epsilon: float, delta: float) -> float:
    """Bound on the probability, under (epsilon, delta)-DP, that the weights of right guesses add up to ``weight`` or more.

    Guarantee:
        For any attacker who sees the output of a mechanism that is (epsilon, delta)-DP in each of ``num_canaries``
        independent fair coins, and who commits to guesses of these weights and abstains on the rest,
        P[W >= weight] <= the returned value, which may exceed 1.

    Args:
        num_canaries: m, all coins, guessed or not.
        counts_K: Numbers of guesses of weight 1, 2, ..., K, fixed before the coins are read; at most m in all.
        weight: v, the sum of the weights of right guesses.
        epsilon: At least 0.
        delta: At least 0, of the same neighbouring relation: one canary added, removed or zeroed out.

    References:
        Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run" (arXiv 2305.08846), theorem 5.2 and the
        lemmas of its proof: given the output, W is stochastically dominated by W* + K F, where W* is the same sum with every
        guess right by a coin of its own, with probability e^eps / (1 + e^eps), and F >= 0 is a count with mean at most
        2 m delta over all outputs. The law of W* is the same for every output, so that
        P[W >= v] <= g(0) + 2 m delta max_i (g(i) - g(0)) / i, g(i) = P[W* >= v - i K].
        With K = 1, W* is Bin(r, e^eps / (1 + e^eps)).
    """
    law_W = _distribution_of_score(counts_K, epsilon)
    tail = float(law_W[weight:].sum())
    if delta == 0 or weight == 0:
        return tail
    # P[v - i K <= W* < v] for i = 1, 2, ..., up to P[W* < v], which a larger i would only divide by more.
    num_counts = len(counts_K)
    below = np.cumsum(law_W[:weight][::-1])
    below = below[np.minimum(np.arange(num_counts - 1, len(below) + num_counts - 1, num_counts), len(below) - 1)]
    return tail + 2 * num_canaries * delta * float((below / np.arange(1, len(below) + 1)).max())


@lru_cache(maxsize=100_000)  # in a simulation only the weight varies, over a few hundred values
def epsilon_of(num_canaries: int, counts_K: tuple[int, ...], weight: int, *, delta: float, alpha: float) -> float:
    """The largest epsilon that right guesses of this total ``weight`` refute at level alpha, at most 1e-9 too small; 0 if none.

    Guarantee:
        Under the assumptions of ``p_value``, with the test chosen in advance: exceeds epsilon with probability <= alpha. The
        largest P[W* + K F >= v] over all laws of F grows with epsilon, because W* does, and the p-value is never below it, so
        if the p-value refutes an epsilon, all smaller ones are refuted too.
    """

    def gap(epsilon: float) -> float:
        """Negative if epsilon is refuted; logarithms make it nearly linear."""
        return math.log(max(p_value(num_canaries, counts_K, weight, epsilon, delta), 1e-300) / alpha)

    if gap(0.0) > 0:
        return 0.0
    low, high = 0.0, 1.0
    while gap(high) <= 0:
        low, high = high, 2 * high
        if high > LARGEST_EPSILON:
            return LARGEST_EPSILON
    root = float(optimize.brentq(gap, low, high, xtol=_TOLERANCE / 4))
    while root > 0 and gap(root) > 0:  # brentq may end on the side that claims too much
        root = max(0.0, root - _TOLERANCE / 2)
    return root


def epsilon_lower_bound(
    scores: ArrayLike,
    inserted: ArrayLike,
    *,
    delta: float,
    alpha: float,
    falling: Sequence[int] = (),
    falling_in: Sequence[int] = (),
) -> OneRunBound:
    """A lower bound on epsilon from one run, by guessing the coins of extreme scores and abstaining on the rest.

    For each r of ``falling``, the r // 2 highest scores are guessed in, the r - r // 2 lowest out: best if the scores of
    members are shifted. For each r of ``falling_in``, the r highest are guessed in: best if only some members left a trace.
    Each is a test of its own, at level alpha divided by the number of tests, and the best counts. Values of r above m (for
    ``falling_in``: m / 2) are dropped before the division, which is valid because m is in the recipe.

    Guarantee:
        P[value > epsilon] <= alpha for every mechanism that is (epsilon, delta)-DP when one canary, with all its
        repetitions, is added, removed or zeroed out (see ``group_claim``). Assumes: each canary was inserted by its own
        fair coin, independent of everything else; the scores depend on the coins only through the mechanism's output;
        higher means in, decided in advance; all grids and ``alpha`` were fixed before the coins were looked at. Among
        equal scores the wrong guesses come first: the theorem holds in every order of them, and no order has fewer right.

    Args:
        scores: Shape (M,); higher = more likely a member; finite.
        inserted: Shape (M,), the coins.
        delta: The claim's delta, in [0, 1].
        alpha: In (0, 1/2).
        falling: The grid of r on both sides, at least 1 each; repeated entries count once.
        falling_in: Likewise.

    Raises:
        ValueError: Shapes differ, a score is not finite, or alpha or delta is out of range.
    """
    played, level = outcomes(scores, inserted, delta=delta, alpha=alpha, falling=falling, falling_in=falling_in)
    num_canaries = np.size(inserted)
    value, best = _best(num_canaries, played, delta, level)
    return OneRunBound(
        value=value,
        alpha=alpha,
        delta=delta,
        falling=tuple(outcome.guesses for outcome in played if outcome.side == "falling"),
        falling_in=tuple(outcome.guesses for outcome in played if outcome.side == "falling_in"),
        best_guesses=best.guesses if best else None,
        best_side=best.side if best else None,
        correct=best.correct if best else None,
        weight=best.weight if best else None,
        num_canaries=num_canaries,
        ceiling=one_run_ceiling(num_canaries, delta=delta, alpha=alpha, falling=falling, falling_in=falling_in),
    )


def one_run_ceiling(num_canaries: int, *, delta: float, alpha: float, **grids: Sequence[int]) -> float:
    """The most that ``epsilon_lower_bound`` can show: its value if every guess is right. Needs no scores."""
    tests, level = _tests(num_canaries, delta, alpha, grids)
    perfect = [Outcome(side, r, r, sum(k * count for k, count in enumerate(_counts(side, r), 1))) for side, r in tests]
    return _best(num_canaries, perfect, delta, level)[0]


def _best(num_canaries: int, played: Sequence[Outcome], delta: float, level: float) -> tuple[float, Outcome | None]:
    """The largest bound of several tests and its outcome; a test is inverted only if it refutes the bound so far."""
    value, best = 0.0, played[-1] if played else None
    for outcome in reversed(played):
        counts_K = _counts(outcome.side, outcome.guesses)
        if p_value(num_canaries, counts_K, outcome.weight, value, delta) < level:
            epsilon = epsilon_of(num_canaries, counts_K, outcome.weight, delta=delta, alpha=level)
            value, best = max(value, epsilon), outcome
    return value, best


def outcomes(
    scores: ArrayLike, inserted: ArrayLike, *, delta: float, alpha: float, **grids: Sequence[int]
) -> tuple[list[Outcome], float]:
    """The result of each applicable test, and the level of each test."""
    score_M, inserted_M = checked(scores, inserted)
    tests, level = _tests(len(score_M), delta, alpha, grids)
    # Ties are ordered so that wrong guesses come first: held-out canaries from above, inserted ones from below.
    from_above_M, from_below_M = (
        inserted_M[np.lexsort((inserted_M, -score_M))],
        inserted_M[np.lexsort((~inserted_M, score_M))],
    )
    right_in, right_out = (np.concatenate(([0], np.cumsum(right_M))) for right_M in (from_above_M, ~from_below_M))
    played = []
    for side, r in tests:
        above, below = _windows(side, r)
        weight = int(right_in[above].sum() + right_out[below].sum())
        played.append(Outcome(side, r, int(right_in[above[-1]] + right_out[below[-1]]), weight))
    return played, level


def checked(scores: ArrayLike, inserted: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores and coins as arrays of one shape (M,); ValueError if they are not, or a score is not finite."""
    score_M, inserted_M = np.asarray(scores, dtype=np.float64), np.asarray(inserted, dtype=bool)
    if score_M.ndim != 1 or score_M.shape != inserted_M.shape:
        raise ValueError(f"scores and coins must be two equally long lists, got {score_M.shape} and {inserted_M.shape}")
    if not np.isfinite(score_M).all():
        raise ValueError("a score is not a finite number, so it has no rank")
    return score_M, inserted_M


def _tests(
    num_canaries: int, delta: float, alpha: float, grids: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[Side, int]], float]:
    """The applicable tests, one-sided before two-sided and small r first, and the level of each."""
    if not 0 < alpha < 0.5 or not 0 <= delta <= 1:
        raise ValueError(f"alpha must lie in (0, 1/2) and delta in [0, 1], got {alpha} and {delta}")
    tests: list[tuple[Side, int]] = []
    tests += [("falling_in", r) for r in sorted(set(grids.get("falling_in", ()))) if 1 <= r <= num_canaries // 2]
    tests += [("falling", r) for r in sorted(set(grids.get("falling", ()))) if 1 <= r <= num_canaries]
    return tests, alpha / max(1, len(tests))


def _windows(side: Side, r: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of the summed tests of weight 1: how many of the highest scores are guessed in, and of the lowest out."""
    top, bottom = (r, 0) if side == "falling_in" else (r // 2, r - r // 2)
    parts = min(_WEIGHTS, max(top, bottom))
    shares = np.arange(1, parts + 1)
    # Rounded up, so that the smallest window is not empty and the largest holds all r.
    return -(-top * shares // parts), -(-bottom * shares // parts)


@lru_cache(maxsize=256)
def _counts(side: Side, r: int) -> tuple[int, ...]:
    """How many guesses have weight 1, 2, ..., K: the weight of a guess is the number of windows that contain it."""
    above, below = (np.diff(windows, prepend=0)[::-1] for windows in _windows(side, r))
    return tuple(int(count) for count in above + below)


@lru_cache(maxsize=256)
def _log_choose(r: int) -> NDArray[np.float64]:
    k = np.arange(r + 1)
    result: NDArray[np.float64] = gammaln(r + 1) - gammaln(k + 1) - gammaln(r - k + 1)
    result.setflags(write=False)
    return result


@lru_cache(maxsize=64)
def _waves(counts_K: tuple[int, ...]) -> tuple[list[tuple[int, NDArray[np.complex128]]], int]:
    """For each distinct count of guesses, exp(-i weight frequency) of the weights with it; and the length of the law."""
    length = sum(weight * count for weight, count in enumerate(counts_K, start=1)) + 1
    size = fft.next_fast_len(length, real=True)
    step_F = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
    weights = [
        (count, [weight for weight, other in enumerate(counts_K, start=1) if other == count]) for count in set(counts_K)
    ]
    return [(count, np.array([step_F**weight for weight in of_count])) for count, of_count in weights], length


def _distribution_of_score(counts_K: tuple[int, ...], epsilon: float) -> NDArray[np.float64]:
    """The law of W*: P[W* = w] for w from 0 to the sum of all weights."""
    # Log of 1 - q without computing q, which rounds to 1 from epsilon = 37 on; q / (1 - q) = e^epsilon.
    log_rest = -epsilon - math.log1p(math.exp(-epsilon))
    if len(counts_K) == 1:  # keeps full relative precision in the smallest tail
        r = counts_K[0]
        return np.exp(_log_choose(r) + (np.arange(r + 1) * epsilon + r * log_rest))
    # Transforms of independent summands multiply: a guess of weight w has remaining + (1 - remaining) exp(-i w f).
    waves, length = _waves(counts_K)
    remaining = math.exp(log_rest)
    spectrum_F: Any = 1.0
    for count, waves_KF in waves:
        spectrum_F = spectrum_F * (remaining + (1 - remaining) * waves_KF).prod(axis=0) ** count
    law_W: NDArray[np.float64] = fft.irfft(spectrum_F, fft.next_fast_len(length, real=True))[:length]
    return law_W


# Bounds from many runs: each run is one trial.

ASSUMES = "each trial is a training run of its own, its threshold chosen without these trials"


@dataclass(frozen=True)
class Rates:
    """Counts of guesses at one threshold: trials with the canary (positives) and without it (negatives)."""

    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int


@dataclass(frozen=True)
class RateBound:
    """A lower bound on epsilon at ``delta``, 0 if nothing is shown, with the upper limits of the rates that give it."""

    value: float
    assumes: str
    alpha: float
    delta: float
    rates: Rates
    fnr_upper: float
    fpr_upper: float


def epsilon_from_rates(rates: Rates, *, delta: float, alpha: float) -> RateBound:
    """A lower bound on epsilon from the error rates at one threshold, in both directions.

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
    value, fnr, fpr = _bounds_of_counts(*counts, delta, alpha)
    return RateBound(float(value), ASSUMES, alpha, delta, rates, float(fnr), float(fpr))


def many_runs(positives: ArrayLike, negatives: ArrayLike, *, delta: float, alpha: float) -> RateBound:
    """A lower bound on epsilon from many training runs, with one score of each.

    Every second run of each kind is used to choose the threshold at which the bound from those runs is largest; the other
    runs are counted at it.

    Guarantee:
        That of ``epsilon_from_rates``, if all runs of a kind are independent and identically distributed.

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
    # A threshold chosen on the runs that are counted at it would fit their noise and void the guarantee.
    tried_P, tried_N = np.sort(positive_P[::2]), np.sort(negative_N[::2])
    cuts = np.concatenate((tried_P, tried_N))
    below_P, below_N = np.searchsorted(tried_P, cuts, side="right"), np.searchsorted(tried_N, cuts, side="right")
    tried = len(tried_P) - below_P, below_P, len(tried_N) - below_N, below_N
    cut = cuts[_bounds_of_counts(*tried, delta, alpha)[0].argmax()]
    # A score that equals the threshold is not called a member.
    above_P, above_N = positive_P[1::2] > cut, negative_N[1::2] > cut
    counts = (above_P.sum(), (~above_P).sum(), above_N.sum(), (~above_N).sum())
    return epsilon_from_rates(Rates(*map(int, counts)), delta=delta, alpha=alpha)


def _bounds_of_counts(
    caught: ArrayLike, missed: ArrayLike, accused: ArrayLike, cleared: ArrayLike, delta: float, alpha: float
) -> tuple[NDArray[np.float64], ...]:
    """Epsilon, and upper limits of the false negative and false positive rates, both valid with probability 1 - alpha."""
    fnr, fpr = upper_limit(missed, caught, alpha / 2), upper_limit(accused, cleared, alpha / 2)
    # 1 - FNR <= e^eps FPR + delta and its mirror image; at least 0.
    ratio = np.maximum((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
    return np.log(np.maximum(ratio, 1.0)), fnr, fpr
