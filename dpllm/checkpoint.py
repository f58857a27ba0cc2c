"""What a run leaves on disk: export/ (publishable) and private/resume (secret).

Comes in: the model, the optimizer, the step. Goes out: directories. A checkpoint holds no seed and no generator state:
a resumed run draws fresh noise and fresh samples.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from dpllm.errors import Refused
from dpllm.rundir import RunDir, read_json, write_json


def export(model: Any, tokenizer: Any, run: RunDir) -> dict[str, str]:
    """Writes what may be published, and nothing else, into export/.

    Args:
        model: PeftModel (the adapter is saved) or transformers model (all weights are saved).
        tokenizer: Saved beside it.
        run: Where.

    Returns:
        File name -> SHA-256 of every weight file.
    """
    temporary = run.root / f".export.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    if isinstance(model, PeftModel):
        model.save_pretrained(str(temporary), save_embedding_layers=False)
        (temporary / "README.md").unlink(missing_ok=True)  # peft's template; the card is written by report/card.py
    else:
        model.save_pretrained(str(temporary))
    tokenizer.save_pretrained(str(temporary))
    shutil.rmtree(run.export, ignore_errors=True)
    os.replace(temporary, run.export)
    return weight_hashes(run.export)


def weight_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of each safetensors file, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.safetensors"))
    }


def save_resume(
    run: RunDir,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    entry: str | None,
    max_grad_norm: float,
) -> None:
    """Writes a checkpoint atomically: a temporary directory, then a rename.

    Args:
        run: Where.
        model: Its trainable parameters are saved.
        optimizer: Its state is saved.
        step: Steps executed so far.
        entry: The ledger's reservation, which a resumed run goes on with.
        max_grad_norm: C of the next step, which adaptive clipping moves; a function of released values.
    """
    temporary = run.private / f".resume.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(_trainable(model), temporary / "trainable.safetensors")
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    digest = hashlib.sha256((temporary / "trainable.safetensors").read_bytes()).hexdigest()
    optimizer_digest = hashlib.sha256((temporary / "optimizer.pt").read_bytes()).hexdigest()
    state = {"step": step, "entry": entry, "trainable": digest, "optimizer": optimizer_digest}
    # JSON has no infinity, which is C of a run without differential privacy.
    write_json(temporary / "state.json", state | ({"max_grad_norm": max_grad_norm} if max_grad_norm < math.inf else {}))
    shutil.rmtree(run.resume, ignore_errors=True)
    os.replace(temporary, run.resume)


def load_resume(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restores a checkpoint into model and optimizer.

    Returns:
        {"step", "entry", "max_grad_norm"}, the last with differential privacy only.

    Raises:
        ConfigError: There is no checkpoint.
        Refused: It is truncated, edited, or of another model.
    """
    state = read_json(run.resume / "state.json")
    try:
        weights = (run.resume / "trainable.safetensors").read_bytes()
        moments = (run.resume / "optimizer.pt").read_bytes()
    except OSError:
        weights = moments = b""
    digests = (hashlib.sha256(weights).hexdigest(), hashlib.sha256(moments).hexdigest())
    if digests != (state.get("trainable"), state.get("optimizer")):
        raise Refused(f"{run.resume}: the checkpoint is truncated or was edited. Start anew with --overwrite.")
    saved = load_file(run.resume / "trainable.safetensors")
    current = dict(model.named_parameters())
    if set(saved) != set(_trainable(model)):
        raise Refused(
            f"{run.resume}: the checkpoint trains other layers than the recipe. Resume with the run's config.yaml."
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            current[name].copy_(tensor)
    optimizer.load_state_dict(torch.load(run.resume / "optimizer.pt", weights_only=True))
    return state


def _trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
