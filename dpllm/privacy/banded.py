"""Banded noise, which later steps cancel in part: its coefficients, their effect on the noise, and the best number of bands.

An example: with coefficients (0.9, 0.4) the noise of step t is (z_t - 0.4 x_{t-1}) / 0.9, where z is fresh and x is the noise of
the step before. The sum over many steps then has less noise than with independent noise, and a single step has more.

Comes in: the public schedule of learning rates, a promise. Goes out: the coefficients c_0, ..., c_{b-1} of the lower triangular
Toeplitz matrix C with b bands, and ratios of noise. Must not import torch: `dpllm plan` and `verify` use it.

Guarantee:
    Steps are numbered 0, 1, ... as they are charged, over all attempts. Each unit has one group g of b, whatever its data are,
    and joins step i with probability q' if i mod b = g, else never. Let G_i be the clipped sum of step i, Z rows of N(0,
    sigma^2), and let every release be a function of C G + Z up to then (``noise.BandedNoise``). Then n steps cost at most ceil(n
    / b) rounds of a Gaussian of noise multiplier sigma, each over a fresh Poisson sample of rate q':

    1. A unit's steps i < j are at least b apart, and column i of C is zero outside rows i to i + b - 1. So the columns of its
       steps have no row in common, and n steps hold at most ceil(n / b) of them.
    2. Column i has norm at most ||c|| <= 1. So in those rows the unit moves the mean by a vector of norm at most 1, or with
       probability 1 - q' by none, and G_i was fixed before the first of them: given what was released before, one Poisson-sampled
       Gaussian. Rows between its steps it does not move. Other units' sums may follow earlier releases, as in any composition.
    3. A resumed run begins with empty buffers: no row of the new attempt reaches into the old one. C is then block diagonal, and
       each block's columns are the first entries of c: no wider and no longer. Steps that were charged and lost are counted and
       skip no turn, so 1 holds across the gap, and no round is charged twice.
    4. All of this holds for every assignment of groups, and the assignment does not depend on the data. Hockey-stick divergences
       are jointly convex, so it holds on average over assignments, and nobody needs to know or not to know them.

References:
    Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization: A unified approach to private training" (arXiv
    2306.08153), theorems 2 and 4. Denisov et al. 2022, "Improved Differential Privacy for SGD via Optimal Private Linear
    Operators on Adaptive Streams", theorem 2.1 (adaptive streams). McKenna 2024, "Scaling up the Banded Matrix Factorization
    Mechanism for Differentially Private ML" (Toeplitz strategies and their gradients).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.schedule import Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Shape = Literal["linear", "cosine", "constant"]  # of the learning rate
CANDIDATES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # bands that auto compares with 1
LEAST_GAIN = 0.05  # in the noise of the last weights; if less is gained, auto takes 1
MOST_STEPS = 2000  # for which coefficients are optimised; a longer schedule is replaced by this many steps of its shape
MOST_BANDS = 512
NEAR = 0.2  # distance of coefficients: warm-ups move the best ones by at most 0.17; the identity is at least 0.22 away
FIRST_STEP = 0.05  # of the search, in every coefficient: a larger one can reach a series that diverges


@dataclass(frozen=True)
class Effect:
    """Noise of a banded mechanism relative to independent noise with the same guarantee."""

    last_iterate: float  # noise in the last weights under plain SGD: below 1
    # Noise of one step, once all buffers are full: above 1. AdamW divides by its own estimate of that noise, so multiply a
    # learning rate that suits independent noise by it.
    one_step: float


@dataclass(frozen=True)
class LearningRate:
    """A learning-rate schedule: rises linearly during the warm-up, then falls to 0 according to its shape."""

    peak: float = 1e-3
    shape: Shape = "linear"
    warmup: float = 0.0  # share of the steps, in [0, 1)

    def at(self, step: int, num_steps: int) -> float:
        """The rate of step 0..num_steps-1; never zero, because every step spends privacy. Depends on the step alone."""
        warm = math.ceil(self.warmup * num_steps)
        if step < warm:
            return self.peak * (step + 1) / (warm + 1)
        remaining = (num_steps - step) / max(1, num_steps - warm)
        shape = {"constant": 1.0, "linear": remaining, "cosine": 0.5 * (1 - math.cos(math.pi * remaining))}
        return self.peak * shape[self.shape]


def rates(rate: LearningRate, num_steps: int) -> Floats:
    """rate_T: the learning rates divided by their maximum; cosine's last one may be as small as 1e-7, and none is 0."""
    import numpy as np

    rate_T = np.array([rate.at(step, num_steps) for step in range(num_steps)])
    return np.asarray(rate_T / rate_T.max())


def strategy(rate: LearningRate, num_steps: int, bands: int) -> tuple[float, ...]:
    """Coefficients that minimise the noise in the weights over a run; their squares add up to at most 1, exactly.

    They minimise the sum over all steps of the squared noise in the weights under plain SGD, ||A C^-1||_F^2 with A[t, s] = lr_s
    for s <= t. Momentum is ignored: except for the last steps, it multiplies all weights of a step by nearly the same number. The
    search is reproducible with the same numpy and scipy; a resumed run reads its coefficients from plan.json.
    """
    # The peak only changes the last bits of the search: with a fixed peak, equal shapes have equal coefficients.
    return _strategy(replace(rate, peak=LearningRate.peak), min(num_steps, MOST_STEPS), bands)


@lru_cache(maxsize=64)
def _strategy(rate: LearningRate, num_steps: int, bands: int) -> tuple[float, ...]:
    import numpy as np

    best_B = optimise(workload(rates(rate, num_steps)), bands)
    best_B = best_B / np.linalg.norm(best_B)
    while not admissible(best_B.tolist()):  # rounding may have made the norm exceed 1
        best_B = best_B * (1 - 2.0**-52)
    return tuple(best_B.tolist())


def admissible(coefficients: Sequence[float]) -> bool:
    """Whether every column of C has norm at most 1, in exact arithmetic, and c_0 > 0, so that the noise can be computed."""
    finite = all(map(math.isfinite, coefficients))
    return finite and coefficients[0] > 0 and sum(Fraction(weight) ** 2 for weight in coefficients) <= 1


def near_best(coefficients: Sequence[float], num_steps: int) -> bool:
    """Whether coefficients may come from ``strategy``, for readers without the schedule; all ``admissible`` are as private."""
    steps, bands, length = min(num_steps, MOST_STEPS), len(coefficients), math.hypot(*coefficients)
    if not 0 < bands <= min(steps, MOST_BANDS) or length < 1 - 1e-12 or max(coefficients) > coefficients[0]:
        return False
    best = (_strategy(LearningRate(shape=shape), steps, bands) for shape in get_args(Shape))
    return min(math.dist(coefficients, other) for other in best) < NEAR


def workload(rate_T: Floats) -> Floats:
    """H_TT such that the squared error ||A C^-1||_F^2 is d^T H d, with d the first T coefficients of the power series 1 / c(x).

    G[u, v] = lr_u lr_v (T - max(u, v)); H[k, l] = sum over s of G[s + k, s + l] = H[k + 1, l + 1] + G[k, l].
    """
    import numpy as np

    steps = np.arange(len(rate_T))
    gram_TT: Floats = np.outer(rate_T, rate_T) * (len(rate_T) - np.maximum(steps[:, None], steps))
    for k in range(len(rate_T) - 2, -1, -1):
        gram_TT[k, :-1] += gram_TT[k + 1, 1:]
    return gram_TT


def error(coefficients_B: Floats, workload_TT: Floats) -> tuple[float, Floats]:
    """log(||A C^-1||_F^2 ||c||^2), which does not depend on the length of c, and its gradient.

    With g = 2 H d and e = d * d as a product of series, dE/dc_j = - sum over k >= j of g_k e_{k-j}.
    """
    import numpy as np
    from scipy.signal import lfilter

    steps = len(workload_TT)
    with np.errstate(all="ignore"):
        inverse_T = inverse(coefficients_B, steps)
        half_T = workload_TT @ inverse_T
        total, length = float(inverse_T @ half_T), float(coefficients_B @ coefficients_B)
        if not math.isfinite(total):
            return 1e300, np.zeros_like(coefficients_B)
        square_T = lfilter([1.0], coefficients_B, inverse_T)
        gradient_B = np.array([-2 * half_T[j:] @ square_T[: steps - j] for j in range(len(coefficients_B))])
    return math.log(total) + math.log(length), gradient_B / total + 2 * coefficients_B / length


def optimise(workload_TT: Floats, bands: int) -> Floats:
    """c_B that minimises ``error``, of any norm; the search starts from (1 - x)^(-1/2), which is best without bands."""
    import numpy as np
    from scipy.optimize import minimize

    start_B = np.cumprod([1.0] + [(2 * j - 1) / (2 * j) for j in range(1, bands)])

    def scaled(point_B: Floats) -> tuple[float, Floats]:
        value, gradient_B = error(point_B * FIRST_STEP, workload_TT)
        return value, gradient_B * FIRST_STEP

    options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 1000}
    search = minimize(scaled, start_B / FIRST_STEP, jac=True, method="L-BFGS-B", options=options)
    return np.asarray(search.x * FIRST_STEP)


def inverse(coefficients: Sequence[float] | Floats, num_steps: int) -> Floats:
    """d_T: the first column of C^-1, the coefficients of the power series 1 / c(x)."""
    import numpy as np
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], np.asarray(coefficients), np.eye(1, num_steps)[0]))


def whiten(coefficients: Sequence[float], row_TP: Floats, starts: Sequence[int] = (0,)) -> Floats:
    """C row_TP: noise becomes independent normal rows; ``starts`` are the first rows of attempts, when buffers were empty."""
    return _each(lambda part_TP: _filter(coefficients, part_TP), row_TP, starts)


def matched(coefficients: Sequence[float], white_TP: Floats, starts: Sequence[int] = (0,)) -> tuple[Floats, Floats]:
    """The matched filter for a contribution to step t of whitened rows: the sum over j of c_j times row t + j; and its power_T.

    A contribution g to step t moves it by power_t g; its noise has standard deviation sigma sqrt(power_t). A unit's steps are at
    least b apart, so their noise is independent.
    """
    import numpy as np

    squares = [weight**2 for weight in coefficients]
    power_T = _each(lambda part_T: _filter(squares, part_T)[::-1], np.ones(len(white_TP)), starts)
    return _each(lambda part_TP: _filter(coefficients, part_TP[::-1])[::-1], white_TP, starts), power_T


def _each(change: Callable[[Floats], Floats], row_TP: Floats, starts: Sequence[int]) -> Floats:
    import numpy as np

    return np.concatenate([change(part) if len(part) else part for part in np.split(row_TP, list(starts)[1:])])


def _filter(coefficients: Sequence[float], row_TP: Floats) -> Floats:
    import numpy as np
    from scipy.signal import lfilter

    return np.asarray(lfilter(np.asarray(coefficients), [1.0], row_TP, axis=0))


def effect(coefficients: Sequence[float], rate_T: Floats, sigma: float, independent: float) -> Effect:
    """The effect of these coefficients with noise multiplier ``sigma``; independent noise would need ``independent``."""
    import numpy as np
    from scipy.signal import fftconvolve

    steps, ratio = len(rate_T), sigma / independent
    inverse_T = inverse(coefficients, steps)
    left_T = fftconvolve(rate_T, inverse_T[::-1])[steps - 1 :]  # (lr^T C^-1)_j = sum over k of lr_{j+k} d_k
    last = float(np.linalg.norm(left_T) / np.linalg.norm(rate_T))
    return Effect(ratio * last, ratio * step_noise(coefficients, steps))


def step_noise(coefficients: Sequence[float], num_steps: int) -> float:
    """Standard deviation of one step's noise, once all buffers are full, over that of fresh noise: ||d||, above 1."""
    return math.sqrt(sum(weight**2 for weight in inverse(coefficients, num_steps).tolist()))


def check(bands: int | Literal["auto"], schedule: Schedule, sampling: str) -> None:
    """Refuses sampled rows, for which banded noise is not accounted, and too few units or steps for the bands."""
    size, batch, num_steps = schedule.dataset_size, schedule.expected_batch_size, schedule.num_steps
    if sampling == "example":
        raise Refused(
            "privacy.noise: banded needs each unit to join at most every b-th step, but with data.sampling: example the rows of "
            "a unit can join in any step, which the accounting does not cover. Set data.sampling: unit, or privacy.noise: "
            "independent."
        )
    if bands == "auto" or bands == 1:
        return
    if bands * batch > size:
        raise Refused(
            f"privacy.bands {bands} splits {size} units into groups smaller than train.batch_size {batch}, so the sampling rate "
            f"within a group would exceed 1. Set privacy.bands to {size // batch} or less, or lower train.batch_size."
        )
    if bands > (maximum := min(num_steps, MOST_BANDS)):
        limit = f"{MOST_BANDS}, which would take too long to plan"
        if maximum == num_steps:
            limit = f"the run's {num_steps} steps, so some groups would never have a turn"
        raise Refused(f"privacy.bands {bands} is more than {limit}. Set privacy.bands to {maximum} or less.")


def choose(rate: LearningRate, schedule: Schedule, sigma_of: Callable[[int], float]) -> int:
    """The number of bands with the least noise in the last weights; 1 if that is less than 5% below independent noise.

    ``sigma_of``: bands -> the noise multiplier that meets the target, to about 1%; raises ConfigError if none does.
    """
    num_steps, best, lowest = schedule.num_steps, 1, 1 - LEAST_GAIN
    # q' = b B / N is at most 1, and every group needs a turn within T steps.
    rate_T, max_bands = rates(rate, num_steps), min(schedule.dataset_size // schedule.expected_batch_size, num_steps)
    try:
        independent = sigma_of(1)
    except ConfigError:  # the recipe's own noise meets the target, but calibration does not reach it
        return 1
    for bands in CANDIDATES:
        if bands <= max_bands:
            try:
                sigma = sigma_of(bands)
            except ConfigError:
                continue
            noise = effect(strategy(rate, num_steps, bands), rate_T, sigma, independent).last_iterate
            best, lowest = (bands, noise) if noise < lowest else (best, lowest)
    return best
