"""What is written and scored: all references of a prompt, nothing twice, and clear words where something is missing."""

from __future__ import annotations

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

INF = float("inf")


def test_prompts_are_counted_once_and_keep_all_references() -> None:
    pairs = (("a", " 1"), ("b", "2 "), ("a", "3"), ("c", "4"), ("b", "5"))
    rows = tiny.rows({"prompt": prompt, "completion": completion} for prompt, completion in pairs)
    table = Table("rows.jsonl", rows, "prompt_completion")
    assert tasks.by_prompt(table, 2) == {"a": ["1", "3"], "b": ["2", "5"]}
    assert list(tasks.by_prompt(table, 9)) == ["a", "b", "c"]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else find(name))
    with pytest.raises(ConfigError, match=r"sacrebleu, which is not installed. Type: pip install sacrebleu"):
        tasks.measure([make_run(tmp_path / "a", 3.0)], 3)


def test_references_are_needed(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    with pytest.raises(ConfigError, match=r"builtin:clinic/eval: has no prompts with completions"):
        tasks.measure([make_run(tmp_path / "a", 3.0)], 3)
    nothing: dict[str, Any] = {"data": {"eval": None}}
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        tasks.measure([make_run(tmp_path / "b", 3.0, nothing)], 3)


def test_what_is_known_of_these_weights_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu")
    runs = [make_run(tmp_path / name, epsilon) for name, epsilon in (("a", 3.0), ("b", INF), ("c", 8.0))]
    score, scored = {"value": 60.0, "interval": None}, []

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
    code = (
        "import sys, dpllm.comparison.tasks; print({'torch', 'transformers', 'sacrebleu'} & sys.modules.keys() or '')"
    )
    assert run_program("-c", code) == "\n"
