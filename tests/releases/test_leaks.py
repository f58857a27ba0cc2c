"""What releases do for publishing: private text is found in what would be published, and an interrupted data set goes on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models

from dpllm.errors import ConfigError, Refused
from dpllm.publish.synthesize import SynthesisRequest
from dpllm.recipe.config import dump_config
from dpllm.releases import leaks
from dpllm.releases.draft import DUPLICATE, Draft, filters, request_of, why_dropped
from dpllm.releases.inference_budget import InferenceRequest
from dpllm.run.directory import RunDir
from dpllm.text.data import load_table
from dpllm.text.prompts import Sample, keep_rows

TEMPLATE = "You are a helpful assistant who answers every question of the customer with care."
ROWS = [(number, name, f"{TEMPLATE} {name} owes {number} crowns to the bakery near the old harbour since May")
        for number, name in enumerate(("Aino", "Bertil", "Cilla", "Doris", "Erik"), start=1)]  # fmt: skip


def a_run(root: Path, train: Any) -> RunDir:
    """A run directory with a recipe, and where its data lie."""
    run = RunDir(root / "run")
    run.private.mkdir(parents=True)
    config = tiny_models.recipe(data={"train": train})
    run.config.write_text(dump_config(config))
    keep_rows(run.rows, config.data, load_table(config.data.train, config.data, "train", root / "cache"), None)
    return run


def searched(run: RunDir) -> Iterator[str]:
    """What is said of a search for training text in a page that repeats the third row."""
    return leaks._rows(run, {"chat.jinja": ROWS[2][2]}, run.export)


FOUND = pytest.raises(Refused, match=r"training text: .* is in chat.jinja")


def test_words_of_one_row_are_found_and_those_of_a_template_are_not() -> None:
    texts = {"README.md": f"# Card\n\n{TEMPLATE}\n", "chat.jinja": "owes 3 crowns to the bakery near the OLD harbour!"}
    assert leaks._matches(ROWS, texts, limit=3) == {"chat.jinja": 3}


def test_a_short_row_is_found_as_a_whole() -> None:
    texts = {"README.md": "It says: the alarm code reads 516667672066, they say."}
    assert leaks._matches([(9, "", "The alarm code reads 516667672066")], texts, limit=3) == {"README.md": 9}
    assert not leaks._matches([(9, "", "the alarm they"), (10, "", "they say it")], texts, limit=3)


@pytest.mark.parametrize("source", ["*.jsonl", "ward", ["a.jsonl", "c.jsonl.gz"]])
def test_text_of_every_file_of_a_source_is_searched_for(tmp_path: Path, source: Any) -> None:
    folder = tmp_path / "ward"
    tiny.write_rows(folder / "a.jsonl", [{"text": "nothing of note"}])
    content = "".join(json.dumps({"text": text}) + "\n" for _, _, text in ROWS).encode()
    (folder / "b.jsonl").write_bytes(content)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(content))
    inside = folder.parent if source == "ward" else folder
    train = [str(inside / item) for item in source] if isinstance(source, list) else str(inside / source)
    run = a_run(tmp_path, train)
    with FOUND:
        list(searched(run))


def test_every_file_is_searched_for_and_what_was_not_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "MOST_ROWS", 10)
    tiny.write_rows(tmp_path / "a.jsonl", [{"text": "nothing of note"}] * 90)
    tiny.write_rows(tmp_path / "b.jsonl", [{"text": ROWS[2][2]}] * 10)
    run = a_run(tmp_path, [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert list(leaks._rows(run, {"chat.jinja": "nothing"}, run.export)) == [
        "training text: only 10 of 100 rows, evenly spread, were searched for."
    ]
    with pytest.raises(Refused, match=r"chat.jinja \(row 91\)"):
        list(searched(run))


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
    sentences = searched(run)
    assert "not known to be those that the run read" in next(sentences)
    with FOUND:
        next(sentences)


def test_rows_are_found_from_elsewhere_and_not_mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative name may be another file where one stands now."""
    tiny.write_rows(tmp_path / "at" / "a.jsonl", [{"text": text} for _, _, text in ROWS])
    tiny.write_rows(tmp_path / "else" / "a.jsonl", [{"text": "nothing of note"}])
    monkeypatch.chdir(tmp_path / "at")
    run = a_run(tmp_path, "a.jsonl")
    for place in ("/", tmp_path / "else"):
        monkeypatch.chdir(place)
        with FOUND:
            list(searched(run))
    (tmp_path / "at" / "a.jsonl").unlink()
    (sentence,) = searched(run)
    assert "are not where the run read them" in sentence


def reason(text: str, *, ended: bool = True, keep_unfinished: bool = True, min_words: int = 0) -> str | None:
    tests = filters(keep_unfinished=keep_unfinished, min_words=min_words)
    return why_dropped(Sample(0, None, text, ended), tests, text, {"again"})


def test_texts_are_dropped_for_their_reason_and_no_other() -> None:
    assert (reason(""), reason(" \n")) == ("empty", "empty")
    assert reason("one", ended=False, keep_unfinished=False) == "did not end"
    assert reason("one", ended=False) is None
    assert (reason("one two", min_words=2), reason("one", min_words=2)) == (None, "under 2 words")
    assert reason("again") == DUPLICATE
    with pytest.raises(ConfigError, match="--min-words -4"):
        reason("one", min_words=-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rows": 1}, "--epsilon is missing"), ({"rows": 1, "epsilon": 2.0, "top_p": 0.5}, "--top-p: has no effect")],
)
def test_an_option_of_another_way_or_none_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request_of(InferenceRequest, "inference", options)


def test_what_was_added_is_there_again_for_its_owner_alone_and_what_was_cut_off_is_not(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    Draft(path, {"rows": 2}, lambda: {"seed": 1}).add([1], {"a": 2})
    assert path.stat().st_mode & 0o077 == 0
    with path.open("ab") as file:
        file.write(b"[1, 2")
    draft = Draft(path, {"rows": 2}, lambda: {"seed": 2})
    assert (draft.facts, draft.lines) == ({"seed": 1}, [[1], {"a": 2}])
    draft.add([3])
    assert draft.lines == [[1], {"a": 2}, [3]]
    assert path.read_bytes().count(b"\n") == 4
    with pytest.raises(ConfigError, match="began with another rows"):
        Draft(path, {"rows": 3}, dict)


@pytest.mark.parametrize(
    "text", ['{"settings": {"rows": 2}, "seed": 1}\nx\n', "{}\n", "[]\n", '{"settings": 1}\n', "1\n"]
)
def test_a_damaged_draft_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "draft"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read\. Remove it"):
        Draft(path, {"rows": 2}, dict)
    assert path.read_text() == text


def test_files_may_be_named_by_text() -> None:
    request = request_of(SynthesisRequest, "training", {"rows": 2, "prompts": "prompts.jsonl"})
    assert request.prompts == Path("prompts.jsonl")
