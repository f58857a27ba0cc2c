"""The privacy statement of a run as one typed record: what privacy.json holds.

Comes in: a JSON value. Goes out: a ``PrivacyRecord``, or sentences about what is wrong; the JSON Schema of all that may stand
there. Must not know how a statement is made, worded or checked.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dpllm.statement.fields import (
    AtLeast1,
    Between0And1,
    ByCopies,
    Composed,
    Count,
    Json,
    Lineage,
    NotAStatement,
    Number,
    Positive,
    Record,
    Sha256,
    Share,
    Steps,
    Terms,
    Text,
)
from dpllm.statement.labels import Labels
from dpllm.statement.released import BesideRun

SCHEMA_VERSION = 2


class Bound(Record):
    """What the audit proves about epsilon."""

    value: Number | None
    """Lower bound; null where nothing was measured."""
    alpha: Between0And1
    """Probability that it exceeds the truth."""
    delta: Number | None
    """Delta at which it is stated."""
    method: str
    """How it was computed."""
    num_canaries: Count
    """Canaries behind it."""
    best_guesses: Count
    """Guesses of the best of the tests fixed in advance."""
    correct: Count
    """How many of them were right."""
    ceiling: Number | None
    """The most that an attack which is always right would have shown."""


class AttackLimits(Record):
    """What the guarantee allows it at most; null without a guarantee."""

    tpr_at_fpr_0_01: Share = Field(alias="tpr_at_fpr_0.01")
    """Largest true-positive rate at a false-positive rate of 1%."""
    tpr_at_fpr_0_001: Share = Field(alias="tpr_at_fpr_0.001")
    """Largest true-positive rate at a false-positive rate of 0.1%."""
    auc: Share
    """Largest area under the ROC curve."""


class Attack(Record):
    """One attack on the least repeated canaries."""

    group: AtLeast1
    """How often each of its canaries was planted."""
    auc: Share | None
    """Area under its ROC curve."""
    auc_interval: tuple[Number, Number] | None
    """Confidence interval."""
    confidence: Share
    """Of the intervals."""
    tpr_at_1_percent_fpr: Share | None
    """True-positive rate at a false-positive rate of 1%."""
    tpr_at_1_percent_fpr_interval: tuple[Number, Number] | None
    """Confidence interval."""
    positives: Count
    """Planted canaries."""
    negatives: Count
    """Canaries that were left out, references included."""
    limits: AttackLimits | None


class Exposure(Record):
    """Exposure of one group, in bits."""

    inserted: Count
    """Planted canaries."""
    mean: Number | None
    """Mean exposure."""
    null_mean: Number | None
    """Its mean if nothing is remembered."""
    base_mean: Number | None
    """Mean exposure under the base model."""
    p_value: Number | None
    """Of the hypothesis that planted ones rank like others."""
    maximum: Number | None
    """Largest exposure."""


class Extraction(Record):
    """Extraction of one group, as counts."""

    inserted: Count
    """Planted."""
    tuned: Count
    """Of these, completed by the tuned model."""
    base: Count
    """Of these, completed by the base model."""
    held_out: Count
    """Left out."""
    held_out_tuned: Count
    """Of these, completed by the tuned model."""


class WordsControl(Record):
    """A classifier that sees words and no model; null where there were too few canaries."""

    auc: Number | None
    """Area under its ROC curve."""
    succeeds: bool
    """Whether it tells planted ones from the others."""


class Controls(Record):
    """What has to hold before an audit that finds nothing means anything."""

    base_separates: bool
    """The base model, which saw no canary, tells planted ones from the others."""
    words: WordsControl | None
    positive: str | None
    """Where the attack was seen to work; null: nowhere."""


class CanaryGroup(Record):
    """One group."""

    candidates: Count
    """Candidates."""
    inserted: Count
    """Of these, planted by their coin."""


class Canaries(Record):
    """What was planted, without its text."""

    kind: str
    """Kind of secret."""
    secrets: str
    """The same in words."""
    groups: ByCopies[CanaryGroup]
    """Canaries by how often each was planted."""
    references: Count
    """Canaries that no coin could plant."""


class WeightsAudit(Record):
    """What the weights before and after the run show of the same vectors, without any step between."""

    epsilon_lower_bound: Number
    """What whoever holds both could prove about epsilon."""
    alpha: Between0And1
    """Probability that it exceeds the truth."""
    ceiling: Number
    """The most that an attack which is always right would have shown."""
    auc: Share | None
    """Area under the ROC curve of how far the weights went along each vector."""
    auc_interval: tuple[Number, Number] | None
    """Its 95% interval."""
    expected_epsilon: Number
    """What is expected to be visible of one unit in the final weights, by the last-iterate comparison; no bound."""


class GradientAudit(Record):
    """What every step of the run showed of vectors that coins planted in its sums; absent where there were none."""

    canaries: AtLeast1
    """Vectors with a coin each."""
    inserted: Count
    """Of these, planted by their coin."""
    steps: Count
    """Steps that were seen."""
    epsilon_lower_bound: Number
    """What an observer of every step could prove about epsilon."""
    alpha: Between0And1
    """Probability that it exceeds the truth."""
    delta: Share
    """Delta at which it is stated."""
    ceiling: Number
    """The most that an attack which is always right would have shown."""
    auc: Share | None
    """Area under the ROC curve of the scores behind it."""
    auc_interval: tuple[Number, Number] | None
    """Its 95% interval."""
    noise: Number | None
    """Standard deviation of the noise over C, as measured on vectors that were not planted."""
    noise_interval: tuple[Number, Number] | None
    """Its 95% interval."""
    noise_planned: Positive
    """The same by the Plan."""
    noise_refuted: bool
    """Whether less was measured than chance allows."""
    drawn: Number | None
    """How often a planted vector was drawn, on average, as measured."""
    drawn_standard_error: Number | None
    """Of it."""
    drawn_planned: Number
    """The same by the Plan."""
    drawn_refuted: bool
    """Whether more was measured than chance allows."""
    weights: WeightsAudit | None = None
    """What the weights alone show; absent where the first ones were not kept."""


class Audit(Record):
    """The audit of these weights with planted canaries; null where none is published, as without differential privacy."""

    verdict: Literal["falsified", "consistent", "inconclusive", "no_claim"]
    """falsified, consistent or inconclusive; no_claim for a run that claims nothing."""
    verdict_reason: str
    """Why."""
    epsilon_lower_bound: Bound
    attacks: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.+-]+$")], Attack]
    """Attacks on the least repeated canaries, by name."""
    exposure: ByCopies[Exposure]
    """How planted secrets rank among ones never planted, by how often they were planted."""
    extraction: ByCopies[Extraction]
    """How many secrets the model completes word for word, by how often they were planted."""
    controls: Controls
    canaries: Canaries
    audits_run: AtLeast1
    """How often this run was audited."""
    commitment: str | None
    """Hash of the canaries and their coins, fixed before training."""
    weights: dict[Text, Sha256]
    """SHA-256 of the weight files that were attacked."""
    gradient: GradientAudit | None = None


class MergedFrom(Record):
    """The adapter of which these weights are a merged copy; absent or null where they are what the run wrote."""

    files: dict[Text, Sha256]
    """SHA-256 of its files."""


class BaseModelName(Record):
    """The model that was tuned."""

    name: str
    """Hub id, builtin name, or last part of a directory."""
    revision: str | None
    """Commit on the Hub; null where it came from elsewhere."""
    covered: Literal[False]
    """Its training data are never covered by this run."""


class _Statement(Record):
    """What stands in every statement, with a guarantee or without."""

    schema_version: Literal[2]
    """Version of this schema."""
    guarantee: bool
    """Whether the run gives a guarantee."""
    released: Literal["adapter weights", "model weights"]
    """What the run releases; no checkpoint and no optimizer state."""
    dataset: str
    """Public name of the training data: as the ledger knows them, or the last part of where they lay."""
    data_public: bool
    """Whether the recipe declares the training data public."""
    steps: Steps
    status: Literal["completed", "interrupted"]
    """How the run ended."""
    composed: Composed | None
    lineage: Lineage | None
    base_model: BaseModelName
    not_covered: Annotated[tuple[str, ...], Field(min_length=1)]
    """Every access to data, and every property, that the guarantee is not about."""
    deviations: tuple[str, ...]
    """What departed from the recipe or the usual course, each named."""
    tuning: str | None
    """How hyper-parameters were chosen, in the words of whoever trained the model; null: not stated."""
    contact: str | None
    """Whom to ask; null: nobody is named."""
    audit: Audit | None
    software: dict[Text, str]
    """Versions of dpllm, Python and the packages that the result depends on."""
    hardware: dict[Text, str | bool | int | float | tuple[str, ...]]
    """What the run ran on, without names of machines."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day on which the run started, in UTC."""
    recipe_digest: Sha256
    """SHA-256 of the recipe without directories, addresses and seeds."""
    files: dict[Text, Sha256]
    """SHA-256 of every file published beside the card, by its path."""
    merged_from: MergedFrom | None = None
    statistics: BesideRun | None = None
    labels: Labels | None = None
    labels_before: tuple[Labels, ...] = ()
    """Draws of labels that taught the models before this one, the latest first; absent where there are none."""
    template: str | None = None
    """How prompt and completion became one text, of a recipe that says so; `dpllm generate` writes prompts by it."""


class Guaranteed(_Statement, Terms):
    """Of a run that gives a guarantee: its terms stand at the top level."""

    guarantee: Literal[True]
    """Whether the run gives a guarantee."""

    @property
    def terms(self) -> Terms:
        """What is guaranteed."""
        return self


class NotGuaranteed(_Statement):
    """Of a run that gives none: the terms that it was planned with are no promise, and stand apart."""

    guarantee: Literal[False]
    """Whether the run gives a guarantee."""
    reason: Text
    """Why there is no guarantee; absent where there is one."""
    attempted: Terms | None = None
    """The terms that the run was planned with, where they are no guarantee; absent for a run without differential privacy."""

    @property
    def terms(self) -> Terms | None:
        """What was attempted; None for a run without differential privacy."""
        return self.attempted


PrivacyRecord = Guaranteed | NotGuaranteed


@cache
def _reader() -> TypeAdapter[PrivacyRecord]:
    return TypeAdapter(Annotated[PrivacyRecord, Field(discriminator="guarantee")])


def schema() -> Json:
    """The JSON Schema (draft 2020-12) of a privacy statement."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_reader().json_schema()}


def read(block: object) -> PrivacyRecord:
    """A privacy statement, checked.

    Args:
        block: Any JSON value.

    Raises:
        NotAStatement: It does not keep to the schema.
    """
    try:
        text = json.dumps(block, allow_nan=False, sort_keys=True)
        record = _reader().validate_json(text)
    except ValidationError as error:
        raise NotAStatement.of(error, tag=True) from None
    except (TypeError, ValueError, RecursionError):
        raise NotAStatement(["the block: holds what JSON has no word for"]) from None
    if json.dumps(record.to_json(), sort_keys=True) != text:  # pydantic takes 1 for true where only true is allowed
        raise NotAStatement(["the block: holds a number in place of true, false or a whole number"])
    return record
