"""Reading a source of text row by row: files, directories of datasets, the Hub, embedded data.

Comes in: a data source. Goes out: its rows, one after the other, so that a source larger than memory can be read. Its
errors name files, lines and columns and never the text of a row. It must not know what a row is for.

``datasets`` reads directories and what comes from the Hub. Single files are read by hand: ``datasets`` would copy their text into
a cache, guess the type of a column from the rows of all people (a date, a number), and quote rows in its errors.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from dpllm.errors import DataError
from dpllm.recipe import names
from dpllm.recipe.config import CsvConfig, DataConfig, Source
from dpllm.text import builtin
from dpllm.text.rows import Row

ROWS_AT_ONCE = 1000
"""Rows of a table that are Python objects at a time."""
MOST_LEVELS = 100
"""Of lists and objects in one another in a row of JSON."""
KNOWN = (
    "a jsonl, json, csv or parquet file (the first three also as .gz), a glob, a directory of files or datasets, a Hub id, or a "
    "list of them"
)


def expand(source: Source) -> list[str]:
    """Every file, directory, Hub id and builtin name of a source, in its order; the files of a glob by name.

    Raises:
        DataError: A glob that matches nothing, or a file that is named twice: its people would count as two.
    """
    found: dict[str, str] = {}
    for part in names.listed(source):
        matched = [part]
        if glob.has_magic(part) and not Path(part).exists():
            matched = sorted(glob.glob(part, recursive=True))
        if not matched:
            raise DataError(
                f"{part}: no file matches, so there is nothing to learn from. Check data.train and data.eval."
            )
        for name in matched:
            key = name if names.is_builtin(name) else str(Path(name).resolve())
            if key in found:
                raise DataError(f"{name}: is named twice, so everybody in it would count as two people. Name it once.")
            found[key] = name
    return list(found.values())


def is_here(source: Source) -> bool:
    """Whether all of a source lies on this machine."""
    try:
        return all(names.is_builtin(name) or Path(name).exists() for name in expand(source))
    except DataError:
        return False


def read_rows(source: str, data: DataConfig, split: str, cache_dir: Path) -> Iterator[Row]:
    """Reads one of the sources that ``expand`` found, row by row, as it is written there; see ``data.load_table``.

    Raises:
        DataError: A source that is missing, of no known kind or damaged.
    """
    try:
        path = builtin.path(source) if names.is_builtin(source) else Path(source)
    except KeyError as error:
        raise DataError(str(error.args[0])) from None
    suffix = _suffix(path)
    read = READERS.get(suffix)
    if read and path.is_file():
        try:
            yield from read(path, data.csv)
        except (OSError, EOFError, zlib.error, LookupError, csv.Error, ValueError) as error:
            # The message of the parser may quote the row; its type does not.
            mend = ""
            if isinstance(error, UnicodeError | LookupError):
                mend = (
                    " Name its encoding in data.csv.encoding, such as cp1252."
                    if read is _read_csv
                    else " JSON is UTF-8."
                )
            raise DataError(f"{source}: cannot be read as {suffix} ({type(error).__name__}).{mend}") from None
    elif path.is_dir():
        _check_kinds(path)
        yield from _read_directory(path, data.csv, split, cache_dir)
    elif read or path.is_file() or source.count("/") != 1:
        reason = "is of no known kind" if path.exists() else "no such file"
        raise DataError(f"{source}: {reason}. data.train and data.eval take {KNOWN}.")
    else:
        yield from _read_hub(source, data, split, cache_dir)


def _suffix(path: Path) -> str:
    """In lower case; of a gzip file of text, the one before .gz."""
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix.lower() == ".gz" and inner != ".parquet" else path.suffix.lower()


def _open(path: Path, encoding: str) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding=encoding, newline=""))
    return open(path, encoding=encoding, newline="")


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
        value = json.loads(text)
        _limit_depth(value, MOST_LEVELS + (wanted == "one list of objects"))
    except RecursionError:
        raise DataError(
            f"{where} is nested more than {MOST_LEVELS} levels deep, which no format reads. Mend or drop the row."
        ) from None
    except ValueError:
        raise DataError(f"{where} is not valid JSON; {wanted} is expected.") from None
    return value


def _object(value: Any, where: str, wanted: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} holds no JSON object; {wanted} is expected.")
    return value


def _limit_depth(value: Any, levels: int = MOST_LEVELS) -> None:
    """Raises the same error that json raises, but at a depth that no later reader of the row minds."""
    if not levels:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _limit_depth(inner, levels - 1)


def _read_csv(path: Path, settings: CsvConfig) -> Iterator[Row]:
    with _open(path, settings.encoding or _encoding(path)) as file:
        header = file.readline()
        delimiter = settings.delimiter or _delimiter(header, ".tsv" in path.suffixes)
        yield from csv.DictReader(itertools.chain([header], file), delimiter=delimiter)


def _encoding(path: Path) -> str:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _delimiter(header: str, tabs: bool) -> str:
    """Of the header line alone, which nobody's row is: what people wrote decides nothing."""
    unquoted = re.sub(r'"[^"]*"', "", header)
    return "\t" if tabs else next((mark for mark in ",;\t|" if mark in unquoted), ",")


def _read_parquet(path: Path, _: CsvConfig) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    ".parquet": _read_parquet,
}


def _check_kinds(path: Path) -> None:
    kinds = {suffix for file in path.rglob("*") if (suffix := _suffix(file)) in READERS}
    saved = any(
        (path / name).exists() for name in ("dataset_dict.json", "state.json", "README.md")
    )  # these say what they hold
    if len(kinds) > 1 and not saved:
        raise DataError(
            f"{path}: holds {' and '.join(sorted(kinds))} files, of which datasets would read one kind and leave out the others. "
            "Name the files, or a glob such as DIR/*.jsonl."
        )


def _read_directory(path: Path, settings: CsvConfig, split: str, cache_dir: Path) -> Iterator[Row]:
    import datasets

    datasets.disable_progress_bars()
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            loaded = datasets.load_from_disk(str(path))
        else:
            said = {"sep": settings.delimiter, "encoding": settings.encoding}
            said = {key: value for key, value in said.items() if value}
            loaded = datasets.load_dataset(str(path), cache_dir=str(cache_dir), **said)
        if isinstance(loaded, dict):
            if split not in loaded:
                raise DataError(f"{path}: has no split {split!r}; it has {', '.join(loaded)}. Set data.train_split.")
            loaded = loaded[split]
        for table in loaded.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            yield from table.to_pylist()
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds, and its messages may quote rows
        raise DataError(f"{path}: cannot be read as a directory of datasets ({type(error).__name__}).") from None


def _read_hub(source: str, data: DataConfig, split: str, cache_dir: Path) -> Iterator[Row]:
    # datasets would keep the downloaded files in the user's shared Hub cache; a snapshot into our own folder does not.
    from huggingface_hub import snapshot_download

    target = cache_dir / "hub" / source.replace("/", "--")
    try:
        snapshot_download(source, repo_type="dataset", revision=data.revision, local_dir=target)
    except Exception as error:
        raise DataError(
            f"{source}: no such file, and the Hub gave no dataset of that name ({type(error).__name__}). "
            "Check the spelling and the network, or set data.train and data.eval to local files."
        ) from None
    yield from _read_directory(target, data.csv, split, cache_dir)
