"""Events are plain values of an allow-list, and each comes down to what it costs."""

from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld

from dpllm.errors import ConfigError
from dpllm.privacy import events, privacy_loss
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import Gaussian, Imported, PoissonSampled, PureDP, SelfComposed, compose, dp_sgd_event, read
from dpllm.privacy.parts import Parts, SampledSums, accountants, dp_event_of, imported_delta, parts_of

RUN = dp_sgd_event(0.02, 0.8, 150)
GROUP = dp_sgd_event(0.02, 0.8, 150, 4)
ONCE, PURE = Imported(1.0, 1e-6), PureDP(0.25)
BANDED = events.CyclicPoisson(4, 30, 0.2, Gaussian(1.0))
ALL = compose([RUN, GROUP, ONCE, PURE, BANDED, Gaussian(2.0)])
GAUSSIAN, IMPORTED = Gaussian(1.0).to_json(), ONCE.to_json()


def test_an_event_is_stored_as_plain_json_and_read_back() -> None:
    assert RUN.to_json() == {
        "type": "self_composed",
        "count": 150,
        "event": {
            "type": "poisson_sampled",
            "probability": 0.02,
            "event": {"type": "gaussian", "noise_multiplier": 0.8},
        },
    }
    inside = GROUP.to_json()["event"]
    assert (inside["type"], inside["group_size"]) == ("poisson_sampled_group", 4)
    assert read(json.loads(json.dumps(ALL.to_json()))) == ALL
    whole = {"type": "imported", "epsilon": 1, "delta": 0}  # numbers stay as they were given
    assert json.dumps(read(whole).to_json()) == json.dumps(whole)
    sampled = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(0.8))
    assert dp_event_of(parts_of(RUN)) == dp_accounting.SelfComposedDpEvent(sampled, 150)


def test_releases_are_counted_where_this_run_pays_for_them() -> None:
    assert events.count_releases(compose([RUN, RUN, dp_sgd_event(0.5, 3.0, 7)])) == 307
    assert events.count_releases(GROUP) == 150
    assert events.count_releases(compose([PURE, RUN, SelfComposed(3, PURE)])) == 154
    assert events.count_releases(ONCE) == 0
    assert events.count_releases(compose([RUN, ONCE])) == 150


SAMPLED, GROUPED = PoissonSampled(0.5, Gaussian(1.0)).to_json(), PoissonSampled(0.5, Gaussian(1.0), 2).to_json()
MALFORMED: dict[str, Any] = {
    "unknown type": {"type": "os.system", "command": "true"},
    "of another library": {
        "class_name": "GaussianDpEvent",
        "module_name": "dp_accounting.dp_event",
        "noise_multiplier": 1.0,
    },
    "type that is no text": {"type": ["gaussian"]},
    "text": "gaussian",
    "nothing": None,
    "field missing": {"type": "gaussian"},
    "field too many": {**GAUSSIAN, "sensitivity": 0.1},
    **{
        f"noise {noise!r}": {**GAUSSIAN, "noise_multiplier": noise}
        for noise in (0.0, -1.0, math.nan, math.inf, True, "1")
    },
    **{f"rate {rate}": {**SAMPLED, "probability": rate} for rate in (0.0, 1.1)},
    "sampled steps": {**SAMPLED, "event": dp_sgd_event(0.5, 1.0, 2).to_json()},
    "group of a single type": {**SAMPLED, "group_size": 2},
    "group without a size": {**SAMPLED, "type": "poisson_sampled_group"},
    **{f"group of {size!r}": {**GROUPED, "group_size": size} for size in (0, 2.0, True, 10**6)},
    "grouped import": {**GROUPED, "event": IMPORTED},
    "selection without runs": {"type": "repeat_and_select", "events": [], "mean": 2.0, "distribution": "geometric"},
    **{f"imported epsilon {value}": {**IMPORTED, "epsilon": value} for value in (-1.0, math.inf)},
    **{f"imported delta {value}": {**IMPORTED, "delta": value} for value in (1.0, -1e-9)},
    "pure_dp with a delta": {**PURE.to_json(), "delta": 1e-6},
    **{f"count {count}": {"type": "self_composed", "count": count, "event": GAUSSIAN} for count in (-1, 1.5)},
    "no times what is unknown": {"type": "self_composed", "count": 0, "event": {"type": "unknown"}},
    "nothing within": {"type": "composed", "events": [GAUSSIAN, None]},
    "events that are a text": {"type": "composed", "events": "gaussian"},
    "no bands": {**BANDED.to_json(), "bands": 0},
    "bands of pure_dp": {**BANDED.to_json(), "event": PURE.to_json()},
}


@pytest.mark.parametrize("event", MALFORMED.values(), ids=MALFORMED)
def test_malformed_or_foreign_events_are_refused(event: Any) -> None:
    with pytest.raises(ConfigError):
        read(event)


def test_the_parts_count_equal_parts_together_in_any_order() -> None:
    two = compose([compose([GROUP, RUN]), SelfComposed(2, compose([RUN, ONCE]))])
    assert parts_of(two) == parts_of(compose([ONCE, RUN, ONCE, RUN, RUN, GROUP]))
    assert parts_of(dp_sgd_event(0.3, 1.0, 0)) == parts_of(compose([])) == Parts()
    assert parts_of(Imported(0.0, 0.0)) == parts_of(SelfComposed(5, PureDP(0))) == Parts()


def test_a_group_of_one_is_one_and_a_group_in_every_batch_is_a_larger_gaussian() -> None:
    one = {"type": "poisson_sampled_group", "probability": 0.02, "group_size": 1, "event": GAUSSIAN}
    assert read(one) == PoissonSampled(0.02, Gaussian(1.0))
    assert parts_of(PoissonSampled(1.0, Gaussian(1.0), 4)) == parts_of(Gaussian(0.25))


@pytest.mark.parametrize(
    ("event", "known"),
    [
        (RUN, {"pld", "rdp", "prv"}),
        (GROUP, {"pld"}),
        (compose([RUN, ONCE]), {"pld", "rdp"}),
        (compose([GROUP, ONCE, RUN]), {"pld"}),
        (SelfComposed(0, compose([GROUP, ONCE])), {"pld", "rdp", "prv"}),
    ],
)
def test_each_event_lists_its_accountants(event: Any, known: set[str]) -> None:
    assert accountants(event) == known
    for name in known:
        assert math.isfinite(epsilon(event, 1e-3, "zero_out", name, interval=1e-2))
    for name in {"pld", "rdp", "prv"} - known:
        with pytest.raises(ConfigError, match=f"{name}.*does not support"):
            epsilon(event, 1e-3, "zero_out", name)


def test_imported_deltas_add_up() -> None:
    assert imported_delta(compose([RUN, SelfComposed(3, ONCE)])) == pytest.approx(3e-6)
    assert imported_delta(RUN) == 0.0
    with pytest.raises(ConfigError, match="imported"):
        dp_event_of(parts_of(ONCE))


def test_what_fits_no_float_or_can_change_is_refused() -> None:
    for noise in (1e-160, 1e-7, 1e10):  # its square fits none
        with pytest.raises(ConfigError, match="noise_multiplier"):
            Gaussian(noise)
    with pytest.raises(ConfigError, match="which can change"):
        events.Composed([RUN])  # type: ignore[arg-type]


def test_more_steps_than_can_be_composed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"too long to compose\. Take fewer"):
        epsilon(dp_sgd_event(0.01, 1.0, 10**7), 1e-5, "zero_out")


def test_pure_dp_costs_what_dp_accounting_says_and_takes_no_delta() -> None:
    """With DP-SGD, composed directly from dp-accounting's public functions."""
    one = pld.from_privacy_parameters(common.DifferentialPrivacyParameters(0.25, 0.0), 1e-4)
    run = pld.from_gaussian_mechanism(0.8, sampling_prob=0.02, value_discretization_interval=1e-4).self_compose(150)
    whole = compose([PURE, RUN, PURE])
    direct = one.self_compose(2).compose(run).get_epsilon_for_delta(1e-6)
    steps = privacy_loss._sampled_loss(SampledSums(0.02, 0.8, 1, 150), 1e-4).self_compose(150)
    composed = one.self_compose(2).compose(steps).get_epsilon_for_delta(1e-6)
    assert epsilon(whole, 1e-6, "add_or_remove_one") == pytest.approx(composed, rel=1e-9)
    # Points of one step differ by 2e-16 from dp-accounting's, and 150 steps by 1.1e-9 on some processors.
    assert epsilon(whole, 1e-6, "add_or_remove_one") == pytest.approx(direct, rel=1e-8)
    assert epsilon(RUN, 1e-6, "zero_out") < direct < epsilon(RUN, 1e-6, "zero_out") + 0.5
    assert accountants(whole) == {"pld", "rdp"}
    assert epsilon(whole, 1e-6, "zero_out", "rdp") >= direct - 1e-3
    with pytest.raises(ConfigError, match="does not support"):
        epsilon(whole, 1e-6, "zero_out", "prv")


@pytest.mark.parametrize(
    "thing", [None, "gaussian", GAUSSIAN, [RUN], object(), 1.0], ids=str.split("none text json list object number")
)
def test_what_is_no_event_is_never_free(thing: Any) -> None:
    """A list of runs in place of their events would else cost nothing."""
    for made in (
        lambda: compose([RUN, thing]),
        lambda: SelfComposed(3, thing),
        lambda: PoissonSampled(0.1, thing),
        lambda: events.CyclicPoisson(2, 3, 0.1, thing),
        lambda: events.count_releases(thing),
        lambda: parts_of(thing),
    ):
        with pytest.raises(ConfigError, match="is not an accounting event"):
            made()


def test_events_lie_in_each_other_only_so_deep() -> None:
    """A recursion deeper than Python's would end in a traceback, when a ledger is read as well."""
    deep = RUN.to_json()
    for _ in range(events.MAX_DEPTH - 3):
        deep = {"type": "self_composed", "count": 1, "event": deep}
    assert parts_of(read(deep)) == parts_of(RUN)
    for depth in (1, 500):
        for _ in range(depth):
            deep = {"type": "composed", "events": [deep]}
        with pytest.raises(ConfigError, match="nested"):
            read(deep)


def test_the_step_of_a_run_is_that_of_its_sampling() -> None:
    assert events.step_of(GROUP) == PoissonSampled(0.02, Gaussian(0.8), 4)
    assert events.step_of(BANDED) == BANDED
    for other in (Gaussian(1.0), compose([RUN]), SelfComposed(3, Gaussian(1.0)), SelfComposed(3, RUN), PURE):
        with pytest.raises(ConfigError, match="not an event of Poisson-sampled steps"):
            events.step_of(other)
