"""Reading a source of text row by row: files, directories of datasets, the Hub, embedded data.

Comes in: a data source. Goes out: its rows, one after the other, so that a source larger than memory can be read. Its
errors name files, lines and columns and never the text of a row. It must not know what a row is for.

``datasets`` says which files of a directory or of the Hub are a split, and reads those whose types are declared: saved datasets
and lines of text. Other files are read by hand: ``datasets`` would copy their text into a cache, guess the type of a
column from the rows of all people (007 becomes 7 until one person is called x), and quote rows in its errors.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import glob
import gzip
import itertools
import json
import lzma
import re
import socket
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from dpllm.errors import DataError
from dpllm.files import resolved
from dpllm.recipe import names
from dpllm.recipe.config import CsvConfig, DataConfig, Source
from dpllm.text import builtin
from dpllm.text.rows import Row

PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ROWS_AT_ONCE = 1000
"""Rows of a table that are Python objects at a time."""
_MORE = "\0more fields than the header line"
_VALUES = ValueError, ArithmeticError, NotImplementedError  # pyarrow's, and Python's of a date that it does not have
MOST_LEVELS = 100
"""Of lists and objects in one another in a row of JSON."""
KNOWN = (
    "a jsonl, json, csv, parquet or arrow file (the first three also as .gz, .bz2 or .xz), a glob, a directory of files or "
    "datasets, a Hub id, or a list of them"
)


def expand(source: Source) -> list[str]:
    """Every file, directory, Hub id and builtin name of a source, in its order; the files of a glob by name.

    Raises:
        DataError: A glob that matches nothing, or a file that is named twice: its people would count as two.
    """
    found: list[str] = []
    for part in names.listed(source):
        matched = [part]
        if glob.has_magic(part) and not Path(part).exists():
            matched = sorted(glob.glob(part, recursive=True))
        if not matched:
            raise DataError(f"{part}: no file matches. Check data.train and data.eval.")
        below = {str(parent) for name in matched for parent in Path(name).parents}
        found += matched if matched == [part] else [name for name in matched if str(Path(name)) not in below]
    return _once(found)


def _once(found: list[str]) -> list[str]:
    """The same, if no file is there twice: by another path, below a directory that is named too, or packed beside itself."""
    seen: set[Any] = set()
    folders = {resolved(name) for name in found if Path(name).is_dir()}
    for name in found:
        path = resolved(name)
        keys: set[Any] = {name if names.is_builtin(name) else unpacked(str(path))}
        if path.exists():
            keys.add((path.stat().st_dev, path.stat().st_ino))
        if keys & seen or folders & set(path.parents):
            raise DataError(
                f"{name}: is read twice (also named through a link or a directory, or also there as a compressed copy), so "
                "everybody in it would count as two people. Name it once."
            )
        seen |= keys
    return found


def files(source: Source, data: DataConfig, split: str, cache_dir: Path) -> list[str]:
    """The same as ``expand``, where a directory or Hub id is replaced by the files of the split, if ``read_rows`` reads them.

    Raises:
        DataError: See ``expand``; a split that is not there; a directory of several kinds of files.
    """
    found: list[str] = []
    for name in expand(source):
        path = Path(name)
        if path.is_dir():
            _check_kinds(path)
        elif not names.is_builtin(name) and _is_hub(name):
            path = _download(name, data, cache_dir)
        found += _of_split(path, split, cache_dir) if path.is_dir() else [name]
    return _once(found)


def _is_hub(name: str) -> bool:
    return not Path(name).exists() and _suffix(Path(name)) not in READERS and name.count("/") == 1


def is_here(source: Source) -> bool:
    """Whether all of a source lies on this machine."""
    try:
        return all(names.is_builtin(name) or Path(name).exists() for name in expand(source))
    except DataError:
        return False


def read_rows(source: str, data: DataConfig, split: str, cache_dir: Path) -> Iterator[Row]:
    """Reads one of the sources that ``files`` found, row by row, as it is written there; see ``data.load_table``.

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
        except (OSError, EOFError, zlib.error, lzma.LZMAError, LookupError, csv.Error, *_VALUES) as error:
            # The message of the parser may quote the row; its type does not.
            fix = ""
            if isinstance(error, UnicodeError | LookupError):
                fix = (
                    " Name its encoding in data.csv.encoding, such as cp1252."
                    if read is _read_csv
                    else " JSON is UTF-8."
                )
            raise DataError(f"{source}: cannot be read as {suffix} ({type(error).__name__}).{fix}") from None
    elif path.is_dir():
        yield from _read_directory(path, split, cache_dir)
    else:
        reason = "has an unknown file type" if path.exists() else "no such file"
        raise DataError(f"{source}: {reason}. data.train and data.eval accept {KNOWN}.")


def unpacked(name: str) -> str:
    """The name of a file without what says that it is compressed."""
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in PACKED else name


def _suffix(path: Path) -> str:
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
        value = json.loads(text)
        _limit_depth(value, MOST_LEVELS + (wanted == "one list of objects"))
    except RecursionError:
        raise DataError(f"{where} is nested more than {MOST_LEVELS} levels deep. Flatten or drop the row.") from None
    except ValueError:
        raise DataError(f"{where} is not valid JSON; {wanted} is expected.") from None
    return value


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


def _read_csv(path: Path, settings: CsvConfig) -> Iterator[Row]:
    with _open(path, settings.encoding or _encoding(path)) as file:
        header = file.readline()
        delimiter = settings.delimiter or _delimiter(header, ".tsv" in path.suffixes)
        lines = _unambiguous(itertools.chain([header], file), re.escape(delimiter))
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True, restkey=_MORE)
        csv.field_size_limit(2**31 - 1)
        number = 0
        try:
            for number, row in enumerate(rows, start=1):
                if any(row.pop(_MORE, ())):
                    raise DataError(
                        f"{path}: row {number} has more fields than the header line, so its columns may be shifted and the row "
                        "assigned to the wrong owner. Quote fields that contain the delimiter, or fix the row."
                    )
                yield row
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

    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _read_arrow(path: Path, _: CsvConfig) -> Iterator[Row]:
    """A stream, as ``datasets`` writes it, or a file of batches."""
    from pyarrow import ipc, memory_map

    with memory_map(str(path)) as content:
        whole = content.read(6) == b"ARROW1"
        content.seek(0)
        table = ipc.open_file(content) if whole else ipc.open_stream(content)
        for batch in map(table.get_batch, range(table.num_record_batches)) if whole else table:
            for start in range(0, len(batch), ROWS_AT_ONCE):
                yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,  # datasets would read all files of a directory by the types of the first
}
DECLARED = {".txt"}
"""Of files that ``datasets`` reads without a guess: a line is text."""


def _check_kinds(path: Path) -> None:
    kinds = {suffix for file in path.rglob("*") if (suffix := _suffix(file)) in READERS}
    if len(kinds) > 1 and not _is_saved(path) and not _has_configs(path / "README.md"):
        raise DataError(
            f"{path}: holds {' and '.join(sorted(kinds))} files, and datasets would read one type and ignore the others. Name "
            "the files, or a glob such as DIR/*.jsonl."
        )


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _has_configs(readme: Path) -> bool:
    """Whether a dataset's card says which files are its data."""
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    front = re.match(r"---\s*\n(.*?\n)---", text, re.DOTALL)
    return bool(front and re.search(r"^configs:", front[1], re.MULTILINE))


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """``datasets`` raises many kinds of errors, and its messages may quote rows."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a directory of datasets ({type(error).__name__}).") from None


def _of_split(path: Path, split: str, cache_dir: Path) -> list[str]:
    """The files of a split, of which no row is read; the directory itself where ``datasets`` reads them by declared types."""
    if _is_saved(path):
        return [str(path)]
    import datasets

    with _told(path):
        found = datasets.load_dataset_builder(str(path), cache_dir=str(cache_dir)).config.data_files
        splits = {str(name): sorted({str(file) for file in of_it}) for name, of_it in (found or {}).items()}
    kinds = {_suffix(Path(file)) for file in _one(splits, split, path)}
    if kinds <= READERS.keys():
        return splits[split]
    if kinds <= DECLARED:
        return [str(path)]
    raise DataError(
        f"{path}: holds {', '.join(sorted(kinds - READERS.keys()))} files, where datasets guesses a column's type from all "
        "rows, so one row could change how others are read. Convert them to jsonl, csv, parquet or arrow."
    )


def _one(splits: Mapping[str, Any], split: str, path: Path) -> Any:
    if split not in splits:
        raise DataError(f"{path}: has no split {split!r}; it has {', '.join(splits)}. Set data.train_split.")
    return splits[split]


def _read_directory(path: Path, split: str, cache_dir: Path) -> Iterator[Row]:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its messages quote rows
    with _told(path):
        loaded = (
            datasets.load_from_disk(str(path))
            if _is_saved(path)
            else datasets.load_dataset(str(path), cache_dir=str(cache_dir))
        )
        if isinstance(loaded, dict):
            loaded = _one(loaded, split, path)
        for table in loaded.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            yield from table.to_pylist()


@contextlib.contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Where the Hub cannot be reached, only a cached copy of ``name`` is looked for inside.

    huggingface_hub would ask for two minutes. Behind a proxy, and where HF_HUB_OFFLINE is set, nothing is changed.
    """
    from huggingface_hub import constants

    before, place = constants.HF_HUB_OFFLINE, urllib.parse.urlsplit(constants.ENDPOINT)
    if not before and names.is_hub_id(name) and not urllib.request.getproxies().keys() & {place.scheme, "all"}:
        try:
            port = place.port or {"https": 443}.get(place.scheme, 80)
            socket.create_connection((place.hostname or "", port), timeout=5).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _download(source: str, data: DataConfig, cache_dir: Path) -> Path:
    # datasets would keep the downloaded files in the user's shared Hub cache; a snapshot into our own folder does not.
    from huggingface_hub import snapshot_download

    target = cache_dir / "hub" / source.replace("/", "--")
    try:
        with asking_hub(source):
            snapshot_download(source, repo_type="dataset", revision=data.revision, local_dir=target)
    except Exception as error:
        raise DataError(
            f"{source}: no such file, and no such dataset on the Hub ({type(error).__name__}). Check the spelling and the "
            "network, or set data.train and data.eval to local files."
        ) from None
    return target
