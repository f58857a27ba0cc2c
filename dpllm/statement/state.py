"""From facts to the privacy statement: everything in it that follows from something else is derived here, and nowhere else.

Comes in: plan.json, run.json, the audit's part, released statistics, and what the recipe says. Goes out: a ``PrivacyRecord``. The
card renders it; ``dpllm verify`` reads the facts back from a published statement, derives the rest again and compares. Pure: must
not read a file, a clock or ``private/``.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpllm.privacy.accounting import compose, finite, stated
from dpllm.privacy.plan import Plan
from dpllm.records import Json
from dpllm.statement import privacy_record
from dpllm.statement.audit import AuditRecord
from dpllm.statement.fields import CRYPTOGRAPHIC, Composed, Randomness
from dpllm.statement.lineage import PromisedEvent
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import BesideRun, Statistics
from dpllm.statement.run_files import LedgerRecord, RunRecord


def state(
    recipe: Json,
    record: RunRecord,
    plan: Plan | None,
    reason: str | None,
    audit: AuditRecord | None,
    statistics: Statistics | None,
    files: Mapping[str, str],
) -> PrivacyRecord:
    """The statement that facts allow.

    Args:
        recipe: What a statement holds of it, in public words.
        record: What happened.
        plan: What was promised; None for a run without differential privacy.
        reason: Why there is no guarantee; None where there is one. The Plan then stands under ``attempted``, and nowhere else.
        audit: Of these weights.
        statistics: What was released about the training data.
        files: SHA-256 of what is published, by path.

    Raises:
        NotAStatement: A fact is none that a statement may hold.
    """
    promised = {} if plan is None else {"plan" if reason is None else "attempted": plan.to_json()}
    lost = {"lost": record.steps_lost} if record.steps_lost else {}
    beside = beside_run(statistics, plan, reason is None) if statistics else None
    where_known = {
        "reason": reason,
        "labels": record.labels and record.labels.to_json(),
        "labels_before": [one.to_json() for one in record.labels_before] or None,
        "statistics": beside and beside.to_json(),
    }
    block = {
        "schema_version": privacy_record.SCHEMA_VERSION,
        "guarantee": reason is None,
        **promised,
        "randomness": None if plan is None else _randomness(record).to_json(),
        **recipe,
        "steps": {"planned": record.steps_planned, "taken": record.steps_taken, **lost},
        "status": record.status,
        "composed": composed(record.ledger, plan.delta if plan else None).to_json() if record.ledger else None,
        "lineage": record.lineage.to_json() if record.lineage else None,
        "base_model": {"name": recipe["base_model"], "revision": record.model.commit, "covered": False},
        "deviations": record.deviations,
        "audit": audit.to_json() if audit else None,
        "software": record.versions,
        # No object and no null, which a statement has no field for.
        "hardware": {
            name: value
            for name, value in record.hardware.items()
            if isinstance(value, str | int | float)
            or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        },
        "date": record.started_at[:10],
        "files": dict(sorted(files.items())),
        **{name: value for name, value in where_known.items() if value is not None},
    }
    return privacy_record.read(block)


def _randomness(record: RunRecord) -> Randomness:
    return Randomness.pick(
        {"generator": record.generator, "secure_noise": record.generator == CRYPTOGRAPHIC},
        lattice=record.lattice,
    )


def composed(ledger: LedgerRecord, delta: float | None) -> Composed:
    """The total over all runs on the dataset, as the ledger had it after this one, at its budget's delta or the run's."""
    budget = ledger.budget
    return Composed.pick(
        ledger.to_json(),
        delta=budget.delta if budget else delta,
        entries=ledger.head.count,
        head=ledger.head.hash,
        group=ledger.group,
    )


def beside_run(released: Statistics, terms: PromisedEvent | None, guarantee: bool) -> BesideRun:
    """What was released about the training data, and what it comes to together with the run."""
    with_run = None
    if terms is not None and guarantee:
        event = compose([terms.event, released.event()])
        with_run = finite(stated(event, terms.delta, terms.neighbouring_relation)[0])
    return BesideRun.pick(released.to_json(), with_run=with_run)
