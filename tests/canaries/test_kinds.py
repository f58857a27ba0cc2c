"""Kinds of canaries: each draws texts that training reads back whole, alike for candidates and references."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import compress
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_program
from pydantic import ValidationError
from scipy import stats

from dpllm.canaries import canaries, texts
from dpllm.canaries.canaries import plan_canaries, redraw_coins
from dpllm.canaries.texts import ModelSource, encode_secret
from dpllm.errors import ConfigError
from dpllm.model import loading
from dpllm.recipe.sections import CanaryConfig
from dpllm.text.tokens import encode

KINDS = ("digits", "random_tokens", "new_tokens")
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def recipe(**data):
    adapter = {"method": "lora", "modules_to_save": ["lm_head"]}
    data = {"format": "text", "max_length": 64, **data}
    return tiny_models.recipe(model={"name_or_path": "builtin:tiny"}, adapter=adapter, data=data)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return loading.load_tokenizer(recipe().model)


def source_of(tokenizer, **data):
    return ModelSource(recipe(**data), tokenizer, torch.device("cpu"))


@pytest.fixture(scope="module")
def source(tokenizer):
    return source_of(tokenizer)


def everyone(plan):
    return [*plan.canaries, *plan.references]


def config(kind, once=60, references=100, **more):
    return CanaryConfig(kind=kind, groups={1: once, 3: 4}, references=references, **more)


def encoded(canary, tokenizer, fmt="text"):
    sequence, mask = encode_secret(canary, fmt, tokenizer, tiny.reads(64, "refuse"))
    return list(compress(sequence.input_ids, mask))


ROWS = [*itertools.product(("text", "prompt_completion"), KINDS), ("messages", "random_tokens")]


@pytest.mark.parametrize(("fmt", "kind"), ROWS)
def test_every_secret_is_learned_whole_and_stands_nowhere_else(fmt, kind, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT.replace("m['content']", "m['content'] | trim"))
    model = source_of(tokenizer, format=fmt)
    plan = plan_canaries(config(kind), source=model, generator=random.Random(3))
    assert plan.kind == kind
    for attribute in ("carrier", "secret", "canary_id"):
        assert len({getattr(canary, attribute) for canary in everyone(plan)}) == 164
    sentences = "\n".join(canary.carrier for canary in everyone(plan))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for canary in everyone(plan):
        assert canary.secret not in sentences
        ids = encoded(canary, tokenizer, fmt)
        assert tokenizer.decode(ids).strip() == canary.secret
        assert not special & set(ids)
        assert len(ids) == {"random_tokens": 6, "new_tokens": 1}.get(kind, len(ids))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.integers(3, 12), st.integers(0, 2**32))
def test_secrets_have_the_length_that_the_recipe_says(source, tokenizer, tokens, entropy):
    settings = config("random_tokens", once=5, tokens=tokens)
    plan = plan_canaries(settings, source=source, generator=random.Random(entropy))
    assert {len(encoded(canary, tokenizer)) for canary in everyone(plan)} == {tokens}
    assert plan.settings["tokens"] == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_follows_from_its_entropy_and_from_nothing_else(kind, source):
    settings = config(kind, once=10, tokens=3)
    first, same, other = (plan_canaries(settings, source=source, generator=random.Random(key)) for key in (5, 5, 6))
    assert first == same
    assert first.commitment != other.commitment
    assert not {canary.carrier for canary in first.canaries} & {canary.carrier for canary in other.canaries}


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_like_references_and_coins_like_nothing(kind, source, tokenizer, seed):
    """Kolmogorov-Smirnov on what a text shows, 3 kinds by 4 features by 2 questions: 24 tests."""
    sizes = {"once": 60, "references": 100} if kind == "new_tokens" else {"once": 150, "references": 150, "tokens": 4}
    plan = plan_canaries(config(kind, **sizes), source=source, generator=random.Random(seed))
    shown = [
        (len(canary.carrier), len(canary.secret), canary.secret, sum(encoded(canary, tokenizer)))
        for canary in everyone(plan)
    ]
    coins = np.array([canary.inserted for canary in plan.canaries])
    for values in zip(*shown, strict=True):
        rank_of = {value: rank for rank, value in enumerate(sorted(set(values)))}
        ranks = np.array([rank_of[value] for value in values])
        candidates, references = ranks[: len(coins)], ranks[len(coins) :]
        assert stats.ks_2samp(candidates, references).pvalue > 1e-8 / 24
        assert stats.ks_2samp(candidates[coins], candidates[~coins]).pvalue > 1e-8 / 24


def test_the_order_in_which_texts_are_found_says_nothing_of_who_gets_them(monkeypatch, seed):
    texts_drawn = [(f"carrier {number:05d}", f"secret {number:05d}") for number in range(4000)], 12.0
    monkeypatch.setattr(canaries, "draw", lambda *arguments: texts_drawn)
    settings = CanaryConfig(groups={1: 1500, 2: 500}, references=2000)
    plan = plan_canaries(settings, generator=random.Random(seed))
    ranks = np.array([int(canary.carrier[-5:]) for canary in everyone(plan)])
    assert sorted(ranks) == list(range(4000))
    for part in (ranks[:1500], ranks[1500:2000], ranks[2000:], ranks[::2]):
        assert stats.kstest(part / 4000, "uniform").pvalue > 1e-8 / 5
    coins = np.array([canary.inserted for canary in plan.canaries])
    assert stats.ks_2samp(ranks[:2000][coins], ranks[:2000][~coins]).pvalue > 1e-8 / 5


def test_random_tokens_are_uniform_over_what_can_be_drawn(seed):
    """With a tokenizer that reads everything back: one letter for each token, the first of its own pool."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    honest = SimpleNamespace(
        first_ids=list(range(13)),
        ordinary_ids=list(range(26)),
        text=lambda ids: "".join(letters[token] for token in ids).upper(),
        reads=lambda *arguments: True,
        check_room=lambda *arguments: None,
    )
    drawn, log2_secrets = canaries.draw(CanaryConfig(kind="random_tokens", tokens=5), 6000, random.Random(seed), honest)
    for position in range(5):
        counts = Counter(secret[position] for _, secret in drawn)
        assert set(counts) == set(letters[: 26 if position else 13].upper())
        assert stats.chisquare(list(counts.values())).pvalue > 1e-8 / 5
    assert log2_secrets == pytest.approx(math.log2(13) + 4 * math.log2(26))


def mean_log_probs(tokenizer, sentences):
    net = loading.load_base(recipe().model, torch.device("cpu")).eval()
    with torch.inference_mode():
        rows = [net(torch.tensor([tokenizer(sentence)["input_ids"]])).logits[0, -1] for sentence in sentences]
    return torch.stack(rows).double().log_softmax(dim=-1).mean(dim=0).numpy()


def test_what_the_base_model_expects_is_what_one_pass_after_the_other_gives(source, tokenizer):
    sentences = [texts.carrier(index) for index in (0, 12_345, 777_777, 1_234_567)]
    np.testing.assert_allclose(source.expected(sentences), mean_log_probs(tokenizer, sentences), rtol=1e-4)


def test_new_tokens_are_one_for_each_canary_and_rarely_expected(source, tokenizer):
    plan = plan_canaries(config("new_tokens", once=10), source=source, generator=random.Random(9))
    used = [encoded(canary, tokenizer)[0] for canary in everyone(plan)]
    assert len(set(used)) == 114 <= 2**plan.log2_secrets <= 228
    indices = random.Random(0).sample(range(texts.NUM_CARRIERS), canaries.PROBED_CARRIERS)
    expected = mean_log_probs(tokenizer, [texts.carrier(index) for index in indices])
    assert expected[used].mean() < expected[source.first_ids].mean()


def test_kinds_of_the_base_model_need_one():
    for kind in set(KINDS) - {"digits"}:
        with pytest.raises(ConfigError, match="no model was given"):
            plan_canaries(config(kind))
    assert plan_canaries(config("digits")).kind == "digits"
    assert set(KINDS) == canaries.KEYS.keys()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"kind": "random_tokens", "tokens": 1, "groups": {1: 900}, "references": 100}, r"audit\.canaries\.tokens"),
        ({"kind": "new_tokens"}, r"2040 canaries and references need .* the vocabulary has"),  # a thousand tokens
        ({"groups": {1: 9_950}, "digits": 4, "references": 100}, r"raise audit\.canaries\.digits"),
        ({"groups": {1: 9_000_000_000}}, "distinct sentences"),
    ],
)
def test_more_canaries_than_texts_are_refused(settings, advice, source, monkeypatch):
    monkeypatch.setattr(canaries, "TRIES", 3)
    config = CanaryConfig(**settings)
    with pytest.raises(ConfigError, match=advice):
        canaries.draw(config, sum(config.groups.values()) + config.references, random.Random(0), source)


def test_room_for_a_secret_is_judged_as_training_would_cut_it(tokenizer):
    generator = random.Random(21)
    for length in (26, 28, 30):
        model = source_of(tokenizer, max_length=length)
        token = next(token for token in model.first_ids if model.text((token,)) == "N")
        outcomes = set()
        for _ in range(60):
            sentence = texts.carrier(generator.randrange(texts.NUM_CARRIERS))
            fits = len(tokenizer(f"{sentence} N")["input_ids"]) <= length
            outcomes.add(fits)
            assert model.reads(sentence, "N", (token,)) == fits
            with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"raise data\.max_length"):
                model.check_room([sentence], 1)
        assert outcomes == {True, False}


def test_what_is_not_read_back_is_refused_and_quotes_nothing(tokenizer, source, monkeypatch):
    short = source_of(tokenizer, max_length=28)
    for kind in ("random_tokens", "new_tokens"):
        with pytest.raises(ConfigError, match=r"raise data\.max_length") as caught:
            plan_canaries(config(kind), source=short, generator=random.Random(13))
        assert not any(word in str(caught.value) for word in ("store", "number for", "reads", "remains"))
    unread = source_of(tokenizer)
    monkeypatch.setattr(unread, "reads", lambda *arguments: False)
    with pytest.raises(ConfigError, match=r"use audit\.canaries\.kind digits"):
        plan_canaries(config("random_tokens"), source=unread, generator=random.Random(13))
    monkeypatch.setattr(unread, "check_room", lambda *arguments: None)
    empty = SimpleNamespace(first_ids=[], ordinary_ids=[1], check_room=unread.check_room)
    for unusable in (empty, unread):
        with pytest.raises(ConfigError, match="use kind digits"):
            plan_canaries(config("random_tokens"), source=unusable, generator=random.Random(13))


def test_new_coins_keep_the_texts_and_forget_the_old_coins(source, seed):
    generator = random.Random(seed)
    plan = plan_canaries(CanaryConfig(groups={1: 5_000}, references=100), generator=generator)
    redrawn = redraw_coins(plan, generator=generator)
    without_coins = [[replace(canary, inserted=False) for canary in everyone(drawn)] for drawn in (plan, redrawn)]
    assert without_coins[0] == without_coins[1]
    assert (redrawn.kind, redrawn.settings, redrawn.log2_secrets) == (plan.kind, plan.settings, plan.log2_secrets)
    assert redrawn.salt != plan.salt
    assert redrawn.commitment != plan.commitment
    coins = [np.array([canary.inserted for canary in drawn.canaries]) for drawn in (plan, redrawn)]
    for part in (coins[1], coins[0] ^ coins[1]):
        assert stats.binomtest(int(part.sum()), 5_000, 0.5).pvalue > 1e-8 / 2
    assert redraw_coins(plan).commitment != redraw_coins(plan).commitment
    assert not any(canary.inserted for canary in redrawn.references)


def test_neither_planning_without_a_model_nor_statistics_import_torch():
    code = (
        "import sys, dpllm.auditing.summary; from dpllm.canaries.canaries import plan_canaries, CanaryConfig; "
        "plan_canaries(CanaryConfig(groups={1: 5}, references=100)); print({'torch', 'transformers'} & {*sys.modules})"
    )
    assert run_program("-c", code) == "set()\n"


# Secrets in prompts.


@pytest.mark.parametrize("fmt", ["prompt_completion", "messages"])
def test_a_secret_in_a_prompt_is_read_and_never_learned(fmt, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    plan = plan_canaries(config("digits", place="prompt"), generator=random.Random(3))
    assert plan.settings["place"] == "prompt"
    for canary in everyone(plan):
        (trained,) = encode(canary.example(fmt), fmt, tokenizer, tiny.reads(64, "refuse"))
        scored, mask = encode_secret(canary, fmt, tokenizer, tiny.reads(64, "refuse"))
        assert scored.input_ids == trained.input_ids  # the row that trains
        assert scored.loss_mask == mask
        learned, secret = (list(compress(trained.input_ids, chosen)) for chosen in (trained.loss_mask, mask))
        assert tokenizer.decode(secret).strip() == canary.secret
        assert tokenizer.decode(learned, skip_special_tokens=True).strip() == texts.COMPLETION
        assert trained.loss_mask.index(True) > len(mask) - 1 - mask[::-1].index(True)  # all of it behind the secret


@pytest.mark.parametrize("kind", ["random_tokens", "new_tokens"])
def test_only_digits_stand_in_prompts(kind):
    with pytest.raises(ValidationError, match="kind: digits"):
        config(kind, place="prompt")


def test_rows_without_prompts_hold_no_secret_in_them():
    for fmt, answers in (("preference", 2), ("text", 1)):
        with pytest.raises(ConfigError, match=f"format {fmt}"):
            plan_canaries(config("digits", place="prompt"), answers=answers).canaries[0].example(fmt)
