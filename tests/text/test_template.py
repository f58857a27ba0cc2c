"""How a prompt and its completion become one text: in training, where a plan tells of it, and where a model is asked."""

from pathlib import Path

import pytest
import tiny
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st
from text_tables import Json, load_rows, refused

from dpllm.errors import ConfigError
from dpllm.recipe.config import load_config
from dpllm.text import prompts, rendering
from dpllm.text.builtin import NAMES
from dpllm.text.tokens import encode

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
