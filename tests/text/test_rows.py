"""Rows that memory does not hold come back as they were, and are grouped as their values say."""

import stat
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.recipe.config import DataConfig
from dpllm.text import data
from dpllm.text.data import StoredRows, Table, sampled_rows
from dpllm.text.layouts import Row

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
