"""What trains, and the mechanism that trains it: model, optimizer, precision, sampler, and the engine, checked.

Comes in: a decision, a device. Goes out: a model in training mode, a sampler, an engine that passed its self-check. Must not see
data: a schedule that followed the loss would be outside the guarantee.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from dpllm.errors import NotBatchInvariant
from dpllm.model import adapters, loading, processes
from dpllm.model.processes import shared
from dpllm.privacy import guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, StepEngine
from dpllm.privacy.noise import GaussianNoise, os_entropy
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import CyclicSchedule, PoissonSampler
from dpllm.privacy.schedule import Packing
from dpllm.privacy.selfcheck import Checked
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig, TrainConfig
from dpllm.run.promise import Decision

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def make_optimizer(train: TrainConfig, net: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer, over what trains."""
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    rate, decay = train.learning_rate, train.weight_decay
    if train.optimizer == "sgd":
        return torch.optim.SGD(trainable, lr=rate, weight_decay=decay, momentum=train.momentum)
    return torch.optim.AdamW(trainable, lr=rate, weight_decay=decay)


def is_low(net: Any, precision: torch.dtype | None) -> bool:
    """Whether anything is computed or held in less than float32; ``precision`` is that of autocast."""
    if precision is not None or getattr(getattr(net, "config", None), "quantization_config", None) is not None:
        return True
    return any(p.is_floating_point() and p.dtype != torch.float32 for p in net.parameters())


def build_model(decision: Decision, device: torch.device, console: Console) -> tuple[Any, dict[str, float] | None]:
    """The model with what trains, and the rates of dropout that were set to zero; says both."""
    config = decision.config
    net = loading.build(config, device, decision.weights)
    guards.check_model(net)
    loading.check_length(config, net)
    total = sum(parameter.numel() for parameter in net.parameters())
    console.print(adapters.trainable_text(adapters.trainable_table(net), total), markup=False, highlight=False)
    dropout_off = loading.without_dropout(net) if decision.plan else None
    if dropout_off:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout_off.items())
        console.print(
            "The base model's dropout is off, because its masks would make the contribution of one unit depend on the "
            f"others: {rates}"
        )
    auto = config.adapter.method == "lora" and config.adapter.target_modules == "auto"
    if apart := adapters.left_out(net) if auto else []:
        what = "routers, experts and other layers for which adapters or per-example gradients are not possible"
        console.print(f"adapter.target_modules: auto leaves out {', '.join(apart)}: {what}.")
    if adapters.untied(net):
        console.print(
            "The base model ties its head to its input embedding; a copy of it trains, so the two are untied."
        )
    return net, dropout_off


def make_engine(
    decision: Decision,
    net: Any,
    optimizer: torch.optim.Optimizer,
    size: int,
    device: torch.device,
    precision: torch.dtype | None,
    packing: Packing,
    groups: int = 0,
) -> tuple[PoissonSampler, StepEngine, Autocast]:
    """Sampler and engine, with keys that no rank but these knows, and the context of a forward pass; ``size`` is N.

    ``precision`` is that of autocast, the same on all ranks; None: float32. ``groups`` is the key of ``CyclicSchedule``, the same
    as before where a run goes on.
    """
    privacy, schedule = decision.config.privacy, decision.schedule
    assert schedule is not None
    seed = privacy.insecure_seed
    noise_key, sampling_key = shared((os_entropy(), os_entropy()) if seed is None else (2 * seed, 2 * seed + 1))
    autocast: Autocast = partial(torch.autocast, device.type, dtype=precision) if precision else contextlib.nullcontext
    engine = StepEngine(
        net,
        optimizer,
        schedule,
        decision.plan,
        packing,
        noise=GaussianNoise(noise_key, device, secure=privacy.secure_noise),
        autocast=autocast,
        loss_scale=FP16_LOSS_SCALE if precision == torch.float16 else 1.0,
    )
    engine.pairs = derived.pair_loss(decision.config)
    charged = decision.resumed.charged if decision.resumed else 0
    turns = CyclicSchedule(decision.plan.bands if decision.plan else 1, groups, charged)
    return PoissonSampler(schedule, size, sampling_key, turns), engine, autocast


def check_passes(
    engine: StepEngine, vocabulary: int, *, pad_id: int, low: bool = False, console: Console | None = None
) -> Checked:
    """Checks the engine against brute-force autograd, and that no unit is rounded by its place or its company.

    Where a kernel does round so, passes have another length; where that does not help, each example has a pass of its own.

    Args:
        engine: As it will train; its packing may change.
        vocabulary: Tokens are drawn below this.
        pad_id: As in training.
        low: Something is computed or held in less than float32.
        console: Where the outcome is said.

    Returns:
        What the check found.

    Raises:
        Refused: The engine computes something else, in more than rounding; or ranks round differently.
    """
    console, first = console or Console(quiet=True), engine.packing
    tries = [*filter(None, [first.half()]), replace(first, alone=True)]
    checked, reason = Checked(0.0), ""
    while True:
        failed = False
        try:
            checked = engine.self_check(vocabulary, low, pad_id)
        except NotBatchInvariant as refusal:
            failed, reason = True, str(refusal).partition(", so that ")[0]
        if not processes.totals(failed)[0]:  # all ranks try alike
            break
        engine.repack(tries.pop(0))
    if engine.packing != first and reason:
        console.print(f"Passes of {engine.packing} in this run, which is slower: {reason}.", markup=False)
    processes.check_rounding({"the gradient sum of a pass of synthetic tokens": checked.digest})
    console.print(f"Self-check against brute-force autograd: largest relative error {checked.error:.1e}")
    return checked


def check_in_float32(config: RunConfig, net: Any, plan: Plan, device: torch.device, packing: Packing) -> None:
    """The self-check once more, on a small float32 model of the same architecture: low precision hides small errors.

    How kernels round is asked of the model that trains, since those of another size and precision are others.
    """
    small = loading.shrunken(config, net, device)
    noise = GaussianNoise(0, device)  # it draws none
    engine = StepEngine(small, make_optimizer(config.train, small), plan.schedule, plan, packing, noise=noise)
    engine.pairs = derived.pair_loss(config)
    with contextlib.closing(engine):
        engine.self_check(loading.SHRUNKEN_VOCABULARY, company=False)
