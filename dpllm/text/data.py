"""Tables of rows, in memory or on disk, and the owner of each row.

Comes in: a data source and the recipe's data section. Goes out: a ``Table`` of rows, which can be read repeatedly, in any order,
and may be larger than memory; ``Groups`` of rows, one for each privacy unit. This module reads private text; its errors name
files, rows and columns and never the text of a row. Must not know tokens.
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
"""Bytes of rows that are kept in memory; a smaller corpus is never written to disk."""


class ReadWhenAsked(Sequence[T]):
    """A sequence that reads each item when it is indexed."""

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
    """Rows that are read back one at a time; ``BUFFER`` bytes, and eight bytes for each row, stay in memory.

    Guarantee:
        The file has no name: it is gone when the process ends, however it ends, and no other user can open it. Later changes
        to the source do not change these rows.
    """

    def __init__(self, folder: Path, buffer: int | None = None) -> None:
        """``folder`` holds the unnamed file; it is made if the rows exceed ``buffer`` bytes (None: ``BUFFER``)."""
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
            if self._file.tell() != self._starts[-1]:  # after reading a row
                self._file.seek(self._starts[-1])
            self._file.write(pickled)
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, number: int) -> Row:
        with self._disk_errors():
            self._file.seek(self._starts[number])
            pickled = self._file.read(self._starts[number + 1] - self._starts[number])
        row: Row = pickle.loads(pickled)  # bytes that this process wrote to a file that nobody else can open
        return row

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self._folder}: cannot store the rows, which do not fit into memory ({error.strerror}). Free some space, or "
                "type an --output_dir on another disk."
            ) from None


class Groups(ReadWhenAsked[list[Row]]):
    """Groups of rows that are sampled or counted together; memory holds row numbers, not rows."""

    def __init__(
        self, rows: Sequence[Row], numbers: Sequence[int], starts: Sequence[int], graph: owners.Graph | None = None
    ) -> None:
        """Group i holds the rows ``numbers[starts[i] : starts[i + 1]]``; ``graph`` is set for rows with several owners."""
        self._rows, self._numbers, self._starts, self.graph = rows, numbers, starts, graph

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, number: int) -> list[Row]:
        return [self._rows[row] for row in self._numbers[self._starts[number] : self._starts[number + 1]]]

    def each_alone(self) -> Groups:
        """The same rows, each as a group by itself."""
        return Groups(self._rows, self._numbers, range(len(self._numbers) + 1), self.graph)

    def digest(self) -> str:
        """Hash of the row numbers of all groups, in hexadecimal."""
        import numpy as np

        digest = hashlib.blake2b(b"%d:" % len(self._starts), digest_size=32)
        for numbers in (self._starts, self._numbers):
            for start in range(0, len(numbers), 2**20):  # so a range never becomes one large array
                digest.update(np.asarray(numbers[start : start + 2**20], dtype="<i8").tobytes())
        return digest.hexdigest()


def each_row(rows: Sequence[Row]) -> Groups:
    """Every row as a group by itself."""
    return Groups(rows, range(len(rows)), range(len(rows) + 1))


@dataclass(frozen=True)
class Table:
    """Rows of one format, and their source."""

    name: str
    """The source."""
    rows: Sequence[Row]
    """Can be read repeatedly, in any order; those of ``load_table`` may be larger than memory."""
    format: Format
    """Format of every row."""
    digest: str | None = None
    """Hash of the columns that the format reads, of all rows in order, in hexadecimal; None unless ``load_table`` made the
    table. Private: a hash of a short text confirms a guess of that text."""
    reads: str = ""
    """Columns that are read, in one line."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Name and number of rows of each file of the source."""
    columns: tuple[str, ...] = ()
    """Columns of the first row."""

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

    table: Table  # training rows
    groups: Groups  # rows that are sampled together
    held_out: Table | None  # evaluation rows; None if the recipe names none


def load_table(source: Source, data: DataConfig, split: str, cache_dir: Path, columns: Collection[str] = ()) -> Table:
    """Reads a data source once, from beginning to end, and renames columns to those of the format.

    Args:
        source: File, glob, directory, Hub id or builtin name, or a list of them; all rows are read in that order.
        data: The recipe's data section: format, columns, csv, revision, unit, control.
        split: The split to read, if the source has several.
        cache_dir: Folder for copies of the data, in the run's private directory, never shared. Rows that do not fit into
            memory are stored there, in a file without a name that is gone when the process ends.
        columns: Columns that rows keep in ``Row.codes``, besides those of ``data.control``.

    Raises:
        DataError: The source is missing or unreadable or has no rows; a row lacks a field of the format, fits several formats
            under format auto, or has another layout than the rows before it; no row has a column of ``columns``,
            ``data.control`` or ``data.columns``; or the text of a column of ``data.control`` is learned.

    Guarantee:
        How a row is read depends only on the recipe and that row; the other rows can only cause a refusal of the whole source.
    """
    rows, layout, content = StoredRows(cache_dir), None, hashlib.blake2b(digest_size=32)
    sizes, first = list[tuple[str, int]](), tuple[str, ...]()
    title, renamed_columns = ", ".join(names.listed(source)), list(filter(None, data.columns.values()))
    ignored = {name for name, column in data.columns.items() if column is None}
    # The set of columns is assumed to be public.
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
        raise DataError(f"{title}: has no rows. Check data.train and its split.")
    if missing:
        raise DataError(f"{title}: no row has a column {min(missing)!r}. Name a column of the data.")
    description = in_words(layout, data.columns, data.control)
    return Table(title, rows, layout.format, content.hexdigest(), description, tuple(sizes), first)


def load_held_out(data: DataConfig, cache_dir: Path) -> Table | None:
    """The evaluation rows of a recipe, see ``load_table``; None if it names none."""
    return load_table(data.eval, data, data.eval_split, cache_dir) if data.eval is not None else None


def _typed(
    raw: Raw, location: str, layout: Layout, data: DataConfig, columns: Collection[str]
) -> tuple[Row, bytes, Set[str]]:
    row, fields = converted(raw, location, layout)
    if data.template is not None and (layout.lists or "prompt" not in FIELDS[layout.format]):
        raise DataError(
            f"{location} reads as {layout.name}, so data.template, which joins a prompt with its completion, would have no "
            "effect. Remove data.template: messages use the model's chat template, and text is read unchanged."
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
            "position of every token. Use rows with text, or with prompt and completion, or remove data.control."
        )
    texts = {*layout.columns(), *FIELDS[layout.format], *filter(None, data.columns.values())}
    if text_codes := sorted(texts & set(data.control)):
        raise DataError(
            f"{location}: column {text_codes[0]!r} is listed in data.control but holds the text itself. Name columns with "
            "few distinct values in data.control."
        )


def group_rows(table: Table, data: DataConfig) -> Groups:
    """Groups rows by privacy unit, see ``unit_name``, with at most ``max_examples_per_unit`` rows for each.

    A unit keeps the rows whose texts have the smallest hashes, so its choice depends on no other unit. Units are in the order of
    their first rows. Memory holds 32 bytes for each row: units and rows are identified by hashes of 128 bits, of which two are
    equal by chance in one of 10^20 corpora of 10^9 rows. With several owners, each row that ``owners.choose_rows`` keeps is a
    group, whatever its text.

    Raises:
        DataError: A row names no unit, or several units although ``data.owners`` is one.
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
    # Strings of 16 bytes: numpy sorts them bytewise, and ignoring NULs at the end makes no two of them equal.
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
    single_owner = data.owners == "one"
    list_as_text = any(owners.is_written_list(value, surely=single_owner) for value in values)
    if list_as_text or any(isinstance(value, list | dict) for value in values):
        fix = 'Write a plain list of names, or in a text "ana; ben"'
        if single_owner:
            fix = f"{fix}, and set data.owners: several" if list_as_text else "Set data.owners: several"
        raise DataError(
            f"{table.location(number)} has a list in column {data.unit!r}, where data.unit expects a name: the list would count "
            f"as one person, and nobody in it would be protected. {fix}, or name another column there."
        )
    if owner_names_of_row := owner_names(row.unit, data):
        return owner_names_of_row
    hits = [] if data.unit in table.columns else difflib.get_close_matches(data.unit, table.columns, 1)
    fix = f"Did you mean {hits[0]!r}?" if hits else "Fill in the value, drop the row, or name another column there."
    raise DataError(
        f"{table.location(number)} has no value in column {data.unit!r}, which data.unit names, so its owner is unknown and "
        f"could not be protected. {fix}"
    )


def owner_names(value: Any, data: DataConfig) -> list[str]:
    """The people whom a value of the unit column names, each once, see ``unit_name``; empty if one of them has no name."""
    unit_names = list(map(unit_name, owners.values_of(value) if data.owners == "several" else [value]))
    return list(dict.fromkeys(name for name in unit_names if name)) if all(unit_names) else []


def unit_name(value: Any) -> str | None:
    """The canonical name of a row's owner, by which units are compared; None if nobody is named.

    A person whose name is written in several ways is one unit. Exports change names: surrounding, repeated or unusual spaces,
    invisible letters, another Unicode form (NFKC: full-width letters too), 1.0 for 1. A person who counts as two units has twice
    the bound, and so less protection than is stated; two people who count as one share a bound, which is safe and makes N
    smaller. Upper and lower case, leading zeros and single spaces distinguish units: they may be different people.
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
    """The canonical text of a value for counts and control codes, see ``unit_name``; empty if there is none."""
    return str(value).lower() if isinstance(value, bool) else unit_name(value) or ""


def _row_hash(row: Row, fields: Sequence[str]) -> bytes:
    # Hashes the text alone: a table may read another column as 7 or "7", depending on other people's rows.
    text = json.dumps([row.parts[field] for field in fields], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), key=b"dpllm rows of a unit", digest_size=16).digest()


def sampled_rows(table: Table, data: DataConfig) -> Groups:
    """Groups of rows that are sampled together: ``group_rows``, or with ``sampling: example`` each of their rows by itself."""
    groups = group_rows(table, data)
    return groups if data.sampling == "unit" else groups.each_alone()


def dataset_name(data: DataConfig) -> str:
    """The ledger's default name of a dataset: Hub id, builtin name, or a file's folder and stem; several are joined by "+"."""
    return "+".join(map(_dataset_name, names.listed(data.train)))


def _dataset_name(source: str) -> str:
    if names.is_builtin(source) or not (Path(source).exists() or glob.has_magic(source)):
        return source
    path = Path(source).resolve()
    return names.shown(f"{path.parent.name}/{Path(unpacked(path.name)).stem}")
