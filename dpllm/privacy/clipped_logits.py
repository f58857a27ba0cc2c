"""Draws one token by the votes of records: clipped logit differences on a lattice, and an exact draw.

Comes in: logits behind a public prompt and behind one prompt for each record, the public numbers of a ``Ballot``, an entropy.
Goes out: a token. Must not know models or texts, and stores no vote.

With phi_0 the public logits and phi_i those of unit i, the token is drawn from

    softmax((phi_0 + (1/B) sum over i of clip(phi_i - phi_0, C)) / tau),

among the public candidates alone, where clip acts on each coordinate, to [-C, C].

Guarantee:
    One draw is a bounded-range mechanism with eta = 2 C / (B tau) under zero_out, where the unit's vote becomes 0, and under
    add_or_remove_one, where the vote is there or not: B is a public divisor, not the number of votes.

    Proof. A unit's vote on one token is an integer of absolute value at most 2^LATTICE_BITS that depends only on its own logits
    and the public ones; times C / 2^LATTICE_BITS it is the clipped difference. The integers are summed exactly, so u, their sum
    times C / (2^LATTICE_BITS B tau), differs by at most C / (B tau) in any coordinate. With public weights q_y > 0 of the
    candidates, the probabilities are q_y exp(u_y) / sum q exp(u). The log ratio is u_y - u'_y minus a number that is the same for
    all y, so its values lie in an interval of length 2 C / (B tau).

    The probabilities are exact: a candidate is proposed with probability q_y (rounding in the softmax of phi_0 / tau does not
    matter, since no record affects it) and accepted by an exact coin of probability exp((u_y - max u) / (B tau)); else another is
    proposed. The number of proposals is not released, but it takes time.

    A unit that is absent or has a logit that is not finite votes 0 on every token.

References:
    InvisibleInk (arXiv 2507.02974), equations 3 to 5, and Amin et al. 2024 (arXiv 2407.12108), for the clipped votes. Canonne,
    Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy", algorithms 1 and 2, for the coin. McSherry and
    Talwar 2007 (the exponential mechanism); Durfee and Rogers 2019, lemma 3.1 (its bounded range).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import ConfigError
from dpllm.privacy.events import BoundedRange, integer, number
from dpllm.privacy.releases import Below, bernoulli_exp

MOST_CLIP = 6.0  # maximum of clip / temperature: a proposal is accepted with probability at least exp(-2 C / tau)
LATTICE_BITS = 20  # a vote is rounded by at most C / 2^21, which is the spacing of bfloat16 logits near 2^-13
# A legend of shapes: V tokens of the vocabulary, R records of one unit.

Floats = NDArray[np.float64]
Votes = NDArray[np.int64]


@dataclass(frozen=True)
class Ballot:
    """The public parameters of a vote.

    Attributes:
        batch_size: B >= 1, the divisor of the votes.
        clip: C > 0, in nats.
        temperature: tau > 0.
        top_k: Number of candidates, the likeliest tokens after the public prompt; 0: all tokens.
    """

    batch_size: int
    clip: float
    temperature: float
    top_k: int = 0

    def __post_init__(self) -> None:
        """Refuses, with a ConfigError, parameters without a guarantee."""
        integer("batch_size", self.batch_size, 1)
        integer("top_k", self.top_k, 0)
        for name in ("clip", "temperature"):
            number(name, getattr(self, name), 1e-6, 1e6, including=True)
        if self.clip / self.temperature > MOST_CLIP:
            raise ConfigError(
                f"clip {self.clip:g} over temperature {self.temperature:g} is above {MOST_CLIP:g}, so a draw could take millions "
                "of proposals. Lower the clip, or raise the temperature."
            )

    @cached_property
    def _per_vote(self) -> Fraction:
        """The exponent's increase for one lattice step of the sum: C / (2^LATTICE_BITS B tau), exactly."""
        scale = 2**LATTICE_BITS * self.batch_size * Fraction(self.temperature)
        return Fraction(Fraction(self.clip) / scale)

    @property
    def range(self) -> float:
        """Eta = 2 C / (B tau), rounded up."""
        exact = self._per_vote * 2 ** (LATTICE_BITS + 1)
        eta = float(exact)
        return eta if Fraction(eta) >= exact else math.nextafter(eta, math.inf)

    def event(self, draws: int) -> BoundedRange:
        """The event of ``draws`` adaptive draws, each after the tokens drawn before."""
        return BoundedRange(self.range, draws)

    def vote(self, logits_RV: Floats, public_V: Floats) -> Votes:
        """The vote of one unit: the mean over its records of their difference from the public logits, clipped, on the lattice.

        Args:
            logits_RV: Logits after the prompt of each record; without records, the unit votes 0.
            public_V: Logits after the public prompt.
        """
        finite_V = np.isfinite(public_V)
        if not len(logits_RV) or not np.isfinite(logits_RV[:, finite_V]).all():
            return np.zeros(public_V.shape, np.int64)
        difference_V = np.where(finite_V, logits_RV.mean(axis=0) - np.where(finite_V, public_V, 0.0), 0.0)
        scaled_V = np.clip(difference_V / self.clip, -1.0, 1.0) * 2.0**LATTICE_BITS
        vote_V: Votes = np.rint(scaled_V).astype(np.int64)
        return vote_V

    def draw(self, votes: Iterable[Votes], public_V: Floats, below: Below) -> int:
        """Draws one token.

        Args:
            votes: The vote of each unit.
            public_V: Logits after the public prompt; tokens whose logit is not finite are not candidates.
            below: Uniform random integers; the operating system's, for the guarantee to hold.

        Raises:
            ConfigError: No token is a candidate.
        """
        sum_V = np.zeros(public_V.shape, np.int64)
        for vote_V in votes:
            sum_V += vote_V
        finite_K = np.flatnonzero(np.isfinite(public_V))
        if not len(finite_K):
            raise ConfigError("no public logit is finite, so no token can be drawn. Try --model.dtype float32.")
        if 0 < self.top_k < len(finite_K):
            finite_K = np.sort(finite_K[np.argsort(-public_V[finite_K], kind="stable")[: self.top_k]])
        weight_K = np.exp((public_V[finite_K] - public_V[finite_K].max()) / self.temperature)
        cumulated_K, largest = np.cumsum(weight_K), int(sum_V[finite_K].max())
        while True:
            uniform = below(2**53) / 2**53 * cumulated_K[-1]
            token = int(finite_K[min(int(np.searchsorted(cumulated_K, uniform, side="right")), len(finite_K) - 1)])
            if bernoulli_exp((largest - int(sum_V[token])) * self._per_vote, below):
                return token
