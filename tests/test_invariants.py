"""The table of docs/architecture.md that says what catches a broken invariant names modules, mutants and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
LISTED, TABLE = PAGE.split("## Invariants\n")[1].split("### What catches a break\n")
ROWS = dict(re.findall(r"^\| (\d+) \| (.*) \|$", TABLE, re.MULTILINE))
MUTANTS = "".join(
    (ROOT / "tests" / "privacy" / name).read_text("utf-8") for name in ("test_mutations.py", "mutants.py")
)


def test_code_of_a_model_is_never_run() -> None:
    """transformers asks at a terminal, and a pipe of "yes" agrees, unless every call says no."""
    asking = []
    for path in (ROOT / "dpllm").rglob("*.py"):
        source = path.read_text("utf-8")
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            text = ast.get_source_segment(source, call) or ""
            loads = ast.unparse(call.func).endswith(".from_pretrained") and "Peft" not in text
            spread = any(keyword.arg is None for keyword in call.keywords) and "trust_remote_code" in source
            if loads and not spread and "trust_remote_code=False" not in text:
                asking.append(f"{path.name}: {text}")
    assert asking == []


def test_each_invariant_has_its_row() -> None:
    assert list(ROWS) == re.findall(r"^(\d+)\. ", LISTED, re.MULTILINE)


@pytest.mark.parametrize("number", ROWS)
def test_what_holds_it_and_what_catches_a_break_exist(number: str) -> None:
    held, caught = ROWS[number].split(" | ")
    modules = re.findall(r"`([\w/]+\.py)`", held)
    assert modules
    assert [name for name in modules if not (ROOT / "dpllm" / name).is_file()] == []
    tests, mutants = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", caught), re.findall(r'"([^"]+)"', caught)
    assert tests or mutants
    assert [name for name in mutants if f'"{name}": ' not in MUTANTS] == []
    for file, name in tests:
        body = ast.parse((ROOT / file).read_text("utf-8")).body
        assert name in [node.name for node in body if isinstance(node, ast.FunctionDef)], f"{file}::{name}"
