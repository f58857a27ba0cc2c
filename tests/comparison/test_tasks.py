"""What is written and scored: all references of a prompt, nothing twice; scores by hand; errors that name what is missing."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from comparing import make_run, write_tasks
from programs import run_program

from dpllm.comparison import tasks
from dpllm.comparison.compare import PROTOCOL, cached_tasks
from dpllm.errors import ConfigError
from dpllm.statement.run_files import read_run
from dpllm.text.data import Table

pytest.importorskip("sacrebleu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
metrics: Any = importlib.import_module("e2e_metrics")
bleu, nist, rouge_l, cider, words = tasks.bleu, metrics.nist, metrics.rouge_l, metrics.cider, metrics.words


def test_prompts_are_counted_once_and_keep_all_references() -> None:
    pairs = (("a", " 1"), ("b", "2 "), ("a", "3"), ("c", "4"), ("b", "5"))
    rows = tiny.rows({"prompt": prompt, "completion": completion} for prompt, completion in pairs)
    table = Table("rows.jsonl", rows, "prompt_completion")
    assert tasks.by_prompt(table, 2) == {"a": ["1", "3"], "b": ["2", "5"]}
    assert list(tasks.by_prompt(table, 9)) == ["a", "b", "c"]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else find(name))
    with pytest.raises(ConfigError, match=r"sacrebleu, which is not installed. Type: pip install sacrebleu"):
        tasks.measure([make_run(tmp_path / "a", 3.0)], 3)


def test_references_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"builtin:clinic/eval: has no prompts with completions"):
        tasks.measure([make_run(tmp_path / "a", 3.0)], 3)
    nothing: dict[str, Any] = {"data": {"eval": None}}
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        tasks.measure([make_run(tmp_path / "b", 3.0, nothing)], 3)


def test_what_is_known_of_these_weights_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name, epsilon) for name, epsilon in (("a", 3.0), ("b", math.inf), ("c", 8.0))]
    score = {"value": 60.0, "interval": None}
    scored: list[tuple[str, bool]] = []

    def compute(run: Any, base: bool, rows: int) -> dict[str, Any]:
        scored.append((run.directory.root.name, base))
        return {"weights": {}, "tuned": {}, "base": None if base else {}}

    monkeypatch.setattr(tasks, "_written", compute)
    for run in runs:
        write_tasks(run, score, score)
    tasks.measure(runs, 2)
    assert scored == []
    write_tasks(runs[1], score, weights={"adapter_model.safetensors": "f" * 64})
    tasks.measure(runs, 2)
    assert scored == [("b", True)]  # the base model is known from another run
    tasks.measure(runs, 3)
    assert scored[1:] == [("a", False), ("b", True), ("c", True)]
    assert (runs[0].private / "tasks.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("protocol", "is_cached"), [(None, False), ({**PROTOCOL, "beams": 1}, False), (PROTOCOL, True)]
)
def test_scores_of_another_protocol_are_not_shown(tmp_path: Path, protocol: Any, is_cached: bool) -> None:
    run = make_run(tmp_path / "a", 3.0)
    write_tasks(run, {"value": 60.0, "interval": None}, protocol=protocol)
    assert (cached_tasks(run, read_run(run)) is not None) == is_cached


def test_importing_it_loads_no_model_library() -> None:
    code = "import sys, dpllm.comparison.tasks; print({'torch', 'transformers', 'sacrebleu'} & {*sys.modules})"
    assert run_program("-c", code) == "set()\n"


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
