"""What an audit of the mechanism found, and what follows from its figures.

Comes in: figures of the watched engine. Goes out: a verdict, which a stranger can compute again. Must not run anything.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.auditing.bounds import OneRunBound
from dpllm.auditing.statistics import Floats


@dataclass(frozen=True)
class ReleaseTest:
    """One property of what was released.

    Attributes:
        name: What was tested.
        found: The statistic, in the units of ``promised``.
        promised: What it is by the Plan, up to chance.
        p_value: Probability of a statistic at least so far off (twice the smaller side, where there are two).
    """

    name: str
    found: float
    promised: float
    p_value: float


def scale_test(name: str, noise: Floats) -> ReleaseTest:
    """Chi-square test of the standard deviation, over all steps and coordinates given."""
    square, degrees = float(np.square(noise).sum()), noise.size
    p_value = 2 * min(stats.chi2.cdf(square, degrees), stats.chi2.sf(square, degrees))
    return ReleaseTest(name, math.sqrt(square / degrees), 1.0, float(np.minimum(1.0, p_value)))


def rate_test(name: str, joined: int, chances: int, rate: float) -> ReleaseTest:
    """Binomial test of how many of so many chances were taken."""
    p_value = 2 * min(stats.binom.cdf(joined, chances, rate), stats.binom.sf(joined - 1, chances, rate))
    return ReleaseTest(name, joined / chances, rate, float(np.minimum(1.0, p_value)))


def spread_test(name: str, counts: NDArray[np.int64], trials: NDArray[np.int64], rate: float) -> ReleaseTest:
    """Sum of squared deviations of binomial counts, against the gamma distribution of the same mean and variance."""
    counts, trials = counts[trials > 0], trials[trials > 0]  # nobody in a group, nothing to be seen
    variance = trials * rate * (1 - rate)
    ratio = float((np.square(counts - trials * rate) / variance).sum())
    of_one = float((2 + (1 - 6 * rate * (1 - rate)) / variance).mean())  # variance of (n - trials q)^2 / variance
    shape = len(counts) / of_one
    p_value = 2 * min(stats.gamma.cdf(ratio, shape, scale=of_one), stats.gamma.sf(ratio, shape, scale=of_one))
    return ReleaseTest(name, math.sqrt(ratio / len(counts)), 1.0, float(np.minimum(1.0, p_value)))


def steps_test(noise_TP: Floats) -> ReleaseTest:
    """Equal or related noise in two steps, whichever they are; found is the largest correlation.

    For s < t, <r_s, r_t> / |r_s| is N(0, 1) given r_s; the p-value is the smallest of all pairs, times their number.
    """
    gram_TT = noise_TP @ noise_TP.T
    length_T = np.sqrt(np.maximum(np.diag(gram_TT), 1e-300))
    earlier, later = np.triu_indices(len(noise_TP), k=1)
    z = np.abs(gram_TT[earlier, later]) / length_T[earlier]
    found = float((z / length_T[later]).max())
    return ReleaseTest("noise of two steps", found, 0.0, float(np.minimum(1.0, len(z) * 2 * stats.norm.sf(z.max()))))


@dataclass(frozen=True)
class Pair:
    """Two batches that differ in one unit, and by how much what came of them differs.

    Attributes:
        units: Units of the larger batch.
        rows: Rows of the unit that the other batch lacks.
        physical_batches: Of the larger batch.
        sum_difference: Norm of the difference of the clipped sums over C, before noise, in float64; at most 1 + 1e-6.
        released_difference: The same of what one step hands to the optimizer, noise included, less what rounding to
            float32 can explain.
        count_difference: With adaptive clipping, how far the released count moved; at most 1/2.
    """

    units: int
    rows: int
    physical_batches: int
    sum_difference: float
    released_difference: float
    count_difference: float | None

    @property
    def excess(self) -> float:
        """The largest of the differences over what the Plan allows for it; more than 1 contradicts the Plan."""
        of_count = 2 * (self.count_difference or 0.0) / (1 + SLACK)
        # numpy's maximum, because Python's forgets a nan that does not come first.
        return float(np.max([self.sum_difference / (1 + SLACK), self.released_difference / (1 + SLACK), of_count]))


ALPHA = 1e-3
"""Probability that a mechanism which keeps its Plan is called falsified."""
SLACK = 1e-6  # of C: what the engine promises for one unit
COARSEST = 0.5  # an error of the sum's length that must be visible, or the audit is inconclusive
SCOPE = (
    "The engine, the sampler and the noise are those that train; the model is a small one made to be watched, and only "
    "the recipe's numbers are its own. What this run's weights remember is measured by the audit of the run."
)


@dataclass(frozen=True)
class MechanismReport:
    """What one audit of the mechanism found.

    Attributes:
        verdict: falsified, consistent or inconclusive; never private, which no audit can show.
        reason: In a sentence or two.
        steps: How many steps were run, and tested.
        promised_steps: How many of them, from the first, the bound looks at: no more than the Plan has.
        canaries: M.
        claimed: Numbers of the Plan that were tested, and its epsilon for all of its steps.
        epsilon: What the accountant states for ``promised_steps``, at the delta of ``bound``, for one thing that is sampled.
        bound: Lower bound on it, from the canaries' coins.
        tests: What was released against the Plan.
        level: Of each test: half of ALPHA over their number. The bound has the other half.
        resolution: By what share the sum must be too long or too short for its test to see it, half of the time.
        largest_contribution: Of one unit, over C.
        pairs: Neighbouring batches with equal noise.
    """

    verdict: str
    reason: str
    steps: int
    promised_steps: int
    canaries: int
    claimed: dict[str, Any]
    epsilon: float
    bound: OneRunBound
    tests: tuple[ReleaseTest, ...]
    level: float
    resolution: float
    largest_contribution: float
    pairs: tuple[Pair, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON value; what is not finite is null."""
        values = asdict(self)
        values["bound"] = self.bound.to_json()
        for pair, shown in zip(self.pairs, values["pairs"], strict=True):
            shown["excess"] = pair.excess
        for key in ("epsilon", "resolution"):
            values[key] = values[key] if math.isfinite(values[key]) else None
        return {**values, "tests": list(values["tests"]), "pairs": list(values["pairs"]), "scope": SCOPE}


def verdict(report: MechanismReport) -> tuple[str, str]:
    """falsified, inconclusive or consistent, and why; whatever ``report.verdict`` says."""
    wrong = contradictions(report)
    if wrong:
        return "falsified", f"What the engine released contradicts the Plan: {'; '.join(wrong)}."
    if not report.resolution <= COARSEST:
        return "inconclusive", (
            f"In {report.steps} steps at sampling rate {report.claimed['sampling_rate']:.3g} the {report.canaries} canaries "
            "were drawn too seldom: a sum of half or twice its length would not have been seen. Noise and single "
            "contributions are as the Plan says. Take more steps or more canaries."
        )
    return "consistent", (
        f"No test failed over {report.steps} steps: noise, sampling, clipping and the sum are as the Plan says, to "
        f"{100 * report.resolution:.1f}% of the sum's length. This proves nothing about what was not tested."
    )


def contradictions(report: MechanismReport) -> list[str]:
    """Every property that failed, with its p-value where it has one."""
    wrong = [
        f"{test.name} is {test.found:.4g} and should be {test.promised:.4g} (p = {test.p_value:.1g})"
        for test in report.tests
        if not test.p_value > report.level  # a statistic of nan fails
    ]
    if not report.largest_contribution <= 1 + SLACK:
        wrong.append(f"one unit contributed {report.largest_contribution:.4g} C")
    excess = max((pair.excess for pair in report.pairs), default=0.0)
    if not all(pair.excess <= 1 for pair in report.pairs):
        wrong.append(f"neighbouring batches with equal noise differ by {excess:.4g} times what is allowed")
    if not report.bound.value <= report.epsilon:
        wrong.append(
            f"epsilon is at least {report.bound.value:.3g} after {report.promised_steps} steps, and {report.epsilon:.3g} is "
            f"stated (delta {report.bound.delta:.1g}, level {report.bound.alpha:.1g})"
        )
    return wrong
