"""Data as people have them: packed files, lists, csv of every kind, globs and several files give the rows that were written."""

import csv
import io
import json
import random
import shutil
import socket
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import tiny
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet
from text_tables import COMPRESS, SENTINEL, Json, load, refused, section, write, write_bytes

from dpllm.errors import DataError
from dpllm.text import sources
from dpllm.text.data import dataset_name
from dpllm.text.sources import _unambiguous, expand, is_here

ROWS = [{"who": f"p{number}", "text": f"note {number}, with a comma; é"} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
LIST = "\n \t" + json.dumps(ROWS, indent=2)
PEOPLE = "who,text\n" + "".join(f"p{number},note {number}\n" for number in range(6))


def raw(source: Any, folder: Path, split: str = "train", **values: Any) -> list[Any]:
    """Rows as they are read, before anything knows what they are for."""
    data = section(train=[str(part) for part in source] if isinstance(source, list) else str(source), **values)
    named = sources.files(data.train, data, split, folder / "cache")
    return [row for name in named for row in sources.read_rows(name, data, split)]


def table_text(mark: str) -> str:
    quoted = [[f'"{value}"' for value in row.values()] for row in ROWS]
    return "".join(mark.join(cells) + "\r\n" for cells in [["who", "text"], *quoted])


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES.encode()), ("rows.json", LINES.encode()), ("rows.json", LIST.encode()),
        ("rows.json", b"\xef\xbb\xbf" + LIST.encode()), ("rows.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        *[("rows.csv", table_text(mark).encode()) for mark in ",;\t|"], ("rows.tsv", table_text("\t").encode()),
        ("rows.csv", table_text(";").encode("utf-8-sig")), ("rows.csv", table_text(";").encode("utf-16")),
    ],
)  # fmt: skip
def test_every_file_gives_the_rows_that_were_written(tmp_path: Path, name: str, content: bytes, packed: str) -> None:
    path = write_bytes(tmp_path / f"{name}{packed}", content)
    assert raw(path, tmp_path) == ROWS
    assert dataset_name(section(train=str(path))) == f"{tmp_path.name}/rows"


def test_what_a_csv_file_does_not_say_the_recipe_says(tmp_path: Path) -> None:
    content, settings = table_text("~").encode("cp1252"), {"delimiter": "~", "encoding": "cp1252"}
    path = write_bytes(tmp_path / "rows.csv", content)
    assert raw(path, tmp_path, csv=settings) == ROWS
    for wrong in ({}, {"encoding": "klingon"}):
        with refused(r"rows.csv: .* data.csv.encoding"):
            load(path, tmp_path, csv=wrong)
    with refused(r"row 1 .*data.csv.delimiter"):
        load(path, tmp_path, csv={"encoding": "cp1252"})
    write_bytes(tmp_path / "folder" / "rows.csv", content)
    assert raw(tmp_path / "folder", tmp_path, csv=settings) == ROWS


def test_no_row_decides_how_a_csv_file_is_parted_and_a_long_field_is_read(tmp_path: Path) -> None:
    rows = load(write_bytes(tmp_path / "rows.csv", b"who|text\na|b\n" + 9 * b"c;d;e,f\t|g\n"), tmp_path).rows
    assert [row.parts["text"] for row in rows[:2]] == ["b", "g"]
    path = write(tmp_path / "rows.csv", [{"text": "x" * 200_000}])
    assert [len(row["text"]) for row in raw(path, tmp_path)] == [200_000]


@pytest.mark.parametrize("several", ["glob", "list", "directory", "mixed list"])
def test_several_files_are_one_source_in_their_order(tmp_path: Path, several: str) -> None:
    folder = tmp_path / "ward"
    paths = [folder / f"part-{number}.jsonl{'.gz' if number == 1 else ''}" for number in range(3)]
    for path, row in zip(paths, ROWS, strict=True):
        write(path, [row])
    mixed = [str(folder / "part-0*"), str(folder / "part-[12]*")]
    whole, names = str(folder), list(map(str, paths))
    source: Any = {"glob": f"{whole}/part-*", "list": names, "directory": whole, "mixed list": mixed}[several]
    assert raw(source, tmp_path) == ROWS
    data = section(train=source, unit="who", max_examples_per_unit=1)
    assert tiny.count_units(data, tmp_path / "cache") == 3
    assert is_here(source)
    assert str(tmp_path) not in dataset_name(data)
    alone = load(write(tmp_path / "all.jsonl", ROWS), tmp_path)
    assert load(source, tmp_path).digest == alone.digest  # of the rows, wherever they stand


def test_every_file_of_a_source_is_in_its_digest_and_its_protection(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"{number}.jsonl", [row])) for number, row in enumerate(ROWS)]
    before = load(paths, tmp_path).digest
    write(Path(paths[2]), [{"text": "changed"}])
    assert load(paths, tmp_path).digest != before
    Path(paths[2]).unlink()
    assert not is_here(paths)  # a search for private text would miss some of it


def test_a_row_is_named_by_its_own_file(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", [*ROWS, {"text": SENTINEL}])
    with refused(rf"^{second}: row 4 has no value"):
        data = section(train=[str(first), str(second)], unit="who", max_examples_per_unit=1)
        tiny.count_units(data, tmp_path / "cache")
    with refused(rf"^{second}: row 1 .*'text'"):
        load([first, write(second, [{"prompt": SENTINEL}])], tmp_path)


@pytest.mark.parametrize("cut", [3, 30])
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz", "rows.csv.bz2", "rows.jsonl.xz"])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path: Path, name: str, cut: int) -> None:
    path = write(tmp_path / name, [{"text": SENTINEL}] * 3)
    for content in (path.read_bytes()[:-cut], SENTINEL.encode()):
        path.write_bytes(content)
        with refused(f"^{path}: cannot be read"):
            load(path, tmp_path)


@pytest.mark.parametrize(
    "row", ['p1,"note 1\n', '"p1,note 1\n', 'p1,"note" 1\n', 'p1,"note 1"" and\n', 'p1,note 1"\n', 'p1, "note 1"\n']
)
@pytest.mark.parametrize("last", ["p5,note 5", 'p5,5"'], ids=["", "another one ends it"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_stray_quote_swallows_nobody(tmp_path: Path, row: str, suffix: str, last: str) -> None:
    """In a file that has one, 198 rows became the text of another, and nothing was refused."""
    text = PEOPLE.replace("p1,note 1\n", row).replace("note 4", '"said ""so"" today"')
    text = text.replace("p5,note 5", last).replace(",", "," if suffix == ".csv" else "\t")
    with refused("row 2 has an unclosed or undoubled quote((?!note).)*$"):
        load(write_bytes(tmp_path / f"rows{suffix}", text.encode()), tmp_path)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    rows=st.lists(st.lists(st.text('a", \n\r;', max_size=6), min_size=2, max_size=2), min_size=1, max_size=4),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_is_well_formed_is_read_as_it_is(rows: list[list[str]], quoting: Any, tmp_path_factory: Any) -> None:
    content = io.StringIO(newline="")
    csv.writer(content, quoting=quoting).writerows(rows)
    assert list(csv.reader(_unambiguous(iter(content.getvalue().splitlines(keepends=True)), ","), strict=True)) == rows


@pytest.mark.parametrize("stream", [True, False])
def test_each_arrow_file_has_types_of_its_own(tmp_path: Path, stream: bool) -> None:
    """``datasets`` reads all by the types of the first: one person's 7 turned the 01 of all others into 1."""
    for number, code in enumerate((7, "01")):
        table = pyarrow.table({"text": ["me"], "code": [code]})
        (tmp_path / "arrow").mkdir(exist_ok=True)
        path = str(tmp_path / "arrow" / f"train-{number}.arrow")
        with (ipc.new_stream if stream else ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table)
    assert [row["code"] for row in raw(tmp_path / "arrow", tmp_path)] == [7, "01"]


@pytest.mark.parametrize("kind", ["timestamp", "date32", "duration"])
def test_a_date_that_python_does_not_have_is_one_message(tmp_path: Path, kind: str) -> None:
    types = {"timestamp": pyarrow.timestamp("us"), "date32": pyarrow.date32(), "duration": pyarrow.duration("s")}
    numbers = pyarrow.array([2**30], pyarrow.int32()) if kind == "date32" else pyarrow.array([2**62], pyarrow.int64())
    parquet.write_table(pyarrow.table({"text": ["a"], "on": numbers.cast(types[kind])}), tmp_path / "a.parquet")
    with refused("a.parquet: cannot be read"):
        load(tmp_path / "a.parquet", tmp_path)


@pytest.mark.parametrize(
    "source",
    [["ward", "ward/a.jsonl"], ["ward/a.jsonl", "ward"], ["ward", "ward/in"], "ward/*.jsonl*", ["ward/a.jsonl", "link.jsonl"],
     ["ward/a.jsonl", "hard.jsonl"], "linked", ["ward/a.jsonl", "ward/*.jsonl"]],
)  # fmt: skip
def test_nobody_counts_twice_by_another_path(tmp_path: Path, source: Any) -> None:
    path, linked = write(tmp_path / "ward" / "a.jsonl", ROWS), write(tmp_path / "linked" / "b.jsonl", ROWS)
    (tmp_path / "ward" / "in").mkdir()
    if source == "ward/*.jsonl*":
        write(path.with_suffix(".jsonl.gz"), ROWS)
    (tmp_path / "link.jsonl").symlink_to(path)
    (tmp_path / "hard.jsonl").hardlink_to(path)
    linked.with_stem("c").hardlink_to(linked)
    with refused("is read twice"):
        load([tmp_path / name for name in source] if isinstance(source, list) else tmp_path / source, tmp_path)


def test_a_glob_is_the_files_that_match_and_a_name_that_looks_like_one_is_itself(tmp_path: Path) -> None:
    path = str(write(tmp_path / "rows[1].jsonl", ROWS))
    assert expand(path) == [path]
    with refused("no file matches"):
        expand(str(tmp_path / "*.csv"))
    paths = [str(write(tmp_path / "ward" / name, ROWS)) for name in ("a.jsonl", "in/b.jsonl")]
    assert expand(str(tmp_path / "ward" / "**")) == paths
    assert expand(str(tmp_path / "war*")) == [str(tmp_path / "ward")]


@pytest.mark.parametrize("name", ["train.csv.zst", "train.zip", "train.jsonl.lz4", "train.txt"])
def test_a_directory_whose_types_would_be_guessed_is_refused(tmp_path: Path, name: str) -> None:
    content: Any = io.BytesIO()
    if name.endswith("zip"):
        with zipfile.ZipFile(content, "w") as packed:
            packed.writestr("train.csv", "who,text\n007,note\n7,note\n")
    write_bytes(tmp_path / "ward" / name, content.getvalue())
    with refused("ward: (holds .* files|cannot be read)"):
        load(tmp_path / "ward", tmp_path)


FILES = [*(f"train.{kind}{packed}" for kind in ("jsonl", "json", "csv") for packed in ("", *COMPRESS)), "train.parquet"]
PLACES = ["file", "glob", "list", "directory", "configs", "Hub"]
TEXTS = {name: {"dtype": "string", "_type": "Value"} for name in ("who", "age", "text")}
VALUES = [
    *("x", "", " ", "7", "07", "1e5", "1.0", "true", "null", "nan", "2020-01-01", "2020-01-01T00:00:00"),
    *("[1]", "{}", '"', "a,b;c\td", "\ufeff", "a\nb"),
]


EVERYWHERE = [(name, place) for name in FILES for place in PLACES]
UNPACKED_EVERYWHERE = [  # once unpacked, files are read as the others are
    (name, place) for name, place in EVERYWHERE if Path(name).suffix not in COMPRESS or place in ("file", "directory")
]


@pytest.mark.parametrize(("name", "layout"), [*UNPACKED_EVERYWHERE, (FILES[0], "saved")])
def test_what_one_row_holds_changes_no_other_row(
    tmp_path: Path, name: str, layout: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every source that is read, with one row's value changed to anything: the others are the same, or all are refused."""
    generator = random.Random(f"{seed} {name} {layout}")

    def read(number: int, rows: list[Json]) -> list[Any]:
        folder = tmp_path / str(number)
        if layout == "saved":
            datasets.Dataset.from_list(rows, datasets.Features.from_dict(TEXTS)).save_to_disk(str(folder))
        else:
            write(folder / name, rows)
        if layout == "configs":
            (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {name}\n---\n")
        copied = partial(shutil.copytree, folder, dirs_exist_ok=True)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, local_dir, **__: copied(local_dir))
        places = {"file": folder / name, "glob": f"{folder}/train*", "list": [folder / name], "Hub": "org/letters"}
        source: Any = places.get(layout, folder)
        return list(load(source, tmp_path / f"cache{number}", columns_kept=("who", "age")).rows)

    rows = [{"who": f"{number:03}", "age": str(number), "text": f"note {number}"} for number in range(6)]
    before = read(0, rows)
    assert len(before) == len(rows)
    refusals = 0
    for number in range(1, 3 if Path(name).suffix in COMPRESS else 7):
        changed, column = generator.randrange(len(rows)), generator.choice(["who", "age", "text"])
        value: Any = generator.choice(VALUES)
        if name.startswith("train.json") and layout != "saved":
            value = generator.choice([value, 7, 7.5, True, None, [1], {"a": 1}])
        try:
            after = read(number, [row | {column: value} if i == changed else row for i, row in enumerate(rows)])
        except DataError:
            refusals += 1
            continue
        assert len(after) == len(rows)
        assert after[:changed] + after[changed + 1 :] == before[:changed] + before[changed + 1 :]
    assert refusals < 6


@pytest.mark.parametrize("layout", ["{}.jsonl", "{}/rows.jsonl", "data/{}-00000-of-00001.jsonl"])
def test_the_splits_of_a_directory_follow_from_its_names(tmp_path: Path, layout: str) -> None:
    splits = ("train", "validation", "test")
    for split in splits:
        write(tmp_path / "ward" / layout.format(split), [{"text": split}])
    for split in splits:
        assert raw(tmp_path / "ward", tmp_path, split) == [{"text": split}]
    with refused("has no split 'extra'; it has train, validation, test"):
        load(tmp_path / "ward", tmp_path, "extra")


def test_a_readme_that_names_no_files_mends_no_mixture(tmp_path: Path) -> None:
    write(tmp_path / "ward" / "a.jsonl", ROWS)
    write(tmp_path / "ward" / "b.csv", ROWS)
    readme = write_bytes(tmp_path / "ward" / "README.md", b"# Letters\n\nconfigs:\n")
    with refused(r"holds .csv and .jsonl files"):
        load(tmp_path / "ward", tmp_path)
    readme.write_text("---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n")
    assert len(load(tmp_path / "ward", tmp_path).rows) == 3


def test_a_hub_that_cannot_be_reached_is_asked_once_and_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with sources.asking_hub("owner/name"):
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE  # what else the program asks of the Hub is not ours
        with refused("^owner/name: .*network"):
            sources._download("owner/name", section(train="owner/name"), Path("nowhere"))
        server.listen()
        with sources.asking_hub("owner/name"):
            assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("setting", ["offline", "proxy"])
def test_the_users_settings_of_the_hub_stay(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", setting == "offline")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("connected in spite of the setting"))
    if setting == "proxy":
        monkeypatch.setattr(constants, "ENDPOINT", "http://mirror")
        monkeypatch.setenv("http_proxy", "http://proxy:3128")
    with sources.asking_hub("owner/name"):
        assert constants.HF_HUB_OFFLINE is (setting == "offline")
