"""Calibrated noise meets its target, and hardly less noise does."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest

from dpllm.errors import ConfigError
from dpllm.privacy import accounting
from dpllm.privacy.accounting import calibrate_noise_multiplier, dp_sgd_event, epsilon
from dpllm.privacy.privacy_loss import privacy_loss
from dpllm.privacy.renyi import MAX_NOISE_MULTIPLIER

slow = pytest.mark.full
CALIBRATIONS = [  # target, delta, q, steps, rows of a unit, and the noise that others publish
    (8.0, 1e-5, 0.02, 150, 1, 0.560556),
    pytest.param(3.0, 1 / 84122, 1024 / 42061, 410, 1, 1.01264, marks=slow),
    (1.0, 1e-6, 0.1, 512, 1, 9.66),
    (1.0, 1e-5, 0.2, 1000, 1, None),
    (0.1, 1e-6, 0.01, 1000, 1, 11.5709),
    (3.0, 1e-5, 1.0, 30, 1, None),
    (5.0, 1e-5, 0.01, 100, 4, None),
    (1.0, 1e-6, 0.3, 5, 2, None),
    pytest.param(8.0, 1e-5, 0.02, 300, 16, None, marks=slow),
    pytest.param(2.0, 1e-5, 1e-3, 2000, 64, None, marks=slow),
]


@pytest.fixture(autouse=True)
def _calibrated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the tests of a session share what was found."""
    for name in ("_calibrate", "_pld"):
        monkeypatch.setattr(accounting, name, getattr(accounting, name).__wrapped__)


@pytest.mark.parametrize(("target", "delta", "q", "num_steps", "rows", "published"), CALIBRATIONS)
def test_calibrated_noise_meets_the_target_and_no_smaller_noise_does(
    target: float, delta: float, q: float, num_steps: int, rows: int, published: float | None
) -> None:
    sigma = calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out", group_size=rows)
    assert round(sigma * 1e4) / 1e4 == sigma
    assert published is None or sigma == pytest.approx(published, abs=3e-3)
    assert epsilon(dp_sgd_event(q, sigma, num_steps, rows), delta, "zero_out") <= target
    assert epsilon(dp_sgd_event(q, sigma - 1e-3, num_steps, rows), delta, "zero_out") > target


@pytest.mark.parametrize(
    ("target", "delta", "q", "num_steps", "says"),
    [
        (1e-9, 1e-9, 0.5, 1000, "not reachable.*Raise epsilon"),
        (1.0, 0.01, 0.001, 1, "not reachable.*lower epsilon"),
        (0.0, 1e-5, 0.1, 10, "privacy.epsilon"),
        (-1.0, 1e-5, 0.1, 10, "privacy.epsilon"),
        (math.nan, 1e-5, 0.1, 10, "privacy.epsilon"),
        (math.inf, 1e-5, 0.1, 10, "privacy.epsilon"),
        (1.0, 0.0, 0.1, 10, "privacy.delta"),
        (1.0, 1.0, 0.1, 10, "privacy.delta"),
        (1.0, 1e-5, 0.0, 10, "sampling_rate"),
        (1.0, 1e-5, 0.1, 0, "num_steps"),
    ],
)
def test_impossible_targets_are_refused_with_what_to_change(
    target: float, delta: float, q: float, num_steps: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out")


@pytest.mark.parametrize(
    ("target", "delta", "q", "num_steps", "rows"),
    [
        (1e-4, 2e-5, 0.031, 60, 1),
        (1e-4, 8e-4, 2 / 127, 3552, 1),
        (1e-4, 6e-4, 39 / 180, 234, 1),
        (1e-5, 3e-4, 6 / 354, 1641, 1),
        (1e-5, 1e-3, 33 / 86, 619, 1),
        (1e-5, 2e-4, 12 / 660, 29, 16),
        (1e-5, 7e-6, 1 / 13446, 1, 4),
        (1e-5, 1e-6, 0.01, 1000, 16),
        (1e-9, 1e-9, 0.5, 1000, 1),
        (1e-4, 1e-2, 0.001, 1, 1),
        (1.0, 1e-5, 0.1, 100, 1),
    ],
)
def test_the_answer_comes_after_a_bounded_number_of_trials(
    monkeypatch: Any, target: float, delta: float, q: float, num_steps: int, rows: int
) -> None:
    """Where epsilon is 0 beyond some noise, a search that reads slopes alone swung there and back for minutes."""
    tried: list[float] = []

    def loss(terms: Any, *arguments: Any) -> Any:
        tried.append(terms.sampled[0].noise_multiplier)
        assert len(tried) <= 30
        return privacy_loss(terms, *arguments)

    monkeypatch.setattr(accounting, "privacy_loss", loss)
    with suppress(ConfigError):  # which is known after one trial
        sigma = calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out", group_size=rows)
        assert epsilon(dp_sgd_event(q, sigma, num_steps, rows), delta, "zero_out") <= target
        assert epsilon(dp_sgd_event(q, sigma - 1e-3, num_steps, rows), delta, "zero_out") > target
        return
    assert len(tried) <= 1
    least, most = (
        epsilon(dp_sgd_event(q, sigma, num_steps, rows), delta, "zero_out") for sigma in (0.5, MAX_NOISE_MULTIPLIER)
    )
    assert most > target or least == accounting.MIN_EPSILON
