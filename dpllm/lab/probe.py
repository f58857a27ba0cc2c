"""A model made to be watched, and what the real engine releases when it trains it.

Comes in: a Plan and how the recipe computes it. Goes out: an ``Observation`` in numpy: coins, draws, released sums, and
what each of them should have been. The draw, the clipping and the noise are the engine's own; the gradients that they are
compared with are computed here by plain autograd, and clipped here once more. Knows no statistics, no data.

Shape suffixes: M canaries, T steps, P trainable coordinates, R rows of a physical batch, L tokens, D width.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor, nn
from torch.nn import functional

from dpllm.lab.replay import Watched, engine_options, noise_key
from dpllm.privacy import banded
from dpllm.privacy.engine import Engine
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import PoissonSampler, physical_batches
from dpllm.privacy.schedule import shapes_of
from dpllm.privacy.stream import Turns, groups
from dpllm.recipe.config import RunConfig
from dpllm.text.data import TokenSequence, Unit

Floats = NDArray[np.float64]

CLASSES = 2  # tokens 0 and 1 are targets and padding; canary i is token i + 2
WIDTH = 4
FAINT = 0.02  # the layer with a bias, which all canaries share, is made to matter little
NORMS = (16.0, 32.0, 1.2, 64.0, 8.0, 16.0, 0.5, 32.0)  # lengths of the canaries' gradients, in units of C
EMPTY_SLOTS = 2000
MAX_LENGTH = 16
FEW_CANARIES = 20


@dataclass(frozen=True)
class Observation:
    """What was released, what went in, and what should have come of it."""

    inserted_M: NDArray[np.bool_]  # the coins
    draws: list[list[int]]  # slots that joined each step; canary i holds slot num_slots - M + i, those before are empty
    num_slots: int
    # Both times C, the strategy of banded noise, so that the noise is independent:
    released_TP: Floats  # times the public divisor, over that step's C: a sum with noise of noise_multiplier
    expected_TP: Floats  # the sum of the drawn canaries' clipped gradients over C, by this module's arithmetic
    own_MP: Any  # the part of each canary's clipped gradient on coordinates of its own, over C; sparse
    gain_TM: Floats  # by how much that part was longer or shorter in that step (C moves under adaptive clipping)
    noise_multiplier: float  # the Plan's, of the gradients
    turn_TN: NDArray[np.bool_]  # whether a slot's group has its turn; always, where there is one group
    coefficients: tuple[float, ...]  # c of banded noise; (1,) for independent noise
    starts: tuple[int, ...]  # with which attempts began: with banded noise the run is stopped and resumed half way
    parts: dict[str, tuple[int, int]]  # trained parameter -> its first coordinate and the one behind its last
    count_residual_T: Floats | None  # with adaptive clipping, released minus counted units over the Plan's noise
    contributions: tuple[float, ...]  # norm of what the engine adds for a single unit, over C, for some canaries


class Probe(nn.Module):
    """A causal language model in which canary i reaches coordinates that no other canary reaches."""

    # Two embeddings, a linear layer, and a faint one with a bias train; all stay zero, so that gradients stay the same.

    def __init__(self, size_M: Tensor) -> None:
        """``size_M`` scales the hidden state of each canary, and so its gradient."""
        super().__init__()
        count = len(size_M)
        vocabulary = count + CLASSES
        self.first = nn.Embedding(vocabulary, WIDTH)
        self.second = nn.Embedding(vocabulary, WIDTH)
        self.dense = nn.Linear(count, WIDTH, bias=False)
        self.faint = nn.Linear(count, WIDTH, bias=True)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.which = _frozen(functional.pad(torch.eye(count), (0, 0, CLASSES, 0)))
        self.size = _frozen(functional.pad(size_M, (CLASSES, 0)).unsqueeze(1))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = nn.Parameter(torch.tensor([[1.0, -0.5, 0.25, 0.5]] * CLASSES), requires_grad=False)
        self.head.weight[1] *= -1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        """Logits of the two classes, from each token alone."""
        which_RLM = self.which(input_ids)
        hidden_RLD = self.first(input_ids) + self.second(input_ids) + self.dense(which_RLM)
        hidden_RLD = hidden_RLD + FAINT * self.faint(which_RLM)
        return SimpleNamespace(logits=self.head(self.size(input_ids) * hidden_RLD))


def _frozen(weight: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight, freeze=True)  # type: ignore[no-untyped-call,no-any-return]


def observe(config: RunConfig, plan: Plan, *, steps: int, canaries: int, generator: np.random.Generator) -> Observation:
    """Runs the probe through the real engine and sampler, computing as the recipe says; each canary has a fair coin."""
    torch.set_float32_matmul_precision("highest")
    units = _canary_units(canaries, several=plan.sampling == "unit")
    probe, exact = _probe(units, plan.max_grad_norm)
    divisor = plan.schedule.expected_batch_size
    coefficients = plan.coefficients or (1.0,)
    starts = (0, steps // 2) if plan.coefficients else (0,)
    inserted_M = generator.random(canaries) < 0.5
    slots: list[Unit | None] = [None] * EMPTY_SLOTS
    slots += [unit if coin else None for unit, coin in zip(units, inserted_M, strict=True)]
    turns = Turns(plan.bands, noise_key(generator))
    sampler = PoissonSampler(plan.schedule, len(slots), noise_key(generator), turns)
    draws = [sampler.draw() for _ in range(steps)]
    shapes = shapes_of(_physical_batch_size(config, plan, slots), len(slots), MAX_LENGTH)
    norms, counts, released_TP = [], [], []
    for first, last in itertools.pairwise((*starts, steps)):
        watched = Watched(probe, plan, noise_key(generator), **engine_options(config))
        with contextlib.closing(watched.engine) as engine:
            for drawn in draws[first:last]:
                norms.append(engine.max_grad_norm)
                released_P, count = watched.step(physical_batches(drawn, slots, shapes, 0))
                released_TP.append(released_P.numpy() * divisor / norms[-1])
                counts.append(count)
            contributions = _contributions(engine, units)
    present = [[slot - EMPTY_SLOTS for slot in drawn if slots[slot] is not None] for drawn in draws]
    clipped = {norm: _clipped(exact, plan.clipping, norm) for norm in set(norms)}
    own_MP = clipped[plan.max_grad_norm] @ exact.own_PP
    ends = itertools.accumulate(parameter.numel() for parameter in engine.parameters.values())
    expected_TP = [
        np.asarray(clipped[norm][joined].sum(axis=0)).ravel() for norm, joined in zip(norms, present, strict=True)
    ]
    return Observation(
        inserted_M=inserted_M,
        draws=draws,
        num_slots=len(slots),
        turn_TN=np.arange(steps)[:, None] % plan.bands == groups(turns, len(slots)),
        coefficients=coefficients,
        starts=starts,
        released_TP=banded.whiten(coefficients, np.array(released_TP), starts),
        expected_TP=banded.whiten(coefficients, np.array(expected_TP), starts),
        own_MP=own_MP,
        gain_TM=np.array([lengths(clipped[norm] @ exact.own_PP) for norm in norms]) / lengths(own_MP),
        noise_multiplier=plan.gradient_noise_multiplier,
        parts=dict(zip(engine.parameters, itertools.pairwise([0, *ends]), strict=True)),
        count_residual_T=_count_residuals(exact, plan, norms, counts, present) if plan.adaptive else None,
        contributions=contributions,
    )


def _canary_units(count: int, *, several: bool) -> list[Unit]:
    """One unit for each canary, of ragged rows: one to three of them if ``several``."""
    units = []
    for canary in range(count):
        rows = []
        for row in range(1 + canary % 3 if several else 1):
            tail = (canary + row) % 4  # tokens behind the target, which nobody learns
            ids = (canary + CLASSES, canary % CLASSES, *([0] * tail))
            rows.append(TokenSequence(ids, (False, True, *([False] * tail)), 1))
        units.append(Unit(tuple(rows)))
    return units


def _physical_batch_size(config: RunConfig, plan: Plan, slots: list[Unit | None]) -> int:
    """About three physical batches, or what the recipe says, where that is less."""
    rows = plan.schedule.sampling_rate * sum(len(unit.sequences) for unit in slots if unit)
    named, third = config.train.physical_batch_size, max(1, math.ceil(rows / 3))
    return third if named == "auto" else min(named, third)


def _contributions(engine: Engine, units: list[Unit]) -> tuple[float, ...]:
    """Norm over C of what single units add, each as a logical batch of its own; the longest gradients are among them."""
    size, found = sum(p.numel() for p in engine.parameters.values()), []
    for unit in units[:FEW_CANARIES]:
        for rows in (len(unit.sequences), 1):  # whole, and cut into batches of one row
            sum_P = engine.clipped_sum(physical_batches([0], [unit], shapes_of(rows, rows, MAX_LENGTH), 0))[0][:size]
            found.append(float(sum_P.norm()) / engine.max_grad_norm)
    return tuple(found)


# The same gradients without the engine.


@dataclass(frozen=True)
class _Exact:
    """Each canary's gradient as plain autograd has it, sparse, and which coordinates are whose layer's."""

    gradient_MP: Any
    layers: tuple[tuple[int, int], ...]
    own_PP: Any  # keeps the coordinates that canaries do not share


def _probe(units: list[Unit], max_grad_norm: float) -> tuple[Probe, _Exact]:
    """A probe whose gradients have the lengths of ``NORMS`` times C, and these gradients."""
    exact = _gradients(Probe(torch.ones(len(units))).double(), units)
    wanted_M = max_grad_norm * np.array([NORMS[canary % len(NORMS)] for canary in range(len(units))])
    size_M = torch.tensor(wanted_M / lengths(exact.gradient_MP), dtype=torch.float32)
    # At zero weights a canary's gradient is proportional to its size.
    return Probe(size_M), replace(exact, gradient_MP=_scaled(exact.gradient_MP, size_M.double().numpy()))


def _gradients(probe: Probe, units: list[Unit]) -> _Exact:
    trained = {name: p for name, p in probe.named_parameters() if p.requires_grad}
    rows = []
    for unit in units:
        loss = torch.zeros((), dtype=torch.float64)
        for sequence in unit.sequences:
            logits = probe(torch.tensor([sequence.input_ids[:1]])).logits[0]
            loss = loss + functional.cross_entropy(logits, torch.tensor(sequence.input_ids[1:2]))
        found = torch.autograd.grad(loss, list(trained.values()))
        rows.append(sparse.csr_matrix(torch.cat([g.flatten() for g in found]).numpy()[None]))
    ends = dict(zip(trained, itertools.accumulate(p.numel() for p in trained.values()), strict=True))
    bounds = [0, *(ends[f"{layer}.weight"] for layer in ("first", "second", "dense")), ends["faint.bias"]]
    own_P = np.ones(ends["faint.bias"])
    own_P[ends["faint.weight"] :] = 0.0  # the bias
    return _Exact(sparse.vstack(rows).tocsr(), tuple(itertools.pairwise(bounds)), sparse.diags(own_P).tocsr())


def _clipped(exact: _Exact, clipping: str, bound: float) -> Any:
    """clipped_MP over C: each clipping function once more, from its definition."""
    gradient_MP = exact.gradient_MP
    if clipping == "per_layer":
        share = bound / math.sqrt(len(exact.layers))
        parts = []
        for start, end in exact.layers:
            part = gradient_MP[:, start:end]
            parts.append(_scaled(part, np.minimum(1.0, share / np.maximum(lengths(part), 1e-300)) / bound))
        return sparse.hstack(parts).tocsr()
    norm_M = lengths(gradient_MP)
    factor_M = bound / (norm_M + 0.01) if clipping == "automatic" else np.minimum(1.0, bound / norm_M)
    return _scaled(gradient_MP, factor_M / bound)


def _count_residuals(
    exact: _Exact, plan: Plan, norms: list[float], counts: list[float | None], present: list[list[int]]
) -> Floats:
    """Released count of unclipped units minus the counted one, over the Plan's noise."""
    assert plan.adaptive is not None
    norm_M = lengths(exact.gradient_MP)
    counted_T = [np.where(norm_M[joined] <= norm, 0.5, -0.5).sum() for norm, joined in zip(norms, present, strict=True)]
    released_T = (np.array(counts) - 0.5) * plan.schedule.expected_batch_size
    result: Floats = (released_T - counted_T) / plan.adaptive.count_noise_multiplier
    return result


def lengths(rows: Any) -> Floats:
    """The norm of each row of a sparse matrix."""
    return np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1), dtype=np.float64)).ravel()


def _scaled(rows: Any, factor_M: Floats) -> Any:
    return (sparse.diags(factor_M) @ rows).tocsr()
