"""Holds every unit's gradient of one pass until the clipping factors are known.

Comes in: parts from the layer rules. Goes out: each unit's norms, and the sum with given factors.

Small gradients are formed at once and held, side by side, for every unit of the pass. Large ones (a trained head, whole layers)
are formed twice from the same numbers, once to be measured and once to be added, so the same gradient is measured and added.
Public numbers decide which ones are held. Everything computed for one unit has a shape that depends on that unit and on public
numbers; sums are exact sums of integers.

Shape suffixes: M tokens of a pass, U units, L parameters, P coordinates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.privacy.packing import Segment, sent
from dpllm.privacy.rules import Formed, LookedUp, Part, Product, Summed

WIDE = 16_384  # rows above which a weight counts as a head over a vocabulary
CACHED = 2**16  # numbers squared at a time, so that they stay in a processor's cache
TOGETHER = 8  # units squared at a time
FORMED = 2**21  # numbers of a gradient formed twice that exist at a time
ADDED = 2**17  # numbers of all units added at a time
ALIGNED = 32  # numbers; alignment of gradients in the buffer, so that kernels read them the same way for each unit
NARROW = 64  # columns up to which a CPU forms a tall matrix several times faster as its transpose
SMALL = 2**16  # numbers of a gradient that one thread forms faster than several


@dataclass(frozen=True)
class Place:
    """The place of a parameter's coordinates."""

    start: int  # in the flat vector of trainable coordinates
    size: int
    shape: torch.Size
    held: int | None  # offset in the buffer of held gradients; None: formed twice
    transposed: bool = False  # held as its transpose


def is_wide(parameter: Tensor) -> bool:
    """Whether it is a head or embedding of a vocabulary, and not an adapter of one."""
    return parameter.dim() == 2 and max(parameter.shape) >= WIDE and min(parameter.shape) > 64


def places_of(parameters: Mapping[str, nn.Parameter], held_numbers: int, transposes: bool = True) -> dict[str, Place]:
    """Decides which gradients are held: all but heads over a vocabulary, if ``held_numbers`` per unit allow it.

    ``transposes``: whether tall, narrow ones (LoRA's B) are held as their transposes.
    """
    wide = {name for name, p in parameters.items() if is_wide(p)}
    matrices = {name for name, p in parameters.items() if p.dim() == 2}
    small = sum(p.numel() for name, p in parameters.items() if name not in wide)
    twice = wide if small <= held_numbers else matrices
    places, start, held = {}, 0, 0
    for name, parameter in parameters.items():
        size, shape = parameter.numel(), parameter.shape
        tall = len(shape) == 2 and shape[1] <= min(NARROW, shape[0])
        if name in twice:
            places[name] = Place(start, size, shape, None)
        else:
            places[name] = Place(start, size, shape, held, transposed=tall and transposes)
        start += size
        held += 0 if name in twice else -(-size // ALIGNED) * ALIGNED
    return places


class PassGradients:
    """The contributions of all layer calls in one backward pass.

    A parameter may be used by several calls and several layers (a tied head): their gradients are added before any norm is
    taken, cross terms included.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], most_units: int, held_numbers: int) -> None:
        """``held_numbers``: maximum coordinates held per unit."""
        self._device = next(iter(parameters.values())).device
        self._kernels = kernels_for(self._device)  # with kernels, one call handles all units
        self.places = places_of(parameters, held_numbers, transposes=self._kernels is None)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.size = sum(place.size for place in self.places.values())
        ends = [place.held + place.size for place in self.places.values() if place.held is not None]
        self._held = -(-max(ends, default=0) // ALIGNED) * ALIGNED
        self._most = most_units
        self._bounds_2U = torch.empty(0)  # for kernels: starts and ends of units
        spans = [(place.held, place.size) for place in self.places.values() if place.held is not None]
        self._held_2L = torch.tensor([*zip(*spans, strict=True)], device=self._device)  # and places of parameters
        self._buffer_UP = torch.zeros((0, self._held), device=self._device)
        self._units: list[Segment] = []
        self._seen: set[int] = set()
        self._parts: dict[str, list[Part]] = {}

    def open(self, units: Sequence[Segment]) -> None:
        """Begins a pass and forgets the last one."""
        self._units, self._seen, self._parts = list(units), set(), {}
        if len(units) > self._most:
            raise ValueError(f"{len(units)} units in a pass of {self._most}")
        if self._kernels is not None:
            bounds = [[unit.start for unit in units], [unit.stop for unit in units]]
            self._bounds_2U = sent(bounds, torch.long, self._device)
        if len(self._buffer_UP) < len(units):
            self._buffer_UP = self._buffer_UP[:0].clone()  # frees it before a larger one is allocated
            self._buffer_UP = torch.zeros((len(units), self._held), device=self._device)

    def close(self) -> None:
        """Forgets the last pass but keeps its buffer for the next."""
        self._parts = {}

    def trains(self, parameter: Tensor | None) -> bool:
        """Whether a parameter is among the trainable ones."""
        return id(parameter) in self._names

    def missing(self) -> list[str]:
        """Names of parameters to which no call contributed."""
        return [name for key, name in self._names.items() if key not in self._seen]

    def add(self, parameter: Tensor, part: Part) -> None:
        """Adds the contribution of one call of one layer."""
        name, first = self._names[id(parameter)], id(parameter) not in self._seen
        place = self.places[name]
        self._seen.add(id(parameter))
        if place.held is None:
            self._parts.setdefault(name, []).append(part)
            return
        if self._kernels is not None and isinstance(part, (Product, Summed)):
            if self._units:
                self._add_together(part, self._buffer_UP[:, place.held : place.held + place.size], place, first)
            return
        into_U = self._slots(place)
        if isinstance(part, Product):
            _products(part, self._units, into_U, first)
            return
        for number, (unit, into) in enumerate(zip(self._units, into_U, strict=False)):
            if first:
                into.zero_()
            _add_one(part, number, unit, into)

    def _slots(self, place: Place) -> Tensor:
        """View of the buffer, (units or more, *shape): each unit's gradient of a parameter."""
        assert place.held is not None
        slots_UP = self._buffer_UP[:, place.held : place.held + place.size]
        return slots_UP.view(-1, *reversed(place.shape)).mT if place.transposed else slots_UP.view(-1, *place.shape)

    def _add_together(self, part: Product | Summed, slot_UP: Tensor, place: Place, first: bool) -> None:
        """Adds every unit's share of a part in one call."""
        assert self._kernels is not None
        if isinstance(part, Product):
            tokens, left, right = len(part.left_Mi), part.left_Mi.flatten(0, -2), part.right_Mj.flatten(0, -2)
            into_Uij = slot_UP.view(-1, *place.shape)
        else:
            tokens, right = len(part.values_M), part.values_M.reshape(-1, place.size)
            left, into_Uij = right.new_ones(1, 1).expand(len(right), 1), slot_UP.unsqueeze(1)
        left, right = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (left, right))
        self._kernels.products(left, right, self._bounds_2U, into_Uij, tokens, first)

    def unit_norms(self) -> Tensor:
        """square_LU: the squared L2 norm of each unit's gradient of each parameter, in float64."""
        square_LU = torch.zeros((len(self.places), len(self._units)), dtype=torch.float64, device=self._device)
        rows = list(enumerate(self.places.items()))
        if self._held_2L.numel() and self._units:
            held_LU = square_LU.new_empty(self._held_2L.shape[1], len(self._units))
            if self._kernels is not None:
                self._kernels.squares(self._buffer_UP, self._held_2L, held_LU)
            else:
                held_LU[:] = _squares(self._buffer_UP[: len(self._units)], self._held_2L[0]).T
            if len(held_LU) == len(square_LU):
                return held_LU
            square_LU[[row for row, (_, place) in rows if place.held is not None]] = held_LU
            rows = [(row, item) for row, item in rows if item[1].held is None]
        for row, (name, place) in rows:
            for number in range(len(self._units)):
                norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for _, g in self._formed(name, place, number)]
                square_LU[row, number] = sum(norm.square_() for norm in norms)
        return square_LU

    def added_up(self, square_LU: Tensor) -> Tensor:
        """square_U: summed one by one, since a kernel's sum over L may use another order for the last units."""
        if self._kernels is None:
            return reduce(torch.add, square_LU.unbind())
        square_U = torch.empty_like(square_LU[0])
        self._kernels.add_up(square_LU, square_U)
        return square_U

    def _formed(self, name: str, place: Place, number: int) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Forms one unit's gradient of one matrix, some rows at a time, in float32; with the same bits each time."""
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

    def add_to(self, sum_P: Tensor, factor_U: Tensor, counted_U: Tensor) -> None:
        """Adds the counted units' gradients times ``factor_U``, each rounded to integers, to ``sum_P``, in float64.

        Sums of integers below 2^53 are exact, so they do not depend on the order or on other units.
        """
        held_UP = self._buffer_UP[: len(self._units)]
        stretches = list(self._stretches())
        if self._kernels is not None:
            counted_factor_U = factor_U.where(counted_U, 0.0)
            for start, stop, held in stretches:
                self._kernels.add_rounded(held_UP[:, held : held + stop - start], counted_factor_U, sum_P[start:stop])
            stretches = []
        twice = {name: place for name, place in self.places.items() if place.held is None}
        if self._kernels is not None and not twice:
            return  # without waiting for the GPU
        taken = counted_U.nonzero().flatten().tolist()
        if not taken:
            return
        if len(taken) < len(held_UP):
            held_UP[~counted_U] = 0  # 0 * nan is nan: one bad unit would spoil the whole sum
        width = max(1, ADDED // len(self._units))
        for into, stop, held in stretches:
            for start in range(into, stop, width):
                end, at = min(start + width, stop), held + start - into
                sum_P[start:end] += _rounded(held_UP[:, at : at + end - start], factor_U)
        for place in (place for place in self.places.values() if place.transposed):
            into_ji = sum_P[place.start : place.start + place.size].view(place.shape).t()
            held_Uji = self._slots(place).mT[: len(self._units)]
            high = max(1, width // into_ji.shape[1])
            for some_ji, some_Uji in zip(torch.split(into_ji, high), torch.split(held_Uji, high, dim=1), strict=True):
                some_ji += _rounded(some_Uji, factor_U)
        for name, place in twice.items():
            target = sum_P[place.start : place.start + place.size].view(place.shape)
            for number in taken:
                for rows, gradient in self._formed(name, place, number):
                    target[rows] += gradient.double().mul_(factor_U[number]).round_()

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, offset in the buffer) of coordinates that are contiguous in both."""
        start = stop = held = 0
        for place in self.places.values():
            if place.held is None or place.transposed:
                continue
            if place.start != stop or place.held - held != place.start - start:
                if stop > start:
                    yield start, stop, held
                start, held = place.start, place.held
            stop = place.start + place.size
        if stop > start:
            yield start, stop, held

    def whole(self, number: int) -> Tensor:
        """A copy of gradient_P of one unit, in float32."""
        gradient_P = torch.zeros(self.size, device=self._device)
        for name, place in self.places.items():
            into = gradient_P[place.start : place.start + place.size]
            if place.held is not None:
                into.view(place.shape).copy_(self._slots(place)[number])
                continue
            for rows, gradient in self._formed(name, place, number):
                into.view(place.shape)[rows] = gradient
        return gradient_P


@cache
def kernels_for(device: torch.device) -> Any:
    """The module ``kernels`` if this device can use it; None without Triton or its compiler, or if the GPU is too small."""
    if device.type != "cuda":
        return None
    try:
        from dpllm.privacy import kernels

        kernels.try_out(device)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a missing compiler raises anything
        return None
    return kernels


def _squares(buffer_UP: Tensor, start_L: Tensor) -> Tensor:
    """square_UL in float64 of gradients side by side, which start at multiples ``start_L`` of ``ALIGNED``, with zeros between.

    Sums ``ALIGNED`` squares, then these sums; both orders depend only on the gradient's size.
    """
    units, size = buffer_UP.shape
    sum_UK = torch.empty((units, size // ALIGNED), dtype=torch.float64, device=buffer_UP.device)
    width = max(1, CACHED // TOGETHER // ALIGNED)
    for first in range(0, units, TOGETHER):
        rows_UKa = buffer_UP[first : first + TOGETHER].view(-1, size // ALIGNED, ALIGNED)
        for start in range(0, size // ALIGNED, width):
            square_UKa = rows_UKa[:, start : start + width].double().square_()
            sum_UK[first : first + TOGETHER, start : start + width] = square_UKa.sum(dim=-1)
    starts = (start_L // ALIGNED).cpu().numpy()
    return torch.from_numpy(np.add.reduceat(sum_UK.cpu().numpy(), starts, axis=1)).to(buffer_UP.device)


def _rounded(gradient_U: Tensor, factor_U: Tensor) -> Tensor:
    """The sum over units of factor times gradient, each rounded to integers."""
    multiple_U = gradient_U.double().mul_(factor_U.view(-1, *(1 for _ in gradient_U.shape[1:])))
    return multiple_U.round_().sum(dim=0)


def _add_one(part: Part, number: int, unit: Segment, into: Tensor, start: int = 0) -> None:
    """Adds one unit's share of a part to its gradient, or to its rows from ``start`` on."""
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
    """(N, last) in float32: dimensions between token and last become rows."""
    return values.float().flatten(0, -2)


def _looked_up(parts: Sequence[LookedUp], unit: Segment) -> tuple[Tensor, Tensor]:
    """(id_K, values_Kd): the sum of one unit's vectors at each distinct index."""
    id_N = torch.cat([part.ids_M[unit.start : unit.stop] for part in parts])
    values_Nd = torch.cat([part.values_Md[unit.start : unit.stop] for part in parts])
    id_K, place_N = torch.unique(id_N, return_inverse=True)
    return id_K, values_Nd.new_zeros((len(id_K), values_Nd.shape[1])).index_add_(0, place_N, values_Nd)


def _products(part: Product, units: Sequence[Segment], into_Uij: Tensor, first: bool) -> None:
    """Each unit's left.T @ right over its own tokens, in float32."""
    left, right = _rows_of(part.left_Mi), _rows_of(part.right_Mj)
    rows = len(left) // len(part.left_Mi)  # of each token
    sizes = [(min(unit.stop, len(part.left_Mi)) - unit.start) * rows for unit in units]
    sizes.append(len(left) - sum(sizes))  # padding of the pass
    lefts, rights = torch.split(left.t(), sizes, dim=1), torch.split(right, sizes)
    with _one_thread() if left.shape[1] * right.shape[1] <= SMALL else contextlib.nullcontext():
        for left_iN, right_Nj, into_ij in zip(lefts, rights, into_Uij[: len(units)], strict=False):
            if first:
                torch.mm(left_iN, right_Nj, out=into_ij)
            else:
                into_ij.addmm_(left_iN, right_Nj)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
