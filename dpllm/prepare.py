"""What stands before the first gradient: data, Plan, model, self-check, and last of all the reservation.

Comes in: a recipe. Goes out: a ``Prepared`` value from which the loop runs. Everything that can be refused is refused
here, before anything is spent.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from torch import distributed

from dpllm import checkpoint, data, ledger, model
from dpllm.audit import canaries
from dpllm.audit.scores import encode_secret
from dpllm.config import RunConfig, TrainConfig, dump_config
from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting, guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, Engine
from dpllm.privacy.noise import os_entropy
from dpllm.privacy.plan import Plan, Schedule, make_plan, make_schedule
from dpllm.privacy.sampling import PoissonSampler
from dpllm.rundir import RunDir, read_json, write_json


@dataclass(frozen=True)
class Prepared:
    """What stands before the first gradient."""

    config: RunConfig
    run: RunDir
    schedule: Schedule
    plan: Plan | None
    units: list[data.Unit | None]
    held_out: list[data.TokenSequence]
    tokenizer: Any
    model: Any
    optimizer: torch.optim.Optimizer
    engine: Engine
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    sampler: PoissonSampler
    ledger: ledger.Ledger | None
    entry: str | None
    first_step: int
    notes: list[str]


def prepare(config: RunConfig, run: RunDir, state: PartialState, console: Console, *, resume: bool) -> Prepared:
    """Data, Plan, model, self-check, and last of all the reservation."""
    run.private.mkdir(mode=0o700, parents=True, exist_ok=True)  # before the first copy of private data lies in it
    if resume:
        _same_recipe(config, run)
    cache = run.private / "cache"
    table = data.load_table(config.data.train, config.data, config.data.train_split, cache)
    config = config.model_copy(update={"data": config.data.model_copy(update={"format": table.format})})
    groups = data.group_rows(table, config.data)
    num_units = config.data.public_size or len(groups)
    plan = make_plan(config, num_units, accounting_cache()) if config.privacy.enabled else None
    schedule = plan.schedule if plan else make_schedule(config, num_units)
    canary_plan = None
    if config.audit.canaries:
        canary_plan = shared(canaries.load(run.canaries) if resume else canaries.plan_canaries(config.audit.canaries))
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
        for candidate in (*canary_plan.canaries, *canary_plan.references):  # found by the audit, it would be paid for
            encode_secret(candidate, table.format, tokenizer, config.data.max_length, config.data.long_examples)
        for canary in canaries.slots(canary_plan):
            rows = [[canary.example(table.format)]] if canary else []
            units += data.encode_units(rows, table.format, tokenizer, config.data) or [None]
    held_out = _held_out(config, tokenizer, cache)
    net = model.build(config, state.device)
    guards.check_model(net)
    longest = getattr(net.config, "max_position_embeddings", None)
    if longest and config.data.max_length > longest:
        raise ConfigError(
            f"data.max_length {config.data.max_length} is more than the {longest} positions of {config.model.name_or_path}. "
            f"Set data.max_length to {longest} or less."
        )
    _show_trainable(net, console)
    if model.untied(net):
        console.print("The base model ties its head to its input embedding; what trains is a copy, so they are untied.")
    optimizer = _optimizer(config.train, net)
    precision = _precision(config.train, state.device)
    autocast = partial(_autocast, state.device, precision)
    insecure = config.privacy.insecure_seed
    noise_key, sampling_key = shared(
        (os_entropy(), os_entropy()) if insecure is None else (2 * insecure, 2 * insecure + 1)
    )
    engine = Engine(
        net,
        optimizer,
        schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        max_length=config.data.max_length,
        noise_entropy=noise_key,
        device=state.device,
        autocast=autocast,
        loss_scale=FP16_LOSS_SCALE if precision == torch.float16 else 1.0,
    )
    low = precision is not None or config.model.quantization is not None
    low = low or any(p.is_floating_point() and p.dtype != torch.float32 for p in net.parameters())
    error = engine.self_check(
        len(tokenizer),
        config.data.max_length,
        physical_batch_size=config.train.physical_batch_size,
        low_precision=low,
    )
    if plan and low:
        _check_in_float32(config, net, plan, state.device)
    if plan:
        console.print(f"Self-check against brute-force autograd: largest relative error {error:.1e}")

    first_step, entry, notes, book = 0, None, [], None
    if state.is_main_process and plan:
        book = ledger.Ledger(Path(config.privacy.ledger) if config.privacy.ledger else ledger.default_path())
    if resume:
        saved = checkpoint.load_resume(run, net, optimizer)
        entry, first_step = saved["entry"], int(saved["step"])
        engine.max_grad_norm = saved.get("max_grad_norm", engine.max_grad_norm)
        charged = shared(book.steps(entry) if book and entry else first_step)
        if charged > first_step:
            notes.append(f"{charged - first_step} charged steps were lost before the checkpoint and were not repeated")
            first_step = charged
    elif plan:
        entry = shared(_reserve(config, plan, run, book).entry if book else None)
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
        config, run, schedule, plan, units, held_out, tokenizer, net, optimizer, engine, autocast, sampler,
        book, entry, first_step, notes,
    )  # fmt: skip


def _check_in_float32(config: RunConfig, net: Any, plan: Plan, device: torch.device) -> None:
    """The self-check once more, on a small float32 model of the same architecture: low precision hides small errors."""
    small = model.shrunken(config, net, device)
    engine = Engine(
        small,
        _optimizer(config.train, small),
        plan.schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        max_length=config.data.max_length,
        noise_entropy=0,  # it draws none
        device=device,
    )
    try:
        engine.self_check(small.config.vocab_size, config.data.max_length)
    finally:
        engine.close()


def accounting_cache() -> Path:
    """Where calibrations are remembered; they depend on public numbers only."""
    return ledger.default_path().parent / "calibration"


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


RESUME_MAY_CHANGE = {"train.physical_batch_size", "train.eval_every", "train.checkpoint_every", "card"}


def _same_recipe(config: RunConfig, run: RunDir) -> None:
    """A resumed run is the run that was interrupted: other data would escape their budget, a seed its confession.

    Raises:
        Refused: A key differs that the run's promise or its record depends on.
    """
    saved = run.load_config()
    before, now = _flat(saved.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    # The saved recipe names the format that was found.
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    changed = [key for key in changed if not (key == "data.format" and now[key] == "auto")]
    changed = [key for key in changed if not {key, key.partition(".")[0]} & RESUME_MAY_CHANGE]
    if changed:
        raise Refused(
            f"{run.root}: {', '.join(changed)} differs from the run that is resumed, whose reservation and record are about "
            f"that run only. Resume with {run.config}."
        )


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and key not in {"groups", "columns"}:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _reserve(config: RunConfig, plan: Plan, run: RunDir, book: ledger.Ledger) -> ledger.Reservation:
    return book.reserve(
        ledger_name(config),
        event=plan.event,
        delta=plan.delta,
        unit=plan.unit,
        relation=plan.neighbouring_relation,
        num_steps=plan.schedule.num_steps,
        run=f"{run.root.name}-{secrets.token_hex(4)}",
    )


def ledger_name(config: RunConfig) -> str:
    """The dataset's name in the ledger."""
    return config.privacy.dataset or data.dataset_name(config.data)


def check_directory(config: RunConfig, run: RunDir, *, resume: bool, overwrite: bool) -> None:
    """Refuses to lose a run, or the ledger.

    Raises:
        ConfigError: The directory holds a run, has nothing to resume, or would take the ledger with it.
    """
    status = read_json(run.run).get("status") if run.run.exists() else None
    book = Path(config.privacy.ledger).resolve() if config.privacy.ledger else None
    if book and any(book.is_relative_to(part.resolve()) for part in (run.private, run.export)):
        raise ConfigError(
            f"privacy.ledger {config.privacy.ledger} lies in the part of the run directory that a new run replaces, and the "
            "budget would go with it. Keep it elsewhere; the run directory itself will do."
        )
    if resume:
        if status == "completed":
            raise ConfigError(f"{run.root}: the run is complete, so there is nothing to resume.")
        if not (run.resume / "state.json").exists():
            raise ConfigError(
                f"{run.root}: holds no checkpoint to resume from. Start anew, with --overwrite if need be."
            )
    elif not overwrite and (run.config.exists() or status not in (None, "refused")):
        raise ConfigError(
            f"{run.root}: already holds a run, which would be lost. Type --resume to go on with it, --overwrite to replace it, "
            "or another --output_dir."
        )
    elif not overwrite and status is None and any(part.name != "cache" for part in _contents(run.export, run.private)):
        raise ConfigError(
            f"{run.root}: holds no run, but {run.export.name}/ or {run.private.name}/ of something else, which a run replaces. "
            "Type another --output_dir, or --overwrite if they may go."
        )


def _contents(*directories: Path) -> list[Path]:
    return [part for directory in directories if directory.is_dir() for part in directory.iterdir()]


def _held_out(config: RunConfig, tokenizer: Any, cache: Path) -> list[data.TokenSequence]:
    if config.data.eval is None:
        return []
    table = data.load_table(config.data.eval, config.data, config.data.eval_split, cache)
    units = data.encode_units([[row] for row in table.rows], table.format, tokenizer, config.data, name=table.name)
    return [sequence for unit in units for sequence in unit.sequences]


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
    table = Table("what trains", "tensors", "parameters", title=None)
    rows = model.trainable_table(net)
    for kind, tensors, size in rows:
        table.add_row(kind, str(tensors), f"{size:,}")
    total = sum(parameter.numel() for parameter in net.parameters())
    table.add_row(
        "all", str(sum(row[1] for row in rows)), f"{sum(row[2] for row in rows):,} of {total:,}", style="bold"
    )
    console.print(table)


def shared(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
