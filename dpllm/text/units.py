"""Groups of rows, of which memory holds the numbers and not the text.

Comes in: a sequence of rows, and which of them belong together. Goes out: lists of rows, each read when it is asked for.
It must not know what a row means, nor why rows belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

from dpllm.text.rows import Row


class Groups(Sequence[list[Row]]):
    """The rows of each thing that is sampled or counted as a whole, read when they are asked for.

    In memory are the numbers of rows and not the rows.
    """

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int], starts: Sequence[int]) -> None:
        """Group i holds the rows ``numbers[starts[i] : starts[i + 1]]``."""
        self._rows, self._numbers, self._starts = rows, numbers, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> list[Row]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[Row]]: ...

    def __getitem__(self, index: int | slice) -> list[Row] | list[list[Row]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return [self._rows[row] for row in self._numbers[self._starts[number] : self._starts[number + 1]]]

    def __iter__(self) -> Iterator[list[Row]]:
        return (self[number] for number in range(len(self)))

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
