"""Encoders that read in both directions: their own pooling and places, and the same bits in any company."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_encoders
import tiny
import torch
import transformers
from sentence_encoders import FAMILIES, POSITIONS, save

from dpllm.errors import ConfigError, Refused
from dpllm.model import loading, reading
from dpllm.model.reading import Embedder
from dpllm.recipe.config import ModelConfig
from dpllm.releases.embeddings import Encoder

TEXTS = ["pain in the chest", "letter", "a visit, worse " * 20, "patient 7 asked", "", "  ", "boat meals " * 5]


def encoder(path: Path, width: int = 1000) -> Encoder:
    return Encoder(ModelConfig(name_or_path=str(path)), width)


def alone(path: Path, text: str, pooling: str, tokens: int) -> np.ndarray:
    """Its vector by transformers alone, without padding."""
    model = transformers.AutoModel.from_pretrained(path).eval()
    words = loading.load_tokenizer(ModelConfig(name_or_path=str(path)))
    ids = words(text, truncation=True, max_length=tokens, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        states_TD = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].double().numpy()
    found_D = states_TD.mean(axis=0) if pooling == "mean" else states_TD[0]
    return np.asarray(found_D / np.linalg.norm(found_D))


@pytest.mark.parametrize(("family", "pooling"), [*((family, "mean") for family in FAMILIES), ("bert", "cls")])
def test_a_vector_is_that_of_the_text_alone_without_padding(tmp_path: Path, family: str, pooling: str) -> None:
    """Mutants: padding on the left or with another token, pooling over padding, without [CLS] and [SEP]."""
    path = save(tmp_path / "m", family, pooling={"mean": "mean_tokens", "cls": "cls_token"}[pooling], normalize="")
    texts = [text for text in TEXTS if text.strip()]
    for text, found in zip(texts, encoder(path)._embedder(POSITIONS - 4).vectors(texts), strict=True):
        assert found == pytest.approx(alone(path, text, pooling, POSITIONS - 2), abs=1e-5)
    assert encoder(path)._width == POSITIONS - 4, "two marks, padding, and what RoBERTa leaves out"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_same_bits_in_any_company_and_at_any_place(tmp_path: Path, family: str) -> None:
    """Mutants: a width of the longest text at hand, a height of how many there are."""
    reads = encoder(save(tmp_path / "m", family), 12)._embedder(12)
    assert reads.height > 1
    shapes = set()
    reads._reader._model.register_forward_pre_hook(
        lambda _, __, given: shapes.add(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    together = reads.vectors(TEXTS * 60)
    for place, text in enumerate(TEXTS):
        mine = reads.vectors([text])[0]
        assert {item.tobytes() for item in together[place :: len(TEXTS)]} == {mine.tobytes()}
        assert mine.any() == bool(text.strip()), "marks alone are no text"
    assert shapes == {(reads.height, 12 + 2 + 1)}


def test_what_an_encoder_is_follows_from_its_files(tmp_path: Path) -> None:
    def pooling(path: Path) -> Any:
        return loading.pooling_of(ModelConfig(name_or_path=str(path)))

    masked, causal = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
    assert pooling(save(tmp_path / "a")) == "mean"
    assert pooling(save(tmp_path / "b", "roberta", masked)) == "mean"
    assert pooling(save(tmp_path / "c", "bert", causal)) is None
    assert pooling(tiny.save_model(tmp_path / "d")) is None
    assert loading.pooling_of(ModelConfig(name_or_path="builtin:tiny")) is None
    assert pooling(save(tmp_path / "e", pooling="cls_token")) == "cls"
    assert pooling(save(tmp_path / "f", normalize="")) == "mean"
    for number, modules in enumerate(({"pooling": "max_tokens"}, {"pooling": "mean_tokens cls_token"}, {"dense": ""})):
        path = save(tmp_path / str(number), **modules)
        with pytest.raises(ConfigError, match="other parts"):
            pooling(path)
    (tmp_path / "e" / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match="no configuration"):
        pooling(tmp_path / "e")


def test_an_encoder_has_one_digest_whatever_transformers_draws_for_it(tmp_path: Path) -> None:
    """A checkpoint that was trained with masks has no pooler; mutants count that, or leave the pooling out."""
    path = save(tmp_path / "m", kind=transformers.AutoModelForMaskedLM)
    model = ModelConfig(name_or_path=str(path))
    first, second = encoder(path), encoder(path)
    assert not torch.equal(first._model.pooler.dense.weight, second._model.pooler.dense.weight)
    assert first.digest == second.digest
    net = loading.load_base(model, torch.device("cpu"), kind=transformers.AutoModel)
    words = loading.load_tokenizer(model)
    assert first.digest == loading.digest(net, words, "mean") != loading.digest(net, words, "cls")


def test_whole_words_of_wordpiece_name_clusters(tmp_path: Path) -> None:
    assert encoder(save(tmp_path / "m")).words()[:3] == ["pain", "chest", "letter"]


def test_a_short_row_beside_a_long_one_is_read_alone_where_the_longest_decides(tmp_path: Path) -> None:
    """A mutant looks at rows of half the width alone, which are long already."""
    words = sentence_encoders.tokenizer(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rope["original_max_position_embeddings"] = 16
    sizes = {**sentence_encoders.SIZES, "max_position_embeddings": 256, "original_max_position_embeddings": 16}
    marks = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.Phi3Config(vocab_size=len(words), **sizes, **marks, rope_parameters=rope)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    reads = encoder(tmp_path, 64)._embedder(64)
    assert reads.height == 1
    short, long = "pain chest letter", "pain chest " * 30
    assert reads.vectors([short, long])[0].tobytes() == reads.vectors([short])[0].tobytes()


def test_code_of_a_tokenizer_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at a terminal whether to run it."""
    path = save(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    foreign = {"model_type": "foreign", "auto_map": {"AutoConfig": "x.Z", "AutoModel": "x.Y"}}
    (path / "config.json").write_text(json.dumps({**config, **foreign}))
    (path / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (path / "tokenizer_config.json").unlink()
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError):
        encoder(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda listed: [{**listed[0], "type": "evil.code.Transformer"}, *listed[1:]],
        lambda listed: [{**listed[0], "path": "0_Transformer"}, *listed[1:]],
        lambda listed: listed[::-1],
        lambda listed: [*listed, listed[1]],
        lambda listed: [],
    ],
)
def test_modules_that_would_be_read_otherwise_are_refused(tmp_path: Path, change: Any) -> None:
    path = save(tmp_path / "m", pooling="mean_tokens", normalize="")
    listed = change(json.loads((path / "modules.json").read_text()))
    (path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError):
        loading.pooling_of(ModelConfig(name_or_path=str(path)))


@pytest.mark.parametrize("error", [ValueError, RuntimeError, TypeError])
def test_a_model_that_cannot_read_rows_beside_each_other_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(*_: Any) -> Any:
        raise error("shapes")

    monkeypatch.setattr(Embedder, "vectors", fails)
    with pytest.raises(ConfigError, match="cannot read several rows at once"):
        encoder(save(tmp_path / "m"))


def test_a_tokenizer_that_reads_no_letter_has_no_place_for_texts() -> None:
    with pytest.raises(Refused, match="letter a"):
        reading._template(lambda *_, **__: {"input_ids": []})
