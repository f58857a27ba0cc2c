"""Releases without a training run: the statistics of describe.json, and labels randomised at the source.

Comes in: JSON. Goes out: typed records, which a card can also show with a run, and a release in words. Must not know how a
release is drawn or checked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dpllm.errors import ConfigError
from dpllm.privacy.accounting import Relation, stored
from dpllm.privacy.events import Composed, Event, Gaussian, PureDP, SelfComposed, compose, count_releases, mechanism_of
from dpllm.privacy.releases import OTHER, flip_probability
from dpllm.records import AtLeast1, Between0And1, NotNegative, Number, Positive, Record, Sha256, Share, Text
from dpllm.statement import formatting

RECORD, VECTORS = "describe.json", "vectors.safetensors"
"""Files of a folder of clusters, or of a classifier, besides its card."""
MOST_VECTORS = 2**24
"""Maximum bytes of the vectors."""


def _is_release(event: object) -> bool:
    """Whether an event is Gaussian sums, or an epsilon above 0 at delta 0: no release is free."""
    if isinstance(event, SelfComposed):
        return isinstance(event.event, Gaussian) and event.count > 0
    return isinstance(event, PureDP) and event.epsilon > 0


ReleaseEvent = Annotated[PureDP | SelfComposed, *stored(_is_release)]


@dataclass(frozen=True)
class Entry:
    """A charge that a ledger must contain as a separate entry."""

    name: str
    dataset: str
    unit: str
    relation: Relation
    event: Event
    steps: int
    """Minimum number of charged steps."""


class Declared(Record):
    """What was declared for it, and not read from the data."""

    values: tuple[Text, ...] | None = None
    """Values that are counted; others count as "other"."""
    numbers: tuple[Number, ...] | None = None
    """Candidates of a quantile."""
    quantile: Share | None = None
    """Which quantile."""
    clusters: Annotated[int, Field(ge=2, le=99)] | None = None
    """How many clusters."""
    encoder: Text | None = None
    """Public model whose mean hidden states are clustered, or classified by ``values``."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a text that it reads."""
    dimensions: AtLeast1 | None = None
    """To which they were projected."""
    units: AtLeast1 | None = None
    """Public number of units."""


class Release(Record):
    """One statistic, released once."""

    statistic: Text
    """What it is, in words."""
    declared: Declared
    mechanism: Text
    """What drew it; by OpenDP where nothing is encoded."""
    event: ReleaseEvent
    """What it costs: with a delta of 0, by OpenDP's privacy map; or Gaussian sums, by their noise multiplier."""
    error_95: NotNegative
    """With 95% probability it errs by at most this, by its mechanism's theorem."""
    error_of: Text
    """What that counts."""
    value: dict[Text, Number] | None
    """What was drawn: noisy counts by value, or the candidate chosen; null before."""
    entry: Text | None
    """Its entry in the ledger; null before it was drawn."""
    vectors: Sha256 | None = None
    """Of the file with the centres or weights that were released with it."""
    encoder: Sha256 | None = None
    """Of the encoder's weights, configuration and vocabulary."""

    def counts(self) -> list[tuple[str, float]]:
        """Each declared value and "other", or each cluster, with its noisy count."""
        value, named = self.value or {}, self.declared.values
        return [(name, value.get(name, 0)) for name in ((*named, OTHER) if named else sorted(value))]

    @property
    def cost(self) -> str:
        """Epsilon, or the noise of Gaussian sums, in words."""
        if isinstance(self.event, PureDP):
            return f"{self.event.epsilon:g}"
        return f"{self.event.count} sums, noise multiplier {self.noise_multiplier:g}"

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of Gaussian sums; 0 for other events."""
        mechanism = mechanism_of(self.event)
        return mechanism.noise_multiplier if mechanism else 0.0

    def words(self) -> str:
        """The value and its 95% error in words; shares are computed from the noisy counts."""
        value, error = self.value, f"± {self.error_95:,.3g} {self.error_of}"
        if value is None:
            return error
        if not (self.declared.values or self.declared.clusters):
            return f"{next(iter(value.values())):,g} ({error})"
        total = max(1, sum(max(0, count) for count in value.values()))
        parts = [f"{name} {count:,} = {max(0, count) / total:.1%}" for name, count in self.counts()]
        return f"{', '.join(parts)} ({error})"


class Statistics(Record):
    """All that one call of dpllm describe released."""

    dataset: Text
    """Name of the data in the ledger: the account that was charged."""
    unit: Text
    """Whom the guarantee protects: example (one row), or the column that says whose row it is."""
    max_examples_per_unit: AtLeast1
    """Most rows of one unit that were looked at."""
    neighbouring_relation: Literal["zero_out", "add_or_remove_one"]
    """How two datasets differ between which the guarantee holds."""
    epsilon: NotNegative
    """Of all releases together, by PLD."""
    delta: Between0And1
    """At which that is stated; a pure_dp release alone has none."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day of the releases, in UTC."""
    software: dict[Text, str]
    """Versions of dpllm, and of OpenDP or torch and transformers."""
    releases: Annotated[tuple[Release, ...], Field(min_length=1, max_length=1000)]
    """Each statistic, declared, mechanism, event (pure_dp, or a gaussian self_composed), error_95, error_of, value and entry."""

    def event(self) -> Composed:
        """All releases as one accounting event."""
        return compose([release.event for release in self.releases])

    def positive(self, name: str | None) -> dict[str, float]:
        """The declared values of a statistic with a positive released count -> that count."""
        counts = next((release.value for release in self.releases if release.statistic == name and release.value), {})
        return {value: count for value, count in counts.items() if value != OTHER and count > 0}

    def entries(self) -> list[Entry]:
        """The ledger entry of each release."""
        account = self.dataset, self.unit, self.neighbouring_relation
        paid = ((release.entry or "", release.event) for release in self.releases)
        return [Entry(name, *account, event, count_releases(event)) for name, event in paid]

    @property
    def pure(self) -> float:
        """The sum of all epsilons at delta 0; infinite with Gaussian sums."""
        events = [release.event for release in self.releases]
        return sum(event.epsilon if isinstance(event, PureDP) else math.inf for event in events)

    @property
    def drawn(self) -> bool:
        """Whether all statistics were released, not only estimated by a dry run."""
        return all(release.value is not None and release.entry is not None for release in self.releases)


class Embedded(Statistics):
    """describe.json in a folder of clusters, or of a classifier."""

    schema_version: Literal[1]
    releases: tuple[Release]


class BesideRun(Statistics):
    """What was released about the training data, by OpenDP; absent where the author names nothing."""

    with_run: NotNegative | None
    """Epsilon of the run and these releases together, at the run's delta; null where the run gives no guarantee."""


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

    @model_validator(mode="after")
    def _follows(self) -> Self:
        unit_epsilon = self.max_labels * self.epsilon
        rules = {
            "probability is not that of epsilon": abs(self.probability - flip_probability(self.epsilon)) <= 1e-12,
            "unit_epsilon is not that of all its labels": abs(self.unit_epsilon - unit_epsilon) <= 1e-9 * unit_epsilon,
            "account_epsilon is less than this draw": (self.account_epsilon or math.inf) >= unit_epsilon * (1 - 1e-9),
            "an example has one label": self.unit != "example" or self.max_labels == 1,
        }
        if wrong := [problem for problem, good in rules.items() if not good]:
            raise ValueError(", ".join(wrong))
        return self

    @property
    def paid(self) -> Entry:
        """The ledger entry for all labels of one unit."""
        event = PureDP(self.unit_epsilon)
        return Entry(self.entry, self.dataset, self.unit, self.neighbouring_relation, event, 1)

    def with_account(self, held: float = 0.0, before: Sequence[Labels] = ()) -> Self:
        """A copy with the largest known total of its account, from a ledger or models ``before``; none if units differ."""
        draws: list[Labels] = [self, *(draw for draw in before if draw.dataset == self.dataset)]
        paid = math.fsum({draw.entry: draw.unit_epsilon for draw in draws}.values())  # using a draw twice costs once
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
        """The part that a statement contains."""
        return Labels.pick(self.to_json())


def page(statistics: Statistics) -> str:
    """The card of a folder of clusters, or of a classifier: README.md."""
    [release] = statistics.releases
    sizes = {name: f"{count:,}" for name, count in release.counts()}
    return formatting.template("embedded.md.j2").render(w=formatting, s=statistics, release=release, sizes=sizes)


def read_vectors(path: Path, release: Release) -> tuple[Any, Any]:
    """Centre and vectors of a folder, as numpy arrays in float64.

    Raises:
        ConfigError: The file is not the released one, or its tensors do not fit the record.
    """
    import numpy as np
    import safetensors.numpy

    size, labels = release.declared.dimensions or 0, len(release.value or ())
    shape = (labels, size) if release.declared.clusters else (size + 1, labels)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_VECTORS)
        tensors = safetensors.numpy.load(content)
        centre, vectors = tensors["centre"], tensors["vectors"]
        good = len(tensors) == 2 and centre.ndim == 1 and vectors.shape == shape
        good &= all(tensor.dtype == np.float64 and bool(np.isfinite(tensor).all()) for tensor in (centre, vectors))
        good &= hashlib.sha256(content).hexdigest() == release.vectors
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        good = False
    if not good:
        raise ConfigError(
            f"{path}: is not the file that {RECORD} names, with its shapes and finite numbers. Restore the folder."
        )
    return centre, vectors
