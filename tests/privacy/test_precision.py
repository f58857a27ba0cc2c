"""In every precision a unit adds at most C, and its rounding does not follow its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from cases import BF16, FP16, MODES, built, generated
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional

from dpllm.privacy import clipping, gradients
from dpllm.privacy.gradients import Owners, UnitGradients
from dpllm.privacy.rules import Dense, Product, Rows


def lowered(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The frozen base in low precision, the adapters in float32."""
    for p in net.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)
    return net


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"autocast": BF16},
    "fp16": {"autocast": FP16, "loss_scale": 1024.0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name", ["llama, all-linear", "gpt2, last block", "LoRA, tied embedding and head", "LoRA, first factor frozen"]
)
def test_one_unit_moves_the_sum_by_at_most_c(name: str, precision: str, mode: str) -> None:
    some = tm.units(((9, 4), (16,), (5,), (40,), (2,)), seed=1)
    engine = tm.make_engine(built(name), tm.plan(0.02), mode=mode, **PRECISIONS[precision])
    checks.neighbours(engine, some)
    for one in some:
        assert float(tm.clipped_sum(engine, [one]).norm()) >= 0.02 * (1 - 1e-6)  # bounded, and not lost


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_on_a_base_of_low_precision_are_bounded(family: str, dtype: torch.dtype, mode: str) -> None:
    net = lowered(tm.build(family), dtype)
    engine = tm.make_engine(net, tm.plan(0.02), mode=mode)
    checks.bounded(engine, tm.units(((9, 4), (16,), (5,), (40,)), seed=1))
    assert engine.self_check(tm.VOCABULARY, tm.shapes(32), low_precision=True).error <= 5e-2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_a_gradient_whose_terms_cancel_is_bounded(scale: float, precision: str, mode: str) -> None:
    """A float32 norm formed from Gram products cancels here (below); what is summed must be what was measured."""
    for bound in (1e-4, 1.0):
        checks.cancelling(mode, scale, bound, **PRECISIONS[precision])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_the_rounding_of_a_unit_does_not_follow_its_neighbours(scale: float, mode: str) -> None:
    checks.own_rounding(mode, scale)


@settings(parent=generated, max_examples=60)
@given(
    tokens=st.integers(2, 40),
    i=st.integers(1, 40),
    j=st.integers(1, 40),
    log_scale=st.floats(0, 9),
    copies=st.integers(1, 3),
    low=st.booleans(),
    looked_up=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_factors_that_cancel_are_clipped_to_at_most_c(
    tokens: int, i: int, j: int, log_scale: float, copies: int, low: bool, looked_up: bool, seed: int
) -> None:
    """Any factors, several calls and rows of one unit, and lookups (a tied head), whose sum nearly vanishes."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if low else torch.float32
    i += 2 * looked_up
    parameter = nn.Parameter(torch.zeros(i, j))
    held = UnitGradients(parameter, Owners(torch.tensor([0, 1, 0, -1]), 2))
    for _ in range(copies):
        left, right = (torch.randn(4, tokens, width, generator=generator) for width in (i, j))
        left, right = (left * 10**log_scale).to(dtype), right.to(dtype)
        held.add(Product(left, right))
        held.add(Product(-left, right))
    if looked_up:
        ids = torch.randint(0, i, (4, tokens), generator=generator)
        values = 10**log_scale * torch.randn(4, tokens, j, generator=generator)
        held.add(Rows(ids, values))
        one_hot = -functional.one_hot(ids, i).float()
        held.add(Product(one_hot, values))
    rest = torch.randn(4, tokens, i, generator=generator), torch.randn(4, tokens, j, generator=generator)
    held.add(Product(*rest))
    norm_U, bound = held.square_norm().sqrt(), 1e-3
    for unit in range(2):
        sum_ = torch.zeros(i, j, dtype=torch.float64)
        factor_U = torch.zeros(2, dtype=torch.float64)
        factor_U[unit] = (bound / norm_U[unit]).clamp(max=1.0)
        held.add_to(sum_, factor_U, [True, True])
        assert float(sum_.norm()) <= bound * checks.BOUND


@pytest.mark.parametrize("counted", [(True, True, True), (True, False, True)], ids=["all finite", "one not finite"])
@pytest.mark.parametrize("together", [1, 40, 10**6], ids=["each alone", "some", "all together"])
def test_parameters_that_are_added_together_get_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, together: int, counted: tuple[bool, ...]
) -> None:
    """Neighbours in one vector, with a gap and a large one between them, and tensors of their own."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 3), (4,), (3, 2), (50, 9), (2, 2), (1, 5)]
    dense = [1e6 * torch.randn(3, *shape, generator=generator) for shape in shapes]
    for gradient_U in dense:
        gradient_U[[unit for unit, good in enumerate(counted) if not good]] = float("nan")
    sizes = [gradient_U[0].numel() for gradient_U in dense]
    vector = 2.0**40 + torch.arange(sum(sizes) + 7, dtype=torch.float64)
    places = [7 * (index > 1) + sum(sizes[:index]) for index in range(len(sizes))]
    sums = [vector[place : place + size].view(shape) for place, size, shape in zip(places, sizes, shapes, strict=True)]
    sums[-1] = sums[-1].clone()
    factor_U, owners = torch.tensor([0.3, 0.0, 1e-4], dtype=torch.float64), Owners(torch.arange(3), 3)
    expected = [before.clone() for before in sums]
    before = vector.clone()
    for sum_, gradient_U in zip(expected, dense, strict=True):
        for unit, good in enumerate(counted):
            sum_ += (gradient_U[unit].double() * factor_U[unit]).round() if good else 0
    monkeypatch.setitem(gradients.TOGETHER, "cpu", together)
    held = [UnitGradients(nn.Parameter(torch.zeros(shape)), owners) for shape in shapes]
    for one, gradient_U in zip(held, dense, strict=True):
        one.add(Dense(gradient_U.clone()))
    gradients.add_all(list(zip(held, sums, strict=True)), factor_U, counted)
    assert all(torch.equal(sum_, right) for sum_, right in zip(sums, expected, strict=True))
    assert torch.equal(vector[10:17], before[10:17])
    assert torch.equal(vector[-5:], before[-5:])


PRODUCTS = {
    "backends": torch.backends,
    "backends.cuda.matmul": torch.backends.cuda.matmul,
    "backends.mkldnn.matmul": torch.backends.mkldnn.matmul,
}


def untouched() -> None:
    """As torch starts: nobody has set anything."""
    torch.set_float32_matmul_precision("highest")
    for place in PRODUCTS.values():
        place.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def _untouched() -> Iterator[None]:
    untouched()
    yield
    untouched()


@pytest.mark.usefixtures("_untouched")
@pytest.mark.parametrize(
    ("place", "precision"),
    [("", "high"), ("", "medium"), *((place, "tf32") for place in PRODUCTS), ("backends.mkldnn.matmul", "bf16")],
)
def test_tf32_is_refused_however_it_was_switched_on(place: str, precision: str) -> None:
    """With torch's newer switches the older one, here without a place, can no longer be read."""
    if place:
        checks.tf32_refused(lambda: setattr(PRODUCTS[place], "fp32_precision", precision))
    else:
        checks.tf32_refused(lambda: torch.set_float32_matmul_precision(precision))


def test_adapters_keep_their_inputs_in_the_precision_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with peft's cast to float32, which autocast rounds again; peft casts again once the engine is closed."""
    found, kept = [], set[torch.dtype]()

    net = lowered(tm.build("llama", tm.LORA), torch.bfloat16)
    layers = [module for module in net.modules() if isinstance(module, BaseTunerLayer)]
    assert layers
    monkeypatch.setattr(clipping.PerUnitClipper, "_receive", _looking(clipping.PerUnitClipper._receive, kept))
    for cast in (True, False):
        engine = tm.make_engine(net, tm.plan(0.05), autocast=BF16)
        if cast:
            for layer in layers:
                del layer._cast_input_dtype
        found.append(engine.clipped_sum(tm.batches(tm.units(tm.RAGGED)))[0])
        assert kept == {torch.float32, torch.bfloat16} if cast else kept == {torch.bfloat16}
        assert (
            net(tm.batches(tm.units(tm.RAGGED))[0].input_ids_RT).logits.dtype == torch.bfloat16
        )  # without autocast too
        kept.clear()
        engine.close()
    assert torch.equal(*found)
    assert not any("_cast_input_dtype" in vars(layer) for layer in layers)


def _looking(receive: Any, kept: set[torch.dtype]) -> Any:
    def look(self: Any, layer: Any, name: str, rule: Any, input: torch.Tensor, backprop: torch.Tensor) -> None:
        kept.add(input.dtype)
        receive(self, layer, name, rule, input, backprop)

    return look
