"""The promise: epsilon and every number beside it, computed again from the stored event, also of the models before this one.

Comes in: the terms and the lineage of a privacy statement. Goes out: checks. That this event is what ran is asserted, and so is
that the base model said what lineage has of it: its own card is verified by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast, get_args

from dpllm.privacy import accounting, banded
from dpllm.privacy.events import PureDP
from dpllm.privacy.plan import ACCOUNTANT, Plan, if_shuffled, noise_scale
from dpllm.privacy.privacy_loss import Relation
from dpllm.privacy.releases import OTHER, Kind, Statistic, tidy, told
from dpllm.statement import state
from dpllm.statement.fields import CRYPTOGRAPHIC, Ancestor, Composed, Lineage
from dpllm.statement.lineage import together
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import BesideRun, Release
from dpllm.verification import costs
from dpllm.verification.costs import Promised, again, by, rounding
from dpllm.verification.values import Check, Published, Wrong, asserted, close, differences, listed, tried, verified

OTHER_RDP = 1e-2
"""Relative; how far RDP of another version, which has other orders, may lie from this one."""
MOST_PARENTS = 10
_AGAIN = again(None)


def check(found: Published) -> Iterator[Check]:
    """Every number of the promise that follows from the event and the public sizes."""
    record, plan = found.record, found.record.plan
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


def check_epsilon(terms: Promised) -> Check:
    """Epsilon against the event, which costs as much."""
    accountant = terms.accountant
    if accountant.name != ACCOUNTANT or accountant.interval != accounting.FINE_INTERVAL:
        raise Wrong(f"accountant is not {ACCOUNTANT} at interval {accounting.FINE_INTERVAL:g}. {again(terms)}")
    delta, stated = terms.delta, terms.epsilon
    least, coarse = costs.of(terms)
    slack = costs.COARSE if coarse else rounding(terms)
    if not math.isfinite(least) or stated < least * (1 - slack):
        raise Wrong(
            f"the event costs epsilon {least:.12g} at delta {delta:g}, but {stated:.12g} is stated{by(terms)}. {again(terms)}"
        )
    if stated > least * (1 + slack):
        raise Wrong(
            f"epsilon {stated:.12g} is stated, but the event costs {least:.12g}: parts of two statements{by(terms)}. "
            f"{again(terms)}"
        )
    return verified("epsilon", f"PLD gives {least:.6g} at delta {delta:g} for the event; {stated:.6g} is stated.")


def _sizes(record: PrivacyRecord, plan: Plan) -> Check:
    """What goes together; that the event follows from N, B, T, sigma and the unit is a rule of every Plan."""
    steps, coefficients, delta = record.steps, plan.coefficients, plan.delta
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
    if record.randomness and not wrong:
        lattice = record.randomness.lattice
        scale = noise_scale(plan.noise_multiplier, 1.0, lattice.coordinates)
        wrong += differences(
            lattice.noise_over_max_grad_norm, scale, "randomness.lattice.noise_over_max_grad_norm", 1e-12
        )
    if wrong:
        raise Wrong(f"{listed(wrong)}. {_AGAIN}")
    return verified(
        "sizes",
        f"N {plan.dataset_size}, batch {plan.expected_batch_size}, {plan.num_steps} steps and noise {plan.noise_multiplier:.4g} "
        f"match the event; delta is {delta * plan.dataset_size:.2g} / N.",
    )


def _accountants(terms: Plan) -> Check:
    name = "other accountants"
    fresh = costs.beside(terms)
    slack = max(rounding(terms, OTHER_RDP), costs.COARSE if costs.of(terms)[1] else 0.0)
    wrong = list(differences(terms.accountants, fresh, tolerance=slack))
    if wrong:
        raise Wrong(f"accountants.{listed(wrong)} is not what the event costs{by(terms)}. {_AGAIN}")
    return verified(name, ", ".join(f"{key} {value:.6g}" for key, value in fresh.items() if value is not None) + ".")


def check_cross_check(terms: Promised) -> Check:
    """What a second accountant says of the event."""
    name, stated = "cross-check", terms.cross_check
    if stated is None:
        if {"pld", "rdp"} <= accounting.accountants(terms.event):
            raise Wrong(f"cross_check is missing, although RDP supports this event. {again(terms)}")
        return verified(name, "no second accountant supports this event.")
    value = stated.epsilon
    if stated.name == "opacus-prv":
        pld, _ = costs.of(terms)
        room = max(accounting.PRV_GAP, 1e-3 * pld)
        if terms.delta >= accounting.LEAST_COMPARED and not pld - 1e-3 <= value <= pld + room:
            raise Wrong(f"cross_check states {value}, which PRV cannot give where PLD gives {pld:.6g}. {again(terms)}")
        return asserted(
            name, f"{value:.6g} is stated for {stated.name}, which is possible; it needs torch, so it is not run here."
        )
    if not stated.name.startswith("dp-accounting-rdp"):
        raise Wrong(f"cross_check names an accountant that dpllm never uses. {again(terms)}")
    fresh = costs.beside(terms)["rdp"]
    if not close(value, fresh, rounding(terms, OTHER_RDP)):
        raise Wrong(f"cross_check states {value}, but RDP gives {fresh}{by(terms)}. {again(terms)}")
    return verified(name, f"RDP gives {fresh:.6g}.")


def _attackers(plan: Plan) -> Check:
    """Limits and curves: the same event in other words."""
    name, stated = "limits of attackers", plan.to_json()
    if costs.of(plan)[1]:
        return asserted(name, "not recomputed: an epsilon in the hundreds limits no attacker.")
    fresh = costs.attackers(plan.event, plan.neighbouring_relation)
    # Where curves are stated is the same in every version; the rates are rounded up to four digits, so that one gives one text.
    wrong: list[object] = [
        key for key in ("curve", "trade_off") if [at for at, _ in stated[key]] != [at for at, _ in fresh[key]]
    ]
    slack = rounding(plan, OTHER_RDP, costs.MAGNIFIED)
    wrong += costs.wrong_limits(stated["limits"], fresh["limits"], slack)
    wrong += differences(stated["curve"], fresh["curve"], "curve", slack)
    wrong += differences(stated["trade_off"], fresh["trade_off"], "trade_off", rounding(plan, OTHER_RDP, 0.0))
    if wrong:
        raise Wrong(f"{listed(wrong)} does not follow from the event{by(plan)}. {_AGAIN}")
    return verified(name, "limits and curve, to five digits, and trade_off follow from the event.")


def _shuffled(plan: Plan) -> Check:
    name, stated = "without amplification", plan.without_amplification
    fresh = if_shuffled(plan)
    if stated != fresh:  # rounded up to four digits, by no accountant's version
        raise Wrong(f"{stated} is stated, but the same noise without credit for sampling costs {fresh}. {_AGAIN}")
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


def check_statistics(found: Published) -> Iterator[Check]:
    """What was released about the data: its epsilon, alone and with the run, against its events."""
    shown, terms = found.record.statistics, found.record.plan
    if shown is not None:
        size = terms.dataset_size - terms.canary_slots if terms else 1
        yield from check_beside(shown, terms, size, found.record.guarantee)


def check_beside(shown: BesideRun, terms: Promised | None, size: int, guarantee: bool) -> Iterator[Check]:
    """Statistics beside a run, or beside texts, of so many units."""
    if terms is None or (shown.unit, shown.neighbouring_relation) != (terms.unit, terms.neighbouring_relation):
        raise Wrong(f"the statistics protect another unit, or use another relation. {again(terms)}")
    relation, slack, name = terms.neighbouring_relation, rounding(terms), "statistics"
    if shown.delta * size >= 1:
        raise Wrong(
            f"the statistics' epsilon is stated at a delta of 1/N or more, which protects nobody. {again(terms)}"
        )
    if not shown.drawn or shown.pure > costs.LARGE:
        raise Wrong(f"the statistics were not drawn, or have an epsilon above {costs.LARGE:g}. {again(terms)}")
    for one in shown.releases:
        _check_release(one, shown.max_examples_per_unit, again(terms))
    alone = costs.together([shown.event()], shown.delta, relation)
    both = state.beside_run(shown, terms, guarantee).with_run
    if not (close(shown.epsilon, alone, slack) and close(shown.with_run, both, slack)):
        raise Wrong(f"statistics cost {alone:.6g}, with all else {both}, but other figures are stated. {again(terms)}")
    with_run = "" if both is None else f", with all else {both:.6g} at delta {terms.delta:g}"
    yield verified(name, f"{len(shown.releases)} releases cost epsilon {alone:.6g} at delta {shown.delta:g}{with_run}.")
    yield asserted("values of statistics", "the author's word that OpenDP drew them from these data.")


def _check_release(one: Release, rows: int, again: str) -> None:
    """A statistic that dpllm releases, by its mechanism, with the error that its epsilon gives."""
    given = one.declared.model_dump(exclude_none=True)
    kinds = {"": "units", "values": "shares", "numbers quantile": "quantiles"}
    asked = Statistic(cast(Kind, kinds.get(" ".join(given))), one.statistic.partition(" of ")[2], **given)
    stated = one.mechanism, one.error_95, one.error_of
    if (
        not isinstance(one.event, PureDP)
        or not asked.kind
        or asked.name != one.statistic
        or any(differences(stated, told(asked, rows, one.event.epsilon)))
        or not _possible(asked, one.value)
    ):
        raise Wrong(f"{one.statistic} is no statistic of dpllm, by that mechanism and with that error. {again}")


def _possible(asked: Statistic, value: Mapping[str, float] | None) -> bool:
    """Whether dpllm releases such a value: whole counts of what was declared, or a candidate."""
    found = value or {}
    if asked.quantile:
        return [*found] == [f"{asked.quantile:g}"] and {*found.values()} <= {tidy(float(one)) for one in asked.numbers}
    counts = [*asked.values, OTHER] if asked.values else ["units"]
    return sorted(found) == sorted(counts) and all(float(one).is_integer() for one in found.values())


def check_lineage(found: Published) -> Iterator[Check]:
    """What a run's base model states, see ``lineage_of``."""
    record = found.record
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
    parents, mine = lineage.models, lineage.mine
    charged, learned = account.dataset if account else None, {parent.dataset for parent in parents}
    rules = {
        f"more than {MOST_PARENTS} earlier models are named": len(parents) <= MOST_PARENTS,
        "same_dataset contradicts the datasets that are named": lineage.same_dataset == bool(mine),
        "an earlier model was trained on this run's dataset, but lineage denies it": charged in (None, lineage.dataset)
        or charged not in learned,
        "an earlier model was trained on the same dataset without a guarantee, so this one has none": own is None
        or all(parent.guarantee for parent in mine),
    }
    if wrong := [problem for problem, good in rules.items() if not good]:
        raise Wrong(f"{listed(wrong)}. {_AGAIN}")
    for parent in parents:
        _check_parent(parent)
    (total, why), stated = together(mine, own), lineage.composed
    if stated is None:
        if total or not lineage.reason:
            raise Wrong(f"no total of all runs on the dataset is stated, or no reason why. {_AGAIN}")
        yield asserted(
            "lineage", f"{listed([parent.name for parent in parents])}: no total is stated ({lineage.reason})."
        )
        return
    if own is None or total is None:
        raise Wrong(f"a total is stated, but there is none: {why}. {_AGAIN}")
    if stated.delta != total.delta or not close(stated.epsilon, total.epsilon, rounding(own)):
        raise Wrong(
            f"together: {total.epsilon:.6g} at delta {total.delta:g}, not {stated.epsilon:g} at {stated.delta:g}. {_AGAIN}"
        )
    yield verified("lineage", f"with {len(mine)} earlier models on the same dataset: epsilon {total.epsilon:.6g}.")


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
