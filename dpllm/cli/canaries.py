"""``dpllm canaries``: what a recipe plants, drawn and committed to before training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.cli.plan import AddCommand, load_recipe, show, take_json, take_recipe
from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from dpllm.canaries.canaries import CanaryPlan
    from dpllm.canaries.texts import ModelSource
    from dpllm.recipe.config import RunConfig
    from dpllm.run.directory import RunDir

PLAN = "draw a recipe's canaries and their coins, for a later run in output_dir"


def add_commands(add: AddCommand) -> None:
    """The command, its action and what that takes."""
    parser = add("canaries", run, "draw the canaries of a recipe, before training", None)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog="dpllm canaries")
    plan = actions.add_parser("plan", help=PLAN, allow_abbrev=False)
    plan.description = PLAN[0].upper() + PLAN[1:] + "."
    take_recipe(plan, "canaries plan RECIPE")
    take_json(plan)
    plan.add_argument("--overwrite", action="store_true", help="draw them again, replacing earlier ones")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Plans the canaries and prints how many, never what they say."""
    from dpllm.canaries import canaries, texts
    from dpllm.recipe.derived import pairs_of
    from dpllm.run.directory import RunDir
    from dpllm.run.labels import read_labels

    config = load_recipe(known, rest)
    run_dir = RunDir(Path(config.output_dir))
    _check(config, run_dir, known.overwrite)  # before anything is made
    with run_dir.locked():
        _check(config, run_dir, known.overwrite)
        run_dir.private.mkdir(mode=0o700, parents=True, exist_ok=True)  # before a copy of private data lies in it
        run_dir.private.chmod(0o700)
        if config.audit.texts.place == "prompt":
            config = _with_format(config, run_dir)
            texts.check_place("prompt", config.data.format)
        source, gradient = _source(config, run_dir), config.audit.gradient_canaries
        if label := read_labels(config.data):
            config = config.changed({"data.label_epsilon": label.epsilon})
        plan = canaries.plan_canaries(config.audit.texts, source=source, gradient=gradient, **pairs_of(config))
        canaries.save(plan, run_dir.canaries)
    found = describe(plan, config)
    return show(
        known,
        {**found, "manifest": str(run_dir.canaries)} if known.json else _table(found),
        f"Commitment: {found['commitment']}",
        f"Written to {run_dir.canaries}, readable by its owner only.",
    )


def describe(plan: CanaryPlan, config: RunConfig) -> dict[str, Any]:
    """What may be said of a plan before training: numbers and the commitment, no text and no coin."""
    from dpllm.recipe.derived import num_slots

    settings = config.audit.texts
    return {
        "kind": plan.kind,
        "place": settings.place,
        "groups": {str(group): candidates for group, candidates in sorted(settings.groups.items())},
        "candidates": len(plan.canaries),
        "gradient_canaries": len(plan.gradient_coins),
        "slots": num_slots(config.audit, config.data),
        "references": len(plan.references),
        "log2_secrets": plan.log2_secrets,
        "commitment": plan.commitment,
    }


def _check(config: RunConfig, run: RunDir, overwrite: bool) -> None:
    """Refuses to lose anything: a run, canaries that were planned, or something else that lies there."""
    from dpllm.recipe.derived import num_slots
    from dpllm.run.directory import check_directory

    if not config.audit.plants:
        raise ConfigError(
            "audit.canaries is null, so the recipe plants nothing. Set audit: {canaries: {}}, or keys of that section."
        )
    num_slots(config.audit, config.data)
    if run.config.exists():
        raise ConfigError(
            f"{run.root}: holds a run, whose audit needs the canaries that it was trained with. Type another --output_dir."
        )
    if run.canaries.exists() and not overwrite:
        raise ConfigError(
            f"{run.canaries}: canaries are planned already, and new ones would not match a commitment that was noted. Type "
            "--overwrite to draw new ones, or train with these."
        )
    check_directory(config, run, resume=False, overwrite=False)


def _source(config: RunConfig, run: RunDir) -> ModelSource | None:
    """The base model, for the kinds that are made of it; of the data the names of the columns alone are looked at."""
    from dpllm.canaries.canaries import NEED_MODEL

    if config.audit.texts.kind not in NEED_MODEL:
        return None
    import torch

    from dpllm.canaries.texts import ModelSource
    from dpllm.model import loading

    config = _with_format(config, run)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ModelSource(config, loading.load_tokenizer(config.model, config.data), device)


def _with_format(config: RunConfig, run: RunDir) -> RunConfig:
    """With the format that the data were found to have."""
    from dpllm.text import data

    if config.data.format != "auto":
        return config
    fmt = data.load_table(config.data.train, config.data, config.data.train_split, run.private / "cache").format
    return config.changed({"data.format": fmt})


def _table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("what", "planned", title="Canaries")
    table.add_row("kind", found["kind"])
    table.add_row("stand as", found["place"])
    for group, candidates in found["groups"].items():
        table.add_row(f"repeated {group}x", f"{candidates} candidates")
    if found["gradient_canaries"]:
        table.add_row("in gradients", f"{found['gradient_canaries']} candidates")
    table.add_row("slots in N", str(found["slots"]))
    table.add_row("references, never inserted", str(found["references"]))
    table.add_row("log2 of the number of secrets", f"{found['log2_secrets']:.1f} bits")
    return table
