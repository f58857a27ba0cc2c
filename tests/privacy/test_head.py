"""Losses in chunks, with and without logits, are cross entropy over all logits: losses, gradients, and nothing beside.

Those without leave the model as it was, and are refused where its head is more than a product.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import checks
import pytest
import tiny
import tiny_models as tm
import torch
from cases import BF16, FAMILIES, FP16, HEAD, Shapes, generated, lora
from heads import VOCABULARY, Headed, gradients, logits, losses, plain, ragged, ways
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import around
from peft import PromptTuningConfig, get_peft_model
from tiny_models import FROZEN, LORA
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from dpllm.errors import Refused
from dpllm.privacy import loss as losses_module
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.loss import Targets, TokenLosses, fused_losses, pack_of, token_losses
from dpllm.privacy.packing import lay_out
from dpllm.privacy.schedule import Unit
from dpllm.run.footprint import tally


def compare(net: Any, tolerance: float, *, fused: bool) -> None:
    scorer = TokenLosses(net, tm.CPU)
    assert (scorer.head is not None) == fused
    for some in ways(net):
        with RowAttention(net).of(some):  # checkpointing computes again in the backward pass
            torch.manual_seed(0)
            expected_R = plain(net, some)
            torch.manual_seed(0)  # Phimoe jitters what its experts read
            loss_R = losses(scorer, net, some)
            assert loss_R.dtype == expected_R.dtype
            torch.testing.assert_close(loss_R, expected_R, rtol=tolerance, atol=tolerance)
            assert checks.apart(gradients(loss_R, net), gradients(expected_R, net)) <= tolerance


def exactly(net: Any, *, fused: bool) -> None:
    if hasattr(net, "set_experts_implementation"):
        net.set_experts_implementation("eager")  # grouped products know no float64
    compare(net, 1e-6, fused=fused)
    compare(net.double(), 1e-12, fused=fused)


def with_bias(net: Any, *, trains: bool = False) -> Any:
    """A head with a bias, which no family of the table has."""
    net.get_output_embeddings().bias = nn.Parameter(torch.randn(VOCABULARY), requires_grad=trains)
    return net


def scaled(config: Any, **changes: Any) -> Any:
    torch.manual_seed(5)
    net = AutoModelForCausalLM.from_config(config(**{**tiny.SMALL, "vocab_size": VOCABULARY, **changes}))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    return net


def twice(head: nn.Module, hidden_RTd: Tensor) -> Tensor:
    head(hidden_RTd.detach().flip(1))
    return head(hidden_RTd)


def once_more(head: nn.Module, hidden_RTd: Tensor) -> Tensor:
    logits_RTV = head(hidden_RTd)
    head(hidden_RTd.detach().flip(1))
    return logits_RTV


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
    "a bias of the head that trains": (lambda: with_bias(tm.build("llama", LORA), trains=True), False),
    "an adapter on the head": (lambda: tm.build("llama", lora(target_modules=["lm_head", "q_proj"])), False),
    "a copy of the head": (lambda: tm.build("llama", lora(modules_to_save=["lm_head"])), False),
    "checkpointing": (lambda: tm.build("llama", LORA, checkpointing="non-reentrant"), True),
    "logits that are divided": (lambda: scaled(GraniteConfig, logits_scaling=8.0), False),
    "logits that are multiplied": (lambda: scaled(CohereConfig, logit_scale=0.25), False),
    "logits changed in place": (lambda: Headed(lambda head, hidden_RTd: head(hidden_RTd).mul_(0.5)), False),
    "a head called twice": (lambda: Headed(twice), False),
    "a head called once more": (lambda: Headed(once_more), False),
    "a part of the vocabulary": (lambda: Headed(lambda head, hidden_RTd: head(hidden_RTd)[..., :-1]), False),
    "no head by name": (tm.Toy, False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_plain_frozen_head_keeps_its_logits(name: str) -> None:
    made, fused = OTHERS[name]
    exactly(made(), fused=fused)


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


def targets_of(ids_RT: Tensor, mask_RT: Tensor, pack: int = 4) -> Targets:
    positions = mask_RT.flatten().nonzero().flatten() - 1
    return Targets.of(ids_RT.flatten().tolist(), positions.tolist(), tuple(ids_RT.shape), pack)


BOTH: dict[str, Callable[[Tensor, nn.Linear, Targets], Tensor]] = {
    "without logits": lambda hidden_RTd, head, targets: fused_losses(head, hidden_RTd, targets).nll_M,
    "with logits": lambda hidden_RTd, head, targets: token_losses(head(hidden_RTd), targets),
}


@settings(parent=generated, max_examples=60)
@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    at_once=st.integers(1, 40),
    pack=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_chunks_of_any_size_give_the_same(rows, tokens, vocabulary, at_once, pack, bias, seed):
    hidden_RTd, head, (ids_RT, mask_RT) = hidden_and_head(rows, tokens, vocabulary, seed, bias=bias)
    targets = targets_of(ids_RT, mask_RT, pack)
    scores_RTV = head(hidden_RTd).log_softmax(dim=-1)
    picked_RT = -scores_RTV[:, :-1].gather(2, ids_RT[:, 1:, None])[..., 0]
    expected_RT = torch.where(mask_RT[:, 1:], picked_RT, 0.0)
    weight_RT = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (expected,) = torch.autograd.grad((expected_RT * weight_RT[:, :-1]).sum(), hidden_RTd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses_module, "CHUNK_ELSEWHERE", at_once * vocabulary)
        for way in BOTH.values():
            nll_RT = way(hidden_RTd, head, targets).view(rows, tokens)
            torch.testing.assert_close(nll_RT[:, :-1], expected_RT, rtol=1e-12, atol=1e-12)
            assert not bool(nll_RT[:, -1].any())
            (gradient,) = torch.autograd.grad((nll_RT * weight_RT).sum(), hidden_RTd)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_target_cannot_poison(bad: float, way: str) -> None:
    """Padding, with which packs are filled up, and prompts may hold anything; a row whose targets do spoils itself alone."""
    hidden_RTd, head, (ids_RT, mask_RT) = hidden_and_head(3, 6, 20, 2, bias=False)
    mask_RT[:, 1:] = torch.tensor([True, True, False, False, False])
    targets = targets_of(ids_RT, mask_RT)
    assert targets.count < len(targets.position_N)
    silent, loud = torch.zeros(2, 3, 6, 1, dtype=torch.bool)
    silent[:, 2:], loud[1, 0] = True, True

    def run(where: Tensor | None) -> tuple[Tensor, Tensor]:
        leaf = hidden_RTd.detach().requires_grad_()
        nll_RT = BOTH[way](leaf if where is None else leaf.masked_fill(where, bad), head, targets).view(3, 6)
        return nll_RT.detach(), torch.autograd.grad(nll_RT.sum(), leaf)[0]

    clean_RT, clean_RTd = run(None)
    assert all(map(torch.equal, run(silent), (clean_RT, clean_RTd)))
    spoilt_RT, spoilt_RTd = run(loud)
    assert torch.equal(spoilt_RT[::2], clean_RT[::2])
    assert torch.equal(spoilt_RTd[::2], clean_RTd[::2])
    assert not bool(spoilt_RT[1, 0].isfinite())


@pytest.mark.parametrize("at_once", [1, 8, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_tokens_of_one_row_leave_the_bits_of_the_others(family, at_once, monkeypatch):
    """Nor do its length, its place and who else is there; Gemma 2 keeps its logits."""
    monkeypatch.setattr(losses_module, "CHUNK_ELSEWHERE", at_once * VOCABULARY)
    packing = replace(tm.packing(), targets=pack_of(VOCABULARY, tm.CPU))
    net, some, other = tm.build(family, LORA), tm.units([(9,), (9,), (9,)]), tm.unit([9], 77)
    scorer = TokenLosses(net, tm.CPU)

    def nll(units: list[Unit]) -> list[Tensor]:
        laid = lay_out(units, packing, 0)
        with RowAttention(net).of(laid), torch.no_grad():
            nll_M = scorer(laid).nll_M
        return [nll_M[row.start : row.stop] for row in laid.rows]

    before, after = nll(some), nll([other, *some[1:]])
    assert all(map(torch.equal, before[1:], after[1:]))
    assert not torch.equal(before[0], after[0])
    for place, company in enumerate(([], [other], [tm.unit([21], 8), tm.unit([5], 9)], [tm.unit([40], 4)])):
        assert torch.equal(nll([*company, some[0], *company[:1]])[len(company)], before[0]), place


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("autocast", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_under_autocast_it_is_as_exact_as_all_logits(family: str, autocast: Any, tied: bool) -> None:
    """Losses agree to the rounding of float32; gradients are as far from float64's as those of the ordinary way."""
    net = tm.build(family, LORA, tie_word_embeddings=tied)
    scorer, double = TokenLosses(net, tm.CPU, autocast), copy.deepcopy(net).double()
    own, ordinary, exact = [], [], []
    for seed in range(4):  # roundings of one batch alone are a third larger or smaller by chance
        some = ragged(seed=seed)
        ordinary_R, loss_R = plain(net, some, autocast, seed), losses(scorer, net, some)
        torch.testing.assert_close(loss_R, ordinary_R, rtol=1e-6, atol=1e-6)
        own.append(gradients(128 * loss_R, net) / 128)
        ordinary.append(gradients(128 * ordinary_R, net) / 128)
        exact.append(gradients(plain(double, some, seed=seed), double))
    whole = torch.cat(exact)
    assert checks.apart(torch.cat(own), whole) <= 1.2 * checks.apart(torch.cat(ordinary), whole) + 1e-4


def test_float16_keeps_the_tail_of_a_softmax_over_a_large_vocabulary() -> None:
    """Beside a likely target, 60,000 tokens of 1.5e-8 each hold all that there is to learn; float16 ends at 6e-8."""
    gradient, targets = [], Targets.of([0, 5], [0], (1, 2), 1)
    for kind in (torch.float64, torch.float16):
        head = nn.Linear(2, 60_000, bias=False, dtype=kind).requires_grad_(False)
        head.weight.copy_(torch.tensor([0.0, 1.0]).expand(60_000, 2))
        head.weight[5] = torch.tensor([4.5, 0.0])
        hidden_RTd = torch.tensor([[[4.0, 0.0], [0.0, 0.0]]], dtype=kind).requires_grad_()
        nll_M = fused_losses(head, hidden_RTd, targets).nll_M
        gradient.append(torch.autograd.grad(256 * nll_M.sum(), hidden_RTd)[0].double())
    torch.testing.assert_close(gradient[1], gradient[0], rtol=2e-2, atol=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_logits_of_low_precision_are_never_copied_whole(kind: torch.dtype) -> None:
    logits_RTV = torch.randn(4, 25, 50, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()
    ids_RT = torch.randint(0, 50, (4, 25), generator=torch.Generator().manual_seed(1))
    mask_RT = torch.ones(4, 25, dtype=torch.bool)
    mask_RT[:, 0] = False
    targets = targets_of(ids_RT, mask_RT, 96)
    with Shapes(torch.float32) as seen:
        nll_M = token_losses(logits_RTV, targets)
        nll_M.sum().backward()
    at_once = losses_module._at_once(targets, logits_RTV.flatten(0, 1))
    assert at_once < 4 * 25 / 2
    assert seen.largest == at_once * 50
    scores_RVT = logits_RTV.detach().float()[:, :-1].mT
    expected_RT = functional.cross_entropy(scores_RVT, ids_RT[:, 1:], reduction="none")
    torch.testing.assert_close(nll_M.detach().view(4, 25)[:, :-1], expected_RT, rtol=1e-6, atol=1e-6)


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's step nothing is larger than a chunk, and prompts and padding are not multiplied at all."""
    vocabulary, at_once = 3000, 16
    monkeypatch.setattr(losses_module, "CHUNK_ELSEWHERE", at_once * vocabulary)
    engine = tm.make_engine(tm.build("llama", LORA, vocab_size=vocabulary))
    (some,) = tm.batches([tm.unit([20], 1), tm.unit([40], 2), tm.unit([33], 3)], engine)
    with Shapes() as seen:
        engine.clipped_sum([some])
    assert seen.largest <= max(at_once * vocabulary, engine._token_losses.head.weight.numel())
    wide = [shape[0] for shape in seen.products if shape[1] == vocabulary]
    assert wide == [at_once] * -(-some.targets.count // at_once)  # so that no shape tells another's targets


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_none_is_computed(context: Any) -> None:
    net, some = tm.build("llama", LORA), ragged()
    scorer, pack = TokenLosses(net, tm.CPU), some.targets.pack
    with RowAttention(net).of(some):
        expected_M = scorer(some).nll_M.detach()
        with context(), Shapes() as seen:
            nll_M = scorer(some).nll_M
    assert torch.equal(nll_M, expected_M)
    assert not nll_M.requires_grad
    assert (pack, VOCABULARY) in seen.products
    assert (pack, 16) not in seen.products


@pytest.mark.parametrize("tokens", [tm.ALONE, tm.TOKENS], ids=["padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BF16], ids=["fp32", "bf16"])
def test_hits_are_where_the_target_has_the_highest_logit(family: str, autocast: Any, tokens: int) -> None:
    net, some = tm.build(family, LORA), ragged(tokens)
    with torch.inference_mode(), autocast():
        best_M = logits(net, some).argmax(dim=-1)
    ids_M = some.input_ids_1M.flatten().clone()
    ids_M[1::2] = best_M[0:-1:2]  # a model with random weights hits nothing by itself
    positions, shape = some.targets.position_N[: some.targets.count], some.targets.shape
    targets = Targets.of(ids_M.tolist(), positions.tolist(), shape, tm.packing().targets)
    some = replace(some, input_ids_1M=ids_M.view(shape), targets=targets)
    with torch.inference_mode():
        with autocast():
            best_M = logits(net, some).argmax(dim=-1)
        scorer = TokenLosses(net, tm.CPU, autocast)
        with RowAttention(net).of(some):
            hit_M = scorer(some, hits=True).hit_M
    expected_M = torch.zeros_like(hit_M)
    expected_M[positions] = best_M[positions] == ids_M[positions + 1]
    assert torch.equal(hit_M, expected_M)
    assert 0 < int(hit_M.sum()) < len(positions)


def test_shapes_alone_can_be_run_for_the_planner() -> None:
    meta = torch.device("meta")
    with meta:
        net = tiny.model("llama", vocab_size=VOCABULARY).requires_grad_(False)
        net.model.layers[1].requires_grad_(True)
    with tally():
        scorer = TokenLosses(net, meta)
        for tokens in (tm.ALONE, tm.TOKENS):
            losses(scorer, net, ragged(tokens).to(meta)).sum().backward()
    assert net.model.layers[1].mlp.up_proj.weight.grad.shape == (24, 16)


def test_looking_leaves_no_trace() -> None:
    net = tm.build("llama", lora(dropout=0.5))
    net.model.model.layers[0].eval()
    modes, state = [module.training for module in net.modules()], torch.get_rng_state()
    scorer = TokenLosses(net, tm.CPU)
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(scorer.head)


def test_the_head_gets_its_forward_back_though_a_pass_fails() -> None:
    net = Headed()
    scorer = TokenLosses(net, tm.CPU)
    assert scorer.head is net.head
    net.hidden = lambda x_RTd: x_RTd[:, 1:]
    with pytest.raises(Refused, match="without virtual tokens"):
        scorer(ragged(tm.ALONE))
    assert "forward" not in vars(net.head)


def test_a_model_that_changes_its_logits_later_is_refused() -> None:
    net = Headed()
    scorer = TokenLosses(net, tm.CPU)
    net.logits = lambda hidden_RTd: 2.0 * net.head(hidden_RTd)
    with pytest.raises(Refused, match="Do not change the model while it trains"):
        scorer(ragged(tm.ALONE))


def test_virtual_tokens_are_refused() -> None:
    """Positions and tokens would be paired wrongly; with whole logits too."""
    for family in ("llama", "gemma2"):
        net = tiny.model(family, vocab_size=VOCABULARY)
        tuned = get_peft_model(net, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(Refused, match="without virtual tokens"):
            TokenLosses(tuned, tm.CPU)(ragged(tm.ALONE))


def test_whoever_watches_the_head_sees_logits() -> None:
    net, some, shapes = tm.build("llama", LORA), ragged(), []
    scorer = TokenLosses(net, tm.CPU)
    with RowAttention(net).of(some):
        expected_M = scorer(some).nll_M
        handle = scorer.head.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape)))
        torch.testing.assert_close(scorer(some).nll_M, expected_M, rtol=1e-6, atol=1e-6)
    handle.remove()
    assert shapes == [(*some.input_ids_1M.shape, VOCABULARY)]


def test_ways_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device or a type on which the products go wrong is noticed before anything runs."""

    net = tm.build("llama", LORA)
    assert TokenLosses(net, tm.CPU).head is not None
    wrong = around(losses_module, "log_likelihood_", lambda right, logits_nV, *rest: right(logits_nV.mul_(1.01), *rest))
    wrong(monkeypatch)
    net.get_output_embeddings().weight.mul_(10)
    assert TokenLosses(net, tm.CPU).head is None


@pytest.fixture
def _one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("whole_head", [False, True], ids=["head by itself", "head with the root"])
def test_a_sharded_model_hands_on_losses_too(whole_head: bool) -> None:
    net, some = tm.build("llama", LORA), ragged()
    expected_R = plain(net, some)
    expected = gradients(expected_R, net)
    shard = partial(torch.distributed.fsdp.fully_shard, ignored_params=set(tm.trainable(net).values()))
    layers = net.get_base_model().model.layers
    for unit in (*layers, *([] if whole_head else [net.get_output_embeddings()]), net):
        shard(unit)
    scorer = TokenLosses(net, tm.CPU)
    assert scorer.head is net.get_output_embeddings()
    with Shapes() as seen, warnings.catch_warnings():
        warnings.simplefilter("error")  # FSDP2 warns of views, whose hooks could be lost
        loss_R = losses(scorer, net, some)
    assert (some.input_ids_1M.numel(), VOCABULARY) not in seen.products
    torch.testing.assert_close(loss_R, expected_R, rtol=1e-6, atol=1e-6)
    assert checks.apart(gradients(loss_R, net), expected) <= 1e-6
