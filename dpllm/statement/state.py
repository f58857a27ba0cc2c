"""Derives the privacy statement from facts: the only place that derives its dependent fields.

Comes in: the recipe, the Plan, the record of the run, its audit, released statistics, hashes of files. Goes out: a
``PrivacyRecord``, of which the marked parts of the card are a function; ``dpllm verify`` derives it again and compares.
Pure: must not read a file, a clock or ``private/``, nor state an epsilon as a guarantee if there is no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dpllm.errors import ConfigError
from dpllm.files import of_model
from dpllm.privacy import accounting
from dpllm.privacy.accounting import compose, finite
from dpllm.privacy.plan import Plan
from dpllm.recipe import names
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.records import Json
from dpllm.statement import formatting, privacy_record
from dpllm.statement.audit import AuditRecord
from dpllm.statement.audit_bounds import Claim
from dpllm.statement.lineage import PromisedEvent
from dpllm.statement.privacy_record import CRYPTOGRAPHIC, Composed, PrivacyRecord
from dpllm.statement.released import BesideRun, Statistics
from dpllm.statement.run_files import LedgerRecord, RunRecord

_EVERYTHING = "everything: this run gives no guarantee"


def statement_of(
    config: RunConfig,
    plan: Plan | None,
    record: RunRecord,
    audit: AuditRecord | None,
    files: Mapping[str, str] | None = None,
    statistics: Json | None = None,
) -> PrivacyRecord:
    """The privacy statement of a run.

    Args:
        config: The resolved recipe.
        plan: ``plan.json``; None for a run without differential privacy.
        record: ``run.json``.
        audit: ``audit.json``; None if these weights were not audited.
        files: Path in export/ -> SHA-256, of all files published with the card; None: those of the record.
        statistics: ``describe.json``; None without one.

    Returns:
        The statement. Its epsilon is that of the whole Plan even if the run was interrupted, since un-noised figures may have led
        somebody to stop it. ``guarantee`` is true only if the run kept every assumption and its audits do not contradict it.
        Otherwise ``reason`` says why, and the Plan's numbers appear only under ``attempted`` and ``audit.claim``.

    Raises:
        ConfigError: The audit is not of this run, or an input has a value that no statement may have.
    """
    if audit is not None and (mismatch := other_than_audited(audit, plan, record.artifacts)):
        raise ConfigError(f"audit.json {mismatch} the run's, so its verdict is about another. Run dpllm audit again.")
    reason = why_not(config, plan, record, audit)
    released = None if statistics is None else beside_run(_released(statistics, plan, record), plan, reason is None)
    secure, lattice = record.generator == CRYPTOGRAPHIC, record.lattice and record.lattice.to_json()
    randomness = {"generator": record.generator, "secure_noise": secure, "lattice": lattice}
    where_known = {
        "plan" if reason is None else "attempted": plan and plan.to_json(),
        "reason": reason,
        "labels": record.labels and record.labels.to_json(),
        "labels_before": [draw.to_json() for draw in record.labels_before] or None,
        "statistics": released and released.to_json(),
        "deployment": config.card.deployment.model_dump(exclude_none=True) or None,
    }
    facts = {
        "schema_version": privacy_record.SCHEMA_VERSION,
        "guarantee": reason is None,
        **_recipe_fields(config, record),
        **_record_fields(record),
        "randomness": None if plan is None else randomness,
        "composed": composed(record.ledger, plan.delta if plan else None).to_json() if record.ledger else None,
        "not_covered": _not_covered(config, plan, record) if reason is None else [_EVERYTHING],
        "audit": audit.to_json() if audit else None,
        "files": dict(sorted((record.artifacts if files is None else files).items())),
        **{name: value for name, value in where_known.items() if value is not None},
    }
    template = {"template": config.data.template} if config.data.template else {}  # "[/INST]" is not a path
    return privacy_record.read({**names.without_paths(facts), **template})


def _recipe_fields(config: RunConfig, record: RunRecord) -> Json:
    base = record.model.name_or_path
    is_linked = record.model.commit or names.is_builtin(base)
    return {
        "released": "adapter weights" if isinstance(config.adapter, LoraConfig) else "model weights",
        "dataset": record.ledger.dataset if record.ledger else record.dataset or names.public_name(config.data.train),
        "data_public": config.data.public,
        "base_model": {
            "name": base if is_linked else names.last_part(base),
            "revision": record.model.commit,
            "covered": False,
        },
        "tuning": config.card.tuning,
        "contact": config.card.contact,
        "recipe_digest": names.digest(config),
        "optimizer": config.train.optimizer,
    }


def _record_fields(record: RunRecord) -> Json:
    lost = {"lost": record.steps_lost} if record.steps_lost else {}
    return {
        "steps": {"planned": record.steps_planned, "taken": record.steps_taken, **lost},
        "status": record.status,
        "lineage": record.lineage.to_json() if record.lineage else None,
        "deviations": record.deviations,
        "software": record.versions,
        # Without objects and nulls, for which a statement has no field.
        "hardware": {
            name: value
            for name, value in record.hardware.items()
            if isinstance(value, str | int | float)
            or (isinstance(value, list) and all(isinstance(item, str) for item in value))
        },
        "date": record.started_at[:10],
    }


def why_not(config: RunConfig, plan: Plan | None, record: RunRecord, audit: AuditRecord | None) -> str | None:
    """Why a run gives no guarantee, as one sentence without its full stop; None if it gives one."""
    if not config.privacy.enabled or plan is None:
        public = ", on data that the recipe declares public" if config.data.public else ""
        return f"this model was trained without differential privacy (privacy.enabled: false){public}"
    if not record.guarantee.holds:
        return (record.guarantee.reason or "an assumption of the guarantee was broken").rstrip(". ")
    if (broken := config.flaw) is not None:  # whatever the record says
        return broken
    if audit is None or not contradicts(audit, plan.epsilon):
        return None
    bound, finding = audit.epsilon_lower_bound, audit.verdict_reason.rstrip(". ")
    if bound.value > plan.epsilon:
        sure, at_least = formatting.percent(1 - bound.alpha), formatting.proven(bound.value)
        planned = f"the run was planned for {formatting.bound(plan.epsilon)}"
        finding = f"epsilon is at least {at_least} with {sure} confidence, and {planned}"
    return f"the audit of these weights contradicts it: {finding}"


def contradicts(audit: AuditRecord, epsilon: float) -> bool:
    """Whether an audit found more leakage than epsilon allows."""
    return audit.verdict == "falsified" or audit.epsilon_lower_bound.value > epsilon


def other_than_audited(audit: AuditRecord, plan: Plan | None, files: Mapping[str, str]) -> str | None:
    """The first difference between the subject of an audit and a Plan with its files; None if there is none.

    Args:
        audit: An audit; those of earlier versions name the weights alone.
        plan: None for a run without differential privacy.
        files: SHA-256 by path.
    """
    of_these = {name: files[name] for name in of_model(files)}
    weights = {name for name in of_these if name.endswith(".safetensors")}
    same_weights = weights <= audit.weights.keys() and audit.weights.items() <= of_these.items()
    rules = {"is about other weights than": bool(weights) and same_weights}
    if plan:
        rules |= {
            "is of other canaries than": plan.canary_commitment == audit.canaries.commitment,
            "was made with another alpha or other tests than": audit.settings == plan.audit,
            "tested another epsilon, delta or unit than": audit.claim == Claim(plan.epsilon, plan.delta, plan.unit),
        }
    return next((problem for problem, good in rules.items() if not good), None)


def _released(describe: Json, plan: Plan | None, record: RunRecord) -> Statistics:
    """Statistics of describe.json; refuses those about other data, or with another unit or relation, than the run."""
    statistics, ledger = Statistics.pick(describe), record.ledger
    if not statistics.drawn:
        raise ConfigError("describe.json is of a dry run, so it has no values. Name a file of released statistics.")
    if statistics.pure == math.inf:
        raise ConfigError(
            "describe.json is of clusters or a classifier, which have their own card, in the folder of that file. Name a file of "
            "statistics."
        )
    charged = None if plan is None or ledger is None else (ledger.dataset, plan.unit, plan.neighbouring_relation)
    if (statistics.dataset, statistics.unit, statistics.neighbouring_relation) != charged:
        raise ConfigError(
            f"describe.json is about dataset {statistics.dataset!r} per {statistics.unit!r} under "
            f"{statistics.neighbouring_relation!r}, but the run was charged for another, so they do not add up. Name its file."
        )
    return statistics


def _not_covered(config: RunConfig, plan: Plan | None, record: RunRecord) -> list[str]:
    lines = formatting.template("not_covered.txt.j2").render(
        data=config.data,
        visible=formatting.visible,
        tuning=config.card.tuning,
        best_of=plan is not None and plan.best_of,
        private_metrics=config.telemetry.private_metrics,
        relation=plan.neighbouring_relation if plan is not None else None,
        interrupted=record.status == "interrupted",
    )
    return lines.strip().splitlines()


def composed(ledger: LedgerRecord, delta: float | None) -> Composed:
    """The ledger's total over all runs on the dataset after this one, at the budget's delta or else the run's."""
    budget = ledger.budget
    return Composed.pick(
        ledger.to_json(),
        delta=budget.delta if budget else delta,
        entries=ledger.head.count,
        head=ledger.head.hash,
        group=ledger.group,
    )


def beside_run(released: Statistics, terms: PromisedEvent | None, guarantee: bool) -> BesideRun:
    """Released statistics of the training data, with their epsilon together with the run."""
    with_run = None
    if terms is not None and guarantee:
        event = compose([terms.event, released.event()])
        with_run = finite(accounting.epsilon(event, terms.delta, terms.neighbouring_relation))
    return BesideRun.pick(released.to_json(), with_run=with_run)
