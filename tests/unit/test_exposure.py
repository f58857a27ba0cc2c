"""Exposure by a fitted tail: right where it extrapolates, silent where it does not fit, 1.443 bits where nothing is."""

from __future__ import annotations

import json
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.audit import attacks, skew_normal
from dpllm.audit.bounds import GroupClaim, group_claim
from dpllm.audit.exposure import (
    expected_maximum,
    exposure_limit,
    largest_exposure,
    mean_exposure,
    summary,
    tail_exposure,
)
from dpllm.audit.skew_normal import fit_tail, log_tail
from dpllm.audit.table import CanaryScores
from dpllm.audit.verdict import Claim

LN2 = math.log(2)
DRAWS = {
    "skewed right": lambda rng, n: stats.skewnorm.rvs(3, size=n, random_state=rng),
    "skewed left": lambda rng, n: stats.skewnorm.rvs(-4, loc=-60, scale=9, size=n, random_state=rng),
    "normal": lambda rng, n: rng.normal(-40, 5, n),
    "sum of 12 losses": lambda rng, n: -rng.gamma(0.7, 2, (n, 12)).sum(axis=1),
}


def bits(scores, references, log2_secrets=None):
    return tail_exposure(scores, references, log2_secrets=log2_secrets, fit=fit_tail(references))


# The tail.


@pytest.mark.parametrize("shape", [-10.0, -3.0, 0.0, 0.5, 8.0])
def test_the_tail_is_the_integral_of_the_density_as_far_out_as_one_looks(shape):
    for score in (-1.0, 0.9, 2.5, 9.0, 20.0):
        with mpmath.workdps(25):
            places = [score, *(score + step for step in (0.05, 0.2, 0.5, 1, 2, 5, 20))]
            area = mpmath.quad(lambda t: 2 * mpmath.npdf(t) * mpmath.ncdf(shape * t), places)
            truth = float(mpmath.log(area))
        assert log_tail([score], shape)[0] == pytest.approx(truth, rel=1e-7, abs=1e-12)
        assert log_tail([5 * score - 3], shape, -3.0, 5.0)[0] == pytest.approx(truth, rel=1e-7, abs=1e-12)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.floats(-10, 10), st.lists(st.floats(-5, 60), min_size=2, max_size=30))
def test_a_higher_score_is_never_less_exposed(shape, scores):
    found = log_tail(np.sort(scores), shape)
    assert np.isfinite(found).all()
    assert (np.diff(found) <= 1e-9).all()
    assert (found <= 1e-12).all()


def test_a_fit_finds_the_distribution_and_does_not_depend_on_units():
    references = stats.skewnorm.rvs(3, loc=-50, scale=8, size=4000, random_state=np.random.default_rng(0))
    found = fit_tail(references)
    assert found.fault is None
    assert (found.shape, found.location, found.scale) == pytest.approx((3, -50, 8), rel=0.1)
    scores = references.mean() + references.std() * np.array([1.0, 4.0, 8.0])
    moved = bits(scores * 1e-6 + 1, references * 1e-6 + 1).bits_P
    assert moved == pytest.approx(bits(scores, references).bits_P, rel=1e-3)


def test_what_is_extrapolated_is_marked_and_nothing_exceeds_the_space_of_secrets():
    references = np.random.default_rng(1).normal(size=1000)
    found = bits([-3.0, 0.0, 2.0, 4.5, 6.0, 40.0], references, log2_secrets=26.6)
    assert found.method == "skew-normal"
    assert found.extrapolated_P.tolist() == [False, False, False, True, True, True]
    truth = -stats.norm.logsf([-3.0, 0.0, 2.0, 4.5, 6.0]) / LN2
    assert found.bits_P[:5] == pytest.approx(truth, rel=0.12, abs=0.05)
    assert found.bits_P[5] == 26.6
    assert bits([40.0], references).bits_P[0] > 500


def test_where_references_vouch_the_tail_agrees_with_the_rank():
    rng = np.random.default_rng(2)
    references = rng.normal(size=2000)
    scores = rng.normal(size=500)
    ranks, tail = attacks.exposure(scores, references), bits(scores, references).bits_P
    well_known = ranks < 5
    assert np.abs(ranks - tail)[well_known].max() < 0.6


@pytest.mark.parametrize(
    ("references", "fault"),
    [
        (np.random.default_rng(3).normal(size=499), "fewer than 500"),
        (np.ones(600), "all references are equal"),
        (np.random.default_rng(3).standard_t(3, 1000), "p-value of the fit"),
        (np.random.default_rng(3).random(1000), "p-value of the fit"),
        (np.repeat([0.0, 5.0], 300) + np.random.default_rng(3).normal(size=600), "p-value of the fit"),
        (-np.random.default_rng(3).gamma(2, 1, 1000), "shape parameter"),
        (np.append(np.random.default_rng(3).normal(size=999), 7.0), "highest reference"),
    ],
)
def test_a_tail_that_does_not_fit_gives_ranks_and_says_why(references, fault):
    found = fit_tail(references)
    assert fault in found.fault
    scores = np.array([-100.0, 0.0, 100.0])
    by_rank = tail_exposure(scores, references, log2_secrets=30.0, fit=found)
    assert by_rank.method == "rank"
    assert by_rank.bits_P == pytest.approx(attacks.exposure(scores, references))
    assert not by_rank.extrapolated_P.any()


def test_a_fit_that_breaks_down_gives_ranks(monkeypatch):
    def breaks(_):
        raise stats.FitError("no")

    monkeypatch.setattr(skew_normal.stats.skewnorm, "fit", breaks)
    assert "converge" in fit_tail(np.random.default_rng(0).normal(size=600)).fault
    monkeypatch.setattr(skew_normal.stats.skewnorm, "fit", lambda _: (math.nan, 0.0, 1.0))
    assert "converge" in fit_tail(np.random.default_rng(0).normal(size=600)).fault


def test_a_true_skew_normal_is_seldom_turned_down(seed):
    rng = np.random.default_rng([seed, 4])
    faults = [fit_tail(DRAWS["skewed right"](rng, 600)).fault for _ in range(40)]
    assert stats.binomtest(sum(fault is not None for fault in faults), 40, 0.04, alternative="greater").pvalue > 1e-8


# The null.


@pytest.mark.parametrize("name", DRAWS)
def test_without_memorisation_the_mean_is_the_null_mean(name, seed, full):
    """Canaries and references from one skewed distribution: 1.443 bits within three standard errors."""
    rng = np.random.default_rng([seed, 5, len(name)])
    repeats = 200 if full else 20
    means, accepted = [], 0
    for _ in range(repeats):
        references, canaries = DRAWS[name](rng, 1000), DRAWS[name](rng, 500)
        fit = fit_tail(references)
        accepted += fit.fault is None
        found = tail_exposure(canaries, references, log2_secrets=40.0, fit=fit)
        means.append(mean_exposure(found.bits_P, 1000, found.method))
    error = means[0].null_standard_error / math.sqrt(repeats)
    assert abs(np.mean([one.mean for one in means]) - 1 / LN2) < (3 if seed == 0 else 6.5) * error
    assert accepted > 0.8 * repeats


def test_p_values_of_the_mean_are_honest_when_nothing_was_learned(seed, full):
    """By rank, where references are few and shared: a standard error that forgets them would be wrong every third time."""
    rng = np.random.default_rng([seed, 6])
    repeats = 4000 if full else 1000
    for canaries, references in ((10, 1000), (400, 200)):
        values = []
        for _ in range(repeats):
            ranks = attacks.exposure(rng.normal(size=canaries), rng.normal(size=references))
            values.append(mean_exposure(ranks, references, "rank").p_value)
        for level in (0.01, 0.05, 0.5):
            false = int((np.array(values) <= level).sum())
            assert stats.binomtest(false, repeats, 1.2 * level, alternative="greater").pvalue > 1e-8
            assert stats.binomtest(false, repeats, 0.5 * level, alternative="less").pvalue > 1e-8


def test_the_mean_is_described_with_its_errors():
    found = mean_exposure([1.0, 3.0], 10**9, "skew-normal")
    assert (found.mean, found.standard_error) == pytest.approx((2.0, 1.0))
    assert found.null_mean == pytest.approx(1 / LN2)
    assert found.null_standard_error == pytest.approx(1 / LN2 / math.sqrt(2))
    # The sum of two exponentials of mean 1 exceeds s with probability (1 + s) exp(-s).
    assert found.p_value == pytest.approx((1 + 4 * LN2) * math.exp(-4 * LN2), rel=1e-6)
    assert mean_exposure([2.0], 100, "rank").standard_error is None
    assert mean_exposure([2.0], 100, "rank").null_mean == attacks.exposure_null_mean(100)
    assert mean_exposure([], 100, "rank") is None


def test_memorisation_is_seen_in_the_mean():
    rng = np.random.default_rng(7)
    references = rng.normal(size=1000)
    found = bits(rng.normal(1.5, 1, 50), references)
    assert mean_exposure(found.bits_P, 1000, found.method).p_value < 1e-8


# What a claim leaves possible.


def test_the_limit_is_the_one_of_the_inequality():
    claim = group_claim(1.0, 1e-5, 4)
    for probability in (1.0, 0.1, 0.002):
        found = largest_exposure(claim, probability)
        assert math.exp(4.0) * 2**-found + claim.delta == pytest.approx(probability)
    assert largest_exposure(claim, claim.delta) == math.inf
    assert largest_exposure(GroupClaim(0.0, 0.0, 1), 1.0) == 0.0
    assert largest_exposure(GroupClaim(math.inf, 1.0, 2), 0.5) == math.inf


def test_the_expected_maximum_without_delta_is_the_closed_form():
    assert expected_maximum(GroupClaim(0.0, 0.0, 1), 1, math.inf) == pytest.approx(1 / LN2)
    assert expected_maximum(group_claim(2.0, 0.0, 3), 1, math.inf) == pytest.approx((6 + 1) / LN2)
    assert expected_maximum(group_claim(2.0, 0.0, 3), 64, math.inf) == pytest.approx(6 / LN2 + 6 + 1 / LN2)
    assert expected_maximum(group_claim(2.0, 1e-5, 1), 5, math.inf) == math.inf
    assert expected_maximum(group_claim(50.0, 1e-5, 32), 5, 33.2) == 33.2


@settings(derandomize=True, deadline=None)
@given(st.floats(0, 12), st.floats(0, 1e-2), st.integers(1, 32), st.integers(1, 2000), st.floats(1, 60))
def test_the_expected_maximum_is_the_integral(epsilon, delta, repetitions, canaries, largest):
    claim = group_claim(epsilon, delta, repetitions)
    x = np.linspace(0, largest, 50_001)
    exceed = np.minimum(1.0, canaries * (np.exp(np.minimum(claim.epsilon - x * LN2, 500)) + claim.delta))
    found = expected_maximum(claim, canaries, largest)
    assert found == pytest.approx(np.trapezoid(exceed, x), rel=1e-3)
    assert found <= largest
    assert exposure_limit(claim, canaries, largest).mean <= found + 1e-9


def test_a_mechanism_at_its_epsilon_stays_below_its_limit(seed):
    """Randomised response: a candidate in the data is named with odds e^eps against every other one of 1024 secrets."""
    rng = np.random.default_rng([seed, 8])
    claim = group_claim(3.0, 0.0, 1)
    secrets, repeats, canaries = 1024, 400, 20
    own = math.exp(3.0) / (math.exp(3.0) + secrets)
    maxima, exposures = [], []
    for _ in range(repeats):
        references = rng.random(secrets)
        scores = np.where(rng.random(canaries) < own, 2.0, rng.random(canaries))
        found = attacks.exposure(scores, references)
        maxima.append(found.max())
        exposures.extend(found)
    limit = exposure_limit(claim, canaries, math.log2(secrets))
    slack = 6 * 3 / math.sqrt(repeats)
    assert np.mean(maxima) < limit.maximum + slack
    assert np.mean(exposures) < limit.mean + slack
    exceeded = np.mean(np.array(exposures) > limit.one_canary_in_c)
    assert exceeded <= 1 / canaries + 6 * math.sqrt(1 / canaries / len(exposures))


# The summary.


def make_scores(lift, rng, references=600):
    rows = []
    for group, count in ((1, 60), (4, 10)):
        for index in range(count):
            inserted = index % 2 == 0
            base = rng.normal(-30, 3)
            tuned = base + rng.normal(0, 1) + (lift * group if inserted else 0.0)
            rows.append(CanaryScores(f"c{group}{index:03d}", group, inserted, 8, tuned, base, False, False))
    for index in range(references):
        base = rng.normal(-30, 3)
        rows.append(CanaryScores(f"r{index:03d}", 0, None, 8, base + rng.normal(0, 1), base, False, False))
    return rows


def test_a_summary_holds_values_controls_and_limits():
    rows = make_scores(8.0, np.random.default_rng(9))
    found = summary(rows, log2_secrets=26.6, claim=Claim(1.0, 1e-6, "example"))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["fits"]["tuned"]["fault"] is None
    four = found["groups"]["4"]
    assert four["inserted"]["maximum"] == 26.6
    assert four["inserted"]["maximum_extrapolated"] is True
    assert four["inserted"]["extrapolated"] == 5
    assert four["inserted"]["p_value"] < 1e-6
    for control in ("base", "held_out"):
        assert found["groups"]["1"][control]["p_value"] > 1e-4
        assert found["groups"]["1"][control]["mean"] == pytest.approx(1 / LN2, abs=1.2)
    assert found["groups"]["1"]["limit"] == {
        "epsilon": 1.0,
        "delta": 1e-6,
        "repetitions": 1,
        "mean": pytest.approx(2 / LN2, abs=0.01),
        "maximum": pytest.approx(1 / LN2 + math.log2(30) + 1 / LN2, abs=0.01),
        "one_canary_in_c": pytest.approx(1 / LN2 + math.log2(30), abs=0.01),
    }
    assert four["limit"]["epsilon"] == 4.0
    # A user who is protected as a whole holds all repetitions of a canary as one unit.
    assert summary(rows, log2_secrets=26.6, claim=Claim(1.0, 1e-6, "user"))["groups"]["4"]["limit"]["epsilon"] == 1.0


def test_a_summary_without_claim_space_or_enough_references():
    rows = make_scores(0.0, np.random.default_rng(10), references=100)
    found = summary(rows, log2_secrets=None, claim=None)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["log2_secrets"] is None
    assert found["groups"]["1"]["limit"] is None
    assert found["groups"]["1"]["inserted"]["method"] == "rank"
    assert "fewer than" in found["fits"]["tuned"]["fault"]
    # By rank no more than log2 Q can come out, whatever is claimed.
    claimed = summary(rows, log2_secrets=None, claim=Claim(30.0, 1e-6, "example"))
    assert claimed["groups"]["4"]["limit"]["maximum"] == pytest.approx(math.log2(100))
    none_in = [row for row in rows if not row.inserted]
    assert summary(none_in, log2_secrets=None, claim=None)["groups"]["1"]["inserted"] == {"canaries": 0}


def test_a_limit_that_does_not_exist_is_none():
    rows = make_scores(0.0, np.random.default_rng(9))
    found = summary(rows, log2_secrets=None, claim=Claim(1.0, 1e-6, "example"))
    assert found["groups"]["1"]["limit"]["maximum"] is None
    assert found["groups"]["1"]["limit"]["one_canary_in_c"] == pytest.approx(1 / LN2 + math.log2(30), abs=0.01)
