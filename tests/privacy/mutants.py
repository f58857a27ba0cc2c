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


def around(where: Any, name: str, change: Callable[..., Any]) -> Change:
    """``change`` is called in place of a function or method, with that function before its arguments."""
    real = getattr(where, name)
    return lambda patch: patch.setattr(where, name, lambda *arguments: change(real, *arguments))


def drawn(value: Callable[[Tensor], Tensor]) -> Change:
    """Noise as it should be, changed."""
    return around(GaussianNoise, "draw", lambda draw, self, size: value(draw(self, size)))


def scaled_by_the_batch(release: Any, self: StepEngine, flat_P: Tensor) -> Tensor:
    """The noise is divided by B before the sum is."""
    with pytest.MonkeyPatch.context() as inner:
        drawn(lambda noise: noise / self._schedule.expected_batch_size)(inner)
        return release(self, flat_P)


def constant_seed(draw: Any, self: GaussianNoise, size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(42).standard_normal(size, dtype=np.float32))


def one_step_again(patch: pytest.MonkeyPatch) -> None:
    """Of all steps, the fortieth has the noise of the third."""
    seen: dict[int, list[Tensor]] = {}

    def again(draw: Any, self: GaussianNoise, size: int) -> Tensor:
        noise = seen.setdefault(id(self), [])
        noise.append(draw(self, size))
        return (noise[2] if len(noise) == 40 else noise[-1]).clone()  # what is returned is scaled in place

    around(GaussianNoise, "draw", again)(patch)


def canaries_at_ten_times_q(draw: Any, self: PoissonSampler) -> list[int]:
    """The later half of the slots."""
    first = self._num_slots // 2
    joined = {slot for slot in draw(self) if slot < first}
    more = self._stream.uniform(self._num_slots - first) < min(1.0, 10 * self._rate)
    return sorted(joined | {first + int(slot) for slot in np.flatnonzero(more)})


def shuffled(patch: pytest.MonkeyPatch) -> None:
    """Batches of one size, through the data again and again."""
    orders: dict[int, list[int]] = {}

    def next_ones(draw: Any, self: PoissonSampler) -> list[int]:
        order = orders.setdefault(id(self), [])
        size = round(self._rate * self._num_slots)
        if len(order) < size:
            order += np.argsort(self._stream.uniform(self._num_slots)).tolist()
        taken, order[:] = order[:size], order[size:]
        return sorted(set(taken))

    around(PoissonSampler, "draw", next_ones)(patch)


def one_variate_more_for_every_unit(summed: Any, self: StepEngine, *batches: Any) -> Any:
    result = summed(self, *batches)
    self._noise.draw(1 + result[1].units)
    return result


def parts_of_the_sum(value: Callable[[list[Any]], list[Any]]) -> Change:
    return around(StepEngine, "clipped_sum", lambda summed, self, some, *rest: summed(self, value(list(some)), *rest))


def divided_by_who_came(step: Any, self: StepEngine, batches: Any, *canaries: Any) -> Any:
    flat_P, seen = self.clipped_sum(batches, *canaries)
    self._apply(self._release(flat_P) * self._schedule.expected_batch_size / max(1, seen.units))
    return seen


def rows_clipped_each(add: Any, self: PerUnitClipper, losses: Any, batch: Any, *rest: Any) -> Any:
    """The losses are those of the whole: a pair of answers has one."""
    rows = tuple(row._replace(unit=number) for number, row in enumerate(batch.rows))
    apart = replace(batch, rows=rows, num_units=len(rows), goes_on=False)
    return add(self, lambda _: losses(batch), apart, *rest)


def noise_follows_the_batch(patch: pytest.MonkeyPatch) -> None:
    """Smaller noise where fewer units came; on average it is right."""
    came: list[float] = [1.0]

    def counting(summed: Any, self: StepEngine, *batches: Any) -> Any:
        result = summed(self, *batches)
        came[0] = (result[1].units + 1) / (self._schedule.expected_batch_size + 1)
        return result

    around(StepEngine, "clipped_sum", counting)(patch)
    drawn(lambda noise: noise * came[0])(patch)


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
    "noise scaled by the wrong batch size": around(StepEngine, "_release", scaled_by_the_batch),
    "constant noise seed": around(GaussianNoise, "draw", constant_seed),
    "the noise of one step used again": one_step_again,
    "no noise on the bias": drawn(none_on_the_last_four),
    "two layers share their noise": drawn(twice_the_same),
    "laplace noise of the same variance": drawn(laplace),
    "noise that follows the realised batch": noise_follows_the_batch,
}
SAMPLING: dict[str, Change] = {
    "canaries at ten times q": around(PoissonSampler, "draw", canaries_at_ten_times_q),
    "shuffled batches of one size": shuffled,
}
SUMS: dict[str, Change] = {
    "a pass dropped": parts_of_the_sum(lambda batches: batches[1:] if len(batches) > 1 else batches),
    "a pass doubled": parts_of_the_sum(lambda batches: batches + batches[-1:] if len(batches) > 1 else batches),
}
