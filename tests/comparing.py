"""Run directories that were never trained, with figures of which each is known."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import cards

from dpllm.comparison.compare import PROTOCOL
from dpllm.files import read_json, write_json
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir

Json = dict[str, Any]
CHEAP = {"dataset_size": 888, "expected_batch_size": 888, "num_steps": 4, "noise_multiplier": 40.0}
GROUPS = {"1": 99, "4": 11, "16": 9}


def recipe(epsilon: float, **sections: Json) -> Json:
    enabled = math.isfinite(epsilon)
    base: Json = {
        "model": {"name_or_path": "builtin:tiny"},
        "data": {"train": "builtin:clinic", "eval": "builtin:clinic/eval", "public": True, "eval_public": True},
        "privacy": {"enabled": enabled, **({"epsilon": epsilon} if enabled else {})},
        "train": {"steps": 100, "learning_rate": 1e-3 if enabled else 5e-4},
        "audit": {"canaries": {"groups": {1: 200, 4: 20, 16: 20}}},
        "output_dir": f"runs/eps-{epsilon:g}",
    }
    return base | {name: {**base[name], **section} for name, section in sections.items()}


def weights(root: Path) -> dict[str, str]:
    return {"adapter_model.safetensors": hashlib.sha256(root.name.encode()).hexdigest()}


def measured_audit(epsilon: float, artifacts: dict[str, str]) -> Json:
    """The larger epsilon is, the more is found."""
    private, usual = math.isfinite(epsilon), cards.audit()
    strength = epsilon / (epsilon + 4) if private else 0.9
    auc = 0.5 + 0.4 * strength
    rates = {"tpr_at_1_percent_fpr": strength / 3, "tpr_at_1_percent_fpr_interval": [strength / 6, strength / 2]}
    attack = usual["attacks"]["ratio"] | {"auc": auc, "auc_interval": [auc - 0.06, auc + 0.05], **rates}
    del attack["limits"]  # which follow from the claim
    exposure, extraction = {}, {}
    for number, (group, planted) in enumerate(GROUPS.items(), start=1):
        share, inserted = strength * number / 3, {"inserted": planted}
        exposure[group] = usual["exposure"]["1"] | {"mean": 1.5 + 8 * share, "p_value": 0.3, **inserted}
        extraction[group] = usual["extraction"]["1"] | {"tuned": math.floor(share * planted), **inserted}
    measured = {
        "claim": {"epsilon": epsilon, "delta": 1e-5, "unit": "example"} if private else None,
        "canaries": usual["canaries"] | {"groups": {}},
        "controls": {"base_separates": False, "words": None, "positive": None},
        "attacks": {
            name: {**attack, "auc": auc - less} for name, less in {"calibrated": 0, "ratio": 0.01, "loss": 0.02}.items()
        },
        "exposure": exposure,
        "extraction": extraction,
        "epsilon_lower_bound": usual["epsilon_lower_bound"] | {"value": 2 * strength},
        "verdict": "consistent" if private else "no_claim",
        "published": private,
        "weights": artifacts,
    }
    return cards.whole_audit(usual | measured)


def make_run(
    root: Path,
    epsilon: float,
    sections: dict[str, Json] | None = None,
    record: Json | None = None,
    summary: Json | None = None,
    *,
    audit: bool = True,
    group: str | None = None,
    artifacts: dict[str, str] | None = None,
) -> RunDir:
    """One run; ``epsilon`` infinite: without differential privacy."""
    enabled = math.isfinite(epsilon)
    config = RunConfig.model_validate(recipe(epsilon, **(sections or {})))
    plan = cards.plan(epsilon=epsilon, unit="example", **CHEAP) if enabled else None
    evaluated = {"eval_loss_before": 3.912, "eval_loss_after": 1.954 + 1.2 / epsilon, "eval_tokens": 15023}
    evaluated |= summary or {}
    usual = cards.record(artifacts=artifacts or weights(root))
    ledger = usual["ledger"] | {"dataset": "notes", "entry": "ab" * 8, "spent_epsilon": 1.17 * epsilon}
    ledger["group"] = {"name": group, "runs": 2, "epsilon": 9.1, "delta": 1e-5} if group else None
    facts = {
        "guarantee": {"holds": enabled, "reason": None},
        "delta": 1e-5 if enabled else None,
        "model": {**usual["model"], "name_or_path": "builtin:tiny", "commit": None},
        "ledger": ledger if enabled else None,
        "metrics": {"public": evaluated if config.data.eval_public else {}},
        "duration_seconds": 61.5,
        "peak_memory_bytes": None,
        "hardware": {},
    }
    measured = measured_audit(epsilon, weights(root)) if audit else None
    run = cards.make_run(root, config, plan, {**usual, **facts, **(record or {})}, measured)
    for name in ("adapter_model.safetensors", "tokenizer.json"):  # the manifest names files that nobody has
        (run.export / name).unlink()
    write_json(run.private / "summary.json", evaluated)
    return run


def change_audit(run: RunDir, every: Json | None = None, **changes: Any) -> None:
    """Changes keys of a run's audit; ``every`` maps a key to what changes in each of its parts."""
    path = run.audit_dir(run.load_config().privacy.enabled) / "audit.json"
    audit = read_json(path)
    for name, new in (every or {}).items():
        changes[name] = {part: {**attack, **new} for part, attack in audit[name].items()}
    audit |= {name: audit[name] | new if isinstance(new, dict) else new for name, new in changes.items()}
    write_json(path, audit)


def write_tasks(run: RunDir, tuned: Json, base: Json | None = None, **changes: Any) -> None:
    """Scores of what these weights write behind two prompts with nine references."""
    counts = {"num_tokens": 100, "prompts": 2, "references": 9, "asked": 2}
    scores = {"tuned": {"bleu": tuned}, "base": {"bleu": base} if base else None}
    results = {"weights": weights(run.root), "protocol": PROTOCOL, **counts, **scores, **changes}
    write_json(run.private / "tasks.json", results)


def without_pictures(monkeypatch: Any) -> None:
    """Drawing takes most of the time of a comparison, and has tests of its own."""

    def draw(values: Json, path: Path) -> bool:
        path.write_bytes(b"a picture")
        return True

    monkeypatch.setattr("dpllm.comparison.shown.draw", draw)
