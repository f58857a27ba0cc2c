"""How much an audit finds: runs of the smoke recipe, by the primary score and its tests.

    python scripts/audit_power.py                                    all 24 runs: about an hour on one core
    python scripts/audit_power.py --epsilons inf,8 --sizes 200 --repetitions 1 --output power.json

What a run showed is kept in --output, and what stands there is not made again, so that the table can be made in parts. Runs that
lie in --runs are audited and not trained again. Prints the table as Markdown. Each bound has the whole
alpha to itself.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _machine import commit, machine, versions

from dpllm.auditing.run import audit
from dpllm.auditing.summary import PRIMARY_ATTACK, summarise
from dpllm.auditing.table import read_tokens
from dpllm.files import read_json, write_json
from dpllm.recipe.config import load_config
from dpllm.run.directory import RunDir
from dpllm.run.loop import train

RECIPE = "recipes/smoke/clinic.yaml"
REPEATED = {4: 20, 32: 20}

Json = dict[str, Any]


def measure(epsilon: str, size: int, steps: int, gradient: int, folder: Path) -> Json:
    """Trains one run, unless it exists, and audits it."""
    wanted: Json = {"train.steps": steps, "train.batch_size": 128, "audit.canaries.groups": {1: size, **REPEATED}}
    wanted |= {"audit.gradient_canaries": gradient}
    wanted |= {"privacy.ledger": str(folder / "ledger.sqlite"), "output_dir": str(folder / "run")}
    wanted |= {"privacy.enabled": False} if epsilon == "inf" else {"privacy.epsilon": float(epsilon)}
    config, run = load_config(RECIPE, wanted), RunDir(folder / "run")
    if not run.export.exists():
        train(config)
    report = audit(run)
    tokens = read_tokens(run.audit_dir(report.published) / "tokens.parquet")
    summary = summarise(tokens, report.claim, config.audit.fixed())
    return {
        "bound": summary.epsilon_lower_bound.value,
        "ceiling": summary.epsilon_lower_bound.ceiling,
        "auc": {group: seen[PRIMARY_ATTACK].auc for group, seen in summary.by_group().items()},
        "gradient": report.gradient.epsilon_lower_bound if report.gradient else None,
    }


def table(runs: Sequence[Json]) -> str:
    """Means over repetitions, one line per epsilon and size, with the AUC of canaries planted once, 4 and 32 times."""
    lines = [
        "| epsilon | m | runs | bound | AUC | bound of gradient canaries |",
        "|---|---|---|---|---|---|",
    ]
    cells = dict.fromkeys((run["epsilon"], run["size"]) for run in runs)
    for epsilon, size in cells:
        group_runs = [run for run in runs if (run["epsilon"], run["size"]) == (epsilon, size)]
        bounds = " ".join(f"{run['bound']:.2f}" for run in group_runs)
        areas = " / ".join(
            f"{np.mean([run['auc'][group] for run in group_runs]):.3f}" for group in ("1", *map(str, REPEATED))
        )
        gradient = " ".join(f"{run['gradient']:.2f}" for run in group_runs if run["gradient"] is not None)
        known = "none" if epsilon == "inf" else epsilon
        lines.append(" | ".join([f"| {known}", f"{size:,}", str(len(group_runs)), bounds, areas, f"{gradient} |"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilons", default="inf,8,3,1")
    parser.add_argument("--sizes", default="200,1000", help="candidates planted once")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--gradient", type=int, default=1000, help="gradient canaries beside them")
    parser.add_argument("--runs", type=Path, default=Path("runs/audit_power"), help="where the runs are kept")
    parser.add_argument("--output", type=Path, default=Path("runs/audit_power.json"))
    options = parser.parse_args()
    runs: list[Json] = read_json(options.output)["runs"] if options.output.exists() else []
    sizes = [int(size) for size in options.sizes.split(",")]
    for repetition, epsilon, size in itertools.product(range(options.repetitions), options.epsilons.split(","), sizes):
        key = {"epsilon": epsilon, "size": size, "steps": options.steps, "repetition": repetition}
        key |= {"gradient_canaries": options.gradient} if options.gradient else {}
        if any(key.items() <= run.items() and run.get("gradient_canaries", 0) == options.gradient for run in runs):
            continue
        folder = options.runs / "-".join(map(str, key.values()))
        runs.append({**key, **measure(epsilon, size, options.steps, options.gradient, folder), "commit": commit()})
        about = {"machine": machine(), "versions": versions("torch", "transformers", "dpllm"), "recipe": RECIPE}
        write_json(options.output, {**about, "runs": runs})
        print(key, runs[-1]["bound"], runs[-1]["auc"], flush=True)
    runs.sort(key=lambda run: (-float(run["epsilon"]), run["size"], run["repetition"]))
    shown = (options.steps, options.gradient)
    print(table([run for run in runs if (run["steps"], run.get("gradient_canaries", 0)) == shown]))


if __name__ == "__main__":
    main()
