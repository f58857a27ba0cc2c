"""Losses without logits leave the model as it was, and are refused where its head is more than a product."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import checks
import pytest
import tiny
import tiny_models as tm
import torch
from cases import Shapes, lora
from heads import VOCABULARY, Headed, gradients, losses, plain, ragged
from peft import PromptTuningConfig, get_peft_model
from tiny_models import LORA
from torch import Tensor

from dpllm.errors import Refused
from dpllm.privacy import loss as losses_module
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.loss import TokenLosses


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
        scorer = TokenLosses(tuned, tm.CPU)
        with pytest.raises(Refused, match="without virtual tokens"):
            scorer(ragged(tm.ALONE))


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

    def wrong(logits_nV: Tensor, target_n: Tensor) -> Any:
        return right(logits_nV.mul_(1.01), target_n)

    right = losses_module.log_likelihood_
    net = tm.build("llama", LORA)
    assert TokenLosses(net, tm.CPU).head is not None
    monkeypatch.setattr(losses_module, "log_likelihood_", wrong)
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
