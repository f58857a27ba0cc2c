"""How a logical batch becomes passes: sequences of one public number of tokens, in which whole units lie one after the other.

Comes in: units, and a ``Packing`` that follows from public numbers. Goes out: ``Pass`` values, each of them one forward and one
backward pass. What one unit adds must have the same bits whoever else was drawn, and kernels round by the shape of what they
multiply: so every pass has the same shape, and what is computed for one row or one unit (attention, the sum of its losses, its
gradient) has a shape that follows from that row or unit alone. Which units share a pass, and where each lies, may depend on the
others.

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
    """Numbers on a device, for which nothing waits."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Segment(NamedTuple):
    """Neighbouring tokens of a pass that belong to one row, or to one unit."""

    start: int
    stop: int
    unit: int  # counted from 0 in the pass


@dataclass(frozen=True)
class Targets:
    """What is to be predicted, and from where: in packs of a fixed size, the last of them filled up.

    What fills it reads the last position of all, which predicts nothing.
    """

    shape: tuple[int, int]  # of the token ids
    count: int  # targets; what comes behind them in the next two fills a pack
    position_N: Tensor  # where each is predicted, counted over all rows: one before the target
    target_N: Tensor  # the token to predict
    pack: int  # what one product takes: N is a multiple of it

    @classmethod
    def of(cls, ids: Sequence[int], positions: Sequence[int], shape: tuple[int, int], pack: int) -> Targets:
        """From flat token ids and the positions that predict a target."""
        filled = [*positions, *[shape[0] * shape[1] - 1] * (-len(positions) % pack)]
        following = [ids[position + 1] for position in positions] + [0] * (len(filled) - len(positions))
        position_N, target_N = (torch.tensor(each, dtype=torch.long) for each in (filled, following))
        return cls(shape, len(positions), position_N, target_N, pack)


@dataclass(frozen=True)
class Pass:
    """What one forward pass reads.

    No mask goes with the ids: attention is computed row by row, and a row's own padding comes behind its tokens.
    """

    input_ids_1M: Tensor  # of an example by itself: one row or, of a pair, two of the same length
    position_ids_1M: Tensor | None  # each row counts from 0; None for an example by itself, whose model counts
    targets: Targets
    rows: tuple[Segment, ...]
    denominator_R: Tensor  # target tokens of each row's whole example
    reference_R: Tensor  # of preference pairs: see ``TokenSequence``
    num_units: int  # each of them whole, unless the pass goes on
    longest: int = 0  # tokens of the longest row that any pass can hold; of an example by itself unused
    goes_on: bool = False  # the one unit of this pass has more rows in the next one

    @property
    def units(self) -> list[Segment]:
        """Where each unit lies, all of its rows together."""
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
        """The same pass in page-locked memory, from which a GPU copies while it computes."""
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
    """Units whose sizes are known without reading them."""

    def sizes(self, index: int) -> list[int]:
        """Tokens of each sequence of a slot; none for one that holds no data."""


def sizes_of(units: Sequence[Unit | None], index: int) -> list[int]:
    """Tokens of each sequence of a unit; of tokenised data on disk without reading them."""
    if isinstance(units, SizedUnits):
        return units.sizes(index)
    unit = units[index]
    return [len(sequence.input_ids) for sequence in unit.sequences] if unit is not None else []


def passes_of(
    drawn: Sequence[int], units: Sequence[Unit | None], packing: Packing, pad_id: int, rank: int = 0, world: int = 1
) -> list[Pass]:
    """Cuts a logical batch into passes, and takes this rank's.

    A unit with more tokens than a pass holds gets passes of its own on one rank, cut by its own rows alone, which the clipper
    adds together before it takes the norm; any other unit lies in one pass. Every rank gets as many passes as the one that has
    most, the missing ones empty, so that no rank waits for another's forward pass.

    Args:
        drawn: Slots of the logical batch, the same on every rank.
        units: Slot -> unit; None for a slot that holds no data (a canary whose coin said out).
        packing: Public.
        pad_id: Token id for padding.
        rank: This process, of ``world``.
        world: Number of processes.
    """
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    counts = [0] * world
    for group, count in _grouped([(index, sizes_of(units, index)) for index in drawn], packing):
        least = counts.index(min(counts))
        shares[least].append(group)
        counts[least] += count
    passes: list[Pass] = []
    for group in shares[rank]:
        members = [unit for index in group if (unit := units[index]) is not None]
        pieces = list(_pieces(members[0].sequences, packing)) if len(members) == 1 else []
        if len(pieces) > 1:
            some = [lay_out([Unit(piece)], packing, pad_id) for piece in pieces]
            passes += [replace(piece, goes_on=True) for piece in some[:-1]] + some[-1:]
        else:
            passes.append(lay_out(members, packing, pad_id))
    return passes + [lay_out([], packing, pad_id)] * (max(counts) - len(passes))


def _grouped(sized: Sequence[tuple[int, list[int]]], packing: Packing) -> Iterator[tuple[list[int], int]]:
    """Groups of units that share a pass, each with its number of passes: best-fit decreasing over whole units."""
    room: dict[int, list[list[int]]] = {}  # free tokens -> groups that have so many
    free: list[int] = []  # its keys that have groups, ascending
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
            group, left = [index], packing.room - tokens
            groups.append(group)
        else:
            left = free[place] - tokens
            group = room[free[place]].pop()
            if not room[free[place]]:
                del room[free.pop(place)]
            group.append(index)
        if left and len(group) < packing.most_units:
            if left not in room:
                bisect.insort(free, left)
                room[left] = []
            room[left].append(group)
    yield from ((group, 1) for group in groups)


def _pieces(sequences: Sequence[TokenSequence], packing: Packing) -> Iterator[tuple[TokenSequence, ...]]:
    for start, stop in _cut([len(sequence.input_ids) for sequence in sequences], packing):
        yield tuple(sequences[start:stop])


def _cut(sizes: Sequence[int], packing: Packing) -> Iterator[tuple[int, int]]:
    """Where one unit is cut, by its own rows from the first on, and never inside an example of ``rows_each`` rows."""
    each, start, held = packing.rows_each, 0, 0
    for first in range(0, len(sizes), each):
        tokens = sum(sizes[first : first + each])
        if first > start and (packing.alone or held + tokens > packing.room):
            yield start, first
            start, held = first, 0
        held += tokens
    if len(sizes) > start:
        yield start, len(sizes)


def lay_out(units: Sequence[Unit], packing: Packing, pad_id: int, width: int = 0) -> Pass:
    """One pass of whole units, in their order; of none, one that learns nothing.

    ``width``: where rows stand under one another (``packing.alone``), the tokens of each, at least.
    """
    owners = [index for index, unit in enumerate(units) for _ in unit.sequences]
    sequences = [sequence for unit in units for sequence in unit.sequences]
    lengths = [len(sequence.input_ids) for sequence in sequences]
    if packing.alone:
        wide = max(width, *lengths, 2)
        wide = max(wide, min(-(-wide // 8) * 8, packing.max_length))  # beyond it a model may have no positions
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
