"""The model card: Hugging Face front matter with a privacy block, and the same statement in words.

Comes in: ``config.yaml``, ``plan.json``, ``run.json`` and ``export/audit/audit.json`` of a run. Goes out:
``export/README.md`` and ``export/privacy.json``. Must not read ``private/``: what is written here is published.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from dpllm.audit.verdict import Claim
from dpllm.builtin import is_builtin
from dpllm.config import LoraConfig, RunConfig
from dpllm.errors import ConfigError
from dpllm.privacy.accounting import attacker_limits
from dpllm.report import words
from dpllm.report.claim import Json, privacy_block
from dpllm.rundir import RunDir, read_json, write_json

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"
DP_TAGS = ("differential-privacy", "dp-sgd")


def write_card(run: RunDir) -> Path:
    """Writes the model card of a run and the same privacy statement as JSON.

    Args:
        run: A finished or interrupted run. Of a run without differential privacy the audit is not read: it lies in
            ``private/``.

    Returns:
        The path of ``export/README.md``.

    Raises:
        ConfigError: A file is missing or damaged, the run was refused, or the audit belongs to other weights.
    """
    config = run.load_config()
    record = read_json(run.run)
    if record["status"] == "refused":
        raise ConfigError(f"{run.root}: the run was refused, so there are no weights to describe. Train first.")
    plan = audit = mechanism = None
    if config.privacy.enabled:
        plan = read_json(run.plan)
        folder = run.audit_dir(True)
        audit, mechanism = (
            read_json(path) if path.exists() else None for path in (folder / "audit.json", folder / "mechanism.json")
        )
    text, block = render_card(config, plan, record, audit, mechanism)
    write_json(run.export / "privacy.json", block)
    card = run.export / "README.md"
    temporary = card.with_name(f".{card.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, card)
    return card


def render_card(
    config: RunConfig, plan: Json | None, record: Json, audit: Json | None, mechanism: Json | None = None
) -> tuple[str, Json]:
    """The card and its privacy block.

    Args:
        config: The resolved recipe.
        plan: ``plan.json``; None for a run without differential privacy.
        record: ``run.json``.
        audit: ``audit.json``, of a run with differential privacy only; None where there is none.
        mechanism: ``mechanism.json``, of the engine that trained; None where it was not audited.

    Returns:
        Markdown with YAML front matter, and the ``privacy`` entry of that front matter. Equal arguments give equal
        text.

    Raises:
        ConfigError: The audit belongs to other weights or canaries, or the Plan and the record disagree.
    """
    block = privacy_block(config, plan, record, audit, mechanism)
    data = ModelCardData(**_front_matter(config, record, block["guarantee"]), privacy=block)
    record, audit = words.without_paths(record), words.without_paths(audit)
    card = ModelCard.from_template(data, str(TEMPLATE), **_context(config, record, audit, block))
    card.text = re.sub(r"\n{3,}", "\n\n", card.text.strip("\n"))
    return f"{card}\n", block


def _front_matter(config: RunConfig, record: Json, holds: bool) -> dict[str, Any]:
    lora = isinstance(config.adapter, LoraConfig)
    # A search for models with differential privacy must not find those that have none.
    own = [tag for tag in config.card.tags if holds or tag not in DP_TAGS]
    tags = [*(DP_TAGS if holds else ()), "dpllm", *(["lora"] if lora else []), *own]
    return {
        "base_model": _base_model(config, record),
        "library_name": "peft" if lora else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(tags)),
        "license": config.card.license,
        "language": config.card.language,
        "datasets": [config.data.train] if _hub_dataset(config) else None,
    }


def _base_model(config: RunConfig, record: Json) -> str | None:
    """The base model's Hub id; None for one that is embedded or local."""
    name = config.model.name_or_path
    return name if record["model"]["commit"] and words.is_hub_id(name) else None


def _hub_dataset(config: RunConfig) -> bool:
    return config.data.public and "/" in config.data.train and words.is_hub_id(config.data.train)


def _context(config: RunConfig, record: Json, audit: Json | None, block: Json) -> dict[str, Any]:
    """What the template reads beside the block: the recipe, the record, and the numbers that follow from epsilon."""
    holds: bool = block["guarantee"]
    terms: Json | None = block if holds else block.get("attempted")
    ledger = record["ledger"]
    metrics = record["metrics"]
    name = config.model.name_or_path
    return {
        "w": words,
        "config": config,
        "record": record,
        "audit": audit,
        "block": block,
        "holds": holds,
        "terms": terms,
        "epsilon": words.bound(terms["epsilon"]) if terms else None,
        "limits": attacker_limits(terms["epsilon"], terms["delta"]) if holds and terms else None,
        "groups": _groups(audit),
        "secrets": _secrets(audit["canaries"]) if audit else None,
        "attacks": _attacks(audit, terms if holds else None),
        "title": " ".join((config.card.title or words.last_part(config.output_dir)).split()),
        "lora": isinstance(config.adapter, LoraConfig),
        "base_model": _base_model(config, record),
        "base_name": name if is_builtin(name) else words.last_part(name),
        "dataset": ledger["dataset"] if ledger else words.public_name(config.data.train),
        "evaluation": metrics["public"] if config.data.eval_public else {},
        "released": metrics["released"] if holds else {},
        "settings": _settings(config, record),
    }


def _attacks(audit: Json | None, terms: Json | None) -> list[Json]:
    """Each attack with the limits that epsilon sets for its group of canaries; None where there is no guarantee."""
    rows = []
    for name, attack in sorted((audit or {"attacks": {}})["attacks"].items()):
        limits = None
        if terms:
            claim = Claim(terms["epsilon"], terms["delta"], terms["unit"])
            limits = claim.limits(int(attack["group"]), terms.get("limits"))
        rows.append({"name": name, **attack, "limits": limits})
    return rows


def _secrets(canaries: Json) -> str:
    """What the canaries of an audit hide, in words."""
    settings = canaries["settings"]
    return {
        "digits": f"random secrets of {settings.get('digits')} digits",
        "random_tokens": f"random secrets of {settings.get('tokens')} tokens",
        "rare_tokens": f"random secrets of {settings.get('tokens')} rare tokens",
        "new_tokens": "secrets of tokens that no text has",
        "synthetic": f"secrets of {settings.get('tokens')} tokens that the base model made up",
        "pii": "invented personal details",
    }[canaries["kind"]]


def _groups(audit: Json | None) -> list[tuple[str, Json, Json]]:
    """Exposure and extraction of each group of canaries, the least repeated first."""
    if audit is None:
        return []
    return [(group, seen, audit["extraction"][group]) for group, seen in sorted(audit["exposure"].items(), key=_copies)]


def _copies(item: tuple[str, Json]) -> int:
    return int(item[0])


def _settings(config: RunConfig, record: Json) -> list[tuple[str, object]]:
    """The recipe as a table, without a path, and without anything that depends on the data."""
    model, data, train = config.model, config.data, config.train
    sizes = record["model"]
    adapter = [f"{key} {value}" for key, value in config.adapter.model_dump().items() if key != "method"]
    quantized = f", {model.quantization} quantisation" if model.quantization else ""
    return [
        ("Method", ", ".join([{"lora": "LoRA", "frozen": "frozen layers"}[config.adapter.method], *adapter])),
        ("Architecture", sizes["architecture"]),
        (
            "Trained parameters",
            f"{words.count(sizes['trainable_parameters'])} of {words.count(sizes['total_parameters'])}",
        ),
        ("Precision", f"base {model.dtype}{quantized}; autocast {train.precision}; trained parameters float32"),
        (
            "Text",
            f"format {data.format}; at most {data.max_length} tokens in a sequence, longer ones: {data.long_examples}",
        ),
        ("Optimizer", f"{train.optimizer}, learning rate {train.learning_rate:g}, weight decay {train.weight_decay:g}"),
        ("Learning rate", f"{train.lr_scheduler}, warm-up over {100 * train.warmup:g}% of the steps"),
        ("Batch", f"{train.batch_size} expected; {train.physical_batch_size} sequences in one forward pass"),
        ("Seed of initialisation and dropout", train.seed),
        ("Started", str(record["started_at"])[:10]),
        *((f"Hardware: {key}", value) for key, value in sorted(record["hardware"].items()) if _plain(value)),
        *((f"Version of {name}", version) for name, version in sorted(record["versions"].items())),
    ]


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float)
