"""Advice: settings that are allowed and likely to hurt, each with its reason and what to type.

Comes in: the recipe, its Plan, and what an earlier run released with noise. Goes out: sentences; none for a good recipe. Advice
refuses nothing and is no part of the guarantee. Must not see data, and must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dpllm.errors import ConfigError
from dpllm.files import read_json
from dpllm.forecast import signal
from dpllm.privacy.plan import Plan, auto_delta
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir

TOO_NOISY = 1.5  # times the least noise per unit of signal that the same compute allows
NOT_REWARDED = 1.10  # less noise than this factor for twice the steps
WEAK_EPSILON = 10.0
WEAK_NOISE = 0.5
FAR_FROM_HALF = 0.2  # of a clip fraction; its own noise is a twentieth where the noise on the count is left alone
FAR_FROM_C = 2.0


def advise(config: RunConfig, plan: Plan, released: Mapping[str, float] | None = None) -> list[str]:
    """What is likely to hurt, why, and what to type.

    Args:
        config: The recipe.
        plan: What it promises.
        released: ``unclipped_fraction`` and ``max_grad_norm`` that an earlier run with adaptive clipping released with
            noise, inside its own epsilon; None: nothing is known of the gradients.

    Returns:
        Sentences, the gravest first; none for a good recipe.

    References:
        Ponomareva et al. 2023, How to DP-fy ML: A Practical Guide to Machine Learning with Differential Privacy (tiers of
        epsilon; batch size and steps); Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping (the
        median as a target of C).
    """
    found = [_epsilon(plan), _delta(plan), _noise(plan), _batch(plan), _steps(plan)]
    found.append(_clipping(config, released) if released else None)
    return [text for text in found if text]


def released_by(run: RunDir) -> dict[str, float]:
    """What an earlier run released with noise, which may be read at no further cost.

    Args:
        run: Its directory.

    Returns:
        ``unclipped_fraction`` and ``max_grad_norm`` of adaptive clipping.

    Raises:
        ConfigError: No run there, or it released nothing under its guarantee.
    """
    record = read_json(run.run)
    released = record.get("metrics", {}).get("released", {})
    if not record.get("guarantee", {}).get("holds") or not {"unclipped_fraction", "max_grad_norm"} <= released.keys():
        raise ConfigError(
            f"{run.root}: released no clip fraction under its guarantee, and an un-noised one is private and not looked at. "
            "Name a completed run with privacy.clipping: adaptive."
        )
    return {name: float(released[name]) for name in ("unclipped_fraction", "max_grad_norm")}


def _epsilon(plan: Plan) -> str | None:
    if plan.epsilon <= WEAK_EPSILON:
        return None
    return (
        f"epsilon {plan.epsilon:.3g} is weak: above 10 the bound on what an attacker may learn says little by itself, and only "
        f"an audit speaks for the run. Type --privacy.epsilon 8 or less."
    )


def _delta(plan: Plan) -> str | None:
    size = plan.schedule.dataset_size
    if plan.delta * size <= 0.1 * (1 + 1e-9):
        return None
    share = plan.delta * size
    return (
        f"delta {plan.delta:g} is {share:.2g} times 1/N, near to 1/N: a mechanism that publishes each record outright with "
        f"probability {plan.delta:g} satisfies it, and would publish {share:.2g} records on average. "
        f"Type --privacy.delta auto (here {auto_delta(size):g})."
    )


def _noise(plan: Plan) -> str | None:
    if plan.noise_multiplier >= WEAK_NOISE:
        return None
    size, most = plan.schedule.expected_batch_size, plan.schedule.dataset_size
    more = f"--train.batch_size {min(2 * size, most)} or " if size < most else ""
    return (
        f"noise multiplier {plan.noise_multiplier:.3g} is below {WEAK_NOISE}: nearly all of the promise then rests on nobody "
        "knowing who was in which batch, and one step alone would tell much of somebody who is known to be in it. "
        f"Type {more}a smaller --privacy.epsilon, either of which calls for more noise."
    )


def _batch(plan: Plan) -> str | None:
    own = signal.own_choice(plan)
    size, steps = signal.candidates(plan)[-1]  # the largest batch has the least noise per unit of signal
    if size <= own.batch_size or signal.noisier(plan, size, steps, than=own.noise_per_signal / TOO_NOISY):
        return None
    try:
        suggested = signal.suggest(plan).suggested
    except ConfigError:
        return None
    ratio = own.noise_per_signal / suggested.noise_per_signal
    return (
        f"the logical batch is too small for its noise: {suggested.batch_size} units in {suggested.num_steps} steps look at as "
        f"many examples as {own.batch_size} in {own.num_steps}, at the same epsilon, with {ratio:.2g} times less noise per unit "
        f"of signal. Type --train.batch_size {suggested.batch_size}{_steps_flag(suggested.num_steps)}."
    )


def _steps(plan: Plan) -> str | None:
    own = signal.own_choice(plan)
    half = own.num_steps // 2
    if half < signal.MIN_STEPS:
        return None
    exactly = math.sqrt(own.num_steps / half / 2)  # where T is odd, half of it is a little less than half
    if signal.noisier(plan, own.batch_size, half, than=NOT_REWARDED * exactly * own.noise_per_signal):
        return None
    return (
        f"the last {own.num_steps - half} of {own.num_steps} steps are hardly rewarded: at the same epsilon, {half} steps of the "
        f"same batch have less than {NOT_REWARDED - 1:.0%} more noise per unit of signal, for half the compute. "
        f"Type --train.steps {half}, or spend the compute on a larger --train.batch_size."
    )


def _clipping(config: RunConfig, released: Mapping[str, float]) -> str | None:
    fraction, norm = 1 - released["unclipped_fraction"], released["max_grad_norm"]
    wanted = 1 - config.privacy.adaptive.quantile
    shown = min(max(fraction, 0.0), 1.0)
    chosen = "It was chosen after seeing that run's result, so the two runs fit a ledger's adaptive gate, not one list."
    if abs(fraction - wanted) > FAR_FROM_HALF:
        side = (
            "too small: it shortens most gradients" if fraction > wanted else "too large: it buys noise and clips few"
        )
        return (
            f"C was {side}: the earlier run ended with a noised clip fraction of {shown:.2f} at C {norm:.3g}, where {wanted:.2g} "
            f"is the aim. Type --privacy.clipping adaptive --privacy.max_grad_norm {norm:.2g}, with more steps or a larger "
            f"--privacy.adaptive.learning_rate, so that C arrives. {chosen}"
        )
    ratio = config.privacy.max_grad_norm / norm
    if not 1 / FAR_FROM_C <= ratio <= FAR_FROM_C:
        effect = "adds noise that no gradient needs" if ratio > 1 else "shortens most gradients"
        return (
            f"C {config.privacy.max_grad_norm:g} is {ratio:.2g} times the {norm:.3g} at which the earlier run's noised clip "
            f"fraction was {shown:.2f}, so it {effect}. Type --privacy.max_grad_norm {norm:.2g}. {chosen}"
        )
    return None


def _steps_flag(steps: int) -> str:
    return f" --train.steps {steps} (and --train.epochs null where the recipe counts epochs)"
