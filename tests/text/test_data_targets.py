"""Which tokens of a row are learned, how a prompt and its completion become one text, and what becomes of long rows."""

from pathlib import Path

import pytest
import tiny
import torch
import transformers
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import TALKS, TEXT
from text_tables import Json, learned, load_rows, refused, section, tokenizer
from tokenizers.processors import TemplateProcessing

from dpllm.errors import ConfigError
from dpllm.privacy.loss import row_sums, token_losses
from dpllm.privacy.packing import lay_out
from dpllm.privacy.schedule import Packing, TokenSequence, Unit
from dpllm.recipe.config import load_config
from dpllm.text import prompts, rendering
from dpllm.text.builtin import NAMES
from dpllm.text.tokens import encode, encode_units

LONG = {"text": " ".join(tiny.sentence(number) for number in range(9))}


def encoded(row: Json, fmt: str) -> TokenSequence:
    (sequence,) = encode(row, fmt, tokenizer(), tiny.reads(128, "truncate"))  # type: ignore[arg-type]
    assert sequence.denominator == sum(sequence.loss_mask) > 0
    assert not sequence.loss_mask[0]
    return sequence


def test_text_is_learned_whole_with_its_end_and_not_its_beginning_up_to_max_length() -> None:
    sequence = encoded(TEXT[0], "text")
    assert learned(sequence) == TEXT[0]["text"] + "</s>"
    assert (sequence.input_ids[0], sequence.input_ids[-1]) == (0, 1)
    (sequence,) = encode(LONG, "text", tokenizer(), tiny.reads(20, "truncate"))
    (uncut,) = encode(LONG, "text", tokenizer(), tiny.reads(10_000, "truncate"))
    assert sequence.input_ids == uncut.input_ids[:20]
    assert sequence.denominator == sum(sequence.loss_mask) == 19


def test_a_tokenizer_without_a_beginning_or_with_an_end_changes_no_target() -> None:
    bare = tiny.tokenizer()
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    (sequence,) = encode({"text": "Anna bought plums"}, "text", bare, tiny.reads(128, "truncate"))
    first = tokenizer().decode([sequence.input_ids[0]])
    assert first + learned(sequence) == "Anna bought plums</s>"
    assert sequence.denominator == sum(sequence.loss_mask)
    ending, special = tiny.tokenizer(), [("<s>", 0), ("</s>", 1)]
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    (sequence,) = encode(TEXT[0], "text", ending, tiny.reads(128, "truncate"))
    assert learned(sequence) == TEXT[0]["text"] + "</s>"
    assert sequence.input_ids.count(1) == 1


def test_of_a_conversation_the_assistants_turns_are_learned() -> None:
    first, second = (turn["content"] for turn in TALKS[0]["messages"] if turn["role"] == "assistant")
    sequence = encoded(TALKS[0], "messages")
    assert learned(sequence) == f"{first}</s>{second}</s>"
    assert tokenizer().decode(sequence.input_ids).startswith("<s><|user|>What did")
    assert sequence.input_ids.count(0) == 1


def test_nothing_to_predict_makes_no_sequence() -> None:
    assert learned(encoded({"text": ""}, "text")) == "</s>"
    user = {"messages": [{"role": "user", "content": "Hello?"}]}
    assert encode(user, "messages", tokenizer(), tiny.reads(16, "truncate")) == []
    assert encode_units([tiny.rows([user])], "messages", tokenizer(), section()) == [Unit(())]


@pytest.mark.parametrize(("name", "source"), [(None, "rows.jsonl"), ("held_out.jsonl", "held_out.jsonl")])
def test_a_long_row_is_refused_by_its_source_and_unit(name: str | None, source: str) -> None:
    data, units = section(max_length=64, long_examples="refuse"), [tiny.rows([TEXT[0]]), tiny.rows([LONG])]
    assert len(encode_units(units[:1], "text", tokenizer(), data)) == 1
    with refused(rf"^{source}: unit 2: .*data.max_length \(64 tokens\)"):
        encode_units(units, "text", tokenizer(), data, name=name)


@settings(max_examples=80, deadline=None)
@given(words=st.lists(st.sampled_from([*tiny.NAMES, "bought", "é", "\n"]), max_size=40), length=st.integers(2, 30))
def test_chunks_cover_every_target_exactly_once(words: list[str], length: int) -> None:
    half = len(words) // 2
    row = {"prompt": " ".join(words[:half]), "completion": " ".join(words[half:])}
    uncut = encode(row, "prompt_completion", tokenizer(), tiny.reads(10_000, "chunk"))
    chunks = encode(row, "prompt_completion", tokenizer(), tiny.reads(length, "chunk"))
    targets = [t for s in uncut for t, learn in zip(s.input_ids, s.loss_mask, strict=True) if learn]
    covered = [t for s in chunks for t, learn in zip(s.input_ids, s.loss_mask, strict=True) if learn]
    assert covered == targets
    assert all(len(s.input_ids) <= length and not s.loss_mask[0] and any(s.loss_mask) for s in chunks)
    assert {s.denominator for s in chunks} == {s.denominator for s in uncut} <= {len(targets)}


@settings(max_examples=15, deadline=None)
@given(length=st.integers(2, 40), seed=st.integers(0, 9))
def test_losses_of_chunks_add_up_to_the_mean_of_the_whole_row(length: int, seed: int) -> None:
    """For a model that looks back one token, so that cutting the context changes nothing."""
    logits_VV = torch.randn(384, 384, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(sequences: list[TokenSequence]) -> torch.Tensor:
        tokens = sum(len(sequence.input_ids) for sequence in sequences) + 1
        laid = lay_out([Unit(tuple(sequences))], Packing(tokens, 1, 0, 16, tokens), pad_id=2)
        nll_M = token_losses(logits_VV[laid.input_ids_1M], laid.targets)
        return (row_sums(nll_M, laid.rows) / laid.denominator_R.double()).sum()

    (uncut,) = encode(LONG, "text", tokenizer(), tiny.reads(10_000, "chunk"))
    ids = torch.tensor(uncut.input_ids)
    mean = torch.nn.functional.cross_entropy(logits_VV[ids[:-1]], ids[1:])
    chunks = encode(LONG, "text", tokenizer(), tiny.reads(length, "chunk"))
    torch.testing.assert_close(loss([uncut]).double(), mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss(chunks).double(), mean, rtol=1e-5, atol=0)


ANSWER = "{prompt}\n### Answer:\n{completion}"
TEMPLATES = [None, ANSWER, "{prompt}{completion}", "{prompt} {completion}", "[INST] {prompt} [/INST] {completion}"]
TOKENIZERS = {"byte-level": tiny.tokenizer(), "tiny": transformers.AutoTokenizer.from_pretrained(NAMES["builtin:tiny"])}


@pytest.mark.parametrize(
    ("template", "prompt", "completion", "masked", "learned"),
    [
        (None, "near[Cuisine]", "Wildwood", "near[Cuisine]", " Wildwood"),
        (None, "Q: ", "5", "Q:", " 5"),
        (None, "Q:", " 5", "Q:", " 5"),
        (None, "Q: ", " 5", "Q:", "  5"),
        (None, "Q:\n", "5", "Q:\n", "5"),
        (None, "", "5", "", "5"),
        ("{prompt}{completion}", "near[Cuisine]", "Wildwood", "near[Cuisine]", "Wildwood"),
        (ANSWER, "Who?", "Anna", "Who?\n### Answer:\n", "Anna"),
        (ANSWER, "", "", "\n### Answer:\n", ""),
        # What stands in the data is text, also where it looks like a field.
        (ANSWER, "{completion} {0} {{", "{prompt}", "{completion} {0} {{\n### Answer:\n", "{prompt}"),
        ("{{prompt} }{completion}", "{prompt}", "x", "{{prompt} }", "x"),
    ],
)
def test_what_is_masked_and_what_is_learned(
    template: str | None, prompt: str, completion: str, masked: str, learned: str
) -> None:
    assert rendering.joined(prompt, completion, template) == (masked, learned)
    row, tokenizer = {"prompt": prompt, "completion": completion}, TOKENIZERS["byte-level"]
    (sequence,) = encode(row, "prompt_completion", tokenizer, tiny.reads(128, template=template))
    first = sequence.loss_mask.index(True)
    assert tokenizer.decode(sequence.input_ids) == f"<s>{masked}{learned}</s>"
    assert tokenizer.decode(sequence.input_ids[first:]) == f"{learned}</s>"


@given(
    template=st.sampled_from(TEMPLATES),
    name=st.sampled_from(sorted(TOKENIZERS)),
    prompt=st.text("ab{}[]() \n.", max_size=6) | st.sampled_from(["{completion}", "a\n\n", "a \n\n", "x:"]),
    completion=st.sampled_from(["Anna came", "x", "{prompt}"]),
)
def test_a_model_is_asked_with_the_tokens_that_stood_before_completions_in_training(
    template: str | None, name: str, prompt: str, completion: str
) -> None:
    row, tokenizer = {"prompt": prompt, "completion": completion}, TOKENIZERS[name]
    ids = prompts.encode(tokenizer, prompt, 0, "prompt_completion", template)
    (sequence,) = encode(row, "prompt_completion", tokenizer, tiny.reads(128, template=template))
    if rendering.joined(prompt, "", template)[0] and completion[0].isalpha():
        assert list(sequence.input_ids[: sequence.loss_mask.index(True)]) == ids
    assert ids  # a text begins with a token, also where nothing stands there


@pytest.mark.parametrize(
    "wrong",
    [
        "{prompt}", "{completion}", "{completion} {prompt}", "{prompt} {prompt} {completion}", "{prompt}\n{completion}\n",
        "{prompt} {completion} {completion}", "{prompt} {input} {completion}", "{} {prompt} {completion}", "",
        "{prompt}\\n{completion}", "{Prompt} {completion}", "{{prompt}} {completion}", "{prompt}\ud800 {completion}",
    ],
)  # fmt: skip
def test_a_template_that_loses_text_or_says_it_twice_is_refused(tmp_path: Path, wrong: str) -> None:
    recipe = {"model": {"name_or_path": "builtin:tiny"}, "data": {"train": "builtin:clinic", "template": wrong}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "train": {"steps": 1}, "output_dir": "run"}))
    with pytest.raises(ConfigError, match=r"^[^\n]*data\.template: [^\n]*$"):
        load_config(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("row", [{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_other_formats_refuse_a_template(tmp_path: Path, row: Json) -> None:
    with refused(r"row 1 reads as .*data\.template"):
        load_rows(tmp_path, row, template=ANSWER)
