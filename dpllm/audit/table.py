"""The score table: everything the statistics of an audit are computed from, and no text.

Comes in: scores. Goes out: one CSV row for each candidate and reference, sorted, the same bytes for the same scores.
Torch is not imported, so that anyone can recompute a published audit from the file.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpllm.errors import ConfigError

_COLUMNS = (
    *("canary_id", "group", "inserted", "num_tokens"),
    *("tuned_log_prob", "base_log_prob", "tuned_greedy", "base_greedy"),
)


@dataclass(frozen=True)
class CanaryScores:
    """What two models say about one secret. Log-probabilities are sums over the secret's tokens, in nats."""

    canary_id: str
    group: int
    """Repetitions; 0 for a reference."""
    inserted: bool | None
    """The coin; None for a reference, which has none."""
    num_tokens: int
    tuned_log_prob: float
    base_log_prob: float
    tuned_greedy: bool
    """Greedy decoding of the tuned model after the carrier gives the secret."""
    base_greedy: bool
    """The same for the base model, which never saw it: the control."""


def by_group(table: Iterable[CanaryScores]) -> dict[int, list[CanaryScores]]:
    """The rows of each group, smallest number of repetitions first; 0 holds the references."""
    groups: dict[int, list[CanaryScores]] = {}
    for row in sorted(table, key=lambda row: (row.group, row.canary_id)):
        groups.setdefault(row.group, []).append(row)
    return groups


def write_table(table: Iterable[CanaryScores], path: Path) -> None:
    """Writes the table atomically, sorted by id; floats are written so that they read back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in sorted(table, key=lambda row: row.canary_id):
        coin = "" if row.inserted is None else int(row.inserted)
        log_probs = (repr(float(row.tuned_log_prob)), repr(float(row.base_log_prob)))
        flags = (int(row.tuned_greedy), int(row.base_greedy))
        writer.writerow((row.canary_id, row.group, coin, row.num_tokens, *log_probs, *flags))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    os.replace(temporary, path)


def read_table(path: Path) -> tuple[CanaryScores, ...]:
    """Reads what ``write_table`` wrote.

    Raises:
        ConfigError: Missing or damaged file.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        if tuple(header) != _COLUMNS:
            raise ValueError("header")
        return tuple(_parse(row) for row in rows)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such score table; run dpllm audit first.") from None
    except (OSError, ValueError):
        raise ConfigError(f"{path}: is no score table; the file is damaged. Run dpllm audit again.") from None


def _parse(row: Sequence[str]) -> CanaryScores:
    canary_id, group, coin, num_tokens, tuned, base, tuned_greedy, base_greedy = row
    return CanaryScores(
        canary_id=canary_id,
        group=int(group),
        inserted=None if coin == "" else _flag(coin),
        num_tokens=int(num_tokens),
        tuned_log_prob=float(tuned),
        base_log_prob=float(base),
        tuned_greedy=_flag(tuned_greedy),
        base_greedy=_flag(base_greedy),
    )


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("flag")
    return text == "1"
