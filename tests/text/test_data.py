"""What data become: whose text, which tokens are learned, and errors that never quote a row."""

from __future__ import annotations

import csv
import gzip
import os
import random
import subprocess
import sys
import tempfile
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import dpllm
from dpllm.errors import ConfigError, DataError
from dpllm.recipe.config import DataConfig
from dpllm.text.data import Table, dataset_name, group_rows, load_table
from dpllm.text.layouts import FIELDS, Row

Json = dict[str, Any]
SENTINEL = "Sigrid Forsberg owes 4711"
TEXT = [{"text": tiny.sentence(number)} for number in range(6)]
PROMPTED = [{"prompt": f"{tiny.NAMES[number]} bought", "completion": tiny.THINGS[number]} for number in range(5)]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"What did {tiny.NAMES[number]} buy?"},
            {"role": "assistant", "content": tiny.THINGS[number]},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "Nothing."},
        ]
    }
    for number in range(4)
]
ROWS = {"text": TEXT, "prompt_completion": PROMPTED, "messages": TALKS}


@cache
def tokenizer() -> Any:
    return tiny.tokenizer()


def section(**values: Any) -> DataConfig:
    return DataConfig.model_validate({"train": "rows.jsonl", **values})


def load(path: Path, **values: Any) -> Any:
    return load_table(
        str(path), section(train=str(path), **values), values.get("train_split", "train"), path.parent / "c"
    )


def write(path: Path, rows: list[Json]) -> Path:
    if path.suffix == ".jsonl":
        return tiny.write_rows(path, rows)
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ROWS)
def test_directories_of_datasets_give_the_split_that_is_asked_for(tmp_path: Path, fmt: str) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS[fmt])
    rows.save_to_disk(str(tmp_path / "one"))
    other = datasets.Dataset.from_list(ROWS[fmt][:2])
    datasets.DatasetDict({"train": rows, "extra": other}).save_to_disk(str(tmp_path / "several"))
    learned = tiny.rows({field: row[field] for field in FIELDS[fmt]} for row in ROWS[fmt])  # type: ignore[index]
    assert list(load(tmp_path / "one").rows) == learned
    assert list(load(tmp_path / "several").rows) == learned
    assert list(load(tmp_path / "several", train_split="extra").rows) == learned[:2]
    with pytest.raises(DataError, match=r"no split 'test'; it has train, extra"):
        load(tmp_path / "several", train_split="test")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
@pytest.mark.parametrize("fmt", ["auto", "text"])
@pytest.mark.parametrize(
    "columns", [{"text": "noet"}, {"text": "note", "prompt": "noet"}, {"text": "note", "input": "noet"}]
)
def test_a_named_column_that_does_not_exist_is_refused(
    tmp_path: Path, name: str, fmt: str, columns: dict[str, str]
) -> None:
    """And never read under the name that it should get."""
    path = write(tmp_path / name, [{"text": SENTINEL, "note": "a", "prompt": "b", "input": "c"}] * 2)
    with pytest.raises(DataError, match="column 'noet'") as refused:
        load(path, columns=columns, format=fmt)
    assert SENTINEL not in str(refused.value)


def test_in_no_single_row_is_another_column_read_instead(tmp_path: Path) -> None:
    found = [{"text": SENTINEL, "note": "a"}, {"text": SENTINEL}]
    with pytest.raises(DataError, match="row 2 has no"):
        load(write(tmp_path / "rows.jsonl", found), columns={"text": "note"})
    empty = load(write(tmp_path / "rows.jsonl", [found[0], {"text": SENTINEL, "note": None}]), columns={"text": "note"})
    assert [row.parts["text"] for row in empty.rows] == ["a", ""]
    asked = {"instruction": "i", "input": "old", "output": "o"}
    table = load(write(tmp_path / "rows.jsonl", [{**asked, "new": "n"}, asked]), columns={"input": "new"})
    assert [row.parts["prompt"] for row in table.rows] == ["i\nn\n", "i\n"], (
        "it may be missing, as without data.columns"
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_without_a_value_is_no_column(tmp_path: Path, kind: str) -> None:
    rows: list[Json] = [{"messages": None, "text": None, **row} for row in PROMPTED]
    path = tmp_path / f"rows.{kind}"
    assert load(write(path, rows)).format == "prompt_completion"
    message = hidden(write(path, [*rows, {"text": SENTINEL, "prompt": None, "completion": None}]), [])
    assert "row 6 reads as text, but the rows before it read as prompt_completion" in message
    message = hidden(write(path, [{"text": SENTINEL, "prompt": None, "completion": None}, *rows]), [])
    assert "row 2 reads as prompt_completion, but the rows before it read as text" in message


FIELD_VALUES = {"text": "a", "prompt": "b", "completion": "c", "messages": TALKS[0]["messages"], "who": "d"}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.sets(st.sampled_from(sorted(FIELD_VALUES))), min_size=2, max_size=5),
    other=st.sets(st.sampled_from(sorted(FIELD_VALUES))),
    place=st.integers(0, 4),
)
def test_a_row_in_place_of_another_changes_no_format(keys: list[set[str]], other: set[str], place: int) -> None:
    def formats(rows: list[set[str]]) -> set[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "rows.jsonl", [{key: FIELD_VALUES[key] for key in row} for row in rows])
            try:
                return {load(path).format}
            except DataError:
                return set()

    place %= len(keys)
    assert len(formats(keys) | formats([*keys[:place], other, *keys[place + 1 :]])) <= 1


def test_a_message_has_the_keys_of_its_own_row(tmp_path: Path) -> None:
    call = {"name": "look_up", "arguments": {"of": "Anna", "since": None}}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "tool_calls": [call]}]
    other = [{"role": "user", "content": None, "name": "Bo", "tool_calls": [{"arguments": {"until": "May"}}]}]
    [alone] = load(write(tmp_path / "alone.parquet", [{"messages": talk}])).rows
    together = load(write(tmp_path / "together.parquet", [{"messages": other}, {"messages": talk}])).rows
    assert alone == together[1]
    assert alone.parts["messages"][1]["tool_calls"] == [{"name": "look_up", "arguments": {"of": "Anna"}}]
    assert together[0].parts["messages"] == other  # content may be nothing


def test_builtin_data_need_no_file_of_the_user(tmp_path: Path) -> None:
    data = section(train="builtin:clinic", unit="patient_id", max_examples_per_unit=8)
    table = load_table("builtin:clinic", data, "train", tmp_path)
    assert table.format == "text"
    assert tiny.count_units(data, tmp_path) == len({row.unit for row in table.rows})
    with pytest.raises(ConfigError, match="builtin:clinic"):
        load_table("builtin:klinik", data, "train", tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved", "folder of files"])
def test_rows_of_every_kind_of_source_keep_their_order_and_their_text(tmp_path: Path, kind: str) -> None:
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    random.seed(1)
    texts = ["".join(random.choices('a,"\t \n\r;é\u2028😀', k=random.randint(1, 9))) for _ in range(2500)]
    rows = [{"text": text, "n": str(number)} for number, text in enumerate(texts)]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    elif kind == "saved":
        datasets.Dataset.from_list(rows[::-1]).select(range(2499, -1, -1)).save_to_disk(str(path))
    else:
        write(path / "train.jsonl" if kind == "folder of files" else path, rows)
    table = load(path)
    learned = tiny.rows({"text": text} for text in texts)
    assert list(table.rows) == learned
    assert table.rows[2499] == learned[2499]


def test_a_row_keeps_what_is_read_and_nothing_else(tmp_path: Path) -> None:
    row = {"text": "a", "who": "p1", "visit": "home", "age": 7, "phone": SENTINEL}
    data = section(unit="who", max_examples_per_unit=1, control=["visit"])
    path = str(write(tmp_path / "rows.jsonl", [row]))
    table = load_table(path, data, "train", tmp_path, ["age"])
    assert list(table.rows) == [Row({"text": "a"}, "p1", {"visit": "home", "age": 7}, "visit: home\n")]


# --- errors name file, row and column, and never the text ------------------------------------------------------------


def hidden(path: Path, rows: list[Json], **values: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path if path.exists() else write(path, rows), **values)
    message = str(caught.value)
    assert str(path) in message
    assert not any(word in message for word in ["Sigrid", "Forsberg", "4711"]), message
    assert caught.value.__cause__ is None
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("missing", [{"completion": SENTINEL}, {"prompt": SENTINEL}])
def test_a_missing_field_is_named_with_its_row(tmp_path: Path, kind: str, missing: Json) -> None:
    good = {"prompt": SENTINEL, "completion": SENTINEL}
    if kind == "csv":  # a short line; an empty cell is the empty text
        path = tmp_path / "rows.csv"
        names = ["completion", "prompt"] if "completion" in missing else ["prompt", "completion"]
        path.write_text(f"{','.join(names)}\n{SENTINEL},{SENTINEL}\n{SENTINEL}\n")
    else:
        path = write(tmp_path / "rows.jsonl", [good, missing])
    field = ({"prompt", "completion"} - set(missing)).pop()
    message = hidden(path, [])
    assert f"row 2 has no text in column '{field}'" in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", f'{{"text": "{SENTINEL}"}}\n{{"text": "{SENTINEL}'),
        ("rows.jsonl", f'{{"text": "{SENTINEL}"}}\n"{SENTINEL}"\n'),
        ("rows.jsonl", f'{{"body": "{SENTINEL}"}}\n'),
        ("rows.csv", f"{SENTINEL},{SENTINEL}\n{SENTINEL},{SENTINEL}\n"),
        ("rows.csv", f'text\n{SENTINEL}\n"' + "x" * 200_000 + "\n"),
        ("rows.tsv", f"{SENTINEL}\t1\n{SENTINEL}\t2\n"),
        ("rows.parquet", SENTINEL * 20),
        ("rows.txt", SENTINEL),
        ("rows.jsonl", f"{SENTINEL}\udcff\udcfe\n"),  # bytes that are no UTF-8
        ("rows.csv", f"{SENTINEL}\udcff\udcfe\n"),
    ],
    ids=[
        "cut",
        "no-object",
        "other-column",
        "no-header",
        "endless-field",
        "tsv",
        "no-parquet",
        "kind",
        "bytes",
        "bytes-csv",
    ],
)
def test_broken_files_are_told_without_their_text(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    hidden(tmp_path / name, [])


def test_a_broken_line_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "{SENTINEL}"}}\n\n{{"text": {SENTINEL}}}\n')
    assert "line 3 is not valid JSON" in hidden(path, [])


@pytest.mark.parametrize("levels", [101, 900, 100_000])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_without_end_has_its_line(tmp_path: Path, name: str, levels: int) -> None:
    path = tmp_path / name
    value = f'{{"text": "{SENTINEL}", "n": {"[" * levels}"{SENTINEL}"{"]" * levels}}}'
    path.write_text(f'{{"text": "{SENTINEL}"}}\n{value}\n')
    assert "line 2 is nested" in hidden(path, [])


def test_half_a_character_has_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "whole \\ud83d\\ude00"}}\n{{"text": "{SENTINEL} \\ud800"}}\n')
    assert "row 2 holds half a character" in hidden(path, [])


def test_a_broken_directory_is_told_without_its_text(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "state.json").write_text(SENTINEL)
    hidden(folder, [])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_no_rows_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "rows.parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    else:
        path.write_text("text\n" if name == "rows.csv" else "\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        load(path)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.csv", "absent", "a/b/c/absent"])
def test_a_missing_file_is_no_hub_id(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_table(str(tmp_path / name), section(), "train", tmp_path)


def test_a_hub_id_without_network_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"some-org/some-data: no such file, and no such dataset on the Hub .* network"
    ) as caught:
        load_table("some-org/some-data", section(), "train", tmp_path)
    assert "\n" not in str(caught.value)


CACHES = """
import sys
from pathlib import Path
from dpllm.recipe.config import DataConfig
from dpllm.text.data import load_table
cache, *sources = sys.argv[1:]
for source in sources:
    assert len(load_table(source, DataConfig(train=source), "train", Path(cache)).rows) == 3, source
"""


def test_copies_of_data_lie_in_the_given_cache_only(tmp_path: Path) -> None:
    """Of files, packed ones too, of folders of either, and of what ``datasets`` saved."""
    import datasets

    source = tmp_path / "source"
    lines = tiny.write_rows(source / "files" / "train.jsonl", [{"text": SENTINEL}] * 3).read_bytes()
    for packed in (source / "packed" / "rows.jsonl.gz", source / "rows.jsonl.gz"):
        packed.parent.mkdir(exist_ok=True)
        packed.write_bytes(gzip.compress(lines))
    datasets.Dataset.from_list([{"text": SENTINEL}] * 3).save_to_disk(str(source / "saved"))
    before = {path: path.stat().st_size for path in source.rglob("*")}
    home, passing = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    passing.mkdir()
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "TRANSFORMERS_"))}
    env = {"HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(passing)}
    env = {**keep, **env, "PYTHONPATH": str(Path(dpllm.__file__).parents[1])}
    words = [tmp_path / "cache", *source.iterdir()]
    subprocess.run([sys.executable, "-c", CACHES, *map(str, words)], env=env, check=True, capture_output=True)
    left = [path for path in passing.rglob("*") if path.is_file() and SENTINEL.encode() in path.read_bytes()]
    assert left + [path for path in home.rglob("*") if path.is_file()] == []
    assert {path: path.stat().st_size for path in source.rglob("*")} == before


def test_dataset_name_has_no_path_of_the_user(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / "ward" / f"{name}.jsonl", TEXT)) for name in "ab"]
    for source, name in ((paths[0], "ward/a"), (paths, "ward/a+ward/b"), ("builtin:clinic",) * 2, ("org/name",) * 2):
        assert dataset_name(section(train=source)) == name


# --- units -----------------------------------------------------------------------------------------------------------


def units_of(rows: list[Json], limit: int) -> dict[str, list[str]]:
    table = Table("rows.jsonl", tiny.rows(rows, "who"), "text")
    groups = group_rows(table, section(unit="who", max_examples_per_unit=limit))
    assert all(len({str(row.unit) for row in group}) == 1 for group in groups)
    return {str(group[0].unit): sorted(row.parts["text"] for row in group) for group in groups}


def test_without_a_unit_column_every_row_is_a_unit() -> None:
    assert list(group_rows(Table("rows.jsonl", tiny.rows(TEXT), "text"), section())) == [
        [row] for row in tiny.rows(TEXT)
    ]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abcd"), st.text("xyz", max_size=4)), min_size=1, max_size=24),
    limit=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_which_rows_of_a_unit_train_depends_on_that_unit_alone(
    rows: list[tuple[str, str]], limit: int, seed: int
) -> None:
    everyone = [{"who": who, "text": text} for who, text in rows]
    chosen = units_of(everyone, limit)
    mixed = list(everyone)
    random.Random(seed).shuffle(mixed)
    assert units_of(mixed, limit) == chosen
    for who, texts in chosen.items():
        own = [row for row in everyone if row["who"] == who]
        assert units_of(own, limit) == {who: texts}
        assert len(texts) == min(limit, len(own))


def test_how_others_fill_a_column_does_not_change_the_choice() -> None:
    own = [{"who": "a", "text": f"t{number}", "age": number} for number in range(12)]
    read = [{**row, "age": str(row["age"])} for row in own]  # as a table reads it in which one row says "unknown"
    assert units_of(own, 3) == units_of(read, 3)


PEOPLE: list[list[Any]] = [
    ["p1", " p1 ", "p1\n", "\u200bp1", "\ufeffp1", "p\u00ad1", "\uff50\uff11", "p\u00b9"],
    ["Zoë  Ø", "Zoe\u0308 Ø", "Zoë\u00a0Ø", "\tZoë\u2003Ø"],
    [1, 1.0, "1", "1.0", "1.000", " 1.0 ", Decimal("1.00"), "\uff11"],
    [10**17, "100000000000000000", "100000000000000000.0", 1e17],
    ["01"], ["1.01"], ["1.10"], ["1.1", 1.1], ["P1"], ["p 1"], ["ZOË Ø"], ["1e0"], [10], [-1, "-1.0"], ["1.0.0"], [True],
]  # fmt: skip


def test_a_person_written_in_several_ways_is_one_unit() -> None:
    rows = [{"who": who, "text": str(number)} for number, people in enumerate(PEOPLE) for who in people]
    random.Random(0).shuffle(rows)
    table = Table("rows.jsonl", tiny.rows(rows, "who"), "text")
    groups = group_rows(table, section(unit="who", max_examples_per_unit=99))
    assert sorted([int(row.parts["text"]) for row in group] for group in groups) == [
        [number] * len(people) for number, people in enumerate(PEOPLE)
    ]


@pytest.mark.parametrize(
    "owner", [{}, *({"who": null} for null in (None, "", " ", float("nan"), "\u200b\u00a0"))], ids=repr
)
def test_a_row_without_an_owner_is_refused_by_its_number(tmp_path: Path, owner: Json) -> None:
    path = write(tmp_path / "rows.jsonl", [{"who": "a", "text": SENTINEL}, {"text": SENTINEL, **owner}])
    data = section(train=str(path), unit="who", max_examples_per_unit=2)
    with pytest.raises(DataError) as caught:
        tiny.count_units(data, tmp_path)
    assert str(caught.value).startswith(f"{path}: row 2 has no ")
    assert "'who'" in str(caught.value)
    assert "Sigrid" not in str(caught.value)


def test_a_csv_line_with_too_many_cells_has_no_sure_owner(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    data = section(train=str(path), unit="who", max_examples_per_unit=1)
    path.write_text("text,who\none,a,,\ntwo,a\n")
    assert tiny.count_units(data, tmp_path) == 1  # what is too much holds nothing
    path.write_text("text,who\none,a\ntwo, more,a\n")
    with pytest.raises(DataError, match="row 2 has more fields than the header line"):
        tiny.count_units(data, tmp_path)
