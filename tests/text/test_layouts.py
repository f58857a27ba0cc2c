"""The layouts that trainers document: what is learned of each, and that no row decides for another one."""

from pathlib import Path

import pytest
from text_tables import SENTINEL, Json, learned, load_rows, refused, units_of

from dpllm.text import rendering
from dpllm.text.data import Table

ALPACA = {"instruction": "Say hello", "input": "to Anna", "output": "Hello Anna"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Anna"}]}
TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anna"}]
SYSTEM = {"role": "system", "content": "Be."}
CHATS = {"prompt": [*TALK, {"role": "user", "content": "And?"}], "completion": [{"role": "assistant", "content": "Bo"}]}
AS_ALPACA = "read as Alpaca: instruction + input -> prompt, output -> completion"
AS_SHAREGPT = "read as ShareGPT: system + conversations -> messages"
PLAIN = {"prompt": "Who?", "completion": "Anna"}
TURN = {"from": [SENTINEL], "value": SENTINEL}


def learned_text(table: Table) -> list[str]:
    return [learned(sequence) for unit in units_of(table) for sequence in unit.sequences]


@pytest.mark.parametrize(
    ("row", "fmt", "fields", "reads"),
    [
        ({"text": "a"}, "text", {"text": "a"}, "read as text: text"),
        (PLAIN, "prompt_completion", PLAIN, "read as prompt_completion: prompt, completion"),
        ({"messages": TALK}, "messages", {"messages": TALK}, "read as messages: messages"),
        (ALPACA, "prompt_completion", {"prompt": "Say hello\nto Anna\n", "completion": "Hello Anna"}, AS_ALPACA),
        ({**ALPACA, "input": ""}, "prompt_completion", {"prompt": "Say hello\n"}, AS_ALPACA),
        (SHAREGPT, "messages", {"messages": TALK}, AS_SHAREGPT),
        ({**SHAREGPT, "system": "Be."}, "messages", {"messages": [SYSTEM, *TALK]}, AS_SHAREGPT),
        ({"conversations": TALK}, "messages", {"messages": TALK}, AS_SHAREGPT),
    ],
)
@pytest.mark.parametrize("stated", [False, True])
def test_a_layout_becomes_a_format_and_says_so(
    tmp_path: Path, row: Json, fmt: str, fields: Json, reads: str, stated: bool
) -> None:
    table = load_rows(tmp_path, row, format=fmt if stated else "auto")
    assert (table.format, table.reads) == (fmt, reads)
    assert {field: table.rows[0].parts[field] for field in fields} == fields


def test_other_columns_are_named_as_they_are_read(tmp_path: Path) -> None:
    table = load_rows(tmp_path, {"q": "Who?", "a": "Anna"}, columns={"instruction": "q", "output": "a"})
    assert table.reads == "read as Alpaca: q (else instruction) + input -> prompt, a (else output) -> completion"
    assert table.rows[0].parts["prompt"] == "Who?\n"


def test_a_column_that_is_named_nothing_is_ignored(tmp_path: Path) -> None:
    row = {**ALPACA, "text": "Say hello"}
    assert load_rows(tmp_path, row, columns={"text": None}).reads == AS_ALPACA
    table = load_rows(tmp_path, row, columns={"text": None, "input": None})
    assert table.rows[0].parts["prompt"] == "Say hello\n"
    assert table.reads == "read as Alpaca: instruction -> prompt, output -> completion"
    renamed = {"text": "output", "instruction": None, "output": None}
    assert load_rows(tmp_path, row, columns=renamed).format == "text"
    with refused("row 1 fills the columns output of those"):
        load_rows(tmp_path, ALPACA, columns={"instruction": None, "input": None})


def test_the_answer_alone_is_learned_and_no_earlier_one_of_a_prompt_of_messages(tmp_path: Path) -> None:
    for row, answer in ((ALPACA, "Hello Anna</s>"), (SHAREGPT, "Anna</s>")):
        assert learned_text(load_rows(tmp_path, row)) == [answer]
    table = load_rows(tmp_path, CHATS)
    assert (table.format, len(table.rows[0].parts["messages"])) == ("messages", 4)
    assert learned_text(table) == ["Bo</s>"]
    assert learned_text(load_rows(tmp_path, {"messages": CHATS["prompt"] + CHATS["completion"]})) == ["Anna</s>Bo</s>"]


@pytest.mark.parametrize("stated", ["auto", "prompt_completion"])
def test_rows_of_two_layouts_are_refused(tmp_path: Path, stated: str) -> None:
    with refused("row 2 reads as Alpaca, but the rows before it read as prompt_completion"):
        load_rows(tmp_path, PLAIN, ALPACA, format=stated)
    with refused("row 3 .*'output'"):
        load_rows(tmp_path, ALPACA, ALPACA, {"instruction": SENTINEL}, format=stated)


def test_a_row_that_fits_two_formats_is_refused_unless_one_is_stated(tmp_path: Path) -> None:
    row = {**ALPACA, "text": "Say hello"}
    with refused("row 1 reads as text and as Alpaca"):
        load_rows(tmp_path, row)
    assert load_rows(tmp_path, row, format="text").format == "text"
    assert load_rows(tmp_path, row, format="prompt_completion").rows[0].parts["completion"] == "Hello Anna"
    with refused("row 1 has no .*messages"):
        load_rows(tmp_path, row, format="messages")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": SENTINEL, SENTINEL: "yes"}, "the columns prompt of those .* and 1 others"),
        *(({**ALPACA, column: value}, f"'{column}'") for column, value in (("input", [SENTINEL]), ("instruction", 7))),
        *(({"text": value}, "'text'") for value in (7, [SENTINEL], {"a": SENTINEL}, True)),
        *(({"messages": value}, "'messages'") for value in (SENTINEL, [])),
        ({"conversations": SENTINEL}, "'conversations'"),
        *(({"conversations": [turn]}, "'from'") for turn in (TURN, {**TURN, "from": SENTINEL}, {"value": SENTINEL}, SENTINEL)),
        ({**SHAREGPT, "system": 7}, "'system'"),
        ({"prompt": [{"role": "user", "content": SENTINEL}], "completion": SENTINEL}, "'prompt'"),
    ],
)  # fmt: skip
def test_a_row_that_fits_no_layout_names_its_columns_and_not_their_text(tmp_path: Path, row: Json, named: str) -> None:
    with refused(f"row 1 .*{named}"):
        load_rows(tmp_path, row)


def test_an_example_of_public_data_says_what_is_learned(tmp_path: Path) -> None:
    shown = rendering.example(load_rows(tmp_path, CHATS).rows[0], "messages", None).splitlines()
    assert shown[:2] == ["user, masked: Who?", "assistant, masked: Anna"]
    assert shown[2:] == ["user, masked: And?", "assistant, learned: Bo"]
    shown = rendering.example(load_rows(tmp_path, ALPACA).rows[0], "prompt_completion", None)
    assert shown.endswith("learned: Hello Anna<eos>")
