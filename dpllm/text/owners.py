"""Rows of several people, such as mail and chats: which of them train, so that no person has more than a limit.

Comes in: the owners of each row. Goes out: the rows that are kept. Who has which row is a graph that is taken as public: it
alone decides, and no text is read here. The neighbour of a dataset has the same graph and the same kept rows, of which those of
one person are emptied: an emptied row keeps its slot, and nothing is learned from it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.text.layouts import FIELDS, Format, Row

SEPARATOR = ";"
_BESIDE_TEXT = {"role", "name", "weight"}
"""Keys of a message that say nothing by themselves."""


@dataclass(frozen=True)
class Graph:
    """How many rows are kept; public, as the graph of owners and rows is."""

    rows: int  # of the data
    kept: int  # of these
    owners: int  # different people that the rows name
    most: int  # kept rows of one owner

    def __str__(self) -> str:
        return (
            f"{self.kept:,} of {self.rows:,}, so that each of {self.owners:,} owners has at most {self.most:,}; chosen by who "
            "has which row, which is public, and by no text"
        )


def values_of(value: Any) -> list[Any]:
    """The owners in a value of the unit column: the items of a list, or the parts of a text.

    The text of an item has parts too: of a name that is split by mistake, each part is bounded, and so is its bearer.
    """
    if isinstance(value, str):  # a separator may end it
        return [part for part in value.split(SEPARATOR) if part.strip()]
    items = value if isinstance(value, list) else [value]
    return [part for item in items for part in (item.split(SEPARATOR) if isinstance(item, str) else [item])]


def is_written_list(value: Any) -> bool:
    """Whether a text is a list as JSON or Python write it, such as a cell of a csv file: the list would count as one name."""
    return isinstance(value, str) and value.strip().startswith(("[", "{", "('", '("'))


def choose_rows(owners_of_rows: Iterable[Sequence[str]], limit: int) -> tuple[Sequence[int], Graph]:
    """One greedy pass over the graph: rows with few owners first, then by number, while no owner has too many.

    Args:
        owners_of_rows: The owners of each row, each person once.
        limit: k, the most rows that one owner keeps; at least 1.

    Returns:
        The numbers of the rows that are kept, from 0, ascending; and the counts.

    Guarantee:
        No owner has more than ``limit`` of them, and they follow from ``owners_of_rows`` and ``limit`` alone.

    References:
        Ganesh et al. 2025, "It's My Data Too: Private ML for Datasets with Multi-User Training Examples" (arXiv 2503.03622).
    """
    import numpy as np

    numbers = dict[bytes, int]()  # of owners, by hash
    owner_E, start_N = array("q"), array("q", [0])  # E: pairs of a row and one of its owners, by row
    for names in owners_of_rows:
        for name in names:
            digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
            owner_E.append(numbers.setdefault(digest, len(numbers)))
        start_N.append(len(owner_E))
    chosen, held_U = array("q"), [0] * len(numbers)
    for row in np.argsort(np.diff(start_N), kind="stable").tolist():
        owners = owner_E[start_N[row] : start_N[row + 1]]
        if all(held_U[owner] < limit for owner in owners):
            chosen.append(row)
            for owner in owners:
                held_U[owner] += 1
    return array("q", sorted(chosen)), Graph(len(start_N) - 1, len(chosen), len(numbers), limit)


def is_empty(row: Row, fmt: Format) -> bool:
    """Whether a row is what the neighbouring relation makes of one: nothing is learned from it, not even its end."""
    values = [row.parts[field] for field in FIELDS[fmt]]
    turns = [turn for value in values if isinstance(value, list) for turn in value]
    contents = [turn[key] for turn in turns for key in turn.keys() - _BESIDE_TEXT]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part["text"] if isinstance(part, dict) and part.keys() == {"type", "text"} else part for part in parts]
    return not any(texts) and not any(value for value in values if isinstance(value, str))
