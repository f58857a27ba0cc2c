"""Private rows are recognised by what they say, wherever a copy of them lies and wherever one stands."""

import gzip
import json
import stat
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiny
from text_tables import load_rows

from dpllm.errors import ConfigError
from dpllm.files import read_json
from dpllm.recipe.config import DataConfig
from dpllm.text.data import load_table
from dpllm.text.prompts import keep_rows, private_among

NAMES = ("Aino Öberg", "Bertil Ek", "Cilla Falk", "Doris Ask", "Erik Lind")
ROWS = [
    {"prompt": f"Who was seen?\nOn day {n}", "completion": f"{name}, with a cough."} for n, name in enumerate(NAMES)
]


def kept(folder: Path, rows: Any, held_out: Any = None, **data: Any) -> Path:
    """The digests of such rows; ``rows`` are written to a file, unless they name sources."""
    if not isinstance(rows, str):
        rows = str(tiny.write_rows(folder / "train.jsonl", rows))
    config = DataConfig(train=rows, **data)
    evaluated = load_rows(folder / "eval", *held_out) if held_out else None
    keep_rows(folder / "rows.json", config, load_table(config.train, config, "train", folder / "cache"), evaluated)
    return folder / "rows.json"


@pytest.mark.parametrize(
    "text",
    [
        "Aino Öberg, with a cough.", "  aino   ÖBERG with a\tcough", "AINO ÖBERG -- WITH A COUGH!",
        unicodedata.normalize("NFD", "Aino Öberg, with a cough."), "Aino_Öberg,_with_a_cough.",
        "Aino Oberg, with a\u0301 cough.", "Ai\u200bno Öberg, with\u00a0a cough.", "\uff21ino Öberg, with a cough.",
        "Who was seen? On day 0", "Who was seen? On day 0 Aino Öberg, with a cough.", json.dumps(ROWS[0]),
        json.dumps({"id": 7, "messages": [{"content": ROWS[0]["completion"]}]}, ensure_ascii=False),
    ],
)  # fmt: skip
def test_a_copy_that_is_edited_without_thought_is_the_same_text(tmp_path: Path, text: str) -> None:
    path = kept(tmp_path, ROWS)
    assert private_among(path, ["Nobody came.", text, "", "  ", "{", "[" * 100_000]) == [2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(name in path.read_text() for name in ("Aino", "cough"))


def test_lines_of_a_text_that_each_became_a_prompt_are_found(tmp_path: Path) -> None:
    path = kept(tmp_path, ROWS)
    prompts = ["Nobody came.", "Who was seen?", "On day 3", "Nobody."]
    assert private_among(path, prompts) == []
    assert private_among(path, prompts, lines=20) == [2]


def test_a_template_is_nobodys(tmp_path: Path) -> None:
    """What four of five rows say is a template's; what three say may be three people's."""
    rows = [{"prompt": "Write a note.", "completion": name} for name in NAMES[:4]]
    rows += [{"prompt": "Write a letter.", "completion": str(number)} for number in range(3)]
    path = kept(tmp_path, rows)
    assert private_among(path, ["Write a note.", "Write a letter.", "Bertil Ek"]) == [2, 3]
    of_many = [{"prompt": f"Ward {n // 10}", "completion": str(n)} for n in range(200)]
    assert private_among(kept(tmp_path / "many", of_many), ["Ward 3"]) == [1]


def test_what_one_unit_says_in_all_its_rows_is_its_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"Patient {name}", "completion": str(n), "who": name} for name in NAMES for n in range(30)]
    path = kept(tmp_path, rows, unit="who", max_examples_per_unit=30)
    assert private_among(path, ["Patient Aino Öberg", "Patient Nobody", "7"]) == [1]


def test_each_line_of_a_long_text_is_private(tmp_path: Path) -> None:
    lines = [f"In line {n} of it stands something of a person" for n in range(40)]
    path = kept(tmp_path, [{"text": "\n".join(lines)}, {"text": "b"}])
    assert private_among(path, [lines[7], "In line 7"]) == [1]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"text": "One two."}, ["One two."]),
        ({"text": "\U0001f600 \U0001f600"}, ["\U0001f600 \U0001f600"]),
        ({"instruction": "Say", "input": "this", "output": "that"}, ["Say", "this", "that", "Say\nthis\n"]),
        ({"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yo."}]}, ["Hi?", "Yo."]),
        ({"system": "Be.", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yo"}]},
         ["Be.", "Hi?", "Yo"]),
        ({"prompt": "", "completion": "what is left"}, ["what is left"]),
    ],
)  # fmt: skip
def test_each_text_of_a_row_is_private_in_every_layout(tmp_path: Path, row: Any, texts: list[str]) -> None:
    assert private_among(kept(tmp_path, [row]), [*texts, "", "?"]) == list(range(1, len(texts) + 1))


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("eval_public", [False, True])
def test_rows_that_are_declared_public_are_not_kept(tmp_path: Path, public: bool, eval_public: bool) -> None:
    held_out = [{"prompt": "Who left?", "completion": "Frida"}]
    path = kept(tmp_path, ROWS, held_out, public=public, eval_public=eval_public)
    numbers = private_among(path, ["Bertil Ek, with a cough", "Frida"])
    assert numbers == [1] * (not public) + [2] * (not eval_public)
    assert read_json(path)["training"]["digest"], "of public data, where they lie and what they were"


@pytest.mark.parametrize(
    "source", ["train.jsonl", "*.jsonl", "folder", "train.jsonl.gz", ["a.jsonl", "folder/b.jsonl"]]
)
def test_places_hold_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path("folder").mkdir()
    for name in ("train.jsonl", "folder/b.jsonl") if isinstance(source, str) else ("a.jsonl", "folder/b.jsonl"):
        Path(name).write_text(lines if name != "a.jsonl" else '{"prompt": "One", "completion": "two"}\n')
    Path("train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    data = DataConfig(train=source)
    keep_rows(Path("rows.json"), data, load_table(source, data, "train", tmp_path / "cache"), None)
    monkeypatch.chdir("/")
    places = read_json(tmp_path / "rows.json")["training"]["places"]
    assert all(Path(path).is_absolute() for path in places)
    rows = load_table(places, DataConfig(train=places), "train", tmp_path / "cache").rows
    assert [row.parts["completion"] for row in rows][-5:] == [row["completion"] for row in ROWS]


def test_what_a_resumed_run_finds_stays(tmp_path: Path) -> None:
    path = kept(tmp_path, ROWS)
    before = path.read_bytes()
    kept(tmp_path, ROWS[:1])
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"digests": "0', b"\xff\xfe"])
def test_digests_that_cannot_be_read_are_one_message(tmp_path: Path, content: bytes | None) -> None:
    path = kept(tmp_path, ROWS)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rows\.json: "):
        private_among(path, ["a"])
