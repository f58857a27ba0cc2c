"""The p-value of the one-run bound is the printed formula, and the bound is where it crosses alpha; so of many runs' rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from audit_simulation import ALPHA, EPSILONS, MECHANISMS, Mechanism, laplace, runs, too_often
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.auditing import bounds
from dpllm.auditing.bounds import Rates, epsilon_from_rates, epsilon_lower_bound, epsilon_of, many_runs, one_run_ceiling
from dpllm.privacy.limits import gaussian_epsilon
from dpllm.statement.audit_bounds import group_claim

GRID = (10, 20, 50, 100, 200)


def one_run_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Of guesses of weight 1."""
    return min(1.0, bounds.p_value(m, (r,), v, epsilon, delta))


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
    assert epsilon_of(1000, (r,), v, delta=1e-5, alpha=0.05) == pytest.approx(expected, abs=5.1e-5)


def logit(q: float) -> float:
    return math.log(q / (1 - q))


@st.composite
def guessing(draw: st.DrawFn) -> tuple[int, int, int]:
    m = draw(st.integers(1, 120))
    r = draw(st.integers(1, m))
    return m, r, draw(st.integers(0, r))


@settings(max_examples=150, deadline=None)
@given(guessing(), st.floats(0, 8), st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)))
def test_p_value_equals_the_formula_as_printed(mrv, epsilon, delta):
    m, r, v = mrv
    expected = min(1.0, naive_p_value(m, [1] * r, v, epsilon, delta))
    assert one_run_p_value(*mrv, epsilon, delta) == pytest.approx(expected, rel=1e-9, abs=1e-15)


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


# The bound from scores.


def test_the_grid_costs_alpha_over_its_length():
    rng = np.random.default_rng(1)
    coins = rng.random(300) < 0.5
    scores = coins + rng.normal(size=300)
    alone = [epsilon_lower_bound(scores, coins, delta=1e-5, alpha=0.01, falling=[r]).value for r in GRID]
    together = epsilon_lower_bound(scores, coins, delta=1e-5, alpha=0.05, falling=GRID)
    assert together.value == pytest.approx(max(alone), abs=1e-8)
    assert together.best_guesses == GRID[int(np.argmax(alone))]


def test_guess_counts_above_the_number_of_canaries_are_dropped_before_alpha_is_divided():
    coins = np.arange(60) % 2 == 0
    bound = epsilon_lower_bound(coins.astype(float), coins, delta=1e-5, alpha=0.05, falling=[100, 20, 20, 50])
    assert bound.falling == (20, 50)
    assert bound.value == max(perfect(60, "falling", r, delta=1e-5, alpha=0.025) for r in (20, 50))


def test_nothing_playable_shows_nothing():
    bound = epsilon_lower_bound([1.0, 0.0], [True, False], delta=1e-5, alpha=0.05, falling=[10])
    assert (bound.value, bound.ceiling, bound.falling, bound.best_guesses, bound.correct) == (0.0, 0.0, (), None, None)
    assert epsilon_lower_bound([], [], delta=1e-5, alpha=0.05, falling=[10]).ceiling == 0.0


@pytest.mark.parametrize("sign", [-1, 0], ids=["wrong direction", "equal scores"])
@pytest.mark.parametrize("members_first", [True, False])
def test_what_tells_nothing_shows_nothing_whatever_the_order_of_the_rows(members_first, sign):
    coins = (np.arange(1000) < 500) == members_first
    assert epsilon_lower_bound(sign * coins.astype(float), coins, delta=1e-5, alpha=0.05, falling=GRID).value == 0.0


def test_a_bound_of_scores_without_rank_is_refused():
    with pytest.raises(ValueError, match="not a finite number"):
        epsilon_lower_bound([1.0, math.nan], [True, False], delta=1e-5, alpha=0.05, falling=[2])
    with pytest.raises(ValueError, match="equally long"):
        epsilon_lower_bound([1.0], [True, False], delta=1e-5, alpha=0.05, falling=[2])


# Falling weights.


def weights(r: int, parts: int | None = None) -> list[int]:
    """Of the most extreme score, the next, ...: how many of 8 windows, each an 8th of r longer than the last, hold it."""
    parts = parts or min(8, r)
    return [sum(place < math.ceil(r * part / parts) for part in range(1, parts + 1)) for place in range(r)]


def perfect(m: int, side: str, r: int, *, delta: float, alpha: float) -> float:
    """The bound where all guesses of one test are right."""
    played = weights(r) if side == "falling_in" else weights(r // 2) + weights(r - r // 2)
    return epsilon_of(m, counts(played), sum(played), delta=delta, alpha=alpha)


def counts(played: list[int]) -> tuple[int, ...]:
    """How many guesses have weight 1, 2, ..."""
    return tuple(played.count(weight) for weight in range(1, max(played) + 1))


def naive_p_value(m: int, played: list[int], seen: int, epsilon: float, delta: float) -> float:
    """The formula as it is printed: the law guess by guess, and every number of guesses that delta might have paid for."""
    q, law = math.exp(epsilon) / (1 + math.exp(epsilon)), {0: 1.0}
    for weight in played:
        law = {w: (1 - q) * law.get(w, 0.0) + q * law.get(w - weight, 0.0) for w in range(max(law) + weight + 1)}

    def tail(least: int) -> float:
        return sum(p for w, p in law.items() if w >= least)

    worst = max((tail(seen - i * max(played)) - tail(seen)) / i for i in range(1, m + 1))
    return tail(seen) + 2 * m * delta * worst


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(["of weight 1", "falling", "falling_in"]), st.integers(1, 40), st.data())
def test_the_bound_is_where_the_formula_as_printed_crosses_alpha(side, r, data):
    parts = min(8, r - r // 2)  # also where the shorter side has fewer places than there are windows
    both_sides = sorted(weights(r // 2, parts) + weights(r - r // 2, parts))
    played = {"of weight 1": [1] * r, "falling": both_sides, "falling_in": weights(r)}[side]
    seen, delta, alpha = data.draw(st.integers(0, sum(played))), data.draw(st.sampled_from([0.0, 1e-5, 1e-3])), 0.05
    value = epsilon_of(2 * r, counts(played), seen, delta=delta, alpha=alpha)
    assert naive_p_value(2 * r, played, seen, value + 1e-6, delta) > alpha
    if value > 0:
        assert naive_p_value(2 * r, played, seen, value, delta) <= alpha * (1 + 1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=80), st.data())
def test_no_order_of_equal_scores_has_fewer_right_guesses(rows, data):
    """Nor less weight; and none of them is needed where scores differ: then the count is that of a loop."""
    scores, coins = (np.array(column) for column in zip(*rows, strict=True))
    r, order = data.draw(st.integers(1, len(rows) // 2)), data.draw(st.permutations(range(len(rows))))
    ways = {"delta": 0.0, "alpha": 0.1, "falling": [r], "falling_in": [r]}
    counted, ordered = (bounds.outcomes(s, coins, **ways)[0] for s in (scores, scores + 1e-3 * np.array(order)))
    for one, other in zip(counted, ordered, strict=True):
        assert one[:2] == other[:2]
        assert one.correct <= other.correct
        assert one.weight <= other.weight
    ranked = coins[np.argsort(scores + 1e-3 * np.array(order))]
    results = {outcome.side: outcome.weight for outcome in ordered}
    assert results["falling_in"] == np.dot(weights(r), ranked[::-1][:r])
    if r >= 16:
        right = np.dot(weights(r // 2), ranked[::-1][: r // 2]) + np.dot(weights(r - r // 2), ~ranked[: r - r // 2])
        assert results["falling"] == right


def test_falling_weights_say_what_won():
    rng = np.random.default_rng(3)
    coins = rng.random(1000) < 0.5
    scores = coins * 0.925 + rng.normal(size=1000)
    bound = epsilon_lower_bound(scores, coins, delta=1e-5, alpha=0.05, falling=[126, 2000], falling_in=[600])
    assert (bound.falling, bound.falling_in, bound.best_side, bound.best_guesses) == ((126,), (), "falling", 126)
    played = counts(weights(63) + weights(63))
    assert bound.value == epsilon_of(1000, played, bound.weight, delta=1e-5, alpha=0.05)
    assert bound.to_json()["falling"] == [126]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40), st.data())
def test_guesses_are_counted_from_both_ends(rows, data):
    """Against a loop; ties between scores make a second ranking as good, so scores are made distinct by the row."""
    scores = [score + 1e-3 * row for row, (score, _) in enumerate(rows)]
    coins = [coin for _, coin in rows]
    both, only_in = data.draw(st.integers(1, len(rows))), data.draw(st.integers(1, max(1, len(rows) // 2)))
    ranked = [coin for _, coin in sorted(zip(scores, coins, strict=True))]
    top = both // 2
    right = sum(not coin for coin in ranked[: both - top]) + sum(ranked[len(rows) - top :])
    expected = [("falling", both, right)]
    if len(rows) > 1:
        expected.insert(0, ("falling_in", only_in, sum(ranked[len(rows) - only_in :])))
    played, level = bounds.outcomes(scores, coins, delta=0.0, alpha=0.1, falling=[both], falling_in=[only_in])
    assert [item[:3] for item in played] == expected
    assert level == 0.1 / len(expected)


def test_guesses_on_one_side_are_paid_for_and_find_what_few_members_show():
    rng = np.random.default_rng(2)
    coins = rng.random(1000) < 0.5
    scores = np.where(coins & (rng.random(1000) < 0.3), 9.0, 0.0) + rng.normal(size=1000)
    terms = {"delta": 1e-5, "alpha": 0.05, "falling": [40, 400]}
    bound = epsilon_lower_bound(scores, coins, falling_in=[120, 600, 120], **terms)
    assert (bound.falling, bound.falling_in) == ((40, 400), (120,))
    assert (bound.best_side, bound.best_guesses, bound.correct) == ("falling_in", 120, 120)
    assert bound.value == perfect(1000, "falling_in", 120, delta=1e-5, alpha=0.05 / 3)
    assert bound.value > 2 * epsilon_lower_bound(scores, coins, **terms).value
    assert bound.ceiling == one_run_ceiling(1000, falling_in=[120], **terms)
    assert bound.ceiling == perfect(1000, "falling", 400, delta=1e-5, alpha=0.05 / 3)


def test_the_ceiling_needs_no_scores():
    for r in (10, 100, 1000):
        ceiling = one_run_ceiling(1000, delta=1e-5, alpha=0.05, falling=[r])
        assert ceiling == perfect(1000, "falling", r, delta=1e-5, alpha=0.05)
    assert one_run_ceiling(1000, delta=0.0, alpha=0.05, falling=[100]) == pytest.approx(
        logit(0.05 ** (1 / 100)), abs=1e-6
    )
    assert one_run_ceiling(5, delta=1e-5, alpha=0.05, falling=[10]) == 0.0
    # Where m delta is far above alpha, no attack could show anything.
    assert one_run_ceiling(1000, delta=1e-2, alpha=0.05, falling=GRID) == 0.0
    assert one_run_ceiling(1000, delta=1.0, alpha=0.05, falling=GRID) == 0.0


@pytest.mark.parametrize("alpha", [0.0, 0.5, -1.0, math.nan])
def test_impossible_levels_are_refused(alpha):
    with pytest.raises(ValueError, match="alpha must lie"):
        one_run_ceiling(100, delta=0.0, alpha=alpha, falling=[10])
    with pytest.raises(ValueError, match="delta in"):
        one_run_ceiling(100, delta=1.1, alpha=0.05, falling=[10])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(0, 5), st.floats(0, 1e-6), st.integers(1, 32))
def test_the_claim_for_a_group_is_the_sum_as_printed(epsilon, delta, k):
    claim = group_claim(epsilon, delta, k)
    assert claim.epsilon == pytest.approx(k * epsilon)
    assert claim.delta == pytest.approx(min(1.0, sum(delta * math.exp(j * epsilon) for j in range(k))), rel=1e-9)


def test_the_claim_for_a_group_never_overflows_and_never_promises_more_than_nothing():
    for epsilon, k in ((100.0, 32), (1e6, 10**6), (math.inf, 2), (0.0, 10**9)):
        claim = group_claim(epsilon, 1e-5, k)
        assert claim.delta == 1.0
        assert claim.epsilon == epsilon * k
    assert group_claim(1e-12, 1e-9, 1000).delta == pytest.approx(1e-6)
    assert group_claim(math.inf, 0.0, 3).delta == 0.0
    assert group_claim(3.0, 1e-5, 1).delta == 1e-5
    for bad in ((-1.0, 0.0, 1), (1.0, 2.0, 1), (1.0, 0.0, 0), (math.nan, 0.0, 1)):
        with pytest.raises(ValueError, match="a group claim needs"):
            group_claim(*bad)


def test_a_group_claim_holds_for_the_gaussian():
    """k rows shift a Gaussian k times as far; its exact delta there is below the one of the claim."""
    for mu in (0.2, 0.5, 1.0):
        for k in (2, 4, 16):
            claim = group_claim(gaussian_epsilon(mu, 1e-5), 1e-5, k)
            if claim.delta < 1:
                assert gaussian_epsilon(k * mu, claim.delta) <= claim.epsilon


COUNTS = Rates(400, 100, 50, 450)


# Error rates of many runs, and the curves of mechanisms.


def test_rates_match_an_independent_implementation():
    bound = epsilon_from_rates(COUNTS, delta=1e-5, alpha=0.05)
    assert (bound.fnr_upper, bound.fpr_upper) == pytest.approx((0.237792, 0.129709), abs=1e-6)
    assert bound.value == pytest.approx(1.770912, abs=1e-6)
    assert "run of its own" in bound.assumes
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

    def highest(errors: int, others: int) -> float:
        trials = errors + others
        return stats.binomtest(errors, trials).proportion_ci(1 - alpha, method="exact").high if trials else 1.0

    fnr = highest(rates.false_negatives, rates.true_positives)
    fpr = highest(rates.false_positives, rates.true_negatives)
    bound = epsilon_from_rates(rates, delta=delta, alpha=alpha)
    assert (bound.fnr_upper, bound.fpr_upper) == pytest.approx((fnr, fpr), abs=1e-9)

    def allowed(epsilon: float) -> bool:
        return fnr >= 1 - delta - math.exp(epsilon) * fpr and fpr >= 1 - delta - math.exp(epsilon) * fnr

    assert allowed(bound.value + 1e-9)
    assert bound.value == 0 or not allowed(bound.value - 1e-6)


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


def test_the_epsilon_of_a_gaussian_matches_an_independent_implementation():
    for mu, expected in ((0.5, 1.99309), (1.0, 4.37718), (2.0, 9.99726)):
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(expected, abs=5.1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(1e-9, 1e-5) == 0.0
