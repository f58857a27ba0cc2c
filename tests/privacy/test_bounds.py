"""The lower bound on epsilon is one: on mechanisms whose privacy is known exactly it is hardly ever above the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats

from dpllm.audit.bounds import OneRunBound, epsilon_from_guesses, epsilon_lower_bound, one_run_p_value

ALPHA = 0.05
GRID = (10, 20, 50, 100, 200)
SPREAD_GRID = (10, 15, 22, 33, 50, 80, 130, 220, 400)
SIGNIFICANCE = 1e-8  # how often one simulation may alarm falsely

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


# Known mechanisms: coins in, one score for each coin out.


def randomized_response(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    flipped = rng.random(len(coins)) < 1 / (1 + math.exp(epsilon))
    return (coins ^ flipped).astype(float)


def laplace(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    return coins + rng.laplace(scale=1 / epsilon, size=len(coins))


def gaussian(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    return coins * gaussian_shift(epsilon, delta) + rng.normal(size=len(coins))


def name_and_shame(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    """With probability delta a coin is published outright; otherwise randomized response."""
    published = rng.random(len(coins)) < delta
    return np.where(published, 20.0 * coins - 10.0, randomized_response(coins, epsilon, delta, rng))


def gaussian_shift(epsilon: float, delta: float) -> float:
    """The sensitivity over sigma at which the Gaussian mechanism is exactly (epsilon, delta)-DP."""

    def excess(mu: float) -> float:
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return float(upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(optimize.brentq(excess, 1e-3, 50.0))


@dataclass(frozen=True)
class Mechanism:
    run: Callable[[Bools, float, float, np.random.Generator], Floats]
    delta: float
    """Of the claim, and of the mechanism where it has one."""


MECHANISMS = {
    "randomized response": Mechanism(randomized_response, 1e-5),
    "laplace": Mechanism(laplace, 1e-5),
    "gaussian": Mechanism(gaussian, 1e-5),
    "name and shame": Mechanism(name_and_shame, 1e-2),
}


def audits(
    mechanism: Mechanism,
    epsilon: float,
    num_canaries: int,
    count: int,
    rng: np.random.Generator,
    *,
    alpha: float = ALPHA,
    guesses: Sequence[int] = GRID,
    delta: float | None = None,
) -> list[OneRunBound]:
    """Audits of independent runs of a mechanism; ``delta`` is what the bound is told, if not the truth."""
    told = mechanism.delta if delta is None else delta
    results = []
    for _ in range(count):
        coins = rng.random(num_canaries) < 0.5
        scores = mechanism.run(coins, epsilon, mechanism.delta, rng)
        results.append(epsilon_lower_bound(scores, coins, delta=told, alpha=alpha, guesses=guesses))
    return results


def false_alarm(bounds: Sequence[OneRunBound], epsilon: float, alpha: float = ALPHA) -> bool:
    """Whether bounds exceed the truth more often than alpha allows."""
    false = sum(bound.value > epsilon for bound in bounds)
    return bool(stats.binomtest(false, len(bounds), alpha, alternative="greater").pvalue < SIGNIFICANCE)


# The p-value.


@pytest.mark.parametrize(
    ("m", "r", "v", "epsilon", "delta", "expected"),
    [
        (1000, 100, 90, 1.0, 0.0, 2.735812801e-05),
        (1000, 100, 90, 1.0, 1e-5, 8.412885614e-04),
        (1000, 100, 100, 4.0, 1e-5, 0.1688040858),
        (100, 50, 40, 0.5, 1e-3, 0.01977751982),
    ],
)
def test_p_value_matches_an_independent_implementation(m, r, v, epsilon, delta, expected):
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("r", "v", "expected"), [(100, 90, 1.6261), (100, 100, 3.4654), (1000, 600, 0.2972)])
def test_epsilon_matches_an_independent_implementation(r, v, expected):
    assert epsilon_from_guesses(1000, r, v, delta=1e-5, alpha=0.05) == pytest.approx(expected, abs=5.1e-5)


def naive_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The formula as it is printed, in loops."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))

    def between(low: int, high: int) -> float:
        return sum(math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(max(0, low), high))

    worst = max((between(v - i, v) / i for i in range(1, m + 1)), default=0.0) if v > 0 else 0.0
    return min(1.0, between(v, r + 1) + 2 * m * delta * worst)


@st.composite
def guessing(draw: st.DrawFn) -> tuple[int, int, int]:
    m = draw(st.integers(1, 120))
    r = draw(st.integers(1, m))
    return m, r, draw(st.integers(0, r))


@settings(max_examples=150, deadline=None)
@given(guessing(), st.floats(0, 8), st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)))
def test_p_value_equals_the_formula_as_printed(mrv, epsilon, delta):
    assert one_run_p_value(*mrv, epsilon, delta) == pytest.approx(
        naive_p_value(*mrv, epsilon, delta), rel=1e-9, abs=1e-15
    )


@settings(max_examples=150, deadline=None)
@given(guessing(), st.floats(0, 12), st.floats(0, 3), st.floats(0, 1e-3))
def test_p_value_grows_with_epsilon_delta_and_canaries_and_shrinks_with_right_guesses(mrv, epsilon, more, delta):
    m, r, v = mrv
    here = one_run_p_value(m, r, v, epsilon, delta)
    slack = 1e-12
    assert one_run_p_value(m, r, v, epsilon + more, delta) >= here * (1 - 1e-9) - slack
    assert one_run_p_value(m, r, v, epsilon, 2 * delta) >= here - slack
    assert one_run_p_value(2 * m, r, v, epsilon, delta) >= here - slack
    if v > 0:
        assert one_run_p_value(m, r, v - 1, epsilon, 0.0) >= one_run_p_value(m, r, v, epsilon, 0.0) - slack


@pytest.mark.parametrize("epsilon", [0.0, 30.0, 40.0, 700.0])
def test_p_value_is_finite_where_probabilities_round_to_zero_and_one(epsilon):
    for r, v in ((5000, 5000), (5000, 2500), (5000, 0), (1, 1)):
        assert 0.0 <= one_run_p_value(5000, r, v, epsilon, 1e-6) <= 1.0


@settings(max_examples=60, deadline=None)
@given(guessing(), st.floats(0, 1e-3), st.floats(1e-4, 0.2))
def test_the_bound_is_where_the_p_value_crosses_alpha(mrv, delta, alpha):
    m, r, v = mrv
    epsilon = epsilon_from_guesses(m, r, v, delta=delta, alpha=alpha)
    assert one_run_p_value(m, r, v, epsilon + 1e-6, delta) > alpha
    if epsilon > 0:
        assert one_run_p_value(m, r, v, epsilon, delta) <= alpha
        assert v > r / 2
    if v > 0:
        assert epsilon_from_guesses(m, r, v - 1, delta=delta, alpha=alpha) <= epsilon


# The bound from scores.


def test_a_perfect_separator_reaches_the_ceiling_in_closed_form():
    coins = np.arange(400) % 2 == 0
    bound = epsilon_lower_bound(coins.astype(float), coins, delta=0.0, alpha=0.05, guesses=[10, 100])
    q = (0.05 / 2) ** (1 / 100)
    assert bound.value == bound.ceiling == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert (bound.best_guesses, bound.correct, bound.num_canaries) == (100, 100, 400)


def test_the_grid_costs_alpha_over_its_length():
    rng = np.random.default_rng(1)
    coins = rng.random(300) < 0.5
    scores = coins + rng.normal(size=300)
    alone = [epsilon_lower_bound(scores, coins, delta=1e-5, alpha=0.01, guesses=[r]).value for r in GRID]
    together = epsilon_lower_bound(scores, coins, delta=1e-5, alpha=0.05, guesses=GRID)
    assert together.value == pytest.approx(max(alone), abs=1e-8)
    assert together.best_guesses == GRID[int(np.argmax(alone))]


def test_guess_counts_above_the_number_of_canaries_are_dropped_before_alpha_is_divided():
    coins = np.arange(60) % 2 == 0
    bound = epsilon_lower_bound(coins.astype(float), coins, delta=1e-5, alpha=0.05, guesses=[100, 20, 20, 50])
    assert bound.guesses == (20, 50)
    assert bound.value == pytest.approx(epsilon_from_guesses(60, 50, 50, delta=1e-5, alpha=0.025), abs=1e-8)


def test_nothing_playable_shows_nothing():
    bound = epsilon_lower_bound([1.0, 0.0], [True, False], delta=1e-5, alpha=0.05, guesses=[10])
    assert (bound.value, bound.ceiling, bound.guesses, bound.best_guesses, bound.correct) == (0.0, 0.0, (), None, None)
    assert epsilon_lower_bound([], [], delta=1e-5, alpha=0.05, guesses=[10]).ceiling == 0.0


def test_the_wrong_direction_shows_nothing():
    coins = np.arange(400) % 2 == 0
    assert epsilon_lower_bound(-coins.astype(float), coins, delta=1e-5, alpha=0.05, guesses=GRID).value == 0.0


@pytest.mark.parametrize("members_first", [True, False])
def test_equal_scores_show_nothing_whatever_the_order_of_the_rows(members_first):
    coins = (np.arange(1000) < 500) == members_first
    assert epsilon_lower_bound(np.zeros(1000), coins, delta=1e-5, alpha=0.05, guesses=GRID).value == 0.0


def test_a_bound_of_scores_without_rank_is_refused():
    with pytest.raises(ValueError, match="not a finite number"):
        epsilon_lower_bound([1.0, math.nan], [True, False], delta=1e-5, alpha=0.05, guesses=[2])
    with pytest.raises(ValueError, match="equally long"):
        epsilon_lower_bound([1.0], [True, False], delta=1e-5, alpha=0.05, guesses=[2])


# Known mechanisms.


@pytest.mark.parametrize("num_canaries", [100, 1000])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_bound_exceeds_the_truth_at_most_as_often_as_alpha_says(name, epsilon, num_canaries, seed, full):
    mechanism = MECHANISMS[name]
    rng = np.random.default_rng([seed, num_canaries, int(10 * epsilon), list(MECHANISMS).index(name)])
    bounds = audits(mechanism, epsilon, num_canaries, 1000 if full else 60, rng)
    assert not false_alarm(bounds, epsilon)


def test_one_guess_count_on_randomized_response_is_nearly_tight(seed, full):
    """Here the theorem is an equality, so a bound that is much too careful would show as well."""
    count, epsilon = (4000, 1.0) if full else (1000, 1.0)
    rng = np.random.default_rng([seed, 7])
    mechanism = Mechanism(randomized_response, 0.0)
    bounds = audits(mechanism, epsilon, 400, count, rng, guesses=[300])
    assert not false_alarm(bounds, epsilon)
    false = sum(bound.value > epsilon for bound in bounds)
    assert stats.binomtest(false, count, 0.02, alternative="less").pvalue > SIGNIFICANCE


def test_many_guess_counts_are_paid_for_and_would_be_caught_if_not(seed, full):
    epsilon, count = 0.5, 2000 if full else 800
    rng = np.random.default_rng([seed, 8])
    # Without delta and with a mechanism whose every extreme score is equally telling, no entry is better than another.
    mechanism = Mechanism(laplace, 0.0)
    assert not false_alarm(audits(mechanism, epsilon, 1000, count, rng, guesses=SPREAD_GRID), epsilon)
    # Each entry tested at alpha itself, as if there were no others.
    unpaid_alpha = ALPHA * len(SPREAD_GRID)
    unpaid = audits(mechanism, epsilon, 1000, count, rng, alpha=unpaid_alpha, guesses=SPREAD_GRID)
    assert false_alarm(unpaid, epsilon)


def test_delta_is_paid_for_and_would_be_caught_if_not(seed):
    mechanism, epsilon = MECHANISMS["name and shame"], 0.5
    rng = np.random.default_rng([seed, 9])
    assert not false_alarm(audits(mechanism, epsilon, 1000, 100, rng), epsilon)
    assert false_alarm(audits(mechanism, epsilon, 1000, 100, rng, delta=0.0), epsilon)


def test_the_bound_has_power(seed):
    """A bound of 0 would pass every test above."""
    rng = np.random.default_rng([seed, 10])
    bounds = audits(MECHANISMS["gaussian"], 4.0, 1000, 60, rng)
    assert np.mean([bound.value for bound in bounds]) >= 1.0
