"""The numbers of an audit, recomputable by anyone from the published score and token tables.

Comes in: the tables, the claim, what was fixed before training (alpha, the grids of guesses), and the controls that tables
cannot show. Goes out: a JSON value with a verdict. Torch is not imported; no model, text or file is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dpllm.auditing import attacks, extraction, statistics
from dpllm.auditing.bounds import OneRunBound, epsilon_lower_bound
from dpllm.auditing.rates import event_trade_off
from dpllm.auditing.table import CanaryScores, TokenTable, by_group
from dpllm.auditing.verdict import CONTROL_LEVEL, Claim, Controls, Test, grid, judge, levels
from dpllm.errors import ConfigError
from dpllm.privacy.limits import attacker_limits

__all__ = ["CONFIDENCE", "PRIMARY_ATTACK", "Claim", "summarise"]

SCHEMA_VERSION = 3
"""Of audit.json. 1 had narrower intervals, see ``statistics.INTERVALS``; 1 and 2 held estimates that decided nothing."""
CONFIDENCE = 0.95
PRIMARY_ATTACK = "calibrated"
"""The score behind the lower bound, chosen here once so that nobody picks the best of several afterwards."""
DELTA_WITHOUT_CLAIM = 1e-5
ROC_GRID = tuple(float(tpr) for tpr in np.geomspace(1e-3, 1.0, 61))
METHOD = (
    "one training run, guesses on both sides and on one (Steinke, Nasr and Jagielski 2023), once-inserted canaries, score "
    f"'{PRIMARY_ATTACK}', alpha divided by the number of guess counts"
)


def summarise(
    scores: Sequence[CanaryScores],
    claim: Claim | None,
    *,
    alpha: float,
    guesses: Sequence[int],
    guesses_in: Sequence[int] = (),
    tokens: TokenTable | None = None,
    promise: Mapping[str, Any] | None = None,
    words: Mapping[str, Any] | None = None,
    twin: str | None = None,
    slope: float | None = None,
    version: int = SCHEMA_VERSION,
) -> dict[str, Any]:
    """Everything that an audit concludes from its scores.

    Args:
        scores: The score table, candidates and references.
        claim: None for a run without differential privacy; the bound is then stated at delta = 1e-5.
        alpha: Of the recipe.
        guesses: Of the recipe.
        guesses_in: Of the recipe.
        tokens: The token table of the same canaries; None: only the attacks that need none.
        promise: plan.json or privacy.json, whose event and neighbouring relation give the trade-off curve of the configured
            mechanism; None: it is not looked at.
        words: What the classifier found that sees words and no model; its ``succeeds`` decides.
        twin: Where else the attack was seen to work, in words; empty: it was looked at, and not seen there either.
        slope: Of ``attacks.slope``; None: fitted on the candidates of ``scores``.
        version: Of audit.json: by which intervals an earlier one was made, see ``SCHEMA_VERSION``.

    Returns:
        The fields schema_version, claim, attacks, exposure, extraction, sampling, epsilon_lower_bound, repeated,
        attacker_limits, roc_limit, controls, verdict and verdict_reason.

    Raises:
        ConfigError: The table holds no references.
    """
    intervals = 1 if version == 1 else statistics.INTERVALS
    groups = by_group(scores)
    references = groups.pop(0, [])
    if not references:
        raise ConfigError("the score table holds no references, so nothing can be ranked; run dpllm audit again.")
    once = groups.get(1, [])
    sizes = {group: len(rows) for group, rows in groups.items()}
    level = levels(sizes, claim, alpha, guesses, guesses_in) if claim else {1: alpha}
    delta = claim.delta if claim else DELTA_WITHOUT_CLAIM
    if slope is None:
        slope = attacks.slope(row for rows in groups.values() for row in rows)
    bound = _bound(once, slope, delta=delta, alpha=level[1], guesses=guesses, guesses_in=guesses_in)
    tests = {}
    for group, own_level in level.items():
        if group > 1 and claim:
            own, own_in = grid(sizes[group], guesses, guesses_in)
            target = claim.of(group)
            found = _bound(groups[group], slope, delta=target.delta, alpha=own_level, guesses=own, guesses_in=own_in)
            tests[group] = Test(target, found)
    smallest = min(groups, default=1)
    whole = (promise or {}).get("limits")
    by_token = _by_token(tokens)
    attacked = {
        group: {
            name: {**seen, "limits": claim.limits(group, whole) if claim else None}
            for name, seen in _attacks(group, rows, references, by_token, slope, intervals).items()
        }
        for group, rows in groups.items()
    }
    controls = _controls(groups, references, attacked, slope, words, twin, intervals)
    trade_off = None
    if promise and promise.get("event"):
        trade_off = event_trade_off(promise["event"], promise["neighbouring_relation"])
    word, reason = judge(claim, bound, tests, len(attacks.members(once)), controls)
    return {
        "schema_version": version,
        "claim": asdict(claim) if claim else None,
        "attacks": attacked.get(smallest, {}),
        "exposure": {str(group): _exposure(rows, references) for group, rows in groups.items()},
        "extraction": {str(group): attacks.extraction(rows) for group, rows in groups.items()},
        "sampling": extraction.summary(tokens, scores) if tokens is not None else None,
        "epsilon_lower_bound": {**_listed(bound), "method": METHOD, "slope": slope},
        "repeated": {
            str(group): {
                "claim": asdict(claim.of(group)) if claim else None,
                "attacks": {name: attacked[group][name] for name in (PRIMARY_ATTACK, *attacks.ATTACKS)},
                "test": {**_listed(tests[group].bound), "refuted": tests[group].refuted} if group in tests else None,
            }
            for group in groups
            if group != smallest
        },
        "attacker_limits": attacker_limits(claim.epsilon, claim.delta) if claim else None,
        "roc_limit": [[trade_off(tpr), tpr] for tpr in ROC_GRID] if trade_off else None,
        "controls": {
            "base_separates": controls.base_separates,
            "words": dict(words) if words else None,
            "positive": controls.positive,
            "twin": twin,
            "level": CONTROL_LEVEL,
        },
        "verdict": word,
        "verdict_reason": reason,
    }


def _bound(rows: Sequence[CanaryScores], slope: float, **settings: Any) -> OneRunBound:
    return epsilon_lower_bound(attacks.calibrated(rows, slope), [bool(row.inserted) for row in rows], **settings)


def _listed(bound: OneRunBound) -> dict[str, Any]:
    return {**asdict(bound), "guesses": list(bound.guesses), "guesses_in": list(bound.guesses_in)}


def _controls(
    groups: Mapping[int, Sequence[CanaryScores]],
    references: Sequence[CanaryScores],
    attacked: Mapping[int, Mapping[str, Any]],
    slope: float,
    words: Mapping[str, Any] | None,
    twin: str | None,
    intervals: int,
) -> Controls:
    """The base model on the same split, and the group where the attack is seen best."""
    inside = [row for rows in groups.values() for row in attacks.members(rows)]
    outside = [row for rows in groups.values() for row in attacks.held_out(rows)]
    before = statistics.auc(
        attacks.base_loss(inside), attacks.base_loss(outside), 1 - CONTROL_LEVEL, intervals=intervals
    )
    separates = before is not None and not before.low <= 0.5 <= before.high
    positive = None
    p_values = {}
    for group, rows in groups.items():
        others = attacks.calibrated([*attacks.held_out(rows), *references], slope)
        p_values[group] = statistics.rank_sum_p_value(attacks.calibrated(attacks.members(rows), slope), others)
    seen = [group for group, p in p_values.items() if p is not None and p < CONTROL_LEVEL / len(groups)]
    if seen:
        best = max(seen, key=lambda group: attacked[group][PRIMARY_ATTACK]["auc"])
        found = attacked[best][PRIMARY_ATTACK]["auc"]
        positive = f"AUC {found:.2f} on the canaries planted {best} times" if best > 1 else f"AUC {found:.2f}"
    tried = [f"planted {max(groups)} times"] * bool(groups) + ["of the twin"] * (twin == "")
    return Controls(separates, bool(words and words["succeeds"]), positive or twin or None, tuple(tried))


def _by_token(tokens: TokenTable | None) -> dict[str, dict[str, float]]:
    """The attacks that need tokens: name -> canary -> score."""
    if tokens is None:
        return {}
    attacked = {name: attack(tokens).tolist() for name, attack in attacks.TOKEN_ATTACKS.items()}
    return {name: dict(zip(tokens.canary_ids, found, strict=True)) for name, found in attacked.items()}


def _attacks(
    group: int,
    rows: Sequence[CanaryScores],
    references: Sequence[CanaryScores],
    by_token: Mapping[str, Mapping[str, float]],
    slope: float,
    intervals: int,
) -> dict[str, Any]:
    """Each attack on one group; held-out candidates and references are the negatives."""
    inside, outside = attacks.members(rows), [*attacks.held_out(rows), *references]
    control = statistics.auc(attacks.base_loss(inside), attacks.base_loss(outside), CONFIDENCE, intervals=intervals)
    scores = {PRIMARY_ATTACK: (attacks.calibrated(inside, slope), attacks.calibrated(outside, slope))}
    scores |= {name: (attack(inside), attack(outside)) for name, attack in attacks.ATTACKS.items()}
    scores["rmia"] = (attacks.rmia_base(inside, references), attacks.rmia_base(outside, references))
    for name, found in by_token.items():
        positive, negative = (np.array([found[row.canary_id] for row in side]) for side in (inside, outside))
        scores[name] = (positive, negative)
    shared: dict[str, Any] = {
        "group": group,
        "positives": len(inside),
        "negatives": len(outside),
        "confidence": CONFIDENCE,
        "base_control_auc": control.value if control else None,
        "base_control_auc_interval": [control.low, control.high] if control else None,
    }
    return {name: {**shared, **separation(*sides, intervals)} for name, sides in scores.items()}


def separation(
    positives: statistics.Floats, negatives: statistics.Floats, intervals: int = statistics.INTERVALS
) -> dict[str, Any]:
    """How well a score separates: AUC and true positive rates with intervals; None where there are too few of a side."""
    area = statistics.auc(positives, negatives, CONFIDENCE, intervals=intervals)
    values: dict[str, Any] = {
        "auc": area.value if area else None,
        "auc_interval": [area.low, area.high] if area else None,
    }
    for fpr, name in ((0.01, "1_percent"), (0.001, "0.1_percent")):
        rate = statistics.tpr_at_fpr(positives, negatives, fpr, CONFIDENCE, intervals=intervals)
        values[f"tpr_at_{name}_fpr"] = rate.value if rate else None
        values[f"tpr_at_{name}_fpr_interval"] = [rate.low, rate.high] if rate else None
    return values


def _exposure(rows: Sequence[CanaryScores], references: Sequence[CanaryScores]) -> dict[str, Any]:
    """Exposure of one group in bits, ranked by the tuned model's log-probability."""
    inside, outside = attacks.members(rows), attacks.held_out(rows)
    known = attacks.loss(references)
    bits = statistics.exposure(attacks.loss(inside), known)
    base_bits = statistics.exposure(attacks.base_loss(inside), attacks.base_loss(references))
    held_out_bits = statistics.exposure(attacks.loss(outside), known)
    return {
        "inserted": len(inside),
        "mean": _mean(bits),
        "maximum": float(bits.max()) if len(bits) else None,
        "base_mean": _mean(base_bits),
        "held_out_mean": _mean(held_out_bits),
        "null_mean": statistics.exposure_null_mean(len(references)),
        "largest_possible": math.log2(len(references)),
        "p_value": statistics.rank_sum_p_value(attacks.loss(inside), attacks.loss([*outside, *references])),
    }


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    return float(values.mean()) if len(values) else None
