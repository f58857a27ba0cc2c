"""One audit of one finished run.

Comes in: a run directory. Goes out: audit.json, scores.csv, tokens.parquet and exposure.png. A run with differential privacy
publishes them: they are computed from its output, from texts drawn before it saw any data, and from their coins. A run without
keeps them private. No canary's text leaves private/.
"""

from __future__ import annotations

from typing import Any

import torch

from dpllm import checkpoint, model
from dpllm.audit import canaries, figure
from dpllm.audit.canaries import CanaryPlan
from dpllm.audit.scores import score_canaries
from dpllm.audit.summary import Claim, summarise
from dpllm.audit.table import write_table
from dpllm.audit.tokens import write_tokens
from dpllm.config import CanaryConfig, RunConfig
from dpllm.data import Format, load_table
from dpllm.errors import ConfigError
from dpllm.rundir import RunDir, read_json, write_json


def audit(run: RunDir) -> dict[str, Any]:
    """Scores the canaries of a finished run and writes what follows from them.

    Args:
        run: A run that planted canaries and exported its weights.

    Returns:
        The report, as audit.json holds it. A falsified claim is said in ``verdict``, not raised.

    Raises:
        ConfigError: No canaries in the recipe, no weights, or canaries other than those committed to before training.
    """
    config = run.load_config()
    settings = config.audit.canaries
    if settings is None:
        raise ConfigError(
            f"{run.root}: no canaries were planted, so there is nothing to measure. Put audit: {{canaries: {{}}}} into "
            "the recipe (or audit.canaries.groups: {1: 200, 4: 20, 16: 20}) and train again."
        )
    weights = checkpoint.weight_hashes(run.export)
    if not weights:
        raise ConfigError(
            f"{run.export}: holds no weights to audit; the run did not finish. Train again, or resume it."
        )
    plan = canaries.load(run.canaries)
    claim = _claim(run, plan) if config.privacy.enabled else None

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = model.load_for_scoring(config, run.export, device)
    table, tokens = score_canaries(
        models, plan, _format(run, config), config.data.max_length, config.data.long_examples
    )

    report = {
        **summarise(
            table,
            claim,
            alpha=config.audit.alpha,
            guesses=config.audit.guesses,
            guesses_in=config.audit.guesses_in,
            tokens=tokens,
        ),
        "canaries": _describe(plan, settings),
        "weights": weights,
        "audits_run": _count(run),
    }
    folder = run.audit_dir(config.privacy.enabled)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(table, folder / "scores.csv")
    write_tokens(tokens, folder / "tokens.parquet")
    figure.draw(table, folder / "exposure.png")
    write_json(folder / "audit.json", report)
    return report


def _claim(run: RunDir, plan: CanaryPlan) -> Claim:
    """The promise of plan.json, which was written before training and commits to the canaries."""
    promise = read_json(run.plan)
    if promise.get("canary_commitment") != plan.commitment:
        raise ConfigError(
            f"{run.canaries}: these are not the canaries that {run.plan.name} committed to before training, so an "
            "audit with them would prove nothing; restore the file, or train again."
        )
    try:
        return Claim(float(promise["epsilon"]), float(promise["delta"]), str(promise["unit"]))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{run.plan}: states no epsilon, delta and unit; the file is damaged.") from None


def _format(run: RunDir, config: RunConfig) -> Format:
    """How the training rows read; where the recipe left it to the data, their columns are looked at again."""
    if config.data.format != "auto":
        return config.data.format
    return load_table(config.data.train, config.data, config.data.train_split, run.private / "cache").format


def _describe(plan: CanaryPlan, settings: CanaryConfig) -> dict[str, Any]:
    groups: dict[str, dict[str, int]] = {}
    for canary in plan.canaries:
        counts = groups.setdefault(str(canary.group), {"candidates": 0, "inserted": 0})
        counts["candidates"] += 1
        counts["inserted"] += canary.inserted
    return {
        "digits": settings.digits,
        "groups": groups,
        "references": len(plan.references),
        "commitment": plan.commitment,
    }


def _count(run: RunDir) -> int:
    """How many audits of this run were made, this one included: choosing the best of several would be seen."""
    path = run.private / "audits.json"
    made = int(read_json(path)["audits"]) if path.exists() else 0
    write_json(path, {"audits": made + 1})
    return made + 1
