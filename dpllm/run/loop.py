"""The one loop. Read this first.

Comes in: a recipe. Goes out: a run directory. LoRA, frozen layers and the baseline without differential privacy all run
through ``train``, in one process or many; they differ in what ``loading.build`` unfreezes and in whether there is a Plan.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console

from dpllm.model import evaluate, memory, processes
from dpllm.model.processes import ahead, stop_signal
from dpllm.privacy import guards
from dpllm.privacy.sampling import PhysicalBatch, physical_batches
from dpllm.recipe.config import RunConfig
from dpllm.run.build import Prepared, check_processes, prepare
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.failures import fail_together
from dpllm.run.optimizer import learning_rate
from dpllm.run.promise import Start
from dpllm.run.record import Recorder
from dpllm.statement.run_files import RunRecord, read_run
from dpllm.telemetry import Telemetry
from dpllm.text import tokens

COMPARE_EVERY = 50  # steps after which the ranks compare their weights; also at every stop and at the end


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    make_up_lost_steps: bool = False,
    entry: str | None = None,
    console: Console | None = None,
) -> RunRecord:
    """Runs a recipe from data to export/.

    Args:
        config: The recipe.
        resume: Go on with the interrupted run in ``output_dir``: same reservation, fresh noise.
        overwrite: Replace a run that lies in ``output_dir``. What it spent stays in the ledger.
        make_up_lost_steps: With ``resume``: steps that were charged and lost in a crash are reserved once more and repeated;
            the stated epsilon then covers them too.
        entry: A reservation that was made for this run before, as one of a tuning group; None: it makes its own.
        console: Where progress and tables go.

    Returns:
        What run.json says.

    Raises:
        ConfigError: The recipe or the data cannot be used (exit code 2).
        Refused: A guard or the ledger's budget refuses (exit code 3).
    """
    guards.check_modes(config)  # before anything is made
    started, start = time.time(), Start(resume, make_up_lost_steps, overwrite, entry)
    state, run = processes.join(), RunDir(Path(config.output_dir))
    main = state.is_main_process
    console = console or Console(quiet=not main)
    torch.set_float32_matmul_precision("highest")  # TF32 off: norms and sums are float32
    memory.reset_peak_memory()
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(fail_together(config.train.process_timeout))  # where one process fails, all end
        check_processes(config, state)
        if main:  # rank 0 alone reads and writes the run directory
            check_directory(config, run, resume=resume, overwrite=overwrite)  # before anything is made
            stack.enter_context(run.locked())
        telemetry = stack.enter_context(Telemetry(config, run, main=main))
        prepared = prepare(config, start, state, console)  # all that can refuse; last of all the reservation
        stack.enter_context(contextlib.closing(prepared.payment))
        recorder = stack.enter_context(Recorder(prepared, started, telemetry, watch, console, main=main))
        settings, total, step = prepared.config.train, prepared.schedule.num_steps, prepared.first_step

        recorder.evaluated(_evaluate(prepared, state), "before")
        with (
            stop_signal() as stopping,
            contextlib.closing(ahead(partial(_next_batches, prepared, state), total - step)) as logical_batches,
        ):
            (stop,) = processes.totals(len(stopping))
            while step < total and not stop:
                watch.step(step + 1)
                rate = learning_rate(settings, step, total)
                for group in prepared.optimizer.param_groups:
                    group["lr"] = rate
                batches = next(logical_batches)
                prepared.payment.charge(step + 1)  # written before the update exists
                with memory.explained(prepared.config, prepared.physical_batch_size):
                    mine = prepared.engine.step(batches)
                step += 1
                stop, loss_sum, units, clipped = processes.totals(
                    len(stopping), mine.loss_sum, mine.units, mine.clipped
                )
                if step % COMPARE_EVERY == 0 or stop or step == total:
                    processes.check_same_weights(prepared.engine.parameters.values(), step)
                recorder.step(step, rate, loss_sum, units, clipped)
                watch.rest()  # what comes now may take as long as it wants
                # once in a while:
                if settings.eval_every and step % settings.eval_every == 0 and step < total:
                    recorder.evaluated(_evaluate(prepared, state), "during")
                if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                    recorder.save()

        prepared.engine.close()
        if step < total or (settings.checkpoint_every and step > prepared.first_step):
            recorder.save()  # a crash from here on must not lose paid steps
        recorder.evaluated(_evaluate(prepared, state), "after")
        recorder.finish()
        if step == total and state.is_local_main_process:  # a copy of private text that nobody reads again
            shutil.rmtree(run.private / "cache" / tokens.FOLDER, ignore_errors=True)
        record = read_run(run) if main else None
        try:
            shared: RunRecord = processes.shared(record)
            return shared
        except RuntimeError:  # another process died; rank 0 has written everything down
            if record is None:
                raise
            return record


def _next_batches(prepared: Prepared, state: PartialState) -> list[PhysicalBatch]:
    """This rank's part of the next logical batch, in physical batches."""
    pad_id = prepared.tokenizer.pad_token_id if prepared.tokenizer.pad_token_id is not None else 0
    rank, world, longest = state.process_index, state.num_processes, prepared.config.data.max_length
    found = physical_batches(
        prepared.sampler.draw(), prepared.units, prepared.physical_batch_size, pad_id, longest, rank, world
    )
    return [batch.pinned() for batch in found] if state.device.type == "cuda" else found


def _evaluate(prepared: Prepared, state: PartialState) -> evaluate.HeldOut | None:
    """Held-out loss and accuracy; None where there are no held-out rows."""
    if not prepared.held_out:
        return None
    size = prepared.physical_batch_size * (4 if state.device.type == "cpu" else 1)
    rank, world = state.process_index, state.num_processes
    with memory.explained(prepared.config, prepared.physical_batch_size):
        return evaluate.held_out_loss(
            prepared.model, prepared.held_out, size, state.device, prepared.autocast, rank, world
        )
