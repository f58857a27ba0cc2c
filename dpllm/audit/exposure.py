"""Exposure beyond the number of references: by the tail of a distribution fitted to their scores.

Comes in: scores of canaries and references, the size of the space that secrets were drawn from, and a claim. Goes out:
exposures in bits, marked where no reference vouches for them, their mean against that of a model that learned nothing,
and the exposure that the claim allows. Knows no model and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from dpllm.audit import attacks
from dpllm.audit.bounds import GroupClaim
from dpllm.audit.skew_normal import TailFit, fit_tail, log_tail
from dpllm.audit.table import CanaryScores, by_group
from dpllm.audit.verdict import Claim

# A legend of shapes: P scores that are looked at, Q references.

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NULL_MEAN = 1 / math.log(2)


@dataclass(frozen=True)
class TailExposure:
    """Exposures of P scores."""

    bits_P: Floats
    extrapolated_P: Bools
    """Whether the value exceeds log2 Q, so that it rests on the shape of the tail and not on a rank."""
    method: Literal["skew-normal", "rank"]


@dataclass(frozen=True)
class MeanExposure:
    """The mean of c exposures beside that of canaries that the model never saw."""

    mean: float
    standard_error: float | None
    """From the spread of the exposures themselves; None for a single one."""
    null_mean: float
    null_standard_error: float
    """Of the mean of c exposures against Q references where nothing was learned: null_mean sqrt(1/c + 1/Q)."""
    p_value: float
    """One-sided: how often a model that learned nothing reaches this mean; approximate."""


@dataclass(frozen=True)
class ExposureLimit:
    """The exposure, in bits, that a claim of differential privacy leaves possible."""

    epsilon: float
    delta: float
    repetitions: int
    mean: float
    """The mean exposure is at most this, in expectation."""
    maximum: float
    """The largest of c exposures is at most this, in expectation."""
    one_canary_in_c: float
    """One canary exceeds this with probability at most 1/c."""


def tail_exposure(
    scores: ArrayLike, reference_scores: ArrayLike, *, log2_secrets: float | None, fit: TailFit
) -> TailExposure:
    """Exposure in bits, -log2 of the fitted tail above a score; by rank where the fit has a fault.

    Never above log2_secrets: a secret cannot be more exposed than named.

    Args:
        scores: Shape (P,), higher = likelier.
        reference_scores: Shape (Q,), what ``fit`` was fitted to.
        log2_secrets: log2 |R|, bits of the space that secrets were drawn from; None where it has no known size.
        fit: Of ``fit_tail``.
    """
    reference_Q = np.asarray(reference_scores, dtype=np.float64)
    if fit.fault is None:
        bits_P = -log_tail(scores, fit.shape, fit.location, fit.scale) / math.log(2)
    else:
        bits_P = attacks.exposure(scores, reference_Q)
    bits_P = np.minimum(bits_P, _largest(log2_secrets))
    return TailExposure(bits_P, bits_P > math.log2(len(reference_Q)), "skew-normal" if fit.fault is None else "rank")


def mean_exposure(bits: ArrayLike, num_references: int, method: Literal["skew-normal", "rank"]) -> MeanExposure | None:
    """The mean of exposures against the null of no memorisation, under which it is 1 / ln 2 = 1.4427 bits.

    Under the null an exposure is exponential. A mean of c of them is compared with a gamma distribution whose variance is
    that of the mean plus what the Q shared references add, so that many canaries do not make few references precise.

    Args:
        bits: Shape (c,).
        num_references: Q.
        method: Which exposure; ranks have the exact mean of ``attacks.exposure_null_mean``.

    Returns:
        None where there is no canary.
    """
    bits_P = np.asarray(bits, dtype=np.float64)
    count = len(bits_P)
    if not count:
        return None
    null = _NULL_MEAN if method == "skew-normal" else attacks.exposure_null_mean(num_references)
    variance = 1 / count + 1 / num_references
    mean = float(bits_P.mean())
    return MeanExposure(
        mean=mean,
        standard_error=float(bits_P.std(ddof=1) / math.sqrt(count)) if count > 1 else None,
        null_mean=null,
        null_standard_error=null * math.sqrt(variance),
        p_value=float(stats.gamma.sf(mean, 1 / variance, scale=null * variance)),
    )


def largest_exposure(claim: GroupClaim, probability: float) -> float:
    """The exposure that a canary exceeds with at most the given probability: k eps / ln 2 - log2(probability - delta_k).

    Guarantee:
        Of a canary with a random secret, inserted as often as the claim says, ranked among references by the output of
        a mechanism that keeps the claim: P[exposure >= x] <= e^(k eps) 2^-x + delta_k, because without it the rank is
        uniform. Of exposures by a fitted tail only as far as the fit is true.

    Args:
        claim: Of ``bounds.group_claim``: its epsilon is k eps, its delta is delta_k.
        probability: In (0, 1].

    Returns:
        Bits, at least 0; inf where delta_k alone is as probable.
    """
    if probability <= claim.delta:
        return math.inf
    return max(0.0, claim.epsilon / math.log(2) - math.log2(probability - claim.delta))


def expected_maximum(claim: GroupClaim, num_canaries: int, largest: float) -> float:
    """The most that the largest of c exposures is in expectation under a claim, in bits.

    Guarantee:
        As ``largest_exposure``, by the union bound: the integral over x from 0 to ``largest`` of
        min(1, c (e^(k eps) 2^-x + delta_k)). With delta 0 and no largest value: k eps / ln 2 + log2 c + 1 / ln 2. It holds
        however the canaries depend on each other.

    Args:
        claim: Of one canary with all its repetitions.
        num_canaries: c >= 1; 1 gives the bound on the mean.
        largest: No exposure is above it: log2 Q by rank, log2 |R| by a fitted tail, inf for none.
    """
    certain = min(largest, largest_exposure(claim, 1 / num_canaries))
    if certain == largest:
        return largest
    falling = num_canaries * 2 ** (claim.epsilon / math.log(2) - certain)
    rest = falling * (1 - 2 ** (certain - largest)) / math.log(2)
    if claim.delta > 0:
        rest += num_canaries * claim.delta * (largest - certain)
    return min(largest, certain + rest)


def exposure_limit(claim: GroupClaim, num_canaries: int, largest: float) -> ExposureLimit:
    """What a claim leaves possible for c canaries that each hold all its repetitions.

    Args:
        claim: Of one canary.
        num_canaries: c >= 1.
        largest: As in ``expected_maximum``.
    """
    return ExposureLimit(
        epsilon=claim.epsilon,
        delta=claim.delta,
        repetitions=claim.repetitions,
        mean=expected_maximum(claim, 1, largest),
        maximum=expected_maximum(claim, num_canaries, largest),
        one_canary_in_c=min(largest, largest_exposure(claim, 1 / num_canaries)),
    )


def summary(scores: Sequence[CanaryScores], *, log2_secrets: float | None, claim: Claim | None) -> dict[str, Any]:
    """Exposure by the fitted tail for each group of repetitions, beside its controls and its limit.

    Args:
        scores: The score table, candidates and references.
        log2_secrets: As in ``tail_exposure``.
        claim: None for a run without differential privacy.

    Returns:
        Ready for JSON: ``fits`` (of the tuned and of the base model, with the fault if it is not used), ``references``,
        ``log2_secrets`` (None: not known) and ``groups``. Of each group: ``inserted`` by the tuned model, and as controls
        ``base`` (the same canaries by the base model) and ``held_out`` (the others of the group by the tuned model); each
        with method, mean and test, the largest value and whether it is extrapolated, and how many are; and ``limit``,
        what the claim allows to the inserted ones (None: no claim, or no limit).
    """
    groups = by_group(scores)
    references = groups.pop(0, [])
    known = {"tuned": attacks.loss(references), "base": attacks.base_loss(references)}
    fits = {name: fit_tail(values) for name, values in known.items()}
    result = {}
    for group, rows in groups.items():
        inside, outside = attacks.members(rows), attacks.held_out(rows)
        sides = {
            "inserted": ("tuned", attacks.loss(inside)),
            "base": ("base", attacks.base_loss(inside)),
            "held_out": ("tuned", attacks.loss(outside)),
        }
        described: dict[str, Any] = {}
        for side, (model, values) in sides.items():
            found = tail_exposure(values, known[model], log2_secrets=log2_secrets, fit=fits[model])
            described[side] = _describe(found, len(references))
        limit = None
        if claim is not None and inside:
            by_rank = fits["tuned"].fault is not None
            largest = min(_largest(log2_secrets), math.log2(len(references)) if by_rank else math.inf)
            limit = _finite(asdict(exposure_limit(claim.of(group), len(inside), largest)))
        result[str(group)] = {**described, "limit": limit}
    return {
        "references": len(references),
        "log2_secrets": log2_secrets,
        "fits": {name: asdict(fit) for name, fit in fits.items()},
        "groups": result,
    }


def _largest(log2_secrets: float | None) -> float:
    return math.inf if log2_secrets is None else log2_secrets


def _describe(found: TailExposure, num_references: int) -> dict[str, Any]:
    mean = mean_exposure(found.bits_P, num_references, found.method)
    if mean is None:
        return {"canaries": 0}
    top = int(found.bits_P.argmax())
    return {
        "canaries": len(found.bits_P),
        "method": found.method,
        **asdict(mean),
        "maximum": float(found.bits_P[top]),
        "maximum_extrapolated": bool(found.extrapolated_P[top]),
        "extrapolated": int(found.extrapolated_P.sum()),
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
