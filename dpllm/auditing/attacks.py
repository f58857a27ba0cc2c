"""Attacks: scores of the canaries' rows and of their tokens, higher = more likely a member; and extraction of secrets.

Comes in: the score and token tables. Goes out: one array for each attack; counts of secrets that greedy decoding or
a number of samples reveals, with their controls. Directions and settings are fixed here and are never reversed or tuned on coins.
Everything is computed from probabilities: nothing is generated. Must not know models or texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.auditing.statistics import Floats, fit_slope
from dpllm.auditing.table import CanaryScores, TokenTable, by_group, sum_up

# A legend of shapes: S sequences, N tokens.

LOWEST_SHARE = 0.2  # of a sequence's tokens, for Min-K%++
SMALLEST_VARIANCE = 1e-12  # of log p, which is 0 if the model is certain


def ratio(table: Iterable[CanaryScores]) -> Floats:
    """Increase in the log-probability of the text: sum of log p_tuned - log p_base, in nats."""
    return np.array([row.tuned_log_prob - row.base_log_prob for row in table], dtype=np.float64)


def loss(table: Iterable[CanaryScores]) -> Floats:
    """Log-probability of the text after training: sum of log p_tuned, in nats."""
    return np.array([row.tuned_log_prob for row in table], dtype=np.float64)


def base_loss(table: Iterable[CanaryScores]) -> Floats:
    """Log-probability of the text before training, in nats: the control, which must not succeed."""
    return np.array([row.base_log_prob for row in table], dtype=np.float64)


def slope(candidates: Sequence[CanaryScores]) -> float:
    """The slope of the log-probabilities after training on those before it; 1 if unknown.

    It is fitted on all candidates, whatever their coins, so a score that uses it depends on the coins only through the
    model. A model that hardly changed has a slope near 1; one that relearned how to write digits, near 0.
    """
    return fit_slope(np.array([row.base_left for row in candidates]), np.array([row.tuned_left for row in candidates]))


def calibrated(table: Iterable[CanaryScores], slope: float) -> Floats:
    """The part that the base model's log-probability does not explain: sum of log p_tuned - slope * log p_base, in nats.

    The best use of the base as a control variate: ``ratio`` for slope 1, ``loss`` for slope 0, and never noisier than
    both. For whole rows, the part that their words explain is first subtracted from both, see ``unexplained``.

    References:
        Watson et al. 2022, "On the Importance of Difficulty Calibration in Membership Inference Attacks" (a reference
        model's score is subtracted); the slope and the words are ours.
    """
    return np.array([row.tuned_left - slope * row.base_left for row in table], dtype=np.float64)


def unexplained(table: TokenTable, log_prob_N: Floats) -> Floats:
    """Excess of a row's log-probability over that of the same words in all rows, in nats, shape (S,).

    Three means are subtracted from each token's log-probability in turn: over all tokens, over equal tokens, and over equal
    tokens that follow equal tokens. The last two means include one more token, of 0, so a token that occurs only once
    keeps half each time. All rows have the same weight, whatever their coins.
    """
    assert table.word_N is not None
    before_N = np.append(-1, table.word_N[:-1])
    before_N[table.starts()] = -1
    left_N = log_prob_N - log_prob_N.mean()
    for kind_N in (table.word_N, table.word_N * (len(left_N) + 1) + before_N):
        _, which_N, often_K = np.unique(kind_N, return_inverse=True, return_counts=True)
        left_N = left_N - (np.bincount(which_N, left_N) / (often_K + 1))[which_N]
    return table.sums(left_N)


def whole_rows(tokens: TokenTable) -> list[CanaryScores]:
    """The scores as the primary attack reads them: summed over whole rows, of which the secrets are a part."""
    columns: dict[str, dict[str, Any]] = {}
    for model, log_prob_N in (("tuned", tokens.tuned_log_prob_N), ("base", tokens.base_log_prob_N)):
        score_S = left = tokens.by_canary(tokens.sums(log_prob_N))
        if tokens.answers == 1:  # else both have the same words: two noises would be added where one is taken off
            left = tokens.by_canary(unexplained(tokens, log_prob_N))
        columns |= {f"{model}_log_prob": score_S, f"{model}_left": left}
    return [replace(row, **{name: column[row.canary_id] for name, column in columns.items()}) for row in sum_up(tokens)]


def members(rows: Iterable[CanaryScores]) -> list[CanaryScores]:
    """The inserted candidates."""
    return [row for row in rows if row.inserted]


def held_out(rows: Iterable[CanaryScores]) -> list[CanaryScores]:
    """The candidates that were left out, and references."""
    return [row for row in rows if not row.inserted]


def zlib(table: TokenTable) -> Floats:
    """Log-probability over the compressed length: an easy text is likely in every model (Carlini et al. 2021)."""
    return table.sums(table.tuned_log_prob_N) / table.zlib_bytes_S


def min_k_plus(table: TokenTable) -> Floats:
    """Log p in standard deviations from its mean over the vocabulary, averaged over the lowest fifth of the tokens.

    Their number is rounded up.

    References:
        Zhang et al. 2025, Min-K%++.
    """
    deviation_N = np.sqrt(np.maximum(table.tuned_variance_N, SMALLEST_VARIANCE))
    standardised_N = (table.tuned_log_prob_N - table.tuned_mean_N) / deviation_N
    order_N = np.lexsort((standardised_N, table.sequence_N))
    starts, lengths = table.starts(), table.lengths()
    few_S = np.ceil(LOWEST_SHARE * lengths).astype(np.int64)
    total_N1 = np.concatenate(([0.0], np.cumsum(standardised_N[order_N])))
    result: Floats = (total_N1[starts + few_S] - total_N1[starts]) / few_S
    return result


ATTACKS: dict[str, Callable[[Iterable[CanaryScores]], Floats]] = {"ratio": ratio, "loss": loss}
"""Membership scores of secrets by name, reported besides the primary one."""

TOKEN_ATTACKS: dict[str, Callable[[TokenTable], Floats]] = {"zlib": zlib, "min_k_plus": min_k_plus}
"""Membership scores of sequences by name."""


class Scoring(NamedTuple):
    """How the canaries of a table are scored, besides their sums."""

    words: str  # what is summed
    by_token: Mapping[str, Mapping[str, float]]  # the attacks that need tokens: name -> canary -> score
    slope: float  # see ``calibrated``


def scoring(tokens: TokenTable, candidates: Sequence[CanaryScores]) -> Scoring:
    """The scoring of a table; a pair's reward is the difference of whole log p, so it has neither slope nor token attacks."""
    if tokens.answers > 1:
        return Scoring("of pairs, the margin of their implicit rewards", {}, 1.0)
    scored = "the secret's tokens" if np.all(tokens.secret_N) else "every token that entered the loss"
    by_token = {name: tokens.by_canary(attack(tokens)) for name, attack in TOKEN_ATTACKS.items()}
    return Scoring(f"of {scored}, less what its words explain", by_token, slope(candidates))


# Extraction.

Model = Literal["tuned", "base"]
Scheme = Literal["all_tokens", "top_k"]
"""Sampling at temperature 1, from the whole vocabulary or from the ``table.TOP_K`` likeliest tokens."""

SCHEMES: tuple[Scheme, ...] = ("all_tokens", "top_k")
ATTEMPTS = (1, 10, 100, 1000, 10_000)
"""n: numbers of samples that the attacker draws."""
PROBABILITIES = (0.1, 0.5, 0.9)
"""p: the probability that one of them is the secret."""
_ROUNDING = 1e-12  # relative rounding error of n in float64: 1 - (1 - 1/2)^1 >= 1/2 must not come out as n = 2


def greedy_extraction(rows: Sequence[CanaryScores]) -> dict[str, int]:
    """Number of secrets that greedy decoding reveals among the inserted ones, and among the held-out ones as the control."""
    inside, outside = members(rows), held_out(rows)
    return {
        "inserted": len(inside),
        "tuned": sum(row.tuned_greedy for row in inside),
        "base": sum(row.base_greedy for row in inside),
        "held_out": len(outside),
        "held_out_tuned": sum(row.tuned_greedy for row in outside),
    }


def log_prob(table: TokenTable, model: Model, scheme: Scheme = "all_tokens") -> Floats:
    """Shape (S,), log p_z in nats: one sample is exactly the scored tokens with probability p_z; -inf if it cannot be."""
    column = {"all_tokens": "log_prob", "top_k": "top_k_log_prob"}[scheme]
    # Rounding can make the log-probability of a token with probability 1 positive.
    result: Floats = np.minimum(table.sums(getattr(table, f"{model}_{column}_N")), 0.0)
    return result


def attempts(log_p: ArrayLike, probability: float) -> Floats:
    """The smallest number of samples n among which the secret is with the given probability.

    That is the smallest n with 1 - (1 - p_z)^n >= p. Computed with logarithms, so that it is as exact for a p_z of
    1e-300 as for one of 1 - 1e-16.

    Args:
        log_p: log p_z in nats, at most 0, of any shape; -inf: never drawn.
        probability: p, strictly between 0 and 1.

    Returns:
        Whole numbers >= 1 of the same shape; inf if p_z is 0 or n exceeds the largest float64.

    Raises:
        ValueError: A value is out of range.

    References:
        Hayes et al. 2024 (arXiv 2410.19482), (n, p)-discoverable extraction.
    """
    log_p_S = np.asarray(log_p, dtype=np.float64)
    if not 0 < probability < 1 or np.isnan(log_p_S).any() or (log_p_S > 1e-6).any():
        raise ValueError(f"attempts needs log p_z <= 0 and 0 < p < 1, got p = {probability}")
    log_p_S = np.minimum(log_p_S, 0.0)
    log_miss = -math.log1p(-probability)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        # log(1 - p_z) in the form that is exact on either side of p_z = 1/2; where p_z^2 is negligible, -p_z.
        log_rest_S = np.where(log_p_S > -math.log(2), np.log(-np.expm1(log_p_S)), np.log1p(-np.exp(log_p_S)))
        exact_S = np.where(log_p_S < -40, np.exp(math.log(log_miss) - log_p_S), log_miss / -log_rest_S)
    result: Floats = np.maximum(1.0, np.ceil(exact_S * (1 - _ROUNDING)))
    return result


def sampled_extraction(table: TokenTable) -> dict[str, Any]:
    """Counts extractable secrets for each group of repetitions.

    There are three counts: ``inserted``, of the secrets in the training data; ``base``, of the same secrets by the model
    before training; ``held_out``, of the held-out candidates of the group and all references by the trained model.

    Returns:
        For each group ``canaries`` (how many there are), and for each scheme of ``SCHEMES`` ``discoverable`` (counts, by p and
        then by n), ``never`` (counts of p_z = 0) and ``median_attempts`` (n at p = 0.5 of the median secret, the upper one of
        two; None: never, or no secret).
    """
    index_of = {canary_id: index for index, canary_id in enumerate(table.canary_ids)}
    groups = by_group(sum_up(table))
    references = groups.pop(0, [])
    result: dict[str, Any] = {}
    for group, rows in groups.items():
        inside = np.array([index_of[row.canary_id] for row in members(rows)], dtype=np.int64)
        outside = np.array([index_of[row.canary_id] for row in [*held_out(rows), *references]], dtype=np.int64)
        sides: dict[str, tuple[Model, NDArray[np.int64]]] = {
            "inserted": ("tuned", inside),
            "base": ("base", inside),
            "held_out": ("tuned", outside),
        }
        result[str(group)] = {
            "canaries": {name: len(indices) for name, (_, indices) in sides.items()},
            **{
                scheme: _sampling({name: log_prob(table, model, scheme)[at] for name, (model, at) in sides.items()})
                for scheme in SCHEMES
            },
        }
    return result


def _sampling(log_p: dict[str, Floats]) -> dict[str, Any]:
    needed = {p: {name: attempts(values, p) for name, values in log_p.items()} for p in PROBABILITIES}
    return {
        "discoverable": {
            str(p): {str(n): {name: int((values <= n).sum()) for name, values in needed[p].items()} for n in ATTEMPTS}
            for p in PROBABILITIES
        },
        "never": {name: int(np.isneginf(values).sum()) for name, values in log_p.items()},
        "median_attempts": {name: _median(values) for name, values in needed[0.5].items()},
    }


def _median(values: Floats) -> float | None:
    middle = float(np.sort(values)[len(values) // 2]) if len(values) else math.inf
    return middle if math.isfinite(middle) else None
