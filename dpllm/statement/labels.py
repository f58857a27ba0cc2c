"""Labels that were randomised before training: what the record beside the data holds, and what of it a statement says.

Comes in: JSON. Goes out: typed records. Must not know how a label is flipped or checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from dpllm.privacy.labels import flip_probability
from dpllm.records import AtLeast1, Positive, Record, Sha256, Text


class Labels(Record):
    """Which answer of each pair is called the chosen one was flipped by a coin; absent where labels are as they were given."""

    mechanism: Literal["randomised response"]
    """What flipped them."""
    neighbouring_relation: Literal["label_changed"]
    """How two datasets differ: in one label, or in all labels of one unit. Prompts and answers are the same in both."""
    epsilon: Annotated[float, Field(gt=1e-3, le=50)]
    """Of one label, with a delta of 0."""
    probability: Annotated[float, Field(gt=0, lt=0.5)]
    """With which each label was flipped: 1 / (1 + e^epsilon)."""
    unit: Text
    """Whose labels are protected together: example (one pair), or the column that says whose label it is."""
    max_labels: AtLeast1
    """Most labels of one unit."""
    unit_epsilon: Positive
    """Of all labels of one unit: max_labels times epsilon."""
    dataset: Text
    """Name of these labels in the ledger: an account of their own, which adds to no other."""
    entry: Text
    """Its entry there."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day on which they were flipped, in UTC."""
    account_epsilon: Positive | None = None
    """Of one unit, for all that the account was known to hold, this draw among it; absent where nothing says it."""

    @property
    def coherent(self) -> bool:
        """Whether probability and costs are those of the epsilon of a label."""
        whole = self.max_labels * self.epsilon
        same = abs(self.probability - flip_probability(self.epsilon)) <= 1e-12
        same &= abs(self.unit_epsilon - whole) <= 1e-9 * whole
        same &= self.account_epsilon is None or self.account_epsilon >= whole * (1 - 1e-9)
        return same and (self.unit != "example" or self.max_labels == 1)

    def with_account(self, held: float = 0.0, before: Sequence[Labels] = ()) -> Self:
        """The same with the largest total known of its account, in a ledger or by models ``before``; none for other units."""
        draws: list[Labels] = [self, *(draw for draw in before if draw.dataset == self.dataset)]
        paid = math.fsum({draw.entry: draw.unit_epsilon for draw in draws}.values())  # who uses one twice pays once
        total = max(held, paid, *(draw.account_epsilon or 0.0 for draw in draws))
        fields = {key: value for key, value in self.to_json().items() if key != "account_epsilon"}
        if {draw.unit for draw in draws} == {self.unit}:
            fields["account_epsilon"] = total
        return self.checked(fields)


class LabelRecord(Labels):
    """The same beside the data. It holds no coin, no number of flips, and nothing of the labels as they were."""

    schema_version: Literal[1]
    """Version of this record."""
    file_sha256: Sha256
    """Of the file with the flipped labels; it is published nowhere, since whoever guesses the texts could check them."""

    def public(self) -> Labels:
        """What a statement says of it."""
        return Labels.pick(self.to_json())
