"""No command makes anything of a run of which a file was changed since; which files: tests/run/test_open_run.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from running import Place, contents, refused


def _edit_plan(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "epsilon": 99.0}), encoding="utf-8")


def _edit(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("name", ["plan.json", "export/adapter_model.safetensors", "private/canaries.json"])
def test_a_changed_file_stops_every_command_that_may_read_it(copy: Place, name: str) -> None:
    run = copy.run
    commands: list[tuple[object, ...]]
    (_edit_plan if name == "plan.json" else _edit)(run / name)
    other = Path(shutil.copytree(run, copy.root / "other"))
    before = contents(copy.root)
    commands = [("audit", run), ("audit", run, "--members"), ("card", run), ("compare", run, other)]
    commands += [("push", run, "a/b", "--dry-run")]
    if not name.startswith("private/"):
        commands += [("generate", run), ("merge", run), ("synthesize", run, "--rows", 3)]
    for command in commands:
        assert f"{name} is not what the run wrote" in refused(*command)
    assert contents(copy.root) == before
