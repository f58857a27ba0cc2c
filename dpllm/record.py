"""run.json: what happened, in public and released values only.

Comes in: a prepared run and how it ended. Goes out: the record, and beside it, under private/, the figures that may not
leave.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dpllm import artifacts, environment, lineage, model
from dpllm.config import RunConfig
from dpllm.ledger import gates, groups
from dpllm.prepare import Prepared
from dpllm.privacy import guards
from dpllm.report import recipe
from dpllm.rundir import COST, digest, read_json, write_json


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


def may_tell(p: Prepared) -> bool:
    """Whether held-out figures may leave: of public rows, by weights that have a guarantee or saw public rows alone."""
    held = guards.deviations(p.config)[0] is None and lineage.why_not(p.lineage) is None
    return p.config.data.eval_public and (held or p.config.data.public)


def may_tell_cost(config: RunConfig) -> bool:
    """Whether time and memory may leave: they follow from the lengths of all rows that were read."""
    return config.data.public and (config.data.eval is None or config.data.eval_public)


def write_record(
    p: Prepared, step: int | None, status: str, started: float, summary: Summary, unfinished: str | None = None
) -> None:
    """Writes run.json and private/summary.json; ``unfinished`` says why the run did not reach its end."""
    reason, notes = guards.deviations(p.config)
    reason = reason or lineage.why_not(p.lineage)
    if status == "interrupted" and p.plan and unfinished is None:
        notes.append(
            "the run was interrupted; the full Plan's epsilon is stated, and a decision to stop that was taken on un-noised "
            "metrics is outside the guarantee"
        )
    public: dict[str, Any] = {}
    if summary.after is not None and may_tell(p):
        public = summary.to_json()
    finished = datetime.now(UTC).isoformat(timespec="seconds") if unfinished is None else None
    cost = dict(zip(COST, (finished, round(time.time() - started, 1), environment.peak_memory()), strict=True))
    record = {
        "status": status,
        "guarantee": {"holds": reason is None and unfinished is None, "reason": reason or unfinished},
        "deviations": notes + lineage.deviations(p.lineage) + p.notes,
        "resumes": [note for note in p.notes if note not in p.custody.deviations()],
        "steps_planned": p.schedule.num_steps,
        "training_digest": recipe.of_training(p.config),
        "plan_digest": digest(read_json(p.run.plan)) if p.plan else None,
        "steps_taken": step,
        "physical_batch_size": p.physical_batch_size,
        "epsilon_spent": p.plan.epsilon if p.plan else None,
        "delta": p.plan.delta if p.plan else None,
        "ledger": _ledger_record(p),
        "lineage": p.lineage,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        "model": {
            "name_or_path": model.public_name(p.config.model.name_or_path),
            "commit": getattr(p.model.config, "_commit_hash", None),
            "architecture": (p.model.config.architectures or [type(p.model).__name__])[0],
            "trainable_parameters": sum(t.numel() for t in p.engine.parameters.values()),
            "total_parameters": sum(t.numel() for t in p.model.parameters()),
            "dropout_off": p.dropout_off,
        },
        "artifacts": artifacts.hashes(p.run.export) if unfinished is None else {},
        "lattice": p.engine.lattice() if p.plan else None,
        "metrics": {"public": public, "released": p.engine.released()},
        "started_at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        **(cost if may_tell_cost(p.config) else {}),
    }
    write_json(p.run.run, record)
    write_json(p.run.private / "summary.json", {**summary.to_json(), **cost})


def _ledger_record(p: Prepared) -> dict[str, Any] | None:
    if not (p.ledger and p.claims and p.plan):
        return None
    claim = p.ledger.reservation(p.claims[0][0])
    budget = p.ledger.budget(claim.dataset)
    account = p.ledger.account(claim.dataset)
    return {
        "dataset": claim.dataset,
        "entry": claim.entry,
        "made_up_by": [entry for entry, _ in p.claims[1:]],
        "head": p.ledger.head(),
        "budget": {name: getattr(budget, name) for name in ("epsilon", "delta", "gate", "order")} if budget else None,
        "spent_epsilon": p.ledger.spent(claim.dataset, None if budget else p.plan.delta),
        "filter_epsilon": gates.filter_epsilon(account),
        "imported": len(account.imports),
        "group": groups.of_entry(p.ledger, claim.entry),
    }
