"""The optimizer, and its learning rate as a function of the step alone.

Comes in: the training section of a recipe. Goes out: a stock optimizer over what trains, and numbers. Must not see data: a
schedule that followed the loss would be outside the guarantee.
"""

from __future__ import annotations

import math

import torch

from dpllm.recipe.config import TrainConfig


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
