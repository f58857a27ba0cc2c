"""Banded noise as numbers: the strategy is the best one and moves no unit by more than C, and the event counts every round."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import dp_accounting
import numpy as np
import pytest
import tiny_models as tm
from dp_accounting.pld import PLDAccountant
from scipy.optimize import minimize

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting, banded, events, renyi
from dpllm.privacy.plan import Plan
from dpllm.recipe.config import RunConfig
from dpllm.run.promise import plan_of

UNITS = 1200


def recipe(**sections: dict[str, Any]) -> RunConfig:
    privacy = {"epsilon": 4.0, "noise": "banded", "bands": 4, **sections.pop("privacy", {})}
    train = {"batch_size": 60, "steps": 30, **sections.pop("train", {})}
    return tm.recipe(privacy=privacy, train=train, **sections)


def plan(**sections: dict[str, Any]) -> Plan:
    return plan_of(recipe(**sections), UNITS)


WARM = banded.LearningRate(warmup=0.05)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (20, 16), (150, 6)])
def test_a_list_for_any_schedule_is_told_from_others(shape: str, steps: int, bands: int) -> None:
    for warmup in (0.0, 0.05, 0.3, 0.6, 0.99):
        c = banded._strategy(banded.LearningRate(shape=shape, warmup=warmup), steps, bands)
        assert banded.near_best(c, steps)
        shorter, signs = [item * 0.999 for item in c], [item * (-1) ** lag for lag, item in enumerate(c)]
        others = [c[::-1], (1.0, *[0.0] * (bands - 1)), (c[1], c[0], *c[2:]), shorter, signs]
        assert not any(banded.near_best(item, steps) for item in others)


def toeplitz(coefficients: Any, num_steps: int) -> banded.Floats:
    c_TT = np.zeros((num_steps, num_steps))
    for lag, value in enumerate(list(coefficients)[:num_steps]):
        c_TT += np.diag(np.full(num_steps - lag, value), -lag)
    return c_TT


def dense_error(coefficients: Any, rate_T: banded.Floats) -> float:
    """||A C^-1||_F^2 ||c||^2 from dense matrices."""
    steps = len(rate_T)
    a_TT = np.tril(np.ones((steps, steps))) * rate_T
    return float(np.sum((a_TT @ np.linalg.inv(toeplitz(coefficients, steps))) ** 2) * np.sum(np.square(coefficients)))


@pytest.mark.parametrize(
    ("num_steps", "bands", "shape"), [(6, 2, "linear"), (16, 5, "cosine"), (16, 5, "constant"), (12, 12, "linear")]
)
def test_the_strategy_is_the_best_one(num_steps: int, bands: int, shape: str) -> None:
    train = banded.LearningRate(shape=shape, warmup=0.2)
    rate_T = banded.rates(train, num_steps)
    result = dense_error(banded.strategy(train, num_steps, bands), rate_T)
    starts = np.random.default_rng(7).uniform(0, 0.6, (4, bands - 1))
    method, options = ("Nelder-Mead", {"xatol": 1e-10, "fatol": 1e-14}) if bands < 4 else ("BFGS", {"gtol": 1e-7})
    options["maxiter"] = 20_000

    def error(rest: banded.Floats) -> float:
        return math.log(dense_error([1.0, *rest], rate_T))

    others = [minimize(error, start, method=method, options=options).fun for start in starts]
    assert abs(result / math.exp(min(others)) - 1) < 1e-6


def sensitivity(c_TT: banded.Floats, patterns: list[tuple[int, ...]]) -> float:
    """The furthest that a unit of norm 1 in each of its steps moves C G, over all patterns and all signs of what it adds."""
    most = 0.0
    for steps in patterns:
        columns_TK = c_TT[:, list(steps)]
        for signs in itertools.product((1.0, -1.0), repeat=len(steps)):
            most = max(most, float(np.linalg.norm(columns_TK @ np.array(signs))))
    return most


def patterns(num_steps: int, apart: int) -> list[tuple[int, ...]]:
    """All choices of up to five steps that are at least so far apart."""
    whole = itertools.chain.from_iterable(itertools.combinations(range(num_steps), n) for n in range(1, 6))
    return [item for item in whole if all(b - a >= apart for a, b in itertools.pairwise(item))]


@pytest.mark.parametrize(("num_steps", "bands"), [(8, 2), (9, 3), (10, 4), (7, 7)])
def test_no_pattern_of_steps_moves_a_sum_by_more_than_one(num_steps: int, bands: int) -> None:
    """Columns of steps that are b apart share no row, so that each round is one Gaussian of sensitivity 1."""
    c_TT = toeplitz(banded.strategy(WARM, num_steps, bands), num_steps)
    for steps in patterns(num_steps, bands):
        overlap_KK = np.abs(c_TT[:, list(steps)]).T @ np.abs(c_TT[:, list(steps)])
        assert np.count_nonzero(overlap_KK - np.diag(np.diag(overlap_KK))) == 0
        assert np.diag(overlap_KK).max() <= 1
        assert len(steps) <= -(-num_steps // bands)
    assert sensitivity(c_TT, patterns(num_steps, bands)) <= math.sqrt(-(-num_steps // bands)) * (1 + 1e-12)


@pytest.mark.parametrize("lost", [0, 1, 5])
@pytest.mark.parametrize("first", [1, 4])
def test_a_resume_costs_no_further_round(first: int, lost: int) -> None:
    """Two attempts, the second with empty buffers after steps that were charged and lost: C is block diagonal."""
    bands, num_steps = 3, 9
    charged = [*range(first), *range(first + lost, num_steps + lost)]
    coefficients = banded.strategy(WARM, num_steps, bands)
    c_TT = toeplitz(coefficients, num_steps)
    c_TT[first:, :first] = 0
    for group in range(bands):
        steps = [place for place, count in enumerate(charged) if count % bands == group]
        for i, j in itertools.combinations(steps, 2):
            assert not np.any(c_TT[:, i] * c_TT[:, j])
        assert len(steps) <= -(-(charged[-1] + 1) // bands)
    assert np.linalg.norm(c_TT, axis=0).max() <= 1


def test_mutants_of_the_strategy_and_of_the_groups_are_seen() -> None:
    good = banded.strategy(WARM, 9, 3)
    assert banded.admissible(good)
    assert not banded.admissible([*good[:2], good[2] * (1 + 1e-9)])  # a column longer than 1
    c_TT = toeplitz(good, 9)
    # b - 1 groups: steps two apart share a row, and move the sum further than two rounds would.
    fewer = [item for item in patterns(9, 2) if len(item) == 2]
    assert sensitivity(c_TT, fewer) > math.sqrt(2) * (1 + 1e-3)
    # A unit in two groups takes part in neighbouring steps.
    assert sensitivity(c_TT, [(0, 1)]) > math.sqrt(2) * (1 + 1e-3)
    # Buffers replayed after a resume: noise of the first attempt is taken back where it was not added, so whitening fails.
    fresh_TP = np.random.default_rng(3).standard_normal((6, 4000))
    replayed_TP = np.zeros_like(fresh_TP)
    for t in range(6):
        past_TP = replayed_TP[:t] if t < 3 else np.concatenate([replayed_TP[1:3], replayed_TP[3:t]])
        back_P = sum(weight * past_TP[-lag] for lag, weight in enumerate(good[1:], 1) if lag <= len(past_TP))
        replayed_TP[t] = (fresh_TP[t] - back_P) / good[0]
    second_TP = banded.whiten(good, replayed_TP[3:])
    assert abs(np.var(second_TP[0]) - 1) > 0.1


def test_columns_are_at_most_one_in_exact_arithmetic() -> None:
    for bands in (1, 2, 3, 7, 16, 48):
        for steps in (48, 300):
            result = banded.strategy(WARM, steps, bands)
            assert len(result) == bands
            assert 1 - 1e-12 < sum(Fraction(item) ** 2 for item in result) <= 1
    assert not banded.admissible((0.0, 0.5))
    assert not banded.admissible((math.nan,))


@pytest.mark.parametrize(("epsilon", "bands", "ratio"), [(3.0, 3, 0.73), (8.0, 16, 0.526)])
def test_the_gain_is_the_one_that_was_computed_elsewhere(epsilon: float, bands: int, ratio: float) -> None:
    """The last prefix sum of 80 steps of our E2E recipe, beside amplified DP-SGD of the same epsilon."""
    size, batch, steps = 42_061, 768, 80

    def sigma(b: int) -> float:
        rounds = -(-steps // b)
        return accounting.calibrate_noise_multiplier(epsilon, 1e-5, b * batch / size, rounds, "zero_out", rough=True)

    train = banded.LearningRate(shape="constant", warmup=0.0)
    result = banded.effect(banded.strategy(train, steps, bands), np.ones(steps), sigma(bands), sigma(1))
    assert result.last_iterate == pytest.approx(ratio, abs=0.02 if bands == 3 else 0.01)
    assert result.one_step > 2


def test_the_event_costs_ceil_t_over_b_rounds_at_b_times_the_rate() -> None:
    for steps, rounds in ((29, 8), (30, 8), (32, 8), (33, 9)):
        made = plan(train={"steps": steps})
        account = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, accounting.FINE_INTERVAL)
        one = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(made.noise_multiplier))
        account.compose(dp_accounting.SelfComposedDpEvent(one, rounds))
        assert made.epsilon == pytest.approx(account.get_epsilon(made.delta), rel=1e-9)
        assert made.epsilon <= 4.0
        assert events.count_releases(made.event) == steps
        assert accounting.accountants(made.event) == {"pld", "rdp", "prv"}


def test_fewer_steps_never_cost_more_than_is_stated() -> None:
    made = plan()
    costs = [accounting.epsilon(made.event_after(n), made.delta, "zero_out") for n in range(31)]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert costs[30] == made.epsilon
    assert costs[1] == costs[4] < costs[5]


def test_attempts_that_were_reserved_apart_cost_at_least_the_whole() -> None:
    made = plan()
    apart = accounting.epsilon(events.compose([made.event_after(17), made.event_after(13)]), made.delta, "zero_out")
    assert apart >= made.epsilon


def test_one_band_is_plain_dp_sgd() -> None:
    plain = plan(privacy={"noise": "independent", "bands": "auto"})
    assert plan(privacy={"bands": 1}) == plain
    assert plain.coefficients == ()


def test_auto_takes_the_least_noise_and_one_band_where_it_gains_nothing() -> None:
    strong, weak = ({"privacy": {"bands": "auto", "epsilon": epsilon}} for epsilon in (8.0, 0.3))
    made = plan(**strong)
    rate_T = banded.rates(WARM, 30)
    alone = plan(privacy={"noise": "independent", "bands": "auto", "epsilon": 8.0}).noise_multiplier

    def left(of: Plan) -> float:
        return banded.effect(of.coefficients or (1.0,), rate_T, of.noise_multiplier, alone).last_iterate

    each = {bands: left(plan(privacy={"bands": bands, "epsilon": 8.0})) for bands in (2, 8, 16)}
    assert made.bands > 1
    assert left(made) <= min(each.values()) * 1.01
    assert plan(**weak, train={"steps": 400}).coefficients == ()


def test_noise_rises_to_fit_what_a_filter_has_left() -> None:
    made = plan()
    fit = renyi.Fit(order=4.0, allowance=0.9 * renyi.rdp(made.event, 4.0))
    fitted = plan_of(recipe(), UNITS, fit=fit)
    assert fitted.noise_multiplier > made.noise_multiplier
    assert renyi.rdp(fitted.event, 4.0) <= fit.allowance
    assert fitted.coefficients == made.coefficients


def test_a_schedule_of_any_length_has_coefficients() -> None:
    result = banded.strategy(WARM, 5000, 4)
    assert banded.admissible(result)
    assert banded.effect(result, banded.rates(WARM, 5000), 1.0, 1.0).last_iterate < 1


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"privacy": {"bands": 21}}, "privacy.bands 21 splits 1200 units"),
        ({"privacy": {"bands": 16}, "train": {"steps": 15}}, "more than the run's 15 steps"),
        ({"data": {"unit": "person", "max_examples_per_unit": 2, "sampling": "example"}}, "data.sampling: example"),
        ({"privacy": {"bands": 600}, "train": {"batch_size": 1, "steps": 700}}, f"bands to {banded.MOST_BANDS}"),
    ],
)
def test_what_it_is_not_accounted_for_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        plan(**sections)


@pytest.mark.parametrize("privacy", [{"noise": "independent", "bands": 4}, {"bands": 0}, {"bands": "many"}], ids=str)
def test_a_recipe_that_contradicts_itself_is_refused(privacy: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"privacy\.bands"):
        recipe(privacy=privacy)


def test_coefficients_are_those_of_before_whatever_the_rate_is() -> None:
    """To the last bit with the same numpy and scipy: the search stands in plan.json of finished runs."""
    rate = banded.LearningRate(0.3, "linear", 0.1)
    result = banded.strategy(rate, 38, 4)
    assert result == banded.strategy(banded.LearningRate(1e-5, "linear", 0.1), 38, 4)
    before = (0.7171054053011602, 0.47267975299455106, 0.3919318804647438, 0.32973184540204553)
    assert result == pytest.approx(before, abs=1e-9)


def test_a_noise_multiplier_of_the_recipe_is_judged_with_its_bands() -> None:
    needed = plan().noise_multiplier
    assert plan(privacy={"noise_multiplier": needed}).epsilon <= 4.0
    with pytest.raises(Refused, match="above the target"):
        plan(privacy={"noise_multiplier": needed * 0.9})


@pytest.mark.parametrize("privacy", [{"noise_multiplier": 3.0}, {"noise_multiplier": 0.3, "epsilon": 1e6}])
def test_auto_goes_with_noise_that_the_recipe_sets(privacy: dict[str, float]) -> None:
    """Bands are chosen for the target; where no noise is needed for it, there is nothing to gain."""
    made = plan(privacy={"bands": "auto", **privacy})
    assert (made.bands > 1) == ("epsilon" not in privacy)
    assert made.noise_multiplier == privacy["noise_multiplier"]
    assert made.epsilon <= made.target_epsilon


def test_auto_for_a_target_that_protects_nobody_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="lower epsilon"):
        plan(privacy={"bands": "auto", "epsilon": 1e6})


def test_a_plan_of_a_run_that_goes_on_keeps_its_coefficients() -> None:
    first = plan()
    assert plan_of(recipe(), UNITS, coefficients=first.coefficients).event == first.event
