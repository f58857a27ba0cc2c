"""The one loop. Read this first.

Comes in: a recipe. Goes out: a run directory. LoRA, frozen layers and the baseline without differential privacy all run
through ``_loop``; they differ in what ``model.build`` unfreezes and in whether there is a Plan.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import distributed

from dpllm import checkpoint, data, environment, evaluate, ledger, model
from dpllm.audit import canaries
from dpllm.config import RunConfig, TrainConfig, dump_config
from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting, guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, Engine
from dpllm.privacy.noise import os_entropy
from dpllm.privacy.plan import Plan, Schedule, make_plan, make_schedule
from dpllm.privacy.sampling import PoissonSampler, physical_batches
from dpllm.rundir import RunDir, read_json, write_json


@dataclass(frozen=True)
class Prepared:
    """What stands before the first gradient."""

    config: RunConfig
    run: RunDir
    schedule: Schedule
    plan: Plan | None
    plan_json: dict[str, Any] | None
    units: list[data.Unit | None]
    held_out: list[data.TokenSequence]
    tokenizer: Any
    model: Any
    optimizer: torch.optim.Optimizer
    engine: Engine
    sampler: PoissonSampler
    ledger: ledger.Ledger | None
    entry: str | None
    first_step: int
    notes: list[str]


def train(
    config: RunConfig, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Runs a recipe from data to export/.

    Args:
        config: The recipe.
        resume: Go on with the interrupted run in ``output_dir``: same reservation, fresh noise.
        overwrite: Replace a run that lies in ``output_dir``. What it spent stays in the ledger.
        console: Where progress and tables go.

    Returns:
        run.json as a dictionary.

    Raises:
        ConfigError: The recipe or the data cannot be used (exit code 2).
        Refused: A guard or the ledger's budget refuses (exit code 3).
    """
    state = PartialState()
    console = console or Console(quiet=not state.is_main_process)
    run = RunDir(Path(config.output_dir))
    guards.check_config(config)
    _check_directory(run, resume=resume, overwrite=overwrite)
    torch.set_float32_matmul_precision("highest")  # TF32 off: norms and sums are float32
    started = time.time()
    try:
        prepared = _prepare(config, run, state, console, resume=resume, overwrite=overwrite)
    except Refused as error:
        if state.is_main_process and not run.run.exists():
            run.make()
            reason = {"holds": False, "reason": f"the run was refused: {error}"}
            write_json(run.run, {"status": "refused", "guarantee": reason, "steps_taken": 0})
        raise
    with prepared.ledger or contextlib.nullcontext():
        return _run(prepared, state, console, started)


def _prepare(
    config: RunConfig, run: RunDir, state: PartialState, console: Console, *, resume: bool, overwrite: bool
) -> Prepared:
    """Data, Plan, model, self-check, and last of all the reservation."""
    cache = run.private / "cache"
    table = data.load_table(config.data.train, config.data, config.data.train_split, cache)
    groups = data.group_rows(table, config.data)
    num_units = config.data.public_size or len(groups)
    plan = make_plan(config, num_units, accounting_cache()) if config.privacy.enabled else None
    schedule = plan.schedule if plan else make_schedule(config, num_units)
    canary_plan = None
    if config.audit.canaries:
        canary_plan = _shared(canaries.load(run.canaries) if resume else canaries.plan_canaries(config.audit.canaries))
    plan_json = _plan_json(plan, canary_plan, run, resume=resume)
    if plan:
        console.print(
            f"[bold]Plan[/]: epsilon {plan.epsilon:.3f} at delta {plan.delta:g} per {plan.unit}, N {schedule.dataset_size}, "
            f"q {schedule.sampling_rate:.4f}, {schedule.num_steps} steps, noise multiplier {plan.noise_multiplier:g}, "
            f"C {plan.max_grad_norm:g}"
        )
    else:
        console.print(f"[bold]No differential privacy[/]: {schedule.num_steps} steps on data declared public")

    tokenizer = model.load_tokenizer(config.model)
    units: list[data.Unit | None] = list(data.encode_units(groups, table.format, tokenizer, config.data))
    if canary_plan:
        examples = [c.example(table.format) if c else None for c in canaries.slots(canary_plan)]
        for example in examples:
            encoded = data.encode_units([[example]], table.format, tokenizer, config.data) if example else [None]
            units.extend(encoded)
    held_out = _held_out(config, table.format, tokenizer, cache)
    net = model.build(config, state.device)
    guards.check_model(net)
    _show_trainable(net, console)
    optimizer = _optimizer(config.train, net)
    precision = _precision(config.train, state.device)
    insecure = config.privacy.insecure_seed
    noise_key, sampling_key = _shared((os_entropy(), os_entropy()) if insecure is None else (2 * insecure, 2 * insecure + 1))
    engine = Engine(
        net,
        optimizer,
        schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        noise_entropy=noise_key,
        device=state.device,
        autocast=partial(_autocast, state.device, precision),
        loss_scale=FP16_LOSS_SCALE if precision == torch.float16 else 1.0,
    )
    low = precision is not None or any(p.is_floating_point() and p.dtype != torch.float32 for p in net.parameters())
    error = engine.self_check(len(tokenizer), config.data.max_length, low_precision=low)
    if plan:
        console.print(f"Self-check against brute-force autograd: largest relative error {error:.1e}")

    first_step, entry, notes, book = 0, None, [], None
    if state.is_main_process and plan:
        book = ledger.Ledger(Path(config.privacy.ledger) if config.privacy.ledger else ledger.default_path())
    if resume:
        saved = checkpoint.load_resume(run, net, optimizer)
        entry, first_step = saved["entry"], int(saved["step"])
        charged = _shared(book.steps(entry) if book and entry else first_step)
        if charged > first_step:
            notes.append(f"{charged - first_step} charged steps were lost before the checkpoint and were not repeated")
            first_step = charged
    elif plan:
        entry = _shared(_reserve(config, plan, run, book).entry if book else None)
    if state.is_main_process and not resume:
        run.clear()
        run.make()
        run.config.write_text(dump_config(config), encoding="utf-8")
        if plan_json:
            write_json(run.plan, plan_json)
        if canary_plan:
            canaries.save(canary_plan, run.canaries)
    state.wait_for_everyone()
    sampler = PoissonSampler(schedule, len(units), sampling_key)
    return Prepared(
        config, run, schedule, plan, plan_json, units, held_out, tokenizer, net, optimizer, engine, sampler, book, entry,
        first_step, notes,
    )  # fmt: skip


def _run(p: Prepared, state: PartialState, console: Console, started: float) -> dict[str, Any]:
    """The loop, and what is written when it ends, whichever way it ends."""
    main, step, summary = state.is_main_process, p.first_step, _Summary()
    if main:
        _write_record(p, step, "interrupted", started, summary, "the run has not ended, or its process was killed")
    status = "interrupted"
    try:
        if p.first_step == 0:
            summary.before = _evaluate(p, state)
            console.print(f"Held-out loss before: {summary.before:.4f} nats per token" if summary.before else "No held-out data")
        for step in _loop(p, state, console):
            if p.config.train.eval_every and step % p.config.train.eval_every == 0 and step < p.schedule.num_steps:
                _log(p, state, {"step": step, "eval_loss": _evaluate(p, state)})
            if main and p.config.train.checkpoint_every and step % p.config.train.checkpoint_every == 0:
                checkpoint.save_resume(p.run, p.model, p.optimizer, step, p.entry)
        status = "completed" if step == p.schedule.num_steps else "interrupted"
    finally:
        p.engine.close()
        if main and status == "interrupted":
            checkpoint.save_resume(p.run, p.model, p.optimizer, step, p.entry)
    summary.after = _evaluate(p, state)
    summary.tokens = sum(sum(sequence.loss_mask) for sequence in p.held_out)
    if main:
        checkpoint.export(p.model, p.tokenizer, p.run)
        if p.ledger and p.entry:
            p.ledger.finish(p.entry, status)
        if status == "completed":
            shutil.rmtree(p.run.resume, ignore_errors=True)
        record = _write_record(p, step, status, started, summary)
        console.print(f"Held-out loss after: {summary.after:.4f} nats per token" if summary.after else "")
        console.print(f"[bold]{status}[/] after {step} of {p.schedule.num_steps} steps: {p.run.root}")
    state.wait_for_everyone()
    return record if main else read_json(p.run.run)


def _loop(p: Prepared, state: PartialState, console: Console) -> Iterator[int]:
    """One logical batch after the other; yields the number of steps executed so far."""
    rank, world, main = state.process_index, state.num_processes, state.is_main_process
    pad_id = p.tokenizer.pad_token_id if p.tokenizer.pad_token_id is not None else 0
    epsilon_after = _EpsilonSpent(p.plan)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _stop_signal() as stopping, Progress(*columns, console=console, disable=not main) as progress:
        task = progress.add_task("training", total=p.schedule.num_steps, completed=p.first_step)
        for step in range(p.first_step, p.schedule.num_steps):
            if _any_rank(bool(stopping), state):
                return
            for group in p.optimizer.param_groups:
                group["lr"] = learning_rate(p.config.train, step, p.schedule.num_steps)
            drawn = p.sampler.draw()
            batches = physical_batches(drawn, p.units, p.config.train.physical_batch_size, pad_id, rank, world)
            if p.ledger and p.entry:
                p.ledger.charge(p.entry, step + 1)  # written before the update exists
            diagnostics = p.engine.step(batches)
            _log(p, state, {"step": step + 1, "loss": diagnostics.loss, "units": diagnostics.units,
                            "clipped": diagnostics.clipped})  # fmt: skip
            progress.update(task, completed=step + 1, description=epsilon_after(step + 1))
            yield step + 1


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of step 0..num_steps-1; never zero, because every step spends privacy.

    Rises linearly over the warm-up, then falls to 0 as the schedule says; depends on the step alone.
    """
    import math

    warm = math.ceil(train.warmup * num_steps)
    if step < warm:
        return train.learning_rate * (step + 1) / (warm + 1)
    left = (num_steps - step) / max(1, num_steps - warm)
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return train.learning_rate * shape[train.lr_scheduler]


def accounting_cache() -> Path:
    """Where calibrations are remembered; they depend on public numbers only."""
    return ledger.default_path().parent / "calibration"


@dataclass
class _Summary:
    """Held-out losses in nats per target token: private unless the evaluation data are public."""

    before: float | None = None
    after: float | None = None
    tokens: int = 0


class _EpsilonSpent:
    """An upper bound of the epsilon spent so far, for the progress bar: computed at tenths of the run, rounded up."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan, self._known = plan, (0, 0.0)

    def __call__(self, step: int) -> str:
        if self._plan is None:
            return "training, no differential privacy"
        schedule = self._plan.schedule
        if step > self._known[0]:
            tenth = -(-schedule.num_steps // 10)
            grid = min(schedule.num_steps, -(-step // tenth) * tenth)
            event = accounting.dp_sgd_event(schedule.sampling_rate, self._plan.noise_multiplier, grid)
            value = accounting.epsilon(event, self._plan.delta, self._plan.neighbouring_relation, interval=1e-3)
            self._known = (grid, min(value, self._plan.epsilon) if grid == schedule.num_steps else value)
        return f"training, epsilon spent <= {self._known[1]:.2f} of {self._plan.epsilon:.2f}"


def _write_record(
    p: Prepared, step: int, status: str, started: float, summary: _Summary, unfinished: str | None = None
) -> dict[str, Any]:
    """run.json: what happened, in public and released values only."""
    reason, notes = guards.deviations(p.config)
    if status == "interrupted" and p.plan and unfinished is None:
        notes.append(
            "the run was interrupted; the full Plan's epsilon is stated, and a decision to stop that was taken on un-noised "
            "metrics is outside the guarantee"
        )
    public: dict[str, Any] = {}
    if p.config.data.eval_public and summary.after is not None:
        public = {"eval_loss_before": summary.before, "eval_loss_after": summary.after, "eval_tokens": summary.tokens}
    record = {
        "status": status,
        "guarantee": {"holds": reason is None and unfinished is None, "reason": reason or unfinished},
        "deviations": notes + p.notes,
        "steps_planned": p.schedule.num_steps,
        "steps_taken": step,
        "epsilon_spent": p.plan.epsilon if p.plan else None,
        "delta": p.plan.delta if p.plan else None,
        "ledger": _ledger_record(p),
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        "model": {
            "name_or_path": model.public_name(p.config.model.name_or_path),
            "commit": getattr(p.model.config, "_commit_hash", None),
            "architecture": (p.model.config.architectures or [type(p.model).__name__])[0],
            "trainable_parameters": sum(t.numel() for t in p.engine.parameters.values()),
            "total_parameters": sum(t.numel() for t in p.model.parameters()),
        },
        "artifacts": checkpoint.weight_hashes(p.run.export) if unfinished is None else {},
        "metrics": {"public": public, "released": {}},
        "started_at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds") if unfinished is None else None,
        "duration_seconds": round(time.time() - started, 1),
    }
    write_json(p.run.run, record)
    write_json(
        p.run.private / "summary.json",
        {"eval_loss_before": summary.before, "eval_loss_after": summary.after, "eval_tokens": summary.tokens},
    )
    return record


def _ledger_record(p: Prepared) -> dict[str, Any] | None:
    if not (p.ledger and p.entry and p.plan):
        return None
    name = _dataset(p.config)
    budget = p.ledger.budget(name)
    return {
        "dataset": name,
        "entry": p.entry,
        "head": p.ledger.head(),
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta} if budget else None,
        "spent_epsilon": p.ledger.spent(name, None if budget else p.plan.delta),
    }


def _plan_json(plan: Plan | None, canary_plan: Any, run: RunDir, *, resume: bool) -> dict[str, Any] | None:
    if plan is None:
        return None
    if resume:
        saved = read_json(run.plan)
        promised = json.loads(json.dumps(plan.to_json()))
        if changed := [key for key, value in promised.items() if saved.get(key) != value]:
            raise Refused(
                f"{run.root}: the recipe now promises another {changed[0]} than the run that is resumed, which would change "
                f"a promise already spent. Resume with {run.config}."
            )
        return saved
    return {
        **plan.to_json(),
        "cross_check": accounting.cross_check(plan.event, plan.delta, plan.neighbouring_relation, plan.epsilon),
        "canary_commitment": canary_plan.commitment if canary_plan else None,
    }


def _reserve(config: RunConfig, plan: Plan, run: RunDir, book: ledger.Ledger) -> ledger.Reservation:
    return book.reserve(
        _dataset(config),
        event=plan.event,
        delta=plan.delta,
        unit=plan.unit,
        relation=plan.neighbouring_relation,
        num_steps=plan.schedule.num_steps,
        run=f"{run.root.name}-{secrets.token_hex(4)}",
    )


def _dataset(config: RunConfig) -> str:
    return config.privacy.dataset or data.dataset_name(config.data)


def _check_directory(run: RunDir, *, resume: bool, overwrite: bool) -> None:
    status = read_json(run.run).get("status") if run.run.exists() else None
    if resume:
        if status == "completed":
            raise ConfigError(f"{run.root}: the run is complete, so there is nothing to resume.")
        if not (run.resume / "state.json").exists():
            raise ConfigError(f"{run.root}: holds no checkpoint to resume from. Start anew, with --overwrite if need be.")
    elif not overwrite and (run.config.exists() or status not in (None, "refused")):
        raise ConfigError(
            f"{run.root}: already holds a run, which would be lost. Type --resume to go on with it, --overwrite to replace it, "
            "or another --output_dir."
        )


def _held_out(config: RunConfig, fmt: data.Format, tokenizer: Any, cache: Path) -> list[data.TokenSequence]:
    if config.data.eval is None:
        return []
    table = data.load_table(config.data.eval, config.data, config.data.eval_split, cache)
    units = data.encode_units([[row] for row in table.rows], fmt if fmt == table.format else table.format, tokenizer, config.data)
    return [sequence for unit in units for sequence in unit.sequences]


def _evaluate(p: Prepared, state: PartialState) -> float | None:
    if not p.held_out:
        return None
    precision = _precision(p.config.train, state.device)
    loss, _ = evaluate.held_out_loss(
        p.model, p.held_out, 4 * p.config.train.physical_batch_size, state.device,
        partial(_autocast, state.device, precision), state.process_index, state.num_processes,
    )  # fmt: skip
    return loss


def _optimizer(train: TrainConfig, net: torch.nn.Module) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if train.optimizer == "sgd":
        return torch.optim.SGD(trainable, lr=train.learning_rate, weight_decay=train.weight_decay)
    return torch.optim.AdamW(trainable, lr=train.learning_rate, weight_decay=train.weight_decay)


def _precision(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The autocast type; None for float32."""
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.precision]


def _autocast(device: torch.device, precision: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if precision is None else torch.autocast(device.type, dtype=precision)


def _show_trainable(net: torch.nn.Module, console: Console) -> None:
    from rich.table import Table

    table = Table("what trains", "tensors", "parameters", title=None)
    rows = model.trainable_table(net)
    for kind, tensors, size in rows:
        table.add_row(kind, str(tensors), f"{size:,}")
    total = sum(parameter.numel() for parameter in net.parameters())
    table.add_row("all", str(sum(row[1] for row in rows)), f"{sum(row[2] for row in rows):,} of {total:,}", style="bold")
    console.print(table)


def _log(p: Prepared, state: PartialState, values: dict[str, Any]) -> None:
    if state.is_main_process:
        with open(p.run.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({**values, "time": round(time.time(), 2)}) + "\n")


def _shared(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def _any_rank(flag: bool, state: PartialState) -> bool:
    if state.num_processes == 1:
        return flag
    tensor = torch.tensor(int(flag), device=state.device)
    distributed.all_reduce(tensor)
    return bool(tensor)


@contextlib.contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, so that the loop stops between steps; a second Ctrl-C stops at once."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
