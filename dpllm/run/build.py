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
from dpllm.model.rewards import Pairs, Rewards, referenced
from dpllm.privacy import accounting
from dpllm.privacy.accounting import CrossCheck
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import PoissonSampler
from dpllm.privacy.schedule import Schedule
from dpllm.privacy.selfcheck import Checked
from dpllm.privacy.stream import os_entropy
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.recipe.derived import pairs_of
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.run.mechanism import (
    Autocast,
    build_model,
    check_in_float32,
    check_passes,
    is_low,
    make_engine,
    make_optimizer,
)
from dpllm.run.payment import Payment, pay
from dpllm.run.projections import KeptGroups, read_groups
from dpllm.run.promise import Decision, Start, decide
from dpllm.run.resume import ResumeState, flat
from dpllm.run.samples import Samples
from dpllm.run.screen import tell_lengths
from dpllm.text import data, prompts, tokens
from dpllm.text.rows import Groups, each_row

PLACES = {"output_dir", "data.train", "data.eval", "model.name_or_path", "model.adapter", "privacy.ledger"}
PLACES |= {"telemetry.textfile"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What stands before the first gradient."""

    decision: Decision  # recipe, Plan, schedule and lineage
    run: RunDir
    units: tokens.Units  # what is sampled, canary slots last
    held_out: list[data.TokenSequence]
    pairs: Pairs | None  # of preference training: the same, with what the reference says of each answer
    samples: Samples  # prompts of texts that are written during training
    tokenizer: Any
    model: Any  # in training mode, on its device
    optimizer: torch.optim.Optimizer
    engine: StepEngine  # hooked into the model, and checked
    autocast: Autocast
    sampler: PoissonSampler
    payment: Payment
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
    def first_step(self) -> int:
        """Steps taken before a resume."""
        return self.decision.resumed.charged if self.decision.resumed else 0

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
            f"{state.num_processes} processes share an expected batch of {config.train.batch_size} units, so some would mostly "
            f"be idle. Start at most {config.train.batch_size}, or raise train.batch_size."
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
            f"{run.root}: cannot be written to ({error.strerror}), and every process stores tokens there. Type another "
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
    engine: StepEngine,
    vocabulary: int,
    pad_id: int,
    precision: torch.dtype | None,
    console: Console,
) -> Checked:
    """What the self-check says of the passes, which may change; without a Plan there is none."""
    config, plan, device = decision.config, decision.plan, PartialState().device
    checked = Checked(0.0)
    memory.rehearse(engine, config, vocabulary, device)
    if plan is not None:
        low = is_low(net, precision)
        checked = check_passes(engine, vocabulary, pad_id=pad_id, low=low, console=console)
        if low:
            check_in_float32(config, net, plan, device, engine.packing)
    return checked


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
    decided = decide(config, start, fetch=True, cache=cache).obeyed() if main else None
    rows = decided.subject.rows if decided and decided.subject else None  # rank 0 reads the data once
    decision: Decision = _here(shared(decided.without_rows() if decided else None), config)
    config, plan, resumed = decision.config, decision.plan, decision.resumed
    console.print(str(decision), markup=False)
    tokenizer = loading.load_tokenizer(config.model, config.data)
    plants = main and config.audit.plants
    planted = shared(_canaries(config, run, start.resume, tokenizer, device) if plants else None)
    promise = _promise(decision, planted)
    table, units = _units(decision, rows, tokenizer, planted, run)
    units.lengths.check(config.data)
    tell_lengths(units.lengths, config, console)
    evaluation, held_out = _held_out(config, tokenizer, cache)
    samples = Samples.of(config, tokenizer, main=main)  # before anything is reserved
    digests = {"training": units.digest, "held-out": repr(held_out)}
    processes.check_equal({f"the {name} data, as tokens,": salted(one) for name, one in digests.items()})
    net, dropout_off = build_model(decision, device, console)
    vocabulary, optimizer = _vocabulary(config, net, tokenizer, units, held_out), make_optimizer(config.train, net)
    key: int = shared(_groups_key(config, run, plan, resumed) if main else 0)
    precision = shared(loading.precision_of(config.train, device))  # auto: what rank 0 makes of it
    packing = shared(memory.packing_for(config, net, vocabulary, device))
    sampler, engine, autocast = make_engine(decision, net, optimizer, len(units), device, precision, packing, key)
    if plan and planted and main:  # rank 0 adds the noise, and them
        engine.canaries = _gradient_canaries(planted, engine.size, plan, device)
    checked = _check(decision, net, engine, vocabulary, tokenizer.pad_token_id or 0, precision, console)
    rewards = Rewards(net, engine.packing, tokenizer.pad_token_id or 0, device, autocast)
    pairs = referenced(rewards, units, held_out, run.references, resumed is not None) if engine.pairs else None
    notes = [*decision.policy.deviations]
    if resumed:
        if main:
            checkpoint.load_resume(run, net, optimizer)
        processes.replicate(optimizer, list(checkpoint.kept(net).values()))
        notes = list(dict.fromkeys([*notes, *resumed.noted, *resumed.notes]))
        for note in resumed.notes:
            console.print(f"Resumed: {note}.", markup=False, highlight=False, soft_wrap=True)
    payment = pay(config, decision, start, run, table) if main else Payment()
    prepared = Prepared(
        decision=decision,
        run=run,
        units=units,
        held_out=held_out,
        pairs=pairs,
        samples=samples,
        tokenizer=tokenizer,
        model=net,
        optimizer=optimizer,
        engine=engine,
        autocast=autocast,
        sampler=sampler,
        payment=payment,
        checked=checked,
        notes=notes,
        dropout_off=dropout_off,
    )
    if main:
        _write(prepared, promise, planted, key, table, evaluation)
    state.wait_for_everyone()
    return prepared


def _gradient_canaries(planted: CanaryPlan, size: int, plan: Plan, device: torch.device) -> GradientCanaries | None:
    if not planted.gradient_coins:
        return None
    return GradientCanaries(int(planted.gradient_key, 16), planted.gradient_coins, size, plan.clipping, device)


def _here(decision: Decision, config: RunConfig) -> Decision:
    """Rank 0's decision with places of this machine, and what was found in the data."""
    data = decision.config.data
    seen = {f"data.{name}": getattr(data, name) for name in ("format", "label_epsilon", "chat_template")}
    return replace(decision, config=config.changed(seen))


def _canaries(config: RunConfig, run: RunDir, resume: bool, tokenizer: Any, device: torch.device) -> CanaryPlan:
    """Those of the run that goes on, those that ``dpllm canaries plan`` left for a run that has not begun, or new ones.

    Those of an earlier run in the same directory are never taken: what it published tells their coins.
    """
    settings = config.audit
    if resume:
        return canaries.load(run.canaries)
    if run.canaries.exists() and not run.config.exists():
        return canaries.check_fits(canaries.load(run.canaries), settings, run.canaries, **pairs_of(config))
    # Its base model, which some kinds load, is gone before the one that trains is built.
    source, gradient = ModelSource(config, tokenizer, device), settings.gradient_canaries
    return canaries.plan_canaries(settings.texts, source=source, gradient=gradient, **pairs_of(config))


def _write(
    prepared: Prepared,
    promise: Plan | None,
    planted: CanaryPlan | None,
    groups_key: int,
    table: data.Table,
    evaluation: data.Table | None,
) -> None:
    """What the run directory holds before the first step, of a new run instead of what lay there."""
    run, config, plan, resumed = prepared.run, prepared.config, prepared.plan, prepared.decision.resumed
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(prepared.payment.close)
        if not resumed:
            run.clear(keep=prepared.units.path)
            run.make()
            if prepared.pairs:
                prepared.pairs.keep(run.references)
            run.config.write_text(dump_config(config), encoding="utf-8")
            if planted:
                canaries.save(planted, run.canaries)
        prompts.keep_rows(run.rows, config.data, table, evaluation)
        if plan and plan.coefficients:
            starts = (*read_groups(run.groups).starts, resumed.charged) if resumed else (0,)
            KeptGroups(plan.bands, groups_key, len(prepared.units), starts).write(run.groups)
        if promise:
            write_json(run.plan, promise.to_json())
        on_failure.pop_all()


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
        f"{run.groups}: not the groups that the run began with, so a unit could take part twice in one round, which no "
        "accountant covers. Restore the file, or start anew with --overwrite."
    )


def _promise(decision: Decision, planted: CanaryPlan | None) -> Plan | None:
    """plan.json: the Plan, a second accountant's word, and what the audit may not choose later."""
    plan = decision.plan
    if plan is None or decision.resumed:
        return plan
    second = accounting.cross_check(plan.event, plan.delta, plan.neighbouring_relation, plan.epsilon)
    fixed = {
        "canary_commitment": planted.commitment if planted else None,
        "audit": decision.config.audit.fixed(),
        "cross_check": CrossCheck(**second) if second else None,
    }
    return plan.model_copy(update=fixed)


def _units(
    decision: Decision, rows: tuple[data.Table, Groups] | None, tokenizer: Any, planted: CanaryPlan | None, run: RunDir
) -> tuple[data.Table, tokens.Units]:
    """The rows, and the tokenised units with the slots of all canaries behind them: those that rank 0 decided about."""
    settings, cache = decision.config.data, run.private / "cache"
    if rows is None:  # in another process
        table = data.load_table(settings.train, settings, settings.train_split, cache)
        assert decision.subject is not None
        if table.digest != decision.subject.digest:
            raise Refused(
                f"data.train ({settings.train}) changed while the run was starting, so the guarantee would be about other "
                "people. Start again, and do not change the file meanwhile."
            )
        rows = table, data.sampled_rows(table, settings)
    table, groups = rows
    units = tokens.make_units(table, groups, tokenizer, settings, cache)
    if planted is not None:
        for candidate in (*planted.canaries, *planted.references):  # found by the audit, it would be paid for
            for answer in candidate.answers:
                encode_secret(answer, table.format, tokenizer, settings)
        slots: list[data.Unit | None] = []
        for slot in canaries.slots(planted, settings):
            examples = [canary.example(table.format) for canary in slot]
            slots += data.encode_units([examples], table.format, tokenizer, settings) if examples else [None]
        units = units.with_slots([*slots, *[None] * len(planted.gradient_coins)])
    if decision.resumed and decision.resumed.units != units.digest:
        raise Refused(
            f"{run.root}: data.train now holds other units than the run began with (their rows, owners or order), so its steps "
            "would be charged to the wrong people. Restore the file, or start anew."
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
            f"{config.model.name_or_path}: the tokenizer has {made} tokens but the model only {known} embeddings, and the data "
            "contain tokens without one. Use the tokenizer that the model was trained with, or give the model more: "
            f"model.resize_token_embeddings({made}), save it, and name that directory."
        )
    return min(known, made)
