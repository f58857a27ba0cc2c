"""A finished run's metrics from its record: the same values that its process showed last.

Comes in: a run directory. Goes out: ``RunValues``. Of private/ it reads one line of metrics.jsonl, and that only where the
recipe allows private metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from dpllm import lineage
from dpllm.config import RunConfig
from dpllm.errors import ConfigError
from dpllm.privacy import accounting, guards
from dpllm.report import words
from dpllm.rundir import RunDir, read_json
from dpllm.telemetry.ledger import label
from dpllm.telemetry.metrics import AuditValues, PrivateValues, RunValues, State
from dpllm.telemetry.spent import INTERVAL

Json = dict[str, Any]


def model_label(run: RunDir) -> str:
    """The name of what is trained: the last part of the run directory."""
    return run.root.resolve().name


def of_record(run: RunDir, config: RunConfig) -> RunValues:
    """The metrics of a run that ended.

    Args:
        run: Holds run.json, and plan.json if it was private.
        config: Its recipe.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    try:
        return _of_record(run, config, read_json(run.run))
    except (KeyError, TypeError):
        raise ConfigError(
            f"{run.run}: does not say what a run's record says, so there is nothing to show; the file is damaged."
        ) from None


def _of_record(run: RunDir, config: RunConfig, record: Json) -> RunValues:
    plan = read_json(run.plan) if record.get("epsilon_spent") is not None else None
    public, released = record["metrics"]["public"], record["metrics"]["released"]
    ledger, status = record.get("ledger"), record["status"]
    promised = plan is not None and promises(config, record.get("lineage"))
    values = RunValues(
        model=model_label(run),
        base_model=record["model"]["name_or_path"],
        dataset=label(ledger["dataset"]) if ledger else words.public_name(config.data.train),
        run_id=ledger["entry"] if ledger else "",
        state=status if status in get_args(State) else "interrupted",
        step=record["steps_taken"] or 0,
        steps_planned=record["steps_planned"],
        accuracy_delta=accuracy_delta(public) if promised or config.data.public else None,
        audit=_audit(run),
    )
    if config.telemetry.private_metrics:
        values = replace(values, private=_last_step(run, clips=plan is not None))
    if plan is None:
        return values
    values = replace(values, noise_multiplier=plan["noise_multiplier"])
    if not promised:
        return values
    return replace(
        values,
        epsilon_consumed=_consumed(plan, record),
        stated_epsilon=plan["epsilon"],
        delta=plan["delta"],
        clip_fraction=clip_fraction(released),
    )


def promises(config: RunConfig, ancestry: Json | None) -> bool:
    """Whether a run of this recipe, on a base with these ancestors, states an epsilon at all."""
    return guards.deviations(config)[0] is None and lineage.why_not(ancestry) is None


def clip_fraction(released: Mapping[str, Any]) -> float | None:
    """The noised share of clipped gradients, moved into [0, 1], which reads nothing but what was released."""
    unclipped = released.get("unclipped_fraction")
    return None if unclipped is None else min(1.0, max(0.0, 1.0 - unclipped))


def accuracy_delta(public: Json) -> float | None:
    """Next-token accuracy after less before, where both were measured on public data."""
    before, after = public.get("eval_accuracy_before"), public.get("eval_accuracy_after")
    return None if before is None or after is None else after - before


def _consumed(plan: Json, record: Json) -> float:
    """The epsilon of the steps that were executed; of a run whose process was killed, all of it."""
    steps, whole = record["steps_taken"], float(plan["epsilon"])
    if steps is None or record["status"] == "completed" or plan["event"].get("type") != "self_composed":
        return whole
    event = {**plan["event"], "count": min(steps, plan["event"]["count"])}
    return min(whole, accounting.epsilon(event, plan["delta"], plan["neighbouring_relation"], interval=INTERVAL))


def _audit(run: RunDir) -> AuditValues | None:
    """The audit in export/, if it is there; one in private/ is not for metrics."""
    path = run.export / "audit" / "audit.json"
    if not path.exists():
        return None
    from dpllm.audit.summary import PRIMARY_ATTACK  # imports scipy

    report = read_json(path)
    attack = report["attacks"].get(PRIMARY_ATTACK) or {}
    lower, upper = attack.get("auc_interval") or (None, None)
    return AuditValues(
        attack.get("auc"),
        lower,
        upper,
        (attack.get("limits") or {}).get("auc"),
        report["epsilon_lower_bound"]["value"],
    )


def _last_step(run: RunDir, *, clips: bool) -> PrivateValues | None:
    """The un-noised figures of the last step."""
    lines = run.metrics.read_text(encoding="utf-8").splitlines() if run.metrics.exists() else []
    steps = [line for line in map(json.loads, lines) if "units" in line]
    return unnoised(steps[-1], clips=clips) if steps else None


def unnoised(step: Mapping[str, Any], *, clips: bool) -> PrivateValues:
    """Loss and share of clipped gradients of one line of metrics.jsonl: private.

    Args:
        step: Such a line.
        clips: Whether the run clips gradients at all.
    """
    share = step["clipped"] / step["units"] if clips and step["units"] else None
    return PrivateValues(step["loss"], share)
