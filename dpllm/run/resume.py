"""Where a stopped run goes on: what the ledger charged, what the checkpoint holds, and whether it is the same run.

Comes in: the recipe, the run directory, the ledger. Goes out: a ``ResumeState``, or a refusal. Steps that were charged and
whose update no checkpoint has are lost: they are repeated only if as many more are reserved.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger, Reservation, default_path
from dpllm.ledger.dataset_policy import DatasetPolicy
from dpllm.privacy.plan import Plan
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.statement.parents import Base
from dpllm.statement.run_files import PlanRecord, read_plan, read_run

TRAIN_MAY_CHANGE = {"physical_batch_size", "eval_every", "checkpoint_every", "process_timeout"}
TRAIN_MAY_CHANGE |= {"sample_prompts", "sample_every"}
MAY_CHANGE = {"card", "telemetry", *(f"train.{key}" for key in TRAIN_MAY_CHANGE)}
WITH_STEPS = {"num_steps", "event", "epsilon", "accountants", "curve", "limits"}  # of plan.json: what grows with them


@dataclass(frozen=True)
class ResumeState:
    """A stopped run."""

    plan: PlanRecord | None  # None without differential privacy
    claims: tuple[tuple[str, int], ...]  # its reservations and their steps, in the order in which they are charged
    charged: int  # steps that may have been released, by the ledger
    extra_steps: int  # beyond the recipe's, reserved by earlier resumes to make up lost ones
    to_make_up: int  # of the charged steps that the checkpoint does not have, how many none of these stand for
    notes: tuple[str, ...]  # what earlier resumes noted for run.json
    units: str | None  # digest of the units on which the checkpoint was trained; None in one that does not say
    groups: str | None = None  # digest of the groups of banded noise
    lost: int = 0  # of the charged steps, how many are in no weights, also of those that others make up


def read_resume_state(config: RunConfig, run: RunDir, ledger: Ledger | None, policy: DatasetPolicy) -> ResumeState:
    """Reads checkpoint and ledger, and refuses where one cannot belong to the other.

    Raises:
        ConfigError: There is no checkpoint, or the ledger has no such reservation.
        Refused: No checkpoint is intact; the ledger was cut or replaced since; or the data are others than reserved for.
    """
    from dpllm.run import checkpoint  # which imports torch

    _, saved = checkpoint.newest(run)
    record = read_run(run) if run.run.exists() else None
    notes = record.resumes if record else ()
    if not config.privacy.enabled:
        return ResumeState(None, (), saved.step, 0, 0, notes, saved.units)
    if ledger is None:
        where = config.privacy.ledger or default_path()
        raise ConfigError(
            f"{run.root}: its ledger, {where}, is missing, so nothing says which steps were released. Restore the ledger that "
            "the run was started with."
        )
    if record is None or record.generator is None:
        raise Refused(
            f"{run.root}: run.json is missing, or the run began with an older dpllm with different noise, so no statement holds "
            "for all its steps. Start anew with --overwrite; the ledger keeps what it spent."
        )
    plan = read_plan(run)
    if problems := ledger.verify(saved.head):
        raise _cut(run, problems[0])
    assert saved.entry is not None
    claims = _reservations(run, saved.entry, ledger, policy)
    charged = sum(ledger.run(claim.entry).steps for claim in claims)
    if charged < saved.step:
        raise _cut(run, f"it charged {charged} steps to this run, whose checkpoint is of step {saved.step}.")
    for claim in claims:
        if ledger.run(claim.entry).event != replace(plan.event, count=claim.num_steps):
            raise Refused(
                f"{run.plan} has another accounting event than the run reserved, so its steps would be accounted wrongly. Start "
                "anew with --overwrite."
            )
    if saved.event != replace(plan.event, count=saved.step).to_json():
        raise Refused(
            f"{run.resume}: the checkpoint was trained under another accounting event than plan.json has, so its steps would be "
            "accounted wrongly. Start anew with --overwrite."
        )
    sizes = [claim.num_steps for claim in claims]
    since = sum(sizes) - saved.reserved  # the checkpoint stands on steps made up before it
    left = max(0, charged - saved.step - since)
    entries = tuple((claim.entry, claim.num_steps) for claim in claims)
    lost = saved.lost + charged - saved.step
    return ResumeState(plan, entries, charged, sum(sizes[1:]), left, notes, saved.units, saved.groups, lost)


def _reservations(run: RunDir, entry: str, ledger: Ledger, policy: DatasetPolicy) -> list[Reservation]:
    """The run's own reservation, which is for these data, and those that made up lost steps."""
    own, dataset = ledger.run(entry), policy.dataset
    first = own.reservation
    if own.state == "reconciled":
        raise Refused(
            f"{run.root}: its reservation was closed (dpllm ledger history says by whom), and its unused steps may have gone to "
            "other runs. Start anew with --overwrite."
        )
    if first.dataset != ledger.records.charged_to(dataset, policy.derived_from):
        raise Refused(
            f"{run.root}: the run reserved for dataset {first.dataset!r}, and data.train is dataset {dataset!r}. Resume with "
            f"{run.config} and the original data."
        )
    registered = ledger.records.of_account(first.dataset)
    if policy.records and registered and policy.records.digest not in registered:
        raise Refused(
            f"{run.root}: data.train no longer holds the records that the run reserved for, so its steps would be charged to "
            "other people's data. Restore the file, or start anew."
        )
    return [first, *(r.reservation for r in ledger.runs(first.dataset) if r.reservation.extends == first.entry)]


def check_promise(plan: Plan, resumed: ResumeState) -> None:
    """Refuses, with Refused, a recipe that promises something else than plan.json does."""
    promised, before = json.loads(json.dumps(plan.to_json())), resumed.plan.to_json() if resumed.plan else {}
    # Steps that were reserved to make up lost ones may not have reached plan.json yet.
    fixed = promised.keys() - (WITH_STEPS if resumed.extra_steps else set())
    if changed := sorted(key for key in fixed if before.get(key) != promised[key]):
        raise Refused(
            f"the recipe now has another {changed[0]} than the run to resume, whose guarantee is already reserved and partly "
            "spent. Resume with the config.yaml of the run directory."
        )


def same_recipe(config: RunConfig, run: RunDir) -> None:
    """Refuses, with Refused, another recipe: other data would escape their budget, a seed its confession."""
    saved = run.load_config()
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
    record = read_run(run) if run.run.exists() else None
    if record is None or "lineage" not in record.model_fields_set:  # of an older version
        return
    before = (record.lineage.base, *record.lineage.ancestors) if record.lineage else ()
    if before != ((base.statement, *base.ancestors) if base else ()):
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
