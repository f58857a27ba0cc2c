"""The numbers of an audit of canaries that somebody else planted.

Comes in: score and token tables, and the manifest. Goes out: what ``dpllm.auditing.summary`` says of an audited run, without
what this manifest cannot carry: references that are not there, and a theorem about coins that were none. Torch is not
imported; models are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from dpllm.auditing import attacks
from dpllm.auditing.blind import words_control
from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.summary import summarise
from dpllm.auditing.table import CanaryScores, TokenTable
from dpllm.auditing.verdict import Claim
from dpllm.lab.manifest import Manifest
from dpllm.recipe.config import AuditConfig

NO_COINS = (
    "The manifest does not say that each canary was inserted by a fair coin of its own, so no lower bound on epsilon follows "
    'from it and no claim is tested. If they were, put {"coins": "independent"} into its first line.'
)
_SHIFT = " The words alone, or the base model, already tell planted texts from the others, so no score shows what was learned."
_NOT_SEEN = (
    "The lower bound does not exceed the claimed epsilon, but the attack was seen to work nowhere, so finding nothing means "
    "nothing. Plant a group with 32 repetitions."
)
_RANKED = ("attacks", "exposure", "sampling")
_NOT_TESTED = "none: the canaries were not planted by independent fair coins"


def summarise_manifest(
    rows: Sequence[CanaryScores], tokens: TokenTable, planned: Manifest, claim: Claim | None, settings: AuditConfig
) -> dict[str, Any]:
    """Everything that an audit concludes from the scores of a manifest's canaries.

    Args:
        rows: The score table of all of them.
        tokens: Their token table.
        planned: Texts and coins.
        claim: Somebody's, or None.
        settings: alpha and the grids of guesses.

    Returns:
        What ``dpllm.auditing.summary.summarise`` returns. Without references the canaries that were left out are ranked among;
        without independent coins the bound is 0, for want of a theorem, and the verdict inconclusive or no_claim.
    """
    fixed = {"alpha": settings.alpha, "guesses": settings.guesses, "guesses_in": settings.guesses_in}
    chosen: dict[str, Any] = {
        **fixed,
        "tokens": tokens,
        "words": words_control(planned.canaries),
    }
    report = summarise(rows, claim, **chosen) if planned.references else _without_references(rows, claim, chosen)
    return report if planned.independent_coins else _without_coins(report, fixed)


def _without_references(rows: Sequence[CanaryScores], claim: Claim | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """Canaries that were left out stand in for references wherever scores are ranked; the test needs their coins instead.

    So the report is made of two: in one they are references and have no coins, in the other, of which only what rests on
    coins is taken, they are both.
    """
    chosen = {**chosen, "slope": attacks.slope(rows)}
    stand_ins = [replace(row, group=0, inserted=None) for row in rows if not row.inserted]
    ranked = summarise([*(row for row in rows if row.inserted), *stand_ins], claim, **chosen)
    tested = summarise([*rows, *stand_ins], claim, **chosen)
    report = {**tested, **{name: ranked[name] for name in _RANKED}}
    for group, seen in tested["repeated"].items():
        if group in ranked["repeated"]:
            report["repeated"][group] = {**seen, "attacks": ranked["repeated"][group]["attacks"]}
    positive = ranked["controls"]["positive"]
    report["controls"] = {**tested["controls"], "positive": positive}
    if report["verdict"] == "consistent" and positive is None:
        report |= {"verdict": "inconclusive", "verdict_reason": _NOT_SEEN}
    return report


def _without_coins(report: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """The same without anything that rests on independent fair coins."""
    nothing = epsilon_lower_bound([], [], delta=report["epsilon_lower_bound"]["delta"], **fixed)
    shift = report["controls"]["base_separates"] or bool((report["controls"]["words"] or {}).get("succeeds"))
    return {
        **report,
        "epsilon_lower_bound": {**asdict(nothing), "guesses": [], "guesses_in": [], "method": _NOT_TESTED},
        "repeated": {group: {**seen, "test": None} for group, seen in report["repeated"].items()},
        "verdict": "inconclusive" if report["claim"] else "no_claim",
        "verdict_reason": NO_COINS + (_SHIFT if shift else ""),
    }
