"""Folders as strangers send them: what is looked at before anything is verified, and files that nobody lists."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cards import HASH, TOKENIZER, audit, config, make_run, plan, record
from published import failing, rehash

from dpllm import verification
from dpllm.card.card import write_card
from dpllm.cli import main
from dpllm.verification.values import Check
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


# What an audit is about: the weights, and the settings that say how they are applied.

NAME, SETTINGS = "adapter_config.json", {"peft_type": "LORA", "lora_alpha": 16, "r": 8}


def export(root: Path, named: bool) -> Path:
    """A published adapter whose audit names its settings, or is of a version that named none."""
    text = json.dumps({**SETTINGS, "base_model_name_or_path": "openai-community/gpt2"}).encode()
    weights = {"adapter_model.safetensors": HASH, NAME: hashlib.sha256(text).hexdigest()}
    happened = record(artifacts={**weights, "tokenizer.json": hashlib.sha256(TOKENIZER).hexdigest()})
    of_audit = weights if named else {"adapter_model.safetensors": HASH}
    run = make_run(root, config(), plan(), happened, audit(weights=of_audit))
    (run.export / NAME).write_bytes(text)
    write_card(run)
    return run.export


def of_weights(folder: Path) -> Check:
    """The line of the audit's weights, or of whatever ended the audit before it."""
    return next(check for check in verify(folder).checks if check.name in ("audit: weights", "audit"))


@pytest.mark.parametrize("named", [True, False])
def test_a_changed_scale_is_never_under_a_verified_line(tmp_path: Path, named: bool) -> None:
    folder = export(tmp_path / "run", named)
    before = of_weights(folder)
    assert before.status == ("verified" if named else "asserted")
    assert NAME in before.detail
    path = folder / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 48}), encoding="utf-8")
    rehash(folder, NAME)
    after = of_weights(folder)
    assert after.status == ("failed" if named else "asserted")
    assert ("other weights" if named else NAME) in after.detail
