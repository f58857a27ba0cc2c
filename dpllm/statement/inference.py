"""Texts that were written by private inference: what inference.json holds, and what follows from it.

Comes in: JSON. Goes out: a typed record. Must not know how texts are written or checked, nor the card. What lies in the folder::

    README.md          the card, whose front matter the Hub and ``datasets.load_dataset`` read
    inference.json     this record
    data/train.jsonl   the rows, one JSON object a line

Nothing was trained. For each text, the records of a batch of units stand in a prompt of their own each, and their clipped votes
draw token after token: ``max_new_tokens`` draws of range 2 C / (B tau). Batches are disjoint, so all texts cost what one costs.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from dpllm.privacy import events
from dpllm.privacy.accounting import Accountant, CrossCheck, stored
from dpllm.privacy.events import Event, compose
from dpllm.privacy.limits import MechanismLimits, attacker_limits
from dpllm.privacy.plan import Plan
from dpllm.records import AtLeast1, Between0And1, Count, NotAStatement, NotNegative, Positive, Text
from dpllm.statement.privacy_record import BaseModelName, Composed, ComposedLineage, Lineage
from dpllm.statement.released import BesideRun, Statistics
from dpllm.statement.synthetic import Written

RECORD = "inference.json"
BoundedRange = Annotated[
    events.BoundedRange, *stored(lambda event: isinstance(event, events.BoundedRange) and event.count > 0)
]
"""The event of one text or more, drawn token by token."""


class Inference(Written):
    """All about one data set that was written by private inference."""

    epsilon: NotNegative
    """Of the texts alone, an upper bound in full precision."""
    delta: Between0And1
    """Slack of the definition; far below 1/N."""
    unit: Text
    """Whom the guarantee protects: example (one row of the data), or the name of the column that says whose row it is."""
    max_examples_per_unit: AtLeast1 | None
    """Most rows that one unit may bring; null where each row is a unit."""
    neighbouring_relation: Literal["zero_out", "add_or_remove_one"]
    """How two datasets differ between which the guarantee holds."""
    event: BoundedRange
    """The mechanism as a value, from which epsilon can be computed again."""
    accountant: Accountant
    cross_check: CrossCheck | None
    limits: MechanismLimits | None
    """Of texts and statistics together; null where only those are stated that follow from epsilon and delta."""
    num_units: AtLeast1
    """N, the public number of units; with add_or_remove_one as somebody declared it."""
    batch_size: AtLeast1
    """B, how many units vote for each token of a text, and the public divisor of the sum of their votes."""
    clip: Positive
    """C: a vote moves each logit by at most so much, up or down."""
    temperature: Positive
    """tau, by which the mean of the votes is divided before a token is drawn."""
    top_k: Count
    """Candidates are so many tokens, the likeliest behind the public prompt; 0: all."""
    max_new_tokens: AtLeast1
    """T: a text has at most so many."""
    texts: AtLeast1
    """How many were begun, each by a batch of its own, which never draws again."""
    prompt: Text
    """The public template in which each record stood, at {text}; the public prompt has nothing there."""
    base_model: BaseModelName
    dataset: str
    """Public name of the data: as the ledger knows them, or the last part of where they lay."""
    data_public: bool
    """Whether whoever wrote the rows declares the data public."""
    eval_public: bool
    """The same of evaluation rows, beside which quality may have been measured."""
    composed: Composed | None
    lineage: Lineage | None
    """What the base model states of its own training; where that was on the same data, the total of both."""
    statistics: BesideRun | None
    """Those whose shares were asked for; with_run is epsilon of the texts and them together."""
    not_covered: Annotated[tuple[str, ...], Field(min_length=1)]
    """Every property, and every access to data, that the guarantee is not about."""
    hardware: dict[Text, str | bool | int | float | tuple[str, ...]]
    """Where the model read the records, without names of machines."""


Promised = Plan | Inference
"""What states an epsilon of an event."""


def read(value: object) -> Inference:
    """A record, checked.

    Raises:
        NotAStatement: It does not keep to the schema.
    """
    return Inference.checked(value)


def eta(record: Inference) -> Fraction:
    """The exact range of a draw: one unit moves the mean of the votes by at most C / B in each coordinate."""
    return 2 * Fraction(record.clip) / (record.batch_size * Fraction(record.temperature))


def whole(event: Event, released: Statistics | None) -> Event:
    """All that was released: the texts, and the statistics that say how often to ask for what."""
    return event if released is None else compose([event, released.event()])


def epsilon(record: Inference) -> float:
    """Of texts, statistics and the models before on the same data, together, at the record's delta.

    With earlier models the statistics, whose delta is 0, are added by basic composition.

    Raises:
        NotAStatement: It is not stated.
    """
    if (before := _before(record)) is not None:
        return before.epsilon + (record.statistics.pure if record.statistics else 0.0)
    total = record.statistics.with_run if record.statistics else record.epsilon
    if total is None:
        raise NotAStatement(["statistics.with_run: is null, so that no epsilon covers the texts"])
    return total


def recognised(record: Inference) -> float:
    """The largest share of units that any test of all that was released recognises, if it is wrong about 1% of the others."""
    # The limits are of what was released here alone.
    most = record.limits.tpr_at_fpr_0_01 if record.limits and _before(record) is None else None
    return min(attacker_limits(epsilon(record), record.delta)["tpr_at_fpr_0.01"], 1.0 if most is None else most)


def _before(record: Inference) -> ComposedLineage | None:
    """Texts and the models before them that learned the same data; None where there are no such models."""
    return record.lineage.composed if record.lineage else None
