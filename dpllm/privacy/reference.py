"""The reference of the self-check: ordinary autograd on a few units, one by one, and how much an engine may differ.

Comes in: a ``Subject``, units of random tokens. Goes out: norms, losses and a clipped sum; a refusal that names the layer. All
rows are synthetic; this module must not see data.

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

ROUNDED = 1e-6  # relative error of losses due to float32 rounding
# The effect of rounding on the reference is measured by perturbing it: layers' outputs move by as much as rounding moves them,
# and losses are multiplied by SCALE before the backward pass. The engine, which uses other kernels, may differ by ROUNDINGS times
# that, and never by more than SEEN: if a parameter's only contribution is missing, the difference is 1.
SCALE, ROUNDINGS, SEEN = 0.73, 4.0, 0.4
NORMS = 3.0  # maximum error of a unit's norm, in tolerances: clipping relies on it, and no sum reveals a norm that is too small
NORM = "the norm of a unit's gradient"
ADVICE = (
    " Its gradient does not come from ordinary calls of its layer (a weight used outside it, a fused kernel, a layer called "
    "with another layout), so clipping would not bound it. Do not train this layer: change adapter.target_modules or "
    "adapter.last_blocks."
)
Rerun = Callable[[bool], tuple[Tensor, Tensor]]
"""Whether to perturb rounding -> the clipped sum_P, norm_U."""


@dataclass(frozen=True)
class Subject:
    """The object of the self-check: the engine's parts, and the passes that will run."""

    model: nn.Module  # as it trains, without hooks
    parameters: Mapping[str, nn.Parameter]  # all trainable ones; they require gradients and hold none
    losses: Losses
    make_clipper: Callable[[], PerUnitClipper]  # with flat clipping
    device: torch.device
    vocab_size: int  # synthetic tokens are below this
    packing: Packing
    pad_id: int  # as in training
    tolerance: float  # accepted relative error
    batch_invariance: bool = True  # whether to compare units bit for bit among different other units

    @property
    def longest(self) -> int:
        """Number of tokens of the longest possible row."""
        return longest_row(self.model, self.packing.max_length)

    def laid_out(self, units: Sequence[Unit]) -> Pass:
        """A pass as in training, on the device."""
        return lay_out(units, self.packing, self.pad_id).to(self.device)

    def by_itself(self, unit: Unit, width: int = 0) -> Pass:
        """A unit's rows in a batch with ordinary padding, read by the model's own attention."""
        return lay_out([unit], replace(self.packing, alone=True), self.pad_id, width).to(self.device)


def longest_row(model: nn.Module, max_length: int) -> int:
    """Number of tokens of the longest row that the model can run, limited by a table of positions."""
    config: Any = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or 0
    endless = getattr(config, "rope_parameters", None) or positions < 1  # XLNet says -1
    return max_length if endless else min(max_length, positions)


def gradients_of(loss_R: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradients of the sum of the losses, by parameter; afterwards parameters hold no gradient."""
    loss_R.sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def brute_force(subject: Subject, attention: RowAttention, units: Sequence[Unit]) -> tuple[float, Rerun, Tensor]:
    """A C between the norms (so that some units are clipped), a function for the clipped sum and norm_U, and loss_U.

    The function takes whether to perturb rounding. Only one unit's gradient is held at a time, since each may take gigabytes.
    """
    width = 0 if subject.packing.alone else _reference_width(subject, attention, units)

    def gradient(unit: Unit, scale: float = 1.0) -> tuple[Tensor, float]:
        loss_R = subject.losses(subject.by_itself(unit, width))
        by_name = gradients_of(loss_R * scale, subject.parameters)
        parts = [by_name[name] if name in by_name else torch.zeros_like(p) for name, p in subject.parameters.items()]
        return torch.cat([part.flatten() for part in parts]).double() / scale, float(loss_R.detach().double().sum())

    norms, losses = [], []
    for unit in units:
        gradient_P, loss = gradient(unit)
        norms.append(float(gradient_P.norm()))
        losses.append(loss)
    if not all(0 < norm < math.inf for norm in norms):
        raise Refused(
            f"self-check: the gradient of a synthetic row has the norm {min(norms)} to {max(norms)}, so nothing can be compared. "
            "The base model's weights or its padding embedding may give losses that are not finite: use another model. With "
            "train.precision: fp16, the constant loss scale may overflow: set bf16 or fp32."
        )
    bound = sorted(norms)[(len(norms) - 1) // 2] * 1.01

    def rerun(otherwise: bool) -> tuple[Tensor, Tensor]:
        scale, moved = (SCALE, _moved(subject.model)) if otherwise else (1.0, contextlib.nullcontext())
        sum_P, norms_now = torch.zeros((), dtype=torch.float64, device=subject.device), []
        with moved:
            for unit, norm in zip(units, norms, strict=True):
                gradient_P, _ = gradient(unit, scale)
                norms_now.append(gradient_P.norm())
                sum_P = sum_P + gradient_P * min(1.0, bound / norm)
        return sum_P, torch.stack(norms_now)

    return bound, rerun, torch.tensor(losses, dtype=torch.float64, device=subject.device)


def _reference_width(subject: Subject, attention: RowAttention, units: Sequence[Unit]) -> int:
    """0, or ``longest`` if the model reads a row depending on the largest position in the pass, as longrope does."""
    batch = subject.laid_out(units)
    with torch.no_grad():
        with attention.of(batch):
            together = subject.losses(batch).double()

        def away(width: int) -> float:
            alone = torch.cat([subject.losses(subject.by_itself(unit, width)) for unit in units]).double()
            return float((alone - together).abs().max() / together.abs().max())

        near = away(0)  # losses depend on positions much less than gradients do
        return subject.longest if near > ROUNDED and away(subject.longest) < near / 2 else 0


@contextlib.contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """Perturbs layers' low-precision outputs at random, by as much as rounding moves them."""
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


def compare(subject: Subject, seen_U: Tensor, seen_P: Tensor, rerun: Rerun) -> float:
    """Returns the largest relative error of a unit's norm or a parameter's clipped sum; a refusal names the worst.

    If rounding alone moves the reference by more than the tolerance (bfloat16 with tiny gradients), a few times that is accepted:
    for a sum, as long as a missing contribution would still show; for a norm, up to ``NORMS`` tolerances.
    """
    expected = rerun(False)
    errors, accepted = _apart(subject.parameters, (seen_P, seen_U), expected), subject.tolerance
    if not all(error <= accepted for error in errors.values()):
        rounding = _apart(subject.parameters, rerun(True), expected)
        finite = {key: moved if math.isfinite(moved) else 0.0 for key, moved in rounding.items()}
        limits = {key: NORMS * accepted if key == NORM else SEEN for key in errors}
        over = {key: error / max(accepted, min(limits[key], ROUNDINGS * finite[key])) for key, error in errors.items()}
        wrong = [key for key in over if not over[key] <= 1.0]
        if wrong:  # names a layer, if one stands out
            name = max(wrong, key=lambda key: (key != NORM, math.inf if math.isnan(over[key]) else over[key]))
            raise Refused(f"self-check: {name} is off by {errors[name]:.1e} (relative).{ADVICE}")
    return max(errors.values())


def _apart(
    parameters: Mapping[str, nn.Parameter], seen: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """The relative error of each parameter's clipped sum, and the largest relative error of a norm."""
    (seen_P, seen_U), (expected_P, expected_U) = seen, expected
    sizes, total_norm = [parameter.numel() for parameter in parameters.values()], float(expected_P.norm())
    split = zip(parameters, torch.split(seen_P, sizes), torch.split(expected_P, sizes), strict=True)
    # Some gradients (a key bias) are zero up to rounding.
    sums = {
        f"the clipped sum of {name}": float((seen - part).norm()) / max(float(part.norm()), 1e-3 * total_norm)
        for name, seen, part in split
    }
    return {**sums, NORM: float(((seen_U - expected_U).abs() / expected_U).max())}
