"""The promise: one frozen value from which sampler, noise, accountant, ledger and card are all built.

Comes in: the recipe and the public number of privacy units. Goes out: a ``Schedule`` (what every run has) and a ``Plan``
(what a run with differential privacy promises). This module must not see data and must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpllm.audit import canaries
from dpllm.config import RunConfig
from dpllm.errors import Refused
from dpllm.privacy import accounting
from dpllm.privacy.accounting import Event, Relation
from dpllm.privacy.adaptive import AdaptiveClipping, adaptive_clipping

RELATION_IN_WORDS: dict[Relation, str] = {
    "zero_out": "two datasets of the same public size are neighbours if one becomes the other when the data of one "
    "privacy unit are replaced by nothing",
    "add_or_remove_one": "two datasets are neighbours if one becomes the other when one privacy unit is added or removed",
}


@dataclass(frozen=True)
class Schedule:
    """How often whom: the part of a run that does not depend on whether it is private.

    Attributes:
        dataset_size: N, the public number of privacy units, canary slots included.
        canary_slots: How many of the N are held by candidate canaries.
        expected_batch_size: B, the public divisor of the summed gradient.
        sampling_rate: q = B / N; every unit joins every logical batch independently with this probability.
        num_steps: T, the number of logical steps.
    """

    dataset_size: int
    canary_slots: int
    expected_batch_size: int
    sampling_rate: float
    num_steps: int


@dataclass(frozen=True)
class Plan:
    """What one run promises.

    Guarantee:
        The trained parameters are (epsilon, delta)-differentially private for the privacy unit ``unit`` under
        ``neighbouring_relation``, if T = num_steps steps run as ``schedule`` says, each unit's contribution to a summed
        gradient has L2 norm at most ``max_grad_norm``, and N(0, (noise_multiplier * max_grad_norm)^2) is added to every
        coordinate of each sum. With ``adaptive``, sum and count are released together as one Gaussian of the same
        noise multiplier (see ``AdaptiveClipping``), and the guarantee covers the released counts too.

    Attributes:
        schedule: Sampling rate, steps, public size and divisor.
        unit: example, or the name of the column that says whose row it is.
        max_examples_per_unit: Rows that one unit may bring; None for example.
        neighbouring_relation: zero_out (N was counted and is published) or add_or_remove_one (N was declared).
        noise_multiplier: sigma, the noise's standard deviation over max_grad_norm.
        clipping: The clipping function: flat, automatic, per_layer or adaptive.
        max_grad_norm: C; with adaptive clipping the first one, which later releases move.
        delta: Probability-like slack; below 1/N.
        epsilon: Stated by the accountant for the event below.
        target_epsilon: What the recipe asked for; at least epsilon.
        accountant: Name, version and discretisation interval.
        event: The mechanism as a value, from which anyone can recompute epsilon.
        adaptive: How the noise is split between gradients and count; None for the other clipping functions.
    """

    schedule: Schedule
    unit: str
    max_examples_per_unit: int | None
    neighbouring_relation: Relation
    noise_multiplier: float
    clipping: str
    max_grad_norm: float
    delta: float
    epsilon: float
    target_epsilon: float
    accountant: dict[str, Any]
    event: Event
    adaptive: AdaptiveClipping | None = None

    def to_json(self) -> dict[str, Any]:
        """The Plan as plan.json holds it, with the schedule's fields beside the others."""
        fields = asdict(self)
        return {**fields.pop("schedule"), **fields}


def make_schedule(config: RunConfig, num_units: int) -> Schedule:
    """Derives N, q and T, in integers and exact fractions.

    Args:
        config: The recipe.
        num_units: Public number of privacy units without canaries: declared or counted.

    Raises:
        Refused: The logical batch is larger than the dataset.
    """
    slots = canaries.num_slots(config.audit.canaries) if config.audit.canaries else 0
    size = num_units + slots
    batch = config.train.batch_size
    if batch > size:
        raise Refused(
            f"train.batch_size {batch} is larger than the dataset ({size} privacy units), so that the sampling rate would "
            f"exceed 1. Set train.batch_size to {max(1, size // 10)} or less, or bring more data."
        )
    # Exact: int(epochs / q) in floating point is often off by one.
    steps = config.train.steps or math.ceil(Fraction(str(config.train.epochs)) * size / batch)
    return Schedule(
        dataset_size=size,
        canary_slots=slots,
        expected_batch_size=batch,
        sampling_rate=batch / size,
        num_steps=steps,
    )


def make_plan(config: RunConfig, num_units: int, cache_dir: Path | None = None) -> Plan:
    """Builds the promise, calibrating the noise where the recipe does not set it.

    Args:
        config: A recipe with ``privacy.enabled``.
        num_units: See ``make_schedule``.
        cache_dir: Where calibrations are remembered.

    Raises:
        Refused: delta >= 1/N, or the given noise_multiplier exceeds the target epsilon.
        ConfigError: The target epsilon cannot be reached.
    """
    privacy = config.privacy
    schedule = make_schedule(config, num_units)
    relation: Relation = "add_or_remove_one" if config.data.public_size is not None else "zero_out"
    delta = auto_delta(schedule.dataset_size) if privacy.delta == "auto" else float(privacy.delta)
    if delta * schedule.dataset_size >= 1:
        raise Refused(
            f"privacy.delta {delta:g} is not below 1/N = {1 / schedule.dataset_size:.2g}: a mechanism that publishes one "
            f"person's record outright would satisfy it. Set privacy.delta: auto (here {auto_delta(schedule.dataset_size):g})."
        )
    rate, steps = schedule.sampling_rate, schedule.num_steps
    sigma = privacy.noise_multiplier or accounting.calibrate_noise_multiplier(
        privacy.epsilon, delta, rate, steps, relation, cache_dir=cache_dir
    )
    event = accounting.dp_sgd_event(rate, sigma, steps)
    epsilon = accounting.epsilon(event, delta, relation)
    if epsilon > privacy.epsilon:
        raise Refused(
            f"privacy.noise_multiplier {sigma:g} gives epsilon {epsilon:.3f}, above the target privacy.epsilon "
            f"{privacy.epsilon:g}. Set privacy.noise_multiplier: null to calibrate it, or raise privacy.epsilon."
        )
    return Plan(
        schedule=schedule,
        unit=config.data.unit,
        max_examples_per_unit=config.data.max_examples_per_unit,
        neighbouring_relation=relation,
        noise_multiplier=sigma,
        clipping=privacy.clipping,
        max_grad_norm=privacy.max_grad_norm,
        delta=delta,
        epsilon=epsilon,
        target_epsilon=privacy.epsilon,
        accountant={
            "name": "dp-accounting PLD",
            "version": accounting.versions()["version"],
            "interval": accounting.FINE_INTERVAL,
        },
        event=event,
        adaptive=_adaptive(config, sigma, schedule.expected_batch_size),
    )


def _adaptive(config: RunConfig, sigma: float, expected_batch_size: int) -> AdaptiveClipping | None:
    privacy = config.privacy
    if privacy.clipping != "adaptive":
        return None
    wanted = privacy.adaptive
    return adaptive_clipping(
        sigma, expected_batch_size, wanted.quantile, wanted.learning_rate, wanted.count_noise_multiplier
    )


def auto_delta(dataset_size: int) -> float:
    """1/(10 N), rounded down to one significant digit."""
    bound = Fraction(1, 10 * dataset_size)
    exponent = math.floor(math.log10(bound))
    return float(math.floor(bound / Fraction(10) ** exponent) * Fraction(10) ** exponent)
