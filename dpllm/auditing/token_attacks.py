"""Membership attacks on the token table: each a score for every sequence, higher = more likely a member.

Comes in: the token table. Goes out: one array for each attack. The directions and the settings are fixed here and are
never turned round or tuned on coins. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dpllm.auditing.tokens import TokenTable

# A legend of shapes: S sequences, N tokens.

Floats = NDArray[np.float64]

LOWEST_SHARE = 0.2  # of a sequence's tokens, for Min-K%
SMALLEST_VARIANCE = 1e-12  # of log p: a model that is certain has none
SMOOTHING = 1e-6  # nats, in the ratio of gains to losses
WINDOWS = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)


def zlib(table: TokenTable) -> Floats:
    """Log-probability over the compressed length: an easy text is likely in every model (Carlini et al. 2021)."""
    return _sums(table, table.tuned_log_prob_N) / table.zlib_bytes_S


def min_k(table: TokenTable) -> Floats:
    """Mean log-probability of the least likely fifth of the tokens, at least one (Shi et al. 2024, Min-K%)."""
    return _lowest(table, table.tuned_log_prob_N)


def min_k_plus(table: TokenTable) -> Floats:
    """The same of log p in standard deviations from its mean over the vocabulary (Zhang et al. 2025, Min-K%++)."""
    return _lowest(table, _standardised(table.tuned_log_prob_N, table.tuned_mean_N, table.tuned_variance_N))


def min_k_plus_ratio(table: TokenTable) -> Floats:
    """Min-K%++ of the tuned model minus that of the base model."""
    base = _lowest(table, _standardised(table.base_log_prob_N, table.base_mean_N, table.base_variance_N))
    return min_k_plus(table) - base


def gains_over_losses(table: TokenTable) -> Floats:
    """Where the tuned model still errs: log-probability gained over log-probability lost, each plus a small constant.

    A sequence without an error left is judged by all its tokens: it must not rank lowest, as it does where the ratio is
    set to 0 for want of losses.

    References:
        EZ-MIA (arXiv 2601.12104), smoothed.
    """
    gain_N = table.tuned_log_prob_N - table.base_log_prob_N
    errors_S = _sums(table, (~table.tuned_argmax_N).astype(np.float64))
    counted_N = np.where(errors_S[table.sequence_N] > 0, ~table.tuned_argmax_N, True)
    gained = _sums(table, np.where(counted_N, np.maximum(gain_N, 0.0), 0.0))
    lost = _sums(table, np.where(counted_N, np.maximum(-gain_N, 0.0), 0.0))
    return np.log(gained + SMOOTHING) - np.log(lost + SMOOTHING)


def windows(table: TokenTable) -> Floats:
    """Share of windows of neighbouring tokens in which the tuned model is likelier, averaged over widths.

    Widths longer than a sequence are left out; a sequence of one token has that token as its window.

    References:
        WBC (arXiv 2601.02751).
    """
    gain_N = table.tuned_log_prob_N - table.base_log_prob_N
    starts, lengths = table.starts(), table.lengths()
    total_N1 = np.concatenate(([0.0], np.cumsum(gain_N)))
    votes_S = np.zeros(len(starts))
    widths_S = np.zeros(len(starts), dtype=np.float64)
    for width in (1, *WINDOWS):
        fits_S = lengths >= width if width > 1 else lengths == 1
        if not fits_S.any():
            continue
        likelier = (total_N1[width:] - total_N1[: len(total_N1) - width] > 0).astype(np.float64)
        before = np.concatenate(([0.0], np.cumsum(likelier)))
        last_S = starts + np.maximum(lengths - width + 1, 0)
        shares: Floats = (before[np.where(fits_S, last_S, 0)] - before[np.where(fits_S, starts, 0)]) / np.where(
            fits_S, lengths - width + 1, 1
        )
        votes_S += np.where(fits_S, shares, 0.0)
        widths_S += fits_S
    return votes_S / widths_S


ATTACKS: dict[str, Callable[[TokenTable], Floats]] = {
    "zlib": zlib,
    "min_k": min_k,
    "min_k_plus": min_k_plus,
    "min_k_plus_ratio": min_k_plus_ratio,
    "gains_over_losses": gains_over_losses,
    "windows": windows,
}
"""Scores by name, looked at beside the primary one; that one and the loss need sums alone (``attacks.ATTACKS``)."""


def _sums(table: TokenTable, values_N: Floats) -> Floats:
    return np.bincount(table.sequence_N, weights=values_N, minlength=len(table.canary_ids)).astype(np.float64)


def _standardised(log_prob_N: Floats, mean_N: Floats, variance_N: Floats) -> Floats:
    result: Floats = (log_prob_N - mean_N) / np.sqrt(np.maximum(variance_N, SMALLEST_VARIANCE))
    return result


def _lowest(table: TokenTable, values_N: Floats) -> Floats:
    """Mean of each sequence's lowest fifth, rounded up to a whole token."""
    order_N = np.lexsort((values_N, table.sequence_N))
    starts, lengths = table.starts(), table.lengths()
    few_S = np.ceil(LOWEST_SHARE * lengths).astype(np.int64)
    total_N1 = np.concatenate(([0.0], np.cumsum(values_N[order_N])))
    result: Floats = (total_N1[starts + few_S] - total_N1[starts]) / few_S
    return result
