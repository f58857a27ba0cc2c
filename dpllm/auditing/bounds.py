"""Lower bounds on epsilon: what one audited run proves about the privacy it had.

Comes in: one score for each canary of a repetition group, and the coins; or how many guesses were right. Goes out: a
number that exceeds the true epsilon with probability at most alpha, and the claim that repeated canaries are under.
Knows neither models nor texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize
from scipy.special import gammaln

# A legend of shapes: M candidates, R + 1 outcomes of a binomial.

LARGEST_EPSILON = 64.0
"""No bound is sought above it."""
_TOLERANCE = 1e-9

Side = Literal["both", "in"]
"""Guesses on both ends of the ranking, half of them "in", or "in" for the highest scores alone."""


class Outcome(NamedTuple):
    """One way to guess, and how it went: v of r guesses were right."""

    side: Side
    guesses: int
    correct: int


@dataclass(frozen=True)
class OneRunBound:
    """What the one-run test certifies, and the most that it could have certified."""

    value: float
    """The lower bound on epsilon; 0 where nothing is shown."""
    alpha: float
    """Probability that ``value`` exceeds the true epsilon."""
    delta: float
    guesses: tuple[int, ...]
    """The numbers of guesses tried on both sides; each test has level alpha / (len(guesses) + len(guesses_in))."""
    best_guesses: int | None
    """The number of guesses that gave ``value`` (the largest one, where nothing is shown)."""
    correct: int | None
    """How many of ``best_guesses`` were right."""
    num_canaries: int
    """M: candidates with a coin each, in or out."""
    ceiling: float
    """The bound if every guess had been right: a ceiling below the claim means that the audit could not refute it."""
    guesses_in: tuple[int, ...] = ()
    """The numbers of guesses tried on the highest scores alone."""
    best_side: Side | None = None
    """Which of the two gave ``value``."""


@dataclass(frozen=True)
class GroupClaim:
    """What an (epsilon, delta) for one row promises for k copies of it."""

    epsilon: float
    delta: float
    """At most 1, and 1 says nothing."""
    repetitions: int
    """k."""


def one_run_p_value(num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float) -> float:
    """Probability, under (epsilon, delta)-DP, of at least so many right guesses about coins.

    Guarantee:
        For any attacker who sees the output of a mechanism that is (epsilon, delta)-DP in each of ``num_canaries``
        independent fair coins, and who commits to ``num_guesses`` guesses and abstains on the rest,
        P[right guesses >= num_correct] <= the returned value.

    Args:
        num_canaries: m, all coins, guessed or not.
        num_guesses: r <= m, fixed before the coins are looked at.
        num_correct: v <= r.
        epsilon: At least 0.
        delta: At least 0, of the same neighbouring relation: one canary added, removed or zeroed out.

    References:
        Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run" (arXiv 2305.08846), the bound
        for (epsilon, delta)-DP: P[B >= v] + 2 m delta max_i P[v - i <= B < v] / i, B ~ Bin(r, e^eps / (1 + e^eps)).
    """
    return min(1.0, _p_value(num_canaries, _log_choose(num_guesses), num_correct, epsilon, delta))


@lru_cache(maxsize=100_000)  # one simulation: m, r, delta and level stay, v takes some hundred values
def epsilon_from_guesses(num_canaries: int, num_guesses: int, num_correct: int, *, delta: float, alpha: float) -> float:
    """The largest epsilon that so many right guesses refute at level alpha, at most 1e-9 too small; 0 if none.

    Guarantee:
        Under the assumptions of ``one_run_p_value``, r chosen in advance: exceeds epsilon with probability <= alpha.

    References:
        ``one_run_p_value``, inverted. With B + F for the right guesses, F >= 0 the ones that delta pays for and of mean
        at most 2 m delta, the largest P[B + F >= v] over all laws of F grows with epsilon, because B does. The p-value
        is never below it, so whatever epsilon the p-value refutes, all smaller ones are refuted too.
    """
    log_choose_R = _log_choose(num_guesses)

    def gap(epsilon: float) -> float:
        """Below 0 where epsilon is refuted; logarithms make it nearly straight."""
        p = _p_value(num_canaries, log_choose_R, num_correct, epsilon, delta)
        return math.log(max(p, 1e-300) / alpha)

    if gap(0.0) > 0:
        return 0.0
    high = 1.0
    while gap(high) <= 0:
        high *= 2
        if high > LARGEST_EPSILON:
            return LARGEST_EPSILON
    root = float(optimize.brentq(gap, 0.0, high, xtol=_TOLERANCE / 4))
    while root > 0 and gap(root) > 0:
        root = max(0.0, root - _TOLERANCE / 2)
    return root


def epsilon_lower_bound(
    scores: ArrayLike,
    inserted: ArrayLike,
    *,
    delta: float,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
) -> OneRunBound:
    """A lower bound on epsilon from one run, by guessing the coins of extreme scores and abstaining on the rest.

    For each r of ``guesses``, the r // 2 highest scores are guessed in, the r - r // 2 lowest out: best where the scores of
    members are shifted. For each r of ``guesses_in``, the r highest are guessed in and nothing is guessed out: best where
    only some members left a trace. Each is a test of its own at level alpha / K, and the best of all K counts. Entries
    that cannot be played, above m, or above m / 2 in ``guesses_in``, are dropped before K is counted, which is fair
    because m is in the recipe.

    Guarantee:
        P[value > epsilon] <= alpha for every mechanism that is (epsilon, delta)-DP when one canary, with all its
        repetitions, is added, removed or zeroed out (see ``group_claim``). Assumes: each canary was inserted by its own
        fair coin, independent of everything else; the scores depend on the coins only through the mechanism's output;
        higher means in, decided in advance; both grids and ``alpha`` were fixed before the coins were looked at. Equal
        scores are ordered without them.

    Args:
        scores: Shape (M,); higher = more likely a member; finite.
        inserted: Shape (M,), the coins.
        delta: The claim's delta, in [0, 1].
        alpha: In (0, 1/2).
        guesses: The grid of r on both sides, at least 1 each; repeated entries count once.
        guesses_in: The grid of r on the highest scores alone.

    References:
        Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846); the union bound over the grid is ours to pay.

    Raises:
        ValueError: Shapes differ, a score is not a finite number, or alpha or delta is out of range.
    """
    played, level = outcomes(scores, inserted, delta=delta, alpha=alpha, guesses=guesses, guesses_in=guesses_in)
    num_canaries = len(np.asarray(inserted))
    value, best = 0.0, None
    for outcome in reversed(played):
        bound = epsilon_from_guesses(num_canaries, outcome.guesses, outcome.correct, delta=delta, alpha=level)
        if best is None or bound > value:
            value, best = bound, outcome
    return OneRunBound(
        value=value,
        alpha=alpha,
        delta=delta,
        guesses=tuple(outcome.guesses for outcome in played if outcome.side == "both"),
        best_guesses=best.guesses if best else None,
        correct=best.correct if best else None,
        num_canaries=num_canaries,
        ceiling=one_run_ceiling(num_canaries, delta=delta, alpha=alpha, guesses=guesses, guesses_in=guesses_in),
        guesses_in=tuple(outcome.guesses for outcome in played if outcome.side == "in"),
        best_side=best.side if best else None,
    )


def one_run_ceiling(
    num_canaries: int, *, delta: float, alpha: float, guesses: Sequence[int], guesses_in: Sequence[int] = ()
) -> float:
    """The most that ``epsilon_lower_bound`` can show: its value where every guess is right. Needs no scores."""
    ways, level = _ways(num_canaries, delta, alpha, guesses, guesses_in)
    return max((epsilon_from_guesses(num_canaries, r, r, delta=delta, alpha=level) for _, r in ways), default=0.0)


def outcomes(
    scores: ArrayLike,
    inserted: ArrayLike,
    *,
    delta: float,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
) -> tuple[list[Outcome], float]:
    """Every way to guess that can be played, how many guesses were right, and the level of each way."""
    score_M, inserted_M = checked(scores, inserted)
    ways, level = _ways(len(score_M), delta, alpha, guesses, guesses_in)
    # The first key breaks ties by a fixed shuffle: a caller may hand over all members first, and position would tell.
    ranked_M = inserted_M[np.lexsort((_shuffle(len(score_M)), score_M))]
    right_in = np.concatenate(([0], np.cumsum(ranked_M[::-1])))
    right_out = np.concatenate(([0], np.cumsum(~ranked_M)))
    played = []
    for side, r in ways:
        top = r if side == "in" else r // 2
        played.append(Outcome(side, r, int(right_in[top] + right_out[r - top])))
    return played, level


def group_claim(epsilon: float, delta: float, repetitions: int) -> GroupClaim:
    """What a claim for one row promises for a canary that holds ``repetitions`` of them.

    Guarantee:
        A mechanism that is (epsilon, delta)-DP for one row is (k epsilon, delta (1 + e^eps + ... + e^((k - 1) eps)))-DP
        for k rows. A tighter statement needs the mechanism itself.

    Args:
        epsilon: At least 0; may be infinite.
        delta: In [0, 1].
        repetitions: k >= 1.

    References:
        Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", theorem 2.2, with the delta that
        composing the inequality k times gives: delta (e^(k eps) - 1) / (e^eps - 1).

    Raises:
        ValueError: A value is out of range.
    """
    if not epsilon >= 0 or not 0 <= delta <= 1 or repetitions < 1:
        raise ValueError(
            f"a group claim needs epsilon >= 0, delta in [0, 1], k >= 1: {epsilon}, {delta}, {repetitions}"
        )
    if delta == 0 or repetitions == 1:
        return GroupClaim(epsilon * repetitions, delta, repetitions)
    if epsilon == math.inf:
        return GroupClaim(math.inf, 1.0, repetitions)
    # The largest term first, e^((k - 1) eps), and the others as shares of it; at most 1 before anything overflows.
    shares = repetitions if epsilon == 0 else math.expm1(-repetitions * epsilon) / math.expm1(-epsilon)
    log_delta = math.log(delta) + (repetitions - 1) * epsilon + math.log(shares)
    return GroupClaim(epsilon * repetitions, math.exp(min(0.0, log_delta)), repetitions)


def checked(scores: ArrayLike, inserted: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores and coins as arrays of one shape (M,); ValueError where they are none, or a score is not finite."""
    score_M, inserted_M = np.asarray(scores, dtype=np.float64), np.asarray(inserted, dtype=bool)
    if score_M.ndim != 1 or score_M.shape != inserted_M.shape:
        raise ValueError(f"scores and coins must be two equally long lists, got {score_M.shape} and {inserted_M.shape}")
    if not np.isfinite(score_M).all():
        raise ValueError("a score is not a finite number, so it has no rank")
    return score_M, inserted_M


def _ways(
    num_canaries: int, delta: float, alpha: float, guesses: Sequence[int], guesses_in: Sequence[int]
) -> tuple[list[tuple[Side, int]], float]:
    """The ways to guess that can be played, small r first, and the level of each."""
    if not 0 < alpha < 0.5 or not 0 <= delta <= 1:
        raise ValueError(f"alpha must lie in (0, 1/2) and delta in [0, 1], got {alpha} and {delta}")
    ways: list[tuple[Side, int]] = [("in", r) for r in sorted(set(guesses_in)) if 1 <= r <= num_canaries // 2]
    ways += [("both", r) for r in sorted(set(guesses)) if 1 <= r <= num_canaries]
    return ways, alpha / max(1, len(ways))


@lru_cache(maxsize=64)
def _shuffle(num_canaries: int) -> NDArray[np.int64]:
    result = np.random.default_rng(0).permutation(num_canaries)
    result.setflags(write=False)
    return result


@lru_cache(maxsize=256)
def _log_choose(r: int) -> NDArray[np.float64]:
    """Logarithms of the binomial coefficients (r over k), k = 0..r."""
    k = np.arange(r + 1)
    result: NDArray[np.float64] = gammaln(r + 1) - gammaln(k + 1) - gammaln(r - k + 1)
    result.setflags(write=False)
    return result


def _p_value(num_canaries: int, log_choose_R: NDArray[np.float64], correct: int, epsilon: float, delta: float) -> float:
    """The p-value before it is cut at 1."""
    r = len(log_choose_R) - 1
    # Log of 1 - q without forming q, which rounds to 1 from epsilon = 37 on; q / (1 - q) is e^epsilon.
    log_rest = -epsilon - math.log1p(math.exp(-epsilon))
    pmf_R = np.exp(log_choose_R + (np.arange(r + 1) * epsilon + r * log_rest))
    tail = float(pmf_R[correct:].sum())
    if delta == 0 or correct == 0:
        return tail
    # P[v - i <= B < v] for i = 1..v; a larger i only divides the same mass by more.
    below = np.cumsum(pmf_R[:correct][::-1])
    return tail + 2 * num_canaries * delta * float((below / np.arange(1, correct + 1)).max())
