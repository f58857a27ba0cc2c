"""Rows that were read, in memory or on disk: tables of them, and the owner of each row.

Comes in: a data source, the recipe's data section. Goes out: a ``Table`` of rows, as often as asked for and in any order, of
which memory need not hold all; ``Groups`` of them, one for each privacy unit. This module reads private text; its errors name
files, rows and columns and never the text of a row. It must not know what a token is.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import json
import pickle
import re
import tempfile
import unicodedata
from abc import abstractmethod
from array import array
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from dpllm.errors import DataError
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, Source
from dpllm.text import layouts, owners
from dpllm.text.layouts import (
    COLUMNS,
    FIELDS,
    TEMPLATE_COLUMNS,
    Format,
    Layout,
    Row,
    converted,
    in_words,
    layout_of,
    packed,
    renamed,
)
from dpllm.text.sources import Raw, files, read_rows, unpacked

T = TypeVar("T")
BUFFER = 16 * 2**20
"""Bytes of rows that are kept in memory; a corpus of fewer never touches the disk."""


class ReadWhenAsked(Sequence[T]):
    """A sequence that reads an item when it is indexed."""

    @abstractmethod
    def _read(self, number: int) -> T: ...

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        numbers = range(len(self))[index]
        return [self._read(number) for number in numbers] if isinstance(numbers, range) else self._read(numbers)


class StoredRows(ReadWhenAsked[Row]):
    """Rows that are read back one at a time; in memory stay ``BUFFER`` bytes, and eight bytes for each row.

    Guarantee:
        The file has no name: it is gone when the process ends, however it ends, and no other user can open it. A source
        that changes meanwhile changes nothing here.
    """

    def __init__(self, folder: Path, buffer: int | None = None) -> None:
        """``folder`` is made where ``buffer`` bytes (None: ``BUFFER``) do not suffice, and holds the file without a name."""
        self._folder, self._buffer = folder, BUFFER if buffer is None else buffer
        self._file = tempfile.SpooledTemporaryFile(max_size=max(1, self._buffer), dir=str(folder))  # noqa: SIM115
        self._starts = array("q", [0])

    def append(self, row: Row) -> None:
        """Adds a row at the end.

        Raises:
            DataError: The disk is full, or the folder cannot be written to.
        """
        pickled = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        end = self._starts[-1] + len(pickled)
        with self._disk_errors():
            if self._starts[-1] <= self._buffer < end:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._file.tell() != self._starts[-1]:  # a row was read meanwhile
                self._file.seek(self._starts[-1])
            self._file.write(pickled)
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, number: int) -> Row:
        with self._disk_errors():
            self._file.seek(self._starts[number])
            pickled = self._file.read(self._starts[number + 1] - self._starts[number])
        row: Row = pickle.loads(pickled)  # our own bytes, from a file that nobody else can open
        return row

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self._folder}: cannot store the rows, which do not fit in memory ({error.strerror}). Free some space, or "
                "type an --output_dir on another disk."
            ) from None


class Groups(ReadWhenAsked[list[Row]]):
    """Rows that are sampled or counted together; memory holds their numbers and not the rows."""

    def __init__(
        self, rows: Sequence[Row], numbers: Sequence[int], starts: Sequence[int], graph: owners.Graph | None = None
    ) -> None:
        """Group i holds the rows ``numbers[starts[i] : starts[i + 1]]``; ``graph`` is of rows with several owners."""
        self._rows, self._numbers, self._starts, self.graph = rows, numbers, starts, graph

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, number: int) -> list[Row]:
        return [self._rows[row] for row in self._numbers[self._starts[number] : self._starts[number + 1]]]

    def each_alone(self) -> Groups:
        """The same rows, each a group of its own."""
        return Groups(self._rows, self._numbers, range(len(self._numbers) + 1), self.graph)

    def digest(self) -> str:
        """Hash of which rows, by number, are in which group; in hexadecimal."""
        import numpy as np

        digest = hashlib.blake2b(b"%d:" % len(self._starts), digest_size=32)
        for numbers in (self._starts, self._numbers):
            for start in range(0, len(numbers), 2**20):  # a range is never an array as a whole
                digest.update(np.asarray(numbers[start : start + 2**20], dtype="<i8").tobytes())
        return digest.hexdigest()


def each_row(rows: Sequence[Row]) -> Groups:
    """Every row as a group of its own."""
    return Groups(rows, range(len(rows)), range(len(rows) + 1))


@dataclass(frozen=True)
class Table:
    """Rows of one format, and where they came from."""

    name: str
    """The source."""
    rows: Sequence[Row]
    """As often as asked for, in any order; those of ``load_table`` may be more than memory holds."""
    format: Format
    """Of every row."""
    digest: str | None = None
    """Of the columns that the format reads, of all rows in their order, in hexadecimal; None of a table that ``load_table`` did
    not make. Private: a hash of a short text tells whoever guesses it."""
    reads: str = ""
    """From which columns, in one line."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Rows of each file, where the source is several."""
    columns: tuple[str, ...] = ()
    """Of the first row."""

    def parts(self) -> Iterator[dict[str, Any]]:
        """The parts of each row, by column."""
        return (row.parts for row in self.rows)

    def location(self, number: int) -> str:
        """The file of a row and its number in that file; both numbers count from 1."""
        for name, size in self.sizes:
            if number <= size:
                return f"{name}: row {number}"
            number -= size
        return f"{self.name}: row {number}"


@dataclass(frozen=True)
class Rows:
    """The rows of a recipe, each read once."""

    table: Table  # that train
    groups: Groups  # sampled together
    held_out: Table | None  # for evaluation; None where the recipe names none


def load_table(source: Source, data: DataConfig, split: str, cache_dir: Path, columns: Collection[str] = ()) -> Table:
    """Reads a data source, once from its beginning to its end; columns are renamed to those of the format.

    Args:
        source: File, glob, directory, Hub id or builtin name, or a list of them, of which all rows are read in that order.
        data: The recipe's data section: format, columns, csv, revision, unit, control.
        split: Which split, where the source has several.
        cache_dir: Where copies of the data may lie; under the run's private directory, never shared. What does not fit in
            memory lies there in a file without a name, which ends with the process.
        columns: That rows keep besides those of ``data.control``, under ``Row.codes``.

    Raises:
        DataError: Missing or unreadable source, no rows, or a row that lacks a field of the format; with format auto, a row
            that fits several formats; a row in another layout than the rows before it; a column of ``columns``, ``data.control``
            or ``data.columns`` that no row has, or one of ``data.control`` whose text is learned.

    Guarantee:
        How a row reads depends on the recipe and on that row alone; what the others hold can only make the whole be refused.
    """
    rows, layout, content = StoredRows(cache_dir), None, hashlib.blake2b(digest_size=32)
    sizes, first = list[tuple[str, int]](), tuple[str, ...]()
    title, renamed_columns = ", ".join(names.listed(source)), list(filter(None, data.columns.values()))
    ignored = {name for name, column in data.columns.items() if column is None}
    # Which columns the data have is taken as public.
    missing = {*data.control, *columns, *(set(renamed_columns) - ignored)}
    for name in files(source, data, split, cache_dir):
        number = 0
        for number, raw in enumerate(read_rows(name, data, split), start=1):
            location = f"{name}: row {number}"
            row = renamed(raw, location, data.columns)
            layout = layout_of(row, location, data.format, layout, renamed_columns)
            typed, fields, has = _typed(row, location, layout, data, columns)
            missing -= has
            first = first or tuple(has)
            content.update(fields)
            rows.append(typed)
        sizes.append((name, number))
    if layout is None:
        raise DataError(f"{title}: holds no rows. Check data.train and its split.")
    if missing:
        raise DataError(f"{title}: no row has a column {min(missing)!r}. Name a column of the data.")
    read = in_words(layout, data.columns, data.control)
    return Table(title, rows, layout.format, content.hexdigest(), read, tuple(sizes), first)


def load_held_out(data: DataConfig, cache_dir: Path) -> Table | None:
    """The evaluation rows of a recipe, see ``load_table``; None where it names none."""
    return load_table(data.eval, data, data.eval_split, cache_dir) if data.eval is not None else None


def _typed(
    raw: Raw, location: str, layout: Layout, data: DataConfig, columns: Collection[str]
) -> tuple[Row, bytes, Set[str]]:
    row, fields = converted(raw, location, layout)
    if data.template is not None and (layout.lists or "prompt" not in FIELDS[layout.format]):
        raise DataError(
            f"{location} reads as {layout.name}, and data.template, which joins a prompt with its completion, would do nothing. "
            "Remove data.template: messages are read by the model's chat template, text as it stands."
        )
    line = ""
    if data.control:
        _check_control(data, layout, location)
        line = layouts.code_line(data.control, [value_name(row.get(name)) for name in data.control])
        fields += packed(line, location, ", ".join(data.control))
    parts = {name: row[name] for name in (*COLUMNS, *TEMPLATE_COLUMNS) if name in row}
    codes = {name: row[name] for name in (*data.control, *columns) if name in row}
    return Row(parts, row.get(data.unit) if data.unit != "example" else None, codes, line), fields, row.keys()


def _check_control(data: DataConfig, layout: Layout, location: str) -> None:
    if layout.lists:
        raise DataError(
            f"{location} reads as {layout.name}, and data.control cannot add its line there, because the chat template fixes the "
            "place of every token. Use rows with text, or with prompt and completion, or remove data.control."
        )
    texts = {*layout.columns(), *FIELDS[layout.format], *filter(None, data.columns.values())}
    if text_codes := sorted(texts & set(data.control)):
        raise DataError(
            f"{location}: column {text_codes[0]!r} is listed in data.control but holds the text itself. Name columns with "
            "few distinct values in data.control."
        )


def group_rows(table: Table, data: DataConfig) -> Groups:
    """Splits rows by privacy unit, see ``unit_name``, at most ``max_examples_per_unit`` each.

    Which rows of a unit stay is decided by the smallest hashes of its own texts, so that it depends on no other unit. Units
    stand in the order of their first rows. In memory are 32 bytes for each row: units and rows are known by hashes of
    128 bits, of which two are equal by chance in one of 10^20 corpora of 10^9 rows. Of rows with several owners, each that
    ``owners.choose_rows`` keeps is a group, whatever it says.

    Raises:
        DataError: A row that names no unit, or several where ``data.owners`` is one.
    """
    import numpy as np

    if data.unit == "example":
        return each_row(table.rows)
    if data.owners == "several":
        owners_of_rows = (_owners_of(table, number, row, data) for number, row in enumerate(table.rows, start=1))
        numbers, graph = owners.choose_rows(owners_of_rows, data.max_examples_per_unit or 1)
        return Groups(table.rows, numbers, range(len(numbers) + 1), graph)
    units, hashes = bytearray(), bytearray()
    for number, row in enumerate(table.rows, start=1):
        [unit] = _owners_of(table, number, row, data)
        units += hashlib.blake2b(unit.encode(errors="surrogatepass"), digest_size=16).digest()
        hashes += _row_hash(row, FIELDS[table.format])
    # As strings of 16 bytes, which numpy sorts as they are; NULs at the end make no two of them equal.
    _, first_U, inverse_N = np.unique(np.frombuffer(units, "S16"), return_index=True, return_inverse=True)
    unit_N = np.argsort(np.argsort(first_U))[inverse_N]  # numbered by first row
    order_N = np.lexsort((np.frombuffer(hashes, "S16"), unit_N))  # stable: equal rows keep their order
    count_U = np.bincount(unit_N)
    start_U = np.cumsum(count_U) - count_U
    place_N = np.arange(len(order_N)) - np.repeat(start_U, count_U)
    limit = data.max_examples_per_unit or len(order_N)
    starts = np.concatenate([[0], np.cumsum(np.minimum(count_U, limit))])
    return Groups(table.rows, order_N[place_N < limit], starts)  # type: ignore[arg-type]


def _owners_of(table: Table, number: int, row: Row, data: DataConfig) -> list[str]:
    """The owners of a row, each once; ``number`` counts from 1."""
    values = owners.values_of(row.unit) if data.owners == "several" else [row.unit]
    list_as_text = data.owners == "several" and any(map(owners.is_written_list, values))
    if list_as_text or any(isinstance(value, list | dict) for value in values):
        plain = 'Write a plain list of names, or in a text "ana; ben"'
        fix = "Set data.owners: several" if data.owners == "one" else plain
        raise DataError(
            f"{table.location(number)} has a list in column {data.unit!r}, where data.unit expects a name: the list would be "
            f"taken for one person, and nobody in it would be protected. {fix}, or name another column there."
        )
    if owner_names_of_row := owner_names(row.unit, data):
        return owner_names_of_row
    near = [] if data.unit in table.columns else difflib.get_close_matches(data.unit, table.columns, 1)
    fix = f"Did you mean {near[0]!r}?" if near else "Fill in the value, drop the row, or name another column there."
    raise DataError(
        f"{table.location(number)} has no value in column {data.unit!r}, which data.unit names, so its owner is unknown and "
        f"could not be protected. {fix}"
    )


def owner_names(value: Any, data: DataConfig) -> list[str]:
    """The people that a value of the unit column names, each once, see ``unit_name``; none if one of them has no name."""
    unit_names = list(map(unit_name, owners.values_of(value) if data.owners == "several" else [value]))
    return list(dict.fromkeys(name for name in unit_names if name)) if all(unit_names) else []


def unit_name(value: Any) -> str | None:
    """The owner of a row, as every comparison of units reads the unit column; None where nobody is named.

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
    """A value as counts and control codes read it, see ``unit_name``; empty where there is none."""
    return str(value).lower() if isinstance(value, bool) else unit_name(value) or ""


def _row_hash(row: Row, fields: Sequence[str]) -> bytes:
    # Of the text alone: how a table reads another column, such as 7 or "7", depends on how the rows of others fill it.
    text = json.dumps([row.parts[field] for field in fields], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), key=b"dpllm rows of a unit", digest_size=16).digest()


def sampled_rows(table: Table, data: DataConfig) -> Groups:
    """The rows that are sampled together: ``group_rows``, or with ``sampling: example`` each of their rows alone."""
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
