"""Sequences of which memory does not hold all: rows on disk that nobody else can read, and groups of rows.

Comes in: rows, one after the other; which of them belong together. Goes out: the same rows, as often as asked for, in any
order. It must not know what a row means, nor why rows belong together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from dpllm.errors import DataError

T = TypeVar("T")
Row = dict[str, Any]
BUFFER = 16 * 2**20
"""Bytes of rows that are kept in memory; a corpus of fewer never touches the disk."""


class OpenFile:
    """A file that is read at any place, and closed when nobody holds it any more.

    Reading moves no position, so threads may share it. Mapped pages would count as this process's memory, and a file cut
    short would end it with a signal.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` is closed with this object."""
        self._descriptor = descriptor

    def read(self, start: int, size: int) -> bytes:
        """``size`` bytes from ``start``.

        Raises:
            DataError: The file ends before.
        """
        parts = []
        while size:
            part = os.pread(self._descriptor, size, start)
            if not part:
                raise DataError("the copy of the data in the run's cache was truncated while it was read. Start again.")
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when a program ends, os may be gone before
        close(self._descriptor)


class ReadWhenAsked(Sequence[T]):
    """A sequence whose items are read when they are asked for, by number."""

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
        packed = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        end = self._starts[-1] + len(packed)
        with self._disk_errors():
            if self._starts[-1] <= self._buffer < end:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._file.tell() != self._starts[-1]:  # a row was read meanwhile
                self._file.seek(self._starts[-1])
            self._file.write(packed)
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, number: int) -> Row:
        with self._disk_errors():
            self._file.seek(self._starts[number])
            packed = self._file.read(self._starts[number + 1] - self._starts[number])
        row: Row = pickle.loads(packed)  # our own bytes, from a file that nobody else can open
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
    """The rows of each thing that is sampled or counted as a whole; in memory are the numbers of rows and not the rows."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int], starts: Sequence[int]) -> None:
        """Group i holds the rows ``numbers[starts[i] : starts[i + 1]]``."""
        self._rows, self._numbers, self._starts = rows, numbers, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, number: int) -> list[Row]:
        return [self._rows[row] for row in self._numbers[self._starts[number] : self._starts[number + 1]]]

    def each_alone(self) -> Groups:
        """The same rows, each a group of its own."""
        return Groups(self._rows, self._numbers, range(len(self._numbers) + 1))

    def digest(self) -> str:
        """Of which rows, by number, stand in which group; in hexadecimal."""
        import numpy as np

        found = hashlib.blake2b(b"%d:" % len(self._starts), digest_size=32)
        for numbers in (self._starts, self._numbers):
            for start in range(0, len(numbers), 2**20):  # a range is never an array as a whole
                found.update(np.asarray(numbers[start : start + 2**20], dtype="<i8").tobytes())
        return found.hexdigest()


def each_row(rows: Sequence[Row]) -> Groups:
    """Every row as a group of its own."""
    return Groups(rows, range(len(rows)), range(len(rows) + 1))
