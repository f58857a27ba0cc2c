"""Recomputes what can be recomputed from published files, one module for each kind; ``verify`` runs in its own process.

Files are assumed hostile: each is read with a limit, none is executed, no link is followed. Even if a file kills the process that
reads it, this process can print lines. It forks before numpy is imported, because a fork would lose numpy's threads, so nothing
heavy may be imported here. No module of this package may import torch, transformers, peft or datasets.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dpllm.errors import DpllmError

SECONDS, BYTES_A_SECOND = 120, 10**7
"""Time limit, and the minimum rate in bytes per second that extends it for large files."""
_MOST_FILES = 10_000


def verify_apart(path: Path, **options: Any) -> dict[str, Any]:
    """``to_json`` of ``dpllm.verification.verify.verify``, computed in another process; same arguments and errors.

    Returns:
        The checks; a single failed one if the process was killed, was aborted by a library, or did not end.
    """
    seconds = SECONDS + _bytes_in(path if os.path.isdir(path) else path.parent) / BYTES_A_SECOND
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(sender, path, options))
    child.start()
    sender.close()
    answer = None
    try:
        with suppress(EOFError):  # the child died
            answer = receiver.recv() if receiver.poll(seconds) else None
    finally:
        child.kill()
        child.join()
    if isinstance(answer, DpllmError):
        raise answer
    if answer is None:
        from dpllm.verification.values import Verification, failed

        detail = (
            f"these files ended the process that read them, or kept it busy for {seconds:,.0f} seconds, which no files of dpllm "
            "do. Do not open them with another program, and ask whoever sent them."
        )
        answer = Verification(str(path), (failed("end", detail),)).to_json()
    return dict(answer)


def _bytes_in(folder: Path) -> int:
    """Bytes on disk of the first ``_MOST_FILES`` files in a folder; unreadable ones count as 0."""
    total, count, pending = 0, 0, [str(folder)]
    while pending and count < _MOST_FILES:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in islice(entries, _MOST_FILES - count):
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total


def _answer(sender: Connection, path: Path, options: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages of a library that aborts
    from dpllm.verification.verify import verify

    try:
        sender.send(verify(path, **options).to_json())
    except DpllmError as error:
        sender.send(error)
