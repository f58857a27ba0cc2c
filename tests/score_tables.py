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
    """One row of a score table, of a secret."""
    return CanaryScores(name, group, inserted, tuned, base, tuned_greedy, base_greedy, tuned, base)


def token_table(
    tuned: Sequence[Any], base: Sequence[Any], names: Iterable[str] | None = None, **columns: Any
) -> TokenTable:
    """A token table from one list of log-probabilities for each sequence; what ``columns`` leave out says nothing."""
    lengths, scores = [len(tokens) for tokens in tuned], {}
    for which, log_prob_N in (("tuned", np.concatenate(tuned)), ("base", np.concatenate(base))):
        ones = np.ones_like(log_prob_N)
        kinds = {
            "log_prob": log_prob_N,
            "mean": -3 * ones,
            "variance": ones,
            "argmax": ones < 1,
            "top_k_log_prob": log_prob_N,
        }
        scores |= {f"{which}_{name}_N": values for name, values in kinds.items()}
    ids = tuple(names or (f"c{index}" for index in range(len(lengths))))
    sequence_N = np.repeat(np.arange(len(ids)), lengths)
    marks = {"secret_N": np.ones_like(sequence_N, dtype=bool), "word_N": np.arange(len(sequence_N))}
    return TokenTable(ids, np.full(len(ids), 40), sequence_N, **{**scores, **marks, **columns})


def tokens_of(rows: Sequence[CanaryScores]) -> TokenTable:
    """The token table of secrets of one token each, which adds up to these rows."""
    return token_table(
        [[secret.tuned_log_prob] for secret in rows],
        [[secret.base_log_prob] for secret in rows],
        [secret.canary_id for secret in rows],
        groups=tuple(secret.group for secret in rows),
        coins=tuple(secret.inserted for secret in rows),
        tuned_argmax_N=np.array([secret.tuned_greedy for secret in rows]),
        base_argmax_N=np.array([secret.base_greedy for secret in rows]),
    )
