"""What stands before the first gradient: data, Plan, model, self-check, and last of all the reservation.

Comes in: a recipe. Goes out: a ``Prepared`` value from which the loop runs. Everything that can be refused is refused
here, before anything is spent.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from dpllm import checkpoint, data, fitting, ledger, lineage, model, ranks, tokens
from dpllm.audit import canaries
from dpllm.audit.canaries import CanaryPlan
from dpllm.audit.planting.source import ModelSource
from dpllm.audit.scores import encode_secret
from dpllm.config import RunConfig, TrainConfig, dump_config
from dpllm.errors import BudgetExceeded, ConfigError, Refused, RoundsByCompany
from dpllm.groups import each_row
from dpllm.ledger import protect
from dpllm.ledger.reserving import take
from dpllm.privacy import accounting, guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, Engine
from dpllm.privacy.noise import key_bits, os_entropy
from dpllm.privacy.plan import Plan, Schedule, make_plan, make_schedule
from dpllm.privacy.sampling import PoissonSampler
from dpllm.ranks import salted, shared
from dpllm.resume import Standing, check_promise, make_up, same_recipe, stand
from dpllm.rundir import RunDir, read_json, write_json


@dataclass(frozen=True)
class Prepared:
    """What stands before the first gradient."""

    config: RunConfig
    run: RunDir
    schedule: Schedule
    plan: Plan | None
    units: Sequence[data.Unit | None]
    held_out: list[data.TokenSequence]
    tokenizer: Any
    model: Any
    optimizer: torch.optim.Optimizer
    engine: Engine
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    sampler: PoissonSampler
    custody: protect.Custody
    ledger: ledger.Ledger | None
    claims: tuple[tuple[str, int], ...]
    first_step: int
    physical_batch_size: int
    notes: list[str]
    lineage: dict[str, Any] | None
    dropout_off: dict[str, float] | None
    """Rates of the base model that were set to zero; None without differential privacy, where they hold."""


def prepare(
    config: RunConfig,
    run: RunDir,
    state: PartialState,
    console: Console,
    *,
    resume: bool = False,
    make_up_lost_steps: bool = False,
    entry: str | None = None,
) -> Prepared:
    """Data, custody, Plan, model, self-check, and last of all the reservation, unless ``entry`` names one made before."""
    try:
        run.private.mkdir(mode=0o700, parents=True, exist_ok=True)  # before the first copy of private data lies in it
    except OSError as error:
        raise ConfigError(
            f"{run.root}: cannot be written to ({error.strerror}), and every process keeps tokens there. Type another "
            "--output_dir."
        ) from None
    if resume and state.is_main_process:
        same_recipe(config, run)
    cache = run.private / "cache"
    table = data.load_table(config.data.train, config.data, config.data.train_split, cache)
    config = config.model_copy(update={"data": config.data.model_copy(update={"format": table.format})})
    book = None
    if state.is_main_process:
        book = ledger.open_ledger(config.privacy.ledger, create=False)
    try:
        custody = shared(protect.take_custody(config, table, book) if state.is_main_process else None)
        return _prepare(config, run, state, console, table, book, custody, resume, make_up_lost_steps, entry)
    except BaseException as error:
        if (
            not resume and state.is_local_main_process
        ):  # what this attempt tokenised; a run that goes on still needs its own
            shutil.rmtree(cache / tokens.FOLDER, ignore_errors=True)
        if book is not None:
            if isinstance(error, Refused) and error.reason:
                book.count_refusal(error.dataset, error.reason)
            book.close()
        raise


def _prepare(
    config: RunConfig,
    run: RunDir,
    state: PartialState,
    console: Console,
    table: data.Table,
    book: ledger.Ledger | None,
    custody: protect.Custody,
    resume: bool,
    make_up_lost_steps: bool,
    entry: str | None,
) -> Prepared:
    cache = run.private / "cache"
    base = lineage.of_base(config) if state.is_main_process else None
    groups = data.sampled_rows(table, config.data)
    num_units = config.data.public_size or len(groups)
    standing = shared(stand(config, run, book, custody) if resume and state.is_main_process else None)
    main = state.is_main_process
    plan = shared(_plan(config, num_units, book, custody, standing) if main else None)
    schedule = plan.schedule if plan else make_schedule(config, num_units)
    tokenizer = model.load_tokenizer(config.model)
    canary_plan = None
    if config.audit.canaries:
        canary_plan = shared(_canaries(config, run, resume, tokenizer, state.device) if main else None)
    plan_json = _plan_json(config, plan, canary_plan, standing)
    if plan and standing and make_up_lost_steps and standing.to_make_up:
        plan = shared(_plan(config, num_units, book, custody, standing, standing.to_make_up) if main else None)
        assert plan is not None
        schedule = plan.schedule
        plan_json = {**(plan_json or {}), **plan.to_json()}
    if plan and plan_json and standing and plan.schedule.num_steps != standing.plan["num_steps"]:
        plan_json |= _checked(plan)
    ancestry = shared(_ancestry(base, config, book, custody, plan) if state.is_main_process else None)
    if plan:
        console.print(
            f"[bold]Plan[/]: epsilon {plan.epsilon:.3f} at delta {plan.delta:g} per {plan.unit}, N {schedule.dataset_size}, "
            f"q {schedule.sampling_rate:.4f}, {schedule.num_steps} steps, noise multiplier {plan.noise_multiplier:g}, "
            f"C {plan.max_grad_norm:g}"
        )
    else:
        console.print(f"[bold]No differential privacy[/]: {schedule.num_steps} steps")

    units = tokens.make_units(table, groups, tokenizer, config.data, cache)
    if canary_plan:
        for candidate in (*canary_plan.canaries, *canary_plan.references):  # found by the audit, it would be paid for
            encode_secret(candidate, table.format, tokenizer, config.data.max_length, config.data.long_examples)
        slots: list[data.Unit | None] = []
        for slot in canaries.slots(canary_plan, config.data):
            rows = [canary.example(table.format) for canary in slot]
            slots += data.encode_units([rows], table.format, tokenizer, config.data) if rows else [None]
        units = units.with_slots(slots)
    ranks.check_equal({"the training data, as tokens,": salted(units.digest)})
    if standing and standing.units not in (None, units.digest):
        raise Refused(
            f"{run.root}: data.train now holds other units than the run began with (their rows, their owners or their order), so "
            "its steps would count for people whom it does not protect. Put the file of that time back, or start anew."
        )
    held_out = _held_out(config, tokenizer, cache)
    ranks.check_equal({"the held-out data, as tokens,": salted(repr(held_out))})
    net = model.build(config, state.device)
    guards.check_model(net)
    model.check_length(config, net)
    vocabulary = _vocabulary(config, net, tokenizer, units, held_out)
    _show_trainable(net, console)
    dropout_off = model.without_dropout(net) if plan else None
    if dropout_off:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout_off.items())
        console.print(
            f"The base model's dropout is off, as its masks would tie what one unit adds to the others: {rates}"
        )
    if config.adapter.method == "lora" and config.adapter.target_modules == "auto" and (apart := model.left_out(net)):
        what = "routers, experts and others whose gradients of single rows or adapters cannot be had"
        console.print(f"adapter.target_modules: auto leaves out {', '.join(apart)}: {what}.")
    if model.untied(net):
        console.print("The base model ties its head to its input embedding; what trains is a copy, so they are untied.")
    optimizer = _optimizer(config.train, net)
    precision = _precision(config.train, state.device)
    autocast = partial(_autocast, state.device, precision)
    insecure, secure = config.privacy.insecure_seed, config.privacy.secure_noise
    bits = key_bits(secure)
    noise_key, sampling_key = shared(
        (os_entropy(bits), os_entropy(bits)) if insecure is None else (2 * insecure, 2 * insecure + 1)
    )
    engine = Engine(
        net,
        optimizer,
        schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        max_length=config.data.max_length,
        noise_entropy=noise_key,
        secure_noise=secure,
        device=state.device,
        autocast=autocast,
        loss_scale=FP16_LOSS_SCALE if precision == torch.float16 else 1.0,
    )
    physical_batch_size = fitting.resolve(engine, config, vocabulary, state.device, world=state.num_processes)
    low = precision is not None or getattr(net.config, "quantization_config", None) is not None
    low = low or any(p.is_floating_point() and p.dtype != torch.float32 for p in net.parameters())
    pad_id = tokenizer.pad_token_id or 0
    check = partial(engine.self_check, vocabulary, config.data.max_length, low_precision=low, pad_id=pad_id)
    alone, error = "", 0.0
    try:
        error = check(physical_batch_size=physical_batch_size)
    except RoundsByCompany as refusal:
        alone = str(refusal).partition(", so that")[0]
    if ranks.totals(len(alone))[0]:
        console.print(f"train.physical_batch_size is 1 in this run, which is slower: {alone}.")
        physical_batch_size, error = 1, check(physical_batch_size=1)
    if plan and low:
        _check_in_float32(config, net, plan, state.device, physical_batch_size)
    if plan:
        console.print(f"Self-check against brute-force autograd: largest relative error {error:.1e}")

    first_step, notes, claims = 0, custody.deviations(), ()
    if standing:
        saved = shared(checkpoint.load_resume(run, net, optimizer) if state.is_main_process else {})
        ranks.replicate(optimizer, list(engine.parameters.values()))
        first_step, claims = standing.charged, standing.claims
        notes += [note for note in (*standing.notes, *saved["notes"]) if note not in notes]
        engine.max_grad_norm = saved.get("max_grad_norm", engine.max_grad_norm)
        if plan and make_up_lost_steps and standing.to_make_up:
            claims += shared((make_up(plan, run, book, custody, standing),) if book else None)
            notes.append(f"{standing.to_make_up} charged steps were lost and were made up by as many more")
        elif standing.to_make_up:
            notes.append(f"{standing.to_make_up} charged steps were lost before the checkpoint and were not repeated")
    elif plan:
        if state.is_main_process and book is None:  # the first reservation makes the file; a refusal makes none
            book = ledger.open_ledger(config.privacy.ledger)
            custody = protect.take_custody(config, table, book)
        claims = shared((_reserve(plan, run, book, custody, entry),) if book else None)
    if state.is_main_process:
        if not resume:
            run.clear(keep=units.path)
            run.make()
            run.config.write_text(dump_config(config), encoding="utf-8")
            if canary_plan:
                canaries.save(canary_plan, run.canaries)
        if plan_json:
            write_json(run.plan, plan_json)
    state.wait_for_everyone()
    sampler = PoissonSampler(schedule, len(units), sampling_key, secure=secure)
    return Prepared(
        config, run, schedule, plan, units, held_out, tokenizer, net, optimizer, engine, autocast, sampler,
        custody, book if plan else None, claims, first_step, physical_batch_size, notes, ancestry, dropout_off,
    )  # fmt: skip


def _ancestry(
    base: lineage.Base | None,
    config: RunConfig,
    book: ledger.Ledger | None,
    custody: protect.Custody,
    plan: Plan | None,
) -> dict[str, Any] | None:
    """What the base model and this run promise together; see ``dpllm.lineage``."""
    return lineage.settle(
        base, config, dataset=custody.dataset, derived_from=custody.derived_from, book=book, plan=plan
    )


def _check_in_float32(config: RunConfig, net: Any, plan: Plan, device: torch.device, rows: int) -> None:
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
        engine.self_check(model.SHRUNKEN_VOCABULARY, config.data.max_length, physical_batch_size=min(8, rows))
    finally:
        engine.close()


def accounting_cache() -> Path:
    """Where calibrations are remembered; they depend on public numbers only."""
    return ledger.default_path().parent / "calibration"


def _plan(
    config: RunConfig,
    num_units: int,
    book: ledger.Ledger | None,
    custody: protect.Custody,
    standing: Standing | None,
    more_steps: int = 0,
) -> Plan | None:
    if not config.privacy.enabled:
        return None
    if standing is None:
        terms = protect.terms(book, custody.dataset, custody.derived_from)
        try:
            return make_plan(config, num_units, accounting_cache(), **terms)
        except BudgetExceeded:
            if book is None:
                raise
            # The ledger says it with what is requested, spent and left, for the noise that the target alone asks for.
            plan = make_plan(config, num_units, accounting_cache(), largest_delta=terms["largest_delta"])
            raise _over_budget(plan, book, custody) from None
    # The noise was calibrated to what was left of the budget then.
    then = {key: standing.plan[key] for key in ("noise_multiplier", "delta")}
    again = config.model_copy(update={"privacy": config.privacy.model_copy(update=then)})
    return make_plan(again, num_units, accounting_cache(), extra_steps=standing.extra_steps + more_steps)


def _over_budget(plan: Plan, book: ledger.Ledger, custody: protect.Custody) -> BudgetExceeded:
    seen = book.outlook(
        custody.dataset,
        event=plan.event,
        delta=plan.delta,
        unit=plan.unit,
        relation=plan.neighbouring_relation,
        num_steps=plan.schedule.num_steps,
        derived_from=custody.derived_from,
    )
    return BudgetExceeded(seen.refusal or "the budget has no room", dataset=seen.dataset, reason="over_budget")


def _canaries(config: RunConfig, run: RunDir, resume: bool, tokenizer: Any, device: torch.device) -> CanaryPlan:
    """Those of the run that goes on, those that ``dpllm canaries plan`` left for a run that has not begun, or new ones.

    Those of an earlier run in the same directory are never taken: what it published tells their coins.
    """
    settings = config.audit.canaries
    assert settings is not None
    if resume:
        plan = canaries.load(run.canaries)
        if run.plan.exists() and read_json(run.plan).get("canary_commitment") != plan.commitment:
            raise ConfigError(
                f"{run.canaries}: these are not the canaries that the run began with, so no audit could count on them. Restore "
                "the file, or train again."
            )
        return plan
    if run.canaries.exists() and not run.config.exists():
        return canaries.check_fits(canaries.load(run.canaries), settings, run.canaries)
    # Its base model, which some kinds load, is gone before the one that trains is built.
    return canaries.plan_canaries(settings, source=ModelSource(config, tokenizer, device))


def _plan_json(
    config: RunConfig, plan: Plan | None, canary_plan: Any, standing: Standing | None
) -> dict[str, Any] | None:
    if plan is None:
        return None
    if standing:
        return check_promise(plan, standing)
    commitment = canary_plan.commitment if canary_plan else None
    fixed = {"canary_commitment": commitment, "audit": config.audit.fixed()}
    return {**plan.to_json(), **_checked(plan), **fixed}


def _checked(plan: Plan) -> dict[str, Any]:
    second = accounting.cross_check(plan.event, plan.delta, plan.neighbouring_relation, plan.epsilon)
    return {"cross_check": second}


def _reserve(
    plan: Plan, run: RunDir, book: ledger.Ledger, custody: protect.Custody, entry: str | None
) -> tuple[str, int]:
    if entry is not None:
        account = book.records.charged_to(custody.dataset, custody.derived_from)
        steps = plan.schedule.num_steps
        taken = take(book, entry, dataset=account, event=plan.event, num_steps=steps, records=custody.records)
        return taken.entry, taken.num_steps
    claim = book.reserve(
        custody.dataset,
        event=plan.event,
        delta=plan.delta,
        unit=plan.unit,
        relation=plan.neighbouring_relation,
        num_steps=plan.schedule.num_steps,
        run=f"{run.root.name}-{secrets.token_hex(4)}",
        records=custody.records,
        derived_from=custody.derived_from,
    )
    return claim.entry, claim.num_steps


def _held_out(config: RunConfig, tokenizer: Any, cache: Path) -> list[data.TokenSequence]:
    if config.data.eval is None:
        return []
    table = data.load_table(config.data.eval, config.data, config.data.eval_split, cache)
    units = data.iter_units(each_row(table.rows), table.format, tokenizer, config.data, name=table.name)
    return [sequence for unit in units for sequence in unit.sequences]


def _vocabulary(
    config: RunConfig,
    net: Any,
    tokenizer: Any,
    units: Sequence[data.Unit | None],
    held_out: Sequence[data.TokenSequence],
) -> int:
    """How many tokens both tokenizer and model know. Gemma 3's tokenizer has one more, for images, that no text holds."""
    known, made = int(net.get_input_embeddings().weight.shape[0]), len(tokenizer)
    sequences = itertools.chain((sequence for unit in units if unit for sequence in unit.sequences), held_out)
    if made > known and any(max(sequence.input_ids) >= known for sequence in sequences):
        raise ConfigError(
            f"{config.model.name_or_path}: the tokenizer has {made} tokens and the model embeddings of {known}, and the data "
            "hold some that have none, which the model cannot read. Use the tokenizer that the model was trained with, or give "
            f"the model more: model.resize_token_embeddings({made}), save it, and name that directory."
        )
    return min(known, made)


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
