"""Four ways to shorten a gradient, one promise: no unit adds more than C, and the noise knows it."""

from __future__ import annotations

import math
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

from dpllm.privacy.clipping_functions import FUNCTIONS, WORDS, Clipping
from dpllm.privacy.plan import AdaptiveClipping, adaptive_clipping
from dpllm.recipe.derived import plan_of

NETS: dict[str, tuple[str, Any]] = {"lora": ("llama", LORA), "frozen": ("gpt2", FROZEN), "everything": ("gpt2", "")}


@cache
def built(name: str) -> Any:
    return tm.build(NETS[name][0], NETS[name][1])


@cache
def reference(name: str) -> Tensor:
    return tm.brute_force(built(name), tm.units(tm.RAGGED))


def test_each_function_has_a_name_in_recipes_words_on_the_card_and_a_row_in_the_documentation() -> None:
    assert get_args(Clipping) == tuple(FUNCTIONS) == tuple(WORDS)
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "engine.md").read_text(encoding="utf-8")
    assert [name for name in FUNCTIONS if f"\n| `{name}` |" not in page] == []


# --- all of them -----------------------------------------------------------------------------------------------------


@settings(parent=generated, max_examples=200)
@given(
    log_norms=st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=1, max_size=40),
    log_bound=st.floats(-9, 6),
    silent=st.integers(0, 3),
)
@pytest.mark.parametrize("clipping", FUNCTIONS)
def test_any_norms_are_brought_within_c(
    clipping: str, log_norms: list[list[float]], log_bound: float, silent: int
) -> None:
    """``silent`` units have a gradient of zero in one layer."""
    norm_GU, bound = 10 ** torch.tensor(log_norms, dtype=torch.float64), 10**log_bound
    norm_GU[0, :silent] = 0.0
    if clipping != "per_layer":
        norm_GU = norm_GU.norm(dim=0, keepdim=True)
    factor_GU = FUNCTIONS[clipping](norm_GU, bound)
    assert bool(torch.isfinite(factor_GU).all())
    contribution_U = (factor_GU * norm_GU).norm(dim=0)
    assert float(contribution_U.max()) <= bound * (1 + 1e-12)
    if clipping != "automatic":
        assert float(factor_GU.max()) <= 1.0  # a short gradient is left as it is


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_clipped_sums_are_those_by_hand(clipping: str, name: str, mode: str) -> None:
    for bound in (0.05, 1.0):
        checks.function(clipping, built(name), tm.units(tm.RAGGED), reference(name), bound, grad_sample_mode=mode)


@settings(parent=generated, max_examples=10)
@given(
    clipping=st.sampled_from(["flat", "automatic", "per_layer"]),
    name=st.sampled_from(sorted(NETS)),
    mode=st.sampled_from(MODES),
    lengths=st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=4),
    size=st.integers(1, 5),
    log_bound=st.floats(-4, 2),
    seed=st.integers(0, 10**6),
)
def test_any_unit_moves_the_sum_by_at_most_c(
    clipping: str, name: str, mode: str, lengths: Any, size: int, log_bound: float, seed: int
) -> None:
    promise = tm.plan(10**log_bound, clipping=clipping)
    engine = tm.make_engine(built(name), promise, grad_sample_mode=mode)
    checks.neighbours(engine, tm.units(lengths, seed), size)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
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
    engine = tm.make_engine(built("lora"), tm.plan(0.3, clipping="automatic"))
    norm_U = reference("lora").norm(dim=1)
    for one, norm in zip(tm.units(tm.RAGGED), norm_U.tolist(), strict=True):
        assert float(tm.clipped_sum(engine, [one]).norm()) == pytest.approx(0.3 * norm / (norm + 0.01), rel=1e-5)


def test_a_layer_is_a_module_with_its_weight_and_bias() -> None:
    assert len(checks.layers(Toy(bias=True))) == 1
    assert len(checks.layers(built("frozen"))) == 7  # four linear layers, three norms


# --- adaptive --------------------------------------------------------------------------------------------------------


@settings(parent=generated, max_examples=300)
@given(sigma=st.floats(1e-3, 100), batch=st.integers(1, 10**6), log_count=st.none() | st.floats(-4, 4))
def test_the_two_noises_cost_together_what_is_accounted(sigma: float, batch: int, log_count: float | None) -> None:
    checks.noise_split(sigma, batch, None if log_count is None else 10**log_count)


@pytest.mark.parametrize("count", [0.3, 0.5])
def test_half_of_sigma_is_the_limit_of_the_count(count: float) -> None:
    checks.refused(lambda: adaptive_clipping(1.0, 10, 0.5, 0.2, count), "count_noise_multiplier")
    adaptive_clipping(1.0, 10, 0.5, 0.2, 0.5 + 1e-6)


@pytest.mark.parametrize(("quantile", "rate", "released"), [(0.5, 0.2, 0.8), (0.9, 1.0, -3.0), (0.1, 0.05, 0.1)])
def test_c_follows_andrews_formula(quantile: float, rate: float, released: float) -> None:
    made = AdaptiveClipping(quantile, rate, 1.0, 1.0)
    assert made.next_norm(0.7, released, 0.5) == pytest.approx(0.7 * math.exp(-rate * (released - quantile)), rel=1e-12)


@settings(parent=generated, max_examples=100)
@given(rate=st.floats(1e-3, 1e9), shares=st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20))
def test_c_stays_where_it_can_be_noised(rate: float, shares: list[float]) -> None:
    """Never 0, where nothing would be noised, and never infinite, whatever the noise of the count."""
    made, bound = AdaptiveClipping(0.5, rate, 1.0, 1.0), 0.3
    for share in shares:
        bound = made.next_norm(bound, share, 0.3)
        assert 0.3e-6 * (1 - 1e-9) <= bound <= 0.3e6 * (1 + 1e-9)


def test_a_recipe_whose_c_would_jump_is_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 10"):
        tm.recipe(privacy={"adaptive": {"learning_rate": 5000}})


def test_the_recipe_makes_it_part_of_the_plan() -> None:
    privacy = {"clipping": "adaptive", "noise_multiplier": 1.5, "epsilon": 100.0, "adaptive": {"quantile": 0.3}}
    made = plan_of(tm.recipe(privacy=privacy), 100)
    assert made.adaptive is not None
    assert made.adaptive.quantile == 0.3
    assert made.noise_multiplier == 1.5
    both = made.adaptive.gradient_noise_multiplier**-2 + (2 * made.adaptive.count_noise_multiplier) ** -2
    assert both == pytest.approx(1.5**-2)
    assert plan_of(tm.recipe(privacy={**privacy, "clipping": "flat"}), 100).adaptive is None


@pytest.mark.parametrize("mode", MODES)
def test_a_unit_is_counted_once_or_not_at_all(mode: str) -> None:
    checks.counts(mode)


def test_a_unit_without_a_finite_gradient_counts_as_a_long_one() -> None:
    net, one = Toy(), tm.unit((6,), 1)
    with torch.no_grad():
        net.embed.weight.fill_(float("nan"))
    engine = tm.make_engine(net, tm.plan(adaptive=adaptive_clipping(1.0, 10, 0.5, 0.2)))
    assert engine.clipped_sum(tm.batches([one]))[0].tolist() == [0.0] * 64 + [-0.5]


def test_both_sums_are_noised_as_promised_while_c_moves(full: bool, seed: int) -> None:
    checks.adaptive_noise(tm.units([(9, 4), (7,), (5,)]), 4000 if full else 500, seed)


def test_an_empty_batch_is_noised_and_moves_c_too(full: bool, seed: int) -> None:
    checks.adaptive_noise([], 4000 if full else 500, seed + 1)


@settings(parent=generated, max_examples=8)
@given(
    lengths=st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=4), min_size=1, max_size=4),
    size=st.integers(1, 5),
    log_bound=st.floats(-3, 1),
    seed=st.integers(0, 10**6),
)
def test_one_unit_moves_the_gradients_by_c_and_the_count_by_a_half(
    lengths: Any, size: int, log_bound: float, seed: int
) -> None:
    some, bound = tm.units(lengths, seed), 10**log_bound
    engine = tm.make_engine(built("lora"), tm.plan(bound, adaptive=adaptive_clipping(1.0, 10, 0.5, 0.2)))
    whole = tm.clipped_sum(engine, some, size)
    for index in range(len(some)):
        moved = whole - tm.clipped_sum(engine, checks.without(some, index), size)
        assert float(moved[:-1].norm()) <= bound * checks.BOUND
        assert abs(float(moved[-1])) == 0.5


@pytest.mark.parametrize("start", [100.0, 1e-4])
@pytest.mark.parametrize("quantile", [0.5, 0.25])
def test_c_finds_the_quantile_of_the_norms(start: float, quantile: float) -> None:
    """With hardly any noise, on frozen weights, from far above and far below."""
    some = tm.units([(3 + number,) for number in range(20)])
    net = Toy()
    norms = tm.brute_force(net, some).norm(dim=1).sort().values
    adaptive = adaptive_clipping(1e-3, 20, quantile, 0.3, 1e-3)
    engine = tm.make_engine(net, tm.plan(start, 1e-3, tm.schedule(20, 20), adaptive=adaptive))
    seen = []
    for _ in range(160):
        tm.released(engine, tm.batches(some))
        seen.append(engine.max_grad_norm)
    place = round(quantile * 20)
    low, high = float(norms[place - 2]), float(norms[place + 1])
    assert all(low * 0.95 <= bound <= high * 1.05 for bound in seen[-20:])
    assert engine.noisy_fraction == pytest.approx(quantile, abs=0.11)


def test_the_share_that_is_released_is_the_noisy_one() -> None:
    some = tm.units([(5,), (9,), (7,)])
    engine = checks.adaptive_engine(adaptive_clipping(1.0, 10, 0.5, 0.2), 100.0, 1.0)
    assert engine.noisy_fraction is None
    engine.step(tm.batches(some))
    assert engine.noisy_fraction != pytest.approx(0.65, abs=1e-9)  # three of ten, none clipped
    other = tm.make_engine(Toy(), tm.plan())
    other.step(tm.batches(some))
    assert other.noisy_fraction is None
    assert other.max_grad_norm == 1.0
