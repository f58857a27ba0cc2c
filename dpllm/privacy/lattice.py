"""The lattice on which everything is added: how coarse it is, and how much noise one unit's move on it takes.

Comes in: a noise multiplier, C, the number of coordinates. Goes out: the noise's standard deviation, the spacing. Must not import
torch: whoever verifies a card computes them again.
"""

from __future__ import annotations

import math

from dpllm.errors import Refused

LATTICE_BITS = 30  # the noise's standard deviation is 2^30 to 2^31 times the spacing of the lattice
SLACK = 1e-6  # of C, by which rounding may make a clipped gradient longer; see ``clipping.PerUnitClipper``


def noise_scale(noise_multiplier: float, max_grad_norm: float, coordinates: int) -> float:
    """The standard deviation s of the noise: ``noise_multiplier`` times what one unit can move the sum on the lattice.

    A unit's clipped gradient is no longer than C (1 + 1e-6), and rounding it to the lattice moves each of P coordinates by at
    most one spacing, which is at most 2^-30 s. So s = sigma (C (1 + 1e-6) + 2^-30 s sqrt(P)), solved for s: sigma C (1 + 1e-6
    + 2^-30 sigma sqrt(P)), nearly; of a million coordinates at sigma 1, sigma C (1 + 2e-6).

    Raises:
        Refused: The lattice would be as coarse as C.
    """
    rounding = 2.0**-LATTICE_BITS * noise_multiplier * math.sqrt(coordinates)
    if rounding >= 0.5:
        raise Refused(
            f"a noise multiplier of {noise_multiplier:g} over {coordinates:,} coordinates needs a lattice as coarse as the "
            "gradients themselves. Lower privacy.noise_multiplier, or train fewer parameters."
        )
    return noise_multiplier * max_grad_norm * (1 + SLACK) / (1 - rounding)


def spacing_of(scale: float) -> float:
    """The spacing of the lattice for noise of this standard deviation: a power of two in (2^-31, 2^-30] times it."""
    return math.ldexp(1.0, math.floor(math.log2(scale)) - LATTICE_BITS)
