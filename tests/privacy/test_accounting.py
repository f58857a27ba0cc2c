"""The stated epsilon is right: against closed forms, published grids, other accountants, and itself."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting, privacy_loss
from dpllm.privacy.accounting import compose, cross_check, dp_sgd_event, epsilon, epsilon_by_accountant
from dpllm.privacy.events import Gaussian, Imported, SelfComposed
from dpllm.privacy.parts import SampledSums, dp_event_of, parts_of
from dpllm.privacy.privacy_loss import Relation

RUN = dp_sgd_event(0.02, 0.8, 150)  # epsilon 2.9633 at delta 1e-5

# Gaussian mechanism with mean shift mu (sensitivity over standard deviation): exact, from the closed form.
EXACT_GAUSSIAN = [
    (1.0, 1e-5, 4.377178095681),
    (0.5, 1e-6, 2.254084650220),
    (2.0, 1e-5, 9.997256146434),
    (1.0, 1e-10, 6.547924066865),
]
# One Poisson-subsampled step (q, sigma, delta): exact, by solving for epsilon.
slow = pytest.mark.full
EXACT_ONE_STEP = [
    (0.01, 1.0, 1e-5, 0.199450447796),
    pytest.param(0.1, 0.7, 1e-6, 4.361453095189, marks=slow),
    pytest.param(0.001, 0.5, 1e-6, 1.085235709058, marks=slow),
]
# q, sigma, T, delta, PLD (dp-accounting 0.6.0), PRV and RDP (Opacus 1.6.0).
DP_SGD = [
    pytest.param(0.01, 4.0, 10000, 1e-5, 0.9470, 0.9569, 1.0355, marks=slow),
    pytest.param(256 / 60000, 1.1, 14062, 1e-5, 2.3817, 2.3917, 2.5966, marks=slow),
    (0.005, 0.8, 1000, 1e-6, 2.0041, 2.0143, 2.6265),
    pytest.param(0.08192, 3.0, 2468, 1e-5, 6.5293, 6.5396, 7.0458, marks=slow),
    (0.08192, 10.0, 875, 1e-5, 0.9028, 0.9128, 0.9877),
    (0.02, 0.8, 150, 1e-5, 2.9633, 2.9736, 3.6224),
    pytest.param(0.5, 4.0, 100, 1e-5, 5.8687, 5.8790, 6.350, marks=slow),
    pytest.param(0.01, 0.3, 1000, 1e-5, 69.816, 69.830, 79.05, marks=slow),
]


@pytest.mark.parametrize(("mu", "delta", "exact"), EXACT_GAUSSIAN)
def test_gaussian_matches_the_closed_form(mu: float, delta: float, exact: float) -> None:
    once = Gaussian(1 / mu)
    hundred = SelfComposed(100, Gaussian(10 / mu))
    for event in (once, hundred, dp_sgd_event(1.0, 1 / mu, 1)):
        assert exact - 1e-9 <= epsilon(event, delta, "add_or_remove_one") <= exact + 2e-3


@pytest.mark.parametrize(("q", "sigma", "delta", "exact"), EXACT_ONE_STEP)
def test_one_step_matches_the_exact_value(q: float, sigma: float, delta: float, exact: float) -> None:
    assert exact - 1e-9 <= epsilon(dp_sgd_event(q, sigma, 1), delta, "zero_out") <= exact + 2e-3


@pytest.mark.parametrize(("q", "sigma", "num_steps", "delta", "pld", "prv", "rdp"), DP_SGD)
def test_dp_sgd_matches_published_values(q, sigma, num_steps, delta, pld, prv, rdp):
    event = dp_sgd_event(q, sigma, num_steps)
    figure = epsilon(event, delta, "zero_out")
    assert pld - 1e-3 <= figure <= pld + 2e-3
    assert epsilon(event, delta, "zero_out", "prv") == pytest.approx(prv, abs=2e-3)
    assert figure <= epsilon(event, delta, "zero_out", "prv") <= figure + 0.03
    assert epsilon(event, delta, "zero_out", "rdp") == pytest.approx(rdp, rel=5e-3)
    assert epsilon(event, delta, "add_or_remove_one") == figure


@pytest.mark.parametrize(("runs", "pld", "rdp", "added"), [(2, 3.788, 4.460, 5.93), (10, 7.863, 8.730, 29.6)])
def test_runs_compose_for_less_than_their_sum(runs: int, pld: float, rdp: float, added: float) -> None:
    assert pld - 1e-3 <= epsilon(compose([RUN] * runs), 1e-5, "zero_out") <= pld + 2e-3
    assert epsilon(compose([RUN] * runs), 1e-5, "zero_out", "rdp") == pytest.approx(rdp, rel=1e-3)
    assert runs * epsilon(RUN, 1e-5, "zero_out") == pytest.approx(added, rel=3e-3)
    different = compose([dp_sgd_event(0.2, 2.0, 3), dp_sgd_event(0.1, 1.5, 5)])
    figure = epsilon(different, 1e-5, "zero_out")
    assert figure <= epsilon(different, 1e-5, "zero_out", "prv") <= figure + 0.03


# Several rows of a unit, each drawn and clipped on its own (q .01, sigma 1.5, T 300, delta 1e-5).
@pytest.mark.parametrize(
    ("rows", "pld"),
    [(1, 0.497), (2, 1.063), (4, 2.299), *(pytest.param(*item, marks=slow) for item in ((8, 5.076), (16, 11.65)))],
)
def test_groups_match_published_values(rows: int, pld: float) -> None:
    assert pld - 1e-3 <= epsilon(dp_sgd_event(0.01, 1.5, 300, rows), 1e-5, "zero_out") <= pld + 2e-3


@pytest.mark.parametrize(
    ("q", "sigma", "rows", "delta"),
    [pytest.param(0.3, 1.0, 2, 1e-3, marks=slow), (0.05, 2.0, 5, 1e-5), (0.5, 4.0, 20, 1e-6)],
)
def test_one_step_of_a_group_matches_its_exact_mixture(q: float, sigma: float, rows: int, delta: float) -> None:
    """delta at the stated epsilon, integrated over a grid: both directions below delta, and one of them near it."""
    eps = epsilon(dp_sgd_event(q, sigma, 1, rows), delta, "zero_out")
    x = np.linspace(-12 * sigma, rows + 12 * sigma, 400_001)
    with_them = sum(binom.pmf(j, rows, q) * norm.pdf(x, j, sigma) for j in range(rows + 1))
    without = norm.pdf(x, 0, sigma)
    sides = (with_them, without), (without, with_them)
    exact = max(np.trapezoid(np.maximum(one - math.exp(eps) * other, 0), x) for one, other in sides)
    assert delta * (1 - 1e-3) <= exact <= delta * (1 + 1e-6)


@pytest.mark.parametrize("direction", ["REMOVE", "ADD"])
@pytest.mark.parametrize("sigma", [0.02, 0.8, 200.0])
@pytest.mark.parametrize("q", [1e-9, 0.01, 0.5, 1 - 1e-12])
def test_a_sampled_step_is_that_of_dp_accounting(q: float, sigma: float, direction: str) -> None:
    """The same points, inverted all at once: each delta is theirs but for the rounding of numbers near 1."""
    theirs = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=AdjacencyType[direction])
    ours = privacy_loss._gaussian(SampledSums(q, sigma, 1, 1), removes=direction == "REMOVE")
    assert ours.connect_dots_bounds() == theirs.connect_dots_bounds()
    bounds = theirs.connect_dots_bounds()
    epsilons = np.linspace(bounds.epsilon_lower - 0.01, bounds.epsilon_upper + 0.01, 2_001)
    assert ours.get_delta_for_epsilon(epsilons) == pytest.approx(theirs.get_delta_for_epsilon(epsilons), abs=2e-15)


def test_an_imported_run_costs_what_it_says() -> None:
    assert epsilon(Imported(1.0, 1e-6), 1e-6, "zero_out") == pytest.approx(1.0, abs=2e-4)
    assert epsilon(Imported(1.0, 1e-6), 0.9e-6, "zero_out") == math.inf
    assert epsilon(Imported(1.0, 1e-6), 0.9e-6, "zero_out", "rdp") == math.inf
    assert 1.0 - 1e-9 <= epsilon(Imported(1.0, 0.0), 1e-12, "zero_out") <= 1.0 + 1e-4
    assert epsilon(Imported(0.0, 0.0), 1e-6, "zero_out") == 0.0
    twice = SelfComposed(
        2, Imported(0.0, 0.01)
    )  # of two that tell all with probability d each, one does with 1 - (1 - d)^2
    assert epsilon(twice, 0.0199 + 1e-9, "zero_out") == pytest.approx(0.0, abs=1e-6)
    assert epsilon(twice, 0.0199 - 1e-9, "zero_out") == math.inf
    both = epsilon(compose([RUN, Imported(0.5, 1e-6)]), 1e-5, "zero_out")
    assert epsilon(RUN, 1e-5, "zero_out") < both <= epsilon(RUN, 9e-6, "zero_out") + 0.5 + 1e-3
    assert both <= epsilon(compose([RUN, Imported(0.5, 1e-6)]), 1e-5, "zero_out", "rdp")


@pytest.mark.parametrize(("eps", "times"), [(0.1, 40), (1.0, 4), (0.5, 1)])
def test_imported_runs_compose_as_randomised_response(eps: float, times: int) -> None:
    """The worst (eps, 0)-DP mechanism: the delta of its k-fold composition is a binomial sum (Kairouz et al. 2015)."""
    event = SelfComposed(times, Imported(eps, 0.0))
    result = epsilon(event, 1e-3, "zero_out")
    yes = np.arange(times + 1)
    losses = (2 * yes - times) * eps
    mass = binom.pmf(yes, times, 1 / (1 + math.exp(-eps)))

    def delta(at: float) -> float:
        return float(np.sum(mass * np.maximum(0.0, -np.expm1(at - losses))))

    assert delta(result) <= 1e-3 * (1 + 1e-9)
    assert delta(result - 2e-4 * times) >= 1e-3
    assert result <= epsilon(event, 1e-3, "zero_out", "rdp")


def test_gdp_is_refused_because_it_is_optimistic() -> None:
    with pytest.raises(ConfigError, match="understates"):
        epsilon(RUN, 1e-5, "zero_out", "gdp")


@pytest.mark.parametrize(
    ("delta", "relation", "accountant", "named"),
    [
        *((delta, "zero_out", "pld", "delta") for delta in (0.0, 1.0, -1e-5, math.nan, None)),
        (1e-5, "replace_one", "pld", "replace_one"),
        (1e-5, "zero_out", "moments", "moments"),
    ],
)
def test_bad_arguments_are_refused(delta: Any, relation: Any, accountant: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        epsilon(RUN, delta, relation, accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_nothing_released_costs_nothing(accountant: str) -> None:
    for nothing in (compose([]), dp_sgd_event(0.02, 0.8, 0), dp_sgd_event(0.02, 0.8, 0, 9)):
        assert epsilon(nothing, 1e-5, "zero_out", accountant) == 0.0
        event = compose([RUN, nothing])
        assert epsilon(event, 1e-5, "zero_out", accountant) == epsilon(RUN, 1e-5, "zero_out", accountant)


def test_hardly_any_noise_is_answered_with_a_bound_and_not_with_a_crash() -> None:
    assert 20_000 < epsilon(dp_sgd_event(0.02, 0.01, 10), 1e-5, "zero_out") < 60_000
    assert epsilon(dp_sgd_event(0.02, 1e-6, 1000), 1e-5, "zero_out") == math.inf
    assert epsilon(dp_sgd_event(0.02, 0.5, 10, 1024), 1e-5, "zero_out") > 1000
    assert epsilon(dp_sgd_event(0.02, 1e-6, 10, 4), 1e-5, "zero_out") == math.inf
    assert epsilon(Gaussian(1e-5), 1e-5, "zero_out") == math.inf
    assert epsilon(SelfComposed(100, Imported(1000.0, 0.0)), 1e-5, "zero_out") == math.inf


quick = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
rates, sigmas, steps = st.floats(0.005, 0.5), st.floats(0.7, 5.0), st.integers(1, 300)
deltas = st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4])
more = st.floats(1.0, 3.0)
# Fourier transforms move epsilon by up to 2.4e-7 at delta 1e-7 (1500 draws of mechanisms that differ in their last bits).
# One step more costs at least 2.6e-5 here, and another delta is read off the same distribution: both are exact.
ROUND_OFF = 1e-6


def cost(q: float, sigma: float, num_steps: int, delta: float, rows: int = 1) -> float:
    return epsilon(dp_sgd_event(q, sigma, num_steps, rows), delta, "zero_out", interval=1e-3)


@quick
@given(rates, sigmas, steps, deltas, more)
def test_epsilon_rises_with_steps_and_sampling_and_falls_with_noise_and_delta(q, sigma, num_steps, delta, by):
    here = cost(q, sigma, num_steps, delta)
    assert cost(q, sigma, math.ceil(num_steps * by), delta) >= here
    assert cost(min(1.0, q * by), sigma, num_steps, delta) >= here - ROUND_OFF
    assert cost(q, sigma * by, num_steps, delta) <= here + ROUND_OFF
    assert cost(q, sigma, num_steps, min(0.5, delta * by)) <= here
    assert cost(q, sigma, num_steps, delta, rows=2) >= here - ROUND_OFF


@quick
@given(rates, sigmas, steps, deltas)
def test_rdp_is_never_below_pld_and_a_fine_pld_never_above_a_coarse_one(q, sigma, num_steps, delta):
    event = dp_sgd_event(q, sigma, num_steps)
    fine, coarse = (epsilon(event, delta, "zero_out", interval=interval) for interval in (5e-4, 2e-3))
    assert fine <= coarse + ROUND_OFF
    assert epsilon(event, delta, "zero_out", "rdp") >= fine - 1e-3


@quick
@given(rates, sigmas, steps, rates, sigmas, steps, deltas)
def test_composition_commutes_and_costs_at_least_each_part(q, sigma, num_steps, q2, sigma2, num_steps2, delta):
    one, two = dp_sgd_event(q, sigma, num_steps), dp_sgd_event(q2, sigma2, num_steps2, 2)
    both = epsilon(compose([one, two]), delta, "zero_out", interval=1e-3)
    assert both == epsilon(compose([two, one]), delta, "zero_out", interval=1e-3)
    parts = [epsilon(e, delta, "zero_out", interval=1e-3) for e in (one, two)]
    assert both >= max(parts) - ROUND_OFF
    assert epsilon(compose([one, two]), 2 * delta, "zero_out", interval=1e-3) <= sum(parts) + 1e-2


def test_accountants_stand_side_by_side() -> None:
    assert epsilon_by_accountant(RUN, 1e-5, "zero_out") == {
        "pld": epsilon(RUN, 1e-5, "zero_out"),
        "rdp": epsilon(RUN, 1e-5, "zero_out", "rdp"),
    }
    assert epsilon_by_accountant(RUN, 1e-5, "zero_out", prv=True).keys() == {"pld", "rdp", "prv"}
    assert epsilon_by_accountant(dp_sgd_event(0.1, 1.0, 2, 3), 1e-5, "zero_out", prv=True).keys() == {"pld"}
    assert epsilon_by_accountant(MILLION, 1e-6, "zero_out", prv=True).keys() == {"pld", "rdp"}


@pytest.mark.parametrize(("name", "off"), [("rdp", -0.002), ("prv", -0.002), ("prv", 0.06)])
def test_accountants_that_contradict_each_other_are_an_error(monkeypatch: Any, name: str, off: float) -> None:
    true = epsilon(RUN, 1e-5, "zero_out")
    monkeypatch.setattr(accounting, "rdp_epsilon", lambda *_: true + (off if name == "rdp" else 0.5))
    monkeypatch.setattr(accounting, "_prv", lambda *_: true + (off if name == "prv" else 0.01))
    with pytest.raises(Refused, match=f"contradicted by {name}"):
        epsilon_by_accountant(RUN, 1e-5, "zero_out", prv=True)


MILLION = dp_sgd_event(0.001, 1.0, 1_000_000)  # more than PRV may take
SECOND = {
    "opacus-prv": (RUN, 1e-5, 2.9736),
    "dp-accounting-rdp (prv cannot answer)": (MILLION, 1e-6, 7.1441),
    "dp-accounting-rdp (prv does not know this event)": (compose([RUN, Imported(0.5, 1e-6)]), 1e-5, None),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_accountant_that_knows_the_event_agrees_or_refuses(name: str) -> None:
    event, delta, expected = SECOND[name]
    figure = epsilon(event, delta, "zero_out")
    second = cross_check(event, delta, "zero_out", figure)
    assert (second.name, bool(second.version)) == (name, True)
    assert second.epsilon >= figure
    assert expected is None or second.epsilon == pytest.approx(expected, abs=2e-3)
    for wrong in (1.5 * figure + 5, math.inf):
        with pytest.raises(Refused):
            cross_check(event, delta, "zero_out", wrong)


def test_a_second_accountant_contradicts_what_is_hardly_wrong() -> None:
    figure = epsilon(RUN, 1e-5, "zero_out")
    for wrong in (figure + 0.02, figure - 0.05):
        with pytest.raises(Refused):
            cross_check(RUN, 1e-5, "zero_out", wrong)
    with pytest.raises(ConfigError, match="prv"):
        epsilon(MILLION, 1e-6, "zero_out", "prv")
    assert cross_check(compose([]), 1e-5, "zero_out", 0.0).epsilon == 0.0
    alone = dp_sgd_event(0.02, 1.0, 10, 4)
    assert cross_check(alone, 1e-5, "zero_out", epsilon(alone, 1e-5, "zero_out")) is None
    with pytest.raises(Refused):
        cross_check(alone, 1e-5, "zero_out", math.inf)


def test_accounting_and_calibration_never_import_torch() -> None:
    code = """
import sys
from dpllm.privacy import accounting, limits, renyi
assert not {"torch", "dp_accounting", "scipy", "numpy"} & sys.modules.keys()
sigma = accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.2, 100, "zero_out")
event = accounting.dp_sgd_event(0.2, sigma, 100)
accounting.epsilon_by_accountant(event, 1e-5, "zero_out")
accounting.epsilon(accounting.dp_sgd_event(0.2, sigma, 9, 4), 1e-5, "zero_out")
limits.attacker_limits_of(event, "zero_out")
renyi.filter_order(2.0, 1e-5)
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@pytest.mark.parametrize("rate", [0.000325, 0.02, 0.99])
def test_groups_of_every_size_have_an_epsilon(rate: float, full: bool) -> None:
    """Binomial weights that add up to more or less than 1 by rounding, or vanish, are no reason to fail."""
    sizes = [*range(2, 26), 64, 333, 1023, 1024] if full else [2, 3, 5, 9, 25, 64, 333, 1024]
    values = [epsilon(dp_sgd_event(rate, 1.0, 3, size), 1e-5, "zero_out", interval=0.01) for size in sizes]
    finite = [value for value in values if math.isfinite(value)]
    assert len(finite) >= len(values) - 2
    assert finite == values[: len(finite)]
    assert all(after > before - 0.03 - 1e-3 * before for before, after in itertools.pairwise(finite))


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [(0.02, 1.0, 1000, 1e-12), (0.005, 0.6, 3000, 1e-12), (0.25, 0.1, 10, 1e-3), (0.02, 1.0, 1000, 1e-11)],
)
def test_round_off_and_large_epsilons_are_no_contradiction(rate: float, sigma: float, steps: int, delta: float) -> None:
    event = dp_sgd_event(rate, sigma, steps)
    assert cross_check(event, delta, "zero_out", epsilon(event, delta, "zero_out"))


RELATIONS = {
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("part", [(0.01, 1.0, 500), (1.0, 4.0, 10), (0.002, 0.5, 3000)])
def test_pld_is_that_of_dp_accountings_own_accountant(part: Any, relation: Any, monkeypatch: Any) -> None:
    """Steps are composed here, so that one step is computed once for every number of them; nothing may be lost by it.

    One step of our own differs from theirs by rounding alone.
    """
    event = compose([dp_sgd_event(*part), dp_sgd_event(0.05, 3.0, 7)])
    theirs = PLDAccountant(RELATIONS[relation], 1e-3).compose(dp_event_of(parts_of(event))).get_epsilon(1e-5)
    assert epsilon(event, 1e-5, relation, "pld", interval=1e-3) == pytest.approx(theirs, rel=1e-8)

    def step(part: SampledSums, _: Relation, interval: float) -> Any:
        options = {"value_discretization_interval": interval, "sampling_prob": part.probability}
        return pld.from_gaussian_mechanism(part.noise_multiplier, **options)

    monkeypatch.setattr(privacy_loss, "_step", step)
    composed = privacy_loss.privacy_loss.__wrapped__(parts_of(event), relation, 1e-3)
    assert float(composed.get_epsilon_for_delta(1e-5)) == pytest.approx(theirs, rel=1e-12)
