"""The layouts that trainers document: what is learned of each, and that no row decides for another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from dpllm.errors import DataError
from dpllm.recipe.config import DataConfig
from dpllm.text import rendering
from dpllm.text.data import each_row, load_table
from dpllm.text.tokens import encode_units

Json = dict[str, Any]
SENTINEL = "Sigrid Forsberg owes 4711"
ALPACA = {"instruction": "Say hello", "input": "to Anna", "output": "Hello Anna"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Anna"}]}
TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anna"}]
CHATS = {"prompt": [*TALK, {"role": "user", "content": "And?"}], "completion": [{"role": "assistant", "content": "Bo"}]}
AS_ALPACA = "read as Alpaca: instruction + input -> prompt, output -> completion"
AS_SHAREGPT = "read as ShareGPT: system + conversations -> messages"
PLAIN = {"prompt": "Who?", "completion": "Anna"}


def load(tmp_path: Path, *rows: Json, **values: Any) -> Any:
    path = tiny.write_rows(tmp_path / "rows.jsonl", list(rows))
    data = DataConfig.model_validate({"train": str(path), **values})
    return load_table(data.train, data, "train", tmp_path / "cache")


def learned_text(table: Any) -> list[str]:
    tokenizer = tiny.tokenizer()
    data = DataConfig(train="rows.jsonl", max_length=128)
    units = encode_units(each_row(table.rows), table.format, tokenizer, data)
    return [
        tokenizer.decode([token for token, wanted in zip(one.input_ids, one.loss_mask, strict=True) if wanted])
        for unit in units
        for one in unit.sequences
    ]


@pytest.mark.parametrize(
    ("row", "fmt", "fields", "reads"),
    [
        ({"text": "a"}, "text", {"text": "a"}, "read as text: text"),
        (PLAIN, "prompt_completion", PLAIN, "read as prompt_completion: prompt, completion"),
        ({"messages": TALK}, "messages", {"messages": TALK}, "read as messages: messages"),
        (ALPACA, "prompt_completion", {"prompt": "Say hello\nto Anna\n", "completion": "Hello Anna"}, AS_ALPACA),
        ({**ALPACA, "input": ""}, "prompt_completion", {"prompt": "Say hello\n"}, AS_ALPACA),
        (SHAREGPT, "messages", {"messages": TALK}, AS_SHAREGPT),
        (
            {**SHAREGPT, "system": "Be."},
            "messages",
            {"messages": [{"role": "system", "content": "Be."}, *TALK]},
            AS_SHAREGPT,
        ),
        ({"conversations": TALK}, "messages", {"messages": TALK}, AS_SHAREGPT),
    ],
)
@pytest.mark.parametrize("stated", [False, True])
def test_a_layout_becomes_a_format_and_says_so(
    tmp_path: Path, row: Json, fmt: str, fields: Json, reads: str, stated: bool
) -> None:
    table = load(tmp_path, row, format=fmt if stated else "auto")
    assert (table.format, table.reads) == (fmt, reads)
    assert {field: table.rows[0].parts[field] for field in fields} == fields


def test_other_columns_are_named_as_they_are_read(tmp_path: Path) -> None:
    table = load(tmp_path, {"q": "Who?", "a": "Anna"}, columns={"instruction": "q", "output": "a"})
    assert table.reads == "read as Alpaca: q (else instruction) + input -> prompt, a (else output) -> completion"
    assert table.rows[0].parts["prompt"] == "Who?\n"


def test_a_column_that_is_named_nothing_is_ignored(tmp_path: Path) -> None:
    row = {**ALPACA, "text": "Say hello"}
    assert load(tmp_path, row, columns={"text": None}).reads == AS_ALPACA
    told = load(tmp_path, row, columns={"text": None, "input": None})
    assert told.rows[0].parts["prompt"] == "Say hello\n"
    assert told.reads == "read as Alpaca: instruction -> prompt, output -> completion"
    assert load(tmp_path, row, columns={"text": "output", **dict.fromkeys(("instruction", "output"))}).format == "text"
    with pytest.raises(DataError, match="row 1 fills the columns output of those"):
        load(tmp_path, ALPACA, columns={"instruction": None, "input": None})


@pytest.mark.parametrize(("row", "answer"), [(ALPACA, "Hello Anna"), (SHAREGPT, "Anna")])
def test_of_each_layout_the_answer_alone_is_learned(tmp_path: Path, row: Json, answer: str) -> None:
    [learned] = learned_text(load(tmp_path, row))
    assert answer in learned
    assert "Say" not in learned
    assert "Who" not in learned


def test_of_a_prompt_of_messages_earlier_answers_are_not_learned(tmp_path: Path) -> None:
    table = load(tmp_path, CHATS)
    assert (table.format, len(table.rows[0].parts["messages"])) == ("messages", 4)
    [answer] = learned_text(table)
    assert "Bo" in answer
    assert "Anna" not in answer
    [both] = learned_text(load(tmp_path, {"messages": CHATS["prompt"] + CHATS["completion"]}))
    assert "Anna" in both


@pytest.mark.parametrize("stated", ["auto", "prompt_completion"])
def test_rows_of_two_layouts_are_refused(tmp_path: Path, stated: str) -> None:
    with pytest.raises(DataError, match="row 2 reads as Alpaca, but the rows before it read as prompt_completion"):
        load(tmp_path, PLAIN, ALPACA, format=stated)
    with pytest.raises(DataError, match="row 3 has no text in column 'output', which Alpaca reads"):
        load(tmp_path, ALPACA, ALPACA, {"instruction": SENTINEL}, format=stated)


def test_a_row_that_fits_two_formats_is_refused_unless_one_is_stated(tmp_path: Path) -> None:
    row = {**ALPACA, "text": "Say hello"}
    with pytest.raises(DataError, match="row 1 reads as text and as Alpaca"):
        load(tmp_path, row)
    assert load(tmp_path, row, format="text").format == "text"
    assert load(tmp_path, row, format="prompt_completion").rows[0].parts["completion"] == "Hello Anna"
    with pytest.raises(DataError, match=r"row 1 has no .*messages"):
        load(tmp_path, row, format="messages")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": SENTINEL, SENTINEL: "yes"}, "row 1 fills the columns prompt of those .* and 1 others; a row needs"),
        (
            {"conversations": [{"from": [SENTINEL], "value": SENTINEL}]},
            "row 1 has a turn .* 'from' is not one of human, ",
        ),
        ({**ALPACA, "input": [SENTINEL]}, "row 1 has no text in column 'input', which Alpaca reads"),
        ({**ALPACA, "instruction": 7}, "row 1 has no text in column 'instruction'"),
        *(({"text": value}, "row 1 has no text in column 'text'") for value in (7, [SENTINEL], {"a": SENTINEL}, True)),
        *(({"messages": value}, "row 1 has no a list of messages in column") for value in (SENTINEL, [])),
        ({"conversations": SENTINEL}, "row 1 has no a list of messages in column 'conversations'"),
        (
            {"conversations": [{"from": SENTINEL, "value": SENTINEL}]},
            "row 1 has a turn .* 'from' is not one of human, ",
        ),
        ({"conversations": [{"value": SENTINEL}]}, "row 1 has a turn .* without a key 'from'"),
        ({"conversations": [SENTINEL]}, "row 1 has a turn .* without a key 'from'"),
        ({**SHAREGPT, "system": 7}, "row 1 has no text in column 'system'"),
        ({"prompt": [{"role": "user", "content": SENTINEL}], "completion": SENTINEL}, "no text in column 'prompt'"),
    ],
)
def test_a_row_that_fits_no_layout_names_its_columns_and_not_their_text(tmp_path: Path, row: Json, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        load(tmp_path, row)
    assert "Sigrid" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_example_of_public_data_says_what_is_learned(tmp_path: Path) -> None:
    table = load(tmp_path, CHATS)
    assert rendering.example(table.rows[0], "messages", None).splitlines() == [
        "user, masked: Who?",
        "assistant, masked: Anna",
        "user, masked: And?",
        "assistant, learned: Bo",
    ]
    shown = rendering.example(load(tmp_path, ALPACA).rows[0], "prompt_completion", None)
    assert shown.endswith("learned: Hello Anna<eos>")
