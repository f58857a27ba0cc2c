"""The privacy statement of a run as one typed record: what privacy.json holds.

Comes in: a JSON value. Goes out: a ``PrivacyRecord``, or sentences about what is wrong; the JSON Schema of all that may stand
there. Must not know how a statement is made, worded or checked.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from dpllm.privacy.plan import Plan
from dpllm.records import Json, NotAStatement, Record, Sha256, Text
from dpllm.statement.audit import AuditRecord
from dpllm.statement.fields import Composed, Lineage, Randomness, Steps
from dpllm.statement.released import BesideRun, Labels

SCHEMA_VERSION = 4


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

    schema_version: Literal[4]
    """Version of this schema."""
    guarantee: bool
    """Whether the run gives a guarantee."""
    released: Literal["adapter weights", "model weights"]
    """What the run releases; no checkpoint and no optimizer state."""
    dataset: str
    """Public name of the training data: as the ledger knows them, or the last part of where they lay."""
    data_public: bool
    """Whether the recipe declares the training data public."""
    optimizer: Literal["adamw", "sgd"]
    """Which optimizer took the noised sums, or plain gradients without differential privacy."""
    randomness: Randomness | None
    """Where sampling and noise came from; null without differential privacy."""
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
    audit: AuditRecord | None
    """Of these weights, as export/audit/audit.json holds it; null where none is published, as without differential privacy."""
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


class Guaranteed(_Statement):
    """Of a run that gives a guarantee."""

    guarantee: Literal[True]
    """Whether the run gives a guarantee."""
    plan: Plan
    """What is promised, as plan.json holds it."""
    randomness: Randomness
    """Where sampling and noise came from; null without differential privacy."""


class NotGuaranteed(_Statement):
    """Of a run that gives none: the Plan that it had is no promise, and stands under another name."""

    guarantee: Literal[False]
    """Whether the run gives a guarantee."""
    reason: Text
    """Why there is no guarantee; absent where there is one."""
    attempted: Plan | None = None
    """plan.json, which is no guarantee of this run; absent for a run without differential privacy."""

    @model_validator(mode="after")
    def _of_a_private_run(self) -> Self:
        if (self.randomness is None) != (self.attempted is None):
            raise ValueError("randomness and attempted are both there, or neither is")
        return self

    @property
    def plan(self) -> Plan | None:
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
