"""Epsilon from error rates of many runs, and the curves of mechanisms: right by other means of computing them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from audit_simulation import ALPHA, EPSILONS, MECHANISMS, Mechanism, laplace, runs, too_often
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.auditing.bounds import Rates, epsilon_from_rates, many_runs
from dpllm.privacy.limits import gaussian_epsilon

COUNTS = Rates(400, 100, 50, 450)


# Error rates.


def test_rates_match_an_independent_implementation():
    bound = epsilon_from_rates(COUNTS, delta=1e-5, alpha=0.05)
    assert (bound.fnr_upper, bound.fpr_upper) == pytest.approx((0.237792, 0.129709), abs=1e-6)
    assert bound.value == pytest.approx(1.770912, abs=1e-6)
    # Members and others exchanged: the same two numbers, so the better direction counts in both.
    mirrored = epsilon_from_rates(Rates(450, 50, 100, 400), delta=1e-5, alpha=0.05)
    assert mirrored.value == pytest.approx(bound.value, abs=1e-9)


@pytest.mark.parametrize(("per_side", "expected"), [(50, 2.570), (100, 3.281), (500, 4.906), (5000, 7.212)])
def test_a_perfect_attack_on_rates_shows_what_the_limits_leave(per_side, expected):
    bound = epsilon_from_rates(Rates(per_side, 0, 0, per_side), delta=1e-5, alpha=0.05)
    assert bound.value == pytest.approx(expected, abs=5.1e-4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.tuples(*[st.integers(0, 300)] * 4), st.floats(0, 0.1), st.floats(0.001, 0.4))
def test_rates_equal_the_region_as_printed(counts, delta, alpha):
    """Against the interval of another library, and the two lines of the region searched for the smallest epsilon."""
    rates = Rates(*counts)
    limits = []
    for events, others in (
        (rates.false_negatives, rates.true_positives),
        (rates.false_positives, rates.true_negatives),
    ):
        trials = events + others
        test = stats.binomtest(events, trials) if trials else None
        limits.append(test.proportion_ci(1 - alpha, method="exact").high if test else 1.0)
    bound = epsilon_from_rates(rates, delta=delta, alpha=alpha)
    assert (bound.fnr_upper, bound.fpr_upper) == pytest.approx(limits, abs=1e-9)
    value = bound.value
    fnr, fpr = limits

    def allowed(epsilon: float) -> bool:
        return fnr >= 1 - delta - math.exp(epsilon) * fpr and fpr >= 1 - delta - math.exp(epsilon) * fnr

    assert allowed(value + 1e-9)
    assert value == 0 or not allowed(value - 1e-6)


def test_rates_say_what_they_are_worth():
    assert "run of its own" in epsilon_from_rates(COUNTS, delta=1e-5, alpha=0.05).assumes


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_independent_runs_exceed_the_truth_at_most_as_often_as_alpha_says(name, epsilon, seed, full):
    """Each canary is a run of its own here: the coins of these mechanisms do not touch."""
    mechanism = MECHANISMS[name]
    rng = np.random.default_rng([seed, 30, int(10 * epsilon), list(MECHANISMS).index(name)])
    number = 1000 if full else 100
    false = 0
    for scores, coins in runs(mechanism, epsilon, 300, number, rng):
        false += many_runs(scores[coins], scores[~coins], delta=mechanism.delta, alpha=ALPHA).value > epsilon
    assert not too_often(false, number)


def test_runs_that_chose_the_threshold_are_not_counted_at_it():
    """Whatever the second half of the runs scores, the threshold is that of the first."""
    positives, negatives = [3.0, 0.0] * 50, [1.0, 2.0] * 50
    bound = many_runs(positives, negatives, delta=0.0, alpha=ALPHA)
    assert bound.rates == Rates(0, 50, 50, 0)  # the first half separates perfectly, the second one the other way round
    assert bound.value == 0.0  # higher means in, also where turning it round would show a lot


def test_raw_rates_would_be_caught(seed):
    """The largest ratio of rates over all thresholds, as some report it, is above the truth nearly always."""
    epsilon, number = 1.0, 200
    rng = np.random.default_rng([seed, 31])
    false = 0
    for scores, coins in runs(Mechanism(laplace, 0.0), epsilon, 400, number, rng):
        cuts = np.quantile(scores, np.linspace(0.1, 0.9, 41))
        raw = [(scores[coins] > cut).mean() / (scores[~coins] > cut).mean() for cut in cuts]
        false += math.log(max(raw)) > epsilon
    assert too_often(false, number)


def test_rates_have_power(seed):
    rng = np.random.default_rng([seed, 32])
    audited = runs(MECHANISMS["gaussian"], 4.0, 1000, 50, rng)
    split = [many_runs(s[c], s[~c], delta=1e-5, alpha=ALPHA).value for s, c in audited]
    assert np.mean(split) >= 0.5


def test_rates_of_bad_input_are_refused():
    with pytest.raises(ValueError, match="alpha must lie"):
        epsilon_from_rates(COUNTS, delta=0.0, alpha=0.7)
    with pytest.raises(ValueError, match="cannot be negative"):
        epsilon_from_rates(Rates(1, -1, 0, 1), delta=0.0, alpha=0.05)
    with pytest.raises(ValueError, match="not a finite number"):
        many_runs([1.0, math.nan], [0.0, 0.0], delta=0.0, alpha=0.05)
    with pytest.raises(ValueError, match="half of the runs"):
        many_runs([1.0], [0.0, 0.0], delta=0.0, alpha=0.05)


# Gaussian mechanisms.


def test_the_epsilon_of_a_gaussian_matches_an_independent_implementation():
    for mu, expected in ((0.5, 1.99309), (1.0, 4.37718), (2.0, 9.99726)):
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(expected, abs=5.1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(1e-9, 1e-5) == 0.0
