"""Folders as strangers send them: what is looked at before anything is verified, and files that nobody lists."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpllm.cli import main
from dpllm.verification import apart, verify
from dpllm.verification.values import Wrong

CARD = Path(__file__).parents[2] / "model_cards" / "clinic-epsilon-8"


def test_folders_in_folders_are_looked_at_without_recursion(tmp_path: Path) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Path("file").write_bytes(b"a" * 5000)
        os.chdir(before)
        assert apart._bytes_in(tmp_path) >= 4096
    finally:
        os.chdir(before)
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)  # pytest would clean up by recursion


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "more.safetensors"])
def test_a_file_that_neither_run_nor_card_nor_audit_wrote_is_named(name: str) -> None:
    wrote = {"adapter_model.safetensors": "a"}
    record: Any = SimpleNamespace(artifacts=wrote)
    fine: Any = SimpleNamespace(hashes={**wrote, "privacy.svg": "b", "audit/audit.json": "c"})
    assert verify._artifacts(fine, record).status == "verified"
    with pytest.raises(Wrong, match=name):
        verify._artifacts(SimpleNamespace(hashes={**fine.hashes, name: "d"}), record)  # type: ignore[arg-type]


def test_names_that_a_terminal_cannot_write_end_in_lines(tmp_path: Path) -> None:
    folder = shutil.copytree(CARD, tmp_path / os.fsdecode(b"r\xff"))
    assert main(["verify", str(folder)]) == 0
    (folder / "export" / "na\u00efve\U0001f600.txt").touch()
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream):
        assert main(["verify", str(folder)]) == 4
    stream.flush()
    assert b"\\U0001f600.txt" in stream.buffer.getvalue()  # type: ignore[attr-defined]
