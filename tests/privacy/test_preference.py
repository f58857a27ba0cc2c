"""A preference pair is clipped once, by the gradient of its own loss, and adds the same bits in any company."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import checks
import numpy as np
import pytest
import tiny_models as tm
import torch
from cases import BF16
from mutants import Change, around, rows_clipped_each
from tiny_models import FROZEN, LORA
from torch import Tensor
from torch.nn import functional

from dpllm.errors import NotBatchInvariant, Refused
from dpllm.model.rewards import Reading, Referenced, surprises
from dpllm.privacy.clipping import PerUnitClipper
from dpllm.privacy.loss import row_sums
from dpllm.privacy.packing import lay_out
from dpllm.privacy.preference import PairLoss
from dpllm.privacy.schedule import Packing, TokenSequence, Unit

FAMILIES = {"llama": LORA, "gpt2": LORA, "qwen3": LORA, "gemma3": LORA, "llama, last block": FROZEN}
LOSSES = {
    "dpo": PairLoss(beta=0.3),
    "debiased dpo": PairLoss(beta=0.3, flip=0.27),
    "cdpo": PairLoss("cdpo", 0.3, 0.27),
    "ipo": PairLoss("ipo", 0.3),
    "debiased ipo": PairLoss("ipo", 0.3, 0.12),
}
# The lengths of the answers of each unit: one pair, pairs of unequal lengths, and units of several pairs.
LENGTHS = ((9, 4), (17, 18), (5, 12), (3, 7, 11, 8), (31, 2), (6, 6), (6, 5, 40, 2, 23, 21))


def pairs(lengths: Sequence[Sequence[int]] = LENGTHS, seed: int = 0) -> list[Unit]:
    """Units of pairs whose reference is some model with log-likelihoods of its own."""
    generator = np.random.default_rng(seed)

    def referenced(one: TokenSequence) -> TokenSequence:
        return replace(one, reference=one.denominator * math.log(tm.VOCABULARY) + generator.normal())

    return [Unit(tuple(map(referenced, one.sequences))) for one in tm.units(lengths, seed)]


@cache
def built(name: str) -> Any:
    return tm.build(name.partition(",")[0], FAMILIES[name])


def packing(tokens: int = tm.TOKENS) -> Packing:
    """Passes of whole pairs; the last unit has more tokens than a pass of them."""
    return replace(tm.packing(tokens, longest=40), rows_each=2)


def make_engine(net: Any, loss: PairLoss, max_grad_norm: float = 1.0, tokens: int = tm.TOKENS, **arguments: Any) -> Any:
    engine = tm.make_engine(net, tm.plan(max_grad_norm), **arguments)
    engine.example_loss = loss
    engine.repack(packing(tm.ALONE if engine.packing.alone else tokens))
    return engine


# --- against float64 autograd, with every formula written out again ------------------------------------------------------


def loss_by_the_book(margin: Tensor, loss: PairLoss) -> Tensor:
    def plain(h: Tensor) -> Tensor:
        if loss.objective == "ipo":
            return (h / loss.beta - 1 / (2 * loss.beta)) ** 2
        return torch.log(1 + torch.exp(-h))

    if loss.objective == "cdpo":
        return (1 - loss.flip) * plain(margin) + loss.flip * plain(-margin)
    return ((1 - loss.flip) * plain(margin) - loss.flip * plain(-margin)) / (1 - 2 * loss.flip)


def log_likelihood(net: Any, answer: TokenSequence) -> Tensor:
    ids = torch.tensor([answer.input_ids])
    scores = functional.log_softmax(net(input_ids=ids, use_cache=False).logits[0].double(), dim=-1)
    return sum(scores[t - 1, ids[0, t]] for t, learned in enumerate(answer.loss_mask) if learned)  # type: ignore[return-value]


def by_autograd(net: Any, some: Sequence[Unit], loss: PairLoss) -> Tensor:
    """gradient_UP of each unit's own loss: every answer alone, unpadded, through a float64 copy of the model."""
    if net in tm._engines:
        tm._engines.pop(net).close()
    exact = copy.deepcopy(net).double()
    parameters, gradient_UP = list(tm.trainable(exact).values()), []
    for unit in some:
        total = torch.zeros((), dtype=torch.float64)
        rewards = [log_likelihood(exact, answer) + answer.reference for answer in unit.sequences]
        for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True):
            total = total + loss_by_the_book(loss.beta * (chosen - rejected), loss)
        gradient_UP.append(torch.cat([part.flatten() for part in torch.autograd.grad(total, parameters)]))
    return torch.stack(gradient_UP)


def exact(name: str, loss: PairLoss, sizes: Sequence[int] = (tm.ALONE, 64, 512)) -> None:
    """Norms and clipped sums, at a C that clips some units and not others, are those of autograd."""
    some, net = pairs(), built(name)
    expected_UP = by_autograd(net, some, loss)
    norm_U = expected_UP.norm(dim=1)
    bound = float(norm_U.median()) * 1.01
    for tokens in sizes:
        engine = make_engine(net, loss, bound, tokens)
        sum_P, seen = engine.clipped_sum(tm.batches(some, engine))
        assert checks.apart(sum_P, checks.clip(expected_UP, bound)) <= 1e-4
        assert (seen.units, seen.clipped) == (len(some), int((norm_U > bound).sum()))
        assert seen.norm_sum == pytest.approx(float(norm_U.sum()), rel=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pair_has_the_gradient_of_its_own_loss_in_float64(name: str) -> None:
    exact(name, LOSSES["dpo"])


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_so_it_is_for_every_loss(loss: PairLoss) -> None:
    exact("llama", loss, sizes=(512,))


def test_in_bf16_it_is_the_same_up_to_its_rounding() -> None:
    some, net, loss = pairs(), built("llama"), LOSSES["dpo"]
    expected_UP = by_autograd(net, some, loss)
    bound = float(expected_UP.norm(dim=1).median())
    sum_P = tm.clipped_sum(make_engine(net, loss, bound, autocast=BF16), some)
    assert checks.apart(sum_P, checks.clip(expected_UP, bound)) <= 0.1


def test_losses_are_those_of_the_book_and_a_pass_of_nobody_has_none() -> None:
    some, net = pairs(), built("llama")
    for loss in LOSSES.values():
        engine = make_engine(net, loss, tokens=512)
        for item in (lay_out(some, engine.packing, 0), lay_out([], engine.packing, 0)):
            with engine._attention.of(item):
                nll_R = row_sums(engine._token_losses(item).nll_M.double(), item.rows)
                loss_P = engine.losses(item)
            if not item.rows:
                assert not loss_P.any()
                continue
            margin_P = loss.beta * ((item.reference_R - nll_R)[::2] - (item.reference_R - nll_R)[1::2])
            torch.testing.assert_close(loss_P, loss_by_the_book(margin_P, loss))


# --- the same bits in any company ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sum_is_the_sum_of_what_each_unit_adds_by_itself(name: str, autocast: Any) -> None:
    """So S(D + X) - S(D) = S({X}), bit for bit; also of a unit with more pairs than a pass holds."""
    some, engine = pairs(), make_engine(built(name), LOSSES["debiased dpo"], 0.05, autocast=autocast)

    def added(units: Sequence[Unit | None]) -> Tensor:
        return engine.clipped_sum(tm.batches(units, engine))[0]

    whole = added(some)
    assert bool(whole.any())
    assert torch.equal(whole, sum(added([item]) for item in some))
    assert torch.equal(added(some[::-1]), whole)
    assert torch.equal(whole - added(checks.without(some, 3)), added([some[3]]))


def test_a_pair_without_a_finite_margin_adds_nothing_and_harms_nobody() -> None:
    some, engine = pairs(), make_engine(built("llama"), LOSSES["dpo"], 0.05)
    broken = Unit(tuple(replace(sequence, reference=math.nan) for sequence in some[1].sequences))
    whole, _ = engine.clipped_sum(tm.batches([some[0], broken, *some[2:]], engine))
    assert torch.equal(whole, engine.clipped_sum(tm.batches(checks.without(some, 1), engine))[0])


def bounded(loss: PairLoss) -> None:
    checks.bounded(make_engine(built("llama"), loss, 0.02), pairs())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_pair_adds_at_most_the_clipping_norm(loss: PairLoss) -> None:
    bounded(loss)


def test_what_the_reference_says_of_a_pair_follows_from_that_pair_alone() -> None:
    some, net = pairs(), built("llama")
    reading = Reading(net, packing(), 0, tm.CPU, contextlib.nullcontext)
    whole = surprises(reading, some)
    assert np.array_equal(whole, np.concatenate([surprises(reading, [sequence]) for sequence in some]))
    with torch.no_grad():
        expected = [float(-log_likelihood(net, sequence)) for unit in some for sequence in unit.sequences]
    np.testing.assert_allclose(whole, expected, rtol=1e-5)


def test_references_reach_the_answers_they_are_of() -> None:
    some: list[Unit | None] = [*pairs(), None, *pairs(seed=3)]
    reference_R = np.random.default_rng(1).normal(size=sum(len(sequence.sequences) for sequence in some if sequence))
    referenced = Referenced(some, reference_R)
    assert [sequence.reference for unit in referenced if unit for sequence in unit.sequences] == reference_R.tolist()
    assert referenced.sizes(0) == list(LENGTHS[0])
    assert referenced.sizes(len(LENGTHS)) == []
    assert referenced[len(LENGTHS)] is None


# --- whole pairs in whole passes -----------------------------------------------------------------------------------------


def test_rows_that_are_no_whole_pairs_are_refused() -> None:
    engine = make_engine(built("llama"), LOSSES["dpo"])
    for lengths in ([(9,), (4,)], [(9, 4, 5), (3,)], [(9,)]):
        one = lay_out(tm.units(lengths), engine.packing, 0)
        with pytest.raises(Refused, match="not whole preference pairs"), engine._attention.of(one):
            engine.losses(one)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_self_check_of_pairs_passes(name: str) -> None:
    for tokens in (tm.ALONE, tm.TOKENS, 512):
        assert make_engine(built(name), LOSSES["dpo"], tokens=tokens).self_check(tm.VOCABULARY).error < 1e-4


@pytest.mark.parametrize("longest", [2, 8, 15])
def test_small_passes_of_pairs_are_checked_too(longest: int) -> None:
    engine = make_engine(built("llama"), LOSSES["dpo"])
    engine.repack(replace(engine.packing, tokens=32, max_length=longest))
    engine.self_check(tm.VOCABULARY)


def test_it_sees_a_kernel_that_rounds_by_company() -> None:
    """A pair alone in its pass has no company but itself."""

    def by_company(_module: Any, _inputs: Any, output_1Md: Tensor) -> Tensor:
        return output_1Md + 3e-6 * output_1Md.detach().mean()

    net = tm.build("llama")
    net.base_model.model.model.layers[0].mlp.register_forward_hook(by_company)
    with pytest.raises(NotBatchInvariant, match=r"rounds a row differently"):
        make_engine(net, LOSSES["dpo"]).self_check(tm.VOCABULARY)
    make_engine(net, LOSSES["dpo"], tokens=tm.ALONE).self_check(tm.VOCABULARY)


# --- mutants ---------------------------------------------------------------------------------------------------------------


def less_the_mean_of_the_pass(margins: Any, self: PairLoss, nll_R: Tensor, reference_R: Tensor) -> Tensor:
    margin_P = margins(self, nll_R, reference_R)
    return margin_P - margin_P.mean()


def weights(change: Callable[[PairLoss], tuple[float, float]]) -> Change:
    return lambda patch: patch.setattr(PairLoss, "weights", property(change))


WEIGHTS: Any = vars(PairLoss)["weights"].fget
CHECKS: dict[str, tuple[Change, Callable[[], None]]] = {
    # So that a pair moves the sum by up to 2 C.
    "answers clipped each": (around(PerUnitClipper, "add", rows_clipped_each), lambda: bounded(LOSSES["dpo"])),
    "a mean over the batch": (
        around(PairLoss, "__call__", lambda call, self, nll_M, some: call(self, nll_M, some) / (len(some.rows) // 2)),
        lambda: exact("llama", LOSSES["dpo"], (512,)),
    ),
    "margins less their mean": (
        around(PairLoss, "margins", less_the_mean_of_the_pass),
        lambda: test_a_sum_is_the_sum_of_what_each_unit_adds_by_itself("llama", contextlib.nullcontext),
    ),
    "no debiasing": (weights(lambda self: (1.0, 0.0)), lambda: exact("llama", LOSSES["debiased dpo"], (512,))),
    "another epsilon": (
        weights(lambda self: WEIGHTS(replace(self, flip=self.flip / 2))),
        lambda: exact("llama", LOSSES["debiased dpo"], (512,)),
    ),
    "no reference": (
        around(PairLoss, "margins", lambda margins, self, nll_R, reference_R: margins(self, nll_R, 0 * reference_R)),
        lambda: exact("llama", LOSSES["dpo"], (512,)),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_broken_loss_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unbroken, each check is one of the tests above."""
    change, check = CHECKS[name]
    change(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("objective", ["dpo", "ipo"])
def test_the_debiased_loss_is_the_loss_of_the_true_label_on_average(objective: Any) -> None:
    """Over the coin of the label, whose margin a flip negates; conservative DPO is not unbiased, and bounded below."""
    margin_P = torch.linspace(-4, 4, 9, dtype=torch.float64)
    for flip in (0.05, 0.12, 0.38):
        noisy, plain = PairLoss(objective, 0.2, flip), PairLoss(objective, 0.2)
        own, swapped = noisy.weights
        kept_P, flipped_P = (own * noisy._loss(h) + swapped * noisy._loss(-h) for h in (margin_P, -margin_P))
        torch.testing.assert_close((1 - flip) * kept_P + flip * flipped_P, plain._loss(margin_P))
    own, swapped = PairLoss("cdpo", 0.2, 0.12).weights
    assert own + swapped == 1
    assert PairLoss("dpo", 0.2, 0.0).weights == (1, 0)
