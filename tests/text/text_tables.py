"""What the tests of rows share: small tables and their files, what of a text is learned, and refusals that quote no row."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tiny
from pyarrow import ipc, parquet

from dpllm.errors import DataError
from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.recipe.config import DataConfig
from dpllm.text.data import Table, each_row, load_table
from dpllm.text.tokens import encode_units

Json = dict[str, Any]
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
SENTINEL = "Sigrid Forsberg owes 4711"


@cache
def tokenizer() -> Any:
    return tiny.tokenizer()


def section(**values: Any) -> DataConfig:
    return DataConfig.model_validate({"train": "rows.jsonl", **values})


def load(source: Any, folder: Path, split: str = "train", *, columns_kept: Any = (), **values: Any) -> Table:
    """A source as a recipe with these keys of data reads it."""
    data = section(train=[str(part) for part in source] if isinstance(source, list) else str(source), **values)
    return load_table(data.train, data, split, folder / "cache", columns_kept)


def load_rows(folder: Path, *rows: Json, **values: Any) -> Table:
    return load(tiny.write_rows(folder / "rows.jsonl", rows), folder, **values)


def units_of(table: Table, tokenizer_: Any = None, **values: Any) -> list[Unit]:
    data = section(**{"max_length": 128, **values})
    return encode_units(each_row(table.rows), table.format, tokenizer_ or tokenizer(), data)


def learned(sequence: TokenSequence) -> str:
    ids = [token for token, target in zip(sequence.input_ids, sequence.loss_mask, strict=True) if target]
    return str(tokenizer().decode(ids))


@contextlib.contextmanager
def refused(match: str) -> Iterator[None]:
    """A refusal in one line, with no word of a row, also in its cause."""
    with pytest.raises(DataError, match=match) as caught:
        yield
    message = str(caught.value)
    assert not any(word in message for word in ("Sigrid", "Forsberg", "4711", "\n")), message
    assert caught.value.__cause__ is None


def write_bytes(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    return path


def write(path: Path, rows: list[Json]) -> Path:
    """The same rows in the format that the name says."""
    kind = path.with_suffix("").suffix if path.suffix in COMPRESS else path.suffix
    return write_bytes(path, content_of(kind, rows))


def content_of(kind: str, rows: list[Json]) -> bytes:
    if kind == ".json":
        return json.dumps(rows).encode()
    if kind in (".csv", ".tsv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    if kind in (".parquet", ".arrow"):
        buffer, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
        if kind == ".parquet":
            parquet.write_table(table, buffer, row_group_size=700)
        else:
            with ipc.new_stream(buffer, table.schema) as stream:
                stream.write_table(table)
        return bytes(buffer.getvalue())
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
