"""Statistics of what was released: nan is a failure, and a group of nobody is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dpllm.auditing import mechanism_report as report
from dpllm.auditing.bounds import OneRunBound

NAN = float("nan")
NOISE_TP = np.random.default_rng(0).normal(size=(5, 40))


def spoiled() -> np.ndarray:
    noise_TP = NOISE_TP.copy()
    noise_TP[2, 7] = NAN
    return noise_TP


def made(
    *tests: report.ReleaseTest, pairs: tuple[report.Pair, ...] = (), epsilon: float = 3.0
) -> report.MechanismReport:
    given = {"value": 0.5, "alpha": 5e-4, "delta": 1e-5, "guesses": (10,), "guesses_in": ()}
    given |= {"best_guesses": 10, "best_side": "both", "correct": 6}
    bound = OneRunBound(**given, num_canaries=40, ceiling=4.0)
    return report.MechanismReport(
        "consistent", "", 5, 5, 40, {"sampling_rate": 0.1}, epsilon, bound, tests, 1e-4, 0.1, 1.0, pairs
    )


@pytest.mark.parametrize(
    "test",
    [
        lambda: report.scale_test("scale", spoiled()),
        lambda: report.steps_test(spoiled()),
        lambda: report.rate_test("rate", 3, 10, NAN),
        lambda: report.spread_test("spread", np.array([3, NAN]), np.array([10, 10]), 0.3),
    ],
)
def test_a_statistic_of_nan_has_no_p_value_and_never_passes(test: Callable[[], report.ReleaseTest]) -> None:
    found = test()
    assert math.isnan(found.p_value)
    assert report.verdict(made(found))[0] == "falsified"


@pytest.mark.parametrize("where", range(3))
def test_a_difference_of_nan_never_passes(where: int) -> None:
    differences = [0.5, 0.5, 0.25]
    assert report.verdict(made(pairs=(report.Pair(3, 3, 1, *differences),)))[0] == "consistent"
    differences[where] = NAN
    assert report.verdict(made(pairs=(report.Pair(3, 3, 1, *differences),)))[0] == "falsified"


def test_an_epsilon_of_nan_bounds_nothing() -> None:
    assert report.verdict(made(epsilon=NAN))[0] == "falsified"
    assert report.verdict(made(epsilon=math.inf))[0] == "consistent"


def test_a_group_of_nobody_is_no_statistic() -> None:
    generator = np.random.default_rng(3)
    trials = np.array([40, 0, 25, 0, 30])
    found = report.spread_test("spread", generator.binomial(trials, 0.3), trials, 0.3)
    assert math.isfinite(found.found)
    assert 1e-4 < found.p_value <= 1
    counts, some = generator.binomial(trials[trials > 0], 0.3), trials[trials > 0]
    whole = np.zeros_like(trials)
    whole[trials > 0] = counts
    assert report.spread_test("spread", whole, trials, 0.3) == report.spread_test("spread", counts, some, 0.3)
