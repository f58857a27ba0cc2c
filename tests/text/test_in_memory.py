"""Rows of a program: how each is written depends on that row and on public types, and what JSON cannot hold is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from dpllm.errors import DataError
from dpllm.text.in_memory import write_rows

ROWS = [{"text": f"Note {number}, café.", "who": f"p{number % 3}"} for number in range(5)]


def written(rows: Any, tmp_path: Path, named: tuple[str, ...] = ("who",)) -> list[Any]:
    path = write_rows(rows, named, tmp_path / "rows", "train")
    assert [other.name for other in path.parent.iterdir() if other.suffix == ".part"] == []
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kind", [list, iter, pd.DataFrame, datasets.Dataset.from_list])
def test_every_kind_of_rows_is_written_alike(kind: Any, tmp_path: Path) -> None:
    assert written(kind(ROWS), tmp_path) == ROWS
    first = write_rows(kind(ROWS), ("who",), tmp_path / "rows", "train")
    other = write_rows(kind(ROWS[1:]), ("who",), tmp_path / "rows", "train")
    again = write_rows(kind(ROWS), ("who",), tmp_path / "rows", "train")
    assert (first.name, other.name, again) == (
        "train-1.jsonl",
        "train-2.jsonl",
        first,
    )  # a card shows it: no hash of rows


def test_a_column_that_pandas_types_by_the_rows_of_others_is_refused_or_left_out(tmp_path: Path) -> None:
    whole = pd.DataFrame({"text": ["a", "b"], "who": [1, 2], "price": [1.5, 2.5]})
    assert written(whole, tmp_path) == [{"text": "a", "who": 1}, {"text": "b", "who": 2}]
    gap = pd.DataFrame({"text": ["a", "b"], "who": [1, None]})
    for rows in (gap, datasets.Dataset.from_pandas(gap)):
        with pytest.raises(DataError, match="'who' is of type"):
            written(rows, tmp_path)
    declared = gap.astype({"who": "Int64"})
    assert written(declared, tmp_path) == [{"text": "a", "who": 1}, {"text": "b", "who": None}]


def test_missing_and_numpy_values_become_those_of_json(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "who": np.int64(7), "parts": np.array([1, 2]), "none": float("nan"), "na": pd.NA, "at": pd.NaT}
    ]
    assert written(rows, tmp_path) == [{"text": "a", "who": 7, "parts": [1, 2], "none": None, "na": None, "at": None}]


@pytest.mark.parametrize(
    "rows",
    [
        *([], {"text": ["a"]}, "train.jsonl", Path("train.jsonl"), 5, ["a"], [{1: "a"}]),
        *([{"text": 1j}], [{"text": [float("inf")]}], [{"text": pd.Timestamp(0)}]),
        pd.DataFrame([["a", "b"]], columns=["text", "text"]),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
    ],
    ids=repr,
)
def test_what_are_no_rows_is_refused_and_leaves_no_file(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^train: ") as told:
        written(rows, tmp_path)
    assert "1j" not in str(told.value)
    assert not list(tmp_path.rglob("*.jsonl")) + list(tmp_path.rglob("*.part"))
