"""Makes all processes of a run end together: if one fails, all end, and rank 0 says why, once.

Comes in: the process group. Goes out: a message on rank 0's standard error and the same exit code everywhere. A rank that fails
writes the reason into the group's store; a thread in every rank polls it, so that ranks waiting in a collective operation that
will never end also stop. Must not know what is trained, and must not read the run directory.

torchrun's error files also name the first failure, but only on its own machine; it ends the others by SIGTERM, which here
requests an orderly stop. The group's time-out does not end a rank that hangs outside a collective operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dpllm.errors import DpllmError, EndedElsewhere
from dpllm.model import processes

CHARGED = "Steps taken so far stay charged. With a checkpoint, continue with --resume, on any number of processes."
LOOK_EVERY = 0.25  # seconds, as all of these times are
TO_SAY, TO_LEAVE = 10.0, 5.0  # for rank 0 to print the reason, and to wait for the others before the store ends with it
TO_END = 10.0  # for rank 0 to record how the run ended, after another rank failed
BROKEN = re.compile(r"gloo|nccl|process group|connection (closed|reset|refused)|peer|broken pipe|socket", re.IGNORECASE)
Cause = dict[str, Any]
_runs = 0  # runs of this process so far, so that the second does not read a message of the first


class StepDeadline:
    """A time limit for each step. ``writing`` is held while rank 0 writes files, which must not be interrupted."""

    def __init__(self, seconds: float) -> None:
        """A step that takes more than ``seconds`` ends the run; no step has begun yet."""
        self.seconds, self.writing = seconds, threading.RLock()
        self._doing, self._until = "", float("inf")

    def step(self, step: int) -> None:
        """Step ``step`` begins."""
        self._doing, self._until = f"step {step}", time.monotonic() + self.seconds

    def rest(self) -> None:
        """Suspends the limit: evaluation and checkpoints may take any time."""
        self._until = float("inf")

    def overdue(self, grace: float = 0.0) -> str | None:
        """The step that is late by more than ``grace`` seconds, or None."""
        return self._doing if time.monotonic() > self._until + grace else None


@contextlib.contextmanager
def fail_together(seconds: float) -> Iterator[StepDeadline]:
    """Within the block, all ranks fail if one does; a step may take ``seconds``. A run of one process has no deadline.

    Raises:
        EndedElsewhere: Another rank failed, and rank 0 has said why.
        DpllmError: A rank was killed without a message; raised on rank 0.
    """
    deadline = StepDeadline(seconds)
    if not processes.several():
        yield deadline
        return
    failures = _Failures(deadline)
    watch = threading.Thread(target=failures.watch, daemon=True)
    watch.start()
    threading.Thread(target=failures.end_alone, daemon=True).start()
    try:
        yield deadline
    except BaseException as error:
        ended = failures.end(error)
        if ended is error:
            raise
        raise ended from error
    finally:
        failures.over.set()
        watch.join()
        failures.leave()


class _Failures:
    """The first failure of a run, in the group's store: rank, exit code and message."""

    def __init__(self, deadline: StepDeadline) -> None:
        global _runs
        _runs += 1
        store: Any = _get_default_store()
        self._store = PrefixStore(f"dpllm/{_runs}", store.clone())
        self._rank, self._deadline, self.over = distributed.get_rank(), deadline, threading.Event()

    def end(self, error: BaseException) -> BaseException:
        """The exception for the main thread to end with: its own, or ``EndedElsewhere`` if another rank failed first."""
        broken = isinstance(error, RuntimeError) and (
            isinstance(error, distributed.DistError) or BROKEN.search(str(error))
        )
        # If every rank refuses, rank 0 reports it itself; the others give it time.
        cause = self._cause(TO_END if broken else float(self._rank > 0))
        failure = error
        if cause is None:
            if broken:
                failure = DpllmError(
                    "another process of the run ended without a message (perhaps out of memory, or its machine failed), so "
                    f"this one ends too ({type(error).__name__}). {CHARGED}"
                )
            elif self._rank and not isinstance(error, DpllmError):
                traceback.print_exception(error)  # on its own machine: rank 0 prints only the type
            words = str(failure) if isinstance(failure, DpllmError) else f"{type(failure).__name__}; see its output"
            cause = self._post(words, getattr(failure, "exit_code", 1), self._rank)
        if self._rank == 0 == cause["rank"]:
            self._set("said")
            return failure
        if not self._wait(TO_SAY, "said"):  # rank 0 has ended or cannot be reached
            self._say(cause)
        return EndedElsewhere(cause["code"])

    def watch(self) -> None:
        """Runs in a thread; ends this process when another has failed or a step takes too long."""
        while not self.over.wait(LOOK_EVERY):
            if overdue := self._deadline.overdue():
                self._post(
                    f"{overdue} did not end within {self._deadline.seconds:g} s: a process hangs, or the network between "
                    f"processes failed. {CHARGED} If a step takes that long, raise train.process_timeout."
                )
            if (cause := self._cause()) is None:
                continue
            if self._rank:
                self._wait(TO_SAY, "said")
            elif cause["rank"] != 0:  # the main thread reports rank 0's own failure
                self._say(cause)
            if not self.over.wait(2 * LOOK_EVERY if self._rank else TO_END):  # the main thread waits for ever
                with self._deadline.writing:
                    if self._rank:
                        self.leave()
                    os._exit(cause["code"])

    def end_alone(self) -> None:
        """Runs in a second thread: the first waits for ever if the store does not answer (machine lost, process stopped)."""
        while not self.over.wait(LOOK_EVERY):
            if overdue := self._deadline.overdue(TO_SAY + 2 * TO_END):
                _print(f"{overdue} did not end, and the first process does not answer. {CHARGED}", self._rank)
                os._exit(1)

    def leave(self) -> None:
        """Signs off; rank 0, whose process may host the store, ends last."""
        if self._rank:
            self._set(f"left {self._rank}")
        else:
            self._wait(TO_LEAVE, *(f"left {rank}" for rank in range(1, distributed.get_world_size())))

    def _say(self, cause: Cause) -> None:
        _print(cause["message"], cause["rank"])
        self._set("said")

    def _set(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(key, "1")

    def _post(self, message: str, code: int = 1, rank: int | None = None) -> Cause:
        """Records a cause unless there is one already; returns the recorded one."""
        cause: Cause = {"rank": rank, "code": code, "message": message}
        with contextlib.suppress(RuntimeError):  # the store is gone
            cause = json.loads(self._store.compare_set("cause", "", json.dumps(cause)))
        return cause

    def _cause(self, seconds: float = 0.0) -> Cause | None:
        word = self._wait(seconds, "cause")
        return json.loads(word) if word else None

    def _wait(self, seconds: float, *keys: str) -> str | None:
        """The value of the last key once all keys are set; None if that takes too long or the store is gone."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self._store.check(list(keys)):
                if time.monotonic() >= until:
                    return None
                time.sleep(LOOK_EVERY / 5)
            return bytes(self._store.get(keys[-1])).decode()
        return None


def _print(message: str, rank: int | None) -> None:
    where = f"process {rank}: " if rank else ""
    print(f"dpllm train: {where}{message}", file=sys.stderr, flush=True)
