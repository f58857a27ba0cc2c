"""A label is flipped with exactly the probability that its epsilon allows, and the debiased loss takes that back on average."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpllm.errors import ConfigError
from dpllm.privacy import accounting, releases
from dpllm.privacy.events import Gaussian, PureDP
from dpllm.privacy.releases import flip_probability, flipped

ALARM = 1e-9  # false alarm probability of each statistical check
DRAWS = 40_000
EPSILONS = (0.5, 1.0, 2.0, 3.0)


def below(seed: int) -> Any:
    return random.Random(seed).randrange


def flips(epsilon: float, seed: int = 0) -> int:
    generator = below(seed)
    return sum(flipped(epsilon, generator) for _ in range(DRAWS))


def as_often_as_epsilon_says(epsilon: float) -> None:
    """The number of flips is binomial with q = 1 / (1 + e^epsilon), to the confidence of so many draws."""
    result = stats.binomtest(flips(epsilon), DRAWS, 1 / (1 + math.exp(epsilon)))
    assert result.pvalue > ALARM


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_labels_flip_as_often_as_their_epsilon_says(epsilon: float) -> None:
    as_often_as_epsilon_says(epsilon)
    assert flip_probability(epsilon) == pytest.approx(1 / (1 + math.exp(epsilon)), rel=1e-15)


def test_two_labels_flip_independently() -> None:
    generator = below(5)
    coins = np.array([[flipped(1.0, generator) for _ in range(2)] for _ in range(10_000)])
    both = stats.binomtest(int(coins.all(axis=1).sum()), 10_000, flip_probability(1.0) ** 2)
    assert both.pvalue > ALARM


def test_the_coin_computes_with_the_very_number_that_is_charged() -> None:
    """A fair coin, then an exact one with probability e^-epsilon: no float is compared with a random number."""
    assert not flipped(1.0, lambda _: 0)  # the fair coin keeps
    said, asked, rest = iter([1]), list[int](), below(3)

    def tell(most: int) -> int:
        asked.append(most)
        return next(said, None) or rest(most)

    flipped(0.7, tell)
    assert asked[:2] == [2, Fraction(0.7).denominator]


MUTANTS = {
    "epsilon of another": lambda patch: patch.setattr(releases, "Fraction", lambda epsilon: Fraction(epsilon) / 2),
    "a fair coin": lambda patch: patch.setattr(releases, "bernoulli_exp", lambda gamma, below: below(2) == 1),
    "never": lambda patch: patch.setattr(releases, "bernoulli_exp", lambda gamma, below: False),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_coin_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        as_often_as_epsilon_says(2.0)


def test_labels_are_accounted_by_known_epsilons_alone() -> None:
    """k labels of one annotator add up; a clipped sum, which a changed label moves by 2 C, has no figure under this relation."""
    assert accounting.epsilon(PureDP(3.0), 1e-9, "label_changed") == pytest.approx(3.0, abs=1e-3)
    together = accounting.compose([PureDP(1.0), PureDP(1.0)])
    assert accounting.epsilon(together, 1e-9, "label_changed") == pytest.approx(2.0, abs=1e-3)
    with pytest.raises(ConfigError, match="2 C"):
        accounting.epsilon(Gaussian(1.0), 1e-5, "label_changed")
