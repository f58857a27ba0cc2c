"""What one run shows about a mechanism whose whole trade-off curve is assumed, and not only one (epsilon, delta).

Comes in: scores and coins of one run, and a trade-off curve: a Gaussian's, or the one of the event that a plan accounts
for. Goes out: a p-value for that curve, or how much of a family of curves is refuted. None of it is a lower bound on
epsilon in general: off the assumed family such a number can be far above the truth, so each result says what it
assumes. Knows neither models nor texts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize
from scipy.special import log_ndtr, ndtr, ndtri

from dpllm.audit.bounds import Outcome, outcomes
from dpllm.audit.rates import Rates, rate_limits
from dpllm.privacy.events import Event, Terms, normal_form
from dpllm.privacy.limits import profile
from dpllm.privacy.privacy_loss import Relation

_LARGEST_MU = 30.0
_LARGEST_EPSILON = 1e4
_SMALLEST_P = 1e-30
_NORMAL = NormalDist()

ASSUMES_GAUSSIAN = "the mechanism is a Gaussian one with an unknown noise; for any other this is no bound on epsilon"
ASSUMES_EVENT = "the trade-off curve of the configured mechanism, sampling and number of steps included"


@dataclass(frozen=True)
class TradeOff:
    """The best that any test can do which tells "in" from "out" of one canary, exchanging the two included."""

    assumes: str
    smallest_fpr: Callable[[float], float]
    """True positive rate in [0, 1] -> the smallest false positive rate that goes with it: convex and rising."""


@dataclass(frozen=True)
class MechanismTest:
    """Whether the guesses of one run are compatible with a trade-off curve."""

    refuted: bool
    """A true curve is refuted with probability at most ``alpha``."""
    p_value: float
    """After paying for the grid; at most 1."""
    alpha: float
    assumes: str
    """What the tested hypothesis is."""
    best: Outcome | None
    """The way to guess that gave ``p_value``."""


@dataclass(frozen=True)
class FamilyBound:
    """The strongest member of a family of mechanisms that is refuted. No lower bound on epsilon in general."""

    kind: str
    """one_run_gaussian or gaussian_from_rates."""
    mu: float
    """The largest refuted mu, of N(mu, 1) against N(0, 1); 0 where nothing is shown."""
    epsilon: float
    """Of that member at ``delta``: a lower bound on epsilon only if the mechanism is one of the family."""
    delta: float
    alpha: float
    assumes: str
    best: Outcome | None
    """The way to guess that gave ``mu``; None for rates, and where there was none."""


@dataclass(frozen=True)
class NoiseBound:
    """How much noise the scores leave possible, as a multiple of the configured noise."""

    multiple: float
    """Every noise multiplier of at least this many times the configured one is refuted; below 1, so is the claim."""
    alpha: float
    assumes: str


def gaussian_trade_off(mu: float) -> TradeOff:
    """The curve of N(mu, 1) against N(0, 1).

    Args:
        mu: At least 0.

    References:
        Dong, Roth and Su 2022, "Gaussian Differential Privacy", equation 6.
    """
    inverse, root = _NORMAL.inv_cdf, math.sqrt(2)

    def smallest_fpr(tpr: float) -> float:
        if not 0 < tpr < 1:
            return float(tpr >= 1)
        return math.erfc((mu - inverse(tpr)) / root) / 2

    return TradeOff(f"a Gaussian mechanism with mu = {mu:.6g}", smallest_fpr)


def profile_trade_off(epsilons: Sequence[float], deltas: Sequence[float], assumes: str) -> TradeOff:
    """The curve that pairs of (epsilon, delta) allow together: a polygon below that of any mechanism with all of them.

    Args:
        epsilons: At least 0.
        deltas: In [0, 1], one for each.
        assumes: The words for the hypothesis.

    References:
        Kairouz, Oh and Viswanath 2015: FPR >= e^-eps (TPR - delta) and FPR >= 1 - delta - e^eps (1 - TPR).
    """
    # Lines over the true positive rate. The intercept of a steep one is huge, so it is evaluated from the far end.
    lines = [(0.0, 0.0, False)]  # slope, delta, steep
    for epsilon, delta in zip(epsilons, deltas, strict=True):
        lines += [(math.exp(-epsilon), delta, False), (math.exp(min(epsilon, 700.0)), delta, True)]

    def at(line: tuple[float, float, bool], tpr: float) -> float:
        slope, delta, steep = line
        return 1 - delta - slope * (1 - tpr) if steep else slope * (tpr - delta)

    kept: list[tuple[float, float, bool]] = []
    starts: list[float] = []  # where each kept line becomes the highest
    for line in sorted(lines, key=lambda line: (line[0], at(line, 0.0))):
        while kept:
            gap = at(kept[-1], 0.0) - at(line, 0.0)
            start = gap / (line[0] - kept[-1][0]) if line[0] > kept[-1][0] else (0.0 if gap <= 0 else math.inf)
            if start > starts[-1]:
                break
            kept.pop()
            starts.pop()
        else:
            start = 0.0
        if start < math.inf:
            kept.append(line)
            starts.append(max(0.0, start))

    def smallest_fpr(tpr: float) -> float:
        return min(1.0, max(0.0, at(kept[bisect_right(starts, tpr) - 1], tpr)))

    return TradeOff(assumes, smallest_fpr)


def event_trade_off(event: Event, relation: Relation) -> TradeOff:
    """The curve of an event as the accountant knows it, the worse of both directions.

    Args:
        event: What was released, see ``dpllm.privacy.events``.
        relation: The neighbouring relation.

    Raises:
        Refused: No accountant knows every part of the event.
    """
    return _terms_trade_off(normal_form(event), relation)


def fdp_p_value(num_canaries: int, num_guesses: int, num_correct: int, trade_off: TradeOff) -> float:
    """Probability, for a mechanism with this trade-off curve, of at least so many right guesses about coins.

    Guarantee:
        For any attacker who sees the output of a mechanism that has ``trade_off`` in each of ``num_canaries`` independent
        fair coins, and who commits to ``num_guesses`` guesses, P[right guesses >= num_correct] <= the returned value.

    Args:
        num_canaries: m, all coins, guessed or not.
        num_guesses: r.
        num_correct: v.
        trade_off: The hypothesis.

    References:
        Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-Differential Privacy in One Run" (arXiv 2410.22235), the
        recursion for two-valued coins; the smallest level at which it finds the assumed probability impossible.
    """
    if num_correct == 0:
        return 1.0

    def impossible(log_level: float) -> bool:
        return _impossible(num_canaries, num_guesses, num_correct, trade_off, math.exp(log_level))

    low, high = math.log(_SMALLEST_P), 0.0
    if not impossible(high):
        return 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if impossible(middle) else (middle, high)
    return math.exp(high)


def mechanism_test(
    scores: ArrayLike,
    inserted: ArrayLike,
    trade_off: TradeOff,
    *,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
) -> MechanismTest:
    """Tests the curve that a run is meant to have: tighter than a test of its (epsilon, delta) alone.

    Guarantee:
        P[refuted] <= alpha for every mechanism with that trade-off curve, under the assumptions of
        ``bounds.epsilon_lower_bound``. Refuted means that the run did not do what was configured, by how much is open.

    Args:
        scores: Shape (M,); higher = more likely a member; finite.
        inserted: Shape (M,), the coins.
        trade_off: Usually ``event_trade_off`` of the plan's event.
        alpha: In (0, 1/2).
        guesses: The grid of the recipe; the p-value is multiplied by the number of ways to guess.
        guesses_in: The other grid of the recipe.

    Raises:
        ValueError: Shapes differ, a score is not a finite number, or alpha is out of range.
    """
    played, _ = outcomes(scores, inserted, delta=0.0, alpha=alpha, guesses=guesses, guesses_in=guesses_in)
    num, p_value, best = len(np.asarray(inserted)), 1.0, None
    for way in played:
        found = min(1.0, len(played) * fdp_p_value(num, way.guesses, way.correct, trade_off))
        if best is None or found <= p_value:
            p_value, best = found, way
    return MechanismTest(p_value <= alpha, p_value, alpha, trade_off.assumes, best)


def noise_bound(
    scores: ArrayLike,
    inserted: ArrayLike,
    event: Event,
    relation: Relation,
    *,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
) -> NoiseBound:
    """The least multiple of the configured noise that the scores refute, to one part in a hundred, rounded up.

    Guarantee:
        If the run did what ``event`` says with s times its noise, P[multiple <= s] <= alpha.

    Args:
        scores: Shape (M,); higher = more likely a member; finite.
        inserted: Shape (M,), the coins.
        event: The plan's event.
        relation: The neighbouring relation.
        alpha: In (0, 1/2).
        guesses: The grid of the recipe.
        guesses_in: The other grid of the recipe.

    Returns:
        A multiple from 1/64 up; infinite where not even 64 times the noise is refuted.

    Raises:
        ValueError: As ``mechanism_test``.
        Refused: No accountant knows every part of the event.
    """
    played, level = outcomes(scores, inserted, delta=0.0, alpha=alpha, guesses=guesses, guesses_in=guesses_in)
    num, terms = len(np.asarray(inserted)), normal_form(event)

    def refuted(multiple: float) -> bool:
        parts = tuple(part._replace(noise_multiplier=part.noise_multiplier * multiple) for part in terms.sampled)
        curve = _terms_trade_off(terms._replace(sampled=parts), relation)
        return any(_impossible(num, way.guesses, way.correct, curve, level) for way in played)

    # From 1 outwards: the loss of hardly any noise takes long to compute, and no audit gets there.
    high = 1.0
    while not refuted(high):
        high *= 2
        if high > 64:
            return NoiseBound(math.inf, alpha, ASSUMES_EVENT)
    low = high / 2
    while refuted(low):
        low, high = low / 2, low
        if high <= 1 / 64:
            return NoiseBound(high, alpha, ASSUMES_EVENT)
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return NoiseBound(high, alpha, ASSUMES_EVENT)


def gaussian_bound(
    scores: ArrayLike,
    inserted: ArrayLike,
    *,
    delta: float,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
) -> FamilyBound:
    """The largest mu that one run refutes, and the epsilon that a Gaussian mechanism with that mu has.

    Guarantee:
        P[mu > true mu] <= alpha for Gaussian mechanisms, under the assumptions of ``bounds.epsilon_lower_bound``. No
        guarantee for any other mechanism: on randomised response with epsilon 2 it is above the truth every time.

    Args:
        scores: Shape (M,); higher = more likely a member; finite.
        inserted: Shape (M,), the coins.
        delta: Of the stated epsilon, in (0, 1).
        alpha: In (0, 1/2).
        guesses: The grid of the recipe.
        guesses_in: The other grid of the recipe.

    Raises:
        ValueError: Shapes differ, a score is not a finite number, or alpha or delta is out of range.
    """
    played, level = outcomes(scores, inserted, delta=delta, alpha=alpha, guesses=guesses, guesses_in=guesses_in)
    mu, best = 0.0, None
    for way in played:
        found = gaussian_mu(len(np.asarray(inserted)), way.guesses, way.correct, alpha=level)
        if best is None or found >= mu:
            mu, best = found, way
    return FamilyBound("one_run_gaussian", mu, gaussian_epsilon(mu, delta), delta, alpha, ASSUMES_GAUSSIAN, best)


def gaussian_from_rates(rates: Rates, *, delta: float, alpha: float) -> FamilyBound:
    """The mu between two error rates, and its epsilon: an extrapolation from one threshold to a whole curve.

    Guarantee:
        P[mu > true mu] <= alpha for Gaussian mechanisms if all trials are independent training runs. None otherwise.

    Args:
        rates: Counts at a threshold that was chosen without them.
        delta: Of the stated epsilon, in (0, 1).
        alpha: In (0, 1).

    References:
        Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning" (arXiv 2302.07956).
    """
    fnr, fpr = rate_limits(rates, alpha)
    mu = max(0.0, float(ndtri(1 - fpr) - ndtri(fnr))) if fnr < 1 and fpr < 1 else 0.0
    epsilon = gaussian_epsilon(mu, delta)
    return FamilyBound("gaussian_from_rates", mu, epsilon, delta, alpha, ASSUMES_GAUSSIAN, None)


@lru_cache(maxsize=100_000)
def gaussian_mu(num_canaries: int, num_guesses: int, num_correct: int, *, alpha: float) -> float:
    """The largest mu that so many right guesses refute at level alpha, rounded down to 1e-7; 0 if none.

    Args:
        num_canaries: m.
        num_guesses: r <= m, fixed in advance.
        num_correct: v <= r.
        alpha: Level of this one test.
    """

    def refuted(mu: float) -> bool:
        return _impossible(num_canaries, num_guesses, num_correct, gaussian_trade_off(mu), alpha)

    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
        if low >= _LARGEST_MU:
            return low
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


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


def _terms_trade_off(terms: Terms, relation: Relation) -> TradeOff:
    epsilons, deltas = ([0.0], [0.0]) if terms == Terms() else profile(terms, relation)
    return profile_trade_off(epsilons, deltas, ASSUMES_EVENT)


def _impossible(m: int, r: int, v: int, trade_off: TradeOff, level: float) -> bool:
    """Whether P[right >= v] = level contradicts the trade-off curve.

    From v downwards, ``hit`` is at least the mass of guesses that are right, and ``miss`` of those that are wrong, where at
    least i guesses are right, each as a share of m. They cannot be more than all guesses, r / m.
    """
    hit, miss, whole = level * v / m, level * (r - v) / m, r / m
    for i in range(v - 1, -1, -1):
        more = max(miss, trade_off.smallest_fpr(min(1.0, hit)))
        hit += i / (r - i) * (more - miss)
        miss = more
        if hit + miss > whole:  # neither ever falls
            return True
    return hit + miss > whole
