"""Attack statistics: golden numbers, brute force, coverage, and a verdict that says no more than was shown."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.audit import attacks
from dpllm.audit.bounds import OneRunBound
from dpllm.audit.summary import Claim, summarise, verdict
from dpllm.audit.table import CanaryScores
from dpllm.errors import ConfigError

SIGNIFICANCE = 1e-8


def row(name, group=1, inserted=True, tuned=-10.0, base=-12.0, tuned_greedy=False, base_greedy=False):
    return CanaryScores(name, group, inserted, 4, tuned, base, tuned_greedy, base_greedy)


def make_table(rng, lift, groups=((1, 200), (4, 20)), references=300):
    """A table in which every insertion raises the secret's log-probability by about ``lift``."""
    rows = []
    for group, count in groups:
        for index in range(count):
            inserted, base = bool(rng.random() < 0.5), rng.normal(-18, 2)
            tuned = base + rng.normal(0, 0.5) + (lift * group if inserted else 0.0)
            rows.append(row(f"c{group}-{index}", group, inserted, tuned, base, tuned_greedy=tuned > -3))
    for index in range(references):
        base = rng.normal(-18, 2)
        rows.append(row(f"r{index}", 0, None, base + rng.normal(0, 0.5), base))
    return rows


# Scores.


def test_attacks_have_a_fixed_direction():
    rows = [row("a", tuned=-5.0, base=-9.0), row("b", tuned=-6.0, base=-6.0)]
    assert attacks.ATTACKS["ratio"](rows) == pytest.approx([4.0, 0.0])
    assert attacks.ATTACKS["loss"](rows) == pytest.approx([-5.0, -6.0])
    assert attacks.base_loss(rows) == pytest.approx([-9.0, -6.0])


# Exposure.


@pytest.mark.parametrize(("log_perplexity", "bits"), [(3.5, 2.0), (0, 4.0), (20, -0.08746284125034)])
def test_exposure_matches_an_independent_implementation(log_perplexity, bits):
    references = -np.arange(1.0, 17.0)
    assert attacks.exposure([-log_perplexity], references)[0] == pytest.approx(bits, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 20))
def test_exposure_is_the_rank_with_ties_against_the_canary(references, score):
    rank = 1 + sum(reference >= score for reference in references)
    assert attacks.exposure([score], references)[0] == pytest.approx(math.log2(len(references) / rank))


def test_exposure_of_nothing_learned_has_the_stated_mean(seed):
    rng = np.random.default_rng([seed, 1])
    for count in (5, 100, 1000):
        bits = np.concatenate([attacks.exposure(rng.normal(size=1), rng.normal(size=count)) for _ in range(4000)])
        assert abs(bits.mean() - attacks.exposure_null_mean(count)) < 6.5 * bits.std() / math.sqrt(len(bits))
    exact = np.mean([math.log2(5 / rank) for rank in range(1, 7)])
    assert attacks.exposure_null_mean(5) == pytest.approx(exact)
    assert attacks.exposure_null_mean(10**7) == pytest.approx(1 / math.log(2), abs=1e-5)


def test_rank_sum_p_values_are_uniform_when_nothing_was_learned(seed):
    rng = np.random.default_rng([seed, 2])
    values = [attacks.rank_sum_p_value(rng.normal(size=30), rng.normal(size=200)) for _ in range(1500)]
    assert stats.kstest(values, "uniform").pvalue > SIGNIFICANCE


def test_rank_sum_looks_in_one_direction_and_survives_degenerate_scores():
    assert attacks.rank_sum_p_value(np.arange(50) + 100.0, np.arange(50)) < 1e-9
    assert attacks.rank_sum_p_value(np.arange(50), np.arange(50) + 100.0) > 0.999
    assert attacks.rank_sum_p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert attacks.rank_sum_p_value([], [1.0]) is None


# AUC.

scores = st.lists(st.integers(0, 8).map(float), min_size=2, max_size=25)


@settings(deadline=None)
@given(scores, scores)
def test_auc_and_its_variance_equal_the_definition(positives, negatives):
    wins = np.array([[(p > n) + (p == n) / 2 for n in negatives] for p in positives])
    found = attacks.auc(positives, negatives)
    assert found.value == pytest.approx(wins.mean())
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high
    variance = wins.mean(1).var(ddof=1) / len(positives) + wins.mean(0).var(ddof=1) / len(negatives)
    if variance > 1e-12 and 0 < found.value < 1:
        width = 2 * stats.norm.ppf(0.975) * math.sqrt(variance) / (found.value * (1 - found.value))
        logit = [math.log(x / (1 - x)) for x in (found.low, found.high)]
        assert logit[1] - logit[0] == pytest.approx(width, rel=1e-6)


@settings(deadline=None)
@given(scores, scores)
def test_auc_is_never_folded(positives, negatives):
    forward, backward = attacks.auc(positives, negatives), attacks.auc(negatives, positives)
    assert forward.value + backward.value == pytest.approx(1.0)
    assert forward.low + backward.high == pytest.approx(1.0)


@pytest.mark.parametrize(("count", "shift"), [(25, 0.0), (25, 1.5), (100, 0.0), (100, 1.0), (100, 2.5)])
def test_auc_intervals_cover_the_truth(count, shift, seed, full):
    rng = np.random.default_rng([seed, 3, count, int(10 * shift)])
    truth, repeats = stats.norm.cdf(shift / math.sqrt(2)), 5000 if full else 800
    intervals = [attacks.auc(rng.normal(shift, size=count), rng.normal(size=count)) for _ in range(repeats)]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals)
    assert stats.binomtest(covered, repeats, 0.935, alternative="less").pvalue > SIGNIFICANCE
    assert stats.binomtest(covered, repeats, 0.975, alternative="greater").pvalue > SIGNIFICANCE


def test_perfect_separation_is_not_presented_as_certainty():
    found = attacks.auc(np.arange(10) + 100.0, np.arange(30))
    assert (found.value, found.high) == (1.0, 1.0)
    # Ten disjoint pairs, all in order: 0.025^(1/10), as Clopper and Pearson have it.
    assert found.low == pytest.approx(stats.binomtest(10, 10).proportion_ci(0.95).low)
    worst = attacks.auc(np.arange(30), np.arange(10) + 100.0)
    assert (worst.low, worst.value) == (0.0, 0.0)
    assert worst.high == pytest.approx(1 - found.low)


@pytest.mark.parametrize(("positives", "negatives"), [([1.0] * 20, [1.0] * 20), ([2.0], [1.0, 3.0, 4.0, 1.5])])
def test_no_variance_in_the_sample_gives_a_wide_interval(positives, negatives):
    found = attacks.auc(positives, negatives)
    assert found.high - found.low > 0.5


def test_auc_of_one_side_alone_is_not_stated():
    assert attacks.auc([], [1.0]) is None
    assert attacks.auc([1.0], []) is None


# True positive rate.


def test_tpr_counts_positives_above_all_but_one_percent_of_the_negatives():
    negatives = np.arange(200.0)
    # Two negatives may pass (199 and 198), so the threshold is 197 and a positive there does not.
    found = attacks.tpr_at_fpr([196.0, 197.0, 197.5, 300.0], negatives)
    assert found.value == 0.5
    exact = stats.binomtest(2, 4).proportion_ci(0.95)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


@settings(deadline=None)
@given(st.integers(100, 400), st.integers(0, 5))
def test_no_more_than_one_percent_of_the_negatives_pass(count, spread):
    negatives = np.random.default_rng(count).integers(0, 10 * spread + 1, size=count).astype(float)
    found = attacks.tpr_at_fpr(negatives, negatives)
    assert found.value <= 0.01 + 1e-12


def test_tpr_is_not_stated_from_too_few_negatives():
    assert attacks.tpr_at_fpr([1.0], np.zeros(99)) is None
    assert attacks.tpr_at_fpr([], np.zeros(500)) is None
    assert attacks.tpr_at_fpr([1.0], np.zeros(100)).value == 1.0


def test_extraction_counts_each_side_and_the_control():
    rows = [
        row("a", tuned_greedy=True, base_greedy=True),
        row("b", tuned_greedy=True),
        row("c"),
        row("d", inserted=False, tuned_greedy=True),
        row("e", inserted=False),
    ]
    expected = {"inserted": 3, "tuned": 2, "base": 1, "held_out": 2, "held_out_tuned": 1}
    assert attacks.extraction(rows) == expected


# Summary and verdict.

CLAIM = Claim(epsilon=4.0, delta=1e-5, unit="example")


def bound(value, ceiling=3.7, num_canaries=200):
    return OneRunBound(value, 0.05, 1e-5, (10, 100), 100, 90, num_canaries, ceiling)


@pytest.mark.parametrize(
    ("claim", "found", "num_inserted", "word"),
    [
        (CLAIM, bound(4.1, ceiling=5.0), 100, "falsified"),
        (CLAIM, bound(4.0, ceiling=5.0), 100, "consistent"),
        (CLAIM, bound(0.0), 100, "consistent"),
        (CLAIM, bound(0.0, ceiling=0.99), 100, "inconclusive"),
        (CLAIM, bound(0.0), 0, "inconclusive"),
        (CLAIM, bound(0.0), 200, "inconclusive"),
        (CLAIM, bound(0.0, ceiling=0.0, num_canaries=0), 0, "inconclusive"),
        (None, bound(3.0), 100, "no_claim"),
    ],
)
def test_the_verdict_says_no_more_than_was_shown(claim, found, num_inserted, word):
    said, reason = verdict(claim, found, num_inserted)
    assert said == word
    assert "private" not in said + reason
    assert reason.endswith(".")


def test_a_summary_has_what_reports_read_and_is_json(seed):
    report = summarise(make_table(np.random.default_rng([seed, 4]), 0.0), CLAIM, alpha=0.05, guesses=[10, 50])
    json.dumps(report, allow_nan=False)
    assert report["claim"] == {"epsilon": 4.0, "delta": 1e-5, "unit": "example"}
    assert set(report["attacks"]) == {"ratio", "loss"}
    for attack in report["attacks"].values():
        wanted = {"group", "auc", "auc_interval", "confidence", "tpr_at_1_percent_fpr", "tpr_interval"}
        assert wanted | {"positives", "negatives", "base_control_auc"} <= set(attack)
        assert attack["positives"] + attack["negatives"] == 500
    assert set(report["exposure"]) == set(report["extraction"]) == {"1", "4"}
    assert {"mean", "null_mean", "p_value", "maximum", "base_mean", "inserted"} <= set(report["exposure"]["1"])
    wanted = {"value", "alpha", "delta", "method", "guesses", "best_guesses", "correct", "num_canaries", "ceiling"}
    assert set(report["epsilon_lower_bound"]) == wanted | {"guesses_in", "best_side"}
    assert report["epsilon_lower_bound"]["num_canaries"] == 200
    assert {name: found["kind"] for name, found in report["estimates"].items()} == {
        "clopper_pearson": "heuristic",
        "gaussian": "one_run_gaussian",
    }
    assert all(found["assumes"] for found in report["estimates"].values())
    assert 0.9 < report["attacker_limits"]["auc"] < 1


def test_a_summary_finds_what_was_memorised_and_only_that(seed):
    rng = np.random.default_rng([seed, 5])
    nothing = summarise(make_table(rng, 0.0), CLAIM, alpha=0.05, guesses=[10, 50, 100])
    assert nothing["epsilon_lower_bound"]["value"] < 2
    assert nothing["exposure"]["1"]["p_value"] > SIGNIFICANCE
    much = summarise(make_table(rng, 8.0), Claim(1.0, 1e-5, "example"), alpha=0.05, guesses=[10, 50, 100])
    assert much["attacks"]["ratio"]["auc"] > 0.99
    assert 0.3 < much["attacks"]["ratio"]["base_control_auc"] < 0.7
    assert much["exposure"]["1"]["mean"] > 5 > 3 > much["exposure"]["1"]["base_mean"]
    assert much["exposure"]["1"]["p_value"] < 1e-9
    assert much["extraction"]["4"]["tuned"] > 0 == much["extraction"]["4"]["base"]
    assert much["verdict"] == "falsified"


def test_repeated_canaries_do_not_speak_about_the_claim(seed):
    rng = np.random.default_rng([seed, 6])
    report = summarise(make_table(rng, 5.0, groups=((4, 300),)), CLAIM, alpha=0.05, guesses=[10, 50])
    assert report["attacks"]["ratio"]["group"] == 4
    assert report["epsilon_lower_bound"]["num_canaries"] == 0
    assert report["verdict"] == "inconclusive"


def test_without_a_claim_the_bound_states_its_delta(seed):
    report = summarise(make_table(np.random.default_rng([seed, 7]), 3.0), None, alpha=0.05, guesses=[10, 50])
    assert (report["claim"], report["attacker_limits"], report["verdict"]) == (None, None, "no_claim")
    assert report["epsilon_lower_bound"]["delta"] == 1e-5
    assert report["epsilon_lower_bound"]["value"] > 0


def test_groups_of_which_none_or_all_were_inserted_are_summarised():
    rng = np.random.default_rng(0)
    for coin in (True, False):
        rows = [row(f"c{i}", 1, coin, rng.normal(), rng.normal()) for i in range(20)]
        rows += [row(f"r{i}", 0, None, rng.normal(), rng.normal()) for i in range(100)]
        report = summarise(rows, CLAIM, alpha=0.05, guesses=[10, 20])
        json.dumps(report, allow_nan=False)
        assert report["verdict"] == "inconclusive"
        assert (report["exposure"]["1"]["mean"] is None) == (not coin)


def test_a_table_without_references_is_refused():
    with pytest.raises(ConfigError, match="no references"):
        summarise([row("a")], CLAIM, alpha=0.05, guesses=[10])
