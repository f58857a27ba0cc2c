"""Chats of several turns under templates of many habits: the assistant's turns are learned, whole, and nothing else."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import chat_templates as of
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layouts import load

from dpllm.errors import DataError
from dpllm.text import prompts, rendering
from dpllm.text.data import each_row
from dpllm.text.tokens import encode, encode_units

Json = dict[str, Any]
SENTINEL = "Sigrid Forsberg owes 4711"
SIGNS = [
    *("<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<think>", "</think>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "[INST]", "[/INST]"),
]  # fmt: skip


def turn(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def talk(*words: str, system: str = "") -> list[Json]:
    turns = [turn(role, one) for role, one in zip(itertools.cycle(("user", "assistant")), words, strict=False)]
    return [turn("system", system)] * bool(system) + turns


@cache
def reader(template: str | None, *, special: bool = True) -> Any:
    made = tiny.tokenizer(chat_template=template)
    if special:
        made.add_special_tokens({"additional_special_tokens": SIGNS})
    return made


def learned(tokenizer: Any, messages: list[Json], **beside: Any) -> list[str]:
    """The learned pieces of a row, each whole."""
    (one,) = encode({"messages": messages, **beside}, "messages", tokenizer, tiny.reads(4096))
    runs = itertools.groupby(zip(one.input_ids, one.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for wanted, run in runs if wanted]


NO_THOUGHT = "<think>\n\n</think>\n\n"
WRITTEN = {  # what the assistant says -> what is learned of it, in the middle and at the end
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
    middle, last = WRITTEN[name]
    return [*(middle.format(one) for one in answers[:-1]), last.format(answers[-1])]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_assistants_turns_with_their_ends_are_learned_and_nothing_else(name: str, special: bool) -> None:
    system = "" if name == "PICKY" else "Be brief."
    messages = talk("Who?", "Anna", "And?", "Bo", "Or?", "Eva", system=system)
    assert learned(reader(getattr(of, name), special=special), messages) == expected(name, ["Anna", "Bo", "Eva"])


def test_signs_that_are_words_to_the_tokenizer_are_not_cut_where_they_begin_alike() -> None:
    words = of.ENDS.replace("<|{{ m.role }}|>", "<|of {{ m.role }}|>").replace("<|assistant|>", "<|of assistant|>")
    plain = reader(words.replace("{{ eos_token }}", "<|over|>"), special=False)
    assert learned(plain, talk("Who?", "Anna", "And?", "Bo")) == ["Anna<|end|>\n", "Bo<|end|>\n<|over|>"]


SAID = st.text("ab<|>:#?\n", min_size=1, max_size=9).map(lambda text: f"x{text}y") | st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>assistant\n.",
        "<|user|>",
        "<|end|>",
        "[INST] a [/INST]",
        "### Assistant:\n.",
        "{{ x }}",
    ]
)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(WRITTEN)), words=st.lists(SAID, min_size=2, max_size=6), told=st.booleans())
def test_whatever_people_say_their_words_are_not_learned(name: str, words: list[str], told: bool) -> None:
    words = words[: len(words) // 2 * 2]
    system = "Be brief." if told and name != "PICKY" else ""
    read = reader(getattr(of, name))
    pieces = learned(read, talk(*words, system=system))
    assert pieces == expected(name, words[1::2])


CALL = [{"type": "function", "function": {"name": "look_up", "arguments": {"of": "Anna"}}}]
CALLED = '<tool_call>{"name": "look_up", "arguments": {"of": "Anna"}}</tool_call><|im_end|>\n'
LOOKED = [turn("user", "Who?"), turn("assistant", None, reasoning_content="Hm.", tool_calls=CALL), turn("tool", "42")]
THOUGHT = "<think>\nHm.\n</think>\n\n"
THINKING = {
    "thoughts of an earlier turn are not there": (
        [turn("user", "Who?"), turn("assistant", "Anna", reasoning_content="Hm."), *talk("And?", "Bo")],
        {},
        ["Anna<|im_end|>\n", f"{NO_THOUGHT}Bo<|im_end|>\n"],
    ),
    "nor those within its words": (
        talk("Who?", f"{THOUGHT}Anna", "And?", f"{THOUGHT}Bo"),
        {},
        ["Anna<|im_end|>\n", f"{THOUGHT}Bo<|im_end|>\n"],
    ),
    "calls of tools": (
        [*LOOKED, turn("assistant", "Anna")],
        {},
        [f"{THOUGHT}{CALLED}", f"{NO_THOUGHT}Anna<|im_end|>\n"],
    ),
    "calls of tools, earlier": (
        [*LOOKED, turn("assistant", "Anna"), *talk("And?", "Bo")],
        {},
        [CALLED, "Anna<|im_end|>\n", f"{NO_THOUGHT}Bo<|im_end|>\n"],
    ),
    "calls beside words, earlier": (
        [LOOKED[0], {**LOOKED[1], "content": "I look."}, LOOKED[2], turn("assistant", "Anna"), *talk("And?", "Bo")],
        {},
        [f"I look.{CALLED}", "Anna<|im_end|>\n", f"{NO_THOUGHT}Bo<|im_end|>\n"],
    ),
    "an empty thought that is asked for is no word of the assistant": (
        talk("Who?", "Anna", "And?", "Bo"),
        {"chat_template_kwargs": {"enable_thinking": False}},
        ["Anna<|im_end|>\n", "Bo<|im_end|>\n"],
    ),
}


@pytest.mark.parametrize("what", THINKING)
def test_turns_are_found_where_earlier_ones_are_written_otherwise(what: str) -> None:
    messages, beside, pieces = THINKING[what]
    assert learned(reader(of.THINKS), messages, **beside) == pieces


def test_a_call_beside_which_no_words_are_shown_is_found_by_its_name() -> None:
    silent = of.THINKS.replace("{{ said }}", "{{ '' if m.tool_calls else said }}")
    assert learned(reader(silent), THINKING["calls of tools, earlier"][0]) == THINKING["calls of tools, earlier"][2]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_turn_of_no_weight_is_left_out(name: str) -> None:
    messages = talk("Who?", "Anna", "And?", "Bo")
    messages[1]["weight"] = 0
    assert learned(reader(getattr(of, name)), messages) == expected(name, ["Anna", "Bo"])[1:]


def test_of_marks_that_tell_no_turn_none_is_left_out() -> None:
    parts = of.MARKED.replace(
        "{{ m.content }}<|im_end|>{%", "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{%"
    )
    messages = talk("Who?", "Anna", "And?", "Bo")
    assert learned(reader(parts), messages) == expected("MARKED", ["Anna", "Bo"])
    messages[1]["weight"] = 0
    with pytest.raises(DataError, match="marks parts of turns"):
        learned(reader(parts), messages)


@pytest.mark.parametrize("answer", ["Anna", "", "é" * 9, "<|user|>"])
def test_marks_are_read_as_transformers_reads_them(answer: str) -> None:
    messages = talk("Who?", answer, "And?", "Bo", system="Be brief.")
    own = reader(of.MARKED).apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    (one,) = encode({"messages": messages}, "messages", reader(of.MARKED), tiny.reads(4096))
    assert list(one.input_ids) == own["input_ids"]
    assert list(map(int, one.loss_mask)) == own["assistant_masks"]


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
    with pytest.raises(DataError, match="does not show where a turn") as caught:
        learned(reader(template), talk(SENTINEL, "Anna", SENTINEL, "Bo"))
    assert "Sigrid" not in str(caught.value)


def test_a_row_with_the_sign_itself_is_refused_where_the_sign_is_needed() -> None:
    with pytest.raises(DataError, match="does not show where a turn"):
        learned(reader(of.THINKS), talk("\ue0d1\ue0d2", "Anna", "And?", "Bo"))


PARTS = [{"type": "text", "text": SENTINEL}]
SILENT = turn("assistant", None, tool_calls=CALL)
BROKEN = {
    "no template": (None, talk(SENTINEL, "Anna"), "has no chat template"),
    "parts that cannot be joined to text": (of.PICKY, [turn("user", PARTS), turn("assistant", "Anna")], "in parts"),
    "parts that would be printed as a list": (of.CHATML, [turn("user", PARTS), turn("assistant", "Anna")], "in parts"),
    "null": (of.PICKY + "{# tool_calls #}", [turn("user", SENTINEL), SILENT], "without content"),
    "a role": (of.PICKY, talk("Who?", "Anna", system=SENTINEL), "refuses a role"),
    "an order": (of.PICKY, [*talk("Who?", "Anna"), turn("assistant", SENTINEL)], "refuses a role"),
    "a beginning": (of.CHATML, [turn("assistant", SENTINEL), *talk("Who?", "Anna")], "begins with the assistant"),
    "calls that would not be seen": (of.CHATML, [turn("user", SENTINEL), SILENT], "does not read tool_calls"),
    "a template that is no template": ("{% for %}", talk(SENTINEL, "Anna"), "fails on"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_template_does_not_take_is_said_in_its_own_words(what: str) -> None:
    template, messages, says = BROKEN[what]
    others = {words for _, _, words in BROKEN.values()} - {says}
    with pytest.raises(DataError, match=says) as caught:
        learned(reader(template), messages)
    said = str(caught.value)
    assert not any(words in said for words in others)
    assert "Sigrid" not in said
    assert "\n" not in said


def test_a_template_that_reads_parts_gets_them() -> None:
    joins = of.CHATML.replace(
        "{{ m.content }}", "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
    )
    messages = [
        turn("user", PARTS),
        turn("assistant", [{"type": "text", "text": "An"}, {"type": "text", "text": "na"}]),
    ]
    assert learned(reader(joins), messages) == ["Anna<|im_end|>\n"]
    joins = of.CHATML.replace("{{ m.content }}", "{% for one in m.content %}{{ one.text }}{% endfor %}")
    ends = joins.replace("{% if add", "{% if not add_generation_prompt %}</s>{% endif %}{% if add")
    assert learned(reader(ends), [*messages, *messages]) == ["Anna<|im_end|>\n", "Anna<|im_end|>\n</s>"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (turn("assistant", None), "whose content is null"),
        ({"role": "assistant"}, "whose content is null"),
        (turn("user", [{"type": "image", "url": SENTINEL}]), "no text .an image"),
        (turn("user", [SENTINEL]), "no text .an image"),
    ],
)
def test_a_file_with_a_message_that_says_nothing_names_its_row(tmp_path: Path, message: Json, says: str) -> None:
    with pytest.raises(DataError, match=f"row 2 has a message .*{says}") as caught:
        load(tmp_path, {"messages": talk("Who?", "Anna")}, {"messages": [*talk("Who?"), message]})
    assert "Sigrid" not in str(caught.value)


# --- columns beside messages ------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Looks up.", "parameters": {"content": {"of": "x"}}},
    }
]
CHAT: Json = {"messages": talk("Who?", "Anna")}


def text_of(table: Any, tokenizer: Any) -> str:
    units = encode_units(each_row(table.rows), table.format, tokenizer, tiny.reads(4096))
    return str(tokenizer.decode(units[0].sequences[0].input_ids))


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", ["messages", "conversations", "preference"])
def test_tools_and_settings_of_a_row_reach_the_template(tmp_path: Path, kind: str, as_text: bool) -> None:
    import json

    beside: Json = {"tools": TOOLS, "chat_template_kwargs": {"style": "terse"}}
    if as_text:
        beside = {name: json.dumps(value) for name, value in beside.items()}
    row = {kind: CHAT["messages"]}
    if kind == "preference":
        row = {"prompt": talk("Who?"), "chosen": [turn("assistant", "Anna")], "rejected": [turn("assistant", "Bo")]}
    told, silent = (load(tmp_path, {**row, **more}) for more in (beside, {}))
    read = reader(of.TOOLED)
    assert text_of(told, read).startswith(f"<tools>{json.dumps(TOOLS)}</tools>\n<terse><|im_start|>user")
    assert text_of(silent, read).startswith("<|im_start|>user")
    assert told.digest != silent.digest


@pytest.mark.parametrize(
    "beside",
    [{"tools": TOOLS}, {"chat_template_kwargs": {"style": SENTINEL}}, {"chat_template_kwargs": {"tokenize": True}}],
)
def test_what_a_template_does_not_read_is_refused_or_ignored_on_demand(tmp_path: Path, beside: Json) -> None:
    (column,) = beside
    with pytest.raises(DataError, match=rf"does not read {column} .*--data.columns '{{{column}: null}}'") as caught:
        text_of(load(tmp_path, {**CHAT, **beside}), reader(of.CHATML + "{# tokenize #}"))
    assert "Sigrid" not in str(caught.value)
    table = load(tmp_path, {**CHAT, **beside}, columns={column: None})
    assert text_of(table, reader(of.CHATML)).endswith("Anna<|im_end|>\n")


@pytest.mark.parametrize("empty", [None, [], "", "[]", "{}", {}])
def test_columns_that_hold_nothing_say_nothing(tmp_path: Path, empty: Any) -> None:
    table = load(tmp_path, {**CHAT, "tools": empty, "chat_template_kwargs": empty})
    assert table.digest == load(tmp_path, CHAT).digest
    assert text_of(table, reader(of.CHATML)) == text_of(load(tmp_path, CHAT), reader(of.CHATML))


@pytest.mark.parametrize(
    "beside", [{"tools": SENTINEL}, {"tools": [7]}, {"tools": {"a": 1}}, {"chat_template_kwargs": [SENTINEL]}]
)
def test_columns_of_another_kind_are_refused(tmp_path: Path, beside: Json) -> None:
    (column,) = beside
    with pytest.raises(DataError, match=f"row 1 has no .* in column '{column}'") as caught:
        load(tmp_path, {**CHAT, **beside})
    assert "Sigrid" not in str(caught.value)


def test_rows_of_a_program_keep_their_tools(tmp_path: Path) -> None:
    from dpllm.recipe.config import DataConfig
    from dpllm.text.data import load_table
    from dpllm.text.in_memory import write_rows

    data = DataConfig(train=str(write_rows([{**CHAT, "tools": TOOLS}], [], tmp_path, "train")))
    assert load_table(data.train, data, "train", tmp_path).rows[0].parts["tools"] == TOOLS


def test_prompts_with_tools_are_refused(tmp_path: Path) -> None:
    path = tiny.write_rows(
        tmp_path / "prompts.jsonl", [{"messages": talk("Who?")}, {"messages": talk("Who?"), "tools": TOOLS}]
    )
    with pytest.raises(DataError, match="line 2 has tools"):
        prompts.read_prompts(path)


# --- text that was rendered before ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["text", "prompt_completion", "preference"])
def test_a_rendered_text_begins_once(fmt: str) -> None:
    read = tiny.tokenizer()
    asked, whole = "<s><|user|>Who?<|assistant|>", "<s><|user|>Who?<|assistant|>Anna</s>"
    row = (
        {"text": whole}
        if fmt == "text"
        else {"prompt": asked, "completion": "Anna", "chosen": "Anna", "rejected": "Bo"}
    )
    for one in encode_units([tiny.rows([row])], fmt, read, tiny.reads(128, template="{prompt}{completion}"))[
        0
    ].sequences:  # type: ignore[arg-type]
        assert one.input_ids.count(read.bos_token_id) == 1
        assert one.input_ids[0] == read.bos_token_id
        assert one.denominator == sum(one.loss_mask)
    bare = {"text": whole.removeprefix("<s>")} if fmt == "text" else {**row, "prompt": asked.removeprefix("<s>")}
    how = tiny.reads(128, template="{prompt}{completion}")
    assert encode_units([tiny.rows([row])], fmt, read, how) == encode_units([tiny.rows([bare])], fmt, read, how)  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["text", "prompt_completion"])
def test_a_rendered_prompt_begins_once(fmt: Any) -> None:
    ids = prompts.encode(tiny.tokenizer(), "<s><|user|>Who?", 0, fmt, "{prompt}{completion}")
    assert ids == prompts.encode(tiny.tokenizer(), "<|user|>Who?", 0, fmt, "{prompt}{completion}")
    assert ids.count(0) == 1


DROPS_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_drops_what_is_said_is_refused() -> None:
    """Qwen3's writes nothing for content in parts: a run would be charged and learn the ends of turns alone."""
    parts = [{"role": role, "content": [{"type": "text", "text": "Hello"}]} for role in ("user", "assistant")]
    texts = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
    tokenizer = tiny.tokenizer(chat_template=DROPS_PARTS)
    assert rendering.render_chat({"messages": texts}, tokenizer)[1]
    with pytest.raises(DataError, match="leaves out what a message says"):
        rendering.render_chat({"messages": parts}, tokenizer)


def test_thoughts_of_a_turn_that_is_left_out_are_not_learned_by_marks() -> None:
    """Two marks a turn, each where something stands: one count for two turns says nothing of whose they are."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for part in [m.get('reasoning_content'), m.content] %}{% if part %}"
        "{% generation %}{{ part }}{% endgeneration %}{% endif %}{% endfor %}{% endfor %}"
    )
    ask = {"role": "user", "content": "What?"}
    left_out = {"role": "assistant", "content": "cat", "weight": 0, "reasoning_content": "hmm"}
    rows = [ask, {"role": "assistant", "content": ""}, ask, left_out]
    with pytest.raises(DataError, match="marks parts of turns"):
        rendering.render_chat({"messages": rows}, tiny.tokenizer(chat_template=template))


CHANNELS = (  # as gpt-oss: thoughts have a message of their own, which stands in the last turn alone
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant"
    "{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_the_end_of_the_users_turn_is_not_taken_for_the_beginning_of_the_assistants() -> None:
    """Both begin with the same two letters, and the thoughts between them are left out of a turn that others follow."""
    thinking = [turn("assistant", one, reasoning_content=f"hmm {one}") for one in ("cat one", "cat two")]
    pieces = learned(reader(CHANNELS), [turn("user", "q1"), thinking[0], turn("user", "q2"), thinking[1]])
    assert pieces == [
        "<|channel|>final<|message|>cat one<|end|>",
        "<|channel|>analysis<|message|>hmm cat two<|end|><|start|>assistant<|channel|>final<|message|>cat two<|end|>",
    ]
