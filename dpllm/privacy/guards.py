"""Refusals: what would break the promise, found in the model or the machine before anything runs.

A guard costs a user one clear line; a guard that is missing costs somebody their privacy.
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

ROUTED = frozenset({"experts", "router", "gate"})  # parts of a name
# torch reads it once, when the process multiplies on a GPU for the first time, and refuses products afterwards if it was not set.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_model(model: nn.Module) -> None:
    """Refuses a layer that couples the rows of a batch, and a router, an expert or a DoRA magnitude that trains."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise Refused(
                f"{name} is a batch norm: every row's output depends on the other rows in the batch. Use another base model."
            )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parameter.requires_grad and ROUTED & set(parts):
            raise Refused(
                f"{name} belongs to a router or an expert, which mixes tokens of different rows. Set adapter.method: lora and "
                "adapter.target_modules: auto, which leaves routers and experts out."
            )
        if parameter.requires_grad and any("magnitude_vector" in part for part in parts):
            raise Refused(f"{name} is a DoRA magnitude, whose layer is called twice. Use LoRA without DoRA.")


def check_float32() -> None:
    """Refuses TF32 and other short cuts of products of float32."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's new switches were used, and the old one then does not answer
        exact = False
    if not exact:
        raise Refused(
            "TF32 or another shortcut for float32 products is on, so gradients would have 10 bits or fewer. Call "
            "torch.set_float32_matmul_precision('highest'), and leave fp32_precision alone."
        )


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, kernels whose result has the same bits each time, where there are such; elsewhere they have anyway.

    Sums by atomic additions come in an order that nobody decides, so a row would be rounded differently in every pass.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # every kernel would write what nobody reads
    torch.use_deterministic_algorithms(True)  # warn_only would leave the backward pass of attention as it is
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
    """For writes to places of which none is written twice: they leave the same bits in any order.

    Without it, ``deterministic`` has torch sort the places first, at ten times the cost on a GPU.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
