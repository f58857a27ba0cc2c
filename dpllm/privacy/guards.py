"""Refusals: what would break the promise, found before anything runs.

Comes in: the recipe, the model, the run directory. Goes out: nothing, or ``Refused``. A guard costs a user one clear
line; a guard that is missing costs somebody their privacy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpllm.errors import Refused
from dpllm.recipe.config import LoraConfig, RunConfig

if TYPE_CHECKING:
    import torch
    from torch import nn  # `dpllm plan` guards recipes without importing torch

ROUTED = frozenset({"experts", "router", "gate"})  # parts of a name


def check_modes(config: RunConfig) -> None:
    """Refuses what the recipe alone shows: dropout that couples units."""
    if config.privacy.enabled and isinstance(config.adapter, LoraConfig) and config.adapter.dropout > 0:
        raise Refused(
            f"adapter.dropout is {config.adapter.dropout:g}, and its masks depend on a row's place in the batch, so one unit "
            "would change all other contributions, which clipping does not bound. Set adapter.dropout: 0."
        )


def deviations(config: RunConfig) -> tuple[str | None, list[str]]:
    """Why a run has no guarantee (None: it has one), and the deviations that leave it standing, which the card names."""
    if not config.privacy.enabled:
        return "it was trained without differential privacy", []
    if config.privacy.insecure_seed is not None:
        return "its noise and sampling were seeded by the user (privacy.insecure_seed), so they can be regenerated", []
    notes = []
    if config.data.eval is not None and not config.data.eval_public:
        notes.append(
            "held-out loss was computed on private evaluation data; it is kept private and nothing was chosen by it"
        )
    if config.telemetry.private_metrics and not config.data.public:
        notes.append(
            "un-noised figures of the training data (loss, share of clipped gradients) and of the evaluation data went to "
            "metrics and trackers (telemetry.private_metrics); they are outside the guarantee"
        )
    return None, notes


def check_model(model: nn.Module) -> None:
    """Refuses a layer that couples the rows of a batch, and a router, an expert or a DoRA magnitude that trains."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise Refused(
                f"{name} is a batch norm: every row's output depends on its neighbours. Use another base model."
            )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parameter.requires_grad and ROUTED & set(parts):
            raise Refused(
                f"{name} belongs to a router or an expert, which sees other rows' tokens. Set "
                "adapter.method: lora and adapter.target_modules: auto, which leaves routers and experts out."
            )
        if parameter.requires_grad and any("magnitude_vector" in part for part in parts):
            raise Refused(f"{name} is a DoRA magnitude, whose layer is called twice. Use LoRA without DoRA.")


def check_float32() -> None:
    """Refuses TF32 and other short cuts of products of float32."""
    import torch

    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's new switches were used, and the old one then does not answer
        exact = False
    if not exact:
        raise Refused(
            "TF32 or another short cut for float32 products is on, so that gradients would have 10 bits or fewer. Call "
            "torch.set_float32_matmul_precision('highest'), and leave fp32_precision alone."
        )


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, kernels whose result has the same bits each time, where there are such; elsewhere they have anyway.

    Sums by atomic additions come in an order that nobody decides, so a row would be rounded differently in every pass.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # warn_only would leave the backward pass of attention as it is
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise Refused(
            f"this device computes in no fixed order ({str(error).partition('.')[0]}), so the same row would be rounded "
            "differently in every pass. Use another base model, or train.precision: fp32."
        ) from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
