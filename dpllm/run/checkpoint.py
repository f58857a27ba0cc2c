"""What a run leaves on disk: export/ (publishable) and private/resume (secret).

Comes in: the model, the optimizer, the step. Goes out: directories. A checkpoint holds no seed and no generator state:
a resumed run draws fresh noise and fresh samples. Must not know what a step costs; it carries the event as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from dpllm.errors import ConfigError, Refused
from dpllm.files import keep_publishable, sha256, whole_directory
from dpllm.run.directory import RunDir

SCHEMA_VERSION = 2
STATE, WEIGHTS, MOMENTS = "state.json", "trainable.safetensors", "optimizer.pt"


def export(model: Any, tokenizer: Any, run: RunDir) -> None:
    """Writes what may be published, and nothing else, into export/.

    Args:
        model: PeftModel (the adapter is saved) or transformers model (all weights are saved).
        tokenizer: Saved beside it.
        run: Where.
    """
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
    """SHA-256 of each safetensors file, by name."""
    return {path.name: sha256(path) for path in sorted(directory.glob("*.safetensors"))}


def save_resume(
    run: RunDir,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    entry: str | None,
    max_grad_norm: float,
    head: dict[str, Any] | None = None,
    event: dict[str, Any] | None = None,
    reserved: int | None = None,
    units: str | None = None,
) -> None:
    """Writes a checkpoint atomically, and keeps the intact one before it.

    A temporary directory, every file and the directory flushed to the disk, one rename, the parent flushed: whoever is
    killed leaves the former checkpoints as they were. The learning rate is a function of the step alone, so the step is
    all that the schedule needs.

    Args:
        run: Where: private/resume/step-00000040 for step 40.
        model: Its trainable parameters are saved.
        optimizer: Its state is saved.
        step: Steps executed so far, as the ledger counts them.
        entry: The ledger's reservation, which a resumed run goes on with.
        max_grad_norm: C of the next step, which adaptive clipping moves; a function of released values.
        head: The ledger's head by now, which the ledger of a resumed run must contain.
        event: The Plan's event; the part of it that was executed is saved.
        reserved: Steps reserved by now, those included that make up lost ones.
        units: Digest of all tokens and of which unit they are; private, as the checkpoint is.
    """
    for leftover in run.private.glob(".resume.*"):  # of a process that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = run.private / f".resume.{os.getpid()}"
    temporary.mkdir(parents=True)
    save_file(_trainable(model), temporary / WEIGHTS)
    torch.save(optimizer.state_dict(), temporary / MOMENTS)
    state = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "entry": entry,
        "head": head,
        "reserved": reserved,
        "units": units,
        "event": executed(event, step) if event else None,
        "files": {name: sha256(temporary / name) for name in (WEIGHTS, MOMENTS)},
        # JSON has no infinity, which is C of a run without differential privacy.
        **({"max_grad_norm": max_grad_norm} if max_grad_norm < math.inf else {}),
    }
    (temporary / STATE).write_bytes(_signed(state))
    for path in (temporary / WEIGHTS, temporary / MOMENTS, temporary / STATE, temporary):
        _flush(path)
    if not run.resume.is_dir():
        run.resume.mkdir()
        _flush(run.private)
    place = run.resume / f"step-{step:08d}"
    if place.exists():  # no step was executed since, or it was found damaged
        os.replace(place, run.private / f".resume.{os.getpid()}.old")
    os.replace(temporary, place)
    _flush(run.resume)
    before = next((path for path in run.checkpoints() if path != place and _intact(path)), None)
    for path in (*run.resume.iterdir(), *run.private.glob(".resume.*")):
        if path not in (place, before):
            shutil.rmtree(path, ignore_errors=True)


def executed(event: dict[str, Any], step: int) -> dict[str, Any]:
    """The part of a Plan's event that its first ``step`` steps are.

    Raises:
        ConfigError: The event is not one step composed with itself.
    """
    if event.get("type") != "self_composed" or not 0 <= step <= event["count"]:
        raise ConfigError(
            f"the first {step} steps are no part of an event of type {event.get('type')!r}, so a checkpoint could not say "
            "what it was charged for. Give the Plan's event, and a step within it."
        )
    return {**event, "count": step}


def newest(run: RunDir) -> dict[str, Any]:
    """What the newest intact checkpoint says, without loading it.

    A digest over state.json, which holds the digests of the other files, finds truncation and every changed byte. It has
    no key: it does not stop someone who edits a checkpoint and computes it again. What was spent is the ledger's to say.

    Returns:
        {"step", "entry", "head", "event", "notes", "max_grad_norm"}, the last with differential privacy only; notes are
        sentences for run.json about a newer checkpoint that was damaged.

    Raises:
        ConfigError: There is no checkpoint.
        Refused: All are truncated or edited.
    """
    return _newest(run)[1]


def load_resume(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restores the newest intact checkpoint into model and optimizer.

    Returns:
        The same as ``newest``.

    Raises:
        ConfigError: There is no checkpoint.
        Refused: All are truncated or edited, or it is of another model.
    """
    place, state = _newest(run)
    saved = load_file(place / WEIGHTS)
    current = dict(model.named_parameters())
    if set(saved) != set(_trainable(model)):
        raise Refused(
            f"{place}: the checkpoint trains other layers than the recipe. Resume with the run's config.yaml."
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            current[name].copy_(tensor)
    optimizer.load_state_dict(torch.load(place / MOMENTS, weights_only=True))
    return state


def _newest(run: RunDir) -> tuple[Path, dict[str, Any]]:
    found = run.checkpoints()
    if not found:
        raise ConfigError(f"{run.root}: holds no checkpoint to resume from. Start anew, with --overwrite if need be.")
    for place in found:
        if (state := _intact(place)) is not None:
            damaged = f"the newest checkpoint was damaged; the one before it, of step {state['step']}, was used"
            return place, {**state, "notes": [] if place == found[0] else [damaged]}
    raise Refused(f"{run.resume}: the checkpoint is truncated or was edited. Start anew with --overwrite.")


def _signed(state: dict[str, Any]) -> bytes:
    """state.json: the state, and a digest over all of it."""
    digest = hashlib.sha256(_text(state)).hexdigest()
    return _text({**state, "digest": digest})


def _text(state: dict[str, Any]) -> bytes:
    return (json.dumps(state, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _intact(place: Path) -> dict[str, Any] | None:
    """What state.json says; None if a byte of it or of the files beside it is not what was written."""
    try:
        text = (place / STATE).read_bytes()
        state = dict(json.loads(text))
        state.pop("digest")
        # The text itself is compared, so that not even a space may change.
        whole = text == _signed(state) and state["files"] == {n: sha256(place / n) for n in (WEIGHTS, MOMENTS)}
        return state if whole else None
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


def _trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
