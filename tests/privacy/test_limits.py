"""Limits on an attacker are upper bounds, and near what the best attack achieves."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

from dpllm.privacy.accounting import compose, dp_sgd_event, epsilon
from dpllm.privacy.events import Gaussian, Imported
from dpllm.privacy.limits import _gaussian_mu, attacker_limits, attacker_limits_of, profile, roc_limits

RUN = dp_sgd_event(0.02, 0.8, 150)


@pytest.mark.parametrize("eps", [0.0, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
def test_attacker_limits_are_the_trade_off_curve(eps: float, delta: float) -> None:
    def tpr(fpr):
        # Every line that (epsilon, delta)-DP of the test, and of its complement, puts above the curve.
        return np.minimum(1.0, np.minimum(np.exp(eps) * fpr + delta, 1 - np.exp(-eps) * (1 - delta - fpr)))

    # Refined towards 0, where the curve of a large epsilon bends.
    fpr = np.concatenate([[0.0], np.geomspace(1e-30, 1.0, 400_000)])
    limits = attacker_limits(eps, delta)
    assert limits["auc"] == pytest.approx(np.trapezoid(tpr(fpr), fpr), abs=1e-7)
    for at in (0.01, 0.001):
        assert limits[f"tpr_at_fpr_{at}"] == pytest.approx(float(tpr(at)))
    # The polygon of one pair is that of the closed form.
    assert roc_limits([eps], [delta]) == {name: pytest.approx(value, abs=1e-12) for name, value in limits.items()}


def test_attacker_limits_of_known_and_of_no_guarantee() -> None:
    assert attacker_limits(3.0, 0.0)["auc"] == pytest.approx(0.95257, abs=1e-5)
    assert attacker_limits(1.0, 1e-5)["tpr_at_fpr_0.01"] == pytest.approx(0.0271928, abs=1e-6)
    assert set(attacker_limits(math.inf, 0.0).values()) == {1.0}
    assert attacker_limits(0.0, 0.0) == {"tpr_at_fpr_0.01": 0.01, "tpr_at_fpr_0.001": 0.001, "auc": 0.5}


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 5.0])
def test_the_limits_of_a_gaussian_are_its_roc_curve(mu: float) -> None:
    limits = attacker_limits_of(Gaussian(1 / mu), "zero_out")
    assert limits["gdp_mu"] == pytest.approx(mu, abs=1e-3)
    for fpr in (0.001, 0.01):
        best = norm.sf(norm.isf(fpr) - mu)
        assert best <= limits[f"tpr_at_fpr_{fpr}"] <= best * 1.001
    auc = norm.cdf(mu / math.sqrt(2))
    assert auc <= limits["auc"] <= auc + 2e-5


@pytest.mark.parametrize(("q", "sigma"), [(0.1, 0.7), (0.5, 2.0), (0.02, 0.5)])
def test_no_test_of_one_sampled_step_does_better(q: float, sigma: float) -> None:
    """Neyman and Pearson: of the mixture against the Gaussian, and of the Gaussian against the mixture."""
    limits = attacker_limits_of(dp_sgd_event(q, sigma, 1), "zero_out")
    threshold = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    without = norm.sf(threshold / sigma)
    sampled = (1 - q) * without + q * norm.sf((threshold - 1) / sigma)
    for fpr, tpr in ((without, sampled), (1 - sampled, 1 - without)):
        order = np.argsort(fpr)
        auc = np.trapezoid(tpr[order], fpr[order])
        assert auc <= limits["auc"] + 1e-9
        for at in (0.001, 0.01):
            assert np.interp(at, fpr[order], tpr[order]) <= limits[f"tpr_at_fpr_{at}"] + 1e-9
    best = np.interp(0.01, without[::-1], sampled[::-1])
    assert limits["tpr_at_fpr_0.01"] == pytest.approx(best, rel=0.02)  # the curve covers both directions at once


@pytest.mark.parametrize("event", [RUN, dp_sgd_event(0.02, 2.0, 50, 4)], ids=str)
def test_the_whole_profile_limits_more_than_any_one_pair(event: dict[str, object]) -> None:
    whole = attacker_limits_of(event, "zero_out")
    for delta in (1e-3, 1e-5, 1e-7):
        one = attacker_limits(epsilon(event, delta, "zero_out"), delta)
        for name, value in one.items():
            assert whole[name] <= value + 1e-6, (name, delta)
    assert whole["auc"] < 0.85


def test_a_larger_mu_bounds_the_profile_of_a_sampled_run() -> None:
    """At every delta, the epsilon of mu-GDP is at least the stated one, and somewhere no larger."""
    mu = attacker_limits_of(RUN, "zero_out")["gdp_mu"]
    for delta in np.geomspace(1e-9, 1e-2, 15).tolist():
        assert dp_accounting.get_epsilon_gaussian(1 / mu, delta) >= epsilon(RUN, delta, "zero_out") - 2e-3
    assert attacker_limits_of(RUN, "add_or_remove_one")["gdp_mu"] == mu


def test_whether_the_last_delta_counts_does_not_hang_on_its_rounding() -> None:
    """It is 1e-10 but for rounding, and with it mu is larger by up to a thousandth."""
    epsilons, deltas = profile(RUN, "zero_out")
    above, below = ([*deltas[:-1], 1e-10 * (1 + moved)] for moved in (1e-12, -1e-12))
    assert _gaussian_mu(epsilons, above) == pytest.approx(_gaussian_mu(epsilons, below), rel=1e-9)


def test_limits_where_there_is_no_distribution() -> None:
    nothing = attacker_limits_of(compose([]), "zero_out")
    assert nothing == {"tpr_at_fpr_0.001": 0.001, "tpr_at_fpr_0.01": 0.01, "auc": 0.5, "gdp_mu": 0.0}
    leaky = attacker_limits_of(Imported(0.1, 0.05), "zero_out")
    assert leaky.pop("gdp_mu") is None
    assert leaky == pytest.approx(attacker_limits(0.1, 0.05), abs=1e-4)
    assert attacker_limits_of(Gaussian(1e-5), "zero_out")["auc"] == 1.0
    drowned = attacker_limits_of(dp_sgd_event(1 / 5000, 1e9, 1), "zero_out")
    assert drowned["gdp_mu"] == 0.0
    assert 0.5 <= drowned["auc"] <= 0.5001
