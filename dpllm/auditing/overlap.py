"""Overlap: rows that are said not to have trained, and did.

Comes in: the rows of both sides. Goes out: counts, or a refusal with counts. It names no row and quotes no text, and must not
know a model.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from dpllm.errors import ConfigError
from dpllm.text.data import FIELDS, Format, unit_name

Rows = list[dict[str, Any]]
"""The rows of one privacy unit."""

NGRAM = 13
"""Words in a row that two texts hardly share by chance."""
NEAR_COPY = 0.5
"""A row that has more than this share of its 13-word runs in common with members is a copy of theirs."""


def check_overlap(members: Sequence[Rows], non_members: Sequence[Rows], fmt: Format, unit: str) -> dict[str, Any]:
    """Looks for non-members that trained: the same text, a near copy, or another row of the same unit.

    Case and white space make no difference. A near copy has more than half of its runs of 13 words in common with members.

    Returns:
        Counts, and the mean share of 13-word runs of non-members that members have too.

    Raises:
        ConfigError: There are some; how many is said, and not which.
    """
    rows = [row for group in non_members for row in group]
    words = [_words(row, fmt) for row in rows]
    whole = {" ".join(found) for found in words}
    runs = [_runs(found) for found in words]
    wanted: set[int] = set().union(*runs)
    seen: set[int] = set()
    copied: set[str] = set()
    units: set[str | None] = set()
    for row in (row for group in members for row in group):
        found = _words(row, fmt)
        text = " ".join(found)
        if text in whole:
            copied.add(text)
        seen |= _runs(found) & wanted
        units.add(unit_name(row.get(unit)))
    shares = [len(run & seen) / len(run) if run else 0.0 for run in runs]
    exact = sum(" ".join(found) in copied for found in words)
    near = sum(share > NEAR_COPY for share in shares)
    shared_units = 0 if unit == "example" else sum(unit_name(group[0].get(unit)) in units for group in non_members)
    if exact or near or shared_units:
        counts = [f"{exact} of {len(rows)} rows are members too, word by word"] if exact else []
        counts += (
            [f"{near} of {len(rows)} have most of their runs of {NGRAM} words in common with members"] if near else []
        )
        counts += [f"{shared_units} of {len(non_members)} units are units of members too"] if shared_units else []
        raise ConfigError(
            f"non-members overlap with members: {'; '.join(counts)}. What trained cannot stand for what did not; take these "
            "rows out of the non-members."
        )
    return {"rows": len(rows), "exact": 0, "near_copies": 0, "mean_share_of_13_word_runs": sum(shares) / len(rows)}


def _text(row: Mapping[str, Any], fmt: Format) -> str:
    parts = [row[field] for field in FIELDS[fmt]]
    if fmt == "messages":
        parts = [str(turn.get("content", "")) if isinstance(turn, dict) else str(turn) for turn in parts[0]]
    return "\n".join(map(str, parts))


def _words(row: Mapping[str, Any], fmt: Format) -> list[str]:
    return unicodedata.normalize("NFC", _text(row, fmt)).casefold().split()


def _runs(words: Sequence[str]) -> set[int]:
    """Hashes of all runs of 13 words."""
    return {hash(tuple(words[start : start + NGRAM])) for start in range(len(words) - NGRAM + 1)}
