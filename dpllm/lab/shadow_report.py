"""What shadow runs show about a target run, as JSON.

Comes in: the target's score table, and a ``ShadowScores``. Goes out: AUC and true positive rates of every attack that uses
shadows, group by group, and a lower bound on epsilon from one score of each run. Scores do not depend on the target's coins,
which only sort them afterwards; torch is not imported; no model, text or file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.auditing import attacks
from dpllm.auditing.attacks import average_offline, rmia, rmia_base
from dpllm.auditing.rates import Rates, epsilon_from_rates, many_runs
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import CanaryScores
from dpllm.lab.shadow_attacks import average_online, lira, log_mean, sides

# A legend of shapes: K shadows, M candidates, Q references, R runs: the target and its shadows.

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]


@dataclass(frozen=True)
class ShadowScores:
    """What K shadow runs say about the canaries of the target. Log-probabilities are sums over a secret, in nats.

    Attributes:
        canary_ids: Of the M candidates.
        coins_KM: Whether the shadow's own coin said in.
        log_prob_KM: Of each candidate under each shadow.
        num_tokens_M: Scored tokens of each candidate.
        reference_ids: Of the Q references, which no run was trained on.
        references_KQ: Their log-probabilities.
        reference_tokens_Q: Their scored tokens.
    """

    canary_ids: tuple[str, ...]
    coins_KM: Coins
    log_prob_KM: Floats
    num_tokens_M: NDArray[np.int64]
    reference_ids: tuple[str, ...]
    references_KQ: Floats
    reference_tokens_Q: NDArray[np.int64]

    def part(self, canary_ids: Sequence[str]) -> ShadowScores:
        """The same of some candidates, in the order given."""
        place = {canary_id: index for index, canary_id in enumerate(self.canary_ids)}
        own = [place[canary_id] for canary_id in canary_ids]
        return ShadowScores(
            tuple(canary_ids),
            self.coins_KM[:, own],
            self.log_prob_KM[:, own],
            self.num_tokens_M[own],
            self.reference_ids,
            self.references_KQ,
            self.reference_tokens_Q,
        )


def shadow_scores(
    candidates: Sequence[CanaryScores], references: Sequence[CanaryScores], shadows: ShadowScores
) -> dict[str, Floats]:
    """Every attack on candidates of one group.

    Args:
        candidates: M rows of the target's table, repeated equally often; their coins are not read.
        references: Its references.
        shadows: Of the same canaries.

    Returns:
        Scores by name, shape (M,), higher = more likely a member. ratio: what needs no shadow, to compare with.
        rmia_base: RMIA with the base model as the only out model. rmia_offline: with the shadows that lack the candidate.
        rmia_online: with those that have it too.
    """
    own = shadows.part([row.canary_id for row in candidates])
    base_M = attacks.base_loss(candidates)
    tuned_M = attacks.loss(candidates) / own.num_tokens_M
    place = {row.canary_id: row for row in references}
    known = [place[canary_id] for canary_id in own.reference_ids]
    tuned_Q = attacks.loss(known) / own.reference_tokens_Q
    in_M, out_M, lift = sides(own.log_prob_KM / own.num_tokens_M, own.coins_KM)
    references_KQ = own.references_KQ / own.reference_tokens_Q
    out_Q = log_mean(references_KQ, np.ones(references_KQ.shape, dtype=np.bool_))
    return {
        "ratio": attacks.ratio(candidates),
        "rmia_base": rmia_base(candidates, references),
        "rmia_offline": rmia(tuned_M, average_offline(out_M), tuned_Q, average_offline(out_Q)),
        # No model saw a reference; what it would have gained is the candidates' lift, or their scales would differ.
        "rmia_online": rmia(tuned_M, average_online(in_M, out_M), tuned_Q, average_online(out_Q + lift, out_Q)),
        "lira": lira(attacks.ratio(candidates), own.log_prob_KM - base_M, own.coins_KM),
    }


def summarise_shadows(
    groups: Mapping[int, Sequence[CanaryScores]],
    shadows: ShadowScores,
    *,
    delta: float,
    alpha: float,
) -> dict[str, Any]:
    """What follows from shadows, JSON-ready; the true positive rates are None below 100 and 1,000 held-out candidates.

    Args:
        groups: The target's table by repetitions, 0 holding the references (``table.by_group``).
        shadows: Of the same canaries.
        delta: Of the claim.
        alpha: Of the recipe.

    Returns:
        ``shadows``: K. ``attacks``: for each group, each attack on its candidates; the held-out ones are the negatives,
        for only they differ from the others by nothing but a coin. ``many_runs``: see ``one_canary_bound``.
    """
    tested: dict[str, Any] = {}
    for group, rows in groups.items():
        if not group:
            continue
        in_M = np.array([bool(row.inserted) for row in rows])
        scores = shadow_scores(rows, groups[0], shadows)
        positives = int(in_M.sum())
        shared = {"group": group, "positives": positives, "negatives": len(rows) - positives, "confidence": CONFIDENCE}
        tested[str(group)] = {
            name: {**shared, **separation(found_M[in_M], found_M[~in_M])} for name, found_M in scores.items()
        }
    return {
        "shadows": len(shadows.coins_KM),
        "attacks": tested,
        "many_runs": one_canary_bound(groups.get(1, []), shadows, delta=delta, alpha=alpha),
    }


def one_canary_bound(
    once: Sequence[CanaryScores], shadows: ShadowScores, *, delta: float, alpha: float
) -> dict[str, Any]:
    """A lower bound on epsilon from the first candidate that is inserted once: one score of the target, one of each shadow.

    Guarantee:
        That of ``rates.many_runs``: P[value > epsilon] <= alpha if every run draws its coins, sample and noise anew from one
        (epsilon, delta)-DP mechanism. The canary is the one with the smallest id, whatever the scores.

    Returns:
        ``value`` is None where fewer than two runs have the canary or lack it; ``ceiling`` is what runs so many would show
        if the score told them apart without an error.
    """
    runs: dict[str, Any] = {"value": None, "ceiling": None, "alpha": alpha, "delta": delta}
    if not once:
        return {**runs, "reason": "no canary is inserted once"}
    first = min(once, key=lambda row: row.canary_id)
    own = shadows.part([first.canary_id])
    score_R = np.append(first.tuned_log_prob, own.log_prob_KM[:, 0])
    coin_R = np.append(bool(first.inserted), own.coins_KM[:, 0])
    having, lacking = int(coin_R.sum()), int((~coin_R).sum())
    runs |= {"canary_id": first.canary_id, "runs_with": having, "runs_without": lacking}
    if min(having, lacking) < 2:
        return {**runs, "reason": "it takes two runs with the canary and two without"}
    bound = many_runs(score_R[coin_R], score_R[~coin_R], delta=delta, alpha=alpha)
    # Of each kind the first, third, fifth ... chose the threshold.
    perfect = Rates(having // 2, 0, 0, lacking // 2)
    ceiling = epsilon_from_rates(perfect, delta=delta, alpha=alpha).value
    assumes = (
        "target and shadows are independent runs of one mechanism: same recipe and Plan, coins, sample and noise drawn anew; "
        f"{bound.assumes}; the number of shadows was not chosen by what they showed"
    )
    return {**runs, **asdict(bound), "assumes": assumes, "ceiling": ceiling}
