"""Whole runs of a tiny model with random weights, made once and read by many tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import remembered
import tiny
from running import CANARIES, Place, done, make_place, rows


@pytest.fixture(scope="session")
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data directory of these tests, where nothing should lie: every recipe here names its own ledger."""
    home = tmp_path_factory.mktemp("data_home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def _packages_stay() -> Iterator[None]:
    with remembered.packages():
        yield


@pytest.fixture(autouse=True)
def _own_data_directory(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(data_home))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(1)  # threads that wait for one another make tiny steps slow on a busy machine
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Place:
    return make_place(tmp_path / "place", base)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A private run from plan to card; read only."""
    place = make_place(tmp_path_factory.mktemp("finished"), base)
    tiny.write_rows(place.root / "data" / "eval.jsonl", rows(8, start=500))
    place.write(
        {"data.eval": str(place.root / "data" / "eval.jsonl"), "data.eval_public": True, "audit.canaries": CANARIES}
    )
    (place.root / "plan.txt").write_text(done("plan", place.recipe, "--json").out)
    done("train", place.recipe)
    done("audit", place.run)
    done("card", place.run)
    return place


@pytest.fixture(scope="session")
def baseline(finished: Place, data_home: Path) -> Place:
    """The same recipe without differential privacy, in a directory beside it; read only."""
    run = finished.root / "baseline" / "run"
    place = Place(run.parent, finished.base)
    public = ("--privacy.enabled", "false", "--data.public", "true", "--output_dir", run)
    done("train", finished.recipe, *public)
    done("audit", run)
    done("card", run)
    return place


@pytest.fixture(scope="session")
def merged(finished: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the finished run gives; read only."""
    output = tmp_path_factory.mktemp("merged") / "model"
    assert str(output) in done("merge", finished.run, "--output", output).out
    return output


@pytest.fixture
def copy(finished: Place, tmp_path: Path) -> Place:
    """The finished run, to be damaged."""
    shutil.copytree(finished.root, tmp_path / "copy")
    return Place(tmp_path / "copy", finished.base)


@pytest.fixture(scope="session")
def copies(finished: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run twice: one that tests change, and one to restore it from."""
    folder = tmp_path_factory.mktemp("published")
    for name in ("run", "kept"):
        shutil.copytree(finished.run, folder / name)
    return folder / "run", folder / "kept"


@pytest.fixture
def run(copies: tuple[Path, Path]) -> Iterator[Path]:
    """A run that may be changed; it lies at one place, so that what was read once is known."""
    original, backup = copies
    yield original
    for path in sorted(original.rglob("*"), reverse=True):
        if path.is_symlink() or not os.path.lexists(backup / path.relative_to(original)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in backup.rglob("*"):
        changed = original / path.relative_to(backup)
        if path.is_file() and not (changed.exists() and _seen(changed) == _seen(path)):
            shutil.copy2(path, changed)


def _seen(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@pytest.fixture
def export(run: Path) -> Path:
    return run / "export"
