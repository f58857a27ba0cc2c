"""What trains, and the mechanism that trains it: model, optimizer, precision, sampler, and the engine, checked.

Comes in: a decision, a device. Goes out: a model in training mode, a sampler, an engine that passed its self-check. Must not see
data: a schedule that followed the loss would be outside the guarantee.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

from dpllm.errors import RoundsByCompany
from dpllm.model import adapters, loading, processes
from dpllm.model.processes import shared
from dpllm.privacy import guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, StepEngine
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan
from dpllm.privacy.rules import Form
from dpllm.privacy.sampling import PoissonSampler
from dpllm.privacy.schedule import Shape
from dpllm.privacy.selfcheck import Checked
from dpllm.privacy.stream import Turns, os_entropy
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig, TrainConfig
from dpllm.run import selfcheck_cache
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
    groups: int = 0,
) -> tuple[PoissonSampler, StepEngine, Autocast]:
    """Sampler and engine, with keys that no rank but these knows, and the context of a forward pass; ``size`` is N.

    ``precision`` is that of autocast, the same on all ranks; None: float32. ``groups`` is the key of ``sampling.Turns``, the same
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
        form=Form(decision.config.data.max_length),
        noise=GaussianNoise(noise_key, device, secure=privacy.secure_noise),
        autocast=autocast,
        loss_scale=FP16_LOSS_SCALE if precision == torch.float16 else 1.0,
    )
    engine.pairs = derived.pair_loss(decision.config)
    charged = decision.resumed.charged if decision.resumed else 0
    turns = Turns(decision.plan.bands if decision.plan else 1, groups, charged)
    return PoissonSampler(schedule, size, sampling_key, turns), engine, autocast


def check_rows(
    engine: StepEngine,
    vocabulary: int,
    shapes: Callable[[int], tuple[Shape, ...]],
    rows: int,
    *,
    pad_id: int,
    low: bool = False,
    kept: selfcheck_cache.Kept | None = None,
    console: Console | None = None,
) -> tuple[tuple[Shape, ...], Checked]:
    """Checks the engine against brute-force autograd, and that no row is rounded by its company.

    Args:
        engine: As it will train.
        vocabulary: Tokens are drawn below this.
        shapes: From the most rows of a physical batch to their shapes.
        rows: How many there shall be, at most.
        pad_id: As in training.
        low: Something is computed or held in less than float32.
        kept: Where a pass is kept; None: nowhere, and every check is whole.
        console: Where the outcome is said.

    Returns:
        The shapes that run, with fewer rows where a kernel rounds rows by their company; and what the check found.

    Raises:
        Refused: The engine computes something else, in more than rounding; or ranks round differently.
    """
    console, chosen = console or Console(quiet=True), shapes(rows)
    under = kept.key(chosen) if kept else None
    known = {} if kept is None or kept.fresh else selfcheck_cache.read(under) or {}
    same = processes.shared(known) == known  # asked on every rank, whatever it holds
    same = same and [shape.length for shape in known] == [shape.length for shape in chosen]
    if processes.totals(not same)[0]:  # all ranks check alike
        known = {}
    chosen = tuple(known) or chosen  # the shapes that passed in place of these
    checked, passed, reasons = Checked(0.0), dict[Shape, str](), list[str]()
    while True:
        place = len(chosen)
        try:
            checked = engine.self_check(vocabulary, chosen, low, pad_id, known=known, passed=passed)
            passed = checked.digests
        except RoundsByCompany as refusal:
            place, passed = refusal.place, refusal.passed
            reasons.append(str(refusal).partition(", so ")[0])
        if (place := processes.least(place)) == len(chosen):
            break
        known = {}  # of other shapes than those that run now
        chosen = _with_fewer(chosen, place, 1 if engine.pairs is None else 2)
    if some := ", ".join(map(str, chosen)) if reasons else "":
        console.print(f"Physical batches have fewer rows in this run ({some} tokens), which is slower: {reasons[0]}.")
    facts = {f"the gradient sum of a physical batch of {shape} synthetic tokens": one for shape, one in passed.items()}
    processes.check_rounding(facts)
    if not checked.known:
        selfcheck_cache.keep(under, checked.digests)
    earlier = " (that other rows do not change a row's rounding: shown by an earlier start)" if checked.known else ""
    console.print(f"Self-check against brute-force autograd: largest relative error {checked.error:.1e}{earlier}")
    return chosen, checked


def _with_fewer(shapes: tuple[Shape, ...], place: int, least: int) -> tuple[Shape, ...]:
    """Fewer rows in the shape at a place, on all ranks where one rank's kernels ask for it; for -1, in all shapes the least."""
    if place < 0:
        return tuple(shape._replace(rows=least) for shape in shapes)
    return *shapes[:place], shapes[place].lower, *shapes[place + 1 :]


def check_in_float32(config: RunConfig, net: Any, plan: Plan, device: torch.device, shapes: Sequence[Shape]) -> None:
    """The self-check once more, on a small float32 model of the same architecture: low precision hides small errors."""
    small = loading.shrunken(config, net, device)
    engine = StepEngine(
        small,
        make_optimizer(config.train, small),
        plan.schedule,
        plan,
        form=Form(config.data.max_length),
        noise=GaussianNoise(0, device),  # it draws none
    )
    engine.pairs = derived.pair_loss(config)
    with contextlib.closing(engine):
        engine.self_check(loading.SHRUNKEN_VOCABULARY, [shape._replace(rows=min(8, shape.rows)) for shape in shapes])
