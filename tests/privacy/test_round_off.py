"""What floats lose is never left out of epsilon: tiny sampling rates and deltas, much noise, many steps, huge epsilons."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest

import dpllm
from dpllm.errors import ConfigError
from dpllm.privacy import accounting, events, limits, privacy_loss
from dpllm.privacy.accounting import dp_sgd_event, epsilon
from dpllm.privacy.parts import parts_of
from dpllm.privacy.renyi import rdp


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
    gaussian = events.Gaussian(1.0)
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
        reached = limits.attacker_limits_of(event, "zero_out")
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
    stated = epsilon(events.compose([events.PureDP(each)] * times), delta, "label_changed")
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
    assert epsilon(events.compose([]), 1e-4, relation, accountant) == 0.0  # of nothing
