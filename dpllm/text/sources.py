"""Reading a source of text row by row: files, directories of datasets, the Hub, embedded data.

Comes in: a data source. Goes out: its rows, one after the other, so that a source larger than memory can be read. Its
errors name files, lines and columns and never the text of a row. It must not know what a row is for.

``datasets`` says which files of a directory or of the Hub are a split, and reads those whose types are declared: saved datasets
and lines of text. Other files are read by hand: ``datasets`` would copy their text into a cache, guess the type of a
column from the rows of all people (007 becomes 7 until one person is called x), and quote rows in its errors.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import lzma
import re
import socket
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpllm.errors import DataError
from dpllm.files import resolved, scratch
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, Source
from dpllm.text import builtin
from dpllm.text.parsers import READERS, ROWS_AT_ONCE, read_csv, suffix_of, unpacked
from dpllm.text.rows import Row

_VALUES = ValueError, ArithmeticError, NotImplementedError  # pyarrow's, and Python's of a date that it does not have
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
            matched = sorted(glob.glob(_pattern(part), recursive=True))
        if not matched:
            raise DataError(f"{part}: no file matches. Check data.train and data.eval.")
        below = {str(parent) for name in matched for parent in Path(name).parents}
        found += matched if matched == [part] else [name for name in matched if str(Path(name)) not in below]
    return _once(found)


def _pattern(name: str) -> str:
    """A glob in which the folders that are there stand for themselves: "notes [2024]/*.jsonl" means that very folder."""
    folder = next(parent for parent in Path(name).parents if parent.is_dir())
    return str(Path(glob.escape(str(folder))) / Path(name).relative_to(folder)) if glob.has_magic(str(folder)) else name


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
    return not Path(name).exists() and suffix_of(Path(name)) not in READERS and name.count("/") == 1


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
    suffix = suffix_of(path)
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
                    if read is read_csv
                    else " JSON is UTF-8."
                )
            raise DataError(f"{source}: cannot be read as {suffix} ({type(error).__name__}).{fix}") from None
    elif path.is_dir():
        yield from _read_directory(path, split, cache_dir)
    else:
        reason = "has an unknown file type" if path.exists() else "no such file"
        raise DataError(f"{source}: {reason}. data.train and data.eval accept {KNOWN}.")


DECLARED = {".txt"}
"""Of files that ``datasets`` reads without a guess: a line is text."""


def _check_kinds(path: Path) -> None:
    kinds = {suffix for file in path.rglob("*") if (suffix := suffix_of(file)) in READERS}
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


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """A folder, or where ``datasets`` would take its name for a pattern or an address, a folder of links to its files."""
    if re.fullmatch(r"[\w./ -]+", str(path.resolve())):
        yield path
        return
    with scratch() as folder:
        for file in (found for found in path.rglob("*") if found.is_file()):
            link = folder / file.relative_to(path)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
        yield folder


def _of_split(path: Path, split: str, cache_dir: Path) -> list[str]:
    """The files of a split, of which no row is read; the directory itself where ``datasets`` reads them by declared types."""
    if _is_saved(path):
        return [str(path)]
    import datasets

    with _told(path), _plain(path) as folder:
        found = datasets.load_dataset_builder(str(folder), cache_dir=str(cache_dir)).config.data_files
        names_of = {
            name: {Path(file).relative_to(folder.resolve()) for file in of_it} for name, of_it in (found or {}).items()
        }
        splits = {str(name): sorted(str(path / file) for file in of_it) for name, of_it in names_of.items()}
    kinds = {suffix_of(Path(file)) for file in _one(splits, split, path)}
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
    with _told(path), _plain(path) as folder:
        loaded = (
            datasets.load_from_disk(str(folder))
            if _is_saved(path)
            else datasets.load_dataset(str(folder), cache_dir=str(cache_dir))
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
