"""audit.json as one typed record: the results of an audit.

Comes in: a JSON value. Goes out: an ``AuditRecord``, or one line that names a wrong field; the JSON Schema of audit.json. Must
not know how a figure is computed, worded or checked, nor import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dpllm.errors import ConfigError
from dpllm.files import read_json
from dpllm.privacy.plan import AuditSettings
from dpllm.records import (
    AtLeast1,
    Between0And1,
    ByCopies,
    Count,
    Json,
    NotAStatement,
    Number,
    Record,
    Sha256,
    Share,
    Text,
)
from dpllm.statement.audit_bounds import Claim, GradientAudit, GroupClaim, OneRunBound
from dpllm.statement.formatting import bound, html_table, proven

SCHEMA_VERSION = 4
"""Of audit.json; versions 1 to 3 are refused."""

CONTROL_LEVEL = 0.001
"""A control counts as seen, or as failed, at this level: a true control fails once in a thousand audits."""

Interval = tuple[Number, Number]
AttackName = Annotated[str, Field(pattern=r"^[a-z0-9_.+-]+$")]
Probability = Annotated[str, Field(pattern=r"^0\.[0-9]+$")]


class Sides(Record):
    """Counts of three sides."""

    inserted: Count
    """Of planted secrets, by the tuned model."""
    base: Count
    """Of the same ones, by the base model."""
    held_out: Count
    """Of secrets that were left out, by the tuned model."""


class MedianAttempts(Record):
    """Samples for an even chance of the median secret of three sides; null: never, or no secret."""

    inserted: Number | None
    """Of planted secrets, by the tuned model."""
    base: Number | None
    """Of the same ones, by the base model."""
    held_out: Number | None
    """Of secrets that were left out, by the tuned model."""


class AttackLimits(Record):
    """What the claim allows an attack at most."""

    tpr_at_fpr_0_01: Share = Field(alias="tpr_at_fpr_0.01")
    """Largest true-positive rate at a false-positive rate of 1%."""
    tpr_at_fpr_0_001: Share = Field(alias="tpr_at_fpr_0.001")
    """Largest true-positive rate at a false-positive rate of 0.1%."""
    auc: Share
    """Largest area under the ROC curve."""


class Attack(Record):
    """One attack on the canaries of one group."""

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
    tpr_at_0_1_percent_fpr: Share | None = Field(alias="tpr_at_0.1_percent_fpr")
    """True-positive rate at a false-positive rate of 0.1%."""
    tpr_at_0_1_percent_fpr_interval: Interval | None = Field(alias="tpr_at_0.1_percent_fpr_interval")
    """Confidence interval."""
    base_control_auc: Share | None
    """Area under the curve of the base model's loss, which saw no canary."""
    base_control_auc_interval: Interval | None
    """Confidence interval."""


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
    held_out_mean: Number | None
    """Mean exposure of the canaries that were left out."""
    largest_possible: Number
    """log2 of the number of references."""


class Bound(OneRunBound):
    """The test of the once-planted canaries."""

    method: str
    """How it was computed."""
    slope: Number | None = None
    """How much of a log-probability before training is left after it; absent where nothing was ranked."""


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


class GroupTest(OneRunBound):
    """The test of a repeated group against what the claim allows for it."""

    refuted: bool
    """Whether the bound exceeds the claim."""


class Repeated(Record):
    """What was found of canaries that were planted more often than others."""

    claim: GroupClaim | None
    """What the claim promises for so many copies."""
    attacks: dict[AttackName, Attack]
    """The attacks that need sums alone, by name."""
    test: GroupTest | None
    """Null where the claim for so many copies could not have been refuted."""


class SampledExtraction(Record):
    """One way of sampling at temperature 1."""

    discoverable: dict[Probability, ByCopies[Sides]]
    """Secrets that come out with probability p within n samples, by p and then by n."""
    never: Sides
    """Secrets that cannot come out."""
    median_attempts: MedianAttempts


class Discoverable(Record):
    """How many secrets of one group sampling gives away."""

    canaries: Sides
    """How many there are."""
    all_tokens: SampledExtraction
    """From the whole vocabulary."""
    top_k: SampledExtraction
    """From the likeliest tokens."""


class WordsControl(Record):
    """A classifier that sees words and no model."""

    auc: Number | None
    """Area under its ROC curve."""
    succeeds: bool
    """Whether it tells planted ones from the others."""
    interval: Interval
    """Of its area under the curve."""


class Controls(Record):
    """What has to hold before an audit that finds nothing means anything."""

    base_separates: bool
    """The base model, which saw no canary, tells planted ones from the others."""
    words: WordsControl | None
    """Null where there were too few canaries."""
    positive: str | None
    """Where the attack was seen to work; null: nowhere."""
    twin: str | None
    """Where the attack was seen to work on a run without privacy; empty: nowhere; null: no twin was looked at."""
    level: Between0And1
    """Of each control."""


class Summary(Record):
    """What follows from the published tables, and can be computed again by anyone."""

    schema_version: Literal[4]
    """Version of audit.json."""
    claim: Claim | None
    """What was tested; null for a run that claims nothing."""
    attacks: dict[AttackName, Attack]
    """Attacks on the least repeated canaries, by name."""
    exposure: ByCopies[Exposure]
    """How planted secrets rank among ones never planted."""
    extraction: ByCopies[Extraction]
    """How many secrets the model completes word for word."""
    sampling: ByCopies[Discoverable] | None
    """How many samples it takes to draw one; null without a token table."""
    epsilon_lower_bound: Bound
    """What once-planted canaries prove about epsilon."""
    repeated: ByCopies[Repeated]
    """The other groups."""
    gradient: GradientAudit | None = None
    controls: Controls

    verdict: Literal["falsified", "consistent", "inconclusive", "no_claim"]
    """What tests, claim and controls together allow anybody to say."""
    verdict_reason: str
    """Why."""

    def _in_words(self) -> dict[str, object]:
        lower, claim = self.epsilon_lower_bound, self.claim
        return {
            "verdict": self.verdict,
            "reason": self.verdict_reason,
            "epsilon is at least": proven(lower.value),
            "by gradient canaries, at least": self.gradient and proven(self.gradient.epsilon_lower_bound),
            "claimed epsilon": claim and bound(claim.epsilon),
        }

    def __repr__(self) -> str:
        return "Audit: " + ", ".join(f"{name} {text}" for name, text in self._in_words().items() if text is not None)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table("Audit", self._in_words())

    def by_group(self) -> dict[str, dict[str, Attack]]:
        """The attacks on each group, by how often its canaries were planted."""
        once = {str(attack.group): self.attacks for attack in self.attacks.values()}
        return once | {group: summary.attacks for group, summary in self.repeated.items()}


class CanaryGroup(Record):
    """One group."""

    candidates: Count
    """Candidates."""
    inserted: Count
    """Of these, planted by their coin."""


class CanarySettings(Record):
    """What the texts of canaries follow from, beside chance."""

    groups: ByCopies[AtLeast1]
    """Candidates by how often each was to be planted."""
    references: Count
    """Canaries that no coin could plant."""
    digits: AtLeast1 | None = None
    """Of a number; absent of other kinds."""
    tokens: AtLeast1 | None = None
    """Of random tokens; absent of other kinds."""
    place: Literal["prompt"] | None = None
    """Where a secret stands, if it is no target; absent elsewhere."""


class Canaries(Record):
    """What was planted, without its text."""

    kind: Literal["digits", "random_tokens", "new_tokens"]
    """Kind of secret."""
    settings: CanarySettings
    log2_secrets: Number
    """Size of the space that a secret was drawn from, in bits."""
    groups: ByCopies[CanaryGroup]
    """Canaries by how often each was planted."""
    references: Count
    """Canaries that no coin could plant."""
    commitment: Sha256
    """Hash of the canaries and their coins, fixed before training."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        settings = self.settings
        named = (settings.digits is not None, settings.tokens is not None)
        if named != (self.kind == "digits", self.kind == "random_tokens") or (settings.place and not settings.digits):
            raise ValueError(f"kind {self.kind} has other settings")
        return self

    @property
    def secrets(self) -> str:
        """What they hide, in words."""
        if self.kind == "new_tokens":
            return "secrets of tokens that the base model hardly expects"
        settings = self.settings
        size = f"{settings.digits} digits" if self.kind == "digits" else f"{settings.tokens} tokens"
        position = " at the end of prompts, which no row learns to predict" if settings.place == "prompt" else ""
        return f"random secrets of {size}{position}"


class AuditRecord(Summary):
    """audit.json of a run, and what its statement holds of the audit: the summary, and what needs models, texts or other runs."""

    canaries: Canaries
    settings: AuditSettings
    weights: dict[Text, Sha256]
    """SHA-256 of the weight files that were attacked, and of the settings that say how they are applied."""
    audits_run: AtLeast1
    """How many audits of this run directory were made, this one included."""
    published: bool
    """Whether it may be published: not for a run without privacy, nor where it shows other, private runs."""
    shadows: Json | None = None
    """What shadow runs showed, see ``dpllm.auditing.shadows``."""


def schema() -> Json:
    """The JSON Schema (draft 2020-12) of audit.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **AuditRecord.model_json_schema()}


def read_audit(path: Path) -> AuditRecord:
    """Reads audit.json.

    Raises:
        ConfigError: The file is missing or damaged; the message names a wrong field.
    """
    return parse_audit(read_json(path), str(path))


def parse_audit(value: object, name: str) -> AuditRecord:
    """Parses the JSON value of audit.json.

    Args:
        value: Content of audit.json.
        name: Name of the file in errors.

    Raises:
        ConfigError: The value is not an audit.
    """
    try:
        return AuditRecord.model_validate_json(json.dumps(value))
    except ValidationError as error:
        problem = NotAStatement.of(error).problems[0]
        raise ConfigError(
            f"{name}: {problem}; the file is damaged, or of another version of dpllm. Run dpllm audit again."
        ) from None
