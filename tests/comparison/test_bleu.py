"""BLEU by hand, with several references."""

from __future__ import annotations

import math

import pytest

from dpllm.comparison.tasks import bleu


@pytest.fixture(autouse=True)
def _sacrebleu() -> None:
    pytest.importorskip("sacrebleu")


def test_bleu_by_hand() -> None:
    """Each n-gram counts as often as in the one reference that has it most often; periods are words; case is none."""
    score = bleu(["The cat sat on the mat."], [["the cat sat on a mat.", "A cat sat on the mat"]])
    precisions = (6 / 7, 6 / 6, 4 / 5, 3 / 4)  # "the" stands twice in the text and once in each reference
    assert score["value"] == pytest.approx(100 * math.prod(precisions) ** 0.25)
    assert score["interval"] is None
    assert "case:lc" in score["signature"]
    assert "tok:13a|smooth:none" in score["signature"]


def test_bleu_measures_against_the_reference_of_the_closest_length() -> None:
    text, short = "a b c d", "a b c d"
    assert bleu([text], [[short, f"{short} e f g h"]])["value"] == pytest.approx(100)
    assert bleu([text], [[f"{short} e f g h"]])["value"] == pytest.approx(100 * math.exp(1 - 8 / 4))


def test_bleu_of_a_perfect_and_of_a_foreign_text() -> None:
    same = ["the old key lay on the blue table", "seven plums fell from the tree today"]
    perfect = bleu(same, [["something else entirely here", same[0]], [same[1]]])
    assert perfect["value"] == pytest.approx(100.0)
    assert perfect["interval"] == pytest.approx([100.0, 100.0])
    assert max(perfect["value"], *perfect["interval"]) <= 100  # sacrebleu's rounding may put it above
    assert bleu(same, [["something else entirely here"], [same[1]]])["value"] < 90
    assert bleu(["one two three four five"] * 2, [[text] for text in same])["value"] == 0


def test_the_same_texts_give_the_same_intervals() -> None:
    texts = [f"the old key lay on table {number}" for number in range(6)]
    answers = [[f"the old key was on table {number}"] for number in range(6)]
    score = bleu(texts, answers)
    assert score == bleu(texts, answers)
    low, high = score["interval"]
    assert low <= score["value"] <= high
