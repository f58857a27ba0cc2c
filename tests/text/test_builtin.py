"""What the embedded model and data promise: sizes, reproducibility, and nothing in common."""

import json
import math
import re
import sys
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpllm.errors import ConfigError
from dpllm.recipe import names
from dpllm.text import builtin

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the builders are scripts, not part of the package

PUBLIC_SAMPLE = 20_000  # documents; about 40,000 sentences


@cache
def notes(split: str) -> list[dict[str, str]]:
    name = "builtin:clinic" if split == "train" else f"builtin:clinic/{split}"
    return [json.loads(line) for line in builtin.path(name).read_text("ascii").splitlines()]


@cache
def clinic_texts() -> list[str]:
    return [note["text"] for split in ("train", "eval") for note in notes(split)]


@cache
def public_texts() -> list[str]:
    from _public_text import documents

    return list(islice(documents(seed=99), PUBLIC_SAMPLE))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin.path("builtin:tiny"), local_files_only=True)


@cache
def model() -> Any:
    path = builtin.path("builtin:tiny")
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()


def real_names() -> set[str]:
    """All the names that Faker could have put into the clinic notes."""
    pytest.importorskip("faker")
    from build_builtin_data import WORDS_NOT_NAMES
    from faker.providers.person.en_US import Provider

    lists = (Provider.first_names_male, Provider.first_names_female, Provider.last_names)
    return {name for names in lists for name in names} - WORDS_NOT_NAMES


def word_runs(texts: Iterable[str], length: int) -> set[tuple[str, ...]]:
    split = (re.findall(r"\w+", text.lower()) for text in texts)
    return {tuple(words[i : i + length]) for words in split for i in range(len(words) - length + 1)}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    pairs = {"builtin:clinic/pairs", "builtin:clinic/pairs_eval"}
    assert set(builtin.NAMES) == {"builtin:tiny", "builtin:clinic", "builtin:clinic/eval"} | pairs
    with pytest.raises(ConfigError, match=r"builtin:clinik.*builtin:tiny, builtin:clinic"):
        builtin.path("builtin:clinik")
    assert names.is_builtin("builtin:nothing")
    assert not names.is_builtin("data/builtin:tiny.jsonl")


def test_the_clinic_has_enough_notes_and_patients_and_none_twice() -> None:
    train, held_out = notes("train"), notes("eval")
    people = [{note["patient_id"] for note in split} for split in (train, held_out)]
    assert len(train) >= 3000
    assert len(people[0]) >= 600
    assert 350 <= len(held_out) <= 450
    assert len(people[1]) == 80
    assert not people[0] & people[1]
    assert len(set(clinic_texts())) == len(train + held_out)
    for note in train + held_out:
        assert set(note) == {"text", "patient_id", "visit"}
        assert re.fullmatch(r"P\d{4}", note["patient_id"])


def test_each_patient_has_a_record_number_that_nobody_shares_and_a_fictitious_telephone() -> None:
    """555-01XX are the telephone numbers that are reserved for fiction."""
    everything = notes("train") + notes("eval")
    pairs = {(mrn, note["patient_id"]) for note in everything for mrn in re.findall(r"MRN (\d+)", note["text"])}
    assert len(pairs) == len({number for number, _ in pairs}) == len({patient for _, patient in pairs}) > 200
    phones = [phone for text in clinic_texts() for phone in re.findall(r"\d+-\d+-\d+", text)]
    assert len(phones) > 500
    assert all(re.fullmatch(r"[1-9]\d\d-555-01\d\d", phone) for phone in phones)


def test_the_script_writes_the_same_bytes() -> None:
    faker = pytest.importorskip("faker")
    import build_builtin_data as builder

    if faker.VERSION != builder.FAKER_VERSION:
        pytest.skip(f"Faker {faker.VERSION} has other name lists than {builder.FAKER_VERSION}")
    for stem, lines in builder.files().items():
        name = "builtin:clinic" if stem == "train" else f"builtin:clinic/{stem}"
        assert builtin.path(name).read_bytes() == ("\n".join(lines) + "\n").encode()


def test_the_model_is_a_small_float32_llama() -> None:
    weights = builtin.path("builtin:tiny") / "model.safetensors"
    assert weights.stat().st_size <= 4_000_000
    assert model().config.model_type == "llama"
    assert {parameter.dtype for parameter in model().parameters()} == {torch.float32}
    assert 450_000 <= sum(parameter.numel() for parameter in model().parameters()) <= 800_000
    assert model().config.vocab_size == len(tokenizer())


def test_the_model_reaches_the_loss_that_its_card_states() -> None:
    from build_builtin_model import held_out_loss

    card = (builtin.path("builtin:tiny") / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"held-out loss \| (\d+\.\d+) nats per token", card)
    assert stated
    assert abs(held_out_loss(model(), tokenizer()) - float(stated[1])) < 0.02


def test_no_digit_is_much_likelier_than_another() -> None:
    rng = Random(3)
    codes = ["".join(rng.choices("0123456789", k=8)) for _ in range(256)]
    texts = [f"The key of the old chest is {code}" for code in codes]
    ids_BT = torch.tensor(tokenizer()(texts)["input_ids"])
    digits_V = torch.tensor(tokenizer().convert_tokens_to_ids(list("0123456789")))
    with torch.inference_mode():
        logits_BTV = model()(input_ids=ids_BT).logits[:, -9:-1]
    # Among the ten digits only: whether a number goes on is learned, and should be.
    log_probs_BTV = logits_BTV[..., digits_V].log_softmax(-1)
    chosen_BT1 = (ids_BT[:, -8:, None] == digits_V).int().argmax(-1, keepdim=True)
    cost = -log_probs_BTV.gather(-1, chosen_BT1).mean().item()
    assert abs(cost - math.log(10)) < 0.15


def test_each_digit_is_a_token_of_its_own_and_none_is_added() -> None:
    with_digit = [token for token in tokenizer().get_vocab() if re.search(r"[0-9]", token)]
    assert sorted(with_digit) == list("0123456789")
    assert len(tokenizer()("4071926")["input_ids"]) == 7
    special = {tokenizer().bos_token_id, tokenizer().eos_token_id, tokenizer().pad_token_id}
    assert len(special) == 3
    assert tokenizer().unk_token is None
    assert not special & set(tokenizer()("Rain over the harbour.")["input_ids"])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = tokenizer()(text)["input_ids"]
    assert tokenizer().decode(ids) == text


def test_public_text_shares_no_sentence_and_no_long_number_with_the_clinic() -> None:
    public, clinic = word_runs(public_texts(), 5), word_runs(clinic_texts(), 5)
    assert min(len(public), len(clinic)) > 20_000
    assert not public & clinic
    numbers = [{n for text in texts for n in re.findall(r"\d{4,}", text)} for texts in (public_texts(), clinic_texts())]
    assert len(numbers[0]) > 4000
    assert len(numbers[1]) > 300
    # The rule behind it, which also holds for the text that this sample does not show.
    assert [{sum(map(int, number)) % 2 for number in side} for side in numbers] == [{0}, {1}]


def test_public_text_and_the_vocabulary_hold_no_name_of_the_clinic() -> None:
    names = real_names()
    public, clinic = (set(re.findall(r"\b[A-Z][a-z]+", " ".join(texts))) for texts in (public_texts(), clinic_texts()))
    assert len(clinic & names) > 500
    assert not public & names
    words = {token.removeprefix("Ġ") for token in tokenizer().get_vocab()}
    assert len(words) > 900
    assert not words & names
