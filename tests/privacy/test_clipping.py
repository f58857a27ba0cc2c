"""No unit adds more than C, by either clipping function; its contribution is its own, whatever its size, rows and neighbours."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args

import checks
import pytest
import tiny_models as tm
import torch
from cases import BF16, MODES, generated
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpllm.card.card import CLIPPING_WORDS
from dpllm.privacy.clipping import FUNCTIONS
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.packing import Segment
from dpllm.privacy.rules import conv1d, linear
from dpllm.privacy.schedule import Clipping, Unit


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


# --- the clipping functions ------------------------------------------------------------------------------------------


NETS: dict[str, tuple[str, Any]] = {"lora": ("llama", LORA), "frozen": ("gpt2", FROZEN), "everything": ("gpt2", "")}


@cache
def net_of(name: str) -> Any:
    return tm.build(NETS[name][0], NETS[name][1])


@cache
def reference(name: str) -> Tensor:
    return tm.brute_force(net_of(name), tm.units(tm.RAGGED))


def test_each_function_has_a_name_in_recipes_words_on_the_card_and_a_row_in_the_documentation() -> None:
    assert get_args(Clipping) == tuple(FUNCTIONS) == tuple(CLIPPING_WORDS)
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "engine.md").read_text(encoding="utf-8")
    assert [name for name in FUNCTIONS if f"\n| `{name}` |" not in page] == []


@settings(parent=generated, max_examples=200)
@given(
    log_norms=st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    log_bound=st.floats(-9, 6),
    silent=st.integers(0, 3),
)
@pytest.mark.parametrize("clipping", FUNCTIONS)
def test_any_norms_are_brought_within_c(clipping: str, log_norms: list[float], log_bound: float, silent: int) -> None:
    """``silent`` units have hardly any gradient."""
    norm_U, bound = 10 ** torch.tensor(log_norms, dtype=torch.float64), 10**log_bound
    norm_U[:silent] = 1e-300
    factor_U = FUNCTIONS[clipping](norm_U, bound)
    assert bool(torch.isfinite(factor_U).all())
    assert float((factor_U * norm_U).max()) <= bound * (1 + 1e-12)
    if clipping == "flat":
        assert float(factor_U.max()) <= 1.0  # a short gradient is left as it is


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("clipping", FUNCTIONS)
def test_clipped_sums_are_those_by_hand(clipping: str, name: str, mode: str) -> None:
    for bound in (0.05, 1.0):
        checks.function(clipping, net_of(name), tm.units(tm.RAGGED), reference(name), bound, mode=mode)


@settings(parent=generated, max_examples=10)
@given(
    clipping=st.sampled_from(sorted(FUNCTIONS)),
    name=st.sampled_from(sorted(NETS)),
    mode=st.sampled_from(MODES),
    lengths=st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=4),
    tokens=st.one_of(st.just(tm.ALONE), st.integers(34, 200)),
    log_bound=st.floats(-4, 2),
    seed=st.integers(0, 10**6),
)
def test_any_unit_moves_the_sum_by_at_most_c(
    clipping: str, name: str, mode: str, lengths: Any, tokens: int, log_bound: float, seed: int
) -> None:
    promise = tm.plan(10**log_bound, clipping=clipping)
    engine = tm.make_engine(net_of(name), promise, mode=mode)
    checks.neighbours(engine, tm.units(lengths, seed), tokens)


@pytest.mark.parametrize("clipping", FUNCTIONS)
def test_the_loss_scale_of_fp16_does_not_change_what_is_clipped(clipping: str) -> None:
    """Automatic clipping's 0.01 is compared with the gradient, not with 1024 times the gradient."""
    net, some = Toy(), tm.units([(5,), (9, 4), (7,)])
    with torch.no_grad():
        net.head.weight.mul_(0.02)  # norms about as small as 0.01
    plain, scaled = (
        tm.clipped_sum(tm.make_engine(net, tm.plan(0.005, clipping=clipping), loss_scale=scale), some)
        for scale in (1.0, 1024.0)
    )
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-9)


def test_automatic_clipping_makes_long_gradients_equal() -> None:
    norm_U = reference("lora").norm(dim=1)  # by brute force, before the model has hooks
    engine = tm.make_engine(net_of("lora"), tm.plan(0.3, clipping="automatic"))
    for one, norm in zip(tm.units(tm.RAGGED), norm_U.tolist(), strict=True):
        assert float(tm.clipped_sum(engine, [one]).norm()) == pytest.approx(0.3 * norm / (norm + 0.01), rel=1e-5)
