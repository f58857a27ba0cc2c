"""Estimates what a run needs (trainable parameters and memory) from the base model's configuration alone.

Comes in: the recipe and its schedule. Goes out: a ``Footprint``. The model is built on torch's meta device, where tensors have
shapes but no content: no weights are read. Must not see data.

Accuracy: 0.93 to 1.23 times the measured peak of real steps (a builtin model of 0.8 million parameters and a Llama of 6 blocks
and width 512, LoRA and frozen layers, float32, one thread of a busy shared CPU, 2026-11-22). It was not compared on a GPU. This
command prints the ratios:

    pytest --full -s -n 0 tests/run/test_footprint.py -k real_step
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm.errors import ConfigError, DpllmError, NotBatchInvariant
from dpllm.model import adapters, loading
from dpllm.model import memory as device_memory
from dpllm.privacy import guards
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.gradients import is_wide
from dpllm.privacy.loss import TokenLosses
from dpllm.privacy.packing import lay_out
from dpllm.privacy.schedule import Packing, TokenSequence, Unit
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.run.subject import Refusals
from dpllm.text.sources import asking_hub

UNCOUNTED = "this architecture's shapes depend on values, so memory cannot be estimated without weights"
GPU_MEMORY = dict.fromkeys(("a100", "h100"), int(80e9))  # bytes, of the larger variants


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step, by use. An estimate: allocators and kernels need more.

    d is the number of trainable coordinates.
    """

    weights: int  # of the frozen base, in its precision; 4 or 8 bits for each weight of a quantised linear layer
    trainable: int  # 4 d, in float32
    optimizer: int  # 8 d for AdamW (two moments in float32), 0 for SGD, 4 d with momentum
    sums: int  # 12 d: the clipped sum in float64, and its released form in float32
    # For the units of a pass: gradients held until their norms are known, and the factors of those that are formed twice.
    unit_gradients: int
    activations: int  # saved by the forward pass for the backward pass
    # The peak above that: a chunk of logits with a frozen head, else R T V logits and their gradients; with checkpointing, a
    # recomputed block if that is more.
    logits: int
    noise: int = 0  # 8 d (b - 1) with banded noise of b bands, on the first process only: earlier noise in float64

    @property
    def total(self) -> int:
        """The sum, as if everything were held at once."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Footprint:
    """Parameters and memory of a run."""

    kinds: tuple[tuple[str, int, int], ...]  # (kind of layer, tensors, parameters), trainable ones only
    trainable: int  # d, the number of coordinates that receive noise
    total: int  # parameters of the whole model
    memory: Memory | None  # at the peak of a step of one process; None if the model cannot run on shapes alone
    packing: Packing  # the passes for which memory is counted
    basis: str  # in words
    refusals: tuple[DpllmError, ...]  # errors that the model would raise


def footprint(config: RunConfig, bands: int = 1, gpu: str | None = None) -> Footprint:
    """Builds the model from its configuration and counts parameters and memory, with noise of ``bands`` bands.

    ``gpu`` is a name in ``GPU_MEMORY``, to estimate for that GPU; None: this machine.

    Raises:
        ConfigError: The base model's configuration is not found, the adapter matches no layer, or the GPU is unknown.
    """
    if gpu not in (None, *GPU_MEMORY):
        raise ConfigError(
            f"--device {gpu}: is not a known GPU. Type one of {', '.join(GPU_MEMORY)}, or leave --device out to plan for this "
            "machine."
        )
    device = torch.device("cuda" if gpu or torch.cuda.is_available() else "cpu")
    bf16 = gpu is not None and config.train.precision == "auto"
    dtype = torch.bfloat16 if bf16 else loading.precision_of(config.train, device) or torch.float32
    net, refusals = skeleton(config, dtype), Refusals()
    refusals.attempt(guards.check_model, net)
    refusals.attempt(loading.check_length, config, net)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in net.parameters()]
    packing = device_memory.packing_for(config, net, net.get_input_embeddings().weight.shape[0], device)
    while True:
        try:
            counted = _count(config, net, packing)
        except NotBatchInvariant:  # the self-check will find the same
            packing = replace(packing, alone=True)
            continue
        memory = _memory(config, net, counted, packing, device, bands) if counted else None
        smaller = packing.half() if config.train.tokens_per_pass == "auto" else None
        if memory is None or gpu is None or smaller is None or memory.total <= device_memory.budget(GPU_MEMORY[gpu]):
            break
        packing = smaller  # the rehearsal on that GPU would do the same
    basis = f"estimates: one process, full passes, rows of {config.data.max_length} tokens" if memory else UNCOUNTED
    return Footprint(
        kinds=tuple(adapters.trainable_table(net)),
        trainable=sum(size for size, trains in sizes if trains),
        total=sum(size for size, _ in sizes),
        memory=memory,
        packing=packing,
        basis=basis,
        refusals=tuple(refusals.errors),
    )


def skeleton(config: RunConfig, dtype: torch.dtype) -> Any:
    """The model as it trains, without content; a ConfigError if no configuration is found or the adapter matches no layer."""
    name = config.model.name_or_path
    try:
        with asking_hub(name):
            base = transformers.AutoConfig.from_pretrained(
                loading.source(name), revision=config.model.revision, trust_remote_code=False
            )
        with torch.device("meta"):
            net: Any = transformers.AutoModelForCausalLM.from_config(base, dtype=dtype)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and Hub errors here
        raise ConfigError(
            f"model.name_or_path {name!r}: no configuration of a causal language model was found ({type(error).__name__}). "
            "Check the spelling and the network, or name a local directory."
        ) from None
    net.requires_grad_(False)
    with torch.device("meta"):
        net = adapters.attach(net, config)
    if config.privacy.enabled:
        loading.without_dropout(net)
    return net.train()


def _count(config: RunConfig, net: Any, packing: Packing) -> tuple[int, int] | None:
    """Activations and logits of ``Memory``, from a pass of full-length rows on shapes alone; None if it needs values."""
    longest = min(config.data.max_length, loading.positions(net) or config.data.max_length)
    rows_each = packing.rows_each
    row = TokenSequence((0,) * longest, (False, *[True] * (longest - 1)), max(1, longest - 1))
    num_units = 1 if packing.alone else packing.room // (rows_each * longest)
    passes = lay_out([Unit((row,) * rows_each)] * num_units, packing, 0).to(torch.device("meta"))
    try:
        with tally():  # separately: its inspection of the model is not part of a step
            losses = TokenLosses(net, torch.device("meta"))
        with tally() as counted, RowAttention(net).of(passes):
            loss = losses(passes).nll_M.sum()
            held = counted.live
            if not losses.head:
                head = net.get_output_embeddings().weight
                held -= passes.input_ids_1M.numel() * len(head) * head.element_size()  # of the logits
            loss.backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, AssertionError):  # routers choose rows by value
        return None
    finally:
        net.zero_grad(set_to_none=True)
    return held, counted.peak - held


def _memory(
    config: RunConfig, net: Any, counted: tuple[int, int], packing: Packing, device: torch.device, bands: int
) -> Memory:
    trains = [parameter for parameter in net.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in trains)
    bits = {"4bit": 4.5, "8bit": 8.0}.get(config.model.quantization or "")  # nf4 adds a scale to every 64 weights
    stored = _stored_bytes(config, net, device)
    ends = (net.get_input_embeddings(), net.get_output_embeddings())
    embeddings = {id(layer.weight) for layer in ends if layer is not None}
    weights = 0.0
    for parameter in net.parameters():
        if not parameter.requires_grad:
            quantised = parameter.dim() == 2 and id(parameter) not in embeddings
            weights += parameter.numel() * (bits / 8 if bits is not None and quantised else stored)
    tokens = config.data.max_length if packing.alone else packing.tokens
    factors = sum(tokens * sum(p.shape) for p in trains if p.dim() == 2 and (not packing.held_numbers or is_wide(p)))
    held = packing.most_units * packing.held_numbers + factors
    activations, logits = counted
    return Memory(
        weights=round(weights),
        trainable=4 * size,
        optimizer=size * (8 if config.train.optimizer == "adamw" else 4 if config.train.momentum else 0),
        sums=12 * size,
        noise=8 * size * (bands - 1),
        unit_gradients=4 * (held if config.privacy.enabled else size),
        activations=activations,
        logits=logits,
    )


def _stored_bytes(config: RunConfig, net: Any, device: torch.device) -> int:
    """Bytes per frozen weight, as loading.load_base stores it on this device."""
    if config.model.dtype != "auto":
        return int(loading.DTYPES[config.model.dtype].itemsize)
    saved = getattr(net.config, "dtype", None)
    if device.type != "cuda" or not isinstance(config.adapter, LoraConfig):
        return 4
    return int(saved.itemsize) if isinstance(saved, torch.dtype) else 4


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors made within the block.

    Attributes:
        live: Bytes of such tensors that are still held.
        peak: The largest ``live`` so far.
    """

    def __init__(self) -> None:
        """All counts start at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and counts it."""
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            return 1  # transformers asks whether a mask is all ones; here it is
        out = func(*args, **(kwargs or {}))
        inputs = [*_tensors(args), *_tensors((kwargs or {}).values())]
        storages = {leaf.untyped_storage()._cdata for leaf in inputs}
        for leaf in _tensors((out,)):
            storage = leaf.untyped_storage()
            if storage._cdata not in storages and storage._cdata not in self._held:
                self._hold(storage)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def release() -> None:
            self._held.pop(key, None)
            self.live -= size

        self._held[key] = weakref.finalize(storage, release)
        self._held[key].atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, single or in lists; torch's pytree takes ten times as long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Attention(torch.autograd.Function):
    """Attention that saves what a fused kernel saves: queries, keys, values and output, but no table of T^2 weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextmanager
def tally() -> Iterator[Tally]:
    """Counts all tensors made within the block, with attention as a fused kernel holds it.

    Replaces scaled_dot_product_attention meanwhile: on the meta device it falls back to a table of T^2 weights. A mode of
    torch.overrides would be tidier, but is not active when a checkpointed block is recomputed.
    """
    counted = Tally()

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]

    functional: Any = torch.nn.functional
    fused = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention
    try:
        with counted:
            yield counted
    finally:
        functional.scaled_dot_product_attention = fused
