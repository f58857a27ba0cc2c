"""Clusters and linear classifiers of vectors, one for each unit, with differential privacy: k-means and AdaSSP.

Comes in: vectors of length 1 at most, public settings. Goes out: what may be published, its event, its 95% error. Knows no text,
no model and no ledger; imports torch only where noise is drawn.

Everything that is added up is a whole number of steps of ``1 / STEPS``, in float64: sums and products of such numbers are exact
in any order, so that nothing of a unit follows its company, and the noise of ``dpllm.privacy.noise`` falls on the same lattice.

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
"""Writes down that a round, counted from 1, is about to be drawn."""
# A legend of shapes: N units, R rows, D hidden units, P dimensions, K clusters, C classes.

STEPS = 2**20
"""Of the lattice, from 0 to 1."""
NAMES: dict[Kind, str] = {
    "clusters": "k-means, Gaussian (counts and sums)",
    "classifier": "AdaSSP, Gaussian (Gram matrix and labels)",
}
DIMENSIONS: dict[Kind, int] = {"clusters": 16, "classifier": 64}
MOST_ROWS = 2**13
"""Of a unit: the sum of so many products is exact in float64."""
_NORMAL = 1.959964  # what a standard normal number exceeds, either way, with probability 0.05


@dataclass(frozen=True)
class Projection:
    """A public map: a vector less a centre, in fewer dimensions, at length 1."""

    centre_D: Floats
    dimensions: int

    def __call__(self, vectors_RD: Floats) -> Floats:
        """Shape (R, P), each row of length 1, or zeros for zeros; a row has the same bits whatever the others."""
        there_R1 = vectors_RD.any(axis=1, keepdims=True)
        moved_RD = np.where(there_R1, lattice(vectors_RD) - lattice(self.centre_D), 0.0)
        directions_DP = public_directions(len(self.centre_D), self.dimensions, b"proj")
        return unit_length(moved_RD @ lattice(directions_DP))  # whole numbers below 2^53: exact in any order


def public_directions(rows: int, columns: int, purpose: bytes = b"dirs") -> Floats:
    """Rows of length 1 in random directions, the same for everybody in every version: no secret, and no data."""
    flat = np.empty(rows * columns)
    SecretStream(0, purpose).normal(flat)
    return unit_length(flat.reshape(rows, columns))


def unit_length(vectors_RD: Floats) -> Floats:
    """Each row divided by its length; zeros where that is 0 or not finite."""
    with np.errstate(all="ignore"):
        scaled_RD = vectors_RD / np.abs(vectors_RD).max(axis=1, keepdims=True)  # whose squares do not overflow
        found_RD = scaled_RD / np.sqrt((scaled_RD * scaled_RD).sum(axis=1, keepdims=True))
    return np.asarray(np.nan_to_num(found_RD))  # a row is finite, or NaN as a whole


def lattice(vectors: Floats) -> Floats:
    """Coordinates as whole numbers of steps, rounded towards zero.

    A length of 1 gives ``STEPS`` at most, whatever its rounding error: the next square of a whole number needs 1 + 2^-41.
    """
    return np.trunc(vectors * STEPS)


def mean_by_unit(steps_RQ: Floats, units_R: NDArray[np.int64]) -> Floats:
    """Shape (N, Q): the mean of each unit's rows, in whole steps, exactly, rounded towards zero; units are in rising order."""
    starts_N = np.flatnonzero(np.diff(units_R, prepend=-1))
    rows_N = np.diff(starts_N, append=len(units_R))
    sums_NQ = np.add.reduceat(steps_RQ, starts_N, axis=0) if len(starts_N) else steps_RQ
    return np.asarray(np.trunc(sums_NQ / rows_N[:, None]))


def event_of(kind: Kind, noise_multiplier: float, rounds: int) -> SelfComposed:
    """What is released: of a classifier two sums, of clusters one for each round."""
    return SelfComposed(rounds if kind == "clusters" else 2, Gaussian(noise_multiplier))


def figures(kind: Kind, noise_multiplier: float, rounds: int) -> dict[str, Any]:
    """What a record says of such a release: mechanism, event, and what a count errs by, at most, with 95% probability."""
    error = _NORMAL * math.sqrt(2) * noise_multiplier + 0.5  # it is rounded
    event = event_of(kind, noise_multiplier, rounds)
    return {"mechanism": NAMES[kind], "event": event, "error_95": error, "error_of": "units in each count"}


MOST_NOISE = 2.0**10
"""Above which the lattice of the noise is coarser than that of the sums."""


def least_noise(units: int) -> float:
    """Below which sums over so many units have more than the 2^52 steps of the noise's lattice, and are not added exactly."""
    return units * 2.0**-20


def least_size(noise_multiplier: float, dimensions: int) -> int:
    """Units that a cluster must have for its centre to move: the noise in it is then half a radius long."""
    return math.ceil(2 * math.sqrt(2 * dimensions) * noise_multiplier)


def k_means(
    rows_RP: Floats, units_R: NDArray[np.int64], clusters: int, noise_multiplier: float, rounds: int, charge: Charge
) -> tuple[Floats, Floats]:
    """Lloyd's rounds over the mean of each unit's rows, from public directions around the mean that the first round releases.

    Args:
        rows_RP: Of length 1 at most.
        units_R: Whose rows they are, in rising order.
        clusters: K.
        noise_multiplier: Of one round, over its sensitivity of sqrt(2).
        rounds: How many, 2 or more.
        charge: Called before each.

    Returns:
        sizes_K: Units nearest to each of these centres, which the last round counts and does not move, rounded; noise may make
            one negative.
        centres_KP: Of length 1 at most.
    """
    there_R = rows_RP.any(axis=1)
    steps_NP = mean_by_unit(lattice(rows_RP[there_R]), units_R[there_R])
    dimensions = rows_RP.shape[1]
    steps_NQ = np.insert(steps_NP, dimensions, STEPS, axis=1)  # the last column counts
    centres_KP, sums_KQ = np.zeros((clusters, dimensions)), np.zeros((clusters, dimensions + 1))
    for number in range(1, rounds + 1):
        nearest_N = nearest(steps_NP, centres_KP)  # in the first round all are equal, and the first has everybody
        exact_KQ = [steps_NQ[nearest_N == cluster].sum(axis=0) for cluster in range(clusters)]
        charge(number)
        sums_KQ = _noised(np.stack(exact_KQ), math.sqrt(2) * noise_multiplier)
        moved_KP, sizes_K1 = within_ball(sums_KQ[:, :-1] / np.maximum(sums_KQ[:, -1:], 1.0)), sums_KQ[:, -1:]
        if number == 1:
            # How far vectors of length 1 lie from a mean of this length.
            spread = math.sqrt(max(0.0, 1.0 - float(moved_KP[0] @ moved_KP[0])))
            centres_KP = within_ball(moved_KP[0] + spread / 2 * public_directions(clusters, dimensions))
        elif number < rounds:
            centres_KP = np.where(sizes_K1 >= least_size(noise_multiplier, dimensions), moved_KP, centres_KP)
    return np.rint(sums_KQ[:, -1]), centres_KP


def within_ball(vectors_KP: Floats) -> Floats:
    """Rows that are longer than 1, at length 1."""
    return np.asarray(vectors_KP / np.maximum(1.0, np.sqrt((vectors_KP * vectors_KP).sum(axis=1, keepdims=True))))


def nearest(steps_NP: Floats, centres_KP: Floats) -> NDArray[np.int64]:
    """The nearest centre of each row, the first of equals; exact, so that a row's follows from it alone."""
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
    """A linear classifier by regression onto labels, of noisy second moments; each unit adds the mean of its rows' products.

    Args:
        rows_RP: Of length 1 at most.
        labels_R: From 0 to C - 1.
        units_R: Whose rows they are, in rising order; a unit has ``MOST_ROWS`` at most.
        classes: C.
        noise_multiplier: Of each of the two releases, over their sensitivity of 1.
        charge: Called before each.

    Returns:
        sizes_C: How many units have each label, a unit with several as shares, with noise, rounded.
        weights_QC: One row for each dimension, then that of a constant 1; the largest score is the label's.
    """
    bias, there_R = math.floor(STEPS / math.sqrt(2)), rows_RP.any(axis=1)
    steps_RP, one_RC, units_R = lattice(rows_RP[there_R]), np.eye(classes)[labels_R[there_R]], units_R[there_R]
    steps_RQ = np.insert(np.trunc(steps_RP / math.sqrt(2)), steps_RP.shape[1], bias, axis=1)

    def sums(right_RS: Floats) -> Floats:
        """Of each unit's mean product, which is rounded towards zero, as each mean is."""
        columns = (np.trunc(mean_by_unit(column_R[:, None] * right_RS, units_R) / STEPS) for column_R in steps_RQ.T)
        return np.stack([one_NS.sum(axis=0) for one_NS in columns])

    exact_QQ, exact_QC = sums(steps_RQ), sums(one_RC * STEPS)
    charge(1)
    upper_QQ = np.triu(_noised(exact_QQ, noise_multiplier))
    gram_QQ = upper_QQ + np.triu(upper_QQ, 1).T
    charge(2)
    labels_QC = _noised(exact_QC, noise_multiplier)
    # The eigenvalues of the noise alone lie within 2 sigma sqrt(Q): what is smaller is mostly noise, and the floor is half of
    # that. AdaSSP adds a ridge in place of it, which shrinks what is known well too: docs/decisions.md has figures.
    values_Q, basis_QQ = np.linalg.eigh(gram_QQ)
    floor = noise_multiplier * math.sqrt(len(values_Q))
    weights_QC = basis_QQ @ ((basis_QQ.T @ labels_QC) / np.maximum(values_Q, floor)[:, None])
    return np.rint(labels_QC[-1] * STEPS / bias), weights_QC / math.sqrt(2)  # of rows as they came


def scores(vectors_RP: Floats, weights_QC: Floats) -> Floats:
    """Of each class; the last row of weights is that of a constant 1."""
    return np.asarray(vectors_RP @ weights_QC[:-1] + weights_QC[-1])


def _noised(sums: Floats, scale: float) -> Floats:
    """Whole steps as numbers, with noise: the only place where what is exact becomes what may be published."""
    import torch

    from dpllm.privacy.noise import GaussianNoise

    assert spacing_of(scale) <= 1 / STEPS  # or the lattice of the noise is the coarser one
    flat = torch.from_numpy(sums.flatten() / STEPS)
    GaussianNoise(os_entropy(), torch.device("cpu")).add_to(flat, math.nextafter(scale, math.inf))
    return np.asarray(flat.numpy().reshape(sums.shape), dtype=np.float64)
