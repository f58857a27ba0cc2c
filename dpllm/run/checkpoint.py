"""Checkpoints, and where a stopped run goes on: what the ledger charged, what the checkpoint holds, whether it is the same run.

Comes in: model, optimizer and step; or recipe, run directory and ledger. Goes out: private/resume, which is secret, and the
weights of export/; a ``ResumeState``, or a refusal. A checkpoint holds no seed and no generator state: a resumed run draws fresh
noise and fresh samples. Steps that were charged and whose update no checkpoint has stay charged, and are not repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError, Refused
from dpllm.files import keep_publishable, of_model, sha256, whole_directory
from dpllm.ledger import Ledger, Run, default_path
from dpllm.ledger.dataset_policy import DatasetPolicy
from dpllm.privacy.plan import LATER, Plan
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir, no_checkpoint, open_run
from dpllm.statement.lineage import Base
from dpllm.statement.run_files import read_plan, read_run

if TYPE_CHECKING:
    import torch
    from torch import nn

SCHEMA_VERSION = 3
STATE, WEIGHTS, MOMENTS = "state.json", "trainable.safetensors", "optimizer.pt"
TRAIN_MAY_CHANGE = (
    "tokens_per_pass",
    "eval_every",
    "checkpoint_every",
    "process_timeout",
    "sample_prompts",
    "sample_every",
)
MAY_CHANGE = {"card", "telemetry", *(f"train.{key}" for key in TRAIN_MAY_CHANGE)}


@dataclass(frozen=True)
class State:
    """What a checkpoint says of its run; private, as the checkpoint is."""

    step: int  # executed so far, as the ledger counts them; the learning rate follows from it alone
    entry: str | None = None  # the ledger's reservation, which a resumed run goes on with
    head: dict[str, Any] | None = None  # the ledger's by now, which the ledger of a resumed run must contain
    units: str = ""  # digest of all tokens and of which unit they are
    groups: str | None = None  # digest of the groups of banded noise
    lost: int = 0  # of its steps, how many were charged to earlier attempts and are in no weights


def export(model: Any, tokenizer: Any, run: RunDir) -> None:
    """Writes what may be published, and nothing else, into export/: of a PeftModel the adapter, else all weights."""
    from peft import PeftModel

    for leftover in run.root.glob(".export.*"):  # of a process that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    with whole_directory(run.export) as part:
        if isinstance(model, PeftModel):
            model.save_pretrained(str(part), save_embedding_layers=False)
            (part / "README.md").unlink(missing_ok=True)  # peft's template; the card is written by card/card.py
        else:
            model.save_pretrained(str(part))
        tokenizer.save_pretrained(str(part))
        keep_publishable(part)


def weight_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of each safetensors file and of the settings that say how it is applied, by name; empty without weights."""
    if not any(directory.glob("*.safetensors")):
        return {}
    return {name: sha256(directory / name) for name in of_model(path.name for path in directory.iterdir())}


def save_resume(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Writes a checkpoint (step 40 into private/resume/step-00000040) atomically, and keeps the intact one before it.

    A temporary directory, every file and the directory flushed to the disk, one rename, the parent flushed: whoever is
    killed leaves the former checkpoints as they were.
    """
    import torch
    from safetensors.torch import save_file

    for leftover in run.private.glob(".resume.*"):  # of a process that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = run.private / f".resume.{os.getpid()}"
    temporary.mkdir(parents=True)
    save_file({n: p.detach().cpu().contiguous() for n, p in kept(model).items()}, temporary / WEIGHTS)
    torch.save(optimizer.state_dict(), temporary / MOMENTS)
    (temporary / STATE).write_bytes(_text(state, {name: sha256(temporary / name) for name in (WEIGHTS, MOMENTS)}))
    for path in (temporary / WEIGHTS, temporary / MOMENTS, temporary / STATE, temporary):
        _flush(path)
    if not run.resume.is_dir():
        run.resume.mkdir()
        _flush(run.private)
    place = run.resume / f"step-{state.step:08d}"
    if place.exists():  # no step was executed since, or it was found damaged
        os.replace(place, run.private / f".resume.{os.getpid()}.old")
    os.replace(temporary, place)
    _flush(run.resume)
    before = next((path for path in run.checkpoints() if path != place and _intact(path)), None)
    for path in (*run.resume.iterdir(), *run.private.glob(".resume.*")):
        if path not in (place, before):
            shutil.rmtree(path, ignore_errors=True)


def newest(run: RunDir) -> tuple[Path, State]:
    """The newest intact checkpoint, without loading it.

    A digest over state.json, which holds the digests of the other files, finds truncation and every changed byte. It has
    no key: it does not stop someone who edits a checkpoint and computes it again. What was spent is the ledger's to say.

    Raises:
        ConfigError: There is no checkpoint.
        Refused: All are truncated or edited.
    """
    places = run.checkpoints()
    if not places:
        raise no_checkpoint(run)
    for place in places:
        if state := _intact(place):
            return place, state
    raise Refused(f"{run.resume}: the checkpoint is truncated or was edited. Start anew with --overwrite.")


def load_resume(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restores the newest intact checkpoint into model and optimizer.

    Raises:
        ConfigError: There is no checkpoint.
        Refused: All are truncated or edited, or it is of another model.
    """
    import torch
    from safetensors.torch import load_file

    place, _ = newest(run)
    saved = load_file(place / WEIGHTS)
    current = kept(model)
    if set(saved) != set(current):
        raise Refused(
            f"{place}: the checkpoint trains other layers than the recipe. Resume with the run's config.yaml."
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            current[name].copy_(tensor)
    optimizer.load_state_dict(torch.load(place / MOMENTS, weights_only=True))


def _text(state: State, files: dict[str, str]) -> bytes:
    """state.json: the state, the digests of the files beside it, and one over all of it."""
    value = {**asdict(state), "schema_version": SCHEMA_VERSION, "files": files}
    digest = hashlib.sha256(_dump(value)).hexdigest()
    return _dump({**value, "digest": digest})


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _intact(place: Path) -> State | None:
    """What state.json says; None if a byte of it or of the files beside it is not what was written."""
    try:
        text = (place / STATE).read_bytes()
        value = dict(json.loads(text))
        files = {name: sha256(place / name) for name in (WEIGHTS, MOMENTS)}
        state = State(**{key: value[key] for key in value.keys() - {"schema_version", "files", "digest"}})
        return state if text == _text(state, files) else None  # so that not even a space may change
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def kept(model: nn.Module) -> dict[str, nn.Parameter]:
    """What a checkpoint holds of a model: what trains, and the factors of adapters that do not (adapter.lora_a)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name}


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
    place, saved = newest(run)
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
    ledger_run = ledger.run(saved.entry)
    _check_reservation(run, ledger_run, ledger, policy)
    if ledger_run.steps < saved.step:
        raise _cut(run, f"it charged {ledger_run.steps} steps to this run, whose checkpoint is of step {saved.step}.")
    if ledger_run.event != plan.event:
        raise Refused(
            f"{run.plan} has another accounting event than the run reserved, so its steps would be accounted wrongly. Start "
            "anew with --overwrite."
        )
    if lost := ledger_run.steps - saved.step:
        notes.append(f"{lost} charged steps were lost in a crash and are not repeated")
    return ResumeState(
        plan, saved.entry, ledger_run.steps, saved.lost + lost, record.resumes, tuple(notes), saved.units, saved.groups
    )


def _check_reservation(run: RunDir, ledger_run: Run, ledger: Ledger, policy: DatasetPolicy) -> None:
    """Refuses a reservation that was closed, or is for other data."""
    account, dataset = ledger_run.reservation.dataset, policy.dataset
    if ledger_run.state == "reconciled":
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
    by_data = {"data.format": "auto", "data.label_epsilon": None}
    changed = [key for key in changed if key not in by_data or now[key] != by_data[key]]
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
    keys: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and key not in {"groups", "columns"}:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[prefix + key] = value
    return keys


def _cut(run: RunDir, problem: str) -> Refused:
    return Refused(
        f"the ledger does not continue from where {run.resume} was written: it was cut or replaced by an older copy, and steps "
        f"already released are missing: {problem} Restore the ledger that the run was started with.",
        reason="tampered",
    )
