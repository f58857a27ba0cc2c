"""Held-out loss and accuracy, against one example at a time."""

import contextlib
import math

import pytest
import tiny
import torch

from dpllm.model import reading
from dpllm.model.evaluate import held_out_loss
from dpllm.model.reading import Reader
from dpllm.privacy.schedule import TokenSequence


def sequences() -> list[TokenSequence]:
    tokenizer = tiny.tokenizer()
    made = []
    for number in range(9):
        ids = tokenizer(tiny.sentence(number) * (1 + number % 3))["input_ids"]
        mask = [place > 0 and place % (1 + number % 2) == 0 for place in range(len(ids))]
        made.append(TokenSequence(tuple(ids), tuple(mask), sum(mask)))
    return made


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_loss_and_accuracy_are_those_of_one_example_at_a_time(batch_size: int, one_thread: None) -> None:
    model = tiny.model().train()
    with torch.no_grad():  # or every token is as likely as another, and nothing is ever right
        model.lm_head.weight.mul_(5)
    result = held_out_loss(model, sequences(), batch_size, torch.device("cpu"), contextlib.nullcontext)
    assert model.training
    nats, hits, tokens = 0.0, 0, 0
    model.eval()
    for sequence in sequences():
        with torch.no_grad():
            logits_TV = model(torch.tensor([sequence.input_ids])).logits[0]
        for place, target in enumerate(sequence.loss_mask):
            if target:
                row_V, right = logits_TV[place - 1], sequence.input_ids[place]
                nats -= float(torch.log_softmax(row_V, -1)[right])
                hits += int(row_V.argmax()) == right
                tokens += 1
    assert result.tokens == tokens
    assert result.accuracy == hits / tokens
    assert math.isclose(result.loss, nats / tokens, rel_tol=1e-5)


@pytest.mark.parametrize("way", ["write", "read"])
def test_the_head_reads_no_slice_of_a_batch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which torch's product on a CPU copies the weights for each row: an audit of SmolLM2-135M took 20 GB."""
    model, seen = tiny.model().eval(), []
    head = model.lm_head
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda hidden: seen.append(hidden.is_contiguous()) or forward(hidden))
    if way == "write":
        reading.write_behind(model, reading.generation_config(tiny.tokenizer(), 2, ()), [[5, 6, 7], [8, 9]])
        assert not head._forward_pre_hooks  # or a later run would take the head for a watched one
    else:
        Reader(model, 4, [0], 2).read([[5, 6, 7], [8, 9]])
    assert seen
    assert all(seen)
