"""What an audit tests and certifies: the claim for a canary, and bounds on epsilon from canaries and gradient canaries.

Comes in: the figures of a Plan; JSON. Goes out: claims, and records of bounds. Must not know how a bound is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from dpllm.privacy.limits import attacker_limits
from dpllm.records import AtLeast1, Between0And1, Count, Number, Positive, Record, Share

_CLOSED = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True, config=_CLOSED)
class GroupClaim:
    """What an (epsilon, delta) for one row promises for k copies of it."""

    epsilon: float
    """Of k copies together."""
    delta: float
    """At most 1, and 1 says nothing."""
    repetitions: int
    """The copies, k."""


@dataclass(frozen=True, config=_CLOSED)
class Claim:
    """What the Plan promises for one privacy unit."""

    epsilon: float
    """Epsilon for one unit."""
    delta: float
    """Delta for one unit."""
    unit: str
    """Whom it protects."""

    def units(self, repetitions: int) -> int:
        """Number of privacy units of a canary: one for each repetition if rows are the unit, else one."""
        return repetitions if self.unit == "example" else 1

    def of(self, repetitions: int) -> GroupClaim:
        """The claim for a canary with this number of repetitions."""
        return group_claim(self.epsilon, self.delta, self.units(repetitions))

    def limits(self, repetitions: int, mechanism: Mapping[str, float | None] | None) -> dict[str, float]:
        """Limits on any attack on a canary with this number of repetitions, see ``attacker_limits``.

        ``mechanism``: limits for one unit from the whole mechanism, tighter than from one (epsilon, delta); None: not known.
        """
        target = self.of(repetitions)
        mechanism_limits = (mechanism or {}) if self.units(repetitions) == 1 else {}
        pair = attacker_limits(target.epsilon, target.delta)
        return {name: min(value, mechanism_limits.get(name) or value) for name, value in pair.items()}


def group_claim(epsilon: float, delta: float, repetitions: int) -> GroupClaim:
    """The claim for ``repetitions`` rows that follows from a claim for one row.

    Guarantee:
        A mechanism that is (epsilon, delta)-DP for one row is (k epsilon, delta (1 + e^eps + ... + e^((k - 1) eps)))-DP
        for k rows. A tighter statement needs the mechanism itself.

    Args:
        epsilon: At least 0; may be infinite.
        delta: In [0, 1].
        repetitions: k >= 1.

    References:
        Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", theorem 2.2, with the delta that
        composing the inequality k times gives: delta (e^(k eps) - 1) / (e^eps - 1).

    Raises:
        ValueError: A value is out of range.
    """
    if not epsilon >= 0 or not 0 <= delta <= 1 or repetitions < 1:
        raise ValueError(
            f"a group claim needs epsilon >= 0, delta in [0, 1], k >= 1: {epsilon}, {delta}, {repetitions}"
        )
    if delta == 0 or repetitions == 1:
        return GroupClaim(epsilon * repetitions, delta, repetitions)
    if epsilon == math.inf:
        return GroupClaim(math.inf, 1.0, repetitions)
    # Factor out the largest term, e^((k - 1) eps), and cap the logarithm at 0 before anything can overflow.
    shares = repetitions if epsilon == 0 else math.expm1(-repetitions * epsilon) / math.expm1(-epsilon)
    log_delta = math.log(delta) + (repetitions - 1) * epsilon + math.log(shares)
    return GroupClaim(epsilon * repetitions, math.exp(min(0.0, log_delta)), repetitions)


Side = Literal["falling", "falling_in"]
"""Guesses on both ends of the ranking, half of them "in"; or "in" for the highest scores alone. Weights fall with the rank."""


class OneRunBound(Record):
    """What the one-run test certifies, and the most that it could have certified."""

    value: Number
    """Lower bound on epsilon."""
    alpha: Between0And1
    """Probability that it exceeds the truth."""
    delta: Share
    """Delta at which it is stated."""
    falling: tuple[AtLeast1, ...]
    """Numbers of guesses on both sides, with weights that fall with the rank."""
    falling_in: tuple[AtLeast1, ...]
    """The same on the highest scores alone."""
    best_guesses: AtLeast1 | None
    """Guesses of the best of the tests; null where none could be played."""
    best_side: Side | None
    """Of which kind it was."""
    correct: Count | None
    """How many of its guesses were right."""
    weight: Count | None
    """Sum of their weights."""
    num_canaries: Count
    """Canaries with a coin each."""
    ceiling: Number
    """The most that an attack which is always right would have shown."""


class WeightsAudit(Record):
    """What the weights before and after the run show of the same vectors, without any step between."""

    epsilon_lower_bound: Number
    """What whoever holds both could prove about epsilon."""
    alpha: Between0And1
    """Probability that it exceeds the truth."""
    ceiling: Number
    """The most that an attack which is always right would have shown."""
    auc: Share | None
    """Area under the ROC curve of how far the weights went along each vector."""
    auc_interval: tuple[Number, Number] | None
    """Its 95% interval."""
    expected_epsilon: Number
    """What is expected to be visible of one unit in the final weights, by the last-iterate comparison; no bound."""


class GradientAudit(Record):
    """What every step of the run showed of vectors that coins planted in its sums; absent where there were none."""

    canaries: AtLeast1
    """Vectors with a coin each."""
    inserted: Count
    """Of these, planted by their coin."""
    steps: Count
    """Steps that were seen."""
    epsilon_lower_bound: Number
    """What an observer of every step could prove about epsilon."""
    alpha: Between0And1
    """Probability that it exceeds the truth."""
    delta: Share
    """Delta at which it is stated."""
    ceiling: Number
    """The most that an attack which is always right would have shown."""
    auc: Share | None
    """Area under the ROC curve of the scores behind it."""
    auc_interval: tuple[Number, Number] | None
    """Its 95% interval."""
    noise: Number | None
    """Standard deviation of the noise over C, as measured on vectors that were not planted."""
    noise_interval: tuple[Number, Number] | None
    """Its 95% interval."""
    noise_planned: Positive
    """The same by the Plan."""
    noise_refuted: bool
    """Whether less was measured than chance allows."""
    drawn: Number | None
    """How often a planted vector was drawn, on average, as measured."""
    drawn_standard_error: Number | None
    """Of it."""
    drawn_planned: Number
    """The same by the Plan."""
    drawn_refuted: bool
    """Whether more was measured than chance allows."""
    weights: WeightsAudit | None = None
    """What the weights alone show; absent where the first ones were not kept."""
