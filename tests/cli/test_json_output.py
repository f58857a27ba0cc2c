"""--json on every command that prints a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpllm.cli import _parser, main

# What prints a sentence or a path, or has a format of its own.
NO_TABLE = {
    "card",
    "import-config",
    "merge",
    "ledger init",
    "ledger seal",
    "ledger adopt",
    "ledger except",
    "ledger reconcile",
    "ledger import",
    "ledger export",
    "ledger metrics",
}


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for name, sub in action.choices.items():
            yield from commands(sub, f"{path} {name}".strip())
    if not inner:
        yield path, parser


@pytest.mark.parametrize("name", dict(commands(_parser())))
def test_every_command_with_a_table_has_json(name: str) -> None:
    parser = dict(commands(_parser()))[name]
    takes = any("--json" in action.option_strings for action in parser._actions)
    assert takes or name in NO_TABLE, f"dpllm {name} prints a table without --json, or belongs to NO_TABLE"


@pytest.fixture
def ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "ledger.sqlite"
    words = ["--epsilon", "8", "--delta", "1e-6", "--by", "me", "--reason", "a test", "--ledger", str(path)]
    assert main(["ledger", "init", "notes", *words]) == 0
    assert main(["ledger", "import", "notes", "--epsilon", "1", "--delta", "1e-7", *words[4:]]) == 0
    capsys.readouterr()
    return path


def test_what_the_ledger_shows_is_one_object(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for action in ("show", "history", "verify"):
        assert main(["ledger", action, "--json", "--ledger", str(ledger)]) == 0
        found[action] = json.loads(capsys.readouterr().out)
    shown = found["show"]["datasets"]["notes"]
    assert shown["budget"]["epsilon"] == 8
    assert [entry["event"]["epsilon"] for entry in shown["imports"]] == [1]
    assert any("Budget: epsilon 8" in line for line in shown["says"])
    assert [entry["entry"] for entry in found["history"]["entries"]] == ["budget", "import"]
    assert found["verify"]["problems"] == []
    assert found["verify"]["head"] == found["show"]["head"]


def test_the_environment_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    assert "torch" in json.loads(capsys.readouterr().out)["versions"]
