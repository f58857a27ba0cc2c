"""Epsilon over steps by four ways of composing the same steps, so that a reader sees what the accountant buys.

Comes in: a Plan. Goes out: a ``Comparison`` of four curves. Must not see data, and must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpllm.errors import ConfigError, Refused
from dpllm.planning.signal import interval
from dpllm.privacy import accounting
from dpllm.privacy.accounting import Event
from dpllm.privacy.plan import Plan

POINTS = 25


@dataclass(frozen=True)
class Comparison:
    """Epsilon at the Plan's delta after some numbers of steps; None where an accountant does not know the event.

    Attributes:
        num_steps: In rising order, from 1 to T.
        naive: Basic composition.
        strong: Advanced composition.
        rdp: The moments accountant.
        pld: Privacy-loss distributions.
    """

    num_steps: tuple[int, ...]
    naive: tuple[float, ...]
    strong: tuple[float, ...]
    rdp: tuple[float, ...] | None
    pld: tuple[float, ...]


def compare(plan: Plan, points: int = POINTS) -> Comparison:
    """Composes 1 to T steps of the Plan in four ways, all at the Plan's delta.

    A single step's epsilon is that of PLD, at delta / t for naive composition and at delta / (2 t) for strong composition,
    whose other half of delta is the slack of the theorem. So the curves differ by composition alone.

    Args:
        plan: The promise.
        points: How many numbers of steps, spread evenly in log t.

    References:
        naive: Dwork et al. 2006, Our Data, Ourselves. strong: Dwork, Rothblum and Vadhan 2010, Boosting and Differential
        Privacy, theorem III.3. rdp: Abadi et al. 2016, Deep Learning with Differential Privacy; Mironov 2017, Renyi
        Differential Privacy. pld: Doroshenko et al. 2022, Connect the Dots.
    """
    steps = spread(plan.schedule.num_steps, points)
    delta = plan.delta

    def single(at: float) -> float:
        return _epsilon(plan, 1, at)

    return Comparison(
        num_steps=steps,
        naive=tuple(naive(single, count, delta) for count in steps),
        strong=tuple(strong(single, count, delta) for count in steps),
        rdp=_rdp(plan, steps),
        pld=tuple(_epsilon(plan, count, delta) for count in steps),
    )


def naive(single: Callable[[float], float], num_steps: int, delta: float) -> float:
    """T epsilon_1 at delta / T: epsilons and deltas add up.

    Args:
        single: Epsilon of one step at a delta.
        num_steps: T >= 1.
        delta: Of all steps together.
    """
    return num_steps * single(delta / num_steps)


def strong(single: Callable[[float], float], num_steps: int, delta: float) -> float:
    """epsilon_1 sqrt(2 T ln(2 / delta)) + T epsilon_1 (e^epsilon_1 - 1), with epsilon_1 at delta / (2 T).

    Args:
        single: Epsilon of one step at a delta.
        num_steps: T >= 1.
        delta: Of all steps together; half of it is the slack, half is divided among the steps.
    """
    one = single(delta / (2 * num_steps))
    if one > 700:  # e^one is no float
        return math.inf
    return one * math.sqrt(2 * num_steps * math.log(2 / delta)) + num_steps * one * math.expm1(one)


def spread(most: int, points: int) -> tuple[int, ...]:
    """Whole numbers from 1 to ``most``, evenly spread in their logarithm, both ends included."""
    return tuple(sorted({round(most ** (index / max(1, points - 1))) for index in range(points)} | {1, most}))


def _epsilon(plan: Plan, num_steps: int, delta: float, accountant: str = "pld") -> float:
    event: Event = {**plan.event, "count": num_steps}
    width = interval(plan.schedule.sampling_rate, plan.noise_multiplier)  # the same for every curve
    return accounting.epsilon(event, delta, plan.neighbouring_relation, accountant, width)


def _rdp(plan: Plan, steps: tuple[int, ...]) -> tuple[float, ...] | None:
    try:
        return tuple(_epsilon(plan, count, plan.delta, "rdp") for count in steps)
    except (ConfigError, Refused):  # dp-accounting has no Renyi divergence of a mixture of Gaussians
        return None
