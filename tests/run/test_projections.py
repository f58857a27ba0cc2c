"""What steps released along gradient canaries stays on disk, whatever ends the run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpllm.errors import ConfigError
from dpllm.run.projections import KeptGroups, Projections, read_projections, read_weights


def test_steps_are_kept_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gradient_canaries.npy"
    first = Projections(path, 5, 4)
    first.write(1, np.arange(4.0))
    first.write(2, np.arange(4.0) + 1)
    again = Projections(path, 5, 4)
    again.write(4, np.arange(4.0) + 2)
    found_TM = read_projections(path)
    assert found_TM.shape == (5, 4)
    np.testing.assert_array_equal(found_TM[[0, 1, 3]], [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]])
    assert np.isnan(found_TM[[2, 4]]).all()


@pytest.mark.parametrize("content", [None, b"", b"no array"])
def test_a_missing_or_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "gradient_canaries.npy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"missing or damaged, so .* Restore it, or train again"):
        read_projections(path)


def other(values: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"abc",
        other(np.zeros((5, 3), np.float32)),
        other(np.zeros((4, 4), np.float32)),
        other(np.zeros((5, 4))),
        other(np.zeros(4, np.float32)),
    ],
)
def test_a_run_does_not_go_on_with_a_file_that_is_not_its_own(tmp_path: Path, content: bytes) -> None:
    """A row that does not fit would fail after its step was charged."""
    path = tmp_path / "gradient_canaries.npy"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="missing or damaged"):
        Projections(path, 5, 4)


@pytest.mark.parametrize(
    "content", [other(np.full((2, 4), np.nan)), other(np.zeros((2, 4), np.float32)), other(np.zeros((3, 4)))]
)
def test_weights_that_are_none_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights_along_canaries.npy"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="missing or damaged"):
        read_weights(path)


def test_turns_are_read_without_torch(tmp_path: Path) -> None:
    """``dpllm verify`` does, of a run with banded noise."""
    path = tmp_path / "groups.json"
    KeptGroups(3, 2**200 + 1, 50, (0, 7)).write(path)
    code = """
import sys
from pathlib import Path
from dpllm.run.projections import read_turns
turns = read_turns(Path(sys.argv[1]), (0.8, 0.4, 0.2), 40)
assert len(turns.group_M) == 40 and set(turns.group_M) == {0, 1, 2} and turns.starts == (0, 7)
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=env)
