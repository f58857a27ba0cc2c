"""``dpllm verify``: which statements of a release are verified, which are only asserted, and which fail.

Comes in: a run directory, an export directory, a data set, or a record of a release. Goes out: a ``Verification``, one line for
each check. All kinds go through the same sequence of checks, see ``dpllm.card.artifact``.
Must not import torch, load a tensor, use the network, write anything except restoring a card, or raise because of a file's
content: a malformed file gives a failed check.

Guarantee:
    ``verified`` means that the value was recomputed here from the available files. A value that somebody could make up by
    making all files anew is called ``asserted``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpllm.card import inference, synthetic
from dpllm.card.artifact import EMBEDDED, LABELS, MODEL, Artifact
from dpllm.card.synthetic import DataSet
from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, CARD, SIGNATURE, write_whole
from dpllm.run.directory import RunDir
from dpllm.run.subject import SUFFIX
from dpllm.statement import released, state, tradeoff_figure
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.run_files import read_plan, read_run
from dpllm.verification import (
    check_audits,
    check_folder,
    check_ledger,
    check_promise,
    check_released,
    check_rows,
    sign,
    values,
)
from dpllm.verification.values import Check, Published, Verification, Wrong

Checks = tuple[tuple[str, Callable[[Published[Any]], Iterator[Check]]], ...]
_AGAIN = "The directory was edited, or holds parts of two runs. Restore it, or write the card again: dpllm card RUN."
_WRITTEN = (CARD, BLOCK, SIGNATURE, tradeoff_figure.FILE, synthetic.RECORD, inference.RECORD, "describe.json")
_FOLDERS: dict[str, Artifact[Any]] = {
    synthetic.RECORD: synthetic.ARTIFACT,
    inference.RECORD: inference.ARTIFACT,
    released.VECTORS: EMBEDDED,  # describe.json is in run directories, too
}
"""File that identifies a folder -> its kind. A new kind is one line here, and the module of its ``Artifact``."""


@values.bounded_memory()
def verify(path: Path, *, ledger: str | None = None, public_key: Path | None = None) -> Verification:
    """Checks a release.

    Args:
        path: A run directory, whose export/ is checked together with its recipe, Plan and record; an export directory; the
            folder of a synthetic data set (also one written by private inference), of clusters or of a classifier; or a
            record of randomised labels.
        ledger: A ledger's file, an export of one, or a PostgreSQL URL; None: the ledger that the recipe of a run names, if it
            exists.
        public_key: PEM file of the author whom the caller trusts; None: the signer is only asserted.

    Returns:
        All checks, in a fixed order.

    Raises:
        ConfigError: The path contains nothing to verify, or ``public_key`` cannot be used.
    """
    try:
        release = _opened(path, ledger)
    except Wrong as error:
        return Verification(str(path), (values.failed("card", str(error)),))
    checks = [values.verified("card", f"{release.source} keeps to schema version {release.artifact.version}.")]
    for name, check in (*COMMON, *OWN.get(release.artifact.kind, ())):
        checks += values.guarded(name, check, release)
    if release.artifact is MODEL:
        checks.append(sign.check(release.directory, public_key))
    return Verification(str(path), tuple(checks))


def _opened(path: Path, ledger: str | None) -> Published[Any]:
    """Reads a release; raises Wrong if its files do not follow their schema, and ConfigError if there is no release."""
    if path.name.endswith(SUFFIX) and path.is_file():
        of_labels = replace(LABELS, sources=(path.name,))
        return Published(of_labels, path.parent, values.read_facts(of_labels, path.parent), ledger=ledger)
    artifact = next((kind for name, kind in _FOLDERS.items() if os.path.lexists(path / name)), MODEL)
    directory, run = (path, None) if artifact is not MODEL else _export_and_run(path)
    if artifact is synthetic.ARTIFACT:
        run = synthetic.run_of(path)
    if run is not None:
        values.fit(run.config, run.plan, run.run, run.describe, run.canaries, run.audits)
    facts = values.read_facts(artifact, directory)
    return Published(artifact, directory, facts, values.read_text(directory / CARD), run, ledger)


def insist(path: Path, ledger: str | None = None) -> Verification:
    """All checks of a release that is about to be published; raises ``Refused`` if one fails."""
    verification = verify(path, ledger=ledger)
    if failures := [check for check in verification.checks if check.status == "failed"]:
        count = f" ({len(failures)} checks fail)" if len(failures) > 1 else ""
        raise Refused(
            f"{path}: does not verify, and a card that does not verify is not published{count}: {failures[0].name}: "
            f"{failures[0].detail}"
        )
    return verification


@contextmanager
def undone_unless_verified(root: Path) -> Iterator[None]:
    """Restores the files of a run directory or data set if the block, which writes its card, or ``insist`` fails."""

    def written_files() -> dict[Path, bytes]:
        paths = (root / below / name for below in ("", "export", "run") for name in _WRITTEN)
        return {path: path.read_bytes() for path in paths if path.is_file()}

    original = written_files()
    try:
        yield
        insist(root)
    except BaseException:
        for path in written_files().keys() - original.keys():
            path.unlink()
        for path, content in original.items() - written_files().items():
            write_whole(path, content)
        raise


def _export_and_run(path: Path) -> tuple[Path, RunDir | None]:
    """The export directory, and the run directory if there is one."""
    if not path.is_dir():
        similar = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.glob("*/")], 1)
        problem = "no such directory" + (f" (did you mean {similar[0]}?)" if similar else "")
        problem = "is a file" if path.exists() else problem
        raise ConfigError(f"{path}: {problem}. Type a run or export directory, or a Hub id, which can be verified.")
    run = RunDir(path)
    at_top, below = ({name for name in (BLOCK, CARD) if os.path.lexists(at / name)} for at in (path, run.export))
    if at_top:  # readers see the card at the top, whatever is below it
        return path, None
    if not (run.config.exists() and run.export.is_dir()):
        raise ConfigError(
            f"{path}: has no {BLOCK} or {CARD}, so nothing can be verified. Type a run directory or its export/."
        )
    if not below:
        raise ConfigError(f"{path}: the run has no card yet, so nothing can be verified. Type dpllm card {path} first.")
    return run.export, run


# Checks of a single kind.


def _run(export: Published[PrivacyRecord]) -> Iterator[Check]:
    run = export.run
    if run is None:
        yield values.asserted("run", "only the export is here: recipe, Plan and record of the run cannot be compared.")
        return
    yield values.tried("run", _statement_of_run, export, run)
    yield from values.guarded("audit: canaries", check_audits.check_canaries, export, run)


def _statement_of_run(export: Published[PrivacyRecord], run: RunDir) -> Check:
    config, record = run.load_config(), read_run(run)
    plan = read_plan(run) if config.privacy.enabled else None
    if plan and record.manifest.get(run.plan.name) != plan.digest:
        raise Wrong(f"plan.json is not the Plan with which the run was made. {_AGAIN}")
    # An audit and the figure of the card, which are checked separately, are written after the run.
    later = {name: digest for name, digest in export.hashes.items() if name.startswith("audit/")}
    later |= {name: digest for name, digest in export.hashes.items() if name == tradeoff_figure.FILE}
    folder = run.audit_dir(True)
    audit = check_audits.published_audit(folder) if plan is not None and (folder / "audit.json").exists() else None
    statistics = values.read_object(run.describe) if run.describe.exists() else None
    expected = state.statement_of(config, plan, record, audit, {**record.artifacts, **later}, statistics)
    if wrong := list(values.differences(export.record.to_json(), expected.to_json(), tolerance=0.0)):
        raise Wrong(f"{values.listed(wrong)} of privacy.json does not follow from recipe, Plan and record. {_AGAIN}")
    return values.verified("run", "config.yaml, plan.json and run.json give exactly this privacy.json, and its files.")


def _model(folder: Published[DataSet]) -> Iterator[Check]:
    model = check_rows.model_of(folder)
    for name, check in (*COMMON, ("labels", check_released.of_model)):
        if name != "files":
            for line in values.guarded(name, check, model):
                yield replace(line, name=f"{check_rows.OF_MODEL}{line.name}")


COMMON: Checks = (
    ("front matter", check_folder.front_matter),
    ("marked parts", check_folder.marked),
    ("whole texts", check_folder.whole),
    ("files", check_folder.files),
    ("record", check_promise.rules),
    ("promise", check_promise.check),
    ("author's word", check_promise.asserted_fields),
    ("statistics", check_released.statistics),
    ("lineage", check_promise.check_lineage),
    ("ledger", check_ledger.check),
)
"""Checks of every kind of release."""
OWN: dict[str, Checks] = {
    MODEL.kind: (
        ("kinds of files", check_folder.contents),
        ("audit", check_audits.check),
        ("labels", check_released.of_model),
        ("run", _run),
    ),
    synthetic.ARTIFACT.kind: (("rows", check_rows.of_model), ("run", check_rows.current), ("model", _model)),
    inference.ARTIFACT.kind: (("rows", check_rows.of_inference),),
    EMBEDDED.kind: (("vectors", check_released.vectors),),
    LABELS.kind: (("labels", check_released.labels_file),),
}
"""Checks of one kind alone."""
