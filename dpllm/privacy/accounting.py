"""What a mechanism costs: events in, epsilon out, and what other accountants say.

Comes in: events (see ``dpllm.privacy.events``). Goes out: the stated epsilon, the figures of other accountants, a
refusal where they contradict each other. Knows nothing of models or data, and imports neither torch nor an accountant
before one is needed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from importlib import metadata
from typing import Any, get_args

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.calibration import calibrate_noise_multiplier
from dpllm.privacy.events import (
    Event,
    Terms,
    accountants,
    accountants_of,
    compose,
    count_releases,
    dp_sgd_event,
    normal_form,
    number,
    require,
)
from dpllm.privacy.limits import attacker_limits
from dpllm.privacy.privacy_loss import FINE_INTERVAL, Relation, privacy_loss, versions
from dpllm.privacy.renyi import BELOW_ONE, rdp_epsilon

__all__ = [
    "FINE_INTERVAL",
    "Event",
    "Relation",
    "accountants",
    "attacker_limits",
    "beside",
    "calibrate_noise_multiplier",
    "compose",
    "count_releases",
    "cross_check",
    "curve",
    "dp_sgd_event",
    "epsilon",
    "stated",
    "versions",
]

PRV_MAX_POINTS = 4_000_000  # about 0.8 GB
LEAST_COMPARED = 1e-10  # delta, below which round-off is larger than the gap between accountants
PRV_GAP = 0.05  # how far PRV may lie above PLD: its own error bound is 0.01


def epsilon(
    event: Event,
    delta: float,
    relation: Relation,
    accountant: str = "pld",
    interval: float = FINE_INTERVAL,
) -> float:
    """Epsilon of `event` at `delta`; infinite where no finite value can be certified.

    Args:
        event: what was released, see ``dpllm.privacy.events``.
        delta: in (0, 1).
        relation: zero-out and add/remove-one cost the same under Poisson sampling.
        accountant: "pld" (tight; the one stated), "rdp" (looser) or "prv" (Opacus, with torch).
        interval: PLD's discretisation; a wider one is faster, and larger rather than smaller.

    Raises:
        ConfigError: a malformed event or value, or an accountant not offered, failing here or not knowing the event.
        Refused: no accountant knows every part of the event.

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
    number("privacy.delta", delta, 0.0, BELOW_ONE)
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
    terms = normal_form(event)
    if terms == Terms():
        return 0.0
    require(terms, accountant)
    if accountant == "rdp":
        return rdp_epsilon(terms, delta)
    if accountant == "pld":
        return _pld_epsilon(terms, delta, relation, interval)
    try:
        return _prv(terms, delta)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"accountant 'prv' cannot evaluate this event at delta {delta:g} ({error}). Use pld."
        ) from error


def stated(event: Event, delta: float, relation: Relation) -> tuple[float, str]:
    """The epsilon that is promised, and by which accountant: "pld" where it knows the event, "rdp" elsewhere.

    Args:
        event: what was released.
        delta: in (0, 1).
        relation: see ``epsilon``.

    Raises:
        ConfigError: see ``epsilon``.
        Refused: no accountant knows every part of the event.
    """
    terms = normal_form(event)
    require(terms)
    name = "pld" if "pld" in accountants_of(terms) else "rdp"
    return epsilon(event, delta, relation, name), name


def beside(event: Event, delta: float, relation: Relation, *, prv: bool = False) -> dict[str, float]:
    """What each accountant says that knows `event`, side by side.

    Args:
        event: what was released.
        delta: in (0, 1).
        relation: see ``epsilon``.
        prv: also ask Opacus' PRV, which imports torch; left out where it cannot answer.

    Returns:
        "pld" and "rdp" and, if asked, "prv" -> epsilon.

    Raises:
        Refused: no accountant knows every part of the event, or two contradict each other.
        ConfigError: see ``epsilon``.
    """
    terms = normal_form(event)
    require(terms)
    known = accountants_of(terms)
    values: dict[str, float] = {}
    for name in ("pld", "rdp", "prv"):
        if name in known and (prv or name != "prv"):
            with suppress(ConfigError) if name == "prv" else nullcontext():
                values[name] = epsilon(event, delta, relation, name)
    if math.isfinite(values.get("pld", math.inf)):
        for name in values.keys() - {"pld"}:
            _compare(values["pld"], delta, name, values[name], math.inf if name == "rdp" else PRV_GAP)
    return values


def curve(event: Event, relation: Relation, deltas: Sequence[float]) -> list[tuple[float, float]]:
    """The stated epsilon at several deltas, as (delta, epsilon); one computation for all of them.

    Raises:
        ConfigError: see ``epsilon``.
        Refused: see ``stated``.
    """
    return [(float(delta), stated(event, delta, relation)[0]) for delta in deltas]


def cross_check(event: Event, delta: float, relation: Relation, stated: float) -> dict[str, Any] | None:
    """A second accountant's epsilon for `event`; a refusal where it contradicts the first.

    Opacus' PRV adds its error bound of 0.01, and over a grid of mechanisms lies 0.0065 to 0.0295 above PLD; -0.001 to
    +0.05 is accepted (or a thousandth, of an epsilon above 50). At delta < 1e-10 they are not compared: both are then ruled by
    round-off (at 1e-13 PLD was seen 1 of 9 above, at 1e-12 PRV 0.12 of 13 above the other). Where it does not know the event
    or cannot answer (a tiny delta, or gigabytes of memory for very many steps) RDP stands in, which may be looser but not
    below PLD.

    Args:
        event: what is released.
        delta: in (0, 1).
        relation: the neighbouring relation.
        stated: the epsilon about to be promised.

    Returns:
        `{"name", "version", "epsilon"}` of the second accountant; None where one alone knows the event.

    Raises:
        Refused: the two accountants contradict each other, or `stated` is infinite, or none knows the event.
    """
    if math.isinf(stated):
        raise Refused(
            f"no finite epsilon can be certified at delta {delta:g}, so nothing can be promised. "
            "Raise privacy.delta or privacy.noise_multiplier."
        )
    known = accountants(event)
    require(normal_form(event))
    if not {"pld", "rdp"} <= known:
        return None
    try:
        name, package, most = "opacus-prv", "opacus", PRV_GAP
        value = epsilon(event, delta, relation, "prv")
    except ConfigError:
        why = "prv cannot answer" if "prv" in known else "prv does not know this event"
        name, package, most = f"dp-accounting-rdp ({why})", "dp-accounting", math.inf
        value = epsilon(event, delta, relation, "rdp")
    _compare(stated, delta, name, value, most)
    return {"name": name, "version": metadata.version(package), "epsilon": value}


def _compare(pld: float, delta: float, name: str, value: float, gap: float) -> None:
    if delta < LEAST_COMPARED:
        return
    if not pld - 1e-3 <= value <= pld + max(gap, 1e-3 * pld):
        raise Refused(
            f"epsilon {pld:.4f} at delta {delta:g} is contradicted by {name}: {value:.4f}. "
            "Nothing can be promised until they agree. Compute the plan again, and report the "
            "event if the difference stays."
        )


@lru_cache(maxsize=1024)
def _pld_epsilon(terms: Terms, delta: float, relation: Relation, interval: float) -> float:
    try:
        return privacy_loss(terms, relation, interval).epsilon_at(delta)
    except OverflowError:  # the loss of hardly any noise does not fit a float
        return math.inf


def _prv(terms: Terms, delta: float) -> float:
    # Opacus' own mesh (prv.py, _get_domain): its arrays grow with epsilon and sqrt(T).
    steps = sum(part.times for part in terms.sampled)
    mesh = 0.01 / math.sqrt(steps * math.log(12_000 / delta) / 2)
    points = 2 * (rdp_epsilon(terms, delta / 4000) + 3) / mesh
    if points > PRV_MAX_POINTS:
        raise MemoryError(f"it needs {points:.0f} points")
    import numpy as np
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(part.noise_multiplier, part.probability, part.times) for part in terms.sampled]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        value = float(accountant.get_epsilon(delta, eps_error=0.01))
    if not math.isfinite(value):
        raise ValueError(f"it found {value}")
    return value
