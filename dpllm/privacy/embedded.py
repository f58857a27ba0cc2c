"""Clusters and linear classifiers of units' vectors with differential privacy: k-means and AdaSSP.

Comes in: vectors of length at most 1, public settings. Goes out: a release, its event, its 95% error. Must not know texts, models
or the ledger; imports torch only to draw noise.

All summands are multiples of ``1 / STEPS`` in float64: their sums and products are exact in any order, so a unit's contribution
does not depend on other units, and the noise of ``dpllm.privacy.noise`` lies on the same lattice.

Guarantee:
    ``k_means`` and ``ada_ssp`` are ``event_of(kind, sigma, rounds)`` for one unit, whose rows are replaced by nothing, or which
    is added or removed. k-means: a unit adds the mean of its rows, and a count of 1, to one cluster, so that all sums and counts
    together move by sqrt(1 + 1), whichever it is; each round reads the centres of the round before, which were released. AdaSSP:
    with x = (row, 1) / sqrt(2), of length 1 at most, and y of 0 and one 1 for its label, a unit adds the mean of x x', of
    Frobenius norm |x|^2 at most, and of x y', |x| |y| at most: each of the two is noised for 1. Rounding is towards zero, unit by
    unit, and makes no norm larger. Starts, projection, rounds, least size and floor are public: they follow from settings and
    noise. A row of zeros adds nothing; a unit of such rows alone adds no count either.

References:
    Blum, Dwork, McSherry and Nissim 2005, "Practical Privacy: The SuLQ Framework" (k-means by noisy counts and sums). Wang 2018,
    "Revisiting differentially private linear regression", algorithm 2 (AdaSSP); in place of a third release for a ridge, the
    eigenvalues of the noisy matrix have a public floor here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpllm.privacy.events import Gaussian, SelfComposed
from dpllm.privacy.noise import SecretStream, os_entropy, spacing_of

Kind = Literal["clusters", "classifier"]
Floats = NDArray[np.float64]
Charge = Callable[[int], object]
"""Records that a round, counted from 1, is about to be drawn."""
# A legend of shapes: N units, R rows, D hidden units, P dimensions, K clusters, C classes.

STEPS = 2**20
"""Lattice steps from 0 to 1."""
NAMES: dict[Kind, str] = {
    "clusters": "k-means, Gaussian (counts and sums)",
    "classifier": "AdaSSP, Gaussian (Gram matrix and labels)",
}
DIMENSIONS: dict[Kind, int] = {"clusters": 16, "classifier": 64}
MOST_ROWS = 2**13
"""Maximum of a unit: the sum of this many products is exact in float64."""
_NORMAL = 1.959964  # a standard normal number exceeds it in absolute value with probability 0.05


@dataclass(frozen=True)
class Projection:
    """A public map: subtracts a centre, projects to fewer dimensions and scales to length 1."""

    centre_D: Floats
    dimensions: int

    def __call__(self, vectors_RD: Floats) -> Floats:
        """Shape (R, P), rows of length 1 (zeros stay zeros); a row's bits do not depend on the others."""
        there_R1 = vectors_RD.any(axis=1, keepdims=True)
        moved_RD = np.where(there_R1, lattice(vectors_RD) - lattice(self.centre_D), 0.0)
        directions_DP = public_directions(len(self.centre_D), self.dimensions, b"proj")
        return unit_length(moved_RD @ lattice(directions_DP))  # integers below 2^53: exact in any order


def public_directions(rows: int, columns: int, purpose: bytes = b"dirs") -> Floats:
    """Rows of length 1 in pseudorandom directions, the same for everybody and in every version; neither secret nor data."""
    flat = np.empty(rows * columns)
    SecretStream(0, purpose).normal(flat)
    return unit_length(flat.reshape(rows, columns))


def unit_length(vectors_RD: Floats) -> Floats:
    """Divides each row by its length; rows whose length is 0 or not finite become zeros."""
    with np.errstate(all="ignore"):
        scaled_RD = vectors_RD / np.abs(vectors_RD).max(axis=1, keepdims=True)  # so that squares do not overflow
        found_RD = scaled_RD / np.sqrt((scaled_RD * scaled_RD).sum(axis=1, keepdims=True))
    return np.asarray(np.nan_to_num(found_RD))  # a row is finite or all NaN


def lattice(vectors: Floats) -> Floats:
    """Coordinates as integer numbers of steps, rounded towards zero.

    A vector of length 1 has at most length ``STEPS``, even with rounding errors: the next integer square needs 1 + 2^-41.
    """
    return np.trunc(vectors * STEPS)


def mean_by_unit(steps_RQ: Floats, units_R: NDArray[np.int64]) -> Floats:
    """Shape (N, Q): the exact mean of each unit's rows, in whole steps, rounded towards zero; units are in rising order."""
    starts_N = np.flatnonzero(np.diff(units_R, prepend=-1))
    rows_N = np.diff(starts_N, append=len(units_R))
    sums_NQ = np.add.reduceat(steps_RQ, starts_N, axis=0) if len(starts_N) else steps_RQ
    return np.asarray(np.trunc(sums_NQ / rows_N[:, None]))


def event_of(kind: Kind, noise_multiplier: float, rounds: int) -> SelfComposed:
    """The event: two sums for a classifier, one sum per round for clusters."""
    return SelfComposed(rounds if kind == "clusters" else 2, Gaussian(noise_multiplier))


def figures(kind: Kind, noise_multiplier: float, rounds: int) -> dict[str, Any]:
    """What a record says about a release: mechanism, event, and the 95% error of a count."""
    error = _NORMAL * math.sqrt(2) * noise_multiplier + 0.5  # counts are rounded
    event = event_of(kind, noise_multiplier, rounds)
    return {"mechanism": NAMES[kind], "event": event, "error_95": error, "error_of": "units in each count"}


MOST_NOISE = 2.0**10
"""Above it, the lattice of the noise is coarser than that of the sums."""


def least_noise(units: int) -> float:
    """Below it, sums over ``units`` units exceed 2^52 steps of the noise's lattice and are not added exactly."""
    return units * 2.0**-20


def least_size(noise_multiplier: float, dimensions: int) -> int:
    """Number of units that a cluster needs for its centre to move: the noise in it is then half a radius long."""
    return math.ceil(2 * math.sqrt(2 * dimensions) * noise_multiplier)


def k_means(
    rows_RP: Floats, units_R: NDArray[np.int64], clusters: int, noise_multiplier: float, rounds: int, charge: Charge
) -> tuple[Floats, Floats]:
    """Lloyd's algorithm on the means of units' rows; starts from public directions around the mean that round 1 releases.

    Args:
        rows_RP: Of length at most 1.
        units_R: The unit of each row, in rising order.
        clusters: K.
        noise_multiplier: Noise of one round over its sensitivity of sqrt(2).
        rounds: Number of rounds, >= 2.
        charge: Called before each.

    Returns:
        sizes_K: Rounded noisy counts of the units nearest to each centre, from the last round, which does not move centres; may
            be negative.
        centres_KP: Of length at most 1.
    """
    there_R = rows_RP.any(axis=1)
    steps_NP = mean_by_unit(lattice(rows_RP[there_R]), units_R[there_R])
    dimensions = rows_RP.shape[1]
    steps_NQ = np.insert(steps_NP, dimensions, STEPS, axis=1)  # the last column counts
    centres_KP, sums_KQ = np.zeros((clusters, dimensions)), np.zeros((clusters, dimensions + 1))
    for number in range(1, rounds + 1):
        nearest_N = nearest(steps_NP, centres_KP)  # in round 1 all centres are equal, so the first gets every unit
        exact_KQ = [steps_NQ[nearest_N == cluster].sum(axis=0) for cluster in range(clusters)]
        charge(number)
        sums_KQ = _noised(np.stack(exact_KQ), math.sqrt(2) * noise_multiplier)
        moved_KP, sizes_K1 = within_ball(sums_KQ[:, :-1] / np.maximum(sums_KQ[:, -1:], 1.0)), sums_KQ[:, -1:]
        if number == 1:
            # Distance of vectors of length 1 from a mean of this length.
            spread = math.sqrt(max(0.0, 1.0 - float(moved_KP[0] @ moved_KP[0])))
            centres_KP = within_ball(moved_KP[0] + spread / 2 * public_directions(clusters, dimensions))
        elif number < rounds:
            centres_KP = np.where(sizes_K1 >= least_size(noise_multiplier, dimensions), moved_KP, centres_KP)
    return np.rint(sums_KQ[:, -1]), centres_KP


def within_ball(vectors_KP: Floats) -> Floats:
    """Scales rows longer than 1 to length 1."""
    return np.asarray(vectors_KP / np.maximum(1.0, np.sqrt((vectors_KP * vectors_KP).sum(axis=1, keepdims=True))))


def nearest(steps_NP: Floats, centres_KP: Floats) -> NDArray[np.int64]:
    """The nearest centre of each row, the first of equals; exact, so it depends on that row alone."""
    steps_KP = lattice(centres_KP)
    return np.asarray(np.argmax(2 * steps_NP @ steps_KP.T - (steps_KP * steps_KP).sum(axis=1), axis=1))


def ada_ssp(
    rows_RP: Floats,
    labels_R: NDArray[np.int64],
    units_R: NDArray[np.int64],
    classes: int,
    noise_multiplier: float,
    charge: Charge,
) -> tuple[Floats, Floats]:
    """A linear classifier by regression onto labels, from noisy second moments; each unit adds the mean of its rows' products.

    Args:
        rows_RP: Of length 1 at most.
        labels_R: Labels from 0 to C - 1.
        units_R: The unit of each row, in rising order; a unit has at most ``MOST_ROWS`` rows.
        classes: C.
        noise_multiplier: Noise of each of the two releases over their sensitivity of 1.
        charge: Called before each.

    Returns:
        sizes_C: Rounded noisy counts of the units of each label; a unit with several labels counts in shares.
        weights_QC: One row for each dimension, then that of a constant 1; the largest score gives the label.
    """
    bias, there_R = math.floor(STEPS / math.sqrt(2)), rows_RP.any(axis=1)
    steps_RP, one_RC, units_R = lattice(rows_RP[there_R]), np.eye(classes)[labels_R[there_R]], units_R[there_R]
    steps_RQ = np.insert(np.trunc(steps_RP / math.sqrt(2)), steps_RP.shape[1], bias, axis=1)

    def sums(right_RS: Floats) -> Floats:
        """Sums of units' mean products; products and means are rounded towards zero."""
        columns = (np.trunc(mean_by_unit(column_R[:, None] * right_RS, units_R) / STEPS) for column_R in steps_RQ.T)
        return np.stack([one_NS.sum(axis=0) for one_NS in columns])

    exact_QQ, exact_QC = sums(steps_RQ), sums(one_RC * STEPS)
    charge(1)
    upper_QQ = np.triu(_noised(exact_QQ, noise_multiplier))
    gram_QQ = upper_QQ + np.triu(upper_QQ, 1).T
    charge(2)
    labels_QC = _noised(exact_QC, noise_multiplier)
    # The eigenvalues of noise alone lie within 2 sigma sqrt(Q), so smaller ones are mostly noise; the floor is half of that.
    # AdaSSP adds a ridge instead, which also shrinks well-determined directions: docs/decisions.md has figures.
    values_Q, basis_QQ = np.linalg.eigh(gram_QQ)
    floor = noise_multiplier * math.sqrt(len(values_Q))
    weights_QC = basis_QQ @ ((basis_QQ.T @ labels_QC) / np.maximum(values_Q, floor)[:, None])
    return np.rint(labels_QC[-1] * STEPS / bias), weights_QC / math.sqrt(2)  # for rows as given


def scores(vectors_RP: Floats, weights_QC: Floats) -> Floats:
    """The score of each class; the last row of weights is that of a constant 1."""
    return np.asarray(vectors_RP @ weights_QC[:-1] + weights_QC[-1])


def _noised(sums: Floats, scale: float) -> Floats:
    """Converts steps to numbers and adds noise: the only place where an exact sum becomes a release."""
    import torch

    from dpllm.privacy.noise import GaussianNoise

    assert spacing_of(scale) <= 1 / STEPS  # else the noise's lattice would be the coarser one
    flat = torch.from_numpy(sums.flatten() / STEPS)
    GaussianNoise(os_entropy(), torch.device("cpu")).add_to(flat, math.nextafter(scale, math.inf))
    return np.asarray(flat.numpy().reshape(sums.shape), dtype=np.float64)
