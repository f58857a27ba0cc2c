"""Attacks: scores of the canaries' rows and of their tokens, higher = more likely a member.

Comes in: the score and token tables. Goes out: one array for each attack, and counts of secrets that greedy decoding gives
away. Directions and settings are fixed here and are never turned round or tuned on coins. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from dpllm.auditing.statistics import Floats, fit_slope
from dpllm.auditing.table import CanaryScores, TokenTable

# A legend of shapes: S sequences, N tokens.

LOWEST_SHARE = 0.2  # of a sequence's tokens, for Min-K%++
SMALLEST_VARIANCE = 1e-12  # of log p: a model that is certain has none


def ratio(table: Iterable[CanaryScores]) -> Floats:
    """How much likelier the text became: sum of log p_tuned - log p_base, in nats."""
    return np.array([row.tuned_log_prob - row.base_log_prob for row in table], dtype=np.float64)


def loss(table: Iterable[CanaryScores]) -> Floats:
    """How likely the text is: sum of log p_tuned, in nats."""
    return np.array([row.tuned_log_prob for row in table], dtype=np.float64)


def base_loss(table: Iterable[CanaryScores]) -> Floats:
    """How likely it was before training, in nats: no attack but the control, which must find nothing."""
    return np.array([row.base_log_prob for row in table], dtype=np.float64)


def slope(candidates: Iterable[CanaryScores]) -> float:
    """How much of a log-probability before training is left after it: the slope of tuned on base; 1 if unknown.

    It is fitted on all candidates alike, whatever their coins, so that a score made with it depends on coins through the
    model only. A model that hardly moved has a slope near 1, one that learned to write digits anew a slope near 0.
    """
    tuned, base = _left(candidates)
    return fit_slope(base, tuned)


def calibrated(table: Iterable[CanaryScores], slope: float) -> Floats:
    """What the base model's log-probability does not explain: sum of log p_tuned - slope * log p_base, in nats.

    The best use of the base as a control variate: ``ratio`` for a slope of 1, ``loss`` for one of 0, and never noisier
    than both. Of whole rows both are first freed of what their words explain, see ``unexplained``.

    References:
        Watson et al. 2022, "On the Importance of Difficulty Calibration in Membership Inference Attacks" (a reference
        model's score is subtracted); the slope and the words are ours.
    """
    tuned, base = _left(table)
    return tuned - slope * base


def _left(table: Iterable[CanaryScores]) -> tuple[Floats, Floats]:
    rows = list(table)
    if any(row.tuned_left is None for row in rows):
        return loss(rows), base_loss(rows)
    tuned, base = np.array([(row.tuned_left, row.base_left) for row in rows], dtype=np.float64).reshape(-1, 2).T
    return tuned, base


def unexplained(table: TokenTable, log_prob_N: Floats) -> Floats:
    """Shape (S,): what a row's log-probability has above that of the same words in the other rows, in nats.

    From each token's the mean over all tokens is taken, then the mean of what is left over all tokens that are the same, then
    that over all that also stand behind the same. The last two means count one token more, of 0, so that of a token that
    stands nowhere else half is left each time. Every row counts alike, whatever its coin.
    """
    assert table.word_N is not None
    before_N = np.append(-1, table.word_N[:-1])
    before_N[table.starts()] = -1
    left_N = log_prob_N - log_prob_N.mean()
    for kind_N in (table.word_N, table.word_N * (len(left_N) + 1) + before_N):
        _, which_N, often_K = np.unique(kind_N, return_inverse=True, return_counts=True)
        left_N = left_N - (np.bincount(which_N, left_N) / (often_K + 1))[which_N]
    return table.sums(left_N)


def of_whole_rows(table: Iterable[CanaryScores], tokens: TokenTable | None) -> list[CanaryScores]:
    """The scores as the primary attack reads them: summed over whole rows, where more than the secrets was scored."""
    if tokens is None or tokens.secret_N is None:
        return list(table)
    log_probs = {"tuned": tokens.tuned_log_prob_N, "base": tokens.base_log_prob_N}
    columns = {
        "num_tokens": dict(zip(tokens.canary_ids, tokens.lengths().tolist(), strict=True)),
        **{f"{model}_log_prob": tokens.by_canary(tokens.sums(values_N)) for model, values_N in log_probs.items()},
    }
    # The rejected answers of pairs have the same words: two noises would be added where one is taken off.
    if not tokens.of_pairs:
        columns |= {
            f"{model}_left": tokens.by_canary(unexplained(tokens, values_N)) for model, values_N in log_probs.items()
        }
    return [replace(row, **{name: column[row.canary_id] for name, column in columns.items()}) for row in table]


def members(rows: Iterable[CanaryScores]) -> list[CanaryScores]:
    """The candidates whose coin said in."""
    return [row for row in rows if row.inserted]


def held_out(rows: Iterable[CanaryScores]) -> list[CanaryScores]:
    """The candidates whose coin said out, and references."""
    return [row for row in rows if not row.inserted]


def extraction(rows: Sequence[CanaryScores]) -> dict[str, int]:
    """How many secrets greedy decoding gives away: of those inserted, and of those held out as the control."""
    inside, outside = members(rows), held_out(rows)
    return {
        "inserted": len(inside),
        "tuned": sum(row.tuned_greedy for row in inside),
        "base": sum(row.base_greedy for row in inside),
        "held_out": len(outside),
        "held_out_tuned": sum(row.tuned_greedy for row in outside),
    }


def zlib(table: TokenTable) -> Floats:
    """Log-probability over the compressed length: an easy text is likely in every model (Carlini et al. 2021)."""
    return table.sums(table.tuned_log_prob_N) / table.zlib_bytes_S


def min_k_plus(table: TokenTable) -> Floats:
    """Log p in standard deviations from its mean over the vocabulary, averaged over the lowest fifth of the tokens.

    The fifth is rounded up to a whole token.

    References:
        Zhang et al. 2025, Min-K%++.
    """
    deviation_N = np.sqrt(np.maximum(table.tuned_variance_N, SMALLEST_VARIANCE))
    standardised_N = (table.tuned_log_prob_N - table.tuned_mean_N) / deviation_N
    order_N = np.lexsort((standardised_N, table.sequence_N))
    starts, lengths = table.starts(), table.lengths()
    few_S = np.ceil(LOWEST_SHARE * lengths).astype(np.int64)
    total_N1 = np.concatenate(([0.0], np.cumsum(standardised_N[order_N])))
    result: Floats = (total_N1[starts + few_S] - total_N1[starts]) / few_S
    return result


ATTACKS: dict[str, Callable[[Iterable[CanaryScores]], Floats]] = {"ratio": ratio, "loss": loss}
"""Membership scores of secrets by name, looked at beside the primary one."""

TOKEN_ATTACKS: dict[str, Callable[[TokenTable], Floats]] = {"zlib": zlib, "min_k_plus": min_k_plus}
"""Membership scores of sequences by name."""
