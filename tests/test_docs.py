"""What is written down works: recipes load, links lead somewhere, commands exist, no machine's path is left behind."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dpllm.config import load_config

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "accelerate")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "model_cards/**/*.md", "dpllm/builtin/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Assembled, so that this file does not contain what it looks for.
MACHINES = re.compile(
    rb"(?<![\w.])/(?:" + b"|".join([b"wo" + b"rk", b"ro" + b"ot", b"home/" + b"(?!alice)[a-z]+"]) + rb")/\w"
)


def tracked() -> list[Path]:
    try:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / os.fsdecode(name) for name in names.split(b"\0") if name]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", RECIPES, ids=label)
def test_a_recipe_loads_and_says_how_to_launch_it(path: Path) -> None:
    load_config(path)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(rf"# accelerate launch .*recipes/train\.py {re.escape(label(path))}\b.*", first), first
    assert f"dpllm train {label(path)}" in first


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]
    assert [target for target in targets if target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["scripts/quickstart", "scripts/test"])
def test_the_commands_of_the_readme_exist(name: str) -> None:
    assert name in (ROOT / "README.md").read_text(encoding="utf-8")
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text().startswith("#!")


def test_recipes_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"recipes/[\w/]+\.(?:yaml|py)", text))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_commands_of_the_readme_are_commands() -> None:
    from dpllm.cli import _parser

    known = _parser().format_help()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^dpllm (\w+)", text, flags=re.MULTILINE))
    assert named
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", known)] == []


def test_no_file_names_a_place_on_a_build_machine() -> None:
    found = []
    for path in tracked():
        if not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content[:8000] and (match := MACHINES.search(content)):
            found.append((label(path), content[max(0, match.start() - 20) : match.end() + 20]))
    assert found == []
