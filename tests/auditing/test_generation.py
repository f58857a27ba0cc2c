"""Attacks by generation: they find what was planted, and their controls find nothing; no text comes out."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dpllm.auditing import generation
from dpllm.auditing.generation import complete, generate_attacks
from dpllm.auditing.scores import score
from dpllm.canaries.canaries import Canary, encode_secret, plan_canaries
from dpllm.recipe.audit import CanaryConfig
from dpllm.text import builtin
from dpllm.text.data import TokenSequence

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LENGTH = 128


class Pair:
    """A tuned model and its base as ``dpllm.model.loading.load_for_scoring`` gives them: the adapter on and off."""

    def __init__(self, tokenizer, tuned):
        self.tokenizer, self.tuned = tokenizer, tuned

    @contextlib.contextmanager
    def base(self):
        with self.tuned.disable_adapter():
            yield self.tuned


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(builtin.path("builtin:tiny")))


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(str(builtin.path("builtin:tiny"))).eval()


@pytest.fixture(scope="module")
def plan():
    return plan_canaries(CanaryConfig(groups={1: 8, 16: 12}, references=100), generator=random.Random(1))


@pytest.fixture(scope="module")
def models(tokenizer, plan):
    """An adapter that has learned the inserted canaries of group 16 by heart, and saw none of group 1."""
    torch.set_num_threads(1)
    return Pair(tokenizer, memorise([one for one in plan.canaries if one.inserted and one.group == 16], tokenizer))


def memorise(canaries, tokenizer, steps=60):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(str(builtin.path("builtin:tiny"))), config)
    rows = [encode_secret(one, "text", tokenizer, tiny.reads(MAX_LENGTH, "refuse"))[0].input_ids for one in canaries]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[2] * (width - len(row))] for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        model(input_ids=ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def random_prompts(count, seed=0, longest=30):
    generator = random.Random(seed)
    return [tuple(generator.randrange(3, 1024) for _ in range(generator.randint(1, longest))) for _ in range(count)]


# Decoding.


def test_greedy_completions_are_the_arg_max_of_the_token_table(base, tokenizer):
    """Of many prompts of unequal lengths: each completion is all arg max, and a changed token is not."""
    prompts = random_prompts(120)
    found = complete(base, tokenizer, prompts, 7)
    generator = random.Random(1)
    changed = []
    for written in found:
        place = generator.randrange(7)
        changed.append((*written[:place], (written[place] + 1) % 1024, *written[place + 1 :]))
    for texts, right in ((found, True), (changed, False)):
        sequences = [TokenSequence((*p, *t), (False,) * (len(p) + 7), 7) for p, t in zip(prompts, texts, strict=True)]
        masks = [(*[False] * len(prompt), *[True] * 7) for prompt in prompts]
        matches = [bool(one.is_argmax.all()) for one in score(base, sequences, masks, 2048)]
        assert matches == [right] * 120


def test_an_end_token_and_the_defaults_of_a_model_change_nothing(tokenizer):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)).eval()
    prompts = [tuple(token % 50 for token in prompt) for prompt in random_prompts(10, longest=9)]
    found = complete(model, tokenizer, prompts, 6)
    for prompt, written in zip(prompts, found, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tuple(ids[len(prompt) :]) == written
    model.generation_config.update(
        eos_token_id=found[0][0], repetition_penalty=9.0, do_sample=True, temperature=7.0, no_repeat_ngram_size=1
    )
    own = model.generation_config
    assert complete(model, tokenizer, prompts, 6) == found
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


def test_reading_prompts_once_for_all_beams_changes_no_completion(base, tokenizer, monkeypatch):
    prompts = random_prompts(12)
    once = complete(base, tokenizer, prompts, 5, beams=4)
    monkeypatch.setattr(generation, "_read_once", lambda *_: {})
    assert complete(base, tokenizer, prompts, 5, beams=4) == once


def test_completions_do_not_depend_on_batches(base, tokenizer, monkeypatch):
    prompts = random_prompts(12)
    together = [complete(base, tokenizer, prompts, 5, beams) for beams in (1, 4)]
    monkeypatch.setattr(generation, "_TOKENS_PER_BATCH", 1)
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
    together = [generation.until_end(text, tokenizer) for text in written]
    behind = {token for text, kept in zip(written, together, strict=True) for token in text[len(kept) + 1 :]}
    assert behind == {tokenizer.pad_token_id}
    one = [complete(base, tokenizer, [prompt], 8, beams, ends=True)[0] for prompt in prompts]
    assert together == [generation.until_end(text, tokenizer) for text in one]
    assert len({len(text) for text in together}) > 1
    if beams == 1:
        assert together == [generation.until_end(text, tokenizer) for text in plain]


# The whole.


def case_of(one, tokenizer):
    return generation._case(one, "text", tokenizer, tiny.reads(MAX_LENGTH))


def found_by(models, plan, **options):
    return generate_attacks(models, plan, "text", tiny.reads(MAX_LENGTH, "truncate"), **options)


@pytest.fixture(scope="module")
def report(models, plan):
    return found_by(models, plan)


def test_what_was_learned_by_heart_comes_out_and_the_controls_do_not(report, plan):
    inserted = sum(one.inserted for one in plan.canaries if one.group == 16)
    learned = report["completion"]["16"]["greedy"]
    assert learned["inserted"]["prompts"] == inserted
    assert learned["inserted"]["exact"] >= inserted - 2
    assert learned["inserted"]["mean_common_share"] > 0.8
    others = [learned["base"], learned["held_out"], *report["completion"]["1"]["greedy"].values()]
    assert [other["exact"] + other["near_tokens"] + other["near_characters"] for other in others] == [0] * 5
    assert max(other["mean_common_share"] for other in others) < 0.4


def test_a_report_is_json_repeats_itself_and_holds_no_text(models, plan, report, tokenizer):
    written = json.dumps(report, allow_nan=False)
    assert json.loads(written) == report
    assert found_by(models, plan) == report
    for one in (*plan.canaries, *plan.references):
        assert one.secret not in written
        assert one.carrier not in written
    case = case_of(plan.canaries[0], tokenizer)
    assert plan.canaries[0].secret not in repr(case)


def test_coins_decide_who_is_counted_where_and_nothing_else(models, plan, tokenizer):
    """With every coin turned round, each canary keeps its prompt and its answers."""
    turned = replace(plan, canaries=tuple(replace(one, inserted=not one.inserted) for one in plan.canaries))
    for one, other in zip(plan.canaries, turned.canaries, strict=True):
        first, second = (case_of(c, tokenizer) for c in (one, other))
        assert (first.prompt, first.target) == (second.prompt, second.target)
    report = found_by(models, turned, prompts=3)
    found = report["completion"]["16"]["greedy"]
    assert found["held_out"]["exact"] > 0
    assert found["inserted"]["exact"] == 0


def test_other_formats_and_tight_lengths_are_no_matter(models, plan, tokenizer):
    fitting = max(
        len(encode_secret(one, "prompt_completion", tokenizer, tiny.reads(MAX_LENGTH, "refuse"))[0].input_ids)
        for one in (*plan.canaries, *plan.references)
    )
    report = generate_attacks(models, plan, "prompt_completion", tiny.reads(fitting, "truncate"), prompts=2)
    assert report["completion"]["1"]["greedy"]["inserted"]["prompts"] == 2


def test_canaries_are_chosen_by_id(plan):
    shuffled = random.Random(0).sample(plan.canaries, len(plan.canaries))
    chosen = generation._chosen(shuffled, 3, inserted=True)
    for group in (1, 16):
        ids = sorted(one.canary_id for one in plan.canaries if one.inserted and one.group == group)
        assert [one.canary_id for one in chosen if one.group == group] == ids[:3]


def test_a_secret_that_the_prompt_holds_is_left_out(tokenizer):
    repeated = Canary("c00000", 1, "The code 12345678 of the store is", "12345678", inserted=True)
    case = case_of(repeated, tokenizer)
    found = generation._compare([case], [case.target], [0], tokenizer)
    assert (found["prompts"], found["in_prompt"], found["exact"]) == (0, 1, 0)
    plain = Canary("c00000", 1, "The code of the store is", "12345678", inserted=True)
    case = case_of(plain, tokenizer)
    assert generation._compare([case], [case.target], [0], tokenizer)["exact"] == 1


def test_a_group_without_inserted_canaries_is_reported_empty(models, plan):
    none_in = replace(plan, canaries=tuple(replace(one, inserted=False) for one in plan.canaries if one.group == 1))
    report = found_by(models, none_in, prompts=2)
    assert report["completion"]["1"]["greedy"]["inserted"]["prompts"] == 0
    json.dumps(report, allow_nan=False)
