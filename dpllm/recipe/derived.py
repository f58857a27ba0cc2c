"""What follows from a recipe alone: the settings of its Plan, slots of canaries, and why it may give no guarantee.

Comes in: a recipe and public numbers. Goes out: the small values of ``dpllm.privacy``. Sees no data, no model and no ledger.
"""

from __future__ import annotations

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import accounting, banded
from dpllm.privacy.banded import LearningRate
from dpllm.privacy.plan import (
    Mechanism,
    Neighbours,
    Plan,
    fitting,
    noise_multiplier_for,
    resolved_delta,
    steps_event,
    strategy_for,
)
from dpllm.privacy.renyi import Fit
from dpllm.privacy.schedule import Schedule, make_schedule
from dpllm.recipe.config import DataConfig, LoraConfig, RunConfig
from dpllm.recipe.sections import AuditConfig, TrainConfig


def schedule_of(config: RunConfig, num_units: int) -> Schedule:
    """The schedule of a recipe; ConfigError for a canary of more rows than one unit may bring, else as ``make_schedule``."""
    train, slots = config.train, num_slots(config.audit, config.data)
    return make_schedule(num_units, train.batch_size, train.steps, train.epochs, slots=slots)


def public_units(data: DataConfig, counted: int, delta: float | str = "auto", name: str = "privacy.delta") -> int:
    """N without canaries: declared, or counted in the data.

    Raises:
        Refused: Over twice as many were counted as are declared, or ``delta`` (called ``name``) is no guarantee for all.
            Neither says how many there are.
    """
    if (declared := data.public_size) is None:
        return counted
    if counted > 2 * declared:
        raise Refused(
            f"data.public_size {declared:,} is wrong: data.train holds more than twice as many units (rows, with sampling: "
            "example), so a delta below its 1/N could publish one person's record outright. Declare about as many as there are."
        )
    if not isinstance(delta, str) and delta * counted >= 1:
        raise Refused(
            f"{name} {delta:g} is not below 1/N of the units in data.train, which are more than data.public_size: a mechanism "
            f"that publishes one person's record outright would satisfy it. Set {name} to auto."
        )
    return declared


def plan_of(
    config: RunConfig,
    num_units: int,
    *,
    fit: Fit | None = None,
    largest_delta: float = 1.0,
    coefficients: tuple[float, ...] | None = None,
) -> Plan:
    """The Plan of a recipe with ``privacy.enabled``, whose noise is calibrated where the recipe does not set it.

    Args:
        config: The recipe.
        num_units: Privacy units without canaries, >= 1.
        fit: What is left of a Renyi filter that the run is to fit: calibrated noise is then the larger of what meets the
            target epsilon and what fits. Noise that the recipe names is left as it is, for the ledger to judge.
        largest_delta: Of the dataset's budget, if it has one: ``privacy.delta: auto`` is at most that. Below 1/N itself.
        coefficients: Of the run that goes on; None: they are optimised for the recipe's steps.

    Raises:
        Refused: delta >= 1/N; the given noise exceeds the target; the filter cannot count the event; or bands have no room.
        BudgetExceeded: No noise makes the run fit.
        ConfigError: The target epsilon cannot be reached.
    """
    privacy, data, schedule = config.privacy, config.data, schedule_of(config, num_units)
    relation: Neighbours = "add_or_remove_one" if data.public_size is not None else "zero_out"
    delta = resolved_delta(privacy.delta, largest_delta, schedule.dataset_size)
    group = (data.max_examples_per_unit or 1) if data.sampling == "example" else 1
    if coefficients is None:
        coefficients = _coefficients(config, schedule, delta, relation)
    bands, sigma = max(1, len(coefficients)), privacy.noise_multiplier
    if sigma is None:
        sigma = noise_multiplier_for(privacy.epsilon, delta, schedule, relation, bands, group_size=group)
        if fit is not None:
            sigma = fitting(sigma, lambda sigma: steps_event(sigma, schedule, group, bands), fit)
    epsilon = accounting.epsilon(steps_event(sigma, schedule, group, bands), delta, relation)
    if epsilon > privacy.epsilon:
        raise _above_target(sigma, epsilon, privacy.epsilon)
    return Plan.of(
        Mechanism(
            unit=data.unit,
            max_examples_per_unit=data.max_examples_per_unit,
            sampling=data.sampling,
            neighbouring_relation=relation,
            dataset_size=schedule.dataset_size,
            canary_slots=schedule.canary_slots,
            expected_batch_size=schedule.expected_batch_size,
            num_steps=schedule.num_steps,
            noise_multiplier=float(sigma),
            coefficients=coefficients,
            clipping=privacy.clipping,
            max_grad_norm=privacy.max_grad_norm,
            delta=delta,
            target_epsilon=privacy.epsilon,
        )
    )


def _above_target(sigma: float, epsilon: float, target: float) -> Refused:
    return Refused(
        f"privacy.noise_multiplier {sigma:g} gives epsilon {epsilon:.3f}, above the target privacy.epsilon {target:g}. Set "
        "privacy.noise_multiplier: null to calibrate it, or raise privacy.epsilon."
    )


def _coefficients(config: RunConfig, schedule: Schedule, delta: float, relation: Neighbours) -> tuple[float, ...]:
    """Of the noise; none where it is independent."""
    privacy, rate = config.privacy, learning_rate_of(config.train)
    if privacy.noise == "independent":
        return ()
    banded.check(privacy.bands, schedule, config.data.sampling)
    return strategy_for(privacy.epsilon, delta, schedule, relation, rate, privacy.bands)


def learning_rate_of(train: TrainConfig) -> LearningRate:
    """How it goes with the steps."""
    return LearningRate(train.learning_rate, train.lr_scheduler, train.warmup)


def num_slots(audit: AuditConfig, data: DataConfig) -> int:
    """Slots in N: every candidate holds its own, whatever its coin says, and a gradient canary one.

    Where whole units are drawn, a candidate is one unit that brings all of its repetitions, and holds one slot. Where rows
    are drawn, each repetition holds one. More repetitions than one unit may bring are a ConfigError.
    """
    groups, most = audit.canaries.groups if audit.canaries else {}, data.max_examples_per_unit
    if most is not None and max(groups, default=0) > most:
        raise ConfigError(
            f"audit.canaries.groups: all {max(groups)} repetitions of a canary belong to one {data.unit}, of which only "
            f"data.max_examples_per_unit ({most}) rows train. Lower the repetitions in audit.canaries.groups, or raise "
            "data.max_examples_per_unit."
        )
    return sum(slots_each(group, data) * number for group, number in groups.items()) + audit.gradient_canaries


def slots_each(group: int, data: DataConfig) -> int:
    """Slots that one candidate of so many repetitions holds."""
    return group if data.unit == "example" or data.sampling == "example" else 1


def check_modes(config: RunConfig) -> None:
    """Refuses what the recipe alone shows: dropout that couples units."""
    if config.privacy.enabled and isinstance(config.adapter, LoraConfig) and config.adapter.dropout > 0:
        raise Refused(
            f"adapter.dropout is {config.adapter.dropout:g}, and its masks depend on a row's place in the batch, so one unit "
            "would change the contributions of all others, which clipping does not bound. Set adapter.dropout: 0."
        )


def deviations(config: RunConfig) -> tuple[str | None, list[str]]:
    """Why a run has no guarantee (None: it has one), and the deviations that leave it standing, which the card names."""
    if not config.privacy.enabled:
        return "it was trained without differential privacy", []
    if config.privacy.insecure_seed is not None:
        return "its noise and sampling were seeded by the user (privacy.insecure_seed), so they can be regenerated", []
    notes = []
    if config.data.eval is not None and not config.data.eval_public:
        notes.append(
            "held-out loss was computed on private evaluation data; it is kept private and nothing was chosen by it"
        )
    if config.telemetry.private_metrics and not config.data.public:
        notes.append(
            "un-noised figures of the training data (loss, share of clipped gradients) and of the evaluation data went to "
            "metrics and trackers (telemetry.private_metrics); they are outside the guarantee"
        )
    return None, notes
