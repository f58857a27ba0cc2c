"""What privacy costs in held-out loss, with independent and with banded noise: paired runs of one recipe on data declared public.

    python scripts/utility.py --model MODEL --train FILE --eval FILE --epsilon 3 8 --seeds 1 2 3 --output benchmarks/NAME.json

Variants of one seed begin with the same adapter. Whoever knows the seed of a run knows its noise, so that these runs give
no guarantee, and their data must be public. Losses are in nats per token of completions. Runs that the output holds are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from dpllm import files
from dpllm.model import environment
from dpllm.recipe.config import load_config
from dpllm.run.directory import RunDir
from dpllm.run.loop import train
from dpllm.run.promise import Start

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "lora" / "e2e.yaml"


def changes(known: argparse.Namespace, name: str, epsilon: float | None, seed: int, rate: float) -> dict[str, Any]:
    """What a variant changes of the recipe."""
    own: dict[str, Any] = {"privacy.enabled": False}
    if epsilon is not None:
        own = {"privacy.epsilon": epsilon, "privacy.noise": name, "privacy.delta": 1e-5, "privacy.max_grad_norm": 0.5}
    return own | {
        "model.name_or_path": str(known.model), "data.train": str(known.train), "data.eval": str(known.eval),
        "data.revision": None, "data.public": True, "data.eval_public": True,
        "data.columns": {"prompt": "prompt", "completion": "completion"},
        "audit.gradient_canaries": 0, "privacy.insecure_seed": seed, "train.seed": seed, "train.learning_rate": rate,
        "train.batch_size": known.batch_size, "train.steps": known.steps, "train.physical_batch_size": 12,
    }  # fmt: skip


def loss(known: argparse.Namespace, name: str, epsilon: float | None, seed: int, rate: float) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"output_dir": f"{folder}/run", "privacy.ledger": f"{folder}/ledger.sqlite"}
        config = load_config(RECIPE, changes(known, name, epsilon, seed, rate) | place)
        record = train(config, Start(), console=Console(quiet=True))
        plan = files.read_json(RunDir(Path(folder) / "run").plan) if epsilon is not None else {}
        bands = len(plan.get("coefficients", ())) or 1
        found = record.metrics.public["eval_loss_after"]
    return {"noise": name, "epsilon": epsilon, "seed": seed, "learning_rate": rate, "bands": bands, "loss": found}


def show(rows: list[dict[str, Any]]) -> None:
    """Mean and spread of each variant, and the paired difference from independent noise."""
    groups: dict[tuple[str, str, float], dict[int, float]] = {}
    for row in rows:
        groups.setdefault((str(row["epsilon"]), row["noise"], row["learning_rate"]), {})[row["seed"]] = row["loss"]
    for key, of_seed in sorted(groups.items()):
        spread = statistics.stdev(of_seed.values()) if len(of_seed) > 1 else float("nan")
        print(*key, f"{statistics.mean(of_seed.values()):.4f} +- {spread:.4f} over {len(of_seed)} seeds")


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "eval", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--rates", type=float, nargs=3, default=[0.01, 0.01, 0.02], metavar=("NONE", "INDEPENDENT", "BANDED")
    )
    parser.add_argument("--variants", nargs="+", default=["none", "independent", "banded"])
    known = parser.parse_args()
    rows = json.loads(known.output.read_text())["runs"] if known.output.exists() else []
    rates = dict(zip(("none", "independent", "banded"), known.rates, strict=True))
    for seed in known.seeds:
        for name in known.variants:
            for epsilon in known.epsilon if name != "none" else [None]:
                key = (name, epsilon, seed, rates[name])
                if key in {(row["noise"], row["epsilon"], row["seed"], row["learning_rate"]) for row in rows}:
                    continue
                rows.append(loss(known, name, epsilon, seed, rates[name]))
                print(rows[-1], flush=True)
                settings = {"batch_size": known.batch_size, "steps": known.steps, "recipe": "recipes/lora/e2e.yaml"}
                machine = {"versions": environment.versions(), "hardware": environment.hardware()}
                files.write_json(known.output, {"settings": settings, **machine, "runs": rows})
    show(rows)


if __name__ == "__main__":
    main()
