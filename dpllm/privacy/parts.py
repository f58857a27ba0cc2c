"""Reduces every accounting event to parts, and says which accountants support them.

Comes in: events. Goes out: parts, the dp-accounting event of equal cost, a refusal of unsupported events. Imports an accountant
only when needed.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dpllm.errors import ConfigError
from dpllm.privacy import events
from dpllm.privacy.events import Event, Imported, check_events

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class SampledSums(NamedTuple):
    """``times`` Gaussian sums over Poisson samples, with respect to ``group_size`` rows together."""

    probability: float
    noise_multiplier: float
    group_size: int
    times: int


class Selections(NamedTuple):
    """``times`` selections of the best of a random number of runs, each with one of ``options``."""

    options: tuple[Parts, ...]
    mean: float
    distribution: str
    times: int


class Bounds(NamedTuple):
    """``times`` releases, imported or ``pure_dp``, with known epsilon and delta."""

    epsilon: float
    delta: float
    times: int


class Draws(NamedTuple):
    """``times`` adaptive draws of bounded range."""

    range: float
    times: int


class Parts(NamedTuple):
    """The parts of an event. Composition commutes, so equal parts are counted together and sorted."""

    sampled: tuple[SampledSums, ...] = ()
    selected: tuple[Selections, ...] = ()
    bounds: tuple[Bounds, ...] = ()
    draws: tuple[Draws, ...] = ()


def parts_of(event: Event) -> Parts:
    """The parts that an accountant adds up."""
    check_events(event)
    return _parts_of(event)


@lru_cache(maxsize=65_536)
def _parts_of(event: Event) -> Parts:
    sampled: Counter[tuple[float, float, int]] = Counter()
    selected: Counter[tuple[tuple[Parts, ...], float, str]] = Counter()
    bounds: Counter[tuple[float, float]] = Counter()
    draws: Counter[float] = Counter()

    def walk(part: Event, times: int) -> None:
        match part:
            case events.Gaussian():
                sampled[(1.0, float(part.noise_multiplier), 1)] += times
            case events.PoissonSampled():
                rate, sigma, size = float(part.probability), float(part.event.noise_multiplier), part.group_size
                # Without sampling, the whole group is in every sum: one Gaussian with that sensitivity.
                sampled[(rate, sigma, size) if rate < 1 else (1.0, sigma / size, 1)] += times
            case events.CyclicPoisson():
                walk(events.PoissonSampled(part.probability, part.event), times * -(-part.count // part.bands))
            case events.SelfComposed():
                walk(part.event, times * part.count)
            case events.Composed():
                for inner in part.events:
                    walk(inner, times)
            case events.RepeatAndSelect():
                options = tuple(sorted(map(_parts_of, part.events)))
                if any(option != Parts() for option in options):
                    selected[(options, float(part.mean), part.distribution)] += times
            case Imported() | events.PureDP():
                cost = float(part.epsilon), float(part.delta if isinstance(part, Imported) else 0.0)
                if any(cost):
                    bounds[cost] += times
            case events.BoundedRange():
                draws[float(part.range)] += times * part.count

    walk(event, 1)
    return Parts(
        tuple(sorted(SampledSums(*key, n) for key, n in sampled.items() if n)),
        tuple(sorted(Selections(*key, n) for key, n in selected.items() if n)),
        tuple(sorted(Bounds(*key, n) for key, n in bounds.items() if n)),
        tuple(sorted(Draws(key, n) for key, n in draws.items() if n)),
    )


def imported_delta(event: Event) -> float:
    """The sum of the deltas that `event` imports, which reduce the delta left for everything else."""
    return sum(part.delta * part.times for part in parts_of(event).bounds)


def added(*releases: Event) -> float:
    """The joint epsilon of releases with known epsilon and delta 0, even adaptive ones: the sum."""
    return math.fsum(part.epsilon * part.times for event in releases for part in parts_of(event).bounds)


def accountants(event: Event) -> frozenset[str]:
    """Which of "pld", "rdp" and "prv" support every part of `event`; "pld" supports all parts."""
    return _accountants(parts_of(event))


def _accountants(parts: Parts) -> frozenset[str]:
    within = [_accountants(option) for best in parts.selected for option in best.options]
    # Selection needs a Renyi curve, which an imported delta does not have.
    unknown = any(part.delta for best in parts.selected for option in best.options for part in option.bounds)
    if unknown or any(part.group_size > 1 for part in parts.sampled):
        return frozenset({"pld"})
    alone = frozenset({"pld", "rdp"} if parts.bounds or parts.draws or parts.selected else {"pld", "rdp", "prv"})
    return alone.intersection(*within)


def require(event: Event, accountant: str) -> None:
    """Refuses, with a ConfigError, an event that an accountant does not support."""
    if accountant not in (known := accountants(event)):
        why = "has parts of another kind than sums over samples" if "rdp" in known else "samples rows of one unit apart"
        raise ConfigError(
            f"accountant {accountant!r} does not support this event, which {why}. Use {' or '.join(sorted(known))}."
        )


def dp_event_of(parts: Parts) -> DpEvent:
    """The dp-accounting event of equal cost; ConfigError for imported releases, bounded range and selections."""
    import dp_accounting as dp
    from dp_accounting.dp_event import MixtureOfGaussiansDpEvent

    if parts.bounds or parts.draws or parts.selected:
        raise ConfigError(
            "dp-accounting has no event for an imported epsilon and delta, draws of bounded range or the best of several runs. "
            "Use epsilon() instead."
        )
    runs: list[DpEvent] = []
    for part in parts.sampled:
        step = dp.GaussianDpEvent(part.noise_multiplier)
        if part.group_size > 1:
            from scipy.stats import binom

            many = range(part.group_size + 1)
            weights = binom.pmf(many, part.group_size, part.probability)
            step = MixtureOfGaussiansDpEvent(part.noise_multiplier, list(map(float, many)), list(map(float, weights)))
        elif part.probability < 1.0:
            step = dp.PoissonSampledDpEvent(part.probability, step)
        runs.append(dp.SelfComposedDpEvent(step, part.times))
    return runs[0] if len(runs) == 1 else dp.ComposedDpEvent(runs)
