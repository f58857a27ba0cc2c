"""What the reference of preference training says of every answer: computed once, before the first step, and kept in private/.

Comes in: units of pairs, the model that the run begins with. Goes out: the same pairs with numbers, which are never released. The
reference is the base, where a new adapter adds nothing yet, or the adapter that the run starts from.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from accelerate import PartialState

from dpllm.files import write_whole
from dpllm.model.processes import shared
from dpllm.model.rewards import Floats, Referenced, Rewards, answers
from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.run.directory import RunDir
from dpllm.run.promise import Decision


@dataclass(frozen=True)
class Pairs:
    """Preference pairs with what the reference says of each answer."""

    sampled: Referenced  # the training units, canary slots last
    held_out: Referenced  # empty without evaluation data
    rewards: Rewards  # what the model that trains says of pairs

    def keep(self, run: RunDir) -> None:
        """Writes it down for a run that goes on."""
        file, about = io.BytesIO(), np.frombuffer(_digest(self.held_out.units), np.uint8)
        np.savez(file, sampled=self.sampled.reference_R, held_out=self.held_out.reference_R, about=about)
        write_whole(run.references, file.getvalue(), mode=0o600)


def referenced(
    decision: Decision,
    run: RunDir,
    rewards: Rewards,
    units: Sequence[Unit | None],
    held_out: Sequence[TokenSequence],
) -> Pairs:
    """Asks the reference about all pairs; to be called before a checkpoint is loaded.

    A run that goes on reads what was computed when it began: the reference must not move with the adapter.
    """
    held, state = [Unit(pair) for pair in zip(held_out[::2], held_out[1::2], strict=True)], PartialState()
    kept = _kept(run, len(Referenced(units).reference_R), held) if decision.resumed and state.is_main_process else None
    found = shared(kept)
    if found is None:
        where = state.process_index, state.num_processes
        found = rewards.surprises(units, *where), rewards.surprises(held, *where)
    return Pairs(Referenced(units, found[0]), Referenced(held, found[1]), rewards)


def _kept(run: RunDir, many: int, held: Sequence[Unit]) -> tuple[Floats, Floats] | None:
    """What was written down; None where it is damaged or of other evaluation pairs, and the reference is asked again."""
    try:
        with np.load(run.references) as file:
            sampled_R, held_out_R, about = (file[name] for name in ("sampled", "held_out", "about"))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None
    good = (len(sampled_R), len(held_out_R)) == (many, 2 * len(held)) and about.tobytes() == _digest(held)
    return (sampled_R, held_out_R) if good else None


def _digest(units: Sequence[Unit | None]) -> bytes:
    told = [(one.input_ids, one.loss_mask) for one in answers(units)]
    return hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
