"""A training step without privacy, with dpllm, and with Opacus or fastDP, for scripts/bench_step and bench_processes.

Comes in: a shape and a method. Goes out: one model with random weights, and for each variant a function that takes a step of it.

Shape suffixes: R sequences of a physical batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional

from dpllm.model.adapters import unfreeze
from dpllm.model.memory import packing_of_model
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.packing import Pass, passes_of
from dpllm.privacy.plan import Plan
from dpllm.privacy.schedule import Packing, TokenSequence, Unit
from dpllm.recipe.config import FrozenConfig

warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
warnings.filterwarnings("ignore", message="`gradient_checkpointing_")  # renamed during transformers 5

BATCH_SIZE, MAX_GRAD_NORM, SIGMA = 8, 1.0, 1.0
LEARNING_RATE = 1e-6  # small, because the variants share the weights
KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size")
KEYS += ("num_attention_heads", "num_key_value_heads", "vocab_size")
SHAPES: dict[str, dict[str, Any]] = {  # of Llama-like models
    "tiny": dict(zip(KEYS, (2, 32, 48, 2, 2, 64), strict=True)),
    "cpu": dict(zip(KEYS, (6, 512, 1376, 8, 8, 32_000), strict=True)),
    "body": dict(zip(KEYS, (6, 512, 1376, 8, 8, 2_048), strict=True)),  # a small head: the layers dominate
    "1b": {**dict(zip(KEYS, (16, 2048, 8192, 32, 8, 128_256), strict=True)), "tie_word_embeddings": True},  # Llama 3.2
    "8b": dict(zip(KEYS, (32, 4096, 14_336, 32, 8, 128_256), strict=True)),  # Llama 3.1
}


@dataclass(frozen=True)
class Bench:
    """What all variants share: one model, one optimizer over its trainable parameters, one Plan."""

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    plan: Plan


@dataclass(frozen=True)
class Padded:
    """Rows padded to one length, the input of every variant but dpllm."""

    input_ids_RT: Tensor
    target_RT: Tensor  # -100 at positions without a target
    denominator_R: Tensor


@dataclass(frozen=True)
class Batches:
    """One logical batch, in the form that each variant reads."""

    padded: list[Padded]  # for every variant but dpllm
    passes: list[Pass]
    packing: Packing  # of the passes


Step = Callable[[Batches], Any]


def build(shape: str, method: str, device: torch.device) -> Bench:
    """A model with random weights: trainable ones in float32, the base in the precision that dpllm uses."""
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
            if not parameter.any():  # LoRA's B: with zeros every gradient of A is zero, and some numbers are denormal
                parameter.normal_(std=0.02)
    plan = Plan.model_construct(  # only what the engine reads
        unit="example",
        max_examples_per_unit=None,
        sampling="unit",
        dataset_size=1000,
        canary_slots=0,
        expected_batch_size=BATCH_SIZE,
        num_steps=1,
        noise_multiplier=SIGMA,
        coefficients=(),
        clipping="flat",
        max_grad_norm=MAX_GRAD_NORM,
    )
    autocast = partial(torch.autocast, "cuda", dtype=torch.bfloat16) if cuda else contextlib.nullcontext
    return Bench(model, torch.optim.AdamW(trains, lr=LEARNING_RATE), device, autocast, plan)


def random_batches(
    bench: Bench, shape: str, rows: int, lengths: Sequence[int], longest: int, tokens_per_pass: int | None = None
) -> Batches:
    """The same rows of random tokens for all variants: in batches padded to their longest row, and in dpllm's passes."""
    units, vocabulary = random_units(shape, lengths), SHAPES[shape]["vocab_size"]
    packing = packing_of_model(bench.model, len(units), longest, vocabulary, bench.device, tokens_per_pass)
    padded = [collate(units[start : start + rows], bench.device) for start in range(0, len(units), rows)]
    passes = [some.to(bench.device) for some in passes_of(range(len(units)), units, packing, 0)]
    return Batches(padded, passes, packing)


def warm_up_of(bench: Bench, shape: str, batches: Batches) -> Batches:
    """One short row, with the packing of ``batches``."""
    units = random_units(shape, [8])
    passes = [some.to(bench.device) for some in passes_of([0], units, batches.packing, 0)]
    return Batches([collate(units, bench.device)], passes, batches.packing)


def mixed_lengths(longest: int, number: int) -> list[int]:
    """Lengths from an eighth of the longest to the longest, evenly spaced."""
    return [longest // 8 + (longest - longest // 8) * place // (number - 1) for place in range(number)]


def collate(units: Sequence[Unit], device: torch.device) -> Padded:
    rows = [row for unit in units for row in unit.sequences]
    shape = len(rows), max(len(row.input_ids) for row in rows)
    ids_RT = torch.zeros(shape, dtype=torch.long)
    target_RT = torch.full(shape, -100)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        ids_RT[number, :length] = torch.tensor(row.input_ids)
        target_RT[number, 1:length] = ids_RT[number, 1:length]
    denominator_R = torch.tensor([float(row.denominator) for row in rows])
    return Padded(ids_RT.to(device), target_RT.to(device), denominator_R.to(device))


def random_units(shape: str, lengths: Sequence[int]) -> list[Unit]:
    """Units of random tokens; all but the first token are targets."""
    generator, vocabulary = torch.Generator().manual_seed(len(lengths)), SHAPES[shape]["vocab_size"]

    def unit(length: int) -> Unit:
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        return Unit((TokenSequence(tuple(ids), (False,) + (True,) * (length - 1), length - 1),))

    return [unit(length) for length in lengths]


def losses(bench: Bench, batch: Padded) -> Tensor:
    """loss_R: the mean over the target tokens of each row, in nats."""
    with bench.autocast():
        logits_RTV = bench.model(input_ids=batch.input_ids_RT, use_cache=False).logits
    scores_NV, target_N = logits_RTV[:, :-1].flatten(0, 1).float(), batch.target_RT[:, 1:].flatten()
    nll_N = functional.cross_entropy(scores_NV, target_N, reduction="none")
    return nll_N.view(len(batch.denominator_R), -1).sum(dim=1) / batch.denominator_R


@contextlib.contextmanager
def plain(bench: Bench, *, loss_of_transformers: bool) -> Iterator[Step]:
    """The baselines: plain autograd of the same losses, or of the mean over tokens as transformers computes it."""

    def backward(batch: Padded) -> None:
        if not loss_of_transformers:
            return (losses(bench, batch).sum() / BATCH_SIZE).backward()
        with bench.autocast():
            loss = bench.model(input_ids=batch.input_ids_RT, labels=batch.target_RT, use_cache=False).loss
        return loss.backward()

    def step(batches: Batches) -> None:
        for batch in batches.padded:
            backward(batch)
        bench.optimizer.step()
        bench.optimizer.zero_grad(set_to_none=True)

    yield step


@contextlib.contextmanager
def with_engine(bench: Bench) -> Iterator[Step]:
    engines: list[StepEngine] = []

    def step(batches: Batches) -> None:
        if not engines:
            noise = GaussianNoise(2**100 + 7, bench.device)
            arguments = bench.model, bench.optimizer, bench.plan.schedule, bench.plan, batches.packing
            engines.append(StepEngine(*arguments, noise=noise, autocast=bench.autocast))
        elif engines[0].packing != batches.packing:
            engines[0].repack(batches.packing)
        engines[0].step(batches.passes)

    try:
        yield step
    finally:
        for engine in engines:
            engine.close()


@contextlib.contextmanager
def fastdp(bench: Bench) -> Iterator[Step]:
    """The fastDP of --fastdp with its defaults: MixOpt, one clipping factor for all layers. It does not train norms."""
    import fastDP  # type: ignore[import-not-found]

    promise: Any = {"batch_size": BATCH_SIZE, "sample_size": 1000, "epochs": 1, "noise_multiplier": SIGMA}
    with contextlib.redirect_stdout(None):
        engine = fastDP.PrivacyEngine(bench.model, loss_reduction="sum", clipping_fn="Abadi", **promise)
        engine.attach(bench.optimizer)

    def step(batches: Batches) -> None:
        for module in bench.model.modules():
            module.__dict__.pop("use_gc", None)  # fastDP chooses at the first batch, which is the short warm-up
        for batch in batches.padded:
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
    """Opacus with its defaults: its hooks and its optimizer, with skipped steps as in its BatchMemoryManager."""
    settings: Any = {"loss_reduction": "sum", "max_grad_norm": MAX_GRAD_NORM}
    promise: Any = {**settings, "noise_multiplier": SIGMA, "expected_batch_size": BATCH_SIZE}
    if ghost:
        hooks = GradSampleHooksFastGradientClipping(bench.model, strict=False, **settings)
        optimizer: Any = DPOptimizerFastGradientClipping(bench.optimizer, **promise)
    else:
        hooks = GradSampleHooks(bench.model, strict=False, loss_reduction="sum")
        optimizer = DPOptimizer(bench.optimizer, **promise)

    def step(batches: Batches) -> None:
        for number, batch in enumerate(batches.padded, start=1):
            loss_R = losses(bench, batch)
            if ghost:
                DPTensorFastGradientClipping(hooks, optimizer, loss_R, loss_reduction="sum").backward()
            else:
                loss_R.sum().backward()
            optimizer.signal_skip_step(do_skip=number < len(batches.padded))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    try:
        yield step
    finally:
        hooks.cleanup()


VARIANTS: dict[str, Callable[[Bench], contextlib.AbstractContextManager[Step]]] = {
    "non_private": partial(plain, loss_of_transformers=False),
    "hf_loss": partial(plain, loss_of_transformers=True),
    "dpllm": with_engine,
    "opacus_hooks": partial(opacus, ghost=False),
    "opacus_ghost": partial(opacus, ghost=True),
}
PEERS = {"fastdp": fastdp}  # if a checkout is given
LEFT_BEHIND = ("grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample", "_norm_sample", "norm_sample")


@contextlib.contextmanager
def attached(bench: Bench, name: str, *, checkpointing: bool, warm_up: Batches) -> Iterator[Step]:
    """One variant on the shared model, after a warm-up step on a short row."""
    reentrant = "opacus" in name
    if checkpointing:
        bench.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            bench.model.enable_input_require_grads()
    try:
        with {**VARIANTS, **PEERS}[name](bench) as step:
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
        for module in bench.model.modules():  # a failed step leaves these
            module.__dict__.pop("activations", None)
            module.__dict__.pop("max_batch_len", None)
