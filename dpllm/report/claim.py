"""The privacy statement of a run as one machine-readable value: what is promised, under which assumptions, or why not.

Comes in: the recipe, the Plan, the record of the run, the audit. Goes out: a JSON value, which the card's front matter
and ``export/privacy.json`` both carry. Must not read ``private/``, nor state an epsilon as a guarantee where there is
none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dpllm.config import LoraConfig, RunConfig
from dpllm.errors import ConfigError
from dpllm.report import words
from dpllm.rundir import digest

Json = dict[str, Any]

NOT_COVERED = (
    "the data on which the base model and its tokenizer were trained",
    "facts that many units share; k units together have k times the epsilon and a larger delta",
    "evaluation data and every figure computed from them",
    "the choice of hyper-parameters and of this run among others, where un-noised figures guided it",
    "un-noised figures of the training, such as logs and telemetry, kept by whoever trained the model",
    "text given to the model when it is used",
    "the difference between floating-point arithmetic and real numbers (in bf16 or fp16 one unit can move the rounding of the "
    "others' gradients), and side channels such as timing",
)


def privacy_block(
    config: RunConfig, plan: Json | None, record: Json, audit: Json | None, mechanism: Json | None = None
) -> Json:
    """The privacy statement of a run.

    Args:
        config: The resolved recipe.
        plan: ``plan.json``; None for a run without differential privacy.
        record: ``run.json``.
        audit: ``audit.json``; None where these weights were not audited.
        mechanism: ``mechanism.json``; None where the engine was not audited.

    Returns:
        A JSON value. ``guarantee`` is true only if the run kept every assumption and its audit does not contradict
        it. Otherwise ``reason`` says why, and the Plan's numbers stand under ``attempted`` and nowhere else.

    Raises:
        ConfigError: See ``check_plan`` and ``check_audit``; or the Plan and the record speak of different deltas.
    """
    if plan is not None:
        check_plan(plan, record)
    if audit is not None:
        check_audit(plan, record, audit)
    reason = why_not(config, plan, record, audit, mechanism)
    block: Json = {"guarantee": reason is None}
    if reason is not None:
        block["reason"] = reason
    if plan is not None:
        terms = _terms(config, plan, record)
        block |= terms if reason is None else {"attempted": terms}
    block |= {
        "steps": {"planned": record["steps_planned"], "taken": record["steps_taken"]},
        "status": record["status"],
        "composed": _composed(record),
        "base_model_covered": False,
        "not_covered": _not_covered(plan, record) if reason is None else ["everything: this run gives no guarantee"],
        "deviations": list(record["deviations"]),
        "audit": None if audit is None else _short_audit(audit),
        "mechanism_audit": None
        if mechanism is None
        else {key: mechanism[key] for key in ("verdict", "reason", "steps")},
        "software": dict(record["versions"]),
    }
    # A copy through JSON: no object appears twice, so YAML writes no anchors, and no tuple does.
    copy: Json = json.loads(json.dumps(words.without_paths(block), allow_nan=False))
    return copy


def why_not(
    config: RunConfig, plan: Json | None, record: Json, audit: Json | None, mechanism: Json | None = None
) -> str | None:
    """Why a run gives no guarantee, as one sentence without its full stop; None where it gives one."""
    if not config.privacy.enabled or plan is None:
        where = ", on data that the recipe declares public" if config.data.public else ""
        return f"this model was trained without differential privacy (privacy.enabled: false){where}"
    if not record["guarantee"]["holds"]:
        return str(record["guarantee"]["reason"] or "an assumption of the guarantee was broken").rstrip(". ")
    if mechanism is not None and mechanism["verdict"] == "falsified":
        return f"the audit of the engine that trained contradicts it: {str(mechanism['reason']).rstrip('. ')}"
    if audit is not None and contradicts(audit, stated_epsilon(plan, record)):
        finding = _finding(audit, stated_epsilon(plan, record)).rstrip(". ")
        return f"the audit of these weights contradicts it: {finding}"
    return None


def _finding(audit: Json, epsilon: float) -> str:
    found = audit["epsilon_lower_bound"]
    if found["value"] is None or found["value"] <= epsilon:
        return str(audit["verdict_reason"])
    sure, at_least = words.percent(1 - found["alpha"]), words.measured(found["value"])
    return f"epsilon is at least {at_least} with {sure} confidence, and the run was planned for {words.bound(epsilon)}"


def contradicts(audit: Json, epsilon: float) -> bool:
    """Whether an audit found more leakage than epsilon allows."""
    found = audit["epsilon_lower_bound"]["value"]
    return audit["verdict"] == "falsified" or (found is not None and found > epsilon)


def stated_epsilon(plan: Json, record: Json) -> float:
    """The epsilon of the whole Plan, or more if more was spent.

    An interrupted run states no less: whoever stopped it may have looked at figures that carry no noise.

    Raises:
        ConfigError: What was spent is given at another delta than what was planned, so the two cannot be compared.
    """
    spent = record["epsilon_spent"]
    if spent is not None and record["delta"] not in (None, plan["delta"]):
        raise ConfigError(
            f"run.json gives the epsilon spent at delta {record['delta']}, plan.json at delta {plan['delta']}, so the "
            "card cannot state one of them. The run directory is damaged: train again."
        )
    return max(float(plan["epsilon"]), float(spent or 0.0))


def check_plan(plan: Json, record: Json) -> None:
    """Makes sure that the promise and the record are those of one run.

    Raises:
        ConfigError: The record names another Plan, or another number of steps.
    """
    if record.get("plan_digest", digest(plan)) != digest(plan) or record["steps_planned"] != plan["num_steps"]:
        raise ConfigError(
            "plan.json is not the Plan of the run in run.json, so its figures say nothing about these weights. The run "
            "directory holds parts of two runs: train again."
        )


def check_audit(plan: Json | None, record: Json, audit: Json) -> None:
    """Makes sure that an audit is about the weights and the canaries of this run.

    Raises:
        ConfigError: It names no weights or others than those of the record, or other canaries than those that the
            Plan committed to before training.
    """
    weights: Mapping[str, str] = audit["weights"]
    strangers = sorted(name for name, digest in weights.items() if record["artifacts"].get(name) != digest)
    if strangers or not weights:
        which = ", ".join(strangers) or "no weights at all"
        raise ConfigError(
            f"audit.json belongs to other weights ({which}), so its figures say nothing about these. "
            "Run dpllm audit again."
        )
    if plan is not None and plan["canary_commitment"] != audit["canaries"]["commitment"]:
        raise ConfigError(
            "audit.json is about other canaries than those fixed before training (the commitments differ), so it could "
            "have been chosen to look well. Run dpllm audit again with the canaries of this run."
        )
    if plan is not None and audit.get("settings") != plan.get("audit"):
        raise ConfigError(
            "audit.json was made with another alpha or other numbers of guesses than plan.json fixed before training, so they "
            "could have been chosen to look well. Run dpllm audit again."
        )
    claim = audit["claim"]
    if plan is not None and any(claim.get(name) != plan.get(name) for name in ("epsilon", "delta", "unit")):
        raise ConfigError(
            "audit.json tested another epsilon, delta or unit than plan.json promises, so its verdict is not about this run. "
            "Run dpllm audit again."
        )


def _terms(config: RunConfig, plan: Json, record: Json) -> Json:
    """The numbers of the Plan: everything that is needed to compute epsilon again."""
    return {
        "epsilon": stated_epsilon(plan, record),
        "delta": plan["delta"],
        "unit": plan["unit"],
        "max_examples_per_unit": plan["max_examples_per_unit"],
        "neighbouring_relation": plan["neighbouring_relation"],
        "mechanism": "dp-sgd",
        "optimizer": config.train.optimizer,
        "clipping": plan["clipping"],
        "max_grad_norm": plan["max_grad_norm"],
        "noise_multiplier": plan["noise_multiplier"],
        **({"adaptive": plan["adaptive"]} if plan.get("adaptive") else {}),
        "sampling": {
            "scheme": "poisson",
            "of": plan.get("sampling", "unit"),
            "sampling_rate": plan["sampling_rate"],
            "expected_batch_size": plan["expected_batch_size"],
            "dataset_size": plan["dataset_size"],
            "canary_slots": plan["canary_slots"],
        },
        "randomness": {
            "generator": "chacha20" if config.privacy.secure_noise else "philox",
            "secure_noise": config.privacy.secure_noise,
        },
        "accountant": plan["accountant"],
        "cross_check": plan["cross_check"],
        **_profile(plan, record),
        "event": plan["event"],
        "released": "adapter weights" if isinstance(config.adapter, LoraConfig) else "model weights",
        "data_public": config.data.public,
    }


def _profile(plan: Json, record: Json) -> Json:
    """The other words for the planned epsilon; none where more was spent than planned, of which they are not true."""
    if stated_epsilon(plan, record) > plan["epsilon"]:
        return {}
    return {name: plan[name] for name in ("accountants", "limits", "curve") if plan.get(name)}


def _composed(record: Json) -> Json | None:
    """The total over all runs on the dataset, as the ledger had it after this one."""
    ledger = record["ledger"]
    if ledger is None:
        return None
    budget = ledger["budget"]
    return {
        "dataset": ledger["dataset"],
        "budget": budget,
        "gate": budget["gate"] if budget else None,
        "order": budget["order"] if budget else None,
        "spent_epsilon": ledger["spent_epsilon"],
        "filter_epsilon": ledger["filter_epsilon"],
        "imported": ledger["imported"],
        "made_up_by": ledger["made_up_by"],
        "delta": budget["delta"] if budget else record["delta"],
        "entries": ledger["head"]["count"],
        "entry": ledger["entry"],
        "head": ledger["head"]["hash"],
    }


def _not_covered(plan: Json | None, record: Json) -> list[str]:
    lines = list(NOT_COVERED)
    if plan is not None and plan["neighbouring_relation"] == "zero_out":
        lines.append("the number of units, which is published")
    if record["status"] == "interrupted":
        lines.append("the decision when to stop the run, which may rest on un-noised figures")
    return lines


def _short_audit(audit: Json) -> Json:
    found = audit["epsilon_lower_bound"]
    return {
        "verdict": audit["verdict"],
        "epsilon_lower_bound": found["value"],
        "confidence": 1 - found["alpha"],
        "ceiling": found["ceiling"],
        "method": found["method"],
        "num_canaries": found["num_canaries"],
        "auc": {
            name: {"group": attack["group"], "value": attack["auc"], "interval": attack["auc_interval"]}
            for name, attack in audit["attacks"].items()
        },
        "exposure": {
            group: {"mean": seen["mean"], "null_mean": seen["null_mean"]} for group, seen in audit["exposure"].items()
        },
        "extraction": {
            group: {key: seen[key] for key in ("inserted", "tuned", "base")}
            for group, seen in audit["extraction"].items()
        },
        "audits_run": audit["audits_run"],
        "commitment": audit["canaries"]["commitment"],
    }
