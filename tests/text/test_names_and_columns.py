"""Folders and files of any name are read, two columns of one name never are, and an empty text is the same in every format."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from dpllm.errors import DataError
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig
from dpllm.recipe.section import parse_overrides
from dpllm.text.data import dataset_name, load_table
from dpllm.text.in_memory import write_rows

SECRET = "Sigrid Forsberg owes 4711"
NAMES = [
    *(
        "data (1)",
        "notes [2024]",
        "a[b",
        "🎉",
        "it's",
        '"q"',
        "-dash",
        "trail ",
        " ",
        "%20",
        "a#b",
        "q?",
        "star*",
        "a::b",
    ),
    *("x;y", "new\nline", "~", "\u3000", "{x}", "$HOME", "a\\b", "file:", "hf:", "[!a]", "__s__", "\udcffx", "<b>"),
]


def read(source: Path | str, folder: Path, **data: Any) -> list[list[Any]]:
    """What is learned from, row by row."""
    table = load_table(str(source), DataConfig(train="x", **data), "train", folder / "cache")
    fields = ("text",) if table.format == "text" else ("prompt", "completion")
    return [[row.parts[field] for field in fields] for row in table.rows]


def write(kind: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    """The same rows in a format; a null as the format, or what wrote it, has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, frame = folder / f"a.{kind}", pd.DataFrame(rows)
    table = pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in rows[0]})
    if kind in ("csv", "tsv"):
        frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",", quoting=csv.QUOTE_MINIMAL)
    elif kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "arrow":
        with open(path, "wb") as file, ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif kind == "saved":
        datasets.Dataset(table).save_to_disk(str(path))
    elif kind == "frame of the csv":
        frame.to_csv(folder / "a.csv", index=False)
        return write_rows(pd.read_csv(folder / "a.csv", dtype="string"), (), folder, "train")
    else:
        made = {"list": list, "frame": pd.DataFrame, "Dataset": lambda _: datasets.Dataset(table)}[kind]
        return write_rows(made(rows), (), folder, "train")
    return path


KINDS = ["csv", "tsv", "jsonl", "json", "parquet", "arrow", "saved", "list", "frame", "frame of the csv", "Dataset"]
EMPTY = {
    "text": ([{"text": "a"}, {"text": None}, {"text": "b"}], [["a"], [""], ["b"]]),
    "the first text": ([{"text": "", "id": "7"}, {"text": "b", "id": "8"}], [[""], ["b"]]),
    "prompt": ([{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "c"}], [["a", "b"], ["", "c"]]),
    "completion": ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], [["a", "b"], ["a", ""]]),
    "instruction": ([{"instruction": None, "input": "x", "output": "c"}], [["x\n", "c"]]),
    "columns of another format": ([{"text": "a", "prompt": None, "completion": None}], [["a"]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_is_the_same_in_every_format(kind: str, tmp_path: Path) -> None:
    for number, (rows, expected) in enumerate(EMPTY.values()):
        folder = tmp_path / str(number)
        assert read(write(kind, rows, folder), folder) == expected, list(EMPTY)[number]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "frame"])
def test_what_holds_nothing_fits_every_format_that_it_could_have(kind: str, tmp_path: Path) -> None:
    """No other row decides whether it is a text or a prompt."""
    nothing = {"text": None, "prompt": None, "completion": None}
    for rows in ([{**nothing, "text": SECRET}, nothing], [nothing], [{**nothing, "text": SECRET, "completion": "b"}]):
        with pytest.raises(DataError, match="reads as prompt_completion and as text") as told:
            read(write(kind, rows, tmp_path), tmp_path)
        assert SECRET not in str(told.value)


TWICE = pa.Table.from_arrays([pa.array([SECRET]), pa.array(["t"]), pa.array(["b"])], names=["id", "text", "id"])


def two_columns(kind: str, folder: Path) -> Path:
    path = folder / f"a.{kind}"
    if kind in ("csv", "tsv"):
        path.write_text(f"id,text,id\n{SECRET},t,b\n".replace(",", "\t" if kind == "tsv" else ","))
    elif kind == "jsonl":
        path.write_text(f'{{"text": "a"}}\n{{"id": "{SECRET}", "text": "t", "id": "b"}}\n')
    elif kind == "json":
        path.write_text(f'[{{"id": "{SECRET}", "text": "t", "id": "b"}}]')
    elif kind == "nested.json":
        path.write_text(f'[{{"text": "t", "more": [{{"{SECRET}": 1, "{SECRET}": 2}}]}}]')
    elif kind == "parquet":
        parquet.write_table(TWICE, path)
    elif kind in ("arrow", "file.arrow"):
        with (
            open(path, "wb") as file,
            (ipc.new_file if "file" in kind else ipc.new_stream)(file, TWICE.schema) as stream,
        ):
            stream.write_table(TWICE)
    elif kind == "folder":
        path.mkdir()
        parquet.write_table(TWICE, path / "train.parquet")
    else:
        path = write_rows(pd.DataFrame([[SECRET, "t", "b"]], columns=["id", "text", "id"]), ("id",), folder, "train")
    return path


@pytest.mark.parametrize(
    "kind", ["csv", "tsv", "jsonl", "json", "nested.json", "parquet", "arrow", "file.arrow", "folder", "frame"]
)
def test_two_columns_of_one_name_are_refused(kind: str, tmp_path: Path) -> None:
    """The last one won, also as the column that says whose a row is."""
    with pytest.raises(DataError, match="of one name") as told:
        read(two_columns(kind, tmp_path), tmp_path)
    assert SECRET not in str(told.value)


def test_columns_without_a_name_are_those_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,,\nx,,\n")
    assert read(tmp_path / "a.csv", tmp_path) == [["x"]]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_folder_of_any_name_is_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "x"}\n')
    for source in (folder, folder / "train.jsonl", f"{folder}/*.jsonl"):
        assert read(source, tmp_path) == [["x"]], source
    told = dataset_name(DataConfig(train=str(folder / "train.jsonl")))
    assert told.isprintable()
    assert not names.is_absolute(told)
    assert names.without_paths({"dataset": told, "a": [told]})["dataset"] == told


@pytest.mark.parametrize("name", ["notes [2024]", "a#b", "%20"])
def test_saved_datasets_are_read_from_there_too(name: str, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "y"}]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved").rename(tmp_path / f"{name} saved")
    assert read(tmp_path / f"{name} saved", tmp_path) == [["y"]]


@pytest.mark.parametrize("name", [name for name in NAMES if "::" not in name and "\n" not in name], ids=ascii)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_of_any_name_is_read(name: str, kind: str, tmp_path: Path) -> None:
    path = write(kind, [{"text": "x"}], tmp_path).rename(tmp_path / f"{name}.{kind}")
    assert read(path, tmp_path) == [["x"]]


def test_a_text_keeps_relative_names_and_loses_places_of_this_machine() -> None:
    for kept in ("data (1)/notes", "🎉/notes", "100%/notes", "see https://a.org/(b)/c", "and/or"):
        assert names.without_paths(kept) == kept
    for place in ("/home/alice/notes", "~/x/notes", "C:\\alice\\notes", "file:///home/alice/notes"):
        for text in ("{}", "at {}", "'{}'", "({})", "[{}]", 'in="{}"', "a, {}"):
            assert names.without_paths(text.format(place)) == text.format("notes")


def test_a_name_on_the_command_line_stays_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a: b", "[2024]", "7", "2024-01-01"):
        assert parse_overrides(["--data.train", name])["data.train"] != name
        (tmp_path / name).touch()
    for name in ("notes #1.jsonl", "trail ", "a: b", "[2024]", "7", "2024-01-01", "@x", "*x", "%d"):
        assert parse_overrides(["--data.train", name]) == {"data.train": name}
    for word, value in {"3": 3, "null": None, "true": True, "'x #1'": "x #1", "[a, b]": ["a", "b"]}.items():
        assert parse_overrides(["--train.key", word]) == {"train.key": value}
