"""plan.json and run.json as typed values: what was promised, and what happened.

Comes in: the files of a run directory. Goes out: a ``PlanRecord`` and a ``RunRecord``, each checked once. Must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from dpllm.errors import ConfigError
from dpllm.files import RunPaths, digest, read_json
from dpllm.privacy.plan import AdaptiveClipping, Plan, Schedule
from dpllm.statement.fields import (
    Adaptive,
    Between0And1,
    Budget,
    CrossCheck,
    Generator,
    Group,
    Json,
    Lattice,
    Lineage,
    NotNegative,
    Number,
    Positive,
    Record,
    Sha256,
)
from dpllm.statement.stored_events import RunEvent

COST = ("finished_at", "duration_seconds", "peak_memory_bytes")
"""What a run took. It grows with the longest row: private/summary.json has it, and run.json where all rows are public."""

Status = Literal["completed", "interrupted", "refused"]
Reader = Callable[[Path], Json]
_Kind = TypeVar("_Kind", bound=Record)


class AuditSettings(Record):
    """What the audit may not choose after training."""

    alpha: Number
    """Probability that a bound exceeds the truth."""
    guesses: tuple[int, ...]
    """How many canaries the tests of membership guess."""
    guesses_in: tuple[int, ...]
    """How many of them as planted."""
    falling: tuple[int, ...] = ()
    """The same with weights that fall with the rank: how many are guessed on both sides."""
    falling_in: tuple[int, ...] = ()
    """And how many as planted alone."""
    score: Literal["calibrated"] = "calibrated"
    """Behind the lower bound."""
    version: Literal[1, 2] = 1
    """Of score and tests: 1 sums over the tokens of the secret and orders equal scores by a fixed shuffle; 2 sums over every
    token that entered the loss what its word in other rows does not explain, and equal scores count against the bound."""
    control_level: Between0And1 = 0.001
    """At which a control counts as seen, or as failed."""


class AccountantRecord(Record):
    """What computed epsilon."""

    name: str
    """Name."""
    version: str
    """Version."""
    interval: Number
    """Discretisation of the privacy loss."""


class PlanRecord(Record):
    """plan.json: the fields of ``dpllm.privacy.plan.Plan`` and of its schedule, and what was fixed with them."""

    model_config = ConfigDict(extra="allow")  # its digest is of the whole file, also of one by an older version

    schema_version: Literal[1] = 1
    """Version of the file."""
    dataset_size: int
    """N."""
    canary_slots: int
    """Of the N."""
    expected_batch_size: int
    """B."""
    sampling_rate: Positive
    """q = B / N."""
    num_steps: int
    """T."""
    unit: str
    """Whom the guarantee protects."""
    max_examples_per_unit: int | None
    """Rows that one unit may bring."""
    sampling: Literal["unit", "example"] = "unit"
    """What is drawn and clipped as a whole."""
    neighbouring_relation: Literal["zero_out", "add_or_remove_one"]
    """How neighbouring datasets differ."""
    noise_multiplier: Positive
    """sigma over C."""
    clipping: str
    """The clipping function."""
    max_grad_norm: Positive
    """C."""
    delta: Between0And1
    """Of the guarantee."""
    epsilon: NotNegative
    """Of the guarantee."""
    target_epsilon: Number
    """What the recipe asked for."""
    accountant: AccountantRecord
    """What computed epsilon."""
    event: RunEvent
    """The mechanism as a value."""
    adaptive: Adaptive | None = None
    """How adaptive clipping splits the noise."""
    coefficients: tuple[Number, ...] = ()
    """Of banded noise; empty for independent noise."""
    accountants: dict[str, Number | None] = Field(default={})
    """Epsilon by each accountant."""
    limits: dict[str, Number | None] = Field(default={})
    """What no membership test can exceed."""
    curve: tuple[tuple[Number, Number | None], ...] = ()
    """(delta, epsilon)."""
    cross_check: CrossCheck | None = None
    """A second accountant's epsilon."""
    canary_commitment: str | None
    """Hash of the canaries and their coins; None where none were planned."""
    audit: AuditSettings | None = None
    """What the audit may not choose after training."""

    @property
    def digest(self) -> str:
        """SHA-256 of the file's content."""
        return digest(self.to_json())

    def to_plan(self) -> Plan:
        """The Plan that was written."""
        values = self.to_json()
        schedule = Schedule(**{field.name: values[field.name] for field in fields(Schedule)})
        own = {field.name: values[field.name] for field in fields(Plan) if field.name in values}
        adaptive = AdaptiveClipping(**values["adaptive"]) if values.get("adaptive") else None
        own |= {"schedule": schedule, "adaptive": adaptive, "coefficients": self.coefficients, "event": self.event}
        return Plan(**own)


class Guarantee(Record):
    """Whether the promise holds."""

    holds: bool
    """True only where every assumption was kept to the end."""
    reason: str | None
    """Why not; None where it holds."""


class LedgerHead(Record):
    """A place in the ledger's hash chain."""

    count: int
    """Entries."""
    hash: str
    """Of the last of them."""


class LedgerRecord(Record):
    """What the ledger said of the run when it ended."""

    dataset: str
    """Whose account was charged."""
    entry: str | int
    """The run's reservation."""
    made_up_by: tuple[str | int, ...]
    """Further reservations, for lost steps that were repeated."""
    head: LedgerHead
    """Of the ledger."""
    budget: Budget | None
    """Of the dataset."""
    spent_epsilon: Number | None
    """Of all runs on the dataset, at the budget's delta or the run's."""
    filter_epsilon: Number | None
    """The same by the Renyi filter."""
    imported: int
    """Entries for runs made elsewhere."""
    group: Group | None = None
    """The tuning group."""


class ModelRecord(Record):
    """What was trained."""

    name_or_path: str
    """Of the base model."""
    commit: str | None
    """Of the base model on the Hub."""
    architecture: str
    """Class of the model."""
    trainable_parameters: int
    """Numbers that train."""
    total_parameters: int
    """All of them."""
    dropout_off: dict[str, Number] | None = None
    """Rates of the base model that were set to zero; None without differential privacy, where they hold."""


class Metrics(Record):
    """What may leave."""

    public: dict[str, Number | None] = Field(default={})
    """Held-out figures of public rows: nats per token, shares, tokens."""
    released: dict[str, Number] = Field(default={})
    """Values with noise, which are accounted."""


class RunRecord(Record):
    """run.json: what happened to a run that began."""

    model_config = ConfigDict(extra="ignore")

    schema_version: Literal[1] = 1
    """Version of the file."""
    status: Literal["completed", "interrupted"]
    """How it ended."""
    guarantee: Guarantee
    """Whether the promise holds."""
    deviations: tuple[str, ...]
    """What every card must name."""
    resumes: tuple[str, ...] = ()
    """Of these, what was noted when the run was resumed."""
    steps_planned: int
    """T of the Plan."""
    steps_taken: int | None
    """Logical batches executed; None where the process was killed, and the ledger knows."""
    steps_lost: int = 0
    """Of these, those that no checkpoint kept and whose update is in no weights."""
    training_digest: str | None = None
    """SHA-256 of the recipe, as far as it concerns training; None in a record of an older version."""
    plan_digest: str | None = None
    """SHA-256 of plan.json; None without differential privacy, and in a record of an older version."""
    physical_batch_size: int | None = None
    """Rows in a forward pass, at most."""
    physical_batches: tuple[tuple[int, int], ...] = ()
    """(tokens, rows) of each shape of forward pass; empty in a record of an older version."""
    self_check: Literal["whole", "cached"] | None = None
    """cached: that rows do not round by company was shown by an earlier start; None without differential privacy."""
    epsilon_spent: Number | None
    """Of the whole Plan; None without differential privacy."""
    delta: Number | None
    """Of the Plan."""
    ledger: LedgerRecord | None
    """What the ledger said; None without differential privacy."""
    lineage: Lineage | None = None
    """What the run and the models before it promise together."""
    versions: dict[str, str]
    """Of the packages."""
    hardware: Json
    """Processor, cores and GPUs."""
    model: ModelRecord
    """What was trained."""
    artifacts: dict[str, Sha256]
    """File in export/ -> its hash; empty where nothing was exported."""
    generator: Generator | None = None
    """Of noise; None without differential privacy, and in a record of an older version."""
    lattice: Lattice | None = None
    """To which noise and contributions were rounded; None without differential privacy."""
    metrics: Metrics
    """Public and released values."""
    started_at: str
    """When, in UTC."""
    finished_at: str | None = None
    """When, in UTC; only where all rows are public."""
    duration_seconds: Number | None = None
    """How long; likewise."""
    peak_memory_bytes: int | None = None
    """How much; likewise."""


def read_plan(run: RunPaths, read: Reader = read_json) -> PlanRecord:
    """The promise of a run with differential privacy.

    Args:
        run: Its paths.
        read: How a file is read as a JSON object; of strangers' files with more care.

    Raises:
        ConfigError: Missing or damaged.
    """
    return _checked(PlanRecord, run.plan, read(run.plan))


def read_run(run: RunPaths, read: Reader = read_json) -> RunRecord:
    """What happened.

    Args:
        run: Its paths.
        read: As for ``read_plan``.

    Raises:
        ConfigError: Missing or damaged, or the run was refused before it began.
    """
    value = read(run.run)
    if value.get("status") == "refused":
        raise ConfigError(f"{run.root}: the run was refused, so there are no weights to describe. Train first.")
    return _checked(RunRecord, run.run, value)


def read_status(run: RunPaths) -> Status | None:
    """How a run ended; None where no run is recorded."""
    if not run.run.exists():
        return None
    status: Status = read_json(run.run).get("status", "refused")
    return status


def _checked(kind: type[_Kind], path: Path, value: Json) -> _Kind:
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"{path}: {where} is not what a run writes there, so nothing could be said of the run. The file is damaged, or of "
            "another version of dpllm: train again."
        ) from None
