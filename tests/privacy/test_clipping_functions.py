"""Two ways to shorten a gradient, one promise: no unit adds more than C, and the noise knows it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args

import checks
import pytest
import tiny_models as tm
import torch
from cases import MODES, generated
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor

from dpllm.privacy.clipping import FUNCTIONS
from dpllm.privacy.schedule import Clipping
from dpllm.statement.section import CLIPPING_WORDS

NETS: dict[str, tuple[str, Any]] = {"lora": ("llama", LORA), "frozen": ("gpt2", FROZEN), "everything": ("gpt2", "")}


@cache
def built(name: str) -> Any:
    return tm.build(NETS[name][0], NETS[name][1])


@cache
def reference(name: str) -> Tensor:
    return tm.brute_force(built(name), tm.units(tm.RAGGED))


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
    if clipping != "automatic":
        assert float(factor_U.max()) <= 1.0  # a short gradient is left as it is


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_clipped_sums_are_those_by_hand(clipping: str, name: str, mode: str) -> None:
    for bound in (0.05, 1.0):
        checks.function(clipping, built(name), tm.units(tm.RAGGED), reference(name), bound, mode=mode)


@settings(parent=generated, max_examples=10)
@given(
    clipping=st.sampled_from(["flat", "automatic"]),
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
    engine = tm.make_engine(built(name), promise, mode=mode)
    checks.neighbours(engine, tm.units(lengths, seed), tokens)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
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
    engine = tm.make_engine(built("lora"), tm.plan(0.3, clipping="automatic"))
    for one, norm in zip(tm.units(tm.RAGGED), norm_U.tolist(), strict=True):
        assert float(tm.clipped_sum(engine, [one]).norm()) == pytest.approx(0.3 * norm / (norm + 0.01), rel=1e-5)
