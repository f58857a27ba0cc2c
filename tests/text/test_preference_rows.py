"""Preference pairs as trainers document them: what is learned of each answer, what is refused, and what makes one record."""

from pathlib import Path

import pytest
import tiny
from text_tables import Json, learned, load_rows, refused, section, tokenizer, units_of

from dpllm.ledger.records import fingerprint
from dpllm.text import layouts, prompts, rendering
from dpllm.text.data import Table
from dpllm.text.layouts import FIELDS
from dpllm.text.tokens import EMPTY, encode_units

ASKED = [{"role": "user", "content": "Who?"}]
ANNA, BO = ([{"role": "assistant", "content": name}] for name in ("Anna", "Bo"))
SYSTEM = {"role": "system", "content": "Be brief."}
PAIR = {"prompt": "Who?", "chosen": "Anna", "rejected": "Bo"}
CHATS = {"prompt": ASKED, "chosen": ANNA, "rejected": BO}
LAYOUTS = {
    "preference: prompt, chosen, rejected": (PAIR, PAIR),
    "preference without a prompt: what both answers begin with -> prompt, chosen, rejected": (
        {"chosen": "Who? Anna", "rejected": "Who? Bo"}, {"prompt": "Who?", "chosen": " Anna", "rejected": " Bo"},
    ),
    "preference as messages: prompt, chosen, rejected": (CHATS, CHATS),
    "preference as messages without a prompt: what both answers begin with -> prompt, chosen, rejected": (
        {"chosen": ASKED + ANNA, "rejected": ASKED + BO}, CHATS,
    ),
}  # fmt: skip


PROMPTED = {"prompt": "Who?", "chosen": ASKED + ANNA, "rejected": ASKED + BO}
ULTRAFEEDBACK = {**PROMPTED, "prompt_id": "7", "messages": ASKED + ANNA, "score_chosen": 8.0, "score_rejected": 4.5}
AS_MESSAGES = "read as preference as messages that begin with the prompt: prompt, chosen, rejected"
TEMPLATE = "Q: {prompt}\nA: {completion}"


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        (PROMPTED, {}),
        (ULTRAFEEDBACK, {"format": "preference"}),
        (ULTRAFEEDBACK, {"columns": {"messages": None}}),
        ({**PROMPTED, "chosen": [SYSTEM, *ASKED, *ANNA], "rejected": [SYSTEM, *ASKED, *BO]}, {}),
        ({**PROMPTED, "prompt": None, "question": "Who?"}, {"columns": {"prompt": "question"}}),
    ],
)
def test_a_prompt_as_text_beside_answers_that_begin_with_it_is_read(tmp_path: Path, row: Json, settings: Json) -> None:
    table = load_rows(tmp_path, row, **settings)
    assert table.format == "preference"
    assert table.reads.replace("question (else prompt) -> prompt", "prompt") == AS_MESSAGES
    assert parts(table) == {"prompt": row["chosen"][:-1], "chosen": ANNA, "rejected": BO}
    (unit,) = units_of(table)
    assert [learned(sequence) for sequence in unit.sequences] == ["Anna</s>", "Bo</s>"]


def parts(table: Table) -> Json:
    return {field: table.rows[0].parts[field] for field in FIELDS["preference"]}


def test_a_prompt_as_text_that_no_message_says_is_refused_or_ignored_on_demand(tmp_path: Path) -> None:
    row = {**PROMPTED, "prompt": "Sigrid owes?"}
    with refused(r"row 1 has a text in column 'prompt' .*'\{prompt: null\}'"):
        load_rows(tmp_path, row)
    table = load_rows(tmp_path, row, columns={"prompt": None})
    assert table.rows[0].parts["prompt"] == ASKED
    assert table.reads.startswith("read as preference as messages without a prompt: ")


def test_neither_layout_takes_the_rows_of_the_other_and_answers_of_a_unit_follow_one_another(tmp_path: Path) -> None:
    with refused("row 2 reads as preference as messages, but the rows before it read as preference"):
        load_rows(tmp_path, PROMPTED, CHATS)
    with refused("row 1 .*'chosen'"):
        load_rows(tmp_path, {**PROMPTED, "rejected": "Bo"})
    pairs = [{"prompt": "Q", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(3)]
    (unit,) = encode_units([tiny.rows(pairs)], "preference", tokenizer(), section(max_length=128))
    assert [learned(sequence).split()[0] for sequence in unit.sequences] == ["good", "bad"] * 3


@pytest.mark.parametrize("reads", LAYOUTS)
def test_a_layout_becomes_a_prompt_and_two_answers_and_these_alone_are_learned(tmp_path: Path, reads: str) -> None:
    row, expected = LAYOUTS[reads]
    table = load_rows(tmp_path, row)
    assert (table.format, table.reads) == ("preference", f"read as {reads}")
    assert parts(table) == expected
    (unit,) = units_of(table)
    chosen, rejected = map(learned, unit.sequences)
    assert (chosen.strip(), rejected.strip()) == ("Anna</s>", "Bo</s>")


def test_a_long_pair_is_cut_at_its_end_and_a_long_prompt_leaves_whole_pairs(tmp_path: Path) -> None:
    table = load_rows(tmp_path, PAIR, {**PAIR, "chosen": "Anna " * 90}, {**PAIR, "prompt": "Who? " * 90})
    short, long, prompted = (unit.sequences for unit in units_of(table, max_length=16))
    assert [len(pair) for pair in (short, long, prompted)] == [2, 2, 2]
    assert len(long[0].input_ids) == 16
    assert prompted == (EMPTY, EMPTY)
    with refused(r"data\.max_length"):
        units_of(table, max_length=16, long_examples="refuse")


BAD: dict[str, tuple[Json, str]] = {
    "a missing side": ({"prompt": "Who?", "chosen": "Anna"}, "'rejected'"),
    "an empty side": ({**PAIR, "rejected": ""}, "nothing in one of its answers"),
    "equal answers": ({**PAIR, "rejected": "Anna"}, "two equal answers"),
    "other types": ({**PAIR, "rejected": BO}, "'rejected'"),
    "no turn of the assistant": ({**CHATS, "rejected": ASKED}, "no turn of the assistant in one of its answers"),
    "an unknown role": ({**CHATS, "rejected": [{"role": "boss", "content": "x"}]}, "role"),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_pair_without_a_preference_is_refused(tmp_path: Path, problem: str) -> None:
    row, named = BAD[problem]
    with refused(f"row 2 has .*{named}"):
        load_rows(tmp_path, CHATS if isinstance(row["prompt"], list) else PAIR, row, format="preference")


def test_a_template_joins_prompts_and_answers_of_text_and_a_prompt_alone_reads_alike(tmp_path: Path) -> None:
    (unit,) = units_of(load_rows(tmp_path, PAIR, template=TEMPLATE), template=TEMPLATE)
    assert [learned(sequence).strip() for sequence in unit.sequences] == ["Anna</s>", "Bo</s>"]
    ids = prompts.encode(tokenizer(), "Who?", 0, "preference", TEMPLATE)
    assert list(unit.sequences[0].input_ids[: len(ids)]) == ids
    assert unit.sequences[0].loss_mask.index(True) == len(ids)
    with refused(r"data\.template"):
        load_rows(tmp_path, CHATS, template=TEMPLATE)


def test_swapped_answers_are_the_same_record_and_other_answers_are_not() -> None:
    key, fields = b"k" * 16, FIELDS["preference"]

    def digest(row: Json) -> str:
        return fingerprint([row], fields, key).digest

    swapped = {**PAIR, "chosen": "Bo", "rejected": "Anna"}
    assert digest(swapped) == digest(PAIR)
    assert digest({**CHATS, "chosen": BO, "rejected": ANNA}) == digest(CHATS) == digest(PAIR)
    assert digest({**PAIR, "prompt": "Whom?"}) != digest(PAIR)
    assert digest({**PAIR, "rejected": "Eva"}) != digest(PAIR)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [("I like apples", "I like apricots", "I like"), ("apples", "apricots", ""), ("Q:\nyes", "Q:\nno", "Q:")],
)
def test_no_word_is_cut_where_answers_begin_alike(chosen: str, rejected: str, prompt: str) -> None:
    """A mutant cuts at the first letter that differs, and a space would be read inside a word."""
    pair = layouts._of_answers({"chosen": chosen, "rejected": rejected})
    assert pair["prompt"] == prompt
    for side, answer in (("chosen", chosen), ("rejected", rejected)):
        assert "".join(rendering.joined(prompt, pair[side], None)) == answer
