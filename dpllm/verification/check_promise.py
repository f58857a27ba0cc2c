"""The promise: epsilon and every number beside it, computed again from the stored event, also of the models before this one.

Comes in: the terms, statistics and lineage of a privacy statement. Goes out: checks. ``costs`` has the tables of fields. That
this event is what ran is asserted, and so is that the base model said what lineage has of it: its own card is verified by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast, get_args

from dpllm.privacy import accounting, banded, limits
from dpllm.privacy.events import Event, PureDP
from dpllm.privacy.noise import noise_scale
from dpllm.privacy.plan import ACCOUNTANT, CURVE_DELTAS, Plan, if_shuffled
from dpllm.privacy.privacy_loss import Relation
from dpllm.privacy.releases import OTHER, Kind, Statistic, tidy, told
from dpllm.statement import lineage as ancestry
from dpllm.statement import state
from dpllm.statement.privacy_record import CRYPTOGRAPHIC, Ancestor, Composed, Lineage, PrivacyRecord
from dpllm.statement.released import BesideRun, Release
from dpllm.verification import costs
from dpllm.verification.costs import Promised, again, differing, follows
from dpllm.verification.values import Check, Published, Wrong, asserted, differences, listed, tried, verified

MOST_PARENTS = 10
_AGAIN = again(None)


def check(export: Published) -> Iterator[Check]:
    """Every number of the promise that follows from the event and the public sizes."""
    record, plan = export.record, export.record.plan
    if not record.guarantee:
        attempted = "" if plan is None else " The attempted Plan is checked below."
        yield verified("promise", f"none is made: {record.reason}.{attempted}")
    if plan is None:
        return
    yield tried("epsilon", check_epsilon, plan)
    yield tried("sizes", _sizes, record, plan)
    yield tried("other accountants", _accountants, plan)
    yield tried("cross-check", check_cross_check, plan)
    yield tried("limits of attackers", _attackers, plan)
    yield tried("without amplification", _shuffled, plan)
    yield tried("terms", _generator, record, plan)


def said(export: Published) -> Iterator[Check]:
    """The fields that are the author's word."""
    stated = export.record.to_json()
    stated |= stated.get("plan") or stated.get("attempted") or {}
    for name, (fields, what) in costs.ASSERTED.items():
        there = [field for field in fields.split() if _has(stated, field)]
        if there:
            yield asserted(name, f"{', '.join(there)}: {what}.")


def _has(statement: Any, field: str) -> bool:
    name, _, inner = field.partition(".")
    return isinstance(statement, dict) and name in statement and (not inner or _has(statement[name], inner))


# A Plan, or the terms of texts by inference, field by field.


def check_epsilon(terms: Promised) -> Check:
    """Epsilon against the event, which costs as much."""
    accountant, (epsilon, coarse) = terms.accountant, costs.pld_of(terms)
    if accountant.name != ACCOUNTANT or accountant.interval != accounting.FINE_INTERVAL:
        raise Wrong(f"accountant is not {ACCOUNTANT} at interval {accounting.FINE_INTERVAL:g}. {again(terms)}")
    if not math.isfinite(epsilon):
        raise Wrong(f"no finite epsilon can be certified for the event at delta {terms.delta:g}. {again(terms)}")
    follows({"epsilon": terms.epsilon}, {"epsilon": epsilon}, terms, costs.COARSE if coarse else 0.0)
    return verified(
        "epsilon", f"PLD gives {epsilon:.6g} at delta {terms.delta:g} for the event; {terms.epsilon:.6g} is stated."
    )


def _sizes(record: PrivacyRecord, plan: Plan) -> Check:
    """What goes together; that the event follows from N, B, T, sigma and the unit is a rule of every Plan."""
    steps, coefficients, drawn = record.steps, plan.coefficients, record.randomness
    best = not coefficients or banded.near_best(coefficients, min(plan.num_steps, costs.MOST_STEPS))
    rules = {
        "coefficients are not the best of any schedule": best,
        "steps.planned is not the Plan's num_steps": steps.planned == plan.num_steps,
        "steps.taken is more than planned": steps.taken <= steps.planned,
        "steps.lost is more than taken": (steps.lost or 0) <= steps.taken,
        "a completed run took other steps than planned": record.status != "completed" or steps.taken == steps.planned,
        "epsilon is above target_epsilon": plan.epsilon <= plan.target_epsilon,
    }
    wrong: list[object] = [problem for problem, good in rules.items() if not good]
    if drawn and not wrong:
        scale = noise_scale(plan.noise_multiplier, 1.0, drawn.lattice.coordinates)
        where = "randomness.lattice.noise_over_max_grad_norm"
        wrong += differing(drawn.lattice.noise_over_max_grad_norm, scale, plan, where)
    if wrong:
        raise Wrong(f"{listed(wrong)}. {_AGAIN}")
    return verified(
        "sizes",
        f"N {plan.dataset_size}, batch {plan.expected_batch_size}, {plan.num_steps} steps and noise {plan.noise_multiplier:.4g} "
        f"match the event; delta is {plan.delta * plan.dataset_size:.2g} / N.",
    )


def _accountants(plan: Plan) -> Check:
    epsilon, coarse = costs.pld_of(plan)
    fresh = {"pld": accounting.finite(epsilon)}
    if "rdp" in costs.bounded(plan.event):
        fresh["rdp"] = costs.rdp_of(plan)
    follows({"accountants": plan.accountants}, {"accountants": fresh}, plan, costs.COARSE if coarse else 0.0)
    known = [f"{name} {value:.6g}" for name, value in fresh.items() if value is not None]
    return verified("other accountants", f"{', '.join(known)}.")


def check_cross_check(terms: Promised) -> Check:
    """What a second accountant says of the event."""
    name, stated = "cross-check", terms.cross_check
    if stated is None:
        if {"pld", "rdp"} <= accounting.accountants(terms.event):
            raise Wrong(f"cross_check is missing, although RDP supports this event. {again(terms)}")
        return verified(name, "no second accountant supports this event.")
    if stated.name == "opacus-prv":
        epsilon, value = costs.pld_of(terms)[0], stated.epsilon
        room = max(accounting.PRV_GAP, 1e-3 * epsilon)
        if terms.delta >= accounting.LEAST_COMPARED and not epsilon - 1e-3 <= value <= epsilon + room:
            raise Wrong(
                f"cross_check states {value}, which PRV cannot give where PLD gives {epsilon:.6g}. {again(terms)}"
            )
        return asserted(
            name, f"{value:.6g} is stated for {stated.name}, which is possible; it needs torch, so it is not run here."
        )
    if not stated.name.startswith("dp-accounting-rdp") or "rdp" not in costs.bounded(terms.event):
        raise Wrong(f"cross_check names an accountant that dpllm never uses for this event. {again(terms)}")
    follows({"cross_check": {"epsilon": stated.epsilon}}, {"cross_check": {"epsilon": costs.rdp_of(terms)}}, terms)
    return verified(name, f"RDP gives {stated.epsilon:.6g}.")


def _attackers(plan: Plan) -> Check:
    """Limits and curves: the same event in other words."""
    if costs.pld_of(plan)[1]:
        return asserted("limits of attackers", "not recomputed: an epsilon in the hundreds limits no attacker.")
    follows(plan.to_json(), _attackers_of(plan.event, plan.neighbouring_relation), plan)
    return verified("limits of attackers", "limits and curve, to five digits, and trade_off follow from the event.")


@lru_cache(maxsize=256)
def _attackers_of(event: Event, relation: Relation) -> dict[str, Any]:
    costs.bounded(event)
    curve = accounting.curve(event, relation, CURVE_DELTAS)
    return {
        "limits": dict(limits.attacker_limits_of(event, relation)),
        "curve": [[delta, accounting.finite(epsilon)] for delta, epsilon in curve],
        "trade_off": limits.trade_off(event, relation),
    }


def _shuffled(plan: Plan) -> Check:
    name, stated = "without amplification", plan.without_amplification
    follows({"without_amplification": stated}, {"without_amplification": if_shuffled(plan, plan.best_of)}, plan)
    if plan.coefficients:
        return verified(name, "none is stated: banded noise has no such figure.")
    return verified(name, f"epsilon {stated}, if batches had come from shuffling.")


def _generator(record: PrivacyRecord, plan: Plan) -> Check:
    """What the schema, which fixes the other words, does not say."""
    if record.randomness and record.randomness.secure_noise != (record.randomness.generator == CRYPTOGRAPHIC):
        raise Wrong(f"randomness.secure_noise is not true of {record.randomness.generator}. {_AGAIN}")
    how = " of groups in turn, with banded noise" if plan.coefficients else ""
    return verified(
        "terms", f"{plan.definition}, central, DP-SGD over Poisson samples{how}; the base model is not covered."
    )


# Statistics that were released beside it.


def check_statistics(export: Published) -> Iterator[Check]:
    """What was released about the data: its epsilon, alone and with the run, against its events."""
    shown, terms = export.record.statistics, export.record.plan
    if shown is not None:
        size = terms.dataset_size - terms.canary_slots if terms else 1
        yield from check_beside(shown, terms, size, export.record.guarantee)


def check_beside(shown: BesideRun, terms: Promised | None, size: int, guarantee: bool) -> Iterator[Check]:
    """Statistics beside a run, or beside texts, of so many units."""
    if terms is None or (shown.unit, shown.neighbouring_relation) != (terms.unit, terms.neighbouring_relation):
        raise Wrong(f"the statistics protect another unit, or use another relation. {again(terms)}")
    if shown.delta * size >= 1:
        raise Wrong(
            f"the statistics' epsilon is stated at a delta of 1/N or more, which protects nobody. {again(terms)}"
        )
    if not shown.drawn or shown.pure > costs.LARGE:
        raise Wrong(f"the statistics were not drawn, or have an epsilon above {costs.LARGE:g}. {again(terms)}")
    for release in shown.releases:
        if not _is_ours(release, shown.max_examples_per_unit):
            raise Wrong(
                f"{release.statistic} is no statistic of dpllm, by that mechanism and with that error. {again(terms)}"
            )
    alone = costs.together([shown.event()], shown.delta, terms.neighbouring_relation)
    both = state.beside_run(shown, terms, guarantee).with_run
    fresh = {"epsilon": alone, "with_run": both}
    if wrong := differing({name: getattr(shown, name) for name in fresh}, fresh, terms, "statistics"):
        raise Wrong(f"{listed(wrong)} is not what the statistics cost, alone and with all else. {again(terms)}")
    with_run = "" if both is None else f", with all else {both:.6g} at delta {terms.delta:g}"
    yield verified(
        "statistics",
        f"{len(shown.releases)} releases cost epsilon {alone:.6g} at delta {shown.delta:g}{with_run}.",
    )
    yield asserted("values of statistics", "the author's word that OpenDP drew them from these data.")


def _is_ours(release: Release, rows: int) -> bool:
    """Whether dpllm releases such a statistic: by its mechanism, with the error that its epsilon gives, of such a value."""
    declared, value = release.declared.model_dump(exclude_none=True), release.value or {}
    kinds = {"": "units", "values": "shares", "numbers quantile": "quantiles"}
    asked = Statistic(cast(Kind, kinds.get(" ".join(declared))), release.statistic.partition(" of ")[2], **declared)
    if not isinstance(release.event, PureDP) or not asked.kind or asked.name != release.statistic:
        return False
    stated = release.mechanism, release.error_95, release.error_of
    if any(differences(stated, told(asked, rows, release.event.epsilon))):
        return False
    if asked.quantile:  # one of the candidates
        candidates = {tidy(float(number)) for number in asked.numbers}
        return [*value] == [f"{asked.quantile:g}"] and {*value.values()} <= candidates
    counts = [*asked.values, OTHER] if asked.values else ["units"]
    return sorted(value) == sorted(counts) and all(float(count).is_integer() for count in value.values())


# The models before it.


def check_lineage(export: Published) -> Iterator[Check]:
    """What a run's base model states, see ``lineage_of``."""
    record = export.record
    yield from lineage_of(record.lineage, record.plan if record.guarantee else None, record.composed)


def lineage_of(lineage: Lineage | None, own: Promised | None, account: Composed | None) -> Iterator[Check]:
    """Each ancestor's epsilon against its event, and the composition of those on the same data.

    Args:
        lineage: As it is stated.
        own: What is promised beside it; None: nothing.
        account: What the ledger said; None: nothing is known of it.
    """
    if lineage is None:
        yield asserted("lineage", "none: the author says that the base model has no privacy statement.")
        return
    parents, same_data, stated = lineage.models, lineage.on_same_data, lineage.composed
    charged, learned = account.dataset if account else None, {parent.dataset for parent in parents}
    rules = {
        f"more than {MOST_PARENTS} earlier models are named": len(parents) <= MOST_PARENTS,
        "same_dataset contradicts the datasets that are named": lineage.same_dataset == bool(same_data),
        "an earlier model was trained on this run's dataset, but lineage denies it": charged in (None, lineage.dataset)
        or charged not in learned,
        "an earlier model was trained on the same dataset without a guarantee, so this one has none": own is None
        or all(parent.guarantee for parent in same_data),
    }
    if wrong := [problem for problem, good in rules.items() if not good]:
        raise Wrong(f"{listed(wrong)}. {_AGAIN}")
    for parent in parents:
        _check_parent(parent)
    total, why = ancestry.together(same_data, own)
    if (stated is None) != (total is None) or (stated is None and not lineage.reason):
        raise Wrong(f"a total of all runs on the dataset, or why there is none ({why}), is not stated. {_AGAIN}")
    if own is None or stated is None or total is None:
        names = listed([parent.name for parent in parents])
        yield asserted("lineage", f"{names}: no total is stated ({lineage.reason}).")
        return
    fresh = {"epsilon": total.epsilon, "delta": total.delta}
    if wrong_fields := differing({name: getattr(stated, name) for name in fresh}, fresh, own, "composed"):
        raise Wrong(f"{listed(wrong_fields)} of lineage is not what all runs on the dataset cost. {_AGAIN}")
    yield verified("lineage", f"with {len(same_data)} earlier models on the same dataset: epsilon {total.epsilon:.6g}.")


def _check_parent(parent: Ancestor) -> None:
    if not parent.guarantee:
        if parent.event is not None or parent.epsilon is not None:
            raise Wrong(f"{parent.name} states numbers but no guarantee. {_AGAIN}")
        return
    relation = parent.neighbouring_relation
    if parent.epsilon is None or parent.delta is None or parent.event is None or relation not in get_args(Relation):
        raise Wrong(f"{parent.name} states a guarantee but no numbers. {_AGAIN}")
    least, coarse = costs.pld(parent.event, parent.delta, cast(Relation, relation))
    if not math.isfinite(least) or parent.epsilon < least * (1 - (costs.COARSE if coarse else costs.OTHER_VERSION)):
        raise Wrong(f"{parent.name} states epsilon {parent.epsilon:g}, but its event costs {least:.6g}. {_AGAIN}")
