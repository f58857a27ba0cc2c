"""One end for all processes of a run: where one fails, all end, and rank 0 says why, once.

Comes in: the process group. Goes out: a message on rank 0's standard error and the same exit code everywhere. A rank that
fails writes why into the group's store; a thread in every rank looks there, so that also those end that wait in a collective
operation which will never come to its end. Must not know what is trained, and must not read the run directory.
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
from torch.distributed.distributed_c10d import _get_default_store

from dpllm.errors import DpllmError, EndedElsewhere

CHARGED = (
    "Steps taken so far stay charged. Resume with --resume, on any number of processes, where a checkpoint was kept."
)
LOOK_EVERY = 0.25  # seconds
TO_SAY, TO_LEAVE = (
    10.0,
    5.0,
)  # seconds that rank 0 has to say why, and waits for the others before it takes the store away
TO_END = 10.0  # seconds that rank 0 has to write down how the run ended, once another rank has failed
BROKEN = re.compile(r"gloo|nccl|process group|connection (closed|reset|refused)|peer|broken pipe|socket", re.IGNORECASE)
_runs = 0  # of this process, so that a second run reads no message of the first


class StepDeadline:
    """What the loop tells: that it goes on.

    Attributes:
        seconds: After which a step that has not ended ends the run.
        writes: Rank 0 is writing down what stands.
    """

    def __init__(self, seconds: float) -> None:
        """Begins without a deadline."""
        self.seconds, self.writes = seconds, False
        self._doing, self._until = "", float("inf")

    def step(self, step: int) -> None:
        """Step ``step`` begins, and has ``seconds``."""
        self._doing, self._until = f"step {step}", time.monotonic() + self.seconds

    def rest(self) -> None:
        """What comes now may take as long as it wants: evaluation, a checkpoint."""
        self._until = float("inf")

    def overdue(self, grace: float = 0.0) -> str | None:
        """What has not ended in time, nor ``grace`` seconds later."""
        return self._doing if time.monotonic() > self._until + grace else None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """What happens inside is not cut off because another rank failed: files are written."""
        before, self.writes = self.writes, True
        try:
            yield
        finally:
            self.writes = before


@contextlib.contextmanager
def fail_together(seconds: float) -> Iterator[StepDeadline]:
    """Inside, the failure of one rank is that of all; nothing happens in a run of one process.

    Args:
        seconds: That a step may take; see ``StepDeadline.step``.

    Raises:
        EndedElsewhere: Another rank failed, and rank 0 has said why.
        DpllmError: A rank ended without a word (killed), said on rank 0.
    """
    watch = StepDeadline(seconds)
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        yield watch
        return
    board = _FailureStore()
    thread = threading.Thread(target=board.look, args=(watch,), name="dpllm-failures", daemon=True)
    thread.start()
    threading.Thread(target=board.end_alone, args=(watch,), name="dpllm-alone", daemon=True).start()
    try:
        yield watch
    except BaseException as error:
        board.failed(error)
        raise
    finally:
        board.over.set()
        thread.join()
        board.leave()


class _FailureStore:
    """The place in the group's store where the first failure is written."""

    def __init__(self) -> None:
        global _runs
        _runs += 1
        store = _get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        self._cause, self._said, self._left = (f"dpllm/{_runs}/{word}" for word in ("cause", "said", "left"))
        self._rank = distributed.get_rank()
        self._mouth = threading.Lock()
        self._spoken = False
        self.over = threading.Event()

    def failed(self, error: BaseException) -> None:
        """The main thread's own failure, or the consequence of another's.

        Raises:
            EndedElsewhere: Another's; it was said.
            DpllmError: Another's, which could not be said by itself.
        """
        consequence = isinstance(error, distributed.DistError) or (
            isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None
        )
        # What every rank refuses rank 0 says by itself, if it is given the time.
        cause = self._wait(self._cause, TO_END if consequence else float(self._rank > 0))
        if cause is None and consequence:
            silent = DpllmError(
                "another process of the run ended without a word (killed, for want of memory perhaps, or its machine lost), so "
                f"this one ends too ({type(error).__name__}). {CHARGED}"
            )
            if self._rank == 0 or not self._wait(self._said, TO_SAY):
                self._claim()
                raise silent from error
            raise EndedElsewhere(silent.exit_code) from error
        if cause is None:
            code = error.exit_code if isinstance(error, DpllmError) else 1
            if not isinstance(error, DpllmError) and self._rank:
                traceback.print_exception(error)  # on its own machine; another's message names only its kind
            message = str(error) if isinstance(error, DpllmError) else f"{type(error).__name__}; see what it wrote"
            if self._post(message, code, self._rank) == self._rank:
                if self._rank == 0:
                    self._claim()
                    return
                if not self._wait(self._said, TO_SAY):  # rank 0 is gone, or cannot be reached
                    self._say({"rank": self._rank, "message": message})
                raise EndedElsewhere(code) from error
            cause = self._wait(self._cause, TO_SAY)
        found = json.loads(cause or '{"code": 1}')
        if self._rank == 0 and self._claim():
            self._say(found)
        else:
            self._wait(self._said, TO_SAY)
        raise EndedElsewhere(found["code"]) from error

    def look(self, watch: StepDeadline) -> None:
        """The thread: ends this process when another has failed, or a step takes too long."""
        posted = False
        while not self.over.wait(LOOK_EVERY):
            if not posted and (overdue := watch.overdue()):
                posted = True
                self._post(
                    f"{overdue} did not end within {watch.seconds:g} s: a process hangs, or the network between them is cut. "
                    f"{CHARGED} If a step takes that long, raise train.process_timeout.",
                    1,
                    None,
                )
            cause = self._wait(self._cause, 0.0)
            if cause is None:
                continue
            found = json.loads(cause)
            if self._rank:  # has nothing to write down
                self._wait(self._said, TO_SAY)
                if not self.over.wait(2 * LOOK_EVERY):
                    self.leave()
                    os._exit(found["code"])
            elif found["rank"] != 0 and self._claim():  # its own failure the main thread says
                self._say(found)
            while watch.writes and not self.over.wait(LOOK_EVERY):
                pass
            if not self.over.wait(TO_END):  # the main thread waits in a collective operation that will never end
                os._exit(found["code"])

    def end_alone(self, watch: StepDeadline) -> None:
        """A second thread: the first waits for ever where the store does not answer (its machine lost, its process stopped)."""
        while not self.over.wait(LOOK_EVERY):
            if overdue := watch.overdue(TO_SAY + 2 * TO_END):
                self._say(
                    {
                        "rank": self._rank,
                        "message": f"{overdue} did not end, and the first process does not answer. {CHARGED}",
                    }
                )
                os._exit(1)

    def leave(self) -> None:
        """Says goodbye; rank 0, in whose process the store may live, goes last."""
        until = time.monotonic() + TO_LEAVE
        with contextlib.suppress(RuntimeError, distributed.DistError):
            if self._rank:
                self._store.add(self._left, 1)
                return
            while self._store.add(self._left, 0) < distributed.get_world_size() - 1 and time.monotonic() < until:
                time.sleep(LOOK_EVERY / 5)

    def _claim(self) -> bool:
        """True for the one of rank 0's threads that speaks."""
        with self._mouth:
            first, self._spoken = not self._spoken, True
        if first:
            with contextlib.suppress(RuntimeError, distributed.DistError):
                self._store.set(self._said, "1")
        return first

    def _say(self, found: dict[str, Any]) -> None:
        where = f"process {found['rank']}: " if found.get("rank") else ""
        print(f"dpllm train: {where}{found.get('message', 'another process failed')}", file=sys.stderr, flush=True)

    def _post(self, message: str, code: int, rank: int | None) -> int | None:
        """Writes why, unless another was first; the rank whose word stands, None for nobody's."""
        word = json.dumps({"rank": rank, "code": code, "message": message})
        with contextlib.suppress(RuntimeError, distributed.DistError, ValueError):
            found: int | None = json.loads(self._store.compare_set(self._cause, "", word))["rank"]
            return found
        return rank  # nobody can be told

    def _wait(self, key: str, seconds: float) -> str | None:
        """The word under a key; None if it does not come. A store that is gone has none."""
        until = time.monotonic() + seconds
        while True:
            try:
                if self._store.check([key]):
                    return bytes(self._store.get(key)).decode()
            except (RuntimeError, distributed.DistError):
                return None
            if time.monotonic() >= until:
                return None
            time.sleep(LOOK_EVERY / 5)
