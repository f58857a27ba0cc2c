"""NIST, ROUGE-L and CIDEr of scripts/e2e_metrics.py by hand, each with several references."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sacrebleu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
metrics: Any = importlib.import_module("e2e_metrics")
nist, rouge_l, cider, words = metrics.nist, metrics.rouge_l, metrics.cider, metrics.words


def test_nist_by_hand() -> None:
    """The references hold five words, two of them "a", and "b" and "c" each stand once behind "a"."""
    score = nist(["a B c"], [["a b d", "a c"]])
    one_word = (math.log2(5 / 2) + math.log2(5) + math.log2(5)) / 3
    two_words = math.log2(2 / 1) / 2  # "a b", of two bigrams
    assert score == pytest.approx(one_word + two_words)


def test_nist_halves_a_text_of_two_thirds_of_the_length() -> None:
    assert nist(["a b"], [["a b c"]]) == pytest.approx(math.log2(3) / 2)
    several = nist(["a b"], [["a b c d", "a b"]])  # of three words on average, two of six are "a"
    assert several == pytest.approx(math.log2(3) / 2)
    assert nist([""], [["a b c"]]) == 0


def test_nist_adds_over_texts_before_it_divides() -> None:
    assert nist(["a", "x x"], [["a"], ["b c"]]) == pytest.approx(math.log2(3) / 3)


def test_rouge_l_by_hand() -> None:
    """The longest common subsequence is "the cat sat": all of the text, three fifths of the reference."""
    (value,) = rouge_l(["The cat sat."], [["the big cat sat down"]])
    assert value == pytest.approx((1 + 1.44) * 1 * 0.6 / (0.6 + 1.44 * 1))
    assert rouge_l([""], [["text"]]) == [0.0]


def test_rouge_l_takes_the_best_precision_and_the_best_recall_of_all_references() -> None:
    assert rouge_l(["the cat sat"], [["cat", "the big cat sat down"]]) == [pytest.approx(1.0)]


def test_cider_by_hand() -> None:
    """Every n-gram stands with one of two prompts, so all weigh the same: log 2."""
    exact, foreign = cider(["a b", "x y"], [["a b"], ["c d"]])
    assert exact == pytest.approx(10 * (1 + 1) / 4)  # single words and pairs; there are no longer ones
    assert foreign == 0
    longer, _ = cider(["a b e", "c d"], [["a b"], ["c d"]])
    one_word, two_words = 2 / math.sqrt(3 * 2), 1 / math.sqrt(2 * 1)
    assert longer == pytest.approx(10 * (one_word + two_words) / 4 * math.exp(-1 / (2 * 6**2)))
    often, _ = cider(["a a", "c d"], [["a b"], ["c d"]])
    assert often == pytest.approx(10 * 1 / (2 * math.sqrt(2)) / 4)  # the second "a" lengthens the text's vector alone


def test_cider_is_the_mean_over_references_and_blind_to_what_all_prompts_have() -> None:
    several, _ = cider(["a b", "c d"], [["a b", "x y"], ["c d"]])
    assert several == pytest.approx(10 * (1 + 1) / 4 / 2)
    assert cider(["the", "the"], [["the"], ["the"]]) == [0.0, 0.0]


def test_words_are_those_of_the_treebank_without_punctuation() -> None:
    text = "It doesn't cost £20-25, or 20,000: the centre,Cotto; children\u2019s 3.5 (can't)!"
    expected = "it does n't cost £ 20-25 or 20,000 the centre cotto children 's 3.5 ca n't"
    assert words(text) == expected.split()
