"""BLEU, NIST, ROUGE-L and CIDEr by hand, each with several references."""

from __future__ import annotations

import math

import pytest

from dpllm.comparison import text_scores
from dpllm.comparison.text_scores import cider, rouge_l, words


@pytest.fixture(autouse=True)
def _sacrebleu() -> None:
    pytest.importorskip("sacrebleu")


def test_bleu_by_hand() -> None:
    """Each n-gram counts as often as in the one reference that has it most often; periods are words; case is none."""
    found = text_scores.bleu(["The cat sat on the mat."], [["the cat sat on a mat.", "A cat sat on the mat"]])
    precisions = (6 / 7, 6 / 6, 4 / 5, 3 / 4)  # "the" stands twice in the text and once in each reference
    assert found["value"] == pytest.approx(100 * math.prod(precisions) ** 0.25)
    assert found["interval"] is None
    assert "case:lc" in found["signature"]
    assert "tok:13a|smooth:none" in found["signature"]


def test_bleu_measures_against_the_reference_of_the_closest_length() -> None:
    text, short = "a b c d", "a b c d"
    assert text_scores.bleu([text], [[short, f"{short} e f g h"]])["value"] == pytest.approx(100)
    assert text_scores.bleu([text], [[f"{short} e f g h"]])["value"] == pytest.approx(100 * math.exp(1 - 8 / 4))


def test_bleu_of_a_perfect_and_of_a_foreign_text() -> None:
    same = ["the old key lay on the blue table", "seven plums fell from the tree today"]
    perfect = text_scores.bleu(same, [["something else entirely here", same[0]], [same[1]]])
    assert perfect["value"] == pytest.approx(100.0)
    assert perfect["interval"] == pytest.approx([100.0, 100.0])
    assert max(perfect["value"], *perfect["interval"]) <= 100  # sacrebleu's rounding may put it above
    assert text_scores.bleu(same, [["something else entirely here"], [same[1]]])["value"] < 90
    assert text_scores.bleu(["one two three four five"] * 2, [[text] for text in same])["value"] == 0


def test_nist_by_hand() -> None:
    """The references hold five words, two of them "a", and "b" and "c" each stand once behind "a"."""
    found = text_scores.nist(["a B c"], [["a b d", "a c"]])
    one_word = (math.log2(5 / 2) + math.log2(5) + math.log2(5)) / 3
    two_words = math.log2(2 / 1) / 2  # "a b", of two bigrams
    assert found["value"] == pytest.approx(one_word + two_words)
    assert found["interval"] is None


def test_nist_halves_a_text_of_two_thirds_of_the_length() -> None:
    assert text_scores.nist(["a b"], [["a b c"]])["value"] == pytest.approx(math.log2(3) / 2)
    several = text_scores.nist(["a b"], [["a b c d", "a b"]])  # of three words on average, two of six are "a"
    assert several["value"] == pytest.approx(math.log2(3) / 2)
    assert text_scores.nist([""], [["a b c"]])["value"] == 0


def test_nist_adds_over_texts_before_it_divides() -> None:
    found = text_scores.nist(["a", "x x"], [["a"], ["b c"]])
    assert found["value"] == pytest.approx(math.log2(3) / 3)
    low, high = found["interval"]
    assert low == 0
    assert high == pytest.approx(math.log2(3))


def test_rouge_l_by_hand() -> None:
    """The longest common subsequence is "the cat sat": all of the text, three fifths of the reference."""
    (value,) = rouge_l(["The cat sat."], [["the big cat sat down"]])
    assert value == pytest.approx((1 + 1.44) * 1 * 0.6 / (0.6 + 1.44 * 1))
    assert rouge_l([""], [["text"]]) == [0.0]


def test_rouge_l_takes_the_best_precision_and_the_best_recall_of_all_references() -> None:
    assert rouge_l(["the cat sat"], [["cat", "the big cat sat down"]]) == [pytest.approx(1.0)]


def test_cider_by_hand() -> None:
    """Every n-gram stands with one of two prompts, so all weigh the same: log 2."""
    exact, other = cider(["a b", "x y"], [["a b"], ["c d"]])
    assert exact == pytest.approx(10 * (1 + 1) / 4)  # single words and pairs; there are no longer ones
    assert other == 0
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
    wanted = "it does n't cost £ 20-25 or 20,000 the centre cotto children 's 3.5 ca n't"
    assert words(text) == wanted.split()


def test_the_same_texts_give_the_same_intervals() -> None:
    texts = [f"the old key lay on table {number}" for number in range(6)]
    answers = [[f"the old key was on table {number}"] for number in range(6)]
    for score in (text_scores.bleu, text_scores.nist):
        found = score(texts, answers)
        assert found == score(texts, answers)
        low, high = found["interval"]
        assert low <= found["value"] <= high
