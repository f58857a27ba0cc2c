"""What the run ran on: versions and hardware, for run.json, cards and bug reports.

Comes in: nothing. Goes out: plain dictionaries without host names, user names or paths.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import dpllm

_LINUX_STATUS, _LINUX_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PACKAGES = (
    *("torch", "transformers", "peft", "opacus", "accelerate", "datasets", "safetensors", "dp-accounting"),
    *("numpy", "scipy", "scikit-learn", "pydantic", "huggingface_hub"),
)


def versions() -> dict[str, str]:
    """Version of dpllm, Python and every package that the result depends on; "missing" where there is none."""
    found = {"dpllm": dpllm.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores and GPUs. Imports torch."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def reset_peak_memory() -> None:
    """Begins a new count for ``peak_memory``, where the system allows it: a process may run several recipes in turn."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        _LINUX_RESET.write_text("5")  # see proc(5); only the high-water mark changes


def peak_memory() -> int | None:
    """Bytes that this process held at most: on its GPU where it has one, else of main memory; None where nobody counts.

    Rounded up to 1 MiB. Since ``reset_peak_memory``; of main memory, where that is not possible, since the process began.
    """
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.max_memory_allocated()
    elif _LINUX_STATUS.exists():
        kib = re.search(r"^VmHWM:\s+(\d+) kB", _LINUX_STATUS.read_text(), re.MULTILINE)
        if kib is None:
            return None
        found = 1024 * int(kib[1])
    elif sys.platform == "darwin":
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        return None
    return -(-found // 2**20) * 2**20
