"""Attacks with shadows: scores that know what each canary looks like with and without having been trained on.

Comes in: log-probabilities under the target, and under shadow runs whose coins are known. Goes out: LiRA and RMIA, higher =
more likely a member. A coin of the target is never asked for; torch is not imported; no model, text or file is read.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.auditing.attacks import log_ratio

# A legend of shapes: K shadows, M candidates, Q references.

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]

MANY_SHADOWS = 64
"""From so many on, LiRA takes each candidate's own variances; with fewer, one variance for all of them."""
VARIANCE_FLOOR = 1e-6
"""Nats squared: runs that differ by less than a thousandth of a nat do not differ."""
LIFT_FLOOR = 1e-3
"""Standard deviations: a candidate whose shadows show a smaller effect of training is taken to have this one."""


def lira(target: ArrayLike, shadows: ArrayLike, coins: ArrayLike) -> Floats:
    """Gaussian log-likelihood ratio of in against out, candidate by candidate (LiRA).

    A candidate's score in a shadow is level + coin * lift + noise. Its lift is what its own shadows show, drawn towards
    the mean lift of all candidates by as much as few shadows leave it uncertain (moment estimate of the lifts' variance);
    the level is then the mean of what is left. A candidate without an in shadow, or without an out shadow, has the mean
    lift. Where no shadow has any candidate in, or none out, no lift is known, and the score is the distance from the mean
    in standard deviations.

    Guarantee:
        With fewer than ``MANY_SHADOWS`` shadows a candidate's score rises with its target score: the direction is
        never learned. If some candidate has shadows of both kinds, a constant added to one candidate's scores in target
        and shadows changes nothing.

    Args:
        target: Shape (M,), for instance log-probabilities; finite.
        shadows: Shape (K, M), the same of each shadow.
        coins: Shape (K, M), coins of the shadows.

    Returns:
        Shape (M,), higher = more likely a member.

    References:
        Carlini et al. 2022, "Membership Inference Attacks From First Principles", which takes each candidate's own mean
        in and out however few shadows there are.
    """
    target_M, shadow_KM = np.asarray(target, dtype=np.float64), np.asarray(shadows, dtype=np.float64)
    in_KM = np.asarray(coins, dtype=np.bool_)
    ins_M, outs_M = in_KM.sum(0), (~in_KM).sum(0)
    mean_in_M, mean_out_M = _mean(shadow_KM, in_KM), _mean(shadow_KM, ~in_KM)
    square_KM = (shadow_KM - np.where(in_KM, mean_in_M, mean_out_M)) ** 2
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
        true_variance = max(0.0, float(((found_M - lift) ** 2 - error_M)[both_M].mean()))
    else:
        lift, true_variance = float(shadow_KM[in_KM].mean() - shadow_KM[~in_KM].mean()), 0.0
    trust_M = np.where(both_M, true_variance / (true_variance + error_M), 0.0)
    lift_M = np.maximum(lift + trust_M * (found_M - lift), LIFT_FLOOR * math.sqrt(variance))
    level_M = (shadow_KM - in_KM * lift_M).mean(0)

    var_in_M, var_out_M = np.full_like(level_M, variance), np.full_like(level_M, variance)
    if len(shadow_KM) >= MANY_SHADOWS:
        for own_M, side_KM, count_M in ((var_in_M, in_KM, ins_M), (var_out_M, ~in_KM, outs_M)):
            known_M = count_M > 1
            own_M[known_M] = ((square_KM * side_KM).sum(0)[known_M]) / (count_M[known_M] - 1)
            np.maximum(own_M, VARIANCE_FLOOR, out=own_M)
    return _log_normal(target_M, level_M + lift_M, var_in_M) - _log_normal(target_M, level_M, var_out_M)


def average_online(log_p_in: ArrayLike, log_p_out: ArrayLike) -> Floats:
    """Log p(x) = log((p_in + p_out) / 2)."""
    result: Floats = np.logaddexp(log_p_in, log_p_out) - math.log(2)
    return result


def sides(log_p: ArrayLike, coins: ArrayLike) -> tuple[Floats, Floats, float]:
    """Mean probability over the shadows with and without each candidate, in log space.

    A side on which a candidate has no shadow is filled in from its other side and the mean lift of those that have both
    (without such candidates: the lift between all shadow scores in and all out; 0 where one of them is empty).

    Args:
        log_p: Shape (K, M); minus infinity counts as probability zero.
        coins: Shape (K, M).

    Returns:
        log p_in and log p_out, each of shape (M,), and the mean of log p_in - log p_out.
    """
    log_p_KM, in_KM = np.asarray(log_p, dtype=np.float64), np.asarray(coins, dtype=np.bool_)
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
