"""What ordinary autograd says of a few units, each by itself, and how far an engine may be off: the reference of the self-check.

Comes in: a ``Subject``, units of random tokens. Goes out: norms, losses and a clipped sum; a refusal that names the layer. Rows
are synthetic; this module must not see data.

Shape suffixes: R rows, U units, P coordinates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.errors import Refused
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.clipping import Losses, PerUnitClipper
from dpllm.privacy.packing import Pass, lay_out
from dpllm.privacy.schedule import Packing, Unit

ROUNDED = 1e-6  # relative error of losses that float32 rounds differently
# What rounding does to the reference is measured by rounding otherwise: layers' outputs are moved by as much as rounding moves
# them, and the backward pass is of losses times SCALE. The engine, whose kernels are others, may be off by ROUNDINGS times as
# much, and never by more than SEEN: where a parameter's only contribution is missing it is 1.
SCALE, ROUNDINGS, SEEN = 0.73, 4.0, 0.4
NORMS = 3.0  # tolerances that a unit's norm may be off by at most: clipping rests on it, and no sum shows one that is too small
NORM = "the norm of a unit's gradient"
ADVICE = (
    " Its gradient does not come from ordinary calls of its layer (a weight used outside it, a fused kernel, a layer called "
    "with another layout), so clipping would not bound it. Do not train this layer: change adapter.target_modules or "
    "adapter.last_blocks."
)
Again = Callable[[bool], tuple[Tensor, Tensor]]
"""Whether to round otherwise -> the clipped sum_P, norm_U."""


@dataclass(frozen=True)
class Subject:
    """What is checked: the engine's parts, and the passes that will run."""

    model: nn.Module  # as it trains, without hooks
    parameters: Mapping[str, nn.Parameter]  # all that train; they require gradients and hold none
    losses: Losses
    make_clipper: Callable[[], PerUnitClipper]  # with flat clipping
    device: torch.device
    vocab_size: int  # tokens are drawn below this
    packing: Packing
    pad_id: int  # as in training
    tolerance: float  # relative error that is accepted
    company: bool = True  # whether units are shown in other company, bit for bit

    @property
    def longest(self) -> int:
        """Tokens of the longest row that can run."""
        return longest_row(self.model, self.packing.max_length)

    def laid_out(self, units: Sequence[Unit]) -> Pass:
        """As in training, on the device."""
        return lay_out(units, self.packing, self.pad_id).to(self.device)

    def by_itself(self, unit: Unit, width: int = 0) -> Pass:
        """A unit's rows, padded as batches usually are, and read by the model's own attention."""
        return lay_out([unit], replace(self.packing, alone=True), self.pad_id, width).to(self.device)


def longest_row(model: nn.Module, max_length: int) -> int:
    """Tokens of the longest row that the model can run: a table of positions ends, and rows beyond it fail by themselves."""
    config: Any = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or 0
    endless = getattr(config, "rope_parameters", None) or positions < 1  # XLNet says -1
    return max_length if endless else min(max_length, positions)


def gradients_of(loss_R: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of the sum of the losses, by parameter; the parameters hold none afterwards."""
    loss_R.sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def brute_force(subject: Subject, attention: RowAttention, units: Sequence[Unit]) -> tuple[float, Again, Tensor]:
    """A C between the norms (some units are clipped, others not), the clipped sum at that C with norm_U, and loss_U.

    These two are a function of whether it is to be rounded otherwise. One unit's gradient at a time, so that no more than one is
    held: of a large model's last blocks each is gigabytes.
    """
    width = 0 if subject.packing.alone else _reference_width(subject, attention, units)

    def gradient(unit: Unit, scale: float = 1.0) -> tuple[Tensor, float]:
        loss_R = subject.losses(subject.by_itself(unit, width))
        known = gradients_of(loss_R * scale, subject.parameters)
        parts = [known[name] if name in known else torch.zeros_like(p) for name, p in subject.parameters.items()]
        return torch.cat([part.flatten() for part in parts]).double() / scale, float(loss_R.detach().double().sum())

    norms, losses = [], []
    for unit in units:
        gradient_P, loss = gradient(unit)
        norms.append(float(gradient_P.norm()))
        losses.append(loss)
    if not all(0 < norm < math.inf for norm in norms):
        raise Refused(
            f"self-check: the gradient of a synthetic row has the norm {min(norms)} to {max(norms)}, so nothing can be "
            "compared. The base model's weights or its padding embedding give losses that are not finite: use another one; with "
            "train.precision: fp16, the constant loss scale may overflow: set bf16 or fp32."
        )
    bound = sorted(norms)[(len(norms) - 1) // 2] * 1.01

    def again(otherwise: bool) -> tuple[Tensor, Tensor]:
        scale, moved = (SCALE, _moved(subject.model)) if otherwise else (1.0, contextlib.nullcontext())
        sum_P, others = torch.zeros((), dtype=torch.float64, device=subject.device), []
        with moved:
            for unit, norm in zip(units, norms, strict=True):
                gradient_P, _ = gradient(unit, scale)
                others.append(gradient_P.norm())
                sum_P = sum_P + gradient_P * min(1.0, bound / norm)
        return sum_P, torch.stack(others)

    return bound, again, torch.tensor(losses, dtype=torch.float64, device=subject.device)


def _reference_width(subject: Subject, attention: RowAttention, units: Sequence[Unit]) -> int:
    """0, or ``longest`` where the model reads a row by the largest position that stands beside it, as longrope does."""
    some = subject.laid_out(units)
    with torch.no_grad():
        with attention.of(some):
            together = subject.losses(some).double()

        def away(width: int) -> float:
            alone = torch.cat([subject.losses(subject.by_itself(unit, width)) for unit in units]).double()
            return float((alone - together).abs().max() / together.abs().max())

        near = away(0)  # losses tell much less of positions than gradients do
        return subject.longest if near > ROUNDED and away(subject.longest) < near / 2 else 0


@contextlib.contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """What a layer returns in low precision is moved at random, by as much as rounding moves it."""
    generators: dict[torch.device, torch.Generator] = {}

    def move(layer: nn.Module, inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(1))
        moves = 1 - 2 * torch.rand(output.shape, generator=generator, device=output.device)
        high = output.to(torch.promote_types(output.dtype, torch.float32))
        return (high * (1 + moves * torch.finfo(output.dtype).eps / 2)).to(output.dtype)

    layers = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [layer.register_forward_hook(move) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compare(subject: Subject, seen_U: Tensor, seen_P: Tensor, again: Again) -> float:
    """Largest relative error of a unit's norm and of a parameter's clipped sum; raises naming the worst.

    Where rounding alone moves the reference by more than the tolerance allows (bfloat16, of gradients that nearly vanish), a few
    times as much is accepted: of a sum as far as a contribution that is missing would still be seen, of a norm up to ``NORMS``
    tolerances.
    """
    expected = again(False)
    errors, accepted = _apart(subject.parameters, (seen_P, seen_U), expected), subject.tolerance
    if not all(error <= accepted for error in errors.values()):
        rounding = _apart(subject.parameters, again(True), expected)
        known = {key: moved if math.isfinite(moved) else 0.0 for key, moved in rounding.items()}
        most = {key: NORMS * accepted if key == NORM else SEEN for key in errors}
        over = {key: error / max(accepted, min(most[key], ROUNDINGS * known[key])) for key, error in errors.items()}
        wrong = [key for key in over if not over[key] <= 1.0]
        if wrong:  # a layer is named, if one stands out
            name = max(wrong, key=lambda key: (key != NORM, math.inf if math.isnan(over[key]) else over[key]))
            raise Refused(f"self-check: {name} is off by {errors[name]:.1e} (relative).{ADVICE}")
    return max(errors.values())


def _apart(
    parameters: Mapping[str, nn.Parameter], seen: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """The relative error of each parameter's clipped sum, and the largest of a unit's norm."""
    (seen_P, seen_U), (expected_P, expected_U) = seen, expected
    sizes, whole = [parameter.numel() for parameter in parameters.values()], float(expected_P.norm())
    split = zip(parameters, torch.split(seen_P, sizes), torch.split(expected_P, sizes), strict=True)
    # Some gradients (a key bias) are zero but for rounding.
    sums = {
        f"the clipped sum of {name}": float((seen - part).norm()) / max(float(part.norm()), 1e-3 * whole)
        for name, seen, part in split
    }
    return {**sums, NORM: float(((seen_U - expected_U).abs() / expected_U).max())}
