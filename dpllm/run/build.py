"""Builds the parts of a run: the model with its trainable parameters, the checked mechanism, and the training units.

Comes in: a decision, a device, rows. Goes out: the parts of a ``Prepared`` value, from which the loop runs. The mechanism is
built without data: a schedule that depended on the loss would be outside the guarantee.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.canaries.texts import ModelSource, encode_secret
from dpllm.errors import ConfigError, NotBatchInvariant, Refused
from dpllm.ledger.budgets import Reservation
from dpllm.model import adapters, loading, memory, processes
from dpllm.model.processes import shared
from dpllm.model.rewards import Examples
from dpllm.privacy import guards
from dpllm.privacy.engine import FP16_LOSS_SCALE, StepEngine
from dpllm.privacy.loss import Autocast
from dpllm.privacy.noise import GaussianNoise, os_entropy
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import CyclicSchedule, PoissonSampler
from dpllm.privacy.schedule import Packing, Schedule, TokenSequence, Unit
from dpllm.privacy.selfcheck import Checked
from dpllm.recipe.config import RunConfig, TrainConfig
from dpllm.run.checkpoint import ResumeState
from dpllm.run.directory import RunDir
from dpllm.run.projections import read_groups
from dpllm.run.promise import Decision
from dpllm.run.screen import Samples
from dpllm.text import data, tokens
from dpllm.text.data import Rows, each_row
from dpllm.text.layouts import Row

SLOW = 3.0  # times the float32 time of a product, from which a run says so


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that exists before the first gradient."""

    decision: Decision  # recipe, Plan, schedule and lineage
    run: RunDir
    units: tokens.Units  # what is sampled, canary slots last
    held_out: list[TokenSequence]
    examples: Examples  # the units and the evaluation rows, as the objective reads them
    samples: Samples  # prompts of the texts generated during training
    tokenizer: Any
    model: Any  # in training mode, on its device
    optimizer: torch.optim.Optimizer
    engine: StepEngine  # hooked into the model, and checked
    autocast: Autocast
    sampler: PoissonSampler
    reservation: Reservation
    checked: Checked  # what the self-check found
    notes: list[str]  # notes that the card must show
    dropout_off: dict[str, float] | None  # rates that were set to zero; None without privacy, where they stay

    @property
    def config(self) -> RunConfig:
        """The recipe, with the detected format."""
        return self.decision.config

    @property
    def plan(self) -> Plan | None:
        """The run's Plan; None without differential privacy."""
        return self.decision.plan

    @property
    def first_step(self) -> int:
        """Number of steps taken before a resume."""
        return self.decision.resumed.charged if self.decision.resumed else 0

    @property
    def schedule(self) -> Schedule:
        """Sampling rate, steps, size."""
        assert self.decision.schedule is not None
        return self.decision.schedule


def make_optimizer(train: TrainConfig, net: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer, over the trainable parameters."""
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    rate, decay = train.learning_rate, train.weight_decay
    if train.optimizer == "sgd":
        return torch.optim.SGD(trainable, lr=rate, weight_decay=decay, momentum=train.momentum)
    return torch.optim.AdamW(trainable, lr=rate, weight_decay=decay)


def is_low(net: Any, precision: torch.dtype | None) -> bool:
    """Whether anything is computed or stored in less than float32; ``precision`` is that of autocast."""
    if precision is not None or getattr(getattr(net, "config", None), "quantization_config", None) is not None:
        return True
    return any(p.is_floating_point() and p.dtype != torch.float32 for p in net.parameters())


def slow_precision(net: Any, precision: torch.dtype | None, device: torch.device) -> str | None:
    """A warning if this CPU computes far slower in the run's precision than in float32; products of both are timed.

    A CPU without instructions for bfloat16 or float16 emulates them. ``precision`` is that of autocast.
    """
    key, dtype = "train.precision", precision
    if dtype is None:
        key, dtype = "model.dtype", next((p.dtype for p in net.parameters() if not p.requires_grad), torch.float32)
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return None
    ratio = _product_seconds(dtype) / _product_seconds(torch.float32)
    if ratio < SLOW:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"on this CPU a product in {name} takes {ratio:.0f} times as long as in float32, which slows every step. Type --{key} "
        f"{'fp32' if precision else 'float32'}."
    )


def _product_seconds(dtype: torch.dtype) -> float:
    """The least of three times of a product of 0.13 GFLOP."""
    left, right, times = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype), []
    for _ in range(3):
        begun = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - begun)
    return min(times)


def build_model(decision: Decision, device: torch.device, console: Console) -> tuple[Any, dict[str, float] | None]:
    """The model with its trainable parameters, and the dropout rates that were set to zero; prints both."""
    config = decision.config
    net = loading.build(config, device, decision.weights)
    guards.check_model(net)
    loading.check_length(config, net)
    total = sum(parameter.numel() for parameter in net.parameters())
    console.print(adapters.trainable_text(adapters.trainable_table(net), total), markup=False, highlight=False)
    slow = slow_precision(net, loading.precision_of(config.train, device), device)
    if slow and not decision.resumed:  # a resumed run keeps its precision
        console.print(f"Beware: {slow}", markup=False, highlight=False, soft_wrap=True)
    dropout_off = loading.without_dropout(net) if decision.plan else None
    if dropout_off:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout_off.items())
        console.print(
            "The base model's dropout is off, because its masks would make one unit's contribution depend on the "
            f"others: {rates}"
        )
    auto = config.adapter.method == "lora" and config.adapter.target_modules == "auto"
    if apart := adapters.left_out(net) if auto else []:
        layers = "routers, experts and other layers for which adapters or per-example gradients are not possible"
        console.print(f"adapter.target_modules: auto leaves out {', '.join(apart)}: {layers}.")
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
    """Sampler and engine, with fresh secret keys that all ranks share, and the context of a forward pass; ``size`` is N.

    ``precision`` is that of autocast, the same on all ranks; None: float32. ``groups`` is the key of ``CyclicSchedule``, which a
    resumed run keeps.
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
    engine.example_loss = decision.config.objective.loss()
    charged = decision.resumed.charged if decision.resumed else 0
    turns = CyclicSchedule(decision.plan.bands if decision.plan else 1, groups, charged)
    return PoissonSampler(schedule, size, sampling_key, turns), engine, autocast


def check_engine(
    decision: Decision,
    net: Any,
    engine: StepEngine,
    vocabulary: int,
    pad_id: int,
    precision: torch.dtype | None,
    console: Console,
) -> Checked:
    """Rehearses memory and runs the self-check, which may change the passes; without a Plan there is no self-check."""
    config, plan, device = decision.config, decision.plan, PartialState().device
    checked = Checked(0.0)
    memory.rehearse(engine, config, vocabulary, device)
    if plan is not None:
        low = is_low(net, precision)
        checked = check_passes(engine, vocabulary, pad_id=pad_id, low=low, console=console)
        if low:
            check_in_float32(config, net, plan, device, engine.packing)
    return checked


def check_passes(
    engine: StepEngine, vocabulary: int, *, pad_id: int, low: bool = False, console: Console | None = None
) -> Checked:
    """Checks the engine against brute-force autograd, and that a unit's rounding depends on neither its position nor other units.

    If a kernel does round so, passes get another length; if that does not help, each example gets its own pass.

    Args:
        engine: The one that will train; its packing may change.
        vocabulary: Synthetic tokens are drawn below this.
        pad_id: The one of training.
        low: Whether anything is computed or stored in less than float32.
        console: Where the outcome is printed.

    Returns:
        The outcome of the check.

    Raises:
        Refused: The engine's results differ by more than rounding, or ranks round differently.
    """
    console, first = console or Console(quiet=True), engine.packing
    tries = [*filter(None, [first.half()]), replace(first, alone=True)]
    checked, reason = Checked(0.0), ""
    while True:
        failed = False
        try:
            checked = engine.self_check(vocabulary, low, pad_id)
        except NotBatchInvariant as refusal:
            failed, reason = True, str(refusal).partition(", so ")[0]
        if not processes.totals(failed)[0]:  # all ranks make the same tries
            break
        engine.repack(tries.pop(0))
    if engine.packing != first and reason:
        console.print(f"Passes of {engine.packing} in this run, which is slower: {reason}.", markup=False)
    processes.check_rounding({"the gradient sum of a pass of synthetic tokens": checked.digest})
    console.print(f"Self-check against brute-force autograd: largest relative error {checked.error:.1e}")
    return checked


def check_in_float32(config: RunConfig, net: Any, plan: Plan, device: torch.device, packing: Packing) -> None:
    """Repeats the self-check on a small float32 model of the same architecture, because low precision hides small errors.

    The rounding of kernels is checked only on the model that trains: another size or precision uses other kernels.
    """
    small = loading.shrunken(config, net, device)
    noise = GaussianNoise(0, device)  # never used
    engine = StepEngine(small, make_optimizer(config.train, small), plan.schedule, plan, packing, noise=noise)
    engine.example_loss = config.objective.loss()
    with contextlib.closing(engine):
        engine.self_check(loading.SHRUNKEN_VOCABULARY, batch_invariance=False)


def draw_canaries(config: RunConfig, run: RunDir, resume: bool, tokenizer: Any, device: torch.device) -> CanaryPlan:
    """A resumed run's canaries, those planned in the directory for a run that has not begun (a shadow run), or new ones.

    Canaries of an earlier run in the same directory are never reused: what that run published reveals their coins.
    """
    settings = config.audit
    if resume:
        return canaries.load(run.canaries)
    # If only labels are private, a canary tests the guarantee of a label; leaving an example out is another relation.
    labels = None if config.privacy.enabled else config.data.label_epsilon
    as_planted: dict[str, Any] = {"answers": config.objective.rows_each, "label_epsilon": labels}
    if run.canaries.exists() and not run.config.exists():
        return canaries.check_fits(canaries.load(run.canaries), settings, run.canaries, **as_planted)
    # Some kinds of canaries load the base model here; it is freed before the model that trains is built.
    source, gradient = ModelSource(config, tokenizer, device), settings.gradient_canaries
    return canaries.plan_canaries(settings.texts, source=source, gradient=gradient, **as_planted)


def read_again(decision: Decision, cache: Path) -> Rows:
    """Reads in another process the rows that rank 0 decided about; Refused if they have changed."""
    settings = decision.config.data
    table = data.load_table(settings.train, settings, settings.train_split, cache)
    assert decision.subject is not None
    if table.digest != decision.subject.digest:
        raise Refused(
            f"data.train ({settings.train}) changed while the run was starting, so the guarantee would be about other people. "
            "Start again, and do not change the file while it starts."
        )
    return Rows(table, data.sampled_rows(table, settings), data.load_held_out(settings, cache))


def tokenised_units(
    decision: Decision, rows: Rows, tokenizer: Any, planted: CanaryPlan | None, run: RunDir
) -> tokens.Units:
    """The tokenised units, followed by the slots of all canaries."""
    settings, table = decision.config.data, rows.table
    units = tokens.make_units(table, rows.groups, tokenizer, settings, run.private / "cache")
    if planted is not None:
        scored = [  # an error in the audit would come too late
            sum(encode_secret(answer, table.format, tokenizer, settings)[0].loss_mask)
            for candidate in (*planted.canaries, *planted.references)
            for answer in candidate.answers
        ]
        if len(scored) > canaries.MOST_CANARIES or sum(scored) > canaries.MOST_TOKENS:
            raise ConfigError(
                f"audit.canaries: {len(scored):,} canaries with {sum(scored):,} tokens to score are more than the "
                f"{canaries.MOST_CANARIES:,} and {canaries.MOST_TOKENS:,} that dpllm verify reads, so no card could state the "
                "audit. Plant fewer, or shorter ones, and draw fewer references."
            )
        slots: list[Unit | None] = []
        for slot in canaries.slots(planted, settings):
            examples = [Row(canary.example(table.format)) for canary in slot]
            slots += tokens.encode_units([examples], table.format, tokenizer, settings) if examples else [None]
        units = units.with_slots([*slots, *[None] * len(planted.gradient_coins)])
    if decision.resumed and decision.resumed.units != units.digest:
        raise Refused(
            f"{run.root}: data.train now holds other units than the run began with (their rows, owners or order), so its steps "
            "would be charged to the wrong people. Restore the file, or start anew."
        )
    return units


def held_out_tokens(config: RunConfig, table: data.Table | None, tokenizer: Any) -> list[TokenSequence]:
    """The evaluation rows as tokens; empty if the recipe names none."""
    if table is None:
        return []
    units = tokens.iter_units(each_row(table.rows), table.format, tokenizer, config.data, name=table.name)
    return [sequence for unit in units for sequence in unit.sequences]


def vocabulary_of(
    config: RunConfig,
    net: Any,
    tokenizer: Any,
    units: Sequence[Unit | None],
    held_out: Sequence[TokenSequence],
) -> int:
    """The number of tokens that both tokenizer and model have. Gemma 3's tokenizer has one more, for images, never in text."""
    embedded, made = int(net.get_input_embeddings().weight.shape[0]), len(tokenizer)
    sequences = itertools.chain((sequence for unit in units if unit for sequence in unit.sequences), held_out)
    if made > embedded and any(max(sequence.input_ids) >= embedded for sequence in sequences):
        raise ConfigError(
            f"{config.model.name_or_path}: the tokenizer has {made} tokens but the model only {embedded} embeddings, and the "
            "data contain tokens without one. Use the tokenizer that the model was trained with, or extend the model with "
            f"model.resize_token_embeddings({made}), save it, and name that directory."
        )
    return min(embedded, made)


def groups_key(config: RunConfig, run: RunDir, plan: Plan | None, resumed: ResumeState | None) -> int:
    """The secret key of the groups of banded noise, drawn once for a run; 0 if there is only one group."""
    if plan is None or not plan.coefficients:
        return 0
    if resumed is None:
        seed = config.privacy.insecure_seed
        return os_entropy() if seed is None else seed
    with contextlib.suppress(ConfigError):
        saved = read_groups(run.groups)
        if saved.bands == plan.bands and saved.digest == resumed.groups:
            return saved.key
    raise Refused(
        f"{run.groups}: does not hold the groups that the run began with, so a unit could take part twice in one cycle, which "
        "the accounting does not cover. Restore the file, or start anew with --overwrite."
    )
