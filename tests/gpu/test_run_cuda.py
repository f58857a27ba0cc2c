"""A whole run on CUDA: train, audit, card, verify, generate. Skipped where there is no such device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dpllm
from dpllm.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPE = Path(dpllm.__file__).parents[1] / "recipes" / "smoke" / "clinic.yaml"
STEPS = 6
ADAPTERS = {"lora": {"method": "lora", "r": 8}, "frozen": {"method": "frozen", "last_blocks": 1}}


def shortened(adapter: str, folder: Path) -> Path:
    """The smoke recipe with few steps and few canaries."""
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    recipe["adapter"] = ADAPTERS[adapter]
    recipe["output_dir"] = str(folder / "run")
    recipe["privacy"]["ledger"] = str(folder / "ledger.sqlite")
    recipe["train"] |= {"steps": STEPS, "checkpoint_every": 2}
    recipe["audit"] = {
        "canaries": {"kind": "random_tokens", "references": 100, "groups": {1: 60}},
        "gradient_canaries": 100,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_run_from_training_to_text(adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", str(shortened(adapter, tmp_path))]) == 0
    record, plan = (json.loads((run / name).read_text()) for name in ("run.json", "plan.json"))
    assert record["status"] == "completed"
    assert record["guarantee"]["holds"] is True
    assert record["steps_taken"] == plan["num_steps"] == STEPS
    assert record["hardware"]["gpus"][0] == torch.cuda.get_device_name()
    for command in ("audit", "card", "verify"):
        assert main([command, str(run)]) == 0, command
    assert main(["verify", str(run / "export")]) == 0
    capsys.readouterr()
    assert main(["generate", str(run), "--num", "2", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()
