"""Files of a stranger that stand for more than they hold, or for nothing that ends: each is one failed check, soon."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from cards import audit, config, make_run, plan, record
from published import make_endless
from pyarrow import parquet

from dpllm.auditing.gradient import COLUMNS
from dpllm.card.card import write_card
from dpllm.run.directory import RunDir
from dpllm.verification import check_audits
from dpllm.verification.values import Wrong
from dpllm.verification.verify import verify


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "run", config(), plan(), record(), audit())
    write_card(run)
    return run


def bomb(path: Path, rows: int, columns: dict[str, object]) -> None:
    table = pyarrow.table({name: pyarrow.repeat(value, rows) for name, value in columns.items()})
    parquet.write_table(table, path, compression="zstd", row_group_size=rows)


TOKENS = {
    f"{who}_{what}": 0.0
    for who in ("tuned", "base")
    for what in ("log_prob", "mean", "variance", "argmax", "top_k_log_prob")
}
TOKENS |= {"canary_id": "c00001", "zlib_bytes": 1, "group": 1, "inserted": True, "secret": True, "word": 0}  # type: ignore[dict-item]


def test_a_small_table_that_unpacks_to_gigabytes_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_audits, "MOST_TOKENS", 2_000_000)
    bomb(tmp_path / "tokens.parquet", 3_000_000, TOKENS)
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
