"""Lineage: what the card carries on of the models before it, and what all of them promise together.

Comes in: ``lineage`` of a privacy statement. Goes out: checks. That the base model said this is checked where the base is: its
own card is verified by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast, get_args

from dpllm.privacy import events
from dpllm.privacy.privacy_loss import Relation
from dpllm.report.checks import costs
from dpllm.report.checks.promise import rounding
from dpllm.report.checks.values import Check, Published, Wrong, asserted, close, listed, verified
from dpllm.report.fields import Ancestor, ComposedLineage, Terms

_NAME = "lineage"
MOST_PARENTS = 10
_AGAIN = "Write the card again: dpllm card RUN."


def check(found: Published) -> Iterator[Check]:
    """Each ancestor's epsilon against its event, and the composition of those on the same data."""
    lineage = found.record.lineage
    if lineage is None:
        yield asserted(
            _NAME, "none is stated: the base model, as far as the author says, has no privacy statement of its own."
        )
        return
    parents = [lineage.base, *lineage.ancestors]
    if len(parents) > MOST_PARENTS:
        raise Wrong(f"{len(parents)} models before this one are named, more than {MOST_PARENTS}. {_AGAIN}")
    charged = found.record.composed and found.record.composed.dataset
    if charged != lineage.dataset and charged in [parent.dataset for parent in parents if parent.dataset]:
        raise Wrong(
            f"a model before it learnt the very dataset that this run was charged to, and lineage denies it. {_AGAIN}"
        )
    for parent in parents:
        _parent(parent)
    mine = [parent for parent in parents if parent.dataset is not None and parent.dataset == lineage.dataset]
    if lineage.same_dataset != bool(mine):
        raise Wrong(f"same_dataset contradicts the datasets that are named. {_AGAIN}")
    if found.guarantee and any(not parent.guarantee for parent in mine):
        raise Wrong(
            "a guarantee is stated, and a model before it learnt the same dataset without one. Do not rely on it."
        )
    if lineage.composed is not None:
        yield _composed(found.terms, lineage.composed, mine)
        return
    if mine and found.guarantee and not lineage.reason:
        raise Wrong(f"the models before it learnt the same dataset, and no total is stated. {_AGAIN}")
    yield asserted(_NAME, f"{listed([parent.name for parent in parents])}: no total is stated ({lineage.reason}).")


def _parent(parent: Ancestor) -> None:
    """Its epsilon against its event.

    Raises:
        Wrong: It states less than the event costs, or numbers without a guarantee.
    """
    if not parent.guarantee:
        if parent.event is not None or parent.epsilon is not None:
            raise Wrong(f"{parent.name} has numbers and no guarantee. {_AGAIN}")
        return
    relation = parent.neighbouring_relation
    if parent.epsilon is None or parent.delta is None or parent.event is None or relation not in get_args(Relation):
        raise Wrong(f"{parent.name} has a guarantee and no numbers. {_AGAIN}")
    least, coarse = costs.pld(costs.text(parent.event), parent.delta, cast(Relation, relation))
    if not math.isfinite(least) or parent.epsilon < least * (1 - (2e-2 if coarse else 1e-3)):
        raise Wrong(
            f"{parent.name} is said to have epsilon {parent.epsilon:g}, and its event costs {least:.6g}. {_AGAIN}"
        )


def _composed(terms: Terms | None, composed: ComposedLineage, mine: list[Ancestor]) -> Check:
    if terms is None or not mine:
        raise Wrong(f"a total is stated, and nothing is there to add. {_AGAIN}")
    events.normal_form(terms.event)
    own = (terms.unit, terms.neighbouring_relation)
    if any((parent.unit, parent.neighbouring_relation) != own for parent in mine):
        raise Wrong(f"a total is stated over runs that protect other units, or by another relation. {_AGAIN}")
    all_of = [terms.event, *(parent.event for parent in mine)]
    total = costs.together(costs.text(all_of), composed.delta, terms.neighbouring_relation)
    if composed.delta != terms.delta or not close(composed.epsilon, total, rounding(terms)):
        raise Wrong(f"all of them together cost {total:.6g}, and {composed.epsilon:g} is stated. {_AGAIN}")
    return verified(_NAME, f"with {len(mine)} models before it on the same dataset, epsilon is {total:.6g}.")
