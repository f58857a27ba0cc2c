"""Nothing in a forward pass may be drawn at random: masks and jitter of a batch follow who else is in it.

Comes in: the model, a function from batch to losses, synthetic rows. Goes out: nothing, or a refusal that names the module.
Must not know clipping.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from dpllm.errors import Refused
from dpllm.privacy.sampling import PhysicalBatch

SEEDS = 7, 8


class _Call(NamedTuple):
    """One call of a module: what ``look`` saw of what went in, and of what came out."""

    name: str
    before: Any
    after: Any


def refuse_random_numbers(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    losses: Callable[[PhysicalBatch], Tensor],
    batch: PhysicalBatch,
    tolerance: float,
) -> None:
    """Looks for draws in passes over the same rows.

    A draw from a global generator (of torch, numpy or Python) moves its state, however rare it is and whatever becomes of
    it. One from a generator of a module's own changes the losses from pass to pass, or the gradients; so does one that
    leaves the global state as it was, because passes begin with different seeds. Checkpointing sets the state back before
    it computes again, and is no draw.

    Args:
        model: In training mode.
        parameters: All that train, by name; they require gradients and hold none.
        losses: From a physical batch to loss_R.
        batch: Synthetic rows, on the model's device.
        tolerance: Relative error that the rounding of gradients may reach from pass to pass; losses have the same bits.

    Raises:
        Refused: A forward or backward pass draws random numbers; names the innermost module.
    """
    device = batch.unit_R.device
    with _calls(model, lambda *_: _states(device)) as calls:
        losses(batch)
    if moved := next((call for call in calls if call.before != call.after), None):
        raise _refused(moved.name)
    torch.manual_seed(SEEDS[0])
    before, loss_R = _states(device), losses(batch)
    gradients = _gradients(loss_R, parameters)
    if _states(device) != before:
        raise _refused(f"a backward pass of {type(model).__name__}")
    torch.manual_seed(SEEDS[1])
    again_R = losses(batch)
    if _bits(again_R) != _bits(loss_R):
        raise _refused(_first_that_differs(model, losses, batch))
    for name, gradient in _gradients(again_R, parameters).items():
        size = float(gradient.norm())
        # What is not finite can be compared with nothing; the self-check refuses it next, in words of its own.
        if math.isfinite(size) and not float((gradient - gradients[name]).norm()) <= tolerance * size:
            raise _refused(f"the backward pass of {name}")


def _refused(name: str) -> Refused:
    return Refused(
        f"{name} draws random numbers while the model trains (dropout, jitter, layer drop or noise; or its kernels differ from "
        "call to call), and which of them a row meets follows the rows beside it, so that one unit would change what all "
        "others add, unclipped. Set its rate to zero in the base model's config.json, or use another base model."
    )


def _first_that_differs(model: nn.Module, losses: Callable[[PhysicalBatch], Tensor], batch: PhysicalBatch) -> str:
    """The module that gives other outputs for the same inputs; of several, the one whose call ends first."""
    passes = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        with torch.no_grad(), _calls(model, _bits) as calls:
            losses(batch)
        passes.append(calls)
    pairs = zip(*passes, strict=False)
    names = (one.name for one, two in pairs if one.before == two.before and one.after != two.after)
    return next(names, type(model).__name__)


@contextlib.contextmanager
def _calls(model: nn.Module, look: Callable[..., Any]) -> Iterator[list[_Call]]:
    """The calls of the model's modules inside the block, in the order in which they end: inner ones before outer ones."""
    begun: list[Any] = []
    ended: list[_Call] = []

    def begin(module: nn.Module, inputs: Any, named: Any) -> None:
        begun.append(look(inputs, named))

    def end(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        ended.append(_Call(name, begun.pop(), look(output)))

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


def _gradients(loss_R: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    loss_R.sum().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found
