"""The numbers of an audit, recomputable by anyone from the published score table.

Comes in: the score table, the claim, and what was fixed before training (alpha, the grid of guesses). Goes out: a JSON
value with a verdict, and the same as a table for the terminal. Torch is not imported; no model, text or file is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpllm.audit import attacks, token_attacks
from dpllm.audit.bounds import OneRunBound, epsilon_lower_bound
from dpllm.audit.families import FamilyBound, gaussian_bound
from dpllm.audit.rates import RateBound, one_run_rates
from dpllm.audit.table import CanaryScores, by_group
from dpllm.audit.tokens import TokenTable
from dpllm.errors import ConfigError
from dpllm.privacy.accounting import attacker_limits

if TYPE_CHECKING:
    from rich.table import Table

CONFIDENCE = 0.95
PRIMARY_ATTACK = "ratio"
"""The score behind the lower bound, chosen here once so that nobody picks the best of several afterwards."""
DELTA_WITHOUT_CLAIM = 1e-5
METHOD = (
    "one training run, guesses on both sides and on one (Steinke, Nasr and Jagielski 2023), once-inserted canaries, score "
    f"'{PRIMARY_ATTACK}', alpha divided by the number of guess counts"
)


@dataclass(frozen=True)
class Claim:
    """What the Plan promises for one privacy unit."""

    epsilon: float
    delta: float
    unit: str


def summarise(
    scores: Sequence[CanaryScores],
    claim: Claim | None,
    *,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
    tokens: TokenTable | None = None,
) -> dict[str, Any]:
    """Everything that an audit concludes from its scores.

    Args:
        scores: The score table, candidates and references.
        claim: None for a run without differential privacy; the bound is then stated at delta = 1e-5.
        alpha: Of the recipe.
        guesses: Of the recipe.
        guesses_in: Of the recipe.
        tokens: The token table of the same canaries; None: only the attacks that need none.

    Returns:
        The fields claim, attacks, exposure, extraction, epsilon_lower_bound, estimates, attacker_limits, verdict and
        verdict_reason. What stands under ``estimates`` says itself what it assumes; it is no bound, and no verdict rests on it.

    Raises:
        ConfigError: The table holds no references.
    """
    groups = by_group(scores)
    references = groups.pop(0, [])
    if not references:
        raise ConfigError("the score table holds no references, so nothing can be ranked; run dpllm audit again.")
    once = groups.get(1, [])
    scores_M, coins_M = attacks.ATTACKS[PRIMARY_ATTACK](once), [bool(row.inserted) for row in once]
    delta = claim.delta if claim else DELTA_WITHOUT_CLAIM
    bound = epsilon_lower_bound(scores_M, coins_M, delta=delta, alpha=alpha, guesses=guesses, guesses_in=guesses_in)
    estimates: dict[str, RateBound | FamilyBound] = {}
    if once:
        estimates = {
            "clopper_pearson": one_run_rates(scores_M, coins_M, delta=delta, alpha=alpha, guesses=guesses),
            "gaussian": gaussian_bound(
                scores_M, coins_M, delta=delta, alpha=alpha, guesses=guesses, guesses_in=guesses_in
            ),
        }
    word, reason = verdict(claim, bound, len(attacks.members(once)))
    return {
        "claim": asdict(claim) if claim else None,
        "attacks": _attacks(min(groups), groups[min(groups)], references, tokens) if groups else {},
        "exposure": {str(group): _exposure(rows, references) for group, rows in groups.items()},
        "extraction": {str(group): attacks.extraction(rows) for group, rows in groups.items()},
        "epsilon_lower_bound": {
            **asdict(bound),
            "guesses": list(bound.guesses),
            "guesses_in": list(bound.guesses_in),
            "method": METHOD,
        },
        "estimates": {name: _as_json(asdict(estimate)) for name, estimate in estimates.items()},
        "attacker_limits": attacker_limits(claim.epsilon, claim.delta) if claim else None,
        "verdict": word,
        "verdict_reason": reason,
    }


def verdict(claim: Claim | None, bound: OneRunBound, num_inserted: int) -> tuple[str, str]:
    """What the bound says about the claim: falsified, inconclusive, consistent or no_claim, with the reason.

    Guarantee:
        A true claim is called falsified with probability at most ``bound.alpha``. The word private is never said: an
        audit can refute a claim and cannot prove one.
    """
    shown = f"lower bound {bound.value:.3g} at confidence {1 - bound.alpha:g}"
    if claim is None:
        return "no_claim", f"The run makes no privacy claim; epsilon {shown}, delta {bound.delta:g}."
    claimed = f"the claimed epsilon {claim.epsilon:.3g} (delta {claim.delta:g}, unit {claim.unit})"
    if bound.value > claim.epsilon:
        return "falsified", f"The {shown} exceeds {claimed}."
    if not 0 < num_inserted < bound.num_canaries:
        return "inconclusive", (
            f"Of {bound.num_canaries} once-inserted candidates {num_inserted} were inserted, so {claimed} was not "
            "tested; more candidates in group 1 are needed."
        )
    if bound.ceiling < claim.epsilon / 4:
        return "inconclusive", (
            f"With {bound.num_canaries} once-inserted candidates even a perfect attack shows no more than epsilon "
            f"{bound.ceiling:.3g}, less than a quarter of {claimed}; more candidates in group 1 are needed."
        )
    return "consistent", (
        f"The {shown} does not exceed {claimed}. A perfect attack on these canaries would have shown "
        f"{bound.ceiling:.3g}; stronger attacks or more canaries may show more."
    )


def table(report: dict[str, Any]) -> Table:
    """A report as a table for the terminal."""
    from rich.table import Table

    result = Table(
        "what", "found", "to compare with", title=f"Audit: {report['verdict']}", caption=report["verdict_reason"]
    )
    bound = report["epsilon_lower_bound"]
    claimed = f"claimed {report['claim']['epsilon']:.3g}, " if report["claim"] else ""
    result.add_row(
        "epsilon, lower bound", f"{bound['value']:.3g}", f"{claimed}a perfect attack shows {bound['ceiling']:.3g}"
    )
    for name, attack in report["attacks"].items():
        found, control = _interval(attack["auc"], attack["auc_interval"]), attack["base_control_auc"]
        against = "0.5 if nothing is learned" + (f"; base model {control:.3f}" if control is not None else "")
        result.add_row(f"AUC, {name}, {attack['group']}x", found, against)
        rate = _interval(attack["tpr_at_1_percent_fpr"], attack["tpr_interval"])
        result.add_row(f"TPR at 1 % FPR, {name}, {attack['group']}x", rate, "0.01 if nothing is learned")
    for group, seen in report["exposure"].items():
        if seen["inserted"]:
            null = f"{seen['null_mean']:.2f} if nothing is learned (p = {seen['p_value']:.2g})"
            against = f"{null}; base model {seen['base_mean']:.2f}"
            result.add_row(f"mean exposure, {group}x", f"{seen['mean']:.2f} bits", against)
    for group, count in report["extraction"].items():
        found = f"{count['tuned']} of {count['inserted']}"
        result.add_row(f"extracted, {group}x", found, f"base model {count['base']} of {count['inserted']}")
    return result


def _interval(value: float | None, interval: Sequence[float] | None) -> str:
    return (
        "too few canaries"
        if value is None or interval is None
        else f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
    )


def _attacks(
    group: int, rows: Sequence[CanaryScores], references: Sequence[CanaryScores], tokens: TokenTable | None
) -> dict[str, Any]:
    """Each attack on one group; held-out candidates and references are the negatives."""
    inside, outside = attacks.members(rows), [*attacks.held_out(rows), *references]
    control = attacks.auc(attacks.base_loss(inside), attacks.base_loss(outside), CONFIDENCE)
    scores = {name: (attack(inside), attack(outside)) for name, attack in attacks.ATTACKS.items()}
    if tokens is not None:
        place = {canary_id: index for index, canary_id in enumerate(tokens.canary_ids)}
        sides = [[place[row.canary_id] for row in side] for side in (inside, outside)]
        for name, token_attack in token_attacks.ATTACKS.items():
            found_S = token_attack(tokens)
            scores.setdefault(name, (found_S[sides[0]], found_S[sides[1]]))
    result = {}
    for name, (positives, negatives) in scores.items():
        area = attacks.auc(positives, negatives, CONFIDENCE)
        rate = attacks.tpr_at_fpr(positives, negatives, 0.01, CONFIDENCE)
        result[name] = {
            "group": group,
            "positives": len(inside),
            "negatives": len(outside),
            "confidence": CONFIDENCE,
            "auc": area.value if area else None,
            "auc_interval": [area.low, area.high] if area else None,
            "tpr_at_1_percent_fpr": rate.value if rate else None,
            "tpr_interval": [rate.low, rate.high] if rate else None,
            "base_control_auc": control.value if control else None,
            "base_control_auc_interval": [control.low, control.high] if control else None,
        }
    return result


def _exposure(rows: Sequence[CanaryScores], references: Sequence[CanaryScores]) -> dict[str, Any]:
    """Exposure of one group in bits, ranked by the tuned model's log-probability."""
    inside, outside = attacks.members(rows), attacks.held_out(rows)
    known = attacks.loss(references)
    bits = attacks.exposure(attacks.loss(inside), known)
    base_bits = attacks.exposure(attacks.base_loss(inside), attacks.base_loss(references))
    held_out_bits = attacks.exposure(attacks.loss(outside), known)
    return {
        "inserted": len(inside),
        "mean": _mean(bits),
        "maximum": float(bits.max()) if len(bits) else None,
        "base_mean": _mean(base_bits),
        "held_out_mean": _mean(held_out_bits),
        "null_mean": attacks.exposure_null_mean(len(references)),
        "largest_possible": math.log2(len(references)),
        "p_value": attacks.rank_sum_p_value(attacks.loss(inside), attacks.loss([*outside, *references])),
    }


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """As it reads back: JSON has neither infinity nor tuples."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
    return dict(json.loads(json.dumps(finite)))


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    return float(values.mean()) if len(values) else None
