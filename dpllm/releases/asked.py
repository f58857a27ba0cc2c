"""Parses requests for statistics, with all values declared, and computes their exact values.

Comes in: options of the command line, such as ``age=0:120``; rows by unit. Goes out: ``Statistic`` values, which are public, and
exact values, which are private. A row without a value gives none or an empty one, but never an error, which would reveal it.
Must not know noise or the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from dpllm.errors import ConfigError
from dpllm.privacy.releases import OPTIONS, OTHER, Kind, Statistic
from dpllm.recipe.config import DataConfig
from dpllm.text import layouts
from dpllm.text.data import Groups, Table, value_name
from dpllm.text.tokens import iter_units

MOST_CANDIDATES = 100_000


def columns_of(statistic: Statistic) -> tuple[str, ...]:
    """The columns that a statistic reads."""
    if statistic.kind == "shares":
        return tuple(statistic.column.split(layouts.SEPARATOR))
    return (statistic.column,) if statistic.column else ()


def parse(kind: Kind, text: str, quantiles: str) -> tuple[Statistic, ...]:
    """The statistics that one option requests: one, or one for each of the ``quantiles``.

    Raises:
        ConfigError: Bounds, candidates or values are not declared, or are invalid.
    """
    named = kind in ("quantiles", "shares")
    column, separator, declared = text.partition("=") if named else ("", "", text)
    valid = not named or bool(column and separator)
    statistics: tuple[Statistic, ...] = (Statistic(kind),)
    if kind == "shares":
        columns, lists = zip(*map(_declared_values, text.split(layouts.SEPARATOR)), strict=True)
        valid &= len(set(columns)) == len(columns) and math.prod(map(len, lists)) <= MOST_CANDIDATES
        valid &= all(columns) and all(all(values) and len({*values, OTHER}) == len(values) + 1 for values in lists)
        names = map(layouts.SEPARATOR.join, itertools.product(*lists)) if valid else ()
        statistics = (Statistic(kind, layouts.SEPARATOR.join(columns), tuple(names)),)
    elif kind != "units":
        numbers, shares = _numbers(declared), _numbers(quantiles)
        valid &= len(numbers) >= 2 and list(numbers) == sorted(set(numbers)) and all(map(math.isfinite, numbers))
        valid &= bool(shares) and all(0 < share < 1 for share in shares)
        statistics = tuple(Statistic(kind, column, (), numbers, share) for share in shares)
    if not valid:
        raise ConfigError(
            f"--{kind} {text}: values must be declared, because values read from the data are outside the guarantee. Declare "
            f"distinct values without ;, increasing numbers, or LOW:HIGH:PARTS, as in {OPTIONS[kind][1]}; quantiles lie "
            "between 0 and 1, as in --at .5,.9."
        )
    return statistics


def _declared_values(text: str) -> tuple[str, tuple[str, ...]]:
    column, _, declared = text.partition("=")
    return column, tuple(" ".join(part.split()) for part in declared.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers between commas, or the bounds of the equal parts of LOW:HIGH:PARTS; empty if the text is neither."""
    try:
        if ":" not in text:
            return tuple(map(float, text.split(",")))
        low, high, *count = text.split(":")
        parts = int(*count) if count else 1
        step = (float(high) - float(low)) / parts
        return tuple(float(low) + step * i for i in range(parts + 1)) if parts <= MOST_CANDIDATES else ()
    except (ValueError, TypeError, ArithmeticError):
        return ()


def exact_values(statistic: Statistic, units: Groups, table: Table, data: DataConfig, tokenizer: Any) -> Iterator[Any]:
    """The exact private values of a statistic.

    Args:
        statistic: The statistic to compute.
        units: Rows by unit, at most ``max_examples_per_unit`` each.
        table: The table of these rows.
        data: The recipe's data section.
        tokenizer: The model's tokenizer, for token lengths as in training but before the cut at ``max_length``.

    Yields:
        For counts, one text per unit or row; for quantiles, numbers, and nothing for a value that is not a number.
    """
    if statistic.kind == "units":
        yield from ("" for _ in units)
    elif statistic.kind == "lengths":
        untruncated = data.changed({"max_length": 2**40, "long_examples": "truncate"})
        for unit in iter_units(units.each_alone(), table.format, tokenizer, untruncated):
            yield float(sum(len(sequence.input_ids) for sequence in unit.sequences))
    else:
        columns = columns_of(statistic)
        for row in (row for unit in units for row in unit):
            if statistic.kind == "shares":
                yield layouts.SEPARATOR.join(value_name(row.codes.get(column)) for column in columns)
            elif (number := _number(row.codes.get(statistic.column))) is not None:
                yield number


def _number(value: Any) -> float | None:
    """A finite number from a number or its text; None for anything else."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def text_of(value: Any) -> str:
    """All text of a value, which may be a list of messages."""
    if isinstance(value, list):
        return " ".join(map(text_of, value))
    return str(value.get("content", "") if isinstance(value, dict) else value)
