"""BLEU and ROUGE-L: values by hand, all references, and clear words where something is missing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from comparing import make_run, write_held_out
from rich.console import Console

from dpllm.comparison import tasks
from dpllm.errors import ConfigError
from dpllm.run.directory import RunDir

INF = float("inf")


def test_bleu_of_a_perfect_and_of_a_foreign_text() -> None:
    pytest.importorskip("sacrebleu")
    same = ["the old key lay on the blue table", "seven plums fell from the tree today"]
    perfect = tasks.bleu(same, [[text] for text in same])
    assert perfect["value"] == pytest.approx(100.0)
    assert perfect["interval"] == pytest.approx([100.0, 100.0])
    assert perfect["signature"].startswith("nrefs:1")
    foreign = tasks.bleu(["one two three four five"] * 2, [[text] for text in same])
    assert foreign["value"] < 5
    low, high = foreign["interval"]
    assert 0 <= low <= high <= 100


def test_bleu_takes_the_reference_that_fits_and_rows_of_different_number() -> None:
    pytest.importorskip("sacrebleu")
    texts = ["the old key lay on the blue table", "seven plums fell from the tree today"]
    several = [["something else entirely here", texts[0]], [texts[1]]]
    assert tasks.bleu(texts, several)["value"] == pytest.approx(100.0)
    assert tasks.bleu(texts, [[row[0]] for row in several])["value"] < 90
    assert tasks.bleu(texts[:1], several[:1])["interval"] is None


def test_the_same_texts_give_the_same_interval() -> None:
    pytest.importorskip("sacrebleu")
    texts = [f"the old key lay on table {number}" for number in range(6)]
    answers = [[f"the old key was on table {number}"] for number in range(6)]
    assert tasks.bleu(texts, answers) == tasks.bleu(texts, answers)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    pytest.importorskip("rouge_score")
    (value,) = tasks.rouge_l(["the cat sat"], [["the big cat sat down", "nothing"]])
    precision, recall = 3 / 3, 3 / 5  # the cat sat, in that order
    assert value == pytest.approx(2 * precision * recall / (precision + recall))
    assert tasks.rouge_l([""], [["text"]]) == [0.0]


def test_prompts_are_counted_once_and_keep_all_references() -> None:
    rows = [{"prompt": p, "completion": c} for p, c in (("a", " 1"), ("b", "2 "), ("a", "3"), ("c", "4"), ("b", "5"))]
    assert tasks.by_prompt(rows, 2) == {"a": ["1", "3"], "b": ["2", "5"]}
    assert list(tasks.by_prompt(rows, 9)) == ["a", "b", "c"]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else find(name))
    with pytest.raises(ConfigError, match=r"sacrebleu, not installed here\. Type: pip install 'dpllm\[tasks\]'"):
        tasks.measure([make_run(tmp_path / "a", 3.0)], rows=3)


def test_references_are_needed(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    with pytest.raises(ConfigError, match=r"builtin:clinic/eval: has no prompts with completions"):
        tasks.measure([make_run(tmp_path / "a", 3.0)], rows=3, losses=False)
    nothing: dict[str, Any] = {"data": {"eval": None}}
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        tasks.measure([make_run(tmp_path / "b", 3.0, nothing)], rows=3, losses=False)


def test_references_may_lie_in_several_files(tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "completion": "1"}, {"prompt": "b", "completion": "2"}]
    paths = [str(tiny.write_rows(tmp_path / f"{row['prompt']}.jsonl", [row])) for row in pairs]
    run = RunDir(make_run(tmp_path / "run", 3.0, {"data": {"eval": paths}}).root)
    table = tasks._evaluation(run, run.load_config())
    assert tasks.by_prompt(table.rows, 9) == {"a": ["1"], "b": ["2"]}


def test_what_is_known_of_these_weights_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name, epsilon, held_out=True) for name, epsilon in (("a", 3.0), ("b", INF), ("c", 8.0))]
    asked = []

    def compute(run: Any, config: Any, base: bool) -> dict[str, Any]:
        asked.append((run.root.name, base))
        return {"weights": {}, "tuned": {}, "base": {"loss": []} if base else None}

    monkeypatch.setattr(tasks, "_losses", compute)
    tasks.measure(runs)
    assert asked == []
    write_held_out(runs[1], 2.0, weights={"adapter_model.safetensors": "f" * 64})
    tasks.measure(runs)
    assert asked == [("b", False)]  # the base model is known from another run
    for run in runs:
        (run.private / "held_out.json").unlink()
    tasks.measure(runs)
    assert asked[1:] == [("a", True), ("b", False), ("c", False)]
    assert (runs[0].private / "held_out.json").stat().st_mode & 0o077 == 0


def test_a_run_without_losses_is_compared_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Any, config: Any, base: bool) -> Any:
        raise ConfigError("the base model is not at hand. Fetch it.")

    monkeypatch.setattr(tasks, "_losses", fails)
    run, console = make_run(tmp_path / "a", 3.0), Console(file=io.StringIO(), width=200)
    tasks.measure([run], console=console)
    assert "No intervals for a: the base model is not at hand." in console.file.getvalue()  # type: ignore[attr-defined]
    assert not (run.private / "held_out.json").exists()


def test_importing_it_loads_no_model_library() -> None:
    import subprocess

    code = "import sys, dpllm.comparison.tasks; print([n for n in ('torch', 'transformers', 'sacrebleu') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
