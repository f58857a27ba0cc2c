"""A wheel is the whole of dpllm: what a user types works away from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from docs_pages import ROOT

from dpllm.recipe.config import load_config


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("dpllm-*.whl"))


@pytest.mark.full
def test_a_wheel_trains_and_verifies_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    # The dependencies are this environment's; a .pth file there, such as that of an editable dpllm, is not followed from
    # PYTHONPATH.
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data"), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **home, "PYTHONPATH": sysconfig.get_paths()["purelib"]}

    def run(*arguments: str) -> str:
        command = [str(python), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(tmp_path) in run("-c", "import dpllm; print(dpllm.__file__)")
    recipe = "builtin:smoke/clinic.yaml"
    assert "epsilon" in run("-m", "dpllm", "plan", recipe)
    run("-m", "dpllm", "train", recipe, "--train.steps", "2", "--output_dir", "run")
    run("-m", "dpllm", "card", "run")
    assert "verified" in run("-m", "dpllm", "verify", "run")


def test_a_wheel_holds_what_is_embedded(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    recipes = {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {f"dpllm/recipe/builtin/{name}" for name in recipes} <= held
    assert {"dpllm/text/builtin/tiny/model.safetensors", "dpllm/text/builtin/clinic/train.jsonl"} <= held
    assert not [name for name in held if name.startswith(("tests/", "recipes/"))]


def test_an_embedded_recipe_is_that_of_the_repository() -> None:
    assert load_config("builtin:smoke/clinic.yaml") == load_config(ROOT / "recipes" / "smoke" / "clinic.yaml")
