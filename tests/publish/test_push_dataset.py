"""A data set goes to a dataset repository, as it was verified, by the same push as a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from written_rows import MODEL_CARDS, make_data_set, make_run, released

from dpllm.cli import main
from dpllm.errors import Refused
from dpllm.publish import leaks, push
from dpllm.statement.synthetic import ROWS

NAME = "alice/notes-synthetic"
OPEN = {"README.md", "synthetic.json", ROWS, "run/README.md", "run/privacy.json"}
"""Of a data set without guarantee."""


class Hub:
    """Keeps what arrives, and knows datasets alone."""

    def __init__(self, **_: object) -> None:
        self.arrived: dict[str, bytes] = {}

    def create_repo(self, name: str, *, repo_type: str, private: bool | None, exist_ok: bool) -> SimpleNamespace:
        assert repo_type == "dataset"
        return SimpleNamespace(repo_id=name)

    def dataset_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(private=False, siblings=[SimpleNamespace(rfilename=".gitattributes")])

    def create_commit(
        self, name: str, operations: list[Any], *, commit_message: str, repo_type: str
    ) -> SimpleNamespace:
        assert repo_type == "dataset"
        for one in operations:
            with one.as_file() as file:
                self.arrived[one.path_in_repo] = file.read()
        return SimpleNamespace(commit_url="commit")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(push, "HfApi", lambda **_: hub)
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", "clinic-without-privacy")
    return make_data_set(run, run.root / "synthetic", columns=["text"], control=[], shares=None)


def test_exactly_the_verified_files_arrive(folder: Path, hub: Hub) -> None:
    done = push.push(folder, NAME)
    assert hub.arrived == {name: (folder / name).read_bytes() for name in OPEN}
    assert any(line.startswith("canary secrets in the rows") for line in done.unsearched)


def test_a_dry_run_contacts_nobody(folder: Path, hub: Hub) -> None:
    assert {file.path for file in push.push(folder, NAME, dry_run=True).files} == OPEN
    assert not hub.arrived


def test_what_does_not_verify_is_refused(folder: Path, hub: Hub) -> None:
    path = folder / ROWS
    path.write_text(path.read_text("utf-8").replace("Seen", "Met"), encoding="utf-8")
    with pytest.raises(Refused, match="does not verify"):
        push.push(folder, NAME)
    assert not hub.arrived


def test_a_guarantee_needs_its_ledger(tmp_path: Path, hub: Hub) -> None:
    run = make_run(tmp_path / "run", statistics=released())
    with pytest.raises(Refused, match="--ledger"):
        push.push(make_data_set(run, run.root / "synthetic"), NAME)
    assert not hub.arrived


def test_a_published_data_set_is_verified_by_its_hub_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def download(name: str, *, repo_type: str, local_dir: Path, **_: object) -> None:
        asked.extend([name, repo_type])
        shutil.copytree(MODEL_CARDS / "clinic-synthetic", local_dir, dirs_exist_ok=True)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert main(["verify", f"datasets/{NAME}"]) == 0
    assert asked == [NAME, "dataset"]
    assert ", 0 failed" in capsys.readouterr().out


def test_secrets_in_rows_are_counted_and_nothing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [SimpleNamespace(inserted=True, secret="2026-11-03"), SimpleNamespace(inserted=False, secret="81818181")]
    monkeypatch.setattr(leaks.canaries, "load", lambda path: SimpleNamespace(canaries=told))
    run = make_run(folder.parent.parent / "other", "clinic-without-privacy")
    run.private.mkdir()
    run.canaries.write_text("{}")
    assert "1 of 1 planted and 0 of 1 left out" in leaks.in_rows(run, folder / ROWS)
