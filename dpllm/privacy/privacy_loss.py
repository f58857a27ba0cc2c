"""The privacy-loss distribution of an event: all of its epsilons and deltas at once.

Comes in: the parts of an event, a neighbouring relation, a discretisation. Goes out: dp-accounting's distribution, which answers
"which epsilon at this delta" and "which delta at this epsilon". Imports dp-accounting only when it computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dpllm.errors import ConfigError
from dpllm.privacy import bounded_range, selection
from dpllm.privacy.parts import Draws, Parts, SampledSums, Selections

if TYPE_CHECKING:
    import numpy as np
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from numpy.typing import NDArray

# The first three cost the same under Poisson sampling. Under label_changed one label differs and its text does not: it applies to
# releases of known epsilon, and no sum of gradients is accounted under it.
Relation = Literal["zero_out", "zero_out_public_graph", "add_or_remove_one", "label_changed"]

MAX_STEPS = 1_000_000
CHUNK_OF_DRAWS = 500  # draws whose curve takes a second
# Maximum array elements for the deltas of one mixture: 8 MB a copy, and some tenths of a second.
MIXTURE_ELEMENTS = 1_000_000
ROUND_OFF = 2.0**-52  # of a delta, for each step: three times the observed loss of Fourier transforms
MOST_RATIO = 50.0  # largest log ratio that a selection considers
MOST_EXPONENT = 500.0  # above, probabilities times e^-epsilon lose their digits, and e^epsilon overflows


@lru_cache(maxsize=8)
def privacy_loss(parts: Parts, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """The privacy loss of a non-empty event, as the worse of both directions.

    Discretised at ``interval``, or more coarsely if losses so large would fill the memory; a wider interval is faster, and
    overstates rather than understates.

    Raises:
        ConfigError: there are too many steps or draws.
        OverflowError: with hardly any noise, the loss does not fit a float or is unbounded.
    """
    if max((part.times for kind in (parts.sampled, parts.draws) for part in kind), default=0) > MAX_STEPS:
        raise ConfigError(f"over {MAX_STEPS} steps or draws take too long to compose. Take fewer.")
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    # dp-accounting's public functions, composed as its PLDAccountant does. That accountant has no event for an imported (epsilon,
    # delta), inverts the loss of a mixture point by point, which takes 5 to 20 s, and recomputes one step for every number of
    # steps.
    interval = _interval(parts, interval)
    total = pld.identity(interval)
    for part in parts.sampled:
        if part.probability == 1.0:
            # Sums over all of the data are exactly one Gaussian with less noise: nothing needs to be composed.
            sigma = part.noise_multiplier / math.sqrt(part.times)
            total = total.compose(_step(part._replace(noise_multiplier=sigma, times=1), relation, interval))
        else:
            total = total.compose(_step(part._replace(times=1), relation, interval).self_compose(part.times))
    for release in parts.bounds:
        parameters = common.DifferentialPrivacyParameters(release.epsilon, release.delta)
        total = total.compose(pld.from_privacy_parameters(parameters, interval).self_compose(release.times))
    for draws in parts.draws:  # each chunk has a dominating pair, so chunks compose
        chunks, remainder = divmod(draws.times, CHUNK_OF_DRAWS)
        if chunks:
            total = total.compose(_of_draws(draws._replace(times=CHUNK_OF_DRAWS), interval).self_compose(chunks))
        if remainder:
            total = total.compose(_of_draws(draws._replace(times=remainder), interval))
    for best in parts.selected:
        total = total.compose(_selected(best, relation, interval).self_compose(best.times))
    return total


def epsilon_at(delta: float, loss: PrivacyLossDistribution, parts: Parts) -> float:
    """The smallest epsilon at ``delta`` of parts with this ``privacy_loss``; infinite if delta is within the round-off.

    Round-off is subtracted from delta if it is more than a hundredth of delta. A smaller one moves epsilon by less than a
    thousandth, and published figures stay as they are.
    """
    lost = ROUND_OFF * _compositions(parts)
    return inverse(loss, delta - lost if lost > delta / 100 else delta)


def _compositions(parts: Parts) -> float:
    """The number of steps whose round-off a delta contains; a selection multiplies that of one run by the mean number of runs."""
    steps = sum(part.times for part in parts.sampled if part.probability < 1) + sum(part.times for part in parts.bounds)
    runs = sum(best.times * best.mean * max(map(_compositions, best.options)) for best in parts.selected)
    return steps + sum(draws.times / CHUNK_OF_DRAWS for draws in parts.draws) + runs


def inverse(loss: PrivacyLossDistribution, delta: float) -> float:
    """The epsilon at a delta; by bisection where dp-accounting's sums of e^-epsilon would underflow."""
    if delta < 0 or float(loss.get_delta_for_epsilon(math.inf)) > delta:
        return math.inf
    if float(loss.get_delta_for_epsilon(MOST_EXPONENT)) <= delta:
        return float(loss.get_epsilon_for_delta(delta))
    low, high = MOST_EXPONENT, 2 * MOST_EXPONENT
    while float(loss.get_delta_for_epsilon(high)) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if float(loss.get_delta_for_epsilon(middle)) > delta else (low, middle)
    return high


def deltas_at(loss: PrivacyLossDistribution, epsilons: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Delta at increasing epsilons, the larger of both directions.

    The same sums as dp-accounting's own for many epsilons, which loops in Python: 0.6 s for 100,000 losses. They multiply by
    e^epsilon, which can overflow, so epsilons above ``MOST_EXPONENT`` are computed one by one.
    """
    import numpy as np

    ordered = np.asarray(epsilons, dtype=np.float64)
    near = ordered[ordered <= MOST_EXPONENT]
    directions = [_hockey_stick(pmf.to_dense_pmf(), near) for pmf in (loss._pmf_remove, loss._pmf_add)]
    far = [float(loss.get_delta_for_epsilon(float(epsilon))) for epsilon in ordered[len(near) :]]
    deltas: NDArray[np.float64] = np.clip(np.concatenate([np.maximum(*directions), far]), 0.0, 1.0)
    return deltas


def _hockey_stick(pmf: Any, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of p (1 - e^(epsilon - l)) over the losses l above each epsilon, plus the probability of an infinite one."""
    import numpy as np

    losses = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
    above = pmf.size - np.searchsorted(losses, epsilons, side="right")
    with np.errstate(over="ignore", invalid="ignore"):
        mass_above = np.cumsum(np.concatenate([[pmf._infinity_mass], pmf._probs[::-1]]))
        lower_above = np.cumsum(np.concatenate([[0.0], (pmf._probs * np.exp(-losses))[::-1]]))
        deltas = mass_above[above] - np.exp(epsilons) * lower_above[above]
    return np.where(np.isfinite(deltas), deltas, 1.0)  # e^-l overflows below -700, where delta is at most 1


def _selected(best: Selections, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """The loss of selecting the best of a random number of runs, each with the mean of the options' deltas."""
    import numpy as np

    losses = [privacy_loss(option, relation, interval) for option in best.options]

    def delta_of(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        deltas: NDArray[np.float64] = np.mean([deltas_at(loss, epsilons) for loss in losses], axis=0)
        return deltas

    largest = max(map(_largest, losses))
    added_cost = selection.cost(delta_of, min(largest, MOST_RATIO), best.mean, best.distribution)
    half = math.ceil((largest + added_cost) / interval)
    epsilons = interval * np.arange(-half, half + 1, dtype=np.float64)
    deltas = selection.profile(delta_of(epsilons - added_cost), epsilons, best.mean)
    if deltas[-1] >= 1:
        raise OverflowError("the best of so many runs has no bounded privacy loss")
    return _dominating(interval, deltas)


def _largest(loss: PrivacyLossDistribution) -> float:
    """The largest finite privacy loss, in either direction."""
    dense = [pmf.to_dense_pmf() for pmf in (loss._pmf_remove, loss._pmf_add)]
    return max(float((pmf._lower_loss + len(pmf._probs) - 1) * pmf._discretization) for pmf in dense)


def _dominating(interval: float, deltas: NDArray[np.float64]) -> PrivacyLossDistribution:
    """The loss of a pair of distributions whose divergences are at least these deltas, on a grid centred at 0."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    half = len(deltas) // 2
    return PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -half, half, deltas))


def _of_draws(draws: Draws, interval: float) -> PrivacyLossDistribution:
    """The loss of the pair of distributions whose divergences are the bounding curve, in both directions."""
    import numpy as np

    h, delta_K = bounded_range.profile(*draws)
    half = math.ceil(h * (len(delta_K) - 1) / interval)
    deltas = bounded_range.delta_at(*draws, np.arange(-half, half + 1, dtype=np.float64) * interval)
    return _dominating(interval, deltas)


def _interval(parts: Parts, interval: float) -> float:
    """The given interval, or a wider one if losses of thousands would need gigabytes."""
    from dpllm.privacy.renyi import rdp_epsilon

    weak = any(part.noise_multiplier / part.group_size < 0.3 for part in parts.sampled)
    # Roughly, how often a unit takes part times the cost of each time: fast to compute, and large whenever epsilon is.
    often = ((part, part.times * part.probability) for part in parts.sampled)
    if (
        weak
        or sum((n + 6 * math.sqrt(n) + 6) * (part.group_size / part.noise_multiplier) ** 2 for part, n in often) > 250
    ):
        # A millionth of the total is fine enough. k rows together have about k times the loss.
        size = max(part.group_size for part in parts.sampled)
        alone = Parts(tuple(part._replace(group_size=1) for part in parts.sampled))
        wider = 1e-6 * size * rdp_epsilon(alone, 1e-5)
        interval = max(interval, wider) if weak or wider > 5e-4 else interval
    for kind in (parts.bounds, parts.draws):
        interval = max(interval, 1e-6 * sum(part[0] * part.times for part in kind))
    for best in parts.selected:
        interval = max(_interval(option, interval) for option in best.options)
    for part in parts.sampled:
        if part.group_size > 1:
            bounds = [_mixture(part, removes=removes).connect_dots_bounds() for removes in (True, False)]
            widest = max(bound.epsilon_upper - bound.epsilon_lower for bound in bounds)
            interval = max(interval, widest * (part.group_size + 1) / MIXTURE_ELEMENTS)
    return interval


@lru_cache(maxsize=16)
def _step(part: SampledSums, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """The loss of one step, whatever the number of steps."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    if part.probability < 1.0 or part.group_size > 1:
        return _sampled_loss(part, interval)
    zero_out, add_or_remove = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(
        part.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=part.probability,
        neighboring_relation=add_or_remove if relation == "add_or_remove_one" else zero_out,
    )


def _sampled_loss(part: SampledSums, interval: float) -> PrivacyLossDistribution:
    """One step over a Poisson sample, discretised with connect-the-dots as in dp-accounting, for all points at once."""
    import numpy as np
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    loss_of = _gaussian if part.group_size == 1 else _mixture
    directions = []
    for removes in (True, False):
        loss = loss_of(part, removes=removes)
        bounds = loss.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
        deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
        directions.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas))
    return PrivacyLossDistribution(*directions)


def _gaussian(part: SampledSums, *, removes: bool) -> Any:
    """dp-accounting's loss of a sampled Gaussian at distance 1, inverted for all points at once; its own loop takes a second.

    With g = log(1 + (e^l - 1) / q), where l is the loss (remove) or its negative (add), the loss is reached at
    -1/2 - g s^2 (remove) or 1/2 + g s^2 (add).
    """
    import numpy as np
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    q, variance = part.probability, part.noise_multiplier**2

    class SampledGaussian(GaussianPrivacyLoss):  # type: ignore[misc]  # dp-accounting has no types
        def get_delta_for_epsilon(self, epsilon: Any) -> Any:
            losses = epsilon if removes else -epsilon
            near, far = np.minimum(losses, 1.0), np.maximum(losses, 1.0)  # e^loss overflows far from 0
            with np.errstate(divide="ignore"):  # at log(1 - q), the smallest loss of removing
                g = np.where(
                    losses < 1.0,
                    np.log1p(np.maximum(np.expm1(near) / q, -1.0)),
                    far - math.log(q) + np.log1p((q - 1.0) * np.exp(-far)),
                )
            x = -0.5 - g * variance if removes else 0.5 + g * variance
            deltas = self.mu_upper_cdf(x) - np.exp(epsilon + self.mu_lower_log_cdf(x))
            return np.clip(deltas, 0.0, 1.0)

    direction = AdjacencyType.REMOVE if removes else AdjacencyType.ADD
    return SampledGaussian(part.noise_multiplier, sampling_prob=q, adjacency_type=direction)


def _mixture(part: SampledSums, *, removes: bool) -> Any:
    """dp-accounting's loss of a mixture of Gaussians, inverted for all points at once by Newton's method.

    With k rows of weight w_j at distance j and y = -x (remove) or x (add), the loss is log(w_0 + e^G(y)) with G(y) = log
    sum_{j>0} w_j exp(j y / s^2 - j^2 / (2 s^2)), or its negative. G is convex and increases with a slope of 1/s^2 to k/s^2, so
    Newton's method converges from above, starting at the smallest root of its terms. A delta computed at an inexact point is too
    small only by the square of the error, here 1e-20.
    """
    import numpy as np
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss
    from scipy.special import logsumexp
    from scipy.stats import binom

    variance = part.noise_multiplier**2
    many = np.arange(part.group_size + 1)
    weights = binom.pmf(many, part.group_size, part.probability)
    weights /= weights.sum()  # 1 up to rounding
    all_present = np.flatnonzero(weights > 0)
    present = all_present[all_present > 0]
    log_terms = np.log(weights[present]) - present**2 / (2 * variance)
    slopes = present / variance
    log_none = part.group_size * math.log1p(-part.probability)

    class Mixture(MixtureGaussianPrivacyLoss):  # type: ignore[misc]  # dp-accounting has no types
        def inverse_privacy_losses(self, privacy_losses: Any, precision: float = 1e-10) -> Any:
            losses = np.asarray(privacy_losses, dtype=float) * (1.0 if removes else -1.0)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # for losses that are never reached
                goal = losses + np.log(np.maximum(-np.expm1(log_none - losses), 0.0))
                y = np.min((goal[:, None] - log_terms) / slopes, axis=1)
                for _ in range(100):
                    exponents = log_terms + slopes * y[:, None]
                    value = logsumexp(exponents, axis=1)
                    slope = np.sum(slopes * np.exp(exponents - value[:, None]), axis=1)
                    step = np.where(np.isfinite(y), (value - goal) / slope, 0.0)
                    y = y - step
                    if np.max(np.abs(step), initial=0.0) < precision:
                        break
            return -y if removes else y

    return Mixture(
        part.noise_multiplier,
        many[all_present].astype(float),
        weights[all_present],
        adjacency_type=AdjacencyType.REMOVE if removes else AdjacencyType.ADD,
    )
