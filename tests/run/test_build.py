"""What a run says about its model before anything is spent."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from rich.console import Console

from dpllm.run import build

CPU = torch.device("cpu")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("changes", "times", "advised"),
    [
        ({"model__dtype": "bfloat16"}, 4.0, "--model.dtype float32"),
        ({"model__dtype": "float16"}, 4.0, "--model.dtype float32"),
        ({"train__precision": "bf16"}, 4.0, "--train.precision fp32"),
        ({"model__dtype": "bfloat16"}, 0.5, None),
        ({}, 4.0, None),
    ],
)
def test_a_precision_that_the_cpu_emulates_is_named_before_training(
    tmp_path: Path, monkeypatch: Any, changes: dict[str, str], times: float, advised: str | None, resumed: bool
) -> None:
    monkeypatch.setattr(build, "_product_seconds", lambda dtype: times if dtype != torch.float32 else 1.0)
    sections: dict[str, Any] = {
        "model": {"name_or_path": str(tiny.save_model(tmp_path))},
        "data": {"max_length": 32},
        "train": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections[section][name] = value
    decision: Any = SimpleNamespace(config=tm.recipe(**sections), weights=None, plan=None, resumed=resumed)
    printed = io.StringIO()
    build.build_model(decision, CPU, Console(file=printed, width=200))
    warnings = [line for line in printed.getvalue().splitlines() if line.startswith("Beware: ")]
    if advised is None or resumed:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert "4 times as long as in float32" in warnings[0]
        assert advised in warnings[0]


def test_float32_against_itself_is_not_slow() -> None:
    assert build._product_seconds(torch.float32) < build.SLOW * build._product_seconds(torch.float32)
