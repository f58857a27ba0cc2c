"""Every unit's gradient is the one that float64 autograd gives for it alone, in every family, method and mode.

In passes of several lengths and each example by itself. Where other engines are wrong in silence, this one is exact or refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import cases
import checks
import pytest
import tiny_models as tm
import torch
from cases import CASES, EVERYTHING, HEAD, MODES, TIED, Shapes, built, generated, lora, ragged, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FROZEN, LORA, Made
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpllm.card.card import CLIPPING_WORDS
from dpllm.privacy import gradients, guards
from dpllm.privacy.clipping import FUNCTIONS
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.packing import Pass, Segment
from dpllm.privacy.rules import conv1d, linear
from dpllm.privacy.schedule import Clipping

# --- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_norms_and_clipped_sums_are_those_of_float64_autograd(name: str, mode: str) -> None:
    checks.exact(built(name), ragged(), reference(name), mode)


def test_positions_outside_a_modules_single_input_are_refused() -> None:
    """OPT's positions: called with the mask and the ids."""
    for trains in ("embed_positions", EVERYTHING):
        engine = tm.make_engine(tm.build("opt", trains))
        some = tm.batches(ragged(), engine)
        checks.refused(lambda engine=engine, some=some: engine.step(some), "(OPTLearnedPositionalEmbedding) trains")


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


NETS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"rank {rank}": (lora(r=rank), {}) for rank in (1, 3, 17)},
    "head": (HEAD, {}),
    "tied head": (HEAD, TIED),
    "everything": (EVERYTHING, {}),
}


@settings(parent=generated, max_examples=12)
@given(
    clipping=st.sampled_from(sorted(FUNCTIONS)),
    name=st.sampled_from(sorted(NETS)),
    mode=st.sampled_from(MODES),
    lengths=st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=4),
    tokens=st.one_of(st.just(tm.ALONE), st.integers(34, 200)),
    log_bound=st.floats(-4, 2),
    seed=st.integers(0, 10**6),
)
def test_any_batch_is_clipped_exactly_and_any_unit_moves_it_by_at_most_c(
    clipping, name, mode, lengths, tokens, log_bound, seed
):
    adapter, changes = NETS[name]
    net = tm.build("llama", adapter, **changes)
    some, bound = tm.units(lengths, seed), 10**log_bound
    expected_P = checks.by_hand(clipping, tm.brute_force(net, some), bound).sum(dim=0)
    engine = tm.make_engine(net, tm.plan(bound, clipping=clipping), mode=mode)
    assert checks.apart(engine.clipped_sum(tm.batches(some, tokens))[0], expected_P) <= checks.EXACT
    checks.neighbours(engine, some, tokens)


# --- the clipping functions ------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("name", ["llama, all-linear", "gpt2, last block", "gpt2, everything"])
@pytest.mark.parametrize("clipping", FUNCTIONS)
def test_clipped_sums_are_those_by_hand(clipping: str, name: str, mode: str) -> None:
    checks.function(clipping, built(name), ragged(), reference(name), 0.05, mode=mode)


@pytest.mark.parametrize("clipping", FUNCTIONS)
def test_the_loss_scale_of_fp16_does_not_change_what_is_clipped(clipping: str) -> None:
    """Automatic clipping's 0.01 is compared with the gradient, not with 1024 times the gradient."""
    net, some, promise = tm.Toy(), tm.units([(5,), (9, 4), (7,)]), tm.plan(0.005, clipping=clipping)
    net.head.weight.data.mul_(0.02)  # norms about as small as 0.01
    plain, scaled = (tm.clipped_sum(tm.make_engine(net, promise, loss_scale=scale), some) for scale in (1.0, 1024.0))
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("autocast", [None, cases.BF16], ids=["fp32", "bf16"])
def test_huge_gradients_are_clipped_too(autocast: Any) -> None:
    net, some = tm.build("llama", FROZEN), tm.units(tm.RAGGED)
    net.get_output_embeddings().weight.data.mul_(1e6)
    engine = tm.make_engine(net, tm.plan(1.0), **({"autocast": autocast} if autocast else {}))
    assert min(tm.engine_norm(engine, unit, tm.TOKENS) for unit in some) > 1e3
    checks.neighbours(engine, some)
    assert float(tm.clipped_sum(engine, some[:1]).norm()) >= 1 - 1e-6  # bounded, not lost


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
    held = PassGradients(dict(layer.named_parameters()), most_units=3, held_numbers=10**6)
    held.open([Segment(50 * number, 50 * number + 50, number) for number in range(3)])
    x_1Md, g_1Mp = (values.flatten(0, 1)[None] for values in (x_UTd, g_UTp))
    for parameter, part in rule(layer, x_1Md, g_1Mp, lambda _: True, []):
        held.add(parameter, part)
    exact_Upd = torch.einsum("utp,utd->upd", g_UTp.double(), x_UTd.double())
    exact_Upd = exact_Upd if rule is linear else exact_Upd.transpose(1, 2)
    for number in range(3):
        gradient_P = held.whole(number)
        assert gradient_P.dtype == torch.float32
        exact_P = torch.cat([exact_Upd[number].flatten(), g_UTp[number].double().sum(dim=0)])
        torch.testing.assert_close(gradient_P.double(), exact_P, rtol=1e-4, atol=1e-5)


# --- layers called more than once, and how gradients are held ----------------------------------------------------------


def in_two_shapes(net: Any, x_RTd: Tensor) -> Tensor:
    """All tokens, and then the first ones only, one more dimension around them."""
    first = net.layer(x_RTd[:, None, :2].tanh()).sum(dim=(1, 2))
    return net.layer(x_RTd) + first[:, None]


def in_place(net: Any, x_RTd: Tensor) -> Tensor:
    """A layer's output and input change after its call, as in Falcon."""
    y_RTd = net.layer(x_RTd)
    y_RTd += x_RTd
    return net.layer(y_RTd).mul_(0.5).relu_()


class Scalar(nn.Module):
    """A layer that no rule knows: functorch differentiates it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.7, -1.3]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor[0] + torch.sin(self.factor[1] * x)


def around(other: nn.Module, make: Any, **arguments: Any) -> nn.Module:
    net = Made(make, **arguments)
    net.other = other
    return net


SEVERAL_CALLS: dict[str, Any] = {
    "twice": lambda: Made(lambda net, x_RTd: net.layer(net.layer(x_RTd).tanh())),
    "in two shapes": lambda: Made(in_two_shapes),
    "in place": lambda: Made(in_place),
    "one norm twice": lambda: around(
        nn.LayerNorm(8), lambda net, x_RTd: net.other(net.layer(net.other(x_RTd))), bias=True
    ),
    "a layer without a rule": lambda: around(Scalar(), lambda net, x_RTd: net.other(net.layer(x_RTd))),
    "tied through modules": cases.TiedThroughModules,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SEVERAL_CALLS)
def test_a_weight_that_is_used_in_several_calls_is_exact(name: str, mode: str) -> None:
    net = SEVERAL_CALLS[name]()
    checks.exact(net, ragged(), tm.brute_force(net, ragged()), mode)
    assert tm.make_engine(net, mode=mode).self_check(tm.VOCABULARY).error <= checks.EXACT


@pytest.mark.parametrize("name", ["llama, last block and head", "llama, last block and tied head", "gpt2, everything"])
@pytest.mark.parametrize("numbers", [1, 100])
def test_a_gradient_that_is_formed_in_pieces_is_as_exact(name, numbers, monkeypatch):
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


@settings(parent=generated, max_examples=60)
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
