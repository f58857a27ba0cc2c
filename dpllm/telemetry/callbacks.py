"""Callbacks of transformers' Trainer, at the beginning, after each step and at the end of a run.

Comes in: the public values of a run, and what its steps release. Goes out: calls with TrainerState and TrainerControl, as a
Trainer makes them. A callback gets no model, optimizer or batch; an error in one ends the run, because it is the user's own code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError
from dpllm.recipe.config import RunConfig

if TYPE_CHECKING:
    from transformers import TrainerCallback


class Callbacks:
    """The callbacks of one run; those of its main process alone are called."""

    def __init__(self, callbacks: Sequence[TrainerCallback], config: RunConfig) -> None:
        """Nothing is called yet.

        Raises:
            ConfigError: An object that is no TrainerCallback.
        """
        self._callbacks = tuple(callbacks)
        if not callbacks:
            return
        from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

        for one in self._callbacks:
            if not isinstance(one, TrainerCallback):
                raise ConfigError(
                    f"callbacks: holds a {type(one).__name__}. Give instances of subclasses of transformers.TrainerCallback."
                )
        # Its constructor would make accelerate's state anew, and with it another device.
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
            warmup_steps=train.warmup,  # below 1, a share
            **{key: getattr(train, key) for key in ("learning_rate", "weight_decay", "seed")},
        )
        self._state, self._control = TrainerState(), TrainerControl()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def stop(self) -> bool:
        """Whether one of them has set ``control.should_training_stop``."""
        return bool(self._callbacks) and self._control.should_training_stop

    def begin(self, step: int, total: int) -> None:
        """``on_train_begin``, after ``step`` of ``total`` steps."""
        if self._callbacks:
            self._state.global_step = step
            self._state.max_steps = self._settings.max_steps = total
            self._call("on_train_begin")

    def step(self, step: int, released: Mapping[str, float | None]) -> None:
        """``on_log`` with what the step released, then ``on_step_end``."""
        if self._callbacks:
            logs = {name: value for name, value in released.items() if value is not None}
            self._state.global_step = step
            self._state.log_history.append({**logs, "step": step})
            self._call("on_log", logs=dict(logs))
            self._call("on_step_end")

    def end(self) -> None:
        """``on_train_end``."""
        if self._callbacks:
            self._call("on_train_end")

    def _call(self, what: str, **more: Any) -> None:
        for one in self._callbacks:
            getattr(one, what)(self._settings, self._state, self._control, **more)
