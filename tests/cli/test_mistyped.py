"""What people mistype gets a sentence of its own, before a model is loaded."""

import os
from pathlib import Path
from typing import Any

import pytest

from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.ledger import open_ledger

RECIPE = """model: {name_or_path: "builtin:tiny"}
data: {train: "builtin:clinic"}
train: {steps: 1, batch_size: 5}
output_dir: out
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text").write_text("some text that is no ledger")
    Path("recipe.yaml").write_text(RECIPE)
    os.mkfifo("pipe")


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("folder", "folder/ledger.sqlite"),
        ("text/ledger.sqlite", "text is a file"),
        ("text/a/b/ledger.sqlite", "text is a file"),
        ("pipe", "is not a regular file"),
        ("text", "is not a database"),
    ],
)
def test_a_path_that_can_hold_no_ledger_is_refused(path: str, reason: str, create: bool) -> None:
    with pytest.raises(ConfigError, match=f"^ledger {path}: .*{reason}.*Set privacy.ledger"):
        open_ledger(path, create=create)
    assert Path("text").read_text() == "some text that is no ledger"


@pytest.mark.parametrize("path", ["folder/ledger.sqlite", "folder/new/ledger.sqlite", "text"])
@pytest.mark.parametrize("create", [True, False])
def test_a_ledger_that_is_not_writable_is_refused(monkeypatch: pytest.MonkeyPatch, path: str, create: bool) -> None:
    """Tests may run as root, who may write everywhere."""
    monkeypatch.setattr(os, "access", lambda place, mode: not mode & os.W_OK)
    with pytest.raises(ConfigError, match="may not write"):
        open_ledger(path, create=create)
    assert not Path("folder/new").exists()


def test_a_new_file_an_empty_one_and_a_link_can_be_a_ledger() -> None:
    Path("empty").touch()
    Path("link").symlink_to("elsewhere.sqlite")
    assert open_ledger("folder/new/ledger.sqlite", create=False) is None
    for path in ("folder/new/ledger.sqlite", "empty", "folder/new/ledger.sqlite", "new.sqlite"):
        open_ledger(path).close()


def test_plan_says_it_before_a_run_would_load_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe.yaml", "--privacy.ledger", "text/ledger.sqlite"]) == 2
    assert "text is a file, so nothing can be stored under it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model:\n\tname_or_path: x\n", "recipe.yaml: has a tab at line 2"),
        ("model:\n  name_or_path: x\n\tdtype: auto\n", "recipe.yaml: has a tab at line 3"),
        ("model: {\n", "recipe.yaml: is not valid YAML at line 2"),
    ],
)
def test_a_recipe_that_is_no_yaml_has_its_line(capsys: pytest.CaptureFixture[str], text: str, problem: str) -> None:
    Path("recipe.yaml").write_text(text)
    assert main(["plan", "recipe.yaml"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/clinc", "runs/clinc: no such directory (did you mean clinic?)"),
        ("runs/other", "runs/other: no such directory"),
        ("rons", "rons: no such directory (did you mean runs?)"),
        ("text", "text: is a file"),
    ],
)
def test_a_mistyped_folder_is_no_hub_id(monkeypatch: Any, capsys: Any, path: str, message: str) -> None:
    """A typing error beside a folder of runs was looked up on the network."""
    Path("runs/clinic").mkdir(parents=True)
    downloads: list[object] = []
    monkeypatch.setattr("dpllm.cli.publish._download", lambda *arguments: downloads.append(arguments))
    assert main(["verify", path]) == 2
    assert message in capsys.readouterr().err
    assert downloads == []
    main(["verify", "owner/name"])
    assert len(downloads) == 1
