"""What the two gates of a budget cost: the table and the figure of docs/budgets.md.

    python scripts/figure_gates.py            prints the table, writes docs/figures/gates.png (about a minute)

The run throughout: sampling rate 0.02, 150 steps, delta 1e-5.
"""

from __future__ import annotations

from pathlib import Path

from dpllm.privacy.accounting import calibrate_noise_multiplier, compose, dp_sgd_event, stated
from dpllm.privacy.renyi import Fit, allowance, choose_order, rdp, smallest_noise_multiplier

RATE, STEPS, DELTA, NOISE = 0.02, 150, 1e-5, 0.8
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)
INK, PLD, FILTER, SUM = "#333333", "#3b6fb6", "#c05a2b", "#7a7a7a"


def event(noise_multiplier: float, runs: int = 1) -> dict:
    return compose([dp_sgd_event(RATE, noise_multiplier, STEPS)] * runs) if runs > 1 else dp_sgd_event(
        RATE, noise_multiplier, STEPS
    )  # fmt: skip


def one_run(budget: float) -> tuple[float, float, float]:
    """Noise of one run that takes the whole budget: sealed, under the filter, and the filter's order."""
    planned = calibrate_noise_multiplier(budget, DELTA, RATE, STEPS, "zero_out")
    order = choose_order(budget, DELTA, event(planned))
    adaptive = smallest_noise_multiplier(event, Fit(order, allowance(budget, DELTA, order)))
    return planned, adaptive, order


def many_runs(budget: float) -> tuple[int, int, int]:
    """How many runs of noise 0.8 a budget admits: by sums of epsilons, by the filter, sealed."""
    alone = stated(event(NOISE), DELTA, "zero_out")[0]
    if alone > budget:
        return 0, 0, 0
    order = choose_order(budget, DELTA, event(NOISE))
    by_filter = int(allowance(budget, DELTA, order) / rdp(event(NOISE), order))
    sealed = 1
    while stated(event(NOISE, sealed + 1), DELTA, "zero_out")[0] <= budget:
        sealed += 1
    return int(budget / alone), by_filter, sealed


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    noise = [one_run(budget) for budget in BUDGETS]
    runs = [many_runs(budget) for budget in BUDGETS]
    print(
        "| budget ε | noise, planned | noise, adaptive | more | order | runs by sums | runs, adaptive | runs, planned |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for budget, (planned, adaptive, order), (sums, filtered, sealed) in zip(BUDGETS, noise, runs, strict=True):
        more = f"{adaptive / planned - 1:.1%}"
        print(f"| {budget} | {planned:.4f} | {adaptive:.4f} | {more} | {order:g} | {sums} | {filtered} | {sealed} |")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", facecolor="white")
    left.plot(BUDGETS, [row[0] for row in noise], "o-", color=PLD, label="planned")
    left.plot(BUDGETS, [row[1] for row in noise], "s-", color=FILTER, label="adaptive")
    left.set_xscale("log", base=2)
    left.set_xticks(BUDGETS, map(str, BUDGETS))
    left.minorticks_off()
    left.set_ylim(bottom=0)
    left.set_ylabel("noise multiplier", color=INK)
    left.set_title("One run that takes the whole budget", loc="left", fontsize=10, color=INK)
    places = range(len(BUDGETS))
    for shift, column, color, label in (
        (-0.27, 0, SUM, "sums of ε"),
        (0, 1, FILTER, "adaptive"),
        (0.27, 2, PLD, "planned"),
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
    main()
