"""A recipe, a Plan, a record and audits from which cards are made, and a run directory that holds them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from dpllm.card.card import compose, matter
from dpllm.files import write_json
from dpllm.privacy.noise import noise_scale
from dpllm.privacy.plan import Mechanism, Plan
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record
from dpllm.statement.audit import parse_audit
from dpllm.statement.audit_bounds import Claim
from dpllm.statement.run_files import RunRecord, read_plan
from dpllm.statement.state import statement_of

Json = dict[str, Any]
WEIGHTS, TOKENIZER = b"weights", b"{}"
HASH = hashlib.sha256(WEIGHTS).hexdigest()
SECRET_SEED = 918273645
HELD_OUT = 7.654321
EPSILON = 2.9973841290312
SETTINGS = {"version": 2, "alpha": 0.05, "falling": [10, 50], "falling_in": [10]}
HOME = "/home/alice/secret-project"


def config(**sections: Json) -> RunConfig:
    """A recipe for notes of patients; each section is laid over the default one."""
    base: Json = {
        "model": {"name_or_path": "openai-community/gpt2", "revision": "main"},
        "data": {
            "train": f"{HOME}/notes.jsonl",
            "eval": f"{HOME}/eval.jsonl",
            "unit": "patient_id",
            "max_examples_per_unit": 6,
        },
        "privacy": {"epsilon": 3.0, "ledger": f"{HOME}/ledger.sqlite", "dataset": "ward-7-notes"},
        "train": {"steps": 100, "batch_size": 64},
        "card": {"license": "mit", "language": "en", "tags": ["clinical"], "contact": "dpo@hospital.example"},
        "output_dir": f"{HOME}/runs/notes-lora",
    }
    for name, changes in sections.items():
        base[name] = {**base.get(name, {}), **changes} if isinstance(changes, dict) else changes
    return RunConfig.model_validate(base)


def plan(**changes: Any) -> Json:
    """plan.json: what follows from the numbers of the mechanism follows from the changed ones."""
    run: Json = {
        "unit": "patient_id",
        "max_examples_per_unit": None if changes.get("unit") == "example" else 6,
        "sampling": "unit",
        "neighbouring_relation": "zero_out",
        "dataset_size": 888,
        "canary_slots": 248,
        "expected_batch_size": 64,
        "num_steps": 100,
        "noise_multiplier": 0.9184,
        "coefficients": [],
        "clipping": "flat",
        "max_grad_norm": 1.0,
        "delta": 1e-05,
        "target_epsilon": 3.0,
        "canary_commitment": "c0" * 32,
        "audit": SETTINGS,
    }
    promised = Plan.of(Mechanism.pick({**run, **changes})).to_json()
    second = {"name": "opacus-prv", "version": "1.6.0", "epsilon": 3.0101}
    return {
        **promised,
        "epsilon": EPSILON,
        "cross_check": second,
        **changes,
    }  # which is not checked where words are made


def record(**changes: Any) -> Json:
    """run.json; ``artifacts`` are the files of export/, and ``make_run`` adds recipe and Plan to the manifest."""
    weights = {"adapter_model.safetensors": HASH, "tokenizer.json": hashlib.sha256(TOKENIZER).hexdigest()}
    artifacts: dict[str, str] = changes.pop("artifacts", weights)
    return {
        "schema_version": 2,
        "status": "completed",
        "guarantee": {"holds": True, "reason": None},
        "deviations": [],
        "steps_planned": 100,
        "steps_taken": 100,
        "ledger": {
            "dataset": "ward-7-notes",
            "entry": 3,
            "head": {"hash": "ab12" * 16, "count": 4},
            "budget": None,
            "spent_epsilon": 4.25,
            "used": None,
            "final": False,
            "imported": 0,
        },
        "versions": {"dpllm": "0.1.0", "torch": "2.9.1", "opacus": "1.6.0"},
        "hardware": {"device": "NVIDIA H200", "processes": 1, "cache": f"{HOME}/cache"},
        "model": {
            "name_or_path": "openai-community/gpt2",
            "commit": "607a30d783dfa663caf39e06633721c8d4cfcd7e",
            "architecture": "GPT2LMHeadModel",
            "trainable_parameters": 2359296,
            "total_parameters": 126799104,
        },
        "manifest": {f"export/{name}": value for name, value in artifacts.items()},
        "metrics": {"public": {}},
        "generator": "philox",
        "lattice": {"coordinates": 2359296, "noise_over_max_grad_norm": noise_scale(0.9184, 1.0, 2359296)},
        "started_at": "2026-11-21T02:30:11+00:00",
        "finished_at": "2026-11-21T02:51:40+00:00",
        "duration_seconds": 1289.123,
        **changes,
    }


def whole_audit(parts: Json) -> Json:
    """An audit with all fields of audit.json: those that a test does not care about say nothing."""
    rates = (
        "tpr_at_0.1_percent_fpr",
        "tpr_at_0.1_percent_fpr_interval",
        "base_control_auc",
        "base_control_auc_interval",
    )
    complete: Json = {"schema_version": 4, "repeated": {}, "published": True, "sampling": None, **parts}
    limits = Claim(**parts["claim"]).limits(1, None) if parts["claim"] else None
    complete["attacks"] = {
        name: {"limits": limits, **dict.fromkeys(rates), **attack} for name, attack in parts["attacks"].items()
    }
    complete["exposure"] = {
        group: {"held_out_mean": 1.44, "largest_possible": 9.97, **exposed}
        for group, exposed in parts["exposure"].items()
    }
    bound = {
        "falling": [10, 20, 50, 100, 200],
        "falling_in": [],
        "best_guesses": 50,
        "best_side": "falling",
        "correct": 34,
        "weight": 170,
    }
    complete["epsilon_lower_bound"] = {**bound, "num_canaries": 200, "slope": 0.5, **parts["epsilon_lower_bound"]}
    complete["controls"] = {"twin": None, "level": 0.001, **parts["controls"]}
    complete["canaries"] = {
        "kind": "digits",
        "settings": {"digits": 8, "groups": {"1": 200, "16": 20}, "references": 1000},
        "log2_secrets": 26.6,
        **parts["canaries"],
    }
    return complete


def audit(**changes: Any) -> Json:
    attack = {
        "group": 1,
        "auc": 0.531,
        "auc_interval": [0.45, 0.612],
        "confidence": 0.95,
        "tpr_at_1_percent_fpr": 0.02,
        "tpr_at_1_percent_fpr_interval": [0.002, 0.07],
        "positives": 99,
        "negatives": 101,
    }
    exposure = {"mean": 1.61, "null_mean": 1.44, "p_value": 0.21, "maximum": 6.9, "base_mean": 1.41, "inserted": 99}
    extraction = {"inserted": 99, "tuned": 0, "base": 0, "held_out": 101, "held_out_tuned": 0}
    parts = {
        "claim": {"epsilon": EPSILON, "delta": 1e-05, "unit": "patient_id"},
        "settings": SETTINGS,
        "canaries": {
            "groups": {"1": {"candidates": 200, "inserted": 99}, "16": {"candidates": 20, "inserted": 9}},
            "references": 1000,
            "commitment": "c0" * 32,
        },
        "attacks": {"ratio": attack, "loss": {**attack, "auc": 0.52}},
        "exposure": {"16": {**exposure, "mean": 2.9, "p_value": 0.00002, "inserted": 9}, "1": exposure},
        "extraction": {"16": {**extraction, "inserted": 9, "held_out": 11, "tuned": 1}, "1": extraction},
        "epsilon_lower_bound": {"value": 0.12, "alpha": 0.05, "delta": 1e-05, "method": "one-run", "ceiling": 2.756},
        "controls": {
            "base_separates": False,
            "words": {"auc": 0.49, "interval": [0.3, 0.7], "succeeds": False},
            "positive": "AUC 0.97 on the canaries planted 16 times",
        },
        "verdict": "consistent",
        "verdict_reason": "the lower bound 0.12 does not exceed the stated epsilon 2.997",
        "audits_run": 1,
        "weights": {"adapter_model.safetensors": HASH},
    }
    return {**whole_audit(parts), **changes}


def described(**changes: Any) -> Json:
    """describe.json about the data of ``record``."""
    declared: Json = {"values": ["yes", "no"]}
    cost = {
        "event": {"type": "pure_dp", "epsilon": 0.25},
        "error_95": 72.39236660867908,
        "error_of": "rows in each count",
    }
    value = {"yes": 60, "no": 43, "other": -3}
    shares = {"statistic": "shares of label", "declared": declared, "mechanism": "discrete Laplace", "value": value}
    median = {
        "statistic": "quantile 0.5 of age",
        "declared": {"numbers": [0, 60, 120], "quantile": 0.5},
        "mechanism": "permute-and-flip",
        "value": {"0.5": 60},
    }
    of_median = {"error_95": 98.2642694933304, "error_of": "rows of rank"}
    return {
        "dataset": "ward-7-notes",
        "unit": "patient_id",
        "max_examples_per_unit": 6,
        "neighbouring_relation": "zero_out",
        "epsilon": 0.49999999683586765,
        "delta": 1e-9,
        "date": "2026-11-20",
        "software": {"dpllm": "0.1.0", "opendp": "0.16.0"},
        "releases": [{**shares, **cost, "entry": "0a1b"}, {**median, **cost, **of_median, "entry": "2c3d"}],
        **changes,
    }


def render_card(
    recipe: RunConfig,
    the_plan: Json | None,
    the_record: Json,
    the_audit: Json | None,
    *,
    files: Json | None = None,
    statistics: Json | None = None,
) -> tuple[str, Json]:
    """A card and its privacy block; with ``files`` None it names those of the record."""
    promised, happened = the_plan and Plan.pick(the_plan), RunRecord.pick(the_record)
    audited = None if the_audit is None else parse_audit(the_audit, "audit.json")
    statement = statement_of(recipe, promised or None, happened, audited, files, statistics)
    return compose(recipe, happened, statement), statement.to_json()


def front_matter(text: str) -> Json:
    """The YAML between the first two rules, read as any YAML reader would."""
    parsed: Json = yaml.safe_load(text.split("---\n")[1])
    return parsed


def pointer(block: Json) -> Json:
    """What the front matter of a card says of its privacy statement."""
    return matter(privacy_record.read(block))


def body(text: str) -> str:
    return text.split("---\n", 2)[2]


def above(text: str, heading: str) -> str:
    """What a reader sees of a page before a heading: without front matter, marks and targets of links."""
    return re.sub(r"<!--.*?-->|\]\([^)]*\)", "", body(text).partition(f"\n## {heading}\n")[0])


def words(text: str) -> int:
    """Of a page before the tables of its appendix."""
    return sum(any(letter.isalnum() for letter in word) for word in above(text, "Appendix").split())


def first_line(text: str) -> str:
    """The first line that a reader sees."""
    return next(line for line in body(text).splitlines() if line and not line.startswith("<!--"))


def baseline(**sections: Json) -> RunConfig:
    base: Json = {"privacy": {"enabled": False, "ledger": None}, "data": {"public": True}}
    return config(**{**base, **sections})


def baseline_record(**changes: Any) -> Json:
    return record(
        **{
            "guarantee": {"holds": False, "reason": "privacy.enabled is false"},
            "ledger": None,
            **changes,
        }
    )


def broken(reason: str = "the noise was seeded (privacy.insecure_seed)") -> Json:
    return record(guarantee={"holds": False, "reason": reason})


def make_run(root: Path, recipe: RunConfig, the_plan: Json | None, the_record: Json, the_audit: Json | None) -> RunDir:
    run = RunDir(root)
    run.make()
    (run.export / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (run.export / "tokenizer.json").write_bytes(TOKENIZER)
    run.config.write_text(dump_config(recipe), encoding="utf-8")
    written = {"config.yaml": names.of_training(recipe)}
    if the_plan is not None:
        write_json(run.plan, the_plan)
        written["plan.json"] = read_plan(run).digest
    write_json(run.run, {**the_record, "manifest": {**written, **the_record["manifest"]}})
    if the_audit is not None:
        write_json(run.audit_dir(recipe.privacy.enabled) / "audit.json", the_audit)
    return run


def export_text(run: RunDir) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(run.export.rglob("*")) if path.is_file())


def steady(text: str) -> str:
    """The same with numbers of nine digits and without hashes: processors round the accountant's figures differently."""
    text = re.sub(r"\d+\.\d{9,}", lambda result: f"{float(result[0]):.9g}", text)
    return re.sub(r"\b[0-9a-f]{32,}\b", "HEX", text)


def assert_golden(text: str, golden: Path) -> None:
    """A change that is meant: delete the golden file, run twice, and read the difference."""
    if not golden.exists():
        golden.write_text(text, encoding="utf-8")
        raise AssertionError(f"wrote {golden}: read it, and run this test again")
    assert steady(text) == steady(golden.read_text("utf-8"))
