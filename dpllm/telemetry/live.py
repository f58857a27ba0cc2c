"""What a run shows while it goes on, through a file, a port and experiment trackers; and epsilon meanwhile.

Comes in: the record of a run that begins, its steps, its evaluations. Goes out: a ``.prom`` file, an endpoint's page on the
loopback interface, calls of trackers. Only the main process of a run shows anything, and no failure here ends a run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry, start_http_server

from dpllm.errors import ConfigError, DpllmError
from dpllm.files import RunPaths, resolved
from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig, TelemetryConfig
from dpllm.statement.run_files import read_plan
from dpllm.telemetry import metrics
from dpllm.telemetry.callbacks import Callbacks
from dpllm.telemetry.metrics import INTERVAL, AuditFigures, Families, RunValues

if TYPE_CHECKING:
    from transformers import TrainerCallback

INTERVAL_SECONDS = 5.0
"""At most so often is a file written: a node exporter reads every 15 seconds or so."""
LOOPBACK = "127.0.0.1"
PROJECT = "dpllm"
Value = bool | int | float | str


class Telemetry:
    """Metrics and trackers of one run, from before its reservation to its end; use it in a ``with`` statement.

    Guarantee:
        Without ``telemetry.private_metrics``, what is shown depends on the training data through released values alone,
        and on evaluation data only where they are declared public (side channels such as the time of a step aside).
    """

    def __init__(
        self, config: RunConfig, run: RunPaths, *, main: bool = True, callbacks: Sequence[TrainerCallback] = ()
    ) -> None:
        """Checks everything that the recipe asks for, and starts to listen; only the ``main`` process shows anything.

        Raises:
            ConfigError: A port that is taken, a directory that is not there, a callback that is none.
        """
        settings = config.telemetry
        self.callbacks = Callbacks(callbacks, config)
        self._config, self._run = config, run
        self._directory: Path | None = None
        self._trackers: Trackers | None = None
        self._values: RunValues | None = None
        self._promised, self._told, self._due = False, False, 0.0
        self._shown, self._open = Families(), contextlib.ExitStack()
        self._on = main and bool(settings.textfile or settings.port or settings.trackers or callbacks)
        if not self._on:
            return
        if settings.textfile:
            self._directory = _checked(settings.textfile, run)
        if settings.port:
            registry = CollectorRegistry()
            registry.register(self._shown)
            try:
                server, _ = start_http_server(settings.port, addr=LOOPBACK, registry=registry)
            except OSError as error:
                raise ConfigError(
                    f"telemetry.port {settings.port}: cannot be opened ({error.strerror}), so Prometheus could not scrape the "
                    "run. Set another port, or null."
                ) from None
            self._open.callback(server.server_close)
            self._open.callback(server.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, step: int, epsilon: float | None, *, base_holds: bool) -> None:
        """Shows a run whose record stands, after ``step`` logical batches that spent at most ``epsilon``.

        ``base_holds`` says whether the models before this one leave it a guarantee.
        """
        if not self._on:
            return
        self._promised = base_holds and derived.deviations(self._config)[0] is None
        try:
            values = metrics.of_record(self._run, self._config, promised=self._promised)
            self._values = replace(
                values, state="running", step=step, epsilon_consumed=epsilon if self._promised else None
            )
            if self._config.telemetry.trackers:
                settings, where = self._config.telemetry, self._run.private / "trackers"
                self._trackers = Trackers(settings, values.model, where, _about(self._config, self._run, values))
                self._open.callback(self._trackers.finish)
        except DpllmError as error:
            self._tell(error)
        self._show()

    def step(self, step: int, epsilon: float | None, rate: float, private: Mapping[str, Any]) -> None:
        """Shows a step; ``private`` values (units, clipped, loss) carry no noise, and are read with private metrics only."""
        if self._values is None:
            return
        if not self._promised:  # nothing was released with noise that protects anybody
            epsilon = None
        seen: dict[str, float | None] = {}
        if self._config.telemetry.private_metrics:
            seen = metrics.unnoised(private, clips=self._values.noise_multiplier is not None)
        self._values = replace(self._values, step=step, epsilon_consumed=epsilon, **seen)  # type: ignore[arg-type]
        told = {"epsilon_consumed": epsilon, "learning_rate": rate, **seen}
        if self._trackers:
            self._trackers.log(told, step)
        self.callbacks.step(step, told)
        if time.monotonic() >= self._due:
            self._show()

    def evaluated(self, step: int, loss: float | None, accuracy: float | None) -> None:
        """Hands an evaluation to the trackers, if its data are public and the weights released, or private metrics allowed."""
        released = self._config.data.eval_public and (self._promised or self._config.data.public)
        if self._trackers and (released or self._config.telemetry.private_metrics):
            self._trackers.log({"eval_loss": loss, "eval_accuracy": accuracy}, step)

    def sampled(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Hands texts to the trackers; the caller says by calling that the weights, which wrote them, may leave."""
        if self._trackers:
            texts = {f"sample_{n}": f"{one['prompt']} -> {one['text']}" for n, one in enumerate(samples, start=1)}
            self._trackers.log_texts(texts, step)

    def end(self) -> None:
        """Shows what run.json says of the end; the file keeps it."""
        if self._values is None:
            return
        try:
            values = metrics.of_record(self._run, self._config, promised=self._promised)
            # Not computed again, which would round it in another way.
            self._values = replace(values, epsilon_consumed=self._values.epsilon_consumed)
        except DpllmError as error:
            self._tell(error)
        self._show()

    def _show(self) -> None:
        if self._values is None:
            return
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._shown.now = tuple(metrics.run_families(self._values))
        try:
            if self._directory:
                metrics.write(metrics.file_of(self._directory, "run", self._values.model), self._shown.now)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            _tell(error)
        self._told = True


def _checked(directory: str, run: RunPaths) -> Path:
    """Where metrics can be written, as the recipe says."""
    path = Path(directory)
    if any(resolved(path).is_relative_to(resolved(part)) for part in (run.private, run.export)):
        raise ConfigError(
            f"telemetry.textfile {directory} lies in a part of the run directory that is replaced by a new run or published. "
            "Set it to the directory that the node exporter reads."
        )
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        what, fix = (
            ("cannot be written to", "Ask for write access") if path.is_dir() else ("no such directory", "Make it")
        )
        raise ConfigError(
            f"telemetry.textfile {directory}: {what}, so no metrics would be read. {fix}, or set it to the directory that the "
            "node exporter reads."
        )
    return path


def _about(config: RunConfig, run: RunPaths, values: RunValues) -> dict[str, Value | None]:
    """A run in public values, for the trackers' configuration."""
    train = ("optimizer", "momentum", "learning_rate", "lr_scheduler", "warmup", "weight_decay")
    promise = ("unit", "neighbouring_relation", "clipping", "max_grad_norm", "sampling_rate")
    plan = read_plan(run).to_json() if values.noise_multiplier is not None else {}
    return {
        **{name: getattr(values, name) for name in ("model", "base_model", "dataset", "run_id")},
        "adapter": config.adapter.method,
        **{name: getattr(config.train, name) for name in train},
        "max_length": config.data.max_length,
        "num_steps": values.steps_planned,
        "expected_batch_size": config.train.batch_size,
        "stated_epsilon": values.stated_epsilon,
        "stated_delta": values.delta,
        "noise_multiplier": values.noise_multiplier,
        **{name: plan.get(name) for name in promise},
    }


def publish_audit(run: RunPaths, config: RunConfig, audited: AuditFigures | None) -> None:
    """Writes a run's file, if its recipe has one, with what the audit published; a failure is told, and ends nothing."""
    if not config.telemetry.textfile:
        return
    try:
        values = metrics.of_record(run, config, audited=audited)
        path = metrics.file_of(Path(config.telemetry.textfile), "run", values.model)
        metrics.write(path, metrics.run_families(values))
    except (OSError, DpllmError) as error:
        _tell(error)


def _tell(error: Exception) -> None:
    """One line on standard error."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    print(f"dpllm: metrics could not be written ({why or type(error).__name__}); training goes on.", file=sys.stderr)


class Trackers:
    """The trackers of one run, through accelerate. They take nothing along by themselves, as far as they can be told.

    What may leave is decided by the caller. One that fails gets nothing more.
    """

    def __init__(
        self, settings: TelemetryConfig, model: str, directory: Path, about: Mapping[str, Value | None]
    ) -> None:
        """Starts those of ``telemetry.trackers``; ``about`` has public values without paths, ``directory`` is private."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # wandb would send the command line, paths, the state of git, standard output and the load; mlflow the program's path.
        off = dict.fromkeys(("disable_git", "disable_code", "x_disable_meta", "x_disable_stats"), True)
        run, group = settings.run_name or model, {"group": settings.group} if settings.group else {}
        entity = {"entity": settings.entity} if settings.entity else {}
        options: dict[str, dict[str, Any]] = {
            "wandb": {"name": run, "dir": str(directory), "settings": {"console": "off", **off}, **group, **entity},
            "mlflow": {"run_name": run, "tags": {"mlflow.source.name": PROJECT, **group}},
            "trackio": {"name": run, **group},
        }
        self._started: dict[str, Any] = {}
        for name in settings.trackers:
            with self._dropped_if_it_fails(name):
                kind = LOGGER_TYPE_TO_CLASS[name]
                where = (str(directory),) if kind.requires_logging_directory else ()
                tracker = kind(settings.project, *where, **options.get(name, {}))
                tracker.start()
                self._started[name] = tracker
                tracker.store_init_configuration(_known(about))

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Hands over what is known of a step; None is left out."""
        for name, tracker in tuple(self._started.items()) if _known(values) else ():
            with self._dropped_if_it_fails(name):
                tracker.log(_known(values), step=step)

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Hands over texts; to mlflow as a file, because accelerate gives it numbers alone."""
        for name, tracker in tuple(self._started.items()):
            with self._dropped_if_it_fails(name):
                if name == "mlflow":
                    importlib.import_module(name).log_text("\n".join(texts.values()), f"samples/step-{step}.txt")
                else:
                    tracker.log(dict(texts), step=step)

    def finish(self) -> None:
        """Ends them."""
        for name, tracker in tuple(self._started.items()):
            with self._dropped_if_it_fails(name):
                tracker.finish()
        self._started.clear()

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # which may show an address with a password
            self._started.pop(name, None)
            why = re.sub(r"//[^/@\s]*@", "//", " ".join(f"{type(error).__name__} {error}".split()))[:200]
            print(f"dpllm: the tracker {name} failed ({why}) and is switched off.", file=sys.stderr)


def _known(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


class EpsilonSpent:
    """An upper bound on the epsilon of the steps so far, which costs next to nothing.

    Guarantee:
        At least the epsilon of the steps executed, and at most the Plan's. It is computed at fifths of the run, each when
        its first step is done, and so rises in five stairs.
    """

    def __init__(self, plan: Plan | None) -> None:
        """``plan`` is None for a run without differential privacy, which has no epsilon."""
        self._plan, self._known = plan, (0, 0.0)

    def __call__(self, step: int) -> float | None:
        """The bound after ``step`` steps, counted from 1; 0 before the first."""
        if self._plan is None:
            return None
        schedule = self._plan.schedule
        if step > self._known[0]:
            fifth = -(-schedule.num_steps // 5)
            grid = min(schedule.num_steps, -(-step // fifth) * fifth)
            event, relation = self._plan.event_after(grid), self._plan.neighbouring_relation
            value = accounting.epsilon(event, self._plan.delta, relation, interval=INTERVAL)
            self._known = (grid, min(value, self._plan.epsilon))
        return self._known[1]

    def words(self, step: int) -> str:
        """The same for a progress line."""
        value = self(step)
        if self._plan is None or value is None:
            return "no differential privacy"
        return f"epsilon <= {value:.2f} of {self._plan.epsilon:.2f}"
