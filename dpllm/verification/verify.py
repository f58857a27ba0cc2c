"""``dpllm verify``: which statements of a published run hold, which are only said, and which do not hold.

Comes in: a run directory, an export directory or a synthetic data set. Goes out: a ``Verification``, one line for each thing
that was looked at.
Must not import torch, load a tensor, use the network, write anything but a card back as it was, or end with anything but such
lines: whatever a stranger's file does, it is a failed check.

Guarantee:
    ``verified`` is said only of what was computed again here from the files at hand. What somebody could have made up who
    makes all files anew is called ``asserted``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, CARD, SIGNATURE, write_whole
from dpllm.run.directory import RunDir
from dpllm.statement import synthetic, tradeoff_figure
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
    ("lineage", check_promise.check_lineage),
    ("statistics", check_promise.check_statistics),
    ("ledger", check_ledger.check),
    ("run", check_run.check),
)
_WRITTEN = (CARD, BLOCK, SIGNATURE, tradeoff_figure.FILE, synthetic.RECORD, "describe.json")
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
        for beside, most in _files_of(run) if run else ():
            if os.path.lexists(beside):
                with regular(beside, most):
                    pass  # what reads it later waits for no pipe, and follows no link
    except Wrong as error:
        return Verification(str(path), (failed("card", str(error)),))
    checks.append(verified("card", "README.md and privacy.json are there and can be read."))
    found = Published(directory, block, card, run, ledger)
    for name, check in CHECKS:
        checks += guarded(name, check, found)
    checks.append(sign.check(directory, signers))
    return Verification(str(path), tuple(checks))


def insist(path: Path, ledger: str | None = None) -> Verification:
    """All checks of what is about to be published; ``Refused`` where one of them failed."""
    found = verify(path, ledger=ledger)
    if wrong := [check for check in found.checks if check.status == "failed"]:
        more = f" ({len(wrong)} checks fail)" if len(wrong) > 1 else ""
        raise Refused(
            f"{path}: does not verify, and a card that does not verify is not published{more}: {wrong[0].name}: "
            f"{wrong[0].detail}"
        )
    return found


@contextmanager
def undone_unless_verified(root: Path) -> Iterator[None]:
    """Around what writes the card of a run directory or of a data set: its files are as they were if it, or ``insist``, fails."""

    def held() -> dict[Path, bytes]:
        there = (root / below / name for below in ("", "export", "run") for name in _WRITTEN)
        return {path: path.read_bytes() for path in there if path.is_file()}

    before = held()
    try:
        yield
        insist(root)
    except BaseException:
        for path in held().keys() - before.keys():
            path.unlink()
        for path, content in before.items() - held().items():
            write_whole(path, content)
        raise


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
