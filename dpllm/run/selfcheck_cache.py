"""What an earlier start showed of rounding by company, kept so that it need not be shown again.

Comes in: a model as it trains, and what else decides how it rounds. Goes out: a key, and the digests that are kept under it. Only
passes are kept. What somebody else could have written, and what cannot be read, is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dpllm
from dpllm.files import digest, sha256, write_json
from dpllm.ledger.store import default_path
from dpllm.model import environment, sharding
from dpllm.privacy.schedule import Shape
from dpllm.recipe.config import RunConfig

KNOWN = frozenset({"torch", "transformers", "peft", "opacus", "accelerate", "bitsandbytes", "dpllm"})
BESIDE = frozenset({"huggingface_hub", "safetensors", "tokenizers", "numpy"})  # which their modules import functions of
"""Whose code is the same next time if version and files are."""
ATTENTION = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3"})
"""Whose kernels come with those packages; others are loaded from elsewhere."""
LARGEST = 2**20  # bytes of a file that is read
CALLS = ("forward", "_call_impl", "_compiled_call_impl")  # of a layer itself, if set, in place of its class's


class Kept(NamedTuple):
    """How a check finds what an earlier one showed."""

    key: Callable[[Sequence[Shape]], str | None]  # see ``key_of``
    fresh: bool  # it is not read, and written anew


def folder() -> Path:
    """Where passes are kept: in the user's data directory."""
    return default_path().parent / "self-checks"


def key_of(config: RunConfig, model: nn.Module, shapes: Sequence[Shape], **more: Any) -> str | None:
    """A digest of all that decides how a row is rounded, ``more`` as JSON; None where code takes part that may change unseen."""
    kinds = sorted({kind for module in model.modules() for kind in type(module).__mro__}, key=repr)
    settings: Any = getattr(model, "config", None)
    attention = getattr(settings, "_attn_implementation", None)
    if attention not in ATTENTION or sharding.requested() or not _ours(model, kinds):
        return None
    device = next(model.parameters()).device
    parameters, matmul = dict(model.named_parameters()), torch.backends.cuda.matmul
    tensors = {**parameters, **dict(model.named_buffers())}
    facts = {
        "sources": [_dpllm(), *map(sha256, sorted({Path(inspect.getfile(k)) for k in kinds if _package(k) in KNOWN}))],
        "versions": [environment.versions(), torch.__config__.show(), torch.version.git_version, _kernel_packages()],
        "recipe": config.model_dump(mode="json", include={"adapter": True, "model": True, "privacy": {"clipping"}}),
        "form": [config.data.max_length, config.train.precision],
        "configuration": [str(settings), attention, str(getattr(settings, "quantization_config", None))],
        "model": [[name, type(module).__qualname__, module.training] for name, module in model.named_modules()],
        "checkpointing": [name for name, m in model.named_modules() if getattr(m, "gradient_checkpointing", False)],
        "trains": [name for name, parameter in parameters.items() if parameter.requires_grad],
        "tensors": [[name, str(one.dtype), list(one.shape), one.stride()] for name, one in tensors.items()],
        "weights": _digests(list(tensors.values())),
        "shapes": shapes,
        "kernels": {name: str(value) for name, value in environment.kernels(device).items()},
        "processor": _processor(),
        "variables": {key: os.environ[key] for key in os.environ if key.startswith(("OMP_", "KMP_", "GOMP_", "LD_"))},
        "switches": [
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            *(matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, torch.backends.cudnn.allow_tf32),
            *(matmul.allow_fp16_reduced_precision_reduction, str(torch._C._get_blas_preferred_backend())),
            torch._C._get_cudnn_sdp_enabled(),
            torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            *(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled),
            *(torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()),
            torch._C._get_math_sdp_enabled(),
            torch.get_default_dtype(),
        ],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        **more,
    }
    return digest(json.loads(json.dumps(facts, default=str)))


def read(key: str | None) -> dict[Shape, str] | None:
    """The digests that a check found under this key; None where none is kept, or what is kept is not to be trusted."""
    if key is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if not _mine(os.lstat(folder()), stat.S_ISDIR):
            return None
        with open(os.open(folder() / f"{key}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not _mine(os.fstat(file.fileno()), stat.S_ISREG):
                return None
            kept = json.loads(file.read(LARGEST))
        found = {Shape.read(name): digest for name, digest in kept["digests"].items()}
        if kept["key"] == key and all(isinstance(digest, str) for digest in found.values()):
            return dict(sorted(found.items())) or None
    return None


def keep(key: str | None, digests: Mapping[Shape, str]) -> None:
    """Keeps a pass; where that cannot be done, the next start checks again."""
    if key is None:
        return
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        if _mine(os.lstat(folder()), stat.S_ISDIR):
            kept = {"key": key, "digests": {str(shape): found for shape, found in digests.items()}}
            write_json(folder() / f"{key}.json", kept, mode=0o600)


def _mine(found: os.stat_result, kind: Any) -> bool:
    """Of this user, who alone may write it."""
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _ours(model: nn.Module, kinds: Sequence[type]) -> bool:
    """Whether all code that a pass runs comes from the packages of the key, with no hook, layer or method put in its place."""
    if any(_package(kind) not in KNOWN | {"builtins", "typing", "abc"} for kind in kinds):
        return False
    added = hooks(torch_modules, "_global_")
    for module in model.modules():
        added += hooks(module, "_forward_", "_backward_")
        if any(vars(module).get(name) for name in CALLS):
            return False
    if any(_package(getattr(hook, "func", hook)) not in KNOWN for hook in chain(*added) if callable(hook)):
        return False
    attention = ALL_ATTENTION_FUNCTIONS.get(str(getattr(getattr(model, "config", None), "_attn_implementation", None)))
    places = [vars(kind) for kind in kinds] + [vars(sys.modules[kind.__module__]) for kind in kinds]
    functions = [some for place in places for some in list(place.values()) if inspect.isfunction(some)] + [attention]
    return all(_from_known(one) for one in functions if inspect.isfunction(one))


def hooks(owner: Any, *starts: str) -> list[tuple[Any, ...]]:
    """The hooks in each of the dictionaries that torch keeps in an owner under names that begin so."""
    kept = vars(owner).items()
    return [tuple(some.values()) for name, some in kept if name.startswith(starts) and isinstance(some, dict)]


def _digests(tensors: Sequence[Tensor]) -> list[str]:
    """SHA-256 of each tensor's bytes."""

    def of(one: Tensor) -> str:
        flat = one.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(flat.numpy().data).hexdigest()

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
        return list(threads.map(of, tensors))


def _kernel_packages() -> list[str]:
    """Versions of packages that bring kernels of their own, which no run needs to name."""
    names = ("bitsandbytes", "nvidia-", "triton", "flash", "mkl", "intel-openmp")
    found = ((one.metadata["Name"] or "", one.version) for one in metadata.distributions())
    return sorted(f"{name} {version}" for name, version in found if name.lower().startswith(names))


def _from_known(function: Any) -> bool:
    """By the file of its code, as a wrapper carries the module's name of what it wraps."""
    file = function.__code__.co_filename
    *packages, python = _known_folders()
    plain = file.startswith(python) and not re.search(r"[/\\](site|dist)-packages[/\\]", file)
    return plain or file.startswith(("<", *packages))


@cache
def _known_folders() -> tuple[str, ...]:
    specs = [importlib.util.find_spec(name) for name in sorted(KNOWN | BESIDE)]
    packages = [str(Path(spec.origin).parent) + os.sep for spec in specs if spec and spec.origin]
    return *packages, sysconfig.get_path("stdlib") + os.sep


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", None)).partition(".")[0]


@cache
def _dpllm() -> list[str]:
    """Digests of dpllm's own code."""
    return [sha256(path) for path in sorted(Path(dpllm.__file__).parent.rglob("*.py"))]


@cache
def _processor() -> str:
    """What Linux says of the first core, but for its speed."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        changing = "cpu MHz", "bogomips", "processor", "core id", "apicid"
        return "\n".join(line for line in first if not line.startswith(changing))
    return sys.platform
