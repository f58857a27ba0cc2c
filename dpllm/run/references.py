"""What the reference of preference training says of every answer: computed once, before the first step, and kept in private/.

Comes in: units of pairs, the model that the run begins with. Goes out: the same pairs with numbers, which are never released. The
reference is the base, where a new adapter adds nothing yet, or the adapter that the run starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from accelerate import PartialState

from dpllm.model.processes import shared
from dpllm.model.rewards import Referenced, Rewards
from dpllm.run.directory import RunDir
from dpllm.run.promise import Decision
from dpllm.text import data


@dataclass(frozen=True)
class Pairs:
    """Preference pairs with what the reference says of each answer."""

    sampled: Referenced  # the training units, canary slots last
    held_out: Referenced  # empty without evaluation data
    rewards: Rewards  # what the model that trains says of pairs

    def keep(self, run: RunDir) -> None:
        """Writes it down for a run that goes on."""
        np.save(run.references, np.concatenate([self.sampled.reference_R, self.held_out.reference_R]))


def referenced(
    decision: Decision,
    run: RunDir,
    rewards: Rewards,
    units: Sequence[data.Unit | None],
    held_out: Sequence[data.TokenSequence],
) -> Pairs:
    """Asks the reference about all pairs; to be called before a checkpoint is loaded.

    A run that goes on reads what was computed when it began: the reference must not move with the adapter.
    """
    held, state = [data.Unit(pair) for pair in zip(held_out[::2], held_out[1::2], strict=True)], PartialState()
    own, kept = len(Referenced(units).reference_R), None
    if decision.resumed and state.is_main_process and run.references.exists():
        kept = np.load(run.references)
        kept = kept if len(kept) == own + len(held_out) else None
    found = shared(kept)
    if found is None:
        where = state.process_index, state.num_processes
        found = np.concatenate([rewards.surprises(units, *where), rewards.surprises(held, *where)])
    return Pairs(Referenced(units, found[:own]), Referenced(held, found[own:]), rewards)
