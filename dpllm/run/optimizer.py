"""The optimizer, its learning rate as a function of the step alone, and the precision of a run.

Comes in: the training section of a recipe. Goes out: a stock optimizer over what trains, numbers, contexts. Must not see data: a
schedule that followed the loss would be outside the guarantee.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from dpllm.recipe.config import RunConfig, TrainConfig


def make_optimizer(train: TrainConfig, net: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer, over what trains."""
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if train.optimizer == "sgd":
        return torch.optim.SGD(trainable, lr=train.learning_rate, weight_decay=train.weight_decay)
    return torch.optim.AdamW(trainable, lr=train.learning_rate, weight_decay=train.weight_decay)


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of step 0..num_steps-1; never zero, because every step spends privacy.

    Rises linearly over the warm-up, then falls to 0 as the schedule says; depends on the step alone.
    """
    warm = math.ceil(train.warmup * num_steps)
    if step < warm:
        return train.learning_rate * (step + 1) / (warm + 1)
    left = (num_steps - step) / max(1, num_steps - warm)
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return train.learning_rate * shape[train.lr_scheduler]


def is_low(config: RunConfig, net: Any, device: torch.device) -> bool:
    """Whether anything is computed or held in less than float32."""
    if precision_of(config.train, device) is not None or getattr(net.config, "quantization_config", None) is not None:
        return True
    return any(p.is_floating_point() and p.dtype != torch.float32 for p in net.parameters())


def precision_of(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The autocast type; None for float32."""
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.precision]


def autocast_of(device: torch.device, precision: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass in this precision."""
    return contextlib.nullcontext() if precision is None else torch.autocast(device.type, dtype=precision)
