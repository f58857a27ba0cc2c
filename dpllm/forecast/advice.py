"""Advice: settings that are allowed and likely to hurt, each with its reason and what to type.

Comes in: the recipe and its Plan. Goes out: sentences, none for a good recipe; and noise per unit of signal, with the batch
size that a compute budget is best spent on. Heuristics for planning: they refuse nothing and are no part of any guarantee.
Must not see data, and must not import torch.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace

from dpllm.errors import ConfigError
from dpllm.privacy import accounting, banded
from dpllm.privacy.events import CyclicPoisson, Gaussian, RunEvent, step_of
from dpllm.privacy.plan import Plan, auto_delta, noise_multiplier_for
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig
from dpllm.run.promise import accounting_cache

TOO_NOISY = 1.5  # times the least noise per unit of signal that the same compute allows
NOT_REWARDED = 1.10  # less noise than this factor for twice the steps
WEAK_EPSILON = 10.0
WEAK_NOISE = 0.5
WIDEST = 1e-3  # of PLD's intervals: an answer takes a twentieth of a second, and errs on the safe side
MANY_CANARIES = 0.1  # of N
LARGE_RATE = 0.3  # of AdamW
MIN_STEPS = 50  # fewer updates than this give an optimizer little to work with, however clean each is
NEAR_BEST = 1.10


def advise(config: RunConfig, plan: Plan) -> list[str]:
    """What is likely to hurt, why, and what to type: sentences, the gravest first, and none for a good recipe.

    References:
        Ponomareva et al. 2023, How to DP-fy ML: A Practical Guide to Machine Learning with Differential Privacy (tiers of
        epsilon; batch size and steps).
    """
    found = [_epsilon(plan), _delta(plan), _noise(plan), _batch(plan), _steps(plan), _bands(config, plan)]
    found.append(_canaries(config, plan))
    found.append(_learning_rate(config))
    return [text for text in found if text]


def _epsilon(plan: Plan) -> str | None:
    if plan.epsilon <= WEAK_EPSILON:
        return None
    return (
        f"epsilon {plan.epsilon:.3g} is weak: above 10, the bound on what an attacker can learn means little, and only an audit "
        "supports the run. Type --privacy.epsilon 8 or less."
    )


def _delta(plan: Plan) -> str | None:
    size = plan.schedule.dataset_size
    if plan.delta * size <= 0.1 * (1 + 1e-9):
        return None
    share = plan.delta * size
    return (
        f"delta {plan.delta:g} is {share:.2g} times 1/N, which is too close: a mechanism that publishes each record outright "
        f"with probability {plan.delta:g} satisfies it, and would publish {share:.2g} records on average. Type --privacy.delta "
        f"auto (here {auto_delta(size):g})."
    )


def _noise(plan: Plan) -> str | None:
    if plan.noise_multiplier >= WEAK_NOISE:
        return None
    size, most = plan.schedule.expected_batch_size, plan.schedule.dataset_size
    more = f"--train.batch_size {min(2 * size, most)} or " if size < most else ""
    return (
        f"noise multiplier {plan.noise_multiplier:.3g} is below {WEAK_NOISE}: the guarantee then rests almost entirely on "
        "nobody knowing who was in which batch, and a single step would reveal much about somebody known to be in it. Type "
        f"{more}a smaller --privacy.epsilon; either means more noise."
    )


def _batch(plan: Plan) -> str | None:
    own = own_choice(plan)
    size, steps = candidates(plan)[-1]  # the largest batch has the least noise per unit of signal
    if size <= own.batch_size or noisier(plan, size, steps, than=own.noise_per_signal / TOO_NOISY):
        return None
    try:
        suggested = suggest(plan)
    except ConfigError:
        return None
    ratio = own.noise_per_signal / suggested.noise_per_signal
    return (
        f"the logical batch is too small for its noise: {suggested.batch_size} units in {suggested.num_steps} steps process as "
        f"many examples as {own.batch_size} in {own.num_steps}, at the same epsilon, with {ratio:.2g} times less noise per unit "
        f"of signal. Type --train.batch_size {suggested.batch_size} --train.steps {suggested.num_steps} (and --train.epochs null "
        "where the recipe counts epochs)."
    )


def _steps(plan: Plan) -> str | None:
    own = own_choice(plan)
    half = own.num_steps // 2
    if half < MIN_STEPS:
        return None
    exactly = math.sqrt(own.num_steps / half / 2)  # where T is odd, half of it is a little less than half
    if noisier(plan, own.batch_size, half, than=NOT_REWARDED * exactly * own.noise_per_signal):
        return None
    return (
        f"the last {own.num_steps - half} of {own.num_steps} steps hardly pay off: at the same epsilon, {half} steps of the "
        f"same batch size have less than {NOT_REWARDED - 1:.0%} more noise per unit of signal, for half the compute. Type "
        f"--train.steps {half}, or spend the compute on a larger --train.batch_size."
    )


def _canaries(config: RunConfig, plan: Plan) -> str | None:
    size, batch = plan.schedule.dataset_size, plan.schedule.expected_batch_size
    slots = plan.schedule.canary_slots - config.audit.gradient_canaries
    own = size - slots
    if slots <= MANY_CANARIES * size:
        return None
    drawn = min(batch, own // plan.bands)  # of a plan without them, whose N is smaller
    try:
        without = choose(plan, round(drawn * size / own), plan.schedule.num_steps).noise_multiplier / drawn
    except ConfigError:
        return None
    ratio = plan.noise_multiplier * size / (own * batch) / without
    return (
        f"text canaries occupy {slots} of the N = {size} slots ({slots / size:.0%}), and their text stays in the weights. At "
        f"the same epsilon, batch and steps, the noise per unit of your own data is {ratio:.2g} times what it is without them. "
        "Type --audit.canaries null for a run to be published; dpllm sweep RECIPE --twin trains it together with an audit twin "
        "that has them."
    )


def _learning_rate(config: RunConfig) -> str | None:
    rate = config.train.learning_rate
    if config.train.optimizer != "adamw" or rate <= LARGE_RATE:
        return None
    return (
        f"learning rate {rate:g} is very large: AdamW moves every weight by about so much in each step, whatever the gradient "
        "is, so the run will most likely diverge. Type --train.learning_rate 0.003."
    )


def _bands(config: RunConfig, plan: Plan) -> str | None:
    seen = effect_of(config, plan)
    if config.privacy.noise == "independent" or (seen and config.train.optimizer != "adamw"):
        return None
    if seen is None and (plan.coefficients or config.privacy.bands != "auto"):
        return None
    if seen is None:
        return (
            f"privacy.noise: banded gains less than {banded.LEAST_GAIN:.0%} at this epsilon and number of epochs, so "
            "independent noise is used. Type --privacy.noise independent, or fewer epochs, or a larger --privacy.epsilon."
        )
    rate = config.train.learning_rate
    return (
        f"banded noise makes one step {seen.one_step:.2g} times as noisy as independent noise, but the sum of all steps less "
        "noisy. AdamW normalises by the noise of single steps, so a learning rate tuned for independent noise is too small by "
        f"that factor. If {rate:g} is such a rate, type --train.learning_rate {rate * seen.one_step:.2g}."
    )


def effect_of(config: RunConfig, plan: Plan) -> banded.Effect | None:
    """What a Plan's banded noise does beside independent noise of the same promise; None for independent noise."""
    if not plan.coefficients:
        return None
    target = min(plan.epsilon, plan.target_epsilon)
    try:
        sigma = noise_multiplier_for(
            target, plan.delta, plan.schedule, plan.neighbouring_relation, cache_dir=accounting_cache(), rough=True
        )
    except ConfigError:  # no independent noise that is considered keeps it
        return None
    rate_T = banded.rates(derived.learning_rate_of(config.train), plan.schedule.num_steps)
    return banded.effect(plan.coefficients, rate_T, plan.noise_multiplier, sigma)


@dataclass(frozen=True)
class Choice:
    """A batch size in units and a number of steps, with the noise that the same promise then takes."""

    batch_size: int
    num_steps: int
    noise_multiplier: float
    noise_per_signal: float


def noise_per_signal(noise_multiplier: float, batch_size: int, num_steps: int) -> float:
    """Sigma / (B sqrt(T)): noise over signal in the sum of all updates, for one coordinate, at the clipping norm.

    A step releases (sum of clipped gradients + sigma C z) / B with z standard normal, so that the averaged gradient carries
    noise of standard deviation sigma C / B in each coordinate. Over T steps independent noise grows to sqrt(T) sigma C / B,
    and a signal that keeps its direction, of length at most C a step, grows to T C. Their ratio is sigma sqrt(T) / (B T) =
    sigma / (B sqrt(T)); C cancels. Over all d trainable coordinates it is sqrt(d) times as large.

    At a fixed number of examples K = B T it is sigma sqrt(T) / K: it falls as B grows, since sigma grows more slowly than
    sqrt(B), and flattens where nearly every unit joins every step.

    References:
        Ponomareva et al. 2023, How to DP-fy ML, on the choice of the batch size; Li et al. 2021, Large Language Models Can
        Be Strong Differentially Private Learners, on batch size and effective noise.
    """
    return noise_multiplier / (batch_size * math.sqrt(num_steps))


def own_choice(plan: Plan) -> Choice:
    """The Plan's own."""
    return _choice(plan, plan.schedule.expected_batch_size, plan.schedule.num_steps, plan.noise_multiplier)


def _choice(plan: Plan, batch_size: int, num_steps: int, noise_multiplier: float) -> Choice:
    left = _left(plan, num_steps) * noise_multiplier
    return Choice(batch_size, num_steps, noise_multiplier, noise_per_signal(left, batch_size, num_steps))


def _left(plan: Plan, num_steps: int) -> float:
    """What the Plan's banded noise leaves in the sum of so many updates, over what independent noise would."""
    if not plan.coefficients:
        return 1.0
    import numpy as np

    return banded.effect(plan.coefficients, np.ones(num_steps), 1.0, 1.0).last_iterate


def candidates(plan: Plan) -> list[tuple[int, int]]:
    """(B, T) of the Plan's compute, K = B T examples: B the powers of two and the Plan's own, in rising order.

    The last has the least noise per unit of signal. No B is larger than N, or a group of banded noise, and none leaves fewer than
    50 steps (or than the Plan's own, where that has fewer).
    """
    own = plan.schedule
    compute = own.expected_batch_size * own.num_steps
    most = min(own.dataset_size // plan.bands, compute // min(MIN_STEPS, own.num_steps))
    sizes = {2**power for power in range(most.bit_length())} | {own.expected_batch_size}
    return [
        (size, own.num_steps if size == own.expected_batch_size else round(compute / size)) for size in sorted(sizes)
    ]


def suggest(plan: Plan) -> Choice:
    """The smallest batch, so the most steps, whose noise is within 10% of the least that the compute allows.

    A planning heuristic: epsilon, delta, N and B T are the Plan's; it compares noise only, and says nothing about learning
    rates or about what the data reward.

    Raises:
        ConfigError: No noise multiplier meets the promise at the largest batch.

    References:
        See ``noise_per_signal``.
    """
    options = candidates(plan)
    own = own_choice(plan)
    least = own if options[-1][0] == own.batch_size else choose(plan, *options[-1])
    limit = NEAR_BEST * min(least.noise_per_signal, own.noise_per_signal)
    # The noise falls with B, so the first option within the limit is found by halves.
    place = bisect.bisect(options[:-1], False, key=lambda option: not noisier(plan, option[0], option[1], limit))
    known = {(own.batch_size, own.num_steps): own, (least.batch_size, least.num_steps): least}
    return known.get(options[place]) or choose(plan, *options[place])


def noisier(plan: Plan, batch_size: int, num_steps: int, than: float) -> bool:
    """Whether the Plan's epsilon takes more noise per unit of signal than ``than`` at this batch size and number of steps.

    One evaluation instead of a calibration: the promise is missed with the noise that would be just enough.
    """
    sigma = than * batch_size * math.sqrt(num_steps) / _left(plan, num_steps)
    return _epsilon_of(plan, batch_size, sigma, num_steps) > plan.epsilon


def choose(plan: Plan, batch_size: int, num_steps: int) -> Choice:
    """The noise that keeps the Plan's epsilon with another batch size and number of steps, to about 1e-3 of itself.

    Secant steps in log sigma, from the Plan's own sigma scaled as the central limit theorem would.

    Raises:
        ConfigError: No noise multiplier meets it.
    """
    own = plan.schedule
    ratio = batch_size * math.sqrt(num_steps) / (own.expected_batch_size * math.sqrt(own.num_steps))
    sigma = max(plan.noise_multiplier * math.sqrt(min(ratio, 4.0)), 0.2)
    slope, step, last = -1.5, math.nan, math.nan
    for _ in range(30):
        value = _epsilon_of(plan, batch_size, sigma, num_steps)
        error = math.log(max(value, 1e-300) / plan.epsilon) if math.isfinite(value) else 1.0
        if math.isfinite(error - last) and step:
            slope = min(max((error - last) / step, -1000.0), -0.3)
        if -2e-3 <= error <= 0:
            return _choice(plan, batch_size, num_steps, sigma)
        step, last = min(max((error + 1e-3) / -slope, -0.7), 0.7), error  # aims at a thousandth below the target
        sigma *= math.exp(step)
    raise ConfigError(
        f"no noise multiplier was found that gives epsilon {plan.epsilon:g} with a batch of {batch_size} and {num_steps} "
        "steps, so the choices cannot be compared. Type a larger --privacy.epsilon."
    )


def _epsilon_of(plan: Plan, batch_size: int, noise_multiplier: float, num_steps: int) -> float:
    """Epsilon of the Plan's mechanism with another batch size, noise and number of steps, to about 1e-3."""
    rate = plan.bands * batch_size / plan.schedule.dataset_size
    # PLD's interval: a tenth of the standard deviation of one step's privacy loss, about.
    spread = rate * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))
    interval = min(max(spread / 10, accounting.FINE_INTERVAL), WIDEST)
    event = with_numbers(plan.event, rate, noise_multiplier, num_steps)
    return accounting.epsilon(event, plan.delta, plan.neighbouring_relation, interval=interval)


def with_numbers(event: RunEvent, sampling_rate: float, noise_multiplier: float, num_steps: int) -> RunEvent:
    """The mechanism of a Plan's event with other numbers: the same kind of sampling, another q, sigma and T."""
    gaussian = Gaussian(noise_multiplier)
    if isinstance(event, CyclicPoisson):
        return replace(event, count=num_steps, probability=sampling_rate, event=gaussian)
    return replace(event, count=num_steps, event=replace(step_of(event), probability=sampling_rate, event=gaussian))
