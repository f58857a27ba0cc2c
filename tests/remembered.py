"""Answers of the accountant that many tests ask for again, kept for all processes of one session of tests.

A question is public numbers alone, and the answer a pure function of them, which the code under test computes when it is first
asked. Nothing outlives the session, so nothing of another commit is ever read.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

Once = Callable[[str, Callable[[Path], object]], Path]  # the fixture `once`
WORTH_KEEPING = 0.1  # seconds of processor time


@contextmanager
def accounting(folder: Path) -> Iterator[None]:
    """Keeps the distributions of single steps, which dp-accounting inverts point by point, and calibrated noise."""
    from dpllm.privacy import accounting, privacy_loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(privacy_loss, "_step", _kept(privacy_loss._step, folder))
        patch.setattr(accounting, "_calibrate", _kept(accounting._calibrate, folder))
        yield


def _kept(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @functools.wraps(function)
    def answer(*question: Any) -> Any:
        name = hashlib.sha256(repr((function.__name__, question)).encode()).hexdigest()
        try:
            return pickle.loads((folder / name).read_bytes())
        except FileNotFoundError:
            began = time.process_time()
            found = function(*question)
            if time.process_time() - began > WORTH_KEEPING:
                unfinished = folder / uuid4().hex
                unfinished.write_bytes(pickle.dumps(found))
                unfinished.replace(folder / name)
            return found

    return answer
