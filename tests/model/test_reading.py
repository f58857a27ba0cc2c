"""Rows that are read together: the same bits as beside any others, and the logits of each alone."""

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dpllm.errors import Refused
from dpllm.model.reading import Embedder, Reader

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
TEXTS = ["Anna has a red boat.", "seven plums", "Erik", "the old key and two letters " * 9, "", "   ", "two letters "]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


def alone(model: Any, row: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([row])).logits[0, -1].numpy()


def test_each_row_has_the_logits_that_it_has_alone(model: Any) -> None:
    rows = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4], [1, 2]]
    reader = Reader(model, 6, [1], 3)  # two batches, the last one filled up
    assert reader.read(rows) == pytest.approx(np.array([alone(model, row) for row in rows]), abs=1e-5)
    for token in (11, 12):
        rows = [[*row, token] for row in rows]
        assert reader.go_on(token, 4) == pytest.approx(np.array([alone(model, row) for row in rows]), abs=1e-5)


def test_a_row_has_the_same_bits_whoever_stands_beside_it_and_wherever_it_stands(model: Any) -> None:
    reader, one = Reader(model, 12, [1], 5), [5, 6, 7]
    assert not reader.lower_in_company(50)
    result = set()
    for place in range(5):
        rows = [[(3 * place + n) % 50] * (1 + (place + n) % 12) for n in range(5)]
        rows[place] = one
        result.add((reader.read(rows)[place].tobytes(), reader.go_on(9, 5)[place].tobytes()))
    assert len(result) == 1
    assert reader.height == 5


class Meddling(nn.Module):
    """Adds to every row a little of the mean over all of them, as a kernel may that rounds by company."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache):
        out = self.inner(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)
        out.logits = out.logits + 1e-6 * out.logits.mean(dim=0, keepdim=True)
        return out


def test_where_company_changes_bits_each_row_is_read_alone(model: Any) -> None:
    reader = Reader(Meddling(model), 8, [1], 4)
    assert reader.lower_in_company(50)
    assert reader.height == 1
    first = reader.read([[2, 3], [4]])[0].tobytes()
    assert reader.read([[2, 3], [5, 6, 7]])[0].tobytes() == first


def test_experts_are_read_alone_and_a_model_without_a_cache_is_refused(model: Any) -> None:
    # Their rounding follows routing, which a few synthetic rows do not show.
    reader = Reader(model, 4, [1], 4)
    reader._model = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    assert reader.lower_in_company(50)
    assert reader.height == 1
    with pytest.raises(Refused, match="past_key_values"):
        Reader(nn.Linear(2, 2), 4, [1], 2)


def test_the_mask_is_never_all_ones(model: Any) -> None:
    """transformers leaves such a mask out, so that rows as long as the width would change the kernel for all."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    try:
        reader = Reader(model, 4, [1], 2)
        reader.read([[1, 2, 3, 4], [5, 6, 7, 8]])
        reader.go_on(3, 2)
    finally:
        handle.remove()
    assert [mask.shape for mask in seen] == [(2, 5), (2, 6)]
    assert not any(mask.all() for mask in seen)


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    torch.manual_seed(0)
    words = tiny.tokenizer()
    wide = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": len(words)}, num_key_value_heads=2)).eval()
    return Embedder(wide, words, 40)


def test_a_text_has_the_mean_of_its_last_states_at_length_1(embedder: Embedder) -> None:
    model, words = embedder._reader._model, embedder._tokenizer
    for text, found in zip(TEXTS[:4], embedder.vectors(TEXTS[:4]), strict=True):
        ids = [*embedder._around[0], *words(text, add_special_tokens=False)["input_ids"][:40]]
        with torch.inference_mode():
            mean = model.base_model(torch.tensor([ids])).last_hidden_state[0, 1:].double().mean(dim=0).numpy()
        assert found == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-12)


def test_a_text_has_the_same_vector_in_any_company_and_number(embedder: Embedder) -> None:
    """Mutants: a width of the longest text at hand, a height of how many there are."""
    assert embedder.height > 1
    together = embedder.vectors(TEXTS * 40)
    vectors = {together[place :: len(TEXTS)].tobytes() for place in range(len(TEXTS))}
    assert len(vectors) == len(TEXTS) - 1  # two are empty
    for place, text in enumerate(TEXTS):
        assert embedder.vectors([text])[0].tobytes() == together[place].tobytes()
        assert embedder.vectors([text, "boat " * 500])[0].tobytes() == together[place].tobytes()


def test_an_encoder_with_experts_reads_texts_one_by_one(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpllm.model.reading.has_experts", lambda _: True)
    assert Embedder(embedder._reader._model, embedder._tokenizer, 40).height == 1


def test_a_shape_follows_from_public_numbers_alone(embedder: Embedder) -> None:
    seen = []
    handle = embedder._reader._model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        embedder.vectors(["a"])
        embedder.vectors(["plums " * 300] * 3)
    finally:
        handle.remove()
    assert seen == [(embedder.height, 42)] * 2


def test_what_has_no_text_or_no_finite_state_has_zeros(embedder: Embedder) -> None:
    assert not embedder.vectors(["", "  "])[0].any()
    model = embedder._reader._model
    handle = model.base_model.register_forward_hook(lambda _, __, out: spoilt(out))
    try:
        result = embedder.vectors(TEXTS[:3])
    finally:
        handle.remove()
    assert not result[0].any()
    assert result[1:].any(axis=1).all()


def spoilt(out: Any) -> Any:
    out.last_hidden_state = out.last_hidden_state.clone()
    out.last_hidden_state[0, -1, 0] = float("nan")
    return out
