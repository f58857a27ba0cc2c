"""What a stranger can compute again of what is published, one module for each kind; and ``verify`` in a process of its own.

Files are taken for hostile: each is read with a limit, none is executed, no link is followed. Whatever a file does to the process
that reads it, this one has lines to print; it forks before numpy is imported, whose threads a fork would lose, so that nothing
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
"""How long it may take, and how many bytes of the files it reads in a second at least."""
_MOST_FILES = 10_000


def verify_apart(path: Path, **options: Any) -> dict[str, Any]:
    """What ``to_json`` gives of ``dpllm.verification.verify.verify``, whose arguments and errors these are.

    Returns:
        One failed line where the process was killed, was aborted by a library, or did not end.
    """
    seconds = SECONDS + _bytes_in(path if os.path.isdir(path) else path.parent) / BYTES_A_SECOND
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(sender, path, options))
    child.start()
    sender.close()
    answer = None
    try:
        with suppress(EOFError):  # it died
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
    """What the files in a folder take, of the first ``_MOST_FILES``; what cannot be looked at takes nothing."""
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says before it aborts
    from dpllm.verification.verify import verify

    try:
        sender.send(verify(path, **options).to_json())
    except DpllmError as error:
        sender.send(error)
