"""Where a stopped run goes on: what the ledger charged, what the checkpoint holds, and whether it is the same run.

Comes in: the recipe, the run directory, the ledger. Goes out: a ``ResumeState``, or a refusal. Steps that were charged and
whose update no checkpoint has are lost: they stay charged, are not repeated, and are stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger, Run, default_path
from dpllm.ledger.dataset_policy import DatasetPolicy
from dpllm.privacy.plan import LATER, Plan
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir, open_run
from dpllm.statement.lineage import Base
from dpllm.statement.run_files import read_plan, read_run

TRAIN_MAY_CHANGE = {"tokens_per_pass", "eval_every", "checkpoint_every", "process_timeout"}
TRAIN_MAY_CHANGE |= {"sample_prompts", "sample_every"}
MAY_CHANGE = {"card", "telemetry", *(f"train.{key}" for key in TRAIN_MAY_CHANGE)}


@dataclass(frozen=True)
class ResumeState:
    """A stopped run."""

    plan: Plan | None  # None without differential privacy
    entry: str | None  # its reservation
    charged: int  # steps that may have been released, by the ledger
    lost: int  # of these, how many are in no weights
    noted: tuple[str, ...]  # by earlier resumes, for run.json
    notes: tuple[str, ...]  # by this one: a damaged checkpoint, and the steps lost since the one that is used
    units: str  # digest of the units on which the checkpoint was trained
    groups: str | None  # digest of the groups of banded noise


def read_resume_state(config: RunConfig, run: RunDir, ledger: Ledger | None, policy: DatasetPolicy) -> ResumeState:
    """Reads checkpoint and ledger, and refuses where one cannot belong to the other.

    Raises:
        ConfigError: There is no checkpoint, or the ledger has no such reservation.
        Refused: No checkpoint is intact; the ledger was cut or replaced since; or the data are others than reserved for.
    """
    from dpllm.run import checkpoint  # which imports torch

    place, saved = checkpoint.newest(run)
    record = read_run(run)
    notes = []
    if place != run.checkpoints()[0]:
        notes.append(f"the newest checkpoint was damaged; the one before it, of step {saved.step}, was used")
    if not config.privacy.enabled:
        return ResumeState(None, None, saved.step, 0, record.resumes, tuple(notes), saved.units, None)
    if ledger is None:
        where = config.privacy.ledger or default_path()
        raise ConfigError(
            f"{run.root}: its ledger, {where}, is missing, so nothing says which steps were released. Restore the ledger that "
            "the run was started with."
        )
    plan = read_plan(run)
    if problems := ledger.verify(saved.head):
        raise _cut(run, problems[0])
    assert saved.entry is not None
    own = ledger.run(saved.entry)
    _check_reservation(run, own, ledger, policy)
    if own.steps < saved.step:
        raise _cut(run, f"it charged {own.steps} steps to this run, whose checkpoint is of step {saved.step}.")
    if own.event != plan.event:
        raise Refused(
            f"{run.plan} has another accounting event than the run reserved, so its steps would be accounted wrongly. Start "
            "anew with --overwrite."
        )
    if lost := own.steps - saved.step:
        notes.append(f"{lost} charged steps were lost in a crash and are not repeated")
    return ResumeState(
        plan, saved.entry, own.steps, saved.lost + lost, record.resumes, tuple(notes), saved.units, saved.groups
    )


def _check_reservation(run: RunDir, own: Run, ledger: Ledger, policy: DatasetPolicy) -> None:
    """Refuses a reservation that was closed, or is for other data."""
    account, dataset = own.reservation.dataset, policy.dataset
    if own.state == "reconciled":
        raise Refused(
            f"{run.root}: its reservation was closed (dpllm ledger export says by whom), and its unused steps may have gone to "
            "other runs. Start anew with --overwrite."
        )
    if account != ledger.records.charged_to(dataset, policy.derived_from):
        raise Refused(
            f"{run.root}: the run reserved for dataset {account!r}, and data.train is dataset {dataset!r}. Resume with "
            f"{run.config} and the original data."
        )
    registered = ledger.records.of_account(account)
    if policy.records and registered and policy.records.digest not in registered:
        raise Refused(
            f"{run.root}: data.train no longer holds the records that the run reserved for, so its steps would be charged to "
            "other people's data. Restore the file, or start anew."
        )


def check_promise(plan: Plan, before: Plan) -> None:
    """Refuses, with Refused, a recipe that promises something else than plan.json does."""
    names = [name for name in Plan.model_fields if name not in LATER]
    if changed := sorted(name for name in names if getattr(plan, name) != getattr(before, name)):
        raise Refused(
            f"the recipe now has another {changed[0]} than the run to resume, whose guarantee is already reserved and partly "
            "spent. Resume with the config.yaml of the run directory."
        )


def same_recipe(config: RunConfig, run: RunDir) -> None:
    """Refuses, with Refused, another recipe: other data would escape their budget, a seed its confession."""
    saved = open_run(run, goes_on=True).config
    before, now = flat(saved.model_dump(mode="json")), flat(config.model_dump(mode="json"))
    # The saved recipe names the format that was found.
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    found = {"data.format": "auto", "data.label_epsilon": None}
    changed = [key for key in changed if key not in found or now[key] != found[key]]
    changed = [key for key in changed if not {key, key.partition(".")[0]} & MAY_CHANGE]
    if changed:
        raise Refused(
            f"{run.root}: {', '.join(changed)} differs from the run to resume, and its reservation and record are about that "
            f"run only. Resume with {run.config}."
        )


def same_lineage(base: Base | None, config: RunConfig, run: RunDir) -> None:
    """Refuses, with Refused, a base or adapter whose files or statement are not what the run started from, or cannot be read."""
    stated = read_run(run).lineage
    if (stated.models if stated else ()) != (base.models if base else ()):
        gone = " (none is found now: it was removed, or the Hub cannot be reached)" if base is None else ""
        raise Refused(
            f"{run.root}: {'model.adapter' if config.model.adapter else 'model.name_or_path'} no longer holds the files and the "
            f"privacy statement that the run started from{gone}, so its lineage would be wrong. Restore the files, or start "
            "anew with --overwrite."
        )


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as one of dotted keys; groups and columns, which are values, stay whole."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and key not in {"groups", "columns"}:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _cut(run: RunDir, problem: str) -> Refused:
    return Refused(
        f"the ledger does not continue from where {run.resume} was written: it was cut or replaced by an older copy, and steps "
        f"already released are missing: {problem} Restore the ledger that the run was started with.",
        reason="tampered",
    )
