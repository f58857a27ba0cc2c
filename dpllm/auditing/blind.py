"""The blind control: can members be told from non-members by their words alone, without asking any model?

Comes in: the texts of both sides. Goes out: how well a classifier that sees words and lengths separates them. Where it
succeeds, the two sides are of different kinds, and whatever a model's scores separate is not membership. It must not know
a model or a score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

from dpllm.auditing import statistics
from dpllm.auditing.statistics import Estimate, Floats
from dpllm.canaries.texts import Canary
from dpllm.statement.audit import CONTROL_LEVEL

# A legend of shapes: D texts, W words, P texts of a fold that are of the first side, N those of the second.

FOLDS = 5
FEWEST_TEXTS = 20
"""On each side; with fewer, a fold holds too few to compare."""
# The folds learn from one another's rows, so their AUCs are correlated, and the variance of their mean is larger than that of
# as many independent ones by (1/K + test/training) / (1/K): Nadeau and Bengio's correction. In simulations without any
# difference the mean varies 1.6 to 2.0 times as much as without correlation.
_INFLATION = 1 + FOLDS / (FOLDS - 1)
_WORD = re.compile(r"\w+|[^\w ]|  +")  # words, each other sign, line breaks, and more than one space


def blind(texts_in: Sequence[str], texts_out: Sequence[str], confidence: float = 0.95) -> Estimate | None:
    """Cross-validated naive Bayes over which words a text has, how long it is, and how it begins and ends.

    The area is that of the first side above the second, each text scored by a classifier that was trained without its fold.
    Folds are stratified and drawn with a fixed seed; areas are taken within each and averaged, because scores of different
    classifiers have no common scale. None with fewer than 20 texts on a side.

    Guarantee:
        Where all texts are exchangeable, the area is ``above_half`` with probability about (1 - confidence) / 2 or less. This is
        shown by simulation and not by a theorem: see the tests.

    Args:
        texts_in: One text for each privacy unit.
        texts_out: Likewise.
        confidence: Of the interval.

    References:
        Das, Zhang and Tramer 2024, "Blind baselines beat membership inference attacks for foundation models"; Nadeau and
        Bengio 2003, "Inference for the generalization error", for the correlation between folds.
    """
    if min(len(texts_in), len(texts_out)) < FEWEST_TEXTS:
        return None
    present_DW = _presence([*texts_in, *texts_out])
    first_D = np.arange(len(texts_in) + len(texts_out)) < len(texts_in)
    draw = np.random.default_rng(0)
    fold_D = np.concatenate([draw.permutation(len(side)) % FOLDS for side in (texts_in, texts_out)])
    areas, variances = [], []
    for fold in range(FOLDS):
        test_D = fold_D == fold
        score_D = present_DW @ _weights(present_DW, first_D & ~test_D, ~first_D & ~test_D)
        beaten_P, beating_N = statistics.placements(score_D[test_D & first_D], score_D[test_D & ~first_D])
        areas.append(float(beaten_P.mean()))
        variances.append(float(beaten_P.var(ddof=1) / len(beaten_P) + beating_N.var(ddof=1) / len(beating_N)))
    value, variance, miss = float(np.mean(areas)), _INFLATION * float(np.sum(variances)) / FOLDS**2, 1 - confidence
    if variance <= 1e-18 or not 0 < value < 1:
        reach = statistics.hoeffding(min(len(texts_in), len(texts_out)), miss)
        return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))
    return Estimate(value, *statistics.logit_interval(value, special.ndtri(1 - miss / 2) * math.sqrt(variance)))


def _features(text: str) -> set[str]:
    """Which words and signs a text has, and as longer names, which no word can be, its length and its two ends."""
    words = _WORD.findall(text)
    ends = (f"first {words[0]}", f"last {words[-1]}") if words else ("empty text",)
    return {*words, *ends, f"length {round(4 * math.log2(1 + len(text)))}"}


def _presence(texts: Sequence[str]) -> sparse.csr_array:
    """Shape (D, W): 1 where a text has a word."""
    column: dict[str, int] = {}
    rows = [[column.setdefault(name, len(column)) for name in sorted(_features(text))] for text in texts]
    ends = np.cumsum([0, *(len(row) for row in rows)])
    indices = np.array([index for row in rows for index in row], dtype=np.int64)
    return sparse.csr_array((np.ones(len(indices)), indices, ends), shape=(len(texts), len(column)))


def _weights(present_DW: sparse.csr_array, in_D: NDArray[np.bool_], out_D: NDArray[np.bool_]) -> Floats:
    """Logarithm of how much more often the first side has each word.

    One text that is spread over both sides smooths, so that a word that was never seen weighs nothing, however many texts
    each side has.
    """
    smoothing = 1 / (in_D.sum() + out_D.sum())
    often_in_W = in_D.astype(np.float64) @ present_DW / in_D.sum()
    often_out_W = out_D.astype(np.float64) @ present_DW / out_D.sum()
    result: Floats = np.log(often_in_W + smoothing) - np.log(often_out_W + smoothing)
    return result


def words_control(canaries: Sequence[Canary]) -> dict[str, Any] | None:
    """AUC, its interval at ``CONTROL_LEVEL``, and whether it ``succeeds``; None: too few canaries of a side."""
    sides = [[canary.text for canary in canaries if canary.inserted is coin] for coin in (True, False)]
    found = blind(sides[0], sides[1], confidence=1 - CONTROL_LEVEL)
    if found is None:
        return None
    return {"auc": found.value, "interval": [found.low, found.high], "succeeds": found.above_half}
