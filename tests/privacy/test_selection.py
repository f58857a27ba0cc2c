"""The best of a random number of runs costs no more than is stated: exact toys, other accountants, draws of the number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpllm.errors import ConfigError
from dpllm.privacy import selection
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import Imported, PureDP, RepeatAndSelect, compose, dp_sgd_event, read
from dpllm.privacy.parts import accountants, dp_event_of, parts_of
from dpllm.privacy.privacy_loss import deltas_at, privacy_loss
from dpllm.privacy.renyi import rdp

RUN = dp_sgd_event(0.123, 1.1, 24)
LARGER = dp_sgd_event(0.246, 1.9, 24)
Distribution = NDArray[np.float64]


def hockey_stick(p_Y: Distribution, q_Y: Distribution, order: float) -> float:
    return float(np.maximum(p_Y - order * q_Y, 0).sum())


def of_the_best(p_Y: Distribution, mean: float, distribution: str) -> Distribution:
    """The exact distribution of the largest of K values, from the generating function of K."""
    gamma = selection.gamma_of(mean, distribution)
    below = np.array([0.0, *np.cumsum(p_Y)[:-1], 1.0])
    if distribution == "logarithmic":
        return np.diff(np.log1p(-(1 - gamma) * below) / math.log(gamma) if gamma < 1 else below)
    return np.diff(gamma * below / (1 - (1 - gamma) * below))


def worst(p_Y: Distribution, q_Y: Distribution) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    return lambda epsilons: np.array(
        [max(hockey_stick(p_Y, q_Y, math.exp(e)), hockey_stick(q_Y, p_Y, math.exp(e))) for e in epsilons]
    )


@given(
    st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), min_size=2, max_size=6),
    st.floats(1.0, 200.0),
    st.sampled_from(sorted(selection.SHAPES)),
)
@settings(deadline=None, max_examples=300)
def test_no_mechanism_with_a_known_profile_exceeds_the_bound(weights: Any, mean: float, distribution: str) -> None:
    p_Y, q_Y = (np.array(side) / sum(side) for side in zip(*weights, strict=True))
    delta_of = worst(p_Y, q_Y)
    most = float(np.abs(np.log(p_Y / q_Y)).max())
    more = selection.cost(delta_of, most, mean, distribution)
    epsilons = np.linspace(-most - more - 1, most + more + 1, 60)
    bound = selection.profile(delta_of(epsilons - more), epsilons, mean)
    true = worst(of_the_best(p_Y, mean, distribution), of_the_best(q_Y, mean, distribution))(epsilons)
    assert np.all(true <= bound + 1e-12 + 1e-15 * np.exp(epsilons))  # sums of probabilities round


def test_the_bound_is_nearly_reached() -> None:
    """A bound that could be half as large would not be worth its proof: randomised response whose best answer is rare."""
    epsilon_of_one, mean = 1.0, 20.0
    p_Y, q_Y = (np.array([1 - rare, rare]) for rare in (1e-4, 1e-4 * math.e))
    more = selection.cost(worst(p_Y, q_Y), epsilon_of_one, mean, "logarithmic")
    best = [of_the_best(side, mean, "logarithmic") for side in (p_Y, q_Y)]
    reached = float(np.abs(np.log(best[0] / best[1])).max())
    assert 0.99 < reached <= epsilon_of_one + more < 2.0


@pytest.mark.parametrize("distribution", sorted(selection.SHAPES))
@pytest.mark.parametrize("mean", [1.0, 1.5, 10.0, 300.0])
def test_a_number_of_runs_has_the_mean_and_the_distribution_that_are_accounted(mean: float, distribution: str) -> None:
    uniform = (np.arange(40_000) + 0.5) / 40_000  # as fine as forty thousand draws, without their scatter
    runs = np.array([selection.draw(mean, distribution, float(u)) for u in uniform])
    assert runs.min() == 1
    assert 1 <= selection.draw(mean, distribution, math.nextafter(1.0, 0.0)) < 1000 * mean  # the largest uniform ends
    assert runs.mean() == pytest.approx(mean, rel=0.02)
    x = 0.9
    expected = of_the_best(np.array([x, 1 - x]), mean, distribution)[0]
    assert (x**runs).mean() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("distribution", "pld", "renyi"), [("logarithmic", 5.660, 7.126), ("geometric", 5.901, 7.985)])
def test_figures_of_the_proof(distribution: str, pld: float, renyi: float) -> None:
    """An epsilon of 4 in each of ten runs in the mean; composing ten of them costs 12.04 instead."""
    run = dp_sgd_event(512 / 4160, 1.0796, 24)
    assert epsilon(run, 1e-5, "zero_out") == pytest.approx(4.0, abs=0.01)
    best = RepeatAndSelect((run,), 10, distribution)
    assert epsilon(best, 1e-5, "zero_out") == pytest.approx(pld, abs=0.02)
    assert epsilon(best, 1e-5, "zero_out", "rdp") == pytest.approx(renyi, abs=0.02)


def test_the_renyi_bound_is_that_of_dp_accounting() -> None:
    orders, run = [1.5, 2.0, 4.0, 8.0, 32.0], dp_event_of(parts_of(RUN))
    for distribution, eta in selection.SHAPES.items():
        theirs = RdpAccountant(orders).compose(RepeatAndSelectDpEvent(run, 10, eta)).rdp
        ours = selection.renyi(RdpAccountant(orders).compose(run).rdp, np.array(orders), 10, distribution)
        np.testing.assert_allclose(np.minimum.accumulate(ours[::-1])[::-1], theirs, rtol=1e-9)


def test_one_run_costs_what_it_costs_and_more_runs_more() -> None:
    alone = epsilon(RUN, 1e-5, "zero_out")
    means = [epsilon(RepeatAndSelect((RUN,), mean, "logarithmic"), 1e-5, "zero_out") for mean in (1, 2, 5, 20)]
    assert means[0] == pytest.approx(alone, abs=1e-3)
    assert means == sorted(means)


def test_runs_of_several_settings_cost_what_lies_between() -> None:
    one, other, both = (
        epsilon(RepeatAndSelect(events, 5, "logarithmic"), 1e-5, "zero_out")
        for events in ((RUN,), (LARGER,), (RUN, LARGER))
    )
    assert min(one, other) < both < max(one, other)
    twice = epsilon(RepeatAndSelect((RUN, RUN), 5, "logarithmic"), 1e-5, "zero_out")
    assert twice == pytest.approx(one, abs=1e-3)
    best = [rdp(RepeatAndSelect(events, 5, "logarithmic"), 8.0) for events in ((RUN,), (LARGER,), (RUN, LARGER))]
    assert best[2] >= max(best[:2])


def test_what_has_no_renyi_curve_is_accounted_by_its_profile() -> None:
    best = RepeatAndSelect((compose([RUN, Imported(0.5, 1e-7)]),), 3, "geometric")
    assert accountants(best) == {"pld"}
    assert epsilon(best, 1e-5, "zero_out") > epsilon(RepeatAndSelect((RUN,), 3, "geometric"), 1e-5, "zero_out")


def test_selections_compose_with_other_releases() -> None:
    best = RepeatAndSelect((RUN, LARGER), 5, "logarithmic")
    alone, together = (epsilon(event, 1e-5, "zero_out") for event in (best, compose([best, RUN, PureDP(0.5)])))
    assert alone < together < alone + epsilon(RUN, 1e-5, "zero_out") + 0.5
    assert read(best.to_json()) == best


def test_what_has_no_bound_is_refused() -> None:
    for mean in (0.5, 1e6, math.nan):
        with pytest.raises(ConfigError):
            RepeatAndSelect((RUN,), mean, "geometric")
    for events, distribution in (((RUN,), "poisson"), ((), "geometric"), ([RUN], "geometric")):
        with pytest.raises(ConfigError):
            RepeatAndSelect(events, 2, distribution)  # type: ignore[arg-type]


def test_hardly_more_than_one_run_costs_hardly_more() -> None:
    for mean in (1 + 2**-52, 1 + 1e-13):
        best = RepeatAndSelect((PureDP(1.0),), mean, "logarithmic")
        assert epsilon(best, 1e-6, "zero_out") == pytest.approx(1.0, abs=1e-4)


def test_where_the_best_may_tell_all_nothing_is_certified() -> None:
    """A hundred runs of which each tells all with probability 0.05."""
    assert epsilon(RepeatAndSelect((Imported(1.0, 0.05),), 100, "geometric"), 1e-3, "zero_out") == math.inf


def test_the_round_off_of_every_run_comes_off_delta() -> None:
    """Its delta is that of one run times how many there are, and so is what rounding took from it."""
    run, mean = dp_sgd_event(0.01, 2.0, 20_000), 10_000
    assert epsilon(run, 1e-11, "zero_out", interval=1e-2) < math.inf
    best = RepeatAndSelect((run,), mean, "logarithmic")
    assert epsilon(best, 1e-5, "zero_out", interval=1e-2) < math.inf
    assert epsilon(best, 1e-9, "zero_out", interval=1e-2) == math.inf


@pytest.mark.parametrize("noise_multiplier", [0.05, 0.3, 2.0])
def test_deltas_at_many_epsilons_are_those_of_dp_accounting_one_by_one(noise_multiplier: float) -> None:
    loss = privacy_loss(parts_of(dp_sgd_event(0.123, noise_multiplier, 24)), "zero_out", 1e-2)
    epsilons = np.linspace(-900.0, 900.0, 361)  # e^epsilon underflows and overflows at the ends
    single = [float(loss.get_delta_for_epsilon(float(epsilon))) for epsilon in epsilons]
    assert deltas_at(loss, epsilons) == pytest.approx(single, rel=1e-6, abs=1e-14)
