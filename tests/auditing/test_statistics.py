"""Exposure, areas, rates and the blind control: right by other means of computing them, and intervals that cover."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpllm.auditing import statistics
from dpllm.auditing.statistics import FEWEST_TEXTS, blind

SIGNIFICANCE = 1e-8
scores = st.lists(st.integers(0, 8).map(float), min_size=2, max_size=25)
RATES = [(97, 486, 0.01), (97, 603, 0.01), (97, 103, 0.01), (103, 97, 0.1), (486, 1514, 0.01), (97, 1514, 0.001)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 20))
def test_exposure_is_the_rank_with_ties_against_the_canary(references, score):
    rank = 1 + sum(reference >= score for reference in references)
    assert statistics.exposure([score], references)[0] == pytest.approx(math.log2(len(references) / rank))


def test_exposure_of_nothing_learned_has_the_stated_mean():
    exact = np.mean([math.log2(5 / rank) for rank in range(1, 7)])
    assert statistics.exposure_null_mean(5) == pytest.approx(exact)
    assert statistics.exposure_null_mean(10**7) == pytest.approx(1 / math.log(2), abs=1e-5)


def test_rank_sum_looks_in_one_direction_and_one_side_alone_states_nothing():
    assert statistics.rank_sum_p_value(np.arange(50) + 100.0, np.arange(50)) < 1e-9
    assert statistics.rank_sum_p_value(np.arange(50), np.arange(50) + 100.0) > 0.999
    assert statistics.rank_sum_p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert statistics.rank_sum_p_value([], [1.0]) is None
    assert statistics.auc([], [1.0]) is None
    assert statistics.auc([1.0], []) is None


@settings(deadline=None)
@given(scores, scores)
def test_auc_and_its_variance_equal_the_definition(positives, negatives):
    wins = np.array([[(p > n) + (p == n) / 2 for n in negatives] for p in positives])
    area = statistics.auc(positives, negatives)
    assert area.value == pytest.approx(wins.mean())
    assert 0 <= area.low <= area.value <= area.high <= 1
    assert area.low < area.high
    of_p, of_n = wins.mean(1).var(ddof=1) / len(positives), wins.mean(0).var(ddof=1) / len(negatives)
    variance = of_p + of_n
    if variance > 1e-12 and 0 < area.value < 1:
        freedom = variance**2 / (of_p**2 / (len(positives) - 1) + of_n**2 / (len(negatives) - 1))
        logit = math.log(area.value / (1 - area.value))
        reach = stats.t.ppf(0.975, freedom) * math.sqrt(variance) / (area.value * (1 - area.value))
        low, high = special.expit([logit - reach, logit + reach])
        assert area.low <= low + 1e-9
        assert area.high >= high - 1e-9


@settings(deadline=None)
@given(scores, scores)
def test_auc_is_never_folded(positives, negatives):
    forward, backward = statistics.auc(positives, negatives), statistics.auc(negatives, positives)
    assert forward.value + backward.value == pytest.approx(1.0)
    assert forward.low + backward.high == pytest.approx(1.0)


def gaussian(interval, positives, negatives, shift, spread, repeats, *key):
    """Intervals of Gaussian scores: shape (repeats, 2)."""
    rng = np.random.default_rng(key)
    result = [interval(rng.normal(shift, spread, positives), rng.normal(size=negatives)) for _ in range(repeats)]
    return np.array([(item.low, item.high) for item in result])


def covers(found_R2, truth, share=0.94):
    """Whether so many intervals cover the truth as a method would that covers it in ``share`` of cases."""
    covered = ((found_R2[:, 0] <= truth) & (truth <= found_R2[:, 1])).sum()
    return stats.binomtest(int(covered), len(found_R2), share, alternative="less").pvalue > SIGNIFICANCE


AREAS = [
    (12, 508, 0.99, 1.0), (12, 508, 0.99, 2.0), (12, 508, 0.9, 2.0), (508, 12, 0.7, 0.5), (508, 12, 0.55, 1.0),
    (25, 25, 0.5, 1.0), (25, 25, 0.86, 1.0), (100, 100, 0.76, 1.0),
    (9, 300, 0.95, 1.0), (10, 1000, 0.95, 1.0), (12, 200, 0.95, 1.0),
    (50, 50, 0.99, 1.0), (50, 50, 0.99, 0.5), (97, 103, 0.55, 1.0), (97, 103, 0.99, 2.0), (97, 603, 0.99, 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("positives", "negatives", "area", "spread"), AREAS)
def test_auc_intervals_cover_the_truth_of_extreme_sides(positives, negatives, area, spread, seed, full):
    """Members vary ``spread`` times as much as the others. DeLong's alone covers in .68 to .95 of these cases."""
    shift = stats.norm.ppf(area) * math.hypot(1, spread)
    assert covers(gaussian(statistics.auc, positives, negatives, shift, spread, 5000 if full else 300, seed, 4), area)


def delongs(positives, negatives):
    """DeLong's interval alone, on the logit scale, with the normal quantile."""
    variances = (placed.var(ddof=1) / len(placed) for placed in statistics.placements(positives, negatives))
    value = statistics.auc(positives, negatives).value
    limits = statistics.logit_interval(value, stats.norm.ppf(0.975) * math.sqrt(sum(variances)))
    return statistics.Estimate(value, *limits)


@pytest.mark.parametrize("sizes", [(12, 508), (50, 50), (97, 103), (97, 603)])
@pytest.mark.parametrize("area", [0.55, 0.7])
def test_auc_intervals_are_not_much_wider_than_delongs(sizes, area, seed):
    width, delong = (
        np.ptp(gaussian(interval, *sizes, stats.norm.ppf(area) * math.sqrt(2), 1.0, 200, seed, 4), axis=1).mean()
        for interval in (statistics.auc, delongs)
    )
    assert delong <= width < (1.15 if min(sizes) < 20 else 1.03) * delong


def test_perfect_separation_is_not_presented_as_certainty():
    area = statistics.auc(np.arange(10) + 100.0, np.arange(30))
    assert (area.value, area.high) == (1.0, 1.0)
    # Ten disjoint pairs, all in order: 0.025^(1/10), as Clopper and Pearson have it.
    assert area.low == pytest.approx(stats.binomtest(10, 10).proportion_ci(0.95).low)
    worst = statistics.auc(np.arange(30), np.arange(10) + 100.0)
    assert (worst.low, worst.value) == (0.0, 0.0)
    assert worst.high == pytest.approx(1 - area.low)


@pytest.mark.parametrize(("positives", "negatives"), [([1.0] * 20, [1.0] * 20), ([2.0], [1.0, 3.0, 4.0, 1.5])])
def test_no_variance_in_the_sample_gives_a_wide_interval(positives, negatives):
    area = statistics.auc(positives, negatives)
    assert area.high - area.low > 0.5


def test_tpr_counts_positives_above_all_but_one_percent_of_the_negatives():
    negatives = np.arange(200.0)
    # Two negatives may pass (199 and 198), so the threshold is 197 and a positive there does not.
    positives = [196.0, 197.0, 197.5, 300.0]
    assert statistics.tpr_at_fpr(positives, negatives).value == 0.5


@pytest.mark.parametrize(("positives", "negatives", "fpr"), RATES)
@pytest.mark.parametrize(("shift", "spread"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (3.0, 0.5), (2.0, 2.0)])
def test_tpr_intervals_cover_the_truth(positives, negatives, fpr, shift, spread, seed, full):
    """The threshold is estimated too: intervals that take it for known cover in .4 to .9 of these cases."""
    interval = partial(statistics.tpr_at_fpr, fpr=fpr)
    intervals = gaussian(interval, positives, negatives, shift, spread, 5000 if full else 300, seed, 5)
    assert covers(intervals, stats.norm.sf((stats.norm.isf(fpr) - shift) / spread), 0.95)


@pytest.mark.parametrize(("positives", "negatives", "fpr"), RATES)
@pytest.mark.parametrize("beside", [-1e-6, 1e-6])
def test_tpr_intervals_cover_the_truth_where_the_curve_jumps_at_the_threshold(
    positives, negatives, fpr, beside, seed, full
):
    """No curve is worse: half of the members lie beside the true threshold, and a threshold a little off counts them wrong."""
    rng, threshold = np.random.default_rng([seed, 6]), stats.norm.isf(fpr)
    results = []
    for _ in range(5000 if full else 300):
        kind = rng.random(positives)
        scores = np.where(kind < 0.5, threshold + beside, np.where(kind < 0.75, 9.0, -9.0))
        results.append(statistics.tpr_at_fpr(scores, rng.normal(size=negatives), fpr))
    truth = 0.75 if beside > 0 else 0.25
    assert covers(np.array([(result.low, result.high) for result in results]), truth, 0.95)


@settings(deadline=None)
@given(st.integers(2, 3000), st.sampled_from([0.001, 0.01, 0.1, 0.5]), st.sampled_from([0.05, 0.001, 0.5]))
def test_threshold_and_rate_share_the_error(negatives, fpr, miss):
    """Both ends of the interval fail with at most ``miss`` together, whatever lies between the two thresholds."""
    few, many, miss_low, miss_high = statistics._threshold_ranks(negatives, fpr, miss)
    too_low, too_high = stats.binom.cdf(few, negatives, fpr), stats.binom.sf(many, negatives, fpr)
    assert -1 <= few <= fpr * negatives <= many + 1 <= negatives + 1
    low = too_low + miss_low if few >= 0 else 0  # a lower limit of 0 holds
    assert low + too_high + miss_high == pytest.approx(miss)
    assert min(miss_low, miss_high) >= miss / 8 * (1 - 1e-9)


@pytest.mark.parametrize(("positives", "negatives"), [(97, 603), (486, 1514)])
def test_tpr_intervals_are_not_useless(positives, negatives, seed):
    """At most 1.75 times as wide as the normal approximation that knows the curve's slope at the threshold."""
    shift, threshold = 2.0, stats.norm.isf(0.01)
    truth, slope = stats.norm.sf(threshold - shift), stats.norm.pdf(threshold - shift) / stats.norm.pdf(threshold)
    error = math.sqrt(truth * (1 - truth) / positives + slope**2 * 0.01 * 0.99 / negatives)
    intervals = gaussian(statistics.tpr_at_fpr, positives, negatives, shift, 1.0, 400, seed, 7)
    assert np.ptp(intervals, axis=1).mean() < 1.75 * 2 * stats.norm.ppf(0.975) * error


def test_few_negatives_state_no_tpr_or_bound_it_from_above_only():
    # Of 103 scores one in three times none lies above the true threshold at 1 %, so it may be higher than all of them.
    rate = statistics.tpr_at_fpr(np.full(97, 1e6), np.arange(103.0))
    assert (rate.low, rate.value, rate.high) == (0.0, 1.0, 1.0)
    assert statistics.tpr_at_fpr(np.full(97, 1e6), np.arange(603.0)).low > 0.9
    scores = np.arange(1000.0)
    assert statistics.tpr_at_fpr([1e6], scores[1:], 0.001) is None
    assert statistics.tpr_at_fpr([998.5, 998.0, 999.5], scores, 0.001).value == pytest.approx(2 / 3)
    assert statistics.tpr_at_fpr([1.0], np.zeros(99)) is None
    assert statistics.tpr_at_fpr([], np.zeros(500)) is None
    assert statistics.tpr_at_fpr([1.0], np.zeros(100)).value == 1.0


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30).map(float), min_size=1, max_size=40),
    st.lists(st.integers(0, 30).map(float), min_size=2, max_size=300),
    st.sampled_from([0.01, 0.1, 0.5]),
    st.sampled_from([0.5, 0.95, 0.999]),
)
def test_a_tpr_lies_in_its_interval(positives, negatives, fpr, confidence):
    rate = statistics.tpr_at_fpr(positives, negatives, fpr, confidence)
    if rate is not None:
        assert 0 <= rate.low <= rate.value <= rate.high <= 1


@settings(deadline=None)
@given(st.integers(100, 400), st.integers(0, 5))
def test_no_more_than_one_percent_of_the_negatives_pass(count, spread):
    negatives = np.random.default_rng(count).integers(0, 10 * spread + 1, size=count).astype(float)
    rate = statistics.tpr_at_fpr(negatives, negatives)
    assert rate.value <= 0.01 + 1e-12


WORDS = np.array([f"w{rank}" for rank in range(2000)])
RISING = np.cumsum(1 / np.arange(1, 2001)) / (1 / np.arange(1, 2001)).sum()


def zipf_texts(rng, count, kind="zipf"):
    """Texts of one kind, exchangeable: free words, a few sentences again and again, or a few forms with words filled in."""

    def words(number):
        return " ".join(WORDS[np.searchsorted(RISING, rng.random(number))])

    if kind == "zipf":
        return [words(max(1, int(length))) for length in rng.lognormal(2.5, 0.6, count)]
    forms = [words(12) for _ in range(60)]
    chosen = [forms[number] for number in rng.integers(60, size=count)]
    return chosen if kind == "repeated" else [f"{form} {words(3)}" for form in chosen]


def logit(value):
    return math.log(value / (1 - value))


@pytest.mark.parametrize("kind", ["zipf", "repeated", "forms"])
def test_alike_sides_are_told_apart_no_more_often_than_stated(kind, seed, full):
    """An interval that takes the folds for independent fails both: false alarms of 5 to 8 %, mean z squared of 1.6 to 2."""
    rng, repeats = np.random.default_rng(seed), 2000 if full else 100
    alarms, squares = 0, []
    for _ in range(repeats):
        everything = zipf_texts(rng, 100, kind)
        control = blind(everything[:50], everything[50:])
        alarms += control.above_half
        width = (logit(control.high) - logit(control.low)) / 2 / stats.norm.ppf(0.975)
        squares.append((logit(control.value) / width) ** 2)
    assert alarms <= stats.binom.isf(SIGNIFICANCE, repeats, 0.025)
    assert sum(squares) < stats.chi2.isf(SIGNIFICANCE, repeats)


def test_the_confidence_is_the_one_asked_for(seed):
    rng = np.random.default_rng(seed)
    everything = zipf_texts(rng, 200)
    wide, narrow = (blind(everything[:100], everything[100:], confidence) for confidence in (0.998, 0.95))
    assert wide.value == narrow.value
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    ratio = (logit(wide.high) - logit(wide.low)) / (logit(narrow.high) - logit(narrow.low))
    assert ratio == pytest.approx(stats.norm.ppf(0.999) / stats.norm.ppf(0.975))


@pytest.mark.parametrize(
    "change",
    [
        lambda text, place: text + " since 2023" if place % 2 == 0 else text,
        lambda text, place: text.upper(),
        lambda text, place: text + "\n",
        lambda text, place: text.replace(" ", "  ", 1),
        lambda text, place: text + " " + text,
    ],
    ids=["a date in a half", "case", "line break", "two spaces", "length"],
)
def test_a_difference_in_words_or_form_is_found(change, seed):
    rng = np.random.default_rng(seed)
    everything = [text + " w0 w1" for text in zipf_texts(rng, 400)]
    control = blind(everything[:200], [change(text, place) for place, text in enumerate(everything[200:])])
    assert control.above_half


def test_a_text_is_never_judged_by_a_classifier_that_saw_it():
    """Every text has words of its own alone, by which whoever trained on it would know it."""
    own = [" ".join(f"x{place:03d}y{word}" for word in range(6)) for place in range(200)]
    control = blind(own[:100], own[100:])
    assert abs(control.value - 0.5) < 0.1
    assert not control.above_half


def test_a_word_that_nobody_has_seen_weighs_nothing(seed):
    """However many texts each side has: else long texts, full of new words, would drown a word that half of one side has."""
    rng = np.random.default_rng(seed)
    everything = [" ".join(f"n{rng.integers(10**9)}" for _ in range(rng.integers(10, 60))) for _ in range(360)]
    marked = [text + " mark" * (place % 2) + " end" for place, text in enumerate(everything)]
    control = blind(marked[:60], [text + " end" for text in everything[60:]])
    assert control.value == pytest.approx(0.75, abs=0.07)


def test_equal_texts_say_nothing_and_perfect_separation_says_so():
    same = blind(["a b c"] * 50, ["a b c"] * 50)
    assert (same.value, same.above_half) == (0.5, False)
    assert same.low < 0.4 < 0.6 < same.high
    apart = blind(["a b c"] * 50, ["d e f"] * 50)
    assert (apart.value, apart.high, apart.above_half) == (1.0, 1.0, True)
    turned = blind(["", *["d e f"] * 49], ["a b c"] * 50)
    assert turned.value == 1.0


def test_the_same_texts_give_the_same_answer_and_few_give_none(seed):
    assert blind(["a"] * (FEWEST_TEXTS - 1), ["b"] * 100) is None
    assert blind(["a"] * 100, ["b"] * (FEWEST_TEXTS - 1)) is None
    assert blind(["a"] * FEWEST_TEXTS, ["b"] * FEWEST_TEXTS).above_half
    everything = zipf_texts(np.random.default_rng(seed), 120)
    assert blind(everything[:60], everything[60:]) == blind(everything[:60], everything[60:])
