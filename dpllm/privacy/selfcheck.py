"""The check before every run: the engine against brute-force autograd, through the very model that trains.

Comes in: the model, a function from batch to losses, a way to make a clipper. Goes out: the largest error seen, or a
refusal that names the layer. Rows are synthetic; this module must not see data.

Shape suffixes: R rows, T tokens, U units.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpllm.errors import Refused, RoundsByCompany
from dpllm.privacy.clipping import Losses, Summer
from dpllm.privacy.plan import padded_lengths
from dpllm.privacy.randomness import refuse_random_numbers
from dpllm.privacy.sampling import PhysicalBatch, collate
from dpllm.text.data import TokenSequence, Unit

TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 5e-2


def self_check(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    losses: Losses,
    make_clipper: Callable[[], Summer],
    *,
    device: torch.device,
    vocab_size: int,
    max_length: int,
    physical_batch_size: int,
    low_precision: bool,
    pad_id: int,
) -> float:
    """Compares per-unit norms and a clipped sum with ordinary gradients, taken unit by unit from the same forward pass.

    Ragged rows of random tokens, never private ones, and a dummy row. Weights that start at zero (LoRA's B) are filled for
    the time of the check, because behind them every gradient would be zero and any engine right.

    Then, at the size and at every length of the physical batches that will run: what a unit adds to the sum has the same bits
    alone among rows of nobody as first or last among others. This is compared in whole numbers, without a tolerance.

    Args:
        model: As it trains, without hooks.
        parameters: All that train, by name.
        losses: From a physical batch to loss_R.
        make_clipper: Hooks a clipper with flat clipping into the model.
        device: Where the model is.
        vocab_size: Tokens are drawn below this.
        max_length: Longest row allowed.
        physical_batch_size: Rows of a physical batch.
        low_precision: The forward pass is not float32; the tolerance is then 5e-2 instead of 1e-3.
        pad_id: Token id for padding, as in training.

    Returns:
        The largest relative error seen.

    Raises:
        RoundsByCompany: Rows influence each other through rounding alone; names the layer.
        Refused: Norms or clipped sums differ by more than the tolerance, rows influence each other, or a forward pass moves
            a buffer or draws random numbers; names the layer.
    """
    tolerance = LOW_PRECISION_TOLERANCE if low_precision else TOLERANCE
    units = _synthetic_units(vocab_size, max_length)
    batch = collate(units, pad_id=0, rows=6).to(device)
    with _filled(parameters.values()), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        refuse_random_numbers(model, parameters, _still(model, losses, batch), batch, tolerance)
        _check_padding(model, losses, units, batch, tolerance, max_length)
        norm_U, bound, expected = _brute_force(parameters, losses(batch), batch)
        clipper = make_clipper()
        try:
            sums = {name: torch.zeros(p.shape, dtype=torch.float64, device=device) for name, p in parameters.items()}
            spacing = _spacing(bound, len(batch.unit_R))
            _, seen_U = clipper.add(losses, batch, sums, bound, spacing)
            for part in sums.values():
                part *= spacing
            lengths: list[int] = []
            if physical_batch_size > 1:
                _refuse_experts(model)
                lengths = sorted({min(length, _longest(model, max_length)) for length in padded_lengths(max_length)})
            for length in lengths:
                company = _company(length, physical_batch_size, vocab_size)

                def added(*batches: Sequence[Unit], length: int = length) -> dict[str, Tensor]:
                    found = {name: torch.zeros_like(part) for name, part in sums.items()}
                    for some in batches:
                        rows = collate(some, pad_id, physical_batch_size, length).to(device)
                        clipper.add(losses, rows, found, bound, _spacing(bound, physical_batch_size))
                    return found

                _check_company(model, added, *company, tolerance)
        finally:
            clipper.close()
    worst = float(((seen_U.double() - norm_U).abs() / norm_U).max())
    if not worst <= tolerance:
        _compare(sums, expected, tolerance)  # names the layer, if one stands out
        raise Refused(f"self-check: per-unit gradient norms are off by {worst:.1e} (relative).{_ADVICE}")
    return max(worst, _compare(sums, expected, tolerance))


def _company(length: int, rows: int, vocab_size: int) -> tuple[Unit, Unit, list[Unit]]:
    """A unit of one very short row, one of a full row, and others that fill a physical batch with them.

    One of the others is a single token again and again.
    """
    lengths = [[max(2, length - 3), length]] * ((rows - 2) // 2)
    lengths += [[max(2, length - 1)]] * (rows - 2 - 2 * len(lengths))
    short, long, *others = _units_of([[2], [length], *lengths], vocab_size)
    if others:
        token = others[0].sequences[0].input_ids[-1]
        others[0] = Unit(tuple(replace(s, input_ids=(token,) * len(s.input_ids)) for s in others[0].sequences))
    return short, long, others


def _refuse_experts(model: nn.Module) -> None:
    """Experts compute on as many tokens as chose them: whose rounding follows whose would take every routing to see."""
    for name, module in model.named_modules():
        if "experts" in name.split(".") or "Expert" in type(module).__name__:
            raise RoundsByCompany(
                f"{name} computes on as many tokens as chose it, so that one unit would change how the tokens of all others are "
                "rounded. Set train.physical_batch_size: 1, which computes every row by itself."
            )


def _check_company(
    model: nn.Module,
    added: Callable[..., dict[str, Tensor]],
    short: Unit,
    long: Unit,
    others: Sequence[Unit],
    tolerance: float,
) -> None:
    """What a unit adds is the same to the last bit among rows of nobody, and first or last among other units."""
    apart = added([short], [long], others)
    for first, last in ((short, long), (long, short)):
        beside = [first, *others, last]
        together = added(beside)
        error = {name: float((together[name] - apart[name]).norm()) for name in apart}
        if not any(error.values()):
            continue
        worst = max(error, key=lambda name: error[name])
        relative = error[worst] / max(float(apart[worst].norm()), 1e-30)
        if not relative <= tolerance:
            raise _coupled(relative)
        differ = []
        for unit, row in ((first, 0), (last, -1)):
            pairs = zip(
                _outputs(model, partial(added, beside), row), _outputs(model, partial(added, [unit]), 0), strict=False
            )
            differ += [name for (name, one), (_, other) in pairs if not torch.equal(one, other)][:1]
        raise RoundsByCompany(
            f"{differ[0] if differ else worst} rounds a row in another way when other rows stand beside it (the gradient of "
            f"{worst} moves by {relative:.1e}, relative), so that one unit would change what all others add. Set "
            "train.physical_batch_size: 1, which computes every row by itself, or try train.precision: fp32."
        )


def _outputs(model: nn.Module, run: Callable[[], object], row: int) -> list[tuple[str, Tensor]]:
    """What each layer without inner layers gives for one row, in the order of the calls."""
    found: list[tuple[str, Tensor]] = []

    def hook(name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() > 1:
            found.append((name, output[row].detach().clone()))

    leaves = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: hook(name, output))
        for name, module in leaves
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _spacing(bound: float, rows: int) -> float:
    """Of a lattice as fine as exact sums of so many units of this length allow."""
    return math.ldexp(1.0, math.floor(math.log2(bound)) + math.ceil(math.log2(rows)) - 50)


def _relative(one_R: Tensor, other_R: Tensor) -> Tensor:
    return (one_R - other_R).abs() / other_R.abs().clamp(min=1e-3)


def _coupled(error: float) -> Refused:
    return Refused(
        f"the loss of a row changes by {error:.1e} (relative) with the rows beside it, so clipping could not bound "
        "what one unit does. Batch norm, capacity-limited experts and padding-free attention do this: use another "
        "base model or attention."
    )


def _check_padding(
    model: nn.Module,
    losses: Losses,
    units: Sequence[Unit],
    batch: PhysicalBatch,
    tolerance: float,
    max_length: int,
) -> None:
    training = [module for module in model.modules() if module.training]
    alone = [collate([unit], pad_id=0).to(batch.unit_R.device) for unit in units]
    with torch.no_grad():
        still = _still(model, losses, batch)
        try:
            still(batch)  # in training mode, where running averages would move
            model.eval()
            alone_R = torch.cat([still(one) for one in alone])
            together_R = still(batch)[batch.unit_R >= 0]
            padded_R = still(_padded(alone[-1], _longest(model, max_length)))  # as a long neighbour would pad it
        finally:
            for module in training:
                module.training = True
    alone_R, together_R = torch.cat([alone_R, alone_R[-len(padded_R) :]]), torch.cat([together_R, padded_R])
    error = float(_relative(together_R, alone_R).max())
    if not error <= tolerance:
        raise _coupled(error)


def _still(model: nn.Module, losses: Losses, batch: PhysicalBatch) -> Losses:
    """The losses, and a refusal where a pass moves a buffer."""
    with torch.no_grad():
        losses(batch)  # whatever ran before, a rehearsal of the longest rows perhaps, may have moved buffers already
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def still(one: PhysicalBatch) -> Tensor:
        loss_R = losses(one)
        _check_buffers(model, before)
        return loss_R

    return still


def _check_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise Refused(
                f"the buffer {name} changes in a forward pass, so that one row would change the gradients of others, "
                "unclipped. Running averages and dynamic or long-context RoPE do this: use another base model, or a "
                "data.max_length within the context that the base model was pretrained on."
            )


def _longest(model: nn.Module, max_length: int) -> int:
    config: Any = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or 0
    if config is None or getattr(config, "rope_parameters", None) or positions < 1:  # XLNet says -1
        return max_length
    return min(max_length, positions)  # a table of positions ends; rows beyond it fail by themselves


def _brute_force(
    parameters: Mapping[str, nn.Parameter], loss_R: Tensor, batch: PhysicalBatch
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """norm_U, a C between the norms (some units are clipped, others not), and the clipped sum at that C.

    One unit's gradient at a time, so that no more than one is held: of a large model's last blocks each is gigabytes.
    """

    def gradients(unit: int) -> dict[str, Tensor]:
        loss_R[batch.unit_R == unit].sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        found = {name: p.grad for name, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        return {name: g.double() for name, g in found.items() if g is not None}

    norms = []
    for unit in range(batch.num_units):
        squares = [gradient.square().sum() for gradient in gradients(unit).values()]
        norms.append(float(torch.stack(squares).sum().sqrt()) if squares else 0.0)
    if not all(0 < norm < math.inf for norm in norms):
        raise Refused(
            f"self-check: the gradient of a synthetic row has the norm {min(norms)} to {max(norms)}, so that nothing can be "
            "compared. The base model's weights or its padding embedding make losses that are not finite: use another one."
        )
    bound = sorted(norms)[(len(norms) - 1) // 2] * 1.01
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for unit, norm in enumerate(norms):
        for name, gradient in gradients(unit).items():
            expected[name].add_(gradient, alpha=min(1.0, bound / norm))
    return torch.tensor(norms, dtype=torch.float64, device=loss_R.device), bound, expected


def _compare(sums: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> float:
    """Largest relative error of a parameter's clipped sum; raises naming the worst."""
    whole = float(torch.stack([part.norm() for part in expected.values()]).norm())
    errors = {}
    for name, part in expected.items():
        # Some gradients (a key bias) are zero but for rounding.
        errors[name] = float((sums[name] - part).norm()) / max(float(part.norm()), 1e-3 * whole)
    name = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    if not errors[name] <= tolerance:
        raise Refused(f"self-check: the clipped sum of {name} is off by {errors[name]:.1e} (relative).{_ADVICE}")
    return errors[name]


_ADVICE = (
    " Its gradient does not come from ordinary calls of its layer (a weight used outside it, a fused kernel, a layer called "
    "with another layout), so that clipping would not bound it. Do not train this layer: change adapter.target_modules or "
    "adapter.last_blocks."
)


def _synthetic_units(vocab_size: int, max_length: int) -> list[Unit]:
    lengths = [(11, 6), (17,), (4,), (9,)]
    return _units_of([[max(2, min(length, max_length)) for length in of_one] for of_one in lengths], vocab_size)


def _units_of(lengths: Sequence[Sequence[int]], vocab_size: int) -> list[Unit]:
    """Random tokens; the first third of each row is a prompt."""
    generator = torch.Generator().manual_seed(20161024)
    units = []
    for of_one in lengths:
        sequences = []
        for length in of_one:
            ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
            mask = (False, *(position >= length // 3 for position in range(1, length)))
            sequences.append(TokenSequence(tuple(ids), mask, sum(mask)))
        units.append(Unit(tuple(sequences)))
    return units


def _padded(batch: PhysicalBatch, length: int) -> PhysicalBatch:
    extra = (0, max(0, length - batch.input_ids_RT.shape[1]))
    return replace(
        batch,
        input_ids_RT=functional.pad(batch.input_ids_RT, extra),
        loss_mask_RT=functional.pad(batch.loss_mask_RT, extra),
    )


@contextlib.contextmanager
def _filled(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Small random values in every parameter that is zero, for the time of the block."""
    zeros = [p for p in parameters if not bool(p.detach().any())]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in zeros:
            p.copy_(0.02 * torch.randn(p.shape, generator=generator).to(p.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()
