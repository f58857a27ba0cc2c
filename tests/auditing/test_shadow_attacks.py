"""Attacks with shadows: their formulas, their direction, and what they may not know."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from score_tables import row

from dpllm.auditing import bounds, statistics
from dpllm.auditing.shadows import LIFT_FLOOR, ShadowScores, lira, one_canary_bound, shadow_scores


def world(rng, *, lift, shadows=8, once=300, difficulty=2.0, noise=1.0, spread=0.0):
    """A target's table and its shadows: log p = base + what training does to everybody + coin * lift + noise."""
    ids = [f"c{index:05d}" for index in range(once)]
    base_M, level_M = rng.normal(-18, 1, once), rng.normal(0, difficulty, once)
    lift_M = lift * rng.gamma(1 / spread, spread, once) if spread else np.full(once, lift)
    coins_RM = rng.random((shadows + 1, once)) < 0.5
    log_RM = base_M + level_M + coins_RM * lift_M + rng.normal(0, noise, coins_RM.shape)
    rows = [row(ids[i], 1, bool(coins_RM[0, i]), float(log_RM[0, i]), float(base_M[i])) for i in range(once)]
    return rows, ShadowScores(tuple(ids), coins_RM[1:], log_RM[1:])


def areas(rows, shadows):
    coins = np.array([row.inserted for row in rows])
    attack_scores = shadow_scores(rows, shadows)
    return {name: statistics.auc(score[coins], score[~coins]) for name, score in attack_scores.items()}


def draw_coins(rng, shape):
    coins = rng.random(shape) < 0.5
    coins[0, 0], coins[-1, -1] = True, False
    return coins


def test_lira_with_many_shadows_is_the_textbook_ratio(seed):
    rng = np.random.default_rng([seed, 1])
    shadows, lift = 4000, np.array([0.5, 1.0, 3.0])
    coins = rng.random((shadows, 3)) < 0.5
    sigma, level = 2.0, np.array([-3.0, 0.0, 9.0])
    scores = level + coins * lift + sigma * rng.normal(size=(shadows, 3))
    target = level + np.array([0.3, 2.0, 2.0])
    wanted = stats.norm.logpdf(target, level + lift, sigma) - stats.norm.logpdf(target, level, sigma)
    assert lira(target, scores, coins) == pytest.approx(wanted, abs=0.1)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 10), st.integers(2, 12), st.integers(0, 10**6), st.floats(-3, 3))
def test_liras_direction_is_fixed(shadows, candidates, draw, lift):
    """Also where the shadows of a candidate, or all of them, happen to say the opposite."""
    rng = np.random.default_rng(draw)
    coins = rng.random((shadows, candidates)) < 0.5
    scores = rng.normal(size=coins.shape) + lift * coins
    target = rng.normal(size=candidates)
    low, high = lira(target, scores, coins), lira(target + 1.0, scores, coins)
    assert np.isfinite(low).all()
    assert (high > low).all()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(2, 80), st.integers(0, 10**6))
def test_lira_does_not_see_how_likely_a_text_is_for_every_model(shadows, draw):
    rng = np.random.default_rng(draw)
    coins = draw_coins(rng, (shadows, 6))
    coins[0, 1], coins[1, 1] = True, False  # one candidate has shadows of both kinds
    scores, target = rng.normal(size=coins.shape), rng.normal(size=6)
    hardness = rng.normal(0, 30, 6)
    assert lira(target + hardness, scores + hardness, coins) == pytest.approx(lira(target, scores, coins), abs=1e-7)


def test_lifts_are_told_apart_only_as_far_as_the_shadows_can():
    """How much a nat counts for a candidate is its lift over the variance."""
    rng = np.random.default_rng(2)
    for shadows, alike in ((4, True), (60, False)):
        lift = np.full(400, 2.0) if alike else rng.uniform(0.5, 6, 400)
        coins = draw_coins(rng, (shadows, 400))
        scores = rng.normal(size=coins.shape) + lift * coins
        weight = lira(np.ones(400), scores, coins) - lira(np.zeros(400), scores, coins)
        if alike:
            assert weight.std() < 0.2 * weight.mean()  # their own differences of means would give .5
        else:
            assert weight == pytest.approx(lift, abs=1.2)


def test_candidates_without_shadows_of_a_kind_are_scored_on_the_scale_of_the_others():
    rng = np.random.default_rng(3)
    coins = draw_coins(rng, (6, 400))
    coins[:, 0], coins[:, 1] = True, False
    scores = rng.normal(size=coins.shape) + 2.0 * coins
    # Both are one standard deviation above the middle between in and out, and so worth lift / sigma = 2 nats.
    scores[:, 0], scores[:, 1] = 2.0, 0.0
    score_M = lira(np.full(400, 2.0), scores, coins)
    assert score_M[:2] == pytest.approx([2.0, 2.0], abs=0.25)


def test_with_shadows_of_one_kind_only_the_score_is_a_distance_from_them():
    rng = np.random.default_rng(4)
    shadows, target = rng.normal(5, 3, (40, 500)), rng.normal(5, 3, 500)
    for coins in (np.zeros((40, 500), bool), np.ones((40, 500), bool)):
        score_M = lira(target, shadows, coins)
        assert score_M == pytest.approx((target - shadows.mean(0)) / 3, abs=0.2)


def test_shadows_that_all_agree_give_finite_scores():
    coins = np.array([[True, False], [False, True], [True, False], [False, True]])
    for shadows in (coins * 1.0, np.zeros((4, 2))):
        score_M = lira([1.0, 0.0], shadows, coins)
        assert np.isfinite(score_M).all()
        assert score_M[0] > score_M[1]
    assert LIFT_FLOOR > 0


def test_shadows_beat_the_ratio_where_canaries_differ_in_difficulty(seed):
    rng = np.random.default_rng([seed, 6])
    for shadows, gain in ((4, 0.05), (16, 0.1)):
        result = [areas(*world(rng, lift=1.0, shadows=shadows, spread=0.3)) for _ in range(12)]
        mean = {name: np.mean([item[name].value for item in result]) for name in result[0]}
        assert mean["lira"] > mean["ratio"] + gain, mean
    assert mean["lira"] > 0.72  # of .76, what somebody has who knows every level and lift


def test_no_attack_reads_the_targets_coins_or_the_order_of_rows():
    rng = np.random.default_rng(9)
    rows, shadows = world(rng, lift=2.0)
    attack_scores = shadow_scores(rows, shadows)
    shuffled = rng.permutation([row.inserted for row in rows])
    others = [replace(row, inserted=bool(coin)) for row, coin in zip(rows, shuffled, strict=True)]
    again = shadow_scores(others, shadows)
    turned = shadow_scores(rows[::-1], shadows)
    for name, scores in attack_scores.items():
        assert scores.tobytes() == again[name].tobytes(), name
        assert turned[name] == pytest.approx(scores[::-1], abs=1e-9), name


def one_canary(coins, scores):
    """A target and its shadows about a single canary."""
    target = row("c00000", 1, bool(coins[0]), float(scores[0]), -9.0)
    column = (np.array(coins[1:], bool)[:, None], np.array(scores[1:], float)[:, None])
    return [target], ShadowScores(("c00000",), *column)


def test_the_bound_counts_target_and_shadows_and_is_that_of_many_runs():
    coins = [True, False] * 40
    scores = [1.0 * coin for coin in coins]
    bound = one_canary_bound(*one_canary(coins, scores), delta=1e-5, alpha=0.05)
    sides = ([score for score, coin in zip(scores, coins, strict=True) if coin is side] for side in (True, False))
    wanted = bounds.many_runs(*sides, delta=1e-5, alpha=0.05)
    assert bound["value"] == wanted.value > 1.0
    assert bound["value"] == pytest.approx(bound["ceiling"])
    assert (bound["runs_with"], bound["runs_without"]) == (40, 40)
    assert "independent runs of one mechanism" in bound["assumes"]
    json.dumps(bound, allow_nan=False)


def test_the_canary_of_the_bound_is_fixed_in_advance():
    rows, shadows = world(np.random.default_rng(12), lift=3.0, shadows=12)
    bound = one_canary_bound(rows[::-1], shadows, delta=1e-5, alpha=0.05)
    assert bound["canary_id"] == "c00000"


def test_too_few_runs_of_a_kind_show_nothing():
    for coins in ([True, True, True, False], [False, False, False, False]):
        bound = one_canary_bound(*one_canary(coins, np.arange(4.0)), delta=1e-5, alpha=0.05)
        assert (bound["value"], bound["ceiling"]) == (None, None)
        assert "two runs" in bound["reason"]
    assert one_canary_bound([], one_canary([True], [0.0])[1], delta=1e-5, alpha=0.05)["reason"]
