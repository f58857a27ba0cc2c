"""Memory: how much there is, and whether a pass fits, before anything is reserved.

Comes in: the engine as it will train, and public numbers of the recipe. Goes out: the shape of passes, or one error that says
what to change. Sequences are synthetic and as long as the recipe allows; this module must not see data, the sampler or the Plan.

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
    """Of the passes on one kind of device; benchmarks/NOTES.md has the figures."""

    least: int  # tokens of a pass, below which what it costs before its first token is seen
    most: int  # beyond which a larger pass was no faster
    block: int  # tokens that kernels compute at once; on a CPU, those of each thread
    held: int  # bytes of gradients that are held for the units of a pass


CPU, ELSEWHERE = Limits(512, 2048, 32, 2**30), Limits(16_384, 16_384, 128, 2**33)
SHARE = 0.9  # of free memory; the rest is for fragments, kernels' workspace and the communication of several processes
SMALL, SMALL_TOKENS = 10_000_000, 2048  # weights of a model so small that calls of kernels take longest; then ``least``
# Gradients are held side by side where those of FULL_ROWS times as many units fit as a pass holds rows of full length; then for
# MOST_ROWS times as many, and on a CPU, which takes memory only when it is used, for rows of SHORT tokens.
FULL_ROWS, MOST_ROWS, SHORT = 2, 3, 16
ENDLESS = 2**62  # bytes: more than there are
_STATUS = Path("/proc/self/status")


def packing_for(config: RunConfig, model: nn.Module, vocab_size: int, device: torch.device) -> Packing:
    """The passes of a recipe on this device, whose threads decide about full blocks: one rank's word counts for all."""
    train, asked = config.train, config.train.tokens_per_pass
    tokens, each = None if asked == "auto" else asked, config.objective.rows_each
    return packing_of_model(model, train.batch_size, config.data.max_length, vocab_size, device, tokens, each)


def packing_of_model(
    model: nn.Module,
    batch: int,
    max_length: int,
    vocab_size: int,
    device: torch.device,
    tokens: int | None = None,
    rows_each: int = 1,
) -> Packing:
    """The passes of a model that is to train with batches of so many examples, of ``rows_each`` rows up to ``max_length``."""
    on_cpu, longest = device.type == "cpu", rows_each * max_length
    limits = CPU if on_cpu else ELSEWHERE
    multiple = limits.block * (torch.get_num_threads() if on_cpu else 1)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad and not is_wide(p))
    fits = limits.held // (4 * max(1, numbers))  # units
    most_tokens = limits.most
    if not on_cpu and fits > 1:  # twice formed gradients take thousands of calls
        most_tokens = min(most_tokens, fits * longest // FULL_ROWS)
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    least = min(most_tokens, SMALL_TOKENS if small else limits.least)
    tokens = pass_length(batch, longest, tokens, multiple=multiple, least=least, most=most_tokens)
    units = max(1, (tokens - 1) // longest)  # as long as allowed
    held = fits >= FULL_ROWS * units
    most = min(fits, max(MOST_ROWS * units, tokens // SHORT if on_cpu else 0))
    return Packing(
        tokens=tokens,
        most_units=most if held else tokens // 2,
        held_numbers=numbers if held else 0,
        targets=pack_of(max(vocab_size, _logits_of(model)), device),
        max_length=max_length,
        rows_each=rows_each,
        multiple=multiple,
        alone=has_experts(model) or not attends_by_interface(model),
    )


def pass_length(batch: int, longest: int, tokens: int | None, *, multiple: int, least: int, most: int) -> int:
    """M, a ``multiple`` of what kernels compute at once: the tokens of a pass for batches of examples of up to ``longest``.

    Few, large passes waste the end of the last one; many small ones waste the end of each. What is best follows from how many
    tokens a step has, which is taken to be half of what it can have. ``tokens`` are those asked for; None: chosen here, where
    passes of less than ``least`` are dominated by what they cost before their first token, and of more than ``most`` no faster.
    """
    if tokens is None:
        times = min(3.0, max(1.0, 0.5 * math.log2(max(batch, 2)) - 1.0))  # 1 at 16, 2 at 64, 3 at 256
        # No more than a step can be expected to have.
        wished = max(min(least, batch * longest), min(most, times * longest))
        examples = max(1, int(wished // longest))
        tokens = examples * longest + 1  # so many of the longest, and a token of padding
    return multiple * math.ceil(max(tokens, longest + 1) / multiple)


def _logits_of(model: nn.Module) -> int:
    """How many a position has: a head may be wider than its tokenizer's vocabulary."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return len(head.weight) if isinstance(getattr(head, "weight", None), torch.Tensor) else 0


def rehearse(engine: StepEngine, config: RunConfig, vocab_size: int, device: torch.device) -> None:
    """Runs passes that need as much memory as any, on a GPU, so that what does not fit is an error before steps are charged.

    Where the recipe leaves it open, passes that do not fit are halved. The engine is as it will train, before or after its
    self-check. All ranks call it together.

    Raises:
        ConfigError: A pass does not fit.
        Refused: A layer that trains has gradients that cannot be clipped; see ``StepEngine.step``.
    """
    if device.type != "cuda":
        return  # a pass that does not fit pages or is killed, and the rehearsal would be too
    meter = _Meter(device)
    while True:
        tell("Measuring memory", note=str(engine.packing), public=True)
        try:
            used = -processes.least(-meter.peak_of(lambda: engine.rehearse(_rehearsal(engine.packing, vocab_size))))
        except NotBatchInvariant:  # its attention, on every rank alike
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
    """What may be used of free memory, in bytes."""
    return int(SHARE * free)


def reset_peak_memory() -> None:
    """Begins a new count for ``peak_memory``, where the system allows it: a process may run several recipes in turn."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5); only the high-water mark changes


def peak_memory() -> int | None:
    """Bytes that this process held at most: on its GPU where it has one, else of main memory; None where nobody counts.

    Rounded up to 1 MiB. Since ``reset_peak_memory``; of main memory, where that is not possible, since the process began.
    """
    if torch.cuda.is_available():
        return -(-torch.cuda.max_memory_allocated() // 2**20) * 2**20
    mark = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else None
    return -(-int(mark[1]) // 2**10) * 2**20 if mark else None


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory; libraries under torch raise their own kinds."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and bool(re.search("out of memory|allocate memory", str(error), re.IGNORECASE))
    )


def base_does_not_fit(model: ModelConfig) -> ConfigError:
    """What to change where the weights alone are more than the device holds."""
    advice = ", or ".join([*_lighter(model), "model.name_or_path to a smaller model"])
    return ConfigError(
        f"model.name_or_path {model.name_or_path!r}: its weights do not fit into this device's memory. Set {advice}; or "
        "launch on several GPUs that share them (recipes/accelerate/gpu_fsdp2.yaml)."
    )


@contextlib.contextmanager
def explained(config: RunConfig, packing: Packing) -> Iterator[None]:
    """Says in a ConfigError what a user can do about a lack of memory in the loop."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"out of memory in a pass of {packing}, so the run ended early; its steps so far stay charged. Close other programs, "
            f"or set what needs less: {_other_knobs(config)}; add --resume if there is a checkpoint."
        ) from None


def _rehearsal(packing: Packing, vocab_size: int) -> list[Pass]:
    """Passes that need as much memory as any: of the longest rows, of the shortest units, and of a unit that goes on."""
    each, longest = packing.rows_each, packing.max_length
    count = 1 if packing.alone else packing.room // (each * longest)
    shortest = min(packing.most_units, packing.room // (2 * each))
    long_units = [_synthetic(longest, vocab_size, each)] * count
    short_units = [_synthetic(2, vocab_size, each)] * (0 if packing.alone else shortest)
    whole = lay_out(long_units, packing, 0)
    short = [lay_out(short_units, packing, 0)] if short_units else []
    unit = lay_out([Unit(tuple(row for unit in long_units for row in unit.sequences))], packing, 0)
    return [whole, *short, replace(unit, goes_on=True), unit]


def _synthetic(tokens: int, vocab_size: int, rows: int) -> Unit:
    """An example of random tokens, every one but the first learned."""
    ids = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return Unit((TokenSequence(tuple(ids), (False, *[True] * (tokens - 1)), max(1, tokens - 1)),) * rows)


class _Meter:
    """Memory of a GPU: what was free when it was made (least of all ranks), and what a call adds to what was held."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.empty_cache()
        self._device, self._held = device, torch.cuda.memory_allocated(device)
        self.free = processes.least(free_memory(device))

    def peak_of(self, call: Callable[[], None]) -> int:
        """Bytes held at the peak of the call, beside those held when the meter was made; ENDLESS if there was no memory."""
        reset_peak_memory()
        try:
            call()
            peak = max(0, torch.cuda.max_memory_allocated(self._device) - self._held)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            peak = ENDLESS
        torch.cuda.empty_cache()  # behind the exception, whose frames hold tensors
        reset_peak_memory()
        return peak


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may still take."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _other_knobs(config: RunConfig) -> str:
    """What else makes a step smaller, without what is set already."""
    knobs = [] if config.train.tokens_per_pass == "auto" else ["train.tokens_per_pass: auto"]
    if not config.model.gradient_checkpointing:
        knobs.append("model.gradient_checkpointing: true")
    return ", or ".join([*knobs, *_lighter(config.model), f"data.max_length below {config.data.max_length}"])


def _lighter(model: ModelConfig) -> list[str]:
    """Settings with which weights take less."""
    if model.quantization is not None:
        return []
    return [*(["model.dtype: bfloat16"] if model.dtype in {"auto", "float32"} else []), "model.quantization: 4bit"]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
