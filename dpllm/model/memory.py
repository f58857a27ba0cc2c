"""Memory: how much there is, and how many sequences fit in one forward and backward pass, before anything is reserved.

Comes in: the engine as it will train, and public numbers of the recipe. Goes out: a physical batch size, or one error that
says what to change. Sequences are synthetic and as long as the recipe allows; this module must not see data, the sampler or
the Plan.

Shape suffixes: R rows, T tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from dpllm.errors import ConfigError
from dpllm.model import processes
from dpllm.privacy.sampling import PhysicalBatch
from dpllm.privacy.schedule import pairwise
from dpllm.progress import tell
from dpllm.recipe.config import ModelConfig, RunConfig
from dpllm.recipe.derived import rows_of_one

if TYPE_CHECKING:
    from dpllm.privacy.engine import StepEngine

SHARE = 0.9  # of free memory; the rest is for fragments, kernels' workspace and the communication of several processes
TOKENS = {"cpu": 2048}  # of one pass, beyond which a larger one was no faster; docs/measurements.md has the figures
MANY_TOKENS = 65_536  # elsewhere
SMALL = 10_000_000  # weights
PLENTY = 2**30  # bytes that no row is taken to need less than, where its need is not measured for many
UNKNOWN = sys.maxsize  # bytes: no limit is known; as a need, more than there is
_STATUS, _MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")
# Version 2 and version 1: the limit of a container, and what is used of it.
_CONTAINER = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resolve(engine: StepEngine, config: RunConfig, vocab_size: int, device: torch.device, *, world: int = 1) -> int:
    """The number of sequences in one forward pass, the same on every rank; all ranks call it together.

    With a number in the recipe: that number. On a GPU it is tried once, at ``data.max_length`` tokens, so that a batch that
    does not fit is an error here and not after steps that were charged. With auto: the largest that fits in 90% of what is
    free, at most ``most_rows``; only one is tried where so many fit even if each needs as much as that one. The engine is as it
    will train, before or after its self-check.

    Raises:
        ConfigError: The number does not fit, or not even one sequence does.
        Refused: A layer that trains has gradients that cannot be clipped; see ``StepEngine.step``.
    """
    named = config.train.physical_batch_size
    if named != "auto" and device.type != "cuda":
        return named  # a step that does not fit pages or is killed, and the rehearsal would be too
    meter, seen = _Meter(device), dict[int, int]()

    def bytes_of(rows: int) -> int:
        """At the peak of a rehearsal, beside what the model holds, the most of all ranks; UNKNOWN where it did not fit."""
        if rows not in seen:
            tell("Measuring memory", note=f"{rows} sequences", public=True)
            used = meter.peak_of(lambda: engine.rehearse(_rehearsal(rows, config, vocab_size)))
            seen[rows] = -processes.least(-used)
        return seen[rows]

    if named != "auto" and bytes_of(named) != UNKNOWN:
        return named
    most = most_rows(config, device, world) if named == "auto" else named - 1
    if named == "auto" and most * max(PLENTY, bytes_of(1)) <= budget(meter.free):
        return most  # more rows need no more for each
    found = largest(bytes_of, budget(meter.free), most)
    if not found:
        used = seen.get(1, UNKNOWN)
        need = "more" if used == UNKNOWN else f"about {_gigabytes(used)}"
        raise ConfigError(
            f"one sequence of {config.data.max_length} tokens does not fit: {_gigabytes(meter.free)} are free beside the model, "
            f"of which {round(100 * SHARE)}% may be used, and its forward and backward pass needs {need}. Set "
            f"{_other_knobs(config)}."
        )
    if named == "auto":
        return found
    need = _gigabytes(line(sorted(one for one in seen.items() if one[1] != UNKNOWN), named))
    raise ConfigError(
        f"train.physical_batch_size {named}: {named} sequences of {config.data.max_length} tokens need about {need} beside the "
        f"model, and {_gigabytes(meter.free)} are free, so the run would end with its steps charged. Set "
        f"train.physical_batch_size: auto, or {found} or less."
    )


def largest(bytes_of: Callable[[int], int], limit: int, most: int) -> int:
    """The largest number of rows found to stay within a limit: doubled while the next is expected to, then in quarters.

    Nothing is tried that the line through the two last measurements puts beyond the limit, since on a CPU the system may
    end a process that tries. ``bytes_of`` measures a number of rows, 0 among them; not smaller for more rows.

    Returns:
        A power of two, or 1.25, 1.5 or 1.75 times one, or ``most``; 0 if not even one row fits.
    """
    points = [(0, bytes_of(0))]
    while (fits := points[-1][0]) < most:
        rows = min(max(1, 2 * fits), most)
        if line(points, rows) > limit or (used := bytes_of(rows)) > limit:
            break
        points.append((rows, used))
    else:
        return fits
    quarter = max(1, fits // 4)
    for more in range(fits + 3 * quarter, fits, -quarter):
        if fits and more < rows and line(points, more) <= limit and bytes_of(more) <= limit:
            return more
    return fits


def line(points: Sequence[tuple[int, int]], rows: int) -> int:
    """Bytes of so many rows, on the line through the last two measurements; at least those of the only one."""
    (last, used), (before, less) = points[-1], points[max(0, len(points) - 2)]
    return used + max(0, used - less) * (rows - last) // max(1, last - before)


def most_rows(config: RunConfig, device: torch.device, world: int = 1) -> int:
    """Beyond so many sequences a physical batch gains nothing: the device is busy, or a process's share is over."""
    busy = TOKENS.get(device.type, MANY_TOKENS) // config.data.max_length
    batch = config.train.batch_size / world
    share = math.ceil(batch + 3 * math.sqrt(batch)) * rows_of_one(config)  # few Poisson draws are larger
    return max(1, min(busy, share))


def fixed_tokens(device: torch.device, model: nn.Module) -> int:
    """What a forward and backward pass costs before its first token, in tokens: see ``schedule.shapes_of``.

    Measured on two CPU cores: 62 for SmolLM2-135M with LoRA, 250 to 300 for models of less than a million weights, where the
    calls of small kernels take longest. Of GPUs it is a guess.
    """
    large = sum(parameter.numel() for parameter in model.parameters()) >= SMALL
    return 2048 if device.type != "cpu" else 64 if large else 256


def budget(free: int) -> int:
    """What may be used of free memory, in bytes."""
    return free if free == UNKNOWN else int(SHARE * free)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take: of its GPU's memory, or of main memory; a very large number if unknown.

    Main memory is what the system or the container has left, divided by the processes that the launcher started here.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu" or not _MEMORY.exists():
        return UNKNOWN
    free = _kib(_MEMORY, "MemAvailable")
    for limit, used in _CONTAINER:
        with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
            free = min(free, max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return free // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


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
    found = UNKNOWN
    if torch.cuda.is_available():
        found = torch.cuda.max_memory_allocated()
    elif _STATUS.exists():
        found = _kib(_STATUS, "VmHWM")
    elif sys.platform == "darwin":
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None if found == UNKNOWN else -(-found // 2**20) * 2**20


def synthetic(rows: int, tokens: int, vocab_size: int, *, each: int = 1) -> PhysicalBatch:
    """Random tokens, every one but the first learned: one unit for ``each`` so many rows."""
    ids_RT = torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    learned_RT = torch.ones((rows, tokens), dtype=torch.bool)
    learned_RT[:, 0] = False
    unit_R, none_R = torch.arange(rows) // each, torch.zeros(rows, dtype=torch.float64)
    denominator_R = torch.full((rows,), float(tokens - 1))
    return PhysicalBatch(ids_RT, learned_RT, denominator_R, unit_R, rows // each, none_R)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory; libraries under torch raise their own kinds."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and bool(re.search("out of memory|allocate memory", str(error), re.IGNORECASE))
    )


def base_does_not_fit(model: ModelConfig) -> ConfigError:
    """What to change where the weights alone are more than the device holds."""
    advice = ["model.dtype: bfloat16"] if model.dtype in {"auto", "float32"} else []
    advice += ["model.quantization: 4bit"] if model.quantization is None else []
    advice += ["model.name_or_path to a smaller model"]
    return ConfigError(
        f"model.name_or_path {model.name_or_path!r}: its weights do not fit into this device's memory. Set "
        f"{', or '.join(advice)}; or launch on several GPUs that share them (recipes/accelerate/gpu_fsdp2.yaml)."
    )


@contextlib.contextmanager
def explained(config: RunConfig, size: int) -> Iterator[None]:
    """Says in a ConfigError what a user can do about a lack of memory in the loop; ``size`` is what ``resolve`` returned."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        less = f"a setting that needs less memory: {_other_knobs(config)}"
        if size > 1:
            less = f"train.physical_batch_size: {size // 2} or less"
        raise ConfigError(
            f"out of memory with {size} sequences in one forward pass, so the run ended early; its steps so far stay charged. "
            f"Close other programs that use this memory, or set {less}; add --resume if there is a checkpoint."
        ) from None


def _rehearsal(rows: int, config: RunConfig, vocab_size: int) -> list[PhysicalBatch]:
    """The physical batches of a step that needs as much memory as any; none for 0 rows."""
    if not rows:
        return []
    settings = config.data
    rows = pairwise(rows) if config.train.pairs else rows
    batches = [synthetic(rows, settings.max_length, vocab_size, each=2 if config.train.pairs else 1)]
    many = (settings.max_examples_per_unit or 1) > 1 or settings.long_examples == "chunk"
    if settings.sampling == "unit" and many:  # what a unit has so far is kept beside its rows in the next batch
        rest = synthetic(rows, settings.max_length, vocab_size, each=rows)
        batches += [replace(rest, goes_on=True), rest]
    return batches


class _Meter:
    """Memory of one device: what was free when it was made (least of all ranks), and what a call adds to what was held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._collect()
        self._held, self.free = self._now(), processes.least(free_memory(device))

    def peak_of(self, call: Callable[[], None]) -> int:
        """Bytes held at the peak of the call, beside those held when the meter was made; UNKNOWN if there was no memory."""
        reset_peak_memory()
        try:
            call()
            fits = True
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            fits = False
        peak = self._now(peak=True) if fits else UNKNOWN
        self._collect()  # behind the exception, whose frames hold tensors
        reset_peak_memory()
        return peak if peak == UNKNOWN else max(0, peak - self._held)

    def _collect(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _now(self, *, peak: bool = False) -> int:
        if self._device.type == "cuda":
            count = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
            return int(count(self._device))
        return _kib(_STATUS, "VmHWM" if peak else "VmRSS") if _STATUS.exists() else 0


def _kib(path: Path, key: str) -> int:
    """Bytes of an entry that Linux gives in KiB."""
    found = re.search(rf"^{key}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else UNKNOWN


def _other_knobs(config: RunConfig) -> str:
    """What else makes a step smaller, without what is set already."""
    knobs = []
    if not config.model.gradient_checkpointing:
        knobs.append("model.gradient_checkpointing: true")
    if config.model.quantization is None:
        knobs += ["model.dtype: bfloat16"] if config.model.dtype in {"auto", "float32"} else []
        knobs.append("model.quantization: 4bit")
    return ", or ".join([*knobs, f"data.max_length below {config.data.max_length}"])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
