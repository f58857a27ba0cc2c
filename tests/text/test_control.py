"""A text is learned behind a line of its own row's values, of which no token is a target, and no other row has a say in it."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import PROMPTED, TALKS
from text_tables import Json, load, load_rows, refused, section, tokenizer, units_of, write

from dpllm.canaries.texts import Canary, encode_secret
from dpllm.comparison.tasks import by_prompt
from dpllm.errors import ConfigError
from dpllm.privacy.schedule import TokenSequence
from dpllm.recipe.config import make_config
from dpllm.releases.asked import exact_values, parse
from dpllm.text import rendering
from dpllm.text.data import each_row, group_rows
from dpllm.text.layouts import Row
from dpllm.text.tokens import encode_units

CODES = ["visit", "age"]
LINE = "visit: home | age: 54\n"


def parts(sequence: TokenSequence) -> tuple[str, str]:
    pairs = list(zip(sequence.input_ids, sequence.loss_mask, strict=True))
    first = [target for _, target in pairs].index(True)
    assert all(target for _, target in pairs[first:])
    decode = tokenizer().decode
    return decode([token for token, _ in pairs[:first]]), decode([token for token, _ in pairs[first:]])


def encoded(table: Any) -> list[tuple[str, str]]:
    return [parts(sequence) for unit in units_of(table, max_length=2048) for sequence in unit.sequences]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_text_is_learned_behind_the_line_and_the_line_is_masked(tmp_path: Path, kind: str) -> None:
    rows = [{"text": tiny.sentence(1), "visit": " home", "age": 54}]
    table = load(write(tmp_path / f"rows.{kind}", rows), tmp_path, control=CODES)
    assert table.format == "text"
    assert encoded(table) == [("<s>" + LINE, tiny.sentence(1) + "</s>")]


def test_a_completion_is_learned_behind_the_line_and_no_source_brings_one(tmp_path: Path) -> None:
    row = {**PROMPTED[0], "visit": "home", "age": 54.0}
    table = load_rows(tmp_path, row, control=CODES)
    assert encoded(table) == [("<s>" + LINE + row["prompt"], " " + row["completion"] + "</s>")]
    assert by_prompt(table, 1) == {LINE + row["prompt"]: [row["completion"]]}  # and so compare asks for it
    row = {"text": "a", "line": 7, "visit": "home"}
    assert encoded(load_rows(tmp_path, row)) == [("<s>", "a</s>")]
    assert encoded(load_rows(tmp_path, row, control=["visit"])) == [("<s>visit: home\n", "a</s>")]


@pytest.mark.parametrize(("value", "read"), [(None, ""), (True, "true"), ("a\n b", "a b"), (7.0, "7"), ("\uff21", "A")])
def test_values_read_as_they_count_in_shares(tmp_path: Path, value: Any, read: str) -> None:
    table = load_rows(tmp_path, {"text": "x", "visit": value}, {"text": "y", "visit": "home"}, control=["visit"])
    assert table.rows[0].line == f"visit: {read}\n"
    (statistic,) = parse("shares", "visit=home", ".5")
    assert list(exact_values(statistic, each_row(table.rows), table, section(), None)) == [read, "home"]


def test_rows_are_chosen_for_their_unit_by_their_text_and_so_are_those_of_the_ledger(tmp_path: Path) -> None:
    rows = [{"text": tiny.sentence(n), "who": f"p{n % 3}", "visit": "home" if n % 2 else "clinic"} for n in range(24)]
    data = {"unit": "who", "max_examples_per_unit": 2}
    plain, coded = (load_rows(tmp_path, *rows, control=codes, **data) for codes in ([], ["visit"]))
    grouped = (group_rows(table, section(**data)) for table in (plain, coded))
    chosen = [[[row.parts["text"] for row in unit] for unit in units] for units in grouped]
    assert chosen[0] == chosen[1]
    assert plain.digest != coded.digest  # the tokens and a resumed run are of other rows


ROW = st.fixed_dictionaries(
    {"text": st.sampled_from(["one", "two words", " three"])},
    optional={
        "visit": st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text("ab |:;\n\u00a0", max_size=4)),
        "age": st.integers(0, 99),
        "line": st.text("xy", max_size=3) | st.integers(),
    },
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=5), other=ROW, data=st.data())
def test_one_row_changes_only_its_own_text(rows: list[Json], other: Json, data: st.DataObject) -> None:
    """As under zero-out and replacement; the first row has all columns, since a column of no row is refused."""
    rows = [{"text": "z", "visit": "home", "age": 1}, *rows]
    index = data.draw(st.integers(1, len(rows) - 1))
    with tempfile.TemporaryDirectory() as folder:
        changed = [*rows[:index], other, *rows[index + 1 :]]
        variants = rows, changed, [rows[0], other]
        tables = [load_rows(Path(folder), *variant, control=CODES) for variant in variants]
    before, after, pair = map(encoded, tables)
    assert len(before) == len(after) == len(rows)
    assert after[:index] + after[index + 1 :] == before[:index] + before[index + 1 :]
    assert after[index] == pair[1]


def test_canaries_stand_behind_no_line() -> None:
    """Their text is random and public in kind, and no row's values may reach it."""
    canary = Canary("c00000", 1, "The code of the house is", "4711", inserted=True)
    sequence, _ = encode_secret(canary, "text", tokenizer(), tiny.reads(128, "truncate"))
    (unit,) = encode_units([[Row(canary.example("text"))]], "text", tokenizer(), section(control=CODES))
    assert unit.sequences == (sequence,)


def test_a_plan_shows_the_line(tmp_path: Path) -> None:
    table = load_rows(tmp_path, {"text": "a", "visit": "home", "age": 54}, control=CODES)
    assert table.reads == "read as text: text, behind a line with visit, age"
    assert rendering.shape("text", CODES, None) == "masked: visit: ... | age: ...\nlearned: <text><eos>"
    assert rendering.shape("text", [], None) == "learned: <text><eos>"
    assert rendering.example(table.rows[0], "text", None) == "masked: visit: home | age: 54\nlearned: a<eos>"


@pytest.mark.parametrize("codes", [["a", "a"], [""], ["a;b"], ["a=b"], ["a|b"], ["a:b"], ["a\nb"], ["who"]])
def test_names_that_could_be_read_in_two_ways_and_the_unit_are_refused(codes: list[str]) -> None:
    raw = {"model": {"name_or_path": "m"}, "train": {"steps": 1}, "output_dir": "o"}
    data = {"train": "d", "unit": "who", "max_examples_per_unit": 1, "control": codes}
    with pytest.raises(ConfigError, match=r"data\b.*(rename the column in the data|remove it from data\.control)"):
        make_config({**raw, "data": data}, None, "r")


def test_a_column_that_cannot_be_a_control_code_is_named(tmp_path: Path) -> None:
    text = {"body": "a", "visit": "home"}
    with refused("no row has a column 'age'"):
        load_rows(tmp_path, {"text": "a", "visit": "home"}, {"text": "b"}, control=CODES)
    for column in ("text", "body"):
        with refused(f"column '{column}' is listed in data.control but holds the text"):
            load_rows(tmp_path, text, control=[column], columns={"text": "body"})
    with refused(r"reads as messages, and data\.control"):
        load_rows(tmp_path, {**TALKS[0], "visit": "home"}, control=["visit"])
    with refused("row 1 .*half a character"):
        load_rows(tmp_path, {"text": "a", "visit": "Sigrid \ud800"}, control=["visit"])
