"""Whatever a stranger's file holds, ``dpllm verify`` ends soon, in little memory, with a line of its own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from cards import HASH, TOKENIZER, audit, config, make_run, plan, record
from published import edit, failing, make_endless, rehash
from pyarrow import parquet

from dpllm import verification
from dpllm.auditing.gradient import COLUMNS
from dpllm.canaries import canaries
from dpllm.card.card import write_card
from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.files import MOST_LEVELS, check_shape
from dpllm.run.directory import RunDir
from dpllm.verification import check_audits, check_folder, values
from dpllm.verification import verify as verifying
from dpllm.verification.values import MOST, Check, Wrong, read_object, regular
from dpllm.verification.verify import verify

TERABYTE = 2**40


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "run", config(), plan(), record(), audit())
    write_card(made)
    return made


def check_of(path: Path, name: str) -> Check:
    return next(check for check in verify(path).checks if check.name == name)


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

    monkeypatch.setattr(verifying, "verify", hostile)
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


# --- files that stand for more than they hold, or for nothing that ends ----------------------------------------------


FIGURES = ("log_prob", "mean", "variance", "argmax", "top_k_log_prob")
TOKENS = {f"{who}_{figure}": 0.0 for who in ("tuned", "base") for figure in FIGURES}
TOKENS |= {"canary_id": "c00001", "zlib_bytes": 1, "group": 1, "inserted": True, "secret": True, "word": 0}  # type: ignore[dict-item]


def test_a_small_table_that_unpacks_to_gigabytes_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canaries, "MOST_TOKENS", 2_000_000)
    rows = 3_000_000
    table = pyarrow.table({name: pyarrow.repeat(value, rows) for name, value in TOKENS.items()})
    parquet.write_table(table, tmp_path / "tokens.parquet", compression="zstd", row_group_size=rows)
    assert (tmp_path / "tokens.parquet").stat().st_size < 2**18
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Wrong, match="3,000,000 rows"):
        check_audits.tables(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def varint(number: int, size: int = 0) -> bytes:
    """A number as thrift writes it, in at least so many bytes."""
    parts = [(2 * number >> shift) & 127 for shift in range(0, max(7 * size, (2 * number).bit_length()), 7)]
    return bytes([*(part | 128 for part in parts[:-1]), parts[-1]])


def test_a_table_that_states_another_size_than_it_has_is_not_unpacked(tmp_path: Path) -> None:
    rows, path = 3_000_000, tmp_path / "tokens.parquet"
    table = pyarrow.table({name: pyarrow.repeat(value, rows) for name, value in TOKENS.items()})
    whole = {"row_group_size": rows, "data_page_size": 2**30, "max_rows_per_page": rows, "use_dictionary": False}
    parquet.write_table(table, path, compression="zstd", write_statistics=False, **whole)
    group, written = parquet.read_metadata(path).row_group(0), path.read_bytes()
    start = len(written) - 8 - int.from_bytes(written[-8:-4], "little")
    foot = written[start:]
    for size in {group.total_byte_size, *(group.column(n).total_uncompressed_size for n in range(group.num_columns))}:
        foot = foot.replace(varint(size), varint(1000, len(varint(size))))
    path.write_bytes(written[:start] + foot.replace(varint(rows), varint(10, len(varint(rows)))))
    assert (parquet.read_metadata(path).num_rows, path.stat().st_size < 2**17) == (10, True)
    code = (
        "import sys; from pathlib import Path; from dpllm.verification import check_audits, values; import pyarrow.parquet\n"
        "values.MOST_MEMORY = 2**26\n"
        "with values.bounded_memory(): check_audits.tables(Path(sys.argv[1]))"
    )
    process = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=100)
    assert process.returncode == 1
    assert any(word in process.stderr for word in ("MemoryError", "damaged", "malloc")), process.stderr[-500:]


def test_bytes_count_as_rows_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gradient.parquet"
    parquet.write_table(pyarrow.table({name: np.arange(1e5) for name in COLUMNS}), path)
    check_audits.described(path, COLUMNS, check_audits.MOST_ROWS)
    monkeypatch.setattr(check_audits, "MOST_UNPACKED", 2**20)
    with pytest.raises(Wrong, match="bytes unpacked"):
        check_audits.described(path, COLUMNS, check_audits.MOST_ROWS)


@pytest.mark.parametrize("name", ["config", "plan", "run", "describe", "canaries", "audits"])
@pytest.mark.parametrize("kind", ["pipe", "link", "giant"])
def test_what_a_run_directory_holds_is_read_where_it_is_a_small_file(run: RunDir, name: str, kind: str) -> None:
    path: Path = getattr(run, name)
    if path.exists():
        path.unlink()
    make_endless(path, kind, 2**31)
    verification = verify(run.root)
    assert [check.name for check in verification.checks if check.status == "failed"] == ["card"]
    assert path.name in verification.checks[0].detail
    assert "\n" not in verification.checks[0].detail


def test_aliases_in_a_recipe_are_one_failed_check(run: RunDir) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    run.config.write_text("\n".join(lines), encoding="utf-8")
    started = time.monotonic()
    failed = {check.name: check.detail for check in verify(run.root).checks if check.status == "failed"}
    assert "anchor or an alias" in failed["ledger"]
    assert time.monotonic() - started < 10


# --- folders ---------------------------------------------------------------------------------------------------------


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
def test_a_file_that_neither_run_nor_card_nor_audit_wrote_is_named(run: RunDir, name: str) -> None:
    assert "run" not in failing(run.root)
    (run.export / name).write_text("{}")
    rehash(run.export, name)  # by somebody who writes all of export/ anew
    assert f"files.{name}" in check_of(run.root, "run").detail


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
    edit(folder / NAME, '"lora_alpha": 16', '"lora_alpha": 48')
    rehash(folder, NAME)
    after = of_weights(folder)
    assert after.status == ("failed" if named else "asserted")
    assert ("other weights" if named else NAME) in after.detail
