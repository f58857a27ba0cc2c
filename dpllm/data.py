"""Rows of text become tokenised units: whose text it is, which tokens are learned, and by what they are divided.

Comes in: a data source, its format, a tokenizer. Goes out: ``Unit`` values, one for each privacy unit. This module reads
private text; its errors name files, rows and columns and never the text of a row. It must not know the model or the
Plan.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dpllm import builtin
from dpllm.config import DataConfig
from dpllm.errors import DataError

Format = Literal["text", "prompt_completion", "messages"]
FIELDS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}


@dataclass(frozen=True)
class TokenSequence:
    """One sequence as the model reads it.

    Attributes:
        input_ids: Token ids, at most ``max_length``.
        loss_mask: True where the token is a target (it is predicted from the tokens before it). Never at position 0.
        denominator: Number of target tokens of the whole example, of which this may be one chunk.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    denominator: int


@dataclass(frozen=True)
class Unit:
    """Everything that one privacy unit brings; it is sampled, clipped and bounded as a whole."""

    sequences: tuple[TokenSequence, ...]


@dataclass(frozen=True)
class Table:
    """Raw rows with the canonical column names, and where they came from."""

    name: str
    rows: list[dict[str, Any]]
    format: Format


def load_table(source: str, data: DataConfig, split: str, cache_dir: Path) -> Table:
    """Reads a data source.

    Args:
        source: jsonl, csv or parquet file, directory of datasets, Hub id, or builtin name.
        data: The recipe's data section: format, columns, revision.
        split: Which split, where the source has several.
        cache_dir: Where copies of Hub data may lie; under the run's private directory, never shared.

    Returns:
        The rows, with columns renamed to those of the format.

    Raises:
        DataError: Missing or unreadable source, no rows, or a row that lacks a field of the format.
    """
    rows = _read(source, data, split, cache_dir)
    if not rows:
        raise DataError(f"{source}: holds no rows, so there is nothing to learn from. Check data.train and its split.")
    rows = [_rename(row, data.columns) for row in rows]
    fmt = _detect(source, rows[0], data.format)
    for number, row in enumerate(rows, start=1):
        for field in FIELDS[fmt]:
            value = row.get(field)
            good = isinstance(value, list) and value if field == "messages" else isinstance(value, str)
            if not good:
                kind = "a list of messages" if field == "messages" else "text"
                raise DataError(
                    f"{source}: row {number} has no {kind} in column {field!r}, which format {fmt} reads. "
                    f"Mend or drop the row, or name the column with data.columns."
                )
            if not _encodes(value):
                raise DataError(
                    f"{source}: row {number} holds half a character (an unpaired surrogate) in column {field!r}, which no "
                    "tokenizer reads. Mend or drop the row."
                )
    return Table(name=source, rows=rows, format=fmt)


def _encodes(value: Any) -> bool:
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError:
        return False
    return True


def group_rows(table: Table, data: DataConfig) -> list[list[dict[str, Any]]]:
    """Splits rows by privacy unit, at most ``max_examples_per_unit`` each.

    Which rows of a unit stay is decided by the smallest hashes of its own rows, so that it depends on no other unit.

    Raises:
        DataError: A row whose unit is missing or null.
    """
    if data.unit == "example":
        return [[row] for row in table.rows]
    units: dict[str, list[dict[str, Any]]] = {}
    for number, row in enumerate(table.rows, start=1):
        value = row.get(data.unit)
        if value is None or value != value or not str(value).strip():
            raise DataError(
                f"{table.name}: row {number} has no value in the unit column {data.unit!r}, so nobody could be protected "
                f"as its owner. Fill the column, or drop the row."
            )
        units.setdefault(str(value), []).append(row)
    return [sorted(rows, key=_row_hash)[: data.max_examples_per_unit] for rows in units.values()]


def sampled_rows(table: Table, data: DataConfig) -> list[list[dict[str, Any]]]:
    """The rows of each thing that is sampled as a whole: a unit, or, with ``sampling: example``, one of its rows.

    Raises:
        DataError: See ``group_rows``.
    """
    groups = group_rows(table, data)
    return groups if data.sampling == "unit" else [[row] for rows in groups for row in rows]


def count_units(data: DataConfig, cache_dir: Path) -> int:
    """How many things can be sampled from the training data, N without canaries; needs no tokenizer."""
    return len(sampled_rows(load_table(data.train, data, data.train_split, cache_dir), data))


def encode_units(
    groups: list[list[dict[str, Any]]], fmt: Format, tokenizer: Any, data: DataConfig, *, name: str | None = None
) -> list[Unit]:
    """Tokenises every unit; errors name ``name``, or else the training data.

    Raises:
        DataError: ``long_examples: refuse`` and a longer row, or a row that the chat template does not take.
    """
    units = []
    for number, rows in enumerate(groups, start=1):
        sequences: list[TokenSequence] = []
        for row in rows:
            try:
                sequences.extend(encode(row, fmt, tokenizer, data.max_length, data.long_examples))
            except DataError as error:
                raise DataError(f"{name or data.train}: unit {number}: {error}") from None
        units.append(Unit(tuple(sequences)))
    return units


def encode(
    example: Mapping[str, Any], fmt: Format, tokenizer: Any, max_length: int, long_examples: str
) -> list[TokenSequence]:
    """Tokenises one example.

    Args:
        example: A row with the fields of the format.
        fmt: text, prompt_completion or messages.
        tokenizer: A fast transformers tokenizer.
        max_length: Tokens in one sequence.
        long_examples: chunk, truncate or refuse.

    Returns:
        No sequence (nothing to predict), one, or several chunks. Chunks overlap by one token, so that every target is
        predicted exactly once.

    Raises:
        DataError: See ``encode_units``.
    """
    text, spans, template = _render(example, fmt, tokenizer)
    encoding = tokenizer(text, add_special_tokens=not template, return_offsets_mapping=True, verbose=False)
    ids = list(encoding["input_ids"])
    mask = [any(start < hi and lo < end for lo, hi in spans) for start, end in encoding["offset_mapping"]]
    eos = tokenizer.eos_token_id
    if not template and eos is not None:
        if not ids or ids[-1] != eos:
            ids, mask = [*ids, eos], [*mask, True]
        mask[-1] = True
    if len(ids) > max_length and long_examples == "refuse":
        raise DataError(
            f"a row is longer than data.max_length ({max_length} tokens) and data.long_examples is refuse. "
            "Raise data.max_length, or set data.long_examples to chunk or truncate."
        )
    if long_examples == "truncate":
        ids, mask = ids[:max_length], mask[:max_length]
    if mask:
        mask[0] = False
    total = sum(mask)
    stride = max_length - 1
    sequences = []
    for start in range(0, max(1, len(ids) - 1), stride):
        piece = tuple(ids[start : start + max_length])
        targets = (False, *mask[start + 1 : start + max_length])
        if any(targets):
            sequences.append(TokenSequence(piece, targets, total))
    return sequences


def dataset_name(data: DataConfig) -> str:
    """The ledger's default name of a dataset: the Hub id or builtin name, or a file's folder and stem."""
    path = Path(data.train)
    if builtin.is_builtin(data.train) or not path.exists():
        return data.train
    path = path.resolve()
    return f"{path.parent.name}/{path.stem}"


def _read(source: str, data: DataConfig, split: str, cache_dir: Path) -> list[dict[str, Any]]:
    if builtin.is_builtin(source):
        try:
            path = builtin.path(source)
        except KeyError as error:
            raise DataError(str(error.args[0])) from None
    else:
        path = Path(source)
    suffix = path.suffix.lower()
    try:
        if path.is_file() and suffix in {".jsonl", ".ndjson", ".json"}:
            return list(_read_json_lines(path))
        if path.is_file() and suffix in {".csv", ".tsv"}:
            with open(path, encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ","))
        if path.is_file() and suffix == ".parquet":
            from pyarrow import parquet

            rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
            return rows
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        # The message of the parser may quote the row; its type does not.
        raise DataError(f"{source}: cannot be read as {suffix} ({type(error).__name__}).") from None
    if path.is_dir():
        return _read_directory(path, split, cache_dir)
    if suffix in {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"} or path.is_file() or source.count("/") != 1:
        known = "a jsonl, csv or parquet file, a directory of datasets, or a Hub id"
        reason = "is of no known kind" if path.exists() else "no such file"
        raise DataError(f"{source}: {reason}. data.train and data.eval take {known}.")
    return _read_hub(source, data.revision, split, cache_dir)


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                raise DataError(f"{path}: line {number} is not valid JSON; one object a line is expected.") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} holds no JSON object; one object a line is expected.")
            yield row


def _read_directory(path: Path, split: str, cache_dir: Path) -> list[dict[str, Any]]:
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
        rows: list[dict[str, Any]] = loaded.to_list()
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds, and its messages may quote rows
        raise DataError(f"{path}: cannot be read as a directory of datasets ({type(error).__name__}).") from None
    return rows


def _read_hub(source: str, revision: str | None, split: str, cache_dir: Path) -> list[dict[str, Any]]:
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
    return _read_directory(target, split, cache_dir)


def _rename(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    given = {name: row[column] for name, column in columns.items() if column in row}
    return {**row, **given}


def _detect(source: str, row: Mapping[str, Any], wanted: str) -> Format:
    for fmt, fields in FIELDS.items():
        if wanted == fmt or (wanted == "auto" and all(field in row for field in fields)):
            return fmt
    # A csv file without a header has text where the names of its columns should be.
    headed = Path(source).suffix.lower() not in {".csv", ".tsv"}
    columns = (
        f"has the columns {', '.join(sorted(map(str, row)))}" if headed else "lacks them, or the file its header line"
    )
    raise DataError(
        f"{source}: a row needs text, or prompt and completion, or messages; row 1 {columns}. "
        "Name other columns with data.columns, as in --data.columns '{text: body}'."
    )


def _row_hash(row: Mapping[str, Any]) -> bytes:
    # Without nulls: in a table, a column that only another unit fills is null here.
    text = json.dumps({str(k): v for k, v in row.items() if v is not None}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), key=b"dpllm rows of a unit", digest_size=16).digest()


def _render(example: Mapping[str, Any], fmt: Format, tokenizer: Any) -> tuple[str, list[tuple[int, int]], bool]:
    """The text of an example, the character spans that are learned, and whether a chat template made it."""
    if fmt == "text":
        text = example["text"]
        return text, [(0, len(text))], False
    if fmt == "prompt_completion":
        prompt, completion = example["prompt"], example["completion"]
        # As a person would write it: one space, unless the data bring their own separator.
        joined = "" if not prompt or prompt[-1].isspace() or completion[:1].isspace() else " "
        text = prompt + joined + completion
        return text, [(len(prompt), len(text))], False
    messages = example["messages"]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
            if not (text.startswith(before) and text.startswith(after)):
                raise DataError(
                    "the chat template rewrites earlier turns, so the assistant's turns cannot be told apart. "
                    "Set another template on the tokenizer, or use format prompt_completion."
                )
            spans.append((len(before), len(after)))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the tokenizer's chat template does not take a row's messages ({type(error).__name__}). Each message needs "
            "role and content, and the tokenizer a chat template; base models often have none: use prompt_completion."
        ) from None
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DataError("the chat template gives overlapping turns; use format prompt_completion.")
    return text, spans, True
