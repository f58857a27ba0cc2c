"""What stands before the first gradient: the decision, data, model, self-check, and last of all the reservation.

Comes in: a recipe. Goes out: a ``Prepared`` value from which the loop runs. Everything that can be refused is refused here,
before anything is spent.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from dpllm import ledger
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan, encode_secret
from dpllm.canaries.source import ModelSource
from dpllm.errors import ConfigError, Refused, RoundsByCompany
from dpllm.files import write_json
from dpllm.model import adapters, environment, loading, memory, processes, sharding
from dpllm.model.processes import salted, shared
from dpllm.privacy import accounting, guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, Engine
from dpllm.privacy.noise import key_bits, os_entropy
from dpllm.privacy.plan import Plan, Schedule
from dpllm.privacy.sampling import PoissonSampler
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.run.optimizer import autocast_of, is_low, make_optimizer, precision_of
from dpllm.run.payment import Payment, pay
from dpllm.run.promise import Decision, Start, decide
from dpllm.run.resume import flat
from dpllm.statement.run_files import PlanRecord, read_plan
from dpllm.text import data, tokens
from dpllm.text.rows import each_row

PLACES = {"output_dir", "data.train", "data.eval", "model.name_or_path", "privacy.ledger", "telemetry.textfile"}
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Prepared:
    """What stands before the first gradient.

    Attributes:
        decision: Recipe, Plan, schedule and lineage.
        run: Where it is written down.
        units: What is sampled, canary slots last; None for a slot without data.
        held_out: Evaluation rows.
        tokenizer: Of the base model.
        model: In training mode, on its device.
        optimizer: Over what trains.
        engine: Hooked into the model, and checked.
        autocast: Makes the context of a forward pass.
        sampler: Draws the logical batches.
        payment: What each step is charged to.
        first_step: Steps taken before a resume.
        physical_batch_size: Rows in one forward pass, at most.
        notes: What the card must name.
        dropout_off: Rates of the base model that were set to zero; None without differential privacy, where they hold.
    """

    decision: Decision
    run: RunDir
    units: Sequence[data.Unit | None]
    held_out: list[data.TokenSequence]
    tokenizer: Any
    model: Any
    optimizer: torch.optim.Optimizer
    engine: Engine
    autocast: Autocast
    sampler: PoissonSampler
    payment: Payment
    first_step: int
    physical_batch_size: int
    notes: list[str]
    dropout_off: dict[str, float] | None

    @property
    def config(self) -> RunConfig:
        """The recipe, with the format that was found."""
        return self.decision.config

    @property
    def plan(self) -> Plan | None:
        """The promise; None without differential privacy."""
        return self.decision.plan

    @property
    def schedule(self) -> Schedule:
        """Sampling rate, steps, size."""
        assert self.decision.schedule is not None
        return self.decision.schedule


def check_processes(config: RunConfig, state: PartialState) -> None:
    """Makes sure that all processes are about to run the same recipe with the same code; places may differ.

    Raises:
        ConfigError: They are not, or there are more of them than units in a logical batch.
    """
    keys = flat(config.model_dump(mode="json"))
    processes.check_equal(environment.versions() | {f"the recipe's {key}": keys[key] for key in keys.keys() - PLACES})
    if sharding.requested():
        sharding.check(config)
    if state.num_processes > config.train.batch_size:
        raise ConfigError(
            f"{state.num_processes} processes share an expected batch of {config.train.batch_size} units, so that some would "
            f"mostly wait. Start at most {config.train.batch_size}, or raise train.batch_size."
        )


def prepare(config: RunConfig, start: Start, state: PartialState, console: Console) -> Prepared:
    """Everything up to the first step; the reservation comes last.

    Args:
        config: The recipe.
        start: How the run begins.
        state: This process among the others.
        console: Where promise and tables go.

    Raises:
        ConfigError: The recipe or the data cannot be used.
        Refused: A guard, the self-check or the ledger's budget refuses; the ledger counts it, and nothing is spent.
    """
    run = RunDir(Path(config.output_dir))
    try:
        run.private.mkdir(mode=0o700, parents=True, exist_ok=True)  # before the first copy of private data lies in it
    except OSError as error:
        raise ConfigError(
            f"{run.root}: cannot be written to ({error.strerror}), and every process keeps tokens there. Type another "
            "--output_dir."
        ) from None
    try:
        return _prepare(config, run, start, state, console)
    except BaseException as error:
        if (
            not start.resume and state.is_local_main_process
        ):  # what this attempt tokenised; a run that goes on needs its own
            shutil.rmtree(run.private / "cache" / tokens.FOLDER, ignore_errors=True)
        if isinstance(error, Refused) and state.is_main_process:
            _note(error, config, run)
        raise


def _prepare(config: RunConfig, run: RunDir, start: Start, state: PartialState, console: Console) -> Prepared:
    main, cache, device = state.is_main_process, run.private / "cache", state.device
    decision: Decision = shared(decide(config, start, fetch=True, cache=cache).obeyed() if main else None)
    data_config = config.data.model_copy(update={"format": decision.config.data.format})
    config = config.model_copy(update={"data": data_config})  # with places of this machine, not of rank 0's
    decision = replace(decision, config=config)
    plan, schedule, resumed = decision.plan, decision.schedule, decision.resumed
    assert schedule is not None
    console.print(str(decision), markup=False)
    tokenizer = loading.load_tokenizer(config.model)
    planted = None
    if config.audit.canaries:
        planted = shared(_canaries(config, run, start.resume, tokenizer, device) if main else None)
    promise = _promise(decision, planted)

    table = data.load_table(config.data.train, config.data, config.data.train_split, cache)
    assert decision.subject is not None
    if table.digest != decision.subject.digest:
        raise Refused(
            f"data.train ({config.data.train}) changed after its records were counted and recognised, so the promise would be "
            "about other people. Start again, and leave the file alone meanwhile."
        )
    units = _units(config, table, tokenizer, planted, cache)
    held_out = _held_out(config, tokenizer, cache)
    processes.check_equal({"the training data, as tokens,": salted(units.digest)})
    processes.check_equal({"the held-out data, as tokens,": salted(repr(held_out))})
    if resumed and resumed.units not in (None, units.digest):
        raise Refused(
            f"{run.root}: data.train now holds other units than the run began with (their rows, their owners or their order), so "
            "its steps would count for people whom it does not protect. Put the file of that time back, or start anew."
        )

    net, dropout_off = _build(config, plan, device, console)
    vocabulary = _vocabulary(config, net, tokenizer, units, held_out)
    optimizer = make_optimizer(config.train, net)
    sampler, engine, autocast = _mechanism(config, net, optimizer, schedule, plan, len(units), device)
    rows = memory.resolve(engine, config, vocabulary, device, world=state.num_processes)
    low = is_low(config, net, device)
    rows = _self_check(engine, config, vocabulary, rows, low, tokenizer.pad_token_id or 0, console)
    if plan and low:
        _check_in_float32(config, net, plan, device, rows)

    notes = decision.policy.deviations()
    if resumed:
        saved = shared(checkpoint.load_resume(run, net, optimizer) if main else {})
        processes.replicate(optimizer, list(engine.parameters.values()))
        engine.max_grad_norm = saved.get("max_grad_norm", engine.max_grad_norm)
        notes += [note for note in (*resumed.notes, *saved["notes"]) if note not in notes]
        if lost := resumed.to_make_up:
            made_up = f"{lost} charged steps were lost and were made up by as many more"
            left_out = f"{lost} charged steps were lost before the checkpoint and were not repeated"
            notes.append(made_up if plan and start.make_up_lost_steps else left_out)
    payment = pay(config, decision, start, run, table) if main else Payment()
    claims = shared(payment.claims)
    if main:
        try:
            _begin(run, config, planted, promise, resume=start.resume, keep=units.path)
        except BaseException:
            payment.close()
            raise
    state.wait_for_everyone()
    return Prepared(
        decision, run, units, held_out, tokenizer, net, optimizer, engine, autocast, sampler,
        payment if main else Payment(claims), resumed.charged if resumed else 0, rows, notes, dropout_off,
    )  # fmt: skip


def _begin(
    run: RunDir,
    config: RunConfig,
    planted: CanaryPlan | None,
    promise: PlanRecord | None,
    *,
    resume: bool,
    keep: Path,
) -> None:
    """Writes recipe, canaries and Plan of a run that is about to begin."""
    if not resume:
        run.clear(keep=keep)
        run.make()
        run.config.write_text(dump_config(config), encoding="utf-8")
        if planted:
            canaries.save(planted, run.canaries)
    if promise:
        write_json(run.plan, promise.to_json())


def _mechanism(
    config: RunConfig,
    net: Any,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    plan: Plan | None,
    size: int,
    device: torch.device,
) -> tuple[PoissonSampler, Engine, Autocast]:
    """Sampler and engine, with keys that no rank but these knows."""
    secure, seed = config.privacy.secure_noise, config.privacy.insecure_seed
    bits = key_bits(secure)
    noise_key, sampling_key = shared((os_entropy(bits), os_entropy(bits)) if seed is None else (2 * seed, 2 * seed + 1))
    precision = precision_of(config.train, device)
    autocast = partial(autocast_of, device, precision)
    engine = Engine(
        net,
        optimizer,
        schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        max_length=config.data.max_length,
        noise_entropy=noise_key,
        secure_noise=secure,
        device=device,
        autocast=autocast,
        loss_scale=FP16_LOSS_SCALE if precision == torch.float16 else 1.0,
    )
    return PoissonSampler(schedule, size, sampling_key, secure=secure), engine, autocast


def _note(error: Refused, config: RunConfig, run: RunDir) -> None:
    """Writes down that a run was refused: in run.json of a directory without one, and among the ledger's counts."""
    with contextlib.suppress(ConfigError):  # a ledger that cannot be opened must not hide the refusal
        if error.reason and (book := ledger.open_ledger(config.privacy.ledger, create=False)):
            with book:
                book.count_refusal(error.dataset, error.reason)
    if not run.run.exists():
        reason = {"holds": False, "reason": f"the run was refused: {error}"}
        with contextlib.suppress(OSError):
            write_json(run.run, {"status": "refused", "guarantee": reason, "steps_taken": 0})


def _promise(decision: Decision, planted: CanaryPlan | None) -> PlanRecord | None:
    """plan.json: the Plan, a second accountant's word, and what the audit may not choose later."""
    plan, resumed = decision.plan, decision.resumed
    if plan is None:
        return None
    before = resumed.plan if resumed else None
    if before is not None and before.num_steps == plan.schedule.num_steps:
        return PlanRecord.pick(before.to_json(), **plan.to_json())
    fixed = {"canary_commitment": planted.commitment if planted else None, "audit": decision.config.audit.fixed()}
    second = accounting.cross_check(plan.event, plan.delta, plan.neighbouring_relation, plan.epsilon)
    return PlanRecord.pick(before.to_json() if before else fixed, **plan.to_json(), cross_check=second)


def _units(
    config: RunConfig, table: data.Table, tokenizer: Any, planted: CanaryPlan | None, cache: Path
) -> tokens.Units:
    """The tokenised units, and behind them the slots of all canaries."""
    units = tokens.make_units(table, data.sampled_rows(table, config.data), tokenizer, config.data, cache)
    if planted is None:
        return units
    for candidate in (*planted.canaries, *planted.references):  # found by the audit, it would be paid for
        encode_secret(candidate, table.format, tokenizer, config.data.max_length, config.data.long_examples)
    slots: list[data.Unit | None] = []
    for slot in canaries.slots(planted, config.data):
        rows = [canary.example(table.format) for canary in slot]
        slots += data.encode_units([rows], table.format, tokenizer, config.data) if rows else [None]
    return units.with_slots(slots)


def _build(
    config: RunConfig, plan: Plan | None, device: torch.device, console: Console
) -> tuple[Any, dict[str, float] | None]:
    """The model with what trains, and the rates of dropout that were set to zero; says both."""
    net = loading.build(config, device)
    guards.check_model(net)
    loading.check_length(config, net)
    _show_trainable(net, console)
    dropout_off = loading.without_dropout(net) if plan else None
    if dropout_off:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout_off.items())
        console.print(
            f"The base model's dropout is off, as its masks would tie what one unit adds to the others: {rates}"
        )
    if (
        config.adapter.method == "lora"
        and config.adapter.target_modules == "auto"
        and (apart := adapters.left_out(net))
    ):
        what = "routers, experts and others whose gradients of single rows or adapters cannot be had"
        console.print(f"adapter.target_modules: auto leaves out {', '.join(apart)}: {what}.")
    if adapters.untied(net):
        console.print("The base model ties its head to its input embedding; what trains is a copy, so they are untied.")
    return net, dropout_off


def _self_check(
    engine: Engine, config: RunConfig, vocabulary: int, rows: int, low: bool, pad_id: int, console: Console
) -> int:
    """Checks the engine against brute-force autograd; the physical batch size, 1 where a kernel rounds rows by company."""
    check = partial(engine.self_check, vocabulary, config.data.max_length, low_precision=low, pad_id=pad_id)
    alone, error = "", 0.0
    try:
        error = check(physical_batch_size=rows)
    except RoundsByCompany as refusal:
        alone = str(refusal).partition(", so that")[0]
    if processes.totals(len(alone))[0]:
        console.print(f"train.physical_batch_size is 1 in this run, which is slower: {alone}.")
        rows, error = 1, check(physical_batch_size=1)
    if config.privacy.enabled:
        console.print(f"Self-check against brute-force autograd: largest relative error {error:.1e}")
    return rows


def _check_in_float32(config: RunConfig, net: Any, plan: Plan, device: torch.device, rows: int) -> None:
    """The self-check once more, on a small float32 model of the same architecture: low precision hides small errors."""
    small = loading.shrunken(config, net, device)
    engine = Engine(
        small,
        make_optimizer(config.train, small),
        plan.schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        max_length=config.data.max_length,
        noise_entropy=0,  # it draws none
        device=device,
    )
    try:
        engine.self_check(loading.SHRUNKEN_VOCABULARY, config.data.max_length, physical_batch_size=min(8, rows))
    finally:
        engine.close()


def _canaries(config: RunConfig, run: RunDir, resume: bool, tokenizer: Any, device: torch.device) -> CanaryPlan:
    """Those of the run that goes on, those that ``dpllm canaries plan`` left for a run that has not begun, or new ones.

    Those of an earlier run in the same directory are never taken: what it published tells their coins.
    """
    settings = config.audit.canaries
    assert settings is not None
    if resume:
        plan = canaries.load(run.canaries)
        if run.plan.exists() and read_plan(run).canary_commitment != plan.commitment:
            raise ConfigError(
                f"{run.canaries}: these are not the canaries that the run began with, so no audit could count on them. Restore "
                "the file, or train again."
            )
        return plan
    if run.canaries.exists() and not run.config.exists():
        return canaries.check_fits(canaries.load(run.canaries), settings, run.canaries)
    # Its base model, which some kinds load, is gone before the one that trains is built.
    return canaries.plan_canaries(settings, source=ModelSource(config, tokenizer, device))


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


def _show_trainable(net: torch.nn.Module, console: Console) -> None:
    table = Table("what trains", "tensors", "parameters", title=None)
    rows = adapters.trainable_table(net)
    for kind, tensors, size in rows:
        table.add_row(kind, str(tensors), f"{size:,}")
    total = sum(parameter.numel() for parameter in net.parameters())
    table.add_row(
        "all", str(sum(row[1] for row in rows)), f"{sum(row[2] for row in rows):,} of {total:,}", style="bold"
    )
    console.print(table)
