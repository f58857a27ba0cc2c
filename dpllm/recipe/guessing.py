"""How many coins an audit guesses, and with which weights, where the recipe does not say.

Comes in: a number of candidates. Goes out: the tests, in the words of ``dpllm.auditing.bounds.epsilon_lower_bound``. Knows
neither scores nor coins, so that it can be fixed before training.
"""

from __future__ import annotations

import math


def default_ways(candidates: int, *, shifted: bool = False) -> dict[str, list[int]]:
    """The tests of a group of canaries.

    Args:
        candidates: m, planted or not.
        shifted: Whether the score of every member is shifted alike, as those of gradient canaries are: then one test is best.

    References:
        ``scripts/audit_power.py``, whose table in docs/measurements.md they were chosen by.
    """
    root = math.sqrt(candidates)
    near, far = round(4 * root), min(round(16 * root), candidates)
    if candidates < 64:  # near would be more than half of them, and hardly another test
        near = far
    if shifted:
        return {"falling": [near] if near else []}
    few = [round(root), near] if near < far else [round(root)]
    return {"falling": sorted({near, far} - {0}), "falling_in": [r for r in few if 0 < r <= candidates // 2]}
