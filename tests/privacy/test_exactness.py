"""Every unit's gradient is the one that float64 autograd gives for it alone, in every family, method and mode.

In passes of several lengths and each example by itself. Where other engines are wrong in silence, this one is exact or refuses.
"""

from __future__ import annotations

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
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor, nn

from dpllm.privacy import gradients, guards
from dpllm.privacy.packing import Pass

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
    checks.refused(
        lambda: engine.step(tm.batches(ragged(), engine)), "embed_positions (OPTLearnedPositionalEmbedding) trains"
    )


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
    checks.checkpointed(kind, adapter, reference(name), mode, **changes)


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
def test_passes_of_nobody_add_nothing(name: str, mode: str) -> None:
    checks.empty_passes(built(name), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_unit_of_more_rows_than_a_pass_is_clipped_once(name: str, mode: str) -> None:
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
    long, other = tm.unit((25, 29, 13, 28, 26), 4), tm.units([(7,), (4,)])
    engine = tm.make_engine(built("llama, all-linear"), tm.plan(0.3))
    expected_P, losses, calls = tm.clipped_sum(engine, other), engine.losses, []

    def failing(batch: Pass) -> Tensor:
        calls.append(batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(batch)

    engine.losses = failing  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(tm.batches([long], 64))
    assert torch.equal(tm.clipped_sum(engine, other), expected_P)


@settings(parent=generated, max_examples=8)
@given(
    lengths=st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=4),
    case=st.sampled_from(["rank 1", "rank 3", "rank 17", "head", "tied", "everything"]),
    mode=st.sampled_from(MODES),
    tokens=st.one_of(st.just(tm.ALONE), st.integers(34, 200)),
    log_bound=st.floats(-3, 1),
    seed=st.integers(0, 10**6),
)
def test_any_batch_is_clipped_exactly(
    lengths: list[list[int]], case: str, mode: str, tokens: int, log_bound: float, seed: int
) -> None:
    net, some, bound = any_case(case), tm.units(lengths, seed), 10**log_bound
    expected_P = checks.clip(tm.brute_force(net, some), bound)
    engine = tm.make_engine(net, tm.plan(bound), mode=mode)
    sum_P = engine.clipped_sum(tm.batches(some, tokens))[0]
    assert checks.apart(sum_P, expected_P) <= checks.EXACT
    checks.neighbours(engine, some, tokens)


@cache
def any_case(case: str) -> Any:
    adapter = {"head": HEAD, "tied": HEAD, "everything": EVERYTHING}.get(case) or case
    if case.startswith("rank"):
        adapter = lora(r=int(case.split()[1]))
    return tm.build("llama", EVERYTHING if case == "everything" else adapter, **(TIED if case == "tied" else {}))


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
    assert tm.make_engine(net, mode=mode).self_check(tm.VOCABULARY).error <= checks.EXACT


@pytest.mark.parametrize("name", ["llama, last block and head", "llama, last block and tied head", "gpt2, everything"])
@pytest.mark.parametrize("numbers", [1, 100])
def test_a_gradient_that_is_formed_in_pieces_is_as_exact(
    name: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("FORMED", "CACHED", "ADDED"):
        monkeypatch.setattr(gradients, constant, numbers)
    for mode in MODES:
        checks.exact(built(name), ragged()[1:4], reference(name)[1:4], mode, sizes=(tm.ALONE, 64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_wide_head_makes_no_gradient_of_every_unit(tied: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """U V d numbers would be 4 times the head; the largest tensor that is made is one sum over the batch."""
    hidden, vocabulary = 64, 2_000
    net = tm.build("llama", HEAD, vocab_size=vocabulary, hidden_size=hidden, **(TIED if tied else {}))
    monkeypatch.setattr(gradients, "WIDE", vocabulary)
    monkeypatch.setattr(gradients, "is_wide", lambda parameter: max(parameter.shape) == vocabulary)
    engine = tm.make_engine(net, tm.plan(0.1), mode=mode, tokens=36)
    some = tm.batches([tm.unit((6,), number) for number in range(4)], engine)
    assert [piece.num_units for piece in some] == [4]
    with Shapes() as seen:
        engine.clipped_sum(some)
    assert seen.largest == engine.size
    monkeypatch.undo()
    if mode == "held":
        engine = tm.make_engine(net, tm.plan(0.1), mode=mode, tokens=36)
        with Shapes() as seen:
            engine.clipped_sum(some)
        assert seen.largest >= 4 * hidden * vocabulary


@settings(parent=generated, max_examples=100)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6),
    held=st.integers(0, 20_000),
)
def test_what_is_held_follows_public_numbers_and_its_limit(shapes: list[tuple[int, int]], held: int) -> None:
    parameters = {str(n): nn.Parameter(torch.empty(*shape)) for n, shape in enumerate(shapes)}
    parameters["bias"] = nn.Parameter(torch.empty(7))
    places = gradients.places_of(parameters, held)
    kept = [place for place in places.values() if place.held is not None]
    matrices = sum(p.numel() for p in parameters.values() if p.dim() == 2)
    assert sum(place.size for place in kept) <= max(held, 7)
    assert (len(kept) == len(places)) == (matrices + 7 <= held)
    at = 0
    for place in kept:  # side by side, none over another
        assert place.held >= at
        assert place.held % gradients.ALIGNED == 0
        at = place.held + place.size
