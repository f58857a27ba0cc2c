"""Losses in chunks, with and without logits, are cross entropy over all logits: losses, gradients, and nothing beside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import checks
import pytest
import tiny
import tiny_models as tm
import torch
from cases import BF16, FAMILIES, FP16, HEAD, TIED, Shapes, generated, lora
from heads import VOCABULARY, Headed, gradients, plain, ragged
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FROZEN, LORA
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from dpllm.forecast.footprint import tally
from dpllm.privacy import loss as losses_module
from dpllm.privacy.loss import Targets, TokenLosses, example_means, fused_losses, sequence_losses, token_losses
from dpllm.privacy.sampling import PhysicalBatch, collate


def compare(net: Any, tolerance: float, *, fused: bool, batch: PhysicalBatch | None = None) -> None:
    batch = batch or ragged()
    scorer = TokenLosses(net, tm.CPU)
    assert (scorer.head is not None) == fused
    torch.manual_seed(0)
    expected_R = plain(net, batch)
    torch.manual_seed(0)  # Phimoe jitters what its experts read
    found_R = example_means(scorer(batch).nll_RT, batch.denominator_R)
    assert found_R.dtype == expected_R.dtype
    torch.testing.assert_close(found_R, expected_R, rtol=tolerance, atol=tolerance)
    assert checks.apart(gradients(found_R, net), gradients(expected_R, net)) <= tolerance


def exactly(net: Any, *, fused: bool) -> None:
    if hasattr(net, "set_experts_implementation"):
        net.set_experts_implementation("eager")  # grouped products know no float64
    compare(net, 1e-6, fused=fused)
    compare(net.double(), 1e-12, fused=fused)


def with_bias(net: Any) -> Any:
    """A head with a bias, which no family of the table has."""
    net.get_output_embeddings().bias = nn.Parameter(torch.randn(VOCABULARY), requires_grad=False)
    return net


# --- every architecture ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "phimoe"])
def test_losses_and_gradients_are_those_of_all_logits(family: str, tied: bool) -> None:
    """Gemma 2 caps its logits, so it is the one that keeps them."""
    adapter = lora(target_modules=["q_proj", "v_proj"]) if family in {"mixtral", "phimoe"} else LORA
    net = tm.build(family, adapter, tie_word_embeddings=tied)
    exactly(net, fused=family != "gemma2")


OTHERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "a head with a bias": (lambda: with_bias(tm.build("llama", LORA)), True),
    "the last block": (lambda: tm.build("llama", FROZEN), True),
    "a head that trains": (lambda: tm.build("llama", HEAD), False),
    "a tied head that trains": (lambda: tm.build("gpt2", HEAD, **TIED), False),
    "a bias of the head that trains": (lambda: trained_bias(tm.build("llama", LORA)), False),
    "an adapter on the head": (lambda: tm.build("llama", lora(target_modules=["lm_head", "q_proj"])), False),
    "a copy of the head": (lambda: tm.build("llama", lora(modules_to_save=["lm_head"])), False),
    "checkpointing": (lambda: tm.build("llama", LORA, checkpointing="non-reentrant"), True),
    "logits that are divided": (lambda: scaled(GraniteConfig, logits_scaling=8.0), False),
    "logits that are multiplied": (lambda: scaled(CohereConfig, logit_scale=0.25), False),
    "logits changed in place": (lambda: InPlace(), False),
    "a head called twice": (lambda: Twice(), False),
    "a head called once more": (lambda: OnceMore(), False),
    "a part of the vocabulary": (lambda: Cut(), False),
    "no head by name": (lambda: tm.Toy(), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_plain_frozen_head_keeps_its_logits(name: str) -> None:
    made, fused = OTHERS[name]
    exactly(made(), fused=fused)


def trained_bias(net: Any) -> Any:
    with_bias(net).get_output_embeddings().bias.requires_grad_(True)
    return net


def scaled(config: Any, **changes: Any) -> Any:
    torch.manual_seed(5)
    net = AutoModelForCausalLM.from_config(config(**{**tiny.SMALL, "vocab_size": VOCABULARY, **changes}))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    return net


class InPlace(Headed):
    def logits(self, hidden_RTd: Tensor) -> Tensor:
        return self.head(hidden_RTd).mul_(0.5)


class Twice(Headed):
    def logits(self, hidden_RTd: Tensor) -> Tensor:
        self.head(hidden_RTd.detach().flip(1))
        return self.head(hidden_RTd)


class OnceMore(Headed):
    def logits(self, hidden_RTd: Tensor) -> Tensor:
        logits_RTV = self.head(hidden_RTd)
        self.head(hidden_RTd.detach().flip(1))
        return logits_RTV


class Cut(Headed):
    def logits(self, hidden_RTd: Tensor) -> Tensor:
        return self.head(hidden_RTd)[..., : VOCABULARY - 1]


# --- any targets, any chunks -----------------------------------------------------------------------------------------


def hidden_and_head(rows: int, tokens: int, vocabulary: int, seed: int, *, bias: bool) -> tuple[Tensor, nn.Linear, Any]:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(8, vocabulary, bias=bias).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    hidden_RTd = torch.randn(rows, tokens, 8, generator=generator, dtype=torch.float64).requires_grad_()
    ids_RT = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    mask_RT = torch.rand(rows, tokens, generator=generator) < torch.rand((), generator=generator)
    mask_RT[:, 0] = False
    return hidden_RTd, head, (ids_RT, mask_RT)


@settings(parent=generated, max_examples=60)
@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    at_once=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_chunks_of_any_size_give_the_same(
    rows: int, tokens: int, vocabulary: int, at_once: int, bias: bool, seed: int
) -> None:
    hidden_RTd, head, (ids_RT, mask_RT) = hidden_and_head(rows, tokens, vocabulary, seed, bias=bias)
    targets = Targets.of(ids_RT, mask_RT)
    scores_RTV = head(hidden_RTd).log_softmax(dim=-1)
    picked_RT = -scores_RTV[:, :-1].gather(2, ids_RT[:, 1:, None])[..., 0]
    expected_RT = torch.where(mask_RT[:, 1:], picked_RT, 0.0)
    weight_RT = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (expected,) = torch.autograd.grad((expected_RT * weight_RT[:, :-1]).sum(), hidden_RTd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses_module, "CHUNK_ELSEWHERE", at_once * vocabulary)
        for found_RT in (fused_losses(head, hidden_RTd, targets).nll_RT, token_losses(head(hidden_RTd), targets)):
            torch.testing.assert_close(found_RT[:, :-1], expected_RT, rtol=1e-12, atol=1e-12)
            assert not bool(found_RT[:, -1].any())
            (found,) = torch.autograd.grad((found_RT * weight_RT).sum(), hidden_RTd)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_graph_serves_several_backward_passes() -> None:
    """Brute force by unit walks one graph again and again."""
    hidden_RTd, head, (ids_RT, mask_RT) = hidden_and_head(3, 7, 20, 1, bias=False)
    targets = Targets.of(ids_RT, mask_RT)
    for nll_RT in (fused_losses(head, hidden_RTd, targets).nll_RT, token_losses(head(hidden_RTd), targets)):
        whole = torch.autograd.grad(nll_RT.sum(), hidden_RTd, retain_graph=True)[0]
        parts = [torch.autograd.grad(nll_RT[row].sum(), hidden_RTd, retain_graph=True)[0] for row in range(3)]
        for row, part in enumerate(parts):
            torch.testing.assert_close(part[row], whole[row], rtol=0, atol=0)
            assert not bool(part[torch.arange(3) != row].any())


# --- a row is its own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_target_cannot_poison(bad: float) -> None:
    """Padding and prompts may hold anything; a row whose targets do spoils itself alone."""
    hidden_RTd, head, (ids_RT, mask_RT) = hidden_and_head(3, 6, 20, 2, bias=False)
    mask_RT[:, 1:] = torch.tensor([True, True, False, False, False])
    targets = Targets.of(ids_RT, mask_RT)
    silent, loud = torch.zeros(3, 6, 1, dtype=torch.bool), torch.zeros(3, 6, 1, dtype=torch.bool)
    silent[:, 2:], loud[1, 0] = True, True

    def run(where: Tensor | None, how: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = hidden_RTd.detach().requires_grad_()
        nll_RT = how(leaf if where is None else leaf.masked_fill(where, bad))
        return nll_RT.detach(), torch.autograd.grad(nll_RT.sum(), leaf)[0]

    for how in (lambda leaf: fused_losses(head, leaf, targets).nll_RT, lambda leaf: token_losses(head(leaf), targets)):
        clean_RT, clean_RTd = run(None, how)
        assert all(torch.equal(*pair) for pair in zip(run(silent, how), (clean_RT, clean_RTd), strict=True))
        spoilt_RT, spoilt_RTd = run(loud, how)
        others = torch.tensor([0, 2])
        assert torch.equal(spoilt_RT[others], clean_RT[others])
        assert torch.equal(spoilt_RTd[others], clean_RTd[others])
        assert not bool(spoilt_RT[1, 0].isfinite())


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_the_tokens_of_one_row_leave_the_bits_of_the_others(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses_module, "CHUNK_ELSEWHERE", at_once * VOCABULARY)
    net, some = tm.build("llama", LORA), tm.units([(9,), (9,), (9,)])
    scorer = TokenLosses(net, tm.CPU)
    before, after = (scorer(collate([first, *some[1:]], 0)).nll_RT for first in (some[0], tm.unit([9], 77)))
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_rows_of_nobody_have_losses_of_zero_and_a_graph() -> None:
    """On several ranks such rows keep the backward passes in step."""
    net = tm.build("llama", LORA)
    nll_RT = TokenLosses(net, tm.CPU)(collate([], 0, 2)).nll_RT
    assert nll_RT.requires_grad
    assert not bool(nll_RT.any())
    assert not bool(gradients(nll_RT.sum(dim=1), net).any())


# --- low precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("autocast", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_under_autocast_it_is_as_exact_as_all_logits(family: str, autocast: Any, tied: bool) -> None:
    """Losses agree to the rounding of float32; gradients are as far from float64's as those of the ordinary way."""
    net, batch = tm.build(family, LORA, tie_word_embeddings=tied), ragged(0)
    ordinary_R = plain(net, batch, autocast)
    found_R = example_means(TokenLosses(net, tm.CPU, autocast)(batch).nll_RT, batch.denominator_R)
    torch.testing.assert_close(found_R, ordinary_R, rtol=1e-6, atol=1e-6)
    found, ordinary = gradients(1024 * found_R, net) / 1024, gradients(1024 * ordinary_R, net) / 1024
    exact = gradients(plain(net.double(), batch), net)
    assert checks.apart(found, exact) <= 1.2 * checks.apart(ordinary, exact) + 1e-4


def test_float16_keeps_the_tail_of_a_softmax_over_a_large_vocabulary() -> None:
    """Beside a likely target, 60,000 tokens of 1.5e-8 each hold all that there is to learn; float16 ends at 6e-8."""
    found = []
    for kind in (torch.float64, torch.float16):
        head = nn.Linear(2, 60_000, bias=False, dtype=kind).requires_grad_(False)
        head.weight.copy_(torch.tensor([0.0, 1.0]).expand(60_000, 2))
        head.weight[5] = torch.tensor([4.5, 0.0])
        hidden_RTd = torch.tensor([[[4.0, 0.0], [0.0, 0.0]]], dtype=kind).requires_grad_()
        nll_RT = fused_losses(
            head, hidden_RTd, Targets.of(torch.tensor([[0, 5]]), torch.tensor([[False, True]]))
        ).nll_RT
        found.append(torch.autograd.grad(256 * nll_RT.sum(), hidden_RTd)[0].double())
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_logits_of_low_precision_are_never_copied_whole(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses_module, "CHUNK_ELSEWHERE", 8 * 10 * 50)
    logits_RTV = torch.randn(4, 25, 50, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()
    ids_RT = torch.randint(0, 50, (4, 25), generator=torch.Generator().manual_seed(1))
    mask_RT = torch.ones(4, 25, dtype=torch.bool)
    mask_RT[:, 0] = False
    with Wide() as seen:
        loss_R = sequence_losses(logits_RTV, ids_RT, mask_RT, torch.full((4,), 24.0))
        loss_R.sum().backward()
    assert seen.largest == 10 * 50
    expected_R = functional.cross_entropy(
        logits_RTV.detach().float()[:, :-1].flatten(0, 1), ids_RT[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(loss_R.detach(), expected_R.view(4, 24).mean(dim=1), rtol=1e-6, atol=0)


class Wide(Shapes):
    """The size of the largest float32 tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.largest = max(self.largest, value.numel())
        return result


# --- what is held, and what is computed ------------------------------------------------------------------------------


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's step nothing is larger than a chunk, and prompts and padding are not multiplied at all."""
    vocabulary, at_once = 3000, 16
    monkeypatch.setattr(losses_module, "CHUNK_ELSEWHERE", at_once * vocabulary)
    engine = tm.make_engine(tm.build("llama", LORA, vocab_size=vocabulary))
    batch = collate([tm.unit([20], 1), tm.unit([40], 2), tm.unit([33], 3)], 0)
    with Shapes() as seen:
        engine.clipped_sum([batch])
    wide = sorted((shape[0] for shape in seen.products if shape[1] == vocabulary), reverse=True)
    assert seen.largest <= max(at_once * vocabulary, engine._token_losses.head.weight.numel())
    counts = batch.loss_mask_RT.sum(dim=1).tolist()  # of each row by itself, so that no shape tells another's
    assert wide == sorted({at_once, *(count % at_once for count in counts)}, reverse=True)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_none_is_computed(context: Any) -> None:
    net, batch = tm.build("llama", LORA), ragged()
    scorer = TokenLosses(net, tm.CPU)
    expected_RT = scorer(batch).nll_RT.detach()
    counts = [count for count in batch.loss_mask_RT.sum(dim=1).tolist() if count]
    with context(), Shapes() as seen:
        tokens = scorer(batch)
    assert torch.equal(tokens.nll_RT, expected_RT)
    assert not tokens.nll_RT.requires_grad
    assert {(count, VOCABULARY) for count in counts} <= seen.products
    assert not {(count, 16) for count in counts} & seen.products


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BF16], ids=["fp32", "bf16"])
def test_hits_are_where_the_target_has_the_highest_logit(family: str, autocast: Any) -> None:
    net, batch = tm.build(family, LORA), ragged()
    with torch.no_grad(), autocast():
        best_RT = net(input_ids=batch.input_ids_RT).logits.argmax(dim=-1)
    ids_RT = batch.input_ids_RT.clone()
    ids_RT[:, 1::2] = best_RT[:, 0:-1:2]  # a model with random weights hits nothing by itself
    batch = replace(batch, input_ids_RT=ids_RT)
    with torch.inference_mode():
        with autocast():
            best_RT = net(input_ids=ids_RT).logits.argmax(dim=-1)
        hit_RT = TokenLosses(net, tm.CPU, autocast)(batch, hits=True).hit_RT
    expected_RT = (best_RT[:, :-1] == ids_RT[:, 1:]) & batch.loss_mask_RT[:, 1:]
    assert torch.equal(hit_RT[:, :-1], expected_RT)
    assert not bool(hit_RT[:, -1].any())
    assert 0 < int(hit_RT.sum()) < int(batch.loss_mask_RT.sum())


def test_shapes_alone_can_be_run() -> None:
    """On the meta device, for the planner."""
    with torch.device("meta"):
        net = tiny.model("llama", vocab_size=VOCABULARY).requires_grad_(False)
        net.model.layers[1].requires_grad_(True)
        batch = PhysicalBatch(
            *(torch.zeros((2, 8), dtype=kind) for kind in (torch.long, torch.bool)),
            torch.ones(2), torch.zeros(2, dtype=torch.long), 2,
        )  # fmt: skip
    with tally():
        scorer = TokenLosses(net, torch.device("meta"))
        assert scorer.head is not None
        example_means(scorer(batch).nll_RT, batch.denominator_R).sum().backward()
    assert net.model.layers[1].mlp.up_proj.weight.grad.shape == (24, 16)
