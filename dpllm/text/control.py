"""Control codes: columns of a row that its text is asked for, as a line before the text.

Comes in: names of columns, their values. Goes out: text. An example, with ``data.control: [visit, age]``: a row with visit "home"
and age "old" is learned as "visit: home | age: old", a line end, and its text, of which only the text is learned.
"""

from __future__ import annotations

from collections.abc import Sequence

SEPARATOR = ";"
"""Between the values of several columns, in the name of a value that ``dpllm describe`` counts."""


def line(columns: Sequence[str], values: Sequence[str]) -> str:
    """The line that stands before a text; with its line end."""
    return " | ".join(f"{column}: {value}" for column, value in zip(columns, values, strict=True)) + "\n"


def shares_of(columns: Sequence[str]) -> str:
    """Name of the released statistic of the joint distribution of columns, as ``asked.Statistic.name`` gives it."""
    return f"shares of {SEPARATOR.join(columns)}"
