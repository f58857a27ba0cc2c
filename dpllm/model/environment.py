"""What the run ran on: versions and hardware, for run.json, cards and bug reports.

Comes in: nothing. Goes out: plain dictionaries without host names, user names or paths.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import dpllm
from dpllm.errors import ConfigError

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("torch", "transformers", "peft", "opacus", "accelerate", "datasets", "safetensors", "dp-accounting"),
    *("numpy", "scipy", "scikit-learn", "pydantic", "huggingface_hub"),
)
KERNELS = (
    *("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_", "BLIS_", "TORCH_ALLOW_TF32", "TORCH_BLAS"),
    *("CUBLAS_", "CUDNN_", "NVIDIA_TF32", "HIPBLAS", "ROCBLAS_", "PYTORCH_TUNABLEOP"),
)
"""How the names of variables begin that choose among kernels. Threads are counted, and where they run does not matter."""


def need(package: str, key: str) -> None:
    """Refuses, with a ConfigError, what a key of the recipe asks of a package that is not there; nothing is imported."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{key} needs {package}, which is not installed. Type: pip install {package}")


def versions() -> dict[str, str]:
    """Version of dpllm, Python and every package that the result depends on; "missing" where there is none."""
    found = {"dpllm": dpllm.__version__, "python": platform.python_version(), **dict.fromkeys(PACKAGES, "missing")}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def kernels(device: torch.device) -> dict[str, Any]:
    """What decides how this process rounds: kind of device, instruction sets and caches, threads, variables of the kernels."""
    import torch

    found: dict[str, Any] = {"the kind of device": device.type, "the number of threads": torch.get_num_threads()}
    found["the instruction set"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["the GPU"] = (properties.major, properties.minor, properties.multi_processor_count)
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # new in torch 2.10
    found |= {f"the processor's {key}": able[key] for key in able if not key.startswith(("num_", "cpu_"))}
    return found | {f"the variable {key}": value for key, value in os.environ.items() if key.startswith(KERNELS)}


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
