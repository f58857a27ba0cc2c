"""Files to rows: JSON, csv, Parquet, Arrow.

Comes in: a file. Goes out: its rows, one after the other, as they are written there. Nothing is guessed: a value is text, or what
the file declares. Errors name files and lines and never the text of a row. It must not know which files are read.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import itertools
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dpllm.errors import DataError
from dpllm.recipe.config import CsvConfig
from dpllm.text.rows import Row

PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ROWS_AT_ONCE = 1000
"""Rows of a table that are Python objects at a time."""
_MORE = "\0more fields than the header line"
MOST_LEVELS = 100
"""Of lists and objects in one another in a row of JSON."""


def unpacked(name: str) -> str:
    """The name of a file without what says that it is compressed."""
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in PACKED else name


def suffix_of(path: Path) -> str:
    """In lower case; of a compressed file of text, the one before .gz."""
    inner = Path(unpacked(path.name)).suffix.lower()
    return path.suffix.lower() if inner == ".parquet" else inner


def _open(path: Path, encoding: str) -> IO[str]:
    opened: Any = PACKED.get(path.suffix.lower(), open)
    return cast("IO[str]", opened(path, "rt", encoding=encoding, newline=""))


def _read_json(path: Path, _: CsvConfig) -> Iterator[Row]:
    """One object a line, or one list of objects, which is held in memory."""
    with _open(path, "utf-8-sig") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first = next(lines, (0, ""))
        if first[1].lstrip().startswith("["):
            records = _parsed(first[1] + file.read(), f"{path}: its list", "one list of objects")
            for number, record in enumerate(records, start=1):
                yield _object(record, f"{path}: record {number}", "a list of objects")
            return
        for number, line in itertools.chain([first] if first[0] else [], lines):
            where, wanted = f"{path}: line {number}", "one object a line"
            yield _object(_parsed(line, where, wanted), where, wanted)


def _parsed(text: str, where: str, wanted: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _row(pairs, where))
        _limit_depth(value, MOST_LEVELS + (wanted == "one list of objects"))
    except RecursionError:
        raise DataError(f"{where} is nested more than {MOST_LEVELS} levels deep. Flatten or drop the row.") from None
    except ValueError:
        raise DataError(f"{where} is not valid JSON; {wanted} is expected.") from None
    return value


def _check_names(found: Sequence[str], where: str) -> None:
    """Refuses two columns of one name, which without a header line may be a text; nobody can ask for one without a name."""
    named = [name for name in found if name]
    if len(set(named)) < len(named):
        raise DataError(
            f"{where} has two columns, or keys, of one name, of which one would be lost. Rename or drop one of them."
        )


def _row(pairs: list[tuple[str, Any]], where: str) -> Row:
    _check_names([name for name, _ in pairs], where)
    return dict(pairs)


def _object(value: Any, where: str, wanted: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object; {wanted} is expected.")
    return value


def _limit_depth(value: Any, levels: int = MOST_LEVELS) -> None:
    """Raises the same error that json raises, but at a depth that no later reader of the row minds."""
    if not levels:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _limit_depth(inner, levels - 1)


def read_csv(path: Path, settings: CsvConfig) -> Iterator[Row]:
    """Each row by the names in the header line; a short line has no further columns."""
    with _open(path, settings.encoding or _encoding(path)) as file:
        header = file.readline()
        delimiter = settings.delimiter or _delimiter(header, ".tsv" in path.suffixes)
        lines = _unambiguous(itertools.chain([header], file), re.escape(delimiter))
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True, restkey=_MORE)
        csv.field_size_limit(2**31 - 1)
        number = 0
        try:
            _check_names(rows.fieldnames or (), f"{path}: its header line")
            for number, row in enumerate(rows, start=1):
                if any(row.pop(_MORE, ())):
                    raise DataError(
                        f"{path}: row {number} has more fields than the header line, so its columns may be shifted and the row "
                        "assigned to the wrong owner. Quote fields that contain the delimiter, or fix the row."
                    )
                yield {name: value for name, value in row.items() if value is not None}
        except csv.Error:
            raise DataError(
                f"{path}: row {number + 1} has an unclosed or undoubled quote, which could swallow the rows after it, or the "
                'delimiter is not data.csv.delimiter. Quote the whole field, and write "" inside it.'
            ) from None


def _unambiguous(lines: Iterator[str], mark: str) -> Iterator[str]:
    """The same lines, if each quote begins a field, ends one or is doubled in one.

    Elsewhere csv takes it for a letter, so that a row with a quote too many would end at the letter of somebody else.
    """
    text = '(?:[^"]|"")*+'
    field = f'(?:"{text}"|[^"{mark}]*+)'
    more = f"(?:{mark}{field})*+"
    closed = re.compile(field + more), re.compile(f'{text}"{more}')  # by whether the line begins in a quoted field
    opened = re.compile(f'(?:{field}{mark})*+"{text}'), re.compile(f'(?:{text}"{more}(?<={mark})")?{text}')
    inside = False
    for line in lines:
        if '"' in line:
            row = line.rstrip("\r\n")
            still = bool(opened[inside].fullmatch(row))
            if not still and not closed[inside].fullmatch(row):
                raise csv.Error
            inside = still
        yield line


def _encoding(path: Path) -> str:
    opened: Any = PACKED.get(path.suffix.lower(), open)
    with opened(path, "rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _delimiter(header: str, tabs: bool) -> str:
    """Of the header line alone, which nobody's row is: what people wrote decides nothing."""
    unquoted = re.sub(r'"[^"]*"', "", header)
    return "\t" if tabs else next((mark for mark in ",;\t|" if mark in unquoted), ",")


def _read_parquet(path: Path, _: CsvConfig) -> Iterator[Row]:
    from pyarrow import parquet

    with open(path, "rb") as file, parquet.ParquetFile(file) as table:  # pyarrow opens no name that is not UTF-8
        _check_names(table.schema_arrow.names, f"{path}: its table")
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _read_arrow(path: Path, _: CsvConfig) -> Iterator[Row]:
    """A stream, as ``datasets`` writes it, or a file of batches."""
    from pyarrow import ipc

    with open(path, "rb") as content:
        whole = content.read(6) == b"ARROW1"
        content.seek(0)
        table = ipc.open_file(content) if whole else ipc.open_stream(content)
        _check_names(table.schema.names, f"{path}: its table")
        for batch in map(table.get_batch, range(table.num_record_batches)) if whole else table:
            for start in range(0, len(batch), ROWS_AT_ONCE):
                yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,  # datasets would read all files of a directory by the types of the first
}
