"""Records a run: metrics, checkpoints, the export, and run.json, which holds public and released values only.

Comes in: a prepared run, its steps, and how it ended. Goes out: files, lines on the screen, telemetry. Private figures stay under
private/. Only the main process writes; in the others every call does nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from dpllm import files
from dpllm.errors import ConfigError, DpllmError
from dpllm.files import read_json, write_json
from dpllm.model import loading, memory, processes
from dpllm.model.evaluate import HeldOut
from dpllm.privacy.clipping import layers_of
from dpllm.privacy.engine import Diagnostics
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run import checkpoint
from dpllm.run.build import Prepared
from dpllm.run.directory import Run, manifest_of
from dpllm.run.failures import StepDeadline
from dpllm.run.projections import Projections, keep_weights, read_groups, read_weights
from dpllm.run.screen import Screen, only_seen, summary, summary_table
from dpllm.statement import lineage
from dpllm.statement.run_files import COST, SCHEMA_VERSION, Guarantee, Metrics, ModelRecord, RunRecord, read_run
from dpllm.telemetry.live import EpsilonSpent, Telemetry
from dpllm.text.prompts import printable

Status = Literal["completed", "interrupted"]
INTERRUPTED = (
    "the run was interrupted; the full Plan's epsilon is stated, and a decision to stop that was taken on un-noised metrics is "
    "outside the guarantee"
)


class Recorder:
    """Records one run from its first step to its end, however it ends; use it in a ``with`` statement."""

    def __init__(
        self,
        prepared: Prepared,
        started: float,
        telemetry: Telemetry,
        deadline: StepDeadline,
        console: Console,
        screen: Screen,
        *,
        main: bool,
    ) -> None:
        """Recording begins with the ``with`` block; ``started`` is when preparation began, in seconds since 1970."""
        self._prepared, self._telemetry, self._main = prepared, telemetry, main
        self._started, self._deadline, self._console, self._screen = started, deadline, console, screen
        self._epsilon_after = EpsilonSpent(prepared.plan)
        # Losses in nats per target token, shares: private unless the evaluation data are public.
        names = prepared.examples.figures
        figures = [f"eval_{name}_{when}" for name in names for when in ("before", "after")]
        self._step, summary = prepared.first_step, prepared.run.summary
        stored = read_json(summary) if main and self._step and summary.exists() else {}  # of a resumed run
        figures_before: dict[str, float | None] = {name: stored.get(name) for name in figures[::2]}
        self._figures = names
        self._summary = {**dict.fromkeys(figures), "eval_tokens": 0, **figures_before}
        self._saved: int | None = None
        self._finite = True  # whether the loss of the last step is finite
        self._not_finite = 0  # steps with a gradient that is not finite
        self._finishing = False  # from then on, run.json says how the run ended, or that the process was killed
        # A run resumed with another recipe or on another device keeps its weaker generator and its deviations.
        before = read_run(prepared.run) if main and prepared.plan and self._step else None
        self._generator = prepared.engine.generator if prepared.plan else None
        if before and before.generator == "philox_gpu":
            self._generator = before.generator
        self._deviations = before.deviations if before else ()
        self._lost = prepared.decision.resumed.lost if prepared.decision.resumed else 0
        self._projections: Projections | None = None

    def __enter__(self) -> Self:
        prepared, total = self._prepared, self._prepared.schedule.num_steps
        if self._main:
            if prepared.engine.canaries is not None:
                width = prepared.config.audit.gradient_canaries
                self._projections = Projections(prepared.run.projections, total, width)
                if not self._step:
                    self._keep_weights(None)
            self._write_unfinished(None, "its process was killed; the ledger holds its steps")
            base_holds = lineage.why_not(prepared.decision.lineage) is None
            self._telemetry.begin(self._step, self._epsilon_after(self._step), base_holds=base_holds)
            self._screen.begin_steps(total, self._step)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._finishing or not self._main:
            return
        reason = f"it ended with {type(error).__name__} after step {self._step}"
        # On a full disk, the existing run.json already says interrupted.
        with self._deadline.writing, contextlib.suppress(OSError):
            self._write_unfinished(self._step, reason)
        self._telemetry.end()

    def step(self, step: int, rate: float, positions: int, facts: Diagnostics) -> None:
        """Records step ``step``, counted from 1: learning rate, tokens with padding, and the figures of all ranks."""
        self._step, engine = step, self._prepared.engine
        if self._projections is not None and engine.projections is not None:
            self._projections.write(step, engine.projections.numpy())
        self._finite = math.isfinite(facts.loss_sum)
        self._not_finite += self._prepared.plan is not None and not math.isfinite(facts.norm_sum)
        loss, norm = (value if math.isfinite(value) else None for value in (facts.loss, facts.norm))
        private = {"step": step, "loss": loss, "units": facts.units, "clipped": facts.clipped, "norm": norm}
        by_layer = list(facts.clipped_by_layer)
        layers = {"clipped_by_layer": by_layer} if by_layer else {}
        if self._main and by_layer and step == self._prepared.first_step + 1:  # once, since there can be hundreds
            write_json(self._prepared.run.layers, {"layers": layers_of(engine.parameters)})
        self._log({**private, **layers})
        self._telemetry.step(step, self._epsilon_after(step), rate, private)
        if self._main:
            self._screen.step(step, self._epsilon_after.words(step), positions, facts.loss if facts.units else None)

    def evaluated(self, held_out: HeldOut | None, when: Literal["before", "during", "after"]) -> None:
        """Records a pass over the held-out rows; None without such rows."""
        self._screen.end()
        figures = {name: getattr(held_out, name, None) for name in self._figures}
        # JSON has no nan.
        finite = {
            name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()
        }
        loss = finite["loss"]
        if when == "during":
            self._log({"step": self._step, **{f"eval_{name}": value for name, value in finite.items()}})
        else:
            self._summary |= {f"eval_{name}_{when}": value for name, value in finite.items()}
        if when == "before" and self._main:
            write_json(self._prepared.run.summary, self._summary)  # now, since a killed process writes nothing later
        elif when == "after":
            self._summary["eval_tokens"] = held_out.tokens if held_out else 0
        self._telemetry.evaluated(self._step, loss, finite.get("accuracy"))
        if when == "before" and loss is not None and self._prepared.config.data.eval_public:
            self._console.print(f"Held-out loss before: {loss:.4f} nats per token")

    def sampled(self, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Records completions of public prompts, which are printed if the weights may be published."""
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        self._log({"step": self._step, "samples": samples})
        if not may_publish_weights(self._prepared):
            self._console.print(
                f"Samples of step {self._step}, which no guarantee covers: {self._prepared.run.metrics}", markup=False
            )
            return
        for sample in samples:
            line = " ".join(printable(f"{sample['prompt']} -> {sample['text']}").split())
            self._console.print(f"Sample of step {self._step}: {line}", markup=False, highlight=False, soft_wrap=True)

    def save(self) -> None:
        """Writes a checkpoint."""
        prepared, plan = self._prepared, self._prepared.plan
        if not self._main or self._saved == self._step:
            return
        self._saved = self._step
        with self._writing():
            state = checkpoint.State(
                step=self._step,
                entry=prepared.reservation.entry,
                head=prepared.reservation.ledger.head() if prepared.reservation.ledger else None,
                units=prepared.units.digest,
                groups=read_groups(prepared.run.groups).digest if plan and plan.coefficients else None,
                lost=self._lost,
            )
            checkpoint.save_resume(prepared.run, prepared.model, prepared.optimizer, state)

    def _keep_weights(self, first_M: NDArray[np.float64] | None) -> None:
        """Stores the weights along the gradient canaries: at the start, or with ``first_M``, at the end."""
        engine = self._prepared.engine
        assert engine.canaries is not None
        now_M = engine.canaries.along(engine.parameters.values()).numpy()
        keep_weights(self._prepared.run.along, *((now_M,) if first_M is None else (first_M, now_M)))

    def finish(self) -> None:
        """Exports, closes the reservation and writes run.json, in this order, so that a run killed meanwhile can be resumed.

        Raises:
            Refused: A weight is not finite; all steps stay charged.
        """
        prepared, total = self._prepared, self._prepared.schedule.num_steps
        status: Status = "completed" if self._step == total else "interrupted"
        if not self._main:
            return
        loading.check_finite(prepared.model, "nothing is exported")
        self._finishing = True
        with self._writing():
            if prepared.engine.canaries is not None:
                with contextlib.suppress(ConfigError):  # the audit reports a missing file
                    self._keep_weights(read_weights(prepared.run.along)[0])
            checkpoint.export(prepared.model, prepared.tokenizer, prepared.run)
            cost = self._cost(datetime.now(UTC).isoformat(timespec="seconds"))
            manifest = manifest_of(prepared.run, prepared.config, ended=True)
            prepared.reservation.finish(status, files.digest(manifest))
            self._write(self._step, status, manifest, cost)
            self._telemetry.end()
            if status == "completed":
                shutil.rmtree(prepared.run.resume, ignore_errors=True)
        # Without private figures, because standard output goes into job logs.
        self._console.print(summary_table(summary(Run(prepared.run, read_run(prepared.run), prepared.config))))
        before, after = (self._summary[f"eval_loss_{when}"] for when in ("before", "after"))
        worse = prepared.held_out and (after is None or (before is not None and after > before))
        # Losses and norms carry no noise, so only a terminal, not a log, may show this.
        if (worse or not self._finite or self._not_finite) and only_seen(self._console):
            self._console.print(
                "Warning: the run has diverged: a loss or a gradient is not finite, or the held-out loss is above the base "
                "model's. Lower train.learning_rate and train again.",
                highlight=False,
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Suspends the deadline while writing, and turns an error of the disk into one line."""
        try:
            with self._deadline.writing:
                yield
        except OSError as error:
            raise DpllmError(
                f"{self._prepared.run.root}: cannot be written to ({error.strerror}), so the run ended after step {self._step}; "
                "its steps stay charged. Free some space, and type --resume if there is a checkpoint."
            ) from None

    def _log(self, values: dict[str, Any]) -> None:
        if self._main:
            with open(self._prepared.run.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps({**values, "time": round(time.time(), 2)}) + "\n")

    def _cost(self, ended: str | None) -> dict[str, Any]:
        """What the run cost so far; written to private/summary.json with the held-out figures."""
        cost = dict(zip(COST, (ended, round(time.time() - self._started, 1), memory.peak_memory()), strict=True))
        longest = self._prepared.units.lengths.full
        write_json(self._prepared.run.summary, {**self._summary, **cost, "units_at_max_length": longest})
        return cost

    def _write_unfinished(self, step: int | None, reason: str) -> None:
        manifest = manifest_of(self._prepared.run, self._prepared.config, ended=False)
        self._write(step, "interrupted", manifest, self._cost(None), reason)

    def _write(
        self,
        step: int | None,
        status: Status,
        manifest: dict[str, str],
        cost: dict[str, Any],
        unfinished: str | None = None,
    ) -> None:
        prepared, summary = self._prepared, self._summary
        template = prepared.config.data.chat_template
        reason, notes = prepared.decision.flaw, prepared.config.deviations
        if status == "interrupted" and prepared.plan and unfinished is None:
            notes.append(INTERRUPTED)
        permitted = prepared.decision.policy.deviations
        record = RunRecord.pick(
            cost if may_publish_cost(prepared.config) else {},
            schema_version=SCHEMA_VERSION,
            status=status,
            guarantee=Guarantee(holds=reason is None and unfinished is None, reason=reason or unfinished),
            deviations=grown(notes + lineage.deviations(prepared.decision.lineage) + prepared.notes, self._deviations),
            resumes=[note for note in prepared.notes if note not in permitted],
            steps_planned=prepared.schedule.num_steps,
            steps_taken=step,
            steps_lost=self._lost,
            tokens_per_pass=None if prepared.engine.packing.alone else prepared.engine.packing.tokens,
            ledger=prepared.reservation.to_json(prepared.plan.delta if prepared.plan else None),
            dataset=None if prepared.plan else prepared.decision.policy.account,
            lineage=prepared.decision.lineage,
            labels=prepared.decision.labels,
            labels_before=prepared.decision.labels_before,
            versions=processes.versions(),
            hardware=processes.hardware(),
            model=ModelRecord(
                name_or_path=names.public_name(prepared.config.model.name_or_path),
                commit=getattr(prepared.model.config, "_commit_hash", None),
                architecture=(prepared.model.config.architectures or [type(prepared.model).__name__])[0],
                trainable_parameters=sum(tensor.numel() for tensor in prepared.engine.parameters.values()),
                total_parameters=sum(tensor.numel() for tensor in prepared.model.parameters()),
                dropout_off=prepared.dropout_off,
                chat_template=hashlib.sha256(template.encode()).hexdigest() if template else None,
            ),
            manifest=manifest,
            generator=self._generator,
            lattice=prepared.engine.lattice() if prepared.plan else None,
            metrics=Metrics(
                public=summary if summary["eval_loss_after"] is not None and may_publish_figures(prepared) else {}
            ),
            started_at=datetime.fromtimestamp(self._started, UTC).isoformat(timespec="seconds"),
        )
        write_json(prepared.run.run, record.to_json())


def grown(notes: Sequence[str], before: Sequence[str]) -> list[str]:
    """The deviations of a resumed run, which include those of earlier attempts."""
    return list(dict.fromkeys([*notes, *(note for note in before if note != INTERRUPTED)]))


def may_publish_figures(prepared: Prepared) -> bool:
    """Whether held-out figures may be published: if rows and weights may be."""
    return prepared.config.data.eval_public and may_publish_weights(prepared)


def may_publish_weights(prepared: Prepared) -> bool:
    """Whether weights, and what follows from them and public values, may be published: by a guarantee or public rows."""
    return prepared.decision.flaw is None or prepared.config.data.public


def may_publish_cost(config: RunConfig) -> bool:
    """Whether time and memory may be published: they depend on the lengths of all rows read."""
    return config.data.public and (config.data.eval is None or config.data.eval_public)
