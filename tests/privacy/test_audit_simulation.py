"""Known mechanisms: the bound is hardly ever above the truth, is not zero, and finds nothing where nothing was learned."""

from __future__ import annotations

import math

import audit_simulation as simulated
import numpy as np
import pytest
from audit_simulation import ALPHA, EPSILONS, MECHANISMS, SIGNIFICANCE, SPREAD_GRID, Mechanism, audits, false_alarm
from scipy import stats

from dpllm.auditing.bounds import epsilon_lower_bound, one_run_ceiling
from dpllm.auditing.statistics import auc, exposure, exposure_null_mean, rank_sum_p_value
from dpllm.privacy import accounting
from dpllm.recipe.sections import default_ways
from dpllm.statement.audit_bounds import group_claim


def test_the_sampled_gaussian_has_the_epsilon_that_the_simulations_say() -> None:
    for epsilon, noise in simulated.SAMPLED_NOISE.items():
        event = accounting.dp_sgd_event(simulated.SAMPLING_RATE, noise, simulated.NUM_STEPS)
        stated = accounting.epsilon(event, 1e-5, "zero_out")
        assert epsilon - 0.01 < stated <= epsilon


def rounded(mechanism: Mechanism, order: str, step: float) -> Mechanism:
    """The mechanism with scores of few values, in a table that lists members in a given order."""

    def run(coins, epsilon, delta, rng):
        coins[:] = np.sort(coins)[::-1] if order == "members first" else np.sort(coins)
        return np.round(mechanism.run(coins, epsilon, delta, rng) / step) * step

    return Mechanism(run, mechanism.delta)


@pytest.mark.parametrize("num_canaries", [100, 1000])
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_bound_exceeds_the_truth_at_most_as_often_as_alpha_says(name, epsilon, num_canaries, seed, full):
    mechanism = MECHANISMS[name]
    rng = np.random.default_rng([seed, num_canaries, int(10 * epsilon), list(MECHANISMS).index(name)])
    bounds = audits(mechanism, epsilon, num_canaries, 4000 if full else 250, rng)
    assert not false_alarm(bounds, epsilon)


@pytest.mark.parametrize("num_canaries", [200, 1000])
@pytest.mark.parametrize("order", ["members first", "members last"])
@pytest.mark.parametrize(
    ("name", "step"), [("randomized response", 1.0), ("gaussian", 0.5), ("laplace", 4.0), ("gaussian", 99.0)]
)
@pytest.mark.parametrize("ways", [default_ways(200), {"falling_in": [63]}])
def test_equal_scores_claim_nothing_falsely_in_any_order_of_rows(ways, name, step, order, num_canaries, seed, full):
    """A step of 99 makes all scores equal."""
    mechanism = rounded(MECHANISMS[name], order, step)
    rng = np.random.default_rng([seed, num_canaries, int(step), order == "members first"])
    bounds = audits(mechanism, 1.0, num_canaries, 2000 if full else 100, rng, **ways)
    assert not false_alarm(bounds, 1.0)
    assert step != 99 or not any(bound.value for bound in bounds)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_one_test_on_randomized_response_is_nearly_tight(epsilon, seed, full):
    """Here the theorem is an equality, so a bound that is much too careful would show as well."""
    count = 4000 if full else 300
    rng = np.random.default_rng([seed, 7])
    mechanism = Mechanism(simulated.randomized_response, 0.0)
    bounds = audits(mechanism, epsilon, 400, count, rng, falling=[300])
    assert not false_alarm(bounds, epsilon)
    false = sum(bound.value > epsilon for bound in bounds)
    assert stats.binomtest(false, count, 0.015, alternative="less").pvalue > SIGNIFICANCE


def test_many_guess_counts_are_paid_for_and_would_be_caught_if_not(seed, full):
    epsilon, count = 0.5, 2000 if full else 800
    rng = np.random.default_rng([seed, 8])
    # Without delta and with a mechanism whose every extreme score is equally telling, no entry is better than another.
    mechanism = Mechanism(simulated.laplace, 0.0)
    assert not false_alarm(audits(mechanism, epsilon, 1000, count, rng, falling=SPREAD_GRID), epsilon)
    alpha = ALPHA * len(SPREAD_GRID)  # each entry tested at alpha itself, as if there were no others
    assert false_alarm(audits(mechanism, epsilon, 1000, count, rng, alpha=alpha, falling=SPREAD_GRID), epsilon)


def test_delta_is_paid_for_and_would_be_caught_if_not(seed):
    mechanism, epsilon = Mechanism(MECHANISMS["name and shame"].run, 1e-2), 0.5
    rng = np.random.default_rng([seed, 9])
    # As many guesses as coins are published.
    assert not false_alarm(audits(mechanism, epsilon, 1000, 200, rng, falling=[10]), epsilon)
    assert false_alarm(audits(mechanism, epsilon, 1000, 200, rng, falling=[10], delta=0.0), epsilon)


def test_repeated_canaries_are_judged_by_the_claim_for_groups(seed, full):
    """Four answers about the same coin: within the claim for four, and above the claim for one."""
    one, repetitions, count = 0.5, 4, 1000 if full else 200
    claim = group_claim(one, 1e-6, repetitions)
    rng = np.random.default_rng([seed, 11])

    def answers(coins, epsilon, delta, rng):
        return sum(simulated.randomized_response(coins, one, delta, rng) for _ in range(repetitions))

    bounds = audits(Mechanism(answers, claim.delta), claim.epsilon, 1000, count, rng)
    assert not false_alarm(bounds, claim.epsilon)
    assert false_alarm(bounds, one)


# Power. A bound of 0 would pass every test above.


def test_the_bound_has_power(seed):
    rng = np.random.default_rng([seed, 10])
    for ways, least in ((default_ways(1000), 1.38), ({"falling": [126]}, 1.51)):
        bounds = audits(MECHANISMS["gaussian"], 4.0, 1000, 600, rng, **ways)
        assert np.mean([bound.value for bound in bounds]) >= least


def test_guesses_on_one_side_have_power_where_few_members_show(seed):
    rng = np.random.default_rng([seed, 13])

    def traces(coins, epsilon, delta, rng):
        return np.where(coins & (rng.random(len(coins)) < 0.3), 8.0, 0.0) + rng.normal(size=len(coins))

    without = audits(Mechanism(traces, 1e-5), math.inf, 1000, 50, rng, falling=default_ways(1000)["falling"])
    bounds = audits(Mechanism(traces, 1e-5), math.inf, 1000, 50, rng)
    assert np.mean([bound.value for bound in bounds]) >= 2.5
    assert np.mean([bound.value for bound in without]) <= 1.5


@pytest.mark.parametrize("num_canaries", [100, 200, 1000])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_a_perfect_attack_shows_the_ceiling_and_nothing_shows_more(num_canaries, delta, seed):
    rng = np.random.default_rng([seed, 12, num_canaries])
    coins = rng.permutation(np.arange(num_canaries) % 2 == 0)
    ways = default_ways(num_canaries)
    ceiling = one_run_ceiling(num_canaries, delta=delta, alpha=ALPHA, **ways)
    # Half of the canaries on each side, so that at most all of them are right.
    bound = epsilon_lower_bound(coins + rng.random(num_canaries) / 2, coins, delta=delta, alpha=ALPHA, **ways)
    assert bound.value == bound.ceiling == ceiling
    if delta == 0:  # all right, whatever their weights
        q = (ALPHA / len((*bound.falling, *bound.falling_in))) ** (1 / max(bound.falling))
        assert ceiling == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    for epsilon in (1.0, 8.0):
        bounds = audits(Mechanism(simulated.gaussian, 1e-5), epsilon, num_canaries, 50, rng, delta=delta, **ways)
        assert all(bound.value <= ceiling for bound in bounds)


# Nothing learned: scores that do not depend on the coins.


@pytest.mark.parametrize("num_canaries", [100, 1000])
def test_nothing_learned_shows_nothing(num_canaries, seed, full):
    """The bound is 0 in at least 95 % of audits, also where its labels are shuffled."""
    rng = np.random.default_rng([seed, 20, num_canaries])
    count = 1000 if full else 100
    nothing = Mechanism(lambda coins, epsilon, delta, rng: rng.normal(size=len(coins)), 1e-5)
    assert not false_alarm(audits(nothing, 0.0, num_canaries, count, rng), 0.0)
    shuffled = Mechanism(
        lambda coins, epsilon, delta, rng: rng.permutation(simulated.gaussian(coins, 4.0, 1e-5, rng)), 1e-5
    )
    assert not false_alarm(audits(shuffled, 0.0, num_canaries, count, rng), 0.0)


@pytest.mark.parametrize("per_side", [50, 500])
def test_intervals_of_the_auc_cover_one_half_in_93_to_97_percent(per_side, seed, full):
    rng = np.random.default_rng([seed, 21, per_side])
    count = 20_000 if full else 2000  # at a true coverage of 95 %, 93 and 97 % are 13 or 4 standard errors away
    intervals = [auc(*scores) for scores in rng.normal(size=(count, 2, per_side))]
    assert 0.93 <= np.mean([interval.low <= 0.5 <= interval.high for interval in intervals]) <= 0.97


def test_exposure_of_what_was_not_learned_has_its_known_mean(seed):
    """1.443 bits within three standard errors, of a thousand canaries that share no references."""
    rng = np.random.default_rng([seed, 22])
    # The mean of 4,000 is within six of its own standard errors.
    bits = [exposure(scores[:1], scores[1:])[0] for scores in rng.normal(size=(4000, 4001))]
    assert exposure_null_mean(4000) == pytest.approx(1.4427, abs=3e-3)
    assert np.mean(bits) == pytest.approx(1.443, abs=3 * 1.443 / math.sqrt(1000))


def test_rank_sum_p_values_of_what_was_not_learned_are_uniform(seed, full):
    rng = np.random.default_rng([seed, 23])
    values = [rank_sum_p_value(row[:100], row[100:]) for row in rng.normal(size=(4000 if full else 1000, 1100))]
    assert stats.kstest(values, "uniform").pvalue > SIGNIFICANCE
    # The test would see p-values of a weak effect.
    shifted = [rank_sum_p_value(row[:100] + 0.2, row[100:]) for row in rng.normal(size=(1000, 1100))]
    assert stats.kstest(shifted, "uniform").pvalue < SIGNIFICANCE
