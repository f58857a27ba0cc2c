"""Randomised response: a preference label that is private at the source.

Comes in: an epsilon. Goes out: coins, and how often they flip a label. Knows no text, and imports no torch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from fractions import Fraction

Below = Callable[[int], int]
"""A uniform integer from 0 to its argument, exclusive: ``secrets.randbelow``, or a seeded one in tests."""


def flip_probability(epsilon: float) -> float:
    """The probability q = 1 / (1 + e^epsilon) with which a label is flipped."""
    return 1 / (1 + math.exp(epsilon))


def flipped(epsilon: float, below: Below = secrets.randbelow) -> bool:
    """Whether one label is flipped: True with probability 1 / (1 + e^epsilon), exactly.

    Args:
        epsilon: > 0, of one label.
        below: From n to a uniform integer in 0..n-1; another than the operating system's for tests only.

    Guarantee:
        The label that comes out is (epsilon, 0)-differentially private under a change of the label that went in: either of the
        two comes out at most e^epsilon times as often from one as from the other. Labels are flipped independently, so k of one
        annotator cost k epsilon. What else a row says, its prompt and answers, is not protected.

    References:
        Warner 1965, "Randomized Response". Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy",
        algorithm 1 (the exact coin).
    """
    # A fair coin keeps; the other half flips with probability e^-epsilon and else begins anew. So flips and keeps are as
    # e^-epsilon to 1.
    while below(2):
        if bernoulli_exp(Fraction(epsilon), below):
            return True
    return False


def bernoulli_exp(gamma: Fraction, below: Below) -> bool:
    """True with probability exp(-gamma), gamma >= 0, exactly (Canonne, Kamath and Steinke 2020, algorithm 1)."""
    while gamma > 1:
        if not bernoulli_exp(Fraction(1), below):
            return False
        gamma -= 1
    turn = 1
    while below(gamma.denominator * turn) < gamma.numerator:
        turn += 1
    return turn % 2 == 1
