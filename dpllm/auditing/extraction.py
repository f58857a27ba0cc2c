"""Extraction: whether, and after how many samples, a model gives a planted secret away.

Comes in: the token table and the score table. Goes out: counts for every group beside their controls: the same secrets by the
base model, and secrets that nobody trained on. Everything follows from probabilities: nothing is generated. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.auditing import attacks
from dpllm.auditing.statistics import Floats
from dpllm.auditing.table import CanaryScores, TokenTable, by_group

# A legend of shapes: S sequences.

Model = Literal["tuned", "base"]
Scheme = Literal["all_tokens", "top_k"]
"""Sampling at temperature 1, from the whole vocabulary or from the ``table.TOP_K`` likeliest tokens."""

SCHEMES: tuple[Scheme, ...] = ("all_tokens", "top_k")
ATTEMPTS = (1, 10, 100, 1000, 10_000)
"""n: numbers of samples that an attacker may draw."""
PROBABILITIES = (0.1, 0.5, 0.9)
"""p: with which probability one of them is the secret."""
_ROUNDING = 1e-12  # share of n that float64 cannot tell: 1 - (1 - 1/2)^1 >= 1/2 must not come out as n = 2


def log_prob(table: TokenTable, model: Model, scheme: Scheme = "all_tokens") -> Floats:
    """Shape (S,): log p_z in nats, of drawing exactly the scored tokens in one sample; -inf where it cannot be drawn."""
    column = {"all_tokens": "log_prob", "top_k": "top_k_log_prob"}[scheme]
    # Rounding can lift a certain token's log-probability above 0.
    result: Floats = np.minimum(table.sums(getattr(table, f"{model}_{column}_N")), 0.0)
    return result


def attempts(log_p: ArrayLike, probability: float) -> Floats:
    """The smallest number of samples n of which one is the secret with the given probability.

    That is the smallest n with 1 - (1 - p_z)^n >= p. Computed with logarithms, so that it is as exact for a p_z of
    1e-300 as for one of 1 - 1e-16.

    Args:
        log_p: log p_z in nats, at most 0, of any shape; -inf: never drawn.
        probability: p, strictly between 0 and 1.

    Returns:
        Whole numbers >= 1 of the same shape; inf where p_z is 0 or n is above the largest float64.

    Raises:
        ValueError: A value is out of range.

    References:
        Hayes et al. 2024 (arXiv 2410.19482), (n, p)-discoverable extraction.
    """
    log_p_S = np.asarray(log_p, dtype=np.float64)
    if not 0 < probability < 1 or np.isnan(log_p_S).any() or (log_p_S > 1e-6).any():
        raise ValueError(f"attempts needs log p_z <= 0 and 0 < p < 1, got p = {probability}")
    log_p_S = np.minimum(log_p_S, 0.0)
    wanted = -math.log1p(-probability)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        # log(1 - p_z) in the form that is exact on either side of p_z = 1/2; where p_z^2 vanishes beside it, -p_z.
        log_rest_S = np.where(log_p_S > -math.log(2), np.log(-np.expm1(log_p_S)), np.log1p(-np.exp(log_p_S)))
        exact_S = np.where(log_p_S < -40, np.exp(math.log(wanted) - log_p_S), wanted / -log_rest_S)
    result: Floats = np.maximum(1.0, np.ceil(exact_S * (1 - _ROUNDING)))
    return result


def summary(table: TokenTable, scores: Iterable[CanaryScores]) -> dict[str, Any]:
    """How much can be extracted, for each group of repetitions.

    Three counts stand side by side: ``inserted``, of the secrets that were trained on; ``base``, of the same ones by the
    model before training; ``held_out``, of the held-out candidates of the group and all references by the trained model.

    Returns:
        For each group ``canaries`` (how many there are), and for each scheme of ``SCHEMES`` ``discoverable`` (counts, by p and
        then by n), ``never`` (counts of p_z = 0) and ``median_attempts`` (n at p = 0.5 of the median secret, the upper one of
        two; None: never, or no secret).
    """
    place = {canary_id: index for index, canary_id in enumerate(table.canary_ids)}
    groups = by_group(scores)
    references = groups.pop(0, [])
    result: dict[str, Any] = {}
    for group, rows in groups.items():
        inside = np.array([place[row.canary_id] for row in attacks.members(rows)], dtype=np.int64)
        outside = np.array([place[row.canary_id] for row in [*attacks.held_out(rows), *references]], dtype=np.int64)
        sides: dict[str, tuple[Model, NDArray[np.int64]]] = {
            "inserted": ("tuned", inside),
            "base": ("base", inside),
            "held_out": ("tuned", outside),
        }
        result[str(group)] = {
            "canaries": {name: len(own) for name, (_, own) in sides.items()},
            **{
                scheme: _sampling({name: log_prob(table, model, scheme)[own] for name, (model, own) in sides.items()})
                for scheme in SCHEMES
            },
        }
    return result


def _sampling(log_p: dict[str, Floats]) -> dict[str, Any]:
    """Counts of one sampling scheme, for each side."""
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
