"""A draft that cannot be read is an error that says what to do, and stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpllm.errors import ConfigError
from dpllm.publish.draft import Draft


def take(line: Any) -> None:
    line["texts"].items()


FIRST = b'{"settings": {"rows": 2}, "seed": 1}\n'


DAMAGED = [b"{}\n", b"[]\n", b"3\n", b"x\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", FIRST + b"{}\nx"]


@pytest.mark.parametrize("content", [*DAMAGED, FIRST + b'{"texts": 3, "dropped": {}}\n'])
def test_a_damaged_draft_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".set.draft.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read .*Remove it"):
        Draft(path, {"rows": 2}, dict, take)
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="IsADirectoryError"):
        Draft(tmp_path, {}, dict, take)


def test_what_was_added_is_there_again_for_its_owner_alone_and_what_was_cut_off_is_not(tmp_path: Path) -> None:
    path, found = tmp_path / "draft", list[Any]()
    Draft(path, {"rows": 2}, lambda: {"seed": 1}, found.append).add([1], {"a": 2})
    assert path.stat().st_mode & 0o077 == 0
    with path.open("ab") as file:
        file.write(b"[1, 2")
    again = list[Any]()
    draft = Draft(path, {"rows": 2}, lambda: {"seed": 2}, again.append)
    draft.add([3])
    assert draft.facts == {"seed": 1}
    assert found == [[1], {"a": 2}]
    assert again == [[1], {"a": 2}, [3]]
    assert path.read_bytes().count(b"\n") == 4
