"""The verdict: what tests, claim and controls together allow anybody to say.

Comes in: the claim, the lower bounds and the controls. Goes out: one word and one reason. Knows no scores, texts or
models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpllm.auditing.bounds import one_run_ceiling
from dpllm.recipe.sections import default_ways
from dpllm.statement.audit import Controls, GroupTest
from dpllm.statement.audit_bounds import Claim, GradientAudit, GroupClaim, OneRunBound


def group_test(claim: GroupClaim, bound: OneRunBound) -> GroupTest:
    """The one-run test of a group against the claim that it is under; refutes a true one with probability <= ``bound.alpha``."""
    return GroupTest.pick(bound.to_json(), refuted=bound.value > claim.epsilon)


def levels(sizes: Mapping[int, int], claim: Claim, alpha: float) -> dict[int, float]:
    """How alpha is divided among the groups that are tested.

    Alike among the one that speaks of single units and those repeated ones that could refute their weaker claim. It
    needs sizes (repetitions -> candidates), claim and alpha only, so it was fixed before the coins.
    """
    tested = [1]
    for group in sorted(size for size in sizes if size > 1):
        target = claim.of(group)
        if target.delta >= 1:
            continue
        ceiling = one_run_ceiling(
            sizes[group], delta=target.delta, alpha=alpha / len(sizes), **default_ways(sizes[group])
        )
        if ceiling > target.epsilon:
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
    """What the tests say about the claim: falsified, inconclusive, consistent or no_claim, with the reason.

    Guarantee:
        A true claim is called falsified with probability at most the sum of the tests' alphas, which ``levels`` makes
        the alpha of the recipe. The word private is never said: an audit can refute a claim and cannot prove one.

    Args:
        claim: None for a run that makes none.
        bound: Of the once-inserted candidates, of which ``num_inserted`` were inserted by their coins.
        repeated: The tests of the other groups.
        num_inserted: See ``bound``.
        controls: Of this audit.
        gradient: What gradient canaries show; None: there were none.
        tried: Which canaries the attack was tried on.
    """
    shown = f"lower bound {bound.value:.3g} at confidence {1 - bound.alpha:.4g}"
    if claim is None:
        return "no_claim", f"The run makes no privacy claim; epsilon {shown}, delta {bound.delta:g}."
    claimed = f"the claimed epsilon {claim.epsilon:.3g} (delta {claim.delta:g}, unit {claim.unit})"
    if wrong := _contradiction(gradient, claim.epsilon):
        return "falsified", f"{wrong}, so {claimed} does not hold."
    # Coins that the words or the base model give away were no coins, and without coins there is no theorem.
    if failed := _failed(controls):
        return "inconclusive", f"The {shown}, and the audit cannot be trusted: {failed}."
    if gradient is not None and not bound.num_canaries:
        return _by_gradient(gradient, controls, claim.epsilon, claimed)
    if bound.value > claim.epsilon:
        return "falsified", f"The {shown} exceeds {claimed}."
    for group, test in repeated.items():
        if test.refuted:
            return "falsified", (
                f"The lower bound {test.value:.3g} of the canaries planted {group} times, at confidence "
                f"{1 - test.alpha:.4g}, exceeds {claim.of(group).epsilon:.3g}, which is what {claimed} allows for them."
            )
    if weak := _too_weak(bound, num_inserted, claim.epsilon, claimed):
        return "inconclusive", weak
    if controls.positive is None:
        return "inconclusive", (
            f"The {shown} does not exceed {claimed}, but the attack was seen to work nowhere"
            + (f", not on the canaries {' nor on those '.join(tried)}" if tried else "")
            + ", so finding nothing means nothing. Plant more canaries 32 times (audit.canaries.groups), train longer, or "
            "attack a twin that was trained without privacy and remembers them."
        )
    return "consistent", (
        f"The {shown} does not exceed {claimed}. A perfect attack on these canaries would have shown "
        f"{bound.ceiling:.3g}; stronger attacks or more canaries may show more. {_seen(controls.positive, gradient)}"
    )


def _by_gradient(gradient: GradientAudit, controls: Controls, epsilon: float, claimed: str) -> tuple[str, str]:
    """The verdict where no text was planted, and no contradiction found."""
    asked = "No canary of text was planted, so that nothing was asked of the weights."
    if gradient.ceiling < epsilon / 4 or controls.positive is None:
        return "inconclusive", (
            f"{asked} Of {claimed} the gradient canaries could have shown {gradient.ceiling:.3g} at most, and the attack "
            f"on them was{'' if controls.positive else ' not'} seen to work; more of them are needed, or more steps."
        )
    return "consistent", (
        f"The lower bound {gradient.epsilon_lower_bound:.3g} of the gradient canaries, for an observer of every step, does not "
        f"exceed {claimed}. {asked} {_seen(controls.positive, gradient)}"
    )


def _too_weak(bound: OneRunBound, num_inserted: int, epsilon: float, claimed: str) -> str:
    """Why so few canaries could not have refuted the claim; empty: they could."""
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
        return f"The lower bound {gradient.epsilon_lower_bound:.3g} of the gradient canaries is larger"
    if gradient.weights and gradient.weights.epsilon_lower_bound > epsilon:
        return f"The lower bound {gradient.weights.epsilon_lower_bound:.3g} of the gradient canaries in the weights is larger"
    return ""


def _seen(positive: str | None, gradient: GradientAudit | None) -> str:
    works = f"The attack works where it should: {positive}." if positive else "No text was planted to test the attack."
    if gradient is None or gradient.noise is None:
        return works
    return (
        f"{works} Whoever saw every step could show {gradient.epsilon_lower_bound:.3g} on gradient canaries; the noise measured "
        f"on them is {gradient.noise:.3g} C of {gradient.noise_planned:.3g} C planned."
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
