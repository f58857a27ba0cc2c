"""The privacy-loss distribution of an event: every epsilon and delta of it at once.

Comes in: the parts of an event, a neighbouring relation, a discretisation. Goes out: dp-accounting's distribution, which
answers "which epsilon at this delta" and "which delta at this epsilon".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dpllm.errors import ConfigError
from dpllm.privacy.parts import Parts, SampledSums

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Relation = Literal["zero_out", "add_or_remove_one"]  # which cost the same under Poisson sampling

MAX_STEPS = 1_000_000
# Array elements that the deltas of one mixture may take: 8 MB a copy, and some tenths of a second.
MIXTURE_ELEMENTS = 1_000_000


@lru_cache(maxsize=8)
def privacy_loss(parts: Parts, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """The privacy loss of an event that "pld" knows: not empty, without selections; the worse of both directions.

    Discretised at ``interval``, or wider where the losses are so large that they would fill the memory: a wider one is
    faster, and overstates rather than understates.

    Raises:
        ConfigError: the steps are too many.
        OverflowError: the loss of hardly any noise does not fit a float.
    """
    if any(part.times > MAX_STEPS for part in parts.sampled):
        raise ConfigError(f"more than {MAX_STEPS} steps take too long to compose. Lower train.steps or train.epochs.")
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    # dp-accounting's public functions, composed as its PLDAccountant does. The accountant itself has no event for an imported
    # (epsilon, delta), inverts the loss of a mixture point by point, which takes 5 to 20 s, and computes one step anew for every
    # number of steps.
    interval = _interval(parts, interval)
    whole = pld.identity(interval)
    for part in parts.sampled:
        if part.probability == 1.0:
            sigma = part.noise_multiplier / math.sqrt(part.times)
            whole = whole.compose(_step(part._replace(noise_multiplier=sigma, times=1), relation, interval))
        else:
            whole = whole.compose(_step(part._replace(times=1), relation, interval).self_compose(part.times))
    for release in parts.bounds:
        known = common.DifferentialPrivacyParameters(release.epsilon, release.delta)
        whole = whole.compose(pld.from_privacy_parameters(known, interval).self_compose(release.times))
    return whole


def _interval(parts: Parts, interval: float) -> float:
    """The interval asked for, or a wider one where losses of thousands would need gigabytes."""
    from dpllm.privacy.renyi import rdp_epsilon

    if any(part.noise_multiplier / part.group_size < 0.3 for part in parts.sampled):
        # A millionth of the whole is fine enough. k rows together have about k times the loss.
        size = max(part.group_size for part in parts.sampled)
        alone = Parts(tuple(part._replace(group_size=1) for part in parts.sampled))
        interval = max(interval, 1e-6 * size * rdp_epsilon(alone, 1e-5))
    if parts.bounds:
        interval = max(interval, 1e-6 * sum(part.epsilon * part.times for part in parts.bounds))
    for part in parts.sampled:
        if part.group_size > 1:
            bounds = [_mixture(part, removes=removes).connect_dots_bounds() for removes in (True, False)]
            widest = max(bound.epsilon_upper - bound.epsilon_lower for bound in bounds)
            interval = max(interval, widest * (part.group_size + 1) / MIXTURE_ELEMENTS)
    return interval


@lru_cache(maxsize=16)
def _step(part: SampledSums, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """One step, the same for every number of them."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    if part.group_size > 1:
        return _mixture_loss(part, interval)
    zero_out, add_or_remove = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(
        part.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=part.probability,
        neighboring_relation=zero_out if relation == "zero_out" else add_or_remove,
    )


def _mixture_loss(part: SampledSums, interval: float) -> PrivacyLossDistribution:
    """One step for a group, discretised by connecting the dots as dp-accounting does."""
    import numpy as np
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    directions = []
    for removes in (True, False):
        mixture = _mixture(part, removes=removes)
        bounds = mixture.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
        deltas = mixture.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
        directions.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas))
    return PrivacyLossDistribution(*directions)


def _mixture(part: SampledSums, *, removes: bool) -> Any:
    """dp-accounting's loss of a mixture of Gaussians, with all points inverted at once by Newton's method.

    With k rows of weight w_j at distance j and y = -x (remove) or x (add), the loss is log(w_0 + e^G(y)) with
    G(y) = log sum_{j>0} w_j exp(j y / s^2 - j^2 / (2 s^2)), or its negative. G is convex and rises with a slope of 1/s^2
    to k/s^2, so that Newton's method converges from above from the smallest root of its parts. A delta computed at
    an inexact point is too small by the square of the error only, 1e-20 here.
    """
    import numpy as np
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss
    from scipy.special import logsumexp
    from scipy.stats import binom

    variance = part.noise_multiplier**2
    many = np.arange(part.group_size + 1)
    weights = binom.pmf(many, part.group_size, part.probability)
    weights /= weights.sum()  # which is 1 but for rounding
    all_present = np.flatnonzero(weights > 0)
    present = all_present[all_present > 0]
    log_terms = np.log(weights[present]) - present**2 / (2 * variance)
    slopes = present / variance
    log_none = part.group_size * math.log1p(-part.probability)

    class Mixture(MixtureGaussianPrivacyLoss):  # type: ignore[misc]  # dp-accounting has no types
        def inverse_privacy_losses(self, privacy_losses: Any, precision: float = 1e-10) -> Any:
            losses = np.asarray(privacy_losses, dtype=float) * (1.0 if removes else -1.0)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # of losses that are never reached
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
