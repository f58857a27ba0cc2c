"""Reading a source of text row by row: files, directories of datasets, the Hub, embedded data.

Comes in: a data source. Goes out: its rows, one after the other, so that a source larger than memory can be read. Its
errors name files, lines and columns and never the text of a row. It must not know what a row is for.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpllm.errors import DataError
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig
from dpllm.text import builtin
from dpllm.text.rows import Row

ROWS_AT_ONCE = 1000
"""Rows of a table that are Python objects at a time."""
MOST_LEVELS = 100
"""Of lists and objects in one another in a row of JSON."""


def read_rows(source: str, data: DataConfig, split: str, cache_dir: Path) -> Iterator[Row]:
    """Reads a source row by row, as it is written there; see ``data.load_table``.

    Raises:
        DataError: A source that is missing, of no known kind or damaged.
    """
    try:
        path = builtin.path(source) if names.is_builtin(source) else Path(source)
    except KeyError as error:
        raise DataError(str(error.args[0])) from None
    suffix = path.suffix.lower()
    read = READERS.get(suffix)
    if read and path.is_file():
        try:
            yield from read(path)
        except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
            # The message of the parser may quote the row; its type does not.
            raise DataError(f"{source}: cannot be read as {suffix} ({type(error).__name__}).") from None
    elif path.is_dir():
        yield from _read_directory(path, split, cache_dir)
    elif read or path.is_file() or source.count("/") != 1:
        known = "a jsonl, csv or parquet file, a directory of datasets, or a Hub id"
        reason = "is of no known kind" if path.exists() else "no such file"
        raise DataError(f"{source}: {reason}. data.train and data.eval take {known}.")
    else:
        yield from _read_hub(source, data.revision, split, cache_dir)


def _read_json_lines(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                _limit_depth(row)
            except RecursionError:
                raise DataError(
                    f"{path}: line {number} is nested more than {MOST_LEVELS} levels deep, which no format reads. Mend or drop "
                    "the row."
                ) from None
            except ValueError:
                raise DataError(f"{path}: line {number} is not valid JSON; one object a line is expected.") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} holds no JSON object; one object a line is expected.")
            yield row


def _limit_depth(value: Any, levels: int = MOST_LEVELS) -> None:
    """Raises the same error that json raises, but at a depth that no later reader of the row minds."""
    if not levels:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _limit_depth(inner, levels - 1)


def _read_csv(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json_lines),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    ".parquet": _read_parquet,
}


def _read_directory(path: Path, split: str, cache_dir: Path) -> Iterator[Row]:
    import datasets

    datasets.disable_progress_bars()
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), cache_dir=str(cache_dir))
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


def _read_hub(source: str, revision: str | None, split: str, cache_dir: Path) -> Iterator[Row]:
    # datasets would keep the downloaded files in the user's shared Hub cache; a snapshot into our own folder does not.
    from huggingface_hub import snapshot_download

    target = cache_dir / "hub" / source.replace("/", "--")
    try:
        snapshot_download(source, repo_type="dataset", revision=revision, local_dir=target)
    except Exception as error:
        raise DataError(
            f"{source}: no such file, and the Hub gave no dataset of that name ({type(error).__name__}). "
            "Check the spelling and the network, or set data.train and data.eval to local files."
        ) from None
    yield from _read_directory(target, split, cache_dir)
