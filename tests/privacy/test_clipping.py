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

from dpllm.privacy.rules import Form, conv1d, linear
from dpllm.privacy.sampling import collate, physical_batches
from dpllm.text.data import Unit


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
    batch = collate(some, pad_id=0)
    norm_U = tm.norms(engine, batch)
    assert float(norm_U.min()) > 1e3
    # A shorter padding rounds differently, and logits of 1e5 make the most of bfloat16's eight bits.
    checks.neighbours(engine, some, others=1e-2 if autocast else 0.0)
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
    batches = physical_batches(range(3), tm.units([(9, 4, 5, 6, 7), (4,), (12,)]), tm.shapes(16, 2), 0)
    assert any(batch.goes_on for batch in batches)
    assert engine.clipped_sum(batches)[1].units == 3


@pytest.mark.parametrize("rule", [linear, conv1d])
def test_gradients_of_a_low_precision_pass_are_summed_in_float32(rule: Any) -> None:
    """Products of bfloat16 numbers are exact in float32; summing them in bfloat16 loses all but two digits."""
    layer = nn.Linear(8, 8) if rule is linear else Conv1D(8, 8)
    generator = torch.Generator().manual_seed(2)
    x_RTd, g_RTp = (torch.randn(3, 50, 8, generator=generator).bfloat16() for _ in range(2))
    parts = rule(layer, x_RTd, g_RTp, lambda _: True, Form(50, "per_sample"))
    found = {parameter: part.gradient_R for parameter, part in parts}
    exact_Rpd = torch.einsum("rtp,rtd->rpd", g_RTp.double(), x_RTd.double())
    exact_Rpd = exact_Rpd if rule is linear else exact_Rpd.transpose(1, 2)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    torch.testing.assert_close(found[layer.weight].double(), exact_Rpd, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[layer.bias].double(), g_RTp.double().sum(dim=1), rtol=1e-4, atol=1e-5)
