"""Preference pairs as a model sees them: log-likelihoods of their answers, and the implicit rewards that follow.

Comes in: a model, units of pairs. Goes out: one number for each answer, with which training and evaluation compare the model with
its reference; reward accuracy and margin. All of it is computed from data, so it is private unless the data are public. The
reference is the base model (a new adapter adds nothing yet) or the adapter that the run starts from. It is read once, before the
first step, and its log-likelihoods are kept in private/.

Shape suffixes: R answers, two of each pair, in the order of units; P pairs.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from torch import nn

from dpllm.model import evaluate, processes
from dpllm.model.evaluate import HeldOut, without_memory
from dpllm.privacy import guards
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.loss import Autocast, ExampleLoss, TokenLosses, in_eval_mode, row_sums
from dpllm.privacy.packing import passes_of, sizes_of
from dpllm.privacy.preference import PairLoss
from dpllm.privacy.schedule import Packing, TokenSequence, Unit
from dpllm.progress import tell
from dpllm.text.data import ReadWhenAsked

AT_ONCE = 512  # units laid out in passes at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """How a model is read in passes like those of training."""

    model: nn.Module
    packing: Packing
    pad_id: int
    device: torch.device
    autocast: Autocast


class Referenced(ReadWhenAsked[Unit | None]):
    """Units of pairs whose answers carry a number each: see ``TokenSequence.reference``."""

    def __init__(self, units: Sequence[Unit | None], reference_R: Floats | None = None) -> None:
        """Without ``reference_R``, each answer carries its index among all answers."""
        self.units = units
        counts = (len(sizes_of(units, slot)) for slot in range(len(units)))
        self._first_U = np.fromiter(itertools.accumulate(counts, initial=0), np.int64, len(units) + 1)
        self.reference_R = np.arange(self._first_U[-1], dtype=np.float64) if reference_R is None else reference_R

    def __len__(self) -> int:
        return len(self.units)

    def sizes(self, index: int) -> list[int]:
        """See ``packing.SizedUnits``."""
        return sizes_of(self.units, index)

    def _read(self, number: int) -> Unit | None:
        unit, values = self.units[number], self.reference_R[self._first_U[number] : self._first_U[number + 1]]
        if unit is None:
            return None
        return Unit(tuple(replace(row, reference=float(r)) for row, r in zip(unit.sequences, values, strict=True)))


def surprises(reading: Reading, units: Sequence[Unit | None], rank: int = 0, world: int = 1) -> Floats:
    """nll_R, in nats: minus the log-likelihood of every answer, in evaluation mode, gathered from all ranks.

    All ranks make the same number of forward passes, because all of them gather a sharded model in each. The packing is that of
    training, with which other rows do not change how a row rounds.

    Guarantee:
        An answer's number depends on its pair and the model alone: a pair lies in a pass as in training.
    """
    without_memory(reading.model)
    attention = RowAttention(reading.model)
    places, losses = Referenced(units), TokenLosses(reading.model, reading.device, reading.autocast)
    found_R = torch.zeros(len(places.reference_R), dtype=torch.float64)
    with in_eval_mode(reading.model), guards.deterministic():
        for start in range(0, len(units), AT_ONCE):
            tell("Log-likelihoods of answers", start, len(units))
            indices = range(start, min(start + AT_ONCE, len(units)))
            for batch in passes_of(indices, places, reading.packing, reading.pad_id, rank, world):
                with attention.of(batch):
                    nll_M = losses(batch.to(reading.device)).nll_M
                if batch.rows:
                    found_R[batch.reference_R.long()] = row_sums(nll_M.double(), batch.rows).cpu()
    return np.asarray(processes.totals(*found_R.tolist()))


def answers(units: Sequence[Unit | None]) -> list[TokenSequence]:
    """The sequences of all units, in order."""
    return [sequence for unit in units if unit for sequence in unit.sequences]


def compared(reading: Reading, pairs: Referenced, loss: PairLoss, rank: int, world: int) -> HeldOut:
    """Loss of the chosen answers in nats per token, and the implicit rewards of both answers.

    Reward accuracy is the share of pairs whose chosen answer has the higher implicit reward, in [0, 1]; a tie counts half.
    """
    nll_R = surprises(reading, pairs, rank, world)
    margin_P = loss.margins(torch.from_numpy(nll_R), torch.from_numpy(pairs.reference_R))
    tokens = sum(sum(sequence.loss_mask) for sequence in answers(pairs.units)[::2])
    won = (margin_P > 0).double() + 0.5 * (margin_P == 0).double()
    nats = float(nll_R[::2].sum()) / max(1, tokens)
    return HeldOut(nats, None, tokens, float(won.mean()), float(margin_P.mean()))


@dataclass(frozen=True)
class Examples:
    """Training and evaluation examples, as the objective reads them."""

    sampled: Sequence[Unit | None]  # the training units, canary slots last
    figures: tuple[str, ...]  # fields of ``HeldOut`` that evaluation fills
    evaluate: Callable[[int, int], HeldOut]  # takes rank and world size; the evaluation data are not empty
    begun: bytes = b""  # what a resumed run has to know about its start


def examples_of(
    loss: ExampleLoss,
    reading: Reading,
    units: Sequence[Unit | None],
    held_out: Sequence[TokenSequence],
    saved: Path | None,
) -> Examples:
    """The examples; reads the reference's log-likelihoods of all pairs, so call it before a checkpoint is loaded.

    ``kept`` is the file with ``begun`` of a resumed run: the reference must not move with the adapter.
    """
    if not isinstance(loss, PairLoss):
        size = max(1, 2 * reading.packing.tokens // reading.packing.max_length)
        how = reading.model, held_out, size, reading.device, reading.autocast
        return Examples(units, ("loss", "accuracy"), partial(evaluate.held_out_loss, *how))
    held, state = [Unit(pair) for pair in zip(held_out[::2], held_out[1::2], strict=True)], PartialState()
    before = _kept(saved, len(Referenced(units).reference_R), held) if saved and state.is_main_process else None
    sampled_R, held_out_R = processes.shared(before) or [
        surprises(reading, part, state.process_index, state.num_processes) for part in (units, held)
    ]
    figures = partial(compared, reading, Referenced(held, held_out_R), loss)
    names, begun = ("loss", "reward_accuracy", "reward_margin"), packed(sampled_R, held_out_R, held)
    return Examples(Referenced(units, sampled_R), names, figures, begun)


def packed(sampled_R: Floats, held_out_R: Floats, held: Sequence[Unit]) -> bytes:
    """The reference's log-likelihoods as a file, with a digest of the evaluation pairs."""
    file = io.BytesIO()
    np.savez(file, sampled=sampled_R, held_out=held_out_R, about=np.frombuffer(_digest(held), np.uint8))
    return file.getvalue()


def _kept(path: Path, many: int, held: Sequence[Unit]) -> tuple[Floats, Floats] | None:
    """What ``packed`` wrote; None if it is damaged or about other evaluation pairs, and the reference is read again."""
    try:
        with np.load(path) as file:
            sampled_R, held_out_R, about = (file[name] for name in ("sampled", "held_out", "about"))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None
    good = (len(sampled_R), len(held_out_R)) == (many, 2 * len(held)) and about.tobytes() == _digest(held)
    return (sampled_R, held_out_R) if good else None


def _digest(units: Sequence[Unit | None]) -> bytes:
    texts = [(sequence.input_ids, sequence.loss_mask) for sequence in answers(units)]
    return hashlib.blake2b(repr(texts).encode(), digest_size=16).digest()
