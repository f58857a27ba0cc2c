"""What the run ran on: versions and hardware, for run.json, cards and bug reports.

Comes in: nothing. Goes out: plain dictionaries without host names, user names or paths.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import dpllm

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

    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
