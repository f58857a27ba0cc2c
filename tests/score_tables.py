"""Score and token tables as an audit writes them, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dpllm.auditing.table import CanaryScores, TokenTable


def row(
    name: str,
    group: int = 1,
    inserted: bool | None = True,
    tuned: float = -10.0,
    base: float = -12.0,
    tuned_greedy: bool = False,
    base_greedy: bool = False,
) -> CanaryScores:
    """One row of a score table, of a secret of four tokens."""
    return CanaryScores(name, group, inserted, 4, tuned, base, tuned_greedy, base_greedy)


def token_table(
    tuned: Sequence[Any], base: Sequence[Any], names: Iterable[str] | None = None, **columns: Any
) -> TokenTable:
    """A token table from one list of log-probabilities for each sequence; what ``columns`` leave out says nothing."""
    lengths, given = [len(one) for one in tuned], {}
    for which, log_prob_N in (("tuned", np.concatenate(tuned)), ("base", np.concatenate(base))):
        same = np.ones_like(log_prob_N)
        kinds = {
            "log_prob": log_prob_N,
            "mean": -3 * same,
            "variance": same,
            "argmax": same < 1,
            "top_k_log_prob": log_prob_N,
        }
        given |= {f"{which}_{name}_N": values for name, values in kinds.items()}
    ids = tuple(names or (f"c{index}" for index in range(len(lengths))))
    sequence_N = np.repeat(np.arange(len(ids)), lengths)
    return TokenTable(ids, np.full(len(ids), 40), sequence_N, **{**given, **columns})
