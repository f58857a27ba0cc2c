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
    private = math.isfinite(epsilon)
    strength = epsilon / (epsilon + 4) if private else 0.9
    auc = 0.5 + 0.4 * strength
    attack = {
        "group": 1, "auc": auc, "auc_interval": [auc - 0.06, auc + 0.05], "confidence": 0.95, "positives": 99,
        "negatives": 101, "tpr_at_1_percent_fpr": strength / 3,
        "tpr_at_1_percent_fpr_interval": [strength / 6, strength / 2],
    }  # fmt: skip
    exposure, extraction = {}, {}
    for number, (group, planted) in enumerate(GROUPS.items(), start=1):
        share = strength * number / 3
        expected = {"null_mean": 1.44, "p_value": 0.3, "maximum": 9.9, "base_mean": 1.41, "inserted": planted}
        exposure[group] = {"mean": 1.5 + 8 * share, **expected}
        extracted = math.floor(share * planted)
        extraction[group] = {"inserted": planted, "tuned": extracted, "base": 0, "held_out": 10, "held_out_tuned": 0}
    parts = {
        "claim": {"epsilon": epsilon, "delta": 1e-5, "unit": "example"} if private else None,
        "settings": cards.SETTINGS,
        "canaries": {"groups": {}, "references": 1000, "commitment": "c0" * 32},
        "controls": {"base_separates": False, "words": None, "positive": None},
        "attacks": {
            name: {**attack, "auc": auc - less} for name, less in {"calibrated": 0, "ratio": 0.01, "loss": 0.02}.items()
        },
        "exposure": exposure,
        "extraction": extraction,
        "epsilon_lower_bound": {
            "value": 2 * strength, "alpha": 0.05, "delta": 1e-5, "ceiling": 2.756, "method": "one-run",
        },
        "verdict": "consistent" if private else "no_claim",
        "verdict_reason": "",
        "audits_run": 1,
        "published": private,
        "weights": artifacts,
    }  # fmt: skip
    return cards.whole_audit(parts)


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
    ledger = {
        "dataset": "notes", "entry": "ab" * 8, "head": {"hash": "0" * 64, "count": 3}, "budget": None,
        "spent_epsilon": 1.17 * epsilon, "used": None, "final": False, "imported": 0,
        "group": {"name": group, "runs": 2, "epsilon": 9.1, "delta": 1e-5} if group else None,
    }  # fmt: skip
    usual = cards.record(artifacts=artifacts or weights(root))
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
