"""Shows a run during training through a file, a port, experiment trackers and callbacks; bounds epsilon so far.

Comes in: the record of a starting run, its steps, its evaluations. Goes out: a ``.prom`` file, an endpoint's page on the
loopback interface, calls of trackers and callbacks. Only the main process of a run shows anything. No failure here ends a run,
except an error in a callback, which is the user's own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from dpllm.files import RunPaths
from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan
from dpllm.recipe.config import RunConfig, TelemetryConfig
from dpllm.recipe.names import publishable
from dpllm.statement.run_files import read_plan
from dpllm.telemetry import metrics
from dpllm.telemetry.metrics import Families, Figures, ShownRun

if TYPE_CHECKING:
    from transformers import TrainerCallback

INTERVAL_SECONDS = 5.0
"""Minimum seconds between two writes of the file: a node exporter reads it about every 15 seconds."""
LOOPBACK = "127.0.0.1"
INTERVAL = 5e-3  # of PLD's discretisation: ten times faster than for the stated epsilon; it errs upwards
Value = bool | int | float | str


class Telemetry:
    """Metrics, trackers and callbacks of one run, from before its reservation to its end; use it in a ``with`` statement.

    Guarantee:
        Without ``telemetry.private_metrics``, what is shown depends on the training data only through released values,
        and on evaluation data only if they are declared public (except for side channels such as the time of a step).
    """

    def __init__(
        self, config: RunConfig, run: RunPaths, *, main: bool = True, callbacks: Sequence[TrainerCallback] = ()
    ) -> None:
        """Checks the telemetry settings and opens the port; only the ``main`` process shows anything.

        Raises:
            ConfigError: A port is taken, a directory is missing, or a callback is not a TrainerCallback.
        """
        settings = config.telemetry
        self.callbacks = Callbacks(callbacks, config)
        self._config, self._run = config, run
        self._textfile: Path | None = None
        self._trackers: Trackers | None = None
        self._shown: ShownRun | None = None
        self._promised, self._warned, self._due = False, False, 0.0
        self._page, self._open = Families(), contextlib.ExitStack()
        self._on = main and bool(settings.textfile or settings.port or settings.trackers or callbacks)
        if self._on and settings.textfile:
            self._textfile = _checked(settings.textfile, run)
        if self._on and settings.port:
            self._listen(settings.port)

    def _listen(self, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(self._page)
        try:
            server, _ = start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.port {port}: cannot be opened ({error.strerror}), so Prometheus could not scrape the run. Set "
                "another port, or null."
            ) from None
        self._open.callback(server.server_close)
        self._open.callback(server.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, step: int, epsilon: float | None, *, base_holds: bool) -> None:
        """Shows a run that has written its record, after ``step`` logical batches that spent at most ``epsilon``.

        ``base_holds``: whether the guarantees of the models that this one is trained from hold.
        """
        if not self._on:
            return
        self._promised = base_holds and self._config.flaw is None
        try:
            record = metrics.of_record(self._run, self._config, promised=self._promised)
            if self._config.telemetry.trackers:
                about = _about(self._config, self._run, record, promised=self._promised)
                folder = self._run.private / "trackers"
                self._trackers = Trackers(self._config.telemetry, record.model, folder, about)
                self._open.callback(self._trackers.finish)
        except DpllmError as error:
            self._warn(error)
            return
        self._shown = replace(record, state="running")
        self._show({"dp_training_step": step, "dp_training_epsilon_consumed": epsilon if self._promised else None})

    def step(self, step: int, epsilon: float | None, rate: float, private: Mapping[str, Any]) -> None:
        """Shows a step; ``private`` values (units, clipped, loss) carry no noise and are shown only with private metrics."""
        if self._shown is None:
            return
        if not self._promised:  # the run has no guarantee
            epsilon = None
        released: dict[str, float | None] = {"epsilon_consumed": epsilon, "learning_rate": rate}
        figures: dict[str, float | None] = {"dp_training_step": step, "dp_training_epsilon_consumed": epsilon}
        if self._config.telemetry.private_metrics:
            clips = self._config.privacy.enabled and private["units"]
            loss, share = private["loss"], private["clipped"] / private["units"] if clips else None
            released |= {"private_loss": loss, "private_clip_fraction": share}
            figures |= {"dp_training_private_loss": loss, "dp_gradient_clip_fraction": share}
        if self._trackers:
            self._trackers.log(released, step)
        self.callbacks.step(step, released)
        self._show(figures, now=time.monotonic() >= self._due)

    def evaluated(self, step: int, loss: float | None, accuracy: float | None) -> None:
        """Sends an evaluation to the trackers if its data are public and the weights released, or private metrics are allowed."""
        released = self._config.data.eval_public and (self._promised or self._config.data.public)
        if self._trackers and (released or self._config.telemetry.private_metrics):
            self._trackers.log({"eval_loss": loss, "eval_accuracy": accuracy}, step)

    def end(self) -> None:
        """Shows the end as run.json records it; the file keeps it."""
        if self._shown is None:
            return
        consumed = self._shown.figures.get("dp_training_epsilon_consumed")
        try:
            record = metrics.of_record(self._run, self._config, promised=self._promised)
        except DpllmError as error:
            self._warn(error)
            return
        self._shown = replace(record, figures={**self._shown.figures, **record.figures})
        # An interrupted run has consumed only the epsilon of its own steps.
        self._show({"dp_training_epsilon_consumed": consumed})

    def _show(self, figures: Figures, *, now: bool = True) -> None:
        """Stores new figures, and shows all of them ``now`` or together with later ones."""
        assert self._shown is not None
        self._shown = replace(self._shown, figures={**self._shown.figures, **figures})
        if not now:
            return
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._page.now = tuple(metrics.run_families(self._shown))
        try:
            if self._textfile:
                metrics.write(metrics.file_of(self._textfile, self._shown.model), self._page.now)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            _warn(error)
        self._warned = True


def _checked(directory: str, run: RunPaths) -> Path:
    path = Path(directory)
    if run.replaces(path) or not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"telemetry.textfile {directory}: is no directory outside the run's private/ and export/ that can be written to, so "
            "no metrics would be read. Set it to the directory that the node exporter reads."
        )
    return path


def _about(config: RunConfig, run: RunPaths, shown: ShownRun, *, promised: bool) -> dict[str, Value | None]:
    """The public values of a run, for the trackers' configuration: its settings, and its Plan if it promises something."""
    plan = read_plan(run).to_json() if promised and config.privacy.enabled else {}
    settings = {**publishable(config).train.model_dump(), **plan}
    return {
        **{name: value for name, value in settings.items() if isinstance(value, Value)},
        **shown.names,
        "base_model": shown.base_model,
        "adapter": config.adapter.method,
        "max_length": config.data.max_length,
    }


def publish_audit(run: RunPaths, config: RunConfig, audited: Figures) -> None:
    """Adds published audit figures to a run's metrics file, if its recipe sets one; a failure is only reported."""
    if not config.telemetry.textfile:
        return
    try:
        record = metrics.of_record(run, config)
        families = metrics.run_families(replace(record, figures={**record.figures, **audited}))
        metrics.write(metrics.file_of(config.telemetry.textfile, record.model), families)
    except (OSError, DpllmError) as error:
        _warn(error)


def _warn(error: Exception) -> None:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    print(f"dpllm: metrics could not be written ({reason or type(error).__name__}); the run goes on.", file=sys.stderr)


class Trackers:
    """The trackers of one run, through accelerate, with everything that they would send by themselves switched off.

    The caller decides what may be published. A tracker that fails receives no further values.
    """

    def __init__(
        self, settings: TelemetryConfig, model: str, directory: Path, about: Mapping[str, Value | None]
    ) -> None:
        """Starts the trackers of ``telemetry.trackers``; ``about`` has public values without paths, ``directory`` is private."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # wandb would send the command line, paths, git state, standard output and system load; mlflow the program's path.
        switches = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats")
        settings_of_wandb = {"console": "off", **dict.fromkeys(switches, True)}
        run, group = settings.run_name or model, {"group": settings.group} if settings.group else {}
        entity = {"entity": settings.entity} if settings.entity else {}
        options: dict[str, dict[str, Any]] = {
            "wandb": {"name": run, "dir": str(directory), "settings": settings_of_wandb, **group, **entity},
            "mlflow": {"run_name": run, "tags": {"mlflow.source.name": "dpllm", **group}},
            "trackio": {"name": run, **group},
        }
        self._started: dict[str, Any] = {}
        for name in settings.trackers:
            with self._dropped_if_it_fails(name):
                kind = LOGGER_TYPE_TO_CLASS[name]
                logging_directory = (str(directory),) if kind.requires_logging_directory else ()
                tracker = kind(settings.project, *logging_directory, **options.get(name, {}))
                tracker.start()
                self._started[name] = tracker
                tracker.store_init_configuration(_not_none(about))

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Sends the values of a step, except those that are None."""
        for name, tracker in tuple(self._started.items()) if _not_none(values) else ():
            with self._dropped_if_it_fails(name):
                tracker.log(_not_none(values), step=step)

    def finish(self) -> None:
        """Ends all trackers."""
        for name, tracker in tuple(self._started.items()):
            with self._dropped_if_it_fails(name):
                tracker.finish()
        self._started.clear()

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # its message may contain an address with a password
            self._started.pop(name, None)
            reason = re.sub(r"//[^/@\s]*@", "//", " ".join(f"{type(error).__name__} {error}".split()))[:200]
            print(f"dpllm: the tracker {name} failed ({reason}) and is switched off.", file=sys.stderr)


def _not_none(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


class Callbacks:
    """transformers' callbacks of one run, called as a Trainer calls them, without model, optimizer or batch.

    Only the main process of a run calls them.
    """

    def __init__(self, callbacks: Sequence[TrainerCallback], config: RunConfig) -> None:
        """Prepares the arguments of the callbacks; calls none of them.

        Raises:
            ConfigError: An object is not a TrainerCallback.
        """
        self._callbacks = tuple(callbacks)
        if not callbacks:
            return
        from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

        for callback in self._callbacks:
            if not isinstance(callback, TrainerCallback):
                raise ConfigError(
                    f"callbacks: holds a {type(callback).__name__}. Give instances of subclasses of transformers.TrainerCallback."
                )
        # Its constructor would create a new accelerate state, possibly with another device.
        self._settings: Any = object.__new__(TrainingArguments)
        for part in dataclasses.fields(TrainingArguments):
            make = part.default_factory
            setattr(self._settings, part.name, part.default if make is dataclasses.MISSING else make())
        train = config.train
        vars(self._settings).update(
            output_dir=config.output_dir,
            run_name=config.telemetry.run_name,
            report_to=[],
            optim=train.optimizer,
            num_train_epochs=train.epochs,
            per_device_train_batch_size=train.batch_size,
            lr_scheduler_type=train.lr_scheduler,
            warmup_steps=train.warmup,  # a share if below 1
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            seed=train.seed,
        )
        self._state, self._control = TrainerState(), TrainerControl()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def stop(self) -> bool:
        """Whether a callback has set ``control.should_training_stop``."""
        return bool(self._callbacks) and self._control.should_training_stop

    def begin(self, step: int, total: int) -> None:
        """``on_train_begin``, after ``step`` of ``total`` steps."""
        if self._callbacks:
            self._state.global_step = step
            self._state.max_steps = self._settings.max_steps = total
            self._call("on_train_begin")

    def step(self, step: int, released: Mapping[str, float | None]) -> None:
        """``on_log`` with the released values of the step, then ``on_step_end``."""
        if self._callbacks:
            logs = _not_none(released)
            self._state.global_step = step
            self._state.log_history.append({**logs, "step": step})
            self._call("on_log", logs=dict(logs))
            self._call("on_step_end")

    def end(self) -> None:
        """``on_train_end``."""
        if self._callbacks:
            self._call("on_train_end")

    def _call(self, method: str, **arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(self._settings, self._state, self._control, **arguments)


class EpsilonSpent:
    """An upper bound on the epsilon of the steps so far, computed five times in a run.

    Guarantee:
        At least the epsilon of the executed steps and at most that of the Plan. It is computed for each fifth of the run
        when the first step of that fifth is done, and so rises in five steps.
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
        """The bound after ``step`` steps, as a progress line shows it."""
        value = self(step)
        if self._plan is None or value is None:
            return "no differential privacy"
        return f"epsilon <= {value:.2f} of {self._plan.epsilon:.2f}"
