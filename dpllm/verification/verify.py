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

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpllm.card import inference, synthetic
from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, CARD, SIGNATURE, write_whole
from dpllm.run.directory import RunDir
from dpllm.run.subject import SUFFIX
from dpllm.statement import released, state, tradeoff_figure
from dpllm.statement.run_files import read_plan, read_run
from dpllm.verification import (
    check_audits,
    check_export,
    check_ledger,
    check_promise,
    check_released,
    check_rows,
    sign,
)
from dpllm.verification.values import (
    Check,
    Published,
    Verification,
    Wrong,
    asserted,
    bounded_memory,
    differences,
    failed,
    fit,
    guarded,
    listed,
    read_object,
    read_text,
    tried,
    verified,
)

_AGAIN = (
    "The directory holds parts of two runs, or was edited. Write the card again (dpllm card RUN), or restore the files."
)
_OF_WEIGHTS = ("files", "audit", "run")
"""What needs files that lie beside weights, and not beside a copy of their statement."""
_WRITTEN = (CARD, BLOCK, SIGNATURE, tradeoff_figure.FILE, synthetic.RECORD, inference.RECORD, "describe.json")


@bounded_memory()
def verify(path: Path, *, ledger: str | None = None, public_key: Path | None = None) -> Verification:
    """Checks a published run.

    Args:
        path: A run directory, whose export/ is looked at together with its recipe, Plan and record; an export directory; the
            folder of a synthetic data set, also of one that was written by private inference, or that of clusters or a
            classifier; or a record of randomised labels.
        ledger: A ledger's file, an export of one, or a PostgreSQL URL; None: the one that the recipe of a run names, if it is
            there.
        public_key: Of the author whom the caller trusts, as PEM; None: whose key signed is only asserted.

    Returns:
        All checks, in a fixed order.

    Raises:
        ConfigError: The path holds nothing that could be verified, or `public_key` is none that can be used.
    """
    if path.name.endswith(SUFFIX) and path.is_file():
        return Verification(str(path), tuple(check_released.check_label_record(path, ledger)))
    if os.path.lexists(path / synthetic.RECORD):
        of_model = {name: check for name, check in CHECKS if name not in _OF_WEIGHTS}
        return Verification(str(path), tuple(check_rows.check_synthetic(path, ledger, of_model)))
    if os.path.lexists(path / inference.RECORD):
        return Verification(str(path), tuple(check_rows.check_inference(path, ledger)))
    if os.path.lexists(path / released.VECTORS):
        return Verification(str(path), tuple(check_released.check_embedded(path, ledger)))
    directory, run = _subject(path)
    checks: list[Check] = []
    try:
        statement, card = read_object(directory / BLOCK), read_text(directory / CARD)
        if run:
            fit(run.config, run.plan, run.run, run.describe, run.canaries, run.audits)
    except Wrong as error:
        return Verification(str(path), (failed("card", str(error)),))
    checks.append(verified("card", "README.md and privacy.json exist and can be read."))
    export = Published(directory, statement, card, run, ledger)
    for name, check in CHECKS:
        checks += guarded(name, check, export)
    checks.append(sign.check(directory, public_key))
    return Verification(str(path), tuple(checks))


def insist(path: Path, ledger: str | None = None) -> Verification:
    """All checks of what is about to be published; ``Refused`` where one of them failed."""
    verification = verify(path, ledger=ledger)
    if wrong := [check for check in verification.checks if check.status == "failed"]:
        more = f" ({len(wrong)} checks fail)" if len(wrong) > 1 else ""
        raise Refused(
            f"{path}: does not verify, and a card that does not verify is not published{more}: {wrong[0].name}: "
            f"{wrong[0].detail}"
        )
    return verification


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
        near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*/")], 1)
        what = "no such directory" + (f" (did you mean {near[0]}?)" if near else "")
        what = "is a file" if path.exists() else what
        raise ConfigError(f"{path}: {what}, so nothing can be verified. Type a run or export directory, or a Hub id.")
    run = RunDir(path)
    # A card at the top is the one that a reader sees, whatever lies below it.
    if _has_card(path):
        return path, None
    if not (run.config.exists() and run.export.is_dir()):
        raise ConfigError(
            f"{path}: has no {BLOCK} or {CARD}, so nothing can be verified. Type a run directory or its export/."
        )
    if not _has_card(run.export):
        raise ConfigError(f"{path}: the run has no card yet, so nothing can be verified. Type dpllm card {path} first.")
    return run.export, run


def _has_card(directory: Path) -> bool:
    return any(os.path.lexists(directory / name) for name in (BLOCK, CARD))


def check_run(export: Published) -> Iterator[Check]:
    """The block against the files of the run that it was made from."""
    run = export.run
    if run is None:
        yield asserted("run", "only the export is here: recipe, Plan and record of the run cannot be compared.")
        return
    yield tried("run", _follows, export, run)
    yield from guarded("audit: canaries", check_audits.check_canaries, export, run)


def _follows(export: Published, run: RunDir) -> Check:
    config, record = run.load_config(), read_run(run)
    plan = read_plan(run) if config.privacy.enabled else None
    if plan and record.manifest.get(run.plan.name) != plan.digest:
        raise Wrong(f"plan.json is not the Plan with which the run was made. {_AGAIN}")
    # An audit and the figure of the card, which are checked by themselves, come behind the run.
    later = {name: digest for name, digest in export.hashes.items() if name.startswith("audit/")}
    later |= {name: digest for name, digest in export.hashes.items() if name == tradeoff_figure.FILE}
    folder = run.audit_dir(True)
    audit = check_audits.published_audit(folder) if plan is not None and (folder / "audit.json").exists() else None
    statistics = read_object(run.describe) if run.describe.exists() else None
    fresh = state.statement_of(config, plan, record, audit, {**record.artifacts, **later}, statistics)
    if wrong := list(differences(export.statement, fresh.to_json(), tolerance=0.0)):
        raise Wrong(f"{listed(wrong)} of privacy.json does not follow from recipe, Plan and record. {_AGAIN}")
    return verified(
        "run", "config.yaml, plan.json and run.json give exactly this privacy.json, with the files it names."
    )


CHECKS: tuple[tuple[str, Callable[[Published], Iterator[Check]]], ...] = (
    ("schema", check_export.schema),
    ("front matter", check_export.front_matter),
    ("marked parts", check_export.marked),
    ("files", check_export.files),
    ("figure", check_export.figure),
    ("promise", check_promise.check),
    ("author's word", check_promise.said),
    ("audit", check_audits.check),
    ("lineage", check_promise.check_lineage),
    ("statistics", check_promise.check_statistics),
    ("labels", check_released.check_labels),
    ("ledger", check_ledger.check),
    ("run", check_run),
)
