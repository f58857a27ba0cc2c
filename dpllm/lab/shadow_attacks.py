"""Attacks with shadows: scores that know what each canary looks like with and without having been trained on.

Comes in: the target's score table, and a ``ShadowScores``. Goes out: LiRA and RMIA, higher = more likely a member; how well
they do, group by group; and a lower bound on epsilon from one score of each run. Scores do not depend on the target's coins,
which only sort them afterwards. Torch is not imported; no model, text or file is read.

Shape suffixes: K shadows, M candidates, Q references, R runs: the target and its shadows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.auditing import attacks
from dpllm.auditing.rates import Rates, epsilon_from_rates, many_runs
from dpllm.auditing.statistics import Floats
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import CanaryScores


@dataclass(frozen=True)
class ShadowScores:
    """What K shadow runs say about the canaries of the target. Log-probabilities are sums over a secret, in nats."""

    canary_ids: tuple[str, ...]  # of the M candidates
    coins_KM: attacks.Coins  # whether the shadow's own coin said in
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
    in_M, out_M, lift = attacks.sides(log_prob_KM / tokens_M, coins_KM)
    references_KQ = shadows.references_KQ / shadows.reference_tokens_Q
    out_Q = attacks.log_mean(references_KQ, np.ones(references_KQ.shape, dtype=np.bool_))
    return {
        "ratio": attacks.ratio(candidates),
        "rmia_base": attacks.rmia_base(candidates, references),
        "rmia_offline": attacks.rmia(tuned_M, attacks.average_offline(out_M), tuned_Q, attacks.average_offline(out_Q)),
        # p(x) = (p_in + p_out) / 2, whose half cancels. No model saw a reference; what it would have gained is the candidates'
        # lift, or their scales would differ.
        "rmia_online": attacks.rmia(tuned_M, np.logaddexp(in_M, out_M), tuned_Q, np.logaddexp(out_Q + lift, out_Q)),
        "lira": attacks.lira(attacks.ratio(candidates), log_prob_KM - base_M, coins_KM),
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
    ceiling = epsilon_from_rates(Rates(having // 2, 0, 0, lacking // 2), delta=delta, alpha=alpha).value
    assumes = (
        "target and shadows are independent runs of one mechanism: same recipe and Plan, coins, sample and noise drawn anew; "
        f"{bound.assumes}; the number of shadows was not chosen by what they showed"
    )
    return {**runs, **asdict(bound), "assumes": assumes, "ceiling": ceiling}
