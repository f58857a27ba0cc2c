"""Selects rows with several owners, such as mail and chats, so that no person has more rows than a limit.

Comes in: the owners of each row. Goes out: the rows that are kept. The graph of owners and rows is assumed to be public; the
choice depends on it alone, and no text is read here. A neighbouring dataset has the same graph and the same kept rows, but those
of one person are emptied: an emptied row keeps its slot, and nothing is learned from it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.text.layouts import FIELDS, Format, Row

SEPARATOR = ";"
_BESIDE_TEXT = {"role", "name", "weight"}
"""Keys of a message that hold no content."""


@dataclass(frozen=True)
class Graph:
    """Counts of rows and owners; public, like the graph of owners and rows."""

    rows: int  # rows of the data
    kept: int  # rows that are kept
    owners: int  # distinct people whom the rows name
    most: int  # largest number of kept rows that one owner may have

    def __str__(self) -> str:
        return (
            f"{self.kept:,} of {self.rows:,}, so that each of {self.owners:,} owners has at most {self.most:,}; chosen by who "
            "has which row, which is public, and by no text"
        )


def values_of(value: Any) -> list[Any]:
    """The owners in a value of the unit column: the items of a list, or the parts of a text.

    Text items are split too: if a name is split by mistake, each of its parts is bounded, and so is its owner.
    """
    if isinstance(value, str):  # it may end with a separator
        return [part for part in value.split(SEPARATOR) if part.strip()]
    items = value if isinstance(value, list) else [value]
    return [part for item in items for part in (item.split(SEPARATOR) if isinstance(item, str) else [item])]


def is_written_list(value: Any, *, surely: bool = False) -> bool:
    """Whether a text, such as a csv cell, begins as a list in JSON or Python syntax, which would count as one name.

    With ``surely``, it must be a whole one: where a row has one owner, a name may be "[deleted]" or "{1f0e-77}".
    """
    begins = isinstance(value, str) and value.strip().startswith(("[", "{", "('", '("'))
    if not (begins and surely):
        return begins
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return isinstance(read(value.strip()), list | tuple | dict | set)
    return False


def choose_rows(owners_of_rows: Iterable[Sequence[str]], limit: int) -> tuple[Sequence[int], Graph]:
    """Chooses rows in one greedy pass: rows with fewer owners first, then by number, if all their owners are below the limit.

    Args:
        owners_of_rows: The owners of each row, each person once.
        limit: k >= 1, the maximum number of rows of one owner.

    Returns:
        The numbers of the kept rows, from 0, ascending; and the counts.

    Guarantee:
        No owner has more than ``limit`` kept rows, which depend only on ``owners_of_rows`` and ``limit``.

    References:
        Ganesh et al. 2025, "It's My Data Too: Private ML for Datasets with Multi-User Training Examples" (arXiv 2503.03622).
    """
    import numpy as np

    numbers = dict[bytes, int]()  # hash of an owner -> number
    owner_E, start_N = array("q"), array("q", [0])  # E: pairs of a row and one of its owners, in row order
    for names in owners_of_rows:
        for name in names:
            digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
            owner_E.append(numbers.setdefault(digest, len(numbers)))
        start_N.append(len(owner_E))
    kept_rows, held_U = array("q"), [0] * len(numbers)
    for row in np.argsort(np.diff(start_N), kind="stable").tolist():
        owners = owner_E[start_N[row] : start_N[row + 1]]
        if all(held_U[owner] < limit for owner in owners):
            kept_rows.append(row)
            for owner in owners:
                held_U[owner] += 1
    return array("q", sorted(kept_rows)), Graph(len(start_N) - 1, len(kept_rows), len(numbers), limit)


def is_empty(row: Row, fmt: Format) -> bool:
    """Whether a row is empty, as the neighbouring relation makes it: nothing is learned from it, not even its end."""
    values = [row.parts[field] for field in FIELDS[fmt]]
    turns = [turn for value in values if isinstance(value, list) for turn in value]
    contents = [turn[key] for turn in turns for key in turn.keys() - _BESIDE_TEXT]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part["text"] if isinstance(part, dict) and part.keys() == {"type", "text"} else part for part in parts]
    return not any(texts) and not any(value for value in values if isinstance(value, str))
