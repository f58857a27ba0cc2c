"""The one loop. Read this first.

Comes in: a recipe. Goes out: a run directory. LoRA, frozen layers and the baseline without differential privacy all run
through ``_loop``; they differ in what ``model.build`` unfreezes and in whether there is a Plan.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpllm import checkpoint, environment, evaluate, fitting, lineage, ranks, sharding, tokens
from dpllm.config import RunConfig, TrainConfig
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.fate import Watch, one_fate
from dpllm.ledger import Ledger
from dpllm.prepare import Prepared, prepare
from dpllm.privacy import guards
from dpllm.privacy.sampling import PhysicalBatch, physical_batches
from dpllm.record import Summary, may_tell, write_record
from dpllm.resume import flat
from dpllm.rundir import RunDir, check_directory, read_json, write_json
from dpllm.telemetry import EpsilonSpent, Telemetry

T = TypeVar("T")
COMPARE_EVERY = 50  # steps after which the ranks compare their weights; also at every stop and at the end
PLACES = {"output_dir", "data.train", "data.eval", "model.name_or_path", "privacy.ledger", "telemetry.textfile"}


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    make_up_lost_steps: bool = False,
    entry: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Runs a recipe from data to export/.

    Args:
        config: The recipe.
        resume: Go on with the interrupted run in ``output_dir``: same reservation, fresh noise.
        make_up_lost_steps: With ``resume``: steps that were charged and lost in a crash are reserved once more and repeated;
            the stated epsilon then covers them too.
        overwrite: Replace a run that lies in ``output_dir``. What it spent stays in the ledger.
        entry: A reservation that was made for this run before, as one of a tuning group; None: it makes its own.
        console: Where progress and tables go.

    Returns:
        run.json as a dictionary.

    Raises:
        ConfigError: The recipe or the data cannot be used (exit code 2).
        Refused: A guard or the ledger's budget refuses (exit code 3).
    """
    state = ranks.join()
    console = console or Console(quiet=not state.is_main_process)
    run = RunDir(Path(config.output_dir))
    guards.check_modes(config)
    with one_fate(config.train.process_timeout) as watch:
        ranks.check_equal(environment.versions() | _settings(config))
        if sharding.requested():
            sharding.check(config)
        if state.num_processes > config.train.batch_size:
            raise ConfigError(
                f"{state.num_processes} processes share an expected batch of {config.train.batch_size} units, so that some would "
                f"mostly wait. Start at most {config.train.batch_size}, or raise train.batch_size."
            )
        if not state.is_main_process:  # rank 0 alone reads and writes the run directory
            return _train(config, run, state, console, resume, make_up_lost_steps, entry, watch)
        check_directory(config, run, resume=resume, overwrite=overwrite)  # before anything is made
        with run.locked():
            check_directory(config, run, resume=resume, overwrite=overwrite)
            return _train(config, run, state, console, resume, make_up_lost_steps, entry, watch)


def _train(
    config: RunConfig,
    run: RunDir,
    state: PartialState,
    console: Console,
    resume: bool,
    make_up_lost_steps: bool,
    entry: str | None,
    watch: Watch,
) -> dict[str, Any]:
    torch.set_float32_matmul_precision("highest")  # TF32 off: norms and sums are float32
    started = time.time()
    environment.reset_peak_memory()
    with Telemetry(config, run, main=state.is_main_process) as telemetry:
        try:
            prepared = prepare(
                config, run, state, console, resume=resume, make_up_lost_steps=make_up_lost_steps, entry=entry
            )
        except Refused as error:
            if state.is_main_process and not run.run.exists():
                reason = {"holds": False, "reason": f"the run was refused: {error}"}
                write_json(run.run, {"status": "refused", "guarantee": reason, "steps_taken": 0})
            raise
        with prepared.ledger or contextlib.nullcontext():
            return _run(prepared, state, console, started, telemetry, watch)


def _settings(config: RunConfig) -> dict[str, Any]:
    """The recipe key by key, as the ranks compare it; places may differ from machine to machine."""
    return {
        f"the recipe's {key}": value for key, value in flat(config.model_dump(mode="json")).items() if key not in PLACES
    }


def _run(
    p: Prepared, state: PartialState, console: Console, started: float, telemetry: Telemetry, watch: Watch
) -> dict[str, Any]:
    """The loop, and what is written when it ends, whichever way it ends."""
    main, step, summary, epsilon_after = state.is_main_process, p.first_step, Summary(), EpsilonSpent(p.plan)
    if main:  # what run.json says if the process is killed
        write_record(p, None, "interrupted", started, summary, "its process was killed; the ledger holds its steps")
        telemetry.begin(step, epsilon_after(step), base_holds=lineage.why_not(p.lineage) is None)
    try:
        summary.before, summary.accuracy_before = _evaluate(p, state)
        telemetry.evaluated(step, summary.before, summary.accuracy_before)
        if p.config.data.eval_public and summary.before is not None and not p.first_step:
            console.print(f"Held-out loss before: {summary.before:.4f} nats per token")
        for step in _loop(p, state, console, telemetry, epsilon_after, watch):
            settings = p.config.train
            if settings.eval_every and step % settings.eval_every == 0 and step < p.schedule.num_steps:
                loss, accuracy = _evaluate(p, state)
                telemetry.evaluated(step, loss, accuracy)
                _log(p, state, {"step": step, "eval_loss": loss, "eval_accuracy": accuracy})
            if main and settings.checkpoint_every and step % settings.checkpoint_every == 0:
                with watch.writing(), _writable(p, step):
                    _save(p, step)
        status = "completed" if step == p.schedule.num_steps else "interrupted"
        p.engine.close()
        every = p.config.train.checkpoint_every
        unsaved = every and step % every and step > p.first_step  # a crash from here on must not lose paid steps
        if main and (status == "interrupted" or unsaved):
            with watch.writing(), _writable(p, step):
                _save(p, step)
        summary.after, summary.accuracy_after = _evaluate(p, state)
        telemetry.evaluated(step, summary.after, summary.accuracy_after)
        summary.tokens = sum(sum(sequence.loss_mask) for sequence in p.held_out)
    except BaseException as error:
        if main:
            why = f"it ended with {type(error).__name__} after step {step}"
            with (
                watch.writing(),
                contextlib.suppress(OSError),
            ):  # on a full disk, what stands there says interrupted too
                write_record(p, step, "interrupted", started, summary, why)
            telemetry.end()
        raise
    if main:
        with watch.writing(), _writable(p, step):
            checkpoint.export(p.model, p.tokenizer, p.run)
            if p.ledger:
                _finish(p, p.ledger, "completed" if status == "completed" else "interrupted")
            write_record(p, step, status, started, summary)
            telemetry.end()
            if status == "completed":  # last, so that a run killed before it can still be resumed and recorded
                shutil.rmtree(p.run.resume, ignore_errors=True)
        if summary.after is not None and may_tell(p):
            console.print(f"Held-out loss after: {summary.after:.4f} nats per token")
        elif summary.after is not None:  # un-noised, and standard output goes into job logs
            console.print(f"Held-out loss, which is private: {p.run.private / 'summary.json'}")
        console.print(f"[bold]{status}[/] after {step} of {p.schedule.num_steps} steps: {p.run.root}")
    record: dict[str, Any] = read_json(p.run.run) if main else {}
    if step == p.schedule.num_steps and state.is_local_main_process:  # a copy of private text that nobody reads again
        shutil.rmtree(p.run.private / "cache" / tokens.FOLDER, ignore_errors=True)
    try:
        record = ranks.shared(record)
    except RuntimeError:  # another process died; rank 0 has written everything down
        if not main:
            raise
    return record


def _loop(
    p: Prepared, state: PartialState, console: Console, telemetry: Telemetry, epsilon_after: EpsilonSpent, watch: Watch
) -> Iterator[int]:
    """One logical batch after the other; yields the number of steps executed so far."""
    world, main = state.num_processes, state.is_main_process
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    left = p.schedule.num_steps - p.first_step
    with (
        _stop_signal() as stopping,
        Progress(*columns, console=console, disable=not main) as progress,
        contextlib.closing(ahead(partial(_next_batches, p, state), left)) as prepared,
    ):
        task = progress.add_task("training", total=p.schedule.num_steps, completed=p.first_step)
        stop = ranks.totals(len(stopping))[0]
        for step in range(p.first_step, p.schedule.num_steps):
            if stop:
                return
            watch.step(step + 1)
            rate = learning_rate(p.config.train, step, p.schedule.num_steps)
            for group in p.optimizer.param_groups:
                group["lr"] = rate
            batches = next(prepared)
            if p.ledger:
                _charge(p, p.ledger, step + 1)  # written before the update exists
            with fitting.explained(p.config, p.physical_batch_size):
                mine = p.engine.step(batches)
            stop, loss, units, clipped = ranks.totals(len(stopping), mine.loss_sum, mine.units, mine.clipped)
            if world > 1 and ((step + 1) % COMPARE_EVERY == 0 or stop or step + 1 == p.schedule.num_steps):
                ranks.check_same_weights(p.engine.parameters.values(), step + 1)
            mean = loss / units if units and math.isfinite(loss) else None
            private = {"step": step + 1, "loss": mean, "units": int(units), "clipped": int(clipped)}
            released = p.engine.released()
            _log(p, state, {**private, "released": released})
            telemetry.step(step + 1, epsilon_after(step + 1), rate, released, private)
            progress.update(task, completed=step + 1, description=epsilon_after.words(step + 1))
            watch.rest()
            yield step + 1


def _next_batches(p: Prepared, state: PartialState) -> list[PhysicalBatch]:
    """This rank's part of the next logical batch."""
    pad_id = p.tokenizer.pad_token_id if p.tokenizer.pad_token_id is not None else 0
    rank, world = state.process_index, state.num_processes
    longest = p.config.data.max_length
    found = physical_batches(p.sampler.draw(), p.units, p.physical_batch_size, pad_id, longest, rank, world)
    return [batch.pinned() for batch in found] if state.device.type == "cuda" else found


def ahead(make: Callable[[], T], times: int) -> Generator[T]:
    """What ``make`` returns, so many times; the next is made in a thread while the caller works on the last."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = thread.submit(make) if times else None
        for number in range(times):
            assert waiting is not None
            made = waiting.result()
            waiting = thread.submit(make) if number + 1 < times else None
            yield made


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of step 0..num_steps-1; never zero, because every step spends privacy.

    Rises linearly over the warm-up, then falls to 0 as the schedule says; depends on the step alone.
    """
    warm = math.ceil(train.warmup * num_steps)
    if step < warm:
        return train.learning_rate * (step + 1) / (warm + 1)
    left = (num_steps - step) / max(1, num_steps - warm)
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return train.learning_rate * shape[train.lr_scheduler]


def _save(p: Prepared, step: int) -> None:
    """A checkpoint of the main process; the learning rate follows from the step."""
    entry = p.claims[0][0] if p.claims else None
    head, event = p.ledger.head() if p.ledger else None, p.plan.event if p.plan else None
    norm = p.engine.max_grad_norm
    checkpoint.save_resume(
        p.run,
        p.model,
        p.optimizer,
        step=step,
        entry=entry,
        max_grad_norm=norm,
        head=head,
        event=event,
        reserved=sum(size for _, size in p.claims),
        units=getattr(p.units, "digest", None),
    )


@contextlib.contextmanager
def _writable(p: Prepared, step: int) -> Iterator[None]:
    """Turns a disk that is full or gone into one line.

    Raises:
        DpllmError: Something could not be written.
    """
    try:
        yield
    except OSError as error:
        raise DpllmError(
            f"{p.run.root}: cannot be written to ({error.strerror}), so the run ended after step {step}; its steps stay charged. "
            "Free some space, and type --resume where a checkpoint was kept."
        ) from None


def _charge(p: Prepared, ledger: Ledger, step: int) -> None:
    """Charges a step to the reservation that pays for it: the run's own, then those that make up lost steps."""
    for entry, size in p.claims:
        if step <= size:
            return ledger.charge(entry, step)
        step -= size
    raise Refused("this step was not reserved. Reserve a new run for more steps.")


def _finish(p: Prepared, ledger: Ledger, status: Literal["completed", "interrupted"]) -> None:
    for entry, _ in p.claims:
        # A process that was killed between this and run.json finished the reservation; nothing was left to charge.
        if ledger.run(entry).state != "completed":
            ledger.finish(entry, status)


def _evaluate(p: Prepared, state: PartialState) -> tuple[float | None, float | None]:
    """Held-out loss and next-token accuracy; None for what there is not."""
    if not p.held_out:
        return None, None
    size = p.physical_batch_size * (4 if state.device.type == "cpu" else 1)
    rank, world = state.process_index, state.num_processes
    with fitting.explained(p.config, p.physical_batch_size):
        found = evaluate.held_out_loss(p.model, p.held_out, size, state.device, p.autocast, rank, world)
    loss = found.loss if math.isfinite(found.loss) else None  # of a run that diverged; JSON has no word for it
    return loss, found.accuracy


def _log(p: Prepared, state: PartialState, values: dict[str, Any]) -> None:
    if state.is_main_process:
        with open(p.run.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({**values, "time": round(time.time(), 2)}) + "\n")


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
