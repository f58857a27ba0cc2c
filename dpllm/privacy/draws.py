"""No forward or backward pass draws random numbers: masks and jitter of a batch follow who else is in it.

Comes in: the model under check, a batch of synthetic rows, never data. Goes out: nothing, or a refusal that names the module that
draws; what goes in and out of each module's calls, for whoever looks for one that stands out.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from dpllm.errors import Refused
from dpllm.privacy.clipping import Losses
from dpllm.privacy.packing import Pass

if TYPE_CHECKING:
    from dpllm.privacy.reference import Subject

SEEDS = 7, 8


def refuse_random_numbers(subject: Subject, losses: Losses, batch: Pass) -> None:
    """Looks for draws in passes over the same rows, and names the innermost module that draws.

    A draw from a global generator (of torch, numpy or Python) moves its state, however rare it is and whatever becomes of it. One
    from a generator of a module's own changes the losses from pass to pass, or the gradients; so does one that leaves the global
    state as it was, because passes begin with different seeds. Checkpointing sets the state back before it computes again, and is
    no draw. The rounding of gradients may differ from pass to pass by the tolerance; losses have the same bits.
    """
    model, device = subject.model, subject.device
    with calls_of(model, lambda *_: _states(device)) as calls:
        losses(batch)
    if moved := [name for name, before, after in calls if before != after]:
        raise _refused(moved[0])
    torch.manual_seed(SEEDS[0])
    before, loss_R = _states(device), losses(batch)
    gradients = gradients_of(loss_R, subject.parameters)
    if _states(device) != before:
        raise _refused(f"a backward pass of {type(model).__name__}")
    torch.manual_seed(SEEDS[1])
    again_R = losses(batch)
    if _bits(again_R) != _bits(loss_R):
        raise _refused(_first_that_differs(model, losses, batch))
    for name, gradient in gradients_of(again_R, subject.parameters).items():
        size = float(gradient.norm())
        # What is not finite can be compared with nothing; the self-check refuses it next, in words of its own.
        if math.isfinite(size) and not float((gradient - gradients[name]).norm()) <= subject.tolerance * size:
            raise _refused(f"the backward pass of {name}")


def _refused(name: str) -> Refused:
    return Refused(
        f"{name} draws random numbers in training (dropout, jitter, layer drop or noise; or its kernels differ between calls). "
        "Which numbers a row gets depends on the other rows in the batch, so one unit would change other units' contributions, "
        "which clipping does not bound. Set its rate to zero in the base model's config.json, or use another base model."
    )


def _first_that_differs(model: nn.Module, losses: Callable[[Pass], Tensor], batch: Pass) -> str:
    """The module that gives other outputs for the same inputs; of several, the one whose call ends first."""
    passes = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        with torch.no_grad(), calls_of(model, _bits) as calls:
            losses(batch)
        passes.append(calls)
    names = (one[0] for one, two in zip(*passes, strict=False) if one[1] == two[1] and one[2] != two[2])
    return next(names, type(model).__name__)


@contextlib.contextmanager
def calls_of(model: nn.Module, look: Callable[..., Any]) -> Iterator[list[tuple[str, Any, Any]]]:
    """(name, what ``look`` saw go in, and come out) of each call of a module, inner ones before outer ones."""
    begun: list[Any] = []
    ended: list[tuple[str, Any, Any]] = []

    def begin(module: nn.Module, inputs: Any, named: Any) -> None:
        begun.append(look(inputs, named))

    def end(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        ended.append((name, begun.pop(), look(output)))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(end, name or type(module).__name__)))
    try:
        yield ended
    finally:
        for handle in handles:
            handle.remove()


def _states(device: torch.device) -> int:
    """Of every generator that all modules share, as a hash."""
    on_device = b"" if device.type == "cpu" else torch.get_device_module(device).get_rng_state().numpy().tobytes()
    numpys: Any = np.random.get_state()
    torchs = torch.get_rng_state().numpy().tobytes()
    return hash((torchs, on_device, numpys[1].tobytes(), numpys[2:], random.getstate()))


def _bits(*values: Any) -> list[Any]:
    """Of all tensors in them, as hashes."""
    tensors = [leaf.detach().cpu() for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return [(one.dtype, one.shape, hash(one.reshape(-1).view(torch.uint8).numpy().tobytes())) for one in tensors]


def gradients_of(
    loss_R: Tensor, parameters: Mapping[str, nn.Parameter], *, keep_graph: bool = False
) -> dict[str, Tensor]:
    """Of the sum of the losses, by parameter; the parameters hold none afterwards."""
    loss_R.sum().backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found
