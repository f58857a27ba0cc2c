"""How long a reservation takes: the median time of ``Ledger.reserve``, printed as JSON.

python scripts/bench_ledger.py [--postgres postgresql://USER@HOST/DATABASE] [--repeats 50] [--processes 12]

The PostgreSQL database must be one that may be written to: each case makes a schema of its own there and drops it. "warm"
is a ledger that is open, as in a process that reserved before; "cold" opens it, reads and checks all of it, and reserves,
as a training run does once. In both, the run's own epsilon is known, because the plan computed it. The bar is 10 ms.
With --processes N, N processes reserve at once, each one run after the other: the bar is 1 s at p99.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _machine import machine

from dpllm.ledger import Budget, Ledger, RunRequest, budgets, open_ledger
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy import renyi
from dpllm.privacy.accounting import dp_sgd_event

SIZES = (0, 100, 1000)
DELTA = 1e-5
EVENT = dp_sgd_event(0.01, 4.0, 500)
CLAIM = RunRequest(EVENT, DELTA, 500, "example", "zero_out", "bench")


def room(runs: int) -> float:
    """An epsilon that is enough for this many runs."""
    epsilon = 8.0
    while renyi.allowance(epsilon, DELTA, order := renyi.filter_order(epsilon, DELTA)) < runs * renyi.rdp(EVENT, order):
        epsilon *= 2
    return epsilon


def prepare(book: Ledger, limited: bool, runs: int, runs_to_come: int) -> None:
    """A ledger with ``runs`` reservations, with a budget for all runs or without one."""
    terms: dict[str, Any] = {"unit": "example", "relation": "zero_out", "by": "bench", "reason": "bench"}
    if limited:
        budgets.set_budget(book, "notes", Budget(room(runs + runs_to_come), DELTA, **terms))
    for _ in range(runs):
        reserve_all(book, "notes", [CLAIM])


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def cold(location: str) -> None:
    """Makes one reservation as a new process does."""
    book = open_ledger(location)
    assert book is not None
    with book:
        reserve_all(book, "notes", [CLAIM])


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": round(middle, 2), "quarter_ms": round(low, 2), "three_quarters_ms": round(high, 2)}


def member(location: str, repeats: int, start: Any, results: Any) -> None:
    """One of several concurrent processes."""
    book = open_ledger(location)
    assert book is not None
    with book:
        book.outlook("notes", [CLAIM])  # imports and accounting, which a run does before it reserves
        start.wait()
        results.put([timed(lambda: reserve_all(book, "notes", [CLAIM])) for _ in range(repeats)])


def crowd(location: str, processes: int, repeats: int) -> dict[str, float]:
    """Quantiles of the waiting time of a reservation, in milliseconds."""
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(processes), spawn.Queue()
    workers = [spawn.Process(target=member, args=(location, repeats, start, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    times = sorted(time for _ in workers for time in results.get())
    for worker in workers:
        worker.join()
    quantiles = {
        name: times[round(part * (len(times) - 1))] for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1))
    }
    return {f"{name}_ms": round(value, 1) for name, value in quantiles.items()}


@contextmanager
def place(postgres: str | None) -> Iterator[str]:
    """Yields the location of an empty ledger."""
    if postgres is None:
        with tempfile.TemporaryDirectory() as root:
            yield str(Path(root) / "ledger.sqlite")
        return
    import psycopg

    name = "bench_" + secrets.token_hex(6)
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {name}")
        try:
            yield f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3D{name}"
        finally:
            db.execute(f"DROP SCHEMA {name} CASCADE")


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", help="URL of a database that may be written to")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1, help="how many reserve at once")
    options = parser.parse_args()
    if options.processes > 1:
        cases = []
        for limited in (False, True):
            with place(options.postgres) as location:
                book = open_ledger(location)
                assert book is not None
                with book:
                    prepare(book, limited, 0, options.processes * options.repeats)
                timings = crowd(location, options.processes, options.repeats)
            cases.append({"processes": options.processes, "budget": limited, **timings})
        print(
            json.dumps({"bar_p99_ms": 1000, "repeats": options.repeats, "machine": machine(), "cases": cases}, indent=2)
        )
        return
    cases = []
    for store, url in (("sqlite", None), ("postgres", options.postgres)):
        for runs in SIZES if store == "sqlite" or url else ():
            with place(url) as location:
                book = open_ledger(location)
                assert book is not None
                with book:
                    prepare(book, True, runs, 2 * options.repeats)
                    warm = [
                        timed(lambda book=book: reserve_all(book, "notes", [CLAIM])) for _ in range(options.repeats)
                    ]
                first = [timed(lambda location=location: cold(location)) for _ in range(options.repeats)]
            cases.append({"store": store, "runs": runs, "warm": summary(warm), "cold": summary(first)})
    print(json.dumps({"bar_ms": 10, "repeats": options.repeats, "machine": machine(), "cases": cases}, indent=2))


if __name__ == "__main__":
    main()
