"""Rows of several people: which are kept follows from who has which row, and what one person's rows say changes nothing else."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import tiny
import tiny_models as tm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tables import Json, refused
from text_tables import section as data_section

from dpllm.recipe.config import DataConfig
from dpllm.text import data, owners, prompts, tokens
from dpllm.text.data import Table, load_table, sampled_rows
from dpllm.text.in_memory import write_rows
from dpllm.text.layouts import Row

GRAPH = [["ana", "ben"], ["ana"], ["ben", "cy", "dot"], ["dot"], ["cy", "ana"], ["eva", "ben"], ["eva"], ["dot", "eva"]]
graphs = st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4), min_size=1, max_size=20)


def section(limit: int = 1, **values: Any) -> DataConfig:
    several = {"unit": "who", "owners": "several", "max_examples_per_unit": limit, "sampling": "example"}
    return data_section(**{"max_length": 24, **several, **values})


def table_of(graph: list[list[str]], texts: list[str]) -> Table:
    rows = [Row({"text": text}, who, {"number": n}) for n, (who, text) in enumerate(zip(graph, texts, strict=True))]
    return Table("rows.jsonl", rows, "text")


def kept(graph: list[list[str]], limit: int, texts: list[str] | None = None) -> list[int]:
    groups = data.sampled_rows(table_of(graph, texts or [f"row {n}" for n in range(len(graph))]), section(limit))
    assert all(len(group) == 1 for group in groups)
    return [group[0].codes["number"] for group in groups]


# --- the properties, each as a check that mutants must fail -------------------------------------------------------------


def bounded(graph: list[list[str]], limit: int) -> None:
    rows_of = Counter(owner for row in kept(graph, limit) for owner in set(graph[row]))
    assert max(rows_of.values()) <= limit


def blind_to_text(graph: list[list[str]], limit: int) -> None:
    first = kept(graph, limit)
    for texts in ([""] * len(graph), [f"{n:03d}" for n in range(len(graph), 0, -1)], ["same"] * len(graph)):
        assert kept(graph, limit, texts) == first


def blind_to_emptied_rows(graph: list[list[str]], limit: int) -> None:
    complete = kept(graph, limit)
    for owner in {name for names in graph for name in names}:
        texts = ["" if owner in names else f"row {n}" for n, names in enumerate(graph)]
        assert kept(graph, limit, texts) == complete


def maximal(graph: list[list[str]], limit: int) -> None:
    rows = kept(graph, limit)
    rows_of = Counter(owner for row in rows for owner in set(graph[row]))
    assert all(any(rows_of[owner] >= limit for owner in graph[row]) for row in set(range(len(graph))) - set(rows))


def blind_to_names(graph: list[list[str]], limit: int) -> None:
    renamed = [[f"{9 - ord(name) % 9} {name}" for name in reversed(names)] for names in graph]
    assert kept(renamed, limit) == kept(graph, limit)


CHECKS = [bounded, blind_to_text, blind_to_emptied_rows, maximal, blind_to_names]


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=40, deadline=None)
@given(graph=graphs, limit=st.integers(1, 4))
def test_the_graph_alone_decides(check: Any, graph: list[list[str]], limit: int) -> None:
    check(graph, limit)


def _one_more(patch: pytest.MonkeyPatch) -> None:
    choose = owners.choose_rows
    patch.setattr(owners, "choose_rows", lambda owners_of_rows, limit: choose(owners_of_rows, limit + 1))


def _change_rows(patch: pytest.MonkeyPatch, change: Any) -> None:
    group = data.group_rows
    patch.setattr(data, "group_rows", lambda table, section: group(replace(table, rows=change(table.rows)), section))


def _ties_by_text(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda rows: sorted(rows, key=lambda row: row.parts["text"]))


def _empty_rows_dropped(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda rows: [row for row in rows if row.parts["text"]])


@pytest.mark.parametrize(
    ("mutant", "check"),
    [(_one_more, bounded), (_ties_by_text, blind_to_text), (_empty_rows_dropped, blind_to_text),
     (_empty_rows_dropped, blind_to_emptied_rows)],
)  # fmt: skip
def test_a_choice_that_does_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch, mutant: Any, check: Any) -> None:
    check(GRAPH, 1)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(GRAPH, 1)


def test_rows_with_few_owners_come_first_then_the_earlier_one() -> None:
    # [1] and [3] and [6] are of one owner; [2], [4], [5], [7] and [0] then lack room for somebody.
    assert kept(GRAPH, 1) == [1, 3, 6]
    assert kept(GRAPH, 2) == [0, 1, 3, 5, 6]
    assert kept([["a", "b"], ["c", "a"], ["b", "c"]], 1) == [0]
    assert kept(GRAPH, 9) == list(range(len(GRAPH)))


def test_people_are_counted_once_however_they_are_written(tmp_path: Path) -> None:
    people = ["ana; Ben ;ana", ["ana ", "\u200bBen"], ["cy; ana"], 7, [7.0, "7"]]
    rows = [{"who": who, "text": text} for who, text in zip(people, "abcde", strict=True)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    groups = sampled_rows(load_table(str(path), section(), "train", tmp_path), section())
    assert groups.graph == owners.Graph(rows=5, kept=2, owners=4, most=1)
    assert [group[0].parts["text"] for group in groups] == ["a", "d"]


def test_a_table_of_text_and_rows_in_memory_name_people_too(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text('who,text\n"ana; ben",a\ncy,b\n"ben;cy",c\n', encoding="utf-8")
    rows = [{"who": ["ana", "ben"], "text": "a"}, {"who": ["cy"], "text": "b"}, {"who": ["ben", "cy"], "text": "c"}]
    sources = (rows, pd.DataFrame(rows), datasets.Dataset.from_list(rows))
    for path in (csv, *(write_rows(some, ["who"], tmp_path / "held", "train") for some in sources)):
        groups = sampled_rows(load_table(str(path), section(), "train", tmp_path), section())
        assert [group[0].parts["text"] for group in groups] == ["a", "b"]


@pytest.mark.parametrize(
    ("who", "problem"),
    [
        *((who, "a list .*plain list") for who in ({"to": "ana"}, [["ana"]], '["ana", "ben"]', "['ana' 'ben']", ["['ana']"])),
        ("('ana', 'ben')", "a list .*plain list"),
        *((who, "no value") for who in ([], ["ana", None], ["ana", " "], " ; ", None)),
    ],
)  # fmt: skip
def test_nobody_is_left_unprotected(who: Any, problem: str) -> None:
    with refused(f"row 2 has {problem}"):
        sampled_rows(Table("rows.jsonl", [Row({"text": "a"}, ["x"]), Row({"text": "a"}, who)], "text"), section())


def test_a_list_where_each_row_has_one_owner_is_refused() -> None:
    with refused("row 1 .*Set data.owners: several"):
        sampled_rows(table_of([["ana", "ben"]], ["a"]), section(owners="one"))
    for cell in ("['ana', 'ben']", '["ana", null]', " ('ana', 'ben')", "{'ana': 1}"):  # of a csv file
        with refused('row 1 .*"ana; ben", and set data.owners: several'):
            sampled_rows(table_of([cell], ["a"]), section(owners="one"))


@pytest.mark.parametrize("name", ["[deleted]", "{1f0e-77}", "[", "('ana'", "[ana] ben", "(ana, ben)", "[" * 5000])
def test_a_name_in_brackets_is_one_owner(name: str) -> None:
    assert len(sampled_rows(table_of([name, name, "ben"], ["a", "b", "c"]), section(owners="one"))) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"unit": "example", "max_examples_per_unit": None, "sampling": "unit"}, {"public_size": 9},
     {"sampling": "unit", "max_examples_per_unit": 2}],
    ids=str,
)  # fmt: skip
def test_what_the_relation_does_not_know_is_refused(wrong: Json) -> None:
    with pytest.raises(ValueError, match="owners: several"):
        section(**wrong)


# --- end to end: whose rows are emptied changes the contribution of nobody else ---------------------------------------


FORMATS: dict[str, tuple[Any, Json]] = {
    "text": (lambda text: {"text": text}, {"text": ""}),
    "prompt_completion": (lambda text: {"prompt": text[:9], "completion": text[9:]}, {"prompt": "", "completion": ""}),
    "messages": (
        lambda text: {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]},
        {"messages": [{"role": "user", "content": ""}]},
    ),
}


def contributions(folder: Path, fmt: str, emptied: str | None, changes: Json) -> tuple[list[int], list[torch.Tensor]]:
    """The kept rows, and what each adds to a step of the tiny model, where the rows of ``emptied`` say nothing."""
    write, empty = FORMATS[fmt]
    rows = [
        {**(empty if emptied in who else write(tiny.sentence(number) * (1 + number % 3))), "who": who, "number": number}
        for number, who in enumerate(GRAPH)
    ]
    data_section = section(2, train=str(tiny.write_rows(folder / f"{emptied}.jsonl", rows)), **changes)
    table = load_table(data_section.train, data_section, "train", folder, ["number"])
    groups = data.sampled_rows(table, data_section)
    units = tokens.make_units(table, groups, tiny.tokenizer(), data_section, folder)
    assert len(units) == len(groups)
    net = tm.build("llama", tm.LORA, vocab_size=tiny.SMALL["vocab_size"])
    engine = tm.make_engine(net, tm.plan(0.05))
    clipped_each = [engine.clipped_sum(tm.batches([unit], engine))[0].clone() for unit in units]
    total = engine.clipped_sum(tm.batches(list(units), engine))[0]
    assert torch.equal(total, sum(clipped_each))
    return [group[0].codes["number"] for group in groups], clipped_each


@pytest.mark.parametrize("long_examples", ["truncate", "chunk"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_an_owner_that_is_emptied_changes_nobody_elses_bits(tmp_path: Path, fmt: str, long_examples: str) -> None:
    changes = {"long_examples": long_examples}
    numbers, before = contributions(tmp_path, fmt, None, changes)
    assert numbers == [0, 1, 3, 5, 6]
    assert all(bool(gradient.any()) for gradient in before)
    for owner in ("ana", "eva", "dot"):
        same, after = contributions(tmp_path, fmt, owner, changes)
        assert same == numbers  # as many slots, of the same rows
        for number, first, second in zip(numbers, before, after, strict=True):
            if owner in GRAPH[number]:
                assert not second.any()
            else:
                assert torch.equal(first, second)


@pytest.mark.parametrize("mutant", ["a slot goes with its text", "an empty row teaches its end"])
def test_a_slot_that_goes_and_an_empty_row_that_teaches_are_seen(tmp_path: Path, monkeypatch: Any, mutant: str) -> None:
    real = tokens.iter_units
    if mutant == "an empty row teaches its end":
        monkeypatch.setattr(tokens, "is_empty", lambda row, fmt: False)
    else:
        monkeypatch.setattr(tokens, "iter_units", lambda *some, **more: (u for u in real(*some, **more) if u.sequences))
    with pytest.raises(AssertionError):
        test_an_owner_that_is_emptied_changes_nobody_elses_bits(tmp_path, "text", "truncate")


@pytest.mark.parametrize(
    ("fmt", "row", "empty"),
    [
        ("text", {"text": ""}, True),
        ("text", {"text": " "}, False),
        ("prompt_completion", {"prompt": "", "completion": "a"}, False),
        ("messages", {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]}, True),
        ("messages", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]}, False),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, False),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]}, True),
        ("preference", {"prompt": "", "chosen": [{"role": "assistant", "content": "a"}], "rejected": []}, False),
    ],
)
def test_an_empty_row_says_nothing(fmt: Any, row: Json, empty: bool) -> None:
    assert owners.is_empty(Row(row), fmt) is empty


def test_what_one_person_writes_to_many_is_not_a_template(tmp_path: Path) -> None:
    """In a search for private text, such a row counts for the person with the most rows."""
    rows = [Row({"text": "my signature"}, ["ana", f"p{number}"]) for number in range(20)]
    owners_of_rows = list(prompts.owners(Table("rows", rows, "text"), section()))
    assert set(owners_of_rows) == {"ana"}
    nameless = Table("rows", [Row({"text": "a"}), Row({"text": "b"}, ["x", None])], "text")
    assert len(set(prompts.owners(nameless, section()))) == 2
