"""Checks of the promise: a record's own rules, and every number that follows from its event, by one table of fields.

Comes in: a release. Goes out: checks, figures, and the stated figures that differ. It is asserted, not verified, that this event
is what ran and that the base model stated what lineage says of it: that card is verified separately. Opacus' accountant is not
used, because it would import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, cast, get_args

from dpllm.card.artifact import Promise
from dpllm.privacy import accounting, limits
from dpllm.privacy.accounting import Relation
from dpllm.privacy.events import Event
from dpllm.privacy.noise import noise_scale
from dpllm.privacy.parts import parts_of
from dpllm.privacy.plan import ACCOUNTANT, CURVE_DELTAS, if_shuffled
from dpllm.records import Json
from dpllm.statement import lineage as ancestry
from dpllm.statement.privacy_record import Ancestor
from dpllm.verification import values
from dpllm.verification.values import TOLERANCE, Check, Difference, Published, Wrong

LARGE = 500.0
"""Epsilon by RDP above which PLD uses a coarser grid: such an epsilon protects nobody, and the fine grid takes gigabytes."""
COARSE = 2e-2
"""Relative error of PLD on the coarser grid, upwards."""
MOST_PARTS, MOST_SETTINGS, MOST_STEPS, LEAST_NOISE = 4, 16, 1_000_000, 0.01
MAGNIFIED = 1e-5
"""Relative, for figures that magnify rounding: curves fitted to scores, and limits that use deltas down to 1e-10. Processors
round the accountant's Fourier transform differently: on another one gdp_mu moved by 1.2e-6, and epsilon at delta 1e-8 by 1e-8."""
OF_SUMMARY = 1e-3
"""Relative, for gdp_mu only: near delta 1e-10 it is mostly rounding of the transform; another processor moved it by 5e-4."""
OTHER_VERSION, OTHER_RDP = 1e-3, 1e-2
"""Relative difference allowed to another version's PLD, and to its RDP, which may use other orders."""
MOST_PARENTS = 10
_NOISE = "randomness.lattice.noise_over_max_grad_norm"
_LIMITS, _BY_GRID = "limits of attackers", ("epsilon", "other accountants")


class Field(NamedTuple):
    """A pattern of recomputed fields, the line that reports them, and relative tolerances.

    ``same`` applies if the accountant's version is this one, ``other`` if it is another. Fields that cannot be computed are in
    ``asserted`` of each ``Artifact``.
    """

    line: str
    pattern: str
    same: float
    other: float


TABLE = (
    Field("epsilon", r"epsilon", TOLERANCE, OTHER_VERSION),
    Field("epsilon", r"accountant\b.*", 0.0, 0.0),
    Field(_LIMITS, r"(curve|trade_off)\[\d+\]\[0\]", 0.0, 0.0),  # the deltas of curves are the same in every version
    Field(_LIMITS, r"limits\.gdp_mu", OF_SUMMARY, OTHER_RDP),
    Field(_LIMITS, r"(limits|curve)\b.*", MAGNIFIED, OTHER_RDP),
    Field(_LIMITS, r"trade_off\b.*", 0.0, OTHER_RDP),  # rounded up to four digits
    Field("other accountants", r"accountants\b.*", TOLERANCE, OTHER_RDP),
    Field("cross-check", r"cross_check\b.*", TOLERANCE, OTHER_RDP),
    Field("without amplification", r"without_amplification", 0.0, 0.0),
    Field("lattice", r"randomness\.lattice\b.*", 1e-12, 1e-12),
    Field("statistics", r"statistics\.(epsilon|with_run)", TOLERANCE, OTHER_VERSION),
    Field("lineage", r"lineage\.composed\.epsilon", TOLERANCE, OTHER_VERSION),
    Field("ledger", r"composed\.budget\b.*", 0.0, 0.0),
    Field("ledger", r"composed\b.*", TOLERANCE, OTHER_VERSION),
    Field("", r".*", 0.0, 0.0),
)
"""The first row that matches a field says how it is compared."""


def field_of(name: str) -> Field:
    """The row of the table for a field."""
    return next(field for field in TABLE if re.fullmatch(field.pattern, name))


def bounded(event: Event) -> frozenset[str]:
    """Accountants that support an event; raises Wrong for more parts or steps, or less noise, than a run can have."""
    composition = parts_of(event)
    runs = [option for best in composition.selected for option in best.options]
    compositions: list[list[Any]] = [[part for kind in parts for part in kind] for parts in (composition, *runs)]
    too_large = len(runs) > MOST_SETTINGS or any(len(parts) > MOST_PARTS for parts in compositions)
    for part in [part for parts in compositions for part in parts]:
        group = getattr(part, "group_size", 1)  # steps of groups are mixtures of many Gaussians
        too_large |= part.times > (MOST_STEPS if group == 1 else 10 * MOST_STEPS // group)
        too_large |= getattr(part, "noise_multiplier", LEAST_NOISE) < LEAST_NOISE
    if too_large:
        raise Wrong(
            f"the event has more than {MOST_PARTS} different parts, {MOST_SETTINGS} settings or {MOST_STEPS:,} steps, or noise "
            f"below {LEAST_NOISE}, which nothing by dpllm has. Take it from where it was published."
        )
    return accounting.accountants(event)


def pld(event: Event, delta: float, relation: Relation) -> tuple[float, bool]:
    """Epsilon by PLD, and whether it used the coarser grid, which overstates it; see ``bounded``."""
    if "rdp" in bounded(event):
        upper_bound = accounting.epsilon(event, delta, relation, "rdp")
        if upper_bound > LARGE:
            interval = accounting.FINE_INTERVAL * upper_bound / LARGE
            return accounting.epsilon(event, delta, relation, interval=interval), True
    epsilon = accounting.epsilon(event, delta, relation)
    return epsilon, epsilon > LARGE


def figures(promise: Promise) -> tuple[Json, float]:
    """Every field of a promise that follows from its event, by name; and the minimum tolerance of epsilon."""
    terms: Any = promise.terms
    event, relation, delta = terms.event, terms.neighbouring_relation, terms.delta
    known_accountants = bounded(event)
    rdp = accounting.epsilon(event, delta, relation, "rdp") if "rdp" in known_accountants else None
    if rdp is not None and rdp > promise.most:
        raise Wrong(f"the event costs an epsilon above {promise.most:g}, which is no promise.")
    epsilon, coarse = pld(event, delta, relation)
    if not math.isfinite(epsilon):
        raise Wrong(f"no finite epsilon can be certified for the event at delta {delta:g}.")
    accountant = {"interval": accounting.FINE_INTERVAL, "name": ACCOUNTANT, "version": terms.accountant.version}
    computed: Json = {"epsilon": epsilon, "accountant": accountant}
    fields, second = type(terms).model_fields, terms.cross_check
    if "accountants" in fields:
        computed["accountants"] = {"pld": epsilon, **({"rdp": accounting.finite(rdp)} if rdp is not None else {})}
    if second is not None and second.name.startswith("dp-accounting-rdp") and rdp is not None:
        unsupported = "prv cannot answer" if "prv" in known_accountants else "prv does not know this event"
        rdp_check = {"name": f"dp-accounting-rdp ({unsupported})", "epsilon": accounting.finite(rdp)}
        computed["cross_check"] = second.to_json() | rdp_check
    if not coarse:  # an epsilon in the hundreds does not limit an attacker
        computed |= _attackers(promise.whole or event, event, relation, "curve" in fields)
    if "without_amplification" in fields:
        computed["without_amplification"] = if_shuffled(terms, terms.best_of)
    return computed, COARSE if coarse else 0.0


@lru_cache(maxsize=256)
def _attackers(attacked_event: Event, event: Event, relation: Relation, curves: bool) -> Json:
    computed: Json = {"limits": dict(limits.attacker_limits_of(attacked_event, relation))}
    if curves:
        curve = accounting.curve(event, relation, CURVE_DELTAS)
        computed["curve"] = [[delta, accounting.finite(epsilon)] for delta, epsilon in curve]
        computed["trade_off"] = limits.trade_off(event, relation)
    return computed


def _other_version(terms: Any) -> str:
    """Names the accountant's version that computed the statement; empty if it is this one, or if none is named."""
    version = accounting.versions()["version"]
    stated = terms.accountant.version if terms is not None else version
    return "" if stated == version else f" (stated by dp-accounting {stated}, computed by {version}, which may differ)"


def differing(stated: object, computed: object, terms: Any, path: str = "", least: float = 0.0) -> list[Difference]:
    """Fields of a JSON value, at ``path`` in a statement, that differ from the computed ones.

    The accountant's version in ``terms`` selects the column of ``TABLE``; ``least`` is the minimum tolerance of epsilon.
    """
    other_version = terms is None or bool(_other_version(terms))

    def tolerance_of(name: str) -> float:
        field = field_of(name)
        tolerance = field.other if other_version else field.same
        return max(least, tolerance) if field.line in _BY_GRID else tolerance

    return list(values.differences(stated, computed, path, tolerance_of))


def rules(release: Published[Any]) -> Iterator[Check]:
    """Checks the rules that the facts must follow whatever they promise."""
    outcomes = release.artifact.rules(release.record)
    values.hold(outcomes, release.again)
    if outcomes:
        yield values.verified("record", f"{release.source} keeps to its rules: {release.promise.words}.")


def asserted_fields(release: Published[Any]) -> Iterator[Check]:
    """Lists the fields that nobody can compute."""
    terms = cast(Any, release.promise.terms)
    stated = {**(terms.to_json() if terms else {}), **release.record.to_json()}
    for name, (fields, reason) in release.artifact.asserted.items():
        present = [field for field in fields.split() if _has(stated, field)]
        if present or not fields:
            yield values.asserted(name, f"{', '.join(present)}: {reason}." if present else f"{reason}.")


def _has(value: Any, field: str) -> bool:
    name, _, inner = field.partition(".")
    if isinstance(value, list):  # under "*"
        return any(_has(item, inner) for item in value)
    return isinstance(value, dict) and name in value and (not inner or _has(value[name], inner))


def check(release: Published[Any]) -> Iterator[Check]:
    """Checks every figure that follows from the event, one line for each name in the table."""
    promise, terms = release.promise, cast(Any, release.promise.terms)
    if promise.reason is not None:
        attempted = "" if terms is None else " The attempted Plan is checked below."
        yield values.verified("promise", f"none is made: {promise.reason}.{attempted}")
    if terms is None:
        return
    computed, epsilon_tolerance = figures(promise)
    yield from values.guarded("cross-check", _second_accountant, release, computed)
    stated = {name: value for name, value in terms.to_json().items() if name in computed}
    if lattice := promise.lattice:
        stated[_NOISE] = lattice.noise_over_max_grad_norm
        computed[_NOISE] = noise_scale(terms.noise_multiplier, 1.0, lattice.coordinates)
    yield from _compared(release, stated, computed, epsilon_tolerance)
    if "limits" not in computed:
        yield values.asserted("limits of attackers", "not recomputed: an epsilon in the hundreds limits no attacker.")


def _compared(release: Published[Any], stated: Json, computed: Json, epsilon_tolerance: float) -> Iterator[Check]:
    terms = release.promise.terms
    differences, version = differing(stated, computed, terms, least=epsilon_tolerance), _other_version(terms)
    for line in dict.fromkeys(field.line for field in TABLE):
        names = [name for name in computed if field_of(name).line == line]
        if wrong := [difference for difference in differences if field_of(difference.field).line == line]:
            detail = f"{values.listed(wrong)} does not follow from the event{version}. {release.again}"
            yield values.failed(line, detail)
        elif names:
            figures_in_words = ", ".join(_in_words(name, computed[name]) for name in names)
            yield values.verified(line, f"{figures_in_words}: computed again from the event{version}.")


def _in_words(name: str, figure: Any) -> str:
    if name == "accountants":
        return ", ".join(f"{key.upper()} {value:.6g}" for key, value in figure.items() if value is not None)
    return f"{name} {figure:.6g}" if isinstance(figure, float) else name


def _second_accountant(release: Published[Any], computed: Json) -> Iterator[Check]:
    terms, epsilon = cast(Any, release.promise.terms), computed["epsilon"]
    supporting, stated = accounting.accountants(terms.event), terms.cross_check
    if stated is None and {"pld", "rdp"} <= supporting:
        raise Wrong(f"cross_check is missing, although RDP supports this event. {release.again}")
    if stated is None:
        yield values.verified("cross-check", "no second accountant supports this event.")
    elif stated.name == "opacus-prv":
        tolerance = max(accounting.PRV_GAP, 1e-3 * epsilon)
        if terms.delta >= accounting.MIN_COMPARED_DELTA and not epsilon - 1e-3 <= stated.epsilon <= epsilon + tolerance:
            raise Wrong(f"cross_check is {stated.epsilon}, which PRV cannot give beside {epsilon:.6g}. {release.again}")
        unchecked = "which is possible; it needs torch, so it is not run here"
        yield values.asserted("cross-check", f"{stated.epsilon:.6g} is stated for {stated.name}, {unchecked}.")
    elif "cross_check" not in computed:
        raise Wrong(f"cross_check names an accountant that dpllm never uses for this event. {release.again}")


# Earlier models.


def check_lineage(release: Published[Any]) -> Iterator[Check]:
    """Checks each ancestor's epsilon against its event, and the composition of those on the same data."""
    promise, lineage = release.promise, release.promise.lineage
    if lineage is None:
        if promise.terms is not None or promise.reason is not None:
            yield values.asserted("lineage", "none: the author says that the base model has no privacy statement.")
        return
    own_terms = promise.terms if promise.reason is None else None
    parents, same_data, stated_total = lineage.models, lineage.on_same_data, lineage.composed
    account = promise.composed.dataset if promise.composed else None
    denies_parent = account not in (None, lineage.dataset) and account in {parent.dataset for parent in parents}
    unprotected = own_terms is not None and not all(parent.guarantee for parent in same_data)
    rules = {
        f"more than {MOST_PARENTS} earlier models are named": len(parents) <= MOST_PARENTS,
        "same_dataset contradicts the datasets that are named": lineage.same_dataset == bool(same_data),
        "an earlier model was trained on this run's dataset, but lineage denies it": not denies_parent,
        "an earlier model was trained on the same dataset without a guarantee, so this one has none": not unprotected,
    }
    values.hold(rules, release.again)
    for parent in parents:
        _check_parent(parent, release.again)
    total, reason = ancestry.together(same_data, own_terms)
    if (stated_total is None) != (total is None) or (stated_total is None and not lineage.reason):
        raise Wrong(f"neither a total of all runs on the dataset nor a reason ({reason}) is stated. {release.again}")
    if own_terms is None or stated_total is None or total is None:
        names = values.listed([parent.name for parent in parents])
        yield values.asserted("lineage", f"{names}: no total is stated ({lineage.reason}).")
        return
    computed = {"epsilon": total.epsilon, "delta": total.delta}
    stated = {name: getattr(stated_total, name) for name in computed}
    if wrong := differing(stated, computed, own_terms, "lineage.composed"):
        raise Wrong(f"{values.listed(wrong)} is not what all runs on the dataset cost. {release.again}")
    yield values.verified(
        "lineage", f"epsilon {total.epsilon:.6g} with {len(same_data)} earlier models on the same dataset."
    )


def _check_parent(parent: Ancestor, advice: str) -> None:
    if not parent.guarantee:
        if parent.event is not None or parent.epsilon is not None:
            raise Wrong(f"{parent.name} states numbers but no guarantee. {advice}")
        return
    relation = parent.neighbouring_relation
    if parent.epsilon is None or parent.delta is None or parent.event is None or relation not in get_args(Relation):
        raise Wrong(f"{parent.name} states a guarantee but no numbers. {advice}")
    epsilon, coarse = pld(parent.event, parent.delta, cast(Relation, relation))
    if not math.isfinite(epsilon) or parent.epsilon < epsilon * (1 - (COARSE if coarse else OTHER_VERSION)):
        raise Wrong(f"{parent.name} states epsilon {parent.epsilon:g}, but its event costs {epsilon:.6g}. {advice}")
