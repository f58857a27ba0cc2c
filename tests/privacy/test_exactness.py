"""Every unit's gradient is the one that float64 autograd gives for it alone, in every family, method and mode.

Table 1.9 of the engine survey as tests: where other engines are wrong in silence, this one is exact or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import checks
import pytest
import tiny_models as tm
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_models import FROZEN, LORA, RAGGED, Toy
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm.data import Unit
from dpllm.privacy import gradients, guards, rules
from dpllm.privacy.gradients import Owners, UnitGradients
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.rules import Dense, Product, Rows
from dpllm.privacy.sampling import PhysicalBatch, collate

MODES = ("auto", "per_sample", "ghost")
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
FP16 = partial(torch.autocast, "cpu", dtype=torch.float16)
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "falcon",
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
HEAD = {**FROZEN, "lm_head": True}
ATTENTION = {**LORA, "target_modules": ["q_proj", "v_proj"]}
EVERYTHING = ""
Case = tuple[str, dict[str, Any] | str, dict[str, Any]]
generated = settings(deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def lora(**changes: Any) -> dict[str, Any]:
    return {**LORA, **changes}


CASES: dict[str, Case] = {
    **{f"{family}, all-linear": (family, LORA, {}) for family in FAMILIES},
    **{f"{family}, last block": (family, FROZEN, {}) for family in FAMILIES},
    **{f"{family}, last block and head": (family, HEAD, {}) for family in ("llama", "gpt2", "opt", "gemma2")},
    **{f"{family}, last block and tied head": (family, HEAD, TIED) for family in ("llama", "gpt2", "opt", "gemma2")},
    **{f"{family}, everything": (family, EVERYTHING, {}) for family in ("llama", "qwen2", "gemma3_text", "gpt2")},
    **{f"{family}, everything, tied": (family, EVERYTHING, TIED) for family in ("llama", "gpt2", "gpt_neox")},
    "falcon with biases, all-linear": ("falcon", LORA, {"bias": True}),
    "falcon with biases, last block": ("falcon", FROZEN, {"bias": True}),
    "falcon, newer architecture, last block": ("falcon", FROZEN, {"new_decoder_architecture": True}),
    "llama, eager attention, all-linear": ("llama", LORA, {"attn_implementation": "eager"}),
    "gpt2, eager attention, last block": ("gpt2", FROZEN, {"attn_implementation": "eager"}),
    "mixtral, attention": ("mixtral", ATTENTION, {}),
    "rsLoRA": ("llama", lora(use_rslora=True), {}),
    "LoRA and head": ("llama", lora(modules_to_save=["lm_head"]), {}),
    "LoRA and tied head": ("llama", lora(modules_to_save=["lm_head"]), TIED),
    "LoRA, embedding and head": ("llama", lora(modules_to_save=["embed_tokens", "lm_head"]), {}),
    "LoRA, tied embedding and head": ("llama", lora(modules_to_save=["embed_tokens", "lm_head"]), TIED),
    "gpt2, LoRA, tied embedding and head": ("gpt2", lora(modules_to_save=["wte", "lm_head"]), TIED),
    "LoRA on the embedding": ("llama", lora(target_modules=["embed_tokens"]), {"pad_token_id": None}),
    "LoRA on the embedding, its padding_idx among the tokens": (
        "llama", lora(target_modules=["embed_tokens", "q_proj"]), {"pad_token_id": 9},
    ),
    "LoRA on embedding and head": ("llama", lora(target_modules=["embed_tokens", "lm_head"]), {}),
    "LoRA on a tied embedding": ("llama", lora(target_modules=["embed_tokens", "down_proj"]), TIED),
    "LoRA on a scaled embedding": ("gemma3_text", lora(target_modules=["embed_tokens", "q_proj"]), {}),
    "gpt2, LoRA on the embedding": ("gpt2", lora(target_modules=["wte", "c_attn"]), {}),
    "padding_idx among the tokens": ("llama", EVERYTHING, {"pad_token_id": 9}),
    "padding_idx among the tokens, tied": ("opt", "embed_tokens", {"pad_token_id": 9, **TIED}),
    "positions alone": ("gpt2", "wpe", {}),
}  # fmt: skip


@cache
def built(name: str) -> Any:
    family, adapter, changes = CASES[name]
    return tm.build(family, adapter, **changes)


@cache
def ragged() -> list[Unit]:
    """Ragged units; token 9, which is some models' padding_idx, is one of each sequence's tokens."""
    return [
        Unit(tuple(tm.replace_token(sequence, len(sequence.input_ids) // 2, 9) for sequence in one.sequences))
        for one in tm.units(RAGGED)
    ]


@cache
def reference(name: str) -> Tensor:
    return tm.brute_force(built(name), ragged())


# --- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_norms_and_clipped_sums_are_those_of_float64_autograd(name: str, mode: str) -> None:
    checks.exact(built(name), ragged(), reference(name), mode)


def test_the_cases_are_what_they_are_called() -> None:
    def pieces(name: str) -> set[str]:
        return {part for full in tm.trainable(built(name)) for part in full.split(".")}

    assert built("llama, eager attention, all-linear").config._attn_implementation == "eager"
    assert built("llama, all-linear").config._attn_implementation == "sdpa"
    assert {"lora_embedding_A", "lora_embedding_B"} <= pieces("LoRA on a scaled embedding")
    assert {"lm_head", "embed_tokens", "lora_A"} <= pieces("LoRA, tied embedding and head")
    assert {"bias"} <= pieces("falcon with biases, last block")
    assert set(tm.trainable(built("positions alone"))) == {"transformer.wpe.weight"}
    tied = built("llama, last block and tied head")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    scale = tm.build("llama", lora(use_rslora=True)).model.model.layers[0].mlp.up_proj.scaling["default"]
    assert scale == pytest.approx(4 / 2**0.5)
    for name in ("padding_idx among the tokens", "padding_idx among the tokens, tied"):
        assert built(name).get_input_embeddings().padding_idx == 9


def test_both_parts_of_a_tied_head_and_their_cross_term_matter() -> None:
    """None of the three is a rounding of the others, so the tests above would see it missing."""
    net = built("llama, last block and tied head")
    size = net.lm_head.weight.numel()  # the first of all that trains
    whole_UP = reference("llama, last block and tied head")[:, :size]
    handle = net.model.embed_tokens.register_forward_hook(lambda _module, _inputs, output: output.detach())
    head_UP = tm.brute_force(net, ragged())[:, :size]
    handle.remove()
    embedding_UP = whole_UP - head_UP
    assert float((embedding_UP.norm(dim=1) / whole_UP.norm(dim=1)).min()) > 1e-2
    without_cross_U = (head_UP.square().sum(dim=1) + embedding_UP.square().sum(dim=1)).sqrt()
    assert float((without_cross_U / whole_UP.norm(dim=1) - 1).abs().max()) > 1e-3


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
        checks.refused(lambda: tm.clipped_sum(engine, ragged()), "gate (MixtralTopKRouter) trains and is called with")


def test_adapters_on_a_router_are_refused() -> None:
    """Phimoe's router is an ordinary linear layer, so peft adapts it."""
    net = tm.build("phimoe", lora(target_modules=["router", "q_proj"]))
    assert any("router" in name for name in tm.trainable(net))
    checks.refused(lambda: guards.check_model(net), "belongs to a router or an expert")


def test_the_last_block_of_a_mixture_is_refused() -> None:
    net = tm.build("mixtral", FROZEN)
    checks.refused(lambda: guards.check_model(net), "belongs to a router or an expert")


def test_dora_is_refused_in_the_recipe() -> None:
    with pytest.raises(ValidationError, match=r"set adapter\.use_dora: false"):
        tm.recipe(adapter=lora(use_dora=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_dropout_draws_the_same_masks_as_ordinary_autograd(family: str, mode: str, checkpointing: str | None) -> None:
    net = tm.build(family, lora(dropout=0.3), checkpointing=checkpointing)
    assert tm.make_engine(net, tm.plan(0.1), grad_sample_mode=mode).self_check(tm.VOCABULARY, 32) <= checks.EXACT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, all-linear", "llama, last block", "llama, last block and tied head"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_gradient_checkpointing_changes_nothing(kind: str, name: str, mode: str) -> None:
    _, adapter, changes = CASES[name]
    checks.checkpointed(kind, adapter, tm.brute_force(built(name), tm.units(RAGGED)), mode, **changes)


# --- batches of every shape ------------------------------------------------------------------------------------------


def left_padded(some: list[Unit], width: int) -> PhysicalBatch:
    batch = collate(some, pad_id=0)
    rows, parts = len(batch.unit_R), []
    for right in (batch.input_ids_RT, batch.attention_mask_RT, batch.loss_mask_RT):
        left = right.new_zeros(rows, width)
        for row, length in enumerate(batch.attention_mask_RT.sum(dim=1).tolist()):
            left[row, width - length :] = right[row, :length]
        parts.append(left)
    return PhysicalBatch(*parts, batch.denominator_R, batch.unit_R, batch.num_units)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, all-linear", "gpt2, last block", "opt, all-linear", "positions alone"])
def test_left_padding_is_as_exact(name: str, mode: str) -> None:
    net, batch = built(name), left_padded(ragged(), 20)
    gradient_RP = tm.brute_force_rows(net, batch)
    exact_UP = gradient_RP.new_zeros(len(RAGGED), gradient_RP.shape[1]).index_add_(0, batch.unit_R, gradient_RP)
    engine = tm.make_engine(net, tm.plan(0.3), grad_sample_mode=mode)
    torch.testing.assert_close(tm.norms(engine, batch).double(), exact_UP.norm(dim=1), rtol=checks.EXACT, atol=0)
    assert checks.apart(engine.clipped_sum([batch])[0], checks.clip(exact_UP, 0.3)) <= checks.EXACT


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
def test_rows_of_nobody_add_nothing(name: str, mode: str) -> None:
    checks.dummy_rows(built(name), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_batch_of_nobody_adds_nothing(name: str, mode: str) -> None:
    checks.nobody(built(name), mode)


@pytest.mark.parametrize("mode", MODES)
def test_no_units_at_all_are_noise_alone(mode: str) -> None:
    engine = tm.make_engine(built("llama, all-linear"), tm.plan(0.3, 0.7), grad_sample_mode=mode)
    zeros_P, seen = engine.clipped_sum([])
    assert not bool(zeros_P.any())
    assert (seen.units, seen.clipped) == (0, 0)
    checks.standard_normal(checks.released(engine, [], 12, 0.7))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_unit_of_more_rows_than_a_physical_batch_is_clipped_once(name: str, mode: str) -> None:
    checks.whole_units(built(name), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapter", [LORA, HEAD], ids=["lora", "head"])
def test_a_unit_without_a_finite_gradient_adds_nothing(adapter: dict[str, Any], mode: str) -> None:
    checks.not_finite(mode, adapter)


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
    engine = tm.make_engine(net, tm.plan(bound), grad_sample_mode=mode)
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
    wide = {
        name: functional.pad(getattr(batch, name), (0, extra))
        for name in ("input_ids_RT", "attention_mask_RT", "loss_mask_RT")
    }
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


class TiedThroughModules(Toy):
    """Embedding, a layer in between and the head share their weights pairwise, all of them called as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(True)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(8, 8, bias=False)
        self.other.weight = self.layer.weight

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd) + self.other(x_RTd.cos())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Twice, TwiceInTwoShapes, InPlace, TwoNorms, Unknown, TiedThroughModules])
def test_a_weight_that_is_used_in_several_calls_is_exact(kind: type[Toy], mode: str) -> None:
    net = kind()
    checks.exact(net, ragged(), tm.brute_force(net, ragged()), mode)
    assert tm.make_engine(net, grad_sample_mode=mode).self_check(tm.VOCABULARY, 32) <= checks.EXACT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, last block and head", "llama, last block and tied head", "gpt2, everything"])
@pytest.mark.parametrize("chunk", [1, 100])
def test_a_head_in_chunks_is_as_exact(name: str, chunk: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "CHUNK", chunk)
    checks.exact(built(name), ragged()[1:4], reference(name)[1:4], mode, sizes=(64,))


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that operations make, and which operations multiplied matrices into them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
                if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                    self.products.add(tuple(value.shape))
        return result


@pytest.mark.parametrize("tied", [False, True])
def test_a_wide_head_makes_no_gradient_of_every_row(tied: bool) -> None:
    """R V d numbers would be 4 times the head; the largest tensor that is made is one sum over the batch."""
    rows, tokens, hidden, vocabulary = 4, 6, 80, rules.WIDE
    largest = {}
    for mode in MODES:
        net = Toy(hidden, vocabulary)
        net.layer.requires_grad_(False)
        net.head.requires_grad_(True)
        if tied:
            net.embed.weight = net.head.weight
        engine = tm.make_engine(net, tm.plan(0.1), grad_sample_mode=mode)
        with Shapes() as seen:
            engine.clipped_sum(tm.batches([tm.unit((tokens,), number) for number in range(rows)]))
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
def test_adapters_are_materialised_and_factors_only_where_they_are_asked_for(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tm.make_engine(built("llama, all-linear"), grad_sample_mode=mode)
    seen = parts_of(engine, ragged(), monkeypatch)
    assert set().union(*seen.values()) == {Product if mode == "ghost" else Dense}


@settings(parent=generated, max_examples=200)
@given(tokens=st.integers(1, 4096), i=st.integers(1, 16_383), j=st.integers(1, 16_383), low=st.booleans())
def test_factors_are_kept_where_they_are_cheaper_to_measure_and_to_hold(tokens: int, i: int, j: int, low: bool) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    left, right = (torch.empty(2, tokens, width, dtype=dtype, device="meta") for width in (i, j))
    kept = isinstance(rules.product(left, right, rules.Form("auto", tokens)), Product)
    numbers = tokens * (i + j) * dtype.itemsize
    if kept:
        assert 2 * tokens**2 <= i * j
        assert numbers < 4 * i * j / 2
    elif tokens**2 * 10 <= i * j:
        assert 2 * (numbers + 16 * tokens**2) > 4 * i * j
    assert isinstance(rules.product(left[:, :1, :1], right[:, :1, :1], rules.Form("ghost", tokens)), Product)


# --- precision -------------------------------------------------------------------------------------------------------


def lowered(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The frozen base in low precision, the adapters in float32."""
    for p in net.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)
    return net


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"autocast": BF16},
    "fp16": {"autocast": FP16, "loss_scale": 1024.0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama, all-linear", "gpt2, last block", "LoRA, tied embedding and head"])
def test_one_unit_moves_the_sum_by_at_most_c(name: str, precision: str, mode: str) -> None:
    some = tm.units(((9, 4), (16,), (5,), (40,), (2,)), seed=1)
    engine = tm.make_engine(built(name), tm.plan(0.02), grad_sample_mode=mode, **PRECISIONS[precision])
    checks.bounded(engine, some)
    for one in some:
        assert float(tm.clipped_sum(engine, [one]).norm()) >= 0.02 * (1 - 1e-6)  # bounded, and not lost
    if precision == "fp32":
        checks.neighbours(engine, some)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_on_a_base_of_low_precision_are_bounded(family: str, dtype: torch.dtype, mode: str) -> None:
    net = lowered(tm.build(family), dtype)
    engine = tm.make_engine(net, tm.plan(0.02), grad_sample_mode=mode)
    checks.bounded(engine, tm.units(((9, 4), (16,), (5,), (40,)), seed=1))
    assert engine.self_check(tm.VOCABULARY, 32, low_precision=True) <= 5e-2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_a_gradient_whose_terms_cancel_is_bounded(scale: float, precision: str, mode: str) -> None:
    """A float32 norm formed from Gram products cancels here (below); what is summed must be what was measured."""
    for bound in (1e-4, 1.0):
        checks.cancelling(mode, scale, bound, **PRECISIONS[precision])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_the_rounding_of_a_unit_does_not_follow_its_neighbours(scale: float, mode: str) -> None:
    checks.own_rounding(mode, scale)


@pytest.mark.parametrize("scale", [1e4, 1e5, 1e6])
def test_the_crafted_cancellation_is_as_strong_as_it_says_and_defeats_a_float32_gram(scale: float) -> None:
    """The terms are ``scale`` times the norm; a float32 Gram sum is below zero, and clipping by it does nothing."""
    contributions = []
    for length in (9, 17, 33, 65):
        net, caught = tm.Cancelling(scale), {}
        net.layer.register_full_backward_hook(lambda _m, _i, out, to=caught: to.update(backprop=out[0]))
        net.layer.register_forward_hook(lambda _m, inputs, _o, to=caught: to.update(activation=inputs[0]))
        batch = collate([tm.alternating_unit(length)], pad_id=0)
        sequence_losses(net(batch.input_ids_RT).logits, *tm.loss_inputs(batch)).sum().backward()
        a_Td, b_Td = caught["activation"][0].detach(), caught["backprop"][0].detach()
        norm = float((b_Td.double().T @ a_Td.double()).norm())
        assert float((a_Td.norm(dim=1) * b_Td.norm(dim=1)).double().sum()) / norm > 0.9 * scale
        square = float(((a_Td @ a_Td.T) * (b_Td @ b_Td.T)).sum())
        bound = norm / 100
        contributions.append((norm if square <= 0 else norm * min(1.0, bound / square**0.5)) / bound)
    assert max(contributions) > 99


@settings(parent=generated, max_examples=60)
@given(
    tokens=st.integers(2, 40),
    i=st.integers(1, 40),
    j=st.integers(1, 40),
    log_scale=st.floats(0, 9),
    copies=st.integers(1, 3),
    low=st.booleans(),
    looked_up=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_factors_that_cancel_are_clipped_to_at_most_c(
    tokens: int, i: int, j: int, log_scale: float, copies: int, low: bool, looked_up: bool, seed: int
) -> None:
    """Any factors, several calls and rows of one unit, and lookups (a tied head), whose sum nearly vanishes."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if low else torch.float32
    i += 2 * looked_up
    parameter = nn.Parameter(torch.zeros(i, j))
    held = UnitGradients(parameter, Owners(torch.tensor([0, 1, 0, -1]), 2))
    for _ in range(copies):
        left, right = (torch.randn(4, tokens, width, generator=generator) for width in (i, j))
        left, right = (left * 10**log_scale).to(dtype), right.to(dtype)
        held.add(Product(left, right))
        held.add(Product(-left, right))
    if looked_up:
        ids = torch.randint(0, i, (4, tokens), generator=generator)
        values = 10**log_scale * torch.randn(4, tokens, j, generator=generator)
        held.add(Rows(ids, values))
        one_hot = -functional.one_hot(ids, i).float()
        held.add(Product(one_hot, values))
    rest = torch.randn(4, tokens, i, generator=generator), torch.randn(4, tokens, j, generator=generator)
    held.add(Product(*rest))
    norm_U, bound = held.square_norm().sqrt(), 1e-3
    for unit in range(2):
        sum_ = torch.zeros(i, j, dtype=torch.float64)
        factor_U = torch.zeros(2, dtype=torch.float64)
        factor_U[unit] = (bound / norm_U[unit]).clamp(max=1.0)
        held.add_to(sum_, factor_U, [True, True])
        assert float(sum_.norm()) <= bound * checks.BOUND


def test_a_big_logical_batch_is_summed_without_rounding_away_a_unit() -> None:
    """In float32 the sum of 4096 clipped gradients moved by C (1 + 3e-5) when one of them was emptied."""
    checks.large_sum()


PRODUCTS = {
    "backends": torch.backends,
    "backends.cuda.matmul": torch.backends.cuda.matmul,
    "backends.mkldnn.matmul": torch.backends.mkldnn.matmul,
}


def untouched() -> None:
    """As torch starts: nobody has set anything."""
    torch.set_float32_matmul_precision("highest")
    for place in PRODUCTS.values():
        place.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def _untouched() -> Iterator[None]:
    untouched()
    yield
    untouched()


@pytest.mark.usefixtures("_untouched")
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_tf32_is_refused(precision: str) -> None:
    checks.tf32_refused(lambda: torch.set_float32_matmul_precision(precision))


@pytest.mark.usefixtures("_untouched")
@pytest.mark.parametrize(
    ("place", "precision"), [*((place, "tf32") for place in PRODUCTS), ("backends.mkldnn.matmul", "bf16")]
)
def test_tf32_is_refused_however_it_was_switched_on(place: str, precision: str) -> None:
    """With torch's newer switches the older ones can no longer be read."""
    checks.tf32_refused(lambda: setattr(PRODUCTS[place], "fp32_precision", precision))


# --- nothing else reaches an update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, all-linear", "gpt2, last block", "llama, last block and tied head"])
def test_no_parameter_requires_a_gradient_in_the_backward_pass(name: str, mode: str) -> None:
    checks.no_weight_gradients(built(name), mode)


def test_autograd_multiplies_no_weight_gradient() -> None:
    """An ordinary backward pass has one product of the shape of each weight; the engine's has none."""
    net, some = tm.build("llama", FROZEN, intermediate_size=29), tm.units([(9,), (5,)])
    weights = {tuple(p.shape) for p in tm.trainable(net).values() if p.dim() == 2}
    engine = tm.make_engine(net, grad_sample_mode="per_sample")
    with Shapes() as ordinary:
        engine.losses(collate(some, 0)).sum().backward()
    net.zero_grad()
    with Shapes() as ours:
        engine.clipped_sum([collate(some, 0)])
    assert weights <= ordinary.products
    assert not weights & ours.products


@pytest.mark.parametrize("size", [0, 3])
def test_a_foreign_backward_pass_is_refused(size: int) -> None:
    checks.foreign_gradients_refused(tm.units([(4 + number,) for number in range(size)]))


def test_the_optimizer_does_not_step_beside_the_engine() -> None:
    checks.lone_step_refused()


def test_what_went_through_accelerate_is_refused() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    net = Toy()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([net.layer.weight], lr=1.0))
    checks.refused(lambda: engine_on(net, optimizer), "went through accelerator.prepare")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_wrapped_for_data_parallelism_is_refused() -> None:
    wrapped = object.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Toy()
    checks.refused(
        lambda: engine_on(wrapped, torch.optim.SGD([wrapped.module.layer.weight])), "DistributedDataParallel"
    )


def engine_on(net: nn.Module, optimizer: Any) -> tm.Engine:
    settings = {"grad_sample_mode": "auto", "noise_entropy": 1, "device": tm.CPU}
    return tm.Engine(net, optimizer, tm.schedule(), tm.plan(), **settings)


def test_hooks_are_not_put_in_twice() -> None:
    net = Toy()
    engine = tm.make_engine(net)
    again = torch.optim.SGD([net.layer.weight], lr=1.0)
    checks.refused(lambda: engine_on(net, again), "carries per-sample gradient hooks already")
    engine.close()
    engine_on(net, again).close()


@pytest.mark.parametrize("setting", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_an_embedding_that_reads_other_rows_tokens_is_refused(setting: dict[str, Any]) -> None:
    net = Toy()
    net.embed = nn.Embedding(tm.VOCABULARY, 8, **setting)
    checks.refused(lambda: tm.clipped_sum(tm.make_engine(net), ragged()), "scale_grad_by_freq or max_norm")


def test_what_trains_outside_the_optimizer_and_the_reverse_are_refused() -> None:
    net = Toy(bias=True)
    outside = torch.optim.SGD([net.layer.weight], lr=1.0)
    checks.refused(lambda: engine_on(net, outside), "layer.bias trains outside it")
    frozen = torch.optim.SGD([net.layer.weight, net.layer.bias, net.head.weight], lr=1.0)
    checks.refused(lambda: engine_on(net, frozen), "it holds one that does not train")


class Fused(Toy):
    """As fused cross-entropy kernels do: the head's weight is read, the head is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(True)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=functional.linear(self.hidden(self.embed(input_ids)), self.head.weight))


class Capacity(Toy):
    """An expert that takes the tokens in the order of the batch until it is full."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        rank_RT = (x_RTd[..., 0] > 0).flatten().cumsum(0).view(x_RTd.shape[:2])
        return self.layer(x_RTd) * (rank_RT <= 8).unsqueeze(-1)


class Flattened(Toy):
    """Padding-free: the layers read all rows as one."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd.flatten(0, 1)[None])[0].view_as(x_RTd)


class HalfTied(TiedThroughModules):
    """One of the uses of a shared weight is a function's."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd) + functional.linear(x_RTd.cos(), self.other.weight)


class Leaking(Toy):
    """A row's tokens see those of the row above."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd + 0.5 * x_RTd.roll(1, dims=0))


REFUSED = {
    Fused: "head.weight trains, but no layer's call gave a gradient",
    Capacity: "with the rows beside it",
    Flattened: "layer trains and reads tokens without their rows",
    HalfTied: "self-check",
    Leaking: "with the rows beside it",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_self_check_refuses_what_clipping_would_not_bound(kind: type[Toy]) -> None:
    checks.self_check_refuses(kind(), REFUSED[kind])


def test_the_self_check_refuses_a_mean_over_the_tokens_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpllm.privacy.engine.sequence_losses", checks.batch_token_mean)
    checks.self_check_refuses(Toy(), "with the rows beside it")
