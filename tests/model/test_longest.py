"""Rows that are read together: the same bits as beside any others and behind any before, and the logits of each alone."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import switching
import tiny
import tiny_models as tm
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dpllm.auditing.scores import score
from dpllm.errors import Refused
from dpllm.model import reading
from dpllm.model.evaluate import held_out_loss, rows_at_once, without_memory
from dpllm.model.reading import Embedder, Reader
from dpllm.model.rewards import Reading, surprises
from dpllm.privacy.schedule import TokenSequence, Unit

pytestmark = pytest.mark.usefixtures("one_thread")

ROPES = ["longrope", "dynamic", "by layer"]
WIDTH, FURTHER = 10, 16
ONE, SHORT, LONG = [5, 6, 7], [8, 9], list(range(20, 30))


def bits(reader: Reader, rows: list[list[int]]) -> bytes:
    """All that is read of the first row while 16 tokens are written."""
    result = [reader.read(rows), *(reader.go_on(40 + step, len(rows)) for step in range(FURTHER - 1))]
    return b"".join(logits[0].tobytes() for logits in result)


@pytest.mark.parametrize(
    ("kind", "after"), [("longrope", 5), ("longrope", 24), ("dynamic", 12), ("dynamic", 24), ("by layer", 18)]
)
def test_private_inference_reads_a_record_alike_beside_the_longest(kind: str, after: int) -> None:
    """Mutants: what is read first alone is looked at, or three tokens more; types in layers are not; memory is kept."""
    reader = Reader(switching.model(kind, after), WIDTH, [1], 4, further=FURTHER)
    assert reader.lower_in_company(300)
    assert reader.height == 1
    assert bits(reader, [ONE, SHORT, SHORT, SHORT]) == bits(reader, [ONE, LONG, SHORT, SHORT])


@pytest.mark.parametrize("kind", ["longrope", "window"])
def test_where_nothing_switches_records_are_read_together(kind: str) -> None:
    reader = Reader(switching.model(kind, 64), WIDTH, [1], 4, further=FURTHER)
    assert not reader.lower_in_company(300)
    assert bits(reader, [ONE, SHORT, SHORT, SHORT]) == bits(reader, [ONE, LONG, SHORT, SHORT])


@pytest.mark.parametrize(("kind", "after"), [("longrope", 7), ("longrope", 15), ("longrope", 24), ("dynamic", 24)])
def test_bits_show_a_switch_that_no_configuration_tells(kind: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant looks beside rows that have grown as much as the short one."""
    monkeypatch.setattr(reading, "rows_at_once", lambda model, rows, *_, **__: rows)
    model = switching.model(kind, after)
    without_memory(model)
    assert Reader(model, WIDTH, [1], 4, further=FURTHER).lower_in_company(300)


@pytest.mark.parametrize("after", [7, 24])
def test_a_window_or_a_scale_of_attention_inside_what_is_read_is_read_alone(after: int) -> None:
    reader = Reader(switching.model("window", after), WIDTH, [1], 4, further=FURTHER)
    assert reader.lower_in_company(300)
    assert bits(reader, [ONE, SHORT]) == bits(reader, [ONE, LONG])
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    scaled["original_max_position_embeddings"] = after
    net = tiny.model("llama")
    net.config.rope_parameters = scaled  # as Ministral has it
    assert rows_at_once(net, 4, 40) == 1
    assert rows_at_once(net, 4, after) == 4


def test_a_rotary_embedding_of_an_unknown_type_is_read_alone() -> None:
    """Whatever transformers adds may look at lengths."""
    net = tiny.model("llama")
    net.config.rope_parameters = {"rope_type": "tomorrow", "rope_theta": 1e4}
    assert rows_at_once(net, 4, 129) == 1
    net.config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    assert rows_at_once(net, 4, 129) == 4


@pytest.mark.parametrize("kind", ROPES)
def test_a_text_has_the_same_vector_beside_a_long_one_and_behind_it(kind: str) -> None:
    reads = Embedder(switching.model(kind, 20), tiny.tokenizer(), 40)
    assert reads.height == 1
    some, long = ["Anna has a red boat.", "seven plums and two letters " * 5], "the old key " * 30
    first = reads.vectors(some)
    assert reads.vectors([long, *some[::-1], long])[2:0:-1].tobytes() == first.tobytes()


def rows(*lengths: int) -> list[TokenSequence]:
    return [sequence for unit in tm.units([(length,) for length in lengths]) for sequence in unit.sequences]


@pytest.mark.parametrize("kind", ROPES)
def test_evaluation_reads_a_row_as_it_is_read_alone(kind: str) -> None:
    made, alone = rows(40, 5, 30, 21, 9), []
    model = switching.model(kind, 20, vocab_size=tm.VOCABULARY)
    for item in made:
        net = switching.model(kind, 20, vocab_size=tm.VOCABULARY)  # which has read nothing
        alone.append(held_out_loss(net, [item], 1, tm.CPU, contextlib.nullcontext))
    result = held_out_loss(model, made, 8, tm.CPU, contextlib.nullcontext)
    nats = sum(item.loss * item.tokens for item in alone)
    assert result.loss * result.tokens == pytest.approx(nats, rel=1e-6)
    assert held_out_loss(model, made[2:3], 1, tm.CPU, contextlib.nullcontext) == alone[2]  # behind 40 tokens, 30


@pytest.mark.parametrize("kind", ROPES)
def test_an_audit_scores_and_completes_a_row_as_alone(kind: str) -> None:
    """The base model is scored by the same weights behind the tuned one, so what that has read may not matter either."""
    made, masks = rows(40, 5, 30, 21, 9), [[False] + [True] * (length - 1) for length in (40, 5, 30, 21, 9)]
    model = switching.model(kind, 20, vocab_size=tm.VOCABULARY)
    together, again = (score(model, made, masks, 4096) for _ in range(2))
    prompts = [one.input_ids[:7] for one in made]
    written = reading.write_behind(model, reading.generation_config(tiny.tokenizer(), 25, ()), prompts)
    for place, (one, mask) in enumerate(zip(made, masks, strict=True)):
        net = switching.model(kind, 20, vocab_size=tm.VOCABULARY)
        (alone,) = score(net, [one], [mask], 4096)
        np.testing.assert_allclose(together[place].log_prob, alone.log_prob, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(together[place].log_prob, again[place].log_prob)
        settings = reading.generation_config(tiny.tokenizer(), 25, ())
        assert reading.write_behind(net, settings, [prompts[place]]) == [written[place]]


@pytest.mark.parametrize("kind", ROPES)
def test_pairs_are_read_by_their_own_rows_alone(kind: str) -> None:
    """Dynamic types keep what a longer pair asked for, and a pair of the next round would be read by it."""
    model = switching.model(kind, 8, vocab_size=tm.VOCABULARY)
    short, long = (Unit(tuple(rows(length, length))) for length in (12, 30))
    reading = Reading(model, replace(tm.packing(), rows_each=2), 0, tm.CPU, contextlib.nullcontext)
    first = surprises(reading, [short])
    surprises(reading, [long])
    assert surprises(reading, [short]).tobytes() == first.tobytes() == surprises(reading, [short, long])[:2].tobytes()


@pytest.mark.parametrize("kind", ROPES)
def test_training_refuses_a_switch_inside_the_lengths_that_train(kind: str) -> None:
    """Of examples by themselves; passes all have the same last position."""
    for after, refused in ((20, True), (47, True), (48, False)):
        net = tm.adapters.attach(switching.model(kind, after, vocab_size=tm.VOCABULARY), tm.recipe(adapter=tm.LORA))
        without_memory(net)  # as loaded
        net.train()
        with pytest.raises(Refused, match="inv_freq") if refused else contextlib.nullcontext():
            tm.make_engine(net, tokens=tm.ALONE, longest=48).self_check(tm.VOCABULARY)


@pytest.mark.parametrize("kind", ROPES)
def test_in_training_the_public_length_decides_and_no_other_row(kind: str) -> None:
    """The last position of every pass is that of the longest row allowed, whoever else lies there."""
    net = tm.adapters.attach(switching.model(kind, 20, vocab_size=tm.VOCABULARY), tm.recipe(adapter=tm.LORA))
    without_memory(net)
    net.train()

    def losses(longest: int, other: int) -> torch.Tensor:
        """Of a unit's tokens in a pass with another, which stands before it where it is longer."""
        engine = tm.make_engine(net, longest=longest)
        (both,) = tm.batches([tm.unit((14,), 1), tm.unit((other,), 2)], engine)
        row = both.rows[int(other > 14)]
        return engine._token_losses(both).nll_M[row.start : row.stop].detach()

    seen = {losses(longest, other).numpy().tobytes() for longest, other in ((32, 4), (32, 30), (32, 16))}
    assert len(seen) == 1
    assert not torch.allclose(losses(16, 4), losses(32, 4), atol=1e-3)  # or the test shows nothing


def test_what_one_kind_of_layer_took_is_still_seen_when_another_asks() -> None:
    """A mutant lets all kinds begin anew, so that the self-check sees no buffer move; transformers asks in any order."""
    model = switching.model("by layer", 20)
    without_memory(model)
    rope, states = model.model.rotary_emb, torch.zeros(1, 40, 16)
    first = rope.full_attention_inv_freq.clone()
    for layer in ("full_attention", "sliding_attention"):
        rope(states, torch.arange(40)[None], layer)
        assert not torch.equal(rope.full_attention_inv_freq, first)
    rope(states[:, :5], torch.arange(5)[None], layer_type="full_attention")
    assert torch.equal(rope.full_attention_inv_freq, first)


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
