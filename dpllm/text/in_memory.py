"""Rows that a program holds, written to a file of their owner's: a list of dicts, a pandas DataFrame, a datasets.Dataset.

Comes in: rows, and which columns the recipe names. Goes out: the path of a JSON Lines file, which is then read as any other. Its
errors name columns and rows and never what is in them. Imports neither pandas nor datasets: whoever holds such rows has it.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpllm.errors import DataError
from dpllm.files import locked
from dpllm.text.sources import ROWS_AT_ONCE

_GUESSED = re.compile(r"float|double|complex|datetime|timestamp|timedelta|duration|date|time")
"""Types of a column that pandas and datasets choose by the rows of everybody, or that JSON has no word for."""


def write_rows(rows: Any, named: Collection[str], folder: Path, name: str) -> Path:
    """Writes rows to ``folder``/``name``-NUMBER.jsonl, which only its owner can read; equal rows have the same file.

    A card names the file, so no hash of the rows is in its name: whoever guesses them could check it.

    Args:
        rows: Dicts, one after the other; a ``pandas.DataFrame``; a ``datasets.Dataset``.
        named: Columns that the recipe names. Other columns of numbers with a point, or of times, are left out.
        folder: Is made.
        name: Such as ``train``; errors name it.

    Raises:
        DataError: No rows, a row that is no dict or that JSON cannot hold, or a named column whose type depends on other rows.

    Guarantee:
        How a row is written depends on that row and on public column types alone; other rows can only make the whole be refused.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 0
    descriptor, written = tempfile.mkstemp(dir=folder, suffix=".part")
    part = Path(written)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            for number, row in enumerate(_rows(rows, named, name), start=1):
                file.write(_line(row, f"{name}: row {number}"))
        if not number:
            raise DataError(f"{name}: holds no rows. Give at least one.")
        with locked(folder / ".lock"):  # several processes of one run give the same rows
            for path in (folder / f"{name}-{place}.jsonl" for place in itertools.count(1)):
                if not path.exists():
                    return part.rename(path)
                if filecmp.cmp(path, part, shallow=False):
                    return path
        raise AssertionError  # itertools.count has no end
    finally:
        part.unlink(missing_ok=True)


def _rows(rows: Any, named: Collection[str], name: str) -> Iterator[Any]:
    if isinstance(rows, str | os.PathLike | bytes | Mapping):
        kind = "dict" if isinstance(rows, Mapping) else type(rows).__name__
        raise DataError(
            f"{name}: expects rows, not a {kind}. Give a list of dicts, a DataFrame or a Dataset (a single split); to read a "
            f"file, put its path into the recipe as data.{name}."
        )
    if hasattr(rows, "iloc"):  # a DataFrame
        columns = _columns({column: str(kind) for column, kind in rows.dtypes.items()}, named, name)
        if not rows.columns.is_unique:
            raise DataError(f"{name}: two columns have the same name, so one would be lost. Rename one.")
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield from rows.iloc[start : start + ROWS_AT_ONCE][columns].to_dict("records")
    elif getattr(rows, "features", None):  # a Dataset
        kinds = {column: str(getattr(kind, "dtype", kind)) for column, kind in rows.features.items()}
        yield from rows.select_columns(_columns(kinds, named, name))
    elif hasattr(rows, "__iter__"):
        yield from rows
    else:
        raise DataError(f"{name}: expects rows, not a {type(rows).__name__}. Give a list of dicts or a DataFrame.")


def _columns(kinds: Mapping[Any, str], named: Collection[str], name: str) -> list[Any]:
    """The columns that are written; a named one whose type the rows of others decide is refused."""
    for column, kind in kinds.items():
        if column in named and _GUESSED.match(kind.lower()):
            raise DataError(
                f"{name}: column {column!r} is of type {kind}. A missing value in one row would turn 1 into 1.0 in all others, "
                "so one row would change how others are read. Read it as text, as in pandas.read_csv(..., "
                f'dtype={{"{column}": "string"}}).'
            )
    return [column for column, kind in kinds.items() if not _GUESSED.match(kind.lower())]


def _line(row: Any, place: str) -> str:
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise DataError(
            f"{place} is a {type(row).__name__}, not a dict. Give each row as a dict of column names and values."
        )
    found = {column: None if _missing(value) else value for column, value in row.items()}
    for column, value in found.items():
        try:
            found[column] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise DataError(
                f"{place}: column {column!r} holds a {type(value).__name__}, not text, a number, a list or a dict. Convert it "
                "to text, or drop the column."
            ) from None
    return json.dumps(found, ensure_ascii=True) + "\n"


def _missing(value: Any) -> bool:
    """None, NaN, and pandas' own words for them."""
    return (
        value is None or type(value).__name__ in {"NAType", "NaTType"} or (isinstance(value, float) and value != value)
    )


def _plain(value: Any) -> Any:
    """A value of numpy as one of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
