"""Noise fits: the Renyi filter counts right, and calibrated noise meets its target while hardly less does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpllm.errors import ConfigError
from dpllm.privacy import accounting, privacy_loss
from dpllm.privacy.accounting import calibrate_noise_multiplier, compose, dp_sgd_event, epsilon
from dpllm.privacy.events import Gaussian, Imported, SelfComposed
from dpllm.privacy.parts import dp_event_of, parts_of
from dpllm.privacy.renyi import MAX_NOISE_MULTIPLIER, ORDERS, Fit, allowance, divergence, filter_order, rdp
from dpllm.privacy.renyi import smallest_noise_multiplier as smallest

RUN = dp_sgd_event(0.02, 0.8, 150)


def to_epsilon(divergence: float, delta: float, order: float) -> float:
    """The epsilon that a Renyi divergence implies: Canonne et al. 2020, proposition 12."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


@pytest.mark.parametrize("order", [1.1, 2.0, 3.2, 64.0])
@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_the_divergence_of_a_gaussian_is_its_closed_form(order: float, sigma: float) -> None:
    event = SelfComposed(7, Gaussian(sigma))
    assert rdp(event, order) == pytest.approx(7 * order / (2 * sigma**2), rel=1e-12)


@pytest.mark.parametrize("order", [1.3, 2.0, 3.2, 7.7])
@pytest.mark.parametrize(("q", "sigma"), [(0.02, 0.8), (0.3, 2.0), (0.001, 0.6)])
def test_the_divergence_of_a_sampled_step_is_that_of_the_mixture(order: float, q: float, sigma: float) -> None:
    """Integrated over a grid, in the direction that dominates. Whole orders are exact, fractional ones near or above."""
    exact = log_moment(order, q, sigma) / (order - 1)
    result = rdp(dp_sgd_event(q, sigma, 1), order)
    assert exact * (1 - 1e-9) <= result <= exact * (1.01 if order >= 2 else 1.7)


def log_moment(order: float, q: float, sigma: float) -> float:
    x = np.linspace(-15 * sigma, order + 15 * sigma, 1_000_001)
    base = norm.logpdf(x, 0, sigma)
    mixture = np.logaddexp(math.log1p(-q) + base, math.log(q) + norm.logpdf(x, 1, sigma))
    return math.log(np.trapezoid(np.exp(order * mixture + (1 - order) * base), x))


@pytest.mark.parametrize(("q", "sigma"), [(0.3, 2.0), (0.5, 4.0), (0.7, 1.0)])
@pytest.mark.parametrize("order", [1.1, 1.9, 2.5])
def test_an_order_that_does_not_converge_is_bounded_by_its_neighbours(order: float, q: float, sigma: float) -> None:
    event = dp_sgd_event(q, sigma, 1)
    if order == 1.1:  # why there is such a bound
        assert math.isinf(RdpAccountant([order]).compose(dp_event_of(parts_of(event))).rdp[0])
    exact = log_moment(order, q, sigma) / (order - 1)
    assert exact <= rdp(event, order) <= rdp(event, math.ceil(order))
    assert rdp(event, order) <= exact * 2.2


@pytest.mark.parametrize("eps", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("order", [1.1, 2.0, 3.2, 64.0])
def test_a_pure_import_costs_what_randomised_response_does(eps: float, order: float) -> None:
    p = 1 / (1 + math.exp(-eps))
    rest = math.exp(-eps) * p
    exact = math.log(p**order * rest ** (1 - order) + rest**order * p ** (1 - order)) / (order - 1)
    assert rdp(Imported(eps, 0.0), order) == pytest.approx(exact, rel=1e-9)
    assert rdp(Imported(eps, 0.0), order) <= min(eps, order * eps**2 / 2) * (1 + 1e-12)


def test_an_imported_delta_has_no_finite_divergence() -> None:
    assert rdp(Imported(0.1, 1e-9), 3.2) == math.inf
    assert divergence(parts_of(compose([RUN, Imported(0.1, 1e-9)])), 3.2) == rdp(
        compose([RUN, Imported(0.1, 0.0)]), 3.2
    )
    assert rdp(compose([RUN, Imported(0.1, 0.0)]), 3.2) == pytest.approx(rdp(RUN, 3.2) + rdp(Imported(0.1, 0.0), 3.2))


def test_events_without_a_divergence_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rdp.*rows of one unit"):
        rdp(dp_sgd_event(0.02, 0.8, 5, 3), 3.2)
    for order in (1.0, 0.5, math.inf, math.nan):
        with pytest.raises(ConfigError, match="order"):
            rdp(RUN, order)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(0.05, 20.0), st.floats(1e-9, 0.01), st.floats(1.05, 64.0))
def test_allowance_and_epsilon_are_each_others_inverse(eps: float, delta: float, order: float) -> None:
    assert to_epsilon(allowance(eps, delta, order), delta, order) == pytest.approx(eps)


def test_what_a_filter_allows_is_what_the_rdp_accountant_states() -> None:
    best = min(to_epsilon(rdp(RUN, order), 1e-5, order) for order in ORDERS)
    assert best == pytest.approx(epsilon(RUN, 1e-5, "zero_out", "rdp"), rel=1e-3)
    assert best >= epsilon(RUN, 1e-5, "zero_out")


@pytest.mark.parametrize(("order", "copies"), [(3.2, 8), (4.0, 7), (5.0, 3), (10.0, 0)])
def test_a_budget_of_8_admits_so_many_runs(order: float, copies: int) -> None:
    left = allowance(8.0, 1e-5, order)
    assert rdp(compose([RUN] * copies), order) <= left
    assert rdp(compose([RUN] * (copies + 1)), order) > left


@settings(derandomize=True, deadline=None, max_examples=100)
@given(value=st.floats(0.5, 60.0), delta=st.sampled_from([1e-5, 1e-8]))
def test_the_order_of_a_filter_leaves_a_third_of_the_budget(value: float, delta: float) -> None:
    order = filter_order(value, delta)
    assert order in ORDERS
    assert allowance(value, delta, order) > value / 3


@pytest.mark.parametrize("eps", [1.0, 3.0, 8.0])
def test_the_order_of_a_filter_costs_little_beside_one_chosen_in_hindsight(eps: float) -> None:
    for rate, steps, runs in ((0.02, 150, 8), (0.002, 3000, 1), (0.1, 100, 4)):
        noise = {
            order: smallest(
                lambda s, q=rate, t=steps: dp_sgd_event(q, s, t),  # type: ignore[misc]
                Fit(order, allowance(eps, 1e-5, order) / runs),
            )
            for order in {*ORDERS[::4], filter_order(eps, 1e-5)}
        }
        assert noise[filter_order(eps, 1e-5)] <= 1.13 * min(noise.values())
    assert ORDERS[0] == 1.1
    assert ORDERS[-1] == 64.0
    assert list(ORDERS) == sorted(set(ORDERS))
    assert {10.9, 11.0, 12.0} <= set(ORDERS)


FIT = Fit(3.2, allowance(8.0, 1e-5, 3.2) - 7 * rdp(RUN, 3.2))  # after seven runs


def test_the_smallest_noise_fits_and_a_grid_step_less_does_not() -> None:
    for rate, steps in ((0.02, 150), (0.5, 100), (1.0, 10_000)):
        sigma = smallest(lambda s, q=rate, t=steps: dp_sgd_event(q, s, t), FIT)  # type: ignore[misc]
        assert rdp(dp_sgd_event(rate, sigma, steps), 3.2) <= FIT.allowance
        assert rdp(dp_sgd_event(rate, sigma - 1e-4, steps), 3.2) > FIT.allowance
        assert round(sigma * 1e4) / 1e4 == sigma
    assert smallest(lambda s: dp_sgd_event(0.02, s, 150), Fit(3.2, 0.0)) == math.inf
    assert smallest(lambda s: dp_sgd_event(1.0, s, 10**8), Fit(3.2, 1e-12)) == math.inf


@pytest.mark.parametrize("least", [0.05, 0.0501, 1.0, 9999.9999, 1e4, 1.1e4])
def test_the_grid_is_searched_to_its_ends(least: float) -> None:
    fit = Fit(2.0, rdp(dp_sgd_event(1.0, least, 1), 2.0))
    result = smallest(lambda s: dp_sgd_event(1.0, s, 1), fit)
    assert result == (least if least <= 1e4 else math.inf)


# --- calibrated noise ------------------------------------------------------------------------------------------------


@pytest.fixture
def _calibrated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the tests of a session share what was found."""
    for name in ("_calibrate", "_pld"):
        monkeypatch.setattr(accounting, name, getattr(accounting, name).__wrapped__)


CALIBRATIONS = [  # target, delta, q, steps, rows of a unit, and the noise that others publish
    (8.0, 1e-5, 0.02, 150, 1, 0.560556),
    pytest.param(3.0, 1 / 84122, 1024 / 42061, 410, 1, 1.01264, marks=pytest.mark.full),
    (1.0, 1e-6, 0.1, 512, 1, 9.66),
    (0.1, 1e-6, 0.01, 1000, 1, 11.5709),
    (3.0, 1e-5, 1.0, 30, 1, None),
    (5.0, 1e-5, 0.01, 100, 4, None),
    pytest.param(8.0, 1e-5, 0.02, 300, 16, None, marks=pytest.mark.full),
    pytest.param(2.0, 1e-5, 1e-3, 2000, 64, None, marks=pytest.mark.full),
    # Where epsilon is 0 beyond some noise, a search that reads slopes alone swung there and back for minutes.
    (1e-4, 2e-5, 0.031, 60, 1, None),
    (1e-4, 6e-4, 39 / 180, 234, 1, None),
    (1e-5, 3e-4, 6 / 354, 1641, 1, None),
    (1e-5, 2e-4, 12 / 660, 29, 16, None),
    (1e-5, 7e-6, 1 / 13446, 1, 4, None),
]


@pytest.mark.usefixtures("_calibrated_anew")
@pytest.mark.parametrize(("target", "delta", "q", "num_steps", "rows", "published"), CALIBRATIONS)
def test_calibrated_noise_meets_the_target_after_few_trials_and_no_smaller_noise_does(
    target, delta, q, num_steps, rows, published, monkeypatch
):
    tried: list[float] = []

    def counting(parts: Any, *arguments: Any) -> Any:
        tried.append(parts.sampled[0].noise_multiplier)
        assert len(tried) <= 30
        return privacy_loss.privacy_loss(parts, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(accounting, "privacy_loss", counting)
        try:
            sigma = calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out", group_size=rows)
        except ConfigError:  # known after one trial
            assert len(tried) <= 1
            sigmas = (0.5, MAX_NOISE_MULTIPLIER)
            least, most = (epsilon(dp_sgd_event(q, s, num_steps, rows), delta, "zero_out") for s in sigmas)
            assert most > target or least == accounting.MIN_EPSILON
            return
    assert round(sigma * 1e4) / 1e4 == sigma
    assert published is None or sigma == pytest.approx(published, abs=3e-3)
    assert epsilon(dp_sgd_event(q, sigma, num_steps, rows), delta, "zero_out") <= target
    assert epsilon(dp_sgd_event(q, sigma - 1e-3, num_steps, rows), delta, "zero_out") > target


@pytest.mark.parametrize(
    ("target", "delta", "q", "num_steps", "says"),
    [
        (1e-9, 1e-9, 0.5, 1000, "not reachable.*Raise epsilon"),
        (1.0, 0.01, 0.001, 1, "not reachable.*lower epsilon"),
        *((epsilon, 1e-5, 0.1, 10, "privacy.epsilon") for epsilon in (0.0, -1.0, math.nan, math.inf)),
        *((1.0, delta, 0.1, 10, "privacy.delta") for delta in (0.0, 1.0)),
        (1.0, 1e-5, 0.0, 10, "sampling_rate"),
        (1.0, 1e-5, 0.1, 0, "num_steps"),
    ],
)
def test_impossible_targets_are_refused_with_what_to_change(target, delta, q, num_steps, says):
    with pytest.raises(ConfigError, match=says):
        calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out")
