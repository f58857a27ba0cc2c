"""Writes the figures of ``dpllm plan --model --device h100`` into the gallery's recipes.

    python scripts/recipe_heads.py

Comes in: recipes whose head has a line "# For 42,061 rows: ...", and the shapes in recipes/configs. Goes out: the same line with
guarantee and memory from the current planner; text after "by plan." is kept, because it may report a measurement. Needs no
network, no weights and no GPU. The tests compare every such line with ``head``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from dpllm.cli import main
from dpllm.recipe.config import load_config

ROOT = Path(__file__).resolve().parents[1]
HEAD = re.compile(r"^# For ([\d,]+) (\w+):.*?(?: by plan\.(.*))?$", re.MULTILINE)
NOT_MEASURED = " Not measured."


def gallery() -> list[Path]:
    """The recipes with a head that is written here."""
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    return [path for path in recipes if HEAD.search(path.read_text(encoding="utf-8"))]


def shape_of(path: Path) -> Path:
    """The folder in recipes/configs with the configuration of a recipe's model."""
    return ROOT / "recipes" / "configs" / Path(load_config(path).model.name_or_path).name


def planned(path: Path, folder: Path) -> dict[str, Any]:
    """The plan of a recipe, from the configuration of its model, one row, and the declared number of rows.

    Args:
        path: A recipe of ``gallery``.
        folder: For that row and the ledger.
    """
    text = path.read_text(encoding="utf-8")
    data = load_config(path).data
    row: dict[str, Any] = dict.fromkeys(data.columns.values() or ["text"], "a")
    if "column messages" in text:
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "row.jsonl").write_text(json.dumps({**row, data.unit: "A"}) + "\n")
    number = HEAD.search(text)[1].replace(",", "")  # type: ignore[index]
    overrides = {
        "model.name_or_path": shape_of(path),
        "data.train": folder / "row.jsonl",
        "data.eval": "null",
        "data.revision": "null",
        "data.public_size": number,
        "privacy.ledger": folder / "ledger.sqlite",
    }
    words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["plan", str(path), "--model", "--device", "h100", "--json", *words])
    plan: dict[str, Any] = json.loads(printed.getvalue())
    return plan


def head(text: str, plan: dict[str, Any]) -> str:
    """A recipe with the planned figures in its head."""
    promise = "without differential privacy"
    if plan.get("epsilon"):
        promise = f"epsilon {plan['epsilon']:.2f}, noise multiplier {plan['noise_multiplier']:.2f}"
    needs = f"{plan['model']['memory']['total'] / 1e9:.3g} GB on one H100"

    def line(match: re.Match[str]) -> str:
        return f"# For {match[1]} {match[2]}: {promise}; {needs} by plan.{match[3] or NOT_MEASURED}"

    return HEAD.sub(line, text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = folder
        for recipe in gallery():
            before = recipe.read_text(encoding="utf-8")
            recipe.write_text(head(before, planned(recipe, Path(folder))), encoding="utf-8")
            print(recipe.relative_to(ROOT), HEAD.search(recipe.read_text(encoding="utf-8"))[0], sep="\n  ")  # type: ignore[index]
