"""What is measured of held-out rows: all references of a prompt, nothing twice, and clear words where something is missing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
from comparing import make_run, weights, write_held_out
from rich.console import Console

from dpllm.comparison import tasks
from dpllm.comparison.compared_runs import PROTOCOL, TASKS, cached
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.run.directory import RunDir
from dpllm.statement.run_files import read_run

INF = float("inf")


def test_prompts_are_counted_once_and_keep_all_references() -> None:
    rows = [{"prompt": p, "completion": c} for p, c in (("a", " 1"), ("b", "2 "), ("a", "3"), ("c", "4"), ("b", "5"))]
    assert tasks.by_prompt(rows, 2) == {"a": ["1", "3"], "b": ["2", "5"]}
    assert list(tasks.by_prompt(rows, 9)) == ["a", "b", "c"]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else find(name))
    with pytest.raises(ConfigError, match=r"sacrebleu, which is not installed. Type: pip install sacrebleu"):
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


def test_scores_of_another_protocol_are_made_again_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sacrebleu")
    run, made = make_run(tmp_path / "a", 3.0), []
    scores = {"bleu": {"value": 60.0, "interval": None}}
    found = {"weights": weights(run.root), "asked": 3, "prompts": 3, "references": 5, "tuned": scores, "base": scores}
    monkeypatch.setattr(tasks, "_written", lambda *_: made.append(1) or {**found, "protocol": PROTOCOL})
    for protocol, known in ((None, False), ({**PROTOCOL, "beams": 1}, False), (PROTOCOL, True)):
        write_json(run.private / TASKS, {**found, "protocol": protocol})
        assert (cached(run, TASKS, read_run(run)) is not None) == known
        tasks.measure([run], rows=3, losses=False)
        assert len(made) == (0 if known else 1)
        made.clear()


def test_a_run_without_losses_is_compared_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Mock(side_effect=ConfigError("the base model is not at hand. Fetch it."))
    monkeypatch.setattr(tasks, "_losses", fails)
    run, console = make_run(tmp_path / "a", 3.0), Console(file=io.StringIO(), width=200)
    tasks.measure([run], console=console)
    assert "No intervals for a: the base model is not at hand." in console.file.getvalue()  # type: ignore[attr-defined]
    assert not (run.private / "held_out.json").exists()


def test_importing_it_loads_no_model_library() -> None:
    import subprocess

    code = "import sys, dpllm.comparison.tasks; print([n for n in ('torch', 'transformers', 'sacrebleu') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
