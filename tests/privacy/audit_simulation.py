"""Mechanisms whose privacy is known exactly, audited many times: what the tests of every bound share.

A mechanism takes coins and gives one score for each, higher = more likely in; each coin has its own independent output,
and the score is the best statistic of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.recipe.sections import default_ways
from dpllm.statement.audit_bounds import OneRunBound

ALPHA = 0.05
SPREAD_GRID = (10, 15, 22, 33, 50, 80, 130, 220, 400)
SIGNIFICANCE = 1e-8  # how often one simulation may alarm falsely
EPSILONS = (0.5, 1.0, 2.0, 4.0)

SAMPLING_RATE, NUM_STEPS = 0.25, 16
# Noise multipliers at which that many steps are (epsilon, 1e-5)-DP, and hardly less; a test recomputes epsilon.
SAMPLED_NOISE = {0.5: 7.365, 1.0: 4.0832, 2.0: 2.364, 4.0: 1.454, 8.0: 0.9484}

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def randomized_response(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    """Equal answers are ordered by fresh randomness, as an attacker may."""
    flipped = rng.random(len(coins)) < 1 / (1 + math.exp(epsilon))
    return (coins ^ flipped) + 1e-3 * rng.random(len(coins))


def laplace(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    return coins + rng.laplace(scale=1 / epsilon, size=len(coins))


def gaussian(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    return coins * gaussian_shift(epsilon, delta) + rng.normal(size=len(coins))


def sampled_gaussian(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    """DP-SGD with one coordinate for each canary; the score is the logarithm of the likelihood ratio of all steps."""
    noise_multiplier = SAMPLED_NOISE[epsilon]
    shape = (NUM_STEPS, len(coins))
    joined = coins & (rng.random(shape) < SAMPLING_RATE)
    seen = joined + noise_multiplier * rng.standard_normal(shape)
    ratio = np.exp((2 * seen - 1) / (2 * noise_multiplier**2))
    result: Floats = np.log1p(SAMPLING_RATE * (ratio - 1)).sum(axis=0)
    return result


def name_and_shame(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    """With probability delta a coin is published outright; otherwise randomized response."""
    published = rng.random(len(coins)) < delta
    return np.where(published, 20.0 * coins - 10.0, randomized_response(coins, epsilon, delta, rng))


def few_shamed(coins: Bools, epsilon: float, delta: float, rng: np.random.Generator) -> Floats:
    """A member is pointed out with a chance of 1 in 10, others with one that is e^epsilon lower: evidence on one side."""
    pointed = rng.random(len(coins)) < 0.1 * np.where(coins, 1.0, math.exp(-epsilon))
    return pointed * (rng.random(len(coins)) + 1.0)


@lru_cache
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
    "sampled gaussian": Mechanism(sampled_gaussian, 1e-5),
    "name and shame": Mechanism(name_and_shame, 1e-3),
    "few shamed": Mechanism(few_shamed, 1e-3),
}


def runs(
    mechanism: Mechanism, epsilon: float, num_canaries: int, count: int, rng: np.random.Generator
) -> list[tuple[Floats, Bools]]:
    """Scores and coins of independent runs."""
    results = []
    for _ in range(count):
        coins = rng.random(num_canaries) < 0.5
        results.append((mechanism.run(coins, epsilon, mechanism.delta, rng), coins))
    return results


def audits(
    mechanism: Mechanism,
    epsilon: float,
    num_canaries: int,
    count: int,
    rng: np.random.Generator,
    *,
    alpha: float = ALPHA,
    delta: float | None = None,
    **ways: Sequence[int],
) -> list[OneRunBound]:
    """Audits of independent runs of a mechanism.

    ``delta`` is what the bound is told, if not the truth; without ``ways`` the tests are those of an audit by default.
    """
    told, ways = mechanism.delta if delta is None else delta, ways or default_ways(num_canaries)
    return [
        epsilon_lower_bound(scores, coins, delta=told, alpha=alpha, **ways)
        for scores, coins in runs(mechanism, epsilon, num_canaries, count, rng)
    ]


def too_often(false: int, count: int, alpha: float = ALPHA) -> bool:
    """Whether so many false claims are more than alpha allows, beyond chance."""
    return bool(stats.binomtest(false, count, alpha, alternative="greater").pvalue < SIGNIFICANCE)


def false_alarm(bounds: Sequence[OneRunBound], epsilon: float, alpha: float = ALPHA) -> bool:
    """Whether bounds exceed the truth more often than alpha allows."""
    return too_often(sum(bound.value > epsilon for bound in bounds), len(bounds), alpha)
