"""What one unit adds depends on that unit alone, to the last bit; and what is released tells no more than the theorem allows.

Sums are compared without a tolerance: the sum over a logical batch is the sum of what its units add each by itself.
"""

from __future__ import annotations

import contextlib
import math
import random
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
import torch
from cases import BF16, HEAD, MODES, TIED
from scipy import stats
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor, nn

from dpllm import errors
from dpllm.errors import Refused
from dpllm.privacy import gradients, noise
from dpllm.privacy.gradients import UnitGradients
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import noise_scale, spacing_of

MIXED = ((9, 4), (17,), (5,), (12,), (3, 7, 2), (31,), (6,), (6,), (40, 2), (23,))
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", LORA, {}),
    "gpt2": ("gpt2", LORA, {}),
    "gpt2, last block": ("gpt2", FROZEN, {}),
    "opt": ("opt", LORA, {}),
    "tied head": ("llama", HEAD, TIED),
    "everything": ("gpt2", "", {}),
}


@cache
def built(name: str) -> Any:
    family, adapter, changes = CASES[name]
    return tm.build(family, adapter, **changes)


def added(engine: Any, some: list[Any], size: int) -> Tensor:
    return engine.clipped_sum(tm.batches(some, size))[0]


# --- a unit adds the same bits in any company ---------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_sum_is_the_sum_of_what_each_unit_adds_by_itself(name: str, mode: str, autocast: Any) -> None:
    """Also in bf16, where a row that brought a longer shape once moved the sum over 1,023 others by 7.92 C."""
    some = tm.units(MIXED)
    engine = tm.make_engine(built(name), tm.plan(0.05), mode=mode, autocast=autocast)
    alone = sum(added(engine, [one], 4) for one in some)
    whole = added(engine, some, 4)
    assert bool(whole.any())
    assert torch.equal(whole, alone)
    random.Random(1).shuffle(some)
    assert torch.equal(added(engine, some, 4), whole)


def test_so_it_is_under_automatic_clipping() -> None:
    some = tm.units(MIXED)
    engine = tm.make_engine(built("llama"), tm.plan(0.05, clipping="automatic"))
    assert torch.equal(added(engine, some, 4), sum(added(engine, [one], 4) for one in some))


# --- and a model whose kernels do not is refused ------------------------------------------------------------------------


class RoundsByCompany(Toy):
    """A kernel that picks its way by what the whole batch holds: each row is right to seven digits."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.kernel(self.layer(x_RTd))


class Kernel(nn.Module):
    def forward(self, x_RTd: Tensor) -> Tensor:
        return x_RTd * (1 + 3e-7 * float(x_RTd.detach()[:, 0].sum() > 0)) + 3e-7 * x_RTd.detach().mean()


def test_a_layer_that_rounds_by_its_company_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"^kernel rounds a row differently.*physical_batch_size: 1"):
        tm.make_engine(RoundsByCompany()).self_check(tm.VOCABULARY, tm.shapes(32))


def test_rows_computed_one_by_one_have_no_company() -> None:
    """And an engine that was refused for its rounding can be asked again."""
    engine = tm.make_engine(RoundsByCompany())
    with pytest.raises(errors.RoundsByCompany):
        engine.self_check(tm.VOCABULARY, tm.shapes(32))
    engine.self_check(tm.VOCABULARY, tm.shapes(32, 1))
    some = tm.units(MIXED)
    assert torch.equal(added(engine, some, 1), sum(added(engine, [one], 1) for one in some))


def test_a_mixture_of_experts_adds_the_same_bits_one_by_one() -> None:
    """Experts compute on as many tokens as chose them, so their shapes follow the rows beside."""
    some = tm.units(MIXED)
    engine = tm.make_engine(tm.build("mixtral", {**LORA, "target_modules": ["q_proj", "v_proj"]}))
    engine.self_check(tm.VOCABULARY, tm.shapes(32, 1))
    assert torch.equal(added(engine, some, 1), sum(added(engine, [one], 1) for one in some))


class Nudged(torch.autograd.Function):
    """The identity, or a backward pass that is one, beside what ``change`` makes of it."""

    @staticmethod
    def forward(ctx: Any, x_RTd: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x_RTd.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.change(grads[0].clone()), None


def late(y_RTd: Tensor, place: int) -> Tensor:
    """Other bits in one row, behind its first tokens: short rows never see it."""
    if len(y_RTd) > 1:
        y_RTd = y_RTd.clone()
        y_RTd[place % len(y_RTd), 5:] *= 1 + 2.0**-20
    return y_RTd


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("rows", "place"), [(rows, place) for rows in (2, 5, 8) for place in range(rows)])
def test_every_place_is_taken_by_a_full_row(rows: int, place: int, backward: bool) -> None:
    """A product's tail is the last tokens of the last row: short rows alone in the last places left it unseen."""

    class Late(Toy):
        def hidden(self, x_RTd: Tensor) -> Tensor:
            change = partial(late, place=place)
            y_RTd = self.layer(x_RTd)
            return Nudged.apply(y_RTd, change) if backward else change(y_RTd)  # type: ignore[no-untyped-call]

    with pytest.raises(errors.RoundsByCompany):
        tm.make_engine(Late()).self_check(tm.VOCABULARY, tm.shapes(100, rows)[-1:])


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_last_row_that_reads_the_row_before_is_refused(rows: int) -> None:
    class Reads(Toy):
        def hidden(self, x_RTd: Tensor) -> Tensor:
            y_RTd = self.layer(x_RTd)
            if len(y_RTd) == 1:
                return y_RTd
            mixed_Td = torch.cat([y_RTd[-1, :5], y_RTd[-1, 5:] + 0.1 * y_RTd[-2, 5:]])
            return torch.cat([y_RTd[:-1], mixed_Td[None]])

    with pytest.raises(Refused):
        tm.make_engine(Reads()).self_check(tm.VOCABULARY, tm.shapes(100, rows)[-1:])


class Padded(Toy):
    """A kernel that is chosen by whether anything is padded, or by the longest row."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        longest = int((input_ids != 5).sum(dim=1).max())
        hidden_RTd = self.layer(self.embed(input_ids)) * (1 + 2.0**-20 * (longest > 4))
        return SimpleNamespace(logits=self.head(hidden_RTd))


def test_padding_is_that_of_training() -> None:
    with pytest.raises(errors.RoundsByCompany):
        tm.make_engine(Padded()).self_check(tm.VOCABULARY, tm.shapes(32), pad_id=5)


def test_a_mixture_of_experts_is_computed_row_by_row_whatever_its_routing_shows() -> None:
    """DeepSeek passed with the tokens of the check, and 64 others moved a sum by 36 spacings."""
    with pytest.raises(errors.RoundsByCompany, match=r"^base_model.*experts computes on however many tokens"):
        tm.make_engine(tm.build("mixtral", {**LORA, "target_modules": ["q_proj"]})).self_check(
            tm.VOCABULARY, tm.shapes(32)
        )


@pytest.mark.parametrize("length", [8, 16, 24, 32])
def test_every_listed_length_is_tried(length: int) -> None:
    class Here(Toy):
        def hidden(self, x_RTd: Tensor) -> Tensor:
            company = 3e-7 * x_RTd.detach().abs().mean() * (x_RTd.shape[1] == length)  # a mean may be nearly 0
            return self.layer(x_RTd) + company

    with pytest.raises(Refused, match="rounds a row differently"):
        tm.make_engine(Here()).self_check(tm.VOCABULARY, tm.shapes(32))


# --- noise on a lattice -------------------------------------------------------------------------------------------------


def multiples(vector: Tensor, spacing: float) -> bool:
    return torch.equal(vector, (vector / spacing).round() * spacing)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_clipped_sums_are_multiples_of_the_spacing_and_no_longer_than_stated(name: str, mode: str) -> None:
    on_lattice(built(name), mode)


def on_lattice(net: nn.Module, mode: str = "auto") -> None:
    bound, sigma = 0.05, 0.7
    engine = tm.make_engine(net, tm.plan(bound, sigma), mode=mode)
    scale = noise_scale(sigma, bound, engine.size)
    for one in tm.units(MIXED):
        sum_P = added(engine, [one], 4)
        assert multiples(sum_P, spacing_of(scale))
        assert float(sum_P.norm()) <= scale / sigma
    stream = GaussianNoise(5, tm.CPU)
    noised_P = sum_P.clone()
    stream.add_to(noised_P, scale)
    assert multiples(noised_P, spacing_of(scale))


def test_noise_covers_what_rounding_to_the_lattice_adds() -> None:
    for sigma, bound, size in ((1.0, 1.0, 10**6), (0.3, 0.1, 10**9), (50.0, 3.0, 10**5)):
        scale = noise_scale(sigma, bound, size)
        assert scale >= sigma * (bound * (1 + 1e-6) + spacing_of(scale) * math.sqrt(size))
        assert scale == pytest.approx(sigma * bound, rel=1e-4)
        assert 2**30 <= scale / spacing_of(scale) < 2**31
    with pytest.raises(Refused, match="coarse"):
        noise_scale(1e6, 1.0, 10**9)


def test_noise_too_small_for_exact_sums_is_refused() -> None:
    with pytest.raises(Refused, match="could not be added to their sum exactly"):
        tm.make_engine(Toy(), tm.plan(1.0, 1e-6, tm.schedule(10**6, 1000)))
    tm.make_engine(Toy(), tm.plan(1.0, 0.5, tm.schedule(10**8, 2**17)))


def test_low_bits_of_a_release_are_uniform_with_and_without_a_row(seed: int) -> None:
    for units in ([tm.unit((9,), 3)], []):
        engine = tm.make_engine(Toy(56), tm.plan(1.0, 1.0))
        sum_P = engine.clipped_sum(tm.batches(units, 1))[0]
        scale = noise_scale(1.0, 1.0, engine.size)
        GaussianNoise(2**120 + seed, tm.CPU).add_to(sum_P, scale)
        low = (sum_P / spacing_of(scale)).long() % 16
        assert stats.chisquare(np.bincount(low.numpy(), minlength=16)).pvalue > 1e-8


def test_the_noise_is_the_rounded_gaussian_of_the_stream() -> None:
    sum_P = torch.arange(1000, dtype=torch.float64) * spacing_of(3.0)
    noised_P = sum_P.clone()
    GaussianNoise(7, tm.CPU).add_to(noised_P, 3.0)
    exact_P = 3.0 * GaussianNoise(7, tm.CPU).draw(1000)
    assert float((noised_P - sum_P - exact_P).abs().max()) <= spacing_of(3.0) / 2


# --- each step of the lattice is needed: without it a test above fails ---------------------------------------------------


def no_rounding(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("name", ["llama", "tied head"])
def test_without_rounding_of_contributions_sums_leave_the_lattice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "round_", no_rounding)
    with pytest.raises(AssertionError):
        on_lattice(built(name))


def test_without_rounding_of_the_noise_the_release_leaves_the_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_to(self: GaussianNoise, sum_P: Tensor, scale: float) -> None:
        sum_P += scale * self.draw(len(sum_P))

    monkeypatch.setattr(noise.GaussianNoise, "add_to", add_to)
    with pytest.raises(AssertionError):
        on_lattice(built("llama"))


def test_shapes_that_follow_the_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms taken in float32 over all units at once: right to six digits, and not the same bits."""

    def square_norm(self: UnitGradients) -> Tensor:
        square_UP = self.dense().flatten(1).square()
        return square_UP.cumsum(0).diff(dim=0, prepend=torch.zeros_like(square_UP[:1])).sum(dim=1).double()

    monkeypatch.setattr(gradients.UnitGradients, "square_norm", square_norm)
    with pytest.raises(AssertionError):
        test_a_sum_is_the_sum_of_what_each_unit_adds_by_itself("llama", "auto", contextlib.nullcontext)
