"""Rows of a program and rows that memory does not hold: each is written by itself, comes back as it was, or is refused."""

import json
import re
import stat
import tempfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.errors import DataError
from dpllm.recipe.config import DataConfig
from dpllm.text import data
from dpllm.text.data import StoredRows, Table, sampled_rows
from dpllm.text.in_memory import write_rows
from dpllm.text.layouts import Row

ROWS = [{"text": f"Note {number}, café.", "who": f"p{number % 3}"} for number in range(5)]
NAMED = [["7", "8"], ["7", None]]


def written(rows: Any, tmp_path: Path, columns: tuple[str, ...] = ("who",)) -> list[Any]:
    path = write_rows(rows, columns, tmp_path / "rows", "train")
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".part"] == []
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kind", [list, iter, pd.DataFrame, datasets.Dataset.from_list])
def test_every_kind_of_rows_is_written_alike(kind: Any, tmp_path: Path) -> None:
    assert written(kind(ROWS), tmp_path) == ROWS


def test_the_name_of_rows_tells_nothing_of_them_and_a_run_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    """Numbers would tell a reader of two cards whether the rows were those of the call before."""
    calls = [write_rows(rows, ("who",), tmp_path / "rows", "train") for rows in (ROWS, ROWS, ROWS[1:])]
    assert len({path.name for path in calls}) == 3
    assert all(re.fullmatch(r"train-[0-9a-f]{16}\.jsonl", path.name) for path in calls)
    assert write_rows(ROWS, ("who",), tmp_path / "rows", "train", calls[1]) == calls[1]
    for before in (calls[2], tmp_path / "gone.jsonl"):
        assert write_rows(ROWS, ("who",), tmp_path / "rows", "train", before) != before
    assert all(path.suffix != ".part" for path in (tmp_path / "rows").iterdir())


@pytest.mark.parametrize(
    "column",
    [
        *([1, 2], [1.0, None], [True, False], pd.Categorical([1.5, None]), pd.array([1, 2], "int64[pyarrow]")),
        *(pd.array([1.5, 2.5], "Float64"), pd.Series([1.0, 2.0]).astype(object), pd.Series([7, "x"], dtype=object)),
        pd.to_datetime(["2026-01-01", None]),
    ],
    ids=lambda column: str(getattr(column, "dtype", column)),
)
def test_a_column_whose_type_the_rows_of_others_decide_is_refused(column: Any, tmp_path: Path) -> None:
    table = pd.DataFrame({"text": ["a", "b"], "who": column})
    with pytest.raises(DataError, match="column 'who'"):
        written(table, tmp_path)
    assert written(table, tmp_path, ()) == [{"text": "a"}, {"text": "b"}]  # what nobody reads is not written


@pytest.mark.parametrize("kind", ["string", "object", "category", "large_string[pyarrow]"])
def test_text_is_declared(kind: str, tmp_path: Path) -> None:
    for values in NAMED:
        table = pd.DataFrame({"text": ["a", "b"], "who": pd.Series(values, dtype="object").astype(kind)})
        assert [row["who"] for row in written(table, tmp_path)] == values
    declared = pd.DataFrame({"text": ["a", "b"], "who": pd.array([1, None], "Int64")})
    assert [row["who"] for row in written(declared, tmp_path)] == [1, None]


def test_nested_values_of_a_dataset_are_those_of_their_row_alone(tmp_path: Path) -> None:
    def talk(**keys: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "hi", **keys}]}

    first, second = talk(tool="x"), talk()
    (alone,) = written(datasets.Dataset.from_list([second]), tmp_path)
    assert written(datasets.Dataset.from_list([first, second]), tmp_path)[1] == alone == second
    integers, half = talk(calls=[{"dose": 1}]), talk(calls=[{"dose": 1.5}])
    assert written(datasets.Dataset.from_list([integers]), tmp_path) == [integers]
    with pytest.raises(DataError, match="column 'messages'"):
        written(datasets.Dataset.from_list([integers, half]), tmp_path)
    numbers = datasets.Dataset.from_list([{"text": "a", "who": 7}])
    with pytest.raises(DataError, match="column 'who'"):
        written(numbers, tmp_path)


def test_values_become_those_of_json_and_a_column_of_the_format_is_never_left_out_unseen(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'input'"):
        written(pd.DataFrame({"instruction": ["add"], "input": [41], "output": ["42"]}), tmp_path)
    rows = [{"text": "a", "who": np.int64(7), "prompt": float("nan"), "input": pd.NA, "output": pd.NaT, "extra": 1}]
    assert written(rows, tmp_path) == [{"text": "a", "who": 7, "prompt": None, "input": None, "output": None}]


@pytest.mark.parametrize(
    "rows",
    [
        *(pd.Series(["a"]), SimpleNamespace(dtypes=[], columns=["text"])),
        *([], {"text": ["a"]}, "train.jsonl", Path("train.jsonl"), 5, ["a"], [{1: "a"}]),
        *([{"text": 1j}], [{"text": [float("inf")]}], [{"text": pd.Timestamp(0)}]),
        pd.DataFrame([["a", "b"]], columns=["text", "text"]),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
    ],
    ids=repr,
)
def test_values_that_are_no_rows_are_refused_and_leaves_no_file(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^train: ((?!1j).)*$"):
        written(rows, tmp_path)
    assert not list(tmp_path.rglob("*.jsonl")) + list(tmp_path.rglob("*.part"))


Json = dict[str, Any]
TEXTS = [{"text": tiny.sentence(number)} for number in range(40)]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=9), buffer=st.integers(0, 200))
def test_rows_come_back_in_any_order_wherever_they_lie(rows: list[Json], buffer: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = StoredRows(Path(folder) / "cache", buffer)
        for number, row in enumerate(rows):
            stored.append(Row(row))
            assert stored[number] == Row(row)
    # The folder is gone, and with it every name of the file.
    typed = [Row(row) for row in rows]
    assert list(stored) == typed == stored[:]
    assert [stored[number] for number in reversed(range(len(rows)))] == typed[::-1]
    assert stored[1:-1] == typed[1:-1]
    with pytest.raises(IndexError):
        stored[len(rows)]


def test_rows_may_hold_what_json_cannot(tmp_path: Path) -> None:
    row = {"text": "half \ud800", None: ["more", "cells"], "when": datetime(2026, 1, 1), "raw": b"\x00"}
    for buffer in (0, 2**20):
        stored = StoredRows(tmp_path, buffer)
        stored.append(Row(row))
        assert stored[0] == Row(row)


def test_few_rows_never_touch_the_disk_and_many_leave_no_name_there(tmp_path: Path) -> None:
    few, many = StoredRows(tmp_path / "few"), StoredRows(tmp_path / "many", 64)
    for row in TEXTS:
        few.append(Row(row))
        many.append(Row(row))
    assert not (tmp_path / "few").exists()
    assert list((tmp_path / "many").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "many").stat().st_mode) == 0o700


WHO = st.sampled_from(["a", "b", "cc", 1, "1", 1.0, True])
OWNED = st.fixed_dictionaries({"who": WHO, "text": st.text("xy", max_size=2)})


def grouped_in_memory(rows: list[Row], limit: int) -> list[list[Row]]:
    units: dict[str, list[Row]] = {}
    for row in rows:
        units.setdefault("1" if row.unit == 1.0 and row.unit is not True else str(row.unit), []).append(row)
    return [sorted(group, key=lambda row: data._row_hash(row, ["text"]))[:limit] for group in units.values()]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=st.lists(OWNED, min_size=1, max_size=20), limit=st.integers(1, 4))
def test_grouping_by_hashes_is_grouping_by_values(rows: list[Json], limit: int) -> None:
    typed = tiny.rows(rows, "who")
    data_section = DataConfig(train="rows.jsonl", unit="who", max_examples_per_unit=limit)
    groups = data.group_rows(Table("rows.jsonl", typed, "text"), data_section)
    expected = grouped_in_memory(typed, limit)
    assert list(groups) == expected == groups[:]
    assert groups[-1] == expected[-1]
    alone = DataConfig(train="rows.jsonl", unit="who", max_examples_per_unit=3, sampling="example")
    singles = sampled_rows(Table("rows.jsonl", typed, "text"), alone)
    assert list(singles) == [[row] for group in grouped_in_memory(typed, 3) for row in group]
