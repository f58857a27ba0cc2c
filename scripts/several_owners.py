"""Rows with two owners each: how many are kept for k rows of each owner, what they cost, and what a model learns of them.

    python scripts/several_owners.py [--noise 1.0] [--steps 40] [--runs 3] > FILE

The embedded clinic notes as mail: each is owned by its patient and by another one, drawn with a fixed seed. For each k, the
embedded model learns the rows that are kept: at the same noise, and at the noise for epsilon 8. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from _machine import commit, machine, versions
from rich.console import Console

from dpllm.recipe.config import load_config
from dpllm.run.loop import train
from dpllm.run.promise import Start
from dpllm.text import builtin

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smoke" / "clinic.yaml"
ROWS_EACH = (1, 2, 4, 8)
DELTA = 4e-5  # below a tenth of 1/N for every k
EPSILON = 8.0


def write_mail(path: Path) -> None:
    """Writes the notes with two owners each."""
    notes = [json.loads(line) for line in builtin.path("builtin:clinic").read_text(encoding="utf-8").splitlines()]
    patients = sorted({note["patient_id"] for note in notes})
    random = Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for note in notes:
            others = [patient for patient in patients if patient != note["patient_id"]]
            mail = {"people": [note["patient_id"], random.choice(others)], "text": note["text"]}
            file.write(json.dumps(mail) + "\n")


def measure(folder: Path, max_rows: int, noise: float | None, steps: int, runs: int) -> dict[str, Any]:
    """Trains on the kept rows, at most ``most`` per owner, at this noise, or with None at the noise for the target."""
    output = folder / f"{max_rows}-{noise}"
    changes = {
        "data.train": str(folder / "mail.jsonl"),
        "data.unit": "people",
        "data.owners": "several",
        "data.max_examples_per_unit": max_rows,
        "data.sampling": "unit" if max_rows == 1 else "example",
        "privacy.epsilon": EPSILON if noise is None else 1e6,
        "privacy.noise_multiplier": noise,
        "privacy.delta": DELTA,
        "privacy.ledger": str(folder / "ledger.sqlite"),
        "train.batch_size": 64,
        "train.steps": steps,
        "audit.canaries": None,
        "output_dir": str(output),
    }
    config, losses = load_config(RECIPE, changes), []
    for _ in range(runs):
        record = train(config, Start(overwrite=True), console=Console(quiet=True))
        losses.append(round(record.metrics.public["eval_loss_after"], 4))
    plan = json.loads((output / "plan.json").read_text(encoding="utf-8"))
    return {
        "rows kept": plan["dataset_size"],
        "epsilon": round(plan["epsilon"], 3),
        "noise multiplier": round(plan["noise_multiplier"], 3),
        "held-out loss": losses,
    }


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_mail(Path(name) / "mail.jsonl")
        results = {
            f"k = {most}": [
                measure(Path(name), most, noise, options.steps, options.runs) for noise in (options.noise, None)
            ]
            for most in ROWS_EACH
        }
    about = {"commit": commit(), "machine": machine(), "versions": versions("torch", "transformers", "dp-accounting")}
    print(json.dumps({**about, "settings": vars(options), "runs": results}, indent=2))


if __name__ == "__main__":
    main()
