"""A row passes through few files of dpllm, from its source to the pass of a step and to an audit; a source is read once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiny
import yaml
from running import done

import dpllm
from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.text import builtin, data
from dpllm.text.layouts import Row
from dpllm.text.rendering import Rendered

SENTENCE = "Zebulon lost 4711 plums"
HOME = f"{Path(dpllm.__file__).parent}/"
READING = {"text/sources.py", "text/layouts.py", "text/data.py"}
TOKENS = {"text/rendering.py", "text/tokens.py"}
# The ledger keeps a hash of the row, private/ one of its text, and the loop lays it into passes.
TRAINING = {*READING, *TOKENS, "ledger/records.py", "text/prompts.py", "run/loop.py", "privacy/packing.py"}
AUDIT = {*READING, *TOKENS, "ledger/records.py", "auditing/members.py", "auditing/scores.py", "auditing/statistics.py"}


def holds(value: Any, ids: tuple[int, ...], depth: int = 0) -> bool:
    """Whether the row stands in a value, as text or as tokens."""
    if isinstance(value, str | bytes):
        return (SENTENCE if isinstance(value, str) else SENTENCE.encode()) in value
    if isinstance(value, TokenSequence):
        return any(value.input_ids[start : start + len(ids)] == ids for start in range(len(value.input_ids)))
    if isinstance(value, Row | Rendered | Unit):
        return holds(
            value.parts if isinstance(value, Row) else value[0] if isinstance(value, Rendered) else value.sequences, ids
        )
    if depth < 3 and type(value) in (dict, list, tuple) and len(value) < 300:
        return any(holds(inner, ids, depth + 1) for inner in (value.values() if isinstance(value, dict) else value))
    return False


@contextmanager
def watched(ids: tuple[int, ...]) -> Iterator[set[str]]:
    """The files of dpllm of which a function holds the row, or calls one that does."""
    files: set[str] = set()

    def profile(frame: FrameType, event: str, value: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(HOME):
            held = [*dict(frame.f_locals).values(), value]
            if any(holds(item, ids) for item in held):
                both = [item.f_code.co_filename for item in (frame, frame.f_back) if item is not None]
                files.update(name.removeprefix(HOME) for name in both if name.startswith(HOME))

    threading.setprofile(profile)  # batches are laid out in a thread
    sys.setprofile(profile)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_row_passes_through_few_files_and_its_source_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "eval"):
        some = [{"who": f"{name}{n}", "text": f"{name}: {tiny.sentence(n)}"} for n in range(60)]
        if name == "train":
            some[17]["text"] = SENTENCE
        tiny.write_rows(tmp_path / f"{name}.jsonl", some)
    recipe = {
        "model": {"name_or_path": "builtin:tiny"},
        "data": {
            **{name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")},
            **{"unit": "who", "max_examples_per_unit": 2, "max_length": 64},
        },
        "privacy": {"ledger": str(tmp_path / "ledger.sqlite")},
        "train": {"batch_size": 40, "steps": 12},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    from transformers import AutoTokenizer

    ids = tuple(AutoTokenizer.from_pretrained(builtin.path("builtin:tiny"))(SENTENCE)["input_ids"][1:7])
    read, read_rows = list[str](), data.read_rows
    monkeypatch.setattr(data, "read_rows", lambda name, *more: read.append(Path(name).name) or read_rows(name, *more))
    done("plan", tmp_path / "recipe.yaml")
    assert read == ["train.jsonl", "eval.jsonl"]
    read.clear()
    with watched(ids) as files:
        done("train", tmp_path / "recipe.yaml")
    assert read == ["train.jsonl", "eval.jsonl"]
    assert files == TRAINING
    done("card", tmp_path / "run")
    read.clear()
    with watched(ids) as files:
        done("audit", tmp_path / "run", "--members")
    assert read == ["train.jsonl", "eval.jsonl"]
    assert files == AUDIT
