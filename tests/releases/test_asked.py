"""What may be asked is declared, and what it is computed of depends on one unit's rows alone, whatever they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import tiny

from dpllm.errors import ConfigError, DataError
from dpllm.model.loading import load_tokenizer
from dpllm.recipe.config import DataConfig, ModelConfig
from dpllm.releases.asked import Kind, Statistic, columns_of, exact_values, parse
from dpllm.text import layouts
from dpllm.text.data import Table, group_rows, load_table
from dpllm.text.tokens import encode

ROWS: list[dict[str, Any]] = [
    {"text": "one two", "who": "a", "label": "yes", "age": 30},
    {"text": "Привет, мир", "who": "a", "label": " no ", "age": "12"},
    {"text": "x", "who": "a", "label": "no", "age": 31},
    {"text": "1 2 3", "who": "b", "label": 1, "age": None},
    {"text": "漢字 a", "who": "b", "label": True, "age": True},
    {"text": "z", "who": "c", "label": None, "age": "NaN"},
    {"text": "w", "who": "c", "age": float("inf")},
    {"text": "v", "who": "d", "label": ["x"], "age": "old", "other": 1},
]


def table_of(tmp_path: Path, rows: list[dict[str, Any]], columns: Collection[str] = ()) -> Table:
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    data = DataConfig(train=str(path), unit="who", max_examples_per_unit=9)
    return load_table(str(path), data, "train", tmp_path, columns)


def values(tmp_path: Path, kind: Kind, text: str, rows: list[dict[str, Any]] = ROWS, limit: int = 9) -> list[Any]:
    data = DataConfig(train="rows", unit="who", max_examples_per_unit=limit)
    statistic = parse(kind, text, ".5")[0]
    table = table_of(tmp_path, rows, columns_of(statistic))
    return list(exact_values(statistic, group_rows(table, data), table, data, None))


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("units", "", Statistic("units")),
        ("shares", "label=yes, no", Statistic("shares", "label", ("yes", "no"))),
        ("shares", "label=yes,no;age=1,2", Statistic("shares", "label;age", ("yes;1", "yes;2", "no;1", "no;2"))),
        ("lengths", "8,16", Statistic("lengths", "", (), (8.0, 16.0), 0.5)),
        ("quantiles", "age=0:1:4", Statistic("quantiles", "age", (), (0.0, 0.25, 0.5, 0.75, 1.0), 0.5)),
    ],
)
def test_what_is_typed_is_what_is_declared(kind: Kind, text: str, expected: Statistic) -> None:
    assert parse(kind, text, ".5") == (expected,)


def test_each_quantile_is_a_release_of_its_own() -> None:
    names = [statistic.name for statistic in parse("lengths", "8,16", ".5,.99")]
    assert names == ["quantile 0.5 of token lengths", "quantile 0.99 of token lengths"]


UNDECLARED: dict[Kind, list[str]] = {
    "shares": [
        *("label", "label=", "=yes", "label=yes,yes", "label=yes,other", "label=yes,", "label=yes;no"),
        *("label=yes;label=no", "label=yes;age=", "label=yes;=old", "label=yes;age=other"),
        ";".join(f"column{number}=a,b" for number in range(17)),  # 2^17 combinations
    ],
    "quantiles": [
        *("age", "age=5", "age=120:0", "age=0:inf", "age=3,2,1", "age=0:10:0", "age=0:10:1e3", "age=0:1:1000000000")
    ],
    "lengths": ["many", "16"],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in UNDECLARED.items() for text in texts])
def test_what_is_not_declared_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--{kind} {text}: values must be declared")):
        parse(kind, text, ".5")


@pytest.mark.parametrize("quantiles", ["0", "1", "half", ".5,2"])
def test_quantiles_lie_between_0_and_1(quantiles: str) -> None:
    with pytest.raises(ConfigError, match="lie between 0 and 1"):
        parse("lengths", "8,16", quantiles)


def test_any_value_counts_as_its_text_and_none_is_an_error(tmp_path: Path) -> None:
    assert sorted(values(tmp_path, "shares", "label=yes,1")) == ["", "", "1", "['x']", "no", "no", "true", "yes"]
    assert sorted(values(tmp_path, "quantiles", "age=0:120:4")) == [12.0, 30.0, 31.0]
    assert values(tmp_path, "units", "") == [""] * 4


def test_several_columns_count_together_and_no_value_passes_for_two(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "who": "a", "visit": " home", "age": 1.0},
        {"text": "b", "who": "a", "visit": "home", "age": None},
        {"text": "c", "who": "b", "visit": "home;1"},
        {"text": "d", "who": "b", "age": "home;1", "visit": None},
    ]
    (statistic,) = parse("shares", "visit=home,clinic;age=1,2", ".5")
    assert statistic.name == layouts.shares_of(["visit", "age"]) == "shares of visit;age"
    result = values(tmp_path, "shares", "visit=home,clinic;age=1,2", rows)
    assert sorted(result) == [";home;1", "home;", "home;1", "home;1;"]
    assert [value for value in result if value in statistic.values] == ["home;1"]


def test_a_unit_brings_so_many_rows_and_they_depend_on_no_other_unit(tmp_path: Path) -> None:
    """Taking one unit out changes a list of values by that unit's own, at most two here."""
    statistics: list[tuple[Kind, str]] = [("shares", "label=yes;age=30"), ("quantiles", "age=0:120"), ("units", "")]
    for kind, text in statistics:
        of_all = Counter(values(tmp_path, kind, text, limit=2))
        for unit in "abcd":
            of_others = Counter(values(tmp_path, kind, text, [row for row in ROWS if row["who"] != unit], limit=2))
            assert of_others <= of_all
            assert (of_all - of_others).total() <= (1 if kind == "units" else 2)


def test_token_lengths_are_those_of_training_before_they_are_cut(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(name_or_path="builtin:tiny"))
    data = DataConfig(train="rows", max_length=4, long_examples="refuse")
    rows = [{"text": "word " * many} for many in (1, 3, 50)]
    table = table_of(tmp_path, rows)
    result = list(exact_values(parse("lengths", "8,16", ".5")[0], group_rows(table, data), table, data, tokenizer))
    assert result == [len(encode(row, "text", tokenizer, tiny.reads(10_000, "truncate"))[0].input_ids) for row in rows]
    assert result[2] > 50


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    statistics = [*parse("shares", "label=yes;age=1", ".5"), *parse("quantiles", "other=0:1", ".5"), Statistic("units")]
    table_of(tmp_path, ROWS, [column for statistic in statistics for column in columns_of(statistic)])
    with pytest.raises(DataError, match="no row has a column 'labels'"):
        table_of(tmp_path, ROWS, columns_of(parse("shares", "age=1;labels=yes", ".5")[0]))
