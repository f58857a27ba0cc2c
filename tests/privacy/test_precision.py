"""In every precision a unit adds at most C, and its rounding does not follow its neighbours."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import checks
import numpy as np
import pytest
import tiny_models as tm
import torch
from cases import BF16, FP16, MODES, built, generated
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import around
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny_models import LORA
from torch import Tensor, nn
from torch.nn import functional

from dpllm.errors import Refused
from dpllm.privacy import clipping, engine, gradients, reference, selfcheck
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.packing import Segment
from dpllm.privacy.rules import LookedUp, Product
from dpllm.run.build import check_in_float32


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
    for item in some:
        assert float(tm.clipped_sum(engine, [item]).norm()) >= 0.02 * (1 - 1e-6)  # bounded, and not lost


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_on_a_base_of_low_precision_are_bounded(family: str, dtype: torch.dtype, mode: str) -> None:
    net = lowered(tm.build(family), dtype)
    engine = tm.make_engine(net, tm.plan(0.02), mode=mode)
    checks.bounded(engine, tm.units(((9, 4), (16,), (5,), (40,)), seed=1))
    assert engine.self_check(tm.VOCABULARY, low_precision=True).error <= 5e-2


def test_the_small_copy_in_float32_says_nothing_of_the_kernels_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own may round by company where those of the run do not, and would end a run that is right."""
    monkeypatch.setattr(selfcheck, "_check_company", lambda *_: pytest.fail("asked the copy"))
    config, net = tm.recipe(adapter=LORA), tm.build("llama")
    check_in_float32(config, net, tm.plan(), tm.CPU, tm.packing())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_a_gradient_whose_terms_cancel_is_bounded(scale: float, precision: str, mode: str) -> None:
    """Where terms cancel, one way to form a gradient is far from another; what is summed must be what was measured."""
    for bound in (1e-4, 1.0):
        checks.cancelling(mode, scale, bound, **PRECISIONS[precision])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_the_rounding_of_a_unit_does_not_follow_its_neighbours(scale: float, mode: str) -> None:
    checks.own_rounding(mode, scale)


@settings(parent=generated, max_examples=60)
@given(
    tokens=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    i=st.integers(1, 40),
    j=st.integers(1, 40),
    log_scale=st.floats(0, 9),
    copies=st.integers(1, 3),
    low=st.booleans(),
    looked_up=st.booleans(),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 10**6),
)
def test_parts_that_cancel_are_clipped_to_at_most_c(tokens, i, j, log_scale, copies, low, looked_up, mode, seed):
    """Any products, several calls of one layer, and lookups (a tied head), whose sum nearly vanishes."""
    generator, end = torch.Generator().manual_seed(seed), sum(tokens)
    dtype = torch.bfloat16 if low else torch.float32
    i += 2 * looked_up
    parameter = nn.Parameter(torch.zeros(i, j))
    held = PassGradients({"weight": parameter}, 3, i * j if mode == "held" else 0)
    held.open([Segment(0, tokens[0], 0), Segment(tokens[0], end, 1)])
    for _ in range(copies):
        left, right = (torch.randn(end + 3, width, generator=generator) for width in (i, j))
        left, right = (left * 10**log_scale).to(dtype), right.to(dtype)
        held.add(parameter, Product(left, right))
        held.add(parameter, Product(-left, right))
    if looked_up:
        ids = torch.randint(0, i, (end + 3,), generator=generator)
        values = 10**log_scale * torch.randn(end + 3, j, generator=generator)
        held.add(parameter, LookedUp(ids, values))
        held.add(parameter, Product(-functional.one_hot(ids, i).float(), values))
    held.add(parameter, Product(*(torch.randn(end + 3, width, generator=generator) for width in (i, j))))
    norm_U, bound, spacing = held.unit_norms().sum(dim=0).sqrt(), 1e-3, 2.0**-50
    for unit in range(2):
        sum_P = torch.zeros(i * j, dtype=torch.float64)
        factor_U = torch.zeros(2, dtype=torch.float64)
        factor_U[unit] = (bound / norm_U[unit]).clamp(max=1.0) / spacing
        held.add_to(sum_P, factor_U, torch.tensor([True, True]))
        assert float(sum_P.norm()) * spacing <= bound * checks.BOUND


def test_a_unit_has_the_bits_that_it_has_alone_with_any_threads() -> None:
    """Tall, wide and square matrices, odd sizes, more units than are measured together; a buffer that grows and is used again."""
    generator = torch.Generator().manual_seed(6)
    shapes = [(700, 8), (8, 700), (2000, 40), (65, 64), (33, 33), (7, 1), (1, 7), (300, 300)]
    parameters = {str(number): nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)}
    held = PassGradients(parameters, 20, 10**7)
    lengths = torch.randint(1, 40, (11,), generator=generator).tolist()
    parts = [[torch.randn(sum(lengths) + 5, width, generator=generator) for width in shape] for shape in shapes]

    rows = torch.arange(sum(lengths) + 5).split([*lengths, 5])

    def seen(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """square_LU and the sum of these units, which lie one after the other in a pass of their own."""
        ends = np.cumsum([lengths[number] for number in numbers]).tolist()
        held.open([Segment(start, end, place) for place, (start, end) in enumerate(itertools.pairwise([0, *ends]))])
        padded = torch.cat([*(rows[number] for number in numbers), rows[-1]])
        for parameter, (left, right) in zip(parameters.values(), parts, strict=True):
            held.add(parameter, Product(left[padded], right[padded]))
        sum_P, square_LU = torch.zeros(held.size, dtype=torch.float64), held.unit_norms()
        factor_U = torch.full((len(numbers),), 1e6, dtype=torch.float64)
        held.add_to(sum_P, factor_U, torch.ones(len(numbers), dtype=torch.bool))
        return square_LU, sum_P

    threads = torch.get_num_threads()
    try:
        for first, then in ((1, 2), (2, 1)):
            torch.set_num_threads(first)
            alone = [seen([number]) for number in range(11)]
            torch.set_num_threads(then)
            for numbers in (list(range(11)), [10, 3, 7], list(range(10, -1, -1))):
                square_LU, sum_P = seen(numbers)
                assert torch.equal(square_LU, torch.cat([alone[number][0] for number in numbers], dim=1))
                assert torch.equal(sum_P, torch.stack([alone[number][1] for number in numbers]).sum(dim=0))
            assert torch.get_num_threads() == then
    finally:
        torch.set_num_threads(threads)


PRODUCTS = {
    "backends": torch.backends,
    "backends.cuda.matmul": torch.backends.cuda.matmul,
    "backends.mkldnn.matmul": torch.backends.mkldnn.matmul,
}


@pytest.fixture
def _untouched() -> Iterator[None]:
    """As torch starts: nobody has set anything."""
    for wait in (True, False):
        torch.set_float32_matmul_precision("highest")
        for place in PRODUCTS.values():
            place.fp32_precision = "none"
        assert torch.get_float32_matmul_precision() == "highest"
        if wait:
            yield


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
    sums, kept = [], set[torch.dtype]()
    net = lowered(tm.build("llama", tm.LORA), torch.bfloat16)
    layers = [module for module in net.modules() if isinstance(module, BaseTunerLayer)]
    assert layers

    def look(receive: Any, self: Any, layer: Any, name: str, rule: Any, input: torch.Tensor, *rest: Any) -> None:
        kept.add(input.dtype)
        receive(self, layer, name, rule, input, *rest)

    around(clipping.PerUnitClipper, "_receive", look)(monkeypatch)
    for cast in (True, False):
        engine = tm.make_engine(net, tm.plan(0.05), autocast=BF16)
        if cast:
            for layer in layers:
                del layer._cast_input_dtype
        sums.append(engine.clipped_sum(tm.batches(tm.units(tm.RAGGED), engine))[0])
        assert kept == {torch.float32, torch.bfloat16} if cast else kept == {torch.bfloat16}
        assert net(torch.tensor([[3, 4, 5]])).logits.dtype == torch.bfloat16  # without autocast too
        kept.clear()
        engine.close()
    assert torch.equal(*sums)
    assert not any("_cast_input_dtype" in vars(layer) for layer in layers)


@pytest.mark.parametrize("failure", [ImportError("no Triton"), RuntimeError("no compiler")])
def test_without_kernels_units_are_computed_one_after_the_other(failure: Exception, monkeypatch: Any) -> None:
    """A lack of memory is no lack of a compiler."""
    kernels = ModuleType("dpllm.privacy.kernels")
    monkeypatch.setitem(sys.modules, "dpllm.privacy.kernels", kernels)
    monkeypatch.setattr(sys.modules["dpllm.privacy"], "kernels", kernels, raising=False)

    def try_out(device: torch.device) -> None:
        raise failure

    kernels.try_out = try_out  # type: ignore[attr-defined]
    cuda, kernels_for = torch.device("cuda"), gradients.kernels_for.__wrapped__
    assert kernels_for(cuda) is None
    failure = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError):
        kernels_for(cuda)
    kernels.try_out = lambda device: None  # type: ignore[attr-defined]
    assert kernels_for(cuda) is kernels
    assert kernels_for(torch.device("cpu")) is None


# --- the reference of the self-check: rounding is measured, and does not hide what is missing ---------------------------

EXACT = torch.linspace(1.0, 2.0, 60, dtype=torch.float64)
NORMS = torch.tensor([3.0, 4.0], dtype=torch.float64)


def compared(
    seen_P: Tensor, rounding: float, tolerance: float = 5e-2, seen_U: Any = NORMS, of_norms: float = 0
) -> float:
    """Against a reference of two parameters and two units: rounding moves the second of each by so much."""
    parameters = {"first": nn.Parameter(torch.zeros(20)), "second": nn.Parameter(torch.zeros(40))}
    subject: Any = SimpleNamespace(parameters=parameters, tolerance=tolerance)
    moved = torch.cat([EXACT[:20], EXACT[20:] * (1 + rounding)]), NORMS * torch.tensor([1.0, 1.0 + of_norms])
    return reference.compare(subject, seen_U, seen_P, lambda otherwise: moved if otherwise else (EXACT, NORMS))


def second_times(factor: float) -> Tensor:
    return torch.cat([EXACT[:20], EXACT[20:] * factor])


def test_an_error_of_a_few_roundings_is_accepted_and_a_larger_one_names_its_layer() -> None:
    assert compared(second_times(1.03), 0.0) == pytest.approx(0.03)
    assert compared(second_times(1.08), 0.025) == pytest.approx(0.08)
    with pytest.raises(Refused, match=r"clipped sum of second is off by 8\.0e-02"):
        compared(second_times(1.08), 0.015)
    with pytest.raises(Refused, match="clipped sum of second"):
        compared(second_times(1.002), 2e-4, tolerance=1e-3)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, -1.0, float("nan"), float("inf")])
def test_no_rounding_hides_what_is_missing(factor: float) -> None:
    for rounding in (0.1, 1.0, float("inf"), float("nan")):
        with pytest.raises(Refused, match="clipped sum of second"):
            compared(second_times(factor), rounding)


def test_a_reference_that_is_not_finite_and_rounding_of_another_layer_excuse_nothing() -> None:
    for rounding in (float("nan"), float("inf")):
        with pytest.raises(Refused, match="clipped sum of second"):
            compared(second_times(1.35), rounding, tolerance=1e-3)
    with pytest.raises(Refused, match="clipped sum of first"):
        compared(torch.cat([EXACT[:20] * 1.1, EXACT[20:]]), 0.05)


def norms_times(factor: float) -> Tensor:
    return NORMS * torch.tensor([1.0, factor], dtype=torch.float64)


def test_norms_are_held_to_their_own_rounding() -> None:
    assert compared(EXACT, 0.0, seen_U=norms_times(1.03)) == pytest.approx(0.03)
    assert compared(EXACT, 0.0, seen_U=norms_times(0.92), of_norms=-0.025) == pytest.approx(0.08)
    with pytest.raises(Refused, match=r"norm of a unit's gradient is off by 8\.0e-02"):
        compared(EXACT, 0.1, seen_U=norms_times(1.08), of_norms=0.015)
    with pytest.raises(Refused, match="norm of a unit's gradient"):
        compared(EXACT, 0.0, tolerance=1e-3, seen_U=norms_times(0.99), of_norms=0.1)
    for factor in (0.0, 0.79, 1.2, float("nan"), float("inf")):
        with pytest.raises(Refused, match="norm of a unit's gradient"):
            compared(EXACT, 1.0, seen_U=norms_times(factor), of_norms=1.0)


def test_outputs_of_low_precision_are_moved_by_as_much_as_rounding_moves_them() -> None:
    net = nn.Sequential(nn.Linear(64, 4096, bias=False), nn.Identity())
    for dtype, least, most in ((torch.bfloat16, 5e-4, 4e-3), (torch.float32, 1e-8, 6e-8)):
        net.to(dtype)
        values = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        state = torch.get_rng_state()
        with torch.no_grad():
            before = net[0](values)
            with reference._moved(net):
                after = net[0](values)
            apart = ((after - before).double().norm() / before.double().norm()).item()
            assert least < apart < most
            assert torch.equal(net[0](values), before)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_in_bfloat16_an_engine_passes_by_its_rounding_and_not_with_half_a_gradient(factor, monkeypatch):
    """At a tolerance that rounding alone exceeds."""
    monkeypatch.setattr(engine, "LOW_PRECISION_TOLERANCE", 4e-3)
    made = tm.make_engine(tm.build("llama", tm.LORA), tm.plan(0.05), longest=48, tokens=128, autocast=BF16)
    add, name = PassGradients.add, "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"

    def less(self: PassGradients, parameter: Tensor, part: Product) -> None:
        if parameter is made.parameters[name]:
            part = replace(part, left_Mi=part.left_Mi * factor)
        add(self, parameter, part)

    monkeypatch.setattr(PassGradients, "add", less)
    if factor == 1.0:
        assert 4e-3 < made.self_check(tm.VOCABULARY, low_precision=True).error < 2e-2
        return
    with pytest.raises(Refused, match=re.escape(name)):
        made.self_check(tm.VOCABULARY, low_precision=True)
