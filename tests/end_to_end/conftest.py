"""Whole runs of a tiny model with random weights, made once and read by many tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from running import Place, done, make_place, rows

CANARIES = {"groups": {1: 20, 4: 4}, "references": 100, "digits": 12}


@pytest.fixture(scope="session")
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One place for remembered calibrations; every recipe here names its own ledger."""
    home = tmp_path_factory.mktemp("data_home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home))
        yield home


@pytest.fixture(autouse=True)
def _own_data_directory(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(data_home))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(
        1
    )  # on a busy machine, threads that wait for one another make tiny steps a hundred times slower
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
        {
            "data.eval": str(place.root / "data" / "eval.jsonl"),
            "data.eval_public": True,
            "audit.canaries": CANARIES,
            "audit.guesses": [5, 10],
        }
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
