"""What a model writes and its held-out loss follow from rows and arguments alone: not from batches, nor from its defaults."""

import contextlib
import math
import random

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dpllm.auditing.scores import score
from dpllm.model import reading
from dpllm.model.evaluate import held_out_loss
from dpllm.model.reading import Reader
from dpllm.privacy.schedule import TokenSequence
from dpllm.text import builtin

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(builtin.path("builtin:tiny")))


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(str(builtin.path("builtin:tiny"))).eval()


def complete(model, tokenizer, prompts, num_tokens, beams=1, *, ends=False):
    ending = {tokenizer.eos_token_id} if ends else ()
    return reading.write_behind(model, reading.generation_config(tokenizer, num_tokens, ending, beams=beams), prompts)


def random_prompts(count, seed=0, longest=30):
    generator = random.Random(seed)
    return [tuple(generator.randrange(3, 1024) for _ in range(generator.randint(1, longest))) for _ in range(count)]


def test_greedy_completions_are_the_arg_max_of_the_token_table(base, tokenizer):
    """Of many prompts of unequal lengths: each completion is all arg max, and a changed token is not."""
    prompts = random_prompts(120)
    result = complete(base, tokenizer, prompts, 7)
    generator = random.Random(1)
    changed = []
    for written in result:
        place = generator.randrange(7)
        changed.append((*written[:place], (written[place] + 1) % 1024, *written[place + 1 :]))
    for texts, right in ((result, True), (changed, False)):
        sequences = [TokenSequence((*p, *t), (False,) * (len(p) + 7), 7) for p, t in zip(prompts, texts, strict=True)]
        masks = [(*[False] * len(prompt), *[True] * 7) for prompt in prompts]
        matches = [bool(item.argmax.all()) for item in score(base, sequences, masks, 2048)]
        assert matches == [right] * 120


def test_an_end_token_and_the_defaults_of_a_model_change_nothing(tokenizer):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)).eval()
    prompts = [tuple(token % 50 for token in prompt) for prompt in random_prompts(10, longest=9)]
    result = complete(model, tokenizer, prompts, 6)
    for prompt, written in zip(prompts, result, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tuple(ids[len(prompt) :]) == written
    model.generation_config.update(
        eos_token_id=result[0][0], repetition_penalty=9.0, do_sample=True, temperature=7.0, no_repeat_ngram_size=1
    )
    own = model.generation_config
    assert complete(model, tokenizer, prompts, 6) == result
    assert model.generation_config is own


def test_a_beam_search_is_as_good_as_it_can_be(tokenizer):
    """Two tokens with as many beams as there are first tokens: the search is exhaustive."""
    torch.manual_seed(0)
    small = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    for parameter in small.parameters():
        if parameter.dim() > 1:
            parameter.data *= 6
    prompts = [tuple(token % 12 for token in prompt) for prompt in random_prompts(20, longest=6)]
    for prompt, written in zip(prompts, complete(small, tokenizer, prompts, 2, beams=12), strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, first] for first in range(12)])
            log_p = torch.log_softmax(small(ids).logits, dim=-1)
        best = (log_p[:, len(prompt) - 1].gather(1, ids[:, -1:]) + log_p[:, -1]).flatten().argmax().item()
        assert written == divmod(best, 12)


def test_completions_do_not_depend_on_batches(base, tokenizer, monkeypatch):
    prompts = random_prompts(12)
    together = [complete(base, tokenizer, prompts, 5, beams) for beams in (1, 4)]
    monkeypatch.setattr(reading, "_TOKENS_PER_BATCH", 1)
    assert [complete(base, tokenizer, prompts, 5, beams) for beams in (1, 4)] == together
    assert complete(base, tokenizer, [], 5) == []


@pytest.mark.parametrize("beams", [1, 5])
def test_an_end_token_ends_a_text_where_asked_and_nobody_elses(base, beams):
    tokenizer = AutoTokenizer.from_pretrained(str(builtin.path("builtin:tiny")))
    prompts = random_prompts(12, seed=3)
    plain = complete(base, tokenizer, prompts, 8, beams)
    often = max((token for text in plain for token in text), key=[token for text in plain for token in text].count)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(often)
    assert complete(base, tokenizer, prompts, 8, beams) == plain
    written = complete(base, tokenizer, prompts, 8, beams, ends=True)
    together = [reading.until_end(text, tokenizer) for text in written]
    behind = {token for text, kept in zip(written, together, strict=True) for token in text[len(kept) + 1 :]}
    assert behind == {tokenizer.pad_token_id}
    one = [complete(base, tokenizer, [prompt], 8, beams, ends=True)[0] for prompt in prompts]
    assert together == [reading.until_end(text, tokenizer) for text in one]
    assert len({len(text) for text in together}) > 1
    if beams == 1:
        assert together == [reading.until_end(text, tokenizer) for text in plain]


def sequences() -> list[TokenSequence]:
    tokenizer = tiny.tokenizer()
    made = []
    for number in range(9):
        ids = tokenizer(tiny.sentence(number) * (1 + number % 3))["input_ids"]
        mask = [place > 0 and place % (1 + number % 2) == 0 for place in range(len(ids))]
        made.append(TokenSequence(tuple(ids), tuple(mask), sum(mask)))
    return made


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_loss_and_accuracy_are_those_of_one_example_at_a_time(batch_size: int) -> None:
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
