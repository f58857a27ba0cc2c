"""Private text in a file that would be published is found; words that many rows share are nobody's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from dpllm.errors import Refused
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.releases import leaks
from dpllm.run.directory import RunDir
from dpllm.text.data import load_table
from dpllm.text.prompts import keep_rows

TEMPLATE = "You are a helpful assistant who answers every question of the customer with care."
ROWS = [(number, name, f"{TEMPLATE} {name} owes {number} crowns to the bakery near the old harbour since May")
        for number, name in enumerate(("Aino", "Bertil", "Cilla", "Doris", "Erik"), start=1)]  # fmt: skip


def a_run(root: Path, train: Any) -> RunDir:
    """A run directory with a recipe, and where its data lie."""
    recipe = {"model": {"name_or_path": "m"}, "data": {"train": train}, "train": {"steps": 1}, "output_dir": "run"}
    run = RunDir(root / "run")
    run.private.mkdir(parents=True)
    config = RunConfig.model_validate(recipe)
    run.config.write_text(dump_config(config))
    keep_rows(run.rows, config.data, load_table(config.data.train, config.data, "train", root / "cache"), None)
    return run


def test_words_of_one_row_are_found_and_those_of_a_template_are_not() -> None:
    texts = {"README.md": f"# Card\n\n{TEMPLATE}\n", "chat.jinja": "owes 3 crowns to the bakery near the OLD harbour!"}
    assert leaks._matches(ROWS, texts, limit=3) == {"chat.jinja": 3}


def test_a_short_row_is_found_as_a_whole() -> None:
    texts = {"README.md": "It says: the alarm code reads 516667672066, they say."}
    assert leaks._matches([(9, "", "The alarm code reads 516667672066")], texts, limit=3) == {"README.md": 9}
    assert not leaks._matches([(9, "", "the alarm they"), (10, "", "they say it")], texts, limit=3)


@pytest.mark.parametrize("source", ["*.jsonl", "ward", ["a.jsonl", "b.jsonl.gz"]])
def test_text_of_every_file_of_a_source_is_searched_for(tmp_path: Path, source: Any) -> None:
    rows = [json.dumps({"text": text}) + "\n" for _, _, text in ROWS]
    folder = tmp_path / "ward"
    tiny.write_rows(folder / "a.jsonl", [{"text": "nothing of note"}])
    (folder / ("b.jsonl.gz" if "gz" in str(source) else "b.jsonl")).write_bytes(
        (gzip.compress if "gz" in str(source) else bytes)("".join(rows).encode())
    )
    inside = folder.parent if source == "ward" else folder
    train = [str(inside / item) for item in source] if isinstance(source, list) else str(inside / source)
    run = a_run(tmp_path, train)
    with pytest.raises(Refused, match=r"training text: .* is in chat.jinja"):
        list(leaks._rows(run, {"chat.jinja": ROWS[2][2]}, run.export))


def test_what_was_not_searched_for_is_said_and_every_file_is_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "MOST_ROWS", 10)
    tiny.write_rows(tmp_path / "a.jsonl", [{"text": "nothing of note"}] * 90)
    tiny.write_rows(tmp_path / "b.jsonl", [{"text": ROWS[2][2]}] * 10)
    run = a_run(tmp_path, [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert list(leaks._rows(run, {"chat.jinja": "nothing"}, run.export)) == [
        "training text: only 10 of 100 rows, evenly spread, were searched for."
    ]
    with pytest.raises(Refused, match=r"chat.jinja \(row 91\)"):
        list(leaks._rows(run, {"chat.jinja": ROWS[2][2]}, run.export))


@pytest.mark.parametrize("change", ["a row is added", "nobody noted which rows were read"])
def test_rows_that_are_others_by_now_are_searched_for_all_the_same(tmp_path: Path, change: str) -> None:
    """A file that grows is an everyday thing, and what stood in it may have been copied."""
    data = tmp_path / "a.jsonl"
    tiny.write_rows(data, [{"text": text} for _, _, text in ROWS])
    run = a_run(tmp_path, str(data))
    if change == "a row is added":
        with data.open("a") as file:
            file.write('{"text": "one more"}\n')
    else:
        run.rows.unlink()
    said = leaks._rows(run, {"chat.jinja": ROWS[2][2]}, run.export)
    assert "not known to be those that the run read" in next(said)
    with pytest.raises(Refused, match=r"training text: .* is in chat.jinja"):
        next(said)


def test_the_rows_are_found_from_another_directory_and_not_mistaken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name may be another file where one stands now."""
    tiny.write_rows(tmp_path / "at" / "a.jsonl", [{"text": text} for _, _, text in ROWS])
    tiny.write_rows(tmp_path / "else" / "a.jsonl", [{"text": "nothing of note"}])
    monkeypatch.chdir(tmp_path / "at")
    run = a_run(tmp_path, "a.jsonl")
    for place in ("/", tmp_path / "else"):
        monkeypatch.chdir(place)
        with pytest.raises(Refused, match=r"training text: .* is in chat.jinja"):
            list(leaks._rows(run, {"chat.jinja": ROWS[2][2]}, run.export))
    (tmp_path / "at" / "a.jsonl").unlink()
    (said,) = leaks._rows(run, {"chat.jinja": ROWS[2][2]}, run.export)
    assert "are not where the run read them" in said
