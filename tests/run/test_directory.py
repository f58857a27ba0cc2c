"""A run directory: atomic JSON, a private part, and a clear() that takes only what a run wrote; the deadline of a step."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import cards
import pytest

from dpllm.errors import ConfigError
from dpllm.files import read_json, write_json
from dpllm.run.directory import Run, RunDir
from dpllm.run.failures import StepDeadline
from dpllm.statement.run_files import RunRecord


def test_json_comes_back_with_a_version_and_sorted_keys(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "a.json"
    write_json(path, {"b": 1, "a": {"d": 2, "c": 3}})
    assert read_json(path) == {"schema_version": 1, "b": 1, "a": {"d": 2, "c": 3}}
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_json_cannot_say_leaves_the_old_file(tmp_path: Path, value: object) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"a": value})
    assert read_json(path)["a"] == 1


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert read_json(path)["a"] == 1


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_missing_or_damaged_file_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_private_is_closed_whatever_the_mask_and_whatever_it_was(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = RunDir(tmp_path / "a" / "run")
        run.make()
        assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
        run.private.chmod(0o755)
        run.make()
        assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_clear_takes_what_a_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.make()
    for path in (run.config, run.plan, run.run, run.export / "a", run.canaries):
        path.write_text("{}")
    kept = [tmp_path / "ledger.sqlite", tmp_path / "notes.txt"]
    for path in kept:
        path.write_text("mine")
    run.clear()
    assert sorted(tmp_path.iterdir()) == kept
    run.clear()


def test_clear_keeps_what_the_next_run_reads_already(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.make()
    tokens = run.private / "cache" / "tokens" / "one"
    other = run.private / "cache" / "tokens" / "two"
    for folder in (tokens, other):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_text("7")
    run.canaries.write_text("{}")
    (run.private / "link").symlink_to(tmp_path)
    run.clear(keep=tokens)
    assert [path for path in run.private.rglob("*") if path.is_file()] == [tokens / "tokens.bin"]
    assert not run.export.exists()
    run.clear(keep=tmp_path / "elsewhere")
    assert not run.private.exists()


def test_what_a_run_without_privacy_measured_stays_private(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.audit_dir(True).is_relative_to(run.export)
    assert run.audit_dir(False).is_relative_to(run.private)
    for path in (run.canaries, run.resume, run.metrics):
        assert path.is_relative_to(run.private)
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir(tmp_path).load_config()


def test_a_run_says_what_it_guarantees_and_nothing_where_it_guarantees_nothing(tmp_path: Path) -> None:
    def ended(**changes: Any) -> Run:
        record = RunRecord.model_validate_json(json.dumps(cards.record(**changes)))
        return Run(RunDir(tmp_path), record, config)

    config = cards.config()
    write_json(tmp_path / "plan.json", cards.plan())
    promised = ended()
    assert (promised.epsilon, promised.delta) == (cards.EPSILON, 1e-5)
    broken = ended(guarantee={"holds": False, "reason": "the noise was seeded"})
    assert (broken.epsilon, broken.delta) == (None, None)
    config = cards.baseline()
    baseline = ended(guarantee={"holds": False, "reason": "no privacy"})
    assert (baseline.epsilon, baseline.delta, baseline.status) == (None, None, "completed")


def test_a_step_has_its_time_and_what_lies_between_has_as_much_as_it_wants() -> None:
    watch = StepDeadline(0.02)
    assert watch.overdue() is None
    watch.step(3)
    assert watch.overdue() is None
    time.sleep(0.05)
    assert watch.overdue() == "step 3"
    watch.rest()
    assert watch.overdue() is None
