"""Every unit's gradient is the one that float64 autograd gives for it alone, in every family, method and mode.

Table 1.9 of the engine survey as tests: where other engines are wrong in silence, this one is exact or refuses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from cases import (
    CASES,
    EVERYTHING,
    HEAD,
    MODES,
    TIED,
    Shapes,
    TiedThroughModules,
    built,
    generated,
    lora,
    ragged,
    reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FROZEN, LORA, RAGGED, Toy
from torch import Tensor, nn
from torch.nn import functional

from dpllm.privacy import gradients, guards, rules
from dpllm.privacy.gradients import UnitGradients
from dpllm.privacy.rules import Dense, Product
from dpllm.privacy.sampling import PhysicalBatch, collate
from dpllm.text.data import Unit

# --- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_norms_and_clipped_sums_are_those_of_float64_autograd(name: str, mode: str) -> None:
    checks.exact(built(name), ragged(), reference(name), mode)


def test_positions_outside_a_modules_single_input_are_refused() -> None:
    """OPT's positions: called with the mask and the ids."""
    engine = tm.make_engine(tm.build("opt", "embed_positions"))
    checks.refused(lambda: tm.clipped_sum(engine, ragged()), "embed_positions (OPTLearnedPositionalEmbedding) trains")
    engine = tm.make_engine(tm.build("opt", EVERYTHING))
    checks.refused(lambda: engine.step(tm.batches(ragged())), "embed_positions (OPTLearnedPositionalEmbedding) trains")


@pytest.mark.parametrize("trains", ["experts", "gate"])
def test_routers_and_experts_are_refused(trains: str) -> None:
    """By name before anything runs, and by the engine too."""
    net = tm.build("mixtral", rf"layers\.1\.mlp\.{trains}\.")
    checks.refused(lambda: guards.check_model(net), "belongs to a router or an expert")
    if trains == "experts":
        checks.refused(lambda: tm.make_engine(net), "experts (MixtralExperts) trains parameters of its own")
    else:
        engine = tm.make_engine(net)
        checks.refused(lambda: tm.clipped_sum(engine, ragged()), "gate (MixtralTopKRouter) trains, takes")


def test_adapters_on_a_router_and_the_last_block_of_a_mixture_are_refused() -> None:
    """Phimoe's router is an ordinary linear layer, so peft adapts it."""
    net = tm.build("phimoe", lora(target_modules=["router", "q_proj"]))
    assert any("router" in name for name in tm.trainable(net))
    for routed in (net, tm.build("mixtral", FROZEN)):
        checks.refused(lambda routed=routed: guards.check_model(routed), "belongs to a router or an expert")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, all-linear", "llama, last block", "llama, last block and tied head"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_gradient_checkpointing_changes_nothing(kind: str, name: str, mode: str) -> None:
    _, adapter, changes = CASES[name]
    checks.checkpointed(kind, adapter, tm.brute_force(built(name), tm.units(RAGGED)), mode, **changes)


# --- batches of every shape ------------------------------------------------------------------------------------------


WITH_ROWS = (
    "llama, all-linear",
    "llama, last block",
    "llama, last block and tied head",
    "gpt2, everything",
    "LoRA on the embedding",
    "positions alone",
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_padding_rows_add_nothing_beside_units_and_alone(name: str, mode: str) -> None:
    checks.dummy_rows(built(name), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_unit_of_more_rows_than_a_physical_batch_is_clipped_once(name: str, mode: str) -> None:
    checks.whole_units(built(name), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapter", [LORA, HEAD], ids=["lora", "head"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_unit_without_a_finite_gradient_adds_nothing(bad: float, adapter: dict[str, Any], mode: str) -> None:
    checks.not_finite(mode, adapter, bad)


@pytest.mark.parametrize("name", ["llama, all-linear", "llama, last block and tied head"])
def test_nothing_of_one_batch_is_used_in_the_next(name: str) -> None:
    checks.nothing_left_over(built(name))


def test_a_step_that_broke_off_leaves_nothing_for_the_next() -> None:
    """Out of memory in the middle of a unit, caught by the user: the unit's gradient so far is not another's."""
    long, other = tm.unit((5, 9, 3, 8, 6), 4), tm.units([(7,), (4,)])
    engine = tm.make_engine(built("llama, all-linear"), tm.plan(0.3))
    expected_P, losses, calls = tm.clipped_sum(engine, other), engine.losses, []

    def failing(batch: PhysicalBatch) -> Tensor:
        calls.append(batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(batch)

    engine.losses = failing  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(tm.batches([long], 2))
    assert torch.equal(tm.clipped_sum(engine, other), expected_P)


@settings(parent=generated, max_examples=8)
@given(
    lengths=st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=4),
    case=st.sampled_from(["rank 1", "rank 3", "rank 17", "head", "tied", "everything"]),
    mode=st.sampled_from(MODES),
    padding=st.integers(0, 9),
    size=st.integers(1, 6),
    log_bound=st.floats(-3, 1),
    seed=st.integers(0, 10**6),
)
def test_any_batch_is_clipped_exactly(
    lengths: list[list[int]], case: str, mode: str, padding: int, size: int, log_bound: float, seed: int
) -> None:
    net, some, bound = any_case(case), tm.units(lengths, seed), 10**log_bound
    expected_P = checks.clip(tm.brute_force(net, some), bound)
    engine = tm.make_engine(net, tm.plan(bound), mode=mode)
    found_P = engine.clipped_sum([padded(batch, padding) for batch in tm.batches(some, size)])[0]
    assert checks.apart(found_P, expected_P) <= checks.EXACT
    checks.neighbours(engine, some, size)


@cache
def any_case(case: str) -> Any:
    adapter = {"head": HEAD, "tied": HEAD, "everything": EVERYTHING}.get(case) or case
    if case.startswith("rank"):
        adapter = lora(r=int(case.split()[1]))
    return tm.build("llama", EVERYTHING if case == "everything" else adapter, **(TIED if case == "tied" else {}))


def padded(batch: PhysicalBatch, extra: int) -> PhysicalBatch:
    wide = {name: functional.pad(getattr(batch, name), (0, extra)) for name in ("input_ids_RT", "loss_mask_RT")}
    return replace(batch, **wide)


# --- layers called more than once, and how gradients are held ----------------------------------------------------------


class Twice(Toy):
    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(self.layer(x_RTd).tanh())


class TwiceInTwoShapes(Toy):
    """All tokens, and then the first ones only, one more dimension around them."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        first = self.layer(x_RTd[:, None, :2].tanh()).sum(dim=(1, 2))
        return self.layer(x_RTd) + first[:, None]


class InPlace(Toy):
    """A layer's output and input change after its call, as in Falcon."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        y_RTd = self.layer(x_RTd)
        y_RTd += x_RTd
        return self.layer(y_RTd).mul_(0.5).relu_()


class TwoNorms(Toy):
    """One norm with a bias, called twice."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.norm = nn.LayerNorm(8)

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.norm(self.layer(self.norm(x_RTd)))


class Scalar(nn.Module):
    """A layer that no rule knows: functorch differentiates it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.7, -1.3]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor[0] + torch.sin(self.factor[1] * x)


class Unknown(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = Scalar()

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.scalar(self.layer(x_RTd))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Twice, TwiceInTwoShapes, InPlace, TwoNorms, Unknown, TiedThroughModules])
def test_a_weight_that_is_used_in_several_calls_is_exact(kind: type[Toy], mode: str) -> None:
    net = kind()
    checks.exact(net, ragged(), tm.brute_force(net, ragged()), mode)
    assert tm.make_engine(net, mode=mode).self_check(tm.VOCABULARY, tm.shapes(32)).error <= checks.EXACT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, last block and head", "llama, last block and tied head", "gpt2, everything"])
@pytest.mark.parametrize("chunk", [1, 100])
def test_a_head_in_chunks_is_as_exact(name: str, chunk: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "CHUNK", chunk)
    checks.exact(built(name), ragged()[1:4], reference(name)[1:4], mode, sizes=(64,))


@pytest.mark.parametrize("tied", [False, True])
def test_a_wide_head_makes_no_gradient_of_every_row(tied: bool) -> None:
    """R V d numbers would be 4 times the head; the largest tensor that is made is one sum over the batch."""
    rows, tokens, hidden, vocabulary = 4, 6, 80, rules.WIDE
    largest = {}
    for mode in (*MODES, "per_sample"):
        net = Toy(hidden, vocabulary)
        net.layer.requires_grad_(False)
        net.head.requires_grad_(True)
        if tied:
            net.embed.weight = net.head.weight
        engine = tm.make_engine(net, tm.plan(0.1), mode=mode)
        with Shapes() as seen:
            engine.clipped_sum(tm.batches([tm.unit((tokens,), number) for number in range(rows)], rows))
        largest[mode] = seen.largest
    assert largest["auto"] == largest["ghost"] == hidden * vocabulary
    assert largest["per_sample"] >= rows * hidden * vocabulary


def parts_of(engine: Any, some: list[Unit], monkeypatch: pytest.MonkeyPatch) -> dict[str, set[type]]:
    """How each trainable parameter's gradient is held."""
    names = {id(p): name for name, p in engine.parameters.items()}
    seen: dict[str, set[type]] = {name: set() for name in engine.parameters}
    with monkeypatch.context() as patch:
        add = UnitGradients.add
        patch.setattr(
            UnitGradients,
            "add",
            lambda self, part: (seen[names[id(self.parameter)]].add(type(part)), add(self, part))[1],
        )
        engine.clipped_sum([collate(some, 0)])
    return seen


def test_the_form_of_a_gradient_follows_public_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors where the longest row allowed makes them small, a materialised gradient elsewhere, whoever is drawn."""
    net = Toy(hidden=64)
    batches = [[tm.unit((length,), number) for number in range(3)] for length in (8, 40, 60, 5)]
    references = [tm.brute_force(net, some) for some in batches]
    for max_length, form in ((8, Product), (64, Dense)):
        engine = tm.make_engine(net, max_length=max_length)
        for some, exact_UP in zip(batches, references, strict=True):
            assert parts_of(engine, some, monkeypatch) == {"layer.weight": {form}}
            assert checks.apart(tm.clipped_sum(engine, some), checks.clip(exact_UP, 1.0)) <= checks.EXACT


@pytest.mark.parametrize("mode", MODES)
def test_small_layers_are_materialised_and_factors_only_where_they_are_asked_for(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tm.make_engine(built("llama, all-linear"), mode=mode)
    seen = parts_of(engine, ragged(), monkeypatch)
    assert set().union(*seen.values()) == {Product if mode == "ghost" else Dense}


@settings(parent=generated, max_examples=200)
@given(tokens=st.integers(1, 4096), i=st.integers(1, 16_383), j=st.integers(1, 16_383), low=st.booleans())
def test_factors_are_kept_where_they_are_cheaper_to_measure_and_to_hold(tokens: int, i: int, j: int, low: bool) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    left, right = (torch.empty(2, tokens, width, dtype=dtype, device="meta") for width in (i, j))
    kept = isinstance(rules.product(left, right, rules.Form(tokens)), Product)
    numbers = tokens * (i + j) * dtype.itemsize
    if kept:
        assert 2 * tokens**2 <= i * j
        assert numbers < 4 * i * j / 2
    elif tokens**2 * 10 <= i * j:
        assert 2 * (numbers + 16 * tokens**2) > 4 * i * j
    assert isinstance(rules.product(left[:, :1, :1], right[:, :1, :1], rules.Form(tokens, "ghost")), Product)
