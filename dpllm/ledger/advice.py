"""What would fit where a run does not: fewer steps, or more noise.

Comes in: an event, and whether another would fit. Goes out: a sentence. Knows neither budgets nor gates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from dpllm.ledger.values import ONE_RELEASE
from dpllm.privacy import accounting, events
from dpllm.privacy.accounting import Event

COARSE_INTERVAL = 1e-3  # PLD's, for the search: an upper bound like the fine one
MOST_NOISE = 1e3  # times the noise of what does not fit


def what_fits(event: Event, fits: Callable[[Event, float], bool], whose: str = "") -> str:
    """The largest number of steps, and the smallest noise multiplier, that would fit.

    Args:
        event: What does not fit.
        fits: Whether another event would, by accounting at an interval of which a wide one is quick and never too small.
        whose: Of which run is spoken.
    """
    if event["type"] != "self_composed" or event["event"]["type"] not in ONE_RELEASE or event["count"] < 1:
        return "Use other data."
    count = int(event["count"])
    steps = _most_steps(event, count, fits)
    advice = [f"at most {steps} steps{whose} at this noise" if steps else f"not even one step{whose} at this noise"]
    factor = _least_factor(event, fits)
    if factor is None:
        advice.append("no noise multiplier up to a thousand times this one")
    else:
        sigma = math.ceil(noise_multiplier(event) * factor * 1e4) / 1e4
        advice.append(f"a noise multiplier of at least {sigma:.4f} for {count} steps")
    return (
        f"What would fit: {', or '.join(advice)}. Ask for less (a lower privacy.epsilon, or more noise where the recipe sets "
        "it), train fewer steps, or use other data."
    )


def _most_steps(event: Event, count: int, fits: Callable[[Event, float], bool]) -> int:
    steps = bisect_left(range(1, count), True, key=lambda n: not fits({**event, "count": n}, COARSE_INTERVAL))
    while steps + 1 < count and fits({**event, "count": steps + 1}, accounting.FINE_INTERVAL):
        steps += 1
    return steps


def _least_factor(event: Event, fits: Callable[[Event, float], bool]) -> float | None:
    high = 2.0
    while not fits(events.scaled(event, high), COARSE_INTERVAL):
        high *= 2
        if high > MOST_NOISE:
            return None
    low = high / 2
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(events.scaled(event, middle), COARSE_INTERVAL) else (middle, high)
    return high


def noise_multiplier(event: Event) -> float:
    """Of the Gaussian inside; for the joint event of adaptive clipping, of the Gaussian of equal cost."""
    if "count_noise_multiplier" in event:
        return events.joint_noise_multiplier(event["gradient_noise_multiplier"], event["count_noise_multiplier"])
    return float(event["noise_multiplier"]) if "noise_multiplier" in event else noise_multiplier(event["event"])
