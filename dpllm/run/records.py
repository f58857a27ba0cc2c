"""run.json as one typed value, and a finished run as Python sees it.

Comes in: a run directory. Goes out: a ``Run``, whose record was checked once. Must not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dpllm.errors import ConfigError
from dpllm.run.directory import RunDir


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)


class Guarantee(_Record):
    """Whether the promise holds."""

    holds: bool
    reason: str | None
    """Why not; None where it holds."""


class Metrics(_Record):
    """What may leave."""

    public: dict[str, Any] = {}
    """Held-out figures of public rows: nats per token, shares, tokens."""
    released: dict[str, float] = {}
    """Values with noise, which are accounted."""


class RunRecord(_Record):
    """What happened; of a run that was refused, only the first three fields."""

    status: Literal["completed", "interrupted", "refused"]
    guarantee: Guarantee
    steps_taken: int | None
    """Logical batches executed; None where the process was killed, and the ledger knows."""
    steps_planned: int | None = None
    """T of the Plan."""
    epsilon_spent: float | None = None
    """Of the whole Plan; None without differential privacy."""
    delta: float | None = None
    """Of the Plan."""
    deviations: tuple[str, ...] = ()
    """What every card must name."""
    metrics: Metrics = Metrics()
    """Public and released values."""


@dataclass(frozen=True)
class Run:
    """A run that ended, or was stopped.

    Attributes:
        directory: Its paths.
        record: What run.json says.
    """

    directory: RunDir
    record: RunRecord

    @classmethod
    def of(cls, path: str | os.PathLike[str], record: dict[str, Any]) -> Self:
        """The run in a directory whose run.json holds ``record``.

        Raises:
            ConfigError: It is no record of a run.
        """
        directory = RunDir(Path(path))
        try:
            return cls(directory, RunRecord.model_validate(record))
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise ConfigError(
                f"{directory.run}: {where} is not what a run's record says; the file is damaged."
            ) from None

    @property
    def status(self) -> str:
        """completed, interrupted or refused."""
        return self.record.status

    @property
    def epsilon(self) -> float | None:
        """What the run guarantees at ``delta``; None where it guarantees nothing."""
        return self.record.epsilon_spent if self.record.guarantee.holds else None

    @property
    def delta(self) -> float | None:
        """Of the guarantee."""
        return self.record.delta if self.record.guarantee.holds else None

    @property
    def export_dir(self) -> Path:
        """The only directory to publish."""
        return self.directory.export
