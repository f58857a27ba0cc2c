"""The check before every run: the engine against brute-force autograd, through the very model that trains.

Comes in: a ``Subject``: the model, a function from batch to losses, a way to make a clipper. Goes out: the largest error
seen, or a refusal that names the layer. Rows are synthetic; this module must not see data. Nothing in a forward pass may be
drawn at random: masks and jitter of a batch follow who else is in it.

Shape suffixes: R rows, T tokens, U units.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.errors import Refused, RoundsByCompany
from dpllm.privacy.clipping import Losses, PerUnitClipper
from dpllm.privacy.draws import calls_of, gradients_of, refuse_random_numbers
from dpllm.privacy.loss import evaluating
from dpllm.privacy.sampling import PhysicalBatch, collate
from dpllm.privacy.schedule import padded_lengths
from dpllm.text.data import TokenSequence, Unit


@dataclass(frozen=True)
class Subject:
    """What is checked: the engine's parts, and the rows that will run."""

    model: nn.Module  # as it trains, without hooks
    parameters: Mapping[str, nn.Parameter]  # all that train; they require gradients and hold none
    losses: Losses
    make_clipper: Callable[[], PerUnitClipper]  # with flat clipping
    device: torch.device
    vocab_size: int  # tokens are drawn below this
    max_length: int  # of a row
    physical_batch_size: int
    pad_id: int  # as in training
    tolerance: float  # relative error that is accepted

    @property
    def longest(self) -> int:
        """Longest row that runs: a table of positions ends, and rows beyond it fail by themselves."""
        config: Any = getattr(self.model, "config", None)
        positions = getattr(config, "max_position_embeddings", None) or 0
        if config is None or getattr(config, "rope_parameters", None) or positions < 1:  # XLNet says -1
            return self.max_length
        return min(self.max_length, positions)

    @property
    def lengths(self) -> list[int]:
        """Those of the physical batches that run, ascending."""
        return sorted({min(length, self.longest) for length in padded_lengths(self.max_length)})

    def zeros(self) -> dict[str, Tensor]:
        """Where a sum of gradients grows."""
        shapes = {name: p.shape for name, p in self.parameters.items()}
        return {name: torch.zeros(shape, dtype=torch.float64, device=self.device) for name, shape in shapes.items()}


def self_check(subject: Subject) -> float:
    """Compares per-unit norms and a clipped sum with ordinary gradients, taken unit by unit from the same forward pass.

    Returns the largest relative error seen, on ragged rows of random tokens, never private ones, and a dummy row. Weights that
    start at zero (LoRA's B) are filled for the time of the check: behind them every gradient is zero and any engine right.

    Then, at the size and at every length of the physical batches that will run: what a unit adds to the sum has the same bits
    alone among rows of nobody as first or last among others. This is compared in whole numbers, without a tolerance.

    Raises:
        RoundsByCompany: Rows influence each other through rounding alone; names the layer.
        Refused: Norms or clipped sums differ by more than the tolerance, rows influence each other, or a forward pass moves
            a buffer or draws random numbers; names the layer.
    """
    device, tolerance = subject.device, subject.tolerance
    lengths = [(11, 6), (17,), (4,), (9,)]
    units = _units_of([[max(2, min(length, subject.max_length)) for length in of_one] for of_one in lengths], subject)
    batch = collate(units, pad_id=0, rows=6).to(device)
    devices = [device] if device.type == "cuda" else []
    with _filled(subject.parameters.values()), torch.random.fork_rng(devices=devices):
        refuse_random_numbers(subject, _still(subject, batch), batch)
        _check_padding(subject, units, batch)
        norm_U, bound, expected = _brute_force(subject, batch)
        clipper = subject.make_clipper()
        try:
            sums = subject.zeros()
            spacing = _spacing(bound, len(batch.unit_R))
            _, seen_U = clipper.add(subject.losses, batch, sums, bound, spacing)
            for part in sums.values():
                part *= spacing
            if subject.physical_batch_size > 1:
                _refuse_experts(subject.model)
                for length in subject.lengths:
                    _check_company(subject, clipper, length, bound)
        finally:
            clipper.close()
    worst = float(((seen_U.double() - norm_U).abs() / norm_U).max())
    if not worst <= tolerance:
        _compare(sums, expected, tolerance)  # names the layer, if one stands out
        raise Refused(f"self-check: per-unit gradient norms are off by {worst:.1e} (relative).{_ADVICE}")
    return max(worst, _compare(sums, expected, tolerance))


def digests(subject: Subject) -> dict[int, str]:
    """Length of a physical batch -> a digest of what synthetic units of it add to the sum, bit for bit.

    Ranks whose digests are equal rounded these rows alike. That is a test on samples and no proof: a kernel that rounds other
    values in another way stays unseen.
    """
    found, alone = {}, subject.physical_batch_size == 1
    with _filled(subject.parameters.values()), contextlib.closing(subject.make_clipper()) as clipper:
        for length in subject.lengths:
            short, long, others = _company(subject, length)
            batches = [[short], [long]] if alone else [[short, *others, long]]
            digest = hashlib.blake2b(digest_size=8)
            for name, part in sorted(_added(subject, clipper, length, 1.0, *batches).items()):
                digest.update(name.encode() + part.cpu().numpy().tobytes())
            found[length] = digest.hexdigest()
    return found


def _refuse_experts(model: nn.Module) -> None:
    """Experts compute on as many tokens as chose them: whose rounding follows whose would take every routing to see."""
    for name, module in model.named_modules():
        if "experts" in name.split(".") or "Expert" in type(module).__name__:
            raise RoundsByCompany(
                f"{name} computes on as many tokens as chose it, so that one unit would change how the tokens of all others are "
                "rounded. Set train.physical_batch_size: 1, which computes every row by itself."
            )


def _company(subject: Subject, length: int) -> tuple[Unit, Unit, list[Unit]]:
    """A unit of one very short row, one of a full row, and others that fill a batch with them; one is one token repeated."""
    rows = subject.physical_batch_size
    lengths = [[max(2, length - 3), length]] * ((rows - 2) // 2)
    lengths += [[max(2, length - 1)]] * (rows - 2 - 2 * len(lengths))
    short, long, *others = _units_of([[2], [length], *lengths], subject)
    if others:
        token = others[0].sequences[0].input_ids[-1]
        others[0] = Unit(tuple(replace(s, input_ids=(token,) * len(s.input_ids)) for s in others[0].sequences))
    return short, long, others


def _check_company(subject: Subject, clipper: PerUnitClipper, length: int, bound: float) -> None:
    """What a unit adds is the same to the last bit among rows of nobody, and first or last among other units."""
    added = partial(_added, subject, clipper, length, bound)
    short, long, others = _company(subject, length)
    apart = added([short], [long], others)
    for first, last in ((short, long), (long, short)):
        beside = [first, *others, last]
        together = added(beside)
        error = {name: float((together[name] - apart[name]).norm()) for name in apart}
        if not any(error.values()):
            continue
        worst = max(error, key=lambda name: error[name])
        relative = error[worst] / max(float(apart[worst].norm()), 1e-30)
        if not relative <= subject.tolerance:
            raise _coupled(relative)
        differ = []
        for unit, row in ((first, 0), (last, -1)):
            alone = _outputs(subject.model, partial(added, [unit]), 0)
            pairs = zip(_outputs(subject.model, partial(added, beside), row), alone, strict=False)
            differ += [name for (name, one), (_, other) in pairs if not torch.equal(one, other)][:1]
        raise RoundsByCompany(
            f"{differ[0] if differ else worst} rounds a row in another way when other rows stand beside it (the gradient of "
            f"{worst} moves by {relative:.1e}, relative), so that one unit would change what all others add. Set "
            "train.physical_batch_size: 1, which computes every row by itself, or try train.precision: fp32."
        )


def _added(
    subject: Subject, clipper: PerUnitClipper, length: int, bound: float, *batches: Sequence[Unit]
) -> dict[str, Tensor]:
    """What physical batches of one length add to the sum, in whole numbers."""
    found, size = subject.zeros(), subject.physical_batch_size
    for some in batches:
        rows = collate(some, subject.pad_id, size, length).to(subject.device)
        clipper.add(subject.losses, rows, found, bound, _spacing(bound, size))
    return found


def _outputs(model: nn.Module, run: Callable[[], object], row: int) -> list[tuple[str, Tensor]]:
    """What each layer without inner layers gives for one row, in the order of the calls."""

    def look(output: object, *_: object) -> Tensor | None:
        return output[row].detach().clone() if isinstance(output, Tensor) and output.dim() > 1 else None

    leaves = {name for name, module in model.named_modules() if next(module.children(), None) is None}
    with calls_of(model, look) as calls:
        run()
    return [(name, after) for name, _, after in calls if name in leaves and after is not None]


def _spacing(bound: float, rows: int) -> float:
    """Of a lattice as fine as exact sums of so many units of this length allow."""
    return math.ldexp(1.0, math.floor(math.log2(bound)) + math.ceil(math.log2(rows)) - 50)


def _coupled(error: float) -> Refused:
    return Refused(
        f"the loss of a row changes by {error:.1e} (relative) with the rows beside it, so clipping could not bound "
        "what one unit does. Batch norm, capacity-limited experts and padding-free attention do this: use another "
        "base model or attention."
    )


def _check_padding(subject: Subject, units: Sequence[Unit], batch: PhysicalBatch) -> None:
    """A row's loss is the same alone, among others, and padded as a long neighbour would pad it."""
    alone = [collate([unit], pad_id=0).to(subject.device) for unit in units]
    with torch.no_grad():
        still = _still(subject, batch)
        still(batch)  # in training mode, where running averages would move
        with evaluating(subject.model):
            alone_R = torch.cat([still(one) for one in alone])
            together_R = still(batch)[batch.unit_R >= 0]
            padded_R = still(collate([units[-1]], pad_id=0, length=subject.longest).to(subject.device))
    alone_R, together_R = torch.cat([alone_R, alone_R[-len(padded_R) :]]), torch.cat([together_R, padded_R])
    error = float(((together_R - alone_R).abs() / alone_R.abs().clamp(min=1e-3)).max())
    if not error <= subject.tolerance:
        raise _coupled(error)


def _still(subject: Subject, batch: PhysicalBatch) -> Losses:
    """The losses, and a refusal where a pass moves a buffer."""
    with torch.no_grad():
        # Whatever ran before, a rehearsal of the longest rows perhaps, may have moved buffers already.
        subject.losses(batch)
    before = {name: buffer.clone() for name, buffer in subject.model.named_buffers()}

    def still(one: PhysicalBatch) -> Tensor:
        loss_R = subject.losses(one)
        for name, buffer in subject.model.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise Refused(
                    f"the buffer {name} changes in a forward pass, so that one row would change the gradients of others, "
                    "unclipped. Running averages and dynamic or long-context RoPE do this: use another base model, or a "
                    "data.max_length within the context that the base model was pretrained on."
                )
        return loss_R

    return still


def _brute_force(subject: Subject, batch: PhysicalBatch) -> tuple[Tensor, float, dict[str, Tensor]]:
    """norm_U, a C between the norms (some units are clipped, others not), and the clipped sum at that C.

    One unit's gradient at a time, so that no more than one is held: of a large model's last blocks each is gigabytes.
    """
    loss_R = subject.losses(batch)

    def gradients(unit: int) -> dict[str, Tensor]:
        found = gradients_of(loss_R[batch.unit_R == unit], subject.parameters, keep_graph=True)
        return {name: gradient.double() for name, gradient in found.items()}

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
    expected = subject.zeros()
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


def _units_of(lengths: Sequence[Sequence[int]], subject: Subject) -> list[Unit]:
    """Random tokens; the first third of each row is a prompt."""
    generator = torch.Generator().manual_seed(20161024)
    units = []
    for of_one in lengths:
        sequences = []
        for length in of_one:
            ids = torch.randint(0, subject.vocab_size, (length,), generator=generator).tolist()
            mask = (False, *(position >= length // 3 for position in range(1, length)))
            sequences.append(TokenSequence(tuple(ids), mask, sum(mask)))
        units.append(Unit(tuple(sequences)))
    return units


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
