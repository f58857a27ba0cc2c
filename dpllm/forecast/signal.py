"""Noise per unit of signal: what a batch size and a number of steps buy at the same privacy.

Comes in: a Plan. Goes out: ratios, and the batch size that a compute budget is best spent on. A heuristic for planning; no
part of any guarantee. Must not see data, and must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpllm.errors import ConfigError
from dpllm.privacy import accounting
from dpllm.privacy.accounting import Event
from dpllm.privacy.plan import Plan

WIDEST = 1e-3  # of PLD's intervals: an answer takes a twentieth of a second, and errs on the safe side
MIN_STEPS = 50  # fewer updates than this give an optimizer little to work with, however clean each is
NEAR_BEST = 1.10


@dataclass(frozen=True)
class Choice:
    """A batch size and a number of steps, with the noise that the same promise then takes.

    Attributes:
        batch_size: B, in units.
        num_steps: T.
        noise_multiplier: sigma.
        noise_per_signal: See ``noise_per_signal``.
    """

    batch_size: int
    num_steps: int
    noise_multiplier: float
    noise_per_signal: float


@dataclass(frozen=True)
class Suggestion:
    """What a compute budget of B T examples is best spent on, beside what the recipe does with it."""

    own: Choice
    suggested: Choice
    least_noise: Choice


def noise_per_signal(noise_multiplier: float, batch_size: int, num_steps: int) -> float:
    """Sigma / (B sqrt(T)): noise over signal in the sum of all updates, for one coordinate, at the clipping norm.

    A step releases (sum of clipped gradients + sigma C z) / B with z standard normal, so that the averaged gradient carries
    noise of standard deviation sigma C / B in each coordinate. Over T steps independent noise grows to sqrt(T) sigma C / B,
    and a signal that keeps its direction, of length at most C a step, grows to T C. Their ratio is sigma sqrt(T) / (B T) =
    sigma / (B sqrt(T)); C cancels. Over all d trainable coordinates it is sqrt(d) times as large.

    At a fixed number of examples K = B T it is sigma sqrt(T) / K: it falls as B grows, since sigma grows more slowly than
    sqrt(B), and flattens where nearly every unit joins every step.

    Args:
        noise_multiplier: sigma > 0.
        batch_size: B >= 1, the expected logical batch.
        num_steps: T >= 1.

    References:
        Ponomareva et al. 2023, How to DP-fy ML, on the choice of the batch size; Li et al. 2021, Large Language Models Can
        Be Strong Differentially Private Learners, on batch size and effective noise.
    """
    return noise_multiplier / (batch_size * math.sqrt(num_steps))


def with_numbers(event: Event, sampling_rate: float, noise_multiplier: float, num_steps: int) -> Event:
    """The mechanism of ``event`` with other numbers: the same kind of sampling, another q, sigma and T.

    Args:
        event: Of a Plan: a self_composed step.
        sampling_rate: q.
        noise_multiplier: sigma.
        num_steps: T.
    """
    gaussian = {"type": "gaussian", "noise_multiplier": noise_multiplier}
    step = {**event["event"], "probability": sampling_rate, "event": gaussian}
    return {**event, "count": num_steps, "event": step}


def cost(plan: Plan, batch_size: int, noise_multiplier: float, num_steps: int) -> float:
    """Epsilon of the Plan's mechanism with another batch size, noise and number of steps, to about 1e-3."""
    rate = batch_size / plan.schedule.dataset_size
    event = with_numbers(plan.event, rate, noise_multiplier, num_steps)
    return accounting.epsilon(event, plan.delta, plan.neighbouring_relation, interval=interval(rate, noise_multiplier))


def interval(sampling_rate: float, noise_multiplier: float) -> float:
    """PLD's interval for planning: a tenth of the standard deviation of one step's privacy loss, about, and 1e-3 at most."""
    spread = sampling_rate * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))
    return min(max(spread / 10, accounting.FINE_INTERVAL), WIDEST)


def choose(plan: Plan, batch_size: int, num_steps: int) -> Choice:
    """The noise that keeps the Plan's epsilon with another batch size and number of steps, to about 1e-3 of itself.

    Raises:
        ConfigError: No noise multiplier meets it.
    """
    sigma = _noise_for(plan, batch_size, num_steps)
    return Choice(batch_size, num_steps, sigma, noise_per_signal(sigma, batch_size, num_steps))


def own_choice(plan: Plan) -> Choice:
    """The Plan's own."""
    size, steps = plan.schedule.expected_batch_size, plan.schedule.num_steps
    return Choice(size, steps, plan.noise_multiplier, noise_per_signal(plan.noise_multiplier, size, steps))


def candidates(plan: Plan) -> list[tuple[int, int]]:
    """(B, T) of the Plan's compute, K = B T examples: B the powers of two and the Plan's own, in rising order.

    The last has the least noise per unit of signal. No B is larger than N, and none leaves fewer than 50 steps (or than the
    Plan's own, where that has fewer).
    """
    own = plan.schedule
    compute = own.expected_batch_size * own.num_steps
    most = min(own.dataset_size, compute // min(MIN_STEPS, own.num_steps))
    sizes = {2**power for power in range(most.bit_length()) if 2**power <= most} | {own.expected_batch_size}
    return [
        (size, own.num_steps if size == own.expected_batch_size else round(compute / size)) for size in sorted(sizes)
    ]


def noisier(plan: Plan, batch_size: int, num_steps: int, than: float) -> bool:
    """Whether the Plan's epsilon takes more noise per unit of signal than ``than`` at this batch size and number of steps.

    One evaluation instead of a calibration: the promise is missed with the noise that would be just enough.
    """
    allowed = than * batch_size * math.sqrt(num_steps)
    return cost(plan, batch_size, allowed, num_steps) > plan.epsilon


def suggest(plan: Plan) -> Suggestion:
    """The smallest batch, so the most steps, whose noise is within 10% of the least that the compute allows.

    A planning heuristic: it compares noise only, and says nothing about learning rates or about what the data reward.

    Args:
        plan: The promise, of which epsilon, delta, N and B T are kept.

    Raises:
        ConfigError: No noise multiplier meets the promise at the largest batch.

    References:
        See ``noise_per_signal``.
    """
    options = candidates(plan)
    own = own_choice(plan)
    least = own if options[-1][0] == own.batch_size else choose(plan, *options[-1])
    limit = NEAR_BEST * min(least.noise_per_signal, own.noise_per_signal)
    low, high = 0, len(options) - 1  # the noise falls with B, so the first option within the limit is found by halves
    while low < high:
        middle = (low + high) // 2
        if noisier(plan, *options[middle], than=limit):
            low = middle + 1
        else:
            high = middle
    known = {(own.batch_size, own.num_steps): own, (least.batch_size, least.num_steps): least}
    return Suggestion(own, known.get(options[low]) or choose(plan, *options[low]), least)


def _noise_for(plan: Plan, batch_size: int, num_steps: int) -> float:
    """Secant steps in log sigma, from the Plan's own sigma scaled as the central limit theorem would."""
    own = plan.schedule
    ratio = batch_size * math.sqrt(num_steps) / (own.expected_batch_size * math.sqrt(own.num_steps))
    sigma = max(plan.noise_multiplier * math.sqrt(min(ratio, 4.0)), 0.2)
    slope, step, last = -1.5, math.nan, math.nan
    for _ in range(30):
        value = cost(plan, batch_size, sigma, num_steps)
        error = math.log(max(value, 1e-300) / plan.epsilon) if math.isfinite(value) else 1.0
        if math.isfinite(error - last) and step:
            slope = min(max((error - last) / step, -1000.0), -0.3)
        if -2e-3 <= error <= 0:
            return sigma
        step, last = min(max((error + 1e-3) / -slope, -0.7), 0.7), error  # aims at a thousandth below the target
        sigma *= math.exp(step)
    raise ConfigError(
        f"no noise multiplier was found that gives epsilon {plan.epsilon:g} with a batch of {batch_size} and {num_steps} "
        "steps, so the choices cannot be compared. Plan without --sweep."
    )
