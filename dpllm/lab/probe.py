"""A model made to be watched, and what the real engine releases when it trains it.

Comes in: a Plan and how the recipe computes it. Goes out: an ``Observation`` in numpy: coins, draws, released sums, and
what each of them should have been. The draw, the clipping, the noise and the update are the engine's own; the gradients
that they are compared with are computed here by plain autograd, and clipped here once more. Knows no statistics, no data.

Shape suffixes: M canaries, T steps, P trainable coordinates, R rows of a physical batch, L tokens, D width.
"""

from __future__ import annotations

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

from dpllm.privacy.engine import Engine
from dpllm.privacy.noise import key_bits
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import PoissonSampler, collate, physical_batches
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
    """What was released, what went in, and what should have come of it.

    Attributes:
        inserted_M: The coins.
        draws: Slots that joined each step; canary i holds slot ``num_slots - M + i``, the slots before it are empty.
        num_slots: How many slots were drawn over.
        released_TP: What each step released, times the public divisor, over that step's C: a sum with noise of
            ``noise_multiplier`` in every coordinate.
        expected_TP: The sum of the drawn canaries' clipped gradients over that step's C, by this module's arithmetic.
        own_MP: The part of each canary's clipped gradient on coordinates of its own, over C; sparse.
        gain_TM: By how much that part was longer or shorter in that step (C moves under adaptive clipping).
        noise_multiplier: The Plan's, of the gradients.
        parts: Name of a trained parameter -> its first coordinate and the one behind its last.
        count_residual_T: With adaptive clipping, released count minus counted units over the Plan's noise; else None.
        contributions: Norm of what the engine adds for a single unit, over C, for some canaries.
    """

    inserted_M: NDArray[np.bool_]
    draws: list[list[int]]
    num_slots: int
    released_TP: Floats
    expected_TP: Floats
    own_MP: Any
    gain_TM: Floats
    noise_multiplier: float
    parts: dict[str, tuple[int, int]]
    count_residual_T: Floats | None
    contributions: tuple[float, ...]


class Probe(nn.Module):
    """A causal language model in which canary i reaches coordinates that no other canary reaches.

    Two embeddings, a linear layer, and a faint linear layer with a bias train; all start at zero and are put back to it
    after every step, so that a gradient is the same in all of them.
    """

    def __init__(self, size_M: Tensor) -> None:
        """``size_M`` scales the hidden state of each canary, and so its gradient."""
        super().__init__()
        count = len(size_M)
        vocabulary = count + CLASSES
        self.first = nn.Embedding(vocabulary, WIDTH)
        self.second = nn.Embedding(vocabulary, WIDTH)
        self.dense = nn.Linear(count, WIDTH, bias=False)
        self.faint = nn.Linear(count, WIDTH, bias=True)
        self.reset()
        self.which = _frozen(functional.pad(torch.eye(count), (0, 0, CLASSES, 0)))
        self.size = _frozen(functional.pad(size_M, (CLASSES, 0)).unsqueeze(1))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = nn.Parameter(torch.tensor([[1.0, -0.5, 0.25, 0.5]] * CLASSES), requires_grad=False)
        self.head.weight[1] *= -1.0

    def reset(self) -> None:
        """Everything that trains goes back to zero."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.zero_()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        """Logits of the two classes, from each token alone."""
        which_RLM = self.which(input_ids)
        hidden_RLD = self.first(input_ids) + self.second(input_ids) + self.dense(which_RLM)
        hidden_RLD = hidden_RLD + FAINT * self.faint(which_RLM)
        return SimpleNamespace(logits=self.head(self.size(input_ids) * hidden_RLD))


def _frozen(weight: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight, freeze=True)  # type: ignore[no-untyped-call,no-any-return]


def canary_units(count: int, *, several: bool) -> list[Unit]:
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


def observe(config: RunConfig, plan: Plan, *, steps: int, canaries: int, generator: np.random.Generator) -> Observation:
    """Trains the probe through the real engine and sampler.

    Args:
        config: How the engine computes: grad_sample_mode, secure_noise, physical_batch_size.
        plan: What it promises.
        steps: How many steps, >= 1.
        canaries: M >= 1, each a sampled thing of its own with a fair coin.
        generator: Source of coins and of the keys of noise and sampling.
    """
    torch.set_float32_matmul_precision("highest")
    units = canary_units(canaries, several=plan.sampling == "unit")
    probe, exact = _probe(units, plan.max_grad_norm)
    engine = _engine(config, plan, probe, generator)
    try:
        return _observe(config, plan, probe, engine, units, exact, steps, generator)
    finally:
        engine.close()


def _observe(
    config: RunConfig,
    plan: Plan,
    probe: Probe,
    engine: Engine,
    units: list[Unit],
    exact: _Exact,
    steps: int,
    generator: np.random.Generator,
) -> Observation:
    count, rate, divisor = len(units), plan.schedule.sampling_rate, plan.schedule.expected_batch_size
    inserted_M = generator.random(count) < 0.5
    slots: list[Unit | None] = [None] * EMPTY_SLOTS
    slots += [unit if coin else None for unit, coin in zip(units, inserted_M, strict=True)]
    sampler = PoissonSampler(plan.schedule, len(slots), _key(config, generator), secure=config.privacy.secure_noise)
    rows = rate * sum(len(unit.sequences) for unit, coin in zip(units, inserted_M, strict=True) if coin)
    named, third = config.train.physical_batch_size, max(1, math.ceil(rows / 3))  # about three physical batches
    size = third if named == "auto" else min(named, third)
    released_TP = np.zeros((steps, exact.gradient_MP.shape[1]))
    expected_TP, gain_TM = np.zeros_like(released_TP), np.ones((steps, count))
    draws, residuals = [], []
    norm_M = _lengths(exact.gradient_MP)
    clipped_MP, clipped_at = _clipped(exact, plan.clipping, plan.max_grad_norm), plan.max_grad_norm
    own_MP = _own(exact, clipped_MP)
    for step in range(steps):
        norm, drawn = engine.max_grad_norm, sampler.draw()
        engine.step(physical_batches(drawn, slots, size, 0, MAX_LENGTH))
        sum_P = torch.cat([-p.detach().flatten() for p in engine.parameters.values()]).double() * divisor
        probe.reset()
        released_TP[step] = sum_P.numpy() / norm
        if norm != clipped_at:
            clipped_MP, clipped_at = _clipped(exact, plan.clipping, norm), norm
        present = [slot - EMPTY_SLOTS for slot in drawn if slot >= EMPTY_SLOTS and slots[slot] is not None]
        expected_TP[step] = np.asarray(clipped_MP[present].sum(axis=0)).ravel()
        if plan.adaptive is not None:
            gain_TM[step] = _lengths(_own(exact, clipped_MP)) / _lengths(own_MP)
            released = (engine.released()["unclipped_fraction"] - 0.5) * divisor
            counted = float(np.where(norm_M[present] <= norm, 0.5, -0.5).sum())
            residuals.append((released - counted) / plan.adaptive.count_noise_multiplier)
        draws.append(drawn)
    sigma = plan.adaptive.gradient_noise_multiplier if plan.adaptive else plan.noise_multiplier
    return Observation(
        inserted_M=inserted_M,
        draws=draws,
        num_slots=len(slots),
        released_TP=released_TP,
        expected_TP=expected_TP,
        own_MP=own_MP,
        gain_TM=gain_TM,
        noise_multiplier=sigma,
        parts=_parts(engine),
        count_residual_T=np.array(residuals) if plan.adaptive else None,
        contributions=_contributions(engine, units),
    )


def _probe(units: list[Unit], max_grad_norm: float) -> tuple[Probe, _Exact]:
    """A probe whose gradients have the lengths of ``NORMS`` times C, and these gradients."""
    exact = _gradients(Probe(torch.ones(len(units))).double(), units)
    wanted_M = max_grad_norm * np.array([NORMS[canary % len(NORMS)] for canary in range(len(units))])
    size_M = torch.tensor(wanted_M / _lengths(exact.gradient_MP), dtype=torch.float32)
    # At zero weights a canary's gradient is proportional to its size.
    return Probe(size_M), replace(exact, gradient_MP=_scaled(exact.gradient_MP, size_M.double().numpy()))


def _engine(config: RunConfig, plan: Plan, probe: Probe, generator: np.random.Generator) -> Engine:
    trained = [parameter for parameter in probe.parameters() if parameter.requires_grad]
    return Engine(
        probe,
        torch.optim.SGD(trained, lr=1.0),  # from zero, the update is minus what was released, to the last bit
        plan.schedule,
        plan,
        grad_sample_mode=config.privacy.grad_sample_mode,
        noise_entropy=_key(config, generator),
        secure_noise=config.privacy.secure_noise,
        device=torch.device("cpu"),
    )


def _key(config: RunConfig, generator: np.random.Generator) -> int:
    return int.from_bytes(generator.bytes(key_bits(config.privacy.secure_noise) // 8), "little")


def _parts(engine: Engine) -> dict[str, tuple[int, int]]:
    parts, start = {}, 0
    for name, parameter in engine.parameters.items():
        parts[name] = (start, start + parameter.numel())
        start += parameter.numel()
    return parts


def _contributions(engine: Engine, units: list[Unit]) -> tuple[float, ...]:
    """Norm over C of what single units add, each as a logical batch of its own; the longest gradients are among them."""
    found = []
    for unit in units[:FEW_CANARIES]:
        whole = collate([unit], pad_id=0)
        pieces = [whole] if len(unit.sequences) == 1 else _pieces(unit)
        for batches in ([whole], pieces):
            sum_P = engine.clipped_sum(batches)[0][: sum(p.numel() for p in engine.parameters.values())]
            found.append(float(sum_P.norm()) / engine.max_grad_norm)
    return tuple(found)


def _pieces(unit: Unit) -> list[Any]:
    """A unit cut into batches of one row."""
    return physical_batches([0], [unit], 1, 0, MAX_LENGTH)


# The same gradients without the engine.


@dataclass(frozen=True)
class _Exact:
    """Each canary's gradient as plain autograd has it, sparse, and which coordinates are whose layer's."""

    gradient_MP: Any
    layers: tuple[tuple[int, int], ...]
    shared: tuple[int, int]  # the bias


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
    ends = dict(zip(trained, np.cumsum([p.numel() for p in trained.values()]).tolist(), strict=True))
    bounds = [0, *(ends[f"{layer}.weight"] for layer in ("first", "second", "dense")), ends["faint.bias"]]
    return _Exact(
        sparse.vstack(rows).tocsr(), tuple(itertools.pairwise(bounds)), (ends["faint.weight"], ends["faint.bias"])
    )


def _clipped(exact: _Exact, clipping: str, bound: float) -> Any:
    """clipped_MP over C: each clipping function once more, from its definition."""
    gradient_MP = exact.gradient_MP
    if clipping == "per_layer":
        share = bound / math.sqrt(len(exact.layers))
        parts = []
        for start, end in exact.layers:
            part = gradient_MP[:, start:end]
            parts.append(_scaled(part, np.minimum(1.0, share / np.maximum(_lengths(part), 1e-300)) / bound))
        return sparse.hstack(parts).tocsr()
    norm_M = _lengths(gradient_MP)
    factor_M = bound / (norm_M + 0.01) if clipping == "automatic" else np.minimum(1.0, bound / norm_M)
    return _scaled(gradient_MP, factor_M / bound)


def _own(exact: _Exact, clipped_MP: Any) -> Any:
    """Without the coordinates that all canaries share."""
    keep_P = np.ones(clipped_MP.shape[1])
    keep_P[slice(*exact.shared)] = 0.0
    own = clipped_MP @ sparse.diags(keep_P)
    return own.tocsr()


def _lengths(rows: Any) -> Floats:
    return np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1), dtype=np.float64)).ravel()


def _scaled(rows: Any, factor_M: Floats) -> Any:
    return (sparse.diags(factor_M) @ rows).tocsr()
