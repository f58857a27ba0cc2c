"""The machine, versions and commit of a benchmark, for its report."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Processors, load and operating system; no name of the machine or its user."""
    return {"processors": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "platform": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of packages."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def commit() -> str | None:
    """The commit that was measured, with -dirty if files had changed; None outside a clone."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True)
        return done.stdout.strip() or None
    return None


def matrix_rate(device: Any, dtype: Any, rows: int, inner: int, columns: int, seconds: float = 0.5) -> float:
    """FLOP/s of one matrix product, rows x inner by inner x columns: the best rate that this device reached in that time.

    The best and not the mean, because it is a limit. On a CPU, processor time is divided by the number of threads, so that
    other processes do not count.
    """
    import torch

    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    cuda = out.is_cuda
    clock, threads = (time.perf_counter, 1) if cuda else (time.process_time, torch.get_num_threads())

    def once(times: int) -> float:
        start = clock()
        for _ in range(times):
            torch.mm(left, right, out=out)
        if cuda:
            torch.cuda.synchronize()
        return (clock() - start) / times / threads

    once(1)
    times = max(1, round(0.005 / once(3)))  # so that starting kernels is not what is timed
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, once(times))
    return 2 * rows * inner * columns / best
