"""Packs a logical batch into passes: sequences of a fixed public number of tokens, in which whole units are concatenated.

Comes in: units, and a ``Packing`` that depends on public numbers alone. Goes out: ``Pass`` values, each for one forward and one
backward pass. A unit's contribution must have the same bits whichever other units were drawn, and a kernel's rounding depends on
the shapes that it multiplies. So every pass has the same shape, and what is computed for one row or unit (attention, the sum of
its losses, its gradient) has a shape that depends on that row or unit alone. Which units share a pass, and their positions, may
depend on the other units.

Shape suffixes: M tokens of a pass, N targets of a pass, R rows of a pass, U units of a pass.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpllm.privacy.schedule import Packing, TokenSequence, Unit


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers to a device without waiting for the copy."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Segment(NamedTuple):
    """Neighbouring tokens of a pass that belong to one row, or to one unit."""

    start: int
    stop: int
    unit: int  # counted from 0 in the pass


@dataclass(frozen=True)
class Targets:
    """The tokens to predict, and from which positions, in packs of a fixed size; the last pack is padded.

    Padding reads the last position, which predicts nothing.
    """

    shape: tuple[int, int]  # of the token ids
    count: int  # targets; the next two fields have padding after them
    position_N: Tensor  # where each is predicted, counted over all rows: one position before the target
    target_N: Tensor  # the token to predict
    pack: int  # targets in one product; N is a multiple of it

    @classmethod
    def of(cls, ids: Sequence[int], positions: Sequence[int], shape: tuple[int, int], pack: int) -> Targets:
        """From flat token ids and the positions that predict a target."""
        filled = [*positions, *[shape[0] * shape[1] - 1] * (-len(positions) % pack)]
        following = [ids[position + 1] for position in positions] + [0] * (len(filled) - len(positions))
        position_N, target_N = (torch.tensor(values, dtype=torch.long) for values in (filled, following))
        return cls(shape, len(positions), position_N, target_N, pack)


@dataclass(frozen=True)
class Pass:
    """The input of one forward pass.

    It has no mask: attention is computed row by row, and a row's own padding follows its tokens.
    """

    input_ids_1M: Tensor  # an example by itself has one row, or two of equal length if it is a pair
    position_ids_1M: Tensor | None  # each row counts from 0; None for an example by itself: the model counts
    targets: Targets
    rows: tuple[Segment, ...]
    denominator_R: Tensor  # number of target tokens in each row's whole example
    reference_R: Tensor  # of preference pairs: see ``TokenSequence``
    num_units: int  # all of them whole, unless ``goes_on``
    longest: int = 0  # maximum tokens of a row in any pass; unused for an example by itself
    goes_on: bool = False  # the only unit of this pass has more rows in the next pass

    @property
    def units(self) -> list[Segment]:
        """The segment of each unit, with all of its rows."""
        units: list[Segment] = []
        for row in self.rows:
            if units and units[-1].unit == row.unit:
                units[-1] = units[-1]._replace(stop=row.stop)
            else:
                units.append(row)
        return units

    def to(self, device: torch.device) -> Pass:
        """The same pass on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Pass:
        """The same pass in page-locked memory, from which a GPU can copy while it computes."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Pass:
        targets = self.targets
        return replace(
            self,
            input_ids_1M=change(self.input_ids_1M),
            position_ids_1M=None if self.position_ids_1M is None else change(self.position_ids_1M),
            targets=replace(targets, position_N=change(targets.position_N), target_N=change(targets.target_N)),
            denominator_R=change(self.denominator_R),
            reference_R=change(self.reference_R),
        )


@runtime_checkable
class SizedUnits(Protocol):
    """Units with sizes that are known without reading the units."""

    def sizes(self, index: int) -> list[int]:
        """Tokens of each sequence of a slot; empty for a slot without data."""


def sizes_of(units: Sequence[Unit | None], index: int) -> list[int]:
    """Tokens of each sequence of a unit; does not read tokenised data on disk."""
    if isinstance(units, SizedUnits):
        return units.sizes(index)
    unit = units[index]
    return [len(sequence.input_ids) for sequence in unit.sequences] if unit is not None else []


def passes_of(
    drawn: Sequence[int], units: Sequence[Unit | None], packing: Packing, pad_id: int, rank: int = 0, world: int = 1
) -> list[Pass]:
    """Splits a logical batch into passes, and returns this rank's.

    A unit with more tokens than a pass holds gets its own passes on one rank, split between its rows, and the clipper adds them
    up before it takes the norm; any other unit is in one pass. Every rank gets the same number of passes, some of them empty, so
    that no rank waits for another's forward pass.

    Args:
        drawn: Slots of the logical batch, the same on every rank.
        units: Slot -> unit; None for a slot that holds no data (a canary whose coin said out).
        packing: Public shape of the passes.
        pad_id: Token id for padding.
        rank: This process, of ``world``.
        world: Number of processes.
    """
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    counts = [0] * world
    for group, count in _grouped([(index, sizes_of(units, index)) for index in drawn], packing):
        emptiest = counts.index(min(counts))
        shares[emptiest].append(group)
        counts[emptiest] += count
    passes: list[Pass] = []
    for group in shares[rank]:
        members = [unit for index in group if (unit := units[index]) is not None]
        pieces = list(_pieces(members[0].sequences, packing)) if len(members) == 1 else []
        if len(pieces) > 1:
            parts = [lay_out([Unit(piece)], packing, pad_id) for piece in pieces]
            passes += [replace(piece, goes_on=True) for piece in parts[:-1]] + parts[-1:]
        else:
            passes.append(lay_out(members, packing, pad_id))
    return passes + [lay_out([], packing, pad_id)] * (max(counts) - len(passes))


def _grouped(sized: Sequence[tuple[int, list[int]]], packing: Packing) -> Iterator[tuple[list[int], int]]:
    """Groups of units that share a pass, by best-fit decreasing over whole units; each with its number of passes."""
    room: dict[int, list[list[int]]] = {}  # free tokens -> groups with that many
    free: list[int] = []  # keys of ``room`` with groups, ascending
    held: list[tuple[int, int]] = []
    for index, sizes in sized:
        if not sizes:
            continue
        tokens = sum(sizes)
        if packing.alone or tokens > packing.room:
            yield [index], len(list(_cut(sizes, packing)))
        else:
            held.append((tokens, index))
    groups: list[list[int]] = []
    for tokens, index in sorted(held, key=lambda size: (-size[0], size[1])):
        place = bisect.bisect_left(free, tokens)
        if place == len(free):
            group, remaining = [index], packing.room - tokens
            groups.append(group)
        else:
            remaining = free[place] - tokens
            group = room[free[place]].pop()
            if not room[free[place]]:
                del room[free.pop(place)]
            group.append(index)
        if remaining and len(group) < packing.most_units:
            if remaining not in room:
                bisect.insort(free, remaining)
                room[remaining] = []
            room[remaining].append(group)
    yield from ((group, 1) for group in groups)


def _pieces(sequences: Sequence[TokenSequence], packing: Packing) -> Iterator[tuple[TokenSequence, ...]]:
    for start, stop in _cut([len(sequence.input_ids) for sequence in sequences], packing):
        yield tuple(sequences[start:stop])


def _cut(sizes: Sequence[int], packing: Packing) -> Iterator[tuple[int, int]]:
    """Splits one unit between its rows, from the first on, and never within an example of ``rows_each`` rows."""
    rows_each, start, held = packing.rows_each, 0, 0
    for first in range(0, len(sizes), rows_each):
        tokens = sum(sizes[first : first + rows_each])
        if first > start and (packing.alone or held + tokens > packing.room):
            yield start, first
            start, held = first, 0
        held += tokens
    if len(sizes) > start:
        yield start, len(sizes)


def lay_out(units: Sequence[Unit], packing: Packing, pad_id: int, width: int = 0) -> Pass:
    """One pass of whole units, in order; without units, a pass that learns nothing.

    ``width``: minimum tokens of each row with ``packing.alone``, where rows are stacked.
    """
    owners = [index for index, unit in enumerate(units) for _ in unit.sequences]
    sequences = [sequence for unit in units for sequence in unit.sequences]
    lengths = [len(sequence.input_ids) for sequence in sequences]
    if packing.alone:
        wide = max(width, *lengths, 2)
        wide = max(wide, min(-(-wide // 8) * 8, packing.max_length))  # a model may have no positions beyond it
        shape, slots = (max(1, len(sequences)), wide), [wide] * len(sequences)
    else:
        shape, slots = (1, packing.tokens), lengths
    total = shape[0] * shape[1]
    ids, counted, positions, rows, at = [pad_id] * total, [packing.last_position] * total, [], [], 0
    for sequence, slot, owner in zip(sequences, slots, owners, strict=True):
        ids[at : at + len(sequence.input_ids)] = sequence.input_ids
        counted[at : at + slot] = range(slot)
        positions += [at + place - 1 for place, learned in enumerate(sequence.loss_mask) if learned]
        rows.append(Segment(at, at + slot, owner))
        at += slot
    if at >= total and not packing.alone:
        raise ValueError(f"units of {at} tokens in a pass of {total}, whose last position is padding")
    ids_1M, counted_1M = (torch.tensor(values, dtype=torch.long).view(shape) for values in (ids, counted))
    return Pass(
        ids_1M,
        None if packing.alone else counted_1M,
        Targets.of(ids, positions, shape, packing.targets),
        tuple(rows),
        torch.tensor([sequence.denominator for sequence in sequences], dtype=torch.float32),
        torch.tensor([sequence.reference for sequence in sequences], dtype=torch.float64),
        len(units),
        packing.max_length,
    )
