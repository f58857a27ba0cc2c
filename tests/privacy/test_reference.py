"""The reference of the self-check: what rounding does to it is measured, and does not hide what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tm
import torch
from cases import BF16
from torch import Tensor, nn

from dpllm.errors import Refused
from dpllm.privacy import engine, reference
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.rules import Part, Product

EXACT = torch.linspace(1.0, 2.0, 60, dtype=torch.float64)


NORMS = torch.tensor([3.0, 4.0], dtype=torch.float64)


def compared(
    seen_P: Tensor, rounding: float, tolerance: float = 5e-2, seen_U: Tensor = NORMS, of_norms: float = 0.0
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


@pytest.mark.parametrize("rounding", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_excuses_nothing(rounding: float) -> None:
    with pytest.raises(Refused, match="clipped sum of second"):
        compared(second_times(1.35), rounding, tolerance=1e-3)


def test_rounding_of_one_layer_excuses_no_other() -> None:
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
    for factor in (0.0, 0.5, 0.79, 1.2, 2.0, float("nan"), float("inf")):
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
def test_in_bfloat16_an_engine_passes_by_its_rounding_and_not_with_half_a_gradient(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a tolerance that rounding alone exceeds."""
    monkeypatch.setattr(engine, "LOW_PRECISION_TOLERANCE", 4e-3)
    made = tm.make_engine(tm.build("llama", tm.LORA), tm.plan(0.05), longest=48, tokens=128, autocast=BF16)
    add, name = PassGradients.add, "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"

    def less(self: PassGradients, parameter: Tensor, part: Part) -> None:
        if parameter is made.parameters[name]:
            assert isinstance(part, Product)
            part = replace(part, left_Mi=part.left_Mi * factor)
        add(self, parameter, part)

    monkeypatch.setattr(PassGradients, "add", less)
    if factor == 1.0:
        assert 4e-3 < made.self_check(tm.VOCABULARY, low_precision=True).error < 2e-2
        return
    with pytest.raises(Refused, match=re.escape(name)):
        made.self_check(tm.VOCABULARY, low_precision=True)
