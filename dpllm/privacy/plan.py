"""The promise: one frozen value from which sampler, noise, accountant, ledger and card are all built.

Comes in: settings and a schedule, both public. Goes out: a ``Plan``. Must not see data and must not import torch: whoever
verifies a card computes it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.privacy import accounting, banded, events, privacy_loss, renyi
from dpllm.privacy.accounting import Relation
from dpllm.privacy.banded import LearningRate
from dpllm.privacy.events import (
    CyclicPoisson,
    Gaussian,
    PoissonSampled,
    RunEvent,
    SelfComposed,
)
from dpllm.privacy.renyi import Fit
from dpllm.privacy.schedule import Schedule, group_rate

__all__ = ["CURVE_DELTAS", "RELATION_IN_WORDS", "Plan", "Schedule", "Settings"]
__all__ += ["auto_delta", "check_delta", "make_plan", "noise_multiplier_for", "resolved_delta"]

CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
CONSTANT = LearningRate(shape="constant")
LATTICE_BITS = 30  # the noise's standard deviation is 2^30 to 2^31 times the spacing of the lattice
SLACK = 1e-6  # of C, by which rounding may make a clipped gradient longer; see ``clipping.PerUnitClipper``

RELATION_IN_WORDS: dict[Relation, str] = {
    "zero_out": "two datasets of the same public size are neighbours if one becomes the other when the data of one "
    "privacy unit are replaced by nothing",
    "add_or_remove_one": "two datasets are neighbours if one becomes the other when one privacy unit is added or removed",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of a Plan: public values, which beside the schedule decide it."""

    epsilon: float  # target, > 0
    delta: float | Literal["auto"] = "auto"
    noise_multiplier: float | None = None  # None: calibrated to epsilon
    max_grad_norm: float = 1.0  # C
    clipping: str = "flat"  # flat or automatic
    banded: bool = False
    bands: int | Literal["auto"] = 1
    learning_rate: LearningRate = CONSTANT  # which banded noise suits
    unit: str = "example"
    sampling: Literal["unit", "example"] = "unit"
    max_examples_per_unit: int | None = None
    relation: Relation = "zero_out"

    def __post_init__(self) -> None:
        for name in ("epsilon", "noise_multiplier", "max_grad_norm"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} is {value!r}, from which no guarantee follows. Set a number above 0.")
        if self.sampling == "example" and self.unit != "example" and not self.max_examples_per_unit:
            raise ConfigError(
                "rows are sampled, so max_examples_per_unit is needed. Set it to the most rows of a unit."
            )

    @property
    def group_size(self) -> int:
        """How many of what is sampled are protected together."""
        return self.max_examples_per_unit or 1 if self.sampling == "example" else 1


@dataclass(frozen=True)
class Plan:
    """What one run promises.

    Guarantee:
        The trained parameters are (epsilon, delta)-differentially private for the privacy unit ``unit`` under
        ``neighbouring_relation``, if T = num_steps steps run as ``schedule`` says, the contribution to a summed gradient of
        each thing that is sampled has L2 norm at most ``max_grad_norm``, and N(0, (noise_multiplier * max_grad_norm)^2) is
        added to every coordinate of each sum. With ``sampling`` example, rows are sampled and clipped one by one, and the
        guarantee is for a unit of up to ``max_examples_per_unit`` rows together. With ``coefficients``, steps sample groups in
        turn and the noise of a step takes back a part of earlier noise: ``dpllm.privacy.banded`` has the assumptions and the
        proof.
    """

    schedule: Schedule
    unit: str  # example, or the name of the column that says whose row it is
    max_examples_per_unit: int | None  # rows that one unit may bring; None for example
    neighbouring_relation: Relation  # zero_out (N was counted and is published) or add_or_remove_one (N was declared)
    noise_multiplier: float  # sigma, the noise's standard deviation over max_grad_norm
    clipping: str  # flat or automatic
    max_grad_norm: float  # C
    delta: float  # below 1/N
    epsilon: float  # stated by the accountant for the event
    target_epsilon: float  # what was asked for, at least epsilon
    accountant: dict[str, Any]  # name, version and discretisation interval
    event: RunEvent  # the mechanism as a value, from which anyone can recompute epsilon
    sampling: Literal["unit", "example"] = "unit"  # what is drawn and clipped as a whole; example is a single row
    coefficients: tuple[float, ...] = ()  # c_0, ..., c_{b-1} of banded noise, of squares that add up to at most 1
    accountants: dict[str, float | None] = field(default_factory=dict)  # epsilon by each that knows the event
    limits: dict[str, float | None] = field(default_factory=dict)  # see ``privacy_loss.attacker_limits_of``
    # (delta, epsilon) at ``CURVE_DELTAS``; None where no epsilon is certified
    curve: tuple[tuple[float, float | None], ...] = ()

    def in_words(self) -> dict[str, str]:
        """The figures that everybody asks for, by their names."""
        schedule = self.schedule
        return {
            "epsilon": f"{self.epsilon:.3f}",
            "at delta": f"{self.delta:g}",
            "per": self.unit,
            "N": str(schedule.dataset_size),
            "q": f"{schedule.sampling_rate:.4f}",
            "steps": str(schedule.num_steps),
            "noise multiplier": f"{self.noise_multiplier:g}",
            "C": f"{self.max_grad_norm:g}",
        }

    def __str__(self) -> str:
        told = self.in_words()
        promised = " ".join(f"{name} {told.pop(name)}" for name in ("epsilon", "at delta", "per"))
        drawn = f"N {told['N']}, q {told['q']}, {told['steps']} steps"
        return f"{promised}, {drawn}, noise multiplier {told['noise multiplier']}, C {told['C']}"

    __repr__ = __str__

    def __post_init__(self) -> None:
        if self.coefficients and (len(self.coefficients) < 2 or not banded.admissible(self.coefficients)):
            raise Refused(
                "the coefficients of banded noise are not a strategy with columns of norm at most 1, so there would be less "
                "noise than the accounting assumes. plan.json was edited: start anew with --overwrite."
            )

    @property
    def bands(self) -> int:
        """b, how many groups take turns and over how many steps noise reaches back; 1 for independent noise."""
        return max(1, len(self.coefficients))

    def event_after(self, num_steps: int) -> RunEvent:
        """The event of the first `num_steps` steps."""
        return replace(self.event, count=num_steps)

    def to_json(self) -> dict[str, Any]:
        """The Plan as plan.json holds it, with the schedule's fields beside the others."""
        fields = {name: value for name, value in asdict(self).items() if name != "coefficients" or value}
        return {**fields.pop("schedule"), **fields, "event": self.event.to_json()}


def make_plan(
    settings: Settings,
    schedule: Schedule,
    cache_dir: Path | None = None,
    *,
    fit: Fit | None = None,
    largest_delta: float = 1.0,
    coefficients: tuple[float, ...] | None = None,
) -> Plan:
    """Builds the promise, calibrating the noise where the recipe does not set it.

    Args:
        settings: What is asked.
        schedule: Of the run.
        cache_dir: Where calibrations are remembered.
        fit: What is left of a Renyi filter that the run is to fit: calibrated noise is then the larger of what meets the
            target epsilon and what fits. Noise that the settings name is left as it is, for the ledger to judge.
        largest_delta: Of the dataset's budget, if it has one: ``privacy.delta: auto`` is at most that. Below 1/N itself.
        coefficients: Of the run that goes on; None: they are optimised for the recipe's steps.

    Raises:
        Refused: delta >= 1/N, the run's or the budget's; the given noise_multiplier exceeds the target epsilon; the filter cannot
            count the event; or banded noise has no room (``banded.check``).
        BudgetExceeded: No noise makes the run fit.
        ConfigError: The target epsilon cannot be reached.
    """
    relation = settings.relation
    delta = resolved_delta(settings.delta, largest_delta, schedule.dataset_size)
    coefficients = _coefficients(settings, schedule, delta, cache_dir) if coefficients is None else coefficients
    bands = max(1, len(coefficients))
    sigma = _noise(settings, schedule, delta, cache_dir, fit, bands)
    event = steps_event(sigma, schedule, schedule.num_steps, settings.group_size, bands)
    return Plan(
        schedule=schedule,
        unit=settings.unit,
        max_examples_per_unit=settings.max_examples_per_unit,
        sampling=settings.sampling,
        neighbouring_relation=relation,
        noise_multiplier=float(sigma),
        clipping=settings.clipping,
        max_grad_norm=settings.max_grad_norm,
        delta=delta,
        epsilon=accounting.epsilon(event, delta, relation),
        target_epsilon=settings.epsilon,
        accountant={**accounting.versions(), "name": "dp-accounting PLD", "interval": accounting.FINE_INTERVAL},
        event=event,
        coefficients=coefficients,
        accountants={
            name: accounting.finite(value) for name, value in accounting.beside(event, delta, relation).items()
        },
        limits=privacy_loss.attacker_limits_of(event, relation),
        curve=tuple((d, accounting.finite(value)) for d, value in accounting.curve(event, relation, CURVE_DELTAS)),
    )


def resolved_delta(wanted: float | str, largest_delta: float, size: int, name: str = "privacy.delta") -> float:
    """The delta that is stated, which is below 1/N, as is that of the dataset's budget; errors call it ``name``."""
    if largest_delta < 1.0:
        correct = "Its owner can correct it with dpllm ledger init as long as nothing is spent"
        check_delta(largest_delta, size, "the delta of the dataset's budget,", f"{correct}; or bring more data.")
    delta = min(auto_delta(size), largest_delta) if wanted == "auto" else events.number(name, wanted, 0.0, 1.0)
    check_delta(delta, size, name)
    return delta


def check_delta(delta: float, dataset_size: int, name: str = "privacy.delta", fix: str | None = None) -> None:
    """Refuses a delta of 1/N or more; errors call it `name` and say how to `fix` it (None: by what auto would be)."""
    if delta * dataset_size >= 1:
        raise Refused(
            f"{name} {delta:g} is not below 1/N = {1 / dataset_size:.2g}: a mechanism that publishes one "
            f"person's record outright would satisfy it. {fix or f'Set {name} to auto (here {auto_delta(dataset_size):g}).'}"
        )


def _fitting(sigma: float, event_of: Callable[[float], RunEvent], fit: Fit) -> float:
    """The noise multiplier that meets the target and fits the filter."""
    if "rdp" not in accounting.accountants(event_of(sigma)):
        raise Refused(
            "data.sampling: example is accounted by a mixture of Gaussians, whose Renyi divergence is not known, so the budget "
            "cannot say what fits. Set data.sampling: unit, or privacy.fit_budget: false and privacy.final: true."
        )
    fits = renyi.smallest_noise_multiplier(event_of, fit)
    if math.isinf(fits):
        raise BudgetExceeded(
            "privacy.fit_budget: this dataset's budget is used up, so no amount of noise makes a run fit. Train on other data."
        )
    return max(sigma, fits)


def _coefficients(settings: Settings, schedule: Schedule, delta: float, cache_dir: Path | None) -> tuple[float, ...]:
    """Of the noise; none where it is independent."""
    if not settings.banded:
        return ()
    bands, rate = settings.bands, settings.learning_rate
    banded.check(bands, schedule, settings.sampling)

    def sigma_of(bands: int) -> float:
        return noise_multiplier_for(settings.epsilon, delta, schedule, settings.relation, bands, cache_dir, rough=True)

    if bands == "auto":
        bands = banded.choose(rate, schedule, sigma_of)
    return banded.strategy(rate, schedule.num_steps, bands) if bands > 1 else ()


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    schedule: Schedule,
    relation: Relation,
    bands: int = 1,
    cache_dir: Path | None = None,
    *,
    group_size: int = 1,
    rough: bool = False,
) -> float:
    """Calibrated for the schedule with so many bands: ``accounting.calibrate_noise_multiplier`` of its rounds."""
    rate, rounds = group_rate(schedule, bands), -(-schedule.num_steps // bands)
    return accounting.calibrate_noise_multiplier(
        epsilon, delta, rate, rounds, relation, cache_dir=cache_dir, group_size=group_size, rough=rough
    )


def steps_event(noise_multiplier: float, schedule: Schedule, num_steps: int, group_size: int, bands: int) -> RunEvent:
    """The event of steps on a schedule: its groups take turns where there are bands."""
    noise = Gaussian(noise_multiplier)
    if bands > 1:
        return CyclicPoisson(bands, num_steps, group_rate(schedule, bands), noise)
    return SelfComposed(num_steps, PoissonSampled(schedule.sampling_rate, noise, group_size))


def _noise(
    settings: Settings, schedule: Schedule, delta: float, cache_dir: Path | None, fit: Fit | None, bands: int
) -> float:
    """The noise multiplier that keeps the recipe's promise."""
    group, steps, relation = settings.group_size, schedule.num_steps, settings.relation
    sigma = settings.noise_multiplier or noise_multiplier_for(
        settings.epsilon, delta, schedule, relation, bands, cache_dir, group_size=group
    )
    if fit is not None and settings.noise_multiplier is None:
        sigma = _fitting(sigma, lambda s: steps_event(s, schedule, steps, group, bands), fit)
    epsilon = accounting.epsilon(steps_event(sigma, schedule, steps, group, bands), delta, relation)
    if epsilon > settings.epsilon and settings.noise_multiplier is None and cache_dir is not None:
        return _noise(settings, schedule, delta, None, fit, bands)  # somebody changed the remembered noise
    if epsilon > settings.epsilon:
        raise Refused(
            f"privacy.noise_multiplier {sigma:g} gives epsilon {epsilon:.3f}, above the target privacy.epsilon "
            f"{settings.epsilon:g}. Set privacy.noise_multiplier: null to calibrate it, or raise privacy.epsilon."
        )
    return sigma


def noise_scale(noise_multiplier: float, max_grad_norm: float, coordinates: int) -> float:
    """The standard deviation s of the noise: ``noise_multiplier`` times what one unit can move the sum on the lattice.

    Raises:
        Refused: The lattice would be as coarse as C.
    """
    # A unit's clipped gradient is no longer than C (1 + 1e-6), and rounding it to the lattice moves each of P coordinates by at
    # most one spacing, which is at most 2^-30 s. So s = sigma (C (1 + 1e-6) + 2^-30 s sqrt(P)), solved for s; of a million
    # coordinates at sigma 1, C (1 + 2e-6).
    rounding = 2.0**-LATTICE_BITS * noise_multiplier * math.sqrt(coordinates)
    if rounding >= 0.5:
        raise Refused(
            f"a noise multiplier of {noise_multiplier:g} over {coordinates:,} coordinates would need rounding as coarse as the "
            "gradients themselves. Lower privacy.noise_multiplier, or train fewer parameters."
        )
    return noise_multiplier * max_grad_norm * (1 + SLACK) / (1 - rounding)


def spacing_of(scale: float) -> float:
    """The spacing of the lattice for noise of this standard deviation: a power of two in (2^-31, 2^-30] times it."""
    return math.ldexp(1.0, math.floor(math.log2(scale)) - LATTICE_BITS)


def auto_delta(dataset_size: int) -> float:
    """1/(10 N), rounded down to one significant digit."""
    bound = Fraction(1, 10 * dataset_size)
    exponent = math.floor(math.log10(bound))
    return float(math.floor(bound / Fraction(10) ** exponent) * Fraction(10) ** exponent)
