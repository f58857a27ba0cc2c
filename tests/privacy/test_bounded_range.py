"""Adaptive draws of bounded range: no mechanism of that range costs more, and hardly less is possible.

Votes for a token: no unit moves them by more than C / (B tau), and tokens are drawn with their exact probabilities.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import optimize, special, stats

from dpllm.errors import ConfigError
from dpllm.privacy import accounting, events
from dpllm.privacy.bounded_range import delta_at, profile, zcdp
from dpllm.privacy.clipped_logits import LATTICE_BITS, Ballot
from dpllm.privacy.events import BoundedRange, Gaussian
from dpllm.privacy.releases import bernoulli_exp

PUBLISHED = [(7, 6.64, 7.163), (17, 2.39, 2.595)]  # batch, epsilon of 100 draws at delta 1e-5 by hand, by zCDP


def at(eta: float, draws: int, epsilon: float) -> float:
    return float(delta_at(eta, draws, np.array([epsilon]))[0])


def worst_pair(eta: float, epsilon: float) -> float:
    """The largest delta of one draw: two losses, t and t - eta, of which the first has weight p."""

    def delta(t: float) -> float:
        p = (math.exp(eta) - math.exp(t)) / math.expm1(eta)
        return p * max(0.0, 1 - math.exp(epsilon - t)) + (1 - p) * max(0.0, 1 - math.exp(epsilon - t + eta))

    return max(delta(t) for t in np.linspace(0, eta, 4001))


@pytest.mark.parametrize("eta", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("share", [-0.5, 0.0, 0.2, 0.5, 0.9])
def test_one_draw_costs_what_its_worst_pair_does(eta: float, share: float) -> None:
    found, exact = at(eta, 1, share * eta), worst_pair(eta, share * eta)
    assert exact <= found <= exact + 0.005 * eta


@pytest.mark.parametrize(("batch", "by_hand", "by_zcdp"), PUBLISHED)
def test_a_hundred_draws_cost_what_the_recursion_says(batch: int, by_hand: float, by_zcdp: float) -> None:
    event = BoundedRange(2 / batch, 100)
    both = accounting.epsilon_by_accountant(event, 1e-5, "zero_out")
    assert by_hand <= both["pld"] < 1.005 * by_hand
    assert both["rdp"] == pytest.approx(by_zcdp, abs=2e-3)
    assert accounting.epsilon(event, 1e-5, "add_or_remove_one") == both["pld"]


def test_no_fixed_pair_bounds_adaptive_draws() -> None:
    """A mutant: the dearest pair of losses, the same in each draw, composed exactly."""
    eta, draws = 2 / 7, 100
    result = accounting.epsilon(BoundedRange(eta, draws), 1e-5, "zero_out")

    def fixed(t: float) -> float:
        p = (math.exp(eta) - math.exp(t)) / math.expm1(eta)
        high = np.arange(draws + 1)  # how many draws have the loss t
        log_p = [math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1) for k in high]
        weight = np.exp(np.array(log_p) + high * math.log(p) + (draws - high) * math.log1p(-p))
        loss = draws * (t - eta) + high * eta
        return float(optimize.brentq(lambda e: (weight * np.maximum(0, -np.expm1(e - loss))).sum() - 1e-5, 0, 30))

    dearest = max(fixed(t) for t in np.linspace(0.02, 0.98, 97) * eta)
    assert dearest == pytest.approx(6.588, abs=1e-3)  # docs/howto/synthesize.md
    assert dearest < 0.995 * result


@pytest.mark.parametrize("case", range(6))
def test_adaptive_exponential_mechanisms_stay_below_the_bound(case: int, seed: int) -> None:
    """Three draws of four tokens, each behind the ones before it: every one of 64 texts, with a unit and without."""
    rng, eta = np.random.default_rng((seed, case)), (0.2, 1.0, 2.5)[case % 3]
    one, other = np.ones(1), np.ones(1)  # the probabilities of all texts so far
    for _ in range(3):
        utility = rng.normal(0, 1, (len(one), 4))
        # The extremes of what a unit may do, or anything within them.
        moved = rng.choice([-1, 1], utility.shape) if case % 2 else rng.uniform(-1, 1, utility.shape)
        one = (one[:, None] * special.softmax(utility, axis=1)).ravel()
        other = (other[:, None] * special.softmax(utility + moved * eta / 2, axis=1)).ravel()
    for epsilon in np.linspace(-2 * eta, 3 * eta, 41):
        bound = at(eta, 3, epsilon)
        for first, second in ((one, other), (other, one)):
            assert np.maximum(0, first - math.exp(epsilon) * second).sum() <= bound + 1e-12


def test_the_curve_falls_and_more_draws_cost_more() -> None:
    h, delta = profile(0.3, 20)
    assert (np.diff(delta) <= 1e-15).all()
    assert (delta <= profile(0.3, 21)[1][: len(delta)] + 1e-15).all()
    grid = np.linspace(0, h * (len(delta) - 1), 777)
    assert (delta_at(0.3, 20, grid) <= delta_at(0.31, 20, grid) + 1e-6).all()
    assert at(0.3, 20, 100.0) == delta[-1] < 1e-12
    assert at(0.3, 20, -100.0) == pytest.approx(1.0)
    assert zcdp(0.4, 10) == pytest.approx(0.2)


def test_draws_add_up_whether_named_together_or_apart() -> None:
    def cost(event: events.Event) -> float:
        return accounting.epsilon(event, 1e-6, "zero_out")

    whole = BoundedRange(0.2, 30)
    assert cost(events.SelfComposed(3, BoundedRange(0.2, 10))) == cost(whole)
    assert cost(events.compose([BoundedRange(0.2, 10), BoundedRange(0.2, 20)])) == cost(whole)
    assert cost(events.compose([BoundedRange(0.2, 15), BoundedRange(0.2000001, 15)])) >= cost(whole) - 1e-4
    together = cost(events.compose([Gaussian(2.0), whole]))
    assert max(cost(Gaussian(2.0)), cost(whole)) < together < cost(Gaussian(2.0)) + cost(whole)
    assert cost(BoundedRange(0.2, 0)) == 0.0


def test_the_event_is_read_as_it_was_stored_and_nothing_else_is() -> None:
    event = BoundedRange(0.25, 96)
    assert events.read(event.to_json()) == event
    assert event.to_json() == {"type": "bounded_range", "range": 0.25, "count": 96}
    assert events.count_releases(event) == 96
    for wrong in ({"range": 0.0}, {"range": math.inf}, {"range": True}, {"count": -1}, {"count": 1.5}, {"more": 1}):
        with pytest.raises(ConfigError):
            events.read({**event.to_json(), **wrong})


def test_many_draws_are_composed_in_chunks() -> None:
    """Any number, so that no ledger grows beyond what can be added up; a chunk costs no less than its part of the whole."""
    one, many = (accounting.epsilon(BoundedRange(0.01, draws), 1e-5, "zero_out") for draws in (499, 1200))
    assert one < many < 3 * one
    assert many <= accounting.epsilon(BoundedRange(0.01, 1200), 1e-5, "zero_out", "rdp")
    assert math.isfinite(accounting.epsilon(BoundedRange(0.001, 30_000), 1e-5, "zero_out"))
    with pytest.raises(ConfigError, match="take too long"):
        accounting.epsilon(BoundedRange(0.1, 10**7), 1e-5, "zero_out")


# --- votes for a token: what draws of bounded range are made of ---------------------------------------------------------

SIGNIFICANCE = 1e-6


def logits(rng: np.random.Generator, units: int, size: int, spread: float = 3.0) -> list[np.ndarray]:
    return [rng.normal(0, spread, (rng.integers(1, 4), size)) for _ in range(units)]


def exponents(ballot: Ballot, votes: list[np.ndarray], size: int) -> list[Fraction]:
    per_vote = Fraction(ballot.clip) / (2**LATTICE_BITS * ballot.batch_size * Fraction(ballot.temperature))
    return [per_vote * int(sum(int(vote[token]) for vote in votes)) for token in range(size)]


def probabilities(ballot: Ballot, votes: list[np.ndarray], public: np.ndarray) -> np.ndarray:
    z = public / ballot.temperature + np.array(exponents(ballot, votes, len(public)), dtype=float)
    weights = np.exp(z - z.max())
    return weights / weights.sum()


@pytest.mark.parametrize("case", range(8))
def test_a_unit_that_is_taken_out_moves_no_exponent_by_more_than_half_the_range(case: int, seed: int) -> None:
    """And so the logarithms of the ratios of all probabilities lie within an interval of that length."""
    rng = np.random.default_rng((seed, case))
    ballot = Ballot(int(rng.integers(1, 9)), float(rng.uniform(0.1, 4)), float(rng.uniform(0.3, 2)))
    public = rng.normal(0, 2, 30)
    units = [ballot.vote(rows, public) for rows in logits(rng, ballot.batch_size + int(rng.integers(0, 3)), 30)]
    whole = exponents(ballot, units, 30)
    for left_out in range(len(units)):
        rest = units[:left_out] + units[left_out + 1 :]
        less = exponents(ballot, rest, 30)
        assert max(abs(one - two) for one, two in zip(whole, less, strict=True)) <= Fraction(ballot.range) / 2
        ratio = np.log(probabilities(ballot, units, public) / probabilities(ballot, rest, public))
        assert np.ptp(ratio) <= ballot.range + 1e-9
        assert ratio.min() <= 1e-9 >= -ratio.max()


def test_the_range_is_reached_and_rounded_up() -> None:
    ballot, public = Ballot(3, 0.7, 0.9), np.zeros(2)
    vote = ballot.vote(np.array([[50.0, -50.0]]), public)
    assert vote.tolist() == [2**LATTICE_BITS, -(2**LATTICE_BITS)]
    ratio = np.log(probabilities(ballot, [vote], public) / probabilities(ballot, [], public))
    assert np.ptp(ratio) == pytest.approx(ballot.range)
    assert Fraction(ballot.range) >= 2 * Fraction(0.7) / (3 * Fraction(0.9)) > Fraction(math.nextafter(ballot.range, 0))


def test_the_records_of_a_unit_are_one_vote() -> None:
    """A mutant gives each record a vote of its own."""
    rng, ballot = np.random.default_rng(0), Ballot(2, 1.0, 1.0)
    public, rows = rng.normal(size=10), rng.normal(0, 5, (4, 10))
    vote = ballot.vote(rows, public)
    assert np.abs(vote).max() <= 2**LATTICE_BITS
    assert vote.tolist() == ballot.vote(rows.mean(axis=0)[None], public).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_unit_whose_logits_are_not_finite_or_that_is_absent_votes_for_nothing(bad: float) -> None:
    ballot, public = Ballot(2, 1.0, 1.0), np.array([0.0, 1.0, -math.inf])
    rows = np.array([[1.0, bad, 0.0]])
    assert not ballot.vote(rows, public).any()
    assert not ballot.vote(np.zeros((0, 3)), public).any()
    assert ballot.vote(np.array([[1.0, 1.0, 5.0]]), public)[2] == 0  # what is no candidate has no difference
    assert all(ballot.draw([], public, random.Random(n).randrange) != 2 for n in range(30))


@pytest.mark.parametrize(("clip", "temperature", "top_k"), [(1.0, 1.0, 0), (3.0, 0.7, 0), (2.0, 1.3, 4)])
def test_tokens_are_drawn_with_their_exact_probabilities(clip, temperature, top_k, seed, full):
    rng, below = np.random.default_rng(seed), random.Random(seed).randrange
    ballot, public = Ballot(3, clip, temperature, top_k), rng.normal(0, 1.5, 7)
    votes = [ballot.vote(rows, public) for rows in logits(rng, 3, 7)]
    expected = probabilities(ballot, votes, public)
    if top_k:  # of the public logits alone
        expected[np.argsort(-public)[top_k:]] = 0
        expected /= expected.sum()
    number = 1_000_000 if full else 20_000
    seen = np.bincount([ballot.draw(votes, public, below) for _ in range(number)], minlength=7)
    possible = expected > 0
    assert not seen[~possible].any()
    assert stats.chisquare(seen[possible], number * expected[possible]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(7, 3)])
def test_the_coin_is_exact(gamma: Fraction, seed: int) -> None:
    below, number = random.Random(seed).randrange, 20_000
    seen = sum(bernoulli_exp(gamma, below) for _ in range(number))
    assert stats.binomtest(seen, number, math.exp(-gamma)).pvalue > SIGNIFICANCE


def test_numbers_without_a_guarantee_are_refused() -> None:
    for batch_size in (0, True):
        with pytest.raises(ConfigError):
            Ballot(batch_size, 1.0, 1.0)
    for clip, temperature in ((0.0, 1.0), (math.inf, 1.0), (6.1, 1.0), (1.0, 0.0), (1.0, math.nan)):
        with pytest.raises(ConfigError):
            Ballot(2, clip, temperature)
    with pytest.raises(ConfigError, match="no token can be drawn"):
        Ballot(1, 1.0, 1.0).draw([], np.full(3, math.nan), random.Random(0).randrange)
