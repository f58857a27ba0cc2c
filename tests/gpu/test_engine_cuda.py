"""The same guarantees on CUDA: exact, bounded, noised, the same bits in any company. Skipped where there is no such device."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from cases import MODES, TIED
from checks import apart, clip, without
from scipy import stats
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor

from dpllm.errors import Refused
from dpllm.model import loading
from dpllm.privacy.attention import Layout, Options, attend, by_rows
from dpllm.privacy.attention import _layouts as layouts
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.packing import Segment
from dpllm.run.build import check_passes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALARM = 1e-9
BOUND = 1 + 1e-6
CUDA = torch.device("cuda")
BF16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
RAGGED = ((9, 4), (17,), (5,), (12,), (3, 7, 2))
MIXED = (*RAGGED, (31,), (6,), (6,), (40, 2), (23,))  # of two passes of TOKENS
LONG = (
    (260, 150, 90),
    (300,),
    (129,),
    (128,),
    (5,),
    (127, 2),
)  # several blocks of a unit's tokens, and one unit goes on
TOKENS = 128  # of a pass: what kernels compute at once here
ADAPTERS = {
    "lora": LORA,
    "embedding": {**LORA, "target_modules": ["q_proj", "embed_tokens"]},
    "frozen": FROZEN,
    "head": {**FROZEN, "lm_head": True},
}
CASES = (
    *(("llama", method) for method in ADAPTERS),
    ("gpt2", "lora"),
    ("gpt2", "frozen"),
    ("qwen2", "lora"),
    ("gemma3_text", "frozen"),
)


def engine_on_cuda(family: str, adapter: dict[str, Any], bound: float, **arguments: Any) -> Any:
    net = tm.build(family, adapter).to(CUDA)
    return tm.make_engine(net, tm.plan(bound), **{"device": CUDA, "tokens": TOKENS, **arguments})


def in_precision(autocast: Any) -> dict[str, Any]:
    return {"autocast": autocast} if autocast else {}


def test_tf32_is_off_after_the_setting_that_train_makes() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


# --- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "checkpointing"), [("held", None), ("twice", None), ("held", "reentrant"), ("held", "non-reentrant")]
)
@pytest.mark.parametrize(("family", "method"), CASES)
def test_clipped_sum_is_that_of_float64_autograd(
    family: str, method: str, mode: str, checkpointing: str | None
) -> None:
    """In passes of many rows and of one, which for some units are several."""
    tied = TIED if method == "head" else {}
    net, some = tm.build(family, ADAPTERS[method], checkpointing=checkpointing, **tied).to(CUDA), tm.units(RAGGED)
    exact_UP = tm.brute_force(tm.build(family, ADAPTERS[method], **tied).to(CUDA), some)  # the same weights
    bound = float(exact_UP.norm(dim=1).median()) * 1.01
    engine = tm.make_engine(net, tm.plan(bound), device=CUDA, mode=mode)
    for tokens in (tm.ALONE, 32, TOKENS):
        assert apart(tm.clipped_sum(engine, some, tokens), clip(exact_UP, bound)) <= 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "method"), [("llama", "lora"), ("llama", "head"), ("gemma3_text", "frozen")])
def test_long_units_are_exact_too(family: str, method: str, mode: str) -> None:
    """Longer than what one product takes, and than Gemma's sliding window."""
    places = {"max_position_embeddings": 512}
    net, some = tm.build(family, ADAPTERS[method], **places).to(CUDA), tm.units(LONG)
    exact_UP = tm.brute_force(net, some)
    bound = float(exact_UP.norm(dim=1).median()) * 1.01
    engine = tm.make_engine(net, tm.plan(bound), device=CUDA, mode=mode, longest=300, tokens=384)
    assert apart(tm.clipped_sum(engine, some), clip(exact_UP, bound)) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2", "gemma3_text"])
def test_in_bf16_it_is_the_same_up_to_its_rounding(family: str) -> None:
    """Attention of all rows is one call there."""
    net, some = tm.build(family, LORA).to(CUDA), tm.units(MIXED)
    exact_UP = tm.brute_force(net, some)
    bound = float(exact_UP.norm(dim=1).median())
    engine = tm.make_engine(net, tm.plan(bound), device=CUDA, tokens=TOKENS, autocast=BF16)
    packed_P, alone_P = (tm.clipped_sum(engine, some, tokens) for tokens in (TOKENS, tm.ALONE))
    for sum_P in (packed_P, alone_P):  # of each other they may be off by two such roundings: 0.052 was seen
        assert apart(sum_P, clip(exact_UP, bound)) <= 5e-2


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_rows_in_a_pass_is_that_of_each_row(dtype: torch.dtype, window: int | None) -> None:
    """Forward and backward; and the same bits beside other rows, at another place."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 17, 64, 127, 128, 129, 300, 5]
    rows = [[torch.randn(1, heads, n, 64, generator=generator) for heads in (4, 2, 2, 4)] for n in lengths]

    def run(order: list[int]) -> dict[int, list[Tensor]]:
        tokens, segments, start = 1024, [], 0
        for number, row in enumerate(order):
            segments.append(Segment(start, start + lengths[row], number))
            start += lengths[row]
        parts = [torch.cat([rows[row][n] for row in order], dim=2) for n in range(4)]
        padded = [torch.nn.functional.pad(one, (0, 0, 0, tokens - start)) for one in parts]
        leaves = [one.to(CUDA, dtype).requires_grad_() for one in padded[:3]]
        layouts.append(Layout(segments, max(lengths)))
        try:
            output_1MHd, _ = by_rows(torch.nn.Identity(), *leaves, scaling=0.2, sliding_window=window)
            (output_1MHd.transpose(1, 2) * padded[3].to(CUDA, dtype)).sum().backward()
        finally:
            layouts.pop()
        seen = [output_1MHd.transpose(1, 2), *(leaf.grad for leaf in leaves)]
        return {row: [one[:, :, at.start : at.stop] for one in seen] for row, at in zip(order, segments, strict=True)}

    first, other = run([0, 1, 2, 3, 4, 5, 6, 7]), run([8, 7, 2, 6, 0, 5, 1, 4, 3])
    for row, seen in first.items():
        assert all(map(torch.equal, seen, other[row]))
        leaves = [one.to(CUDA).requires_grad_() for one in rows[row][:3]]
        expected = attend(*leaves, Options(scaling=0.2, sliding_window=window))
        (expected * rows[row][3].to(CUDA)).sum().backward()
        for one, right in zip(seen, [expected, *(leaf.grad for leaf in leaves)], strict=True):
            assert float((one.float() - right).norm()) <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * float(
                right.norm() + 1
            )


# --- bounded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tf32", [False, True], ids=["tf32-off", "tf32-on"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [LORA, FROZEN], ids=["lora", "frozen"])
def test_a_unit_alone_adds_at_most_c(adapter: dict[str, Any], autocast: Any, mode: str, tf32: bool) -> None:
    """Even where somebody switched TF32 on: the tensor that was measured is the one that is summed, in float64."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    engine = engine_on_cuda("llama", adapter, 0.01, mode=mode, **in_precision(autocast))
    for one in tm.units(RAGGED):
        assert 0.0099 <= float(tm.clipped_sum(engine, [one]).norm()) <= 0.01 * BOUND


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_a_gradient_whose_terms_cancel_is_bounded(scale: float, mode: str) -> None:
    net = tm.Cancelling(scale, 64).to(CUDA)
    engine = tm.make_engine(net, tm.plan(1e-4), device=CUDA, mode=mode)
    for length in (9, 17, 33, 65):
        assert float(tm.clipped_sum(engine, [tm.alternating_unit(length)]).norm()) <= 1e-4 * BOUND


def test_a_step_with_tf32_is_refused() -> None:
    torch.set_float32_matmul_precision("high")
    engine = engine_on_cuda("llama", LORA, 1.0)
    with pytest.raises(Refused, match="TF32"):
        engine.step(tm.batches(tm.units(RAGGED), engine))


# --- noised ----------------------------------------------------------------------------------------------------------


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


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
def test_a_long_batch_has_the_same_bits_each_time(autocast: Any) -> None:
    """Attention adds up what keys give by atomic operations, in no order, unless it is told not to."""
    engine = engine_on_cuda("llama", LORA, 0.05, longest=512, tokens=1024, **in_precision(autocast))
    passes = tm.batches(tm.units([(512,), (400,), (300,), (512,)]), engine)
    first = engine.clipped_sum(passes)[0]
    for _ in range(10):
        assert torch.equal(engine.clipped_sum(passes)[0], first)


def check_bits(engine: Any, some: list[Any], *, low: bool, vocabulary: int = tm.VOCABULARY) -> None:
    """Each unit adds the bits that it adds alone, at any place and in any company, in the passes that the self-check allows."""
    check_passes(engine, vocabulary, pad_id=0, low=low)
    alone = [tm.clipped_sum(engine, [one]) for one in some]
    whole = torch.stack(alone).sum(dim=0)
    for order in (some, some[::-1], some[2:] + some[:2]):
        assert torch.equal(tm.clipped_sum(engine, order), whole)
    moved = whole - tm.clipped_sum(engine, without(some, 1))
    assert torch.equal(moved, alone[1])
    assert float(moved.norm()) <= engine.max_grad_norm * BOUND


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "method", "checkpointing"),
    [
        *((*case, None) for case in CASES),
        ("gemma2", "lora", None),
        ("llama", "lora", "reentrant"),
        ("llama", "head", "non-reentrant"),
        ("mixtral", "attention", None),
    ],
)
def test_a_unit_adds_the_same_bits_in_any_company(
    family: str, method: str, checkpointing: str | None, autocast: Any
) -> None:
    """If the self-check lets rows share a pass at all; computed one by one they always do."""
    adapter = ADAPTERS.get(method, {**LORA, "target_modules": ["q_proj", "v_proj"]})
    net = tm.build(family, adapter, checkpointing=checkpointing).to(CUDA)
    engine = tm.make_engine(net, tm.plan(0.05), device=CUDA, tokens=TOKENS, longest=48, **in_precision(autocast))
    assert engine.packing.alone == (family == "mixtral")
    check_bits(engine, tm.units(MIXED), low=autocast is not None)


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
def test_rows_of_a_model_of_usual_widths_share_passes(autocast: Any) -> None:
    """Two blocks as wide as SmolLM2-135M's: what one unit adds has the same bits, and no example needs a pass of its own."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    net = tm.build("llama", {**LORA, "r": 8}, **shape, head_dim=64, max_position_embeddings=512).to(CUDA)
    engine = tm.make_engine(net, tm.plan(0.05), device=CUDA, tokens=1024, longest=300, **in_precision(autocast))
    check_bits(engine, tm.units([*LONG, *MIXED]), low=autocast is not None)
    assert not engine.packing.alone


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
    config = tm.recipe(model=model, adapter={"method": "lora", "r": 4}, data={"max_length": 48})
    net = loading.build(config, CUDA)
    packed = [p for p in net.parameters() if p.dtype == torch.uint8]
    before = [p.data.clone() for p in packed]
    assert len(packed) == 2 * 7  # every linear layer of both blocks
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    how: dict[str, Any] = {"noise_entropy": 1, "device": CUDA, "longest": 48, "tokens": TOKENS, "autocast": BF16}
    engine = tm.engine_of(net, optimizer, tm.schedule(), tm.plan(), **how)
    check_bits(engine, tm.units(MIXED), low=True, vocabulary=384)
    weights = torch.cat([p.detach().flatten() for p in engine.parameters.values()])
    engine.step(tm.batches(tm.units(MIXED), engine))
    assert bool((torch.cat([p.detach().flatten() for p in engine.parameters.values()]) != weights).all())
    assert all(torch.equal(p.data, old) for p, old in zip(packed, before, strict=True))
    engine.close()
