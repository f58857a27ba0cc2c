"""What the words of canaries tell about their coins: nothing, if the coins were fair.

Comes in: canaries. Goes out: how well a classifier that sees no model tells planted ones from the others. Knows no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpllm.auditing.blind import blind
from dpllm.auditing.verdict import CONTROL_LEVEL
from dpllm.canaries.canaries import Canary


def words_control(canaries: Sequence[Canary]) -> dict[str, Any] | None:
    """AUC, its interval at ``CONTROL_LEVEL``, and whether it ``succeeds``; None: too few canaries of a side."""
    sides = [[canary.text for canary in canaries if canary.inserted is coin] for coin in (True, False)]
    found = blind(sides[0], sides[1], confidence=1 - CONTROL_LEVEL)
    if found is None:
        return None
    return {"auc": found.auc, "interval": [found.low, found.high], "succeeds": found.succeeds}
