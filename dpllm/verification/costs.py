"""What accountants say today about a stored event, each asked once.

Comes in: an event as JSON text, because dicts cannot be keys. Goes out: numbers as JSON has them. Knows no card. Opacus is
not asked: it would import torch.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

from dpllm.privacy import accounting, events, limits, plan
from dpllm.privacy.accounting import Relation
from dpllm.statement import tradeoff_figure
from dpllm.verification.values import Wrong

LARGE = 500.0
"""Epsilon by RDP beyond which PLD has a coarser grid: such an epsilon promises nothing, and would take gigabytes."""
MOST_PARTS, MOST_STEPS, LEAST_NOISE = 4, 1_000_000, 0.01
_KEPT = 256


def text(event: Any) -> str:
    """An event as the other functions take it; equal for equal events."""
    return json.dumps(event, sort_keys=True, allow_nan=False)


@lru_cache(maxsize=_KEPT)
def pld(event: str, delta: float, relation: Relation) -> tuple[float, bool]:
    """Epsilon by PLD, and whether on a coarser grid, which raises it.

    Raises:
        Wrong: The event has more different parts than a run can have.
        ConfigError: It is malformed, or PLD does not know it.
    """
    value, known = bounded(event)
    if "rdp" in known:
        most = accounting.epsilon(value, delta, relation, "rdp")
        if most > LARGE:
            interval = accounting.FINE_INTERVAL * most / LARGE
            return accounting.epsilon(value, delta, relation, interval=interval), True
    found = accounting.epsilon(value, delta, relation)
    return found, found > LARGE


@lru_cache(maxsize=_KEPT)
def beside(event: str, delta: float, relation: Relation) -> dict[str, float | None]:
    """By each accountant that knows the event."""
    value, known = bounded(event)
    found = {"pld": pld(event, delta, relation)[0]} if "pld" in known else {}
    if "rdp" in known:
        found["rdp"] = accounting.epsilon(value, delta, relation, "rdp")
    return {name: _finite(epsilon) for name, epsilon in found.items()}


@lru_cache(maxsize=_KEPT)
def attackers(event: str, relation: Relation) -> dict[str, Any]:
    """``limits``, ``curve`` and ``trade_off`` of a block."""
    value, _ = bounded(event)
    return {
        "limits": dict(limits.attacker_limits_of(value, relation)),
        "curve": [[delta, _finite(found)] for delta, found in accounting.curve(value, relation, plan.CURVE_DELTAS)],
        "trade_off": tradeoff_figure.trade_off(value, relation),
    }


def _most_steps(part: Any) -> int:
    """Fewer for groups, whose steps are mixtures of many Gaussians."""
    group: int = getattr(part, "group_size", 1)
    return MOST_STEPS if group == 1 else 10 * MOST_STEPS // group


def bounded(event: str) -> tuple[Any, frozenset[str]]:
    """An event that can be computed in seconds, and who knows it.

    Raises:
        Wrong: It is another.
        ConfigError: It is malformed.
    """
    value = json.loads(event)
    parts = [part for kind in events.normal_form(value) for part in kind]
    many = len(parts) > MOST_PARTS or any(part.times > _most_steps(part) for part in parts)
    if many or any(getattr(part, "noise_multiplier", LEAST_NOISE) < LEAST_NOISE for part in parts):
        raise Wrong(
            f"the event has more than {MOST_PARTS} different parts or {MOST_STEPS:,} steps, or noise below {LEAST_NOISE}, which "
            "none of dpllm has. Restore privacy.json from where the model was published."
        )
    return value, events.accountants(value)


@lru_cache(maxsize=_KEPT)
def together(composed: str, delta: float, relation: Relation) -> float:
    """The stated epsilon of several events, a JSON list of them."""
    return accounting.stated(accounting.compose(json.loads(composed)), delta, relation)[0]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
