"""Votes for a token: no unit moves them by more than C / (B tau), and tokens are drawn with their exact probabilities."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpllm.errors import ConfigError
from dpllm.privacy.clipped_logits import LATTICE_BITS, Ballot
from dpllm.privacy.releases import bernoulli_exp

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
def test_tokens_are_drawn_with_their_exact_probabilities(
    clip: float, temperature: float, top_k: int, seed: int, full: bool
) -> None:
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
