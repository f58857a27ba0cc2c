"""Guards: refuse models and machine settings that would break the promise, before anything runs.

A guard costs a user one clear line; a missing guard costs somebody their privacy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpllm.errors import Refused

ROUTED = frozenset({"experts", "router", "gate"})  # parts of a parameter's name
# torch reads it once, at the first product on a GPU, and refuses later products if it was not set.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_model(model: nn.Module) -> None:
    """Refuses a layer that couples the rows of a batch, and a trainable router, expert or DoRA magnitude."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise Refused(
                f"{name} is a batch norm, so every row's output depends on the other rows in the batch. Use another base model."
            )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parameter.requires_grad and ROUTED & set(parts):
            raise Refused(
                f"{name} belongs to a router or an expert, which mixes tokens of different rows. Set adapter.method: lora and "
                "adapter.target_modules: auto, which excludes routers and experts."
            )
        if parameter.requires_grad and any("magnitude_vector" in part for part in parts):
            raise Refused(f"{name} is a DoRA magnitude, whose layer is called twice. Use LoRA without DoRA.")


def check_float32() -> None:
    """Refuses TF32 and other shortcuts for float32 products."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's new switches were used, and then the old one cannot be read
        exact = False
    if not exact:
        raise Refused(
            "TF32 or another shortcut for float32 products is on, so gradients would have 10 bits or fewer. Call "
            "torch.set_float32_matmul_precision('highest'), and leave fp32_precision alone."
        )


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Selects kernels whose results have the same bits each time.

    Atomic additions happen in a random order, on a GPU and among the threads of a CPU, so a row would be rounded differently in
    every pass.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # else every kernel would fill memory that is never read
    torch.use_deterministic_algorithms(True)  # warn_only would not change the backward pass of attention
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise Refused(
            f"this device has no deterministic kernel for this model ({str(error).partition('.')[0]}), so the same row would be "
            "rounded differently in every pass. Use another base model, or train.precision: fp32."
        ) from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


@contextlib.contextmanager
def distinct() -> Iterator[None]:
    """For writes to distinct indices, whose result does not depend on their order.

    Without it, ``deterministic`` makes torch sort the indices first, at ten times the cost on a GPU.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
