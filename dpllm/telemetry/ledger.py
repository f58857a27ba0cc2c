"""The ledger as Prometheus metrics: budgets, reservations and their heartbeats, refusals, the chain.

Comes in: an open ledger. Goes out: metric families. Reads only, and must not decide anything.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dpllm.errors import Refused
from dpllm.ledger import Ledger
from dpllm.ledger.values import State
from dpllm.report.words import without_paths

OPEN = ("reserved", "running")
"""States of a reservation that is not finished: one that waits for its first step, one whose process charges steps."""


@dataclass(frozen=True)
class DatasetValues:
    """What metrics know of one dataset's account.

    Attributes:
        dataset: Its name; of an absolute path the last part.
        budget: Epsilon that all runs together may spend; None where none was set.
        remaining: What is left of it, by the figure that decides; see ``Ledger.remaining``.
        reservations: State -> number.
        heartbeats: (reservation, state) -> time of its last sign of life, in seconds since the epoch, until it is finished.
    """

    dataset: str
    budget: float | None
    remaining: float | None
    reservations: dict[str, int]
    heartbeats: dict[tuple[str, str], float]


@dataclass(frozen=True)
class LedgerValues:
    """What metrics know of a whole ledger.

    Attributes:
        entries: Links of its chain.
        chain_valid: Whether ``Ledger.verify`` finds no contradiction.
        refused: Reason -> how often it refused for it.
    """

    entries: int
    chain_valid: bool
    refused: dict[str, int]


def label(dataset: str) -> str:
    """A dataset's name as metrics show it: of an absolute path the last part, with a hash that tells it from others."""
    short = str(without_paths(dataset))
    return short if short == dataset else f"{short}-{hashlib.sha256(dataset.encode()).hexdigest()[:8]}"


def of_dataset(book: Ledger, dataset: str) -> DatasetValues:
    """Reads one account.

    Args:
        book: The ledger.
        dataset: Name of the account.

    Raises:
        Refused: The chain is not readable.
        ConfigError: The ledger cannot be read.
    """
    budget = book.budget(dataset)
    try:
        remaining = book.remaining(dataset)
    except Refused:  # no accountant knows everything that was entered, and the gate admits nothing more
        remaining = 0.0
    runs = book.runs(dataset)
    states = Counter(run.state for run in runs)
    return DatasetValues(
        label(dataset),
        budget.epsilon if budget else None,
        remaining,
        {state: states[state] for state in get_args(State)},
        {(run.reservation.entry, run.state): run.heartbeat for run in runs if run.state in OPEN},
    )


def of_ledger(book: Ledger) -> LedgerValues:
    """Reads what belongs to no dataset, and verifies the chain."""
    refused: Counter[str] = Counter()
    for (_, reason), number in book.refusals().items():
        refused[reason] += number
    (entries,) = book.store.rows("SELECT COUNT(*) FROM entries")[0]
    return LedgerValues(entries, not book.verify(), dict(refused))


def read(book: Ledger) -> tuple[LedgerValues, list[DatasetValues]]:
    """Reads everything.

    Returns:
        What belongs to no dataset, and the accounts; none where the chain is broken, as nothing else is known then.

    Raises:
        ConfigError: The ledger cannot be read.
    """
    ledger = of_ledger(book)
    names = book.datasets() if ledger.chain_valid else []
    return ledger, [of_dataset(book, name) for name in names]


def dataset_families(*datasets: DatasetValues) -> list[Metric]:
    """The metrics of some accounts."""
    budget = GaugeMetricFamily(
        "dp_training_budget", "Epsilon that all runs on the dataset together may spend.", labels=("dataset",)
    )
    remaining = GaugeMetricFamily(
        "dp_training_budget_remaining",
        "Budget less what is reserved, by the figure that decides whether a run fits.",
        labels=("dataset",),
    )
    reservations = GaugeMetricFamily(
        "dp_ledger_reservations", "Reservations in each state.", labels=("dataset", "state")
    )
    heartbeat = GaugeMetricFamily(
        "dp_reservation_heartbeat_timestamp_seconds",
        "When a reservation that is not finished was made, or last charged a step, in seconds since the epoch.",
        labels=("dataset", "run_id", "state"),
    )
    for one in datasets:
        if one.budget is not None:
            budget.add_metric((one.dataset,), one.budget)
        if one.remaining is not None:
            remaining.add_metric((one.dataset,), one.remaining)
        for state, number in one.reservations.items():
            reservations.add_metric((one.dataset, state), number)
        for (run_id, state), when in one.heartbeats.items():
            heartbeat.add_metric((one.dataset, run_id, state), when)
    return [family for family in (budget, remaining, reservations, heartbeat) if family.samples]


def ledger_families(ledger: LedgerValues) -> list[Metric]:
    """The metrics of a whole ledger."""
    refused = CounterMetricFamily("dp_ledger_refused", "Runs that were refused, by reason.", labels=("reason",))
    for reason, number in sorted(ledger.refused.items()):
        refused.add_metric((reason,), number)
    return [
        GaugeMetricFamily("dp_ledger_entries", "Links of the ledger's hash chain.", value=ledger.entries),
        GaugeMetricFamily(
            "dp_ledger_chain_valid", "1 while the chain holds, 0 once it contradicts itself.", value=ledger.chain_valid
        ),
        *([refused] if refused.samples else []),
    ]
