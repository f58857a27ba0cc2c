"""The blind control: silent where two sides are alike, loud where words, form or length differ, blind to the row it judges."""

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.auditing.statistics import FEWEST_TEXTS, blind

SIGNIFICANCE = 1e-8
WORDS = np.array([f"w{rank}" for rank in range(2000)])
RISING = np.cumsum(1 / np.arange(1, 2001)) / (1 / np.arange(1, 2001)).sum()


def texts(rng, count, kind="zipf"):
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
        everything = texts(rng, 100, kind)
        control = blind(everything[:50], everything[50:])
        alarms += control.above_half
        width = (logit(control.high) - logit(control.low)) / 2 / stats.norm.ppf(0.975)
        squares.append((logit(control.value) / width) ** 2)
    assert alarms <= stats.binom.isf(SIGNIFICANCE, repeats, 0.025)
    assert sum(squares) < stats.chi2.isf(SIGNIFICANCE, repeats)


def test_the_confidence_is_the_one_asked_for(seed):
    rng = np.random.default_rng(seed)
    everything = texts(rng, 200)
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
    everything = [text + " w0 w1" for text in texts(rng, 400)]
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
    everything = texts(np.random.default_rng(seed), 120)
    assert blind(everything[:60], everything[60:]) == blind(everything[:60], everything[60:])
