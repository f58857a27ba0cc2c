"""Each unit's contribution is its own clipped gradient, exactly, whatever model, precision, padding or neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import tiny_models as tm
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_models import FROZEN, LORA, Toy
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpllm.data import Unit
from dpllm.errors import Refused
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.rules import conv1d, linear
from dpllm.privacy.sampling import collate

BOUND = 1 + 1e-6
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
FAMILIES = ("llama", "gpt2", "qwen2", "gemma2", "gpt_neox", "phi3", "opt")
RAGGED = ((9, 4), (17,), (5,), (12,), (3, 7, 2))


@cache
def built(family: str, method: str) -> Any:
    return tm.build(family, LORA if method == "lora" else FROZEN)


def clip(gradient_UP: torch.Tensor, bound: float) -> torch.Tensor:
    norm_U = gradient_UP.norm(dim=1)
    return (bound / norm_U).clamp(max=1.0) @ gradient_UP


def without(some: Sequence[Unit], index: int) -> list[Unit | None]:
    return [None if position == index else one for position, one in enumerate(some)]


def check_neighbours(engine: Any, some: Sequence[Unit], bound: float, size: int = 64, others: float = 0.0) -> None:
    """Emptying any one unit moves the clipped sum by at most C; so does a unit alone.

    ``others``: how far the rounding of the other units' gradients may follow the shape of the physical batch, over C.
    """
    whole = tm.clipped_sum(engine, some, size)
    for index, one in enumerate(some):
        assert float((whole - tm.clipped_sum(engine, without(some, index), size)).norm()) <= bound * (BOUND + others)
        assert float(tm.clipped_sum(engine, [one]).norm()) <= bound * BOUND


@pytest.mark.parametrize("method", ["lora", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_clipped_sum_are_those_of_float64_autograd(family: str, method: str) -> None:
    net, some = built(family, method), tm.units(RAGGED)
    exact_UP = tm.brute_force(net, some)
    bound = float(exact_UP.norm(dim=1).median()) * 1.01
    engine = tm.make_engine(net, tm.plan(bound))
    batch = collate(some, pad_id=0)
    seen_U = tm.norms(engine, batch)
    torch.testing.assert_close(seen_U.double(), exact_UP.norm(dim=1), rtol=1e-5, atol=0)
    expected_P = clip(exact_UP, bound)
    for size in (1, 3, 64):
        error = (tm.clipped_sum(engine, some, size) - expected_P).norm() / expected_P.norm()
        assert float(error) <= 1e-5


@settings(
    max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    lengths=st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=3), min_size=1, max_size=4),
    size=st.integers(1, 6),
    log_bound=st.floats(-3, 1),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("method", ["lora", "frozen"])
def test_any_ragged_batch_is_clipped_exactly(
    method: str, lengths: list[list[int]], size: int, log_bound: float, seed: int
) -> None:
    net, some, bound = built("llama", method), tm.units(lengths, seed), 10**log_bound
    expected_P = clip(tm.brute_force(net, some), bound)
    engine = tm.make_engine(net, tm.plan(bound))
    assert float((tm.clipped_sum(engine, some, size) - expected_P).norm()) <= 1e-5 * float(expected_P.norm())
    check_neighbours(engine, some, bound, size)


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "frozen"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_unit_moves_the_sum_by_at_most_c(family: str, method: str, autocast: Any) -> None:
    some = tm.units(((9, 4), (16,), (5,), (12,), (40,), (2,)), seed=1)
    engine = tm.make_engine(built(family, method), tm.plan(0.02), **({"autocast": autocast} if autocast else {}))
    check_neighbours(engine, some, 0.02)


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
def test_huge_gradients_are_clipped_too(autocast: Any) -> None:
    net = tm.build("llama", FROZEN)
    with torch.no_grad():
        net.get_output_embeddings().weight.mul_(1e6)
    some = tm.units(RAGGED)
    engine = tm.make_engine(net, tm.plan(1.0), **({"autocast": autocast} if autocast else {}))
    batch = collate(some, pad_id=0)
    norm_U = tm.norms(engine, batch)
    assert float(norm_U.min()) > 1e3
    # A shorter padding rounds differently, and logits of 1e5 make the most of bfloat16's eight bits.
    check_neighbours(engine, some, 1.0, others=1e-2 if autocast else 0.0)
    assert float(tm.clipped_sum(engine, some[:1]).norm()) >= 1 - 1e-6  # bounded, not lost


def test_rounding_of_a_large_sum_does_not_exceed_one_units_bound() -> None:
    """In float32 the sum of 4096 clipped gradients moved by C (1 + 3e-5) when one of them was emptied."""
    some = [tm.unit([3 + number % 9], number // 9) for number in range(4096)]
    engine = tm.make_engine(Toy(), tm.plan(1e-3))
    whole = tm.clipped_sum(engine, some, 256)
    assert float(whole.norm()) > 0.3  # several hundred C: the gradients point the same way
    for index in (0, 5, 2048, 4095):
        moved = float((whole - tm.clipped_sum(engine, without(some, index), 256)).norm())
        assert moved <= 1e-3 * BOUND


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_unit_without_a_finite_gradient_adds_nothing_and_spoils_nothing(bad: float) -> None:
    net = tm.build("llama", FROZEN)
    with torch.no_grad():
        net.get_input_embeddings().weight[tm.VOCABULARY - 1] = bad
    some = tm.units(RAGGED)
    poisoned = Unit((tm.replace_token(some[1].sequences[0], 8, tm.VOCABULARY - 1),))
    engine = tm.make_engine(net, tm.plan(0.3))
    batch = collate([some[0], poisoned, *some[2:]], pad_id=0)
    norm_U = tm.norms(engine, batch)
    assert not bool(norm_U[1].isfinite())
    assert bool(norm_U[[0, 2, 3, 4]].isfinite().all())
    with_it = tm.clipped_sum(engine, [some[0], poisoned, *some[2:]])
    assert torch.equal(tm.clipped_sum(engine, [poisoned]), torch.zeros_like(with_it))
    reference = tm.clipped_sum(engine, without(some, 1))
    assert float((with_it - reference).norm()) <= 1e-6 * float(reference.norm())


def test_one_bad_chunk_zeroes_its_whole_unit() -> None:
    net = tm.build("llama", LORA)
    with torch.no_grad():
        net.get_input_embeddings().weight[tm.VOCABULARY - 1] = float("nan")
    good = tm.unit([9, 6], 1)
    mixed = Unit((good.sequences[0], tm.replace_token(good.sequences[1], 2, tm.VOCABULARY - 1)))
    engine = tm.make_engine(net)
    assert float(tm.clipped_sum(engine, [good]).norm()) > 0
    assert float(tm.clipped_sum(engine, [mixed]).norm()) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_neighbour_does_not_change_a_loss(family: str) -> None:
    engine = tm.make_engine(built(family, "lora"))
    some = tm.units([(6,), (11,), (3,)])
    long = tm.unit([60], 99)
    with torch.no_grad():
        beside_R = engine.losses(collate([*some, long], pad_id=0))[:3]
        alone_R = torch.cat([engine.losses(collate([one], pad_id=0)) for one in some])
    torch.testing.assert_close(beside_R, alone_R, rtol=1e-5, atol=1e-6)


def test_a_loss_divides_by_its_own_example_and_ignores_masked_tokens() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 6, 0, 0, 0]])
    mask = torch.tensor([[False, False, True, True, True], [False, True, False, False, False]])
    logits[1, 2:] = float("inf")  # padding
    loss_R = sequence_losses(logits, ids, mask, torch.tensor([6.0, 1.0]))
    scores = torch.log_softmax(logits, dim=-1)
    expected = [-(scores[0, 1, 3] + scores[0, 2, 4] + scores[0, 3, 5]) / 6, -scores[1, 0, 6]]
    torch.testing.assert_close(loss_R.double(), torch.stack(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["lora", "frozen"])
def test_cutting_into_physical_batches_changes_nothing(method: str) -> None:
    some = tm.units([(4 + number % 7,) for number in range(12)] + [(5, 9), (3, 3, 3)])
    engine = tm.make_engine(built("llama", method), tm.plan(0.3))
    sums = [tm.clipped_sum(engine, some, size) for size in (1, 2, 5, 64)]
    for other in sums[1:]:
        assert float((other - sums[0]).norm()) <= 1e-6 * float(sums[0].norm())


@pytest.mark.parametrize("method", ["lora", "frozen"])
def test_gradient_checkpointing_changes_nothing(method: str) -> None:
    some, adapter = tm.units(RAGGED), LORA if method == "lora" else FROZEN
    sums = []
    for checkpointing in (None, "reentrant", "non-reentrant"):
        engine = tm.make_engine(tm.build("llama", adapter, checkpointing=checkpointing), tm.plan(0.3))
        assert engine.self_check(tm.VOCABULARY, 32) <= 1e-5
        sums.append(tm.clipped_sum(engine, some, 3))
    for other in sums[1:]:
        assert float((sums[0] - other).norm()) <= 1e-6 * float(sums[0].norm())


def test_opacus_ghost_agrees_with_per_sample_on_lora() -> None:
    net, some = built("llama", "lora"), tm.units([(9,), (4,), (17,), (12,)])
    sums = []
    for mode in ("per_sample", "opacus_ghost"):
        engine = tm.make_engine(net, tm.plan(0.5), grad_sample_mode=mode)
        sums.append(tm.clipped_sum(engine, some, 3))
    assert float((sums[0] - sums[1]).norm()) <= 1e-4 * float(sums[0].norm())


def test_opacus_ghost_refuses_units_of_several_sequences() -> None:
    engine = tm.make_engine(built("llama", "lora"), grad_sample_mode="opacus_ghost")
    with pytest.raises(Refused, match="several"):
        tm.clipped_sum(engine, tm.units([(9, 4), (5,)]))


def test_dropout_of_the_adapter_leaves_the_clipped_sum_exact() -> None:
    net = tm.build("llama", {**LORA, "dropout": 0.3})
    engine = tm.make_engine(net, tm.plan(0.1))
    assert engine.self_check(tm.VOCABULARY, 32) <= 1e-4
    check_one = [float(tm.clipped_sum(engine, [one]).norm()) for one in tm.units(RAGGED)]
    assert max(check_one) <= 0.1 * BOUND


@pytest.mark.parametrize("rule", [linear, conv1d])
def test_gradients_of_a_low_precision_pass_are_summed_in_float32(rule: Any) -> None:
    """Products of bfloat16 numbers are exact in float32; summing them in bfloat16 loses all but two digits."""
    layer = nn.Linear(8, 8) if rule is linear else Conv1D(8, 8)
    generator = torch.Generator().manual_seed(2)
    x_RTd, g_RTp = (torch.randn(3, 50, 8, generator=generator).bfloat16() for _ in range(2))
    parts = rule(layer, x_RTd, g_RTp, lambda _: True, "per_sample")
    found = {parameter: part.gradient_R for parameter, part in parts}
    exact_Rpd = torch.einsum("rtp,rtd->rpd", g_RTp.double(), x_RTd.double())
    exact_Rpd = exact_Rpd if rule is linear else exact_Rpd.transpose(1, 2)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    torch.testing.assert_close(found[layer.weight].double(), exact_Rpd, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[layer.bias].double(), g_RTp.double().sum(dim=1), rtol=1e-4, atol=1e-5)


class WithoutRows(Toy):
    """Its layer reads a matrix of some of the tokens, in which no row belongs to anybody."""

    def hidden(self, x_RTd: torch.Tensor) -> torch.Tensor:
        seen = self.layer(x_RTd[:, 1:].flatten(0, 1)).unflatten(0, (len(x_RTd), -1))
        return torch.cat([x_RTd[:, :1], seen], dim=1)


def test_tokens_without_rows_are_refused() -> None:
    engine = tm.make_engine(WithoutRows(hidden=4))
    with pytest.raises(Refused, match="without their rows"):
        tm.clipped_sum(engine, tm.units([(5,), (4,)]))


class Cancelling(Toy):
    """Activations 1e5 and 1e5 + 1, backprops +1 and -1: the terms of the gradient are 1e5 times its norm."""

    def __init__(self, scale: float) -> None:
        super().__init__(hidden=4)
        self.signs = nn.Parameter(torch.tensor([1.0, -1.0]).repeat(40), requires_grad=False)
        with torch.no_grad():
            direction = torch.randn(4, generator=torch.Generator().manual_seed(7))
            noise = torch.randn(tm.VOCABULARY, 4, generator=torch.Generator().manual_seed(8))
            self.embed.weight.copy_(scale * direction + noise)
            self.layer.weight.zero_()

    def hidden(self, x_RTd: torch.Tensor) -> torch.Tensor:
        return self.layer(x_RTd) * self.signs[: x_RTd.shape[1], None]


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_a_gradient_whose_terms_cancel_is_bounded(scale: float, autocast: Any) -> None:
    """A norm formed from Gram products cancels here; the tensor that is summed must be the one that was measured."""
    net = Cancelling(scale)
    same = [tm.constant_unit(length, 9) for length in (9, 17, 33, 64)]
    for bound in (1e-4, 1.0):
        engine = tm.make_engine(net, tm.plan(bound), **({"autocast": autocast} if autocast else {}))
        for one in same:
            assert float(tm.clipped_sum(engine, [one]).norm()) <= bound * BOUND
        check_neighbours(engine, same, bound)


def test_the_crafted_cancellation_is_as_strong_as_it_says() -> None:
    net, one = Cancelling(1e5), tm.constant_unit(65, 9)  # 64 predictions: their signs cancel in pairs
    caught: dict[str, torch.Tensor] = {}
    net.layer.register_full_backward_hook(lambda _m, _i, out: caught.update(backprop=out[0]))
    net.layer.register_forward_hook(lambda _m, inputs, _o: caught.update(activation=inputs[0]))
    batch = collate([one], pad_id=0)
    sequence_losses(net(batch.input_ids_RT).logits, *tm.loss_inputs(batch)).sum().backward()
    terms = (caught["activation"][0].norm(dim=1) * caught["backprop"][0].norm(dim=1)).double().sum()
    assert float(terms / net.layer.weight.grad.double().norm()) > 1e5
