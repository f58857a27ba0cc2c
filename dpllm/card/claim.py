"""The privacy statement of a run: what is promised, under which assumptions, or why not.

Comes in: the recipe, the Plan, the record of the run, its audits, hashes of files. Goes out: a ``PrivacyRecord``, which
``export/privacy.json`` holds, and of which the marked parts of the card are a function. Must not read ``private/``, nor state
an epsilon as a guarantee where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dpllm.errors import ConfigError
from dpllm.privacy.plan import Plan
from dpllm.recipe import derived, names
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.recipe.names import is_builtin
from dpllm.records import Json
from dpllm.statement import formatting, privacy_record, state
from dpllm.statement.audit import AuditRecord
from dpllm.statement.audit_bounds import Claim
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import Statistics
from dpllm.statement.run_files import RunRecord

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
        audit: ``audit.json``; None where these weights were not audited.
        files: Path in export/ -> SHA-256, of all that is published beside the card; None: those of the record.
        statistics: ``describe.json``; None without one.

    Returns:
        The statement, of the epsilon of the whole Plan, also where the run was interrupted: whoever stopped it may have looked at
        figures that carry no noise. ``guarantee`` is true only if the run kept every assumption and its audits do not contradict
        it. Otherwise ``reason`` says why, and the Plan's numbers stand under ``attempted`` and ``audit.claim`` alone.

    Raises:
        ConfigError: The audit is not of this run, or one of these holds what no statement may say.
    """
    if audit is not None:
        _check_audit(audit, plan, record)
    reason = why_not(config, plan, record, audit)
    ledger = record.ledger
    recipe = {
        "released": "adapter weights" if isinstance(config.adapter, LoraConfig) else "model weights",
        "dataset": ledger.dataset if ledger else names.public_name(config.data.train),
        "data_public": config.data.public,
        "base_model": _base_of(record),
        "not_covered": _not_covered(config, plan, record) if reason is None else [_EVERYTHING],
        "tuning": config.card.tuning,
        "contact": config.card.contact,
        "recipe_digest": names.digest(config),
        "optimizer": config.train.optimizer,
    }
    statement = state.state(
        recipe,
        record,
        plan,
        reason,
        audit,
        None if statistics is None else _released(statistics, plan, record),
        record.artifacts if files is None else files,
    )
    template = {"template": config.data.template} if config.data.template else {}  # "[/INST]" is no path
    return privacy_record.read({**names.without_paths(statement.to_json()), **template})


def _base_of(record: RunRecord) -> str:
    """As the statement names the base model: of a directory, its last part."""
    name = record.model.name_or_path
    return name if record.model.commit or is_builtin(name) else names.last_part(name)


def why_not(config: RunConfig, plan: Plan | None, record: RunRecord, audit: AuditRecord | None) -> str | None:
    """Why a run gives no guarantee, as one sentence without its full stop; None where it gives one."""
    if not config.privacy.enabled or plan is None:
        where = ", on data that the recipe declares public" if config.data.public else ""
        return f"this model was trained without differential privacy (privacy.enabled: false){where}"
    if not record.guarantee.holds:
        return (record.guarantee.reason or "an assumption of the guarantee was broken").rstrip(". ")
    if (broken := derived.deviations(config)[0]) is not None:  # whatever the record says
        return broken
    if audit is None or not contradicts(audit, plan.epsilon):
        return None
    found, finding = audit.epsilon_lower_bound, audit.verdict_reason.rstrip(". ")
    if found.value > plan.epsilon:
        sure, at_least = formatting.percent(1 - found.alpha), formatting.measured(found.value)
        planned = f"the run was planned for {formatting.bound(plan.epsilon)}"
        finding = f"epsilon is at least {at_least} with {sure} confidence, and {planned}"
    return f"the audit of these weights contradicts it: {finding}"


def contradicts(audit: AuditRecord, epsilon: float) -> bool:
    """Whether an audit found more leakage than epsilon allows."""
    return audit.verdict == "falsified" or audit.epsilon_lower_bound.value > epsilon


def _check_audit(audit: AuditRecord, plan: Plan | None, record: RunRecord) -> None:
    """Refuses an audit of other weights, and one that tested something else than training fixed."""
    strangers = sorted(name for name, digest in audit.weights.items() if record.artifacts.get(name) != digest)
    rules = {
        f"about other weights ({', '.join(strangers) or 'none at all'}) than": not strangers and bool(audit.weights)
    }
    if plan:
        rules |= {
            "about other canaries than": plan.canary_commitment == audit.canaries.commitment,
            "made with another alpha or other tests than": audit.settings == plan.audit,
            "of another epsilon, delta or unit than": audit.claim == Claim(plan.epsilon, plan.delta, plan.unit),
        }
    if wrong := next((problem for problem, good in rules.items() if not good), None):
        raise ConfigError(
            f"audit.json is {wrong} the run's, so its verdict is not about this run. Run dpllm audit again."
        )


def _released(describe: Json, plan: Plan | None, record: RunRecord) -> Statistics:
    """What describe.json says, which has to be about the data that the run was charged for, and to add to it."""
    one, ledger = Statistics.pick(describe), record.ledger
    if not one.drawn:
        raise ConfigError("describe.json is of a dry run and holds no values. Name the file of the released ones.")
    if one.pure == math.inf:
        raise ConfigError(
            "describe.json is of clusters or a classifier, which have a card of their own, in the folder that holds it. Name a "
            "file of statistics."
        )
    charged = None if plan is None or ledger is None else (ledger.dataset, plan.unit, plan.neighbouring_relation)
    if (one.dataset, one.unit, one.neighbouring_relation) != charged:
        raise ConfigError(
            f"describe.json is about dataset {one.dataset!r} per {one.unit!r} under {one.neighbouring_relation!r}, and the run "
            "was charged for other data, another unit or relation, so that the two do not add. Name the file of these data."
        )
    return one


def _not_covered(config: RunConfig, plan: Plan | None, record: RunRecord) -> list[str]:
    lines = formatting.template("not_covered.txt.j2").render(
        data=config.data,
        visible=formatting.visible,
        tuning=config.card.tuning,
        private_metrics=config.telemetry.private_metrics,
        zero_out=plan is not None and plan.neighbouring_relation == "zero_out",
        interrupted=record.status == "interrupted",
    )
    return lines.strip().splitlines()
