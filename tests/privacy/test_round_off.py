"""What floats lose is never left out of epsilon: tiny sampling rates and deltas, much noise, many steps, huge epsilons."""

from __future__ import annotations

import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from scipy.stats import norm

import dpllm
from dpllm.errors import ConfigError
from dpllm.privacy import accounting, events, limits, privacy_loss
from dpllm.privacy.accounting import compose, dp_sgd_event, epsilon
from dpllm.privacy.events import Gaussian, Imported
from dpllm.privacy.limits import attacker_limits, attacker_limits_of, roc_limits
from dpllm.privacy.parts import parts_of
from dpllm.privacy.renyi import rdp

RUN = dp_sgd_event(0.02, 0.8, 150)


def phi(x: mp.mpf) -> mp.mpf:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def lower_delta(q: float, sigma: float, steps: int, eps: float) -> mp.mpf:
    """What tests of the sum of all steps show of delta, in 60 digits: less than the truth, whatever the threshold."""
    with mp.workdps(60):
        rate, scale, grow = mp.mpf(q), sigma * mp.sqrt(steps), mp.exp(eps)
        mean = steps * q
        few, most = max(0, int(mean - 8 * math.sqrt(mean) - 8)), min(steps, int(mean + 8 * math.sqrt(mean) + 8))
        weights = [mp.binomial(steps, k) * rate**k * (1 - rate) ** (steps - k) for k in range(few, most + 1)]
        means = [k / scale for k in range(few, most + 1)]
        best = mp.mpf(0)
        for c in range(-2, 24):
            with_it = mp.fsum(weight * phi(shift - c) for weight, shift in zip(weights, means, strict=True))
            best = max(best, with_it - grow * phi(mp.mpf(-c)))
        return best


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [
        (1.714e-11, 261774.4, 71010, 3.42e-18),  # 0 was stated
        (1.714e-11, 261774.4, 71010, 5.3e-25),
        (1e-12, 1e4, 1000, 1e-18),
        (0.4811, 3.12388, 729, 1.92e-15),  # 41.37 was stated, whose delta is three times this one
        (0.2, 2.0, 300, 1e-9),
        (1e-9, 0.3, 100, 1e-12),
    ],
)
def test_no_epsilon_is_below_the_true_one_where_floats_lose_delta(q, sigma, steps, delta):
    stated = epsilon(dp_sgd_event(q, sigma, steps), delta, "zero_out")
    assert math.isinf(stated) or lower_delta(q, sigma, steps, stated) <= delta
    assert math.isfinite(stated) == (delta > 1e-13)


def test_the_lower_bound_is_near_the_truth() -> None:
    """Else the test above could not fail."""
    assert 0.8e-5 < lower_delta(1.0, 1.0, 1, 4.377178) < 1.01e-5
    assert lower_delta(0.2, 2.0, 300, 0.8 * epsilon(dp_sgd_event(0.2, 2.0, 300), 1e-9, "zero_out")) > 1e-9


@pytest.mark.parametrize("q", [9.9e-13, 5e-324])
def test_a_sampling_rate_that_floats_do_not_bear_is_refused_wherever_one_comes_from(q: float) -> None:
    gaussian = Gaussian(1.0)
    tiny = {"type": "poisson_sampled", "probability": q, "event": gaussian.to_json()}
    for made in (
        lambda: dp_sgd_event(q, 1.0, 2),
        lambda: events.CyclicPoisson(2, 4, q, gaussian),
        lambda: events.read({"type": "composed", "events": [{"type": "self_composed", "count": 2, "event": tiny}]}),
        lambda: accounting.calibrate_noise_multiplier(1.0, 1e-5, q, 2, "zero_out"),
    ):
        with pytest.raises(ConfigError, match="sampling_rate"):
            made()
    assert dp_sgd_event(1e-12, 1.0, 2).count == 2


def test_a_promise_about_so_many_units_is_refused() -> None:
    """Epsilon 0 was stated, at an eighteenth of the true delta."""
    with pytest.raises(ConfigError, match="larger batch, or fewer units"):
        dpllm.promise(10**18, epsilon=8, batch_size=1, steps=2)


@pytest.mark.parametrize(("q", "sigma"), [(1e-12, 1.0), (1e-9, 1e3), (1e-3, 1e6)])
def test_renyi_divergence_is_never_zero(q: float, sigma: float) -> None:
    event = dp_sgd_event(q, sigma, 1000)
    assert epsilon(event, 1e-12, "zero_out", "rdp") > 0
    for order in (1.5, 2.0, 32.0):
        assert rdp(event, order) >= 1000 * order * (q / sigma) ** 2 / 2


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.01, 0.0605, 3), (1.0, 0.027, 1)])
def test_an_epsilon_beyond_the_exponents_of_floats_warns_of_nothing(monkeypatch, q, sigma, steps):
    monkeypatch.setattr(limits, "INTERVAL", 0.05)
    event = dp_sgd_event(q, sigma, steps)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        stated = epsilon(event, 1e-5, "zero_out", interval=0.01)
        reached = attacker_limits_of(event, "zero_out")
    if q == 1:  # the closed form
        assert 710 < stated < 2000
        with mp.workdps(60):
            shift, at = mp.mpf(1) / sigma, [mp.mpf(stated) * share for share in (mp.mpf("0.999"), 1)]
            deltas = [phi(shift / 2 - e / shift) - mp.exp(e) * phi(-shift / 2 - e / shift) for e in at]
            assert deltas[0] > 1e-5 >= deltas[1]
    assert all(value is None or math.isfinite(value) for value in reached.values())


def test_both_ways_to_invert_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    event = dp_sgd_event(0.3, 0.5, 30)
    loss, far = privacy_loss.privacy_loss(parts_of(event), "zero_out", 1e-3), [0.0, 30.0, 60.0, 90.0]
    theirs = [float(loss.get_epsilon_for_delta(1e-6)), *map(float, loss.get_delta_for_epsilon(far))]
    monkeypatch.setattr(privacy_loss, "MOST_EXPONENT", 5.0)
    ours = [privacy_loss.epsilon_at(1e-6, loss, parts_of(event)), *privacy_loss.deltas_at(loss, far)]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ours[0] >= theirs[0] * (1 - 1e-12)


@pytest.mark.parametrize(("q", "sigma", "steps"), [(1.0, 0.44, 49630), (0.5, 0.35, 100_000)])
def test_an_epsilon_of_thousands_does_not_fill_the_memory(q: float, sigma: float, steps: int) -> None:
    """40 GB, of which the system killed the program."""
    parts = parts_of(dp_sgd_event(q, sigma, steps))
    assert privacy_loss._interval(parts, 1e-4) > 1e-3
    assert privacy_loss._interval(parts_of(dp_sgd_event(0.01, 1.0, 1000)), 1e-4) == 1e-4


@pytest.mark.parametrize(("each", "times", "delta"), [(0.01, 1000, 3e-15), (0.01, 300, 1e-14)])
def test_many_releases_of_known_epsilon_do_not_cost_less_than_randomised_responses(each, times, delta):
    """The exact delta of so many coins, in 60 digits, at a thousandth more than what is stated."""
    stated = epsilon(compose([events.PureDP(each)] * times), delta, "label_changed")
    with mp.workdps(60):
        true, false = mp.exp(each) / (1 + mp.exp(each)), 1 / (1 + mp.exp(each))
        grow = mp.exp(1.001 * stated)
        terms = (
            mp.binomial(times, k) * (true**k * false ** (times - k) - grow * false**k * true ** (times - k))
            for k in range(times + 1)
        )
        assert math.isinf(stated) or mp.fsum(term for term in terms if term > 0) <= delta


@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove_one"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_of_what_reads_data_is_never_nothing(relation: accounting.Relation, accountant: str) -> None:
    """Where delta alone holds the loss, (0, delta) is true and would be read as no loss at all."""
    assert epsilon(dp_sgd_event(1e-3, 1e4, 1), 1e-4, relation, accountant) >= accounting.MIN_EPSILON > 0
    assert epsilon(compose([]), 1e-4, relation, accountant) == 0.0  # of nothing


# --- limits on an attacker are upper bounds, and near what the best attack achieves ------------------------------------


@pytest.mark.parametrize("eps", [0.0, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
def test_attacker_limits_are_the_trade_off_curve(eps: float, delta: float) -> None:
    def tpr(fpr):
        # Every line that (epsilon, delta)-DP of the test, and of its complement, puts above the curve.
        return np.minimum(1.0, np.minimum(np.exp(eps) * fpr + delta, 1 - np.exp(-eps) * (1 - delta - fpr)))

    # Refined towards 0, where the curve of a large epsilon bends.
    fpr = np.concatenate([[0.0], np.geomspace(1e-30, 1.0, 400_000)])
    reached = attacker_limits(eps, delta)
    assert reached["auc"] == pytest.approx(np.trapezoid(tpr(fpr), fpr), abs=1e-7)
    for at in (0.01, 0.001):
        assert reached[f"tpr_at_fpr_{at}"] == pytest.approx(float(tpr(at)))
    # The polygon of one pair is that of the closed form.
    assert roc_limits([eps], [delta]) == {name: pytest.approx(value, abs=1e-12) for name, value in reached.items()}


def test_attacker_limits_of_known_and_of_no_guarantee() -> None:
    assert attacker_limits(3.0, 0.0)["auc"] == pytest.approx(0.95257, abs=1e-5)
    assert attacker_limits(1.0, 1e-5)["tpr_at_fpr_0.01"] == pytest.approx(0.0271928, abs=1e-6)
    assert set(attacker_limits(math.inf, 0.0).values()) == {1.0}
    assert attacker_limits(0.0, 0.0) == {"tpr_at_fpr_0.01": 0.01, "tpr_at_fpr_0.001": 0.001, "auc": 0.5}


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 5.0])
def test_the_limits_of_a_gaussian_are_its_roc_curve(mu: float) -> None:
    reached = attacker_limits_of(Gaussian(1 / mu), "zero_out")
    assert reached["gdp_mu"] == pytest.approx(mu, abs=1e-3)
    for fpr in (0.001, 0.01):
        best = norm.sf(norm.isf(fpr) - mu)
        assert best <= reached[f"tpr_at_fpr_{fpr}"] <= best * 1.001
    auc = norm.cdf(mu / math.sqrt(2))
    assert auc <= reached["auc"] <= auc + 2e-5


@pytest.mark.parametrize(("q", "sigma"), [(0.1, 0.7), (0.5, 2.0), (0.02, 0.5)])
def test_no_test_of_one_sampled_step_does_better(q: float, sigma: float) -> None:
    """Neyman and Pearson: of the mixture against the Gaussian, and of the Gaussian against the mixture."""
    reached = attacker_limits_of(dp_sgd_event(q, sigma, 1), "zero_out")
    threshold = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    without = norm.sf(threshold / sigma)
    sampled = (1 - q) * without + q * norm.sf((threshold - 1) / sigma)
    for fpr, tpr in ((without, sampled), (1 - sampled, 1 - without)):
        order = np.argsort(fpr)
        auc = np.trapezoid(tpr[order], fpr[order])
        assert auc <= reached["auc"] + 1e-9
        for at in (0.001, 0.01):
            assert np.interp(at, fpr[order], tpr[order]) <= reached[f"tpr_at_fpr_{at}"] + 1e-9
    best = np.interp(0.01, without[::-1], sampled[::-1])
    assert reached["tpr_at_fpr_0.01"] == pytest.approx(best, rel=0.02)  # the curve covers both directions at once


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
    epsilons, deltas = limits.profile(RUN, "zero_out")
    above, below = ([*deltas[:-1], 1e-10 * (1 + moved)] for moved in (1e-12, -1e-12))
    assert limits._gaussian_mu(epsilons, above) == pytest.approx(limits._gaussian_mu(epsilons, below), rel=1e-9)


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
