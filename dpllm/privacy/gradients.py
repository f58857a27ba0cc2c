"""Every unit's gradient of one pass, until the clipping factors are known.

Comes in: parts, as the layer rules give them. Goes out: each unit's norms, and the sum under given factors.

Small gradients are formed at once and held, side by side, for every unit of the pass. Large ones (a trained head, whole layers)
are formed twice from the same numbers: once to be measured, once to be added, so that what is added is what was measured. Which
are held follows from public numbers. What is computed for one unit has a shape that follows from that unit and from public
numbers; what is added up are whole numbers, exactly.

Shape suffixes: M tokens of a pass, U units, L parameters, P coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpllm.privacy.packing import Segment
from dpllm.privacy.rules import Formed, LookedUp, Part, Product, Summed

WIDE = 16_384  # rows of a weight that is a head over a vocabulary
CACHED = 2**16  # numbers whose norm is taken at once: they stay in a processor's cache
FORMED = 2**21  # numbers of a gradient that is formed twice, of which so many exist at once
ADDED = 2**17  # numbers of all units that are added at once
LAUNCHED = frozenset({"cuda"})  # devices on which calls of kernels cost more than numbers: all units share one
ADDED_LAUNCHED = 2**25
ALIGNED = 32  # numbers; where a gradient begins in the buffer, so that kernels read it alike for each unit
BLOCK = 128  # tokens of a unit that one product on a GPU takes


@dataclass(frozen=True)
class Place:
    """Where a parameter's coordinates stand."""

    start: int  # in the flat vector of all that train
    size: int
    shape: torch.Size
    held: int | None  # where in the buffer of held gradients; None: formed twice


def is_wide(parameter: Tensor) -> bool:
    """A head or an embedding of a vocabulary, and no adapter of one."""
    return parameter.dim() == 2 and max(parameter.shape) >= WIDE and min(parameter.shape) > 64


def places_of(parameters: Mapping[str, nn.Parameter], held_numbers: int) -> dict[str, Place]:
    """Which gradients are held: all that are no head over a vocabulary, as far as ``held_numbers`` of a unit allow."""
    wide = {name for name, p in parameters.items() if is_wide(p)}
    matrices = {name for name, p in parameters.items() if p.dim() == 2}
    small = sum(p.numel() for name, p in parameters.items() if name not in wide)
    twice = wide if small <= held_numbers else matrices
    places, start, held = {}, 0, 0
    for name, parameter in parameters.items():
        size = parameter.numel()
        places[name] = Place(start, size, parameter.shape, None if name in twice else held)
        start += size
        held += 0 if name in twice else -(-size // ALIGNED) * ALIGNED
    return places


class PassGradients:
    """What the calls of all layers have contributed in one backward pass.

    A parameter may be used by several calls and several layers (a tied head): their gradients are added before any norm is
    taken, cross terms included.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], most_units: int, held_numbers: int) -> None:
        """``held_numbers``: coordinates of one unit that may be held."""
        self.places = places_of(parameters, held_numbers)
        self._of = {id(parameter): self.places[name] for name, parameter in parameters.items()}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.size = sum(place.size for place in self.places.values())
        ends = [place.held + place.size for place in self.places.values() if place.held is not None]
        self._held = -(-max(ends, default=0) // ALIGNED) * ALIGNED
        self._most, self._device = most_units, next(iter(parameters.values())).device
        self._together = self._device.type in LAUNCHED
        self._blocks: Blocks | None = None
        self._buffer_UP: Tensor | None = None
        self._units: list[Segment] = []
        self._seen: set[int] = set()
        self._parts: dict[str, list[Part]] = {}

    def open(self, units: Sequence[Segment]) -> None:
        """Begins a pass, and forgets the last."""
        self._units, self._seen, self._parts = list(units), set(), {}
        if len(units) > self._most:
            raise ValueError(f"{len(units)} units in a pass of {self._most}")
        self._blocks = None
        if self._buffer_UP is None:
            self._buffer_UP = torch.zeros((self._most, self._held), device=self._device)

    def close(self) -> None:
        """Forgets the last pass, and keeps its memory for the next."""
        self._parts = {}

    def trains(self, parameter: Tensor | None) -> bool:
        """Whether it is one of these."""
        return id(parameter) in self._of

    def missing(self) -> list[str]:
        """Parameters to which no call has contributed."""
        return [name for key, name in self._names.items() if key not in self._seen]

    def add(self, parameter: Tensor, part: Part) -> None:
        """Takes the contribution of one call of one layer."""
        place, first = self._of[id(parameter)], id(parameter) not in self._seen
        self._seen.add(id(parameter))
        if place.held is None:
            self._parts.setdefault(self._names[id(parameter)], []).append(part)
            return
        assert self._buffer_UP is not None
        slot_UP = self._buffer_UP[:, place.held : place.held + place.size]
        if self._together and isinstance(part, (Product, Summed)) and self._units:
            self._add_together(part, slot_UP.view(-1, *place.shape), first)
            return
        if isinstance(part, Product):
            _products(part, self._units, slot_UP.view(-1, *place.shape), first)
            return
        for number, unit in enumerate(self._units):
            into = slot_UP[number].view(place.shape)
            if first:
                into.zero_()
            _add_one(part, number, unit, into)

    def _add_together(self, part: Product | Summed, into_U: Tensor, first: bool) -> None:
        """Every unit's share of a part at once, in shapes that follow from public numbers."""
        tokens = len(part.left_Mi if isinstance(part, Product) else part.values_M)
        if self._blocks is None or self._blocks.tokens != tokens:
            self._blocks = Blocks(self._units, tokens, self._most, self._device)
        blocks, count = self._blocks, len(self._units)
        if isinstance(part, Product):
            gradient_U = blocks.products(part.left_Mi, part.right_Mj)
        else:
            gradient_U = blocks.sums(part.values_M, into_U.dim() - 1)
        if first:
            into_U[:count] = gradient_U
        else:
            into_U[:count] += gradient_U

    def unit_norms(self) -> Tensor:
        """square_LU: the squared L2 norm of each unit's gradient of each parameter, in float64."""
        square_LU = torch.zeros((len(self.places), len(self._units)), dtype=torch.float64, device=self._device)
        for row, (name, place) in enumerate(self.places.items()):
            if self._together and place.held is not None and self._buffer_UP is not None:
                held_UP = self._buffer_UP[:, place.held : place.held + place.size]  # of as many units in every pass
                norm_U = torch.linalg.vector_norm(held_UP, dim=1, dtype=torch.float64)
                square_LU[row] = norm_U[: len(self._units)].square()
                continue
            for number in range(len(self._units)):
                square_LU[row, number] = sum(_square(part) for part in self._chunks(name, place, number))
        return square_LU

    def _chunks(self, name: str, place: Place, number: int) -> Iterator[Tensor]:
        """One unit's gradient of one parameter, flat, in parts of a public size."""
        if place.held is not None:
            assert self._buffer_UP is not None
            yield from torch.split(self._buffer_UP[number, place.held : place.held + place.size], CACHED)
            return
        for _, gradient in self._formed(name, place, number):
            yield gradient.flatten()

    def _formed(self, name: str, place: Place, number: int) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """One unit's gradient of one matrix, some of its rows at a time, in float32; the same bits each time."""
        parts, unit = self._parts[name], self._units[number]
        vectors = [part for part in parts if isinstance(part, LookedUp) and not part.columns]
        if len(vectors) == len(parts):  # most rows are zero
            yield _looked_up(vectors, unit)
            return
        rows = max(1, FORMED // place.shape[1])
        for start in range(0, place.shape[0], rows):
            stop = min(start + rows, place.shape[0])
            gradient = torch.zeros((stop - start, place.shape[1]), device=self._device)
            for part in parts:
                _add_one(part, number, unit, gradient, start)
            yield slice(start, stop), gradient

    def add_to(self, sum_P: Tensor, factor_U: Tensor, counted: Sequence[bool]) -> None:
        """Adds the counted units' gradients times ``factor_U``, each rounded to whole numbers, into ``sum_P``, in float64.

        The sum of whole numbers below 2^53 is exact, so it is the same in any order and any company.
        """
        assert self._buffer_UP is not None
        taken = [number for number, good in enumerate(counted) if good]
        if not taken:
            return
        held_UP, factor_U1 = self._buffer_UP, factor_U[:, None]
        if len(taken) < len(self._units):  # 0 * nan is nan: one bad unit would poison everybody's sum
            held_UP[[number for number, good in enumerate(counted) if not good]] = 0
        held_UP = held_UP[: len(self._units)]
        for into, stop, held in self._stretches():
            width = max(1, (ADDED_LAUNCHED if self._together else ADDED) // len(self._units))
            for start in range(into, stop, width):
                end, at = min(start + width, stop), held + start - into
                part_UP = held_UP[:, at : at + end - start].double().mul_(factor_U1).round_()
                sum_P[start:end] += part_UP.sum(dim=0)
        for name, place in self.places.items():
            if place.held is None:
                target = sum_P[place.start : place.start + place.size].view(place.shape)
                for number in taken:
                    for rows, gradient in self._formed(name, place, number):
                        target[rows] += gradient.double().mul_(factor_U[number]).round_()

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, where it is held) of coordinates that are neighbours in both."""
        start = stop = held = 0
        for place in self.places.values():
            if place.held is None:
                continue
            if place.start != stop or place.held - held != place.start - start:
                if stop > start:
                    yield start, stop, held
                start, held = place.start, place.held
            stop = place.start + place.size
        if stop > start:
            yield start, stop, held

    def whole(self, number: int) -> Tensor:
        """gradient_P of one unit, in float32: a copy."""
        found_P = torch.zeros(self.size, device=self._device)
        for name, place in self.places.items():
            into = found_P[place.start : place.start + place.size]
            if place.held is not None:
                torch.cat(list(self._chunks(name, place, number)), out=into)
                continue
            for rows, gradient in self._formed(name, place, number):
                into.view(place.shape)[rows] = gradient
        return found_P


class Blocks:
    """The tokens of every unit of a pass in blocks of one size, the last of a unit filled up with zeros.

    Each block is multiplied by itself and the blocks of a unit are added in pairs, so that what a unit gets follows from its own
    tokens; and in as many blocks as any pass can have, so that the shape of what is multiplied is public.

    Shape suffixes: B blocks, N tokens of one.
    """

    def __init__(self, units: Sequence[Segment], tokens: int, most_units: int, device: torch.device) -> None:
        """``tokens`` of a pass, M, of which units have theirs in ``units``, at least one."""
        self.tokens = tokens
        firsts: list[int] = []
        lasts: list[int] = []
        owned: list[list[int]] = []
        for unit in units:
            start, stop = unit.start, min(unit.stop, tokens)
            begins = range(start, stop, BLOCK)
            owned.append(list(range(len(firsts), len(firsts) + len(begins))))
            firsts += begins
            lasts += [stop] * len(begins)
        count = tokens // BLOCK + most_units + 1
        unused = count - len(firsts)
        first_B1, last_B1 = (
            torch.tensor([*values, *[0] * unused], device=device)[:, None] for values in (firsts, lasts)
        )
        place_BN = first_B1 + torch.arange(BLOCK, device=device)
        self._absent_BN = place_BN >= last_B1
        # In the place of an absent token stands one of the same block, times zero.
        self._place_BN = torch.where(self._absent_BN, first_B1, place_BN)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        nothing = count - 1  # a block that is always unused
        while any(len(blocks) > 1 for blocks in owned):
            owned, nothing = self._halved(owned, nothing, device)
        self._of_unit_U = torch.tensor([blocks[0] for blocks in owned], device=device)

    def _halved(self, owned: list[list[int]], nothing: int, device: torch.device) -> tuple[list[list[int]], int]:
        """Pairs of neighbouring blocks of each unit become one; ``nothing`` is where a block of zeros stands."""
        earlier: list[int] = []
        later: list[int] = []
        halved: list[list[int]] = []
        for blocks in owned:
            halved.append(list(range(len(earlier), len(earlier) + len(blocks[::2]))))
            earlier += blocks[::2]
            later += [*blocks[1::2], *[nothing] * (len(blocks) % 2)]
        earlier.append(nothing)
        later.append(nothing)
        self._pairs.append((torch.tensor(earlier, device=device), torch.tensor(later, device=device)))
        return halved, len(earlier) - 1

    def products(self, left_Mi: Tensor, right_Mj: Tensor) -> Tensor:
        """gradient_Uij: left.T @ right of each unit's tokens, in float32."""
        left_Bi, right_Bj = self._taken(left_Mi), self._taken(right_Mj)
        left_Bi = left_Bi.masked_fill(self._absent_BN.view(*self._absent_BN.shape, *[1] * (left_Bi.dim() - 2)), 0)
        left_BNi, right_BNj = left_Bi.flatten(1, -2), right_Bj.flatten(1, -2)
        low = left_BNi.dtype == right_BNj.dtype and left_BNi.dtype.itemsize == 2 and left_BNi.is_cuda
        if low:
            return self._added(torch.bmm(left_BNi.transpose(1, 2), right_BNj, out_dtype=torch.float32))
        return self._added(torch.bmm(left_BNi.float().transpose(1, 2), right_BNj.float()))

    def sums(self, values_M: Tensor, dims: int) -> Tensor:
        """gradient_U: the sum over each unit's tokens and what stands between them and the last ``dims`` dimensions."""
        values_BN = self._taken(values_M).float()
        values_BN = values_BN.masked_fill(self._absent_BN.view(*self._absent_BN.shape, *[1] * (values_BN.dim() - 2)), 0)
        return self._added(values_BN.flatten(1, values_BN.dim() - 1 - dims).sum(dim=1))

    def _taken(self, values_M: Tensor) -> Tensor:
        """(B, N, ...)."""
        return values_M.index_select(0, self._place_BN.flatten()).view(*self._place_BN.shape, *values_M.shape[1:])

    def _added(self, part_B: Tensor) -> Tensor:
        part_B[-1] = 0
        for earlier, later in self._pairs:
            part_B = part_B.index_select(0, earlier) + part_B.index_select(0, later)
        return part_B.index_select(0, self._of_unit_U)


def _square(part: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float64)
    return norm.square_()


def _add_one(part: Part, number: int, unit: Segment, into: Tensor, start: int = 0) -> None:
    """Adds one unit's share of a part to its gradient, or to the rows of it that begin at ``start``."""
    tokens, rows = slice(unit.start, unit.stop), slice(start, start + len(into))
    if isinstance(part, Product):
        into.addmm_(_rows_of(part.left_Mi[tokens, ..., rows]).t(), _rows_of(part.right_Mj[tokens]))
    elif isinstance(part, Summed):
        values = part.values_M[tokens]
        into += values.flatten(0, values.dim() - 1 - into.dim()).sum(dim=0, dtype=torch.float32)
    elif isinstance(part, Formed):
        into += part.gradient_U[number]
    elif part.columns:
        into.index_add_(1, part.ids_M[tokens], part.values_Md[tokens, rows].t().contiguous())
    else:
        ids_N, values_Nd = part.ids_M[tokens], part.values_Md[tokens]
        inside_N = (ids_N >= rows.start) & (ids_N < rows.stop)
        into.index_add_(0, ids_N[inside_N] - start, values_Nd[inside_N])


def _rows_of(values: Tensor) -> Tensor:
    """(N, last) in float32: whatever stands between a token and the last dimension is a row of its own."""
    return values.float().flatten(0, -2)


def _looked_up(parts: Sequence[LookedUp], unit: Segment) -> tuple[Tensor, Tensor]:
    """(id_K, values_Kd): the sum of one unit's vectors at each index, no index twice."""
    id_N = torch.cat([part.ids_M[unit.start : unit.stop] for part in parts])
    values_Nd = torch.cat([part.values_Md[unit.start : unit.stop] for part in parts])
    id_K, place_N = torch.unique(id_N, return_inverse=True)
    return id_K, values_Nd.new_zeros((len(id_K), values_Nd.shape[1])).index_add_(0, place_N, values_Nd)


def _products(part: Product, units: Sequence[Segment], into_Uij: Tensor, first: bool) -> None:
    """Each unit's left.T @ right, of its own tokens, in float32."""
    left_Mi, right_Mj = part.left_Mi.float(), part.right_Mj.float()
    for number, unit in enumerate(units):
        tokens = slice(unit.start, unit.stop)
        left_iN, right_Nj = _rows_of(left_Mi[tokens]).t(), _rows_of(right_Mj[tokens])
        if first:
            torch.mm(left_iN, right_Nj, out=into_Uij[number])
        else:
            into_Uij[number].addmm_(left_iN, right_Nj)
