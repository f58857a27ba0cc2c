"""The audit of the mechanism: does the engine do what the Plan says, measured on what it releases?

Comes in: a recipe, and the Plan that was made of it. Goes out: a ``MechanismReport`` with a verdict, in a minute, before a
day of training is spent. Reads no weights, no rows of the data and no ledger.

Shape suffixes: M canaries, T steps, P trainable coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy import stats

from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.gradient import likelihood_ratio
from dpllm.auditing.mechanism_report import (
    ALPHA,
    MechanismReport,
    Pair,
    ReleaseTest,
    rate_test,
    scale_test,
    spread_test,
    steps_test,
    verdict,
)
from dpllm.errors import ConfigError
from dpllm.lab.probe import Floats, Observation, lengths, observe
from dpllm.lab.replay import replay
from dpllm.privacy import accounting, banded
from dpllm.privacy.events import PoissonSampled, RunEvent, SelfComposed, step_of
from dpllm.privacy.plan import Plan
from dpllm.privacy.schedule import group_rate
from dpllm.recipe.audit import default_ways
from dpllm.recipe.config import RunConfig
from dpllm.run.promise import plan_before_any_run

CANARIES = 1000
ROWS = 200  # of a step, beyond which the default takes fewer canaries
FEWEST_CANARIES = 300
FEWEST_EXPECTED = 10  # draws of a slot or of a step, below which the spread of their number is not tested


def audit_mechanism(
    config: RunConfig,
    *,
    plan: Plan | None = None,
    steps: int = 300,
    canaries: int | None = None,
    pairs: int = 8,
    entropy: int | Sequence[int] | None = None,
) -> MechanismReport:
    """Runs the real engine on a model made to be watched, and tests what it releases against the Plan.

    The clipping function, C, q, sigma, the divisor, the generators and grad_sample_mode are the recipe's; model, data and
    number of steps are not. Canaries are units whose gradient reaches coordinates of their own, so that each can be seen.

    Guarantee:
        If sampling, clipping, noise and divisor are what the Plan says, ``falsified`` is said with probability at most
        ``ALPHA``, in approximation where a statistic's distribution is one: half of ALPHA is the bound's, the other half is
        divided by the number of tests. ``consistent`` shows that no test failed and proves nothing.

    Args:
        config: A recipe with ``privacy.enabled``.
        plan: The promise to test; None: the one that the recipe makes.
        steps: At least 2.
        canaries: M, at least 2; None: 1000, and fewer, down to 300, where large batches would take long.
        pairs: Neighbouring batches to replay, at least 1.
        entropy: Seeds coins, sampling and noise, for tests; None: the operating system.

    Raises:
        ConfigError: The recipe makes no promise.
        Refused: The Plan cannot be made, or the engine refuses to run.

    References:
        Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning (gradient canaries); Steinke, Nasr and
        Jagielski 2023 (the bound); Cebere et al. 2026, arXiv 2602.17454 (record and replay).
    """
    if not config.privacy.enabled:
        raise ConfigError(
            "privacy.enabled is false, so that there is no mechanism to audit. Audit a recipe that promises something, "
            "or set privacy.enabled: true."
        )
    plan = plan or plan_before_any_run(config)
    canaries = canaries or max(FEWEST_CANARIES, min(CANARIES, round(ROWS / plan.schedule.sampling_rate)))
    generator = np.random.default_rng(entropy)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small are slower on several threads, many times so where cores are shared
    try:
        seen = observe(config, plan, steps=steps, canaries=canaries, generator=generator)
        found = replay(config, plan, pairs=pairs, generator=generator)
    finally:
        torch.set_num_threads(threads)
    return _report(config, plan, seen, found)


def _report(config: RunConfig, plan: Plan, seen: Observation, pairs: tuple[Pair, ...]) -> MechanismReport:
    steps, canaries, schedule = len(seen.draws), len(seen.inserted_M), plan.schedule
    rate = group_rate(schedule, plan.bands)
    tests, promised = release_tests(seen, rate), min(steps, schedule.num_steps)
    level, length = ALPHA / 2 / len(tests), _length_of_the_sum(seen)
    bound = epsilon_lower_bound(
        canary_scores(seen, rate, promised),
        seen.inserted_M,
        # The Plan's event states an epsilon for every delta; the bound's price, 2 M delta, must be small beside alpha.
        delta=min(plan.delta, ALPHA / 1000 / canaries),
        alpha=ALPHA / 2,
        **default_ways(canaries),
    )
    # Of one thing that is sampled: a canary is one, also where the promise is for a unit of several.
    event: RunEvent = plan.event_after(promised)
    if plan.sampling == "example":
        event = SelfComposed(promised, PoissonSampled(rate, step_of(plan.event).event))
    report = MechanismReport(
        verdict="",
        reason="",
        steps=steps,
        promised_steps=promised,
        canaries=canaries,
        claimed={
            **{key: getattr(plan, key) for key in ("delta", "noise_multiplier", "clipping", "max_grad_norm")},
            **{key: getattr(schedule, key) for key in ("num_steps", "sampling_rate", "expected_batch_size")},
            "epsilon": plan.epsilon if math.isfinite(plan.epsilon) else None,
        },
        epsilon=accounting.epsilon(event, bound.delta, plan.neighbouring_relation),
        bound=bound,
        tests=tests,
        level=level,
        resolution=float(stats.norm.isf(level / 2)) / length if length else math.inf,
        largest_contribution=max(seen.contributions),
        pairs=pairs,
    )
    word, reason = verdict(report)
    return replace(report, verdict=word, reason=reason)


# Whether what was released is what the Plan says. Each test's p-value is at most p with a probability of at most p if the
# Plan is kept; they are not independent of each other.


def release_tests(seen: Observation, sampling_rate: float) -> tuple[ReleaseTest, ...]:
    """Every test of what was released; how many there are depends on public numbers alone."""
    # Independent N(0, 1) if the Plan is kept.
    noise_TP = (seen.released_TP - seen.expected_TP) / seen.noise_multiplier
    found = [scale_test(f"noise on {name}", noise_TP[:, start:end]) for name, (start, end) in seen.parts.items()]
    shape = stats.kstest(noise_TP.ravel(), "norm")  # found is the largest distance from the normal distribution
    found.append(ReleaseTest("shape of the noise", float(shape.statistic), 0.0, float(shape.pvalue)))
    found += [steps_test(noise_TP), _noise_within_steps(noise_TP)]
    if seen.count_residual_T is not None:
        found.append(scale_test("noise on the count of unclipped units", seen.count_residual_T))
    found += [_scale_of_the_sum(seen, noise_TP), _single_canaries(seen, noise_TP)]
    return (*found, *_sampling_tests(seen, sampling_rate))


def _noise_within_steps(noise_TP: Floats) -> ReleaseTest:
    """Related noise at any fixed distance within a step, of one stream for two parameters, say; found is the largest.

    For each distance, the sum of products over all steps and coordinates is close to normal; the p-value is the smallest
    of all distances, times their number.
    """
    steps, size = noise_TP.shape
    distances = size // 2
    power = np.square(np.abs(np.fft.rfft(noise_TP, axis=1))).sum(axis=0)
    products = np.abs(np.fft.irfft(power, size)[1 : distances + 1])
    # At a distance of half the circle every pair is there twice.
    spread = np.sqrt(steps * size * np.where(2 * np.arange(1, distances + 1) == size, 2.0, 1.0))
    z = float((products / spread).max())
    found = float(products.max() / max(np.square(noise_TP).sum(), 1e-300))
    return ReleaseTest("noise of two coordinates", found, 0.0, float(np.minimum(1.0, distances * 2 * stats.norm.sf(z))))


def _scale_of_the_sum(seen: Observation, noise_TP: Floats) -> ReleaseTest:
    """How long the released sum is along the expected one: clipping, accumulation and divisor.

    Given the draws, <residual, expected> / |expected| is N(0, 1).
    """
    length = _length_of_the_sum(seen)
    if length == 0:
        return ReleaseTest("length of the sum", 1.0, 1.0, 1.0)
    z = float((noise_TP * seen.expected_TP).sum()) / seen.noise_multiplier / length
    return ReleaseTest("length of the sum", 1 + z / length, 1.0, 2 * float(stats.norm.sf(abs(z))))


def _length_of_the_sum(seen: Observation) -> float:
    return float(np.linalg.norm(seen.expected_TP)) / seen.noise_multiplier


def _single_canaries(seen: Observation, noise_TP: Floats) -> ReleaseTest:
    """Chi-square test over canaries of what each adds beside what it should; found is the root of its mean square.

    Given the draws, the residual along a canary's own coordinates, summed over the steps that drew it, is normal, and
    independent of all others'.
    """
    present_TM = np.zeros((len(seen.draws), len(seen.inserted_M)))
    first = seen.num_slots - len(seen.inserted_M)
    for present_M, drawn in zip(present_TM, seen.draws, strict=True):
        present_M[[slot - first for slot in drawn if slot >= first]] = 1.0
    present_TM[:, ~seen.inserted_M] = 0.0
    count_M = present_TM.sum(axis=0)
    drawn_M = count_M > 0
    if not drawn_M.any():
        return ReleaseTest("sum of single canaries", 1.0, 1.0, 1.0)
    z = (present_TM * _along(seen, noise_TP)).sum(axis=0)[drawn_M] / np.sqrt(count_M[drawn_M])
    return scale_test("sum of single canaries", z)


def _along(seen: Observation, rows_TP: Floats) -> Floats:
    """Each step's product with each canary's direction on its own coordinates."""
    result: Floats = np.asarray((seen.own_MP @ rows_TP.T).T) / lengths(seen.own_MP)
    return result


def _sampling_tests(seen: Observation, rate: float) -> list[ReleaseTest]:
    """How often canaries' slots, and all slots, join; how that spreads over steps and over slots."""
    canaries = len(seen.inserted_M)
    slot_counts = np.bincount([slot for drawn in seen.draws for slot in drawn], minlength=seen.num_slots)
    step_counts = np.array([len(drawn) for drawn in seen.draws])
    of_canaries = int(slot_counts[seen.num_slots - canaries :].sum())
    bands = len(seen.coefficients)
    in_turn_T, in_turn_N = seen.turn_TN.sum(axis=1), seen.turn_TN.sum(axis=0)
    found = [
        rate_test("sampling rate of canaries", of_canaries, int(in_turn_N[-canaries:].sum()), rate),
        rate_test("sampling rate of all slots", int(slot_counts.sum()), int(in_turn_N.sum()), rate),
    ]
    if rate < 1 and rate * seen.num_slots / bands >= FEWEST_EXPECTED:
        found.append(spread_test("spread of the batch's size", step_counts, in_turn_T, rate))
    if rate < 1 and rate * in_turn_N.min() >= FEWEST_EXPECTED:
        found.append(spread_test("spread over slots", slot_counts, in_turn_N, rate))
    if bands > 1:
        astray = sum(int((~turn_N[drawn]).sum()) for turn_N, drawn in zip(seen.turn_TN, seen.draws, strict=True))
        found.append(ReleaseTest("slots that join out of turn", float(astray), 0.0, float(astray == 0)))
        even = stats.chisquare(seen.turn_TN[:bands].sum(axis=1))
        found.append(ReleaseTest("sizes of the groups", float(even.statistic), bands - 1, float(even.pvalue)))
    return found


def canary_scores(seen: Observation, sampling_rate: float, steps: int) -> Floats:
    """score_M of the first steps: higher = more likely inserted. Looks at no draw and no coin.

    For each turn of its group it is the logarithm of the likelihood ratio of "joins with probability q'" against "never", along
    the canary's own coordinates; summed over turns. What it would be for releases of zero is subtracted, so that canaries that
    weigh less are not ranked by their weight where the noise is not what it should be.
    """
    starts = [first for first in seen.starts if first < steps]
    turn_TM = seen.turn_TN[:steps, -len(seen.inserted_M) :]
    shown_TP, power_T = banded.matched(seen.coefficients, seen.released_TP[:steps], starts)
    along_TM = _along(seen, shown_TP) / seen.noise_multiplier * turn_TM
    shift_TM = seen.gain_TM[:steps] * lengths(seen.own_MP) / seen.noise_multiplier * turn_TM
    at_zero_TM = -(shift_TM**2) * power_T[:, None] / 2
    seen_M = likelihood_ratio(shift_TM * along_TM + at_zero_TM, sampling_rate)
    return seen_M - likelihood_ratio(at_zero_TM, sampling_rate)
