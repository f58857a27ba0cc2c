"""Formats numbers and names for cards, with bounds rounded up; loads the templates of their texts.

Comes in: values of a run. Goes out: short strings, templates. Must not open any other file.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from dpllm.privacy.limits import rounded_up

TEMPLATES = Path(__file__).parent / "templates"
NOT_MEASURED = "not measured"
_MARKDOWN = re.compile(r"[\\`*\[\]~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|^[#>+-]")
"""Characters with a meaning in Markdown or in mathematics on the Hub."""


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """An HTML table for notebooks: a title, and one row for each name and value; None is left out."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def bound(value: float, digits: int = 4) -> str:
    """An upper bound, rounded up to ``digits`` significant digits, so that the rounded statement is still true."""
    return number_text(rounded_up(value, digits)) if value else str(value)


def bound_or_infinite(value: float | None, digits: int = 4) -> str:
    """``bound``, with "infinite" for None."""
    return "infinite" if value is None else bound(value, digits)


def percent_bound(share: float) -> str:
    """An upper bound on a share, as a percentage rounded up to one decimal."""
    return f"{math.ceil(round(share * 1000, 9)) / 10:g}%"


def limit_text(name: str, value: float | None) -> str:
    """A limit on an attacker, rounded up: true positive rates as percentages, "infinite" for None."""
    return percent_bound(value) if name.startswith("tpr") and value is not None else bound_or_infinite(value)


def number_text(value: float | int | None) -> str:
    """A number in full precision: the shortest text that parses to the same number."""
    if value is None:
        return NOT_MEASURED
    return repr(int(value)) if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15) else repr(value)


def count(value: int) -> str:
    """A whole number with thousands separated."""
    return f"{value:,}"


def proven(value: float | None) -> str:
    """A lower bound, rounded down to two decimals, so that the rounded statement is still true."""
    return NOT_MEASURED if value is None else f"{math.floor(round(value * 100, 9)) / 100:.2f}"


def measured(value: float | None, decimals: int = 2) -> str:
    """A measured number, rounded to the nearest."""
    return NOT_MEASURED if value is None else f"{value:.{decimals}f}"


def interval(limits: Sequence[float] | None, decimals: int = 2) -> str:
    """A confidence interval."""
    return NOT_MEASURED if limits is None else f"{limits[0]:.{decimals}f} to {limits[1]:.{decimals}f}"


def estimate(value: float | None, limits: Sequence[float] | None, decimals: int = 2) -> str:
    """A measured number with its confidence interval."""
    return f"{measured(value, decimals)} ({interval(limits, decimals)})"


def share(value: float | None) -> str:
    """A measured share as a percentage."""
    return NOT_MEASURED if value is None else f"{100 * value:.1f}%"


def percent(value: float) -> str:
    """A share that was chosen in advance, such as a confidence level, as a percentage."""
    return f"{100 * value:g}%"


def p_value(value: float | None) -> str:
    """A p-value to two digits."""
    return NOT_MEASURED if value is None else "below 0.0001" if value < 1e-4 else f"{value:.2g}"


def line(value: object) -> str:
    """Text on one line, without the full stop at its end."""
    return _prose(visible(value).rstrip(". "))


def cell(value: object) -> str:
    """Text for one cell of a Markdown table, which it cannot leave."""
    return _prose(visible(value)).replace("|", "\\|")


def code(value: object) -> str:
    """A name in a code span, which it cannot end, inside or outside a table."""
    name = visible(value).replace("`", "'") or "?"
    return "`" + re.sub(r"\\*\|", r"\\|", name) + "`"


def visible(value: object) -> str:
    """Text on one line, without invisible characters or ones that reverse the text direction."""
    line = " ".join(str(value).split())
    return "".join(character for character in line if unicodedata.category(character) not in ("Cc", "Cf")).strip()


def _prose(text: str) -> str:
    """Escapes Markdown, so that no image, link, emphasis or heading begins in the text."""
    return _MARKDOWN.sub(r"\\\g<0>", text)


def tier(epsilon: float) -> str:
    """The usual name for the strength of an epsilon.

    References:
        Ponomareva et al. 2023, "How to DP-fy ML", section 5.2 (three tiers, as a convention).
    """
    return "strong" if epsilon <= 1 else "reasonable" if epsilon <= 10 else "weak, often no meaningful protection"


def is_folder_name(source: object) -> bool:
    """Whether a published name is the last part of a local path, not ORGANISATION/NAME of the Hub or builtin:NAME."""
    return isinstance(source, str) and not re.search("[/:]", source)


def by_number(names: Iterable[str]) -> list[str]:
    """Numeric names in ascending order."""
    return sorted(names, key=int)


@cache
def template(name: str) -> Template:
    """A template of a card or of a part of it."""
    loader = FileSystemLoader(TEMPLATES)
    loaded: Template = Environment(loader=loader, undefined=StrictUndefined, autoescape=False).get_template(name)
    return loaded


def epsilon_in_prose(answer: Mapping[str, Any]) -> str:
    """The guarantee of one run of DP-SGD in words, with all its assumptions.

    Args:
        answer: Output of ``dpllm epsilon --json`` without the field ``statement``.

    Returns:
        Paragraphs, separated by empty lines; epsilons are rounded up.
    """
    return template("epsilon.txt.j2").render(answer, up=bound_or_infinite)
