"""What a run writes down: metrics, checkpoints, the export, and run.json in public and released values only.

Comes in: a prepared run, its steps, and how it ended. Goes out: files, a progress bar, telemetry. Figures that may not leave lie
under private/. Only the main process writes anything; in the others every call does nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpllm import files
from dpllm.errors import DpllmError
from dpllm.files import write_json
from dpllm.model import environment, memory
from dpllm.model.evaluate import HeldOut
from dpllm.privacy import guards
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run import checkpoint
from dpllm.run.build import Prepared
from dpllm.run.failures import StepDeadline
from dpllm.statement import lineage
from dpllm.statement.run_files import COST, Guarantee, Metrics, ModelRecord, RunRecord, read_plan
from dpllm.telemetry import EpsilonSpent, Telemetry

Status = Literal["completed", "interrupted"]


@dataclass
class Summary:
    """Held-out losses in nats per target token, next-token accuracies: private unless the evaluation data are public."""

    before: float | None = None
    after: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """As private/summary.json holds it, beside what the run took."""
        return {
            "eval_loss_before": self.before,
            "eval_loss_after": self.after,
            "eval_accuracy_before": self.accuracy_before,
            "eval_accuracy_after": self.accuracy_after,
            "eval_tokens": self.tokens,
        }


class Recorder:
    """Writes down one run from its first step to its end, whichever way it ends; use it in a ``with`` statement."""

    def __init__(
        self, p: Prepared, started: float, telemetry: Telemetry, watch: StepDeadline, console: Console, *, main: bool
    ) -> None:
        """Begins when the run is entered.

        Args:
            p: The prepared run.
            started: When its preparation began, in seconds since 1970.
            telemetry: Already listening.
            watch: Of the other processes, which leaves time to write when one of them fails.
            console: Where progress goes.
            main: Whether this is the main process.
        """
        self._p, self._telemetry, self._watch, self._console, self._main = p, telemetry, watch, console, main
        self._epsilon_after, self._started = EpsilonSpent(p.plan), started
        self._summary, self._step = Summary(), p.first_step
        self._saved: int | None = None
        self._finishing = False  # from then on, run.json says what was done, or that the process was killed
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not main)
        self._task = self._progress.add_task("training", total=p.schedule.num_steps, completed=p.first_step)

    def __enter__(self) -> Self:
        if self._main:
            self._write(None, "interrupted", "its process was killed; the ledger holds its steps")
            base_holds = lineage.why_not(self._p.decision.lineage) is None
            self._telemetry.begin(self._step, self._epsilon_after(self._step), base_holds=base_holds)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if error is None or self._finishing or not self._main:
            return
        why = f"it ended with {type(error).__name__} after step {self._step}"
        with (
            self._watch.writing(),
            contextlib.suppress(OSError),
        ):  # on a full disk, what stands there says interrupted too
            self._write(self._step, "interrupted", why)
        self._telemetry.end()

    def step(self, step: int, rate: float, loss_sum: float, units: float, clipped: float) -> None:
        """Notes step ``step``, counted from 1: learning rate, and un-noised sums over its units."""
        self._step = step
        mean = loss_sum / units if units and math.isfinite(loss_sum) else None
        private = {"step": step, "loss": mean, "units": int(units), "clipped": int(clipped)}
        released = self._p.engine.released()
        self._log({**private, "released": released})
        self._telemetry.step(step, self._epsilon_after(step), rate, released, private)
        self._progress.update(self._task, completed=step, description=self._epsilon_after.words(step))

    def evaluated(self, seen: HeldOut | None, when: Literal["before", "during", "after"]) -> None:
        """Notes a pass over the held-out rows; None where there are none."""
        loss, accuracy, summary = None, None, self._summary
        if seen is not None:  # JSON has no word for the loss of a run that diverged
            loss, accuracy = seen.loss if math.isfinite(seen.loss) else None, seen.accuracy
        if when == "before":
            summary.before, summary.accuracy_before = loss, accuracy
        elif when == "after":
            summary.after, summary.accuracy_after = loss, accuracy
            summary.tokens = sum(sum(sequence.loss_mask) for sequence in self._p.held_out)
        else:
            self._log({"step": self._step, "eval_loss": loss, "eval_accuracy": accuracy})
        self._telemetry.evaluated(self._step, loss, accuracy)
        if when == "before" and loss is not None and not self._step and self._p.config.data.eval_public:
            self._console.print(f"Held-out loss before: {loss:.4f} nats per token")

    def save(self) -> None:
        """Writes a checkpoint; the learning rate follows from the step."""
        p = self._p
        if not self._main or self._saved == self._step:
            return
        self._saved = self._step
        with self._writing():
            checkpoint.save_resume(
                p.run,
                p.model,
                p.optimizer,
                step=self._step,
                entry=p.payment.entry,
                max_grad_norm=p.engine.max_grad_norm,
                head=p.payment.ledger.head() if p.payment.ledger else None,
                event=p.plan.event if p.plan else None,
                reserved=sum(size for _, size in p.payment.claims),
                units=getattr(p.units, "digest", None),
            )

    def finish(self) -> Status:
        """Exports, closes the reservation, writes run.json, in this order: a run that is killed meanwhile can be resumed."""
        p, total = self._p, self._p.schedule.num_steps
        status: Status = "completed" if self._step == total else "interrupted"
        if not self._main:
            return status
        self._finishing = True
        with self._writing():
            checkpoint.export(p.model, p.tokenizer, p.run)
            p.payment.finish(status)
            self._write(self._step, status)
            self._telemetry.end()
            if status == "completed":
                shutil.rmtree(p.run.resume, ignore_errors=True)
        loss = self._summary.after
        if loss is not None and may_tell(p):
            self._console.print(f"Held-out loss after: {loss:.4f} nats per token")
        elif loss is not None:  # un-noised, and standard output goes into job logs
            self._console.print(f"Held-out loss, which is private: {p.run.private / 'summary.json'}")
        self._console.print(f"[bold]{status}[/] after {self._step} of {total} steps: {p.run.root}")
        return status

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Leaves time to write, and turns a disk that is full or gone into one line."""
        try:
            with self._watch.writing():
                yield
        except OSError as error:
            raise DpllmError(
                f"{self._p.run.root}: cannot be written to ({error.strerror}), so the run ended after step {self._step}; its "
                "steps stay charged. Free some space, and type --resume where a checkpoint was kept."
            ) from None

    def _log(self, values: dict[str, Any]) -> None:
        if self._main:
            with open(self._p.run.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps({**values, "time": round(time.time(), 2)}) + "\n")

    def _write(self, step: int | None, status: Status, unfinished: str | None = None) -> None:
        """Writes run.json and private/summary.json; ``unfinished`` says why the run did not reach its end."""
        p, summary = self._p, self._summary
        ended = datetime.now(UTC).isoformat(timespec="seconds") if unfinished is None else None
        cost = dict(zip(COST, (ended, round(time.time() - self._started, 1), memory.peak_memory()), strict=True))
        reason, notes = guards.deviations(p.config)
        reason = reason or lineage.why_not(p.decision.lineage)
        if status == "interrupted" and p.plan and unfinished is None:
            notes.append(
                "the run was interrupted; the full Plan's epsilon is stated, and a decision to stop that was taken on un-noised "
                "metrics is outside the guarantee"
            )
        permitted = p.decision.policy.deviations()
        record = RunRecord.pick(
            cost if may_tell_cost(p.config) else {},
            status=status,
            guarantee=Guarantee(holds=reason is None and unfinished is None, reason=reason or unfinished),
            deviations=notes + lineage.deviations(p.decision.lineage) + p.notes,
            resumes=[note for note in p.notes if note not in permitted],
            steps_planned=p.schedule.num_steps,
            training_digest=names.of_training(p.config),
            plan_digest=read_plan(p.run).digest if p.plan else None,
            steps_taken=step,
            physical_batch_size=p.physical_batch_size,
            epsilon_spent=p.plan.epsilon if p.plan else None,
            delta=p.plan.delta if p.plan else None,
            ledger=p.payment.to_json(p.plan),
            lineage=p.decision.lineage,
            versions=environment.versions(),
            hardware=environment.hardware(),
            model=_model_record(p),
            artifacts=files.hashes(p.run.export) if unfinished is None else {},
            lattice=p.engine.lattice() if p.plan else None,
            metrics=Metrics(
                public=summary.to_json() if summary.after is not None and may_tell(p) else {},
                released=p.engine.released(),
            ),
            started_at=datetime.fromtimestamp(self._started, UTC).isoformat(timespec="seconds"),
        )
        write_json(p.run.run, record.to_json())
        write_json(p.run.private / "summary.json", {**summary.to_json(), **cost})


def may_tell(p: Prepared) -> bool:
    """Whether held-out figures may leave: of public rows, by weights that have a guarantee or saw public rows alone."""
    held = guards.deviations(p.config)[0] is None and lineage.why_not(p.decision.lineage) is None
    return p.config.data.eval_public and (held or p.config.data.public)


def may_tell_cost(config: RunConfig) -> bool:
    """Whether time and memory may leave: they follow from the lengths of all rows that were read."""
    return config.data.public and (config.data.eval is None or config.data.eval_public)


def _model_record(p: Prepared) -> ModelRecord:
    return ModelRecord(
        name_or_path=names.public_name(p.config.model.name_or_path),
        commit=getattr(p.model.config, "_commit_hash", None),
        architecture=(p.model.config.architectures or [type(p.model).__name__])[0],
        trainable_parameters=sum(t.numel() for t in p.engine.parameters.values()),
        total_parameters=sum(t.numel() for t in p.model.parameters()),
        dropout_off=p.dropout_off,
    )
