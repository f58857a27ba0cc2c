"""Rows of text become tokenised units: whose text it is, which tokens are learned, and by what they are divided.

Comes in: a data source, its format, a tokenizer. Goes out: ``Unit`` values, one for each privacy unit. This module reads
private text; its errors name files, rows and columns and never the text of a row. It must not know the model or the Plan.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dpllm.errors import DataError
from dpllm.privacy.schedule import TokenSequence as TokenSequence
from dpllm.privacy.schedule import Unit as Unit
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, Source
from dpllm.text import chats, control
from dpllm.text.layouts import FIELDS, Format, Layout, converted, in_words, joined, layout_of, packed, renamed
from dpllm.text.layouts import sides as sides_of
from dpllm.text.lengths import Lengths
from dpllm.text.parsers import unpacked
from dpllm.text.rows import Groups, Row, StoredRows, each_row
from dpllm.text.sources import files, read_rows

AT_ONCE = 2**18  # characters that a tokenizer gets in one call


@dataclass(frozen=True)
class Table:
    """Raw rows with the canonical column names, and where they came from."""

    name: str
    """The source."""
    rows: Sequence[Row]
    """As often as asked for, in any order; those of ``load_table`` may be more than memory holds."""
    format: Format
    """How they read."""
    digest: str | None = None
    """Of the columns that the format reads, of all rows in their order, in hexadecimal; None of a table that ``load_table`` did
    not make. Private: a hash of a short text tells whoever guesses it."""
    reads: str = ""
    """From which columns, in one line."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Rows of each file, where the source is several."""

    def place(self, number: int) -> str:
        """Where a row stands, counted from 1: its file and its number there."""
        for name, size in self.sizes:
            if number <= size:
                return f"{name}: row {number}"
            number -= size
        return f"{self.name}: row {number}"


def load_table(source: Source, data: DataConfig, split: str, cache_dir: Path) -> Table:
    """Reads a data source, once from its beginning to its end; columns are renamed to those of the format.

    Args:
        source: File, glob, directory, Hub id or builtin name, or a list of them, of which all rows are read in that order.
        data: The recipe's data section: format, columns, csv, revision.
        split: Which split, where the source has several.
        cache_dir: Where copies of the data may lie; under the run's private directory, never shared. What does not fit in
            memory lies there in a file without a name, which ends with the process.

    Raises:
        DataError: Missing or unreadable source, no rows, or a row that lacks a field of the format; with format auto, a row
            that fits several formats; a row in another layout than the rows before it; a column of ``data.control`` or
            ``data.columns`` that no row has, or of the first whose text is learned.

    Guarantee:
        How a row reads depends on the recipe and on that row alone; what the others hold can only make the whole be refused.
    """
    rows, layout, content = StoredRows(cache_dir), None, hashlib.blake2b(digest_size=32)
    sizes: list[tuple[str, int]] = []
    told, named = ", ".join(names.listed(source)), [column for column in data.columns.values() if column is not None]
    for name in files(source, data, split, cache_dir):
        number = 0
        for number, raw in enumerate(read_rows(name, data, split, cache_dir), start=1):
            place = f"{name}: row {number}"
            row = renamed(raw, place, data.columns)
            layout = layout_of(row, place, data.format, layout, named)
            row, fields = converted(row, place, layout)
            row.pop(control.LINE, None)  # no source has a say in it
            if data.template is not None and (layout.lists or "prompt" not in FIELDS[layout.format]):
                raise DataError(
                    f"{place} reads as {layout.name}, and data.template joins a prompt with its completion, so that it would do "
                    "nothing. Remove data.template: messages are read by the model's chat template, text as it stands."
                )
            if data.control:
                _check_control(data, layout, place)
                row[control.LINE] = control.line(data.control, [value_name(row.get(name)) for name in data.control])
                fields += packed(row[control.LINE], place, ", ".join(data.control))
            content.update(fields)
            rows.append(row)
        sizes.append((name, number))
    if layout is None:
        raise DataError(f"{told}: holds no rows. Check data.train and its split.")
    ignored = {name for name, column in data.columns.items() if column is None}
    check_columns([*data.control, *(set(named) - ignored)], rows, told)
    read = in_words(layout, data.columns, data.control)
    return Table(told, rows, layout.format, content.hexdigest(), read, tuple(sizes))


def _check_control(data: DataConfig, layout: Layout, place: str) -> None:
    if layout.lists:
        raise DataError(
            f"{place} reads as {layout.name}, and data.control cannot add its line there, because the chat template fixes the "
            "place of every token. Use rows with text, or with prompt and completion, or remove data.control."
        )
    texts = {*layout.columns(), *FIELDS[layout.format], *filter(None, data.columns.values())}
    if both := sorted(texts & set(data.control)):
        raise DataError(
            f"{place}: column {both[0]!r} is listed in data.control but holds the text itself. Name columns with few distinct "
            "values in data.control."
        )


def check_columns(columns: Iterable[str], rows: Iterable[Row], name: str) -> None:
    """Refuses a column that no row of the source ``name`` has; which columns the data have is taken as public.

    Raises:
        DataError: The column is named.
    """
    missing = set(columns)
    for row in rows:
        if not missing:
            return
        missing -= row.keys()
    if missing:
        raise DataError(f"{name}: no row has a column {min(missing)!r}. Name a column of the data.")


def group_rows(table: Table, data: DataConfig) -> Groups:
    """Splits rows by privacy unit, see ``unit_name``, at most ``max_examples_per_unit`` each.

    Which rows of a unit stay is decided by the smallest hashes of its own texts, so that it depends on no other unit. Units
    stand in the order of their first rows. In memory are 32 bytes for each row: units and rows are known by hashes of
    128 bits, of which two are equal by chance in one of 10^20 corpora of 10^9 rows.

    Raises:
        DataError: A row whose unit is missing or null.
    """
    import numpy as np

    if data.unit == "example":
        return each_row(table.rows)
    owners, hashes = bytearray(), bytearray()
    for number, row in enumerate(table.rows, start=1):
        owner = unit_name(row.get(data.unit))
        if owner is None and data.unit not in row:
            near = difflib.get_close_matches(data.unit, row, 1)
            raise DataError(
                f"{table.place(number)} has no column {data.unit!r}, which data.unit names"
                + (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else ", so its owner is unknown. Name a column of the data there."
                )
            )
        if owner is None:
            raise DataError(
                f"{table.place(number)} has no value in the unit column {data.unit!r}, so its owner is unknown and could not be "
                "protected. Fill in the value, drop the row, or set data.unit to the column that says whose row it is."
            )
        owners += hashlib.blake2b(owner.encode(errors="surrogatepass"), digest_size=16).digest()
        hashes += _row_hash(row, FIELDS[table.format])
    # As strings of 16 bytes, which numpy sorts as they are; NULs at the end make no two of them equal.
    _, first_U, inverse_N = np.unique(np.frombuffer(owners, "S16"), return_index=True, return_inverse=True)
    unit_N = np.argsort(np.argsort(first_U))[inverse_N]  # numbered by first row
    order_N = np.lexsort((np.frombuffer(hashes, "S16"), unit_N))  # stable: equal rows keep their order
    count_U = np.bincount(unit_N)
    start_U = np.cumsum(count_U) - count_U
    place_N = np.arange(len(order_N)) - np.repeat(start_U, count_U)
    most = data.max_examples_per_unit or len(order_N)
    starts = np.concatenate([[0], np.cumsum(np.minimum(count_U, most))])
    return Groups(table.rows, order_N[place_N < most], starts)  # type: ignore[arg-type]


def unit_name(value: Any) -> str | None:
    """Whose row it is, as every comparison of units reads the unit column; None where nobody is named.

    One person written in several ways is one unit. Exports add what nobody typed: spaces around, repeated or of another kind,
    invisible letters, another Unicode form (NFKC: full-width letters too), 1.0 for 1. A person taken for two would be bounded
    as two, and so protected by less than is stated; two persons taken for one are bounded together, which is safe and makes
    N smaller. Upper and lower case, leading zeros and single spaces make different units: they may be different people.
    """
    if value is None or value != value:
        return None
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if not text.isascii():
        visible = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
        text = unicodedata.normalize("NFKC", visible)
    text = " ".join(text.split())
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text) or None


def value_name(value: Any) -> str:
    """A value as counts and control codes read it: in the words of ``unit_name``; empty where there is none."""
    return str(value).lower() if isinstance(value, bool) else unit_name(value) or ""


def _row_hash(row: Mapping[str, Any], fields: Sequence[str]) -> bytes:
    # Of the text alone: how a table reads another column, such as 7 or "7", depends on how the rows of others fill it.
    text = json.dumps([row[field] for field in fields], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), key=b"dpllm rows of a unit", digest_size=16).digest()


def sampled_rows(table: Table, data: DataConfig) -> Groups:
    """What is sampled as a whole: ``group_rows``, or with ``sampling: example`` each of their rows alone."""
    groups = group_rows(table, data)
    return groups if data.sampling == "unit" else groups.each_alone()


def dataset_name(data: DataConfig) -> str:
    """The ledger's default name of a dataset: the Hub id or builtin name, or a file's folder and stem; of several, all."""
    return "+".join(map(_dataset_name, names.listed(data.train)))


def _dataset_name(source: str) -> str:
    if names.is_builtin(source) or not (Path(source).exists() or glob.has_magic(source)):
        return source
    path = Path(source).resolve()
    return names.shown(f"{path.parent.name}/{Path(unpacked(path.name)).stem}")


def encode_units(
    groups: Iterable[Sequence[Row]], fmt: Format, tokenizer: Any, data: DataConfig, *, name: str | None = None
) -> list[Unit]:
    """Tokenises every unit, in memory; errors name ``name``, or else the training data.

    Raises:
        DataError: ``long_examples: refuse`` and a longer row, or a row that the chat template does not take.
    """
    return list(iter_units(groups, fmt, tokenizer, data, name=name))


def iter_units(
    groups: Iterable[Sequence[Row]],
    fmt: Format,
    tokenizer: Any,
    data: DataConfig,
    *,
    name: str | None = None,
    lengths: Lengths | None = None,
) -> Iterator[Unit]:
    """The same, one unit after the other, each counted in ``lengths``; the tokenizer gets ``AT_ONCE`` characters in one call."""
    source = name or ", ".join(names.listed(data.train))

    def finished(waiting: dict[int, list[_Rendered]]) -> Iterator[Unit]:
        encoded = iter(_tokenise([one for unit in waiting.values() for one in unit], tokenizer))
        for number, unit in waiting.items():
            sequences, sizes = list[TokenSequence](), list[tuple[int, bool]]()
            try:
                for one in unit:
                    ids, mask = _ended(one, *next(encoded), tokenizer.eos_token_id)
                    cut = _cut(ids, mask, data.max_length, data.long_examples)
                    sequences += cut or ([NOTHING] if fmt == "preference" else [])
                    sizes.append((len(ids), bool(cut)))
                (lengths or Lengths()).add(sizes, data)
            except DataError as error:
                raise DataError(f"{source}: unit {number}: {error}") from None
            yield Unit(tuple(sequences))

    waiting, characters = dict[int, list[_Rendered]](), 0
    for number, rows in enumerate(groups, start=1):
        try:
            waiting[number] = [one for row in rows for one in _rendered(row, fmt, tokenizer, data.template)]
        except DataError as error:
            yield from finished(waiting)  # an error in a unit before it comes first
            raise DataError(f"{source}: unit {number}: {error}") from None
        characters += sum(len(one.text) for one in waiting[number])
        if characters > AT_ONCE:
            yield from finished(waiting)
            waiting, characters = {}, 0
    yield from finished(waiting)


def encode(example: Mapping[str, Any], fmt: Format, tokenizer: Any, data: DataConfig) -> list[TokenSequence]:
    """Tokenises one row, which is no preference pair, as ``data`` says: template, max_length, long_examples.

    Returns:
        No sequence (nothing to predict), one, or several chunks of at most max_length tokens. Chunks overlap by one
        token, so that every target is predicted exactly once.

    Raises:
        DataError: See ``encode_units``.
    """
    rendered = _render(example, fmt, tokenizer, data.template)
    ((ids, mask),) = _tokenise([rendered], tokenizer)
    return _cut(*_ended(rendered, ids, mask, tokenizer.eos_token_id), data.max_length, data.long_examples)


def encode_prompt(prompt: str, tokenizer: Any, template: str | None) -> list[int]:
    """The tokens that stand before a completion that begins with a letter, as ``encode`` makes them; none of an empty text.

    Encoded alone, a prompt may end in other ones: two line ends are one token of GPT-2's, and two before a letter.
    """
    row = {"prompt": prompt, "completion": "A"}
    ((ids, mask),) = _tokenise([_render(row, "prompt_completion", tokenizer, template)], tokenizer)
    return ids[: mask.index(True)]


class _Rendered(NamedTuple):
    """The text of an example, the character spans that are learned, and whether a chat template made it."""

    text: str
    spans: list[tuple[int, int]]
    template: bool


NOTHING = TokenSequence((0, 0), (False, False), 1)
"""An answer of a pair whose prompt alone is longer than max_length: it is there, so that the other one is no half pair."""


def _rendered(example: Mapping[str, Any], fmt: Format, tokenizer: Any, template: str | None) -> list[_Rendered]:
    """The text of a row; of a preference pair, of both its answers."""
    if fmt != "preference":
        return [_render(example, fmt, tokenizer, template)]
    return [_render(one, inner, tokenizer, template) for inner, one in sides_of(dict(example))]


def _render(example: Mapping[str, Any], fmt: Format, tokenizer: Any, template: str | None) -> _Rendered:
    line = example.get(control.LINE, "")
    if fmt == "text":
        text = line + example["text"]
        return _Rendered(text, [(len(line), len(text))], False)
    if fmt == "prompt_completion":
        masked, after = joined(line + example["prompt"], example["completion"], template)
        return _Rendered(masked + after, [(len(masked), len(masked + after))], False)
    text, spans = chats.render(example, tokenizer)
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DataError("the chat template produces overlapping turns. Use format prompt_completion.")
    return _Rendered(text, spans, True)


def _tokenise(rendered: Sequence[_Rendered], tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Token ids of each text, and which of them are learned. All of them come from one format."""
    import numpy as np

    if not rendered:
        return
    encoding = tokenizer(
        [one.text for one in rendered],
        add_special_tokens=not rendered[0].template,
        return_offsets_mapping=True,
        verbose=False,
    )
    for one, ids, offsets in zip(rendered, encoding["input_ids"], encoding["offset_mapping"], strict=True):
        offset_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        mask_T = np.zeros(len(ids), dtype=bool)
        for low, high in one.spans:
            mask_T |= (offset_T2[:, 0] < high) & (low < offset_T2[:, 1])
        first = int(begins_twice(ids, tokenizer))
        yield list(ids)[first:], mask_T.tolist()[first:]


def begins_twice(ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether a text brought the token with which the tokenizer begins every text: a chat template had written it before."""
    return tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2


def _ended(one: _Rendered, ids: list[int], mask: list[bool], eos: int | None) -> tuple[list[int], list[bool]]:
    """With the end of the text, which is learned too; a chat template says itself where turns end."""
    if not one.template and eos is not None:
        if not ids or ids[-1] != eos:
            ids, mask = [*ids, eos], [*mask, True]
        mask[-1] = True
    return ids, mask


def _cut(ids: list[int], mask: list[bool], max_length: int, long_examples: str) -> list[TokenSequence]:
    """The sequences of one text."""
    if len(ids) > max_length and long_examples == "refuse":
        raise DataError(
            f"a row is longer than data.max_length ({max_length} tokens) and data.long_examples is refuse. "
            "Raise data.max_length, or set data.long_examples to chunk or truncate."
        )
    if long_examples == "truncate":
        ids, mask = ids[:max_length], mask[:max_length]
    if mask:
        mask[0] = False  # nothing stands before it, from which it could be predicted
    total = sum(mask)  # of the whole text, also in each of its chunks: their losses add up to its mean
    sequences = []
    for start in range(0, max(1, len(ids) - 1), max_length - 1):  # the last token of a chunk is the context of the next
        piece = tuple(ids[start : start + max_length])
        targets = (False, *mask[start + 1 : start + max_length])
        if any(targets):
            sequences.append(TokenSequence(piece, targets, total))
    return sequences
