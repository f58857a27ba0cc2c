"""What the lower bound of an audit finds of mechanisms whose epsilon is known: mean bounds, as a table.

python scripts/audit_mechanisms.py [--runs 200]

"default" are the tests of ``sections.default_ways``; "both" is the first of them alone, and "in" the test of gradient
canaries. The mechanisms
are those of ``tests/privacy/audit_simulation.py``, at delta 1e-5 and alpha 0.05; "a visible share" shows so many of the members
plainly, at any epsilon, and the others not at all.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "privacy"))

from audit_simulation import EPSILONS, MECHANISMS, Mechanism, audits

from dpllm.recipe.sections import default_ways


def visible(share: float) -> Mechanism:
    """Scores in which a random share of the members stands out by six standard deviations."""

    def run(coins, epsilon, delta, rng):  # type: ignore[no-untyped-def]
        return 6.0 * (coins & (rng.random(len(coins)) < share)) + rng.normal(size=len(coins))

    return Mechanism(run, 1e-5)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs of each mechanism")
    count = parser.parse_args().runs
    names = ("randomized response", "laplace", "gaussian", "sampled gaussian")
    cases = [(name, MECHANISMS[name], epsilon) for name in names for epsilon in (*EPSILONS, 8.0)]
    cases += [(f"{share:.0%} visible", visible(share), np.inf) for share in (0.05, 0.1, 0.3, 1.0)]
    print("| mechanism | epsilon |" + " default | both | in |" * 2)
    print("|---" * 8 + "|")
    for name, mechanism, epsilon in cases:
        cells = []
        for size in (200, 1000):
            default = default_ways(size)
            two_sided, one_side = {"falling": default["falling"][:1]}, {"falling_in": [round(2 * math.sqrt(size))]}
            for ways in (default, two_sided, one_side):
                rows = audits(mechanism, epsilon, size, count, np.random.default_rng(size), **ways)
                cells.append(f"{np.mean([bound.value for bound in rows]):.2f}")
        print(f"| {name} | {epsilon:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
