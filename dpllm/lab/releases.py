"""Whether what was released is what the Plan says: tests on an ``Observation``, in numpy and scipy.

Comes in: an ``Observation`` and the sampling rate. Goes out: p-values, and the scores of the canaries. Each test's p-value
is at most p with a probability of at most p if the Plan is kept; they are not independent of each other. Knows no torch.

Shape suffixes: M canaries, T steps, P trainable coordinates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.auditing.mechanism_report import ReleaseTest

if TYPE_CHECKING:
    from dpllm.lab.probe import Observation

Floats = NDArray[np.float64]
FEWEST_EXPECTED = 10  # draws of a slot or of a step, below which the spread of their number is not tested


def release_tests(seen: Observation, sampling_rate: float) -> tuple[ReleaseTest, ...]:
    """Every test; how many there are depends on public numbers alone.

    Args:
        seen: See ``probe.observe``.
        sampling_rate: q of the Plan.
    """
    noise_TP = residuals(seen)
    found = [noise_scale(f"noise on {name}", noise_TP[:, start:end]) for name, (start, end) in seen.parts.items()]
    found += [noise_shape(noise_TP), noise_between_steps(noise_TP), noise_within_steps(noise_TP)]
    if seen.count_residual_T is not None:
        found.append(noise_scale("noise on the count of unclipped units", seen.count_residual_T))
    found += [scale_of_the_sum(seen, noise_TP), single_canaries(seen, noise_TP)]
    return (*found, *sampling_tests(seen, sampling_rate))


def residuals(seen: Observation) -> Floats:
    """Released minus expected, over the noise's standard deviation: independent N(0, 1) if the Plan is kept."""
    result: Floats = (seen.released_TP - seen.expected_TP) / seen.noise_multiplier
    return result


def noise_scale(name: str, noise: Floats) -> ReleaseTest:
    """Chi-square test of the standard deviation, over all steps and coordinates given."""
    square, degrees = float(np.square(noise).sum()), noise.size
    p_value = 2 * min(stats.chi2.cdf(square, degrees), stats.chi2.sf(square, degrees))
    return ReleaseTest(name, math.sqrt(square / degrees), 1.0, min(1.0, float(p_value)))


def noise_shape(noise_TP: Floats) -> ReleaseTest:
    """Kolmogorov and Smirnov's test against the normal distribution; found is the largest distance of the two."""
    result = stats.kstest(noise_TP.ravel(), "norm")
    return ReleaseTest("shape of the noise", float(result.statistic), 0.0, float(result.pvalue))


def noise_between_steps(noise_TP: Floats) -> ReleaseTest:
    """Equal or related noise in two steps, whichever they are.

    For s < t, <r_s, r_t> / |r_s| is N(0, 1) given r_s; the p-value is the smallest of all pairs, times their number.
    found is the largest correlation of two steps.
    """
    gram_TT = noise_TP @ noise_TP.T
    length_T = np.sqrt(np.maximum(np.diag(gram_TT), 1e-300))
    earlier, later = np.triu_indices(len(noise_TP), k=1)
    if not len(earlier):
        return ReleaseTest("noise of two steps", 0.0, 0.0, 1.0)
    z = np.abs(gram_TT[earlier, later]) / length_T[earlier]
    found = float((z / length_T[later]).max())
    return ReleaseTest("noise of two steps", found, 0.0, min(1.0, len(z) * 2 * float(stats.norm.sf(z.max()))))


def noise_within_steps(noise_TP: Floats) -> ReleaseTest:
    """Related noise at any fixed distance within a step: one stream used for two parameters, say.

    For each distance, the sum of products over all steps and coordinates is close to normal; the p-value is the smallest
    of all distances, times their number. found is the largest autocorrelation.
    """
    steps, size = noise_TP.shape
    distances = size // 2
    if not distances:
        return ReleaseTest("noise of two coordinates", 0.0, 0.0, 1.0)
    power = np.square(np.abs(np.fft.rfft(noise_TP, axis=1))).sum(axis=0)
    products = np.abs(np.fft.irfft(power, size)[1 : distances + 1])
    # At a distance of half the circle every pair is there twice.
    spread = np.sqrt(steps * size * np.where(2 * np.arange(1, distances + 1) == size, 2.0, 1.0))
    z = float((products / spread).max())
    found = float(products.max() / max(np.square(noise_TP).sum(), 1e-300))
    return ReleaseTest("noise of two coordinates", found, 0.0, min(1.0, distances * 2 * float(stats.norm.sf(z))))


def scale_of_the_sum(seen: Observation, noise_TP: Floats) -> ReleaseTest:
    """How long the released sum is along the expected one: clipping, accumulation and divisor.

    Given the draws, <residual, expected> / |expected| is N(0, 1).
    """
    length = float(np.linalg.norm(seen.expected_TP)) / seen.noise_multiplier
    if length == 0:
        return ReleaseTest("length of the sum", 1.0, 1.0, 1.0)
    z = float((noise_TP * seen.expected_TP).sum()) / seen.noise_multiplier / length
    return ReleaseTest("length of the sum", 1 + z / length, 1.0, 2 * float(stats.norm.sf(abs(z))))


def resolution(seen: Observation, level: float) -> float:
    """By what share the sum must be too long or too short to be told from chance at a level, half of the time."""
    length = float(np.linalg.norm(seen.expected_TP)) / seen.noise_multiplier
    return float(stats.norm.isf(level / 2)) / length if length else math.inf


def single_canaries(seen: Observation, noise_TP: Floats) -> ReleaseTest:
    """Chi-square test over canaries of what each adds beside what it should; found is the root of its mean square.

    Given the draws, the residual along a canary's own coordinates, summed over the steps that drew it, is normal, and
    independent of all others'.
    """
    present_TM = _present(seen)
    count_M = present_TM.sum(axis=0)
    along_TM = _along(seen, noise_TP)
    drawn_M = count_M > 0
    if not drawn_M.any():
        return ReleaseTest("sum of single canaries", 1.0, 1.0, 1.0)
    z = (present_TM * along_TM).sum(axis=0)[drawn_M] / np.sqrt(count_M[drawn_M])
    return noise_scale("sum of single canaries", z)


def sampling_tests(seen: Observation, rate: float) -> list[ReleaseTest]:
    """How often canaries' slots, and all slots, join; how that spreads over steps and over slots."""
    steps, canaries = len(seen.draws), len(seen.inserted_M)
    slot_counts = np.bincount([slot for drawn in seen.draws for slot in drawn], minlength=seen.num_slots)
    step_counts = np.array([len(drawn) for drawn in seen.draws])
    of_canaries = int(slot_counts[seen.num_slots - canaries :].sum())
    found = [
        _rate("sampling rate of canaries", of_canaries, steps * canaries, rate),
        _rate("sampling rate of all slots", int(slot_counts.sum()), steps * seen.num_slots, rate),
    ]
    if rate < 1 and rate * seen.num_slots >= FEWEST_EXPECTED:
        found.append(_spread("spread of the batch's size", step_counts, seen.num_slots, rate))
    if rate < 1 and rate * steps >= FEWEST_EXPECTED:
        found.append(_spread("spread over slots", slot_counts, steps, rate))
    return found


def _rate(name: str, joined: int, chances: int, rate: float) -> ReleaseTest:
    p_value = 2 * min(stats.binom.cdf(joined, chances, rate), stats.binom.sf(joined - 1, chances, rate))
    return ReleaseTest(name, joined / chances, rate, min(1.0, float(p_value)))


def _spread(name: str, counts: NDArray[np.int64], trials: int, rate: float) -> ReleaseTest:
    """Sum of squared deviations of binomial counts, against the gamma distribution of the same mean and variance."""
    variance = trials * rate * (1 - rate)
    ratio = float(np.square(counts - trials * rate).sum()) / variance
    of_one = 2 + (1 - 6 * rate * (1 - rate)) / variance  # variance of (n - trials q)^2 / variance
    shape = len(counts) / of_one
    p_value = 2 * min(stats.gamma.cdf(ratio, shape, scale=of_one), stats.gamma.sf(ratio, shape, scale=of_one))
    return ReleaseTest(name, math.sqrt(ratio / len(counts)), 1.0, min(1.0, float(p_value)))


def canary_scores(seen: Observation, sampling_rate: float, steps: int) -> Floats:
    """score_M of the first steps: higher = more likely inserted.

    Looks at what was released and at the canaries, not at draws or coins. For each step it is the logarithm of the
    likelihood ratio of "joins with probability q" against "never", along the canary's own coordinates; summed over steps.
    What it would be for releases of zero is subtracted, so that canaries that weigh less are not ranked by their weight
    where the noise is not what it should be.
    """
    along_TM = _along(seen, seen.released_TP[:steps]) / seen.noise_multiplier
    length_M = np.sqrt(np.asarray(seen.own_MP.multiply(seen.own_MP).sum(axis=1))).ravel()
    shift_TM = seen.gain_TM[:steps] * length_M / seen.noise_multiplier
    log_ratio_TM = shift_TM * along_TM - shift_TM**2 / 2
    absent = math.log1p(-sampling_rate) if sampling_rate < 1 else -math.inf
    joined = math.log(sampling_rate)
    at_zero_TM = np.logaddexp(absent, joined - shift_TM**2 / 2)
    scores: Floats = (np.logaddexp(absent, joined + log_ratio_TM) - at_zero_TM).sum(axis=0)
    return scores


def _along(seen: Observation, rows_TP: Floats) -> Floats:
    """Each step's product with each canary's direction on its own coordinates."""
    length_M = np.sqrt(np.asarray(seen.own_MP.multiply(seen.own_MP).sum(axis=1))).ravel()
    result: Floats = np.asarray((seen.own_MP @ rows_TP.T).T) / length_M
    return result


def _present(seen: Observation) -> Floats:
    present_TM = np.zeros((len(seen.draws), len(seen.inserted_M)))
    first = seen.num_slots - len(seen.inserted_M)
    for row, drawn in zip(present_TM, seen.draws, strict=True):
        row[[slot - first for slot in drawn if slot >= first]] = 1.0
    present_TM[:, ~seen.inserted_M] = 0.0
    return present_TM
