"""Whatever a stranger's file holds, ``dpllm verify`` ends soon, in little memory, with a line of its own."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cards import audit, config, make_run, plan, record

from dpllm import verification
from dpllm.card.card import write_card
from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.files import MOST_LEVELS, check_shape
from dpllm.run.directory import RunDir
from dpllm.verification import check_folder, values, verify
from dpllm.verification.values import MOST, Check, Wrong, read_object, regular

TERABYTE = 2**40


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "run", config(), plan(), record(), audit())
    write_card(made)
    return made


def check_of(path: Path, name: str) -> Check:
    return next(check for check in verify.verify(path).checks if check.name == name)


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":[' + b"0," * 70_000 + b"0]}", "values"),
        (b'{"a":[' + b"{}," * 70_000 + b"{}]}", "values"),
        (b'{"a":' + b"[" * 70_000 + b"]" * 70_000 + b"}", "values|nested"),
        (b'{"a":' + b"[" * MOST_LEVELS + b"[]" + b"]" * MOST_LEVELS + b"}", "nested"),
        (b'{"a":' * 9000, "no object"),
        (b'{"a": "b', "no object"),
        (b"{}{}", "do not pair"),
        (b"}{", "no object"),
        (b"[]", "no object"),
        (b"", "no object"),
        (b"(lp0\nVhello\np1\na.", "not valid"),
    ],
)
def test_json_is_bounded_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, why: str
) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(Wrong, match=why):
        read_object(tmp_path / "run.json")


@pytest.mark.parametrize("value", [{"a": "[" * 999 + ',"\\{'}, {"\\": '\\"'}, {"a\\": [1, {"b": "}]"}]}, {}])
def test_what_stands_in_quotes_is_no_bracket(value: dict[str, object]) -> None:
    check_shape(json.dumps(value).encode(), 5)


@pytest.mark.parametrize("cut", [2**20 - 1, 2**20, 2**20 + 1])
def test_a_text_may_lie_across_two_pieces(cut: int) -> None:
    text = b'{"' + b"x" * (cut - 2) + b'": "[[[", "b": [1]}'
    check_shape(text, 4)
    with pytest.raises(ValueError, match="values"):
        check_shape(text, 2)


# --- sizes -----------------------------------------------------------------------------------------------------------


def sparse(path: Path, head: bytes = b"", size: int = TERABYTE) -> None:
    path.write_bytes(head)
    os.truncate(path, size)


def whole_header(size: int) -> bytes:
    """Of a safetensors file whose one tensor takes all of so many bytes."""
    text = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("notes.bin", b""),
        ("chat_template.jinja", b""),
        ("tokenizer.json", b"{}"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
        ("adapter_model.safetensors", whole_header(TERABYTE)),
        ("audit/audit.json", b"{}"),
        ("privacy.svg", b""),
    ],
)
def test_a_terabyte_of_nothing_is_not_read(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str, head: bytes
) -> None:
    size = TERABYTE + len(head) if len(head) > 20 else TERABYTE
    sparse(run.export / name, head, size)
    read = check_folder.sha256
    monkeypatch.setattr(
        check_folder, "sha256", lambda path, **how: pytest.fail(name) if path.name in name else read(path, **how)
    )
    started = time.process_time()
    check = check_of(run.export, "files")
    assert check.status == "failed"
    assert name in check.detail
    assert time.process_time() - started < 20


def test_a_file_that_is_not_listed_is_not_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.export / "special_tokens_map.json").write_text("{}", encoding="utf-8")
    read = check_folder._content
    monkeypatch.setattr(
        check_folder, "_content", lambda path, of: pytest.fail("read") if "special" in path.name else read(path, of)
    )
    assert "not listed, and not read: special_tokens_map.json" in check_of(run.export, "files").detail


def test_a_file_with_holes_is_read_where_it_is_small_or_mostly_there(tmp_path: Path) -> None:
    sparse(tmp_path / "a.safetensors", size=2**20)
    sparse(tmp_path / "b.safetensors", bytes(2**16) * 900, 70 * 2**20)
    for name in ("a", "b"):
        with regular(tmp_path / f"{name}.safetensors") as file:
            assert file.tell() == 0
    sparse(tmp_path / "c.safetensors", bytes(2**16), 70 * 2**20)
    with pytest.raises(Wrong, match="never written"), regular(tmp_path / "c.safetensors"):
        pass


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "tokenizer_config.json", "run.json", "x.png"])
def test_each_name_has_its_size(tmp_path: Path, name: str) -> None:
    most = MOST.get(name, MOST.get(Path(name).suffix, values.MOST_OTHER))
    sparse(tmp_path / name, size=most)
    with regular(tmp_path / name):
        pass
    sparse(tmp_path / name, size=most + 1)
    with pytest.raises(Wrong, match="more than"), regular(tmp_path / name):
        pass


# --- a process of its own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "exit", "hang"])
def test_a_file_that_ends_the_reader_is_one_failed_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    def hostile(*_: object, **__: object) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(0)
        time.sleep(100)

    monkeypatch.setattr(verify, "verify", hostile)
    monkeypatch.setattr(verification, "SECONDS", 1.0)
    assert main(["verify", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "0 verified, 0 asserted, 1 failed"
    assert printed.out.startswith("failed    end: ")
    assert "Traceback" not in printed.out + printed.err


def test_what_holds_nothing_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        verification.verify_apart(tmp_path / "nothing")


def test_little_memory_is_taken_by_the_two_files_that_took_all(run: RunDir) -> None:
    (run.export / "audit" / "audit.json").write_bytes(b'{"a":[' + b"0," * 2**23 + b"0]}")
    code = (
        "import resource, sys; from dpllm.cli import main; code = main(['verify', sys.argv[1]]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, run.export], capture_output=True, text=True, timeout=300)
    assert done.returncode == 4, done.stderr
    assert "failed    audit: audit.json has 16,777,225 bytes" in done.stdout
    assert 50 < int(done.stdout.split()[-1]) < 512  # MiB
