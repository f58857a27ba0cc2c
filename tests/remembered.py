"""What many tests ask again: what is installed, and answers of the accountant, kept for all processes of one session of tests.

A question is public numbers alone, and the answer a pure function of them, which the code under test computes when it is first
asked. Nothing outlives the session, so nothing of another commit is ever read.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

Once = Callable[[str, Callable[[Path], object]], Path]  # the fixture `once`
WORTH_KEEPING = 0.02  # seconds of processor time


@contextmanager
def accounting(folder: Path) -> Iterator[None]:
    """Keeps distributions of single steps, profiles of whole events, the epsilons of all accountants, and calibrated noise."""
    from dpllm.privacy import accounting, limits, privacy_loss, renyi

    slow = [privacy_loss._step, limits.profile, renyi.rdp_epsilon]
    slow += [accounting._pld, accounting._prv, accounting._calibrate]
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for function in slow:
            kept = _kept(function, folder)
            for module in [module for name, module in sys.modules.items() if name.startswith("dpllm")]:
                if vars(module).get(function.__name__) is function:  # also where it was imported by name
                    patch.setattr(module, function.__name__, kept)
        yield


@contextmanager
def packages() -> Iterator[None]:
    """What is installed, which each start of a run reads: that takes as long as the steps of a tiny model."""
    from dpllm.model import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", functools.cache(metadata.version))
        processes.versions()  # before a program forks
        yield


def _kept(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @functools.wraps(function)
    def answer(*question: Any) -> Any:
        name = hashlib.sha256(repr((function.__name__, question)).encode()).hexdigest()
        try:
            return pickle.loads((folder / name).read_bytes())
        except FileNotFoundError:
            began = time.process_time()
            result = function(*question)
            if time.process_time() - began > WORTH_KEEPING:
                unfinished = folder / uuid4().hex
                unfinished.write_bytes(pickle.dumps(result))
                unfinished.replace(folder / name)
            return result

    return answer
