"""Lower bounds on epsilon: what one audited run proves about the privacy it had.

Comes in: one score for each once-inserted canary, and the coins. Goes out: a number that exceeds the true epsilon with
probability at most alpha. Knows neither models nor texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

# A legend of shapes: M candidates, R + 1 outcomes of a binomial.

_LARGEST_EPSILON = 64.0
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class OneRunBound:
    """What the one-run test certifies, and the most that it could have certified."""

    value: float
    """The lower bound on epsilon; 0 where nothing is shown."""
    alpha: float
    """Probability that ``value`` exceeds the true epsilon."""
    delta: float
    guesses: tuple[int, ...]
    """The numbers of guesses tried; each test has level alpha / len(guesses)."""
    best_guesses: int | None
    """The number of guesses that gave ``value`` (the largest one, where nothing is shown)."""
    correct: int | None
    """How many of ``best_guesses`` were right."""
    num_canaries: int
    """M: candidates with a coin each, in or out."""
    ceiling: float
    """The bound if every guess had been right: a ceiling below the claim means that the audit could not refute it."""


def one_run_p_value(num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float) -> float:
    """Probability, under (epsilon, delta)-DP, of at least so many right guesses about coins.

    Guarantee:
        For any attacker who sees the output of a mechanism that is (epsilon, delta)-DP in each of ``num_canaries``
        independent fair coins, and who commits to ``num_guesses`` guesses and abstains on the rest,
        P[right guesses >= num_correct] <= the returned value.

    Args:
        num_canaries: m, all coins, guessed or not.
        num_guesses: r, fixed before the coins are looked at.
        num_correct: v.
        epsilon: At least 0.
        delta: At least 0, of the same neighbouring relation: one canary added, removed or zeroed out.

    References:
        Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run" (arXiv 2305.08846), the bound
        for (epsilon, delta)-DP: P[B >= v] + 2 m delta max_i P[v - i <= B < v] / i, B ~ Bin(r, e^eps / (1 + e^eps)).
    """
    log_choose_R = _log_choose(num_guesses)
    return _p_value(num_canaries, log_choose_R, num_correct, epsilon, delta)


def epsilon_from_guesses(num_canaries: int, num_guesses: int, num_correct: int, *, delta: float, alpha: float) -> float:
    """The largest epsilon that so many right guesses refute at level alpha, rounded down; 0 if none.

    Guarantee:
        Under the assumptions of ``one_run_p_value``, r chosen in advance: exceeds epsilon with probability <= alpha.

    Args:
        num_canaries: m.
        num_guesses: r <= m.
        num_correct: v <= r.
        delta: The claim's delta.
        alpha: Level of this one test.

    References:
        ``one_run_p_value``, inverted. The p-value grows with epsilon (a binomial with a larger q dominates one with a
        smaller q, whatever is added to it), so bisection finds the crossing.
    """
    return _epsilon(num_canaries, _log_choose(num_guesses), num_correct, delta, alpha, at_least=0.0)


def epsilon_lower_bound(
    scores: ArrayLike, inserted: ArrayLike, *, delta: float, alpha: float, guesses: Sequence[int]
) -> OneRunBound:
    """A lower bound on epsilon from one run, by guessing coins on both sides and abstaining in between.

    For each r of ``guesses``, the r // 2 highest scores are guessed in, the r - r // 2 lowest out. Each r is a test of
    its own at level alpha / K, and the best of them counts. Entries above m cannot be played: they are dropped, before
    K is counted, which is fair because m is in the recipe.

    Guarantee:
        P[value > epsilon] <= alpha for every mechanism that is (epsilon, delta)-DP when one canary is added, removed or
        zeroed out. Assumes: each canary was inserted at most once, by its own fair coin, independent of everything
        else; the scores depend on the coins only through the mechanism's output; higher means in, decided in advance;
        ``guesses`` and ``alpha`` were fixed before the coins were looked at. Equal scores are ordered without them.

    Args:
        scores: Shape (M,); higher = more likely a member; finite.
        inserted: Shape (M,), the coins.
        delta: The claim's delta.
        alpha: In (0, 1/2).
        guesses: The grid of r, at least 1 each; repeated entries count once.

    References:
        Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846); the union bound over the grid is ours to pay.

    Raises:
        ValueError: Shapes differ, or a score is not a finite number.
    """
    score_M = np.asarray(scores, dtype=np.float64)
    inserted_M = np.asarray(inserted, dtype=bool)
    if score_M.ndim != 1 or score_M.shape != inserted_M.shape:
        raise ValueError(f"scores and coins must be two equally long lists, got {score_M.shape} and {inserted_M.shape}")
    if not np.isfinite(score_M).all():
        raise ValueError("a score is not a finite number, so it has no rank")
    if not 0 < alpha < 0.5 or not 0 <= delta < 1:
        raise ValueError(f"alpha must lie in (0, 1/2) and delta in [0, 1), got {alpha} and {delta}")
    num_canaries = len(score_M)
    grid = tuple(sorted({r for r in guesses if 1 <= r <= num_canaries}))
    # The first key breaks ties by a fixed shuffle: a caller may hand over all members first, and position would tell.
    shuffle_M = np.random.default_rng(0).permutation(num_canaries)
    ranked_M = inserted_M[np.lexsort((shuffle_M, score_M))]

    value, ceiling = 0.0, 0.0
    best: tuple[int, int] | None = None
    # Largest first: it nearly always has the highest ceiling, so that the others need a single look each.
    for r in reversed(grid):
        top = r // 2
        correct = int(ranked_M[num_canaries - top :].sum() + (~ranked_M[: r - top]).sum())
        log_choose_R, level = _log_choose(r), alpha / len(grid)
        bound = _epsilon(num_canaries, log_choose_R, correct, delta, level, at_least=value)
        if best is None or bound > value:
            value, best = bound, (r, correct)
        ceiling = _epsilon(num_canaries, log_choose_R, r, delta, level, at_least=ceiling)
    best_guesses, correct_guesses = best if best else (None, None)
    return OneRunBound(value, alpha, delta, grid, best_guesses, correct_guesses, num_canaries, ceiling)


def _log_choose(r: int) -> NDArray[np.float64]:
    """Logarithms of the binomial coefficients (r over k), k = 0..r."""
    k = np.arange(r + 1)
    result: NDArray[np.float64] = gammaln(r + 1) - gammaln(k + 1) - gammaln(r - k + 1)
    return result


def _p_value(num_canaries: int, log_choose_R: NDArray[np.float64], correct: int, epsilon: float, delta: float) -> float:
    r = len(log_choose_R) - 1
    k_R = np.arange(r + 1)
    # log q and log(1 - q) without forming q, which rounds to 1 from epsilon = 37 on.
    log_q = -np.log1p(np.exp(-epsilon))
    pmf_R = np.exp(log_choose_R + k_R * log_q + (r - k_R) * (log_q - epsilon))
    tail = float(pmf_R[correct:].sum())
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    # P[v - i <= B < v] for i = 1..v; a larger i only divides the same mass by more.
    below = np.cumsum(pmf_R[:correct][::-1])
    return min(1.0, tail + 2 * num_canaries * delta * float((below / np.arange(1, correct + 1)).max()))


def _epsilon(
    num_canaries: int, log_choose_R: NDArray[np.float64], correct: int, delta: float, alpha: float, *, at_least: float
) -> float:
    """The largest refuted epsilon if it is above ``at_least``, otherwise ``at_least``."""

    def refuted(epsilon: float) -> bool:
        return _p_value(num_canaries, log_choose_R, correct, epsilon, delta) <= alpha

    low, high = at_least, at_least + 1.0
    if not refuted(low):
        return low
    while refuted(high) and high < _LARGEST_EPSILON:
        low, high = high, high + 1.0
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
