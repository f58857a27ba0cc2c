"""What stands before the first gradient: the decision, data, model, self-check, and last of all the reservation.

Comes in: a recipe. Goes out: a ``Prepared`` value from which the loop runs. Everything that can be refused is refused here,
before anything is spent.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan, encode_secret
from dpllm.canaries.source import ModelSource
from dpllm.errors import ConfigError, Refused
from dpllm.files import write_json
from dpllm.ledger import open_ledger
from dpllm.model import environment, loading, memory, processes, sharding
from dpllm.model.processes import salted, shared
from dpllm.privacy import accounting
from dpllm.privacy.engine import Engine
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.plan import Plan, Schedule
from dpllm.privacy.sampling import PoissonSampler
from dpllm.privacy.schedule import Shape
from dpllm.privacy.selfcheck import Checked
from dpllm.privacy.stream import os_entropy
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.recipe.derived import shapes_for
from dpllm.run import checkpoint, verdict
from dpllm.run.directory import RunDir
from dpllm.run.mechanism import Autocast, build_model, check_in_float32, check_rows, is_low, make_engine, make_optimizer
from dpllm.run.payment import Payment, pay
from dpllm.run.projections import KeptGroups, read_groups
from dpllm.run.promise import Decision, Start, decide
from dpllm.run.resume import ResumeState, flat
from dpllm.run.samples import Samples
from dpllm.statement.run_files import PlanRecord, read_plan
from dpllm.text import data, prompts, tokens
from dpllm.text.rows import each_row

PLACES = {"output_dir", "data.train", "data.eval", "model.name_or_path", "model.adapter", "privacy.ledger"}
PLACES |= {"telemetry.textfile"}


@dataclass(frozen=True)
class Prepared:
    """What stands before the first gradient."""

    decision: Decision  # recipe, Plan, schedule and lineage
    run: RunDir
    units: Sequence[data.Unit | None]  # what is sampled, canary slots last; None for a slot without data
    held_out: list[data.TokenSequence]
    samples: Samples  # prompts of texts that are written during training
    tokenizer: Any
    model: Any  # in training mode, on its device
    optimizer: torch.optim.Optimizer
    engine: Engine  # hooked into the model, and checked
    autocast: Autocast
    sampler: PoissonSampler
    payment: Payment
    first_step: int  # steps taken before a resume
    shapes: Sequence[Shape]  # of physical batches, by ascending length
    checked: Checked  # what the self-check found
    notes: list[str]  # what the card must name
    dropout_off: dict[str, float] | None  # rates that were set to zero; None without privacy, where they hold

    @property
    def config(self) -> RunConfig:
        """The recipe, with the format that was found."""
        return self.decision.config

    @property
    def plan(self) -> Plan | None:
        """The promise; None without differential privacy."""
        return self.decision.plan

    @property
    def physical_batch_size(self) -> int:
        """Rows in one forward pass, at most."""
        return max(shape.rows for shape in self.shapes)

    @property
    def schedule(self) -> Schedule:
        """Sampling rate, steps, size."""
        assert self.decision.schedule is not None
        return self.decision.schedule


def check_processes(config: RunConfig, state: PartialState) -> None:
    """Makes sure that all processes are about to run the same recipe with the same code; places may differ.

    Raises:
        ConfigError: They are not, or there are more of them than units in a logical batch.
        Refused: Their processors, devices or settings would round the same unit in different ways.
    """
    keys = flat(config.model_dump(mode="json"))
    processes.check_equal(environment.versions() | {f"the recipe's {key}": keys[key] for key in keys.keys() - PLACES})
    if config.privacy.enabled:
        # Within a step all ranks round alike. A run that goes on elsewhere rounds its later steps in another way, which costs
        # nothing: each step's noise covers what one unit moves in that step.
        processes.check_rounding(environment.kernels(state.device))
    if sharding.requested():
        sharding.check(config)
    if state.num_processes > config.train.batch_size:
        raise ConfigError(
            f"{state.num_processes} processes share an expected batch of {config.train.batch_size} units, so that some would "
            f"mostly wait. Start at most {config.train.batch_size}, or raise train.batch_size."
        )


def prepare(config: RunConfig, start: Start, state: PartialState, console: Console) -> Prepared:
    """Everything up to the first step; the reservation comes last.

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
        if not start.resume and state.is_local_main_process:  # a run that goes on needs its own tokens
            shutil.rmtree(run.private / "cache" / tokens.FOLDER, ignore_errors=True)
        if isinstance(error, Refused) and state.is_main_process:
            _note(error, config, run)
        raise


def _check(
    decision: Decision,
    net: Any,
    engine: Engine,
    vocabulary: int,
    pad_id: int,
    precision: torch.dtype | None,
    start: Start,
    console: Console,
) -> tuple[Sequence[Shape], Checked]:
    """The shapes of physical batches, and what the self-check says of them; without a Plan there is none."""
    config, plan, state = decision.config, decision.plan, PartialState()
    assert decision.schedule is not None
    rows = memory.resolve(engine, config, vocabulary, state.device, world=state.num_processes)
    of_rows = shapes_for(config, decision.schedule, memory.fixed_tokens(state.device, net))
    low = is_low(net, precision)
    if plan is None:
        return of_rows(rows), Checked(0.0)
    key = partial(verdict.key_of, config, net, vocabulary=vocabulary, pad_id=pad_id, precision=str(precision))
    kept = verdict.Kept(key, start.fresh_check)
    shapes, checked = check_rows(engine, vocabulary, of_rows, rows, pad_id=pad_id, low=low, kept=kept, console=console)
    if low:
        check_in_float32(config, net, plan, state.device, shapes)
    return shapes, checked


def _note(error: Refused, config: RunConfig, run: RunDir) -> None:
    """Writes down that a run was refused: in run.json of a directory without one, and among the ledger's counts."""
    with contextlib.suppress(ConfigError):  # a ledger that cannot be opened must not hide the refusal
        if error.reason and (ledger := open_ledger(config.privacy.ledger, create=False)):
            with ledger:
                ledger.count_refusal(error.dataset, error.reason)
    if not run.run.exists():
        reason = {"holds": False, "reason": f"the run was refused: {error}"}
        with contextlib.suppress(OSError):
            write_json(run.run, {"status": "refused", "guarantee": reason, "steps_taken": 0})


def _prepare(config: RunConfig, run: RunDir, start: Start, state: PartialState, console: Console) -> Prepared:
    main, cache, device = state.is_main_process, run.private / "cache", state.device
    decision: Decision = shared(decide(config, start, fetch=True, cache=cache).obeyed() if main else None)
    # With places of this machine, not of rank 0's.
    config = config.model_copy(update={"data": config.data.model_copy(update={"format": decision.config.data.format})})
    decision = replace(decision, config=config)
    plan, resumed = decision.plan, decision.resumed
    console.print(str(decision), markup=False)
    tokenizer = loading.load_tokenizer(config.model)
    plants = main and config.audit.canaries is not None
    planted = shared(_canaries(config, run, start.resume, tokenizer, device) if plants else None)
    promise = _promise(decision, planted)
    table, units = _units(config, decision, tokenizer, planted, cache)
    evaluation, held_out = _held_out(config, tokenizer, cache)
    samples = Samples.of(config, tokenizer, main=main)  # before anything is reserved
    told = {"training": units.digest, "held-out": repr(held_out)}
    processes.check_equal({f"the {name} data, as tokens,": salted(one) for name, one in told.items()})
    net, dropout_off = build_model(decision, device, console)
    vocabulary, optimizer = _vocabulary(config, net, tokenizer, units, held_out), make_optimizer(config.train, net)
    groups: int = shared(_groups_key(config, run, plan, resumed) if main else 0)
    precision = shared(loading.precision_of(config.train, device))  # auto: what rank 0 makes of it
    sampler, engine, autocast = make_engine(decision, net, optimizer, len(units), device, precision, groups)
    if plan and planted and main:
        _plant(planted, engine, plan.clipping, device)
    shapes, checked = _check(decision, net, engine, vocabulary, tokenizer.pad_token_id or 0, precision, start, console)
    notes = [*decision.policy.deviations]
    if resumed:
        saved: checkpoint.State = shared(checkpoint.load_resume(run, net, optimizer) if main else None)
        processes.replicate(optimizer, list(checkpoint.kept(net).values()))
        engine.max_grad_norm = saved.max_grad_norm
        new = [*saved.notes, *_lost(resumed.to_make_up, made_up=plan is not None and start.make_up_lost_steps)]
        notes = [*dict.fromkeys((*notes, *resumed.notes, *_said(new, console)))]
    payment = pay(config, decision, start, run, table) if main else Payment()
    claims = shared(payment.claims)
    if main:
        try:
            if not resumed:
                run.clear(keep=units.path)
                run.make()
                run.config.write_text(dump_config(config), encoding="utf-8")
                if planted:
                    canaries.save(planted, run.canaries)
            prompts.keep_rows(run.rows, config.data, table, evaluation)
            if plan and plan.coefficients:
                _save_turns(run, plan, groups, len(units), resumed.charged if resumed else None)
            if promise:
                write_json(run.plan, promise.to_json())
        except BaseException:
            payment.close()
            raise
    state.wait_for_everyone()
    return Prepared(
        decision, run, units, held_out, samples, tokenizer, net, optimizer, engine, autocast, sampler,
        payment if main else Payment(claims), resumed.charged if resumed else 0, shapes, checked, notes, dropout_off,
    )  # fmt: skip


def _canaries(config: RunConfig, run: RunDir, resume: bool, tokenizer: Any, device: torch.device) -> CanaryPlan:
    """Those of the run that goes on, those that ``dpllm canaries plan`` left for a run that has not begun, or new ones.

    Those of an earlier run in the same directory are never taken: what it published tells their coins.
    """
    settings = config.audit
    assert settings.canaries is not None
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
    source, gradient = ModelSource(config, tokenizer, device), settings.gradient_canaries
    return canaries.plan_canaries(settings.canaries, source=source, gradient=gradient)


def _lost(steps: int, *, made_up: bool) -> list[str]:
    """What is noted of steps that were charged and that no checkpoint has."""
    if not steps:
        return []
    became = "and were made up by as many more" if made_up else "before the checkpoint and were not repeated"
    return [f"{steps} charged steps were lost {became}"]


def _said(notes: list[str], console: Console) -> list[str]:
    for note in notes:
        console.print(f"Resumed: {note}.", markup=False, highlight=False, soft_wrap=True)
    return notes


def _save_turns(run: RunDir, plan: Plan, key: int, slots: int, charged: int | None) -> None:
    """Writes what a run that goes on, and its audit, read of its groups; ``charged`` is None for a new run."""
    starts = (0,) if charged is None else (*read_groups(run.groups).starts, charged)
    KeptGroups(plan.bands, key, slots, starts).write(run.groups)


def _groups_key(config: RunConfig, run: RunDir, plan: Plan | None, resumed: ResumeState | None) -> int:
    """The secret from which the groups of banded noise follow: drawn once for a run; 0 where there is one group."""
    if plan is None or not plan.coefficients:
        return 0
    if resumed is None:
        seed = config.privacy.insecure_seed
        return os_entropy() if seed is None else seed
    with contextlib.suppress(ConfigError):
        saved = read_groups(run.groups)
        if saved.bands == plan.bands and saved.digest == resumed.groups:
            return saved.key
    raise Refused(
        f"{run.groups}: not the groups that the run began with, so a unit could join in two turns of one round, which no "
        "accountant counts. Restore the file, or start anew with --overwrite."
    )


def _plant(planted: CanaryPlan, engine: Engine, clipping: str, device: torch.device) -> None:
    """Gives gradient canaries to the engine of rank 0, which adds the noise and them."""
    if coins := planted.gradient_coins:
        engine.canaries = GradientCanaries(int(planted.gradient_key, 16), coins, engine.size, clipping, device)


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
    config: RunConfig, decision: Decision, tokenizer: Any, planted: CanaryPlan | None, cache: Path
) -> tuple[data.Table, tokens.Units]:
    """The rows, and the tokenised units with the slots of all canaries behind them: those that the decision is about."""
    table = data.load_table(config.data.train, config.data, config.data.train_split, cache)
    assert decision.subject is not None
    if table.digest != decision.subject.digest:
        raise Refused(
            f"data.train ({config.data.train}) changed after its records were counted and recognised, so the promise would be "
            "about other people. Start again, and leave the file alone meanwhile."
        )
    units = tokens.make_units(table, data.sampled_rows(table, config.data), tokenizer, config.data, cache)
    if planted is not None:
        for candidate in (*planted.canaries, *planted.references):  # found by the audit, it would be paid for
            encode_secret(candidate, table.format, tokenizer, config.data.max_length, config.data.long_examples)
        slots: list[data.Unit | None] = []
        for slot in canaries.slots(planted, config.data):
            rows = [canary.example(table.format) for canary in slot]
            slots += data.encode_units([rows], table.format, tokenizer, config.data) if rows else [None]
        units = units.with_slots([*slots, *[None] * len(planted.gradient_coins)])
    if decision.resumed and decision.resumed.units not in (None, units.digest):
        raise Refused(
            f"{config.output_dir}: data.train now holds other units than the run began with (their rows, their owners or their "
            "order), so its steps would count for people whom it does not protect. Put the file of that time back, or start anew."
        )
    return table, units


def _held_out(config: RunConfig, tokenizer: Any, cache: Path) -> tuple[data.Table | None, list[data.TokenSequence]]:
    if config.data.eval is None:
        return None, []
    table = data.load_table(config.data.eval, config.data, config.data.eval_split, cache)
    units = data.iter_units(each_row(table.rows), table.format, tokenizer, config.data, name=table.name)
    return table, [sequence for unit in units for sequence in unit.sequences]


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
