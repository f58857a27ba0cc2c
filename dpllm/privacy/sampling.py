"""Poisson sampling over privacy units, and how a logical batch is cut into physical ones.

Comes in: the Schedule and secret entropy. Goes out: which units join a step, and tensors that fit in memory. Every rank
draws the same logical batch from the same secret stream and takes its own share.

What one unit adds must have the same bits whoever else was drawn, and kernels round by the shape of what they multiply. So
every shape here follows from public numbers and from the unit itself: a unit is padded to one of a few public lengths, and a
physical batch of a length always holds the same number of rows; padding rows fill it up.

Shape suffixes: R sequences of a physical batch, T tokens, U units of a physical batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dpllm.privacy.schedule import Schedule, Shape, TokenSequence, Unit, group_rate, shape_for
from dpllm.privacy.stream import SecretStream, Turns, groups


@dataclass(frozen=True)
class PhysicalBatch:
    """What one forward pass reads.

    Token ids are right-padded, and no mask goes with them: causal attention never looks to the right, and a kernel chosen by
    whether anything is masked would be chosen by the longest row.
    """

    input_ids_RT: Tensor
    loss_mask_RT: Tensor  # True for target tokens
    denominator_R: Tensor  # target tokens of the sequence's whole example
    unit_R: Tensor  # index in 0..num_units-1 of the unit that the row belongs to; -1 for a padding row
    num_units: int  # each of them whole, unless the batch goes on
    reference_R: Tensor | None = None  # of preference pairs: see ``TokenSequence``
    goes_on: bool = False  # the one unit of this batch has more rows in the next one

    def to(self, device: torch.device) -> PhysicalBatch:
        """The same batch on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> PhysicalBatch:
        """The same batch in page-locked memory, from which a GPU copies while it computes."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> PhysicalBatch:
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


@runtime_checkable
class SizedUnits(Protocol):
    """Units whose sizes are known without reading them."""

    def sizes(self, index: int) -> tuple[int, int]:
        """(sequences, tokens of the longest) of a slot; (0, 0) for one that holds no data."""


class PoissonSampler:
    """Draws logical batches.

    Guarantee:
        In each draw every one of ``num_slots`` slots joins independently with probability ``schedule.sampling_rate``,
        up to the 53-bit resolution of the uniform variates, which are those of a cryptographic ``SecretStream``.
        With ``turns``, step i draws from group i mod b alone, at b times that rate.

    References:
        Abadi et al. 2016, Deep Learning with Differential Privacy, section 3; Zhu and Wang 2019, Poisson Subsampled
        Renyi Differential Privacy.
    """

    def __init__(self, schedule: Schedule, num_slots: int, entropy: int, turns: Turns | None = None) -> None:
        """``entropy`` is as of ``GaussianNoise``, and the same on every rank; slots are those of units and of canaries."""
        self._turns = turns or Turns()
        self._rate = group_rate(schedule, self._turns.bands)
        self._group_N = groups(self._turns, num_slots)
        self._step = self._turns.first_step
        self._num_slots = num_slots
        self._stream = SecretStream(entropy, b"samp")

    def draw(self) -> list[int]:
        """Indices of the slots that join the next logical batch; possibly none."""
        # A coin for every slot, also where it is not its turn: ranks stay at the same place of the stream.
        joins = self._stream.uniform(self._num_slots) < self._rate
        joins &= self._group_N == self._step % self._turns.bands
        self._step += 1
        return [int(index) for index in np.flatnonzero(joins)]


def physical_batches(
    drawn: Sequence[int],
    units: Sequence[Unit | None],
    shapes: Sequence[Shape],
    pad_id: int,
    rank: int = 0,
    world: int = 1,
) -> list[PhysicalBatch]:
    """Cuts a logical batch into physical batches, and takes this rank's.

    A unit with more sequences than its shape has rows gets batches of its own, which the clipper adds together before it takes
    the norm; any other unit is in one batch, among units that are padded to the same length. Every rank gets as many batches
    as the one that has most, the missing ones of padding rows, so that no rank waits for another's forward pass.

    Guarantee:
        The batches in which a unit lies have a shape that follows from the longest row of that unit alone (``shape_for``).
        Which units are drawn beside it decides its place and its neighbours, and nothing else.

    Args:
        drawn: Slots of the logical batch, the same on every rank.
        units: Slot -> unit; None for a slot that holds no data (a canary whose coin said out).
        shapes: Of physical batches, by ascending length; public (``schedule.shapes_of``).
        pad_id: Token id for padding.
        rank: This process, of ``world``.
        world: Number of processes.
    """
    sizes = [(index, *sizes_of(units, index)) for index in drawn]
    sized = sorted((shape_for(longest, shapes), rows, index) for index, rows, longest in sizes if rows)
    shares: list[list[tuple[list[int], Shape]]] = [[] for _ in range(world)]
    counts = [0] * world
    for shape, of_shape in groupby(sized, key=lambda one: one[0]):
        for group, count in _cut([(index, rows) for _, rows, index in of_shape], shape.rows):
            least = counts.index(min(counts))
            shares[least].append((group, shape))
            counts[least] += count
    batches: list[PhysicalBatch] = []
    for group, (length, size) in shares[rank]:
        members = [unit for index in group if (unit := units[index]) is not None]
        sequences = members[0].sequences
        if len(members) == 1 and len(sequences) > size:
            parts = [sequences[start : start + size] for start in range(0, len(sequences), size)]
            pieces = [collate([Unit(part)], pad_id, rows=size, length=length) for part in parts]
            batches += [replace(piece, goes_on=piece is not pieces[-1]) for piece in pieces]
        else:
            batches.append(collate(members, pad_id, rows=size, length=length))
    padding = collate([], pad_id, rows=shapes[0].rows, length=shapes[0].length)
    return batches + [padding] * (max(counts) - len(batches))


def sizes_of(units: Sequence[Unit | None], index: int) -> tuple[int, int]:
    """(sequences, tokens of the longest) of a unit; of tokenised data on disk without reading them."""
    if isinstance(units, SizedUnits):
        return units.sizes(index)
    unit = units[index]
    if unit is None or not unit.sequences:
        return 0, 0
    return len(unit.sequences), max(len(sequence.input_ids) for sequence in unit.sequences)


def _cut(units: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[list[int], int]]:
    """Groups of units (index, sequences), each with its number of physical batches: one, unless a unit alone needs more."""
    waiting: list[int] = []
    held = 0
    for index, rows in units:
        if rows > size:
            yield [index], -(-rows // size)
            continue
        if held + rows > size:
            yield waiting, 1
            waiting, held = [], 0
        waiting.append(index)
        held += rows
    if waiting:
        yield waiting, 1


def collate(units: Sequence[Unit], pad_id: int, rows: int = 0, length: int = 0) -> PhysicalBatch:
    """Right-pads the sequences of units, one each or more, into one physical batch of at least so many rows and tokens.

    Padding rows, which learn nothing, come last; without any ``rows`` there must be a unit.
    """
    owners = [index for index, unit in enumerate(units) for _ in unit.sequences]
    sequences = [sequence for unit in units for sequence in unit.sequences]
    padding = max(0, rows - len(sequences))
    owners += [-1] * padding
    sequences += [TokenSequence((pad_id, pad_id), (False, False), 1)] * padding
    length = max(length, *(len(sequence.input_ids) for sequence in sequences))
    input_ids_RT = torch.full((len(sequences), length), pad_id, dtype=torch.long)
    loss_mask_RT = torch.zeros((len(sequences), length), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens = len(sequence.input_ids)
        input_ids_RT[row, :tokens] = torch.tensor(sequence.input_ids)
        loss_mask_RT[row, :tokens] = torch.tensor(sequence.loss_mask)
    return PhysicalBatch(
        input_ids_RT,
        loss_mask_RT,
        torch.tensor([sequence.denominator for sequence in sequences], dtype=torch.float32),
        torch.tensor(owners, dtype=torch.long),
        len(units),
        torch.tensor([sequence.reference for sequence in sequences], dtype=torch.float64),
    )
