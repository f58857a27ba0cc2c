"""The cost of choosing the best of a secret number of runs, compared with alternatives: figures of docs/concepts/selection.md.

    python scripts/choice_costs.py     two tables, in ten seconds; needs no data and no model

In: the E2E mechanism (N 4,160, batch 512, 24 steps, delta 1e-5, independent noise). Out: the epsilon of one
run if a choice among three, ten or thirty expected runs costs epsilon 8; and the epsilon of ten runs of epsilon 4.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq

from dpllm.comparison.choice import DISTRIBUTION, calibrated
from dpllm.privacy import selection
from dpllm.privacy.accounting import FINE_INTERVAL, compose, epsilon
from dpllm.privacy.events import Event, RepeatAndSelect
from dpllm.privacy.parts import parts_of
from dpllm.privacy.plan import Mechanism, noise_multiplier_for, steps_event
from dpllm.privacy.privacy_loss import deltas_at, inverse, privacy_loss

DELTA, TOTAL = 1e-5, 8.0
RUN = Mechanism(
    unit="example",
    max_examples_per_unit=None,
    sampling="unit",
    neighbouring_relation="zero_out",
    dataset_size=4160,
    canary_slots=0,
    expected_batch_size=512,
    num_steps=24,
    noise_multiplier=1.0,
    coefficients=(),
    clipping="flat",
    max_grad_norm=1.0,
    delta=DELTA,
    target_epsilon=TOTAL,
)


def run_of(target: float) -> Event:
    """The event of a run with this epsilon."""
    return steps_event(noise_multiplier_for(target, DELTA, RUN.schedule, "zero_out"), RUN.schedule, 1, 1)


def cost(event: Event, accountant: str = "pld") -> float:
    """The epsilon of an event at DELTA."""
    return epsilon(event, DELTA, "zero_out", accountant)


def simpler(run: Event, mean: float) -> float:
    """Epsilon of the best of ``mean`` expected runs with e^c = e^h + (1 - gamma) delta(h) / gamma."""
    loss, gamma = privacy_loss(parts_of(run), "zero_out", FINE_INTERVAL), selection.gamma_of(mean, DISTRIBUTION)
    heights = [step / 1000 for step in range(10_000)]
    ratios = (
        math.exp(h) + (1 - gamma) / gamma * delta for h, delta in zip(heights, deltas_at(loss, heights), strict=True)
    )
    return inverse(loss, DELTA / mean) + math.log(min(ratios))


def main() -> None:
    """Prints the tables."""
    print(
        f"A choice of epsilon {TOTAL:g}: runs in the mean, of each, of each if all were released, by Renyi, one alone, 95%"
    )
    for mean in (3, 10, 30):
        [run] = calibrated([RUN], mean, TOTAL)
        epsilon_of_run = cost(run.event_of_steps)
        composed = brentq(lambda one_run, n=mean: cost(compose([run_of(one_run)] * n)) - TOTAL, 0.5, TOTAL, xtol=1e-3)
        renyi = cost(RepeatAndSelect((run.event_of_steps,), mean, DISTRIBUTION), "rdp")
        alone, runs_in_95_percent = selection.chance(1, mean, DISTRIBUTION), selection.draw(mean, DISTRIBUTION, 0.95)
        print(f"{mean:4} {epsilon_of_run:8.2f} {composed:8.2f} {renyi:8.2f} {alone:8.0%} {runs_in_95_percent:6}")
    run = run_of(4.0)
    best = RepeatAndSelect((run,), 10, DISTRIBUTION)
    print(
        f"Ten runs of epsilon 4 in the mean: {cost(best):.2f}, by the simpler bound {simpler(run, 10):.2f}, by Renyi "
        f"{cost(best, 'rdp'):.2f}, composed {cost(compose([run] * 10)):.2f}"
    )


if __name__ == "__main__":
    main()
