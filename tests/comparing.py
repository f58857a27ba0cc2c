"""Run directories that were never trained, with figures of which each is known."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import cards

from dpllm.comparison.compare import PROTOCOL
from dpllm.files import read_json, write_json
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.run.directory import RunDir
from dpllm.statement.run_files import read_plan

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
    for name, section in sections.items():
        base[name] = {**base[name], **section}
    return base


def weights(root: Path) -> dict[str, str]:
    return {"adapter_model.safetensors": hashlib.sha256(root.name.encode()).hexdigest()}


def measured_audit(epsilon: float, artifacts: dict[str, str]) -> Json:
    """The larger epsilon is, the more is found."""
    result = epsilon / (epsilon + 4) if math.isfinite(epsilon) else 0.9
    exposure, extraction = {}, {}
    for number, (group, planted) in enumerate(GROUPS.items()):
        got = math.floor(result * planted * (number + 1) / 3)
        exposure[group] = {
            "mean": 1.5 + 8 * result * (number + 1) / 3, "null_mean": 1.44, "p_value": 0.3, "maximum": 9.9,
            "base_mean": 1.41, "inserted": planted,
        }  # fmt: skip
        extraction[group] = {"inserted": planted, "tuned": got, "base": 0, "held_out": 10, "held_out_tuned": 0}
    auc = 0.5 + 0.4 * result
    attack = {
        "group": 1, "auc": auc, "auc_interval": [auc - 0.06, auc + 0.05], "confidence": 0.95, "positives": 99,
        "negatives": 101, "tpr_at_1_percent_fpr": result / 3, "tpr_at_1_percent_fpr_interval": [result / 6, result / 2],
    }  # fmt: skip
    bound = {"value": 2 * result, "alpha": 0.05, "delta": 1e-5, "ceiling": 2.756, "method": "one-run"}
    result = {
        "claim": {"epsilon": epsilon, "delta": 1e-5, "unit": "example"} if math.isfinite(epsilon) else None,
        "settings": cards.SETTINGS,
        "canaries": {"groups": {}, "references": 1000, "commitment": "c0" * 32},
        "controls": {"base_separates": False, "words": None, "positive": None},
        "attacks": {
            "calibrated": attack,
            "ratio": {**attack, "auc": auc - 0.01},
            "loss": {**attack, "auc": auc - 0.02},
        },
        "exposure": exposure,
        "extraction": extraction,
        "epsilon_lower_bound": bound,
        "verdict": "consistent" if math.isfinite(epsilon) else "no_claim",
        "verdict_reason": "",
        "audits_run": 1,
        "published": math.isfinite(epsilon),
        "weights": artifacts,
    }
    return cards.whole_audit(result)


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
    run = RunDir(root)
    run.make()
    config = RunConfig.model_validate(recipe(epsilon, **(sections or {})))
    run.config.write_text(dump_config(config), encoding="utf-8")
    after = 1.954 + 1.2 / epsilon
    evaluated = {"eval_loss_before": 3.912, "eval_loss_after": after, "eval_tokens": 15023, **(summary or {})}
    ledger = {
        "dataset": "notes", "entry": "ab" * 8, "head": {"hash": "0" * 64, "count": 3}, "budget": None,
        "spent_epsilon": 1.17 * epsilon, "used": None, "final": False, "imported": 0,
        "group": {"name": group, "runs": 2, "epsilon": 9.1, "delta": 1e-5} if group else None,
    }  # fmt: skip
    written = {f"export/{name}": value for name, value in (artifacts or weights(root)).items()}
    written["config.yaml"] = names.of_training(config)
    if enabled:
        promise = cards.plan(epsilon=epsilon, unit="example", **CHEAP)
        write_json(run.plan, promise)
        written["plan.json"] = read_plan(run).digest
    write_json(
        run.run,
        {
            **cards.record(),
            "guarantee": {"holds": enabled, "reason": None},
            "delta": 1e-5 if enabled else None,
            "model": {**cards.record()["model"], "name_or_path": "builtin:tiny", "commit": None},
            "manifest": written,
            "ledger": ledger if enabled else None,
            "metrics": {"public": evaluated if config.data.eval_public else {}},
            "steps_planned": 100,
            "steps_taken": 100,
            "duration_seconds": 61.5,
            "peak_memory_bytes": None,
            "hardware": {},
            **(record or {}),
        },
    )
    write_json(run.private / "summary.json", evaluated)
    if audit:
        write_json(run.audit_dir(enabled) / "audit.json", measured_audit(epsilon, weights(root)))
    return run


def change_audit(run: RunDir, every: Json | None = None, **changes: Any) -> None:
    """Changes keys of a run's audit; ``every`` maps a key to what changes in each of its parts."""
    path = run.audit_dir(run.load_config().privacy.enabled) / "audit.json"
    audit = read_json(path)
    for name, new in (every or {}).items():
        changes[name] = {part: {**attack, **new} for part, attack in audit[name].items()}
    write_json(
        path, audit | {name: audit[name] | new if isinstance(new, dict) else new for name, new in changes.items()}
    )


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
