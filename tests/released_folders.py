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
    *("--model", "builtin:tiny", "--data.max_length", "16"),
]
UNITS = 40


def rows(units: int = UNITS) -> list[Json]:
    kinds = (("pain in the chest, worse after meals", "yes"), ("a letter for the employer is asked for", "no"))
    return [
        {"text": f"{kinds[unit % 2][0]}, patient {unit}, visit {visit}", "who": f"p{unit}", "label": kinds[unit % 2][1]}
        for unit in range(units)
        for visit in range(2)
    ]


def write(written: list[Json], name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")


def fewer_texts(patch: pytest.MonkeyPatch) -> None:
    """To read for the centre and the names."""
    for constant in ("WORDS", "MIXED"):
        patch.setattr(embeddings, constant, 30)


def describing(capsys: pytest.CaptureFixture[str], options: list[str], usual_epsilon: float) -> Say:
    """Types ``dpllm describe``; returns exit code and what was printed."""

    def typed(*words: object, epsilon: float = usual_epsilon) -> tuple[int, str, str]:
        code = main(["describe", *options, "--epsilon", str(epsilon), *map(str, words)])
        return code, *capsys.readouterr()

    return typed


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Types ``dpllm describe`` on rows that stand in the current directory."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    fewer_texts(monkeypatch)
    write(rows())
    return describing(capsys, FIXED, 20.0)


def ledger() -> Any:
    return open_ledger("l.sqlite")


def entries() -> int:
    book = ledger()
    return len(book.history()) if book else 0


def released(path: str) -> Statistics:
    """Of a file, or of a folder's describe.json."""
    return Statistics.pick(
        json.loads((Path(path) if path.endswith(".json") else Path(path, "describe.json")).read_text())
    )


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
        fewer_texts(patch)
        write(rows())
        assert main(["describe", *FIXED, "--epsilon", "20", *PREDICT]) == 0
    return root


@pytest.fixture
def folder(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the classifier, below the current directory; its ledger may be written to."""
    shutil.copytree(classifier, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    adopt(tmp_path / "l.sqlite")
    return Path("classifier")
