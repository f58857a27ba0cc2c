"""A draft that cannot be read is an error that says what to do, and stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpllm.errors import ConfigError
from dpllm.publish.draft import Draft

FIRST = b'{"settings": {"rows": 2}, "seed": 1}\n'


DAMAGED = [b"{}\n", b"[]\n", b"3\n", b"x\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", FIRST + b"{}\nx"]


@pytest.mark.parametrize("content", [*DAMAGED, FIRST + b'{"texts": 3, "dropped": {}}\n'])
def test_a_damaged_draft_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".set.draft.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read .*Remove it"):
        Draft.at(path, {"rows": 2}, None)
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="IsADirectoryError"):
        Draft.at(tmp_path, {}, None)
