"""Reads a source of text row by row: files, directories of datasets, the Hub, builtin data.

Comes in: a data source. Goes out: its rows as the source holds them, one at a time, so a source may be larger than memory.
Nothing is guessed: a value is text or has the type that the file declares. Errors name files, lines and columns and never the
text of a row. Must not know the purpose of a row.

``datasets`` finds the files of a split in a directory or on the Hub, and reads saved datasets. This module reads files itself:
``datasets`` would copy their text into a cache, guess the type of a column from everybody's rows (007 becomes 7 until one person
is called x), and quote rows in its errors.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dpllm.errors import DataError
from dpllm.files import resolved, scratch
from dpllm.recipe import names
from dpllm.recipe.config import CsvConfig, DataConfig, Source
from dpllm.text import builtin

Raw = dict[str, Any]
"""A row as its source holds it: column -> value."""
_PACKED = OSError, EOFError, zlib.error, lzma.LZMAError  # errors of damaged files
_VALUES = ValueError, ArithmeticError, NotImplementedError  # errors of pyarrow, and of Python on an impossible date


def expand(source: Source) -> list[str]:
    """Every file, directory, Hub id and builtin name of a source, in order; the files of a glob are sorted by name.

    Raises:
        DataError: A glob matches nothing, or a file is named twice, so its people would count twice.
    """
    expanded: list[str] = []
    for part in names.listed(source):
        if not glob.has_magic(part) or Path(part).exists():
            expanded.append(part)
            continue
        matched = sorted(glob.glob(_pattern(part), recursive=True))
        if not matched:
            raise DataError(f"{part}: no file matches. Check data.train and data.eval.")
        below = {str(parent) for name in matched for parent in Path(name).parents}
        expanded += [name for name in matched if str(Path(name)) not in below]
    return _without_duplicates(expanded)


def _pattern(name: str) -> str:
    """A glob whose existing folders are escaped: "notes [2024]/*.jsonl" means that very folder."""
    folder = next(parent for parent in Path(name).parents if parent.is_dir())
    return str(Path(glob.escape(str(folder))) / Path(name).relative_to(folder)) if glob.has_magic(str(folder)) else name


def _without_duplicates(sources: list[str]) -> list[str]:
    """Returns the sources; refuses one that is named by two paths, in a directory that is named too, or also compressed."""
    keys_seen: set[Any] = set()
    folders = {resolved(name) for name in sources if Path(name).is_dir()}
    for name in sources:
        path = resolved(name)
        keys: set[Any] = {name if names.is_builtin(name) else unpacked(str(path))}
        if path.exists():
            keys.add((path.stat().st_dev, path.stat().st_ino))
        if keys & keys_seen or folders & set(path.parents):
            raise DataError(
                f"{name}: is read twice (also named through a link or a directory, or also present as a compressed copy), so "
                "everybody in it would count as two people. Name it once."
            )
        keys_seen |= keys
    return sources


def files(source: Source, data: DataConfig, split: str, cache_dir: Path) -> list[str]:
    """``expand`` with each directory or Hub id replaced by the files of the split.

    Raises:
        DataError: See ``expand``; or the split is missing, or a directory holds several kinds of files.
    """
    split_files: list[str] = []
    for name in expand(source):
        path = Path(name)
        is_hub_id = name.count("/") == 1 and suffix_of(path) not in READERS and not names.is_builtin(name)
        if path.is_dir():
            _check_kinds(path)
        elif is_hub_id and not path.exists():
            path = _download(name, data, cache_dir)
        split_files += _of_split(path, split, cache_dir) if path.is_dir() else [name]
    return _without_duplicates(split_files)


def is_here(source: Source) -> bool:
    """Whether the whole source is on this machine."""
    try:
        return all(names.is_builtin(name) or Path(name).exists() for name in expand(source))
    except DataError:
        return False


def read_rows(source: str, data: DataConfig, split: str) -> Iterator[Raw]:
    """Reads one source of ``files`` row by row, unchanged; see ``data.load_table``.

    Raises:
        DataError: The source is missing, damaged or of an unknown kind.
    """
    path = builtin.path(source) if names.is_builtin(source) else Path(source)
    reader = READERS.get(suffix := suffix_of(path))
    if reader and path.is_file():
        try:
            yield from reader(path, data.csv)
        except (*_PACKED, LookupError, csv.Error, *_VALUES) as error:
            # The parser's message may quote the row; the type of the error does not.
            is_encoding_error = isinstance(error, UnicodeError | LookupError)
            advice = ", or name its data.csv.encoding, such as cp1252" if "csv" in suffix or "tsv" in suffix else ""
            fix = f" Save it as UTF-8{advice}." if is_encoding_error else ""
            raise DataError(f"{source}: cannot be read as {suffix} ({type(error).__name__}).{fix}") from None
    elif path.is_dir():
        yield from _read_saved(path, split)
    else:
        reason = "has an unknown file type" if path.exists() else "no such file"
        raise DataError(
            f"{source}: {reason}. data.train and data.eval accept a jsonl, json, csv, parquet or arrow file (the first three "
            "also as .gz, .bz2 or .xz), a glob, a directory of files or datasets, a Hub id, or a list of them."
        )


def _check_kinds(path: Path) -> None:
    kinds, readme = {suffix_of(file) for file in path.rglob("*")} & READERS.keys(), path / "README.md"
    card = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    front = re.match(r"---\s*\n(.*?\n)---", card, re.DOTALL)
    lists_configs = front and re.search(r"^configs:", front[1], re.MULTILINE)
    if len(kinds) > 1 and not _is_saved(path) and not lists_configs:
        raise DataError(
            f"{path}: holds {' and '.join(sorted(kinds))} files, and datasets would read one type and ignore the others. Name "
            "the files, or a glob such as DIR/*.jsonl."
        )


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


@contextlib.contextmanager
def _for_datasets(path: Path) -> Iterator[Path]:
    """A folder that ``datasets`` can read: the path, or links to its files if the name looks like a pattern or an address.

    Raises:
        DataError: ``datasets`` raises an error; its message, which may quote rows, is dropped.
    """
    try:
        if re.fullmatch(r"[\w./ -]+", str(path.resolve())):
            yield path
            return
        with scratch() as folder:
            for file in filter(Path.is_file, path.rglob("*")):
                link = folder / file.relative_to(path)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
            yield folder
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a directory of datasets ({type(error).__name__}).") from None


def _of_split(path: Path, split: str, cache_dir: Path) -> list[str]:
    """The files of a split, without reading rows; a saved dataset is its own path."""
    if _is_saved(path):
        return [str(path)]
    import datasets

    with _for_datasets(path) as folder:
        builder = datasets.load_dataset_builder(str(folder), cache_dir=str(cache_dir))
        files_of = {  # a file may be named by several patterns
            str(name): {Path(file).relative_to(folder.resolve()) for file in split_files}
            for name, split_files in (builder.config.data_files or {}).items()
        }
    in_split = sorted(str(path / file) for file in _select(files_of, split, path))
    if unread := {suffix_of(Path(file)) for file in in_split} - READERS.keys():
        raise DataError(
            f"{path}: holds {', '.join(sorted(unread))} files, which are not read: lines of text have no columns, and of "
            "other files datasets guesses a column's type from all rows, so one row could change how others are read. Convert "
            "them to jsonl, csv, parquet or arrow."
        )
    return in_split


def _select(splits: Mapping[str, Any], split: str, path: Path) -> Any:
    if split not in splits:
        raise DataError(f"{path}: has no split {split!r}; it has {', '.join(splits)}. Set data.train_split.")
    return splits[split]


def _read_saved(path: Path, split: str) -> Iterator[Raw]:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its messages quote rows
    with _for_datasets(path) as folder:
        loaded = datasets.load_from_disk(str(folder))
        if isinstance(loaded, dict):
            loaded = _select(loaded, split, path)
        for table in loaded.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            yield from table.to_pylist()


@contextlib.contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Inside, only a cached copy of ``name`` is used if the Hub cannot be reached.

    huggingface_hub would retry for two minutes. Has no effect with a proxy, or if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    offline, endpoint = constants.HF_HUB_OFFLINE, urllib.parse.urlsplit(constants.ENDPOINT)
    if not offline and names.is_hub_id(name) and not urllib.request.getproxies().keys() & {endpoint.scheme, "all"}:
        try:
            port = endpoint.port or {"https": 443}.get(endpoint.scheme, 80)
            socket.create_connection((endpoint.hostname or "", port), timeout=5).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _download(source: str, data: DataConfig, cache_dir: Path) -> Path:
    # datasets would leave the files in the user's shared Hub cache; a snapshot into the run's folder does not.
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


PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ROWS_AT_ONCE = 1000
"""Rows of a table that are converted to Python objects at a time."""
_SURPLUS = "\0more fields than the header line"
MOST_LEVELS = 100
"""Maximum nesting depth of lists and objects in a row of JSON."""


def unpacked(name: str) -> str:
    """The name of a file without .gz, .bz2 or .xz."""
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in PACKED else name


def suffix_of(path: Path) -> str:
    """The suffix of a file in lower case; for a compressed text file, the one before .gz."""
    inner = Path(unpacked(path.name)).suffix.lower()
    return path.suffix.lower() if inner == ".parquet" else inner


def _open(path: Path, encoding: str) -> IO[str]:
    unpack: Any = PACKED.get(path.suffix.lower(), open)
    if not encoding:
        with unpack(path, "rb") as file:
            encoding = "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    return cast("IO[str]", unpack(path, "rt", encoding=encoding, newline=""))


def _read_json(path: Path, _: CsvConfig) -> Iterator[Raw]:
    """Reads one object per line, or one list of objects, which is held in memory."""
    values: Iterator[tuple[str, Any]]
    with _open(path, "utf-8-sig") as file:
        expected = "one object a line"
        lines = ((f"{path}: line {number}", line) for number, line in enumerate(file, start=1) if line.strip())
        location, first = next(lines, ("", ""))
        if first.lstrip().startswith("["):
            expected = "a list of objects"
            records = _parsed(first + file.read(), f"{path}: its list", "one list of objects", MOST_LEVELS + 1)
            values = ((f"{path}: record {number}", record) for number, record in enumerate(records, start=1))
        else:
            located = itertools.chain([(location, first)] if first else [], lines)
            values = ((location, _parsed(line, location, expected, MOST_LEVELS)) for location, line in located)
        for location, value in values:
            if not isinstance(value, dict):
                raise DataError(f"{location} is not a JSON object; {expected} is expected.")
            yield value


def _parsed(text: str, location: str, expected: str, levels: int) -> Any:
    def row(keys: list[tuple[str, Any]]) -> Raw:
        _check_names([name for name, _ in keys], location)
        return dict(keys)

    try:
        value = json.loads(text, object_pairs_hook=row)
        _limit_depth(value, levels)
        return value
    except RecursionError:
        raise DataError(f"{location} is nested more than {MOST_LEVELS} levels deep. Flatten or drop the row.") from None
    except ValueError:
        raise DataError(f"{location} is not valid JSON; {expected} is expected.") from None


def _check_names(columns: Sequence[str], location: str) -> None:
    """Refuses two columns of one name, without naming them: without a header line they hold text. Ignores unnamed columns."""
    nonempty = [name for name in columns if name]
    if len(set(nonempty)) < len(nonempty):
        raise DataError(
            f"{location} has two columns, or keys, of one name, so one would be lost. Rename or drop one of them."
        )


def _limit_depth(value: Any, levels: int) -> None:
    """Raises the RecursionError of json at a depth that every later reader of the row can handle."""
    if not levels:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _limit_depth(inner, levels - 1)


def read_csv(path: Path, settings: CsvConfig) -> Iterator[Raw]:
    """Reads each row by the names in the header line; a short line lacks the remaining columns."""
    with _open(path, settings.encoding or "") as file:
        header = file.readline()
        # Chosen by the header line alone, which is nobody's row, so no private text affects it.
        marks = "\t" if ".tsv" in path.suffixes else ",;\t|"
        unquoted = re.sub(r'"[^"]*"', "", header)
        delimiter = settings.delimiter or next((mark for mark in marks if mark in unquoted), marks[0])
        lines = _unambiguous(itertools.chain([header], file), re.escape(delimiter))
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True, restkey=_SURPLUS)
        csv.field_size_limit(2**31 - 1)
        number = 0
        try:
            _check_names(rows.fieldnames or (), f"{path}: its header line")
            for number, row in enumerate(rows, start=1):
                if any(row.pop(_SURPLUS, ())):
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
    """Yields the lines of a csv file with delimiter ``mark``; raises if a quote neither begins nor ends a field nor is doubled.

    csv reads any other quote as a letter, so a row with a surplus quote could end in somebody else's row.
    """
    text = '(?:[^"]|"")*+'
    field = f'(?:"{text}"|[^"{mark}]*+)'
    fields = f"(?:{mark}{field})*+"
    closed = re.compile(field + fields), re.compile(f'{text}"{fields}')  # indexed by whether the line begins in quotes
    opened = re.compile(f'(?:{field}{mark})*+"{text}'), re.compile(f'(?:{text}"{fields}(?<={mark})")?{text}')
    in_quotes = False
    for line in lines:
        if '"' in line:
            row = line.rstrip("\r\n")
            opens = bool(opened[in_quotes].fullmatch(row))
            if not opens and not closed[in_quotes].fullmatch(row):
                raise csv.Error
            in_quotes = opens
        yield line


def _read_parquet(path: Path, _: CsvConfig) -> Iterator[Raw]:
    from pyarrow import parquet

    with open(path, "rb") as file, parquet.ParquetFile(file) as table:  # pyarrow cannot open names that are not UTF-8
        _check_names(table.schema_arrow.names, f"{path}: its table")
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _read_arrow(path: Path, _: CsvConfig) -> Iterator[Raw]:
    """Reads a stream, which ``datasets`` writes, or a file of batches."""
    from pyarrow import ipc

    with open(path, "rb") as content:
        is_file = content.read(6) == b"ARROW1"
        content.seek(0)
        table = ipc.open_file(content) if is_file else ipc.open_stream(content)
        _check_names(table.schema.names, f"{path}: its table")
        for batch in map(table.get_batch, range(table.num_record_batches)) if is_file else table:
            for start in range(0, len(batch), ROWS_AT_ONCE):
                yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,  # datasets would read all files of a directory with the types of the first
}
