"""The score table: what two models say about each secret, and no text.

Comes in: a token table, or the folder of an audit. Goes out: one row for each candidate and reference. Torch is not
imported, so that anyone can recompute a published audit from the files.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpllm.auditing.tokens import TokenTable, read_tokens
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


def sum_up(tokens: TokenTable) -> tuple[CanaryScores, ...]:
    """The score table that a token table of canaries adds up to, one row for each canary in the same order."""
    rows = zip(tokens.canary_ids, tokens.groups, tokens.coins, tokens.starts(), tokens.lengths(), strict=True)
    return tuple(
        CanaryScores(
            canary_id=canary_id,
            group=group,
            inserted=coin,
            num_tokens=int(length),
            tuned_log_prob=float(tokens.tuned_log_prob_N[start : start + length].sum()),
            base_log_prob=float(tokens.base_log_prob_N[start : start + length].sum()),
            tuned_greedy=bool(tokens.tuned_argmax_N[start : start + length].all()),
            base_greedy=bool(tokens.base_argmax_N[start : start + length].all()),
        )
        for canary_id, group, coin, start, length in rows
    )


def read_scores(folder: Path) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    """The tables of an audit.

    Args:
        folder: With tokens.parquet; audits before version 3 of audit.json have groups and coins in a scores.csv beside it.

    Raises:
        ConfigError: Missing or damaged file.
    """
    tokens, old = read_tokens(folder / "tokens.parquet"), folder / "scores.csv"
    if old.exists():
        return _read_csv(old), tokens
    if len(tokens.groups) != len(tokens.canary_ids):
        raise ConfigError(f"{folder}/tokens.parquet: says nothing of groups and coins. Run dpllm audit again.")
    return sum_up(tokens), tokens


def _read_csv(path: Path) -> tuple[CanaryScores, ...]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        if tuple(header) != _COLUMNS:
            raise ValueError("header")
        flags = {"0": False, "1": True}
        return tuple(
            CanaryScores(
                canary_id=canary_id,
                group=int(group),
                inserted={"": None, **flags}[coin],
                num_tokens=int(num_tokens),
                tuned_log_prob=float(tuned),
                base_log_prob=float(base),
                tuned_greedy=flags[tuned_greedy],
                base_greedy=flags[base_greedy],
            )
            for canary_id, group, coin, num_tokens, tuned, base, tuned_greedy, base_greedy in rows
        )
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"{path}: is no score table; the file is damaged. Run dpllm audit again.") from None
