"""Attacks: scores of the canaries' rows and of their tokens, higher = more likely a member.

Comes in: the score and token tables. Goes out: one array for each attack, and counts of secrets that greedy decoding gives
away. Directions and settings are fixed here and are never turned round or tuned on coins. Knows no model and no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.auditing.statistics import Floats, fit_slope
from dpllm.auditing.table import CanaryScores, TokenTable

# A legend of shapes: M candidates, Q references, S sequences, N tokens, K shadows.

Coins = NDArray[np.bool_]

GAMMA = 1.0
"""RMIA's threshold of the likelihood ratio."""
OFFLINE_A = 0.3
"""RMIA's a: how much of p_in is explained by p_out, p_in = a p_out + 1 - a."""
LOWEST_SHARE = 0.2  # of a sequence's tokens, for Min-K%++
SMALLEST_VARIANCE = 1e-12  # of log p: a model that is certain has none
MANY_SHADOWS = 64  # from so many on, LiRA takes each candidate's own variances; below, one for all of them
VARIANCE_FLOOR = 1e-6  # nats squared: runs that differ by less than a thousandth of a nat do not differ
LIFT_FLOOR = 1e-3  # standard deviations: the least effect of training that a candidate is taken to have


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


def rmia(
    target: ArrayLike,
    average: ArrayLike,
    target_references: ArrayLike,
    average_references: ArrayLike,
    gamma: float = GAMMA,
) -> Floats:
    """Share of references z whose likelihood ratio to the candidate x is at least gamma (RMIA).

    The ratio is [p(x | target) / p(x)] / [p(z | target) / p(z)]. For given references the share only rises with
    p(x | target) / p(x): the references set the scale of the score, and hardly its order.

    Args:
        target: Shape (M,), log p(x | target). For a text, p is the geometric mean over its tokens.
        average: Shape (M,), log p(x), over models with and without x: see ``average_offline``.
        target_references: Shape (Q,), log p(z | target).
        average_references: Shape (Q,), log p(z).
        gamma: > 0.

    References:
        Zarifzadeh, Liu and Shokri 2024, "Low-Cost High-Power Membership Inference Attacks".
    """
    gain_M, gain_Q = log_ratio(target, average), np.sort(log_ratio(target_references, average_references))
    result: Floats = np.searchsorted(gain_Q, gain_M - math.log(gamma), side="right") / len(gain_Q)
    return result


def average_offline(log_p_out: ArrayLike, a: float = OFFLINE_A) -> Floats:
    """Log p(x) = log(((1 + a) p_out + 1 - a) / 2), from models that never saw x; p_out = 0 is an answer like another.

    Where texts are unlikely (p_out far below 1 - a) the average hardly depends on p_out, and what remains is an attack on
    the loss.

    References:
        Zarifzadeh, Liu and Shokri 2024, on p(x) without in models.
    """
    result: Floats = np.logaddexp(
        math.log((1 + a) / 2) + np.asarray(log_p_out, dtype=np.float64), math.log((1 - a) / 2)
    )
    return result


def log_ratio(first: ArrayLike, second: ArrayLike) -> Floats:
    """First minus second, in log space; 0 where they are equal, also where both probabilities are zero."""
    over, under = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    same = over == under
    return np.where(same, 0.0, over - np.where(same, 0.0, under))


def rmia_base(rows: Sequence[CanaryScores], references: Sequence[CanaryScores]) -> Floats:
    """RMIA with the base model as its only reference, on probabilities for each token."""

    def averages(side: Sequence[CanaryScores]) -> tuple[Floats, Floats]:
        lengths = np.array([row.num_tokens for row in side], dtype=np.float64)
        return loss(side) / lengths, average_offline(base_loss(side) / lengths)

    return rmia(*averages(rows), *averages(references))


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
SINCE: dict[str, int] = {}
"""Attacks that audits before this ``schema_version`` of audit.json do not have: these are verified without them."""


# With shadow models: runs of the same recipe with other coins.


def lira(target: ArrayLike, shadows: ArrayLike, coins: ArrayLike) -> Floats:
    """Gaussian log-likelihood ratio of in against out, score_M from target_M, shadows_KM and coins_KM (LiRA).

    A candidate's score in a shadow is level + coin * lift + noise. Its lift is what its own shadows show, drawn towards
    the mean lift of all candidates by as much as few shadows leave it uncertain (moment estimate of the lifts' variance);
    the level is then the mean of what is left. A candidate without an in shadow, or without an out shadow, has the mean
    lift. Where no shadow has any candidate in, or none out, no lift is known, and the score is the distance from the mean
    in standard deviations.

    Guarantee:
        With fewer than ``MANY_SHADOWS`` shadows a candidate's score rises with its target score: the direction is
        never learned. If some candidate has shadows of both kinds, a constant added to one candidate's scores in target
        and shadows changes nothing.

    References:
        Carlini et al. 2022, "Membership Inference Attacks From First Principles", which takes each candidate's own mean
        in and out however few shadows there are.
    """
    target_M, shadow_KM = np.asarray(target, dtype=np.float64), np.asarray(shadows, dtype=np.float64)
    in_KM = np.asarray(coins, dtype=np.bool_)
    ins_M, outs_M = in_KM.sum(0), (~in_KM).sum(0)
    mean_in_M, mean_out_M = _mean(shadow_KM, in_KM), _mean(shadow_KM, ~in_KM)
    square_KM = (shadow_KM - np.where(in_KM, mean_in_M, mean_out_M)) ** 2
    # One variance for all: divided by its own, which a handful of shadows hardly tells, a candidate would rank by chance.
    freedom = int(np.maximum(ins_M - 1, 0).sum() + np.maximum(outs_M - 1, 0).sum())
    # Without two shadows that agree on a candidate's coin the spread is unknown; it does not change the order.
    variance = max(float(square_KM.sum()) / freedom, VARIANCE_FLOOR) if freedom else 1.0
    if in_KM.all() or not in_KM.any():
        distance_M: Floats = (target_M - shadow_KM.mean(0)) / math.sqrt(variance)
        return distance_M

    both_M = (ins_M > 0) & (outs_M > 0)
    found_M = np.where(both_M, mean_in_M - mean_out_M, 0.0)
    error_M = variance * (1 / np.maximum(ins_M, 1) + 1 / np.maximum(outs_M, 1))
    if both_M.any():
        lift = float(found_M[both_M].mean())
        # Lifts that are found vary as the true ones do, and by their errors: what the errors leave is what is true.
        true_variance = max(0.0, float(((found_M - lift) ** 2 - error_M)[both_M].mean()))
    else:
        lift, true_variance = float(shadow_KM[in_KM].mean() - shadow_KM[~in_KM].mean()), 0.0
    trust_M = np.where(both_M, true_variance / (true_variance + error_M), 0.0)
    # Above 0 whatever the shadows say, so that the direction is never learned.
    lift_M = np.maximum(lift + trust_M * (found_M - lift), LIFT_FLOOR * math.sqrt(variance))
    level_M = (shadow_KM - in_KM * lift_M).mean(0)
    var_in_M, var_out_M = (_own_variance(square_KM, side_KM, variance) for side_KM in (in_KM, ~in_KM))
    return _log_normal(target_M, level_M + lift_M, var_in_M) - _log_normal(target_M, level_M, var_out_M)


def _own_variance(square_KM: Floats, counted_KM: Coins, variance: float) -> Floats:
    """Each candidate's own variance where many shadows tell it, else the one of all."""
    count_M = counted_KM.sum(0)
    own_M = np.maximum((square_KM * counted_KM).sum(0) / np.maximum(count_M - 1, 1), VARIANCE_FLOOR)
    result: Floats = np.where((len(square_KM) >= MANY_SHADOWS) & (count_M > 1), own_M, variance)
    return result


def sides(log_p_KM: Floats, in_KM: Coins) -> tuple[Floats, Floats, float]:
    """Log p_in and log p_out of each candidate, means of probabilities over its shadows, and the mean of their difference.

    A side on which a candidate has no shadow is filled in from its other side and the mean lift of those that have both
    (without such candidates: the lift between all shadow scores in and all out; 0 where one of them is empty). A
    log-probability of minus infinity counts as probability zero.
    """
    in_M, out_M = log_mean(log_p_KM, in_KM), log_mean(log_p_KM, ~in_KM)
    has_in_M, has_out_M = in_KM.any(0), (~in_KM).any(0)
    gain_M = log_ratio(in_M, out_M)[has_in_M & has_out_M]
    gain_M = gain_M[np.isfinite(gain_M)]
    lift = 0.0
    if len(gain_M):
        lift = float(gain_M.mean())
    elif has_in_M.any() and has_out_M.any():
        gain = log_ratio(in_M[has_in_M].mean(), out_M[has_out_M].mean())
        lift = float(gain) if np.isfinite(gain) else 0.0
    return np.where(has_in_M, in_M, out_M + lift), np.where(has_out_M, out_M, in_M - lift), lift


def _mean(values_KM: Floats, counted_KM: Coins) -> Floats:
    """Mean of the counted ones of each column; 0 where there are none."""
    result: Floats = np.where(counted_KM, values_KM, 0.0).sum(0) / np.maximum(counted_KM.sum(0), 1)
    return result


def log_mean(log_KM: Floats, counted_KM: Coins) -> Floats:
    """Log of the mean of exp of the counted ones of each column; minus infinity where there are none."""
    total_M: Floats = np.logaddexp.reduce(np.where(counted_KM, log_KM, -np.inf), axis=0)
    result: Floats = total_M - np.log(np.maximum(counted_KM.sum(0), 1))
    return result


def _log_normal(value_M: Floats, mean_M: Floats, variance_M: Floats) -> Floats:
    """Log of the normal density, up to a constant."""
    return -0.5 * ((value_M - mean_M) ** 2 / variance_M + np.log(variance_M))
