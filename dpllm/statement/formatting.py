"""Numbers and names as a card shows them: bounds are rounded up, paths are cut to their last part.

Comes in: values of a run. Goes out: short strings. Must not open any file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

DATA_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst"}
NOT_MEASURED = "not measured"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Not part of a URL or of a relative path, and at least one directory deep.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/\\-])(?:file://)?(?:~|[A-Za-z]:)?[/\\][^\s'\"`,;:()]+")


def bound(value: float, digits: int = 4) -> str:
    """An upper bound, rounded up to some significant digits, so that the rounded sentence is still true."""
    number = Decimal(repr(value))
    if not number.is_finite() or number == 0:
        return str(value)
    unit = Decimal(1).scaleb(number.adjusted() - digits + 1)
    return number_text(float(number.quantize(unit, rounding=ROUND_CEILING)))


def percent_bound(share: float) -> str:
    """An upper bound on a share, as a percentage rounded up to one decimal."""
    return f"{math.ceil(round(share * 1000, 9)) / 10:g}%"


def number_text(value: float | int | None) -> str:
    """A number in full: the shortest text that reads back as the same number."""
    if value is None:
        return NOT_MEASURED
    return repr(int(value)) if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15) else repr(value)


def count(value: int) -> str:
    """A whole number with thousands separated."""
    return f"{value:,}"


def measured(value: float | None, decimals: int = 2) -> str:
    """A measured number, rounded to the nearest."""
    return NOT_MEASURED if value is None else f"{value:.{decimals}f}"


def interval(limits: Sequence[float] | None, decimals: int = 2) -> str:
    """A confidence interval."""
    return NOT_MEASURED if limits is None else f"{limits[0]:.{decimals}f} to {limits[1]:.{decimals}f}"


def share(value: float | None) -> str:
    """A measured share as a percentage."""
    return NOT_MEASURED if value is None else f"{100 * value:.1f}%"


def percent(value: float) -> str:
    """A share chosen beforehand, such as a confidence, as a percentage."""
    return f"{100 * value:g}%"


def p_value(value: float | None) -> str:
    """A p-value to two digits."""
    return NOT_MEASURED if value is None else "below 0.0001" if value < 1e-4 else f"{value:.2g}"


def sentence(text: str) -> str:
    """One line that ends with a full stop and begins with a capital, unless it begins with a name such as a key."""
    first, _, rest = " ".join(text.split()).partition(" ")
    line = f"{first[:1].upper() + first[1:] if first.isalpha() else first} {rest}".strip()
    return line if line.endswith((".", "!", "?")) else line + "."


def line(value: object) -> str:
    """Text on one line, without the full stop at its end."""
    return " ".join(str(value).split()).rstrip(". ")


def cell(value: object) -> str:
    """Text that stays inside its cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def tier(epsilon: float) -> str:
    """How an epsilon is commonly called.

    References:
        Ponomareva et al. 2023, "How to DP-fy ML", section 5.2 (three tiers, as a convention).
    """
    return "strong" if epsilon <= 1 else "reasonable" if epsilon <= 10 else "weak, often no meaningful protection"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face repository and nothing local bears it."""
    return (
        _HUB_ID.fullmatch(name) is not None
        and Path(name).suffix.lower() not in DATA_SUFFIXES
        and not Path(name).exists()
    )


def public_name(name: str) -> str:
    """A dataset by its Hub id or builtin name, and a local path by its last part."""
    if name.startswith("builtin:") or is_hub_id(name):
        return name
    return last_part(name)


def last_part(path: str) -> str:
    """The name of a local file or directory without where it lies."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def without_paths(value: Any) -> Any:
    """The same JSON value with every absolute local path in its strings cut to its last part."""
    if isinstance(value, str):
        return _ABSOLUTE_PATH.sub(lambda match: last_part(match[0]), value)
    if isinstance(value, dict):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    return value


def by_number(names: Iterable[str]) -> list[str]:
    """Names that are numbers, the smallest first."""
    return sorted(names, key=int)
