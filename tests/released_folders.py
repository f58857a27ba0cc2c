"""Clusters and classifiers that ``dpllm describe`` released, for the tests of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpllm.cli import main
from dpllm.ledger import open_ledger
from dpllm.releases import embeddings
from dpllm.statement.released import Statistics

Json = dict[str, Any]
Say = Callable[..., tuple[int, str, str]]
PREDICT = ["--predict", "label", "--values", "yes,no"]
CLUSTERS = ["--clusters", "2"]
UNITS = 40


def rows(units: int = UNITS) -> list[Json]:
    texts = ("pain in the chest, worse after meals", "a letter for the employer is asked for")
    return [
        {
            "text": f"{texts[unit % 2]}, patient {unit}, visit {number}",
            "who": f"p{unit}",
            "label": ("yes", "no")[unit % 2],
        }
        for unit in range(units)
        for number in range(2)
    ]


def write(found: list[Json], name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Types ``dpllm describe`` on rows; returns exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    for constant in ("WORDS", "MIXED"):  # fewer texts to read, for the centre and the names
        monkeypatch.setattr(embeddings, constant, 30)
    write(rows())

    def typed(*words: object, epsilon: float = 20.0) -> tuple[int, str, str]:
        fixed = ["rows.jsonl", "--unit", "who", "--max-examples-per-unit", 4, "--dataset", "notes"]
        fixed += ["--ledger", "l.sqlite", "--epsilon", epsilon, "--model", "builtin:tiny", "--data.max_length", 16]
        code = main(["describe", *map(str, [*fixed, *words])])
        return code, *capsys.readouterr()

    return typed


def ledger() -> Any:
    return open_ledger("l.sqlite")


def entries() -> int:
    book = ledger()
    return len(book.history()) if book else 0


def released(folder: str) -> Statistics:
    return Statistics.pick(json.loads((Path(folder) / "describe.json").read_text()))


def verdicts(capsys: pytest.CaptureFixture[str], folder: str, *more: str) -> dict[str, str]:
    capsys.readouterr()
    main(["verify", folder, "--json", *more])
    return {check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.fixture
def folder(say: Say) -> Path:
    assert say(*PREDICT)[0] == 0
    return Path("classifier")
