"""What data become: rows of one format, whose they are, and refusals that never quote a row."""

import os
import random
import re
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tables import SENTINEL, Json, load, load_rows, refused, section, write, write_bytes

import dpllm
from dpllm.errors import ConfigError, DataError
from dpllm.text.data import Table, dataset_name, group_rows, load_table
from dpllm.text.layouts import FIELDS, Row

TEXT = [{"text": tiny.sentence(number)} for number in range(6)]
PROMPTED = [{"prompt": f"{tiny.NAMES[number]} bought", "completion": tiny.THINGS[number]} for number in range(5)]
LAST = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Nothing."}]
TALKS = [
    {"messages": [{"role": "user", "content": f"What did {name} buy?"}, {"role": "assistant", "content": thing}, *LAST]}
    for name, thing in zip(tiny.NAMES[:4], tiny.THINGS[:4], strict=True)
]
ROWS = {"text": TEXT, "prompt_completion": PROMPTED, "messages": TALKS}
FIELD_VALUES = {"text": "a", "prompt": "b", "completion": "c", "messages": TALKS[0]["messages"], "who": "d"}


@pytest.mark.parametrize("fmt", ROWS)
def test_saved_datasets_are_read_by_split(tmp_path: Path, fmt: str) -> None:
    rows, several = datasets.Dataset.from_list(ROWS[fmt]), tmp_path / "several"
    rows.save_to_disk(str(tmp_path / "alone"))
    datasets.DatasetDict({"train": rows, "extra": rows.select(range(2))}).save_to_disk(str(several))
    expected = tiny.rows({field: row[field] for field in FIELDS[fmt]} for row in ROWS[fmt])  # type: ignore[index]
    assert list(load(tmp_path / "alone", tmp_path).rows) == list(load(several, tmp_path).rows) == expected
    assert list(load(several, tmp_path, "extra").rows) == expected[:2]
    with refused(r"no split 'test'; it has train, extra"):
        load(several, tmp_path, "test")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
@pytest.mark.parametrize("fmt", ["auto", "text"])
@pytest.mark.parametrize(
    "columns", [{"text": "noet"}, {"text": "note", "prompt": "noet"}, {"text": "note", "input": "noet"}]
)
def test_a_missing_column_is_named_not_replaced(tmp_path: Path, name: str, fmt: str, columns: dict[str, str]) -> None:
    path = write(tmp_path / name, [{"text": SENTINEL, "note": "a", "prompt": "b", "input": "c"}] * 2)
    with refused("column 'noet'"):
        load(path, tmp_path, columns=columns, format=fmt)


def test_a_column_that_a_single_row_lacks_is_not_replaced(tmp_path: Path) -> None:
    row = {"text": SENTINEL, "note": "a"}
    with refused("row 2 has no"):
        load_rows(tmp_path, row, {"text": SENTINEL}, columns={"text": "note"})
    table = load_rows(tmp_path, row, {"text": SENTINEL, "note": None}, columns={"text": "note"})
    assert [row.parts["text"] for row in table.rows] == ["a", ""]
    alpaca = {"instruction": "i", "input": "old", "output": "o"}
    table = load_rows(tmp_path, {**alpaca, "new": "n"}, alpaca, columns={"input": "new"})
    assert [row.parts["prompt"] for row in table.rows] == ["i\nn\n", "i\n"]  # an optional column may be missing


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_nulls_decides_no_format(tmp_path: Path, kind: str) -> None:
    path, text = tmp_path / f"rows.{kind}", {"text": SENTINEL, "prompt": None, "completion": None}
    rows: list[Json] = [{"messages": None, "text": None, **row} for row in PROMPTED]
    assert load(write(path, rows), tmp_path).format == "prompt_completion"
    for mixed, number in (([*rows, text], 6), ([text, *rows], 2)):
        with refused(f"row {number} reads as .*, but the rows before it read as"):
            load(write(path, mixed), tmp_path)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.sets(st.sampled_from(sorted(FIELD_VALUES))), min_size=2, max_size=5),
    other=st.sets(st.sampled_from(sorted(FIELD_VALUES))),
    index=st.integers(0, 4),
)
def test_a_row_in_place_of_another_changes_no_format(keys: list[set[str]], other: set[str], index: int) -> None:
    def formats(rows: list[set[str]]) -> set[str]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return {load_rows(Path(folder), *({key: FIELD_VALUES[key] for key in row} for row in rows)).format}
            except DataError:
                return set()

    index %= len(keys)
    assert len(formats(keys) | formats([*keys[:index], other, *keys[index + 1 :]])) <= 1


def test_a_message_has_the_keys_of_its_own_row(tmp_path: Path) -> None:
    call = {"name": "look_up", "arguments": {"of": "Anna", "since": None}}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "tool_calls": [call]}]
    other = [{"role": "user", "content": None, "name": "Bo", "tool_calls": [{"arguments": {"until": "May"}}]}]
    [alone] = load(write(tmp_path / "alone.parquet", [{"messages": talk}]), tmp_path).rows
    together = load(write(tmp_path / "together.parquet", [{"messages": other}, {"messages": talk}]), tmp_path).rows
    assert alone == together[1]
    assert alone.parts["messages"][1]["tool_calls"] == [{"name": "look_up", "arguments": {"of": "Anna"}}]
    assert together[0].parts["messages"] == other  # content may be null


def test_builtin_data_need_no_file_of_the_user(tmp_path: Path) -> None:
    data = section(train="builtin:clinic", unit="patient_id", max_examples_per_unit=8)
    table = load_table("builtin:clinic", data, "train", tmp_path)
    assert tiny.count_units(data, tmp_path) == len({row.unit for row in table.rows})
    with pytest.raises(ConfigError, match="builtin:clinic"):
        load_table("builtin:klinik", data, "train", tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved", "folder of files"])
def test_rows_of_every_source_keep_their_order_and_their_text(tmp_path: Path, kind: str) -> None:
    random.seed(1)
    texts = ["".join(random.choices('a,"\t \n\r;é\u2028😀', k=random.randint(1, 9))) for _ in range(2500)]
    rows, path = [{"text": text, "n": str(number)} for number, text in enumerate(texts)], tmp_path / f"rows.{kind}"
    if kind == "saved":
        datasets.Dataset.from_list(rows[::-1]).select(range(2499, -1, -1)).save_to_disk(str(path))
    else:
        write(path / "train.jsonl" if kind == "folder of files" else path, rows)
    assert list(load(path, tmp_path).rows) == tiny.rows({"text": text} for text in texts)


def test_a_row_keeps_the_columns_that_are_read_and_no_others(tmp_path: Path) -> None:
    row = {"text": "a", "who": "p1", "visit": "home", "age": 7, "phone": SENTINEL}
    data = {"unit": "who", "max_examples_per_unit": 1, "control": ["visit"]}
    table = load_rows(tmp_path, row, columns_kept=("age",), **data)
    assert list(table.rows) == [Row({"text": "a"}, "p1", {"visit": "home", "age": 7}, "visit: home\n")]


LINE = f'{{"text": "{SENTINEL}"}}\n'
PAIR = '{"prompt": "a", "completion": "b"}\n'


def nested(levels: int) -> str:
    return f'{{"text": "{SENTINEL}", "n": {"[" * levels}"{SENTINEL}"{"]" * levels}}}'


BROKEN = {  # what is wrong -> the file's name, its content, and where the message locates it
    "cut line": ("rows.jsonl", f"{LINE}{LINE[:-3]}", "line 2 "),
    "line without an object": ("rows.jsonl", f'{LINE}"{SENTINEL}"\n', "line 2 "),
    "line that is no JSON": ("rows.jsonl", f'{LINE}\n{{"text": {SENTINEL}}}\n', "line 3 "),
    "other column": ("rows.jsonl", f'{{"body": "{SENTINEL}"}}\n', "row 1 "),
    "no header line": ("rows.csv", "Sigrid,Forsberg\nSigrid,4711\n", "row 1 "),
    "no header line of tabs": ("rows.tsv", f"{SENTINEL}\t1\n{SENTINEL}\t2\n", "row 1 "),
    "field without an end": ("rows.csv", f'text\n{SENTINEL}\n"{"x" * 200_000}\n', "row 2 "),
    "no parquet": ("rows.parquet", SENTINEL * 20, ""),
    "unknown kind": ("rows.txt", SENTINEL, ""),
    "unknown kind, compressed": ("rows.txt.gz", SENTINEL, ""),
    "parquet in gzip": ("rows.parquet.gz", SENTINEL, ""),
    "bytes that are not UTF-8": ("rows.jsonl", f"{SENTINEL}\udcff\udcfe\n", ""),
    "bytes of csv that are not UTF-8": ("rows.csv", f"{SENTINEL}\udcff\udcfe\n", ""),
    **{f"{levels} levels": ("rows.jsonl", f"{LINE}{nested(levels)}\n", "line 2 ") for levels in (101, 900, 100_000)},
    "levels in lines of json": ("rows.json", f"{LINE}{nested(900)}\n", "line 2 "),
    **{f"{levels} levels of a list": ("rows.json", f"[{nested(levels)}]", "its list ") for levels in (900, 90_000)},
    "list with a text": ("rows.json", f'[{{"text": "{SENTINEL}"}}, "{SENTINEL}"]', "record 2 "),
    "cut list": ("rows.json", f'[{{"text": "{SENTINEL}"', "its list "),
    "empty list": ("rows.json", "[]", "no rows"),
    "empty lines": ("rows.jsonl", "\n\n", "no rows"),
    "header line alone": ("rows.csv", "text\n", "no rows"),
    "half a character": ("rows.jsonl", f'{{"text": "\\ud83d\\ude00"}}\n{{"text": "{SENTINEL} \\ud800"}}\n', "row 2 "),
    "no completion": ("rows.jsonl", f'{PAIR}{{"prompt": "{SENTINEL}"}}\n', "row 2 .*'completion'"),
    "no prompt": ("rows.jsonl", f'{PAIR}{{"completion": "{SENTINEL}"}}\n', "row 2 .*'prompt'"),
    "short line": ("rows.csv", f"prompt,completion\n{SENTINEL},{SENTINEL}\n{SENTINEL}\n", "row 2 .*'completion'"),
    "column twice": ("rows.csv", f"id,text,id\n{SENTINEL},t,b\n", "header line .*of one name"),
    "column twice, with tabs": ("rows.tsv", f"id\ttext\tid\n{SENTINEL}\tt\tb\n", "header line .*of one name"),
    "key twice": ("rows.jsonl", f'{LINE}{{"id": "{SENTINEL}", "text": "t", "id": "b"}}\n', "line 2 .*of one name"),
    "inner key twice": ("rows.json", f'[{{"text": "t", "more": [{{"{SENTINEL}": 1, "{SENTINEL}": 2}}]}}]', "of one name"),
}  # fmt: skip


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_file_is_located_without_its_text(tmp_path: Path, problem: str) -> None:
    name, content, location = BROKEN[problem]
    path = write_bytes(tmp_path / name, content.encode(errors="surrogateescape"))
    with refused(f"^{re.escape(str(path))}: .*{location}" if "no rows" not in location else location):
        load(path, tmp_path)


def test_a_broken_directory_and_a_hub_id_without_network_are_named(tmp_path: Path) -> None:
    write_bytes(tmp_path / "folder" / "state.json", SENTINEL.encode())
    with refused(f"^{tmp_path}/folder: "):
        load(tmp_path / "folder", tmp_path)
    with refused(r"^some-org/some-data: .*network"):
        load("some-org/some-data", tmp_path)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent", "a/b/c/absent"])
def test_a_missing_file_is_no_hub_id(tmp_path: Path, name: str) -> None:
    with refused("no such file"):
        load(tmp_path / name, tmp_path)


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
    source, rows = tmp_path / "source", [{"text": SENTINEL}] * 3
    for name in ("files/train.jsonl", "packed/rows.jsonl.gz", "rows.jsonl.gz"):
        write(source / name, rows)
    datasets.Dataset.from_list(rows).save_to_disk(str(source / "saved"))
    before = {path: path.stat().st_size for path in source.rglob("*")}
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "TRANSFORMERS_"))}
    env |= {"HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)}
    env["PYTHONPATH"] = str(Path(dpllm.__file__).parents[1])
    command = [sys.executable, "-c", CACHES, *map(str, [tmp_path / "cache", *source.iterdir()])]
    subprocess.run(command, env=env, check=True, capture_output=True)
    copies = [path for path in temporary.rglob("*") if path.is_file() and SENTINEL.encode() in path.read_bytes()]
    assert copies + [path for path in home.rglob("*") if path.is_file()] == []
    assert {path: path.stat().st_size for path in source.rglob("*")} == before


def test_dataset_name_has_no_path_of_the_user(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / "ward" / f"{name}.jsonl", TEXT)) for name in "ab"]
    for source, name in ((paths[0], "ward/a"), (paths, "ward/a+ward/b"), ("builtin:clinic",) * 2, ("org/name",) * 2):
        assert dataset_name(section(train=source)) == name


def units_of(rows: list[Json], limit: int) -> dict[str, list[str]]:
    """Unit -> the texts of it that train."""
    table = Table("rows.jsonl", tiny.rows(rows, "who"), "text")
    groups = group_rows(table, section(unit="who", max_examples_per_unit=limit))
    assert all(len({str(row.unit) for row in group}) == 1 for group in groups)
    return {str(group[0].unit): sorted(row.parts["text"] for row in group) for group in groups}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abcd"), st.text("xyz", max_size=4)), min_size=1, max_size=24),
    limit=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_rows_of_a_unit_depend_on_that_unit_alone(rows: list[tuple[str, str]], limit: int, seed: int) -> None:
    everyone = [{"who": who, "text": text} for who, text in rows]
    chosen = units_of(everyone, limit)
    shuffled = random.Random(seed).sample(everyone, len(everyone))
    assert units_of(shuffled, limit) == chosen
    for who, texts in chosen.items():
        rows_of_unit = [row for row in everyone if row["who"] == who]
        assert units_of(rows_of_unit, limit) == {who: texts}
        assert len(texts) == min(limit, len(rows_of_unit))


def test_how_others_fill_a_column_does_not_change_the_choice() -> None:
    rows = [{"who": "a", "text": f"t{number}", "age": number} for number in range(12)]
    as_text = [{**row, "age": str(row["age"])} for row in rows]  # as in a table of which one row says "unknown"
    assert units_of(rows, 3) == units_of(as_text, 3)


PEOPLE: list[list[Any]] = [
    ["p1", " p1 ", "p1\n", "\u200bp1", "\ufeffp1", "p\u00ad1", "\uff50\uff11", "p\u00b9"],
    ["Zoë  Ø", "Zoe\u0308 Ø", "Zoë\u00a0Ø", "\tZoë\u2003Ø"],
    [1, 1.0, "1", "1.0", "1.000", " 1.0 ", Decimal("1.00"), "\uff11"],
    [10**17, "100000000000000000", "100000000000000000.0", 1e17],
    ["01"], ["1.01"], ["1.10"], ["1.1", 1.1], ["P1"], ["p 1"], ["ZOË Ø"], ["1e0"], [10], [-1, "-1.0"], ["1.0.0"], [True],
]  # fmt: skip


def test_a_person_written_in_several_ways_is_one_unit() -> None:
    rows = [{"who": who, "text": str(number)} for number, spellings in enumerate(PEOPLE) for who in spellings]
    random.Random(0).shuffle(rows)
    table = Table("rows.jsonl", tiny.rows(rows, "who"), "text")
    groups = group_rows(table, section(unit="who", max_examples_per_unit=99))
    found = sorted([int(row.parts["text"]) for row in group] for group in groups)
    assert found == [[number] * len(spellings) for number, spellings in enumerate(PEOPLE)]


@pytest.mark.parametrize(
    "owner", [{}, *({"who": null} for null in (None, "", " ", float("nan"), "\u200b\u00a0"))], ids=repr
)
def test_a_row_without_an_owner_is_refused_by_its_number(tmp_path: Path, owner: Json) -> None:
    path = write(tmp_path / "rows.jsonl", [{"who": "a", "text": SENTINEL}, {"text": SENTINEL, **owner}])
    with refused(f"^{path}: row 2 has no .*'who'"):
        tiny.count_units(section(train=str(path), unit="who", max_examples_per_unit=2), tmp_path)


def test_a_csv_line_with_too_many_cells_has_no_sure_owner(tmp_path: Path) -> None:
    data = section(train=str(tmp_path / "rows.csv"), unit="who", max_examples_per_unit=1)
    write_bytes(tmp_path / "rows.csv", b"text,who\none,a,,\ntwo,a\n")
    assert tiny.count_units(data, tmp_path) == 1  # the surplus cells are empty
    write_bytes(tmp_path / "rows.csv", b"text,who\none,a\ntwo, more,a\n")
    with refused("row 2 .*wrong owner"):
        tiny.count_units(data, tmp_path)
