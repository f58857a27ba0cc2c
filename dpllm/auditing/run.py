"""One audit of one finished run.

Comes in: a run directory. Goes out: audit.json and tokens.parquet. A run with differential privacy publishes them: they
are computed from its output, from texts drawn before it saw any data, and from their coins. A run without differential
privacy keeps them private. No canary's text is written outside private/, but anyone who knows the generator and the base
model can search for the texts that give the published numbers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dpllm.auditing import shadows as shadow_runs
from dpllm.auditing.gradient import GradientTable, tabulate, write_gradient
from dpllm.auditing.scores import score_canaries
from dpllm.auditing.statistics import words_control
from dpllm.auditing.summary import DELTA_WITHOUT_CLAIM, PRIMARY_ATTACK, AuditContext, summarise
from dpllm.auditing.table import TokenTable, write_tokens
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.model import loading
from dpllm.privacy.plan import Plan
from dpllm.recipe.config import RunConfig
from dpllm.recipe.sections import CanaryConfig
from dpllm.run import checkpoint
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.run.projections import read_projections, read_turns, read_weights
from dpllm.statement.audit import AuditRecord
from dpllm.statement.audit_bounds import Claim
from dpllm.telemetry.live import publish_audit

if TYPE_CHECKING:
    from dpllm.model.loading import ScoringModels


def audit(
    run: RunDir, *, positive_control: RunDir | None = None, shadows: int = 0, console: Console | None = None
) -> AuditRecord:
    """Scores the canaries of a finished run and writes audit.json and the tables.

    Args:
        run: A run that planted canaries and exported its weights.
        positive_control: An audited run of the same recipe without privacy, where the attack has to succeed. Unless both runs
            use the same public data, this report stays in private/, because it reveals something about that run, and a report
            without the control is published.
        shadows: How many shadow runs to train and compare with.
        console: Receives a line for each shadow.

    Returns:
        The content of audit.json. A falsified claim is reported in ``verdict``, not raised.

    Raises:
        ConfigError: No canaries in the recipe, no weights, canaries or settings other than those fixed before training, or
            a run that cannot serve as a positive control.
        Refused: The shadows may not be trained.
    """
    opened, plan, claim = _subject(run)
    config, promise = opened.config, opened.plan
    works, public = _control(config, positive_control) if positive_control else (None, True)
    settings = promise.audit if promise else config.audit.fixed()
    if settings is None:
        raise ConfigError(f"{run.plan}: fixes no tests, so they could be chosen by what the audit shows. Train again.")
    trained = shadow_runs.train_shadows(opened, shadows, console or Console(quiet=True)) if shadows else ()
    assert config.data.format != "auto"  # training writes the format that it found
    tokens = score_canaries(load_models(opened), plan, config.data.format, config.data)
    context = AuditContext(
        limits=promise.limits.to_json() if promise else None,
        words=words_control(plan.canaries),
        own_references=plan.label_epsilon is not None,
        gradient=_gradient(opened, promise, plan) if promise and plan.gradient_coins else None,
    )
    facts = {
        "settings": settings,
        "canaries": _describe(plan),
        "weights": checkpoint.weight_hashes(opened.export_dir),
    }
    if trained:
        at = {"delta": claim.delta if claim else DELTA_WITHOUT_CLAIM, "alpha": config.audit.alpha}
        facts["shadows"] = shadow_runs.summarise_shadows(tokens, shadow_runs.score_shadows(trained), **at)
    facts["audits_run"] = _count(run)

    def write(works: str | None, *, published: bool) -> AuditRecord:
        summary = summarise(tokens, claim, settings, replace(context, twin=works))
        return _write(run, AuditRecord.pick(summary.to_json(), published=published, **facts), tokens, context.gradient)

    report = public_report = write(works, published=config.privacy.enabled and public)
    if config.privacy.enabled and not public:  # the same report without anything about other runs
        facts.pop("shadows", None)
        public_report = write(None, published=True)
    publish_audit(run, config, figures(public_report) if public_report.published else {})
    return report


def _write(run: RunDir, report: AuditRecord, tokens: TokenTable, gradient: GradientTable | None) -> AuditRecord:
    folder = run.audit_dir(report.published)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(tokens, folder / "tokens.parquet")
    if gradient is not None:
        write_gradient(gradient, folder / "gradient.parquet")
    write_json(folder / "audit.json", report.to_json())
    return report


def figures(report: AuditRecord) -> dict[str, float | None]:
    """The metrics of a published audit, by name; None where a value is missing."""
    attack, bound = report.attacks.get(PRIMARY_ATTACK), report.epsilon_lower_bound
    lower, upper = (attack.auc_interval if attack else None) or (None, None)
    return {
        "dp_membership_inference_auc": attack.auc if attack else None,
        "dp_membership_inference_auc_lower": lower,
        "dp_membership_inference_auc_upper": upper,
        "dp_membership_inference_auc_allowed": attack.limits.auc if attack and attack.limits else None,
        "dp_audit_epsilon_lower_bound": bound.value if bound.num_canaries else None,
    }


def load_models(run: Run) -> ScoringModels:
    """Loads the exported weights of a run and its base model for scoring.

    Raises:
        ConfigError: The run exported no weights.
    """
    if not run.record.artifacts or not any(run.export_dir.glob("*.safetensors")):
        raise ConfigError(
            f"{run.export_dir}: holds no weights to audit; the run did not finish. Train again, or resume it."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return loading.load_for_scoring(run.config, run.export_dir, device)


def _gradient(run: Run, promise: Plan, plan: CanaryPlan) -> GradientTable:
    lattice, directory = run.record.lattice, run.directory
    assert lattice is not None
    proj_TM = read_projections(directory.projections)
    turns = read_turns(directory.groups, promise.coefficients, len(plan.gradient_coins))
    first_M, last_M = read_weights(directory.along)
    moved_M = first_M - last_M  # descent: a positive gradient decreases the weight
    return tabulate(
        proj_TM, plan.gradient_coins, promise.sampling_rate, lattice.noise_over_max_grad_norm, turns, moved_M
    )


def _subject(run: RunDir) -> tuple[Run, CanaryPlan, Claim | None]:
    """Opens a run; returns it with its canaries and the claim that they test."""
    opened = open_run(run)
    config = opened.config
    if not config.audit.plants:
        groups = CanaryConfig.usual_groups(config.data.max_examples_per_unit)
        raise ConfigError(
            f"{run.root}: no canaries were planted, so there is nothing to measure. Audit its audit twin, if there is one. To "
            f"train one, which is charged too, type: dpllm train {run.config} --audit.canaries '{{groups: {groups}}}' "
            f"--output_dir {run.root}-twin"
        )
    if (plan := opened.canaries) is None:
        raise ConfigError(f"{run.canaries}: is missing, so nobody knows which canaries were planted. Restore the file.")
    sides = {(canary.group, canary.inserted) for canary in plan.canaries}
    one_sided = plan.label_epsilon and len(sides) < 2 * len({group for group, _ in sides})
    if one_sided or (config.audit.canaries and not any(canary.inserted for canary in plan.canaries)):
        raise ConfigError(
            f"{run.canaries}: every coin said out, or all of a group prefer the same answer, so nothing can be compared. Plan "
            "more candidates (audit.canaries.groups) and train again."
        )
    if promise := opened.plan:
        return opened, plan, Claim(promise.epsilon, promise.delta, promise.unit)
    return opened, plan, Claim(plan.label_epsilon, 0.0, "label") if plan.label_epsilon else None


def _control(config: RunConfig, control: RunDir) -> tuple[str, bool]:
    """Where the attack worked on a run without privacy, in words (empty: nowhere), and whether that may be published."""
    opened = open_run(control)
    trained = opened.config
    if trained.privacy.enabled:
        raise ConfigError(
            f"{control.root}: was trained with differential privacy, so it cannot show whether the attack works. Name a run with "
            "privacy.enabled: false as --positive-control; an audit twin with privacy is audited by itself: dpllm audit "
            f"{control.root}"
        )
    ours, theirs = (
        {**recipe.model_dump(), **recipe.data.model_dump(include={"format", "max_length"})}
        for recipe in (config, trained)
    )
    for name in ("model", "adapter", "train", "audit", "format", "max_length"):
        if ours[name] != theirs[name]:
            raise ConfigError(
                f"{control.root}: its section {name} of the recipe differs, so its audit says nothing about this run. Train a "
                "positive control from the same recipe with --privacy.enabled false."
            )
    report = opened.audit
    if report is None:
        raise ConfigError(f"{control.root}: has no audit yet to serve as a control. Type: dpllm audit {control.root}")
    path = control.audit_dir(False) / "audit.json"
    if report.claim is not None:
        raise ConfigError(
            f"{path}: its canaries are labels that were flipped (data.label_record), so it shows nothing of canaries that are "
            "planted or left out. Audit without --positive-control."
        )
    controls = report.controls
    if controls.base_separates or (controls.words and controls.words.succeeds):
        raise ConfigError(
            f"{path}: its own controls failed, so it cannot show that the attack works. Train another positive control."
        )
    data_source = (config.data.train, config.data.train_split, config.data.revision)
    public = config.data.public and trained.data.public
    public = public and data_source == (trained.data.train, trained.data.train_split, trained.data.revision)
    return (f"{controls.positive} of a run without privacy" if controls.positive else ""), public


def _describe(plan: CanaryPlan) -> dict[str, Any]:
    return {
        "kind": plan.kind,
        "settings": plan.settings,
        "log2_secrets": plan.log2_secrets,
        "groups": canaries.count_groups(plan.canaries),
        "references": len(plan.references),
        "commitment": plan.commitment,
    }


def _count(run: RunDir) -> int:
    """The number of audits of this run directory, this one included, so that choosing the best of several is visible.

    Each audit adds one line in one write, so concurrent audits are all counted.
    """
    path = run.audits
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")
    return len(path.read_text(encoding="utf-8", errors="replace").splitlines())
