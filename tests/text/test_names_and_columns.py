"""Folders and files of any name are read, two columns of one name never are, and an empty text is the same in every format."""

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from text_tables import SENTINEL, Json, load, refused, section, write, write_bytes

from dpllm.recipe import names
from dpllm.recipe.section import parse_overrides
from dpllm.text.data import dataset_name
from dpllm.text.in_memory import write_rows

NAMES = [
    *("data (1)", "notes [2024]", "a[b", "🎉", "it's", '"q"', "-dash"),
    *("trail ", " ", "%20", "a#b", "q?", "star*", "a::b"),
    *("x;y", "new\nline", "~", "\u3000", "{x}", "$HOME", "a\\b", "file:", "hf:", "[!a]", "__s__", "\udcffx", "<b>"),
]
TWICE = pa.Table.from_arrays([pa.array([SENTINEL]), pa.array(["t"]), pa.array(["b"])], names=["id", "text", "id"])


def texts(source: Path | str, folder: Path) -> list[list[Any]]:
    table = load(source, folder)
    fields = ("text",) if table.format == "text" else ("prompt", "completion")
    return [[row.parts[field] for field in fields] for row in table.rows]


def write_as(kind: str, rows: list[Json], folder: Path) -> Path:
    """The same rows in a file, or as a program holds them; a null as the format, or what wrote it, has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "frame of the csv":
        path = write(folder / "a.csv", rows)
        return write_rows(pd.read_csv(path, dtype="string"), (), folder, "train")
    if kind in ("list", "frame", "Dataset"):
        frame: Any = rows if kind == "list" else pd.DataFrame(rows, dtype="string")
        frame = datasets.Dataset.from_pandas(frame) if kind == "Dataset" else frame
        return write_rows(frame, (), folder, "train")
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    return write(folder / f"a.{kind}", rows)


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
    for name, (rows, expected) in EMPTY.items():
        assert texts(write_as(kind, rows, tmp_path / name), tmp_path / name) == expected, name


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "frame"])
def test_an_empty_row_fits_every_format_that_it_could_have(kind: str, tmp_path: Path) -> None:
    """No other row decides whether it is a text or a prompt."""
    empty = {"text": None, "prompt": None, "completion": None}
    for rows in ([{**empty, "text": SENTINEL}, empty], [empty], [{**empty, "text": SENTINEL, "completion": "b"}]):
        with refused("reads as prompt_completion and as text"):
            texts(write_as(kind, rows, tmp_path), tmp_path)


def two_columns(kind: str, folder: Path) -> Path:
    path = folder / f"a.{kind}"
    if kind == "frame":
        return write_rows(pd.DataFrame([[SENTINEL, "t", "b"]], columns=["id", "text", "id"]), ("id",), folder, "train")
    if "arrow" in kind:
        with (ipc.new_file if kind == "file.arrow" else ipc.new_stream)(str(path), TWICE.schema) as stream:
            stream.write_table(TWICE)
    else:
        path.mkdir(exist_ok=True)
        parquet.write_table(TWICE, path / "train.parquet")
    return path / "train.parquet" if kind == "parquet" else path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "file.arrow", "folder", "frame"])
def test_two_columns_of_one_name_are_refused(kind: str, tmp_path: Path) -> None:
    """The last one won, also as the column that says whose a row is. Of text files see test_data.py."""
    with refused("of one name"):
        texts(two_columns(kind, tmp_path), tmp_path)


def test_columns_without_a_name_are_those_of_a_spreadsheet(tmp_path: Path) -> None:
    assert texts(write_bytes(tmp_path / "a.csv", b"text,,\nx,,\n"), tmp_path) == [["x"]]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_folder_of_any_name_is_read(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name / "train.jsonl", [{"text": "x"}])
    for source in (path.parent, path, f"{path.parent}/*.jsonl"):
        assert texts(source, tmp_path) == [["x"]], source
    shown = dataset_name(section(train=str(path)))
    assert shown.isprintable()
    assert not names.is_absolute(shown)
    assert names.without_paths({"dataset": shown, "a": [shown]})["dataset"] == shown


@pytest.mark.parametrize("name", ["notes [2024]", "a#b", "%20"])
def test_saved_datasets_of_any_name_are_read(name: str, tmp_path: Path) -> None:
    path = write_as("saved", [{"text": "y"}], tmp_path).rename(tmp_path / f"{name} saved")
    assert texts(path, tmp_path) == [["y"]]


@pytest.mark.parametrize("name", [name for name in NAMES if "::" not in name and "\n" not in name], ids=ascii)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_of_any_name_is_read(name: str, kind: str, tmp_path: Path) -> None:
    path = write_as(kind, [{"text": "x"}], tmp_path).rename(tmp_path / f"{name}.{kind}")
    assert texts(path, tmp_path) == [["x"]]


def test_a_text_keeps_relative_names_and_loses_places_of_this_machine() -> None:
    for kept in ("data (1)/notes", "🎉/notes", "100%/notes", "see https://a.org/(b)/c", "and/or"):
        assert names.without_paths(kept) == kept
    for path in ("/home/alice/notes", "~/x/notes", "C:\\alice\\notes", "file:///home/alice/notes"):
        for text in ("{}", "at {}", "'{}'", "({})", "[{}]", 'in="{}"', "a, {}"):
            assert names.without_paths(text.format(path)) == text.format("notes")


def test_a_name_on_the_command_line_stays_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a: b", "[2024]", "7", "2024-01-01"):
        assert parse_overrides(["--data.train", name])["data.train"] != name
        (tmp_path / name).touch()
    for name in ("notes #1.jsonl", "trail ", "a: b", "[2024]", "7", "2024-01-01", "@x", "*x", "%d"):
        assert parse_overrides(["--data.train", name]) == {"data.train": name}
    for word, value in {"3": 3, "null": None, "true": True, "'x #1'": "x #1", "[a, b]": ["a", "b"]}.items():
        assert parse_overrides(["--train.key", word]) == {"train.key": value}
