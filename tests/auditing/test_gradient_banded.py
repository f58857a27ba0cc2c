"""Gradient canaries under banded noise: whitened, read in their own turns, across attempts and steps that were not seen."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpllm.auditing.gradient import BandedTurns, GradientTable, examine, tabulate

C = (0.7, 0.5, 0.4, 0.3)
COEFFICIENTS = tuple(np.array(C) / np.linalg.norm(C))
BANDS, RATE, STEPS, NOISE, DELTA, ALPHA = 4, 0.05, 60, 0.7, 1e-5, 0.05
STARTS = (0, 25)


def run(seed, canaries=1000, *, noise=NOISE, missing=(), often=1.0):
    """What a run would release that was resumed once: noise that takes back earlier noise, canaries in their turns alone."""
    generator = np.random.default_rng(seed)
    coins_M, group_M = generator.random(canaries) < 0.5, generator.integers(0, BANDS, canaries)
    x_TM = np.zeros((STEPS, canaries))
    for step in range(STEPS):
        x_TM[step] = generator.normal(0.0, noise, canaries)
        start = max(first for first in STARTS if first <= step)
        for back, weight in enumerate(COEFFICIENTS[1:], 1):
            if step - back >= start:
                x_TM[step] -= weight * x_TM[step - back]
        x_TM[step] /= COEFFICIENTS[0]
    turn_TM = np.arange(STEPS)[:, None] % BANDS == group_M
    drawn_TM = (generator.random(x_TM.shape) < often * BANDS * RATE) & turn_TM & coins_M
    proj_TM = x_TM + drawn_TM
    proj_TM[list(missing)] = np.nan
    return tabulate(proj_TM, coins_M, RATE, NOISE, BandedTurns(COEFFICIENTS, group_M, STARTS))


def examined(table: GradientTable) -> Any:
    return examine(table, delta=DELTA, alpha=ALPHA)


@pytest.mark.parametrize("missing", [(), (24,), (22, 23, 24, 59)], ids=["all seen", "a lost step", "lost steps"])
def test_a_run_as_planned_is_measured_within_its_intervals(missing: tuple[int, ...]) -> None:
    noise_covered, drawn = 0, []
    for seed in range(100):
        table = run(seed, 400, missing=missing)
        audit = examined(table)
        noise_covered += audit.noise_interval[0] <= NOISE <= audit.noise_interval[1]
        drawn.append((audit.drawn - audit.drawn_planned) / audit.drawn_standard_error)
        assert table.steps == STEPS - len(missing)
        assert not audit.noise_refuted
        assert not audit.drawn_refuted
    assert noise_covered >= 89  # 95 expected; P < 1e-2
    assert abs(np.mean(drawn)) < 0.4
    assert stats.kstest(np.array(drawn) - np.mean(drawn), "norm").pvalue > 1e-3


def test_the_score_is_the_likelihood_ratio_of_each_turn() -> None:
    """By dense matrices: of one canary, given its turns, every step that it could have joined."""
    generator, group = np.random.default_rng(1), 1
    strategy_TT = sum(np.diag(np.full(9 - back, weight), -back) for back, weight in enumerate(COEFFICIENTS))
    x_T = np.linalg.solve(strategy_TT, generator.normal(0.0, NOISE, 9)) + np.eye(9)[5]
    table = tabulate(x_T[:, None], [True], RATE, NOISE, BandedTurns(COEFFICIENTS, np.array([group]), (0,)))
    precision_TT = strategy_TT.T @ strategy_TT / NOISE**2
    expected = 0.0
    for first in (1, 5):
        alone_T = np.eye(9)[first]
        log_ratio = alone_T @ precision_TT @ x_T - alone_T @ precision_TT @ alone_T / 2
        expected += np.logaddexp(np.log1p(-BANDS * RATE), np.log(BANDS * RATE) + log_ratio)
    assert table.score_M[0] == pytest.approx(expected, rel=1e-9)


def test_noise_too_small_and_draws_too_many_are_refuted_and_unseen_steps_hide_their_attempt_only() -> None:
    assert sum(examined(run(seed, noise=0.8 * NOISE)).noise_refuted for seed in range(10)) >= 9
    assert sum(examined(run(seed, often=2.0)).drawn_refuted for seed in range(10)) >= 9
    assert run(3, 10, missing=(10,)).steps == 10 + STEPS - 25
    assert run(3, 10, missing=(30,)).steps == 30
    assert run(3, 10, missing=(0, 25)).steps == 0
