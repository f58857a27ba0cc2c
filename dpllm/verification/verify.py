"""``dpllm verify``: which statements of a published run hold, which are only said, and which do not hold.

Comes in: a run directory, an export directory or a synthetic data set. Goes out: a ``Verification``, one line for each thing
that was looked at.
Must not import torch, load a tensor, use the network, write anything, or end with anything but such lines: whatever a
stranger's file does, it is a failed check.

Guarantee:
    ``verified`` is said only of what was computed again here from the files at hand. What somebody could have made up who
    makes all files anew is called ``asserted``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dpllm.errors import ConfigError
from dpllm.files import BLOCK, CARD
from dpllm.run.directory import RunDir
from dpllm.statement import synthetic
from dpllm.verification import check_audits, check_dataset, check_export, check_ledger, check_promise, check_run, sign
from dpllm.verification.values import (
    MOST_BYTES,
    Check,
    Published,
    Verification,
    Wrong,
    bounded_memory,
    failed,
    guarded,
    read_object,
    read_text,
    regular,
    verified,
)

CHECKS: tuple[tuple[str, Callable[[Published], Iterator[Check]]], ...] = (
    ("schema", check_export.schema),
    ("front matter", check_export.front_matter),
    ("marked parts", check_export.marked),
    ("files", check_export.files),
    ("figure", check_export.figure),
    ("promise", check_promise.check),
    ("author's word", check_export.said),
    ("audit", check_audits.check),
    ("audit of the engine", check_audits.check_mechanism),
    ("lineage", check_promise.check_lineage),
    ("statistics", check_promise.check_statistics),
    ("ledger", check_ledger.check),
    ("run", check_run.check),
)
_MOST_CARD, _MOST_BLOCK = 2**22, 2**19


@bounded_memory()
def verify(path: Path, *, ledger: str | None = None, signers: Path | None = None) -> Verification:
    """Checks a published run.

    Args:
        path: A run directory, whose export/ is looked at together with its recipe, Plan and record; an export directory; or the
            folder of a synthetic data set.
        ledger: A ledger's file, an export of one, or a PostgreSQL URL; None: the one that the recipe of a run names, if it is
            there.
        signers: A file of allowed signers (ssh-keygen(1)); None: whose key signed is only asserted.

    Returns:
        All checks, in a fixed order.

    Raises:
        ConfigError: The path holds nothing that could be verified.
    """
    if os.path.lexists(path / synthetic.RECORD):
        return Verification(str(path), tuple(check_dataset.check(path, ledger)))
    directory, run = _subject(path)
    checks: list[Check] = []
    try:
        block = read_object(directory / BLOCK, _MOST_BLOCK)
        card = read_text(directory / CARD, _MOST_CARD)
        for path, most in _files_of(run) if run else ():
            if os.path.lexists(path):
                with regular(path, most):
                    pass  # what reads it later waits for no pipe, and follows no link
    except Wrong as error:
        return Verification(str(path), (failed("card", str(error)),))
    checks.append(verified("card", "README.md and privacy.json are there and can be read."))
    found = Published(directory, block, card, run, ledger)
    for name, check in CHECKS:
        checks += guarded(name, check, found)
    checks.append(sign.check(directory, signers))
    return Verification(str(path), tuple(checks))


def _subject(path: Path) -> tuple[Path, RunDir | None]:
    """The export directory, and the run directory where there is one."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such directory"
        raise ConfigError(
            f"{path}: {what}, so there is nothing to verify. Type a run or export directory, or a Hub id."
        )
    run = RunDir(path)
    # A card at the top is the one that a reader sees, whatever lies below it.
    if _has_card(path):
        return path, None
    if not (run.config.exists() and run.export.is_dir()):
        raise ConfigError(
            f"{path}: holds neither {BLOCK} nor {CARD}, so there is nothing to verify. Type a run directory or its export/."
        )
    if not _has_card(run.export):
        raise ConfigError(
            f"{path}: the run has no card yet, so there is nothing to verify. Type dpllm card {path} first."
        )
    return run.export, run


def _files_of(run: RunDir) -> Iterator[tuple[Path, int]]:
    """What is read of a run beside its export, and how long each may be."""
    yield run.config, 2**18  # YAML is slow to read
    yield run.projections, 2**30
    yield from ((path, MOST_BYTES) for path in (run.plan, run.run, run.describe, run.canaries, run.groups, run.audits))


def _has_card(directory: Path) -> bool:
    return any(os.path.lexists(directory / name) for name in (BLOCK, CARD))
