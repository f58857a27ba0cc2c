"""Attacks with shadows: scores that know what each canary looks like with and without having been trained on.

Comes in: the target's score table, and a ``ShadowScores``. Goes out: LiRA and RMIA, higher = more likely a member; how well
they do, group by group; and a lower bound on epsilon from one score of each run. Scores do not depend on the target's coins,
which only sort them afterwards. Torch is not imported; no model, text or file is read.

Shape suffixes: K shadows, M candidates, Q references, R runs: the target and its shadows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.auditing import attacks
from dpllm.auditing.rates import Rates, epsilon_from_rates, many_runs
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import CanaryScores

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]

MANY_SHADOWS = 64  # from so many on, LiRA takes each candidate's own variances; below, one for all of them
VARIANCE_FLOOR = 1e-6  # nats squared: runs that differ by less than a thousandth of a nat do not differ
LIFT_FLOOR = 1e-3  # standard deviations: the least effect of training that a candidate is taken to have


@dataclass(frozen=True)
class ShadowScores:
    """What K shadow runs say about the canaries of the target. Log-probabilities are sums over a secret, in nats."""

    canary_ids: tuple[str, ...]  # of the M candidates
    coins_KM: Coins  # whether the shadow's own coin said in
    log_prob_KM: Floats
    num_tokens_M: NDArray[np.int64]  # scored tokens of each candidate
    reference_ids: tuple[str, ...]  # of the Q references, which no run was trained on
    references_KQ: Floats
    reference_tokens_Q: NDArray[np.int64]


def shadow_scores(
    candidates: Sequence[CanaryScores], references: Sequence[CanaryScores], shadows: ShadowScores
) -> dict[str, Floats]:
    """Every attack on candidates of one group, which are repeated equally often.

    Returns:
        Scores by name, shape (M,), higher = more likely a member. ratio: what needs no shadow, to compare with.
        rmia_base: RMIA with the base model as the only out model. rmia_offline: with the shadows that lack the candidate.
        rmia_online: with those that have it too.
    """
    own_M = [shadows.canary_ids.index(row.canary_id) for row in candidates]
    coins_KM, log_prob_KM = shadows.coins_KM[:, own_M], shadows.log_prob_KM[:, own_M]
    base_M, tokens_M = attacks.base_loss(candidates), shadows.num_tokens_M[own_M]
    tuned_M = attacks.loss(candidates) / tokens_M
    place = {row.canary_id: row for row in references}
    known = [place[canary_id] for canary_id in shadows.reference_ids]
    tuned_Q = attacks.loss(known) / shadows.reference_tokens_Q
    in_M, out_M, lift = sides(log_prob_KM / tokens_M, coins_KM)
    references_KQ = shadows.references_KQ / shadows.reference_tokens_Q
    out_Q = _log_mean(references_KQ, np.ones(references_KQ.shape, dtype=np.bool_))
    return {
        "ratio": attacks.ratio(candidates),
        "rmia_base": attacks.rmia_base(candidates, references),
        "rmia_offline": attacks.rmia(tuned_M, attacks.average_offline(out_M), tuned_Q, attacks.average_offline(out_Q)),
        # p(x) = (p_in + p_out) / 2, whose half cancels. No model saw a reference; what it would have gained is the candidates'
        # lift, or their scales would differ.
        "rmia_online": attacks.rmia(tuned_M, np.logaddexp(in_M, out_M), tuned_Q, np.logaddexp(out_Q + lift, out_Q)),
        "lira": lira(attacks.ratio(candidates), log_prob_KM - base_M, coins_KM),
    }


def summarise_shadows(
    groups: Mapping[int, Sequence[CanaryScores]], shadows: ShadowScores, *, delta: float, alpha: float
) -> dict[str, Any]:
    """What follows from shadows of the target whose table by repetitions these groups are, JSON-ready.

    Of each attack the held-out candidates are the negatives, for only they differ from the others by nothing but a coin.
    """
    tested: dict[str, Any] = {}
    for group, rows in ((group, rows) for group, rows in groups.items() if group):
        in_M = np.array([bool(row.inserted) for row in rows])
        scores = shadow_scores(rows, groups[0], shadows)
        positives = int(in_M.sum())
        shared = {"group": group, "positives": positives, "negatives": len(rows) - positives, "confidence": CONFIDENCE}
        tested[str(group)] = {
            name: {**shared, **separation(found_M[in_M], found_M[~in_M])} for name, found_M in scores.items()
        }
    many = one_canary_bound(groups.get(1, []), shadows, delta=delta, alpha=alpha)
    return {"shadows": len(shadows.coins_KM), "attacks": tested, "many_runs": many}


def one_canary_bound(
    once: Sequence[CanaryScores], shadows: ShadowScores, *, delta: float, alpha: float
) -> dict[str, Any]:
    """A lower bound on epsilon from the first candidate that is inserted once: one score of the target, one of each shadow.

    Guarantee:
        That of ``rates.many_runs``: P[value > epsilon] <= alpha if every run draws its coins, sample and noise anew from one
        (epsilon, delta)-DP mechanism. The canary is the one with the smallest id, whatever the scores.
    """
    runs: dict[str, Any] = {"value": None, "ceiling": None, "alpha": alpha, "delta": delta}
    if not once:
        return {**runs, "reason": "no canary is inserted once"}
    first = min(once, key=lambda row: row.canary_id)
    own = shadows.canary_ids.index(first.canary_id)
    score_R = np.append(first.tuned_log_prob, shadows.log_prob_KM[:, own])
    coin_R = np.append(bool(first.inserted), shadows.coins_KM[:, own])
    having, lacking = int(coin_R.sum()), int((~coin_R).sum())
    runs |= {"canary_id": first.canary_id, "runs_with": having, "runs_without": lacking}
    if min(having, lacking) < 2:
        return {**runs, "reason": "it takes two runs with the canary and two without"}
    bound = many_runs(score_R[coin_R], score_R[~coin_R], delta=delta, alpha=alpha)
    # If the score told them apart without an error; of each kind the first, third, fifth ... chose the threshold.
    perfect = Rates(having // 2, 0, 0, lacking // 2)
    ceiling = epsilon_from_rates(perfect, delta=delta, alpha=alpha).value
    assumes = (
        "target and shadows are independent runs of one mechanism: same recipe and Plan, coins, sample and noise drawn anew; "
        f"{bound.assumes}; the number of shadows was not chosen by what they showed"
    )
    return {**runs, **asdict(bound), "assumes": assumes, "ceiling": ceiling}


# Their formulas.


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
    in_M, out_M = _log_mean(log_p_KM, in_KM), _log_mean(log_p_KM, ~in_KM)
    has_in_M, has_out_M = in_KM.any(0), (~in_KM).any(0)
    gain_M = attacks.log_ratio(in_M, out_M)[has_in_M & has_out_M]
    gain_M = gain_M[np.isfinite(gain_M)]
    lift = 0.0
    if len(gain_M):
        lift = float(gain_M.mean())
    elif has_in_M.any() and has_out_M.any():
        gain = attacks.log_ratio(in_M[has_in_M].mean(), out_M[has_out_M].mean())
        lift = float(gain) if np.isfinite(gain) else 0.0
    return np.where(has_in_M, in_M, out_M + lift), np.where(has_out_M, out_M, in_M - lift), lift


def _mean(values_KM: Floats, counted_KM: Coins) -> Floats:
    """Mean of the counted ones of each column; 0 where there are none."""
    result: Floats = np.where(counted_KM, values_KM, 0.0).sum(0) / np.maximum(counted_KM.sum(0), 1)
    return result


def _log_mean(log_KM: Floats, counted_KM: Coins) -> Floats:
    """Log of the mean of exp of the counted ones of each column; minus infinity where there are none."""
    total_M: Floats = np.logaddexp.reduce(np.where(counted_KM, log_KM, -np.inf), axis=0)
    result: Floats = total_M - np.log(np.maximum(counted_KM.sum(0), 1))
    return result


def _log_normal(value_M: Floats, mean_M: Floats, variance_M: Floats) -> Floats:
    """Log of the normal density, up to a constant."""
    return -0.5 * ((value_M - mean_M) ** 2 / variance_M + np.log(variance_M))
