"""Experiment trackers, through accelerate.

Comes in: names of trackers, values that may leave. Goes out: calls. What may leave is decided by the caller; this module
makes sure that a tracker takes nothing along by itself, as far as the tracker lets itself be told, and that one that fails
ends nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError

PROJECT = "dpllm"
Value = bool | int | float | str


def check(names: Sequence[str]) -> None:
    """Makes sure that the packages are installed.

    Raises:
        ConfigError: One is not.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"telemetry.trackers: the package {name} is not installed, so the run would leave no trace there. Type: "
                f"pip install {name}; or take {name} off the list."
            )


def _options(name: str, model: str) -> dict[str, Any]:
    """What each tracker is started with beside its project."""
    if name == "wandb":  # it would send the command line, paths, the state of git, standard output and the load
        off = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats")
        return {"name": model, "settings": {"console": "off", **dict.fromkeys(off, True)}}
    if name == "mlflow":  # it would record the path of the program
        return {"run_name": model, "tags": {"mlflow.source.name": PROJECT}}
    return {"name": model} if name == "trackio" else {}


class Trackers:
    """The trackers of one run, in its main process."""

    def __init__(self, names: Sequence[str], model: str, directory: Path, about: Mapping[str, Value | None]) -> None:
        """Starts them.

        Args:
            names: As ``telemetry.trackers`` has them.
            model: Name of the run.
            directory: Where a tracker that keeps files keeps them; private, because it may hold what is not released.
            about: Public values that describe the run, without paths.
        """
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self._started: dict[str, Any] = {}
        described = {key: value for key, value in about.items() if value is not None}
        for name in names:
            try:
                kind = LOGGER_TYPE_TO_CLASS[name]
                where = (str(directory),) if kind.requires_logging_directory else ()
                tracker = kind(PROJECT, *where, **_options(name, model))
                tracker.start()
                self._started[name] = tracker
                tracker.store_init_configuration(described)
            except (Exception, SystemExit) as error:  # a tracker raises what it likes
                self._drop(name, error)

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Hands over what is known of a step; None is left out."""
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            self._each("log", known, step=step)

    def finish(self) -> None:
        """Ends them."""
        self._each("finish")
        self._started.clear()

    def _each(self, method: str, *arguments: Any, **options: Any) -> None:
        for name, tracker in tuple(self._started.items()):
            try:
                getattr(tracker, method)(*arguments, **options)
            except (Exception, SystemExit) as error:
                self._drop(name, error)

    def _drop(self, name: str, error: BaseException) -> None:
        self._started.pop(name, None)
        print(f"dpllm: the tracker {name} failed ({type(error).__name__}) and gets nothing more.", file=sys.stderr)
