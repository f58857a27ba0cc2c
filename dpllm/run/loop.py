"""The training loop, and the preparation before its first step. Read this first.

Comes in: a recipe. Goes out: a run directory. LoRA, frozen layers and the baseline without differential privacy all run through
``train``, in one process or many; they differ in what ``loading.build`` unfreezes and in whether there is a Plan. ``prepare``
raises every refusal, before anything is spent.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from rich.console import Console

from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.errors import ConfigError, Refused
from dpllm.files import write_json, write_whole
from dpllm.ledger import RunRequest, dataset_policy, open_ledger
from dpllm.ledger.budgets import Reservation, reserve_all, use_reservation
from dpllm.model import evaluate, loading, memory, processes, sharding
from dpllm.model.processes import ahead, salted, shared, stop_signal
from dpllm.model.rewards import Reading, examples_of
from dpllm.privacy import accounting
from dpllm.privacy.engine import Diagnostics
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.packing import Pass, passes_of
from dpllm.privacy.plan import Plan
from dpllm.progress import heard_by
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.run import build, checkpoint
from dpllm.run.build import Prepared
from dpllm.run.checkpoint import ResumeState, flat
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.failures import StepDeadline, fail_together
from dpllm.run.projections import KeptGroups, read_groups
from dpllm.run.promise import Decision, Start, check_modes, decide, learning_rate_of
from dpllm.run.record import Recorder, may_publish_cost
from dpllm.run.screen import Samples, Screen, tell_lengths
from dpllm.statement.run_files import RunRecord, read_run
from dpllm.telemetry.live import Callbacks, Telemetry
from dpllm.text import prompts, tokens
from dpllm.text.data import Rows

if TYPE_CHECKING:
    from transformers import TrainerCallback

COMPARE_EVERY = 50  # steps between comparisons of the ranks' weights; also at every stop and at the end
PLACES = {
    "output_dir",
    "data.train",
    "data.eval",
    "model.name_or_path",
    "model.adapter",
    "privacy.ledger",
    "telemetry.textfile",
}


def train(
    config: RunConfig,
    start: Start | None = None,
    *,
    console: Console | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunRecord:
    """Runs a recipe from data to export/.

    Without ``start``, begins a new run in an unused directory; ``callbacks`` are of ``transformers``, the same in every process.
    Returns the content of run.json.

    Raises:
        ConfigError: The recipe or the data cannot be used (exit code 2).
        Refused: A guard or the ledger's budget refuses (exit code 3).
    """
    check_modes(config)  # before anything is made
    started, start = time.time(), start or Start()
    state, run = processes.join(), RunDir(Path(config.output_dir))
    main = state.is_main_process
    console = console or Console(quiet=not main)
    torch.set_float32_matmul_precision("highest")  # TF32 off: norms and sums are float32
    memory.reset_peak_memory()
    with contextlib.ExitStack() as stack:
        deadline = stack.enter_context(fail_together(config.train.process_timeout))  # if one process fails, all end
        _check_processes(config, state)
        if main:  # only rank 0 reads and writes the run directory
            check_directory(config, run, resume=start.resume, overwrite=start.overwrite)  # before anything is made
            stack.enter_context(run.locked())
        telemetry = stack.enter_context(Telemetry(config, run, main=main, callbacks=callbacks))
        screen = stack.enter_context(Screen(console, public=may_publish_cost(config)))
        if main:
            stack.enter_context(heard_by(screen))
        prepared = prepare(config, start, state, console)  # everything that can refuse; the reservation comes last
        screen.end()
        stack.enter_context(contextlib.closing(prepared.reservation))
        recorder = stack.enter_context(Recorder(prepared, started, telemetry, deadline, console, screen, main=main))
        if not prepared.first_step:
            recorder.evaluated(_evaluate(prepared, state), "before")
        total = prepared.schedule.num_steps
        if main:
            telemetry.callbacks.begin(prepared.first_step, total)
        step = _take_steps(prepared, recorder, telemetry.callbacks, deadline, state)
        prepared.engine.close()
        if step < total or (prepared.config.train.checkpoint_every and step > prepared.first_step):
            recorder.save()  # a crash from here on must not lose charged steps
        recorder.evaluated(_evaluate(prepared, state), "after")
        recorder.finish()
        if step == total and state.is_local_main_process:  # a copy of private text that is no longer needed
            shutil.rmtree(run.private / "cache" / tokens.FOLDER, ignore_errors=True)
        if main:
            telemetry.callbacks.end()
        record = read_run(run) if main else None
        try:
            everywhere: RunRecord = processes.shared(record)
            return everywhere
        except RuntimeError:  # another process died; rank 0 has recorded everything
            if record is None:
                raise
            return record


def _take_steps(
    prepared: Prepared, recorder: Recorder, callbacks: Callbacks, deadline: StepDeadline, state: PartialState
) -> int:
    """Charges, steps and logs until all steps are taken or the run is stopped; returns the number of steps taken."""
    settings, total, step = prepared.config.train, prepared.schedule.num_steps, prepared.first_step
    learning_rate = learning_rate_of(settings)
    with (
        stop_signal() as stopping,
        contextlib.closing(ahead(partial(_next_batches, prepared, state), total - step)) as logical_batches,
    ):
        (stop,) = processes.totals(len(stopping))
        while step < total and not stop:
            deadline.step(step + 1)
            rate = learning_rate.at(step, total)
            for group in prepared.optimizer.param_groups:
                group["lr"] = rate
            batches, canaries = next(logical_batches)
            prepared.reservation.charge(step + 1)  # written before the update exists
            with memory.explained(prepared.config, prepared.engine.packing):
                sums = prepared.engine.step(batches, canaries)
            step += 1
            positions = float(sum(batch.input_ids_1M.numel() for batch in batches))
            stop, positions, loss_sum, units, clipped, norm_sum, *by_layer = processes.totals(
                len(stopping), positions, sums.loss_sum, sums.units, sums.clipped, sums.norm_sum, *sums.clipped_by_layer
            )
            everywhere = Diagnostics(loss_sum, int(units), int(clipped), norm_sum, tuple(map(int, by_layer)))
            recorder.step(step, rate, int(positions), everywhere)
            if callbacks:
                stop = max(stop, *processes.totals(int(callbacks.stop)))
            if step % COMPARE_EVERY == 0 or stop or step == total:
                processes.check_same_weights(prepared.engine.parameters.values(), step)
            deadline.rest()  # the rest may take any time
            # occasionally:
            if settings.eval_every and step % settings.eval_every == 0 and step < total:
                recorder.evaluated(_evaluate(prepared, state), "during")
            if prepared.samples.due(step, total):
                texts = prepared.samples.write(prepared.model, prepared.tokenizer, prepared.autocast)
                recorder.sampled(prepared.samples.prompts, texts)
            if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                recorder.save()
    return step


def _next_batches(prepared: Prepared, state: PartialState) -> tuple[list[Pass], list[int]]:
    """This rank's part of the next logical batch, in passes, and the gradient canaries in it, which rank 0 adds."""
    pad_id, rank, world = prepared.tokenizer.pad_token_id or 0, state.process_index, state.num_processes
    drawn, first = prepared.sampler.draw(), len(prepared.units) - prepared.config.audit.gradient_canaries
    passes = passes_of(drawn, prepared.examples.sampled, prepared.engine.packing, pad_id, rank, world)
    canaries = [slot - first for slot in drawn if slot >= first] if rank == 0 else []
    return [batch.pinned() for batch in passes] if state.device.type == "cuda" else passes, canaries


def _evaluate(prepared: Prepared, state: PartialState) -> evaluate.HeldOut | None:
    if not prepared.held_out:
        return None
    with memory.explained(prepared.config, prepared.engine.packing):
        return prepared.examples.evaluate(state.process_index, state.num_processes)


def _check_processes(config: RunConfig, state: PartialState) -> None:
    """Refuses processes with different recipes (places aside), code or rounding, and more of them than units in a batch."""
    keys = flat(config.model_dump(mode="json"))
    processes.check_equal(processes.versions() | {f"the recipe's {key}": keys[key] for key in keys.keys() - PLACES})
    if config.privacy.enabled:
        # Within a step all ranks must round alike. A run resumed on other hardware rounds later steps differently, which is
        # harmless: each step's noise covers what one unit moves in that step.
        processes.check_rounding(processes.kernels(state.device))
    if sharding.requested():
        sharding.check(config)
    if state.num_processes > config.train.batch_size:
        raise ConfigError(
            f"{state.num_processes} processes share an expected batch of {config.train.batch_size} units, so some would mostly "
            f"be idle. Start at most {config.train.batch_size}, or raise train.batch_size."
        )


def prepare(config: RunConfig, start: Start, state: PartialState, console: Console) -> Prepared:
    """Prepares everything up to the first step; the reservation comes last.

    Raises:
        ConfigError: The recipe or the data cannot be used.
        Refused: A guard, the self-check or the ledger's budget refuses; the ledger counts the refusal, and nothing is spent.
    """
    run = RunDir(Path(config.output_dir))
    try:
        run.private.mkdir(mode=0o700, parents=True, exist_ok=True)  # before private data are first copied into it
    except OSError as error:
        raise ConfigError(
            f"{run.root}: cannot be written to ({error.strerror}), and every process stores tokens there. Type another "
            "--output_dir."
        ) from None
    try:
        return _prepare(config, run, start, state, console)
    except BaseException as error:
        if not start.resume and state.is_local_main_process:  # a resumed run still needs its tokens
            shutil.rmtree(run.private / "cache" / tokens.FOLDER, ignore_errors=True)
        if isinstance(error, Refused) and state.is_main_process:
            _note(error, config, run)
        raise


def _note(error: Refused, config: RunConfig, run: RunDir) -> None:
    """Records a refusal: in the ledger's counts, and in run.json if the directory has none."""
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
    everywhere: Decision = shared(decided.without_rows() if decided else None)
    decision = everywhere.at(config)
    config, plan, resumed = decision.config, decision.plan, decision.resumed
    console.print(str(decision), markup=False)
    tokenizer = loading.load_tokenizer(config.model, config.data)
    drawn = build.draw_canaries(config, run, start.resume, tokenizer, device) if main and config.audit.plants else None
    planted = shared(drawn)
    promise = _promise(decision, planted)
    rows = (decided.subject.rows if decided and decided.subject else None) or build.read_again(decision, cache)
    units = build.tokenised_units(decision, rows, tokenizer, planted, run)
    units.lengths.check(config.data)
    tell_lengths(units.lengths, config, console)
    held_out = build.held_out_tokens(config, rows.held_out, tokenizer)
    samples = Samples.of(config, tokenizer, main=main)  # before anything is reserved
    digests = {"training": units.digest, "held-out": repr(held_out)}
    processes.check_equal({f"the {name} data, as tokens,": salted(digest) for name, digest in digests.items()})
    net, dropout_off = build.build_model(decision, device, console)
    vocabulary = build.vocabulary_of(config, net, tokenizer, units, held_out)
    optimizer = build.make_optimizer(config.train, net)
    key: int = shared(build.groups_key(config, run, plan, resumed) if main else 0)
    precision = shared(loading.precision_of(config.train, device))  # auto: rank 0 decides
    packing = shared(memory.packing_for(config, net, vocabulary, device))
    sampler, engine, autocast = build.make_engine(decision, net, optimizer, len(units), device, precision, packing, key)
    if plan and planted and planted.gradient_coins and main:  # rank 0 adds them with the noise
        coins = planted.gradient_coins
        engine.canaries = GradientCanaries(int(planted.gradient_key, 16), coins, engine.size, plan.clipping, device)
    pad_id = tokenizer.pad_token_id or 0
    checked = build.check_engine(decision, net, engine, vocabulary, pad_id, precision, console)
    reading = Reading(net, engine.packing, pad_id, device, autocast)
    examples = examples_of(engine.example_loss, reading, units, held_out, run.references if resumed else None)
    noted = _load(resumed, run, net, optimizer, console) if resumed else []
    reservation = _reserve(config, decision, start, run, rows) if main else Reservation()
    prepared = Prepared(
        decision=decision,
        run=run,
        units=units,
        held_out=held_out,
        examples=examples,
        samples=samples,
        tokenizer=tokenizer,
        model=net,
        optimizer=optimizer,
        engine=engine,
        autocast=autocast,
        sampler=sampler,
        reservation=reservation,
        checked=checked,
        notes=list(dict.fromkeys([*decision.policy.deviations, *noted])),
        dropout_off=dropout_off,
    )
    if main:
        _write(prepared, promise, planted, key, rows)
    state.wait_for_everyone()
    return prepared


def _load(
    resumed: ResumeState, run: RunDir, net: torch.nn.Module, optimizer: torch.optim.Optimizer, console: Console
) -> list[str]:
    """Restores model and optimizer on all processes; returns the notes of this attempt and earlier ones."""
    if PartialState().is_main_process:
        checkpoint.load_resume(run, net, optimizer)
    processes.replicate(optimizer, list(checkpoint.kept(net).values()))
    for note in resumed.notes:
        console.print(f"Resumed: {note}.", markup=False, highlight=False, soft_wrap=True)
    return [*resumed.noted, *resumed.notes]


def _reserve(config: RunConfig, decision: Decision, start: Start, run: RunDir, rows: Rows) -> Reservation:
    """Reserves what a run will spend, or continues an existing reservation.

    Raises:
        BudgetExceeded: The budget has no room for the run.
        Refused: The existing reservation is of another run.

    Guarantee:
        The returned reservation covers every step of the Plan; if this raises, nothing was written.
    """
    plan = decision.plan
    if plan is None:
        return Reservation()
    policy = decision.policy
    with contextlib.ExitStack() as stack:
        ledger = open_ledger(config.privacy.ledger)  # the first reservation creates the file; a refusal does not
        assert ledger is not None
        stack.enter_context(ledger)
        if policy.records is None:  # there was no ledger to recognise the data with
            policy = dataset_policy.find_policy(config, rows.table, rows.held_out, ledger)
        dataset, parent, records = policy.dataset, policy.derived_from, policy.records
        if decision.resumed is not None:
            entry = decision.resumed.entry
        elif start.entry is not None:
            account, steps = ledger.records.charged_to(dataset, parent), plan.schedule.num_steps
            entry = start.entry
            use_reservation(ledger, entry, dataset=account, event=plan.event, num_steps=steps, records=records)
        else:
            name = f"{run.root.name}-{secrets.token_hex(4)}"
            request = RunRequest.of(plan, name, decision.flaw, final=config.privacy.final)
            entry = reserve_all(ledger, dataset, [request], records=records, derived_from=parent)[0].entry
        stack.pop_all()  # stays open
        return Reservation(entry, ledger)


def _promise(decision: Decision, planted: CanaryPlan | None) -> Plan | None:
    """The content of plan.json: the Plan, a second accountant's result, and choices that the audit may not make later."""
    plan = decision.plan
    if plan is None or decision.resumed:
        return plan
    fixed = {
        "canary_commitment": planted.commitment if planted else None,
        "audit": decision.config.audit.fixed(),
        "cross_check": accounting.cross_check(plan.event, plan.delta, plan.neighbouring_relation, plan.epsilon),
    }
    return plan.model_copy(update=fixed)


def _write(
    prepared: Prepared,
    promise: Plan | None,
    planted: CanaryPlan | None,
    groups_key: int,
    rows: Rows,
) -> None:
    """Writes the run directory's files from before the first step; a new run replaces what was there."""
    run, config, plan, resumed = prepared.run, prepared.config, prepared.plan, prepared.decision.resumed
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(prepared.reservation.close)
        if not resumed:
            run.clear(keep=prepared.units.path)
            run.make()
            if prepared.examples.begun:
                write_whole(run.references, prepared.examples.begun, mode=0o600)
            run.config.write_text(dump_config(config), encoding="utf-8")
            if planted:
                canaries.save(planted, run.canaries)
        prompts.keep_rows(run.rows, config.data, rows.table, rows.held_out)
        if plan and plan.coefficients:
            starts = (*read_groups(run.groups).starts, resumed.charged) if resumed else (0,)
            KeptGroups(plan.bands, groups_key, len(prepared.units), starts).write(run.groups)
        if promise:
            write_json(run.plan, promise.to_json())
        on_failure.pop_all()
