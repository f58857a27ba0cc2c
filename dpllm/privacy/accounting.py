"""What a mechanism costs, and the noise that meets a target: events in, epsilon out; a target in, a noise multiplier out.

Comes in: events, targets. Goes out: the stated epsilon, the figures of other accountants, a refusal where they contradict each
other; calibrated noise. Imports neither torch nor an accountant before one is needed.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from typing import Annotated, Any, NoReturn, get_args

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import events
from dpllm.privacy.events import BELOW_ONE, Event, compose, count_releases, dp_sgd_event, number
from dpllm.privacy.parts import Parts, accountants, parts_of, require
from dpllm.privacy.privacy_loss import Relation, epsilon_at, privacy_loss
from dpllm.privacy.renyi import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER, rdp_epsilon
from dpllm.records import NotNegative, Positive, Record

__all__ = ["calibrate_noise_multiplier", "cross_check", "curve", "epsilon", "epsilon_by_accountant"]
__all__ += ["FINE_INTERVAL", "Event", "Relation", "accountants", "compose", "count_releases", "dp_sgd_event"]
__all__ += ["finite", "versions"]

FINE_INTERVAL = 1e-4  # discretisation of the privacy loss, for every epsilon that is stated
PRV_MAX_POINTS = 4_000_000  # about 0.8 GB
MIN_EPSILON = 1e-6  # of whatever reads data: 0 would be read as no loss, where delta alone holds it
MIN_COMPARED_DELTA = 1e-10  # delta, below which round-off is larger than the gap between accountants
PRV_GAP = 0.05  # how far PRV may lie above PLD: its own error bound is 0.01


def stored(allowed: Callable[[Any], object] = bool) -> tuple[Any, ...]:
    """How an event that is ``allowed`` stands in a file: read once with it, and a malformed one makes the file invalid."""

    def read_allowed(value: Any) -> Any:
        try:
            event = value if isinstance(value, Event) else events.read(value)
            if not allowed(event):
                raise ConfigError(f"{event.to_json()} is no event of what this is about.")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return event

    written = PlainSerializer(lambda event: event.to_json())
    return PlainValidator(read_allowed), written, WithJsonSchema({"type": "object", "additionalProperties": True})


StoredEvent = Annotated[Event, *stored()]
"""An event as a field of a file."""
StoredTrainingEvent = Annotated[events.RunEvent | events.RepeatAndSelect, *stored(events.of_training)]
"""That of a run's steps, or of the best of several runs."""


class Accountant(Record):
    """What computed epsilon."""

    interval: Positive
    """Discretisation of the privacy loss."""
    name: str
    """Name."""
    version: str
    """Version."""


class CrossCheck(Record):
    """A second accountant's epsilon for the same event; null where none knows it."""

    epsilon: NotNegative
    """Its epsilon."""
    name: str
    """Name."""
    version: str
    """Version."""


def epsilon(
    event: Event, delta: float, relation: Relation, accountant: str = "pld", interval: float = FINE_INTERVAL
) -> float:
    """Epsilon of `event` at `delta`; infinite where no finite value can be certified.

    Args:
        event: what was released.
        delta: in (0, 1).
        relation: the neighbouring relation.
        accountant: "pld" (tight; the one stated), "rdp" (looser) or "prv" (Opacus, with torch).
        interval: PLD's discretisation; a wider one is faster, and larger rather than smaller.

    Raises:
        ConfigError: a malformed event or value, or an accountant not offered, failing here or not knowing the event.

    Guarantee:
        An upper bound on the smallest epsilon for which doing all of `event` is (epsilon, delta)-DP, if what is done was fixed
        without looking at the results, up to a thousandth of it by round-off. PLD takes the worse of both directions, and is
        infinite where delta is smaller than the round-off of so many steps, 2e-16 for each.

    References:
        pld: Doroshenko et al. 2022, "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions". rdp:
        see ``dpllm.privacy.renyi``. prv, and against gdp: Gopi, Lee and Wutschitz 2021, "Numerical Composition of
        Differential Privacy", section 1.
    """
    number("privacy.delta", delta, 0.0, BELOW_ONE)
    if relation not in get_args(Relation):
        raise ConfigError(
            f"neighbouring relation {relation!r} is unknown. Use one of: {', '.join(get_args(Relation))}."
        )
    if accountant == "gdp":
        raise ConfigError(
            "accountant 'gdp' rests on a central limit approximation that understates epsilon (0.04 for a true 0.20 in one "
            "step), so its figure is not a guarantee. Use pld."
        )
    if accountant not in ("pld", "rdp", "prv"):
        raise ConfigError(f"accountant {accountant!r} is unknown. Use pld, rdp or prv.")
    parts = parts_of(event)
    if parts == Parts():
        return 0.0
    if relation == "label_changed" and parts._replace(bounds=()) != Parts():
        raise ConfigError(
            "under label_changed only releases of known epsilon are accounted, such as randomised response: a changed label "
            "moves a clipped sum by up to 2 C. Use zero_out."
        )
    require(event, accountant)
    if accountant == "rdp":
        cost = rdp_epsilon(parts, delta)
    else:
        cost = _pld(parts, delta, relation, interval) if accountant == "pld" else _prv(parts, delta)
    return max(cost, MIN_EPSILON)


@lru_cache(maxsize=1024)
def _pld(parts: Parts, delta: float, relation: Relation, interval: float) -> float:
    try:
        return epsilon_at(delta, privacy_loss(parts, relation, interval), parts)
    except OverflowError:  # the loss of hardly any noise does not fit a float
        return math.inf


def _prv(parts: Parts, delta: float) -> float:
    # Opacus' own mesh (prv.py, _get_domain): its arrays grow with epsilon and sqrt(T).
    steps = sum(part.times for part in parts.sampled)
    mesh = 0.01 / math.sqrt(steps * math.log(12_000 / delta) / 2)
    try:
        points = 2 * (rdp_epsilon(parts, delta / 4000) + 3) / mesh
        if points > PRV_MAX_POINTS:
            raise MemoryError(f"it needs {points:.0f} points")
        import numpy as np
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        accountant.history = [(part.noise_multiplier, part.probability, part.times) for part in parts.sampled]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            value = float(accountant.get_epsilon(delta, eps_error=0.01))
        if not math.isfinite(value):
            raise ValueError(f"it found {value}")
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"accountant 'prv' cannot evaluate this event at delta {delta:g} ({error}). Use pld."
        ) from error
    return value


def versions() -> dict[str, str]:
    """Name and version of the library behind every stated epsilon."""
    return {"name": "dp-accounting", "version": metadata.version("dp-accounting")}


def curve(event: Event, relation: Relation, deltas: Sequence[float]) -> list[tuple[float, float]]:
    """(delta, epsilon) at several deltas; one computation for all of them. Raises as ``epsilon`` does."""
    return [(float(delta), epsilon(event, delta, relation)) for delta in deltas]


def finite(value: float) -> float | None:
    """An epsilon as JSON holds it: None where none can be certified."""
    return value if math.isfinite(value) else None


def epsilon_by_accountant(event: Event, delta: float, relation: Relation, *, prv: bool = False) -> dict[str, float]:
    """Epsilon by each accountant that knows `event`: "pld", "rdp" and, if ``prv`` is set, "prv" -> epsilon.

    Opacus' PRV imports torch, and is left out where it cannot answer. Raises as ``epsilon`` does, and Refused where two
    contradict each other.
    """
    knowing = accountants(event)
    values = {"pld": epsilon(event, delta, relation)}
    if "rdp" in knowing:
        values["rdp"] = epsilon(event, delta, relation, "rdp")
    if prv and "prv" in knowing:
        with suppress(ConfigError):
            values["prv"] = epsilon(event, delta, relation, "prv")
    if math.isfinite(values["pld"]):
        for name in values.keys() - {"pld"}:
            _compare(values["pld"], delta, name, values[name], math.inf if name == "rdp" else PRV_GAP)
    return values


def cross_check(event: Event, delta: float, relation: Relation, stated: float) -> CrossCheck | None:
    """A second accountant's epsilon for `event`, None where one alone knows it; a refusal where it contradicts the first.

    Where PRV does not know the event or cannot answer (a tiny delta, or gigabytes of memory for very many steps) RDP stands in,
    which may be looser but not below PLD.

    Raises:
        Refused: the two accountants contradict each other, or `stated` is infinite.
    """
    if math.isinf(stated):
        raise Refused(
            f"no finite epsilon can be certified at delta {delta:g}. Raise privacy.delta or privacy.noise_multiplier."
        )
    knowing = accountants(event)
    if "rdp" not in knowing:
        return None
    try:
        name, package, largest_gap = "opacus-prv", "opacus", PRV_GAP
        value = epsilon(event, delta, relation, "prv")
    except ConfigError:
        reason = "prv cannot answer" if "prv" in knowing else "prv does not know this event"
        name, package, largest_gap = f"dp-accounting-rdp ({reason})", "dp-accounting", math.inf
        value = epsilon(event, delta, relation, "rdp")
    _compare(stated, delta, name, value, largest_gap)
    return CrossCheck(name=name, version=metadata.version(package), epsilon=value)


def _compare(pld: float, delta: float, name: str, value: float, gap: float) -> None:
    # PRV adds its error bound of 0.01, and over a grid of mechanisms lies 0.0065 to 0.0295 above PLD; -0.001 to +0.05 is
    # accepted (or a thousandth, of an epsilon above 50). Below MIN_COMPARED_DELTA both are ruled by round-off: at delta 1e-13
    # PLD was seen 1 of 9 above, at 1e-12 PRV 0.12 of 13 above the other.
    if delta >= MIN_COMPARED_DELTA and not pld - 1e-3 <= value <= pld + max(gap, 1e-3 * pld):
        raise Refused(
            f"epsilon {pld:.4f} at delta {delta:g} is contradicted by {name}: {value:.4f}. No guarantee can be given until they "
            "agree. Compute the plan again, and report the event if the difference stays."
        )


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    num_steps: int,
    relation: Relation,
    group_size: int = 1,
    *,
    rough: bool = False,
) -> float:
    """The smallest noise multiplier, in steps of 1e-4, that meets `target_epsilon`.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sampling_rate: as of ``dp_sgd_event``.
        num_steps: logical batches, >= 1.
        relation: the neighbouring relation.
        group_size: as of ``dp_sgd_event``.
        rough: to compare choices: several times faster, about a hundredth off, and without the guarantee.

    Raises:
        ConfigError: a value is out of range, or no noise multiplier from 0.05 to 1e4 meets the target.

    Guarantee:
        For the sigma returned, `epsilon(dp_sgd_event(q, sigma, T, group_size), delta, relation)` is at most the target;
        for sigma - 1e-3 it is not.
    """
    dp_sgd_event(sampling_rate, 1.0, num_steps, group_size)
    number("num_steps", num_steps, 0.0)
    number("privacy.epsilon", target_epsilon, 0.0)
    number("privacy.delta", delta, 0.0, BELOW_ONE)
    return _calibrate(target_epsilon, delta, sampling_rate, num_steps, relation, group_size, rough)


def _calibrate(
    target: float, delta: float, q: float, num_steps: int, relation: Relation, group_size: int, rough: bool
) -> float:
    """Secant steps in log sigma on a coarse PLD, then in whole numbers of 1e-4 on the fine one, both within brackets."""
    too_weak = "A guarantee that weak protects nobody: lower epsilon or delta."

    def refuse(fix: str) -> NoReturn:
        raise ConfigError(
            f"epsilon {target:g} at delta {delta:g} is not reachable with sampling rate {q:g} "
            f"and {num_steps} steps by a noise multiplier of {MIN_NOISE_MULTIPLIER:g} to "
            f"{MAX_NOISE_MULTIPLIER:g}. {fix}"
        )

    def cost(sigma: float, interval: float = FINE_INTERVAL) -> float:
        if sigma < MIN_NOISE_MULTIPLIER:
            refuse(too_weak)
        return _pld(parts_of(dp_sgd_event(q, sigma, num_steps, group_size)), delta, relation, interval)

    # Both ends of what is reachable come first. Without any noise, delta is at most the probability of being drawn at all.
    if q < 1 and -math.expm1(num_steps * group_size * math.log1p(-q)) <= delta:
        refuse(too_weak)
    if not rough and cost(MAX_NOISE_MULTIPLIER) > target:
        refuse("Raise epsilon or delta, or take fewer steps.")
    # Start from the central limit theorem: mu of the Gaussian mechanism, then its sigma. A group of k is taken for one
    # thing at distance k q / (1 - (1 - q)^k) that is sampled with the probability that any of it is.
    any_of_it = -math.expm1(group_size * math.log1p(-q)) if q < 1 else 1.0
    tail = 2 * math.log(1 / delta)
    mu = math.sqrt(tail + 2 * target) - math.sqrt(tail)
    sigma = 1 / math.sqrt(math.log1p(mu**2 / (any_of_it**2 * num_steps)))
    sigma = min(sigma * group_size * q / any_of_it, MAX_NOISE_MULTIPLIER / 2)
    # The standard deviation of one step's privacy loss, about: a coarse bucket is at most a tenth of it.
    spread = q * math.sqrt(math.expm1(min(sigma**-2, 50.0)))
    coarse = min(max(spread / 10, FINE_INTERVAL), 1e-3)
    sigma, slope = _near(lambda sigma: cost(sigma, coarse), target, sigma, 1e-3 if rough else 1e-5)
    if rough:
        return sigma
    return _on_grid(cost, target, sigma, slope) or refuse(too_weak)


def _near(cost: Callable[[float], float], target: float, sigma: float, tolerance: float) -> tuple[float, float]:
    """The sigma whose cost is the target, to a share of about ``tolerance``, and the slope of log cost over log sigma there."""
    # Epsilon is 0 beyond some sigma where delta is large, so that a secant alone would swing from there to here and back.
    slope, previous = -1.5, (math.nan, math.nan)
    low, high = 0.0, MAX_NOISE_MULTIPLIER
    for _ in range(60):
        value = cost(sigma)
        error = math.log(value / target) if value > 0 else -math.inf
        low, high = (sigma, high) if error > 0 else (low, sigma)
        if math.isfinite(error):
            rise = (error - previous[1]) / math.log(sigma / previous[0])
            slope = min(max(rise, -1000.0), -0.3) if math.isfinite(rise) else slope
            previous = sigma, error
        guess = sigma * math.exp(min(max(-error / slope, -0.7), 0.7))
        if low and not low < guess < high:
            guess = math.sqrt(low * high)
        sigma, last = guess, sigma
        if abs(math.log(sigma / last)) < tolerance:
            break
    return sigma, slope


def _on_grid(cost: Callable[[float], float], target: float, sigma: float, slope: float) -> float | None:
    """The smallest multiple of 1e-4 that meets the target; None where even the least noise does."""
    per_grid = -slope * target / sigma * 1e-4
    lowest, high = round(MIN_NOISE_MULTIPLIER * 1e4), round(MAX_NOISE_MULTIPLIER * 1e4)
    grid, low = math.ceil(sigma * 1e4), lowest - 1  # `low` exceeds the target (or is below the range), `high` meets it
    for turn in itertools.count(1):
        if high - low <= 1:
            break
        spare = target - cost(grid / 1e4)
        if 0 <= spare < per_grid:  # one less exceeds the target: epsilon is convex in sigma
            return grid / 1e4
        low, high = (low, grid) if spare >= 0 else (grid, high)
        guess = grid - math.floor(max(spare / per_grid, -1e6)) if turn < 5 else (low + high) // 2
        grid = min(max(guess, low + 1), high - 1)
    return high / 1e4 if high > lowest else None
