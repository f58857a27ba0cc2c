"""The processes of one run, called ranks: what they run on, how they find each other, what they exchange.

Comes in: what the launcher put into the environment; values of one rank. Goes out: the same values on all ranks, or a refusal if
they differ (no-ops in a run of one process); versions and hardware, without host names, user names or paths. Must not know what
is trained.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import platform
import secrets
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

import dpllm
from dpllm.errors import ConfigError, DpllmError, Refused

T = TypeVar("T")
# dpllm.run.failures ends a run whose ranks no longer answer; the group's time-out would also end one while rank 0 tokenises.
TO_COME = datetime.timedelta(minutes=10)  # until all processes have joined
NEVER = datetime.timedelta(days=30)
PIECE = 2**22  # numbers that are fingerprinted at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # less than 64 bits: their sign must count
PACKAGES = (
    *("torch", "transformers", "peft", "opacus", "accelerate", "datasets", "safetensors", "dp-accounting"),
    *("numpy", "scipy", "scikit-learn", "pydantic", "huggingface_hub"),
)
KERNELS = (
    *("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_", "BLIS_", "TORCH_ALLOW_TF32", "TORCH_BLAS"),
    *("CUBLAS_", "CUDNN_", "NVIDIA_TF32", "HIPBLAS", "ROCBLAS_", "PYTORCH_TUNABLEOP"),
)
"""Prefixes of environment variables that choose among kernels. Threads are counted; where they run does not matter."""


def versions() -> dict[str, str]:
    """Versions of dpllm, Python and every package that the result depends on; "missing" if a package is not installed."""
    packages = {"dpllm": dpllm.__version__, "python": platform.python_version(), **dict.fromkeys(PACKAGES, "missing")}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    return packages


def kernels(device: torch.device) -> dict[str, Any]:
    """Everything that decides how this process rounds: device type, instruction set, caches, threads, kernel variables."""
    facts: dict[str, Any] = {"the kind of device": device.type, "the number of threads": torch.get_num_threads()}
    facts["the instruction set"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["the GPU"] = (properties.major, properties.minor, properties.multi_processor_count)
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # new in torch 2.10
    facts |= {f"the processor's {key}": able[key] for key in able if not key.startswith(("num_", "cpu_"))}
    return facts | {f"the variable {key}": value for key, value in os.environ.items() if key.startswith(KERNELS)}


def hardware() -> dict[str, Any]:
    """Processor, cores and GPUs."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def join() -> PartialState:
    """This process's place among the ranks: device, index, number.

    Raises:
        ConfigError: The launcher started several processes that form no group, so each would train and charge alone; or it
            started more processes than this machine has GPUs.
    """
    check_devices()
    try:  # without cpu, accelerate starts no gloo group
        state = PartialState(cpu=not _on_gpu(), timeout=TO_COME)
    except distributed.DistError as error:
        raise DpllmError(
            f"the processes did not find each other within {TO_COME.seconds // 60} minutes: one ended earlier (its own output "
            "says why), or the address or port of the first cannot be reached. Nothing was reserved. Start all of them again."
        ) from error
    if several():
        _set_pg_timeout(NEVER)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != state.num_processes:
        raise ConfigError(
            f"the launcher started {started} processes, but they form a group of {state.num_processes}: each would train and "
            "charge the ledger by itself. Use a launch file of recipes/accelerate/, or one process."
        )
    return state


def check_devices() -> None:
    """Refuses, with a ConfigError, more processes than this machine has GPUs; to be called before the process group is made."""
    gpus = torch.cuda.device_count() if _on_gpu() else 0
    local = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)
    if gpus and local > gpus:
        raise ConfigError(
            f"{local} processes were started on a machine that shows {gpus} GPU{'s' if gpus > 1 else ''}: each process needs "
            f"its own. Type --num_processes {gpus} (accelerate; for several machines, of all of them together) or "
            f"--nproc_per_node {gpus} (torchrun), or free the other GPUs; CUDA_VISIBLE_DEVICES may hide some."
        )


def _on_gpu() -> bool:
    """Whether to train on a GPU: only where CUDA (or ROCm) has one, and the launch file does not say use_cpu.

    Other accelerators, such as Apple's, lack float64.
    """
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def several() -> bool:
    """Whether the run has more than one process."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def shared(value: Any) -> Any:
    """Rank 0's value on every rank; the value must survive pickling."""
    if not several():
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def totals(*values: float) -> tuple[float, ...]:
    """The sums over all ranks, in float64."""
    if not several():
        return values
    numbers = torch.tensor(values, dtype=torch.float64, device=_device())
    distributed.all_reduce(numbers)
    return tuple(numbers.tolist())


def minimum(value: int) -> int:
    """The smallest of all ranks' values."""
    if not several():
        return value
    number = torch.tensor(value, device=_device())
    distributed.all_reduce(number, op=distributed.ReduceOp.MIN)
    return int(number)


def check_equal(facts: Mapping[str, Any]) -> None:
    """Refuses, with a ConfigError, a fact that differs or is missing on some rank; names the fact, the rank and both values."""
    if unequal := _first_unequal(facts):
        raise ConfigError(
            f"{unequal}, so they would not train the same model. Install, copy and type the same on every machine."
        )


def check_rounding(facts: Mapping[str, Any]) -> None:
    """Refuses ranks of which a fact is known that would make them round differently.

    The rank that computes a unit depends on how many units were drawn before it. One unit more would move others to ranks that
    round them differently, and so change the sum by more than the noise hides.

    Raises:
        Refused: A fact has another value, or is missing, on some rank; names the fact, the rank and both values.
    """
    if unequal := _first_unequal(facts):
        raise Refused(
            f"{unequal}, so they would round the same unit differently, and one more unit would change the contributions of "
            "others. Use machines of one kind with the same settings, or one process."
        )


def _first_unequal(facts: Mapping[str, Any]) -> str:
    """The first fact that differs between rank 0 and another rank, with both values; empty if none does."""
    if not several():
        return ""
    all_facts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_facts, dict(facts))
    for rank, theirs in enumerate(all_facts):
        for name in sorted(all_facts[0].keys() | theirs.keys()):
            expected, other = all_facts[0].get(name, "missing"), theirs.get(name, "missing")
            if expected != other:
                return f"{name} is {expected} in process 0 and {other} in process {rank}"
    return ""


def salted(secret: str) -> str:
    """A hash of a secret that ranks may compare and print: useless without the salt, which is never stored."""
    salt = shared(secrets.token_bytes(16))
    return hashlib.blake2b(secret.encode(), salt=salt, digest_size=4).hexdigest()


def check_same_weights(parameters: Iterable[Tensor], step: int) -> None:
    """Raises Refused unless all ranks hold the same trainable parameters, bit for bit."""
    if not several():
        return
    number = torch.tensor(fingerprint(parameters), dtype=torch.int64, device=_device())
    both = torch.stack([number, ~number])  # ~x falls as x rises, and unlike -x it exists for every x
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    if int(both[0]) != ~int(both[1]):
        raise Refused(
            f"after step {step} the processes no longer hold the same weights, so they no longer train one model. Nothing is "
            "exported, and the steps stay charged. Look for unequal machines or faulty memory, and resume from the last "
            "checkpoint on fewer processes."
        )


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """64 bits that change with any bit of any tensor and with their order; computed on the tensors' devices.

    The sum modulo 2^64 of each number's bits times an odd factor that depends on its position. Any one changed bit changes it; it
    does not protect against forgery. Of a sharded tensor, only this rank's part counts.
    """
    total = 0
    for index, tensor in enumerate(tensors):
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        bits = local.contiguous().view(-1).view(_INTEGERS[local.element_size()])
        for number, piece in enumerate(torch.split(bits, PIECE)):
            place = torch.arange(len(piece), device=piece.device) + (number * PIECE + index * 2**40)
            total += int(((piece.long() + 1) * _odd(place)).sum())
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def _odd(place: Tensor) -> Tensor:
    """An odd factor for each position, by a mixing step of splitmix64 (Steele et al. 2014); int64 wraps around."""
    mixed = place * -7_046_029_254_386_353_131
    mixed ^= mixed >> 31
    return mixed * -7_723_592_293_110_705_685 | 1


def replicate(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Copies rank 0's parameters and optimizer state to every rank."""
    if not several():
        return
    for parameter in parameters:
        distributed.broadcast(parameter.data, src=0)
    saved = optimizer.state_dict()

    # Shapes and values other than tensors are sent pickled, tensors as they are.
    def described(value: Any) -> tuple[Any, torch.Size | None, torch.dtype | None]:
        return (None, value.shape, value.dtype) if isinstance(value, Tensor) and value.dim() else (value, None, None)

    shapes = {key: {name: described(value) for name, value in entry.items()} for key, entry in saved["state"].items()}
    state: dict[Any, dict[str, Any]] = {}
    for key, entry in shared(shapes).items():
        state[key] = {}
        for name, (value, shape, dtype) in entry.items():
            if shape is not None:
                value = saved["state"].get(key, {}).get(name)
                value = torch.empty(shape, dtype=dtype, device=_device()) if value is None else value
                distributed.broadcast(value, src=0)
            state[key][name] = value
    optimizer.load_state_dict({**saved, "state": state})


def _device() -> torch.device:
    """The device from which the group's backend reads tensors."""
    device: torch.device = PartialState().device
    return device


@contextlib.contextmanager
def stop_signal() -> Iterator[list[int]]:
    """Records Ctrl-C and SIGTERM, so that the loop stops between steps; a second Ctrl-C stops at once."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        sys.stderr.write("dpllm: stopping after this step, with a checkpoint; a second Ctrl-C stops at once.\n")

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ahead(make: Callable[[], T], times: int) -> Generator[T]:
    """Yields ``make()`` ``times`` times; a thread makes the next value while the caller works on the last."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = thread.submit(make) if times else None
        for number in range(times):
            assert waiting is not None
            made = waiting.result()
            waiting = thread.submit(make) if number + 1 < times else None
            yield made
