"""Chats of several turns under templates of many habits: the assistant's turns are learned, whole, and nothing else."""

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import tiny
from chat_templates import CHATML, ENDS, MARKED, PICKY, THINKS, TOOLED
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tables import SENTINEL, Json, load, load_rows, refused, units_of

from dpllm.privacy.schedule import Unit
from dpllm.text import prompts, rendering
from dpllm.text.data import Table
from dpllm.text.in_memory import write_rows
from dpllm.text.tokens import encode, encode_units

SIGNS = [
    *("<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<think>", "</think>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "[INST]", "[/INST]"),
]  # fmt: skip


def turn(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def talk(*words: str, system: str = "") -> list[Json]:
    turns = [turn(role, text) for role, text in zip(itertools.cycle(("user", "assistant")), words, strict=False)]
    return [turn("system", system)] * bool(system) + turns


@cache
def reader(template: str | None, *, special: bool = True) -> Any:
    """A tokenizer with this template, to which the signs of templates are special tokens."""
    tokenizer = tiny.tokenizer(chat_template=template)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": SIGNS})
    return tokenizer


def learned(tokenizer: Any, messages: list[Json], **columns: Any) -> list[str]:
    (sequence,) = encode({"messages": messages, **columns}, "messages", tokenizer, tiny.reads(4096))
    runs = itertools.groupby(zip(sequence.input_ids, sequence.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for target, run in runs if target]


NO_THOUGHT = "<think>\n\n</think>\n\n"
LEARNED = {  # template -> what is learned of an answer, in the middle and at the end
    "CHATML": ("{}<|im_end|>\n", "{}<|im_end|>\n"),
    "THINKS": ("{}<|im_end|>\n", NO_THOUGHT + "{}<|im_end|>\n"),
    "ENDS": ("{}<|end|>\n", "{}<|end|>\n</s>"),
    "LATE": (" {}</s>", " {}</s>"),
    "OPENS": ("{}</s>", "{}</s>"),
    "RETURNS": ("<|channel|>final<|message|>{}<|end|>", "<|channel|>final<|message|>{}<|return|>"),
    "PLAIN": ("{}\n\n", "{}\n\n</s>"),
    "MARKED": ("{}<|im_end|>", NO_THOUGHT + "{}<|im_end|>"),
    "PICKY": ("{}<end_of_turn>\n", "{}<end_of_turn>\n"),
}


def expected(name: str, answers: list[str]) -> list[str]:
    middle, last = LEARNED[name]
    return [*map(middle.format, answers[:-1]), last.format(answers[-1])]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", LEARNED)
def test_the_assistants_turns_with_their_ends_are_learned_and_nothing_else(name: str, special: bool) -> None:
    system = "" if name == "PICKY" else "Be brief."
    messages = talk("Who?", "Anna", "And?", "Bo", "Or?", "Eva", system=system)
    pieces = learned(reader(getattr(chat_templates, name), special=special), messages)
    assert pieces == expected(name, ["Anna", "Bo", "Eva"])


def test_signs_that_are_words_to_the_tokenizer_are_not_cut_where_they_begin_alike() -> None:
    words = ENDS.replace("<|{{ m.role }}|>", "<|of {{ m.role }}|>").replace("<|assistant|>", "<|of assistant|>")
    plain = reader(words.replace("{{ eos_token }}", "<|over|>"), special=False)
    assert learned(plain, talk("Who?", "Anna", "And?", "Bo")) == ["Anna<|end|>\n", "Bo<|end|>\n<|over|>"]


OF_TEMPLATES = [
    "<|im_end|>", "<|im_start|>assistant\n.", "<|user|>", "[INST] a [/INST]", "### Assistant:\n.", "{{ x }}",
]  # fmt: skip
TEXTS = st.text("ab<|>:#?\n", min_size=1, max_size=9).map(lambda text: f"x{text}y") | st.sampled_from(OF_TEMPLATES)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(LEARNED)), words=st.lists(TEXTS, min_size=2, max_size=6), with_system=st.booleans())
def test_whatever_people_say_their_words_are_not_learned(name: str, words: list[str], with_system: bool) -> None:
    words = words[: len(words) // 2 * 2]
    system = "Be brief." if with_system and name != "PICKY" else ""
    assert learned(reader(getattr(chat_templates, name)), talk(*words, system=system)) == expected(name, words[1::2])


CALL = [{"type": "function", "function": {"name": "look_up", "arguments": {"of": "Anna"}}}]
CALLED = '<tool_call>{"name": "look_up", "arguments": {"of": "Anna"}}</tool_call><|im_end|>\n'
LOOKED = [turn("user", "Who?"), turn("assistant", None, reasoning_content="Hm.", tool_calls=CALL), turn("tool", "42")]
THOUGHT = "<think>\nHm.\n</think>\n\n"
THINKING = {  # messages, other columns, and what is learned
    "thoughts of an earlier turn are not there": (
        [turn("user", "Who?"), turn("assistant", "Anna", reasoning_content="Hm."), *talk("And?", "Bo")], {},
        ["Anna<|im_end|>\n", f"{NO_THOUGHT}Bo<|im_end|>\n"],
    ),
    "nor those within its words": (
        talk("Who?", f"{THOUGHT}Anna", "And?", f"{THOUGHT}Bo"), {}, ["Anna<|im_end|>\n", f"{THOUGHT}Bo<|im_end|>\n"],
    ),
    "calls of tools": (
        [*LOOKED, turn("assistant", "Anna")], {}, [f"{THOUGHT}{CALLED}", f"{NO_THOUGHT}Anna<|im_end|>\n"],
    ),
    "calls of tools, earlier": (
        [*LOOKED, turn("assistant", "Anna"), *talk("And?", "Bo")], {},
        [CALLED, "Anna<|im_end|>\n", f"{NO_THOUGHT}Bo<|im_end|>\n"],
    ),
    "calls beside words, earlier": (
        [LOOKED[0], {**LOOKED[1], "content": "I look."}, LOOKED[2], turn("assistant", "Anna"), *talk("And?", "Bo")], {},
        [f"I look.{CALLED}", "Anna<|im_end|>\n", f"{NO_THOUGHT}Bo<|im_end|>\n"],
    ),
    "an empty thought that is asked for is no word of the assistant": (
        talk("Who?", "Anna", "And?", "Bo"), {"chat_template_kwargs": {"enable_thinking": False}},
        ["Anna<|im_end|>\n", "Bo<|im_end|>\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", THINKING)
def test_turns_are_found_where_earlier_ones_are_written_otherwise(case: str) -> None:
    messages, columns, pieces = THINKING[case]
    assert learned(reader(THINKS), messages, **columns) == pieces


def test_a_call_beside_which_no_words_are_shown_is_found_by_its_name() -> None:
    silent = THINKS.replace("{{ said }}", "{{ '' if m.tool_calls else said }}")
    assert learned(reader(silent), THINKING["calls of tools, earlier"][0]) == THINKING["calls of tools, earlier"][2]


@pytest.mark.parametrize("name", LEARNED)
def test_a_turn_of_no_weight_is_left_out(name: str) -> None:
    messages = talk("Who?", "Anna", "And?", "Bo")
    messages[1]["weight"] = 0
    assert learned(reader(getattr(chat_templates, name)), messages) == expected(name, ["Anna", "Bo"])[1:]


def test_of_marks_that_tell_no_turn_none_is_left_out() -> None:
    end = "<|im_end|>{% endgeneration %}"
    parts = MARKED.replace(end, "{% endgeneration %}{% generation %}" + end)
    messages = talk("Who?", "Anna", "And?", "Bo")
    assert learned(reader(parts), messages) == expected("MARKED", ["Anna", "Bo"])
    messages[1]["weight"] = 0
    with refused("marks parts of turns"):
        learned(reader(parts), messages)


@pytest.mark.parametrize("answer", ["Anna", "", "é" * 9, "<|user|>"])
def test_marks_are_read_as_transformers_reads_them(answer: str) -> None:
    messages = talk("Who?", answer, "And?", "Bo", system="Be brief.")
    tokenizer = reader(MARKED)
    expected = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    (sequence,) = encode({"messages": messages}, "messages", tokenizer, tiny.reads(4096))
    assert list(sequence.input_ids) == expected["input_ids"]
    assert list(map(int, sequence.loss_mask)) == expected["assistant_masks"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.role }}{{ m.content }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content | upper | replace('\ue0d1', '') }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content | length }}{% endfor %}",
    ],
)
def test_turns_that_cannot_be_found_are_refused(template: str) -> None:
    with refused("does not show where a turn"):
        learned(reader(template), talk(SENTINEL, "Anna", SENTINEL, "Bo"))


PARTS = [{"type": "text", "text": SENTINEL}]
SILENT = turn("assistant", None, tool_calls=CALL)
BROKEN = {
    "no template": (None, talk(SENTINEL, "Anna"), "has no chat template"),
    "parts that cannot be joined to text": (PICKY, [turn("user", PARTS), turn("assistant", "Anna")], "in parts"),
    "parts that would be printed as a list": (CHATML, [turn("user", PARTS), turn("assistant", "Anna")], "in parts"),
    "null": (PICKY + "{# tool_calls #}", [turn("user", SENTINEL), SILENT], "without content"),
    "a role": (PICKY, talk("Who?", "Anna", system=SENTINEL), "refuses a role"),
    "an order": (PICKY, [*talk("Who?", "Anna"), turn("assistant", SENTINEL)], "refuses a role"),
    "a beginning": (CHATML, [turn("assistant", SENTINEL), *talk("Who?", "Anna")], "begins with the assistant"),
    "calls that would not be seen": (CHATML, [turn("user", SENTINEL), SILENT], "does not read tool_calls"),
    "a template that is no template": ("{% for %}", talk(SENTINEL, "Anna"), "fails on"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_what_a_template_does_not_take_has_its_own_message(problem: str) -> None:
    template, messages, reason = BROKEN[problem]
    others = {other for _, _, other in BROKEN.values()} - {reason}
    with refused(f"^(?!.*({'|'.join(others)})).*{reason}"):
        learned(reader(template), messages)


def test_a_template_that_reads_parts_gets_them() -> None:
    content = "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
    joins = CHATML.replace("{{ m.content }}", content)
    messages = [turn("user", PARTS), turn("assistant", [{"type": "text", "text": text} for text in ("An", "na")])]
    assert learned(reader(joins), messages) == ["Anna<|im_end|>\n"]
    joins = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    ends = joins.replace("{% if add", "{% if not add_generation_prompt %}</s>{% endif %}{% if add")
    assert learned(reader(ends), [*messages, *messages]) == ["Anna<|im_end|>\n", "Anna<|im_end|>\n</s>"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (turn("assistant", None), "null"),
        ({"role": "assistant"}, "null"),
        (turn("user", [{"type": "image", "url": SENTINEL}]), "not text .an image"),
        (turn("user", [SENTINEL]), "not text .an image"),
    ],
)
def test_a_message_without_text_is_refused_by_its_row(tmp_path: Path, message: Json, reason: str) -> None:
    with refused(f"row 2 has a message .*{reason}"):
        load_rows(tmp_path, {"messages": talk("Who?", "Anna")}, {"messages": [*talk("Who?"), message]})


SCHEMA = {"name": "look_up", "description": "Looks up.", "parameters": {"content": {"of": "x"}}}
TOOLS = [{"type": "function", "function": SCHEMA}]
CHAT: Json = {"messages": talk("Who?", "Anna")}


def text_of(table: Table, tokenizer: Any) -> str:
    units = units_of(table, tokenizer, max_length=4096)
    return str(tokenizer.decode(units[0].sequences[0].input_ids))


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", ["messages", "conversations", "preference"])
def test_tools_and_settings_of_a_row_reach_the_template(tmp_path: Path, kind: str, as_text: bool) -> None:
    columns: Json = {"tools": TOOLS, "chat_template_kwargs": {"style": "terse"}}
    if as_text:
        columns = {name: json.dumps(value) for name, value in columns.items()}
    row = {kind: CHAT["messages"]}
    if kind == "preference":
        row = {"prompt": talk("Who?"), "chosen": [turn("assistant", "Anna")], "rejected": [turn("assistant", "Bo")]}
    with_tools, bare = (load_rows(tmp_path, {**row, **more}) for more in (columns, {}))
    tokenizer = reader(TOOLED)
    assert text_of(with_tools, tokenizer).startswith(f"<tools>{json.dumps(TOOLS)}</tools>\n<terse><|im_start|>user")
    assert text_of(bare, tokenizer).startswith("<|im_start|>user")
    assert with_tools.digest != bare.digest


@pytest.mark.parametrize(
    ("column", "value"),
    [("tools", TOOLS), ("chat_template_kwargs", {"style": SENTINEL}), ("chat_template_kwargs", {"tokenize": True})],
)
def test_a_column_that_a_template_does_not_read_is_refused_or_ignored(tmp_path: Path, column: str, value: Any) -> None:
    with refused(rf"does not read {column} .*--data.columns '{{{column}: null}}'"):
        text_of(load_rows(tmp_path, {**CHAT, column: value}), reader(CHATML + "{# tokenize #}"))
    table = load_rows(tmp_path, {**CHAT, column: value}, columns={column: None})
    assert text_of(table, reader(CHATML)).endswith("Anna<|im_end|>\n")


@pytest.mark.parametrize("empty", [None, [], "", "[]", "{}", {}])
def test_empty_columns_change_nothing(tmp_path: Path, empty: Any) -> None:
    columns = dict.fromkeys(("tools", "chat_template_kwargs"), empty)
    with_columns, bare = (load_rows(tmp_path, {**CHAT, **more}) for more in (columns, {}))
    assert with_columns.digest == bare.digest
    assert text_of(with_columns, reader(CHATML)) == text_of(bare, reader(CHATML))


@pytest.mark.parametrize(
    ("column", "value"),
    [("tools", SENTINEL), ("tools", [7]), ("tools", {"a": 1}), ("chat_template_kwargs", [SENTINEL])],
)
def test_columns_of_another_kind_are_refused(tmp_path: Path, column: str, value: Any) -> None:
    with refused(f"row 1 has no .* in column '{column}'"):
        load_rows(tmp_path, {**CHAT, column: value})


def test_rows_of_a_program_keep_their_tools_and_prompts_with_tools_are_refused(tmp_path: Path) -> None:
    path = write_rows([{**CHAT, "tools": TOOLS}], [], tmp_path, "train")
    assert load(path, tmp_path).rows[0].parts["tools"] == TOOLS
    rows = [{"messages": talk("Who?")}, {"messages": talk("Who?"), "tools": TOOLS}]
    with refused("line 2 has tools"):
        prompts.read_prompts(tiny.write_rows(tmp_path / "prompts.jsonl", rows))


@pytest.mark.parametrize("fmt", ["text", "prompt_completion", "preference"])
def test_a_rendered_text_begins_once(fmt: Any) -> None:
    prompt, tokenizer = "<|user|>Who?<|assistant|>", tiny.tokenizer()
    data = tiny.reads(128, template="{prompt}{completion}")

    def units(prompt: str) -> list[Unit]:
        row = {"text": f"{prompt}Anna</s>", "prompt": prompt, "completion": "Anna", "chosen": "Anna", "rejected": "Bo"}
        return encode_units([tiny.rows([row])], fmt, tokenizer, data)

    assert units(f"<s>{prompt}") == units(prompt)
    for sequence in units(f"<s>{prompt}")[0].sequences:
        assert sequence.input_ids.count(tokenizer.bos_token_id) == 1
        assert sequence.input_ids[0] == tokenizer.bos_token_id
        assert sequence.denominator == sum(sequence.loss_mask)
    if fmt != "preference":
        ids = prompts.encode(tokenizer, f"<s>{prompt}", 0, fmt, data.template)
        assert ids == prompts.encode(tokenizer, prompt, 0, fmt, data.template)
        assert ids.count(0) == 1


DROPS_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_drops_what_is_said_is_refused() -> None:
    """Qwen3's writes nothing for content in parts: a run would be charged and learn the ends of turns alone."""
    tokenizer = tiny.tokenizer(chat_template=DROPS_PARTS)
    assert rendering.render_chat({"messages": talk("Hello", "Hello")}, tokenizer)[1]
    with refused("leaves out what a message says"):
        rendering.render_chat({"messages": [turn("user", PARTS), turn("assistant", PARTS)]}, tokenizer)


def test_thoughts_of_a_turn_that_is_left_out_are_not_learned_by_marks() -> None:
    """Two marks a turn, each where something stands: one count for two turns says nothing of whose they are."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for part in [m.get('reasoning_content'), m.content] %}{% if part %}"
        "{% generation %}{{ part }}{% endgeneration %}{% endif %}{% endfor %}{% endfor %}"
    )
    left_out = turn("assistant", "cat", weight=0, reasoning_content="hmm")
    with refused("marks parts of turns"):
        messages = [*talk("What?", "", "What?"), left_out]
        rendering.render_chat({"messages": messages}, tiny.tokenizer(chat_template=template))


CHANNELS = (  # as gpt-oss: thoughts have a message of their own, which stands in the last turn alone
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant"
    "{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_the_end_of_the_users_turn_is_not_taken_for_the_beginning_of_the_assistants() -> None:
    """Both begin with the same two letters, and the thoughts between them are left out of a turn that others follow."""
    thinking = [turn("assistant", text, reasoning_content=f"hmm {text}") for text in ("cat one", "cat two")]
    pieces = learned(reader(CHANNELS), [turn("user", "q1"), thinking[0], turn("user", "q2"), thinking[1]])
    assert pieces == [
        "<|channel|>final<|message|>cat one<|end|>",
        "<|channel|>analysis<|message|>hmm cat two<|end|><|start|>assistant<|channel|>final<|message|>cat two<|end|>",
    ]


def test_a_row_with_the_sign_itself_is_refused_where_the_sign_is_needed() -> None:
    with refused("does not show where a turn"):
        learned(reader(THINKS), talk("\ue0d1\ue0d2", "Anna", "And?", "Bo"))
