"""Advice on settings that are allowed but likely to hurt, with reasons and what to type; refuses what cannot train at all.

Comes in: the recipe and its Plan. Goes out: sentences, none for a good recipe, which both ``dpllm plan`` and a run print before
anything is spent; and one refusal. These are heuristics, not part of any guarantee. Must not see data, and must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpllm.errors import ConfigError
from dpllm.privacy import accounting
from dpllm.privacy.events import PoissonSampled, step_of
from dpllm.privacy.plan import Plan, auto_delta, noise_multiplier_for, steps_event
from dpllm.privacy.schedule import Schedule
from dpllm.recipe.config import RunConfig

WEAK_EPSILON = 10.0
WEAK_NOISE = 0.5
MANY_CANARIES = 0.1  # of N
LARGE_MOVE = 0.3  # of a weight, in one step
BROKEN_MOVE = 10.0  # nearly all weights of base models and adapters are below 1
TOO_NOISY = 1.5  # times the least noise per unit of signal that the same compute allows
NEAR_BEST = 1.10
MIN_STEPS = 50  # fewer updates give an optimizer little to work with, however little noise each has
WIDEST = 1e-3  # PLD interval: an answer takes a twentieth of a second, and errs on the safe side


def check_learning_rate(config: RunConfig, plan: Plan | None) -> None:
    """Refuses, with a ConfigError, a learning rate at which a single step replaces every weight by noise."""
    if (move := _move(config, plan)) > BROKEN_MOVE:
        raise ConfigError(
            f"train.learning_rate {config.train.learning_rate:g} would move every weight by about {move:.3g} in a step, whatever "
            "the data say, so the epsilon would be spent and nothing learned. Type --train.learning_rate 0.003."
        )


def advise(config: RunConfig, plan: Plan) -> list[str]:
    """What is likely to hurt, why, and what to type: sentences, the most serious first; none for a good recipe.

    References:
        Ponomareva et al. 2023, How to DP-fy ML: A Practical Guide to Machine Learning with Differential Privacy (tiers of
        epsilon; batch size and steps).
    """
    advice = [_learning_rate(config, plan), _epsilon(plan), _delta(plan), _noise(plan), _batch(plan)]
    advice.append(_canaries(config, plan))
    return [text for text in advice if text]


def _move(config: RunConfig, plan: Plan | None) -> float:
    """A lower bound on how far a step moves a weight at the peak learning rate; 0 if none is known without the data."""
    rate = config.train.learning_rate
    if config.train.optimizer == "adamw":
        return rate
    if plan is None:
        return 0.0
    return rate * plan.noise_multiplier * plan.max_grad_norm / plan.schedule.expected_batch_size


def _learning_rate(config: RunConfig, plan: Plan) -> str | None:
    move = _move(config, plan)
    if not LARGE_MOVE < move <= BROKEN_MOVE:
        return None
    return (
        f"learning rate {config.train.learning_rate:g} is very large: a step moves every weight by about {move:.3g}, whatever "
        "the gradient is, so the run will most likely diverge. Type --train.learning_rate 0.003."
    )


def _epsilon(plan: Plan) -> str | None:
    if plan.epsilon <= WEAK_EPSILON:
        return None
    return (
        f"epsilon {plan.epsilon:.3g} is weak: above 10, the bound on what an attacker can learn means little, and only an audit "
        "supports the run. Type --privacy.epsilon 8 or less."
    )


def _delta(plan: Plan) -> str | None:
    size = plan.schedule.dataset_size
    share = plan.delta * size
    if share <= 0.1 * (1 + 1e-9):
        return None
    return (
        f"delta {plan.delta:g} is {share:.2g} times 1/N, which is too close: a mechanism that publishes each record outright "
        f"with probability {plan.delta:g} satisfies it, and would publish {share:.2g} records on average. Type --privacy.delta "
        f"auto (here {auto_delta(size):g})."
    )


def _noise(plan: Plan) -> str | None:
    if plan.noise_multiplier >= WEAK_NOISE:
        return None
    size, dataset_size = plan.schedule.expected_batch_size, plan.schedule.dataset_size
    larger_batch = f"--train.batch_size {min(2 * size, dataset_size)} or " if size < dataset_size else ""
    return (
        f"noise multiplier {plan.noise_multiplier:.3g} is below {WEAK_NOISE}: the guarantee then rests almost entirely on nobody "
        "knowing who was in which batch, and a single step would reveal much about a person known to be in it. Type "
        f"{larger_batch}a smaller --privacy.epsilon; either means more noise."
    )


def _batch(plan: Plan) -> str | None:
    """The smallest doubling of the batch, in as many steps fewer, whose noise is within 10% of the largest one's."""
    step = step_of(plan.event)
    larger = _larger_batches(plan.schedule)
    if not larger or not isinstance(step, PoissonSampled):  # banded noise follows other rules
        return None
    current = noise_per_signal(plan.noise_multiplier, plan.schedule)
    if not _keeps(plan, larger[-1], current / TOO_NOISY, step.group_size):
        return None
    try:
        promise = plan.epsilon, plan.delta, larger[-1], plan.neighbouring_relation
        sigma = noise_multiplier_for(*promise, group_size=step.group_size, rough=True)
    except ConfigError:  # none in the range considered
        return None
    enough = NEAR_BEST * noise_per_signal(sigma, larger[-1])
    best = next((batch for batch in larger if _keeps(plan, batch, enough, step.group_size)), larger[-1])
    size, steps = best.expected_batch_size, best.num_steps
    drawn, taken = plan.schedule.expected_batch_size, plan.schedule.num_steps
    return (
        f"the logical batch is too small for its noise: {size} units in {steps} steps process as many examples as {drawn} in "
        f"{taken}, at the same epsilon, with at least {current / enough:.2g} times less noise per unit of signal. Type "
        f"--train.batch_size {size} --train.steps {steps} (and --train.epochs null where the recipe counts epochs)."
    )


def _larger_batches(schedule: Schedule) -> list[Schedule]:
    """Schedules with the same number of examples: the batch doubled repeatedly, up to N and down to ``MIN_STEPS`` steps."""
    schedules, size = [], 2 * schedule.expected_batch_size
    compute = schedule.expected_batch_size * schedule.num_steps
    while size <= schedule.dataset_size and round(compute / size) >= MIN_STEPS:
        rate, steps = size / schedule.dataset_size, round(compute / size)
        schedules.append(replace(schedule, expected_batch_size=size, sampling_rate=rate, num_steps=steps))
        size *= 2
    return schedules


def noise_per_signal(noise_multiplier: float, schedule: Schedule) -> float:
    """Sigma / (B sqrt(T)): noise over signal in the sum of all updates, for one coordinate, at the clipping norm.

    A step releases (sum of clipped gradients + sigma C z) / B with z standard normal, so that the averaged gradient carries noise
    of standard deviation sigma C / B in each coordinate. Over T steps independent noise grows to sqrt(T) sigma C / B, and a
    signal of constant direction, of length at most C a step, grows to T C. Their ratio is sigma sqrt(T) / (B T) = sigma / (B
    sqrt(T)); C cancels. At a fixed number of examples B T it falls as B grows, since sigma grows more slowly than sqrt(B), and
    flattens where nearly every unit joins every step.

    References:
        Ponomareva et al. 2023, How to DP-fy ML, on the choice of the batch size; Li et al. 2021, Large Language Models Can
        Be Strong Differentially Private Learners, on batch size and effective noise.
    """
    return noise_multiplier / (schedule.expected_batch_size * math.sqrt(schedule.num_steps))


def _keeps(plan: Plan, schedule: Schedule, noise: float, group_size: int) -> bool:
    """Whether the Plan's epsilon allows this little noise per unit of signal on another schedule; one evaluation."""
    sigma = noise / noise_per_signal(1.0, schedule)
    # The PLD interval is about a tenth of the standard deviation of one step's privacy loss.
    spread = schedule.sampling_rate * math.sqrt(math.expm1(min(sigma**-2, 50.0)))
    interval = min(max(spread / 10, accounting.FINE_INTERVAL), WIDEST)
    event = steps_event(sigma, schedule, group_size, 1)
    return accounting.epsilon(event, plan.delta, plan.neighbouring_relation, interval=interval) <= plan.epsilon


def _canaries(config: RunConfig, plan: Plan) -> str | None:
    size = plan.schedule.dataset_size
    slots = plan.schedule.canary_slots - config.audit.gradient_canaries
    if slots <= MANY_CANARIES * size:
        return None
    return (
        f"text canaries occupy {slots} of the N = {size} slots ({slots / size:.0%}), and their text stays in the weights; that "
        "share of every batch is not your data, under the same noise. For a run to be published, type --audit.canaries null; "
        "dpllm sweep RECIPE --twin trains it together with an audit twin that has them."
    )
