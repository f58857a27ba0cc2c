"""Preference pairs as trainers document them: what is learned of each answer, what is refused, and what makes one record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from test_layouts import load

from dpllm.errors import DataError
from dpllm.ledger.records import fingerprint
from dpllm.recipe.config import DataConfig
from dpllm.text import layouts, prompts, rendering
from dpllm.text.data import each_row
from dpllm.text.layouts import FIELDS
from dpllm.text.tokens import NOTHING, encode_units

Json = dict[str, Any]
ASKED = [{"role": "user", "content": "Who?"}]
ANNA, BO = ([{"role": "assistant", "content": name}] for name in ("Anna", "Bo"))
SYSTEM = {"role": "system", "content": "Be brief."}
PAIR = {"prompt": "Who?", "chosen": "Anna", "rejected": "Bo"}
CHATS = {"prompt": ASKED, "chosen": ANNA, "rejected": BO}
LAYOUTS = {
    "preference: prompt, chosen, rejected": (PAIR, PAIR),
    "preference without a prompt: what both answers begin with -> prompt, chosen, rejected": (
        {"chosen": "Who? Anna", "rejected": "Who? Bo"},
        {"prompt": "Who?", "chosen": " Anna", "rejected": " Bo"},
    ),
    "preference as messages: prompt, chosen, rejected": (CHATS, CHATS),
    "preference as messages without a prompt: what both answers begin with -> prompt, chosen, rejected": (
        {"chosen": ASKED + ANNA, "rejected": ASKED + BO},
        CHATS,
    ),
}


BESIDE = {"prompt": "Who?", "chosen": ASKED + ANNA, "rejected": ASKED + BO}
ULTRAFEEDBACK = {**BESIDE, "prompt_id": "7", "messages": ASKED + ANNA, "score_chosen": 8.0, "score_rejected": 4.5}
AS_MESSAGES = "read as preference as messages that begin with the prompt: prompt, chosen, rejected"


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        (BESIDE, {}),
        (ULTRAFEEDBACK, {"format": "preference"}),
        (ULTRAFEEDBACK, {"columns": {"messages": None}}),
        ({**BESIDE, "chosen": [SYSTEM, *ASKED, *ANNA], "rejected": [SYSTEM, *ASKED, *BO]}, {}),
        ({**BESIDE, "prompt": None, "question": "Who?"}, {"columns": {"prompt": "question"}}),
    ],
)
def test_a_prompt_as_text_beside_answers_that_begin_with_it_is_read(tmp_path: Path, row: Json, settings: Json) -> None:
    table = load(tmp_path, row, **settings)
    assert (table.format, table.reads.replace("question (else prompt) -> prompt", "prompt")) == (
        "preference",
        AS_MESSAGES,
    )
    before = row["chosen"][:-1]
    assert {field: table.rows[0].parts[field] for field in FIELDS["preference"]} == {
        "prompt": before,
        "chosen": ANNA,
        "rejected": BO,
    }
    (unit,) = units_of(table)
    assert [learned(one) for one in unit.sequences] == ["Anna</s>", "Bo</s>"]


def test_a_prompt_as_text_that_no_message_says_is_refused_or_ignored_on_demand(tmp_path: Path) -> None:
    row = {**BESIDE, "prompt": "Sigrid owes?"}
    with pytest.raises(DataError, match=r"row 1 has a text in column 'prompt' .*'\{prompt: null\}'") as caught:
        load(tmp_path, row)
    assert "Sigrid" not in str(caught.value)
    table = load(tmp_path, row, columns={"prompt": None})
    assert table.rows[0].parts["prompt"] == ASKED
    assert table.reads.startswith("read as preference as messages without a prompt: what both")


def test_neither_layout_takes_the_rows_of_the_other(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="row 2 reads as preference as messages, but the rows before it read as preference"
    ):
        load(tmp_path, BESIDE, CHATS)
    with pytest.raises(DataError, match="row 1 has no text in column 'chosen'"):
        load(tmp_path, {**BESIDE, "rejected": "Bo"})


def units_of(table: Any, **settings: Any) -> list[Any]:
    data = DataConfig.model_validate({"train": "rows.jsonl", "max_length": 128, **settings})
    return encode_units(each_row(table.rows), table.format, tiny.tokenizer(), data)


def learned(one: Any) -> str:
    ids = [token for token, wanted in zip(one.input_ids, one.loss_mask, strict=True) if wanted]
    return str(tiny.tokenizer().decode(ids))


@pytest.mark.parametrize("reads", LAYOUTS)
def test_a_layout_becomes_a_prompt_and_two_answers_and_these_alone_are_learned(tmp_path: Path, reads: str) -> None:
    row, expected = LAYOUTS[reads]
    table = load(tmp_path, row)
    assert (table.format, table.reads) == ("preference", f"read as {reads}")
    assert {field: table.rows[0].parts[field] for field in FIELDS["preference"]} == expected
    (unit,) = units_of(table)
    chosen, rejected = map(learned, unit.sequences)
    assert "Anna" in chosen
    assert "Bo" in rejected
    assert not any("Who" in one for one in (chosen, rejected))


def test_both_answers_of_all_rows_of_a_unit_follow_one_another(tmp_path: Path) -> None:
    pairs = [{"prompt": "Q", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(3)]
    data = DataConfig(train="rows.jsonl", max_length=128)
    (unit,) = encode_units([tiny.rows(pairs)], "preference", tiny.tokenizer(), data)
    words = [learned(one).split()[0] for one in unit.sequences]
    assert words == ["good", "bad"] * 3


def test_a_long_pair_is_cut_at_its_end_and_a_long_prompt_leaves_whole_pairs(tmp_path: Path) -> None:
    table = load(tmp_path, PAIR, {**PAIR, "chosen": "Anna " * 90}, {**PAIR, "prompt": "Who? " * 90})
    short, long, prompted = (unit.sequences for unit in units_of(table, max_length=16))
    assert [len(unit) for unit in (short, long, prompted)] == [2, 2, 2]
    assert len(long[0].input_ids) == 16
    assert prompted == (NOTHING, NOTHING)
    with pytest.raises(DataError, match=r"longer than data\.max_length"):
        units_of(table, max_length=16, long_examples="refuse")


BAD: dict[str, tuple[Json, str]] = {
    "a missing side": ({"prompt": "Who?", "chosen": "Anna"}, "row 2 has no text in column 'rejected'"),
    "an empty side": ({**PAIR, "rejected": ""}, "row 2 has nothing in one of its answers"),
    "equal answers": ({**PAIR, "rejected": "Anna"}, "row 2 has two equal answers"),
    "other types": ({**PAIR, "rejected": BO}, "row 2 has no text in column 'rejected'"),
    "no turn of the assistant": ({**CHATS, "rejected": ASKED}, "no turn of the assistant in one of its answers"),
    "an unknown role": ({**CHATS, "rejected": [{"role": "boss", "content": "x"}]}, "role is not one of"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_pair_that_says_nothing_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    row, words = BAD[what]
    first = CHATS if isinstance(row["prompt"], list) else PAIR
    with pytest.raises(DataError) as error:
        load(tmp_path, first, row, format="preference")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert "Anna" not in str(error.value)


def test_a_template_joins_prompt_and_answer_of_text_and_of_nothing_else(tmp_path: Path) -> None:
    template = "Q: {prompt}\nA: {completion}"
    (unit,) = units_of(load(tmp_path, PAIR, template=template), template=template)
    assert [learned(one).strip()[0] for one in unit.sequences] == ["A", "B"]
    with pytest.raises(DataError, match=r"data\.template"):
        load(tmp_path, CHATS, template=template)


def test_swapped_answers_are_the_same_record_and_other_answers_are_not() -> None:
    key, fields = b"k" * 16, FIELDS["preference"]

    def digest(row: Json) -> str:
        return fingerprint([row], fields, key).digest

    swapped = {**PAIR, "chosen": "Bo", "rejected": "Anna"}
    assert digest(swapped) == digest(PAIR)
    assert digest({**CHATS, "chosen": BO, "rejected": ANNA}) == digest(CHATS) == digest(PAIR)
    assert digest({**PAIR, "prompt": "Whom?"}) != digest(PAIR)
    assert digest({**PAIR, "rejected": "Eva"}) != digest(PAIR)


def test_a_prompt_reads_as_it_does_before_an_answer(tmp_path: Path) -> None:
    """So that a model which learned pairs is asked in the words that it knows."""
    template = "Q: {prompt}\nA: {completion}"
    (unit,) = units_of(load(tmp_path, PAIR, template=template), template=template)
    ids = prompts.encode(tiny.tokenizer(), "Who?", 0, "preference", template)
    assert list(unit.sequences[0].input_ids[: len(ids)]) == ids
    assert unit.sequences[0].loss_mask.index(True) == len(ids)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [("I like apples", "I like apricots", "I like"), ("apples", "apricots", ""), ("Q:\nyes", "Q:\nno", "Q:")],
)
def test_no_word_is_cut_where_answers_begin_alike(chosen: str, rejected: str, prompt: str) -> None:
    """A mutant cuts at the first letter that differs, and a space would be read inside a word."""
    found = layouts._of_answers({"chosen": chosen, "rejected": rejected})
    assert found["prompt"] == prompt
    for answer, whole in (("chosen", chosen), ("rejected", rejected)):
        assert "".join(rendering.joined(prompt, found[answer], None)) == whole
