"""The skew-normal distribution of reference scores: its far tail, and whether it may be trusted.

Comes in: scores. Goes out: a fit, judged, and logarithms of tails that never run out of digits. Knows nothing of
canaries, models or texts.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

# A legend of shapes: P scores that are looked at, D those in the deep tail, Q references, L nodes of a quadrature.

Floats = NDArray[np.float64]

FEWEST_REFERENCES = 500
"""No tail is fitted to fewer."""
SMALLEST_FIT_P = 0.2
"""Of the Kolmogorov-Smirnov test. The fit saw the same references, so a true skew-normal rarely falls below 0.3."""
SMALLEST_TAIL_P = 0.01
"""Of the highest reference under the fit, on either side: it must lie about where the fit has the highest of Q."""
LARGEST_SHAPE = 10.0
"""|a|: beyond it a skew-normal ends almost like a wall, and whatever lies behind would look impossible."""
_DEEP = 1e-4  # a tail below it is integrated here: scipy's loses digits there and reaches 0
_NODES_L, _WEIGHTS_L = special.roots_laguerre(48)


@dataclass(frozen=True)
class TailFit:
    """A skew-normal distribution fitted to the references' scores, and whether it fits."""

    shape: float
    location: float
    scale: float
    ks_p_value: float
    """Of Kolmogorov and Smirnov's test, as if the parameters had not been estimated."""
    tail_p_value: float
    """Two-sided, of the highest reference as the highest of Q draws."""
    fault: str | None
    """Why it must not be used; None: it fits."""


def log_tail(scores: ArrayLike, shape: float, location: float = 0.0, scale: float = 1.0) -> Floats:
    """Natural logarithm of the skew-normal's P[X >= score]; never -inf for a finite score within 1e150 scales.

    Args:
        scores: Shape (P,).
        shape: The skewness parameter a: the density is 2 phi(z) Phi(a z).
        location: Of z = (score - location) / scale.
        scale: Above 0.
    """
    z_P = np.atleast_1d((np.asarray(scores, dtype=np.float64) - location) / scale)
    with np.errstate(divide="ignore"):
        result: Floats = np.log(np.atleast_1d(stats.skewnorm.sf(z_P, shape)))
    deep_P = result < math.log(_DEEP)
    if not deep_P.any():
        return result
    # The log-density is concave and falls here, with slope s at z; after u = s (t - z) the tail is
    # density(z) / s times the mean of exp(log-density - its tangent) over an exponential u: smooth, and at most 1.
    start_D = z_P[deep_P]
    log_cdf_D = special.log_ndtr(shape * start_D)
    slope_D = start_D - shape * np.exp(-((shape * start_D) ** 2) / 2 - log_cdf_D) / math.sqrt(2 * math.pi)
    step_DL = _NODES_L / slope_D[:, None]
    rest_DL = (
        -step_DL * (start_D[:, None] + step_DL / 2)
        + special.log_ndtr(shape * (start_D[:, None] + step_DL))
        - log_cdf_D[:, None]
    )
    mean_D = np.exp(rest_DL + _NODES_L) @ _WEIGHTS_L
    log_density_D = math.log(2 / math.sqrt(2 * math.pi)) - start_D**2 / 2 + log_cdf_D
    result[deep_P] = log_density_D - np.log(slope_D) + np.log(mean_D)
    return result


def fit_tail(reference_scores: ArrayLike) -> TailFit:
    """Fits a skew-normal to the references' scores by maximum likelihood and tests it.

    It is used (``fault`` is None) only if the whole distribution fits (Kolmogorov and Smirnov), the highest reference
    lies where the highest of Q draws should lie, and the shape is none that ends in a wall.

    Args:
        reference_scores: Shape (Q,), of canaries that were never inserted; higher = likelier.

    References:
        Carlini et al. 2019, "The Secret Sharer", exposure estimated by extrapolation.
    """
    reference_Q = np.sort(np.asarray(reference_scores, dtype=np.float64))
    count = len(reference_Q)
    if count < FEWEST_REFERENCES or reference_Q[0] == reference_Q[-1]:
        why = f"fewer than {FEWEST_REFERENCES} references" if count < FEWEST_REFERENCES else "all references are equal"
        return TailFit(0.0, 0.0, 1.0, 0.0, 0.0, why)
    # Whatever the unit of the scores, the optimiser sees numbers near 1.
    centre, spread = float(reference_Q.mean()), float(reference_Q.std())
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of an optimiser on its way; the tests below judge where it arrived
            shape, location, scale = map(float, stats.skewnorm.fit((reference_Q - centre) / spread))
    except (stats.FitError, RuntimeError):
        return TailFit(0.0, 0.0, 1.0, 0.0, 0.0, "the fit does not converge")
    location, scale = centre + spread * location, spread * scale
    if not (math.isfinite(shape) and math.isfinite(location) and 0 < scale < math.inf):
        return TailFit(0.0, 0.0, 1.0, 0.0, 0.0, "the fit does not converge")
    if abs(shape) > LARGEST_SHAPE:
        return TailFit(shape, location, scale, 0.0, 0.0, f"the fitted shape parameter is beyond {LARGEST_SHAPE:g}")
    ks = float(stats.kstest((reference_Q - location) / scale, stats.skewnorm(shape).cdf).pvalue)
    # How often all of Q draws stay below the highest reference.
    below = math.exp(count * math.log1p(-min(math.exp(log_tail(reference_Q[-1:], shape, location, scale)[0]), 0.5)))
    tail = 2 * min(below, 1 - below)
    fault = None
    if ks < SMALLEST_FIT_P:
        fault = f"the p-value of the fit is below {SMALLEST_FIT_P:g}"
    elif tail < SMALLEST_TAIL_P:
        fault = f"the p-value of the highest reference is below {SMALLEST_TAIL_P:g}"
    return TailFit(shape, location, scale, ks, tail, fault)
