"""Record and replay: one step on two neighbouring batches with the same noise, through the real engine.

Comes in: a Plan and how the recipe computes it. Goes out: by how much each of some random units moved what was released.
The noise cancels, so that what is left is the unit's contribution, exactly, whatever path it took. No statistics are
needed: a single pair that differs by more than C contradicts the Plan. Knows no data and no ledger.

Shape suffix: P trainable coordinates.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dpllm.auditing.mechanism_report import Pair
from dpllm.model import loading
from dpllm.privacy.engine import Engine
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan
from dpllm.privacy.rules import Form, Mode
from dpllm.privacy.sampling import PhysicalBatch, collate, physical_batches
from dpllm.privacy.schedule import Shape
from dpllm.privacy.stream import KEY_BITS
from dpllm.recipe.config import FrozenConfig, LoraConfig, RunConfig
from dpllm.text.data import TokenSequence, Unit

SHAPES = Shape(8, 3), Shape(16, 3)  # few rows, so that a logical batch takes several and a unit of four is cut
MAX_LENGTH, VOCABULARY = 16, 256  # of a shrunken model
CPU = torch.device("cpu")


def replay(config: RunConfig, plan: Plan, *, pairs: int, generator: np.random.Generator) -> tuple[Pair, ...]:
    """Takes the same steps on neighbouring batches; the first neighbour is the empty batch.

    The model is a Llama of two narrow blocks with random weights and the recipe's kind of adapter, without dropout, in
    float32. C is set between the lengths of its gradients, so that some are clipped and others not; nothing else of the
    Plan is changed.

    References:
        Cebere et al. 2026, arXiv 2602.17454 (record and replay).
    """
    torch.set_float32_matmul_precision("highest")
    net = _model(config, generator)
    several = plan.sampling == "unit"
    batches = [_units(1 if pair == 0 else int(generator.integers(3, 8)), generator, several) for pair in range(pairs)]
    gradients = [plain_gradient(net, collate([unit], pad_id=0)).values() for unit in batches[-1]]
    norms = [float(torch.cat([gradient.flatten() for gradient in one]).norm()) for one in gradients]
    promise = replace(plan, max_grad_norm=float(np.median(norms)))
    key, options = noise_key(generator), engine_options(config)
    one, other = (Watched(copy.deepcopy(net), promise, key, max_length=MAX_LENGTH, **options) for _ in range(2))
    try:
        return tuple(_pair(one, other, units, int(generator.integers(len(units))), promise) for units in batches)
    finally:
        one.engine.close()
        other.engine.close()


def noise_key(generator: np.random.Generator) -> int:
    """Entropy of one stream of the engine's or the sampler's."""
    return int.from_bytes(generator.bytes(KEY_BITS // 8), "little")


def engine_options(config: RunConfig) -> dict[str, Any]:
    """How the recipe computes."""
    return {"grad_sample_mode": config.privacy.grad_sample_mode}


def plain_gradient(net: nn.Module, batch: PhysicalBatch) -> dict[str, Tensor]:
    """The gradient of the summed losses of a batch by each parameter that trains, by plain autograd."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    logits = net(input_ids=batch.input_ids_RT, use_cache=False).logits
    loss_R = sequence_losses(logits, batch.input_ids_RT, batch.loss_mask_RT, batch.denominator_R)
    found = torch.autograd.grad(loss_R.sum(), list(trained.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), found, strict=True)}


class Watched:
    """An engine whose releases are read at the optimizer's door; the weights stay."""

    def __init__(self, net: nn.Module, plan: Plan, key: int, *, grad_sample_mode: Mode, max_length: int = 512) -> None:
        """``key`` is the entropy of the noise; the others are the recipe's."""
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0)
        form, noise = Form(grad_sample_mode, max_length), GaussianNoise(key, CPU)
        self.engine = Engine(net, optimizer, plan.schedule, plan, form=form, noise=noise)
        optimizer.register_step_pre_hook(self._read)

    def _read(self, *_: Any) -> None:
        gradients = [p.grad for p in self.engine.parameters.values() if p.grad is not None]
        self._released_P = torch.cat([gradient.flatten() for gradient in gradients]).double()

    def step(self, batches: list[PhysicalBatch]) -> tuple[Tensor, float | None]:
        """What one step releases: the noised sum over the divisor, and with adaptive clipping the count over it."""
        self.engine.step(batches)
        return self._released_P, self.engine.released().get("unclipped_fraction")


def _pair(one: Watched, other: Watched, units: list[Unit], left_out: int, plan: Plan) -> Pair:
    norm, divisor = one.engine.max_grad_norm, plan.schedule.expected_batch_size
    slots: list[Unit | None] = list(units)
    larger = physical_batches(range(len(slots)), slots, SHAPES, 0)
    slots[left_out] = None
    smaller = physical_batches(range(len(slots)), slots, SHAPES, 0)
    sum_P, other_sum_P = one.engine.clipped_sum(larger)[0].double(), other.engine.clipped_sum(smaller)[0].double()
    (released_P, count), (other_released_P, other_count) = one.step(larger), other.step(smaller)
    other.engine.max_grad_norm = one.engine.max_grad_norm  # with adaptive clipping it follows the released count
    size = len(released_P)
    # Each of the two is rounded to float32 twice: as a sum, and when it is divided.
    rounding = 2.0**-22 * float(released_P.norm() + other_released_P.norm()) * divisor / norm
    released = float((released_P - other_released_P).norm()) * divisor / norm
    moved = None
    if count is not None and other_count is not None:
        exact = float((sum_P[size:] - other_sum_P[size:]).abs())
        in_release = abs(count - other_count) * divisor - 2.0**-22 * (abs(count) + abs(other_count) + 1) * divisor
        moved = float(np.maximum(exact, in_release))
    return Pair(
        units=len(units),
        rows=len(units[left_out].sequences),
        physical_batches=len(larger),
        sum_difference=float((sum_P[:size] - other_sum_P[:size]).norm()) / norm,
        released_difference=float(np.maximum(0.0, released - rounding)),  # where Python's max forgets a nan
        count_difference=moved,
    )


def _model(config: RunConfig, generator: np.random.Generator) -> nn.Module:
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    adapter: LoraConfig | FrozenConfig = config.adapter
    if isinstance(adapter, LoraConfig):
        adapter = adapter.model_copy(update={"r": min(adapter.r, 4), "target_modules": "auto", "modules_to_save": []})
    net: nn.Module = loading.shrunken(config.model_copy(update={"adapter": adapter}), LlamaForCausalLM(shape), CPU)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:  # LoRA starts with a factor of zero, which hides the other's gradient
                noise = generator.normal(0.0, 0.1, tuple(parameter.shape))
                parameter.add_(torch.tensor(noise, dtype=parameter.dtype))
    return net


def _units(count: int, generator: np.random.Generator, several: bool) -> list[Unit]:
    """Random tokens; one row each, or one to four; the first third of a row is a prompt."""
    units = []
    for _ in range(count):
        rows = []
        for _ in range(int(generator.integers(1, 5)) if several else 1):
            length = int(generator.integers(3, 16))
            ids = tuple(int(token) for token in generator.integers(0, VOCABULARY, length))
            mask = tuple(position > 0 and position >= length // 3 for position in range(length))
            rows.append(TokenSequence(ids, mask, sum(mask)))
        units.append(Unit(tuple(rows)))
    return units
