"""What was released, as frozen values: the family of accounting events.

Comes in: numbers; JSON of plan.json, the ledger and published statements, read once by ``read``. Goes out: events and their
JSON. Knows no epsilon, no model and no data; ``parts`` adds events up.

An event is stored in plan.json and in the ledger, to be accounted again years later. Fields are exact and meanings
never change. A mechanism is one noisy sum to which a unit adds a vector of norm at most the sensitivity:

    {"type": "gaussian", "noise_multiplier": 1.1}                        noise over sensitivity
    {"type": "adaptive_clipping", "gradient_noise_multiplier": a,        a sum of gradients over C, and of (b - 1/2), where b
        "count_noise_multiplier": b}                                     is 0 or 1, released together; as a gaussian of
                                                                         (a^-2 + (2b)^-2)^-1/2 (Andrew et al. 2021)

What is done with a mechanism, or with an event:

    {"type": "poisson_sampled", "probability": 0.02, "event": MECHANISM}     over a fresh Poisson sample
    {"type": "poisson_sampled_group", "probability": 0.02, "group_size": 4, "event": MECHANISM}
                                        the same for 4 rows or units together, each of which joins by its own coin
    {"type": "cyclic_poisson", "bands": 8, "count": 150, "probability": 0.16, "event": {"type": "gaussian", ...}}
                                        150 steps of banded noise, over fresh Poisson samples of 8 groups in turn (``banded``)
    {"type": "self_composed", "count": 150, "event": EVENT}
    {"type": "composed", "events": [EVENT, ...]}
    {"type": "repeat_and_select", "event": EVENT, "mean": 10, "distribution": "geometric"}
                                        EVENT ran a random number of times, and only the best result left
    {"type": "imported", "epsilon": 1.0, "delta": 1e-6}     made elsewhere, and no more is known
    {"type": "pure_dp", "epsilon": 0.25}    one release with this epsilon and no delta, such as discrete Laplace noise on a count

Guarantee:
    ``poisson_sampled_group`` bounds what changes if up to ``group_size`` rows are taken out, each clipped on its own: the
    number of them in a sample is Binomial(group_size, probability), so that one step is dominated by a mixture of
    Gaussians. ``cyclic_poisson`` costs ceil(count / bands) ``poisson_sampled`` sums at its probability, that of its one group
    (proof: ``dpllm.privacy.banded``). ``repeat_and_select`` holds if the number of runs was drawn, before the first of them,
    from the distribution named (geometric and logarithmic on 1, 2, ...; poisson may give 0 runs and then nothing leaves), of
    this mean and not seen by anyone; if each run is EVENT with fresh randomness; if the runs differ at most in
    hyper-parameters whose list was fixed in advance and from which each run draws at random; if the score that decides is
    part of what EVENT accounts for, or computed from public data; and if nothing of the other runs leaves.
    ``imported`` and ``pure_dp`` hold under the neighbouring relation and for the unit with which they are composed.

References:
    Choquette-Choo et al. 2023, "Privacy Amplification for Matrix Mechanisms", corollary 4.7 (mixtures). Charles et al.
    2024, "Fine-Tuning Large Language Models with User-Level Differential Privacy" (example-level sampling). Choquette-Choo et
    al. 2023, "(Amplified) Banded Matrix Factorization", theorem 4 (cyclic_poisson). Papernot and Steinke 2022, "Hyperparameter
    Tuning with Renyi Differential Privacy", theorems 2 and 6. Kairouz, Oh and Viswanath 2015, "The Composition Theorem for
    Differential Privacy" (imported, pure_dp).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_DOWN, Context, Decimal
from typing import Any, ClassVar, TypeGuard

from dpllm.errors import ConfigError

SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": float("inf")}  # of the truncated negative binomial
LEAST_NOISE, MOST_NOISE = 1e-6, 1e9  # an accountant's squares of others do not fit a float
MAX_GROUP_SIZE = 1024
MAX_DEPTH = 32
_SPLIT = Context(prec=60)


class _Value:
    """An event, whose fields are those of its JSON."""

    type: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """As it is stored; ``read`` is the inverse."""
        stored: dict[str, Any] = {"type": self.type}
        for name in self._stored():
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = [part.to_json() for part in value]
            stored[name] = value.to_json() if isinstance(value, _Value) else value
        return stored

    def _stored(self) -> list[str]:
        return list(self.__annotations__)


@dataclass(frozen=True)
class Gaussian(_Value):
    """One noisy sum. Raises ConfigError, as all events do, for a value from which no guarantee follows."""

    type = "gaussian"
    noise_multiplier: float

    def __post_init__(self) -> None:
        number("noise_multiplier", self.noise_multiplier, LEAST_NOISE, MOST_NOISE, including=True)


@dataclass(frozen=True)
class GaussianPair(_Value):
    """The two sums of adaptive clipping."""

    type = "adaptive_clipping"
    gradient_noise_multiplier: float
    count_noise_multiplier: float

    def __post_init__(self) -> None:
        for name in self._stored():
            number(name, getattr(self, name), LEAST_NOISE, MOST_NOISE, including=True)

    @property
    def noise_multiplier(self) -> float:
        """Of the Gaussian of equal cost."""
        return joint_noise_multiplier(self.gradient_noise_multiplier, self.count_noise_multiplier)


Mechanism = Gaussian | GaussianPair


@dataclass(frozen=True)
class PoissonSampled(_Value):
    """A mechanism over a fresh Poisson sample, for ``group_size`` of what is sampled together."""

    probability: float
    event: Mechanism
    group_size: int = 1

    def __post_init__(self) -> None:
        _within(self, Gaussian, GaussianPair)
        number("sampling_rate", self.probability, 0.0, 1.0)
        integer("group_size", self.group_size, 1, MAX_GROUP_SIZE)

    @property
    def type(self) -> str:  # type: ignore[override]  # which depends on the group
        """Of its JSON."""
        return "poisson_sampled" if self.group_size == 1 else "poisson_sampled_group"

    def _stored(self) -> list[str]:
        return [name for name in super()._stored() if name != "group_size" or self.group_size != 1]


@dataclass(frozen=True)
class CyclicPoisson(_Value):
    """``count`` steps of banded noise, each over a Poisson sample of the group whose turn it is."""

    type = "cyclic_poisson"
    bands: int
    count: int
    probability: float
    event: Gaussian

    def __post_init__(self) -> None:
        integer("cyclic_poisson count", self.count, 0)
        integer("bands", self.bands, 1)
        _within(self, Gaussian)  # adaptive clipping's noise would be taken back at another C
        number("sampling_rate", self.probability, 0.0, 1.0)


@dataclass(frozen=True)
class SelfComposed(_Value):
    """An event ``count`` times."""

    type = "self_composed"
    count: int
    event: Event

    def __post_init__(self) -> None:
        integer("self_composed count", self.count, 0)
        check_events(self.event)


@dataclass(frozen=True)
class Composed(_Value):
    """All of these on the same data."""

    type = "composed"
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple):
            raise ConfigError(
                f"composed events are {type(self.events).__name__}, which can change. Use compose(events)."
            )
        check_events(*self.events)


@dataclass(frozen=True)
class RepeatAndSelect(_Value):
    """An event a random number of times, of which only the best result left."""

    type = "repeat_and_select"
    event: Event
    mean: float
    distribution: str

    def __post_init__(self) -> None:
        check_events(self.event)
        if not isinstance(self.distribution, str) or self.distribution not in SHAPES:
            raise ConfigError(
                f"repeat_and_select distribution is {self.distribution!r}. Use one of {', '.join(SHAPES)}."
            )
        if number("repeat_and_select mean", self.mean, 0.0) < 1:
            raise ConfigError(f"repeat_and_select mean is {self.mean:g}, fewer than one run. Set 1 or more.")


@dataclass(frozen=True)
class Imported(_Value):
    """Made elsewhere, and no more than epsilon and delta is known."""

    type = "imported"
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        number("imported epsilon", self.epsilon, 0.0, including=True)
        if number("imported delta", self.delta, 0.0, including=True) >= 1:
            raise ConfigError(f"imported delta is {self.delta:g}, which promises nothing. Set a number below 1.")


@dataclass(frozen=True)
class PureDP(_Value):
    """One release without a delta."""

    type = "pure_dp"
    epsilon: float

    def __post_init__(self) -> None:
        number("pure_dp epsilon", self.epsilon, 0.0, including=True)


Event = Mechanism | PoissonSampled | CyclicPoisson | SelfComposed | Composed | RepeatAndSelect | Imported | PureDP
RunEvent = SelfComposed | CyclicPoisson
"""What a run of dpllm executes: ``count`` steps."""

_KINDS: dict[str, Any] = {
    kind.type: kind
    for kind in (Gaussian, GaussianPair, CyclicPoisson, SelfComposed, Composed, RepeatAndSelect, Imported, PureDP)
}
_FIELDS = {name: {field.name for field in fields(kind)} for name, kind in _KINDS.items()}
_FIELDS |= {
    "poisson_sampled": {"probability", "event"},
    "poisson_sampled_group": {"probability", "event", "group_size"},
}


def read(value: Any, depth: int = MAX_DEPTH) -> Event:
    """An event from its JSON, by an allow-list.

    Raises:
        ConfigError: an unknown type, a missing or unknown field, a value out of range, or more than `depth` events in each other.
    """
    if not depth:
        raise ConfigError(
            f"an accounting event lies in {MAX_DEPTH} others, which none of dpllm does. Write it shorter."
        )
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in _FIELDS or set(value) != _FIELDS[kind] | {"type"}:
        raise ConfigError(
            f"accounting event of type {kind!r} is unknown or malformed, so its cost is not known. Use one of "
            f"{', '.join(_FIELDS)}, with exactly its fields."
        )
    found = {name: part for name, part in value.items() if name != "type"}
    if "event" in found:
        found["event"] = read(found["event"], depth - 1)
    if "events" in found:
        if not isinstance(found["events"], list | tuple):
            raise ConfigError(f"composed events are {type(found['events']).__name__}. Set a list of events.")
        found["events"] = tuple(read(part, depth - 1) for part in found["events"])
    event: Event = _KINDS.get(kind, PoissonSampled)(**found)
    return event


def dp_sgd_event(sampling_rate: float, noise_multiplier: float, num_steps: int, group_size: int = 1) -> SelfComposed:
    """The event of DP-SGD: `num_steps` Gaussian sums, each over a fresh Poisson sample.

    Args:
        sampling_rate: probability q that a sampled thing joins a logical batch, 0 < q <= 1.
        noise_multiplier: standard deviation of the noise over the clipping norm, > 0.
        num_steps: logical batches, >= 0.
        group_size: how many sampled things are protected together, 1 to 1024.

    Raises:
        ConfigError: a value is out of range.

    References:
        Abadi et al. 2016, "Deep Learning with Differential Privacy", algorithm 1.
    """
    return SelfComposed(num_steps, PoissonSampled(sampling_rate, Gaussian(noise_multiplier), group_size))


def compose(events: Sequence[Event]) -> Composed:
    """The event of doing all of `events` on the same data."""
    return Composed(tuple(events))


def count_releases(event: Event) -> int:
    """How many noisy sums, or pure_dp releases, a run may execute on the strength of `event`; others pay for none."""
    match event:
        case Gaussian() | GaussianPair() | PoissonSampled() | PureDP():
            return 1
        case CyclicPoisson():
            return event.count
        case SelfComposed():
            return event.count * count_releases(event.event)
        case Composed():
            return sum(map(count_releases, event.events))
    check_events(event)
    return 0


def divisible(event: Event) -> TypeGuard[RunEvent]:
    """Whether ``count`` says how many steps an event has, so that a smaller one is the event of fewer of them.

    What was imported or selected ran elsewhere, and no count of steps says how much of it.
    """
    return isinstance(event, CyclicPoisson) or (
        isinstance(event, SelfComposed) and isinstance(event.event, Gaussian | GaussianPair | PoissonSampled)
    )


def step_of(event: Event) -> PoissonSampled | CyclicPoisson:
    """One of a run's steps, with its probability and mechanism; of cyclic_poisson, all of them. ConfigError for other events."""
    match event:
        case CyclicPoisson():
            return event
        case SelfComposed(_, PoissonSampled() as step):
            return step
    raise ConfigError(f"{event.type!r} is not the event of steps over Poisson samples. Use that of a run's Plan.")


def mechanism_of(event: Event) -> Mechanism | None:
    """The noisy sum inside; None where there is none, or are several."""
    while isinstance(event, PoissonSampled | CyclicPoisson | SelfComposed | RepeatAndSelect):
        event = event.event
    return event if isinstance(event, Gaussian | GaussianPair) else None


def joint_noise_multiplier(gradient: float, count: float) -> float:
    """The noise multiplier of adaptive clipping's two sums together, rounded down at the twelfth digit.

    Rounded down, it never states too small an epsilon; to twelve digits, it gives back the noise multiplier that
    ``gradient_noise_multiplier`` split, so that what was calibrated still meets its target to the last bit.
    """
    exact = _SPLIT.power(_inverse_square(gradient) + _inverse_square(2 * count), Decimal("-0.5"))
    # A float may lie below the decimal number that it stands for, by half of its last bit.
    return float(Context(prec=12, rounding=ROUND_DOWN).plus(_SPLIT.multiply(exact, 1 + Decimal(2) ** -52)))


def gradient_noise_multiplier(joint: float, count: float) -> float:
    """The noise on the gradients, rounded up, which with noise `count` on the count gives `joint` for both.

    To the last bit: noise rounded down could cost more than the joint noise that was calibrated.

    Raises:
        ConfigError: the count alone has less noise than both together may have.
    """
    left = _inverse_square(joint) - _inverse_square(2 * count)
    if left <= 0:
        raise ConfigError(f"count_noise_multiplier {count:g} is at most half of {joint:g}. Set a larger one.")
    exact = _SPLIT.power(left, Decimal("-0.5"))
    rounded = float(exact)
    return rounded if Decimal(rounded) >= exact else math.nextafter(rounded, math.inf)


def number(name: str, value: Any, above: float, most: float = sys.float_info.max, *, including: bool = False) -> float:
    """A finite number above `above` (or equal to it, if `including`) and at most `most`; ConfigError for any other."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (above < value <= most or (including and value == above)):
        limit = "" if most == sys.float_info.max else f" and at most {most:g}"
        least = "of at least" if including else "above"
        raise ConfigError(
            f"{name} is {value!r}, from which no guarantee follows. Set a finite number {least} {above:g}{limit}."
        )
    return float(value)


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most`; ConfigError for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and <= {most}"
        raise ConfigError(f"{name} is {value!r}. Set an integer >= {least}{limit}.")
    return value


def check_events(*parts: Event) -> None:
    """Refuses what is no event, which would else cost nothing, with a ConfigError."""
    for part in parts:
        if not isinstance(part, Event):
            raise ConfigError(
                f"{str(part)[:50]!r} is no accounting event, so its cost is not known. Make one, or read its JSON, with "
                "dpllm.privacy.events."
            )


def _within(outer: PoissonSampled | CyclicPoisson, *allowed: type) -> None:
    check_events(outer.event)
    if not isinstance(outer.event, allowed):
        raise ConfigError(f"{outer.event.type!r} within {outer.type} has no known cost. Use gaussian.")


def _inverse_square(value: float) -> Decimal:
    return _SPLIT.power(Decimal(value), Decimal(-2))
