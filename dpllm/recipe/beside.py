"""What a recipe says beside the training: words of the card, and who may watch. Nothing here changes what trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpllm.recipe.section import Section


class CardConfig(Section):
    """What the model card says beside the numbers."""

    title: str | None = None
    """Title of the card; null: the name of the run directory."""
    license: str | None = None
    """The adapter's licence, as a Hub identifier."""
    language: str | list[str] | None = None
    """Code of the language for the Hub, such as en, or a list of them."""
    tags: list[str] = Field(default_factory=list)
    """More tags for the Hub; differential-privacy and dp-sgd are added only where there is a guarantee."""
    description: str | None = None
    """One paragraph on what the model is for."""
    contact: str | None = None
    """Contact for questions about the privacy statement."""
    tuning: str | None = None
    """How hyper-parameters were chosen: on which data, in how many runs, and whether those runs are in the ledger."""


class TelemetryConfig(Section):
    """Metrics for those who run the job. Released and public values only, unless said otherwise."""

    textfile: str | None = None
    """Directory of the node exporter's textfile collector; each run writes one .prom file there and updates it."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on the loopback interface where Prometheus can scrape the running job."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default_factory=list)
    """Experiment trackers, through accelerate. They receive released and public values only."""
    project: str = Field(default="dpllm", pattern=r"^[\w ][\w .-]*$")
    """With trackers: the project (mlflow: experiment) that the run belongs to."""
    run_name: str | None = None
    """With trackers: name of the run; null: the name of the run directory."""
    group: str | None = None
    """With trackers: the group of the run (mlflow: a tag; tensorboard has none)."""
    entity: str | None = None
    """With trackers: wandb's user or team; null: the user's default."""
    private_metrics: bool = False
    """true: metrics and trackers also receive un-noised figures of private data, such as the loss and the share of clipped
    gradients. They are outside the guarantee, and the card says so."""
