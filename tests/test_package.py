"""A wheel is the whole of dpllm: what a user types works away from the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from docs_pages import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def _needs(name: str) -> set[str]:
    requirements = map(Requirement, metadata.requires(name) or ())
    return {
        canonicalize_name(need.name) for need in requirements if not need.marker or need.marker.evaluate({"extra": ""})
    }


def test_wheels_for_a_gpu_machine_bring_what_they_need() -> None:
    """A machine that has torch, transformers and scipy alone; a mutant left out what a new joblib imports."""
    text = (ROOT / "scripts" / "gpu_check").read_text("utf-8")
    (listed,) = re.findall(r"\npackages=\((.*?)\n\)", text, re.DOTALL)
    wheels = set(map(canonicalize_name, listed.split()))
    there, new = set[str](), {"torch", "transformers", "scipy"}
    while new:
        there |= new
        new = {need for name in new if _installed(name) for need in _needs(name)} - there
    left_out = {need for name in wheels for need in _needs(name)} - wheels - there
    assert left_out == {"pandas", "pyarrow"}  # large, and nothing reads a data set there


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:  # an optional part of torch, for other machines
        return False
    return True
