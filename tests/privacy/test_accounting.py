"""The stated epsilon is right: against closed forms, published grids, other accountants, and itself."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting
from dpllm.privacy.accounting import (
    attacker_limits,
    calibrate_noise_multiplier,
    compose,
    count_releases,
    cross_check,
    dp_sgd_event,
    epsilon,
    to_dp_event,
)

RUN = dp_sgd_event(0.02, 0.8, 150)  # epsilon 2.9633 at delta 1e-5

# Gaussian mechanism with mean shift mu (sensitivity over standard deviation): exact, from the closed form.
EXACT_GAUSSIAN = [
    (1.0, 1e-5, 4.377178095681),
    (0.5, 1e-6, 2.254084650220),
    (2.0, 1e-5, 9.997256146434),
    (1.0, 1e-10, 6.547924066865),
]
# One Poisson-subsampled step (q, sigma, delta): exact, by solving for epsilon.
EXACT_ONE_STEP = [
    (0.01, 1.0, 1e-5, 0.199450447796),
    (0.1, 0.7, 1e-6, 4.361453095189),
    (0.001, 0.5, 1e-6, 1.085235709058),
]
# q, sigma, T, delta, PLD (dp-accounting 0.6.0), PRV and RDP (Opacus 1.6.0).
slow = pytest.mark.full
DP_SGD = [
    pytest.param(0.01, 4.0, 10000, 1e-5, 0.9470, 0.9569, 1.0355, marks=slow),
    pytest.param(256 / 60000, 1.1, 14062, 1e-5, 2.3817, 2.3917, 2.5966, marks=slow),
    (0.005, 0.8, 1000, 1e-6, 2.0041, 2.0143, 2.6265),
    (0.08192, 3.0, 2468, 1e-5, 6.5293, 6.5396, 7.0458),
    (0.08192, 10.0, 875, 1e-5, 0.9028, 0.9128, 0.9877),
    (0.02, 0.8, 150, 1e-5, 2.9633, 2.9736, 3.6224),
    (0.5, 4.0, 100, 1e-5, 5.8687, 5.8790, 6.350),
    pytest.param(0.01, 0.3, 1000, 1e-5, 69.816, 69.830, 79.05, marks=slow),
]


@pytest.mark.parametrize(("mu", "delta", "exact"), EXACT_GAUSSIAN)
def test_gaussian_matches_the_closed_form(mu, delta, exact):
    once = {"type": "gaussian", "noise_multiplier": 1 / mu}
    hundred = {"type": "self_composed", "count": 100, "event": {"type": "gaussian", "noise_multiplier": 10 / mu}}
    for event in (once, hundred, dp_sgd_event(1.0, 1 / mu, 1)):
        assert exact - 1e-9 <= epsilon(event, delta, "add_or_remove_one") <= exact + 2e-3


@pytest.mark.parametrize(("q", "sigma", "delta", "exact"), EXACT_ONE_STEP)
def test_one_step_matches_the_exact_value(q, sigma, delta, exact):
    assert exact - 1e-9 <= epsilon(dp_sgd_event(q, sigma, 1), delta, "zero_out") <= exact + 2e-3


@pytest.mark.parametrize(("q", "sigma", "num_steps", "delta", "pld", "prv", "rdp"), DP_SGD)
def test_dp_sgd_matches_published_values(q, sigma, num_steps, delta, pld, prv, rdp):
    event = dp_sgd_event(q, sigma, num_steps)
    stated = epsilon(event, delta, "zero_out")
    assert pld - 1e-3 <= stated <= pld + 2e-3
    assert epsilon(event, delta, "zero_out", "prv") == pytest.approx(prv, abs=2e-3)
    assert stated <= epsilon(event, delta, "zero_out", "prv") <= stated + 0.03
    assert epsilon(event, delta, "zero_out", "rdp") == pytest.approx(rdp, rel=5e-3)


@pytest.mark.parametrize(("runs", "pld", "rdp"), [(2, 3.788, 4.460), (5, 5.599, 6.342), (10, 7.863, 8.730)])
def test_runs_compose_for_less_than_their_sum(runs, pld, rdp):
    assert pld - 1e-3 <= epsilon(compose([RUN] * runs), 1e-5, "zero_out") <= pld + 2e-3
    assert epsilon(compose([RUN] * runs), 1e-5, "zero_out", "rdp") == pytest.approx(rdp, rel=1e-3)


def test_different_runs_compose_in_any_order():
    runs = [RUN, dp_sgd_event(0.05, 1.2, 300), dp_sgd_event(0.01, 0.7, 500)]
    together = epsilon(compose(runs), 1e-5, "zero_out")
    assert together == pytest.approx(5.822, abs=2e-3)
    assert epsilon(compose([compose(runs[:0:-1]), runs[0]]), 1e-5, "zero_out") == together


def test_prv_composes_different_runs_too():
    runs = compose([dp_sgd_event(0.2, 2.0, 30), dp_sgd_event(0.1, 1.5, 50)])
    stated = epsilon(runs, 1e-5, "zero_out")
    assert stated <= epsilon(runs, 1e-5, "zero_out", "prv") <= stated + 0.03


def test_both_relations_cost_the_same_under_poisson_sampling():
    for accountant in ("pld", "rdp"):
        assert epsilon(RUN, 1e-5, "zero_out", accountant) == epsilon(RUN, 1e-5, "add_or_remove_one", accountant)


def test_event_is_plain_json_and_says_what_ran():
    assert RUN == {
        "type": "self_composed",
        "count": 150,
        "event": {
            "type": "poisson_sampled",
            "probability": 0.02,
            "event": {"type": "gaussian", "noise_multiplier": 0.8},
        },
    }
    assert json.loads(json.dumps(RUN)) == RUN
    import dp_accounting as dp

    sampled = dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(0.8))
    assert to_dp_event(RUN) == dp.SelfComposedDpEvent(sampled, 150)
    assert count_releases(compose([RUN, RUN, dp_sgd_event(0.5, 3.0, 7)])) == 307


GAUSSIAN = {"type": "gaussian", "noise_multiplier": 1.0}


@pytest.mark.parametrize(
    "event",
    [
        {"type": "os.system", "command": "true"},
        {"class_name": "GaussianDpEvent", "module_name": "dp_accounting.dp_event", "noise_multiplier": 1.0},
        {"type": "gaussian"},
        {"type": "gaussian", "noise_multiplier": 0.0},
        {"type": "gaussian", "noise_multiplier": -1.0},
        {"type": "gaussian", "noise_multiplier": math.nan},
        {"type": "gaussian", "noise_multiplier": math.inf},
        {"type": "gaussian", "noise_multiplier": True},
        {"type": "gaussian", "noise_multiplier": "1"},
        {"type": "gaussian", "noise_multiplier": 1.0, "sensitivity": 0.1},
        {"type": "poisson_sampled", "probability": 0.0, "event": GAUSSIAN},
        {"type": "poisson_sampled", "probability": 1.1, "event": GAUSSIAN},
        {"type": "poisson_sampled", "probability": 0.5, "event": dp_sgd_event(0.5, 1.0, 2)},
        {"type": "self_composed", "count": -1, "event": GAUSSIAN},
        {"type": "self_composed", "count": 1.5, "event": GAUSSIAN},
        {"type": "self_composed", "count": True, "event": GAUSSIAN},
        {"type": "self_composed", "count": 0, "event": {"type": "unknown"}},
        {"type": "composed", "events": [GAUSSIAN, None]},
        {"type": "composed", "events": "gaussian"},
        {"type": ["gaussian"]},
        "gaussian",
        None,
    ],
)
def test_malformed_or_foreign_events_are_refused(event):
    with pytest.raises(ConfigError):
        to_dp_event(event)
    with pytest.raises(ConfigError):
        epsilon(event, 1e-5, "zero_out")


def test_gdp_is_refused_because_it_is_optimistic():
    with pytest.raises(ConfigError, match="understates"):
        epsilon(RUN, 1e-5, "zero_out", "gdp")


def test_bad_arguments_are_refused():
    for delta in (0.0, 1.0, -1e-5, math.nan, None):
        with pytest.raises(ConfigError, match="delta"):
            epsilon(RUN, delta, "zero_out")
    with pytest.raises(ConfigError, match="replace_one"):
        epsilon(RUN, 1e-5, "replace_one")
    with pytest.raises(ConfigError, match="moments"):
        epsilon(RUN, 1e-5, "zero_out", "moments")


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_zero_steps_cost_nothing(accountant):
    for event in (dp_sgd_event(0.1, 1.0, 0), compose([])):
        assert epsilon(event, 1e-5, "zero_out", accountant) == 0.0


def test_hardly_any_noise_is_answered_with_a_bound_and_not_with_a_crash():
    assert 20_000 < epsilon(dp_sgd_event(0.02, 0.01, 10), 1e-5, "zero_out") < 60_000
    assert epsilon(dp_sgd_event(0.02, 1e-6, 1000), 1e-5, "zero_out") == math.inf


quick = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
rates, sigmas, steps = st.floats(0.005, 0.5), st.floats(0.7, 5.0), st.integers(1, 300)
deltas = st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4])
more = st.floats(1.0, 3.0)


def cost(q, sigma, num_steps, delta):
    return epsilon(dp_sgd_event(q, sigma, num_steps), delta, "zero_out", interval=1e-3)


@quick
@given(rates, sigmas, steps, deltas, more)
def test_epsilon_rises_with_steps_and_sampling_and_falls_with_noise_and_delta(q, sigma, num_steps, delta, by):
    here = cost(q, sigma, num_steps, delta)
    assert cost(q, sigma, math.ceil(num_steps * by), delta) >= here - 1e-5
    assert cost(min(1.0, q * by), sigma, num_steps, delta) >= here - 1e-3
    assert cost(q, sigma * by, num_steps, delta) <= here + 1e-3
    assert cost(q, sigma, num_steps, min(0.5, delta * by)) <= here + 1e-6


@quick
@given(rates, sigmas, steps, deltas)
def test_rdp_is_never_below_pld_and_a_fine_pld_never_above_a_coarse_one(q, sigma, num_steps, delta):
    event = dp_sgd_event(q, sigma, num_steps)
    coarse = epsilon(event, delta, "zero_out", interval=2e-3)
    assert epsilon(event, delta, "zero_out", interval=5e-4) <= coarse + 1e-6
    assert epsilon(event, delta, "zero_out", "rdp") >= epsilon(event, delta, "zero_out", interval=5e-4) - 1e-3


@quick
@given(rates, sigmas, steps, rates, sigmas, steps, deltas)
def test_composition_commutes_and_costs_at_least_each_part(q, sigma, num_steps, q2, sigma2, num_steps2, delta):
    one, two = dp_sgd_event(q, sigma, num_steps), dp_sgd_event(q2, sigma2, num_steps2)
    both = epsilon(compose([one, two]), delta, "zero_out", interval=1e-3)
    assert both == epsilon(compose([two, one]), delta, "zero_out", interval=1e-3)
    parts = [epsilon(e, delta, "zero_out", interval=1e-3) for e in (one, two)]
    assert both >= max(parts) - 1e-3
    assert epsilon(compose([one, two]), 2 * delta, "zero_out", interval=1e-3) <= sum(parts) + 1e-2


CALIBRATIONS = [
    (8.0, 1e-5, 0.02, 150, 0.560556),
    pytest.param(3.0, 1 / 84122, 1024 / 42061, 410, 1.01264, marks=slow),
    (1.0, 1e-6, 0.1, 512, 9.66),
    (1.0, 1e-5, 0.2, 1000, None),
    (0.1, 1e-6, 0.01, 1000, 11.5709),
    (3.0, 1e-5, 1.0, 30, None),
]


@pytest.mark.parametrize(("target", "delta", "q", "num_steps", "published"), CALIBRATIONS)
def test_calibrated_noise_meets_the_target_and_no_smaller_noise_does(target, delta, q, num_steps, published):
    sigma = calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out")
    assert round(sigma * 1e4) / 1e4 == sigma
    assert published is None or sigma == pytest.approx(published, abs=3e-3)
    assert epsilon(dp_sgd_event(q, sigma, num_steps), delta, "zero_out") <= target
    assert epsilon(dp_sgd_event(q, sigma - 1e-3, num_steps), delta, "zero_out") > target


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(0.3, 8.0), st.sampled_from([1e-8, 1e-6, 1e-5]), st.floats(0.05, 1.0), st.integers(50, 2000))
def test_calibration_is_never_above_any_target_and_tight(target, delta, q, num_steps):
    sigma = calibrate_noise_multiplier(target, delta, q, num_steps, "add_or_remove_one")
    assert epsilon(dp_sgd_event(q, sigma, num_steps), delta, "add_or_remove_one") <= target
    assert epsilon(dp_sgd_event(q, sigma - 1e-3, num_steps), delta, "add_or_remove_one") > target


@pytest.mark.parametrize(
    ("target", "delta", "q", "num_steps", "says"),
    [
        (1e-9, 1e-9, 0.5, 1000, "not reachable.*Raise privacy.epsilon"),
        pytest.param(1.0, 0.01, 0.001, 1, "not reachable.*lower privacy.epsilon", marks=slow),
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
def test_impossible_targets_are_refused_with_what_to_change(target, delta, q, num_steps, says):
    with pytest.raises(ConfigError, match=says):
        calibrate_noise_multiplier(target, delta, q, num_steps, "zero_out")


def test_cache_answers_the_same_question_only(tmp_path: Path, monkeypatch):
    cache = tmp_path / "new" / "cache"
    ask = (1.0, 1e-5, 0.2, 100, "zero_out")
    sigma = calibrate_noise_multiplier(*ask, cache)
    [file] = cache.iterdir()
    monkeypatch.setattr(accounting, "_calibrate", lambda *_: 99.0)
    assert calibrate_noise_multiplier(*ask, cache) == sigma
    for place, other in enumerate((1.1, 2e-5, 0.21, 101, "add_or_remove_one")):
        assert calibrate_noise_multiplier(*ask[:place], other, *ask[place + 1 :], cache) == 99.0
    monkeypatch.setattr(accounting, "versions", lambda: {"name": "dp-accounting", "version": "99"})
    assert calibrate_noise_multiplier(*ask, cache) == 99.0
    assert json.loads(file.read_text())["noise_multiplier"] == sigma


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"key": 1}', '{"noise_multiplier": 0.01}', "\x00", "below"],
)
def test_damaged_cache_is_computed_again(tmp_path: Path, monkeypatch, damage):
    monkeypatch.setattr(accounting, "_calibrate", lambda *_: 1.5)
    ask = (1.0, 1e-5, 0.2, 100, "zero_out", tmp_path)
    calibrate_noise_multiplier(*ask)
    [file] = tmp_path.iterdir()
    if damage == "below":  # well-formed but for the value
        damage = json.dumps({**json.loads(file.read_text()), "noise_multiplier": -1.0})
    file.write_text(damage)
    monkeypatch.setattr(accounting, "_calibrate", lambda *_: 2.5)
    assert calibrate_noise_multiplier(*ask) == 2.5
    assert json.loads(file.read_text())["noise_multiplier"] == 2.5


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(accounting, "_calibrate", lambda *_: 1.5)
    (tmp_path / "file").write_text("")
    assert calibrate_noise_multiplier(1.0, 1e-5, 0.2, 100, "zero_out", tmp_path / "file") == 1.5


def test_second_accountant_agrees_or_refuses():
    stated = epsilon(RUN, 1e-5, "zero_out")
    second = cross_check(RUN, 1e-5, "zero_out", stated)
    assert second["name"] == "opacus-prv"
    assert second["version"]
    assert stated <= second["epsilon"] <= stated + 0.03
    for wrong in (stated + 0.02, stated - 0.05, 2.0, 4.0, math.inf):
        with pytest.raises(Refused):
            cross_check(RUN, 1e-5, "zero_out", wrong)
    assert cross_check(compose([]), 1e-5, "zero_out", 0.0)["epsilon"] == 0.0


def test_rdp_stands_in_where_prv_cannot_answer():
    million = dp_sgd_event(0.001, 1.0, 1_000_000)
    stated = epsilon(million, 1e-6, "zero_out")
    second = cross_check(million, 1e-6, "zero_out", stated)
    assert second["name"].startswith("dp-accounting-rdp")
    assert second["epsilon"] == pytest.approx(7.1441, abs=1e-3)
    with pytest.raises(Refused):
        cross_check(million, 1e-6, "zero_out", 7.2)
    with pytest.raises(ConfigError, match="prv"):
        epsilon(million, 1e-6, "zero_out", "prv")


@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0, 3.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
def test_attacker_limits_are_the_trade_off_curve(eps, delta):
    def tpr(fpr):  # every line that (epsilon, delta)-DP of the test, and of its complement, puts above the curve
        return np.minimum(1.0, np.minimum(np.exp(eps) * fpr + delta, 1 - np.exp(-eps) * (1 - delta - fpr)))

    # Refined towards 0, where the curve of a large epsilon bends.
    fpr = np.concatenate([[0.0], np.geomspace(1e-30, 1.0, 400_000)])
    limits = attacker_limits(eps, delta)
    assert limits["auc"] == pytest.approx(np.trapezoid(tpr(fpr), fpr), abs=1e-7)
    assert limits["tpr_at_fpr_0.01"] == pytest.approx(float(tpr(0.01)))
    assert limits["tpr_at_fpr_0.001"] == pytest.approx(float(tpr(0.001)))


def test_attacker_limits_of_known_and_of_no_guarantee():
    assert attacker_limits(3.0, 0.0)["auc"] == pytest.approx(0.95257, abs=1e-5)
    assert attacker_limits(1.0, 1e-5)["tpr_at_fpr_0.01"] == pytest.approx(0.0271928, abs=1e-6)
    assert set(attacker_limits(math.inf, 0.0).values()) == {1.0}
    assert attacker_limits(0.0, 0.0) == {"tpr_at_fpr_0.01": 0.01, "tpr_at_fpr_0.001": 0.001, "auc": 0.5}


def test_accounting_and_calibration_never_import_torch():
    code = """
import sys
from dpllm.privacy import accounting
assert not {"torch", "dp_accounting", "scipy", "numpy"} & sys.modules.keys()
sigma = accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.2, 100, "zero_out")
accounting.epsilon(accounting.dp_sgd_event(0.2, sigma, 100), 1e-5, "zero_out", "rdp")
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
