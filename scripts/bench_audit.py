"""How long the statistics of an audit take: medians, printed as JSON.

python scripts/bench_audit.py [--repeats 50]

"cold" is the first audit of a process, with nothing tabulated; "warm" is a later one, with the outcomes of earlier ones
kept, as in a simulation. The bars: 10 ms for the one-run bound at 1,000 canaries, 50 ms for an AUC with its interval at
1,000 members and 1,000 others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from _machine import machine, versions

from dpllm.auditing import bounds
from dpllm.auditing.statistics import auc
from dpllm.recipe.sections import default_ways

NUM_CANARIES, ALPHA, DELTA = 1000, 0.05, 1e-5
WAYS = default_ways(NUM_CANARIES)
SHIFT = 0.9252  # the Gaussian mechanism with epsilon 4 at delta 1e-5


def forget() -> None:
    """Clears every cache of the statistics."""
    for value in vars(bounds).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def timed(work: Callable[[np.random.Generator], Callable[[], object]], repeats: int, *, cold: bool) -> dict[str, float]:
    """Median and quartiles in milliseconds; ``work`` draws new scores and returns the function that is timed."""
    times = []
    for repeat in range(repeats + 1):
        job = work(np.random.default_rng(repeat))
        if cold:
            forget()
        began = time.perf_counter()
        job()
        times.append((time.perf_counter() - began) * 1e3)
    low, middle, high = statistics.quantiles(times[1:], n=4)  # the first call also imports lazy modules
    return {"median_ms": round(middle, 3), "quarter_ms": round(low, 3), "three_quarters_ms": round(high, 3)}


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats

    def one_run(rng: np.random.Generator) -> Callable[[], object]:
        coins = rng.random(NUM_CANARIES) < 0.5
        scores = coins * SHIFT + rng.normal(size=NUM_CANARIES)
        return lambda: bounds.epsilon_lower_bound(scores, coins, delta=DELTA, alpha=ALPHA, **WAYS)

    def area(rng: np.random.Generator) -> Callable[[], object]:
        scores = rng.normal(size=(2, 1000))
        return lambda: auc(scores[0] + SHIFT, scores[1])

    cases = {
        "one-run bound, cold": (timed(one_run, repeats, cold=True), 10),
        "one-run bound, warm": (timed(one_run, repeats, cold=False), 10),
        "AUC with its interval, 2 x 1000": (timed(area, repeats, cold=True), 50),
    }
    packages = ("dpllm", "numpy", "scipy", "dp-accounting")
    print(
        json.dumps(
            {
                "num_canaries": NUM_CANARIES,
                **WAYS,
                "repeats": repeats,
                "machine": machine(),
                "versions": versions(*packages),
                "cases": {name: {**times, "bar_ms": bar} for name, (times, bar) in cases.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
