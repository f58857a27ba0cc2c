"""The one loop. Read this first.

Comes in: a recipe. Goes out: a run directory. LoRA, frozen layers and the baseline without differential privacy all run
through ``train``, in one process or many; they differ in what ``loading.build`` unfreezes and in whether there is a Plan.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from rich.console import Console

from dpllm.model import evaluate, memory, processes
from dpllm.model.processes import ahead, stop_signal
from dpllm.privacy.engine import Diagnostics
from dpllm.privacy.packing import Pass, passes_of
from dpllm.progress import heard_by
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig
from dpllm.run.build import Prepared, check_processes, prepare
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.failures import StepDeadline, fail_together
from dpllm.run.promise import Start
from dpllm.run.record import Recorder, may_publish_cost
from dpllm.run.screen import Screen
from dpllm.statement.run_files import RunRecord, read_run
from dpllm.telemetry.live import Callbacks, Telemetry
from dpllm.text import tokens

if TYPE_CHECKING:
    from transformers import TrainerCallback

COMPARE_EVERY = 50  # steps after which the ranks compare their weights; also at every stop and at the end


def train(
    config: RunConfig,
    start: Start | None = None,
    *,
    console: Console | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunRecord:
    """Runs a recipe from data to export/.

    Without ``start`` it begins anew, where no run lies yet; ``callbacks`` are of ``transformers``, the same in every process.
    Returns what run.json says.

    Raises:
        ConfigError: The recipe or the data cannot be used (exit code 2).
        Refused: A guard or the ledger's budget refuses (exit code 3).
    """
    derived.check_modes(config)  # before anything is made
    started, start = time.time(), start or Start()
    state, run = processes.join(), RunDir(Path(config.output_dir))
    main = state.is_main_process
    console = console or Console(quiet=not main)
    torch.set_float32_matmul_precision("highest")  # TF32 off: norms and sums are float32
    memory.reset_peak_memory()
    with contextlib.ExitStack() as stack:
        deadline = stack.enter_context(fail_together(config.train.process_timeout))  # where one process fails, all end
        check_processes(config, state)
        if main:  # rank 0 alone reads and writes the run directory
            check_directory(config, run, resume=start.resume, overwrite=start.overwrite)  # before anything is made
            stack.enter_context(run.locked())
        telemetry = stack.enter_context(Telemetry(config, run, main=main, callbacks=callbacks))
        screen = stack.enter_context(Screen(console, public=may_publish_cost(config)))
        if main:
            stack.enter_context(heard_by(screen))
        prepared = prepare(config, start, state, console)  # all that can refuse; last of all the reservation
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
            recorder.save()  # a crash from here on must not lose paid steps
        recorder.evaluated(_evaluate(prepared, state), "after")
        recorder.finish()
        if step == total and state.is_local_main_process:  # a copy of private text that nobody reads again
            shutil.rmtree(run.private / "cache" / tokens.FOLDER, ignore_errors=True)
        if main:
            telemetry.callbacks.end()
        record = read_run(run) if main else None
        try:
            everywhere: RunRecord = processes.shared(record)
            return everywhere
        except RuntimeError:  # another process died; rank 0 has written everything down
            if record is None:
                raise
            return record


def _take_steps(
    prepared: Prepared, recorder: Recorder, callbacks: Callbacks, deadline: StepDeadline, state: PartialState
) -> int:
    """Charge, step, log, until all steps are taken or somebody stops the run; the steps taken."""
    settings, total, step = prepared.config.train, prepared.schedule.num_steps, prepared.first_step
    learning_rate = derived.learning_rate_of(settings)
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
                mine = prepared.engine.step(batches, canaries)
            step += 1
            positions = float(sum(batch.input_ids_1M.numel() for batch in batches))
            stop, positions, loss_sum, units, clipped, norm_sum, *by_layer = processes.totals(
                len(stopping), positions, mine.loss_sum, mine.units, mine.clipped, mine.norm_sum, *mine.clipped_by_layer
            )
            everyone = Diagnostics(loss_sum, int(units), int(clipped), norm_sum, tuple(map(int, by_layer)))
            recorder.step(step, rate, int(positions), everyone)
            if callbacks:
                stop = max(stop, *processes.totals(int(callbacks.stop)))
            if step % COMPARE_EVERY == 0 or stop or step == total:
                processes.check_same_weights(prepared.engine.parameters.values(), step)
            deadline.rest()  # what comes now may take as long as it wants
            # once in a while:
            if settings.eval_every and step % settings.eval_every == 0 and step < total:
                recorder.evaluated(_evaluate(prepared, state), "during")
            if prepared.samples.due(step, total):
                texts = prepared.samples.write(prepared.model, prepared.tokenizer, prepared.autocast)
                recorder.sampled(prepared.samples.prompts, texts)
            if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                recorder.save()
    return step


def _next_batches(prepared: Prepared, state: PartialState) -> tuple[list[Pass], list[int]]:
    """This rank's part of the next logical batch, in passes, and the gradient canaries in it, which are rank 0's."""
    pad_id, rank, world = prepared.tokenizer.pad_token_id or 0, state.process_index, state.num_processes
    drawn, first = prepared.sampler.draw(), len(prepared.units) - prepared.config.audit.gradient_canaries
    units = prepared.units if prepared.pairs is None else prepared.pairs.sampled
    found = passes_of(drawn, units, prepared.engine.packing, pad_id, rank, world)
    canaries = [slot - first for slot in drawn if slot >= first] if rank == 0 else []
    return [batch.pinned() for batch in found] if state.device.type == "cuda" else found, canaries


def _evaluate(prepared: Prepared, state: PartialState) -> evaluate.HeldOut | None:
    """Held-out loss and accuracy; None where there are no held-out rows."""
    if not prepared.held_out:
        return None
    rank, world, device = state.process_index, state.num_processes, state.device
    if prepared.pairs and prepared.engine.pairs:
        return prepared.pairs.rewards.held_out(prepared.pairs.held_out, prepared.engine.pairs, rank, world)
    size = max(1, 2 * prepared.engine.packing.tokens // prepared.config.data.max_length)
    with memory.explained(prepared.config, prepared.engine.packing):
        return evaluate.held_out_loss(prepared.model, prepared.held_out, size, device, prepared.autocast, rank, world)
