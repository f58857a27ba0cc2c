"""What people mistype gets a sentence of its own, before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

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
    ("path", "told"),
    [
        ("folder", "is a directory; name a file in it, such as folder/ledger.sqlite"),
        ("text/ledger.sqlite", "text is a file, and nothing can lie under it"),
        ("text/a/b/ledger.sqlite", "text is a file, and nothing can lie under it"),
        ("pipe", "is not a regular file"),
        ("text", "file is not a database"),
    ],
)
def test_a_path_that_can_hold_no_ledger_is_refused_whether_or_not_it_is_to_be_made(
    path: str, told: str, create: bool
) -> None:
    with pytest.raises(ConfigError) as error:
        open_ledger(path, create=create)
    assert str(error.value).startswith(f"ledger {path}: ")
    assert told in str(error.value)
    assert "nothing runs. Set privacy.ledger to a ledger of dpllm" in str(error.value)
    assert Path("text").read_text() == "some text that is no ledger"


@pytest.mark.parametrize("path", ["folder/ledger.sqlite", "folder/new/ledger.sqlite", "text"])
@pytest.mark.parametrize("create", [True, False])
def test_a_ledger_where_this_user_may_not_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, create: bool
) -> None:
    """Tests may run as root, who may write everywhere."""
    monkeypatch.setattr(os, "access", lambda place, mode: not mode & os.W_OK)
    with pytest.raises(ConfigError, match="this user may not write there"):
        open_ledger(path, create=create)
    assert not Path("folder/new").exists()


def test_a_new_file_an_empty_one_and_a_link_can_be_a_ledger() -> None:
    Path("empty").touch()
    Path("link").symlink_to("elsewhere.sqlite")
    assert open_ledger("folder/new/ledger.sqlite", create=False) is None
    for path in ("folder/new/ledger.sqlite", "empty", "folder/new/ledger.sqlite", "new.sqlite"):
        found = open_ledger(path)
        assert found is not None
        found.close()


def test_plan_says_it_before_a_run_would_load_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe.yaml", "--privacy.ledger", "text/ledger.sqlite"]) == 2
    assert "text is a file, and nothing can lie under it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model:\n\tname_or_path: x\n", "recipe.yaml: has a tab at line 2, which YAML does not take for spaces"),
        ("model:\n  name_or_path: x\n\tdtype: auto\n", "recipe.yaml: has a tab at line 3"),
        ("model: {\n", "recipe.yaml: is not valid YAML at line 2"),
        (RECIPE + "xyzzy: 3\n", "xyzzy: unknown key; known keys: model, adapter"),
        (RECIPE + "trian: 3\n", "did you mean train?"),
    ],
)
def test_a_recipe_with_tabs_or_unknown_keys_is_told_so(
    capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    Path("recipe.yaml").write_text(text)
    assert main(["plan", "recipe.yaml"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("runs/clinc", "runs/clinc: no such directory (did you mean clinic?)"),
        ("runs/other", "runs/other: no such directory, so nothing"),
        ("rons", "rons: no such directory (did you mean runs?)"),
        ("text", "text: is a file"),
    ],
)
def test_a_mistyped_folder_is_no_hub_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, told: str
) -> None:
    """Beside a folder of runs, a slip of the keyboard was asked for on the network."""
    Path("runs/clinic").mkdir(parents=True)
    asked: list[object] = []
    monkeypatch.setattr("dpllm.cli.publish._download", lambda *given: asked.append(given))
    assert main(["verify", path]) == 2
    assert told in capsys.readouterr().err
    assert asked == []
    main(["verify", "owner/name"])
    assert len(asked) == 1
