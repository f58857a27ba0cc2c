"""The Plan: one frozen value from which sampler, noise, accountant, ledger and card are built.

Comes in: a ``Mechanism``, all of it public. Goes out: a ``Plan``, which plan.json and the privacy statement contain unchanged.
Must not see data and must not import torch: verifying a card recomputes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.files import digest
from dpllm.privacy import accounting, banded, events, limits, renyi
from dpllm.privacy.accounting import Accountant, CrossCheck, Relation, StoredTrainingEvent
from dpllm.privacy.banded import LearningRate
from dpllm.privacy.events import CyclicPoisson, Gaussian, PoissonSampled, RepeatAndSelect, RunEvent, SelfComposed
from dpllm.privacy.limits import MechanismLimits
from dpllm.privacy.renyi import Fit
from dpllm.privacy.schedule import Clipping, Schedule, group_rate
from dpllm.records import (
    AtLeast1,
    Between0And1,
    Count,
    NotNegative,
    Number,
    Positive,
    Record,
    Sha256,
    Share,
    Text,
)

ACCOUNTANT = "dp-accounting PLD"
LATER = ("canary_commitment", "audit", "cross_check")
"""Fields of a Plan that are set when training starts."""
CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)

RELATION_IN_WORDS: dict[Relation, str] = {
    "zero_out": "two datasets of the same public size are neighbours if one becomes the other when the data of one "
    "privacy unit are replaced by nothing",
    "zero_out_public_graph": "two datasets with the same public list of who has which row are neighbours if one becomes the "
    "other when all rows of one owner are emptied and keep their places: who wrote to whom is not protected, what was written is",
    "add_or_remove_one": "two datasets are neighbours if one becomes the other when one privacy unit is added or removed",
}


Neighbours = Literal["zero_out", "zero_out_public_graph", "add_or_remove_one"]


class AuditSettings(Record):
    """Choices of the audit that are fixed before training."""

    alpha: Between0And1
    """Probability that a bound exceeds the true value."""
    falling: tuple[AtLeast1, ...]
    """How many canaries the tests of membership guess on both sides, with weights that fall with the rank."""
    falling_in: tuple[AtLeast1, ...]
    """And how many on the planted side only."""
    score: Literal["calibrated"] = "calibrated"
    """The score on which the lower bound is based."""
    version: Literal[2]
    """Version of score and tests: the sum over every token in the loss (for a secret in a prompt, over the secret's tokens) of
    the part not explained by the same word in other rows; equal scores count against the bound."""
    control_level: Between0And1 = 0.001
    """Level at which a control counts as detected, or as failed."""


class Mechanism(Record):
    """The mechanism of a run: every number that determines the promise, and what else is fixed before training."""

    unit: Text
    """Whom the guarantee protects: example (one row of the data), or the name of the column that names a row's owner."""
    max_examples_per_unit: AtLeast1 | None
    """Maximum number of rows of one unit; null if each row is a unit."""
    sampling: Literal["unit", "example"]
    """What is sampled and clipped as a whole: unit, or example for single rows."""
    neighbouring_relation: Neighbours
    """How neighbouring datasets differ: zero_out (one unit's data replaced by nothing; N is unchanged, since it was counted and
    is published), zero_out_public_graph (rows have several owners; ownership is public and unchanged, and all rows of one owner
    are emptied) or add_or_remove_one (N was declared)."""
    dataset_size: AtLeast1
    """N, the public number of sampled units or rows, including canary slots."""
    canary_slots: Count
    """How many of the N are reserved for the audit's canaries."""
    expected_batch_size: AtLeast1
    """Expected number of them in a step, and the public divisor of the sum."""
    num_steps: AtLeast1
    """T, logical steps; epsilon is for all of them."""
    noise_multiplier: Positive
    """sigma, standard deviation of the noise over C."""
    coefficients: tuple[Number, ...]
    """First column of the strategy matrix C of banded noise C^-1 z, with z independent noise; the squares add up to at most 1.
    One for each band, which is also the number of groups that take turns. Empty for independent noise."""
    clipping: Clipping
    """The clipping function."""
    max_grad_norm: Positive
    """C, the L2 norm to which each sampled unit's gradient is clipped."""
    delta: Between0And1
    """The delta of the definition; far below 1/N."""
    target_epsilon: Positive
    """The recipe's target, at least epsilon."""
    canary_commitment: Sha256 | None = None
    """Hash of the canaries and their coins; null if none were planned."""
    audit: AuditSettings | None = None
    """Settings that the audit may not choose later."""

    @property
    def schedule(self) -> Schedule:
        """Sizes, sampling rate and steps."""
        size, batch = self.dataset_size, self.expected_batch_size
        return Schedule(size, self.canary_slots, batch, sampling_rate=batch / size, num_steps=self.num_steps)

    @property
    def bands(self) -> int:
        """b, the number of groups that take turns and of steps with correlated noise; 1 for independent noise."""
        return max(1, len(self.coefficients))

    @property
    def group_size(self) -> int:
        """How many sampled units or rows are protected together."""
        return (self.max_examples_per_unit or 1) if self.sampling == "example" else 1

    @property
    def event_of_steps(self) -> RunEvent:
        """The event of the run's steps."""
        return steps_event(self.noise_multiplier, self.schedule, self.group_size, self.bands)

    @property
    def group_rate(self) -> float:
        """The probability that a member of the group whose turn it is joins a step: b times the sampling rate."""
        return group_rate(self.schedule, self.bands)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            wrong = [problem for problem, good in self._rules().items() if not good]
        except (ArithmeticError, ConfigError) as error:  # numbers that do not fit a float
            raise ValueError(str(error)) from None
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _rules(self) -> dict[str, bool]:
        """Conditions on a mechanism, by the message if one does not hold."""
        size, coefficients = self.dataset_size, self.coefficients
        return {
            "canary_slots do not fit into dataset_size": self.canary_slots < size,
            "expected_batch_size is larger than dataset_size": self.expected_batch_size <= size,
            "delta is not below 1/N, so that publishing one record outright would satisfy it": self.delta * size < 1,
            "max_examples_per_unit belongs to another unit": self.unit != "example"
            or self.max_examples_per_unit is None,
            "rows are sampled, and max_examples_per_unit does not say how many of a unit": self.sampling == "unit"
            or self.unit == "example"
            or self.max_examples_per_unit is not None,
            "rows of several owners are drawn one by one": self.neighbouring_relation != "zero_out_public_graph"
            or (self.unit != "example" and (self.sampling == "example" or self.max_examples_per_unit == 1)),
            "banded noise is for whole units": not coefficients or self.sampling == "unit",
            "coefficients are no strategy with columns of norm at most 1": not coefficients
            or (len(coefficients) > 1 and banded.admissible(coefficients)),
        }


class Plan(Mechanism):
    """The promise of one run: its mechanism, and everything derived from it.

    Guarantee:
        The trained parameters are (epsilon, delta)-differentially private for the privacy unit ``unit`` under
        ``neighbouring_relation``, if T = num_steps steps run as ``schedule`` says, each sampled unit (or row) contributes a
        vector of L2 norm at most ``max_grad_norm`` to a summed gradient, and N(0, (noise_multiplier * max_grad_norm)^2) is added
        to every coordinate of each sum. With ``sampling`` example, rows are sampled and clipped one by one, and the guarantee is
        for a unit of up to ``max_examples_per_unit`` rows together. With ``coefficients``, steps sample groups in turn and the
        noise of a step cancels a part of earlier noise: ``dpllm.privacy.banded`` has the assumptions and the proof.
    """

    schema_version: Literal[2]
    """Version of plan.json."""
    definition: Literal["(epsilon, delta)-differential privacy"]
    """The definition to which epsilon and delta belong."""
    trust_model: Literal["central"]
    """Who saw the data: central means whoever ran the training did, and everybody else sees what is released."""
    mechanism: Literal["dp-sgd", "dp-bandmf"]
    """What released the weights; dp-bandmf is DP-SGD with banded noise."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    """q, probability of each coin, expected_batch_size / dataset_size; with groups, over the draw of the groups too."""
    event: StoredTrainingEvent
    """The mechanism as a value, from which epsilon can be recomputed: what is sampled is what is accounted. For the best of a
    secret number of runs it is that selection, whose events include that of these steps."""
    epsilon: NotNegative
    """An upper bound on the privacy loss of the run, in full precision."""
    accountant: Accountant
    cross_check: CrossCheck | None
    accountants: dict[Annotated[str, Field(pattern=r"^[a-z]+$")], NotNegative | None]
    """Epsilon from each accountant that supports the event."""
    limits: MechanismLimits
    curve: tuple[tuple[Number, Number | None], ...]
    """Pairs of delta and the epsilon certified at it; null if none is."""
    trade_off: tuple[tuple[Share, Share], ...]
    """Pairs of a false-positive rate and the largest true-positive rate of any membership test, in 4 digits."""
    without_amplification: NotNegative | None
    """Epsilon at the same delta with shuffled batches, rounded up to four digits; null if none can be stated, such as for banded
    noise: reshuffled in each epoch, a unit could return within b steps."""

    @classmethod
    def of(cls, run: Mechanism, best_of: RepeatAndSelect | None = None) -> Plan:
        """The Plan of a mechanism. A second accountant runs when training starts: ``accounting.cross_check``.

        ``best_of``: the selection by which this run alone is released; None: it is released whatever its result.
        """
        event, relation, delta = best_of or run.event_of_steps, run.neighbouring_relation, run.delta
        by_accountant = accounting.epsilon_by_accountant(event, delta, relation)
        derived = {
            "schema_version": 2,
            "definition": "(epsilon, delta)-differential privacy",
            "trust_model": "central",
            "mechanism": _name_of(run),
            "sampling_rate": run.schedule.sampling_rate,
            "event": event,
            "epsilon": accounting.epsilon(event, delta, relation),
            "accountant": Accountant(
                name=ACCOUNTANT, interval=accounting.FINE_INTERVAL, version=accounting.versions()["version"]
            ),
            "cross_check": None,
            "accountants": {name: accounting.finite(value) for name, value in by_accountant.items()},
            "limits": MechanismLimits.model_validate(limits.attacker_limits_of(event, relation)),
            "curve": tuple(
                (at, accounting.finite(value)) for at, value in accounting.curve(event, relation, CURVE_DELTAS)
            ),
            "trade_off": limits.trade_off(event, relation),
            "without_amplification": if_shuffled(run, best_of),
        }
        return cls.model_validate({**{name: getattr(run, name) for name in Mechanism.model_fields}, **derived})

    def _rules(self) -> dict[str, bool]:
        follows = {
            "event": self.event_of_steps in (self.best_of.events if self.best_of else (self.event,)),
            "sampling_rate": self.sampling_rate == self.schedule.sampling_rate,
            "mechanism": self.mechanism == _name_of(self),
        }
        return {
            **super()._rules(),
            **{f"{name} does not follow from the other numbers": good for name, good in follows.items()},
        }

    @property
    def best_of(self) -> RepeatAndSelect | None:
        """The selection by which this run is released; None if it was the only run."""
        return self.event if isinstance(self.event, RepeatAndSelect) else None

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""
        return digest(self.to_json())

    def in_words(self) -> dict[str, str]:
        """The main figures, by their names."""
        return {
            "epsilon": f"{self.epsilon:.3f}",
            "at delta": f"{self.delta:g}",
            "per": self.unit,
            "N": str(self.dataset_size),
            "q": f"{self.sampling_rate:.4f}",
            "steps": str(self.num_steps),
            "noise multiplier": f"{self.noise_multiplier:g}",
            "C": f"{self.max_grad_norm:g}",
        }

    def __str__(self) -> str:
        words = self.in_words()
        promised = " ".join(f"{name} {words.pop(name)}" for name in ("epsilon", "at delta", "per"))
        drawn = f"N {words['N']}, q {words['q']}, {words['steps']} steps"
        return f"{promised}, {drawn}, noise multiplier {words['noise multiplier']}, C {words['C']}"

    __repr__ = __str__

    def event_after(self, num_steps: int) -> RunEvent:
        """The event of the first `num_steps` steps of this run."""
        return replace(self.event_of_steps, count=num_steps)


def if_shuffled(run: Mechanism, best_of: RepeatAndSelect | None = None) -> float | None:
    """Epsilon of the same run with shuffled batches: one Gaussian release per epoch, without amplification by sampling.

    Returns:
        Epsilon rounded up to four digits; None for banded noise, for the best of several runs, and from 10,000 on.

    Guarantee:
        An upper bound for the zero-out relation, if a unit keeps its position in the order when its data are replaced by nothing.
        A unit of up to k rows that are sampled one by one counts as one release of sensitivity k C.

    References:
        Dong, Roth and Su 2022, "Gaussian Differential Privacy", corollary 3.3 (Gaussian releases compose to one).
    """
    if run.coefficients or best_of:
        return None
    epochs = math.ceil(Fraction(run.num_steps * run.expected_batch_size, run.dataset_size))
    try:
        value = limits.gaussian_epsilon(run.group_size * math.sqrt(epochs) / run.noise_multiplier, run.delta)
    except (ArithmeticError, ValueError):  # hardly any noise
        return None
    return limits.rounded_up(value * (1 + 1e-9))  # more than the root finder's error


def _name_of(run: Mechanism) -> str:
    return "dp-bandmf" if run.coefficients else "dp-sgd"


def resolved_delta(
    requested: float | str, largest_delta: float, size: int, name: str = "privacy.delta", canary_slots: int = 0
) -> float:
    """The stated delta, below 1/N as the dataset budget's must be; errors call it ``name`` and mention canary slots."""
    if largest_delta < 1.0:
        fewer = "plan fewer canaries (audit.canaries.groups)" if canary_slots else "bring more data"
        fix = f"Its owner can correct it with dpllm ledger init as long as nothing is spent; or {fewer}."
        check_delta(largest_delta, size, "the delta of the dataset's budget,", fix, canary_slots)
    delta = min(auto_delta(size), largest_delta) if requested == "auto" else events.number(name, requested, 0.0, 1.0)
    check_delta(delta, size, name, canary_slots=canary_slots)
    return delta


def check_delta(
    delta: float, dataset_size: int, name: str = "privacy.delta", fix: str | None = None, canary_slots: int = 0
) -> None:
    """Refuses a delta of 1/N or more; errors call it `name` and say how to `fix` it (None: set it to auto)."""
    if delta * dataset_size >= 1:
        slots = f" (N counts {canary_slots:,} slots of canaries)" if canary_slots else ""
        raise Refused(
            f"{name} {delta:g} is not below 1/N = {1 / dataset_size:.2g}{slots}: a mechanism that publishes one "
            f"person's record outright would satisfy it. {fix or f'Set {name} to auto (here {auto_delta(dataset_size):g}).'}"
        )


def fitting(sigma: float, event_of: Callable[[float], RunEvent], fit: Fit) -> float:
    """The larger of ``sigma``, which meets the target, and the smallest noise multiplier that fits a Renyi filter.

    Raises:
        Refused: The filter cannot count the event.
        BudgetExceeded: No noise makes the run fit.
    """
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


def strategy_for(
    epsilon: float,
    delta: float,
    schedule: Schedule,
    relation: Relation,
    rate: LearningRate,
    bands: int | Literal["auto"],
) -> tuple[float, ...]:
    """Coefficients of banded noise for a learning rate; empty if ``auto`` finds that independent noise is as good."""

    def sigma_of(bands: int) -> float:
        return noise_multiplier_for(epsilon, delta, schedule, relation, bands, rough=True)

    if bands == "auto":
        bands = banded.choose(rate, schedule, sigma_of)
    return banded.strategy(rate, schedule.num_steps, bands) if bands > 1 else ()


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    schedule: Schedule,
    relation: Relation,
    bands: int = 1,
    *,
    group_size: int = 1,
    rough: bool = False,
) -> float:
    """The noise multiplier calibrated for a schedule with bands: ``accounting.calibrate_noise_multiplier`` of its rounds."""
    rate, rounds = group_rate(schedule, bands), -(-schedule.num_steps // bands)
    return accounting.calibrate_noise_multiplier(epsilon, delta, rate, rounds, relation, group_size, rough=rough)


def steps_event(noise_multiplier: float, schedule: Schedule, group_size: int, bands: int) -> RunEvent:
    """The event of all steps of a schedule; with bands, groups take turns."""
    noise = Gaussian(noise_multiplier)
    if bands > 1:
        return CyclicPoisson(bands, schedule.num_steps, group_rate(schedule, bands), noise)
    return SelfComposed(schedule.num_steps, PoissonSampled(schedule.sampling_rate, noise, group_size))


def auto_delta(dataset_size: int) -> float:
    """1/(10 N), rounded down to one significant digit."""
    bound = Fraction(1, 10 * dataset_size)
    exponent = math.floor(math.log10(bound))
    return float(math.floor(bound / Fraction(10) ** exponent) * Fraction(10) ** exponent)
