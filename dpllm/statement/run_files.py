"""plan.json and run.json as typed values: what was promised, and what happened.

Comes in: the files of a run directory. Goes out: a ``Plan`` and a ``RunRecord``, each checked once. Must not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from dpllm.errors import ConfigError
from dpllm.files import RunPaths, read_json
from dpllm.privacy.plan import Plan
from dpllm.records import Json, Number, Record, Sha256
from dpllm.statement.privacy_record import Charged, Generator, Group, Lattice, Lineage
from dpllm.statement.released import Labels

SCHEMA_VERSION = 2
"""Of plan.json and of run.json."""
COST = ("finished_at", "duration_seconds", "peak_memory_bytes")
"""What a run took. It grows with the longest row: private/summary.json has it, and run.json where all rows are public."""

Status = Literal["completed", "interrupted", "refused"]
_Kind = TypeVar("_Kind", bound=Record)


class Guarantee(Record):
    """Whether the promise holds."""

    holds: bool
    """True only where every assumption was kept to the end."""
    reason: str | None  # why not; None where it holds


class LedgerHead(Record):
    """A place in the ledger's hash chain."""

    count: int
    hash: str


class LedgerRecord(Charged):
    """What run.json says of the ledger."""

    head: LedgerHead
    group: Group | None = None


class ModelRecord(Record):
    """What was trained."""

    name_or_path: str
    commit: str | None
    architecture: str
    trainable_parameters: int
    total_parameters: int
    dropout_off: dict[str, Number] | None = None
    """Rates of the base model that were set to zero; None without differential privacy, where they hold."""
    chat_template: str | None = None
    """SHA-256 of the chat template that the recipe named in place of the model's; None where it named none."""


class Metrics(Record):
    """What may leave."""

    public: dict[str, Number | None] = Field(default={})
    """Held-out figures of public rows: nats per token, shares, tokens."""


class RunRecord(Record):
    """run.json: what happened to a run that began."""

    model_config = ConfigDict(extra="ignore")

    schema_version: Literal[2]
    status: Literal["completed", "interrupted"]
    guarantee: Guarantee
    deviations: tuple[str, ...]
    """What every card must name."""
    resumes: tuple[str, ...] = ()
    """Of these, what was noted when the run was resumed."""
    steps_planned: int
    steps_taken: int | None
    """Logical batches executed; None where the process was killed, and the ledger knows."""
    steps_lost: int = 0
    """Of these, those that no checkpoint kept and whose update is in no weights."""
    tokens_per_pass: int | None = None
    """Of a forward pass, padding included; None where each example had a pass of its own."""
    ledger: LedgerRecord | None
    dataset: str | None = None
    """The account of the data; None with differential privacy, where ``ledger`` names it."""
    lineage: Lineage | None = None
    versions: dict[str, str]
    hardware: Json
    model: ModelRecord
    manifest: dict[str, Sha256]
    """File that the run wrote -> its digest; of export/ there is none where nothing was exported. See ``run.directory``."""
    generator: Generator | None = None
    """Of noise; None without differential privacy."""
    lattice: Lattice | None = None
    """To which noise and contributions were rounded; None without differential privacy."""
    metrics: Metrics
    labels: Labels | None = None
    """Of the training pairs, where they were flipped at the source."""
    labels_before: tuple[Labels, ...] = ()
    """Draws of labels that taught the models before it."""
    started_at: str  # in UTC
    finished_at: str | None = None  # this and what follows, see COST: only where all rows are public
    duration_seconds: Number | None = None
    peak_memory_bytes: int | None = None

    @property
    def artifacts(self) -> dict[str, str]:
        """File in export/ -> SHA-256; empty if nothing was exported."""
        export = "export/"
        return {name.removeprefix(export): value for name, value in self.manifest.items() if name.startswith(export)}


def read_plan(run: RunPaths) -> Plan:
    """The Plan of a run with differential privacy; raises ConfigError if plan.json is missing or damaged."""
    return _checked(Plan, run.plan, read_json(run.plan))


def read_run(run: RunPaths) -> RunRecord:
    """The record of a run; raises ConfigError if run.json is missing or damaged, or if the run was refused."""
    value = read_json(run.run)
    if value.get("status") == "refused":
        raise ConfigError(f"{run.root}: the run was refused, so there are no weights to describe. Train first.")
    return _checked(RunRecord, run.run, value)


def read_status(run: RunPaths) -> Status | None:
    """How a run ended; None if no run is recorded."""
    if not run.run.exists():
        return None
    status: Status = read_json(run.run).get("status", "refused")
    return status


def _checked(kind: type[_Kind], path: Path, value: Json) -> _Kind:
    if (version := value.get("schema_version")) != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: has schema version {version!r}, but this version of dpllm reads only {SCHEMA_VERSION}. Audit the run and "
            "write its card with the version that trained it."
        )
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        problem = f"{field} is not what a run writes there" if field else first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{path}: {problem}, so nothing could be said of the run. The file is damaged: restore it, or train again."
        ) from None
