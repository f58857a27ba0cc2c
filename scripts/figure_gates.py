"""The cost of runs in any order, compared with one final reservation: tables and figure of docs/measurements.md.

    python scripts/figure_gates.py            prints the tables, writes docs/figures/gates.png (about two minutes)
    python scripts/figure_gates.py --orders   prints what powers of the order in ``renyi.filter_order`` cost (about ten)

Except with --orders, every run has sampling rate 0.02, 150 steps and delta 1e-5.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpllm.privacy.accounting import calibrate_noise_multiplier, compose, dp_sgd_event, epsilon
from dpllm.privacy.renyi import ORDERS, Fit, allowance, filter_order, rdp, smallest_noise_multiplier

RATE, STEPS, DELTA, NOISE = 0.02, 150, 1e-5, 0.8
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)
SHOWN, RUNS = (1, 3, 8), (1, 2, 4, 8)
INK, PLD, FILTER, SUM = "#333333", "#3b6fb6", "#c05a2b", "#7a7a7a"


def event(noise_multiplier: float, runs: int = 1) -> dict:
    return compose([dp_sgd_event(RATE, noise_multiplier, STEPS)] * runs) if runs > 1 else dp_sgd_event(
        RATE, noise_multiplier, STEPS
    )  # fmt: skip


def equal_runs(budget: float, runs: int) -> tuple[float, float]:
    """Noise multiplier of equal runs that use up the budget: as one final group, and in any order, by the filter."""
    exact = calibrate_noise_multiplier(budget, DELTA, RATE, runs * STEPS, "zero_out")
    order = filter_order(budget, DELTA)
    return exact, smallest_noise_multiplier(event, Fit(order, allowance(budget, DELTA, order) / runs))


def many_runs(budget: float) -> tuple[int, int, int]:
    """Number of runs of noise 0.8 that a budget admits: by summing epsilons, by the filter, as one final group."""
    alone = epsilon(event(NOISE), DELTA, "zero_out")
    order = filter_order(budget, DELTA)
    by_filter = int(allowance(budget, DELTA, order) / rdp(event(NOISE), order))
    final = 0
    while epsilon(event(NOISE, final + 1), DELTA, "zero_out") <= budget:
        final += 1
    return int(budget / alone), by_filter, final


def orders() -> None:
    """Prints the extra noise of each power's order over the best order for the same runs: maximum and mean."""
    for power in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        more = []
        for budget in (0.5, 1, 3, 8, 16, 50):
            for delta in (1e-5, 1e-7):
                own = max(ORDERS, key=lambda order: max(0.0, allowance(budget, delta, order)) / order**power)
                for rate, steps in ((0.02, 150), (0.005, 1000), (0.002, 3000), (0.1, 100), (0.05, 400)):
                    for runs in RUNS:
                        noise = [
                            smallest_noise_multiplier(
                                lambda sigma, rate=rate, steps=steps: dp_sgd_event(rate, sigma, steps),
                                Fit(order, allowance(budget, delta, order) / runs),
                            )
                            for order in (own, *ORDERS[::2])
                        ]
                        more.append(noise[0] / min(noise) - 1)
        print(
            f"power {power:g}: at most {max(more):.0%}, on average {sum(more) / len(more):.1%} more noise", flush=True
        )


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    print("| budget ε | runs | noise, final | noise, in any order | more |")
    print("|---|---|---|---|---|")
    noise = {(budget, 1): equal_runs(budget, 1) for budget in BUDGETS}
    for budget in SHOWN:
        for number in RUNS:
            exact, filtered = noise.setdefault((budget, number), equal_runs(budget, number))
            print(f"| {budget} | {number} | {exact:.4f} | {filtered:.4f} | {filtered / exact - 1:.1%} |")
    runs = [many_runs(budget) for budget in BUDGETS]
    print("| budget ε | order | runs by sums | runs in any order | runs, final |")
    print("|---|---|---|---|---|")
    for budget, (sums, filtered, final) in zip(BUDGETS, runs, strict=True):
        print(f"| {budget} | {filter_order(budget, DELTA):g} | {sums} | {filtered} | {final} |")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", facecolor="white")
    left.plot(BUDGETS, [noise[budget, 1][0] for budget in BUDGETS], "o-", color=PLD, label="final")
    left.plot(BUDGETS, [noise[budget, 1][1] for budget in BUDGETS], "s-", color=FILTER, label="in any order")
    left.set_xscale("log", base=2)
    left.set_xticks(BUDGETS, map(str, BUDGETS))
    left.minorticks_off()
    left.set_ylim(bottom=0)
    left.set_ylabel("noise multiplier", color=INK)
    left.set_title("One run that takes the whole budget", loc="left", fontsize=10, color=INK)
    places = range(len(BUDGETS))
    for shift, column, color, label in (
        (-0.27, 0, SUM, "sums of ε"),
        (0, 1, FILTER, "in any order"),
        (0.27, 2, PLD, "one final group"),
    ):
        right.bar([place + shift for place in places], [row[column] for row in runs], 0.25, color=color, label=label)
    right.set_xticks(places, map(str, BUDGETS))
    right.set_ylabel("runs admitted", color=INK)
    right.set_title(f"Runs of noise multiplier {NOISE}", loc="left", fontsize=10, color=INK)
    for axis in (left, right):
        axis.set_xlabel("budget ε at δ = 1e-5", color=INK)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    path = Path(__file__).parents[1] / "docs" / "figures" / "gates.png"
    figure.savefig(path, dpi=150)
    print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    orders() if "--orders" in sys.argv else main()
