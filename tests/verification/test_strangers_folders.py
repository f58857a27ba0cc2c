"""Folders as strangers send them: what is looked at before anything is verified, and files that nobody lists."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cards import audit, config, make_run, plan, record
from published import failing, rehash

from dpllm import verification
from dpllm.card.card import write_card
from dpllm.cli import main
from dpllm.verification.verify import verify

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
        assert verification._bytes_in(tmp_path) >= 4096
    finally:
        os.chdir(before)
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)  # pytest would clean up by recursion


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "more.safetensors"])
def test_a_file_that_neither_run_nor_card_nor_audit_wrote_is_named(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, config(), plan(), record(), audit())
    write_card(run)
    assert "run" not in failing(run.root)
    (run.export / name).write_text("{}")
    rehash(run.export, name)  # by somebody who writes all of export/ anew
    (said,) = (check.detail for check in verify(run.root).checks if check.name == "run")
    assert f"files.{name}" in said


def test_names_that_a_terminal_cannot_write_end_in_lines(tmp_path: Path) -> None:
    folder = shutil.copytree(CARD, tmp_path / os.fsdecode(b"r\xff"))
    assert main(["verify", str(folder)]) == 0
    (folder / "export" / "na\u00efve\U0001f600.txt").touch()
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream):
        assert main(["verify", str(folder)]) == 4
    stream.flush()
    assert b"\\U0001f600.txt" in stream.buffer.getvalue()  # type: ignore[attr-defined]
