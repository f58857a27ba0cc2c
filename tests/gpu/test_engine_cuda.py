"""The same guarantees on CUDA: exact, bounded, noised. Skipped where there is no such device."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from scipy import stats
from tiny_models import FROZEN, LORA, Toy

from dpllm.errors import Refused, RoundsByCompany
from dpllm.model import loading
from dpllm.privacy.noise import GaussianNoise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALARM = 1e-9
BOUND = 1 + 1e-6
CUDA = torch.device("cuda")
BF16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
RAGGED = ((9, 4), (17,), (5,), (12,), (3, 7, 2))


def engine_on_cuda(family: str, adapter: dict[str, Any], bound: float, **arguments: Any) -> Any:
    return tm.make_engine(tm.build(family, adapter).to(CUDA), tm.plan(bound), device=CUDA, **arguments)


def test_tf32_is_off_after_the_setting_that_train_makes() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


ADAPTERS = {
    "lora": LORA,
    "embedding": {**LORA, "target_modules": ["q_proj", "embed_tokens"]},
    "frozen": FROZEN,
    "head": {**FROZEN, "lm_head": True},
}


@pytest.mark.parametrize(
    ("mode", "checkpointing"),
    [("auto", None), ("per_sample", None), ("ghost", None), ("auto", "reentrant"), ("auto", "non-reentrant")],
)
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in ADAPTERS),
        ("gpt2", "lora"),
        ("gpt2", "frozen"),
        ("qwen2", "lora"),
        ("gemma3_text", "frozen"),
    ],
)
def test_clipped_sum_is_that_of_float64_autograd(
    family: str, method: str, mode: str, checkpointing: str | None
) -> None:
    tied = {"tie_word_embeddings": method == "head"}
    net, some = tm.build(family, ADAPTERS[method], checkpointing=checkpointing, **tied).to(CUDA), tm.units(RAGGED)
    exact_UP = tm.brute_force(tm.build(family, ADAPTERS[method], **tied).to(CUDA), some)  # the same weights
    norm_U = exact_UP.norm(dim=1)
    bound = float(norm_U.median()) * 1.01
    expected_P = (bound / norm_U).clamp(max=1.0) @ exact_UP
    engine = tm.make_engine(net, tm.plan(bound), device=CUDA, mode=mode)
    assert engine.self_check(tm.VOCABULARY, tm.shapes(32)).error <= 1e-3
    for size in (1, 64):
        assert float((tm.clipped_sum(engine, some, size) - expected_P).norm()) <= 1e-5 * float(expected_P.norm())


@pytest.mark.parametrize("tf32", [False, True], ids=["tf32-off", "tf32-on"])
@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [LORA, FROZEN], ids=["lora", "frozen"])
def test_a_unit_alone_adds_at_most_c(adapter: dict[str, Any], autocast: Any, tf32: bool) -> None:
    """Even where somebody switched TF32 on: the tensor that was measured is the one that is summed, in float64."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    engine = engine_on_cuda("llama", adapter, 0.01, **({"autocast": autocast} if autocast else {}))
    for one in tm.units(RAGGED):
        norm = float(tm.clipped_sum(engine, [one]).norm())
        assert 0.0099 <= norm <= 0.01 * BOUND


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
def test_emptying_a_unit_moves_the_sum_by_at_most_c(autocast: Any) -> None:
    """Rows of one length, so that the physical batch keeps its padding; other units' rounding may follow its height."""
    some, bound = tm.units([(12,)] * 8), 0.02
    engine = engine_on_cuda("llama", LORA, bound, **({"autocast": autocast} if autocast else {}))
    whole = tm.clipped_sum(engine, some)
    for index in range(8):
        rest = tm.clipped_sum(engine, [None if number == index else one for number, one in enumerate(some)])
        assert float((whole - rest).norm()) <= bound * (BOUND + (1e-2 if autocast else 1e-5))


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [LORA, FROZEN], ids=["lora", "frozen"])
def test_every_mode_bounds_a_unit_alone(adapter: dict[str, Any], autocast: Any, mode: str) -> None:
    arguments = {"mode": mode, **({"autocast": autocast} if autocast else {})}
    engine = engine_on_cuda("llama", adapter, 0.01, **arguments)
    for one in tm.units(RAGGED):
        assert float(tm.clipped_sum(engine, [one]).norm()) <= 0.01 * BOUND


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_a_gradient_whose_terms_cancel_is_bounded(scale: float, mode: str) -> None:
    """In float32 the Gram sum loses the norm altogether."""
    net = tm.Cancelling(scale, 64).to(CUDA)
    engine = tm.make_engine(net, tm.plan(1e-4), device=CUDA, mode=mode)
    for length in (9, 17, 33, 65):
        assert float(tm.clipped_sum(engine, [tm.alternating_unit(length)]).norm()) <= 1e-4 * BOUND


def test_a_step_with_tf32_is_refused() -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(Refused, match="TF32"):
        engine_on_cuda("llama", LORA, 1.0).step(tm.batches(tm.units(RAGGED)))


def test_bf16_passes_the_self_check_in_its_own_tolerance() -> None:
    engine = engine_on_cuda("llama", LORA, 1.0, autocast=BF16)
    assert engine.self_check(tm.VOCABULARY, tm.shapes(32), low_precision=True).error <= 5e-2


def test_noise_is_float32_normal_fresh_and_of_the_promised_size() -> None:
    promise = tm.plan(0.05, 1.7)
    engine = tm.make_engine(Toy(bias=True).to(CUDA), promise, device=CUDA, noise_entropy=2**99 + 3)
    rows = torch.stack([engine._release(engine.clipped_sum([])[0]) for _ in range(400)])
    assert rows.dtype == torch.float32
    noise = rows.double().cpu().numpy() * 10 / (0.05 * 1.7)
    square_P = (noise**2).sum(axis=0)
    assert min(stats.chi2.sf(square_P, 400).min(), stats.chi2.cdf(square_P, 400).min()) > ALARM / 144
    assert stats.kstest(noise.flatten(), "norm").pvalue > ALARM
    product = (noise[:-1] * noise[1:]).sum() / (72 * 399) ** 0.5
    assert 2 * stats.norm.sf(abs(product)) > ALARM


def test_torchs_seed_does_not_touch_the_noise_on_cuda() -> None:
    torch.manual_seed(0)
    first = GaussianNoise(5, CUDA).draw(1000)
    torch.manual_seed(1)
    assert torch.equal(GaussianNoise(5, CUDA).draw(1000), first)
    for bit in (32, 62):
        assert not torch.equal(GaussianNoise(5 + 2**bit, CUDA).draw(1000), first)


def test_a_long_batch_has_the_same_bits_each_time() -> None:
    """Attention adds up what keys give by atomic operations, in no order, unless it is told not to."""
    engine = engine_on_cuda("llama", LORA, 0.05, autocast=BF16, max_length=512)
    batches = tm.physical_batches(range(4), tm.units([(512,), (400,), (300,), (512,)]), tm.shapes(512, 4), 0)
    first = engine.clipped_sum(batches)[0]
    for _ in range(20):
        assert torch.equal(engine.clipped_sum(batches)[0], first)


def check_bits(engine: Any, some: list[Any], *, low_precision: bool, vocabulary: int = tm.VOCABULARY) -> int:
    """Each unit adds the bits that it adds alone, in any company and at any place; the rows of a pass that this allows."""
    size = 4
    try:
        engine.self_check(vocabulary, tm.shapes(32, size), low_precision=low_precision)
    except RoundsByCompany:
        size = 1
        engine.self_check(vocabulary, tm.shapes(32, size), low_precision=low_precision)
    alone = [engine.clipped_sum(tm.batches([one], size))[0] for one in some]
    for order in (some, some[::-1], some[2:] + some[:2]):
        assert torch.equal(engine.clipped_sum(tm.batches(order, size))[0], torch.stack(alone).sum(dim=0))
    return size


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "method"), [*(("llama", method) for method in ADAPTERS), ("gpt2", "frozen"), ("qwen2", "lora")]
)
def test_a_unit_adds_the_same_bits_in_any_company(
    family: str, method: str, autocast: Any, checkpointing: str | None
) -> None:
    """If the self-check lets rows stand side by side at all; computed one by one they always do."""
    arguments = {} if autocast is None else {"autocast": autocast}
    net = tm.build(family, ADAPTERS[method], checkpointing=checkpointing).to(CUDA)
    engine = tm.make_engine(net, tm.plan(0.05), device=CUDA, **arguments)
    check_bits(engine, tm.units(RAGGED), low_precision=autocast is not None)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_four_bits_under_adapters(checkpointing: bool, tmp_path: Path) -> None:
    """Packed weights stay as they are, every coordinate is noised, and a unit adds the same bits in any company."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    base = tiny.save_model(tmp_path / "base", "llama", **shape)
    model = {"name_or_path": str(base), "quantization": "4bit", "gradient_checkpointing": checkpointing}
    config = tm.recipe(model=model, adapter={"method": "lora", "r": 4}, data={"max_length": 32})
    net = loading.build(config, CUDA)
    packed = [p for p in net.parameters() if p.dtype == torch.uint8]
    before = [p.data.clone() for p in packed]
    assert len(packed) == 2 * 7  # every linear layer of both blocks
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    how: dict[str, Any] = {"noise_entropy": 1, "device": CUDA, "max_length": 32, "autocast": BF16}
    engine = tm.engine_of(net, optimizer, tm.schedule(), tm.plan(), **how)
    check_bits(engine, tm.units(RAGGED), low_precision=True, vocabulary=384)
    weights = torch.cat([p.detach().flatten() for p in engine.parameters.values()])
    engine.step(tm.batches(tm.units(RAGGED)))
    assert bool((torch.cat([p.detach().flatten() for p in engine.parameters.values()]) != weights).all())
    assert all(torch.equal(p.data, old) for p, old in zip(packed, before, strict=True))
    engine.close()
