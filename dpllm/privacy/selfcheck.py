"""The check before every run: compares the engine with brute-force autograd on the model that will train.

Comes in: a ``Subject``: the model, a function from a pass to losses, a factory of clippers. Goes out: ``Checked``, or a refusal
that names the layer. All rows are synthetic; this module must not see data.

Shape suffixes: R rows, M tokens, U units, P coordinates.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.errors import NotBatchInvariant, Refused
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.clipping import Losses, PerUnitClipper
from dpllm.privacy.packing import Pass
from dpllm.privacy.reference import Subject, brute_force, compare, gradients_of
from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.progress import tell

MOST_UNITS = 512  # units in a pass of the batch-invariance test
MOST_SHORT = 12  # maximum rows of two tokens among them: each unit's gradient is held
SEEDS = 7, 8  # for two passes over the same rows
NOBODY = -1  # number of a unit that learns nothing


@dataclass(frozen=True)
class Checked:
    """The result of a self-check."""

    error: float  # largest relative error against brute-force autograd; 0 without a Plan
    # Digest of the exact sum over synthetic units. Processes with equal digests rounded these rows alike: a test on samples, not
    # a proof.
    digest: str = ""


def self_check(subject: Subject) -> Checked:
    """Compares losses, per-unit norms and a clipped sum with the ordinary gradients of each unit by itself.

    It uses ragged rows of random tokens, never private ones. The reference reads each unit with the model's own attention and
    ordinary padding; the engine reads all units in one pass. Weights that start at zero (LoRA's B) are filled during the check:
    else every gradient before them is zero, and any engine would pass.

    Then it checks that a unit's contribution has the same bits whatever other units are in the pass and at any position. This
    compares integers without a tolerance; the outcome depends on shapes, kernels and the model, not on data.

    Raises:
        NotBatchInvariant: Rows influence each other only through rounding.
        Refused: Losses, norms or clipped sums differ by more than the tolerance, rows influence each other, or a forward pass
            moves a buffer or draws random numbers; names the layer.
    """
    longest, device = subject.longest, subject.device
    # The fewest tokens with rows of different lengths and, unless each row has its own pass, a unit of two rows.
    lengths = [(9,), (13,), (4,)] if subject.packing.alone else [(9, 5), (13,), (4,)]
    if not subject.packing.alone and subject.packing.rows_each * sum(map(sum, lengths)) > subject.packing.room:
        lengths = [(4, 2), (6,), (3,)]  # also as pairs, they fit the smallest pass, of 32 tokens
    units = _units_of([[max(2, min(length, longest)) for length in of_one] for of_one in lengths], subject)
    attention = RowAttention(subject.model)
    devices = [device] if device.type == "cuda" else []
    with _filled(subject.parameters.values()), torch.random.fork_rng(devices=devices):
        tell("Self-check: gradients", public=True)
        first = subject.laid_out(units[:1] if subject.packing.alone else units)
        with attention.of(first):
            still = _still(subject, first)
            _refuse_random_numbers(subject, still, first)
        _check_longest(subject, attention, still)
        bound, rerun, loss_U = brute_force(subject, attention, units)
        clipper = subject.make_clipper()
        try:
            spacing = _spacing(bound, len(units))
            groups = [[unit] for unit in units] if subject.packing.alone else [units]
            seen_U, sum_P, seen_loss_U = _added(subject, clipper, groups, bound, spacing)
            sum_P *= spacing
            _check_losses(subject, seen_loss_U, loss_U)
            digest = ""
            if subject.batch_invariance:
                digest = (_digest_alone if subject.packing.alone else _check_company)(subject, clipper)
        finally:
            clipper.close()
        error = compare(subject, seen_U, sum_P, rerun)  # names the layer, if one stands out
    return Checked(error, digest)


def _added(
    subject: Subject, clipper: PerUnitClipper, passes: Iterable[Sequence[Unit]], bound: float, spacing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """norm_U, sum_P in integers, and loss_U of passes of these units."""
    size = sum(parameter.numel() for parameter in subject.parameters.values())
    sum_P, norms, losses = torch.zeros(size, dtype=torch.float64, device=subject.device), [], []
    for units in passes:
        batch = subject.laid_out(units)
        loss_R, norm_U = clipper.add(subject.losses, batch, sum_P, bound, spacing)
        owners = [row.unit for row in batch.rows[:: subject.packing.rows_each]]
        owner_R = torch.tensor(owners, device=loss_R.device)
        losses.append(loss_R.double().new_zeros(len(norm_U)).index_add_(0, owner_R, loss_R.double()))
        norms.append(norm_U.double())
    return torch.cat(norms), sum_P, torch.cat(losses)


def _check_losses(subject: Subject, seen_U: Tensor, loss_U: Tensor) -> None:
    error = float(((seen_U - loss_U).abs() / loss_U.abs().clamp(min=1e-3)).max())
    if not error <= subject.tolerance:
        raise _coupled(subject, error)


def _check_longest(subject: Subject, attention: RowAttention, losses: Losses) -> None:
    """Checks the longest row, which some models read only in part, and which may change state that the next pass reads."""
    units = _units_of([(subject.longest,)], subject)
    batch = subject.laid_out(units)
    with torch.no_grad():
        with attention.of(batch):
            loss_R = losses(batch).double()
        if not subject.packing.alone:
            _check_losses(subject, loss_R, subject.losses(subject.by_itself(units[0], subject.longest)).double())


def has_experts(model: nn.Module) -> bool:
    """Whether a module's batch depends on routing, so that testing its rounding would need every possible routing."""
    return any("experts" in name.split(".") or "Expert" in type(part).__name__ for name, part in model.named_modules())


def _company(subject: Subject) -> list[Unit]:
    """Units that fill most of a pass: the longest row, a unit of two rows, one repeated token, and rows of many lengths.

    The last rows have two tokens.
    """
    longest, rows_each = subject.longest, subject.packing.rows_each
    lengths, room, short = [[longest]], subject.packing.room - rows_each * longest, 0
    for number in range(min(subject.packing.most_units, MOST_UNITS) - 1):
        length = 2 + (7 * number * number + 3 * number) % max(1, longest - 1)
        of_one = [length, max(2, length // 2)] if number == 1 else [length]
        if rows_each * sum(of_one) > room:
            of_one = [2]
            short += 1
        if rows_each * sum(of_one) > room or short > MOST_SHORT:
            break
        lengths.append(of_one)
        room -= rows_each * sum(of_one)
    units = _units_of(lengths, subject)
    if len(units) > 2:
        token = units[2].sequences[0].input_ids[-1]
        units[2] = Unit(tuple(replace(s, input_ids=(token,) * len(s.input_ids)) for s in units[2].sequences))
    return units


def _check_company(subject: Subject, clipper: PerUnitClipper) -> str:
    """Checks that losses, norms and sum of a full pass are the same in passes with other positions and other units.

    One pass has the units in reverse; two others have every second unit each, after or before filler rows of odd lengths. Kernels
    whose rounding depends on position differ there, and so do those that mix rows. Losses and norms are also compared, since
    rounding of the sum may hide a bit. Returns a digest of the sum.
    """
    tell("Self-check: rows beside others", public=True)
    units = _company(subject)
    run = partial(_added, subject, clipper, bound=1.0, spacing=_spacing(1.0, len(units)))
    norm_U, sum_P, loss_U = run(passes=[units])
    numbered = list(enumerate(units))
    even, odd = numbered[::2], numbered[1::2]
    halves = [[*_filler(subject, even, 3), *even], *([[*odd, *_filler(subject, odd, 2)]] if odd else [])]
    for passes in ([numbered[::-1]], halves):
        other_norm, other_P, other_loss = run(passes=[[unit for _, unit in members] for members in passes])
        number_U = torch.tensor([number for members in passes for number, _ in members], device=norm_U.device)
        same_U = (number_U == NOBODY) | (other_norm == norm_U[number_U]) & (other_loss == loss_U[number_U])
        if bool(same_U.all()) and torch.equal(other_P, sum_P):
            continue
        relative = float((other_P - sum_P).norm() / sum_P.norm().clamp(min=1e-30))
        if not relative <= subject.tolerance:
            raise _coupled(subject, relative)
        raise NotBatchInvariant(
            "the model rounds a row differently depending on its place and on the other rows in a pass (the sum moves by "
            f"{relative:.1e}, relative), so that one unit would change the contributions of others."
        )
    return _digest(sum_P)


def _digest_alone(subject: Subject, clipper: PerUnitClipper) -> str:
    """A digest of the sum over rows of several lengths, each in a pass of its own."""
    longest = subject.longest
    units = _units_of([[max(2, length)] for length in (longest, longest // 2, longest // 5, 9, 2)], subject)
    passes = [[unit] for unit in units if len(unit.sequences[0].input_ids) <= longest]
    return _digest(_added(subject, clipper, passes, 1.0, _spacing(1.0, len(passes)))[1])


def _digest(sum_P: Tensor) -> str:
    return hashlib.blake2b(sum_P.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def _filler(subject: Subject, others: Sequence[tuple[int, Unit]], tokens: int) -> list[tuple[int, Unit]]:
    """A unit that learns nothing, if the pass with the others has room for it."""
    taken = sum(len(row.input_ids) for _, unit in others for row in unit.sequences)
    tokens = min(tokens, subject.longest, (subject.packing.room - taken) // subject.packing.rows_each)
    if tokens < 1 or len(others) >= subject.packing.most_units:
        return []
    row = TokenSequence((subject.pad_id,) * tokens, (False,) * tokens, 1)
    return [(NOBODY, Unit((row,) * subject.packing.rows_each))]


def _spacing(bound: float, rows: int) -> float:
    """The finest lattice with exact sums of ``rows`` units of norm ``bound``."""
    return math.ldexp(1.0, math.floor(math.log2(bound)) + math.ceil(math.log2(rows)) - 50)


def _coupled(subject: Subject, error: float) -> Refused:
    kind = Refused if subject.packing.alone else NotBatchInvariant
    return kind(
        f"the loss of a row changes by {error:.1e} (relative) with the other rows in the batch, so clipping could not bound the "
        "influence of one unit. Batch norm, capacity-limited experts and recurrent layers do this: use another base model."
    )


def _still(subject: Subject, batch: Pass) -> Losses:
    """The losses as a function that refuses if a pass changes a buffer."""
    with torch.no_grad():
        # An earlier pass, such as a rehearsal of the longest rows, may already have changed buffers.
        subject.losses(batch)
    before = {name: buffer.clone() for name, buffer in subject.model.named_buffers()}

    def still(batch: Pass) -> Tensor:
        loss_R = subject.losses(batch)
        for name, buffer in subject.model.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise Refused(
                    f"the buffer {name} changes in a forward pass, so one row would change the gradients of others, unclipped. "
                    "Running averages and dynamic or long-context RoPE do this: use another base model, or a data.max_length "
                    "within the context that the base model was pretrained on."
                )
        return loss_R

    return still


def _refuse_random_numbers(subject: Subject, losses: Losses, batch: Pass) -> None:
    """Looks for random draws in passes over the same rows, and names the module that draws if a call shows it.

    Any draw from a global generator (of torch, numpy or Python) changes its state, however rare and whatever its use. A draw from
    a module's own generator changes losses or gradients between passes; so does one that restores the global state, because
    passes begin with different seeds. Checkpointing restores the state before it recomputes, and is not a draw. Gradients may
    differ between passes by the tolerance; losses must have the same bits.
    """
    model, device = subject.model, subject.device
    if name := _first_to_draw(model, device, lambda: losses(batch)):
        raise _draws(name)
    torch.manual_seed(SEEDS[0])
    before, loss_R = _states(device), losses(batch)
    gradients = gradients_of(loss_R, subject.parameters)
    if _states(device) != before:
        raise _draws(f"a backward pass of {type(model).__name__}")
    torch.manual_seed(SEEDS[1])
    again_R = losses(batch)
    if not torch.equal(again_R.detach().view(torch.uint8), loss_R.detach().view(torch.uint8)):  # bits, also of nan
        raise _draws(type(model).__name__)
    for name, gradient in gradients_of(again_R, subject.parameters).items():
        size = float(gradient.norm())
        # Values that are not finite cannot be compared; the self-check refuses them next, with its own message.
        if math.isfinite(size) and not float((gradient - gradients[name]).norm()) <= subject.tolerance * size:
            raise _draws(f"the backward pass of {name}")


def _draws(name: str) -> Refused:
    return Refused(
        f"{name} draws random numbers in training (dropout, jitter, layer drop or noise; or its kernels differ between calls). "
        "Which numbers a row gets depends on the other rows in the batch, so one unit would change other units' contributions, "
        "which clipping does not bound. Set its rate to zero in the base model's config.json, or use another base model."
    )


def _first_to_draw(model: nn.Module, device: torch.device, run: Callable[[], object]) -> str | None:
    """The innermost module with a call that changes the state of a global generator."""
    begun: list[int] = []
    moved: list[str] = []

    def end(name: str, *_: object) -> None:
        if begun.pop() != _states(device):
            moved.append(name)

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_: begun.append(_states(device))))
        hooks.append(module.register_forward_hook(partial(end, name or type(module).__name__)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return moved[0] if moved else None


def _states(device: torch.device) -> int:
    """A hash of the states of all global generators."""
    on_device = b"" if device.type == "cpu" else torch.get_device_module(device).get_rng_state().numpy().tobytes()
    numpys: Any = np.random.get_state()
    torchs = torch.get_rng_state().numpy().tobytes()
    return hash((torchs, on_device, numpys[1].tobytes(), numpys[2:], random.getstate()))


def _units_of(lengths: Sequence[Sequence[int]], subject: Subject) -> list[Unit]:
    """Units of random tokens; the first third of each row is a prompt. The rows of a pair have nearly equal lengths."""
    generator = torch.Generator().manual_seed(20161024)
    units = []
    for of_one in lengths:
        sequences = []
        for length in [max(2, length - less) for length in of_one for less in range(subject.packing.rows_each)]:
            ids = torch.randint(0, subject.vocab_size, (length,), generator=generator).tolist()
            mask = (False, *(position >= length // 3 for position in range(1, length)))
            sequences.append(TokenSequence(tuple(ids), mask, sum(mask)))
        units.append(Unit(tuple(sequences)))
    return units


@contextlib.contextmanager
def _filled(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Fills every parameter that is zero with small random values during the block."""
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
