"""What one unit adds depends on that unit alone, to the last bit; and what is released tells no more than the theorem allows.

Sums are compared without a tolerance: the sum over a logical batch is the sum of what its units add each by itself.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
import torch
from cases import BF16, FAMILIES, MODES, Shapes, built
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_models import LORA, Toy
from torch import Tensor, nn

from dpllm.errors import NotBatchInvariant, Refused
from dpllm.model.memory import pass_length
from dpllm.privacy import attention, guards, selfcheck
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.noise import GaussianNoise, noise_scale, spacing_of
from dpllm.privacy.packing import Targets, lay_out
from dpllm.privacy.schedule import Packing
from dpllm.run.build import check_passes

MIXED = ((9, 4), (17,), (5,), (12,), (3, 7, 2), (31,), (6,), (6,), (40, 2), (23,))
LLAMA, TIED_HEAD = "llama, all-linear", "llama, last block and tied head"
NAMES = (LLAMA, "gpt2, all-linear", "gpt2, last block", TIED_HEAD, "gpt2, everything")


def added(engine: Any, some: list[Any]) -> Tensor:
    return engine.clipped_sum(tm.batches(some, engine))[0]


# --- a unit adds the same bits in any company ---------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_is_the_sum_of_what_each_unit_adds_by_itself(name: str, mode: str, autocast: Any) -> None:
    """Also in bf16, where a row that brought a longer shape once moved the sum over 1,023 others by 7.92 C."""
    engine = tm.make_engine(built(name), tm.plan(0.05), mode=mode, autocast=autocast)
    same_bits(engine)


def same_bits(engine: Any) -> None:
    """In one order and another, and in passes that share nobody."""
    some = tm.units(MIXED)
    whole = added(engine, some)
    assert bool(whole.any())
    assert torch.equal(whole, sum(added(engine, [item]) for item in some))
    random.Random(1).shuffle(some)
    assert torch.equal(added(engine, some), whole)


def test_so_it_is_under_automatic_clipping() -> None:
    same_bits(tm.make_engine(built(LLAMA), tm.plan(0.05, clipping="automatic")))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_its_self_check_and_adds_the_same_bits(family: str) -> None:
    engine = tm.make_engine(tm.build(family, LORA), tm.plan(0.05), longest=40)
    engine.self_check(tm.VOCABULARY)
    same_bits(engine)


@pytest.mark.parametrize("name", NAMES)
def test_products_have_the_same_shapes_whoever_is_drawn(name: str) -> None:
    """A product over as many targets as were drawn had another kernel on a GPU, and other bits."""
    engine, products = tm.make_engine(built(name), tm.plan(0.05)), []
    for lengths in (MIXED, ((17,),), ((3,), (5, 2), (40,)), tuple((2,) for _ in range(9))):
        with Shapes() as seen:
            added(engine, tm.units(lengths))
        products.append(set(seen.products))
    assert products[1:] == products[:-1]


def test_a_product_of_the_targets_that_were_drawn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Targets.of
    monkeypatch.setattr(
        Targets, "of", lambda ids, positions, shape, pack: of(ids, positions, shape, max(1, len(positions)))
    )
    with pytest.raises(AssertionError):
        test_products_have_the_same_shapes_whoever_is_drawn(LLAMA)


# --- and a model whose kernels do not is refused ------------------------------------------------------------------------


class Nudged(torch.autograd.Function):
    """The identity, or a backward pass that is one, beside what ``change`` makes of it."""

    @staticmethod
    def forward(ctx: Any, x_1Md: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x_1Md.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.change(grads[0].clone()), None


def changed(change: Callable[[Tensor], Tensor], backward: bool = False) -> Any:
    """An engine on a model of which one layer's output (1, M, d), or its gradient, goes through ``change``."""
    net = tm.build("llama", LORA)

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return Nudged.apply(output, change) if backward else change(output)  # type: ignore[no-untyped-call]

    net.base_model.model.model.layers[0].mlp.register_forward_hook(hook)
    return tm.make_engine(net)


def by_company(x_1Md: Tensor) -> Tensor:
    """A kernel that picks its way by what the whole pass holds: each row is right to seven digits."""
    return x_1Md + 3e-6 * x_1Md.detach().mean()


def test_a_layer_that_rounds_by_its_company_is_refused_and_examples_by_themselves_have_none() -> None:
    """And an engine that was refused for its rounding can be asked again."""
    engine = changed(by_company)
    with pytest.raises(NotBatchInvariant, match=r"rounds a row differently"):
        engine.self_check(tm.VOCABULARY)
    engine.repack(tm.packing(tm.ALONE))
    engine.self_check(tm.VOCABULARY)
    same_bits(engine)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("block", [0, 32, 64])
def test_every_place_of_a_pass_is_tried(block: int, backward: bool) -> None:
    """A kernel that rounds the tokens of one block another way: whoever lies there has other bits elsewhere."""

    def late(x_1Md: Tensor) -> Tensor:
        if x_1Md.shape[1] != tm.TOKENS:
            return x_1Md
        scale_M = torch.ones(tm.TOKENS)
        scale_M[block : block + 32] += 2.0**-20
        return x_1Md * scale_M[:, None]

    with pytest.raises(NotBatchInvariant):
        changed(late, backward).self_check(tm.VOCABULARY)


@pytest.mark.parametrize("backward", [False, True])
def test_a_row_that_reads_the_row_before_is_refused(backward: bool) -> None:
    shift = -1 if backward else 1  # a row's last token has no gradient of its own
    with pytest.raises(NotBatchInvariant):
        changed(lambda x_1Md: x_1Md + 0.1 * x_1Md.roll(shift, dims=1), backward).self_check(tm.VOCABULARY)


@pytest.mark.parametrize(
    "change", [lambda x_1Md: x_1Md + 0.1 * x_1Md.roll(1, dims=1), None], ids=["layer", "attention"]
)
def test_what_reads_the_row_before_runs_each_example_by_itself(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short convolution or a recurrence (LFM2, RecurrentGemma); or attention that asks for what rows of a pass cannot have."""
    if change is None:
        monkeypatch.setattr(attention, "HARMLESS", frozenset())
    engine = changed(change) if change else tm.make_engine(tm.build("llama", LORA))
    check_passes(engine, tm.VOCABULARY, pad_id=0)
    assert engine.packing.alone
    same_bits(engine)


def test_a_long_row_that_is_read_otherwise_in_a_pass_is_seen() -> None:
    """A model of its own window, say: the rows that are compared with autograd are shorter."""

    def longer(x_1Md: Tensor) -> Tensor:
        return x_1Md + torch.linspace(-1.0, 1.0, x_1Md.shape[2]) * (16 < x_1Md.shape[1] != tm.TOKENS)

    engine = changed(longer)
    with torch.no_grad():
        engine._model.get_output_embeddings().weight.mul_(50)  # as sure of its words as a model that has learned
    with pytest.raises(NotBatchInvariant, match="the loss of a row changes"):
        engine.self_check(tm.VOCABULARY)


@pytest.mark.parametrize("longest", [2, 3, 5, 7, 8, 15, 16, 21, 31])
def test_small_passes_are_checked_too(longest: int) -> None:
    tm.make_engine(built(LLAMA), tokens=32, longest=longest).self_check(tm.VOCABULARY)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 600),
    max_length=st.integers(2, 2_100),
    asked=st.one_of(st.none(), st.integers(1, 4_000)),
    multiple=st.sampled_from([32, 64, 128, 256]),
    each=st.sampled_from([1, 2]),
    most=st.integers(1, 200),
)
def test_what_the_check_shows_in_company_fits_passes_of_any_length(batch, max_length, asked, multiple, each, most):
    tokens = pass_length(batch, each * max_length, asked, multiple=multiple, least=512, most=2_048)
    packing = Packing(tokens, most, 1, 128, max_length, each, multiple)
    subject: Any = SimpleNamespace(longest=max_length, packing=packing, vocab_size=9, pad_id=0)
    units = list(enumerate(selfcheck._company(subject)))
    for some in (units, units[::2], units[1::2]):
        beside = [*some, *selfcheck._filler(subject, some, 3)]
        assert len(beside) <= most
        lay_out([unit for _, unit in beside], packing, 0)


def test_padding_is_that_of_training() -> None:
    """A kernel that is chosen by the tokens that are padded with."""
    net = tm.build("llama", LORA)
    inner = net.base_model.model.model

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        share = float((kwargs["input_ids"] == 5).sum())
        output.last_hidden_state = output.last_hidden_state * (1 + 2.0**-20 * (share > tm.TOKENS // 2))
        return output

    inner.register_forward_hook(hook, with_kwargs=True)
    with pytest.raises(NotBatchInvariant):
        tm.make_engine(net).self_check(tm.VOCABULARY, pad_id=5)


def test_a_mixture_of_experts_adds_the_same_bits_one_by_one() -> None:
    """Experts compute on as many tokens as chose them, so their shapes follow the rows beside: each example is by itself."""
    engine = tm.make_engine(tm.build("mixtral", {**LORA, "target_modules": ["q_proj", "v_proj"]}))
    assert engine.packing.alone
    engine.self_check(tm.VOCABULARY)
    same_bits(engine)


def test_one_by_one_too_processes_that_round_differently_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is compared by ``check_rounding``; a mutant had none here."""
    digests = [_digest_one_by_one() for _ in range(2)]
    linear = torch.nn.functional.linear

    def in_halves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As another library sums."""
        half = weight.shape[1] // 2
        added = linear(x[..., :half], weight[:, :half]) + linear(x[..., half:], weight[:, half:])
        return added if bias is None else added + bias

    monkeypatch.setattr(torch.nn.functional, "linear", in_halves)
    digests.append(_digest_one_by_one())
    assert digests[0] == digests[1] != digests[2]
    assert all(map(len, digests))


def _digest_one_by_one() -> str:
    engine = tm.make_engine(tm.build("llama", LORA))
    engine.repack(replace(engine.packing, alone=True))
    return engine.self_check(tm.VOCABULARY).digest


def test_kernels_give_the_same_bits_each_time_on_several_threads() -> None:
    """Without ``deterministic``, threads add to repeated indices in a random order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator, requires_grad=True)
    index, weight = torch.randint(0, 64, (4096,), generator=generator), torch.randn(4096, 512, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with guards.deterministic():
            seen = {torch.autograd.grad((x[index] * weight).sum(), x)[0].numpy().tobytes() for _ in range(10)}
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


# --- noise on a lattice -------------------------------------------------------------------------------------------------


def multiples(vector: Tensor, spacing: float) -> bool:
    return torch.equal(vector, (vector / spacing).round() * spacing)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_clipped_sums_are_multiples_of_the_spacing_and_no_longer_than_stated(name: str, mode: str) -> None:
    on_lattice(name, mode)


def on_lattice(name: str, mode: str = "held") -> None:
    bound, sigma = 0.05, 0.7
    engine = tm.make_engine(built(name), tm.plan(bound, sigma), mode=mode)
    scale = noise_scale(sigma, bound, engine.size)
    for item in tm.units(MIXED):
        sum_P = added(engine, [item])
        assert multiples(sum_P, spacing_of(scale))
        assert float(sum_P.norm()) <= scale / sigma
    GaussianNoise(5, tm.CPU).add_to(sum_P, scale)
    assert multiples(sum_P, spacing_of(scale))


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
        sum_P = engine.clipped_sum(tm.batches(units, engine))[0]
        scale = noise_scale(1.0, 1.0, engine.size)
        GaussianNoise(2**120 + seed, tm.CPU).add_to(sum_P, scale)
        low = (sum_P / spacing_of(scale)).long() % 16
        assert stats.chisquare(np.bincount(low.numpy(), minlength=16)).pvalue > 1e-8


def test_the_noise_is_the_rounded_gaussian_of_the_stream() -> None:
    sum_P = torch.arange(1000, dtype=torch.float64) * spacing_of(3.0)
    exact_P = sum_P + 3.0 * GaussianNoise(7, tm.CPU).draw(1000)
    GaussianNoise(7, tm.CPU).add_to(sum_P, 3.0)
    assert float((sum_P - exact_P).abs().max()) <= spacing_of(3.0) / 2


# --- each step of the lattice is needed: without it a test above fails ---------------------------------------------------


@pytest.mark.parametrize("name", [LLAMA, TIED_HEAD])
def test_without_rounding_of_contributions_sums_leave_the_lattice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "round_", lambda tensor: tensor)
    with pytest.raises(AssertionError):
        on_lattice(name)


def test_without_rounding_of_the_noise_the_release_leaves_the_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_to(self: GaussianNoise, sum_P: Tensor, scale: float) -> None:
        sum_P += scale * self.draw(len(sum_P))

    monkeypatch.setattr(GaussianNoise, "add_to", add_to)
    with pytest.raises(AssertionError):
        on_lattice(LLAMA)


def test_shapes_that_follow_the_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms over all units together: right to six digits, and not the same bits."""

    def norms_together(self: PassGradients) -> Tensor:
        square_UP = self._buffer_UP[: len(self._units)].square()
        total_U = square_UP.flatten().cumsum(0)[square_UP.shape[1] - 1 :: square_UP.shape[1]]
        return total_U.diff(prepend=total_U.new_zeros(1)).double()[None].expand(len(self.places), -1) / len(self.places)

    monkeypatch.setattr(PassGradients, "unit_norms", norms_together)
    with pytest.raises(AssertionError):
        test_a_sum_is_the_sum_of_what_each_unit_adds_by_itself(LLAMA, "held", contextlib.nullcontext)


@pytest.mark.parametrize("units", [1, 8, 61])
def test_a_units_norm_does_not_follow_how_many_others_are_in_the_pass(units: int) -> None:
    """A sum over layers by one kernel took another order for the last units than for the first."""
    some = tm.units([(3 + number % 5,) for number in range(units)])
    engine = tm.make_engine(tm.build("llama", "", num_hidden_layers=4), tm.plan(0.05), tokens=512)
    engine.repack(replace(engine.packing, most_units=64))
    norm_U = tm.norms(engine, *tm.batches(some, engine))
    by_tokens = sorted(range(units), key=lambda number: (-len(some[number].sequences[0].input_ids), number))
    for place, number in enumerate(by_tokens):
        assert tm.engine_norm(engine, some[number], 512) == float(norm_U[place])
