"""Accounting events: frozen values that say what was released.

Comes in: numbers; JSON of plan.json, the ledger and published statements, read once by ``read``. Goes out: events and their JSON.
Must not know epsilons, models or data; ``parts`` adds events up.

An event is stored in plan.json and in the ledger, to be accounted again years later, as {"type": ..., and its fields}: fields are
exact, and their meanings never change. A Gaussian is a noisy sum to which a unit adds a vector of norm at most the sensitivity;
its noise is in units of that sensitivity. The others say what was done with such a sum or with an event.

Guarantee:
    ``poisson_sampled_group`` bounds the change if up to ``group_size`` rows are removed, each clipped on its own: the number of
    them in a sample is Binomial(group_size, probability), so one step is dominated by a mixture of Gaussians. ``cyclic_poisson``
    costs ceil(count / bands) ``poisson_sampled`` sums at its probability, which is that within a group (proof:
    ``dpllm.privacy.banded``). ``repeat_and_select`` holds if the number of runs was drawn before the first one, from the named
    distribution with this mean, and stays secret; if each run draws one of ``events`` and fresh randomness; if the score that
    selects is computed from public data or is covered by that event; and if nothing of the other runs is released (proof:
    ``dpllm.privacy.selection``). ``bounded_range`` holds for draws of range at most ``range``, each of which may depend on
    earlier results (proof: ``dpllm.privacy.bounded_range``). ``imported`` and ``pure_dp`` hold under the neighbouring relation
    and for the unit of the events composed with them.

References:
    Choquette-Choo et al. 2023, "Privacy Amplification for Matrix Mechanisms", corollary 4.7 (mixtures). Charles et al.
    2024, "Fine-Tuning Large Language Models with User-Level Differential Privacy" (example-level sampling). Choquette-Choo et
    al. 2023, "(Amplified) Banded Matrix Factorization", theorem 4 (cyclic_poisson). Kairouz, Oh and Viswanath
    2015, "The Composition Theorem for Differential Privacy" (imported, pure_dp).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeGuard, get_args

from dpllm.errors import ConfigError
from dpllm.privacy.selection import MAX_MEAN_RUNS, SHAPES

LEAST_NOISE, MOST_NOISE = 1e-6, 1e9  # beyond these, an accountant's squares overflow or underflow
LEAST_RATE = 1e-12  # below, 1 - q has too few digits for the loss of a step: at 1e-17 none, and epsilon would be 0
MOST_RANGE = 100.0
MAX_GROUP_SIZE, MOST_COUNT = 1024, 10**12  # counts are added up in floating point
MAX_DEPTH = 32
BELOW_ONE = math.nextafter(1.0, 0.0)


class _Value:
    """Base of all events: fields are those of the JSON, and fields with the same name have the same checks."""

    type: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuses, with a ConfigError, values that give no guarantee."""
        for name, value in vars(self).items():
            match name:
                case "noise_multiplier":
                    number(name, value, LEAST_NOISE, MOST_NOISE, including=True)
                case "probability":
                    if number("sampling_rate", value, 0.0, 1.0) < LEAST_RATE:
                        raise ConfigError(
                            f"sampling_rate is {value:g}, so small that a float cannot hold the loss of a step, and epsilon "
                            f"would be too small. Sample with {LEAST_RATE:g} or more: a larger batch, or fewer units."
                        )
                case "group_size":
                    integer(name, value, 1, MAX_GROUP_SIZE)
                case "bands":
                    integer(name, value, 1)
                case "range":
                    number("bounded_range range", value, LEAST_NOISE, MOST_RANGE, including=True)
                case "count":
                    integer(f"{self.type} count", value, 0, MOST_COUNT)
                case "epsilon":
                    number(f"{self.type} epsilon", value, 0.0, including=True)
                case "delta":
                    number(f"{self.type} delta", value, 0.0, BELOW_ONE, including=True)
                case "event":
                    check_events(value)
                    if isinstance(self, PoissonSampled | CyclicPoisson) and not isinstance(value, Gaussian):
                        raise ConfigError(f"{value.type!r} within {self.type} has no known cost. Use gaussian.")
                case "events":
                    if not isinstance(value, tuple):
                        raise ConfigError(
                            f"composed events are {type(value).__name__}, which can change. Use compose(events)."
                        )
                    check_events(*value)
                case "mean":
                    number(f"{self.type} mean", value, 1.0, MAX_MEAN_RUNS, including=True)
                case "distribution":
                    if not isinstance(value, str) or value not in SHAPES:
                        raise ConfigError(f"{self.type} distribution is {value!r}. Use one of {', '.join(SHAPES)}.")
                case _:  # an unchecked field would have an unknown cost
                    raise AssertionError(name)

    def to_json(self) -> dict[str, Any]:
        """The stored form; ``read`` is the inverse."""
        stored: dict[str, Any] = {"type": self.type}
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                value = [part.to_json() for part in value]
            stored[name] = value.to_json() if isinstance(value, _Value) else value
        return stored


@dataclass(frozen=True)
class Gaussian(_Value):
    """One noisy sum."""

    type = "gaussian"
    noise_multiplier: float


@dataclass(frozen=True)
class PoissonSampled(_Value):
    """A noisy sum over a fresh Poisson sample, with respect to ``group_size`` rows or units together, each with its own coin."""

    type = "poisson_sampled"
    probability: float
    event: Gaussian
    group_size: int = 1

    def to_json(self) -> dict[str, Any]:
        """Groups have a type of their own, so that a reader that only supports single units does not misread them."""
        stored = super().to_json()
        if self.group_size == 1:
            del stored["group_size"]
            return stored
        return {**stored, "type": "poisson_sampled_group"}


@dataclass(frozen=True)
class CyclicPoisson(_Value):
    """``count`` steps with banded noise, each over a Poisson sample of the group whose turn it is."""

    type = "cyclic_poisson"
    bands: int
    count: int
    probability: float
    event: Gaussian


@dataclass(frozen=True)
class SelfComposed(_Value):
    """An event repeated ``count`` times."""

    type = "self_composed"
    count: int
    event: Event


@dataclass(frozen=True)
class Composed(_Value):
    """Several events on the same data."""

    type = "composed"
    events: tuple[Event, ...]


@dataclass(frozen=True)
class RepeatAndSelect(_Value):
    """A random number of runs, each a uniformly drawn one of ``events``, of which only the best result is released."""

    type = "repeat_and_select"
    events: tuple[Event, ...]
    mean: float
    distribution: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.events:
            raise ConfigError("repeat_and_select has no events, so the cost of a run is unknown. Name one or more.")


@dataclass(frozen=True)
class Imported(_Value):
    """A release made elsewhere, of which only epsilon and delta are known."""

    type = "imported"
    epsilon: float
    delta: float


@dataclass(frozen=True)
class PureDP(_Value):
    """One release with delta 0, such as discrete Laplace noise on a count."""

    type = "pure_dp"
    epsilon: float


@dataclass(frozen=True)
class BoundedRange(_Value):
    """``count`` adaptive draws, each of range at most ``range``, such as exponential mechanisms."""

    type = "bounded_range"
    range: float
    count: int


Event = (
    Gaussian
    | PoissonSampled
    | CyclicPoisson
    | SelfComposed
    | Composed
    | RepeatAndSelect
    | Imported
    | PureDP
    | BoundedRange
)
RunEvent = SelfComposed | CyclicPoisson
"""The event of a dpllm run: ``count`` steps."""

_KINDS: dict[str, Any] = {
    **{kind.type: kind for kind in get_args(Event)},
    "poisson_sampled_group": PoissonSampled,
}
_FIELDS = {name: {field.name for field in fields(kind)} for name, kind in _KINDS.items()}
_FIELDS["poisson_sampled"].remove("group_size")


def read(value: Any, depth: int = MAX_DEPTH) -> Event:
    """An event from its JSON, by an allow-list.

    Raises:
        ConfigError: an unknown type, a missing or unknown field, a value out of range, or events nested more than `depth` deep.
    """
    if not depth:
        raise ConfigError(f"an accounting event is nested in {MAX_DEPTH} others. Flatten it.")
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in _FIELDS or set(value) != _FIELDS[kind] | {"type"}:
        raise ConfigError(
            f"accounting event of type {kind!r} is unknown or malformed, so its privacy cost is unknown. Use one of "
            f"{', '.join(_FIELDS)}, with exactly its fields."
        )
    content = {name: part for name, part in value.items() if name != "type"}
    if "event" in content:
        content["event"] = read(content["event"], depth - 1)
    elif "events" in content:
        if not isinstance(content["events"], list | tuple):
            raise ConfigError(f"composed events are {type(content['events']).__name__}. Set a list of events.")
        content["events"] = tuple(read(part, depth - 1) for part in content["events"])
    return _KINDS[kind](**content)  # type: ignore[no-any-return]


def dp_sgd_event(sampling_rate: float, noise_multiplier: float, num_steps: int, group_size: int = 1) -> SelfComposed:
    """The event of DP-SGD: `num_steps` Gaussian sums, each over a fresh Poisson sample (Abadi et al. 2016, algorithm 1).

    Args:
        sampling_rate: probability q that a unit (or row) joins a logical batch, 0 < q <= 1.
        noise_multiplier: standard deviation of the noise over the clipping norm, > 0.
        num_steps: number of logical batches, >= 0.
        group_size: how many of them are protected together, 1 to 1024.
    """
    return SelfComposed(num_steps, PoissonSampled(sampling_rate, Gaussian(noise_multiplier), group_size))


def compose(events: Sequence[Event]) -> Composed:
    """The event of doing all of `events` on the same data."""
    return Composed(tuple(events))


def count_releases(event: Event) -> int:
    """How many noisy sums, draws or pure_dp releases `event` pays for; 0 for other events."""
    match event:
        case Gaussian() | PoissonSampled() | PureDP() | RepeatAndSelect():
            return 1
        case CyclicPoisson() | BoundedRange():
            return event.count
        case SelfComposed():
            return event.count * count_releases(event.event)
        case Composed():
            return sum(map(count_releases, event.events))
    check_events(event)
    return 0


def divisible(event: Event) -> TypeGuard[RunEvent]:
    """Whether ``count`` is the event's number of steps, so that a smaller ``count`` gives the event of fewer steps.

    An imported event ran elsewhere, and no count says how many of its steps.
    """
    return isinstance(event, CyclicPoisson) or (
        isinstance(event, SelfComposed) and isinstance(event.event, Gaussian | PoissonSampled)
    )


def step_of(event: Event) -> PoissonSampled | CyclicPoisson:
    """One step of a run, with probability and noisy sum; all steps of a cyclic_poisson. ConfigError for other events."""
    match event:
        case CyclicPoisson():
            return event
        case SelfComposed(_, PoissonSampled() as step):
            return step
    raise ConfigError(f"{event.type!r} is not an event of Poisson-sampled steps. Use the event of a run's Plan.")


def of_training(event: Event) -> bool:
    """Whether an event is that of a run or of the best of several runs; ConfigError if its steps are not a run's."""
    runs = event.events if isinstance(event, RepeatAndSelect) else (event,)
    return all(step_of(run) for run in runs)


def mechanism_of(event: Event) -> Gaussian | None:
    """The event's only noisy sum; None if it has none or several."""
    while isinstance(event, PoissonSampled | CyclicPoisson | SelfComposed):
        event = event.event
    return event if isinstance(event, Gaussian) else None


def number(name: str, value: Any, above: float, top: float = sys.float_info.max, *, including: bool = False) -> float:
    """A finite number above `above` (or equal to it, if `including`) and at most `top`; ConfigError for any other."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (above < value <= top or (including and value == above)):
        limit = " and below 1" if top == BELOW_ONE else "" if top == sys.float_info.max else f" and at most {top:g}"
        bound = "of at least" if including else "above"
        raise ConfigError(
            f"{name} is {value!r}, which gives no guarantee. Set a finite number {bound} {above:g}{limit}."
        )
    return float(value)


def integer(name: str, value: Any, minimum: int, top: int | None = None) -> int:
    """An integer from `minimum` to `top`; ConfigError for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum or (top is not None and value > top):
        limit = "" if top is None else f" and <= {top}"
        raise ConfigError(f"{name} is {value!r}. Set an integer >= {minimum}{limit}.")
    return value


def check_events(*parts: Event) -> None:
    """Refuses, with a ConfigError, anything that is not an event, which would otherwise cost nothing."""
    for part in parts:
        if not isinstance(part, Event):
            raise ConfigError(
                f"{str(part)[:50]!r} is not an accounting event, so its privacy cost is unknown. Build one, or read one from "
                "JSON, with dpllm.privacy.events."
            )
