"""Commands that tests type: a recipe that is planned in no time, and processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny
import yaml

import dpllm
from dpllm.ledger import Budget, open_ledger
from dpllm.ledger.budgets import set_budget

HEAVY = ("torch", "transformers", "peft", "opacus", "accelerate", "datasets", "matplotlib")
AFTER = """
import os, sys
from dpllm.cli import main
code = 0
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("LOADED", *[name for name in %r if name in sys.modules], file=sys.stderr)
print("SECONDS", sum(os.times()[:2]), file=sys.stderr)
sys.exit(code)
"""


def fresh(*arguments: object) -> tuple[subprocess.CompletedProcess[str], list[str], float]:
    """Types one command in a new process: its answer, the heavy packages that it loaded, seconds of processor time."""
    env = {**os.environ, "PYTHONPATH": str(Path(dpllm.__file__).parents[1])}
    command = [sys.executable, "-c", AFTER % (HEAVY,), *map(str, arguments)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    said = [line.split() for line in run.stderr.splitlines()[-2:]]
    assert [words[0] for words in said] == ["LOADED", "SECONDS"], run.stderr
    return run, said[0][1:], float(said[1][1])


def give_budget(root: Path, epsilon: float) -> None:
    """To the data set of the recipe that lies in ``root``."""
    with open_ledger(str(root / "ledger.sqlite")) as ledger:  # type: ignore[union-attr]
        set_budget(ledger, "notes", Budget(epsilon, 1e-3, "example", "zero_out"))


def sections(root: Path, **privacy: Any) -> dict[str, Any]:
    """A recipe of 50 rows and three steps, with a ledger beside it; keys of ``privacy`` as given."""
    tiny.write_rows(root / "rows.jsonl", [{"text": tiny.sentence(number)} for number in range(50)])
    return {
        "model": {"name_or_path": "some/model"},
        "data": {"train": str(root / "rows.jsonl")},
        "privacy": {"noise_multiplier": 2.0, "ledger": str(root / "ledger.sqlite"), "dataset": "notes", **privacy},
        "train": {"steps": 3, "batch_size": 5},
        "output_dir": str(root / "run"),
    }


def write_recipe(root: Path, **privacy: Any) -> Path:
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections(root, **privacy)))
    return path
