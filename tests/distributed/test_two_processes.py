"""Two processes take the steps that one would: one logical batch, one sum, one noise, one update."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpllm.privacy.noise import GaussianNoise

STEPS, C, SIGMA, B = 3, 0.05, 0.7, 12
HERE = Path(__file__).parent

Results = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results, Results]:
    """Rank 0 and rank 1 of two processes, and one process alone."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parents[1]), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "step_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [(0, 2), (1, 2), (0, 1)]
    first, second, alone = (torch.load(folder / f"world{w}_rank{r}.pt", weights_only=True) for r, w in ranks)
    return first, second, alone


def test_ranks_hold_the_same_parameters_bit_for_bit(runs: tuple[Results, Results, Results]) -> None:
    first, second, _ = runs
    assert torch.equal(first["weights"], second["weights"])
    for step in range(STEPS):
        assert torch.equal(first[f"released{step}"], second[f"released{step}"])


def test_the_ranks_sums_add_up_to_that_of_one_process(runs: tuple[Results, Results, Results]) -> None:
    first, second, alone = runs
    together, one = first["sum0"] + second["sum0"], alone["sum0"]  # later steps start from rounded weights
    assert float((together - one).norm()) <= 1e-6 * float(one.norm())
    for step in range(STEPS):
        assert int(first[f"units{step}"] + second[f"units{step}"]) == int(alone[f"units{step}"])
        assert int(first[f"units{step}"]) > 0
        assert int(second[f"units{step}"]) > 0
        together, one = first[f"sum{step}"] + second[f"sum{step}"], alone[f"sum{step}"]
        assert float((together - one).norm()) <= 1e-4 * float(one.norm())


def test_noise_is_added_once_by_rank_0(runs: tuple[Results, Results, Results]) -> None:
    """Noise of each rank would double the variance; noise of none is no privacy; rank 1's key must not appear."""
    first, second, _ = runs
    stream = GaussianNoise(1234, torch.device("cpu"))
    for step in range(STEPS):
        total = first[f"sum{step}"] + second[f"sum{step}"]
        expected = (total + SIGMA * C * stream.draw(total.numel()).double()) / B
        torch.testing.assert_close(first[f"released{step}"].double(), expected, rtol=1e-5, atol=1e-8)


def test_two_processes_end_where_one_does(runs: tuple[Results, Results, Results]) -> None:
    first, _, alone = runs
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
