"""What programs read of dpllm's output, as it was: a change of the house must leave it as it is.

A change that is meant: delete the file in tests/golden, run this test twice, read the difference, and write it in the CHANGELOG.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpllm.cli import main
from dpllm.verification.check_promise import MAGNIFIED
from dpllm.verification.values import differences

ROOT = Path(__file__).parents[1]
RECIPE = {
    "model": {"name_or_path": "builtin:tiny"},
    "adapter": {"method": "lora", "r": 4},
    "data": {"train": "builtin:clinic", "public": True, "max_length": 64},
    "privacy": {"epsilon": 3.0, "delta": 1e-5, "ledger": "ledger.sqlite"},
    "train": {"steps": 20, "batch_size": 64, "tokens_per_pass": 512},
    "output_dir": "run",
}


def planned(folder: Path) -> list[str]:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return ["plan", str(folder / "recipe.yaml"), "--json"]


def verified(folder: Path) -> list[str]:
    return ["verify", str(ROOT / "model_cards" / "clinic-epsilon-8" / "export"), "--json"]


def exported(folder: Path) -> list[str]:
    ledger = ["--ledger", str(folder / "ledger.sqlite")]
    for words in (
        "init notes --epsilon 8 --delta 1e-5 --import-delta 1e-6",
        "import notes --run lora --epsilon 1 --delta 1e-6",
        "except notes",
    ):
        assert main(["ledger", *words.split(), "--by", "alice", "--reason", "study 7", *ledger]) == 0
    return ["ledger", "export", *ledger]


def steady(value: Any) -> Any:
    """The same without what differs from run to run: times, hashes and random names."""
    if isinstance(value, dict):
        return {key: steady(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [steady(inner) for inner in value]
    if isinstance(value, str):
        value = re.sub(r"\b[0-9a-f]{16,}\b", "HEX", value.replace(str(ROOT), "ROOT"))
        return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", "TIME", value)
    return value


@pytest.mark.parametrize("command", [planned, verified, exported], ids=["plan", "verify", "ledger_export"])
def test_what_programs_read_stays(
    command: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, request: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command(tmp_path)
    capsys.readouterr()
    assert main(arguments) == 0
    output = steady(json.loads(capsys.readouterr().out))
    golden = ROOT / "tests" / "golden" / f"{request.node.callspec.id}.json"
    if not golden.exists():
        golden.write_text(json.dumps(output, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        pytest.fail(f"{golden} was missing; it was written anew.")
    assert not list(differences(output, json.loads(golden.read_text(encoding="utf-8")), tolerance=MAGNIFIED))
