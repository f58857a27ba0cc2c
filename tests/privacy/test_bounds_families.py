"""Bounds that assume more: right where the assumption holds, labelled because they are wrong where it does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from audit_simulation import (
    ALPHA,
    EPSILONS,
    GRID,
    GRID_IN,
    MECHANISMS,
    NUM_STEPS,
    SAMPLED_NOISE,
    SAMPLING_RATE,
    SPREAD_GRID,
    Mechanism,
    gaussian_shift,
    laplace,
    randomized_response,
    runs,
    sampled_gaussian_at,
    too_often,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.audit.bounds import epsilon_lower_bound, outcomes
from dpllm.audit.families import (
    event_trade_off,
    fdp_p_value,
    gaussian_bound,
    gaussian_epsilon,
    gaussian_from_rates,
    gaussian_mu,
    gaussian_trade_off,
    mechanism_test,
    noise_bound,
    profile_trade_off,
)
from dpllm.audit.rates import Rates, count, epsilon_from_rates, many_runs, one_run_rates, rate_limits
from dpllm.privacy.accounting import dp_sgd_event

COUNTS = Rates(400, 100, 50, 450)


# Error rates.


def test_rates_match_an_independent_implementation():
    bound = epsilon_from_rates(COUNTS, delta=1e-5, alpha=0.05, independent_runs=True)
    assert (bound.fnr_upper, bound.fpr_upper) == pytest.approx((0.237792, 0.129709), abs=1e-6)
    assert bound.value == pytest.approx(1.770912, abs=1e-6)
    # Members and others exchanged: the same two numbers, so the better direction counts in both.
    mirrored = epsilon_from_rates(Rates(450, 50, 100, 400), delta=1e-5, alpha=0.05, independent_runs=True)
    assert mirrored.value == pytest.approx(bound.value, abs=1e-9)


@pytest.mark.parametrize(("per_side", "expected"), [(50, 2.570), (100, 3.281), (500, 4.906), (5000, 7.212)])
def test_a_perfect_attack_on_rates_shows_what_the_limits_leave(per_side, expected):
    bound = epsilon_from_rates(Rates(per_side, 0, 0, per_side), delta=1e-5, alpha=0.05, independent_runs=True)
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
    assert rate_limits(rates, alpha) == pytest.approx(limits, abs=1e-9)
    value = epsilon_from_rates(rates, delta=delta, alpha=alpha, independent_runs=True).value
    fnr, fpr = limits

    def allowed(epsilon: float) -> bool:
        return fnr >= 1 - delta - math.exp(epsilon) * fpr and fpr >= 1 - delta - math.exp(epsilon) * fnr

    assert allowed(value + 1e-9)
    assert value == 0 or not allowed(value - 1e-6)


def test_rates_say_what_they_are_worth():
    exact = epsilon_from_rates(COUNTS, delta=1e-5, alpha=0.05, independent_runs=True)
    assert (exact.kind, "run of its own" in exact.assumes) == ("exact", True)
    estimate = epsilon_from_rates(COUNTS, delta=1e-5, alpha=0.05, independent_runs=False)
    assert (estimate.kind, "nobody has proved" in estimate.assumes) == ("heuristic", True)
    scores, coins = runs(MECHANISMS["gaussian"], 4.0, 1000, 1, np.random.default_rng(1))[0]
    assert one_run_rates(scores, coins, delta=1e-5, alpha=0.05, guesses=GRID).kind == "heuristic"
    assert many_runs(scores[coins], scores[~coins], delta=1e-5, alpha=0.05).kind == "exact"


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
        counted = [count(scores[coins], scores[~coins], cut) for cut in np.quantile(scores, np.linspace(0.1, 0.9, 41))]
        raw = [rates.true_positives / coins.sum() / (rates.false_positives / (~coins).sum()) for rates in counted]
        false += math.log(max(raw)) > epsilon
    assert too_often(false, number)


def test_rates_have_power(seed):
    rng = np.random.default_rng([seed, 32])
    audited = runs(MECHANISMS["gaussian"], 4.0, 1000, 50, rng)
    split = [many_runs(s[c], s[~c], delta=1e-5, alpha=ALPHA).value for s, c in audited]
    ranks = [one_run_rates(s, c, delta=1e-5, alpha=ALPHA, guesses=GRID).value for s, c in audited]
    assert np.mean(split) >= 0.5
    assert np.mean(ranks) >= 0.6


def test_rates_of_bad_input_are_refused():
    with pytest.raises(ValueError, match="alpha must lie"):
        epsilon_from_rates(COUNTS, delta=0.0, alpha=0.7, independent_runs=True)
    with pytest.raises(ValueError, match="cannot be negative"):
        epsilon_from_rates(Rates(1, -1, 0, 1), delta=0.0, alpha=0.05, independent_runs=True)
    with pytest.raises(ValueError, match="not a finite number"):
        many_runs([1.0, math.nan], [0.0, 0.0], delta=0.0, alpha=0.05)
    with pytest.raises(ValueError, match="half of the runs"):
        many_runs([1.0], [0.0, 0.0], delta=0.0, alpha=0.05)
    nothing = one_run_rates([1.0, 0.0], [True, False], delta=0.0, alpha=0.05, guesses=[10])
    assert (nothing.value, nothing.thresholds, nothing.rates) == (0.0, 0, None)


# Gaussian mechanisms.


def test_the_gaussian_extrapolation_matches_an_independent_implementation():
    found = gaussian_from_rates(COUNTS, delta=1e-5, alpha=0.05)
    assert (found.mu, found.epsilon) == pytest.approx((1.841191, 9.032760), abs=1e-6)
    assert (found.kind, "no bound" in found.assumes) == ("gaussian_from_rates", True)
    for mu, expected in ((0.5, 1.99309), (1.0, 4.37718), (2.0, 9.99726)):
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(expected, abs=5.1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(1e-9, 1e-5) == 0.0


@pytest.mark.parametrize(
    ("m", "r", "v", "expected"),
    [
        (1000, 100, 100, 5.5490),
        (1000, 100, 90, 2.4564),
        (1000, 100, 75, 1.0059),
        (1000, 1000, 600, 0.5835),
        (100, 100, 100, 8.2162),
    ],
)
def test_the_recursion_matches_an_independent_implementation(m, r, v, expected):
    assert gaussian_epsilon(gaussian_mu(m, r, v, alpha=0.05), 1e-5) == pytest.approx(expected, abs=5.1e-5)


@st.composite
def guessing(draw: st.DrawFn) -> tuple[int, int, int]:
    m = draw(st.integers(1, 120))
    r = draw(st.integers(1, m))
    return m, r, draw(st.integers(0, r))


def naive_p_value(m: int, r: int, v: int, mu: float) -> float:
    """The recursion as it is printed, and a search for the level at which its masses are as many as the guesses."""

    def total(level: float) -> float:
        hit, miss = level * v / m, level * (r - v) / m
        for i in reversed(range(v)):
            before = miss
            miss = max(before, float(stats.norm.cdf(stats.norm.ppf(hit) - mu)) if hit < 1 else 1.0)
            hit += i / (r - i) * (miss - before)
        return hit + miss

    low, high = 1e-12, 1.0
    if total(high) <= r / m:
        return 1.0
    while high / low > 1 + 1e-7:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if total(middle) > r / m else (middle, high)
    return high


@settings(max_examples=40, deadline=None, derandomize=True)
@given(guessing(), st.floats(0, 3))
def test_the_recursion_equals_the_printed_one(mrv, mu):
    m, r, v = mrv
    found = fdp_p_value(m, r, v, gaussian_trade_off(mu))
    assert found == pytest.approx(naive_p_value(m, r, v, mu), rel=1e-5, abs=2e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(guessing(), st.floats(0, 3), st.floats(0, 1))
def test_the_p_value_of_a_curve_grows_with_the_curve_and_shrinks_with_right_guesses(mrv, mu, more):
    m, r, v = mrv
    here = fdp_p_value(m, r, v, gaussian_trade_off(mu))
    assert fdp_p_value(m, r, v, gaussian_trade_off(mu + more)) >= here * (1 - 1e-8)
    if v > 0:
        assert fdp_p_value(m, r, v - 1, gaussian_trade_off(mu)) >= here * (1 - 1e-8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(guessing(), st.floats(0, 6))
def test_the_p_value_of_a_curve_is_never_below_what_randomized_response_does(mrv, epsilon):
    """Its guesses are right with probability e^eps / (1 + e^eps) each, so the p-value is at least that binomial's."""
    m, r, v = mrv
    curve = profile_trade_off([epsilon], [0.0], "randomized response")
    truth = float(stats.binom.sf(v - 1, r, 1 / (1 + math.exp(-epsilon))))
    assert fdp_p_value(m, r, v, curve) >= min(truth, 1.0) * (1 - 1e-8) - 1e-12


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_gaussian_bound_is_one_for_gaussians(epsilon, seed, full):
    rng = np.random.default_rng([seed, 40, int(10 * epsilon)])
    number = 1000 if full else 200
    truth = gaussian_shift(epsilon, 1e-5)
    bounds = [
        gaussian_bound(scores, coins, delta=1e-5, alpha=ALPHA, guesses=GRID, guesses_in=GRID_IN)
        for scores, coins in runs(MECHANISMS["gaussian"], epsilon, 1000, number, rng)
    ]
    assert not too_often(sum(bound.mu > truth for bound in bounds), number)
    assert all(bound.epsilon == gaussian_epsilon(bound.mu, 1e-5) for bound in bounds)
    if epsilon == 4.0:  # more than the bound that assumes nothing, for the price of the assumption
        assert np.mean([bound.epsilon for bound in bounds]) >= 1.6


def test_off_its_family_the_gaussian_bound_is_none_and_says_so(seed):
    rng = np.random.default_rng([seed, 41])
    audited = runs(Mechanism(randomized_response, 0.0), 2.0, 1000, 100, rng)
    bounds = [gaussian_bound(s, c, delta=1e-5, alpha=ALPHA, guesses=[1000]) for s, c in audited]
    assert too_often(sum(bound.epsilon > 2.0 for bound in bounds), len(bounds))
    assert all("no bound" in bound.assumes for bound in bounds)
    extrapolated = [gaussian_from_rates(count(s[c], s[~c], 0.5), delta=1e-5, alpha=ALPHA) for s, c in audited]
    assert all(found.epsilon > 4.0 for found in extrapolated)
    honest = [epsilon_lower_bound(s, c, delta=1e-5, alpha=ALPHA, guesses=[1000]) for s, c in audited]
    assert not too_often(sum(bound.value > 2.0 for bound in honest), len(honest))


# The curve of what was configured.


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), min_size=1, max_size=12), st.floats(0, 1))
def test_the_curve_of_pairs_is_the_highest_of_their_lines(pairs, tpr):
    epsilons, deltas = zip(*pairs, strict=True)
    lines = [0.0] + [math.exp(-e) * (tpr - d) for e, d in pairs] + [1 - d - math.exp(e) * (1 - tpr) for e, d in pairs]
    assert profile_trade_off(epsilons, deltas, "").smallest_fpr(tpr) == pytest.approx(max(lines), abs=1e-6)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_the_curve_of_a_gaussian_event_is_the_gaussian_and_allows_no_less(mu):
    accounted = event_trade_off({"type": "gaussian", "noise_multiplier": 1 / mu}, "zero_out").smallest_fpr
    exact = gaussian_trade_off(mu).smallest_fpr
    for tpr in (0.0, 1e-6, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 0.9999, 1.0):
        # Discretised losses are too large rather than too small, so a test of the curve errs to the careful side.
        assert accounted(tpr) <= exact(tpr) + 1e-9
        assert accounted(tpr) == pytest.approx(exact(tpr), rel=2e-3, abs=1e-9)


def test_the_curve_of_nothing_allows_nothing():
    nothing = event_trade_off({"type": "composed", "events": []}, "zero_out").smallest_fpr
    assert [nothing(tpr) for tpr in (0.0, 0.3, 1.0)] == pytest.approx([0.0, 0.3, 1.0])


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("guesses", [GRID, SPREAD_GRID])
def test_what_was_configured_is_refuted_at_most_as_often_as_alpha_says(epsilon, guesses, seed, full):
    rng = np.random.default_rng([seed, 50, int(10 * epsilon)])
    number = 1000 if full else 100
    noise = SAMPLED_NOISE[epsilon]
    curve = event_trade_off(dp_sgd_event(SAMPLING_RATE, noise, NUM_STEPS), "zero_out")
    audited = runs(MECHANISMS["sampled gaussian"], epsilon, 1000, number, rng)
    tests = [mechanism_test(s, c, curve, alpha=ALPHA, guesses=guesses) for s, c in audited]
    assert not too_often(sum(test.refuted for test in tests), number)
    assert all(test.refuted == (test.p_value <= ALPHA) for test in tests)
    assert "configured" in tests[0].assumes


def test_the_grid_is_paid_for_by_every_family(seed):
    rng = np.random.default_rng([seed, 53])
    scores, coins = runs(MECHANISMS["gaussian"], 4.0, 500, 1, rng)[0]
    curve = gaussian_trade_off(0.3)
    grids = {"guesses": GRID, "guesses_in": GRID_IN}
    played, level = outcomes(scores, coins, delta=1e-5, alpha=ALPHA, **grids)
    assert (len(played), level) == (5, ALPHA / 5)
    found = mechanism_test(scores, coins, curve, alpha=ALPHA, **grids)
    values = [fdp_p_value(500, way.guesses, way.correct, curve) for way in played]
    assert found.p_value == pytest.approx(5 * min(values))
    assert found.best == played[int(np.argmin(values))]
    bound = gaussian_bound(scores, coins, delta=1e-5, alpha=ALPHA, **grids)
    mus = [gaussian_mu(500, way.guesses, way.correct, alpha=level) for way in played]
    assert (bound.mu, bound.best) == (max(mus), played[int(np.argmax(mus))])


def test_less_noise_than_configured_is_refuted_where_the_bound_on_epsilon_is_blind(seed):
    """A third of the noise, epsilon 28 instead of 4: the bound stays below 4, and the configured curve is refuted."""
    rng = np.random.default_rng([seed, 51])
    curve = event_trade_off(dp_sgd_event(SAMPLING_RATE, SAMPLED_NOISE[4.0], NUM_STEPS), "zero_out")
    refuted = falsified = 0
    for _ in range(40):
        coins = rng.random(1000) < 0.5
        scores = sampled_gaussian_at(SAMPLED_NOISE[4.0] / 3, coins, rng)
        refuted += mechanism_test(scores, coins, curve, alpha=ALPHA, guesses=GRID).refuted
        falsified += epsilon_lower_bound(scores, coins, delta=1e-5, alpha=ALPHA, guesses=GRID).value > 4.0
    assert refuted >= 30
    assert falsified <= 5


def test_the_noise_bound_is_above_the_truth_and_falls_with_it(seed):
    rng = np.random.default_rng([seed, 52])
    event = dp_sgd_event(SAMPLING_RATE, SAMPLED_NOISE[4.0], NUM_STEPS)
    curve = event_trade_off(event, "zero_out")
    multiples = []
    for share in (1.0, 0.2):
        coins = rng.random(1000) < 0.5
        scores = sampled_gaussian_at(share * SAMPLED_NOISE[4.0], coins, rng)
        bound = noise_bound(scores, coins, event, "zero_out", alpha=ALPHA, guesses=GRID)
        assert (bound.multiple < 1) == mechanism_test(scores, coins, curve, alpha=ALPHA, guesses=GRID).refuted
        multiples.append(bound.multiple)
    assert 1.0 < multiples[0] < 4.0
    assert 0.2 < multiples[1] < 1.0
    coins = np.arange(100) % 2 == 0  # and every guess wrong
    nothing = noise_bound(-coins.astype(float), coins, event, "zero_out", alpha=0.05, guesses=[50])
    assert nothing.multiple == math.inf
