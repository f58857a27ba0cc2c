"""What steps released along gradient canaries stays on disk, whatever ends the run."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpllm.errors import ConfigError
from dpllm.run.projections import KeptGroups, Projections, read_projections, read_weights


def test_steps_are_kept_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gradient_canaries.npy"
    first = Projections(path, 5, 4)
    first.write(1, np.arange(4.0))
    first.write(2, np.arange(4.0) + 1)
    resumed = Projections(path, 5, 4)
    resumed.write(4, np.arange(4.0) + 2)
    projection_TM = read_projections(path)
    assert projection_TM.shape == (5, 4)
    np.testing.assert_array_equal(projection_TM[[0, 1, 3]], [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]])
    assert np.isnan(projection_TM[[2, 4]]).all()


def npy(values: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def resume(path: Path) -> Projections:
    return Projections(path, 5, 4)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        pytest.param(read_projections, None, id="steps: missing"),
        pytest.param(read_projections, b"", id="steps: empty"),
        pytest.param(read_projections, b"no array", id="steps: no array"),
        pytest.param(resume, b"abc", id="resume: no array"),  # such a row would fail after its step was charged
        pytest.param(resume, npy(np.zeros((5, 3), np.float32)), id="resume: fewer canaries"),
        pytest.param(resume, npy(np.zeros((4, 4), np.float32)), id="resume: fewer steps"),
        pytest.param(resume, npy(np.zeros(4, np.float32)), id="resume: one dimension"),
        pytest.param(resume, npy(np.zeros((5, 4))), id="resume: float64"),
        pytest.param(read_weights, npy(np.full((2, 4), np.nan)), id="weights: nan"),
        pytest.param(read_weights, npy(np.zeros((2, 4), np.float32)), id="weights: float32"),
        pytest.param(read_weights, npy(np.zeros((3, 4))), id="weights: three rows"),
    ],
)
def test_a_missing_damaged_or_foreign_file_is_refused(tmp_path: Path, read: Any, content: bytes | None) -> None:
    path = tmp_path / "canaries.npy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"canaries\.npy: .*missing or damaged"):
        read(path)


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
