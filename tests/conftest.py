"""What all tests share: seeds that are fixed unless asked otherwise, and the counts of --full.

Statistical tests draw from fixed seeds, so that a passing suite stays passing; ``--seed N`` draws others. Each of them
has a false alarm probability of at most 1e-8, so that the whole suite's is below 1e-6.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import remembered
from remembered import Once

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

pytest_plugins = ("ledger_fixtures", "released_folders")
BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the counts that the promises state, and the slow tests")
    minutes = "with --full: from so many minutes on, slow tests are skipped, so that a slow machine ends in time"
    parser.addoption("--full-minutes", type=float, default=float("inf"), help=minutes)
    parser.addoption("--seed", type=int, default=0, help="other random draws (default: 0, the ones of CI)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["DPLLM_TEST_SEED"] = str(config.getoption("--seed"))  # of whole runs, see entropy.py
    hypothesis.settings.register_profile("dpllm", derandomize=not config.getoption("--seed"))
    hypothesis.settings.load_profile("dpllm")  # before the tests' own settings, which inherit from it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: runs under --full"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    late = time.monotonic() - BEGUN > 60 * item.config.getoption("--full-minutes")
    if late and "full" in item.keywords:
        pytest.skip("slow, and --full-minutes are over")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


@pytest.fixture(autouse=True)
def _same_draws_in_any_order(seed: int) -> None:
    """Which process runs a test, and after which others, is chance: weights and draws without a seed of their own are not."""
    random.seed(seed)
    if "torch" in sys.modules:  # a process that imports it later begins with torch's own constant
        import torch

        torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(seed)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Fills a folder once for all processes of the tests, which wait for it and read it only: a test that changes it copies it.

    It lies beside the processes' own folders, so that it lives as long as this session, and no longer than this commit.
    """
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place

    def fill(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = place / name, place / f"{name}-made"
        with open(place / f"{name}-lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed half-way
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return fill


@pytest.fixture(scope="session", autouse=True)
def _remembered_accounting(once: Once) -> Iterator[None]:
    with remembered.accounting(once("accounting", lambda folder: None)):
        yield


@pytest.fixture(autouse=True)
def _own_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's ledger."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data_home"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, above all where the cores are shared."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
