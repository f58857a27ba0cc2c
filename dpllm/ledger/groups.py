"""Tuning groups: the runs of one sweep, and what they come to together.

Comes in: a ledger. Goes out: the group's runs, their total, a line about each. Must not write.

Choosing among the runs of a group costs nothing beyond their total, as long as the choice looks at nothing but what they
released. A choice by an un-noised figure of private evaluation data is outside it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from dpllm.ledger.ledger import Ledger
from dpllm.ledger.values import Run
from dpllm.privacy.accounting import Relation, compose, stated


def members(book: Ledger, dataset: str, name: str) -> list[Run]:
    """The runs of a group, in the order in which they were fixed; empty where the dataset has no such group."""
    return [run for run in book.runs(dataset) if run.reservation.group == name]


def names(book: Ledger, dataset: str) -> list[str]:
    """Every tuning group of a dataset, oldest first."""
    found = (run.reservation.group for run in book.runs(dataset))
    return list(dict.fromkeys(name for name in found if name is not None))


def total(book: Ledger, dataset: str, name: str) -> dict[str, Any]:
    """What all runs of a group come to, in full, whatever became of them.

    Args:
        book: The ledger.
        dataset: The account that the group was charged to.
        name: Of the group.

    Returns:
        ``name``, ``runs`` (how many), ``epsilon`` and ``delta``: the budget's delta, or else the largest that a run states.

    Guarantee:
        The runs were fixed before the first of them, so that their composition by PLD holds for all of them together.
    """
    runs = members(book, dataset, name)
    budget = book.budget(dataset)
    delta = budget.delta if budget else max(run.reservation.delta for run in runs)
    epsilon = _together(tuple(run.whole() for run in runs), delta, runs[0].reservation.relation)
    return {"name": name, "runs": len(runs), "epsilon": epsilon, "delta": delta}


@lru_cache(maxsize=64)
def _together(events: tuple[str, ...], delta: float, relation: Relation) -> float:
    return stated(compose([json.loads(text) for text in events]), delta, relation)[0]


def of_entry(book: Ledger, entry: str) -> dict[str, Any] | None:
    """The total of the group that a reservation belongs to; None for a single run."""
    claim = book.reservation(entry)
    return total(book, claim.dataset, claim.group) if claim.group is not None else None


def described(book: Ledger, dataset: str) -> list[str]:
    """A line about each group of a dataset, for people."""
    lines = []
    for name in names(book, dataset):
        found = total(book, dataset, name)
        done = sum(run.state == "completed" for run in members(book, dataset, name))
        lines.append(
            f"Tuning group {name}: {found['runs']} runs fixed together, {done} completed; all of them come to epsilon "
            f"{found['epsilon']:.3f} at delta {found['delta']:g}."
        )
    return lines
