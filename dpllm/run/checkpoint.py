"""Checkpoints, and where a stopped run resumes: what the ledger charged, what the checkpoint holds, whether it is the same run.

Comes in: model, optimizer and step; or recipe, run directory and ledger. Goes out: private/resume, which is secret, and the
weights of export/; a ``ResumeState``, or a refusal. A checkpoint holds no seed and no generator state: a resumed run draws fresh
noise and fresh samples. Charged steps whose update is in no checkpoint stay charged and are not repeated.
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
    """What a checkpoint records about its run; private, as the checkpoint is."""

    step: int  # steps so far, as the ledger counts them; the learning rate depends on it alone
    entry: str | None = None  # id of the ledger's reservation, which a resumed run continues
    head: dict[str, Any] | None = None  # head of the ledger so far, which the ledger of a resumed run must contain
    units: str = ""  # digest of all tokens and the units that they belong to
    groups: str | None = None  # digest of the groups of banded noise
    lost: int = 0  # how many of its steps were charged to earlier attempts and are in no weights


def export(model: Any, tokenizer: Any, run: RunDir) -> None:
    """Writes what may be published, and nothing else, into export/: the adapter of a PeftModel, else all weights."""
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
    """SHA-256 of each safetensors file and of the settings for applying it, by file name; empty without weights."""
    if not any(directory.glob("*.safetensors")):
        return {}
    return {name: sha256(directory / name) for name in of_model(path.name for path in directory.iterdir())}


def save_resume(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Writes a checkpoint atomically (step 40 into private/resume/step-00000040), and keeps the intact one before it.

    Writes a temporary directory, flushes every file and the directory to disk, renames once and flushes the parent: a process
    killed at any time leaves the earlier checkpoints as they were.
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
    if place.exists():  # no step was taken since, or it was damaged
        os.replace(place, run.private / f".resume.{os.getpid()}.old")
    os.replace(temporary, place)
    _flush(run.resume)
    before = next((path for path in run.checkpoints() if path != place and _intact(path)), None)
    for path in (*run.resume.iterdir(), *run.private.glob(".resume.*")):
        if path not in (place, before):
            shutil.rmtree(path, ignore_errors=True)


def newest(run: RunDir) -> tuple[Path, State]:
    """The newest intact checkpoint, without loading it.

    A digest over state.json, which holds the digests of the other files, detects truncation and every changed byte. It has no
    key, so it does not stop someone who edits a checkpoint and recomputes it. Only the ledger says what was spent.

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
        Refused: All are truncated or edited, or the checkpoint is of another model.
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
    """The content of state.json: the state, the digests of the other files, and a digest over both."""
    value = {**asdict(state), "schema_version": SCHEMA_VERSION, "files": files}
    digest = hashlib.sha256(_dump(value)).hexdigest()
    return _dump({**value, "digest": digest})


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _intact(place: Path) -> State | None:
    """The state in state.json; None if a byte of it or of the other files changed."""
    try:
        text = (place / STATE).read_bytes()
        value = dict(json.loads(text))
        files = {name: sha256(place / name) for name in (WEIGHTS, MOMENTS)}
        state = State(**{key: value[key] for key in value.keys() - {"schema_version", "files", "digest"}})
        return state if text == _text(state, files) else None  # compares the text, so that not even a space may change
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _flush(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on disk."""
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def kept(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters in a checkpoint: all that train, and adapter factors that do not (adapter.lora_a)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name}


@dataclass(frozen=True)
class ResumeState:
    """Where a stopped run resumes."""

    plan: Plan | None  # None without differential privacy
    entry: str | None  # id of its reservation
    charged: int  # steps that may have been released, according to the ledger
    lost: int  # how many of these are in no weights
    noted: tuple[str, ...]  # notes of earlier resumes, for run.json
    notes: tuple[str, ...]  # notes of this resume: a damaged checkpoint, and the steps lost since the one used
    units: str  # digest of the units on which the checkpoint was trained
    groups: str | None  # digest of the groups of banded noise


def read_resume_state(config: RunConfig, run: RunDir, ledger: Ledger | None, policy: DatasetPolicy) -> ResumeState:
    """Reads checkpoint and ledger, and refuses if they cannot belong together.

    Raises:
        ConfigError: There is no checkpoint, or the ledger has no such reservation.
        Refused: No checkpoint is intact; the ledger was truncated or replaced since; or the run reserved for other data.
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
    """Refuses a reservation that was closed or is for other data."""
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
    """Raises Refused if the recipe's promise is not that of plan.json."""
    names = [name for name in Plan.model_fields if name not in LATER]
    if changed := sorted(name for name in names if getattr(plan, name) != getattr(before, name)):
        raise Refused(
            f"the recipe now has another {changed[0]} than the run to resume, whose guarantee is already reserved and partly "
            "spent. Resume with the config.yaml of the run directory."
        )


def same_recipe(config: RunConfig, run: RunDir) -> None:
    """Raises Refused if the recipe changed: other data would escape their budget, and a new seed the card."""
    saved = open_run(run, goes_on=True).config
    before, now = flat(saved.model_dump(mode="json")), flat(config.model_dump(mode="json"))
    # The saved recipe names the format that was detected.
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    by_data = {"data.format": "auto", "data.label_epsilon": None}
    changed = [key for key in changed if key not in by_data or now[key] != by_data[key]]
    changed = [key for key in changed if not {key, key.partition(".")[0]} & MAY_CHANGE]
    if changed:
        raise Refused(
            f"{run.root}: {', '.join(changed)} differs from the run to resume, whose reservation and record are about its own "
            f"recipe only. Resume with {run.config}."
        )


def same_lineage(base: Base | None, config: RunConfig, run: RunDir) -> None:
    """Raises Refused if files or statement of the base or adapter are unreadable, or not those that the run started from."""
    stated = read_run(run).lineage
    if (stated.models if stated else ()) != (base.models if base else ()):
        gone = " (none is found now: it was removed, or the Hub cannot be reached)" if base is None else ""
        raise Refused(
            f"{run.root}: {'model.adapter' if config.model.adapter else 'model.name_or_path'} no longer holds the files and the "
            f"privacy statement that the run started from{gone}, so its lineage would be wrong. Restore the files, or start "
            "anew with --overwrite."
        )


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a nested dictionary to dotted keys; groups and columns, which are values, stay nested."""
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
