"""``dpllm plan``: what a recipe promises and what the ledger would say, without weights, a GPU or torch."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpllm.commands import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this command takes beside a recipe."""
    parser.add_argument("--json", action="store_true", help="print plan.json")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints the plan."""
    from rich.console import Console
    from rich.table import Table

    from dpllm import data, ledger
    from dpllm.config import describe_keys
    from dpllm.privacy import guards
    from dpllm.privacy.plan import RELATION_IN_WORDS, make_plan, make_schedule

    if known.keys:
        print(describe_keys())
        return 0
    config = load_recipe(known, rest)
    guards.check_config(config)
    with tempfile.TemporaryDirectory() as cache:
        num_units = config.data.public_size or data.count_units(config.data, Path(cache))
    if not config.privacy.enabled:
        schedule = make_schedule(config, num_units)
        steps, batch = schedule.num_steps, schedule.expected_batch_size
        if known.json:
            print(json.dumps(asdict(schedule), indent=2, sort_keys=True))
            return 0
        print(f"No differential privacy: {steps} steps of about {batch} units, on data declared public.")
        return 0
    plan = make_plan(config, num_units, ledger.default_path().parent / "calibration")
    if known.json:
        print(json.dumps(plan.to_json(), indent=2, sort_keys=True))
        return 0
    schedule = plan.schedule
    table = Table(title=f"Plan of {known.config or known.recipe}", show_header=False)
    rows = {
        "epsilon": f"{plan.epsilon:.4f} (target {plan.target_epsilon:g})",
        "delta": f"{plan.delta:g} (1/N is {1 / schedule.dataset_size:.2g})",
        "privacy unit": "example: one row"
        if plan.max_examples_per_unit is None
        else f"user-level: column {plan.unit}, at most {plan.max_examples_per_unit} rows of each",
        "neighbouring relation": f"{plan.neighbouring_relation}: {RELATION_IN_WORDS[plan.neighbouring_relation]}",
        "public size N": f"{schedule.dataset_size} units, of which {schedule.canary_slots} are canary slots",
        "sampling rate q": f"{schedule.sampling_rate:.6f}: each unit joins each step by its own coin",
        "steps T": str(schedule.num_steps),
        "expected batch B": f"{schedule.expected_batch_size} units",
        "clipping": f"{plan.clipping}, {'first C' if plan.adaptive else 'C'} = {plan.max_grad_norm:g}",
        "noise multiplier": f"{plan.noise_multiplier:g}"
        + (
            f": {plan.adaptive.gradient_noise_multiplier:.5g} on gradients, {plan.adaptive.count_noise_multiplier:.5g} on the "
            "count that moves C"
            if plan.adaptive
            else ""
        ),
        "accountant": f"{plan.accountant['name']} {plan.accountant['version']}",
        "ledger": _ledger_outlook(config, plan),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    Console().print(table)
    return 0


def _ledger_outlook(config: Any, plan: Any) -> str:
    from dpllm import data, ledger

    path = Path(config.privacy.ledger) if config.privacy.ledger else ledger.default_path()
    name = config.privacy.dataset or data.dataset_name(config.data)
    if not path.exists():
        return f"{name}: nothing spent yet, no budget set"
    with ledger.Ledger(path) as book:
        budget = book.budget(name)
        delta = budget.delta if budget else plan.delta
        spent = book.spent(name, delta)
        after = book.spent(name, delta, planned=(plan.event, plan.neighbouring_relation))
    limit = f"budget {budget.epsilon:g}" if budget else "no budget set"
    verdict = "; THIS RUN WOULD BE REFUSED" if budget and after > budget.epsilon else ""
    return f"{name}: spent {spent:.3f}, after this run {after:.3f} at delta {delta:g} ({limit}){verdict}"
