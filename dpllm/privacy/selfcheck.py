"""The check before every run: the engine against brute-force autograd, through the very model that trains.

Comes in: a ``Subject``: the model, a function from batch to losses, a way to make a clipper. Goes out: ``Checked``, or a refusal
that names the layer. Rows are synthetic; this module must not see data.

Shape suffixes: R rows, T tokens, U units.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.errors import Refused, RoundsByCompany
from dpllm.privacy.clipping import Losses, PerUnitClipper
from dpllm.privacy.draws import calls_of, gradients_of, refuse_random_numbers
from dpllm.privacy.loss import evaluating
from dpllm.privacy.sampling import PhysicalBatch, collate
from dpllm.privacy.schedule import Shape, TokenSequence, Unit
from dpllm.progress import tell

_Added = tuple[dict[str, Tensor], Tensor, Tensor]  # see ``_added``


@dataclass(frozen=True)
class Subject:
    """What is checked: the engine's parts, and the rows that will run."""

    model: nn.Module  # as it trains, without hooks
    parameters: Mapping[str, nn.Parameter]  # all that train; they require gradients and hold none
    losses: Losses
    make_clipper: Callable[[], PerUnitClipper]  # with flat clipping
    device: torch.device
    vocab_size: int  # tokens are drawn below this
    shapes: Sequence[Shape]  # of the physical batches, by ascending length
    pad_id: int  # as in training
    tolerance: float  # relative error that is accepted
    rows_each: int = 1  # of an example: 2 of a preference pair, which is company to nobody else

    @property
    def running(self) -> list[Shape]:
        """The shapes that run, ascending."""
        longest = longest_row(self.model, self.shapes[-1].length)
        return [shape._replace(length=min(shape.length, longest)) for shape in self.shapes]

    def zeros(self) -> dict[str, Tensor]:
        """Where a sum of gradients grows."""
        shapes = {name: p.shape for name, p in self.parameters.items()}
        return {name: torch.zeros(shape, dtype=torch.float64, device=self.device) for name, shape in shapes.items()}


def longest_row(model: nn.Module, max_length: int) -> int:
    """Tokens of the longest row that the model can run: a table of positions ends, and rows beyond it fail by themselves."""
    config: Any = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or 0
    endless = getattr(config, "rope_parameters", None) or positions < 1  # XLNet says -1
    return max_length if endless else min(max_length, positions)


@dataclass(frozen=True)
class Checked:
    """What a self-check found."""

    error: float  # largest relative error against brute-force autograd; 0 without a Plan
    # Shape of a physical batch -> a digest of what synthetic units of it add to the sum, bit for bit. Processes with equal
    # digests rounded these rows alike: a test on samples, no proof.
    digests: dict[Shape, str] = field(default_factory=dict)
    known: bool = False  # that rows do not round by company was shown before, and the first digest is as it was then


def self_check(subject: Subject, known: Mapping[Shape, str], passed: Mapping[Shape, str]) -> Checked:
    """Compares per-unit norms and a clipped sum with ordinary gradients, taken unit by unit from the same forward pass.

    On ragged rows of random tokens, never private ones, and a padding row. Weights that start at zero (LoRA's B) are filled
    for the time of the check: behind them every gradient is zero and any engine right.

    Then, in every shape of the physical batches that will run: what a unit adds to the sum has the same bits whoever else is in
    the batch and wherever it stands. This is compared in whole numbers, without a tolerance, and rests on shapes, kernels and the
    model, not on data: with the digests ``known`` of such a check, made where all of these were the same, the batch of the
    shortest length runs alone, and all of them only if it adds other bits now. Shapes that ``passed`` a moment ago are left out.

    Raises:
        RoundsByCompany: Rows influence each other through rounding alone; names the layer.
        Refused: Norms or clipped sums differ by more than the tolerance, rows influence each other, or a forward pass moves
            a buffer or draws random numbers; names the layer.
    """
    device, tolerance, longest = subject.device, subject.tolerance, subject.shapes[-1].length
    lengths = [(9, 5), (13,), (4,)]  # as few tokens as show rows that differ, and a unit of two
    units = _units_of([[max(2, min(length, longest)) for length in of_one] for of_one in lengths], subject)
    batch = collate(units, pad_id=0, rows=5 * subject.rows_each).to(device)
    devices = [device] if device.type == "cuda" else []
    with _filled(subject.parameters.values()), torch.random.fork_rng(devices=devices):
        tell("Self-check: gradients", public=True)
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
            digests, as_known = _check_shapes(subject, clipper, known, passed)
        finally:
            clipper.close()
    worst = float(((seen_U.double() - norm_U).abs() / norm_U).max())
    error = _compare(sums, expected, tolerance)  # names the layer, if one stands out
    if not worst <= tolerance:
        raise Refused(f"self-check: per-unit gradient norms are off by {worst:.1e} (relative).{_ADVICE}")
    return Checked(max(worst, error), digests, as_known)


def _check_shapes(
    subject: Subject, clipper: PerUnitClipper, known: Mapping[Shape, str], passed: Mapping[Shape, str]
) -> tuple[dict[Shape, str], bool]:
    """A digest of each shape that runs, and whether they are the known ones, of which only the first was computed again."""
    if any(shape.rows > subject.rows_each for shape in subject.running):
        _refuse_experts(subject.model)
    digests: dict[Shape, str] = {}
    for done, shape in enumerate(subject.running):
        tell("Self-check: rows beside others", done, len(subject.running), public=True)
        run = partial(_added, subject, clipper, shape)
        if shape in passed:
            digests[shape] = passed[shape]
            continue
        long, short = _company(subject, shape)
        together = run([*long, *short])
        digests[shape] = _digest(together[0])
        if not done and known.get(shape) == digests[shape]:
            return dict(known), True
        try:
            if shape.rows > subject.rows_each:
                _check_company(subject, run, long, short, together)
        except RoundsByCompany as refusal:
            refusal.place, refusal.passed = done, {one: digests[one] for one in subject.running[:done]}
            raise
    return digests, False


def _digest(sums: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, part in sorted(sums.items()):
        digest.update(name.encode() + part.cpu().numpy().tobytes())
    return digest.hexdigest()


def has_experts(model: nn.Module) -> str | None:
    """The name of a module that computes on as many tokens as chose it, whose rounding would take every routing to see."""
    for name, module in model.named_modules():
        if "experts" in name.split(".") or "Expert" in type(module).__name__:
            return str(name)
    return None


def _refuse_experts(model: nn.Module) -> None:
    if name := has_experts(model):
        raise RoundsByCompany(
            f"{name} computes on however many tokens were routed to it, so one unit would change how the tokens of others "
            "are rounded. Set train.physical_batch_size: 1, which computes each row by itself."
        )


def _company(subject: Subject, shape: Shape) -> tuple[list[Unit], list[Unit]]:
    """Units that fill a batch: long rows, alone and in pairs, one pair of one token repeated; and as many very short rows."""
    length, rows = shape.length, shape.rows // subject.rows_each
    few = rows // 2
    pairs, odd = divmod(rows - few - 1, 2)
    lengths = [[length], *[[max(2, length - 3), length]] * pairs, *[[max(2, length - 1)]] * odd]
    found = _units_of([*lengths, *([min(length, 2 + number % 3)] for number in range(few))], subject)
    long, short = found[: len(lengths)], found[len(lengths) :]
    if pairs:
        token = long[1].sequences[0].input_ids[-1]
        long[1] = Unit(tuple(replace(s, input_ids=(token,) * len(s.input_ids)) for s in long[1].sequences))
    return long, short


def _check_company(
    subject: Subject, run: Callable[..., _Added], long: Sequence[Unit], short: Sequence[Unit], together: _Added
) -> None:
    """Losses, norms and sum of a full batch are those of two batches in which every unit has another place and other company.

    One holds the short rows at the beginning, the other the long ones at the end, and both rows that learn nothing. Kernels that
    are chosen by what a batch holds, by its longest row or by whether anything is padded, differ there, and so do those that mix
    rows. A full row stands in every place once: a kernel that treats rows by their place, as tails of a tile are, gives some unit
    other bits. Losses and norms are compared too, since the rounding of a sum may hide a bit.
    """
    rows = sum(len(unit.sequences) for unit in long)
    nothing = TokenSequence((subject.pad_id,) * 2, (False, False), 1)
    moved = [Unit((nothing,) * subject.rows_each)] * len(short) + [*long]
    (whole, loss_R, norm_U), (apart, apart_R, apart_U) = together, run(moved, short)
    same = torch.equal(loss_R, apart_R[len(short) * subject.rows_each :]) and torch.equal(norm_U, apart_U[len(short) :])
    error = {name: float((whole[name] - apart[name]).norm()) for name in apart}
    if same and not any(error.values()):
        return
    worst = max(error, key=lambda name: error[name])
    relative = error[worst] / max(float(apart[worst].norm()), 1e-30)
    if not relative <= subject.tolerance:
        raise _coupled(relative)
    differ = []
    for row, batch, place in ((0, moved, len(short) * subject.rows_each), (rows - 1, moved, -1), (rows, short, 0)):
        pair = ([*long, *short], row), (batch, place)
        one, other = (_outputs(subject.model, partial(run, some), at) for some, at in pair)
        differ += [name for (name, x), (_, y) in zip(one, other, strict=False) if not torch.equal(x, y)][:1]
    raise RoundsByCompany(
        f"{differ[0] if differ else worst} rounds a row differently depending on the other rows in the batch (the gradient of "
        f"{worst} moves by {relative:.1e}, relative), so that one unit would change the contributions of others. Set "
        "train.physical_batch_size: 1, which computes each row by itself, or try train.precision: fp32."
    )


def _added(subject: Subject, clipper: PerUnitClipper, shape: Shape, *batches: Sequence[Unit]) -> _Added:
    """What physical batches of one shape add to the sum, in whole numbers; losses of their rows, norms of their units."""
    sums, losses, norms = subject.zeros(), [], []
    for some in batches:
        batch = collate(some, subject.pad_id, shape.rows, shape.length).to(subject.device)
        loss_R, norm_U = clipper.add(subject.losses, batch, sums, 1.0, _spacing(1.0, shape.rows))
        losses.append(loss_R[batch.unit_R >= 0])
        norms.append(norm_U)
    return sums, torch.cat(losses), torch.cat(norms)


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
        f"the loss of a row changes by {error:.1e} (relative) with the other rows in the batch, so clipping could not bound the "
        "influence of one unit. Batch norm, capacity-limited experts and padding-free attention do this: use another base "
        "model or attention."
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
            padded_R = still(collate([units[-1]], pad_id=0, length=subject.running[-1].length).to(subject.device))
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
                    f"the buffer {name} changes in a forward pass, so one row would change the gradients of others, unclipped. "
                    "Running averages and dynamic or long-context RoPE do this: use another base model, or a data.max_length "
                    "within the context that the base model was pretrained on."
                )
        return loss_R

    return still


def _brute_force(subject: Subject, batch: PhysicalBatch) -> tuple[Tensor, float, dict[str, Tensor]]:
    """norm_U, a C between the norms (some units are clipped, others not), and the clipped sum at that C.

    One unit's gradient at a time, so that no more than one is held: of a large model's last blocks each is gigabytes. Then those
    of all together, each loss times its factor: gradients are linear in the loss.
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
            f"self-check: the gradient of a synthetic row has the norm {min(norms)} to {max(norms)}, so nothing can be "
            "compared. The base model's weights or its padding embedding give losses that are not finite: use another one; with "
            "train.precision: fp16, the constant loss scale may overflow: set bf16 or fp32."
        )
    bound = sorted(norms)[(len(norms) - 1) // 2] * 1.01
    factor_U = torch.tensor([min(1.0, bound / norm) for norm in norms], device=loss_R.device)
    owned_R = batch.unit_R >= 0
    clipped = gradients_of(loss_R[owned_R] * factor_U[batch.unit_R[owned_R]], subject.parameters, keep_graph=True)
    expected = {name: clipped[name].double() if name in clipped else zero for name, zero in subject.zeros().items()}
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
    "with another layout), so clipping would not bound it. Do not train this layer: change adapter.target_modules or "
    "adapter.last_blocks."
)


def _units_of(lengths: Sequence[Sequence[int]], subject: Subject) -> list[Unit]:
    """Random tokens; the first third of each row is a prompt. An example of two rows has them about equally long."""
    generator = torch.Generator().manual_seed(20161024)
    units = []
    for of_one in lengths:
        sequences = []
        for length in [max(2, length - less) for length in of_one for less in range(subject.rows_each)]:
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
