"""The numbers of an audit, recomputable by anyone from the published score and token tables.

Comes in: the tables, the claim, what was fixed before training (alpha, the grids of guesses), and the controls that tables
cannot show. Goes out: a ``Summary`` with a verdict. Torch is not imported; no model, text or file is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpllm.auditing import attacks, extraction, statistics
from dpllm.auditing import gradient as gradient_canaries
from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.gradient import GradientTable
from dpllm.auditing.statistics import Floats, shown
from dpllm.auditing.table import CanaryScores, TokenTable, by_group
from dpllm.auditing.verdict import group_test, judge, levels
from dpllm.errors import ConfigError
from dpllm.privacy.plan import AuditSettings
from dpllm.recipe.sections import default_ways
from dpllm.statement.audit import SCHEMA_VERSION, Controls, GroupTest, Summary
from dpllm.statement.audit_bounds import Claim, GradientAudit, OneRunBound

CONFIDENCE = 0.95
PRIMARY_ATTACK = "calibrated"
"""The score behind the lower bound, chosen here once so that nobody picks the best of several afterwards."""
DELTA_WITHOUT_CLAIM = 1e-5
Json = dict[str, Any]


@dataclass(frozen=True)
class Beside:
    """What goes into a summary beside tables, claim and settings.

    Attributes:
        limits: What the whole mechanism allows any attack on one unit, see ``Claim.limits``; None: not known.
        words: What the classifier found that sees words and no model; its ``succeeds`` decides.
        twin: Where else the attack was seen to work, in words; empty: it was looked at, and not seen there either.
        own_references: There are no references, and a group's own canaries whose coins say out, or the other answer, stand in.
        gradient: Of the gradient canaries; None: there were none.
    """

    limits: Mapping[str, float | None] | None = None
    words: Mapping[str, Any] | None = None
    twin: str | None = None
    own_references: bool = False
    gradient: GradientTable | None = None


@dataclass(frozen=True)
class _Scored:
    """The tables, sorted, with the sums that the scores read, and how they are looked at."""

    groups: Mapping[int, Sequence[CanaryScores]]
    """Candidates by repetitions, with their coins."""
    references: Sequence[CanaryScores]
    by_token: Mapping[str, Mapping[str, float]]
    """The attacks that need tokens: name -> canary -> score."""
    slope: float

    def negatives(self, group: int) -> list[CanaryScores]:
        return [*attacks.held_out(self.groups[group]), *self.references]

    def calibrated(self, rows: Sequence[CanaryScores]) -> Floats:
        return attacks.calibrated(rows, self.slope)


def summarise(
    scores: Sequence[CanaryScores],
    claim: Claim | None,
    settings: AuditSettings,
    *,
    tokens: TokenTable | None = None,
    beside: Beside = Beside(),
) -> Summary:
    """Everything that an audit concludes from its scores.

    Args:
        scores: The score table, candidates and references.
        claim: None for a run without differential privacy; the bound is then stated at delta = 1e-5.
        settings: What was fixed before training.
        tokens: The token table of the same canaries; None: only the attacks that need none.
        beside: What tables cannot show.

    Raises:
        ConfigError: The table holds no references.
    """
    scored = _sorted(attacks.of_whole_rows(scores, tokens), tokens, beside)
    gradient = _gradient(beside.gradient, claim, settings)
    if gradient:  # which took its part
        settings = settings.model_copy(update={"alpha": settings.alpha * (1 - gradient_canaries.SHARE_OF_ALPHA)})
    bound, tests = _tests(scored, claim, settings)
    attacked = {
        group: _attacks(scored, group, claim.limits(group, beside.limits) if claim else None) for group in scored.groups
    }
    controls, tried = _controls(scored, attacked, beside, settings)
    once = len(attacks.members(scored.groups.get(1, [])))
    word, reason = judge(claim, bound, tests, once, controls, gradient, tried=tried)
    smallest, secrets = min(scored.groups, default=1), by_group(scores)
    values = {
        "schema_version": SCHEMA_VERSION,
        "claim": asdict(claim) if claim else None,
        "attacks": attacked.get(smallest, {}),
        "exposure": {str(group): _exposure(*_sides(rows, secrets.get(0))) for group, rows in secrets.items() if group},
        "extraction": {str(group): attacks.extraction(rows) for group, rows in scored.groups.items()},
        "sampling": extraction.summary(tokens.secrets(), scores) if tokens is not None else None,
        "epsilon_lower_bound": {**bound.to_json(), "method": _method(tokens), "slope": scored.slope},
        **({"gradient": gradient} if gradient else {}),
        "repeated": {
            str(group): _repeated(group, claim, seen, tests.get(group))
            for group, seen in attacked.items()
            if group != smallest
        },
        "controls": controls,
        "verdict": word,
        "verdict_reason": reason,
    }
    return Summary.pick(values)


def _sorted(scores: Sequence[CanaryScores], tokens: TokenTable | None, beside: Beside) -> _Scored:
    groups = by_group(scores)
    references = groups.pop(0, [])
    if not references and not beside.own_references:
        raise ConfigError("the score table has no references, so nothing can be ranked; run dpllm audit again.")
    by_token, pairs = {}, tokens is not None and tokens.of_pairs
    if tokens is not None and not pairs:  # they read one text
        found = {name: attack(tokens).tolist() for name, attack in attacks.TOKEN_ATTACKS.items()}
        by_token = {name: dict(zip(tokens.canary_ids, values, strict=True)) for name, values in found.items()}
    # A reward is log p less log p of the reference, whole.
    slope = 1.0 if pairs else attacks.slope(row for rows in groups.values() for row in rows)
    return _Scored(groups, references, by_token, slope)


def _tests(scored: _Scored, claim: Claim | None, settings: AuditSettings) -> tuple[OneRunBound, dict[int, GroupTest]]:
    """The bound of the once-planted candidates, and the tests of the repeated groups that can refute the claim."""

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
            target, ways = claim.of(group), default_ways(sizes[group])
            tests[group] = group_test(target, bound(scored.groups[group], delta=target.delta, alpha=own_level, **ways))
    return once, tests


def _method(tokens: TokenTable | None) -> str:
    """How the bound is computed."""
    score = "of every token that entered the loss, less what its words explain"
    if tokens is not None and tokens.secret_N is not None and tokens.secret_N.all():
        score = "of the secret's tokens, less what its words explain"
    if tokens is not None and tokens.of_pairs:
        score = "of pairs, the margin of their implicit rewards"
    return (
        "one training run, guesses on both sides and on one, with weights that fall with the rank (Steinke, Nasr and Jagielski "
        f"2023), once-inserted canaries, score '{PRIMARY_ATTACK}' {score}, alpha divided by the number of tests"
    )


def _gradient(table: GradientTable | None, claim: Claim | None, settings: AuditSettings) -> GradientAudit | None:
    if table is None or claim is None:
        return None
    return gradient_canaries.examine(table, delta=claim.delta, alpha=settings.alpha)


def _repeated(group: int, claim: Claim | None, attacked: Json, test: GroupTest | None) -> Json:
    return {
        "claim": asdict(claim.of(group)) if claim else None,
        "attacks": {name: attacked[name] for name in (PRIMARY_ATTACK, *attacks.ATTACKS)},
        "test": test,
    }


def _controls(
    scored: _Scored, attacked: Mapping[int, Json], beside: Beside, settings: AuditSettings
) -> tuple[Controls, list[str]]:
    """The base model on the same split and the group where the attack is seen best; the canaries it was tried on."""
    level = settings.control_level
    rows = [row for own in scored.groups.values() for row in own]
    sides = attacks.base_loss(attacks.members(rows)), attacks.base_loss(attacks.held_out(rows))
    before = statistics.auc(*sides, 1 - level)
    separates = before is not None and not before.low <= 0.5 <= before.high
    seen = {}
    for group, own in scored.groups.items():
        inside, outside = scored.calibrated(attacks.members(own)), scored.calibrated(scored.negatives(group))
        p = statistics.rank_sum_p_value(inside, outside)
        if p is not None and p < level / len(scored.groups):
            seen[group] = attacked[group][PRIMARY_ATTACK]["auc"]
    positive = None
    if seen:
        best = max(seen, key=lambda group: seen[group])
        positive = f"AUC {seen[best]:.2f}" + (f" on the canaries planted {best} times" if best > 1 else "")
    tried = [f"planted {most} times" for most in sorted(scored.groups)[-1:]]
    if beside.twin == "":
        tried.append("of the twin")
    positive = positive or beside.twin
    if beside.gradient is not None and not positive:
        positive = gradient_canaries.seen(beside.gradient, level)
    found = {"base_separates": separates, "words": beside.words or None, "positive": positive or None}
    return Controls.pick(found, twin=beside.twin, level=level), tried


def _attacks(scored: _Scored, group: int, limits: Mapping[str, float] | None) -> Json:
    """Each attack on one group; held-out candidates and references are the negatives."""
    inside, outside = attacks.members(scored.groups[group]), scored.negatives(group)
    control = statistics.auc(attacks.base_loss(inside), attacks.base_loss(outside), CONFIDENCE)
    scores = {PRIMARY_ATTACK: (scored.calibrated(inside), scored.calibrated(outside))}
    scores |= {name: (attack(inside), attack(outside)) for name, attack in attacks.ATTACKS.items()}
    for name, found in scored.by_token.items():
        positive, negative = (np.array([found[row.canary_id] for row in side]) for side in (inside, outside))
        scores[name] = (positive, negative)
    shared: Json = {
        "group": group,
        "positives": len(inside),
        "negatives": len(outside),
        "confidence": CONFIDENCE,
        **shown("base_control_auc", control),
        "limits": limits,
    }
    return {name: {**shared, **separation(*sides)} for name, sides in scores.items()}


def separation(positives: Floats, negatives: Floats) -> Json:
    """How well a score separates: AUC and true positive rates with intervals; None where there are too few of a side."""
    values = shown("auc", statistics.auc(positives, negatives, CONFIDENCE))
    for fpr, name in ((0.01, "1_percent"), (0.001, "0.1_percent")):
        rate = statistics.tpr_at_fpr(positives, negatives, fpr, CONFIDENCE)
        values |= shown(f"tpr_at_{name}_fpr", rate)
    return values


def _sides(
    rows: Sequence[CanaryScores], references: Sequence[CanaryScores] | None
) -> tuple[Sequence[CanaryScores], Sequence[CanaryScores]]:
    """A group and its references; where there are none, its own left-out rows, which are then not ranked among themselves."""
    return (rows, references) if references else (attacks.members(rows), attacks.held_out(rows))


def _exposure(rows: Sequence[CanaryScores], references: Sequence[CanaryScores]) -> Json:
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


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None
