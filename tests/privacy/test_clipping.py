"""A unit's contribution is bounded and its own, whatever its size, its losses, its rows and its neighbours."""

from __future__ import annotations

from functools import cache
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from cases import BF16
from tiny_models import FROZEN, LORA
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.packing import Segment
from dpllm.privacy.rules import conv1d, linear
from dpllm.privacy.schedule import Unit


@cache
def built(family: str, method: str) -> Any:
    return tm.build(family, {"lora": LORA, "frozen": FROZEN}[method])


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
def test_huge_gradients_are_clipped_too(autocast: Any) -> None:
    net = tm.build("llama", FROZEN)
    with torch.no_grad():
        net.get_output_embeddings().weight.mul_(1e6)
    some = tm.units(tm.RAGGED)
    engine = tm.make_engine(net, tm.plan(1.0), **({"autocast": autocast} if autocast else {}))
    assert min(tm.engine_norm(engine, unit, tm.TOKENS) for unit in some) > 1e3
    checks.neighbours(engine, some)
    assert float(tm.clipped_sum(engine, some[:1]).norm()) >= 1 - 1e-6  # bounded, not lost


def test_one_bad_chunk_zeroes_its_whole_unit() -> None:
    net = tm.build("llama", LORA)
    with torch.no_grad():
        net.get_input_embeddings().weight[tm.VOCABULARY - 1] = float("nan")
    good = tm.unit([9, 6], 1)
    mixed = Unit((good.sequences[0], tm.replace_token(good.sequences[1], 2, tm.VOCABULARY - 1)))
    engine = tm.make_engine(net)
    assert float(tm.clipped_sum(engine, [good]).norm()) > 0
    assert float(tm.clipped_sum(engine, [mixed]).norm()) == 0.0


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2", "gpt_neox", "phi3", "opt", "falcon"])
def test_a_long_neighbour_does_not_change_a_loss(family: str) -> None:
    checks.own_loss(built(family, "lora"))


def test_a_unit_over_several_batches_is_counted_once_without_privacy() -> None:
    net = tm.build("llama")
    engine = tm.engine_of(net, torch.optim.SGD(list(tm.trainable(net).values()), lr=1.0), tm.schedule(), None)
    passes = tm.batches(tm.units([(29, 24, 25, 26, 7), (4,), (12,)]), engine)
    assert any(some.goes_on for some in passes)
    assert engine.clipped_sum(passes)[1].units == 3


@pytest.mark.parametrize("rule", [linear, conv1d])
def test_gradients_of_a_low_precision_pass_are_summed_in_float32(rule: Any) -> None:
    """Products of bfloat16 numbers are exact in float32; summing them in bfloat16 loses all but two digits."""
    layer = nn.Linear(8, 8) if rule is linear else Conv1D(8, 8)
    generator = torch.Generator().manual_seed(2)
    x_UTd, g_UTp = (torch.randn(3, 50, 8, generator=generator).bfloat16() for _ in range(2))
    gradients = PassGradients(dict(layer.named_parameters()), most_units=3, held_numbers=10**6)
    gradients.open([Segment(50 * number, 50 * number + 50, number) for number in range(3)])
    x_1Md, g_1Mp = (values.flatten(0, 1)[None] for values in (x_UTd, g_UTp))
    for parameter, part in rule(layer, x_1Md, g_1Mp, lambda _: True, []):
        gradients.add(parameter, part)
    exact_Upd = torch.einsum("utp,utd->upd", g_UTp.double(), x_UTd.double())
    exact_Upd = exact_Upd if rule is linear else exact_Upd.transpose(1, 2)
    for number in range(3):
        gradient_P = gradients.whole(number)
        assert gradient_P.dtype == torch.float32
        exact_P = torch.cat([exact_Upd[number].flatten(), g_UTp[number].double().sum(dim=0)])
        torch.testing.assert_close(gradient_P.double(), exact_P, rtol=1e-4, atol=1e-5)
