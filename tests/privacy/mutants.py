"""Ways in which an engine can break its Plan: each patches the real classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpllm.privacy.clipping import PerUnitClipper
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.sampling import PoissonSampler

Change = Callable[[pytest.MonkeyPatch], None]
DRAW, JOIN, SUM, ADD = (
    GaussianNoise.draw, PoissonSampler.draw, StepEngine.clipped_sum, PerUnitClipper.add,
)  # fmt: skip


def drawn(value: Callable[[Tensor], Tensor]) -> Change:
    """Noise as it should be, changed."""
    return lambda patch: patch.setattr(GaussianNoise, "draw", lambda self, size: value(DRAW(self, size)))


def scaled_by_the_batch(patch: pytest.MonkeyPatch) -> None:
    """The noise is divided by B before the sum is."""
    release = StepEngine._release

    def releasing(self: StepEngine, flat_P: Tensor) -> Tensor:
        divisor = self._schedule.expected_batch_size
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(GaussianNoise, "draw", lambda noise, size: DRAW(noise, size) / divisor)
            return release(self, flat_P)

    patch.setattr(StepEngine, "_release", releasing)


def constant_seed(patch: pytest.MonkeyPatch) -> None:
    def draw(self: GaussianNoise, size: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng(42).standard_normal(size, dtype=np.float32))

    patch.setattr(GaussianNoise, "draw", draw)


def one_step_again(patch: pytest.MonkeyPatch) -> None:
    """Of all steps, the fortieth has the noise of the third."""
    seen: dict[int, list[Tensor]] = {}

    def draw(self: GaussianNoise, size: int) -> Tensor:
        noise = seen.setdefault(id(self), [])
        noise.append(DRAW(self, size))
        return (noise[2] if len(noise) == 40 else noise[-1]).clone()  # what is returned is scaled in place

    patch.setattr(GaussianNoise, "draw", draw)


def canaries_at_ten_times_q(patch: pytest.MonkeyPatch) -> None:
    """The later half of the slots."""

    def draw(self: PoissonSampler) -> list[int]:
        joined = set(JOIN(self))
        first = self._num_slots // 2
        more = self._stream.uniform(self._num_slots - first) < min(1.0, 10 * self._rate)
        return sorted({slot for slot in joined if slot < first} | {first + int(slot) for slot in np.flatnonzero(more)})

    patch.setattr(PoissonSampler, "draw", draw)


def shuffled(patch: pytest.MonkeyPatch) -> None:
    """Batches of one size, through the data again and again."""
    orders: dict[int, list[int]] = {}

    def draw(self: PoissonSampler) -> list[int]:
        order = orders.setdefault(id(self), [])
        size = round(self._rate * self._num_slots)
        if len(order) < size:
            order += np.argsort(self._stream.uniform(self._num_slots)).tolist()
        taken, order[:] = order[:size], order[size:]
        return sorted(set(taken))

    patch.setattr(PoissonSampler, "draw", draw)


def noise_of_the_data(patch: pytest.MonkeyPatch) -> None:
    """One variate more is drawn for every unit."""

    def summed(self: StepEngine, *batches: Any) -> Any:
        result = SUM(self, *batches)
        self._noise.draw(1 + result[1].units)
        return result

    patch.setattr(StepEngine, "clipped_sum", summed)


def parts_of_the_sum(value: Callable[[list[Any]], list[Any]]) -> Change:
    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StepEngine, "clipped_sum", lambda self, batches, *rest: SUM(self, value(list(batches)), *rest))

    return change


def divided_by_who_came(patch: pytest.MonkeyPatch) -> None:
    def step(self: StepEngine, batches: Any, *canaries: Any) -> Any:
        flat_P, seen = self.clipped_sum(batches, *canaries)
        self._apply(self._release(flat_P) * self._schedule.expected_batch_size / max(1, seen.units))
        return seen

    patch.setattr(StepEngine, "step", step)


def rows_clipped_each(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, losses: Any, batch: Any, *rest: Any) -> Any:
        rows = tuple(row._replace(unit=number) for number, row in enumerate(batch.rows))
        return ADD(self, losses, replace(batch, rows=rows, num_units=len(rows), goes_on=False), *rest)

    patch.setattr(PerUnitClipper, "add", add)


def noise_follows_the_batch(patch: pytest.MonkeyPatch) -> None:
    """Smaller noise where fewer units came; on average it is right."""
    came: list[float] = [1.0]

    def summed(self: StepEngine, batches: Any, *canaries: Any) -> Any:
        result = SUM(self, batches, *canaries)
        came[0] = (result[1].units + 1) / (self._schedule.expected_batch_size + 1)
        return result

    patch.setattr(StepEngine, "clipped_sum", summed)
    patch.setattr(GaussianNoise, "draw", lambda self, size: DRAW(self, size) * came[0])


def none_on_the_last_four(noise: Tensor) -> Tensor:
    noise[-4:] = 0.0  # the bias of four
    return noise


def twice_the_same(noise: Tensor) -> Tensor:
    half = len(noise) // 3
    noise[half : 2 * half] = noise[:half]
    return noise


def laplace(noise: Tensor) -> Tensor:
    uniform = torch.special.ndtr(noise.double()) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs()).clamp(min=-40) / 2**0.5).float()


NOISE: dict[str, Change] = {
    "noise scaled by the wrong batch size": scaled_by_the_batch,
    "constant noise seed": constant_seed,
    "the noise of one step used again": one_step_again,
    "no noise on the bias": drawn(none_on_the_last_four),
    "two layers share their noise": drawn(twice_the_same),
    "laplace noise of the same variance": drawn(laplace),
    "noise that follows the realised batch": noise_follows_the_batch,
}
SAMPLING: dict[str, Change] = {
    "canaries at ten times q": canaries_at_ten_times_q,
    "shuffled batches of one size": shuffled,
}
SUMS: dict[str, Change] = {
    "a pass dropped": parts_of_the_sum(lambda batches: batches[1:] if len(batches) > 1 else batches),
    "a pass doubled": parts_of_the_sum(lambda batches: batches + batches[-1:] if len(batches) > 1 else batches),
}
