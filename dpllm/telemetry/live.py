"""What a run shows while it goes on.

Comes in: a run that was prepared, its steps, its evaluations. Goes out: files, an endpoint's page, calls of trackers. Only
the main process of a run shows anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dpllm.config import RunConfig
from dpllm.errors import DpllmError
from dpllm.report import words
from dpllm.rundir import RunDir
from dpllm.telemetry import textfile, trackers
from dpllm.telemetry.endpoint import Endpoint
from dpllm.telemetry.ledger import label
from dpllm.telemetry.metrics import RunValues, run_families
from dpllm.telemetry.record import clip_fraction, model_label, of_record, promises, unnoised
from dpllm.telemetry.trackers import Trackers

if TYPE_CHECKING:
    from dpllm.prepare import Prepared

INTERVAL_SECONDS = 5.0
"""At most so often is a file written: a node exporter reads every 15 seconds or so."""


class Telemetry:
    """Metrics and trackers of one run, from before its reservation to its end; use it in a ``with`` statement.

    Guarantee:
        Without ``telemetry.private_metrics``, what is shown depends on the training data through released values alone,
        and on evaluation data only where they are declared public (side channels such as the time of a step aside).
    """

    def __init__(self, config: RunConfig, run: RunDir, *, main: bool = True) -> None:
        """Checks everything that the recipe asks for, and starts to listen.

        Args:
            config: The recipe.
            run: The run directory.
            main: Whether this is the main process; no other shows anything.

        Raises:
            ConfigError: A port that is taken, a directory that is not there, a tracker that is not installed.
        """
        settings = config.telemetry
        self._config, self._run = config, run
        self._directory: Path | None = None
        self._endpoint: Endpoint | None = None
        self._trackers: Trackers | None = None
        self._values: RunValues | None = None
        self._due, self._told = 0.0, False
        self._on = main and bool(settings.textfile or settings.port or settings.trackers)
        if not self._on:
            return
        trackers.check(settings.trackers)
        self._directory = textfile.check(settings.textfile, run) if settings.textfile else None
        self._endpoint = Endpoint(settings.port) if settings.port else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trackers:
            self._trackers.finish()
        if self._endpoint:
            self._endpoint.close()

    def begin(self, p: Prepared, epsilon: float | None) -> None:
        """Shows a run that is about to take its first step.

        Args:
            p: The prepared run.
            epsilon: Upper bound on what earlier steps of it spent.
        """
        if not self._on:
            return
        promised = p.plan if promises(p.config, p.lineage) else None
        self._values = RunValues(
            model=model_label(p.run),
            base_model=words.public_name(p.config.model.name_or_path),
            dataset=words.public_name(p.config.data.train),
            run_id=p.claims[0][0] if p.claims else "",
            state="running",
            step=p.first_step,
            steps_planned=p.schedule.num_steps,
            epsilon_consumed=epsilon if promised else None,
            stated_epsilon=promised.epsilon if promised else None,
            delta=promised.delta if promised else None,
            noise_multiplier=p.plan.noise_multiplier if p.plan else None,
        )
        if p.ledger and p.claims:
            account = p.ledger.reservation(p.claims[0][0]).dataset
            self._values = replace(self._values, dataset=label(account))
        if self._config.telemetry.trackers:
            names, where = self._config.telemetry.trackers, p.run.private / "trackers"
            self._trackers = Trackers(names, self._values.model, where, _about(p, self._values))
        self._show()

    def step(
        self, step: int, epsilon: float | None, rate: float, released: Mapping[str, float], private: Mapping[str, Any]
    ) -> None:
        """Shows one step.

        Args:
            step: Logical batches executed.
            epsilon: Upper bound on what they spent.
            rate: The learning rate.
            released: Values of this step that carry noise and are accounted.
            private: Un-noised figures of it, with the keys units, clipped and loss; read with private metrics only.
        """
        if self._values is None:
            return
        if self._values.stated_epsilon is None:  # nothing was released with noise that protects anybody
            epsilon, released = None, {}
        values = replace(self._values, step=step, epsilon_consumed=epsilon, clip_fraction=clip_fraction(released))
        shown: dict[str, float | None] = {
            "epsilon_consumed": values.epsilon_consumed,
            "learning_rate": rate,
            **released,
        }
        if self._config.telemetry.private_metrics:
            seen = unnoised(private, clips=values.noise_multiplier is not None)
            values = replace(values, private=seen)
            shown |= {"private_loss": seen.loss, "private_clip_fraction": seen.clip_fraction}
        self._values = values
        if self._trackers:
            self._trackers.log(shown, step)
        if time.monotonic() >= self._due:
            self._show()

    def evaluated(self, step: int, loss: float | None, accuracy: float | None) -> None:
        """Hands an evaluation to the trackers, if its data are public and the weights released, or private metrics allowed."""
        promised = self._values is not None and self._values.stated_epsilon is not None
        released = self._config.data.eval_public and (promised or self._config.data.public)
        if self._trackers and (released or self._config.telemetry.private_metrics):
            self._trackers.log({"eval_loss": loss, "eval_accuracy": accuracy}, step)

    def end(self) -> None:
        """Shows what run.json says of the end; the files keep it."""
        if self._values is None:
            return
        try:
            last, self._values = self._values, of_record(self._run, self._config)
            if self._values.step == last.step:  # not read again, and rounded in the same way
                self._values = replace(self._values, epsilon_consumed=last.epsilon_consumed)
        except DpllmError as error:
            self._tell(error)
        self._show()

    def _show(self) -> None:
        """Shows everything."""
        assert self._values is not None
        self._due = time.monotonic() + INTERVAL_SECONDS
        if not (self._directory or self._endpoint):
            return
        families = run_families(self._values)
        if self._endpoint:
            self._endpoint.show(families)
        try:
            if self._directory:
                textfile.write(textfile.run_file(self._directory, self._values.model), families)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            textfile.tell(error)
        self._told = True


def _about(p: Prepared, values: RunValues) -> dict[str, trackers.Value | None]:
    """A run in public values, for the trackers' configuration."""
    config, plan = p.config, p.plan
    about: dict[str, trackers.Value | None] = {
        "model": values.model,
        "base_model": values.base_model,
        "dataset": values.dataset,
        "run_id": values.run_id,
        "adapter": config.adapter.method,
        "optimizer": config.train.optimizer,
        "learning_rate": config.train.learning_rate,
        "lr_scheduler": config.train.lr_scheduler,
        "warmup": config.train.warmup,
        "weight_decay": config.train.weight_decay,
        "max_length": config.data.max_length,
        "num_steps": p.schedule.num_steps,
        "expected_batch_size": p.schedule.expected_batch_size,
        "stated_epsilon": values.stated_epsilon,
        "stated_delta": values.delta,
        "noise_multiplier": values.noise_multiplier,
    }
    if plan:
        about |= {
            "unit": plan.unit,
            "neighbouring_relation": plan.neighbouring_relation,
            "clipping": plan.clipping,
            "max_grad_norm": plan.max_grad_norm,
            "sampling_rate": plan.schedule.sampling_rate,
        }
    return about
