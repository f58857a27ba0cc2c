"""What a release promises: the distribution of its mechanism's theorem over neighbours, OpenDP's epsilon, a 95% error.

A label is flipped with exactly the probability that its epsilon allows.

OpenDP takes its noise from the operating system, and no seed can fix it: each statistical test has a false alarm probability
of at most 1e-8 (``ALARM``), whatever is drawn.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opendp.accuracy import discrete_laplacian_scale_to_accuracy as accuracy
from opendp.measurements import make_private_quantile
from opendp.measures import max_divergence
from scipy import stats

from dpllm.errors import ConfigError
from dpllm.privacy import accounting, releases
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import Gaussian, PureDP
from dpllm.privacy.releases import flip_probability, flipped, measurement
from dpllm.releases.asked import OTHER, Statistic

ALARM = 1e-8
DRAWS, COINS = 4000, 40_000
UNITS = Statistic("units")
SHARES = Statistic("shares", "label", ("yes", "no"))
MEDIAN = Statistic("quantiles", "age", (), (10.0, 20.0, 30.0, 40.0), 0.5)
TAIL = Statistic("lengths", "", (), (16.0, 32.0, 64.0), 0.9)
ALL = (UNITS, SHARES, MEDIAN, TAIL)
MADE = [(one, measurement(one, 1, 1.0)) for one in (MEDIAN, TAIL)]


def fits(result: Counter[Any], expected: dict[Any, float]) -> bool:
    """Whether draws are from a distribution, by a chi-square test; rare values are counted together."""
    many = sum(result.values())
    often = {value for value, chance in expected.items() if chance * many >= 20}
    seen = [result[value] for value in sorted(often)]
    chances = [expected[value] for value in sorted(often)]
    rest = 1 - sum(chances)
    if rest * many >= 5:
        seen, chances = [*seen, many - sum(seen)], [*chances, rest]
    total = sum(chances)
    return bool(stats.chisquare(seen, [sum(seen) * one / total for one in chances]).pvalue > ALARM)


def laplace(epsilon: float, rows: int, reach: int = 400) -> dict[int, float]:
    """The theorem of discrete Laplace noise: P(x) is in proportion to exp(-|x| epsilon / rows)."""
    ratio = math.exp(-epsilon / rows)
    return {x: (1 - ratio) / (1 + ratio) * ratio ** abs(x) for x in range(-reach, reach + 1)}


def flips(errors: list[float], scale: float) -> list[float]:
    """The theorem of permute-and-flip: in random order, each candidate is taken with probability exp(-(its excess) / scale)."""
    taken = [math.exp(-(error - min(errors)) / scale) for error in errors]
    chances = [0.0] * len(errors)
    for order in itertools.permutations(range(len(errors))):
        before = 1.0
        for item in order:
            chances[item] += before * taken[item]
            before *= 1 - taken[item]
    return [chance / math.factorial(len(errors)) for chance in chances]


def rank_errors(asked: Statistic, values: list[float]) -> list[float]:
    """How many rows the rank of each candidate is off."""
    alpha = asked.quantile
    return [
        abs((1 - alpha) * sum(value < number for value in values) - alpha * sum(value > number for value in values))
        for number in asked.numbers
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("asked", ALL, ids=lambda one: one.name)
def test_the_event_is_the_epsilon_of_opendp_s_map(asked: Statistic, rows: int) -> None:
    """At most what was asked, hardly less, and the very number that the map gives for a unit's rows."""
    made = measurement(asked, rows, 0.25)
    assert made.event == PureDP(made.measure.map(1 if asked.kind == "units" else rows))
    assert 0.2499 < made.event.epsilon <= 0.25
    assert epsilon(made.event, 1e-9, "zero_out") == pytest.approx(0.25, abs=2e-4)
    if asked.kind != "units":
        assert made.measure.map(2 * rows) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("cost", [1e-3, 0.3, 40.0])
def test_the_error_that_is_told_is_that_of_opendp_s_own_scale(rows: int, cost: float) -> None:
    """Whoever verifies a card has no OpenDP: mechanism, epsilon and what is declared give it."""
    assert measurement(SHARES, rows, cost).error == pytest.approx(accuracy(rows / cost, 0.05), rel=1e-9)
    assert measurement(UNITS, rows, cost).error == pytest.approx(accuracy(1 / cost, 0.05), rel=1e-9)
    for quantile in (0.5, 0.9, 1 / 3, 0.001, 0.29):
        asked = Statistic("quantiles", "age", (), MEDIAN.numbers, quantile)
        made = measurement(asked, rows, cost)
        scale = made.error / math.log(len(asked.numbers) / 0.05)
        spaces = made.measure.input_domain, made.measure.input_metric
        again = make_private_quantile(*spaces, max_divergence(), list(asked.numbers), quantile, scale * (1 + 1e-9))
        assert made.event.epsilon == pytest.approx(again.map(rows), rel=1e-8)


@pytest.mark.parametrize("values", [["yes"] * 5 + ["no"] * 2, ["yes"] * 3 + ["no"] * 2, ["yes"] * 5 + ["what"] * 2])
def test_counts_have_discrete_laplace_noise(values: list[str]) -> None:
    """Of every count, over neighbours at a distance of two rows, whose likelihoods then differ by at most e^epsilon."""
    made, exact = measurement(SHARES, 2, 0.5), Counter(value if value in SHARES.values else OTHER for value in values)
    drawn = [made.release(values) for _ in range(DRAWS)]
    assert set(drawn[0]) == {"yes", "no", OTHER}
    for name in drawn[0]:
        assert fits(Counter(item[name] - exact[name] for item in drawn), laplace(0.5, 2)), name
    assert any(item[name] < 0 for item in drawn for name in item), "published as drawn"


def test_the_number_of_units_has_discrete_laplace_noise_for_one_unit() -> None:
    made = measurement(UNITS, 7, 0.5)
    for many in (10, 11):
        drawn = Counter(made.release([""] * many)["units"] - many for _ in range(DRAWS))
        assert fits(drawn, laplace(0.5, 1))


@pytest.mark.parametrize("asked", [MEDIAN, TAIL], ids=lambda one: one.name)
@pytest.mark.parametrize("values", [[12.0] * 3 + [35.0] * 4, [12.0] * 3 + [35.0] * 3, [15.0, 18.0, 33.0, 70.0]])
def test_quantiles_are_drawn_by_permute_and_flip(asked: Statistic, values: list[float]) -> None:
    made = measurement(asked, 1, 1.0)
    scale = made.error / math.log(len(asked.numbers) / 0.05)
    chances = flips(rank_errors(asked, values), scale)
    drawn = Counter(float(made.release(values)[f"{asked.quantile:g}"]) for _ in range(DRAWS))
    assert fits(drawn, dict(zip(asked.numbers, chances, strict=True)))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.sampled_from([5.0, 10.0, 15.0, 20.0, 25.0, 45.0]), max_size=8), st.sampled_from([5.0, 20.0, 33.0]))
def test_quantiles_keep_their_epsilon_by_the_theorem(values: list[float], added: float) -> None:
    """OpenDP's map against the exact probabilities of permute-and-flip, over neighbours."""
    for asked, made in MADE:
        scale = made.error / math.log(len(asked.numbers) / 0.05)
        one, other = (flips(rank_errors(asked, data), scale) for data in (values, [*values, added]))
        assert max(abs(math.log(p / q)) for p, q in zip(one, other, strict=True)) <= made.event.epsilon + 1e-9


@pytest.mark.parametrize("asked", ALL, ids=lambda one: one.name)
def test_releases_err_by_more_than_stated_at_most_once_in_twenty(asked: Statistic) -> None:
    made, rows, many = measurement(asked, 1, 1.0), 50, 2000
    exact: list[Any] = ["yes"] * rows if asked.kind in ("units", "shares") else [25.0] * rows
    exact = [15.0, 15.0, 25.0, 35.0] if asked.quantile else exact  # candidates hardly worse than the best one
    errors = rank_errors(asked, exact) if asked.quantile else []
    best = min(errors, default=0.0)
    missed = 0
    for _ in range(many):
        result = made.release(exact)
        if asked.quantile:
            chosen = asked.numbers.index(next(iter(result.values())))
            missed += errors[chosen] - best > made.error
        else:
            missed += abs(next(iter(result.values())) - rows) > made.error
    assert missed <= stats.binom.ppf(1 - ALARM, many, 0.05)


def test_without_opendp_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.mod", None)
    with pytest.raises(ConfigError, match=r"pip install opendp"):
        measurement(UNITS, 1, 1.0)


def test_only_declared_text_reaches_opendp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half a character, nor a zero, at which a library of C would stumble."""
    passed_on: list[str] = []
    monkeypatch.setattr(releases, "draw", lambda _, values: passed_on.extend(values) or [1, 0, 4])
    counts = measurement(SHARES, 1, 1.0).release(["yes", "\0", "\ud800", "", "private"])
    assert passed_on == ["yes", *[OTHER] * 4]
    assert counts == {"yes": 1, "no": 0, OTHER: 4}


@pytest.mark.parametrize("cost", [1e-320, 1e300])
def test_an_epsilon_for_which_there_is_no_mechanism_is_one_line(cost: float) -> None:
    with pytest.raises(ConfigError, match="OpenDP has no mechanism of epsilon"):
        measurement(UNITS, 1, cost)


# --- labels ----------------------------------------------------------------------------------------------------------


def as_often_as_epsilon_says(epsilon: float) -> None:
    """The number of flips is binomial with q = 1 / (1 + e^epsilon), to the confidence of so many coins."""
    below = random.Random(0).randrange
    flips = sum(flipped(epsilon, below) for _ in range(COINS))
    assert stats.binomtest(flips, COINS, 1 / (1 + math.exp(epsilon))).pvalue > ALARM


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_labels_flip_as_often_as_their_epsilon_says(epsilon: float) -> None:
    as_often_as_epsilon_says(epsilon)
    assert flip_probability(epsilon) == pytest.approx(1 / (1 + math.exp(epsilon)), rel=1e-15)


def test_two_labels_flip_independently() -> None:
    below = random.Random(5).randrange
    both = sum(flipped(1.0, below) + flipped(1.0, below) == 2 for _ in range(10_000))
    assert stats.binomtest(both, 10_000, flip_probability(1.0) ** 2).pvalue > ALARM


def test_the_coin_computes_with_the_very_number_that_is_charged() -> None:
    """A fair coin, then an exact one with probability e^-epsilon: no float is compared with a random number."""
    assert not flipped(1.0, lambda _: 0)  # the fair coin keeps
    said, asked, rest = iter([1]), list[int](), random.Random(3).randrange

    def tell(most: int) -> int:
        asked.append(most)
        return next(said, None) or rest(most)

    flipped(0.7, tell)
    assert asked[:2] == [2, Fraction(0.7).denominator]


BROKEN_COINS = {
    "epsilon of another": lambda patch: patch.setattr(releases, "Fraction", lambda epsilon: Fraction(epsilon) / 2),
    "a fair coin": lambda patch: patch.setattr(releases, "bernoulli_exp", lambda gamma, below: below(2) == 1),
    "never": lambda patch: patch.setattr(releases, "bernoulli_exp", lambda gamma, below: False),
}


@pytest.mark.parametrize("name", BROKEN_COINS)
def test_a_broken_coin_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN_COINS[name](monkeypatch)
    with pytest.raises(AssertionError):
        as_often_as_epsilon_says(2.0)


def test_labels_are_accounted_by_known_epsilons_alone() -> None:
    """k labels of one annotator add up; a clipped sum, which a changed label moves by 2 C, has no figure under this relation."""
    together = accounting.compose([PureDP(1.0), PureDP(1.0)])
    assert epsilon(together, 1e-9, "label_changed") == pytest.approx(2.0, abs=1e-3)
    with pytest.raises(ConfigError, match="2 C"):
        epsilon(Gaussian(1.0), 1e-5, "label_changed")
