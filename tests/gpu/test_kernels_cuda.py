"""Kernels for all units of a pass: right, and each unit's bits from that unit alone."""

import random

import pytest
import torch
from torch import Tensor, nn

from dpllm.privacy.gradients import PassGradients, kernels_for
from dpllm.privacy.packing import Segment
from dpllm.privacy.rules import Product, Summed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
SHAPES = {"A": (16, 2048), "B": (2048, 16), "odd": (5, 300), "both": (130, 260)}
LENGTHS = [1, 63, 64, 65, 200, 512, 7]


def of(order: list[int], shape: tuple[int, int], dtype: torch.dtype, heads: int, filled: float) -> PassGradients:
    """Gradients of units in that order, with a gap before each; what is nobody's is ``filled``."""
    generator = torch.Generator().manual_seed(3)
    every = [[torch.randn(length, heads, side, generator=generator) for side in shape] for length in LENGTHS]
    left, right = (torch.full((1024, heads, side), filled) for side in shape)
    units, at = [], 0
    for unit, number in enumerate(order):
        start, stop = at + unit % 3, at + unit % 3 + LENGTHS[number]
        left[start:stop], right[start:stop] = every[number]
        units.append(Segment(start, stop, unit))
        at = stop
    left, right = left.to(CUDA, dtype), right.to(CUDA, dtype)
    parameters = {
        name: nn.Parameter(torch.zeros(size, device=CUDA))
        for name, size in (("w", shape), ("b", shape[1:]), ("v", shape))
    }
    gradients = PassGradients(parameters, 8, 10**8)
    gradients.open(units)
    gradients.add(parameters["w"], Product(left, right))
    gradients.add(parameters["b"], Summed(right))
    gradients.add(parameters["v"], Product(left, right))
    gradients.add(parameters["w"], Product(left, 2 * right))
    return gradients


def test_there_are_kernels_here() -> None:
    assert kernels_for(CUDA) is not None


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_norms_and_sums_are_those_of_float64(name: str, dtype: torch.dtype, heads: int) -> None:
    shape, order = SHAPES[name], list(range(len(LENGTHS)))
    found, reference = of(order, shape, dtype, heads, float("nan")), torch.Generator().manual_seed(3)
    square_LU, exact_UP = found.unit_norms(), []
    for number, length in enumerate(LENGTHS):
        left, right = (torch.randn(length, heads, side, generator=reference).to(dtype).double() for side in shape)
        product = left.flatten(0, 1).T @ right.flatten(0, 1)
        exact = torch.cat([3 * product.flatten(), right.sum(dim=(0, 1)), product.flatten()])
        whole_P = found.whole(number).double().cpu()
        assert float((whole_P - exact).norm()) <= 1e-5 * float(exact.norm())
        parts = torch.stack(
            [one.square().sum() for one in whole_P.split([place.size for place in found.places.values()])]
        )
        torch.testing.assert_close(square_LU[:, number].cpu(), parts, rtol=1e-13, atol=0)
        torch.testing.assert_close(found.added_up(square_LU)[number].cpu(), parts.sum(), rtol=1e-13, atol=0)
        exact_UP.append(whole_P)
    factor_U = 10.0 ** torch.arange(len(LENGTHS), dtype=torch.float64)
    counted_U = torch.arange(len(LENGTHS)) != 2
    sum_P = torch.full((found.size,), 5.0, dtype=torch.float64, device=CUDA)
    found.add_to(sum_P, factor_U.to(CUDA), counted_U.to(CUDA))
    expected_P = 5 + sum(
        (one * factor).round() for one, factor, counts in zip(exact_UP, factor_U, counted_U, strict=True) if counts
    )
    assert torch.equal(sum_P.cpu(), expected_P)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_unit_has_the_same_bits_at_any_place_and_in_any_company(name: str, dtype: torch.dtype) -> None:
    orders = [list(range(len(LENGTHS)))]
    orders += [random.Random(seed).sample(orders[0], len(LENGTHS) - seed % 5) for seed in range(6)]
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for place, order in enumerate(orders):
        found = of(order, SHAPES[name], dtype, 2, float(place))
        square_LU = found.unit_norms()
        for unit, number in enumerate(order):
            now = found.whole(unit), square_LU[:, unit]
            before = seen.setdefault(number, now)
            assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))


def test_a_unit_that_is_not_finite_adds_nothing() -> None:
    found = of([0, 5], (16, 2048), torch.float32, 1, 0.0)
    found._buffer_UP[1, 3] = float("nan")
    sum_P = torch.zeros(found.size, dtype=torch.float64, device=CUDA)
    factor_U = torch.ones(2, dtype=torch.float64, device=CUDA)
    found.add_to(sum_P, factor_U, torch.isfinite(found.added_up(found.unit_norms())))
    assert torch.equal(sum_P, found.whole(0).double().round())
