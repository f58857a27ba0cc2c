"""Events are plain values of an allow-list, and each comes down to what it costs."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import (
    Terms,
    accountants,
    compose,
    count_releases,
    dp_event_of,
    dp_sgd_event,
    gradient_noise_multiplier,
    imported_delta,
    joint_noise_multiplier,
    normal_form,
    require,
    sampled_steps,
)

RUN = dp_sgd_event(0.02, 0.8, 150)
GAUSSIAN = {"type": "gaussian", "noise_multiplier": 1.0}
ADAPTIVE = {"type": "adaptive_clipping", "gradient_noise_multiplier": 1.2, "count_noise_multiplier": 5.0}
GROUP = dp_sgd_event(0.02, 0.8, 150, 4)
IMPORTED = {"type": "imported", "epsilon": 1.0, "delta": 1e-6}
PURE = {"type": "pure_dp", "epsilon": 0.25}
BEST = {"type": "repeat_and_select", "event": RUN, "mean": 10, "distribution": "geometric"}


def test_event_is_plain_json_and_says_what_ran() -> None:
    assert RUN == {
        "type": "self_composed",
        "count": 150,
        "event": {
            "type": "poisson_sampled",
            "probability": 0.02,
            "event": {"type": "gaussian", "noise_multiplier": 0.8},
        },
    }
    assert GROUP["event"]["type"] == "poisson_sampled_group"
    assert GROUP["event"]["group_size"] == 4
    assert json.loads(json.dumps(compose([RUN, GROUP, BEST, IMPORTED]))) == compose([RUN, GROUP, BEST, IMPORTED])
    import dp_accounting as dp

    sampled = dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(0.8))
    assert dp_event_of(normal_form(RUN)) == dp.SelfComposedDpEvent(sampled, 150)


def test_releases_are_counted_where_this_run_pays_for_them() -> None:
    assert count_releases(compose([RUN, RUN, dp_sgd_event(0.5, 3.0, 7)])) == 307
    assert count_releases(GROUP) == 150
    assert count_releases(compose([PURE, RUN, {"type": "self_composed", "count": 3, "event": PURE}])) == 154
    assert count_releases(sampled_steps(ADAPTIVE, 0.1, 9)) == 9
    assert count_releases(BEST) == count_releases(IMPORTED) == 0
    assert count_releases(compose([RUN, BEST, IMPORTED])) == 150


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
        {"type": "poisson_sampled", "probability": 0.5, "event": IMPORTED},
        {"type": "poisson_sampled", "probability": 0.5, "group_size": 2, "event": GAUSSIAN},
        {"type": "poisson_sampled_group", "probability": 0.5, "event": GAUSSIAN},
        {"type": "poisson_sampled_group", "probability": 0.5, "group_size": 0, "event": GAUSSIAN},
        {"type": "poisson_sampled_group", "probability": 0.5, "group_size": 2.0, "event": GAUSSIAN},
        {"type": "poisson_sampled_group", "probability": 0.5, "group_size": True, "event": GAUSSIAN},
        {"type": "poisson_sampled_group", "probability": 0.5, "group_size": 10**6, "event": GAUSSIAN},
        {"type": "poisson_sampled_group", "probability": 0.5, "group_size": 2, "event": BEST},
        {"type": "adaptive_clipping", "gradient_noise_multiplier": 1.0},
        {**ADAPTIVE, "gradient_noise_multiplier": 0.0},
        {**ADAPTIVE, "count_noise_multiplier": -1.0},
        {**ADAPTIVE, "count_noise_multiplier": math.nan},
        {**BEST, "distribution": "fixed"},
        {**BEST, "distribution": ["geometric"]},
        {**BEST, "mean": 0.5},
        {**BEST, "mean": math.inf},
        {**BEST, "event": {"type": "unknown"}},
        {**IMPORTED, "epsilon": -1.0},
        {**IMPORTED, "epsilon": math.inf},
        {**IMPORTED, "delta": 1.0},
        {**IMPORTED, "delta": -1e-9},
        {"type": "imported", "epsilon": 1.0},
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
def test_malformed_or_foreign_events_are_refused(event: Any) -> None:
    with pytest.raises(ConfigError):
        dp_event_of(normal_form(event))
    with pytest.raises(ConfigError):
        epsilon(event, 1e-5, "zero_out")
    with pytest.raises(ConfigError):
        count_releases(event)


def test_the_normal_form_counts_equal_parts_together_in_any_order() -> None:
    two = compose([compose([GROUP, RUN]), {"type": "self_composed", "count": 2, "event": compose([RUN, IMPORTED])}])
    assert normal_form(two) == normal_form(compose([IMPORTED, RUN, IMPORTED, RUN, RUN, GROUP]))
    assert normal_form(dp_sgd_event(0.3, 1.0, 0)) == normal_form(compose([])) == Terms()
    assert normal_form({"type": "imported", "epsilon": 0.0, "delta": 0.0}) == Terms()


def test_a_group_of_one_is_one_and_a_group_in_every_batch_is_a_larger_gaussian() -> None:
    one = {"type": "poisson_sampled_group", "probability": 0.02, "group_size": 1, "event": GAUSSIAN}
    assert normal_form(one) == normal_form({"type": "poisson_sampled", "probability": 0.02, "event": GAUSSIAN})
    always = {"type": "poisson_sampled_group", "probability": 1.0, "group_size": 4, "event": GAUSSIAN}
    assert normal_form(always) == normal_form({"type": "gaussian", "noise_multiplier": 0.25})


def test_adaptive_clipping_is_the_gaussian_of_both_sums() -> None:
    """Sensitivities 1 and 1/2 over their noises add in squares."""
    [part] = normal_form(ADAPTIVE).sampled
    assert part.noise_multiplier == pytest.approx((1.2**-2 + (2 * 5.0) ** -2) ** -0.5, rel=1e-11)
    exact = (Decimal("1.2") ** -2 + (2 * Decimal(5)) ** -2) ** Decimal("-0.5")
    assert exact * (1 - Decimal("1e-11")) < Decimal(part.noise_multiplier) < exact  # rounded down, never up
    assert normal_form(sampled_steps(ADAPTIVE, 0.02, 10, 3)).sampled[0].group_size == 3


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(500, 10**8), st.floats(1.0000001, 1e6))
def test_splitting_calibrated_noise_gives_it_back_to_the_last_bit(grid: int, ratio: float) -> None:
    """So that the epsilon of the joint event is the one calibrated, and never above the target."""
    sigma = grid / 1e4
    count = sigma / 2 * ratio
    gradient = gradient_noise_multiplier(sigma, count)
    assert joint_noise_multiplier(gradient, count) == sigma
    assert gradient > sigma


def test_a_count_that_costs_more_than_both_may_is_refused() -> None:
    with pytest.raises(ConfigError, match="count_noise_multiplier"):
        gradient_noise_multiplier(1.0, 0.5)


@pytest.mark.parametrize(
    ("event", "known"),
    [
        (RUN, {"pld", "rdp", "prv"}),
        (sampled_steps(ADAPTIVE, 0.02, 10), {"pld", "rdp", "prv"}),
        (dp_sgd_event(0.02, 1.0, 10, 1), {"pld", "rdp", "prv"}),
        (compose([]), {"pld", "rdp", "prv"}),
        (GROUP, {"pld"}),
        (BEST, {"rdp"}),
        (IMPORTED, {"pld", "rdp"}),
        (compose([RUN, IMPORTED]), {"pld", "rdp"}),
        (compose([GROUP, IMPORTED, RUN]), {"pld"}),
        (compose([BEST, IMPORTED, RUN]), {"rdp"}),
        ({**BEST, "event": BEST}, {"rdp"}),
        (compose([GROUP, BEST]), set()),
        ({**BEST, "event": GROUP}, set()),
        ({**BEST, "event": compose([RUN, IMPORTED])}, set()),
        ({"type": "self_composed", "count": 0, "event": compose([GROUP, BEST])}, {"pld", "rdp", "prv"}),
    ],
)
def test_each_event_lists_its_accountants(event: Any, known: set[str]) -> None:
    assert accountants(event) == known
    for name in known:
        assert math.isfinite(epsilon(event, 1e-3, "zero_out", name, interval=1e-2))
    for name in {"pld", "rdp", "prv"} - known if known else set():
        with pytest.raises(ConfigError, match=f"{name}.*does not know"):
            epsilon(event, 1e-3, "zero_out", name)


@pytest.mark.parametrize("name", ["pld", "rdp", "prv"])
def test_what_no_accountant_knows_is_refused_by_the_names_of_its_parts(name: str) -> None:
    with pytest.raises(Refused, match=r"poisson_sampled_group \(only pld\).*repeat_and_select.*\(only rdp\)"):
        epsilon(compose([GROUP, BEST]), 1e-5, "zero_out", name)
    with pytest.raises(Refused, match="only none"):
        require(normal_form({**BEST, "event": GROUP}))


def test_imported_deltas_add_up() -> None:
    three = {"type": "self_composed", "count": 3, "event": IMPORTED}
    assert imported_delta(compose([RUN, three])) == pytest.approx(3e-6)
    assert imported_delta(RUN) == 0.0
    with pytest.raises(ConfigError, match="imported"):
        dp_event_of(normal_form(IMPORTED))


@pytest.mark.parametrize("noise", [0.0, 1e-160, 1e-7, 1e10, 1e300])
def test_noise_whose_squares_fit_no_float_is_refused(noise: float) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        epsilon({"type": "gaussian", "noise_multiplier": noise}, 1e-5, "zero_out")


def test_more_steps_than_can_be_composed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"too long to compose\. Lower"):
        epsilon(dp_sgd_event(0.01, 1.0, 10**7), 1e-5, "zero_out")


def test_pure_dp_costs_what_dp_accounting_says_and_takes_no_delta() -> None:
    """With DP-SGD, composed directly from dp-accounting's public functions."""
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_privacy_parameters(common.DifferentialPrivacyParameters(0.25, 0.0), 1e-4)
    run = pld.from_gaussian_mechanism(0.8, sampling_prob=0.02, value_discretization_interval=1e-4).self_compose(150)
    whole = compose([PURE, RUN, PURE])
    direct = one.self_compose(2).compose(run).get_epsilon_for_delta(1e-6)
    assert epsilon(whole, 1e-6, "add_or_remove_one") == pytest.approx(direct, rel=1e-9)
    assert epsilon(RUN, 1e-6, "zero_out") < direct < epsilon(RUN, 1e-6, "zero_out") + 0.5
    assert imported_delta(whole) == 0
    assert accountants(whole) == {"pld", "rdp"}
    assert epsilon(whole, 1e-6, "zero_out", "rdp") >= direct - 1e-3
    with pytest.raises(ConfigError, match="does not know"):
        epsilon(whole, 1e-6, "zero_out", "prv")


@pytest.mark.parametrize("broken", [{"epsilon": -0.1}, {"epsilon": math.inf}, {"epsilon": "1"}, {"delta": 1e-6}])
def test_a_malformed_pure_dp_has_no_cost(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        normal_form({**PURE, **broken})
