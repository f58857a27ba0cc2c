"""What accountants say today about a stored event, and how far a statement may lie from it.

Comes in: events and terms of a stranger. Goes out: numbers as JSON has them. Opacus is not asked: it would import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dpllm.card.inference import Inference
from dpllm.privacy import accounting, limits
from dpllm.privacy.accounting import Relation
from dpllm.privacy.events import Event
from dpllm.privacy.parts import parts_of
from dpllm.privacy.plan import CURVE_DELTAS, Plan
from dpllm.verification.values import TOLERANCE, Difference, Wrong, differences

Promised = Plan | Inference
"""What states an epsilon of an event."""
LARGE = 500.0
"""Epsilon by RDP beyond which PLD has a coarser grid: such an epsilon promises nothing, and would take gigabytes."""
COARSE = 2e-2
"""How far PLD on a coarser grid may lie above."""
MOST_PARTS, MOST_STEPS, LEAST_NOISE = 4, 1_000_000, 0.01
MAGNIFIED = 1e-5
"""Relative, where the last bits are magnified: curves fitted to scores, and limits that read deltas down to 1e-10. Processors
round the accountant's Fourier transform differently: on another one gdp_mu moved by 1.2e-6, and epsilon at delta 1e-8 by 1e-8."""
OF_SUMMARY = 1e-3
"""Relative, of gdp_mu alone: near deltas of 1e-10 the transform's noise is most of it, and another processor moved it by 5e-4."""
OF_ROWS = "Restore inference.json from where the rows were published, or write them anew."
OTHER_VERSION = 1e-3
"""Relative; how far PLD of another version may lie from this one."""


def bounded(event: Event) -> frozenset[str]:
    """Who knows an event, which can be computed in seconds.

    Raises:
        Wrong: It has more different parts than a run can have, more steps, or less noise.
        ConfigError: It is malformed.
    """
    parts: list[Any] = [part for kind in parts_of(event) for part in kind]
    many = len(parts) > MOST_PARTS
    for part in parts:
        group = getattr(part, "group_size", 1)  # whose steps are mixtures of many Gaussians
        many |= part.times > (MOST_STEPS if group == 1 else 10 * MOST_STEPS // group)
        many |= getattr(part, "noise_multiplier", LEAST_NOISE) < LEAST_NOISE
    if many:
        raise Wrong(
            f"the event has more than {MOST_PARTS} different parts or {MOST_STEPS:,} steps, or noise below {LEAST_NOISE}, which "
            "nothing by dpllm has. Take it from where it was published."
        )
    return accounting.accountants(event)


def pld(event: Event, delta: float, relation: Relation) -> tuple[float, bool]:
    """Epsilon by PLD, and whether on a coarser grid, which raises it.

    Raises:
        Wrong: See ``bounded``.
        ConfigError: The event is malformed, or PLD does not know it.
    """
    if "rdp" in bounded(event):
        most = accounting.epsilon(event, delta, relation, "rdp")
        if most > LARGE:
            interval = accounting.FINE_INTERVAL * most / LARGE
            return accounting.epsilon(event, delta, relation, interval=interval), True
    found = accounting.epsilon(event, delta, relation)
    return found, found > LARGE


def of(terms: Promised) -> tuple[float, bool]:
    """See ``pld``."""
    return pld(terms.event, terms.delta, terms.neighbouring_relation)


def beside(terms: Promised) -> dict[str, float | None]:
    """By each accountant that knows the event."""
    event, known = terms.event, bounded(terms.event)
    found = {"pld": of(terms)[0]} if "pld" in known else {}
    if "rdp" in known:
        found["rdp"] = accounting.epsilon(event, terms.delta, terms.neighbouring_relation, "rdp")
    return {name: accounting.finite(epsilon) for name, epsilon in found.items()}


@lru_cache(maxsize=256)
def attackers(event: Event, relation: Relation) -> dict[str, Any]:
    """``limits``, ``curve`` and ``trade_off`` of a block."""
    bounded(event)
    return {
        "limits": dict(limits.attacker_limits_of(event, relation)),
        "curve": [
            [delta, accounting.finite(found)] for delta, found in accounting.curve(event, relation, CURVE_DELTAS)
        ],
        "trade_off": limits.trade_off(event, relation),
    }


def wrong_limits(stated: Mapping[str, Any], fresh: Mapping[str, Any], slack: float) -> list[Difference]:
    """Which limits of attackers are not those of the event."""
    differing = differences(stated, fresh, "limits", slack)
    coarse = {one.field for one in differences(stated, fresh, "limits", max(slack, OF_SUMMARY))}
    return [one for one in differing if one.field != "limits.gdp_mu" or one.field in coarse]


def together(composed: list[Event], delta: float, relation: Relation) -> float:
    """The stated epsilon of several events."""
    return accounting.stated(accounting.compose(composed), delta, relation)[0]


def rounding(terms: Promised, other: float = OTHER_VERSION, same: float = TOLERANCE) -> float:
    """How far a figure may lie from what is computed here: hardly, where the accountant's version is the same."""
    return other if by(terms) else same


def by(terms: Promised) -> str:
    """Which other version of the accountant computed the statement; empty where it is this one."""
    stated, here = terms.accountant.version, accounting.versions()["version"]
    return "" if stated == here else f" (stated by dp-accounting {stated}, computed here by {here}, which may differ)"


def again(terms: Promised | None) -> str:
    """What to do about a statement that is wrong, by its kind."""
    of_run = "Restore privacy.json from where the model was published, or write the card again: dpllm card RUN."
    return OF_ROWS if isinstance(terms, Inference) else of_run
