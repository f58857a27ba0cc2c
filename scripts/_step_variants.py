"""What a step is without privacy, with dpllm, and with Opacus or fastDP: for scripts/bench_step and bench_processes.

Comes in: a shape and what trains. Goes out: one model on random weights, and a function for each variant that takes a step of it.

Shape suffixes: R sequences of a physical batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import transformers
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from peft import LoraConfig, get_peft_model
from torch import Tensor

from dpllm.model.adapters import unfreeze
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan, Schedule
from dpllm.privacy.rules import Form, Mode
from dpllm.privacy.sampling import PhysicalBatch, collate, physical_batches
from dpllm.privacy.schedule import shapes_of
from dpllm.recipe.config import FrozenConfig
from dpllm.text.data import TokenSequence, Unit

warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
warnings.filterwarnings("ignore", message="`gradient_checkpointing_")  # renamed within transformers 5

BATCH_SIZE, MAX_GRAD_NORM, SIGMA = 8, 1.0, 1.0
FIXED_TOKENS = 2048  # as dpllm.model.memory has it of GPUs
LEARNING_RATE = 1e-6  # the variants share the weights, which should stay where they are
KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size")
KEYS += ("num_attention_heads", "num_key_value_heads", "vocab_size")
SHAPES: dict[str, dict[str, Any]] = {  # of Llama-like models
    "tiny": dict(zip(KEYS, (2, 32, 48, 2, 2, 64), strict=True)),
    "cpu": dict(zip(KEYS, (6, 512, 1376, 8, 8, 32_000), strict=True)),
    "body": dict(zip(KEYS, (6, 512, 1376, 8, 8, 2_048), strict=True)),  # the head does not hide the layers
    "1b": {**dict(zip(KEYS, (16, 2048, 8192, 32, 8, 128_256), strict=True)), "tie_word_embeddings": True},  # Llama 3.2
    "8b": dict(zip(KEYS, (32, 4096, 14_336, 32, 8, 128_256), strict=True)),  # Llama 3.1
}


@dataclass(frozen=True)
class Bench:
    """What all variants share: one model, one optimizer over what trains, one promise."""

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    plan: Plan


Step = Callable[[Sequence[PhysicalBatch]], Any]


def build(shape: str, method: str, device: torch.device) -> Bench:
    """Random weights, with what trains in float32 and the base in the precision that dpllm trains it with."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[shape])
    cuda, lora = device.type == "cuda", method == "lora"
    with device:
        dtype = torch.bfloat16 if cuda and lora else torch.float32
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.requires_grad_(False)
        if lora:
            adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
            model = get_peft_model(model, adapter)
        else:
            unfreeze(model, FrozenConfig(method="frozen", last_blocks=2))
    trains = [parameter for parameter in model.to(device).train().parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trains:
            parameter.data = parameter.data.float()
            if not parameter.any():  # LoRA's B: zeros would make every gradient of A zero, and some numbers denormal
                parameter.normal_(std=0.02)
    unused: Any = {"delta": 1e-4, "epsilon": 8.0, "target_epsilon": 8.0, "accountant": {}, "event": {}}
    promise: Any = {"unit": "example", "max_examples_per_unit": None, "neighbouring_relation": "zero_out", **unused}
    schedule = Schedule(1000, 0, BATCH_SIZE, BATCH_SIZE / 1000, 1)
    plan = Plan(schedule, clipping="flat", noise_multiplier=SIGMA, max_grad_norm=MAX_GRAD_NORM, **promise)
    autocast = partial(torch.autocast, "cuda", dtype=torch.bfloat16) if cuda else contextlib.nullcontext
    return Bench(model, torch.optim.AdamW(trains, lr=LEARNING_RATE), device, autocast, plan)


Batches = tuple[list[PhysicalBatch], list[PhysicalBatch]]  # for every variant but dpllm, and for dpllm


def random_batches(shape: str, rows: int, length: int, count: int, device: torch.device) -> Batches:
    """Full rows of random tokens, the same for all."""
    units = random_units(shape, [length] * (rows * count))
    batches = [collate(units[start : start + rows], pad_id=0).to(device) for start in range(0, len(units), rows)]
    return batches, batches


def mixed_batches(shape: str, rows: int, length: int, number: int, device: torch.device) -> Batches:
    """Rows of an eighth of the length and more: sorted, in batches padded to their longest row; and in dpllm's own shapes."""
    units = random_units(
        shape, [length // 8 + (length - length // 8) * place // (number - 1) for place in range(number)]
    )
    plain = [collate(units[start : start + rows], pad_id=0) for start in range(0, number, rows)]
    ours = physical_batches(range(number), units, shapes_of(rows, number, length, fixed=FIXED_TOKENS), 0)
    return [batch.to(device) for batch in plain], [batch.to(device) for batch in ours]


def random_units(shape: str, lengths: Sequence[int]) -> list[Unit]:
    """Random tokens, learned from the second on."""
    generator, vocabulary = torch.Generator().manual_seed(len(lengths)), SHAPES[shape]["vocab_size"]

    def unit(length: int) -> Unit:
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        return Unit((TokenSequence(tuple(ids), (False,) + (True,) * (length - 1), length - 1),))

    return [unit(length) for length in lengths]


def losses(bench: Bench, batch: PhysicalBatch) -> Tensor:
    with bench.autocast():
        logits_RTV = bench.model(input_ids=batch.input_ids_RT, use_cache=False).logits
    return sequence_losses(logits_RTV, batch.input_ids_RT, batch.loss_mask_RT, batch.denominator_R)


@contextlib.contextmanager
def plain(bench: Bench, *, loss_of_transformers: bool) -> Iterator[Step]:
    """The baselines: plain autograd of the same losses, or of the mean over tokens that transformers computes."""

    def backward(batch: PhysicalBatch) -> None:
        if not loss_of_transformers:
            return (losses(bench, batch).sum() / BATCH_SIZE).backward()
        labels_RT = batch.input_ids_RT.masked_fill(~batch.loss_mask_RT, -100)
        with bench.autocast():
            loss = bench.model(input_ids=batch.input_ids_RT, labels=labels_RT, use_cache=False).loss
        return loss.backward()

    def step(batches: Sequence[PhysicalBatch]) -> None:
        for batch in batches:
            backward(batch)
        bench.optimizer.step()
        bench.optimizer.zero_grad(set_to_none=True)

    yield step


@contextlib.contextmanager
def with_engine(bench: Bench, mode: str) -> Iterator[Step]:
    how: Any = {"form": Form(512, cast(Mode, mode)), "noise": GaussianNoise(2**100 + 7, bench.device)}
    engine = StepEngine(bench.model, bench.optimizer, bench.plan.schedule, bench.plan, autocast=bench.autocast, **how)
    try:
        yield engine.step
    finally:
        engine.close()


@contextlib.contextmanager
def fastdp(bench: Bench) -> Iterator[Step]:
    """The fastDP of --fastdp, as it comes: MixOpt, one factor for all layers. It leaves norms untrained."""
    import fastDP  # type: ignore[import-not-found]

    promise: Any = {"batch_size": BATCH_SIZE, "sample_size": 1000, "epochs": 1, "noise_multiplier": SIGMA}
    with contextlib.redirect_stdout(None):
        engine = fastDP.PrivacyEngine(bench.model, loss_reduction="sum", clipping_fn="Abadi", **promise)
        engine.attach(bench.optimizer)

    def step(batches: Sequence[PhysicalBatch]) -> None:
        for module in bench.model.modules():
            module.__dict__.pop("use_gc", None)  # chosen at the first batch, which here is the short one of the warm-up
        for batch in batches:
            losses(bench, batch).sum().backward()
        with contextlib.redirect_stdout(None):
            bench.optimizer.step()  # type: ignore[call-arg]
        bench.optimizer.zero_grad(set_to_none=True)

    try:
        yield step
    finally:
        engine.detach()


@contextlib.contextmanager
def opacus(bench: Bench, *, ghost: bool) -> Iterator[Step]:
    """Opacus as it comes: its hooks and its optimizer, with the skipped steps of its BatchMemoryManager."""
    settings: Any = {"loss_reduction": "sum", "max_grad_norm": MAX_GRAD_NORM}
    promise: Any = {**settings, "noise_multiplier": SIGMA, "expected_batch_size": BATCH_SIZE}
    if ghost:
        hooks = GradSampleHooksFastGradientClipping(bench.model, strict=False, **settings)
        optimizer: Any = DPOptimizerFastGradientClipping(bench.optimizer, **promise)
    else:
        hooks = GradSampleHooks(bench.model, strict=False, loss_reduction="sum")
        optimizer = DPOptimizer(bench.optimizer, **promise)

    def step(batches: Sequence[PhysicalBatch]) -> None:
        for number, batch in enumerate(batches, start=1):
            loss_R = losses(bench, batch)
            if ghost:
                DPTensorFastGradientClipping(hooks, optimizer, loss_R, loss_reduction="sum").backward()
            else:
                loss_R.sum().backward()
            optimizer.signal_skip_step(do_skip=number < len(batches))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    try:
        yield step
    finally:
        hooks.cleanup()


VARIANTS: dict[str, Callable[[Bench], contextlib.AbstractContextManager[Step]]] = {
    "non_private": partial(plain, loss_of_transformers=False),
    "hf_loss": partial(plain, loss_of_transformers=True),
    "dpllm": partial(with_engine, mode="auto"),
    "opacus_hooks": partial(opacus, ghost=False),
    "opacus_ghost": partial(opacus, ghost=True),
}
PEERS = {"fastdp": fastdp}  # where a checkout is given
MODES = {f"dpllm_{mode}": partial(with_engine, mode=mode) for mode in ("per_sample", "ghost")}
LEFT_BEHIND = ("grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample", "_norm_sample", "norm_sample")


@contextlib.contextmanager
def attached(bench: Bench, name: str, *, checkpointing: bool, warm_up: Sequence[PhysicalBatch]) -> Iterator[Step]:
    """One variant on the shared model, after a step on short rows for what is made on first use."""
    reentrant = "opacus" in name
    if checkpointing:
        bench.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            bench.model.enable_input_require_grads()
    try:
        with {**VARIANTS, **PEERS, **MODES}[name](bench) as step:
            step(warm_up)
            yield step
    finally:
        if checkpointing:
            bench.model.gradient_checkpointing_disable()
            if reentrant:
                bench.model.disable_input_require_grads()
        for parameter in bench.model.parameters():
            parameter.grad = None
            for left in LEFT_BEHIND:
                parameter.__dict__.pop(left, None)
        for module in bench.model.modules():  # a step that failed half-way
            module.__dict__.pop("activations", None)
            module.__dict__.pop("max_batch_len", None)
