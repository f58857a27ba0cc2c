"""Writes rows in memory (dicts, a pandas DataFrame, a datasets.Dataset) to a file that only its owner can read.

Comes in: rows, and the columns that the recipe names. Goes out: the path of a JSON Lines file, which is read like any other.
Errors name columns and rows and never their contents. Must not import pandas or datasets: callers with such rows have them.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpllm.errors import DataError
from dpllm.text.layouts import COLUMNS, TEMPLATE_COLUMNS
from dpllm.text.sources import ROWS_AT_ONCE

_DECLARED = re.compile(r"object|str|(large_)?string(\[.*\])?|U?Int(8|16|32|64)|boolean")
"""Text types, and types that pandas never infers: it reads 007 as int64 if all other values are numbers too."""
_NUMBERS = re.compile("U?Int|boolean")
_LEAVES = re.compile(r"Value\('(?!(large_)?string'|u?int\d|bool)")
"""Types in a nested column that depend on everybody's rows, such as float, or that JSON lacks."""


def write_rows(rows: Any, columns: Collection[str], folder: Path, name: str, earlier: Path | None = None) -> Path:
    """Writes rows to ``folder``/``name``-RANDOM.jsonl, which only its owner can read.

    A card names the file, so its name has no hash of the rows, which would confirm a guess of them, and no number, which would
    show whether they are those of an earlier call.

    Args:
        rows: An iterable of dicts, a ``pandas.DataFrame`` or a ``datasets.Dataset``.
        columns: Columns that the recipe names; only these and those of the formats are written.
        folder: Folder of the file; it is made if missing.
        name: A name for errors and the file, such as ``train``.
        earlier: The file of a resumed run, which is used again if it holds the same rows.

    Raises:
        DataError: There are no rows, a row is not a dict of JSON values, or the type of a column depends on other rows.

    Guarantee:
        How a row is written depends on that row alone; other rows can only cause a refusal of all rows.
    """
    readable = {*columns, *TEMPLATE_COLUMNS, *COLUMNS}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, part_name = tempfile.mkstemp(dir=folder, suffix=".part")
    part, number = Path(part_name), 0
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            table = _is_frame(rows) or bool(getattr(rows, "features", None))
            kinds = rows.dtypes.items() if _is_frame(rows) else ()
            numbers = {column for column, kind in kinds if _NUMBERS.match(str(kind))}
            for number, row in enumerate(_rows(rows, readable, name), start=1):
                file.write(_line(row, readable, f"{name}: row {number}", table=table, numbers=numbers))
        if not number:
            raise DataError(f"{name}: holds no rows. Give at least one.")
        if earlier is not None and earlier.is_file() and filecmp.cmp(earlier, part, shallow=False):
            return earlier
        return part.rename(folder / f"{name}-{secrets.token_hex(8)}.jsonl")
    finally:
        part.unlink(missing_ok=True)


def _is_frame(rows: Any) -> bool:
    """Only a pandas DataFrame has both: a Series has no columns, and frames of other libraries have no iloc."""
    return hasattr(rows, "iloc") and hasattr(rows, "columns")


def _rows(rows: Any, readable: Collection[str], name: str) -> Iterator[Any]:
    if isinstance(rows, str | os.PathLike | bytes | Mapping):
        kind = "dict" if isinstance(rows, Mapping) else type(rows).__name__
        raise DataError(
            f"{name}: expects rows, not a {kind}. Give a list of dicts, a DataFrame or a Dataset (a single split); to read a "
            f"file, put its path into the recipe as data.{name}."
        )
    if _is_frame(rows):
        if not rows.columns.is_unique:
            raise DataError(f"{name}: has two columns of one name, so one would be lost. Rename one.")
        columns = [column for column in rows.columns if column in readable]
        for column in columns:
            kind = getattr(getattr(rows[column], "cat", None), "categories", rows[column]).dtype
            _check(column, str(kind), bool(_DECLARED.fullmatch(str(kind))), name)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield from rows.iloc[start : start + ROWS_AT_ONCE][columns].to_dict("records")
    elif getattr(rows, "features", None):  # a Dataset
        columns = [column for column in rows.features if column in readable]
        for column in columns:
            kind = rows.features[column]
            flat = getattr(kind, "dtype", None)
            text = flat in ("string", "large_string") if isinstance(flat, str) and "Value(" in repr(kind)[:6] else None
            _check(column, str(flat or kind), not _LEAVES.search(repr(kind)) if text is None else text, name)
        yield from rows.select_columns(columns)
    elif hasattr(rows, "__iter__") and not hasattr(rows, "iloc"):
        yield from rows
    else:
        raise DataError(f"{name}: expects rows, not a {type(rows).__name__}. Give a list of dicts or a DataFrame.")


def _check(column: str, kind: str, declared: bool, name: str) -> None:
    """Refuses a column whose type may depend on other people's rows."""
    if not declared:
        raise DataError(
            f"{name}: column {column!r} is of type {kind}, which pandas and datasets infer from everybody's rows: 007 becomes 7, "
            "and 1 becomes 1.0 if another row has no value, so one person's row would decide how others are read. Make it text "
            f'when you read the data, as in pandas.read_csv(..., dtype={{"{column}": "string"}}), or leave it out.'
        )


def _line(row: Any, readable: Collection[str], location: str, *, table: bool, numbers: Collection[str]) -> str:
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise DataError(f"{location} is a {type(row).__name__}; a dict with names of columns is expected.")
    values = {}
    for column in row.keys() & readable:
        try:
            values[column] = _plain(row[column], table)
            if table and isinstance(values[column], int) and column not in numbers:
                raise TypeError  # in an object column, whose types pandas infers for each part of the file
            json.dumps(values[column], allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise DataError(
                f"{location}: column {column!r} holds a {type(row[column]).__name__}. A column that is read holds text, or lists "
                "and dicts of text; numbers only if rows are a list of dicts, where no table infers types. Make it text."
            ) from None
    return json.dumps(values, sort_keys=True) + "\n"


def _plain(value: Any, table: bool) -> Any:
    """A JSON value; for a table, drops keys that only other rows have, and raises a TypeError for a float."""
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if value is None or type(value).__name__ in {"NAType", "NaTType"} or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, Mapping):
        inner = {key: _plain(item, table) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not None or not table}
    if isinstance(value, list | tuple):
        return [_plain(item, table) for item in value]
    if not isinstance(value, str | bool | int | float) or (table and isinstance(value, float)):
        raise TypeError
    return value
