"""What was released, as values: the family of accounting events, and the one form to which all of them come down.

Comes in: events, plain JSON-able dicts. Goes out: a checked normal form, the dp-accounting event of equal cost, the
accountants that know an event. Knows no epsilon, no model and no data, and imports no accountant before one is needed.

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
    al. 2023, "(Amplified) Banded Matrix Factorization", theorem 4 (cyclic_poisson). Papernot and
    Steinke 2022, "Hyperparameter Tuning with Renyi Differential Privacy", theorems 2 and 6. Kairouz, Oh and Viswanath
    2015, "The Composition Theorem for Differential Privacy" (imported, pure_dp).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_DOWN, Context, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from dpllm.errors import ConfigError, Refused

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Event = dict[str, Any]

ACCOUNTANTS = frozenset({"pld", "rdp", "prv"})
FIELDS = {
    "gaussian": {"type", "noise_multiplier"},
    "adaptive_clipping": {"type", "gradient_noise_multiplier", "count_noise_multiplier"},
    "poisson_sampled": {"type", "probability", "event"},
    "poisson_sampled_group": {"type", "probability", "group_size", "event"},
    "cyclic_poisson": {"type", "bands", "count", "probability", "event"},
    "self_composed": {"type", "count", "event"},
    "composed": {"type", "events"},
    "repeat_and_select": {"type", "event", "mean", "distribution"},
    "imported": {"type", "epsilon", "delta"},
    "pure_dp": {"type", "epsilon"},
}
MECHANISMS = ("gaussian", "adaptive_clipping")
SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": float("inf")}  # of the truncated negative binomial
LEAST_NOISE, MOST_NOISE = 1e-6, 1e9  # multipliers; an accountant's squares of others do not fit a float
MAX_GROUP_SIZE = 1024
_SPLIT = Context(prec=60)


class Sampled(NamedTuple):
    """``times`` Gaussian sums over Poisson samples, for ``group_size`` rows together."""

    probability: float
    noise_multiplier: float
    group_size: int
    times: int


class Selected(NamedTuple):
    """``times`` times the best of a random number of runs."""

    terms: Terms
    mean: float
    distribution: str
    times: int


class Imported(NamedTuple):
    """``times`` releases, made elsewhere or ``pure_dp``, of which epsilon and delta are known."""

    epsilon: float
    delta: float
    times: int


class Terms(NamedTuple):
    """An event in normal form: composition commutes, so that equal parts are counted together and sorted."""

    sampled: tuple[Sampled, ...] = ()
    selected: tuple[Selected, ...] = ()
    imported: tuple[Imported, ...] = ()


def dp_sgd_event(sampling_rate: float, noise_multiplier: float, num_steps: int, group_size: int = 1) -> Event:
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
    return sampled_steps(
        {"type": "gaussian", "noise_multiplier": noise_multiplier}, sampling_rate, num_steps, group_size
    )


def sampled_steps(mechanism: Event, sampling_rate: float, num_steps: int, group_size: int = 1) -> Event:
    """The event of `num_steps` times `mechanism`, each over a fresh Poisson sample; see ``dp_sgd_event``."""
    sampled: Event = {"type": "poisson_sampled", "probability": sampling_rate, "event": mechanism}
    if group_size != 1:
        sampled |= {"type": "poisson_sampled_group", "group_size": group_size}
    event: Event = {"type": "self_composed", "count": num_steps, "event": sampled}
    normal_form(event)  # which checks it
    return event


def cyclic_steps(mechanism: Event, bands: int, probability: float, num_steps: int) -> Event:
    """The event of `num_steps` steps of `mechanism` with banded noise, each over a Poisson sample of the group whose turn it is.

    Args:
        mechanism: a gaussian.
        bands: and groups, b >= 1.
        probability: that a member of the group joins, b B / N.
        num_steps: logical batches, >= 0.

    Raises:
        ConfigError: a value is out of range.
    """
    event = {
        "type": "cyclic_poisson",
        "bands": bands,
        "count": num_steps,
        "probability": probability,
        "event": mechanism,
    }
    normal_form(event)  # which checks it
    return event


def compose(events: Sequence[Event]) -> Event:
    """The event of doing all of `events` on the same data."""
    return {"type": "composed", "events": list(events)}


def count_releases(event: Event) -> int:
    """How many noisy sums, or pure_dp releases, a run may execute on the strength of `event`; others pay for none."""
    sampled = normal_form(event).sampled  # which checks it
    if event["type"] == "composed":
        return sum(map(count_releases, event["events"]))
    if event["type"] == "self_composed":
        return int(event["count"]) * count_releases(event["event"])
    if event["type"] == "pure_dp":
        return 1
    # The groups of cyclic_poisson share each of the rounds that it costs.
    return int(event["count"]) if event["type"] == "cyclic_poisson" else sum(part.times for part in sampled)


def scaled(event: Event, factor: float) -> Event:
    """The same event with every noise multiplier times `factor`."""
    changed: Event = {}
    for key, value in event.items():
        if key.endswith("noise_multiplier"):
            changed[key] = value * factor
        elif isinstance(value, dict):
            changed[key] = scaled(value, factor)
        else:
            changed[key] = [scaled(part, factor) for part in value] if isinstance(value, list) else value
    return changed


def imported_delta(event: Event) -> float:
    """The sum of the deltas that `event` imports, which come off the delta at which anything else is stated."""
    return sum(part.delta * part.times for part in normal_form(event).imported)


def accountants(event: Event) -> frozenset[str]:
    """Which of "pld", "rdp" and "prv" know every part of `event`; none, where its parts do not go together."""
    return accountants_of(normal_form(event))


def accountants_of(terms: Terms) -> frozenset[str]:
    """See ``accountants``."""
    return ACCOUNTANTS.intersection(*(supported for _, supported in _kinds(terms)))


def require(terms: Terms, accountant: str | None = None) -> None:
    """Refuses an event that no accountant knows in every part; a ConfigError where another one does, but not this one."""
    known = accountants_of(terms)
    if not known:
        parts = "; ".join(f"{name} (only {' or '.join(sorted(who)) or 'none'})" for name, who in _kinds(terms))
        raise Refused(
            f"no accountant knows every part of this event, so no epsilon can be stated for it: {parts}. Keep such parts "
            "in budgets of their own, or sample and account whole units."
        )
    if accountant is not None and accountant not in known:
        raise ConfigError(
            f"accountant {accountant!r} does not know {', '.join(name for name, who in _kinds(terms) if accountant not in who)}. "
            f"Use {' or '.join(sorted(known))}."
        )


def normal_form(event: Any) -> Terms:
    """Checks an event by an allow-list and reduces it.

    Raises:
        ConfigError: an unknown type, a missing or unknown field, or a value out of range.
    """
    sampled: Counter[tuple[float, float, int]] = Counter()
    selected: Counter[tuple[Terms, float, str]] = Counter()
    imported: Counter[tuple[float, float]] = Counter()

    def walk(part: Any, times: int) -> None:
        kind = _kind(part)
        if kind in MECHANISMS:
            sampled[(1.0, _noise(part), 1)] += times
        elif kind in ("poisson_sampled", "poisson_sampled_group"):
            if _kind(part["event"]) not in MECHANISMS:
                raise ConfigError(f"{part['event']['type']!r} within {kind} has no known cost. Use gaussian.")
            rate, sigma = number("sampling_rate", part["probability"], 0.0, 1.0), _noise(part["event"])
            size = _integer("group_size", part["group_size"], 1, MAX_GROUP_SIZE) if "group_size" in part else 1
            # Without sampling, all of the group are in every sum: one Gaussian of that sensitivity.
            sampled[(rate, sigma, size) if rate < 1 else (1.0, sigma / size, 1)] += times
        elif kind == "cyclic_poisson":
            steps, bands = _integer("cyclic_poisson count", part["count"], 0), _integer("bands", part["bands"], 1)
            if _kind(part["event"]) != "gaussian":  # adaptive clipping's noise would be taken back at another C
                raise ConfigError(f"{part['event']['type']!r} within cyclic_poisson has no known cost. Use gaussian.")
            one = {"type": "poisson_sampled", "probability": part["probability"], "event": part["event"]}
            walk(one, times * -(-steps // bands))
        elif kind == "self_composed":
            walk(part["event"], times * _integer("self_composed count", part["count"], 0))
        elif kind == "composed":
            if not isinstance(part["events"], list | tuple):
                raise ConfigError(f"composed events are {type(part['events']).__name__}. Set a list of events.")
            for inner in part["events"]:
                walk(inner, times)
        elif kind == "repeat_and_select":
            shape = part["distribution"]
            if not isinstance(shape, str) or shape not in SHAPES:
                raise ConfigError(f"repeat_and_select distribution is {shape!r}. Use one of {', '.join(SHAPES)}.")
            mean = number("repeat_and_select mean", part["mean"], 0.0)
            if mean < 1:
                raise ConfigError(f"repeat_and_select mean is {mean:g}, fewer than one run. Set 1 or more.")
            inner = normal_form(part["event"])
            if inner != Terms():
                selected[(inner, mean, shape)] += times
        else:
            epsilon = number(f"{kind} epsilon", part["epsilon"], 0.0, including=True)
            delta = number("imported delta", part.get("delta", 0.0), 0.0, including=True)  # pure_dp has none
            if delta >= 1:
                raise ConfigError(f"imported delta is {delta:g}, which promises nothing. Set a number below 1.")
            if epsilon or delta:
                imported[(epsilon, delta)] += times

    walk(event, 1)
    return Terms(
        tuple(sorted(Sampled(*key, n) for key, n in sampled.items() if n)),
        tuple(sorted(Selected(*key, n) for key, n in selected.items() if n)),
        tuple(sorted(Imported(*key, n) for key, n in imported.items() if n)),
    )


def dp_event_of(terms: Terms) -> DpEvent:
    """The dp-accounting event of equal cost; it has none for what is imported (ConfigError)."""
    import dp_accounting as dp
    from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent

    if terms.imported:
        raise ConfigError("dp-accounting has no event for an imported epsilon and delta. Use epsilon() instead.")
    runs: list[DpEvent] = []
    for part in terms.sampled:
        one = dp.GaussianDpEvent(part.noise_multiplier)
        if part.group_size > 1:
            from scipy.stats import binom

            many = range(part.group_size + 1)
            weights = binom.pmf(many, part.group_size, part.probability)
            one = MixtureOfGaussiansDpEvent(part.noise_multiplier, list(map(float, many)), list(map(float, weights)))
        elif part.probability < 1.0:
            one = dp.PoissonSampledDpEvent(part.probability, one)
        runs.append(dp.SelfComposedDpEvent(one, part.times))
    for best in terms.selected:
        one = RepeatAndSelectDpEvent(dp_event_of(best.terms), best.mean, SHAPES[best.distribution])
        runs.append(dp.SelfComposedDpEvent(one, best.times))
    return runs[0] if len(runs) == 1 else dp.ComposedDpEvent(runs)


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
            f"{name} is {value!r}, from which no epsilon follows. Set a finite number {least} {above:g}{limit}."
        )
    return float(value)


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and <= {most}"
        raise ConfigError(f"{name} is {value!r}. Set an integer >= {least}{limit}.")
    return value


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind not in tuple(FIELDS) or set(part) != FIELDS[kind]:
        raise ConfigError(
            f"accounting event of type {kind!r} is unknown or malformed, so its cost is not known. Use one of "
            f"{', '.join(FIELDS)}, with exactly its fields."
        )
    return str(kind)


def _noise(part: Event) -> float:
    def sigma(name: str) -> float:
        return number(name, part[name], LEAST_NOISE, MOST_NOISE, including=True)

    if part["type"] == "gaussian":
        return sigma("noise_multiplier")
    return joint_noise_multiplier(sigma("gradient_noise_multiplier"), sigma("count_noise_multiplier"))


def _inverse_square(value: float) -> Decimal:
    return _SPLIT.power(Decimal(value), Decimal(-2))


def _kinds(terms: Terms) -> list[tuple[str, frozenset[str]]]:
    """The kinds of parts that an event has, each with its accountants."""
    kinds: dict[str, frozenset[str]] = {}
    for part in terms.sampled:
        if part.group_size > 1:
            kinds["poisson_sampled_group"] = frozenset({"pld"})
        else:
            kinds["gaussian sums"] = ACCOUNTANTS
    for best in terms.selected:
        # dp-accounting computes the selection from the Renyi curve of one run, which an imported delta has not.
        known = accountants_of(best.terms) & {"rdp"} if not best.terms.imported else frozenset[str]()
        kinds[f"repeat_and_select of {' and '.join(kind for kind, _ in _kinds(best.terms))}"] = known
    if terms.imported:
        kinds["imported"] = frozenset({"pld", "rdp"})
    return list(kinds.items())
