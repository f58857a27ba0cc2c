"""One audit of one finished run.

Comes in: a run directory. Goes out: audit.json, scores.csv, tokens.parquet and four pictures. A run with differential
privacy publishes them: they are computed from its output, from texts drawn before it saw any data, and from their coins. A
run without keeps them private. No canary's text leaves private/.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dpllm import checkpoint, model
from dpllm.audit import attacks, canaries, figure, token_attacks
from dpllm.audit.canaries import CanaryPlan
from dpllm.audit.generate.generation import generate_attacks
from dpllm.audit.rows.blind import blind
from dpllm.audit.scores import score_canaries
from dpllm.audit.summary import DELTA_WITHOUT_CLAIM, PRIMARY_ATTACK, summarise
from dpllm.audit.table import CanaryScores, write_table
from dpllm.audit.tokens import TokenTable, write_tokens
from dpllm.audit.verdict import CONTROL_LEVEL, Claim
from dpllm.config import RunConfig
from dpllm.data import Format, load_table
from dpllm.errors import ConfigError
from dpllm.rundir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from dpllm.model import ScoringModels

PARTS = {
    "exposure": ("exposure", "exposure_tail"),
    "extraction": ("extraction", "sampling"),
    **{name: ("generation", name) for name in ("completion", "choice", "untargeted", "personal")},
}
"""Attacks by the parts of the report that they are; all others are scores, under ``attacks`` and ``repeated``."""
ATTACKS = (PRIMARY_ATTACK, *attacks.ATTACKS, "rmia", *token_attacks.ATTACKS, *PARTS)


def audit(run: RunDir, *, twin: RunDir | None = None, shadows: int = 0, generate: bool = True) -> dict[str, Any]:
    """Scores the canaries of a finished run and writes what follows from them.

    Args:
        run: A run that planted canaries and exported its weights.
        twin: An audited run of the same recipe without privacy, where the attack has to succeed: a positive control. Unless
            the data are public the report then stays in private/, because it tells something of that run.
        shadows: How many shadow runs to train and to compare with, see ``shadows.audit_shadows``; on private data the
            report then stays in private/ too.
        generate: Let the models complete, sample and choose as well; else only what one pass of scoring shows.

    Returns:
        The report, as audit.json holds it. A falsified claim is said in ``verdict``, not raised.

    Raises:
        ConfigError: No canaries in the recipe, no weights, canaries or settings other than those fixed before training, or
            a twin that is none.
        Refused: Shadows that may not be trained.
    """
    from dpllm.audit.shadow.shadows import audit_shadows, may_train  # which train

    config, plan, claim = _subject(run)
    seen = _twin(config, twin) if twin else None
    if shadows:
        may_train(run, config)
    report, table, tokens = _examine(run, config, plan, claim, twin=seen, generate=generate)
    if shadows:
        delta = claim.delta if claim else DELTA_WITHOUT_CLAIM
        found = audit_shadows(run, config, plan, table, shadows, delta=delta, console=Console(stderr=True))
        report["shadows"] = found
    report["audits_run"] = _count(run)
    of_other_runs = twin is not None or shadows > 0
    folder = run.audit_dir(config.privacy.enabled and (config.data.public or not of_other_runs))
    folder.mkdir(parents=True, exist_ok=True)
    write_table(table, folder / "scores.csv")
    write_tokens(tokens, folder / "tokens.parquet")
    figure.draw(table, report, folder)
    write_json(folder / "audit.json", report)
    return report


def attack(run: RunDir, name: str) -> dict[str, Any]:
    """One attack on a finished run. Nothing is written, and no bound is computed, so that it does not count as an audit.

    Args:
        run: As for ``audit``.
        name: Of ``ATTACKS``.

    Returns:
        The part of the report that it makes: for a score one entry for each group of repetitions.

    Raises:
        ConfigError: No such attack; and see ``audit``.
    """
    if name not in ATTACKS:
        near = difflib.get_close_matches(name, ATTACKS, 1)
        advice = f"Did you mean {near[0]}?" if near else f"Type one of {', '.join(ATTACKS)}."
        raise ConfigError(f"--attack {name}: no such attack. {advice}")
    config, plan, claim = _subject(run)
    if name == "personal" and plan.kind != "pii":
        raise ConfigError(
            f"--attack personal: the canaries of {run.root} are {plan.kind}, and no personal details to ask for. Train with "
            "audit.canaries.kind: pii, or type another attack."
        )
    parts = PARTS.get(name, ())
    report, _, _ = _examine(run, config, plan, claim, twin=None, generate="generation" in parts)
    if "generation" in parts:
        return {name: report["generation"][name]}
    if parts:
        return {part: report[part] for part in parts}
    groups = [report["attacks"], *(seen["attacks"] for seen in report["repeated"].values())]
    return {str(group[name]["group"]): group[name] for group in groups if name in group}


def load_models(run: RunDir, config: RunConfig) -> ScoringModels:
    """The weights of a run beside its base.

    Raises:
        ConfigError: The run exported none.
    """
    if not checkpoint.weight_hashes(run.export):
        raise ConfigError(
            f"{run.export}: holds no weights to audit; the run did not finish. Train again, or resume it."
        )
    return model.load_for_scoring(config, run.export, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _examine(
    run: RunDir, config: RunConfig, plan: CanaryPlan, claim: Claim | None, *, twin: str | None, generate: bool
) -> tuple[dict[str, Any], tuple[CanaryScores, ...], TokenTable]:
    """The report without what needs other runs, and the tables behind it."""
    models = load_models(run, config)
    encoding = (_format(run, config), config.data.max_length, config.data.long_examples)
    table, tokens = score_canaries(models, plan, *encoding)
    report = {
        **summarise(
            table,
            claim,
            alpha=config.audit.alpha,
            guesses=config.audit.guesses,
            guesses_in=config.audit.guesses_in,
            tokens=tokens,
            log2_secrets=plan.log2_secrets,
            promise=read_json(run.plan) if claim else None,
            words=_words(plan),
            twin=twin,
        ),
        "generation": generate_attacks(models, plan, *encoding) if generate else None,
        "canaries": _describe(plan),
        "weights": checkpoint.weight_hashes(run.export),
    }
    return report, table, tokens


def _subject(run: RunDir) -> tuple[RunConfig, CanaryPlan, Claim | None]:
    """Recipe, canaries and promise of a run, which belong together."""
    config = run.load_config()
    if config.audit.canaries is None:
        raise ConfigError(
            f"{run.root}: no canaries were planted, so there is nothing to measure. Put audit: {{canaries: {{}}}} into "
            "the recipe and train again."
        )
    plan = canaries.load(run.canaries)
    if not any(canary.inserted for canary in plan.canaries):
        raise ConfigError(
            f"{run.canaries}: every coin said out, so no canary was planted and nothing can be found. Plan more candidates "
            "(audit.canaries.groups) and train again."
        )
    return config, plan, _claim(run, config, plan) if config.privacy.enabled else None


def _claim(run: RunDir, config: RunConfig, plan: CanaryPlan) -> Claim:
    """The promise of plan.json, which was written before training and commits to the canaries and the test."""
    promise = read_json(run.plan)
    if promise.get("canary_commitment") != plan.commitment:
        raise ConfigError(
            f"{run.canaries}: these are not the canaries that {run.plan.name} committed to before training, so an "
            "audit with them would prove nothing; restore the file, or train again."
        )
    if promise.get("audit", config.audit.fixed()) != config.audit.fixed():
        raise ConfigError(
            f"{run.config}: audit.alpha, audit.guesses or audit.guesses_in are not those that {run.plan.name} fixed before "
            "training, and a test chosen afterwards proves nothing. Restore the file, or train again."
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


def _words(plan: CanaryPlan) -> dict[str, Any] | None:
    """What the words alone tell about the coins: nothing, if the coins were fair. None: too few canaries."""
    texts = {
        coin: [f"{one.carrier} {one.secret}" for one in plan.canaries if one.inserted == coin] for coin in (True, False)
    }
    found = blind(texts[True], texts[False], confidence=1 - CONTROL_LEVEL)
    if found is None:
        return None
    return {"auc": found.auc, "interval": [found.low, found.high], "succeeds": found.succeeds}


def _twin(config: RunConfig, twin: RunDir) -> str | None:
    """Where the attack was seen to work on a run of the same recipe without privacy; None if it was not."""
    other = twin.load_config()
    if other.privacy.enabled:
        raise ConfigError(
            f"{twin.root}: was trained with differential privacy, so an attack that fails on it shows nothing about the "
            "attack. Name a run with privacy.enabled: false as --twin."
        )
    for name in ("model", "adapter", "train", "audit"):
        if getattr(config, name) != getattr(other, name):
            raise ConfigError(
                f"{twin.root}: its section {name} of the recipe differs, so it is no twin and its audit says nothing about "
                "this one. Train a twin from the same recipe with --privacy.enabled false."
            )
    path = twin.audit_dir(False) / "audit.json"
    if not path.exists():
        raise ConfigError(f"{twin.root}: was not audited yet, so it controls nothing. Type: dpllm audit {twin.root}")
    seen = read_json(path)["controls"]["positive"]
    return f"{seen} of a run without privacy" if seen else None


def _describe(plan: CanaryPlan) -> dict[str, Any]:
    groups: dict[str, dict[str, int]] = {}
    for canary in plan.canaries:
        counts = groups.setdefault(str(canary.group), {"candidates": 0, "inserted": 0})
        counts["candidates"] += 1
        counts["inserted"] += canary.inserted
    return {
        "kind": plan.kind,
        "settings": plan.settings,
        "log2_secrets": plan.log2_secrets,
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
