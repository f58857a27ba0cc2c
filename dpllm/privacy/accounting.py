"""What a mechanism costs: events in, epsilon out, and the noise that meets a target.

Comes in: events, plain JSON-able dicts that say which noisy sums were released. Goes out: epsilon, a calibrated noise
multiplier, a second accountant's opinion. Knows nothing of models or data, and imports neither torch nor an
accountant before one is needed.

An event is stored in plan.json and in the ledger, to be accounted again years later:

    {"type": "gaussian", "noise_multiplier": 1.1}                        one sum, sensitivity 1
    {"type": "poisson_sampled", "probability": 0.02, "event": GAUSSIAN}  one over a Poisson sample
    {"type": "self_composed", "count": 150, "event": EVENT}
    {"type": "composed", "events": [EVENT, ...]}

All three accountants (pld, rdp, prv) support every event of this family.
"""

import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dpllm.errors import ConfigError, Refused

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld import PLDAccountant

Event = dict[str, Any]
Relation = Literal["zero_out", "add_or_remove_one"]
# What an event comes to, since composition commutes: (sampling rate, noise multiplier, how often).
Segments = tuple[tuple[float, float, int], ...]

FINE_INTERVAL = 1e-4  # PLD's discretisation of the privacy loss, for every epsilon that is stated
MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 0.05, 1e4  # what calibration considers
BELOW_ONE = math.nextafter(1.0, 0.0)
PRV_MAX_POINTS = 4_000_000  # about 0.8 GB
FIELDS = {
    "gaussian": {"type", "noise_multiplier"},
    "poisson_sampled": {"type", "probability", "event"},
    "self_composed": {"type", "count", "event"},
    "composed": {"type", "events"},
}


def dp_sgd_event(sampling_rate: float, noise_multiplier: float, num_steps: int) -> Event:
    """The event of DP-SGD: `num_steps` Gaussian sums, each over a fresh Poisson sample.

    Args:
        sampling_rate: probability q that a unit joins a logical batch, 0 < q <= 1.
        noise_multiplier: standard deviation of the noise over the clipping norm, > 0.
        num_steps: logical batches, >= 0.

    Raises:
        ConfigError: a value is out of range.

    References:
        Abadi et al. 2016, "Deep Learning with Differential Privacy", algorithm 1.
    """
    gaussian = {"type": "gaussian", "noise_multiplier": noise_multiplier}
    sampled = {"type": "poisson_sampled", "probability": sampling_rate, "event": gaussian}
    event = {"type": "self_composed", "count": num_steps, "event": sampled}
    _segments(event)
    return event


def compose(events: Sequence[Event]) -> Event:
    """The event of doing all of `events` on the same data."""
    return {"type": "composed", "events": list(events)}


def to_dp_event(event: Event) -> "DpEvent":
    """The dp-accounting event of equal cost, by an allow-list: stored content names no class.

    Raises:
        ConfigError: an unknown type, a missing or unknown field, or a value out of range.
    """
    return _dp_event(_segments(event))


def count_releases(event: Event) -> int:
    """How many noisy sums `event` pays for: a run must not execute more steps.

    Raises:
        ConfigError: the event is malformed.
    """
    return sum(count for _, _, count in _segments(event))


def epsilon(
    event: Event,
    delta: float,
    relation: Relation,
    accountant: str = "pld",
    interval: float = FINE_INTERVAL,
) -> float:
    """Epsilon of `event` at `delta`; infinite where no finite value can be certified.

    Args:
        event: what was released, see the head of this file.
        delta: in (0, 1).
        relation: zero-out and add/remove-one cost the same under Poisson sampling.
        accountant: "pld" (tight; the one stated), "rdp" (looser) or "prv" (Opacus, with torch).
        interval: PLD's discretisation; a wider one is faster, and larger rather than smaller.

    Raises:
        ConfigError: a malformed event or value, or an accountant not offered or failing here.

    Guarantee:
        An upper bound, up to floating-point round-off (two decimals are sure at delta < 1e-10), on the smallest
        epsilon for which doing all of `event` is (epsilon, delta)-DP, if what is done was fixed without looking at
        the results. PLD takes the worse of both directions.

    References:
        pld: Doroshenko et al. 2022, "Connect the Dots: Tighter Discrete Approximations of Privacy Loss
        Distributions". rdp: Mironov, Talwar and Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian
        Mechanism". prv: Gopi, Lee and Wutschitz 2021, "Numerical Composition of Differential Privacy". Against gdp:
        the same, section 1.
    """
    _number("privacy.delta", delta, 0.0, BELOW_ONE)
    if relation not in get_args(Relation):
        raise ConfigError(
            f"neighbouring relation {relation!r} is unknown, so an epsilon for it means nothing. "
            f"Use one of: {', '.join(get_args(Relation))}."
        )
    if accountant == "gdp":
        raise ConfigError(
            "accountant 'gdp' rests on a central limit approximation that understates epsilon "
            "(0.04 for a true 0.20 in one step), so its figure is no guarantee. Use pld."
        )
    if accountant not in ("pld", "rdp", "prv"):
        raise ConfigError(f"accountant {accountant!r} is unknown. Use pld, rdp or prv.")
    segments = _segments(event)
    if not segments:
        return 0.0
    if accountant == "rdp":
        return _rdp(segments, delta)
    if accountant == "pld":
        return _pld_epsilon(segments, delta, relation, interval)
    try:
        return _prv(segments, delta)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"accountant 'prv' cannot evaluate this event at delta {delta:g} ({error}). Use pld."
        ) from error


def versions() -> dict[str, str]:
    """Name and version of the library behind every stated epsilon."""
    return {"name": "dp-accounting", "version": metadata.version("dp-accounting")}


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    num_steps: int,
    relation: Relation,
    cache_dir: Path | None = None,
) -> float:
    """The smallest noise multiplier, in steps of 1e-4, that meets `target_epsilon`.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sampling_rate: probability q that a unit joins a logical batch, 0 < q <= 1.
        num_steps: logical batches, >= 1.
        relation: the neighbouring relation.
        cache_dir: keeps answers, one JSON file each; a damaged one is computed again.

    Raises:
        ConfigError: a value is out of range, or no noise multiplier up to 1e4 meets the target.

    Guarantee:
        For the sigma returned, `epsilon(dp_sgd_event(q, sigma, T), delta, relation)` is at most the target; for
        sigma - 1e-3 it is not. A cached answer is as good as its directory.
    """
    dp_sgd_event(sampling_rate, 1.0, num_steps)
    _number("num_steps", num_steps, 0.0)
    key = {
        "target_epsilon": _number("privacy.epsilon", target_epsilon, 0.0),
        "delta": _number("privacy.delta", delta, 0.0, BELOW_ONE),
        "sampling_rate": float(sampling_rate),
        "num_steps": num_steps,
        "relation": relation,
        "accountant": {"kind": "pld", "interval": FINE_INTERVAL, **versions()},
    }
    if cache_dir is None:
        return _calibrate(target_epsilon, delta, sampling_rate, num_steps, relation)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_dir / f"noise-multiplier-{digest[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return _number("noise_multiplier", stored["noise_multiplier"], 0.0)
    sigma = _calibrate(target_epsilon, delta, sampling_rate, num_steps, relation)
    with suppress(OSError):  # a cache that cannot be written costs time, and nothing else
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache_dir, delete=False) as file:
            json.dump({"key": key, "noise_multiplier": sigma}, file, sort_keys=True)
        os.replace(file.name, path)
    return sigma


def cross_check(event: Event, delta: float, relation: Relation, stated: float) -> dict[str, Any]:
    """A second accountant's epsilon for `event`; a refusal where it contradicts the first.

    Opacus' PRV adds its error bound of 0.01, and over a grid of mechanisms lies 0.0065 to 0.0295 above PLD; -0.001 to
    +0.05 is accepted, and -0.01 at delta < 1e-10, where round-off is that large in both. Where it cannot answer (a
    tiny delta, or gigabytes of memory for very many steps) RDP stands in, which may be looser but not below PLD.

    Args:
        event: what is released.
        delta: in (0, 1).
        relation: the neighbouring relation.
        stated: the PLD epsilon about to be promised.

    Returns:
        `{"name", "version", "epsilon"}` of the second accountant.

    Raises:
        Refused: the two accountants contradict each other, or `stated` is infinite.
    """
    if math.isinf(stated):
        raise Refused(
            f"no finite epsilon can be certified at delta {delta:g}, so nothing can be promised. "
            "Raise privacy.delta or privacy.noise_multiplier."
        )
    try:
        name, package, most = "opacus-prv", "opacus", stated + 0.05
        value = epsilon(event, delta, relation, "prv")
    except ConfigError:
        name, package, most = "dp-accounting-rdp (prv cannot answer)", "dp-accounting", math.inf
        value = epsilon(event, delta, relation, "rdp")
    if not stated - (1e-3 if delta >= 1e-10 else 1e-2) <= value <= most:
        raise Refused(
            f"epsilon {stated:.4f} at delta {delta:g} is contradicted by {name}: {value:.4f}. "
            "Nothing can be promised until they agree. Compute the plan again, and report the "
            "event if the difference stays."
        )
    return {"name": name, "version": metadata.version(package), "epsilon": value}


def attacker_limits(epsilon: float, delta: float) -> dict[str, float]:
    """What no membership attack on an (epsilon, delta)-DP release can exceed.

    Args:
        epsilon: >= 0, may be infinite.
        delta: in [0, 1].

    Returns:
        `tpr_at_fpr_0.01`, `tpr_at_fpr_0.001`: the largest true positive rate, at most 1 and
            min(e^eps FPR + delta, 1 - e^-eps (1 - delta - FPR)).
        `auc`: the largest area under the ROC curve, 1 - (1 - delta)^2 / (1 + e^eps). What is above that curve is the
            area under the trade-off of FNR against FPR: two triangles, each with a base of 1 - delta on an axis and
            its tip at FPR = FNR = (1 - delta) / (1 + e^eps).

    References:
        Kairouz, Oh and Viswanath 2015, "The Composition Theorem for Differential Privacy".
    """
    shrink, grow = math.exp(-epsilon), math.exp(min(epsilon, 700.0))  # e^710 is too large a float
    limits = {
        f"tpr_at_fpr_{fpr}": min(1.0, grow * fpr + delta, 1.0 - shrink * (1.0 - delta - fpr)) for fpr in (0.01, 0.001)
    }
    return {**limits, "auc": 1.0 - (1.0 - delta) ** 2 * shrink / (1.0 + shrink)}


def _number(name: str, value: Any, above: float, most: float = sys.float_info.max) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not above < value <= most:
        limit = "" if most == sys.float_info.max else f" and at most {most:g}"
        raise ConfigError(
            f"{name} is {value!r}, from which no epsilon follows. Set a finite number above {above:g}{limit}."
        )
    return float(value)


def _segments(event: Event) -> Segments:
    tally: Counter[tuple[float, float]] = Counter()

    def walk(part: Any, times: int, rate: float | None) -> None:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in tuple(FIELDS) or set(part) != FIELDS[kind]:
            raise ConfigError(
                f"accounting event of type {kind!r} is unknown or malformed, so its cost is not "
                f"known. Use one of {', '.join(FIELDS)}, with exactly its fields."
            )
        if kind == "gaussian":
            sigma = _number("noise_multiplier", part["noise_multiplier"], 0.0)
            tally[(1.0 if rate is None else rate, sigma)] += times
        elif rate is not None:
            raise ConfigError(f"{kind!r} within poisson_sampled has no known cost. Use gaussian.")
        elif kind == "poisson_sampled":
            walk(part["event"], times, _number("sampling_rate", part["probability"], 0.0, 1.0))
        elif kind == "self_composed":
            count = part["count"]
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError(f"self_composed count is {count!r}. Set an integer >= 0.")
            walk(part["event"], times * count, None)
        else:
            for inner in part["events"]:
                walk(inner, times, None)

    walk(event, 1, None)
    return tuple(sorted((q, sigma, n) for (q, sigma), n in tally.items() if n))


def _dp_event(segments: Segments) -> "DpEvent":
    import dp_accounting as dp

    runs: list[DpEvent] = []
    for q, sigma, n in segments:
        gaussian = dp.GaussianDpEvent(sigma)
        one = gaussian if q == 1.0 else dp.PoissonSampledDpEvent(q, gaussian)
        runs.append(dp.SelfComposedDpEvent(one, n))
    return runs[0] if len(runs) == 1 else dp.ComposedDpEvent(runs)


@lru_cache(maxsize=8)
def _pld(segments: Segments, relation: Relation, interval: float) -> "PLDAccountant":
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    if min(sigma for _, sigma, _ in segments) < 0.3:
        # Losses of thousands in steps of 1e-4 need gigabytes; a millionth of them is fine enough.
        interval = max(interval, 1e-6 * _rdp(segments, 1e-5))
    neighbours = {
        "zero_out": NeighboringRelation.REPLACE_SPECIAL,
        "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    }[relation]
    return PLDAccountant(neighbours, interval).compose(_dp_event(segments))


@lru_cache(maxsize=1024)
def _pld_epsilon(segments: Segments, delta: float, relation: Relation, interval: float) -> float:
    try:
        return float(_pld(segments, relation, interval).get_epsilon(delta))
    except OverflowError:  # the loss of hardly any noise does not fit a float
        return math.inf


def _rdp(segments: Segments, delta: float) -> float:
    from dp_accounting.rdp import RdpAccountant

    # dp-accounting 0.6.0 logs every order whose series does not converge. It leaves those out, and a minimum over
    # fewer orders is still an upper bound.
    absl = logging.getLogger("absl")
    absl.disabled, before = True, absl.disabled
    try:
        return float(RdpAccountant().compose(_dp_event(segments)).get_epsilon(delta))
    finally:
        absl.disabled = before


def _prv(segments: Segments, delta: float) -> float:
    # Opacus' own mesh (prv.py, _get_domain): its arrays grow with epsilon and sqrt(T).
    steps = sum(n for _, _, n in segments)
    mesh = 0.01 / math.sqrt(steps * math.log(12_000 / delta) / 2)
    points = 2 * (_rdp(segments, delta / 4000) + 3) / mesh
    if points > PRV_MAX_POINTS:
        raise MemoryError(f"it needs {points:.0f} points")
    import numpy as np
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, q, n) for q, sigma, n in segments]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        value = float(accountant.get_epsilon(delta, eps_error=0.01))
    if not math.isfinite(value):
        raise ValueError(f"it found {value}")
    return value


def _calibrate(target: float, delta: float, q: float, num_steps: int, relation: Relation) -> float:
    """Secant steps in log sigma on a coarse PLD, then steps of 1e-4 in sigma on the fine one."""

    def cost(sigma: float, interval: float) -> float:
        if not MIN_NOISE_MULTIPLIER <= sigma <= MAX_NOISE_MULTIPLIER:
            mend = "Raise privacy.epsilon or privacy.delta, or train fewer steps."
            if sigma < MIN_NOISE_MULTIPLIER:
                mend = "So weak a promise protects nobody: lower privacy.epsilon or privacy.delta."
            raise ConfigError(
                f"epsilon {target:g} at delta {delta:g} is not reachable with sampling rate {q:g} "
                f"and {num_steps} steps by a noise multiplier of {MIN_NOISE_MULTIPLIER:g} to "
                f"{MAX_NOISE_MULTIPLIER:g}. {mend}"
            )
        return epsilon(dp_sgd_event(q, sigma, num_steps), delta, relation, interval=interval)

    # Start from the central limit theorem: mu of the Gaussian mechanism, then its sigma.
    tail = 2 * math.log(1 / delta)
    mu = math.sqrt(tail + 2 * target) - math.sqrt(tail)
    sigma = min(1 / math.sqrt(math.log1p(mu**2 / (q**2 * num_steps))), MAX_NOISE_MULTIPLIER / 2)
    # The standard deviation of one step's privacy loss, about: a coarse bucket is at most a tenth of it.
    spread = q * math.sqrt(math.expm1(min(sigma**-2, 50.0)))
    coarse = min(max(spread / 10, FINE_INTERVAL), 1e-3)

    slope, step, last_error = -1.5, math.nan, math.nan  # slope: of log epsilon over log sigma
    for _ in range(60):
        error = math.log(max(cost(sigma, coarse), 1e-300) / target)
        if math.isfinite(error - last_error):
            slope = min(max((error - last_error) / step, -1000.0), -0.3)
        step, last_error = min(max(-error / slope, -0.7), 0.7), error
        sigma *= math.exp(step)
        if abs(step) < 1e-5:
            break

    # Whole numbers of 1e-4 from here: `grid` is tried, `low` exceeds the target, `high` meets it.
    per_grid = -slope * target / sigma * 1e-4
    grid, low, high = math.ceil(sigma * 1e4), 0, sys.maxsize
    while high - low > 1:
        spare = target - cost(grid / 1e4, FINE_INTERVAL)
        if 0 <= spare < per_grid:  # one less exceeds the target: epsilon is convex in sigma
            return grid / 1e4
        low, high = (low, grid) if spare >= 0 else (grid, high)
        guess = grid - math.floor(max(spare / per_grid, -1e6))
        grid = min(max(guess, low + 1), high - 1)
    return high / 1e4
