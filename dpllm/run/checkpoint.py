"""What a run leaves on disk: export/ (publishable) and private/resume (secret).

Comes in: the model, the optimizer, the step. Goes out: directories. A checkpoint holds no seed and no generator state:
a resumed run draws fresh noise and fresh samples. Must not know what a step costs; it carries the event as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from dpllm.errors import ConfigError, Refused
from dpllm.files import keep_publishable, of_model, sha256, whole_directory
from dpllm.run.directory import RunDir

SCHEMA_VERSION = 3
STATE, WEIGHTS, MOMENTS = "state.json", "trainable.safetensors", "optimizer.pt"


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
    found = run.checkpoints()
    if not found:
        raise ConfigError(f"{run.root}: holds no checkpoint to resume from. Start anew, with --overwrite if need be.")
    for place in found:
        if state := _intact(place):
            return place, state
    raise Refused(f"{run.resume}: the checkpoint is truncated or was edited. Start anew with --overwrite.")


def load_resume(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restores the newest intact checkpoint into model and optimizer.

    Raises:
        ConfigError: There is no checkpoint.
        Refused: All are truncated or edited, or it is of another model.
    """
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
    if path.is_dir() and os.name == "nt":  # Windows opens no directories
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def kept(model: nn.Module) -> dict[str, nn.Parameter]:
    """What a checkpoint holds of a model: what trains, and the factors of adapters that do not (adapter.lora_a)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name}
