"""Chats of several turns under templates of many habits: the assistant's turns are learned, whole, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import chat_templates as of
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layouts import load

from dpllm.errors import DataError
from dpllm.text.data import encode, encode_units
from dpllm.text.rows import each_row

Json = dict[str, Any]
SIGNS = [
    *("<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<think>", "</think>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "[INST]", "[/INST]"),
]


def turn(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def talk(*words: str, system: str = "") -> list[Json]:
    turns = [turn(role, one) for role, one in zip(itertools.cycle(("user", "assistant")), words, strict=False)]
    return [turn("system", system)] * bool(system) + turns


def reader(template: str, *, special: bool = True) -> Any:
    made = tiny.tokenizer(chat_template=template)
    if special:
        made.add_special_tokens({"additional_special_tokens": SIGNS})
    return made


def learned(tokenizer: Any, row: Json) -> list[str]:
    """The learned pieces of a row, each whole."""
    (one,) = encode(row, "messages", tokenizer, tiny.reads(4096))
    runs = itertools.groupby(zip(one.input_ids, one.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for wanted, run in runs if wanted]


TWO = talk("Who?", "Anna", "And?", "Bo")
TOLD = talk("Who?", "Anna", "And?", "Bo", system="Be brief.")
EXPECTED = {
    "CHATML": (TOLD, ["Anna<|im_end|>\n", "Bo<|im_end|>\n"]),
    "THINKS": (TOLD, ["Anna<|im_end|>\n", "<think>\n\n</think>\n\nBo<|im_end|>\n"]),
    "ENDS": (TOLD, ["Anna<|end|>\n", "Bo<|end|>\n</s>"]),
    "LATE": (TOLD, [" Anna</s>", " Bo</s>"]),
    "OPENS": (TOLD, ["Anna</s>", "Bo</s>"]),
    "RETURNS": (TOLD, [f"<|channel|>final<|message|>{end}" for end in ("Anna<|end|>", "Bo<|return|>")]),
    "PLAIN": (TOLD, ["Anna\n\n", "Bo\n\n</s>"]),
    "MARKED": (TOLD, ["Anna<|im_end|>", "<think>\n\n</think>\n\nBo<|im_end|>"]),
    "PICKY": (TWO, ["Anna<end_of_turn>\n", "Bo<end_of_turn>\n"]),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_assistants_turns_with_their_ends_are_learned_and_nothing_else(name: str, special: bool) -> None:
    messages, expected = EXPECTED[name]
    if not special and name == "RETURNS":
        pytest.skip("its signs touch, so that nothing but their being tokens tells them apart")
    assert learned(reader(getattr(of, name), special=special), {"messages": messages}) == expected
