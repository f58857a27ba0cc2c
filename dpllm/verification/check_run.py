"""The run directory around an export: that recipe, Plan and record say what the card says.

Comes in: config.yaml, plan.json, run.json, and private/ where it is there. Goes out: checks. A stranger who has the export
alone cannot make them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpllm.auditing.blind import words_control
from dpllm.auditing.gradient import COLUMNS, read_gradient, tabulate
from dpllm.canaries import canaries
from dpllm.card import claim
from dpllm.run.directory import RunDir
from dpllm.run.projections import read_projections, read_turns
from dpllm.statement.privacy_record import Audit
from dpllm.statement.run_files import RunRecord, read_plan, read_run
from dpllm.verification import check_audits
from dpllm.verification.values import (
    Check,
    Published,
    Wrong,
    asserted,
    differences,
    failed,
    listed,
    read_object,
    tried,
    verified,
)

_AGAIN = (
    "The directory holds parts of two runs, or was edited. Write the card again (dpllm card RUN), or restore the files."
)


def check(found: Published) -> Iterator[Check]:
    """The block against the files of the run that it was made from."""
    run = found.run
    if run is None:
        yield asserted("run", "only the export is here: recipe, Plan and record of the run cannot be compared.")
        return
    record = read_run(run, read_object)
    yield tried("run: files", _artifacts, found, record)
    yield tried("run", _block, found, run, record)
    if found.record.audit is not None:
        yield tried("audit: canaries", _coins, found, run, found.record.audit)
    elif found.record.terms is not None and (made := _audits_made(run)):
        yield failed(
            "audit: canaries",
            f"{made} audits of this run were made, and the card shows none, so that a verdict could be hidden. Audit again, then "
            "write the card again: dpllm audit RUN, dpllm card RUN.",
        )


def _audits_made(run: RunDir) -> int:
    return len(run.audits.read_text(encoding="utf-8", errors="replace").splitlines()) if run.audits.exists() else 0


def _artifacts(found: Published, record: RunRecord) -> Check:
    """The files that training wrote are still the same."""
    wrote = record.artifacts
    changed = sorted(name for name, digest in wrote.items() if found.hashes.get(name) != digest)
    weights = [name for name in found.hashes if name.endswith(".safetensors")]
    if changed or not all(name in wrote for name in weights):
        raise Wrong(f"{listed(changed or weights)}: not what the run wrote. Restore the files, or train again.")
    return verified("run: files", f"{len(wrote)} files of export/ are those that the run wrote.")


def _block(found: Published, run: RunDir, record: RunRecord) -> Check:
    config = run.load_config()
    plan = read_plan(run, read_object) if config.privacy.enabled else None
    folder = run.audit_dir(True)
    audit = check_audits.published_audit(folder) if plan is not None and (folder / "audit.json").exists() else None
    released = read_object(run.describe) if run.describe.exists() else None
    fresh = claim.statement_of(config, plan, record, audit, found.record.files, released)
    if wrong := list(differences(found.block, fresh.to_json(), tolerance=0.0)):
        raise Wrong(f"{listed(wrong)} of privacy.json is not what recipe, Plan and record say. {_AGAIN}")
    return verified("run", "config.yaml, plan.json and run.json give this very privacy.json.")


def _coins(found: Published, run: RunDir, audit: Audit) -> Check:
    """Canaries and coins are those that were committed to before training."""
    name = "audit: canaries"
    if not run.canaries.exists():
        return asserted(name, "private/canaries.json is not here, so the commitment cannot be opened.")
    plan = canaries.load(run.canaries)
    if plan.commitment != audit.commitment:
        raise Wrong(f"the card commits to other canaries than private/canaries.json holds. {_AGAIN}")
    coins = {canary.canary_id: (canary.group, canary.inserted) for canary in plan.canaries}
    table, _ = check_audits.tables(found.directory / "audit")
    scored = {row.canary_id: (row.group, row.inserted) for row in table if row.group}
    references = {row.canary_id for row in table if not row.group}
    if scored != coins or references != {reference.canary_id for reference in plan.references}:
        raise Wrong("the audit has other coins or canaries than were committed to before training. Audit again.")
    if plan.gradient_coins and audit.gradient:
        promise = read_plan(run)
        of_plan, bands = (promise.sampling_rate, audit.gradient.noise_planned), max(1, len(promise.coefficients))
        path = found.directory / "audit" / "gradient.parquet"
        check_audits.described(path, COLUMNS, check_audits.MOST_ROWS)
        shown = read_gradient(path, *of_plan, bands)
        turns = read_turns(run.groups, promise.coefficients, len(plan.gradient_coins))
        kept = tabulate(read_projections(run.projections), plan.gradient_coins, *of_plan, turns)
        if not all(np.allclose(getattr(shown, name), getattr(kept, name), rtol=1e-9, atol=1e-9) for name in vars(kept)):
            raise Wrong("the audit has other coins or scores of gradient canaries than the run kept. Audit again.")
    stated = check_audits.published_audit(found.directory / "audit").controls.words
    if any(differences(stated.to_json() if stated else None, words_control(plan.canaries))):
        raise Wrong("the control by words in audit.json is not what the canaries' words give. Audit again.")
    made = _audits_made(run)
    if made > audit.audits_run:
        raise Wrong(
            f"{made} audits of this run were made, and the card says fewer. Write the card again: dpllm card RUN."
        )
    return verified(name, "the commitment opens to these canaries and coins.")
