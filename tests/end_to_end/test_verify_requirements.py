"""``dpllm verify`` where nothing heavy is installed: the short requirements are enough, and locked."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import python

ONLY = """
import sys
allowed = set(sys.argv[1].split(",")) | set(sys.stdlib_module_names) | {"dpllm"}
class Only:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed and not name.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Only())
from dpllm.cli import main
print([main(["verify", place]) for place in sys.argv[2:]])
"""
REQUIREMENTS = Path(__file__).parents[2] / "requirements-verify.txt"


def _required() -> list[Requirement]:
    lines = REQUIREMENTS.read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _modules() -> set[str]:
    """What the requirements install, with all that they require."""
    names, pending = set(), [requirement.name for requirement in _required()]
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in names:
            names.add(name)
            wanted = [Requirement(text) for text in metadata.requires(name) or ()]
            pending += [item.name for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})]
    provided = metadata.packages_distributions()
    return {module for module, of in provided.items() if names & {canonicalize_name(item) for item in of}}


def test_it_runs_where_the_short_requirements_alone_are_installed(run: Path) -> None:
    modules = _modules()
    assert not modules & {"torch", "transformers", "peft", "datasets", "accelerate", "opacus", "sklearn", "matplotlib"}
    other = Path(shutil.copytree(run / "export", run / "other"))
    (other / "tokenizer.json").write_text("{}", encoding="utf-8")
    done = python(ONLY, ",".join(modules), run, other)
    assert done.stdout.splitlines()[-1:] == ["[0, 4]"], done.stdout + done.stderr


def test_the_short_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    known = {canonicalize_name(item.name): item.specifier for item in map(Requirement, project["dependencies"])}
    for requirement in _required():
        assert requirement.name == "pyarrow" or known[canonicalize_name(requirement.name)] == requirement.specifier


def test_what_they_install_is_locked_with_hashes_at_the_versions_of_the_tests() -> None:
    text = REQUIREMENTS.with_suffix(".lock").read_text("utf-8").replace("\\\n", " ")
    locked = {canonicalize_name(line.partition("==")[0]): line for line in text.splitlines() if line[:1] != "#"}
    tested = REQUIREMENTS.with_name("constraints.txt").read_text("utf-8")
    pins = {canonicalize_name(line.partition("==")[0]): line for line in tested.splitlines()}
    assert {canonicalize_name(item.name) for item in _required()} <= locked.keys()
    for name, line in locked.items():
        assert line.partition("==")[2].split()[0] == pins[name].partition("==")[2].split()[0]
        assert re.search(r" --hash=sha256:[0-9a-f]{64}\b", line)


@pytest.mark.full
def test_a_fresh_environment_with_the_short_requirements_verifies(run: Path, tmp_path: Path) -> None:
    """As docs/concepts/verification.md says; skipped where no package index can be reached."""
    venv.create(tmp_path / "venv", with_pip=True)
    interpreter = tmp_path / "venv" / "bin" / "python"

    def install(*what: str) -> subprocess.CompletedProcess[str]:
        command = [interpreter, "-m", "pip", "install", "-q", *what]
        return subprocess.run(command, capture_output=True, text=True, timeout=550)

    if (reached := install("hatchling")).returncode:  # which builds the package
        pytest.skip(f"pip cannot install here: {reached.stderr.strip().splitlines()[-1][:200]}")
    source = tmp_path / "source"
    for name in ("dpllm", "recipes"):
        shutil.copytree(REQUIREMENTS.parent / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements-verify.txt"):
        shutil.copy(REQUIREMENTS.parent / name, source / name)
    for arguments in (["--no-deps", str(source)], ["-r", str(source / "requirements-verify.txt")]):
        done = install(*arguments)
        assert done.returncode == 0, done.stderr
    for place, code in ((run, 0), (run / "export", 0)):
        command = [interpreter, "-m", "dpllm", "verify", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
    (run / "export" / "tokenizer.json").write_text("{}", encoding="utf-8")
    done = subprocess.run(
        [interpreter, "-m", "dpllm", "verify", str(run)], capture_output=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 4
