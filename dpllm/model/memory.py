"""Measures how much memory there is and whether a pass fits, before anything is reserved.

Comes in: the engine as it will train, and public numbers of the recipe. Goes out: the shape of passes, or one error that says
what to change. Its sequences are synthetic, of the recipe's maximum length; it must not see data, the sampler or the Plan.

Shape suffixes: R rows, T tokens.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dpllm.errors import ConfigError, NotBatchInvariant
from dpllm.model import processes
from dpllm.privacy.attention import attends_by_interface
from dpllm.privacy.gradients import is_wide
from dpllm.privacy.loss import pack_of
from dpllm.privacy.packing import Pass, lay_out
from dpllm.privacy.schedule import Packing, TokenSequence, Unit
from dpllm.privacy.selfcheck import has_experts
from dpllm.progress import tell
from dpllm.recipe.config import ModelConfig, RunConfig

if TYPE_CHECKING:
    from dpllm.privacy.engine import StepEngine


class Limits(NamedTuple):
    """Limits of a pass on one kind of device; benchmarks/NOTES.md has the figures."""

    least: int  # tokens of a pass, below which its fixed costs show
    most: int  # tokens above which a larger pass was no faster
    block: int  # tokens that kernels compute at once; on a CPU, per thread
    held: int  # bytes of gradients held for the units of a pass


CPU, ELSEWHERE = Limits(512, 2048, 32, 2**30), Limits(16_384, 16_384, 128, 2**33)
SHARE = 0.9  # of free memory; the rest is for fragmentation, workspaces of kernels and communication between processes
SMALL, SMALL_TOKENS = 10_000_000, 2048  # weights below which kernel launches dominate, and ``least`` for such models
# Per-unit gradients are held side by side if there is room for FULL_ROWS times as many units as a pass has full-length rows. Then
# up to MOST_ROWS times as many are held, and on a CPU, which commits memory on first use, those of rows of SHORT tokens.
FULL_ROWS, MOST_ROWS, SHORT = 2, 3, 16
ENDLESS = 2**62  # bytes: more than any device has
_STATUS = Path("/proc/self/status")


def packing_for(config: RunConfig, model: nn.Module, vocab_size: int, device: torch.device) -> Packing:
    """The passes of a recipe on this device; they depend on its number of threads, so all ranks use one rank's answer."""
    train, setting = config.train, config.train.tokens_per_pass
    tokens, rows_each = None if setting == "auto" else setting, config.objective.rows_each
    return packing_of_model(model, train.batch_size, config.data.max_length, vocab_size, device, tokens, rows_each)


def packing_of_model(
    model: nn.Module,
    batch: int,
    max_length: int,
    vocab_size: int,
    device: torch.device,
    tokens: int | None = None,
    rows_each: int = 1,
) -> Packing:
    """The passes of a model that trains on batches of ``batch`` examples, each of ``rows_each`` rows up to ``max_length``."""
    on_cpu, longest = device.type == "cpu", rows_each * max_length
    limits = CPU if on_cpu else ELSEWHERE
    multiple = limits.block * (torch.get_num_threads() if on_cpu else 1)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad and not is_wide(p))
    fits = limits.held // (4 * max(1, numbers))  # units
    most_tokens = limits.most
    if not on_cpu and fits > 1:  # forming gradients twice takes thousands of kernel launches
        most_tokens = min(most_tokens, fits * longest // FULL_ROWS)
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    fewest = min(most_tokens, SMALL_TOKENS if small else limits.least)
    tokens = pass_length(batch, longest, tokens, multiple=multiple, least=fewest, most=most_tokens)
    units = max(1, (tokens - 1) // longest)  # of the maximum length
    held = fits >= FULL_ROWS * units
    most_units = min(fits, max(MOST_ROWS * units, tokens // SHORT if on_cpu else 0))
    return Packing(
        tokens=tokens,
        most_units=most_units if held else tokens // 2,
        held_numbers=numbers if held else 0,
        targets=pack_of(max(vocab_size, _logits_of(model)), device),
        max_length=max_length,
        rows_each=rows_each,
        multiple=multiple,
        alone=has_experts(model) or not attends_by_interface(model),
    )


def pass_length(batch: int, longest: int, tokens: int | None, *, multiple: int, least: int, most: int) -> int:
    """M, the tokens of a pass, a multiple of ``multiple``, for batches of examples of up to ``longest`` tokens.

    A few large passes waste the end of the last one; many small ones waste the end of each. The best size follows from the tokens
    of a step, assumed to be half of the maximum. ``tokens`` is what the recipe asks for; None chooses here, between ``least``,
    below which fixed costs dominate, and ``most``, above which passes get no faster.
    """
    if tokens is None:
        times = min(3.0, max(1.0, 0.5 * math.log2(max(batch, 2)) - 1.0))  # 1 at 16, 2 at 64, 3 at 256
        # No more tokens than a step is expected to have.
        wished = max(min(least, batch * longest), min(most, times * longest))
        examples = max(1, int(wished // longest))
        tokens = examples * longest + 1  # as many full-length examples, and a token of padding
    return multiple * math.ceil(max(tokens, longest + 1) / multiple)


def _logits_of(model: nn.Module) -> int:
    """How many logits a position has: a head may be wider than its tokenizer's vocabulary."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return len(head.weight) if isinstance(getattr(head, "weight", None), torch.Tensor) else 0


def rehearse(engine: StepEngine, config: RunConfig, vocab_size: int, device: torch.device) -> None:
    """Runs the passes that need most memory on a GPU, so that a lack of memory is an error before steps are charged.

    With tokens_per_pass: auto, passes that do not fit are halved. The engine is as it will train, before or after its self-check.
    All ranks call this together.

    Raises:
        ConfigError: A pass does not fit.
        Refused: A layer that trains has gradients that cannot be clipped; see ``StepEngine.step``.
    """
    if device.type != "cuda":
        return  # a pass that does not fit is paged out or killed, and so would the rehearsal be
    meter = _Meter(device)
    while True:
        tell("Measuring memory", note=str(engine.packing), public=True)
        try:
            used = -processes.minimum(-meter.peak_of(lambda: engine.rehearse(_rehearsal(engine.packing, vocab_size))))
        except NotBatchInvariant:  # because of its attention; all ranks agree
            engine.repack(replace(engine.packing, alone=True))
            continue
        if used <= budget(meter.free):
            return
        if config.train.tokens_per_pass == "auto" and (smaller := engine.packing.half()):
            engine.repack(smaller)
            continue
        need = "more" if used == ENDLESS else f"about {_gigabytes(used)}"
        raise ConfigError(
            f"a pass of {engine.packing} does not fit: {_gigabytes(meter.free)} are free beside the model, of which "
            f"{round(100 * SHARE)}% may be used, and its forward and backward pass needs {need}. Set {_other_knobs(config)}."
        )


def budget(free: int) -> int:
    """The part of free memory that may be used, in bytes."""
    return int(SHARE * free)


def reset_peak_memory() -> None:
    """Restarts the count of ``peak_memory`` if the system allows it: a process may run several recipes in turn."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): resets only the high-water mark


def peak_memory() -> int | None:
    """Peak memory of this process in bytes: of its GPU if it has one, else main memory; None if the system does not count it.

    Rounded up to 1 MiB, since ``reset_peak_memory``; main memory that cannot be reset is counted since the process began.
    """
    if torch.cuda.is_available():
        return -(-torch.cuda.max_memory_allocated() // 2**20) * 2**20
    mark = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else None
    return -(-int(mark[1]) // 2**10) * 2**20 if mark else None


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports a lack of memory; libraries under torch raise types of their own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and bool(re.search("out of memory|allocate memory", str(error), re.IGNORECASE))
    )


def base_does_not_fit(model: ModelConfig) -> ConfigError:
    """The error where the weights alone exceed the device's memory."""
    advice = ", or ".join([*_lighter(model), "model.name_or_path to a smaller model"])
    return ConfigError(
        f"model.name_or_path {model.name_or_path!r}: its weights do not fit into this device's memory. Set {advice}; or "
        "launch on several GPUs that share them (recipes/accelerate/gpu_fsdp2.yaml)."
    )


@contextlib.contextmanager
def explained(config: RunConfig, packing: Packing) -> Iterator[None]:
    """Turns a lack of memory in the loop into a ConfigError that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"out of memory in a pass of {packing}, so the run ended early; its steps so far stay charged. Close other programs, "
            f"or set {_other_knobs(config)}; add --resume if there is a checkpoint."
        ) from None


def _rehearsal(packing: Packing, vocab_size: int) -> list[Pass]:
    """The passes that need most memory: the longest rows, the shortest units, and a unit that spans passes."""
    rows_each, longest = packing.rows_each, packing.max_length
    count = 1 if packing.alone else packing.room // (rows_each * longest)
    num_short = 0 if packing.alone else min(packing.most_units, packing.room // (2 * rows_each))
    long_units = [_synthetic(longest, vocab_size, rows_each)] * count
    short_units = [_synthetic(2, vocab_size, rows_each)] * num_short
    full = lay_out(long_units, packing, 0)
    short = [lay_out(short_units, packing, 0)] if short_units else []
    unit = lay_out([Unit(tuple(row for unit in long_units for row in unit.sequences))], packing, 0)
    return [full, *short, replace(unit, goes_on=True), unit]


def _synthetic(tokens: int, vocab_size: int, rows: int) -> Unit:
    """An example of random tokens; all but the first are targets."""
    ids = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return Unit((TokenSequence(tuple(ids), (False, *[True] * (tokens - 1)), max(1, tokens - 1)),) * rows)


class _Meter:
    """Measures memory of a GPU: what is free at the start (the minimum over ranks), and what a call adds."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.empty_cache()
        self._device, self._held = device, torch.cuda.memory_allocated(device)
        self.free = processes.minimum(free_memory(device))

    def peak_of(self, call: Callable[[], None]) -> int:
        """Bytes that the call adds at its peak to those held at the start; ENDLESS if memory ran out."""
        reset_peak_memory()
        try:
            call()
            peak = max(0, torch.cuda.max_memory_allocated(self._device) - self._held)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            peak = ENDLESS
        torch.cuda.empty_cache()  # after the except block, since the exception's frames hold tensors
        reset_peak_memory()
        return peak


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process can still allocate."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _other_knobs(config: RunConfig) -> str:
    """Settings that make a step need less memory, without those already set."""
    knobs = [] if config.train.tokens_per_pass == "auto" else ["train.tokens_per_pass: auto"]
    if not config.model.gradient_checkpointing:
        knobs.append("model.gradient_checkpointing: true")
    return ", or ".join([*knobs, *_lighter(config.model), f"data.max_length below {config.data.max_length}"])


def _lighter(model: ModelConfig) -> list[str]:
    """Settings that make the weights smaller."""
    if model.quantization is not None:
        return []
    return [*(["model.dtype: bfloat16"] if model.dtype in {"auto", "float32"} else []), "model.quantization: 4bit"]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
