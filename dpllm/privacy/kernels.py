"""Triton kernels for GPUs that handle every unit of a pass in one call.

Comes in: tokens of a pass and each unit's bounds. Goes out: every unit's gradient, its squared norm, the sum with given factors.
The programs that compute a unit's numbers read that unit alone, in an order that depends on its own tokens and public numbers, so
the numbers have the same bits at any position and with any other units.

Shape suffixes: M tokens of a pass, U units, L parameters, P coordinates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST, MOST, MOST_WIDE = 16, 128, 64  # side of a tile, as tensor cores require; MOST_WIDE for float32
TOKENS = 64  # of a unit that a tile reads at a time
AT_ONCE = 1024  # coordinates of one program
WHOLE = 1.5 * 2.0**52  # adding and subtracting it rounds a float64 below 2^51 to the nearest integer
MEASURED = 4096  # numbers of a gradient whose squares a program adds at a time


@triton.jit(do_not_specialize=["units", "tokens", "each", "first"])
def _products(
    left, right, bounds_2U, into, left_row, right_row, into_row, units, tokens, each, wide, high, first,
    WIDE: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    start = tl.load(bounds_2U + unit) * each
    stop = tl.minimum(tl.load(bounds_2U + units + unit), tokens) * each
    i, j = tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.program_id(2) * HIGH + tl.arange(0, HIGH)
    sum_ij = tl.zeros((WIDE, HIGH), tl.float32)
    for begin in range(start, stop, TOKENS):
        n = begin + tl.arange(0, TOKENS)
        left_in = tl.load(left + n[None, :] * left_row + i[:, None], (n[None, :] < stop) & (i[:, None] < wide), 0.0)
        right_nj = tl.load(right + n[:, None] * right_row + j[None, :], (n[:, None] < stop) & (j[None, :] < high), 0.0)
        if not LOW:
            left_in, right_nj = left_in.to(tl.float32), right_nj.to(tl.float32)
        sum_ij = tl.dot(left_in, right_nj, sum_ij, input_precision="ieee")
    inside = (i[:, None] < wide) & (j[None, :] < high)
    place = into + unit.to(tl.int64) * into_row + i[:, None] * high + j[None, :]
    if first == 0:
        sum_ij += tl.load(place, inside, 0.0)
    tl.store(place, sum_ij, inside)


@triton.jit
def _squares(held_UP, places_2L, square_LU, row, AT_ONCE: tl.constexpr):
    layer, unit = tl.program_id(0), tl.program_id(1)
    start = tl.load(places_2L + layer)
    size = tl.load(places_2L + tl.num_programs(0) + layer)
    square = tl.zeros((AT_ONCE,), tl.float64)
    for begin in range(0, size, AT_ONCE):
        place = begin + tl.arange(0, AT_ONCE)
        number = tl.load(held_UP + unit.to(tl.int64) * row + start + place, place < size, 0.0).to(tl.float64)
        square += number * number
    tl.store(square_LU + layer * tl.num_programs(1) + unit, tl.sum(square))


@triton.jit
def _totals(square_LU, square_U, layers):
    unit, units = tl.program_id(0), tl.num_programs(0)
    total = tl.load(square_LU + unit)
    for layer in range(1, layers):
        total += tl.load(square_LU + layer * units + unit)
    tl.store(square_U + unit, total)


@triton.jit(do_not_specialize=["units"])
def _added(held_UP, factor_U, sum_P, row, units, size, AT_ONCE: tl.constexpr, WHOLE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < size
    total, held = tl.load(sum_P + place, inside, 0.0), held_UP + place
    for unit in range(units):
        factor = tl.load(factor_U + unit)
        number = tl.load(held, inside, 0.0).to(tl.float64) * factor
        total += (tl.where(factor == 0.0, 0.0, number) + WHOLE) - WHOLE  # 0 * nan is nan
        held += row
    tl.store(sum_P + place, total, inside)


def _device_of(values: Tensor) -> Any:
    """Makes the values' device current, because Triton launches kernels on the current device and its stream."""
    return torch.cuda.device_of(values)  # type: ignore[no-untyped-call]


def products(left_Ni: Tensor, right_Nj: Tensor, bounds_2U: Tensor, into_Uij: Tensor, tokens: int, first: bool) -> None:
    """Adds left.T @ right of each unit's rows to ``into_Uij`` in float32, or replaces it if ``first``.

    Args:
        left_Ni: Rows of the pass, the same number for each token.
        right_Nj: As many rows.
        bounds_2U: Each unit's first token, and the one after its last.
        into_Uij: Results of at least U units.
        tokens: Number of tokens in the pass.
        first: Whether to replace the old content.
    """
    units, each, (wide, high) = bounds_2U.shape[1], len(left_Ni) // tokens, into_Uij.shape[1:]
    low = left_Ni.dtype == right_Nj.dtype and left_Ni.dtype.itemsize == 2
    largest = MOST if low else MOST_WIDE
    tile = [min(largest, max(LEAST, triton.next_power_of_2(side))) for side in (wide, high)]
    grid = units, triton.cdiv(wide, tile[0]), triton.cdiv(high, tile[1])
    rows = left_Ni.stride(0), right_Nj.stride(0), into_Uij.stride(0)
    with _device_of(left_Ni):
        _products[grid](
            left_Ni,
            right_Nj,
            bounds_2U,
            into_Uij,
            *rows,
            units,
            tokens,
            each,
            wide,
            high,
            int(first),
            *tile,
            TOKENS,
            low,
        )


def squares(held_UP: Tensor, places_2L: Tensor, square_LU: Tensor) -> None:
    """The squared L2 norm of each unit's gradient of each parameter, in float64.

    Args:
        held_UP: Gradients, float32.
        places_2L: Each parameter's start and size.
        square_LU: The output.
    """
    with _device_of(held_UP):
        _squares[square_LU.shape](held_UP, places_2L, square_LU, held_UP.stride(0), MEASURED, num_warps=8)


def add_up(square_LU: Tensor, square_U: Tensor) -> None:
    """The sum over L, from the first to the last."""
    with _device_of(square_LU):
        _totals[square_U.shape](square_LU, square_U, len(square_LU))


def add_rounded(held_UP: Tensor, factor_U: Tensor, sum_P: Tensor) -> None:
    """Adds each unit's numbers times its factor, each rounded to an integer, to ``sum_P``, in float64.

    Numbers with factor 0 are not read.
    """
    grid, constants = (triton.cdiv(len(sum_P), AT_ONCE),), (AT_ONCE, WHOLE)
    with _device_of(held_UP):
        _added[grid](
            held_UP, factor_U, sum_P, held_UP.stride(0), len(factor_U), len(sum_P), *constants, enable_fp_fusion=False
        )


def try_out(device: torch.device) -> None:
    """Compiles and runs every kernel, including products with the largest tiles; raises any error of GPU or compiler."""
    for dtype, side in ((torch.bfloat16, MOST), (torch.float32, MOST_WIDE)):
        ones = torch.ones(side, side, device=device, dtype=dtype)
        into = torch.zeros(1, side, side, device=device)
        products(ones, ones, torch.tensor([[0], [side]], device=device), into, side, True)
    held_UP = into.flatten(1)
    square_LU, sum_P = held_UP.new_zeros((1, 1), dtype=torch.float64), held_UP[0].double()
    squares(held_UP, torch.tensor([[0], [held_UP.shape[1]]], device=device), square_LU)
    add_up(square_LU, square_LU[0].clone())
    add_rounded(held_UP, square_LU[0], sum_P)
    torch.cuda.synchronize(device)
