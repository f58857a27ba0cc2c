"""The privacy statement of a run as one typed, frozen record without unknown fields: the content of privacy.json.

Comes in: a JSON value. Goes out: a ``PrivacyRecord``, or sentences about what is wrong; the JSON Schema of all that may stand
there. Must not know how a statement is made, worded or checked.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from dpllm.privacy.accounting import StoredEvent
from dpllm.privacy.plan import Plan
from dpllm.recipe.sections import DeploymentConfig
from dpllm.records import (
    AtLeast1,
    Between0And1,
    Count,
    Json,
    NotAStatement,
    NotNegative,
    Number,
    Positive,
    Record,
    Sha256,
    Text,
)
from dpllm.statement.audit import AuditRecord
from dpllm.statement.released import BesideRun, Labels

SCHEMA_VERSION = 4
Generator = Literal["aes256_ctr", "philox_gpu", "philox"]
CRYPTOGRAPHIC = "aes256_ctr"


class Lattice(Record):
    """Noise and contributions were rounded to one lattice and added exactly."""

    coordinates: AtLeast1
    """How many numbers train."""
    noise_over_max_grad_norm: Positive
    """Standard deviation of the noise over C: the noise multiplier times the sensitivity, rounding counted."""


class Randomness(Record):
    """Where sampling and noise came from."""

    generator: Generator
    """Of noise; keyed by the operating system, but where a user's seed took the guarantee away."""
    secure_noise: bool
    """Whether the generator is cryptographic."""
    lattice: Lattice


class Steps(Record):
    """Logical steps."""

    planned: Count
    """Of the Plan; epsilon is for all of them."""
    taken: Count
    """Executed."""
    lost: AtLeast1 | None = None
    """Of these, how many were lost in a crash and are in no weights; absent where none were."""


class Budget(Record):
    """The budget that was set for the dataset, by a Renyi filter; null: none, it is charged without limit."""

    delta: Between0And1
    """Its delta."""
    epsilon: NotNegative
    """Its epsilon."""
    order: Number
    """Order of its filter."""


class Group(Record):
    """The tuning group of the run, whose runs were fixed together before the first of them; null for a single run."""

    delta: Between0And1
    """Delta of that epsilon."""
    epsilon: NotNegative
    """Epsilon of all of them together."""
    name: str
    """Its name."""
    runs: AtLeast1
    """How many runs it has."""


class Charged(Record):
    """What the ledger said of the run, and of all runs on its dataset, when it ended."""

    dataset: str
    """Name of the dataset in the ledger."""
    budget: Budget | None
    spent_epsilon: NotNegative | None
    """Epsilon of all runs together, as if fixed in advance; null where one gives no guarantee or none can be computed."""
    used: NotNegative | None
    """Share of the budget that all runs use, whatever runs come; null without a budget, for a final run, and where none covers
    all."""
    final: bool
    """Whether the first reservation was admitted by its exact total, spent_epsilon, and closed the dataset for good."""
    imported: Count
    """How many entries are for runs made elsewhere, as somebody stated them."""
    entry: str | int
    """This run's entry."""
    group: Group | None


class Composed(Charged):
    """The total over all runs on the dataset, as the ledger had it after this one; null where no ledger kept the run."""

    delta: Number | None
    """Delta of these epsilons."""
    entries: Count
    """Entries of the ledger at that time."""
    head: str
    """Hash of the last of these entries, which fixes all before it."""


class Ancestor(Record):
    """What the privacy statement of an earlier model says."""

    name: str
    """Its name."""
    guarantee: bool
    """Whether it states a guarantee."""
    epsilon: NotNegative | None
    """Its epsilon; null without a guarantee."""
    delta: Number | None
    """Its delta."""
    unit: str | None
    """Its unit."""
    neighbouring_relation: str | None
    """Its relation."""
    event: StoredEvent | None
    """Its accounting event; null where it has none."""
    dataset: str | None
    """Name of the dataset in its ledger."""
    entry: str | int | None
    """Its entry there."""
    files_digest: str | None
    """SHA-256 over the hashes of its files."""
    adapter: bool = False
    """Whether it is an adapter, which training started from; absent where it is a model."""


class ComposedLineage(Record):
    """Guarantee for both together where they used the same dataset; null where none can be stated."""

    epsilon: NotNegative
    """Epsilon."""
    delta: Number
    """Delta."""
    accountant: str
    """What computed it."""


class Lineage(Record):
    """What the base model states about its own training, where it has a privacy statement; null elsewhere."""

    base: Ancestor
    """The base model of this run."""
    ancestors: tuple[Ancestor, ...]
    """The models before it, the latest first; each with the fields of lineage.base."""
    same_dataset: bool
    """Whether base and run used the same dataset."""
    dataset: str | None
    """Name of the common dataset in the ledger; null where there is none."""
    composed: ComposedLineage | None
    reason: str | None
    """Why no composed guarantee is stated; null where one is."""

    @property
    def models(self) -> tuple[Ancestor, ...]:
        """All earlier models, the latest first."""
        return (self.base, *self.ancestors)

    @property
    def on_same_data(self) -> list[Ancestor]:
        """Those that learned the common dataset."""
        return [model for model in self.models if model.dataset is not None and model.dataset == self.dataset]


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
    deployment: DeploymentConfig | None = None


class Guaranteed(_Statement):
    """Of a run that gives a guarantee."""

    guarantee: Literal[True]
    """Whether the run gives a guarantee."""
    plan: Plan
    """What is promised, as plan.json holds it."""
    randomness: Randomness
    """Where sampling and noise came from; null without differential privacy."""

    @property
    def weights_epsilon(self) -> float | None:
        """Epsilon of these weights at the Plan's delta, which contain what the run started from.

        It is the run's, unless earlier models learned the same dataset: then of all together, or None if no total is stated.
        """
        if self.lineage is None or not self.lineage.same_dataset:
            return self.plan.epsilon
        return self.lineage.composed.epsilon if self.lineage.composed else None


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
        """The attempted Plan; None for a run without differential privacy."""
        return self.attempted

    @property
    def weights_epsilon(self) -> None:
        """None: nothing is guaranteed."""


PrivacyRecord = Guaranteed | NotGuaranteed


@cache
def _reader() -> TypeAdapter[PrivacyRecord]:
    return TypeAdapter(Annotated[PrivacyRecord, Field(discriminator="guarantee")])


def schema() -> Json:
    """The JSON Schema (draft 2020-12) of a privacy statement."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_reader().json_schema()}


def read(block: object) -> PrivacyRecord:
    """Parses and checks a privacy statement.

    Args:
        block: Any JSON value.

    Raises:
        NotAStatement: The value does not follow the schema.
    """
    try:
        text = json.dumps(block, allow_nan=False, sort_keys=True)
        record = _reader().validate_json(text)
    except ValidationError as error:
        raise NotAStatement.of(error, tag=True) from None
    except (TypeError, ValueError, RecursionError):
        raise NotAStatement(["the block: holds what JSON has no word for"]) from None
    if json.dumps(record.to_json(), sort_keys=True) != text:  # pydantic accepts 1 where only true is allowed
        raise NotAStatement(["the block: holds a number in place of true, false or a whole number"])
    return record
