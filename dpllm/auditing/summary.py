"""The numbers of an audit and its verdict, recomputable by anyone from the published token table.

Comes in: the table, the claim, the settings fixed before training (alpha, the grids of guesses), and the controls that a table
cannot contain. Goes out: a ``Summary`` with a verdict of one word and a reason. Must not import torch, or read models, texts or
files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpllm.auditing import attacks, statistics
from dpllm.auditing import gradient as gradient_canaries
from dpllm.auditing.bounds import epsilon_lower_bound, one_run_ceiling
from dpllm.auditing.gradient import GradientTable
from dpllm.auditing.statistics import Floats, estimate_fields
from dpllm.auditing.table import CanaryScores, TokenTable, by_group, sum_up
from dpllm.errors import ConfigError
from dpllm.privacy.limits import rounded_down, rounded_up
from dpllm.privacy.plan import AuditSettings
from dpllm.recipe.sections import default_ways
from dpllm.statement.audit import SCHEMA_VERSION, Controls, GroupTest, Summary
from dpllm.statement.audit_bounds import Claim, GradientAudit, GroupClaim, OneRunBound

CONFIDENCE = 0.95
PRIMARY_ATTACK = "calibrated"
"""The score that the lower bound uses, fixed here so that nobody can choose the best of several afterwards."""
DELTA_WITHOUT_CLAIM = 1e-5
Json = dict[str, Any]


@dataclass(frozen=True)
class AuditContext:
    """Inputs of a summary besides the token table, claim and settings.

    Attributes:
        limits: Limits of the whole mechanism on any attack on one unit, see ``Claim.limits``; None: unknown.
        words: Result of the classifier that sees only words and no model; its ``succeeds`` decides.
        twin: On which other run the attack worked, in words; empty: it was tried there and did not work; None: not tried.
        own_references: There are no references; a group's held-out canaries, or those that prefer the other answer, replace them.
        gradient: Table of the gradient canaries; None: there were none.
    """

    limits: Mapping[str, float | None] | None = None
    words: Mapping[str, Any] | None = None
    twin: str | None = None
    own_references: bool = False
    gradient: GradientTable | None = None


@dataclass(frozen=True)
class _Scored:
    """The score table by group, and the scoring."""

    groups: Mapping[int, Sequence[CanaryScores]]
    """Candidates by repetitions, with their coins."""
    references: Sequence[CanaryScores]
    scoring: attacks.Scoring

    def negatives(self, group: int) -> list[CanaryScores]:
        return [*attacks.held_out(self.groups[group]), *self.references]

    def calibrated(self, rows: Sequence[CanaryScores]) -> Floats:
        return attacks.calibrated(rows, self.scoring.slope)


def summarise(
    tokens: TokenTable, claim: Claim | None, settings: AuditSettings, context: AuditContext = AuditContext()
) -> Summary:
    """Computes all conclusions of an audit from its scores.

    Args:
        tokens: Tokens of candidates and references.
        claim: None for a run without differential privacy; the bound is then stated at delta = 1e-5.
        settings: The settings fixed before training.
        context: Inputs that the table does not contain.

    Raises:
        ConfigError: The table holds no references.
    """
    scored = _sorted(tokens, context)
    gradient = None
    if context.gradient is not None and claim is not None:
        gradient = gradient_canaries.examine(context.gradient, delta=claim.delta, alpha=settings.alpha)
    if gradient:  # its tests used part of alpha
        settings = settings.model_copy(update={"alpha": settings.alpha * (1 - gradient_canaries.SHARE_OF_ALPHA)})
    bound, tests = _tests(scored, claim, settings)
    attacked = {
        group: _attacks(scored, group, claim.limits(group, context.limits) if claim else None)
        for group in scored.groups
    }
    controls, tried = _controls(scored, attacked, context, settings)
    once = len(attacks.members(scored.groups.get(1, [])))
    verdict, reason = judge(claim, bound, tests, once, controls, gradient, tried=tried)
    smallest, secrets = min(scored.groups, default=1), by_group(sum_up(tokens))
    values = {
        "schema_version": SCHEMA_VERSION,
        "claim": asdict(claim) if claim else None,
        "attacks": attacked.get(smallest, {}),
        "exposure": {str(group): _exposure(rows, secrets.get(0)) for group, rows in secrets.items() if group},
        "extraction": {str(group): attacks.greedy_extraction(rows) for group, rows in scored.groups.items()},
        "sampling": attacks.sampled_extraction(tokens.secrets()),
        "epsilon_lower_bound": {**bound.to_json(), "method": _method(scored.scoring), "slope": scored.scoring.slope},
        **({"gradient": gradient} if gradient else {}),
        "repeated": {
            str(group): {
                "claim": asdict(claim.of(group)) if claim else None,
                "attacks": {name: by_attack[name] for name in (PRIMARY_ATTACK, *attacks.ATTACKS)},
                "test": tests.get(group),
            }
            for group, by_attack in attacked.items()
            if group != smallest
        },
        "controls": controls,
        "verdict": verdict,
        "verdict_reason": reason,
    }
    return Summary.pick(values)


def _sorted(tokens: TokenTable, context: AuditContext) -> _Scored:
    groups = by_group(attacks.whole_rows(tokens))
    references = groups.pop(0, [])
    if not references and not context.own_references:
        raise ConfigError("the score table has no references, so nothing can be ranked; run dpllm audit again.")
    return _Scored(groups, references, attacks.scoring(tokens, [row for rows in groups.values() for row in rows]))


def _tests(scored: _Scored, claim: Claim | None, settings: AuditSettings) -> tuple[OneRunBound, dict[int, GroupTest]]:
    def bound(rows: Sequence[CanaryScores], **test: Any) -> OneRunBound:
        return epsilon_lower_bound(scored.calibrated(rows), [bool(row.inserted) for row in rows], **test)

    sizes = {group: len(rows) for group, rows in scored.groups.items()}
    level = levels(sizes, claim, settings.alpha) if claim else {1: settings.alpha}
    delta = claim.delta if claim else DELTA_WITHOUT_CLAIM
    fixed = {"falling": settings.falling, "falling_in": settings.falling_in}
    once = bound(scored.groups.get(1, []), delta=delta, alpha=level[1], **fixed)
    tests = {}
    for group, own_level in level.items():
        if group > 1 and claim:
            target, grids = claim.of(group), default_ways(sizes[group])
            tests[group] = group_test(target, bound(scored.groups[group], delta=target.delta, alpha=own_level, **grids))
    return once, tests


def _method(scoring: attacks.Scoring) -> str:
    return (
        "one training run, guesses on both sides and on one, with weights that fall with the rank (Steinke, Nasr and Jagielski "
        f"2023), once-inserted canaries, score '{PRIMARY_ATTACK}' {scoring.words}, alpha divided by the number of tests"
    )


def _controls(
    scored: _Scored, attacked: Mapping[int, Json], context: AuditContext, settings: AuditSettings
) -> tuple[Controls, list[str]]:
    """The controls: base model, words, and where the attack worked best; and the canaries that it was tried on."""
    level = settings.control_level
    rows = [row for group_scores in scored.groups.values() for row in group_scores]
    sides = attacks.base_loss(attacks.members(rows)), attacks.base_loss(attacks.held_out(rows))
    base_auc = statistics.auc(*sides, 1 - level)
    separates = base_auc is not None and not base_auc.low <= 0.5 <= base_auc.high
    significant = {}
    for group, group_scores in scored.groups.items():
        inside, outside = scored.calibrated(attacks.members(group_scores)), scored.calibrated(scored.negatives(group))
        p = statistics.rank_sum_p_value(inside, outside)
        if p is not None and p < level / len(scored.groups):
            significant[group] = attacked[group][PRIMARY_ATTACK]["auc"]
    positive = None
    if significant:
        best = max(significant, key=lambda group: significant[group])
        positive = f"AUC {significant[best]:.2f}" + (f" on the canaries planted {best} times" if best > 1 else "")
    tried = [f"planted {largest} times" for largest in sorted(scored.groups)[-1:]]
    if context.twin == "":
        tried.append("of the twin")
    positive = positive or context.twin
    if context.gradient is not None and not positive:
        positive = gradient_canaries.seen(context.gradient, level)
    controls = {"base_separates": separates, "words": context.words or None, "positive": positive or None}
    return Controls.pick(controls, twin=context.twin, level=level), tried


def _attacks(scored: _Scored, group: int, limits: Mapping[str, float] | None) -> Json:
    """The result of each attack on one group, with held-out candidates and references as negatives."""
    inside, outside = attacks.members(scored.groups[group]), scored.negatives(group)
    control = statistics.auc(attacks.base_loss(inside), attacks.base_loss(outside), CONFIDENCE)
    scores = {PRIMARY_ATTACK: (scored.calibrated(inside), scored.calibrated(outside))}
    scores |= {name: (attack(inside), attack(outside)) for name, attack in attacks.ATTACKS.items()}
    for name, score in scored.scoring.by_token.items():
        positive, negative = (np.array([score[row.canary_id] for row in side]) for side in (inside, outside))
        scores[name] = (positive, negative)
    shared: Json = {
        "group": group,
        "positives": len(inside),
        "negatives": len(outside),
        "confidence": CONFIDENCE,
        **estimate_fields("base_control_auc", control),
        "limits": limits,
    }
    return {name: {**shared, **separation(*sides)} for name, sides in scores.items()}


def separation(positives: Floats, negatives: Floats) -> Json:
    """How well a score separates: AUC and true positive rates with intervals; None if a side has too few scores."""
    values = estimate_fields("auc", statistics.auc(positives, negatives, CONFIDENCE))
    for fpr, name in ((0.01, "1_percent"), (0.001, "0.1_percent")):
        rate = statistics.tpr_at_fpr(positives, negatives, fpr, CONFIDENCE)
        values |= estimate_fields(f"tpr_at_{name}_fpr", rate)
    return values


def _exposure(rows: Sequence[CanaryScores], references: Sequence[CanaryScores] | None) -> Json:
    """Exposure of one group in bits, ranked by the tuned model's log-probability among the references.

    Without references the group's own held-out rows replace them, and are then not ranked among themselves.
    """
    inside, outside = attacks.members(rows), attacks.held_out(rows)
    if not references:
        references, outside = outside, []
    reference_scores = attacks.loss(references)
    bits = statistics.exposure(attacks.loss(inside), reference_scores)
    base_bits = statistics.exposure(attacks.base_loss(inside), attacks.base_loss(references))
    held_out_bits = statistics.exposure(attacks.loss(outside), reference_scores)
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


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


# The verdict: what follows from tests, claim and controls together.


def group_test(claim: GroupClaim, bound: OneRunBound) -> GroupTest:
    """Tests a group's bound against the claim for that group; refutes a true claim with probability <= ``bound.alpha``."""
    return GroupTest.pick(bound.to_json(), refuted=bound.value > claim.epsilon)


def levels(sizes: Mapping[int, int], claim: Claim, alpha: float) -> dict[int, float]:
    """The alpha of each group that is tested, by its repetitions.

    Alpha is divided equally among group 1, which tests the claim for single units, and the repeated groups that could refute
    their weaker claims. This needs only sizes (repetitions -> candidates), claim and alpha, so it was fixed before the coins.
    """
    tested = [1]
    for group in sorted(size for size in sizes if size > 1):
        target, grids = claim.of(group), default_ways(sizes[group])
        if one_run_ceiling(sizes[group], delta=target.delta, alpha=alpha / len(sizes), **grids) > target.epsilon:
            tested.append(group)
    return dict.fromkeys(tested, alpha / len(tested))


def judge(
    claim: Claim | None,
    bound: OneRunBound,
    repeated: Mapping[int, GroupTest],
    num_inserted: int,
    controls: Controls,
    gradient: GradientAudit | None = None,
    *,
    tried: Sequence[str] = (),
) -> tuple[str, str]:
    """The verdict on the claim, with its reason: falsified, inconclusive, consistent or no_claim.

    Guarantee:
        A true claim is called falsified with probability at most the sum of the tests' alphas, which ``levels`` makes
        the alpha of the recipe. The word private is never said: an audit can refute a claim and cannot prove one.

    Args:
        claim: None for a run that makes none.
        bound: From the once-inserted candidates, of which ``num_inserted`` were inserted by their coins.
        repeated: The tests of the other groups.
        num_inserted: See ``bound``.
        controls: Controls of this audit.
        gradient: Result of the gradient canaries; None: there were none.
        tried: The canaries that the attack was tried on, in words.
    """
    evidence = f"lower bound {_proven(bound.value)} at confidence {1 - bound.alpha:.4g}"
    if claim is None:
        return "no_claim", f"The run makes no privacy claim; epsilon {evidence}, delta {bound.delta:g}."
    claimed = f"the claimed epsilon {rounded_up(claim.epsilon, 3):g} (delta {claim.delta:g}, unit {claim.unit})"
    if wrong := _contradiction(gradient, claim.epsilon):
        return "falsified", f"{wrong}, so {claimed} does not hold."
    # If words or the base model reveal the coins, they were not independent fair coins, and the theorem does not apply.
    if failed := _failed(controls):
        return "inconclusive", f"The {evidence}, and the audit cannot be trusted: {failed}."
    if gradient is not None and not bound.num_canaries:
        return _by_gradient(gradient, controls, claim.epsilon, claimed)
    if bound.value > claim.epsilon:
        return "falsified", f"The {evidence} exceeds {claimed}."
    for group, test in repeated.items():
        if test.refuted:
            allowed = rounded_up(claim.of(group).epsilon, 3)
            return "falsified", (
                f"The lower bound {_proven(test.value)} of the canaries planted {group} times, at confidence "
                f"{1 - test.alpha:.4g}, exceeds {allowed:g}, which is what {claimed} allows for them."
            )
    if weak := _too_weak(bound, num_inserted, claim.epsilon, claimed):
        return "inconclusive", weak
    if controls.positive is None:
        return "inconclusive", (
            f"The {evidence} does not exceed {claimed}, but the attack was seen to work nowhere"
            + (f", not on the canaries {' nor on those '.join(tried)}" if tried else "")
            + ", so finding nothing means nothing. Plant more canaries 32 times (audit.canaries.groups), train longer, or "
            "attack a twin that was trained without privacy and remembers them."
        )
    return "consistent", (
        f"The {evidence} does not exceed {claimed}. A perfect attack on these canaries would have shown "
        f"{bound.ceiling:.3g}; stronger attacks or more canaries may show more. {_seen(controls.positive, gradient)}"
    )


def _proven(value: float) -> str:
    return f"{rounded_down(value, 3):g}"


def _by_gradient(gradient: GradientAudit, controls: Controls, epsilon: float, claimed: str) -> tuple[str, str]:
    scope = "No canary of text was planted, so that nothing was asked of the weights."
    if gradient.ceiling < epsilon / 4 or controls.positive is None:
        return "inconclusive", (
            f"{scope} Of {claimed} the gradient canaries could have shown {gradient.ceiling:.3g} at most, and the attack "
            f"on them was{'' if controls.positive else ' not'} seen to work; more of them are needed, or more steps."
        )
    return "consistent", (
        f"The lower bound {_proven(gradient.epsilon_lower_bound)} of the gradient canaries, for an observer of every step, does "
        f"not exceed {claimed}. {scope} {_seen(controls.positive, gradient)}"
    )


def _too_weak(bound: OneRunBound, num_inserted: int, epsilon: float, claimed: str) -> str:
    """Why the once-inserted canaries could not have refuted the claim; empty: they could."""
    if not 0 < num_inserted < bound.num_canaries:
        return (
            f"Of {bound.num_canaries} once-inserted candidates {num_inserted} were inserted, so {claimed} was not "
            "tested; more candidates in group 1 are needed."
        )
    if bound.ceiling < epsilon / 4:
        return (
            f"With {bound.num_canaries} once-inserted candidates even a perfect attack shows no more than epsilon "
            f"{bound.ceiling:.3g}, less than a quarter of {claimed}; more candidates in group 1 are needed."
        )
    return ""


def _contradiction(gradient: GradientAudit | None, epsilon: float) -> str:
    """What the gradient canaries refute of the Plan; empty: nothing."""
    if gradient is None:
        return ""
    if gradient.noise_refuted and gradient.noise is not None:
        return (
            f"The noise, measured on {gradient.canaries} gradient canaries, is {gradient.noise:.3g} C where the Plan has "
            f"{gradient.noise_planned:.3g} C: too little was added, or the same twice"
        )
    if gradient.drawn_refuted and gradient.drawn is not None:
        return (
            f"The sums hold each gradient canary {gradient.drawn:.3g} C far where the Plan has {gradient.drawn_planned:.3g} C: "
            "units were drawn too often, or counted for more than C"
        )
    if gradient.epsilon_lower_bound > epsilon:
        return f"The lower bound {_proven(gradient.epsilon_lower_bound)} of the gradient canaries is larger"
    if (weights := gradient.weights) and weights.epsilon_lower_bound > epsilon:
        return (
            f"The lower bound {_proven(weights.epsilon_lower_bound)} of the gradient canaries in the weights is larger"
        )
    return ""


def _seen(positive: str | None, gradient: GradientAudit | None) -> str:
    works = f"The attack works where it should: {positive}." if positive else "No text was planted to test the attack."
    if gradient is None or gradient.noise is None:
        return works
    return (
        f"{works} Whoever saw every step could show {_proven(gradient.epsilon_lower_bound)} on gradient canaries; the noise "
        f"measured on them is {gradient.noise:.3g} C of {gradient.noise_planned:.3g} C planned."
    )


def _failed(controls: Controls) -> str:
    if controls.base_separates:
        return (
            "the base model, which never saw the canaries, already tells the planted ones from the others, so they were "
            "not planted by coins of their own or the base was trained on them"
        )
    if controls.words and controls.words.succeeds:
        return (
            "a classifier that sees the words of carrier and secret and no model tells the planted "
            "canaries from the others, so they were not planted by coins of their own"
        )
    return ""
