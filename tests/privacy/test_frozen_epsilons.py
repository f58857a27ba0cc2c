"""What accounting states, frozen before the house was rebuilt: 400 times an event, a delta and a relation.

A change of the house must leave every figure as it is. One that is meant: delete the file, run this test under --full twice, read
the difference, and write it in the CHANGELOG. Processors round differently, in the last digits only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dpllm.privacy import accounting, events
from dpllm.privacy.events import CyclicPoisson, Event, Gaussian, PureDP, SelfComposed, compose, dp_sgd_event

FROZEN = Path(__file__).parents[1] / "golden" / "frozen-epsilons.json"
DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)
RELATIONS = ("zero_out", "add_or_remove_one")
TOLERANCE = 1e-6  # of epsilon


def grid() -> Iterator[Event]:
    """Fifty events of the kinds that runs, releases and accounts are made of."""
    for q, (sigma, steps) in product((1e-3, 0.01, 0.1), ((0.8, 50), (1.0, 200), (1.5, 1_000), (2.5, 5_000))):
        yield dp_sgd_event(q, sigma, steps)
    for q, sigma, steps in ((1.0, 20.0, 100), (0.5, 8.0, 64), (0.03, 0.6, 1), (1e-5, 0.8, 10_000), (0.01, 1.1, 30_000)):
        yield dp_sgd_event(q, sigma, steps)
    for group_size in (2, 4):
        yield dp_sgd_event(0.01, 2.0, 100, group_size)
    for bands, (count, q, sigma) in product((2, 8, 15), ((100, 0.05, 1.0), (1_000, 0.2, 4.0), (16, 1.0, 3.0))):
        yield CyclicPoisson(bands, count, q, Gaussian(sigma))
    for sigma, count in ((1.0, 1), (3.0, 1), (3.0, 9), (40.0, 500), (0.7, 2), (100.0, 1)):
        yield SelfComposed(count, Gaussian(sigma))
    for epsilon in (1e-3, 0.1, 0.5, 2.0):
        yield PureDP(epsilon)
    yield SelfComposed(40, PureDP(0.05))
    yield events.BoundedRange(0.2, 300)
    yield events.Imported(1.5, 1e-9)
    first, second = dp_sgd_event(0.01, 1.0, 300), dp_sgd_event(0.02, 1.5, 500)
    counts, mean = PureDP(0.3), SelfComposed(3, Gaussian(5.0))
    turns = CyclicPoisson(4, 200, 0.1, Gaussian(2.0))
    yield compose([first, second])
    yield compose([first, first])
    yield compose([first, counts])
    yield compose([second, mean])
    yield compose([turns, counts, mean])
    yield compose([turns, first])
    yield compose([first, second, turns, counts, mean])
    yield compose([mean, counts, events.BoundedRange(0.1, 100)])
    yield compose([compose([first, counts]), events.Imported(0.5, 1e-9), SelfComposed(2, second)])


def stated(row: dict[str, Any]) -> float:
    return accounting.epsilon(events.read(row["event"]), row["delta"], row["relation"])


def combinations() -> list[dict[str, Any]]:
    """Each event with each relation and delta, in this order: what one event costs once is kept for its deltas."""
    return [
        {"event": event.to_json(), "relation": relation, "delta": delta}
        for event, relation, delta in product(grid(), RELATIONS, DELTAS)
    ]


def frozen() -> list[dict[str, Any]]:
    if not FROZEN.exists():
        rows = [json.dumps({**row, "epsilon": stated(row)}) for row in combinations()]
        FROZEN.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
        pytest.fail(f"{FROZEN} was missing; it was written anew.")
    rows: list[dict[str, Any]] = json.loads(FROZEN.read_text(encoding="utf-8"))
    return rows


def test_stated_epsilons_stay(full: bool) -> None:
    each = len(RELATIONS) * len(DELTAS)
    rows = frozen()
    assert len(rows) == 400
    events_of = [rows[start : start + each] for start in range(0, len(rows), each)]
    moved = [
        (row, now)
        for some in (events_of if full else events_of[::10])
        for row in some
        if not math.isclose(now := stated(row), row["epsilon"], rel_tol=TOLERANCE)
    ]
    assert not moved
