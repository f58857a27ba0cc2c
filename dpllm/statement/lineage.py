"""Lineage: the model from which a run starts, that model's privacy statement, and the guarantee of both together.

Comes in: a ``Base``, which ``run.base_model`` reads and checks; the recipe, the ledger, a Plan. Goes out: ``lineage`` of run.json
and card. One rule: runs on the same people are composed by their events; otherwise a reason replaces the total. Reads no file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dpllm.errors import ConfigError
from dpllm.privacy import accounting
from dpllm.privacy.parts import added
from dpllm.recipe.config import RunConfig
from dpllm.statement.privacy_record import Ancestor, ComposedLineage, Lineage
from dpllm.statement.released import Labels

if TYPE_CHECKING:
    from dpllm.ledger import Ledger
    from dpllm.privacy.events import Event
    from dpllm.privacy.privacy_loss import Relation


class PromisedEvent(Protocol):
    """A Plan, texts by inference, or a request: an event, and whom its epsilon protects."""

    @property
    def event(self) -> Event:
        """The accounting event."""

    @property
    def delta(self) -> float:
        """Delta at which its epsilon is stated."""

    @property
    def unit(self) -> str:
        """The privacy unit."""

    @property
    def neighbouring_relation(self) -> Relation:
        """The neighbouring relation."""


@dataclass(frozen=True)
class Base:
    """The privacy statement of a base model or adapter, after checking that it is about these weights.

    Attributes:
        statement: The statement's content.
        ancestors: Statements of earlier models, the nearest first.
        weights: For an adapter, the SHA-256 of its weights.
        labels: Draws of labels on which it and earlier models were trained, the latest first.
    """

    statement: Ancestor
    ancestors: tuple[Ancestor, ...]
    weights: str | None = None
    labels: tuple[Labels, ...] = ()

    @property
    def models(self) -> tuple[Ancestor, ...]:
        """Base and ancestors, the latest first."""
        return (self.statement, *self.ancestors)


def compose_with_base(
    base: Base | None,
    config: RunConfig,
    *,
    dataset: str,
    derived_from: str | None,
    book: Ledger | None,
    plan: PromisedEvent | None,
) -> Lineage | None:
    """The guarantee of a run together with earlier models.

    Args:
        base: The base model's statement; None: it has none.
        config: The recipe.
        dataset: The name of its data in the ledger.
        derived_from: The dataset that is charged instead, if the recipe declares one.
        book: The ledger that the recipe names; None if it does not exist yet.
        plan: The promise; None without differential privacy, or if only refusals are needed.

    Returns:
        None without a base statement; else the common dataset, and the total of all runs on it or the reason why there is none.

    Guarantee:
        ``composed`` bounds what all these runs together reveal about one unit of the common dataset: each is an adaptive
        composition of sampled Gaussian sums, whose parameters must have been fixed before any result was seen.

    References:
        Dwork, Rothblum and Vadhan 2010, "Boosting and Differential Privacy", section 3; Doroshenko et al. 2022 (PLD).
    """
    if base is None:
        return None
    account = book.records.charged_to(dataset, derived_from) if book else derived_from or dataset
    same_data = [model for model in base.models if model.dataset == account]
    composed, reason = together(same_data, plan, config.flaw)
    if base.statement.dataset is None:
        reason = f"nothing says on which data {base.statement.name} was trained"
    return Lineage(
        base=base.statement,
        ancestors=base.ancestors,
        same_dataset=bool(same_data),
        dataset=account if same_data else None,
        composed=composed,
        reason=reason,
    )


def together(
    same_data: Sequence[Ancestor], terms: PromisedEvent | None, broken: str | None = None
) -> tuple[ComposedLineage | None, str | None]:
    """Epsilon of a run and of earlier ones on the same data, at the run's delta; or the reason why there is none.

    Args:
        same_data: Statements of earlier models trained on the same data.
        terms: The run's own promise; None: it has none.
        broken: Why the run gives no guarantee despite ``terms``; None: it gives one.
    """
    if not same_data:
        return None, "the runs are on different datasets: each statement is about its own data"
    if terms is None or broken:
        return None, f"this run gives no guarantee: {broken or 'nothing was planned'}"
    events: list[Event] = [terms.event]
    for parent in same_data:
        theirs, ours = (f"{record.unit}, {record.neighbouring_relation}" for record in (parent, terms))
        if not parent.guarantee:
            return None, f"{parent.name}, on the same dataset, has no guarantee, so all together have none"
        if theirs != ours:
            return None, f"{parent.name} was protected by another unit or neighbouring relation ({theirs}; here {ours})"
        if parent.event is None:
            return None, f"{parent.name}, on the same dataset, does not say what it released"
        events.append(parent.event)
    epsilon = accounting.epsilon(accounting.compose(events), terms.delta, terms.neighbouring_relation)
    if not math.isfinite(epsilon):
        return None, f"no finite epsilon can be certified at delta {terms.delta:g} for all runs together"
    accountant = f"dp-accounting PLD {accounting.versions()['version']}"
    return ComposedLineage(epsilon=epsilon, delta=terms.delta, accountant=accountant), None


def of_labels(labels: Labels | None, base: Base | None, book: Ledger | None) -> Labels | None:
    """The labels of a run with the total of their account, from the ledger, their record and earlier models."""
    if labels is None:
        return None
    account_epsilon = 0.0
    with contextlib.suppress(ConfigError):  # the ledger has no such entry
        if book and book.run(labels.entry).reservation.dataset == labels.dataset:
            account_epsilon = added(*book.account(labels.dataset).events())
    return labels.with_account(account_epsilon, base.labels if base else ())


def why_not(lineage: Lineage | None) -> str | None:
    """Why earlier models void a run's own guarantee; None if they do not."""
    for parent in lineage.on_same_data if lineage else ():
        if not parent.guarantee:
            same_data = f"which was trained on the same dataset ({parent.dataset}) without a guarantee"
            return f"what it started from goes back to {parent.name}, {same_data}"
    return None


def deviations(lineage: Lineage | None) -> list[str]:
    """Card lines that name earlier models without a guarantee for their own data."""
    models = lineage.models if lineage else ()
    same_data = lineage.on_same_data if lineage else ()
    names = dict.fromkeys(model.name for model in models if not model.guarantee and model not in same_data)
    return [
        f"{name}, from which this model was made, states no differential privacy guarantee for the data it was trained on: "
        "these weights may reveal them; a guarantee of this run is about this run's own training data, and only as far as they "
        "are not among those"
        for name in names
    ]
