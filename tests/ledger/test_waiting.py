"""Nobody waits for the ledger without end: neither for its lock nor for rivals that are quicker."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from ledger_stores import reserve

from dpllm.errors import ConfigError
from dpllm.ledger import Ledger, admission, store


def test_whoever_waits_gets_the_lock_from_one_who_takes_it_again_and_again(tmp_path: Path) -> None:
    path, held, done = tmp_path / "ledger.sqlite", threading.Event(), threading.Event()

    def greedy() -> None:
        with Ledger(path) as book:
            while not done.is_set():
                with book.store.write():
                    held.set()
                    time.sleep(0.02)

    with Ledger(path) as patient:
        rival = threading.Thread(target=greedy)
        rival.start()
        try:
            waits = []
            for _ in range(10):
                held.clear()
                held.wait(10)
                began = time.monotonic()
                with patient.store.write():
                    waits.append(time.monotonic() - began)
        finally:
            done.set()
            rival.join()
    assert sorted(waits)[5] < 1.0


def test_a_lock_that_is_never_free_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.2)
    path = tmp_path / "ledger.sqlite"
    with (
        Ledger(path) as one,
        Ledger(path) as other,
        one.store.write(),
        pytest.raises(ConfigError, match="locked"),
    ):
        reserve(other)


def test_rivals_that_are_always_quicker_do_not_outdate_a_reservation_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = admission.refusal, 0
    with Ledger(tmp_path / "ledger.sqlite") as book, Ledger(tmp_path / "ledger.sqlite") as rival:

        def refusal(*arguments: object, **options: object) -> str | None:
            nonlocal calls
            calls += 1
            if calls < 20 and not book.store._db.in_transaction:  # type: ignore[union-attr]
                monkeypatch.setattr(admission, "refusal", real)
                reserve(rival)
                monkeypatch.setattr(admission, "refusal", refusal)
            return real(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(admission, "refusal", refusal)
        reserve(book)
        assert calls == 2
        assert len(book.runs("notes")) == 2
