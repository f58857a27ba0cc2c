"""Clusters and classifiers that ``dpllm describe`` released, for the tests of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_stores import adopt

from dpllm.cli import main
from dpllm.ledger import open_ledger
from dpllm.releases import embeddings
from dpllm.statement.released import Statistics

Json = dict[str, Any]
Say = Callable[..., tuple[int, str, str]]
PREDICT = ["--predict", "label", "--values", "yes,no"]
CLUSTERS = ["--clusters", "2"]
FIXED = [
    *("rows.jsonl", "--unit", "who", "--max-examples-per-unit", "4", "--dataset", "notes", "--ledger", "l.sqlite"),
    *("--epsilon", "20", "--model", "builtin:tiny", "--data.max_length", "16"),
]
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


def write(written: list[Json], name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Types ``dpllm describe`` on rows; returns exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    for constant in ("WORDS", "MIXED"):  # fewer texts to read, for the centre and the names
        monkeypatch.setattr(embeddings, constant, 30)
    write(rows())

    def typed(*words: object, epsilon: float = 20.0) -> tuple[int, str, str]:
        code = main(["describe", *FIXED, "--epsilon", str(epsilon), *map(str, words)])
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


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with rows, the ledger that was charged for a classifier of them, and the classifier."""
    root = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for constant in ("WORDS", "MIXED"):
            patch.setattr(embeddings, constant, 30)
        write(rows())
        assert main(["describe", *FIXED, *PREDICT]) == 0
    return root


@pytest.fixture
def folder(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the classifier, below the current directory; its ledger may be written to."""
    shutil.copytree(classifier, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    adopt(tmp_path / "l.sqlite")
    return Path("classifier")
