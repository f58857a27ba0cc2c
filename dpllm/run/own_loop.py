"""Differential privacy for a custom training loop: sampling, clipping, noise, accounting and the ledger.

Comes in: a model in memory, units of tokens, a Plan, an open ledger. Goes out: updates of the model. Must not read files.
"""

from __future__ import annotations

import inspect
import os
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from operator import index
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger, RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.model import loading, memory, processes
from dpllm.privacy import events, guards
from dpllm.privacy.engine import Diagnostics, StepEngine
from dpllm.privacy.noise import GaussianNoise, os_entropy
from dpllm.privacy.packing import passes_of
from dpllm.privacy.plan import Plan
from dpllm.privacy.reference import longest_row
from dpllm.privacy.sampling import CyclicSchedule, PoissonSampler
from dpllm.privacy.schedule import LARGEST_PASS, Unit
from dpllm.recipe.config import make_config
from dpllm.run.build import check_passes, is_low
from dpllm.run.promise import plan_of

CALLS = ("forward", "_call_impl", "_compiled_call_impl")  # attributes that override the class's when set on a layer


def promise(
    num_units: int,
    *,
    epsilon: float,
    batch_size: int,
    steps: int,
    max_grad_norm: float = 1.0,
    bands: int | Literal["auto"] = 1,
) -> Plan:
    """The Plan of a custom loop, as ``run.promise.plan_of`` makes it from a recipe: flat clipping, whole units sampled.

    Args:
        num_units: N >= 1; it is published.
        epsilon: The target; the noise is calibrated to it.
        batch_size: B, expected number of units in a step.
        steps: T, number of steps.
        max_grad_norm: C, the clipping norm.
        bands: b, the number of correlated steps and of groups that take turns, or auto (``privacy.bands``), for a constant
            learning rate. 1: independent noise.

    Raises:
        ConfigError: A number is out of range, or the target cannot be reached.
        Refused: The batch is larger than N, or than one of b groups; or there are fewer than b steps.
    """
    units = _whole("num_units", num_units)
    noise: dict[str, Any] = {"noise": "independent"}
    if bands != 1:
        noise = {"noise": "banded", "bands": bands if isinstance(bands, str) else _whole("bands", bands)}
    settings = {
        "model": {"name_or_path": "in memory"},
        "data": {"train": "in memory"},
        "output_dir": "none",
        "privacy": {"epsilon": epsilon, "max_grad_norm": max_grad_norm, **noise},
        "train": {
            "batch_size": _whole("batch_size", batch_size),
            "steps": _whole("steps", steps),
            "lr_scheduler": "constant",
            "warmup": 0.0,
        },
    }
    return plan_of(make_config(settings, None, "dpllm.promise"), units)


def _whole(name: str, value: int, maximum: int | None = None) -> int:
    """An integer >= 1, also one of numpy."""
    plain = isinstance(value, Integral) and not isinstance(value, bool)
    return events.integer(name, int(value) if plain else value, 1, maximum)


class Engine:
    """Takes the steps of one reservation on one model, in one process; use it in a ``with`` statement.

    Guarantee:
        Once all T steps are taken, the trainable parameters are (epsilon, delta)-differentially private, as ``plan`` states,
        if each of ``units`` holds all rows of one privacy unit and was encoded from them alone, and if nothing else that was
        computed from these data reaches the parameters: no other optimizer step, no decision taken on what ``step`` returns.
        If the loop ends early, the ledger keeps the whole reservation. That ``dataset`` names these data is taken on trust: the
        ledger sees no records and cannot recognise copies.

    Attributes:
        plan: The promise.
        entry: Id of the reservation.
        dropout_off: Rates of the model that were set to zero.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        units: Sequence[Unit],
        *,
        ledger: Ledger,
        dataset: str,
        max_length: int,
        tokens_per_pass: int | None = None,
    ) -> None:
        """Checks everything, then reserves.

        Args:
            model: A causal LM of transformers, with or without LoRA of peft, on its device; float32 throughout.
            optimizer: Over exactly the trainable parameters.
            plan: From ``promise``.
            units: The N privacy units.
            ledger: Where the run is charged.
            dataset: The ledger's name of the data.
            max_length: Maximum number of tokens in a row; public.
            tokens_per_pass: Size of a forward pass; None: derived from the batch and ``max_length``.

        Raises:
            ConfigError: There are not N different units, or a row cannot be trained on.
            Refused: The Plan is not from ``promise``, there are several processes, the guarantee does not hold for this model or
                optimizer, the precision is low, the self-check fails, or the budget has no room. Nothing is spent.
        """
        _check_plan(plan, ledger, optimizer)
        schedule, size = plan.schedule, plan.schedule.dataset_size
        self.plan, self._model, self._steps, self._open, self._broken = plan, model, 0, True, False
        self._check_surroundings()
        vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        max_length = longest_row(model, max_length)
        self._units = _frozen(units, size, max_length, vocabulary)  # a copy, since the caller may change the lists
        tokens = None if tokens_per_pass is None else _whole("tokens_per_pass", tokens_per_pass, LARGEST_PASS)
        self.dropout_off = loading.without_dropout(model.train())
        self._pad_id = getattr(model.config, "pad_token_id", None) or 0
        torch.set_float32_matmul_precision("highest")
        device = next(model.parameters()).device
        batch, noise = schedule.expected_batch_size, GaussianNoise(os_entropy(), device)
        packing = memory.packing_of_model(model, batch, max_length, vocabulary, device, tokens)
        self._engine = StepEngine(model, optimizer, schedule, plan, packing, noise=noise)
        try:
            check_passes(self._engine, vocabulary, pad_id=self._pad_id)
            self._sampler = PoissonSampler(schedule, size, os_entropy(), CyclicSchedule(plan.bands, os_entropy()))
            self._optimizer, self._seen, self._ledger = optimizer, _seen(model), ledger
            with ledger.counting():
                request = RunRequest.of(plan, f"own-loop-{secrets.token_hex(4)}")
                self.entry = reserve_all(ledger, dataset, [request])[0].entry
        except BaseException:
            self._engine.close()  # removes the hooks from the caller's model
            raise

    def _check_surroundings(self) -> None:
        """Checks what every step needs: one process, float32, no layer that couples rows."""
        guards.check_model(self._model)
        if processes.several() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise Refused("dpllm.Engine is for one process, but there are several. Use accelerate launch and a recipe.")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise Refused(
                "gradients are disabled here, so no step can be taken. Leave torch.no_grad or inference_mode."
            )
        if is_low(self._model, None) or torch.is_autocast_enabled(next(self._model.parameters()).device.type):
            raise Refused(
                "the model is not all float32, and the self-check of lower precision needs a recipe. Load it with "
                "dtype=torch.float32, without autocast."
            )

    def step(self) -> Diagnostics:
        """Charges one step, draws a logical batch, and updates the model.

        Returns:
            Un-noised figures of the step. They are private: do not publish them or base decisions on them.

        Raises:
            Refused: All T steps were taken, the loop was closed, the model or its surroundings changed, or a gradient cannot be
                clipped. A step that fails once it is charged counts as taken.
        """
        if not self._open:
            raise Refused("this Engine is closed, so no further step can be charged. Make another Engine.")
        self._check_surroundings()
        self._check_unchanged()
        self._engine.check()
        if dropout := loading.without_dropout(self._model):
            raise Refused(
                f"dropout was switched on again ({', '.join(dropout)}), and its masks make units depend on each other. It is off "
                "again: leave it off while the Engine is open."
            )
        try:
            self._ledger.charge(self.entry, self._steps + 1)  # written before the update exists
        except KeyboardInterrupt:  # it may come after the write
            self._broken |= self._ledger.run(self.entry).steps > self._steps
            self._steps = self._ledger.run(self.entry).steps
            raise
        self._steps += 1
        if self._broken:  # the failed step added no row of noise, so rows would correlate across a unit's next turn
            self._engine.forget_noise()
        self._broken = True  # set before the draw, which may be interrupted
        try:
            drawn = self._sampler.draw()
            batches = passes_of(drawn, self._units, self._engine.packing, self._pad_id)
            diagnostics = self._engine.step(batches)
        finally:
            self._seen = _seen(self._model)
        self._broken = False
        return diagnostics

    def _check_unchanged(self) -> None:
        """Refuses a model changed by anything but the steps: the self-check saw another model."""
        now = _seen(self._model)
        changed = [name for name in {**self._seen, **now} if self._seen.get(name) != now.get(name)]
        if changed:
            raise Refused(
                f"{changed[0]} was changed since the last step (a weight written, a hook or layer added or replaced), so the "
                "self-check and the Plan no longer apply to this model. Nothing was charged. Do not change the model while the "
                "Engine is open, or make another Engine."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the reservation; untaken steps stay charged unless the ledger gives them back."""
        if not self._open:
            return
        self._open = False
        self._engine.close()
        self._ledger.finish(self.entry, "completed" if self._steps == self.plan.schedule.num_steps else "interrupted")


def _seen(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Name -> marks that change if a tensor is written (except through ``.data``), or a layer is hooked, added or replaced."""
    marks: dict[str, tuple[Any, ...]] = {}
    for name, module in model.named_modules():
        calls = [vars(module).get(call) for call in CALLS]
        marks[name or type(module).__name__] = module, type(module), calls, hooks(module, "_forward_", "_backward_")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        marks[name] = id(tensor), tensor.data_ptr(), tensor._version
    return marks


def hooks(owner: Any, *starts: str) -> list[tuple[Any, ...]]:
    """The hooks in each of torch's dictionaries in ``owner`` whose names begin with one of ``starts``."""
    attributes = vars(owner).items()
    return [tuple(table.values()) for name, table in attributes if name.startswith(starts) and isinstance(table, dict)]


def _check_plan(plan: Plan, ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(plan, Plan) or not isinstance(ledger, Ledger):
        raise ConfigError(
            "dpllm.Engine needs a Plan from dpllm.promise and an open dpllm.Ledger to charge it. Pass both."
        )
    numbers = {"epsilon": plan.target_epsilon, "max_grad_norm": plan.max_grad_norm}
    steps, batch = plan.schedule.num_steps, plan.schedule.expected_batch_size
    if plan != promise(plan.schedule.dataset_size, batch_size=batch, steps=steps, bands=plan.bands, **numbers):
        raise Refused(
            "the Plan was not made by dpllm.promise, so its accounting could be for another mechanism than the one that runs. "
            "Pass what dpllm.promise(len(units), ...) returns."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.SparseAdam) or (closure and closure.default is closure.empty):
        raise Refused(
            f"{type(optimizer).__name__} needs a closure or sparse gradients, so every step would be charged and fail. Use "
            "another optimizer, such as torch.optim.AdamW."
        )


def _frozen(units: Sequence[Unit], size: int, max_length: int, vocabulary: int) -> tuple[Unit, ...]:
    """The units as tuples, which cannot change later; refuses rows on which a step would fail after it was charged."""
    units = tuple(units)  # a lazy sequence would rebuild its units each time
    if len(units) != size:
        raise ConfigError(
            f"there are {len(units)} units, but the Plan is for {size}. Make the Plan with promise(len(units), ...)."
        )
    if len(set(map(id, units))) != size:
        raise ConfigError("a unit is in the list twice and would count twice. List each once, with all its rows.")
    owners: dict[tuple[int, ...], int] = {}
    frozen = []
    for number, unit in enumerate(units):
        if not isinstance(unit, Unit):
            raise ConfigError(f"units[{number}] is not a dpllm.Unit. Build one from all rows of one privacy unit.")
        rows = []
        for row in unit.sequences:
            ids, mask = tuple(map(index, row.input_ids)), tuple(map(bool, row.loss_mask))
            if (owner := owners.setdefault(ids, number)) != number:
                warnings.warn(
                    f"units[{owner}] and units[{number}] hold the same row. If both belong to one person, that person would "
                    "count as two: put all rows of a person into one Unit.",
                    stacklevel=3,
                )
            if len(ids) > max_length:
                raise ConfigError(f"units[{number}] has a row longer than max_length. Cut it, or raise max_length.")
            in_vocabulary = all(0 <= token < vocabulary for token in ids)
            if not in_vocabulary or not 1 <= len(ids) == len(mask) or mask[0] or row.denominator < 1:
                raise ConfigError(
                    f"units[{number}] has a row with nothing to train on. Give token ids below {vocabulary}, a loss_mask of the "
                    "same length that is False at position 0, and a denominator of at least 1."
                )
            rows.append(replace(row, input_ids=ids, loss_mask=mask))
        frozen.append(Unit(tuple(rows)))
    return tuple(frozen)
