"""Tests on the gradient canaries of a run: lower bounds on epsilon, the noise, and how often they were drawn.

Comes in: the projections on each canary of every released step and of the change in weights, and the coins. Goes out: a table,
which is published, and conclusions. Must not import torch, so that anyone can recompute them.

Shape suffixes: T steps, M canaries, I inserted ones, O the others.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

from dpllm.auditing import statistics
from dpllm.auditing.bounds import LARGEST_EPSILON, epsilon_lower_bound
from dpllm.auditing.statistics import Floats
from dpllm.errors import ConfigError
from dpllm.files import write_whole
from dpllm.privacy import banded
from dpllm.run.projections import BandedTurns
from dpllm.statement.audit_bounds import GradientAudit, WeightsAudit

SHARE_OF_ALPHA = 0.5
"""Share of the audit's alpha for all tests of gradient canaries together."""
SHARE_OF_WEIGHTS = 0.2
"""Share of the remaining alpha for the bound from the weights alone; the rest is for the bound from every step."""
SHARE_OF_MEASURES = 0.05
"""Shares of the audit's alpha for the test of the noise and for that of the draws: both are more powerful than the bound."""
CONFIDENCE = 0.95
LEAST_SPREAD, MOST_SPREAD, SMALLEST = 1e-6, 1e9, -800.0
"""For ``expected_epsilon``: noise in units of C below which it is the largest, above which it is 0; log of the probability
below which a number of draws is ignored."""
LEAST_NOISE, MOST_DRAWN = 0.9, 1.25
"""Multiples of what is planned: beyond these, noise and draws are called wrong. The margin is for later gradients, which
depend on what earlier steps released: where the loss is concave along a canary, they shorten differences and lengthen totals."""


@dataclass(frozen=True, eq=False)
class GradientTable:
    """One row for each gradient canary, from the observed steps.

    With banded noise, x_t below is the release times the matrix C, so that its noise is independent, and y_t what the b steps
    from t on show of a contribution to step t (``banded.matched``), only in turns of the canary's own group; else y_t = x_t.

    Attributes:
        inserted_M: The coins; True if inserted.
        score_M: Logarithm of the likelihood ratio of "joins with probability b q" against "never", summed over y.
        squares_M: Sum over disjoint pairs of neighbouring steps of (x_{t+1} - x_t)^2 / 2, x what was released along the canary
            over C: the square of the noise, without what the two steps have in common.
        total_M: Sum of y over steps: how often the canary was drawn, plus noise.
        steps: Number of observed steps.
        pairs: Number of disjoint pairs of neighbouring observed steps.
        sampling_rate: q of the Plan, in (0, 1].
        noise: Standard deviation of the Plan's noise over C, > 0; for banded noise, that of its fresh part.
        coefficients: c_0, ..., c_{b-1} of banded noise; none for independent noise.
        weights_M: Change of the weights against the canary, from before the first step to after the last; None: the table is
            from a version that did not record it.
    """

    inserted_M: NDArray[np.bool_]
    score_M: Floats
    squares_M: Floats
    total_M: Floats
    steps: int
    pairs: int
    sampling_rate: float
    noise: float
    coefficients: tuple[float, ...] = ()
    weights_M: Floats | None = None

    @property
    def bands(self) -> int:
        """b; 1 for independent noise."""
        return max(1, len(self.coefficients))


def tabulate(
    proj_TM: ArrayLike,
    coins: ArrayLike,
    sampling_rate: float,
    noise: float,
    turns: BandedTurns | None = None,
    weights_M: ArrayLike | None = None,
) -> GradientTable:
    """Computes the table of a run.

    Args:
        proj_TM: Projection of each release on each canary, over C; a step with a nan was not observed.
        coins: Shape (M,).
        sampling_rate: See ``GradientTable``.
        noise: See ``GradientTable``.
        turns: For banded noise. Releases of an attempt after an unobserved step are not used.
        weights_M: See ``GradientTable``.

    References:
        The score: Neyman and Pearson's for one step, summed as if steps were independent; their dependence costs power,
        not validity. The squares: von Neumann 1941, "Distribution of the Ratio of the Mean Square Successive Difference to
        the Variance".
    """
    proj_TM = np.asarray(proj_TM, dtype=np.float64)
    steps, bands = len(proj_TM), len(turns.coefficients) if turns else 1
    seen_T = np.isfinite(proj_TM).all(axis=1)
    starts = turns.starts if turns else range(steps)
    for part_T in np.split(seen_T, list(starts)[1:]):
        np.logical_and.accumulate(part_T, out=part_T)
    white_TM = shown_TM = proj_TM[seen_T]
    power_T, turn_TM = np.ones(len(white_TM)), np.ones_like(white_TM)
    if turns:
        begun = [int(seen_T[:start].sum()) for start in starts]
        white_TM = banded.whiten(turns.coefficients, white_TM, begun)
        shown_TM, power_T = banded.matched(turns.coefficients, white_TM, begun)
        turn_TM = (np.flatnonzero(seen_T)[:, None] % bands == turns.group_M).astype(float)
        proj_TM = proj_TM.copy()
        proj_TM[seen_T] = white_TM
    # Disjoint pairs make the squared differences independent; a slow drift of the gradients cancels in each.
    pairs = [step for step in range(0, len(seen_T) - 1, 2) if seen_T[step] and seen_T[step + 1]]
    differences = proj_TM[[step + 1 for step in pairs]] - proj_TM[pairs]
    return GradientTable(
        np.asarray(coins, dtype=bool),
        likelihood_ratio(turn_TM * (shown_TM - power_T[:, None] / 2) / noise**2, bands * sampling_rate),
        np.square(differences).sum(axis=0) / 2,
        (turn_TM * shown_TM / power_T[:, None]).sum(axis=0),
        len(white_TM),
        len(pairs),
        sampling_rate,
        noise,
        turns.coefficients if turns else (),
        None if weights_M is None else np.asarray(weights_M, dtype=np.float64),
    )


def likelihood_ratio(log_ratio_TM: Floats, sampling_rate: float) -> Floats:
    """Log-likelihood ratio of "joins each step with probability q" to "never joins", from that of "joined" for each step."""
    absent = math.log1p(-sampling_rate) if sampling_rate < 1 else -math.inf
    result: Floats = np.logaddexp(absent, math.log(sampling_rate) + log_ratio_TM).sum(axis=0)
    return result


def examine(table: GradientTable, *, delta: float, alpha: float) -> GradientAudit:
    """Bounds epsilon from the table and tests the noise and the sampling of the run.

    Guarantee:
        If the run kept its Plan, each of the two bounds exceeds epsilon with probability at most its part of
        ``SHARE_OF_ALPHA`` alpha: coins are fair, and vectors do not depend on data. Noise and draws are called wrong with at
        most their parts, if later gradients shorten differences by no more than a tenth, and lengthen totals by no more than a
        quarter. The noise is tested on canaries that were not inserted, one-sided: what gradients themselves add only makes
        differences longer, so differences shorter than chi-square allows mean that noise is missing or was used twice. The
        draws are tested by the difference of the mean totals of inserted and other canaries, one-sided, by Welch's test with
        variances no smaller than the Plan's.

    Args:
        table: The table of the run.
        delta: The claim's delta.
        alpha: The alpha of the whole audit.

    References:
        ``GradientCanaries``, ``epsilon_lower_bound``.
    """
    inside, level = table.inserted_M, SHARE_OF_MEASURES * alpha
    of_bound = SHARE_OF_ALPHA * alpha - 2 * level
    share = SHARE_OF_WEIGHTS * of_bound if table.weights_M is not None else 0.0
    of_bound -= share
    # Many inserted canaries were never drawn, so only the highest scores are guessed.
    reach = min(round(2 * math.sqrt(len(inside))), len(inside) // 2)
    bound = epsilon_lower_bound(table.score_M, inside, delta=delta, alpha=of_bound, falling_in=[reach] if reach else [])
    area = statistics.auc(table.score_M[inside], table.score_M[~inside], CONFIDENCE)
    square, degrees = float(table.squares_M[~inside].sum()), int((~inside).sum()) * table.pairs
    tails = np.array([(1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2])
    low, high = np.sqrt(square / stats.chi2.ppf(tails, degrees)) if degrees else (0.0, 0.0)
    draws, error, freedom = _drawn(table)
    expected = table.sampling_rate * table.steps
    noise_p = float(stats.chi2.cdf(square / (LEAST_NOISE * table.noise) ** 2, degrees)) if degrees else 1.0
    drawn_p = float(stats.t.sf((draws - MOST_DRAWN * expected) / error, freedom)) if error > 0 else 1.0
    return GradientAudit.pick(
        {
            "canaries": len(inside),
            "inserted": int(inside.sum()),
            "steps": table.steps,
            "epsilon_lower_bound": bound.value,
            "alpha": of_bound,
            "delta": delta,
            "ceiling": bound.ceiling,
            **statistics.estimate_fields("auc", area),
            "noise": math.sqrt(square / degrees) if degrees else None,
            "noise_interval": [float(low), float(high)] if degrees else None,
            "noise_planned": table.noise,
            "drawn": draws if error > 0 else None,
            "drawn_standard_error": error if error > 0 else None,
            "drawn_planned": expected,
            "noise_refuted": noise_p < level,
            "drawn_refuted": drawn_p < level,
            **({"weights": weights} if (weights := _of_weights(table, delta, share)) else {}),
        }
    )


def _of_weights(table: GradientTable, delta: float, alpha: float) -> WeightsAudit | None:
    """The lower bound from the first and last weights, with the epsilon that they are expected to show."""
    if table.weights_M is None:
        return None
    inside, reach = table.inserted_M, min(round(4 * math.sqrt(len(table.inserted_M))), len(table.inserted_M))
    bound = epsilon_lower_bound(table.weights_M, inside, delta=delta, alpha=alpha, falling=[reach])
    area = statistics.auc(table.weights_M[inside], table.weights_M[~inside], CONFIDENCE)
    return WeightsAudit.pick(
        {
            "epsilon_lower_bound": bound.value,
            "alpha": alpha,
            "ceiling": bound.ceiling,
            **statistics.estimate_fields("auc", area),
            "expected_epsilon": expected_epsilon(table, delta),
        }
    )


def expected_epsilon(table: GradientTable, delta: float) -> float:
    """Epsilon of the sum of all releases alone: an estimate of what the final weights show, not a bound.

    The weights are taken to be that sum: N(0, s^2) against Binomial(T, q) + N(0, s^2), in units of C, where s^2 is the variance
    of the noise of all steps together. With banded noise a unit has T / b turns, each with probability b q.

    References:
        Steinke et al. 2024, "The Last Iterate Advantage" (2410.06186), a heuristic that contrived losses exceed.
    """
    turns, rate = table.steps // table.bands, min(1.0, table.bands * table.sampling_rate)
    if not turns:
        return 0.0
    coefficients = table.coefficients or (1.0,)
    spread = table.noise * float(np.linalg.norm(np.cumsum(banded.inverse(coefficients, table.steps))))
    if not LEAST_SPREAD < spread < MOST_SPREAD:
        return 0.0 if spread >= MOST_SPREAD else LARGEST_EPSILON
    count_K = np.arange(turns + 1.0)
    weight_K = stats.binom.logpmf(count_K, turns, rate)
    count_K, weight_K = count_K[weight_K > SMALLEST], weight_K[weight_K > SMALLEST]

    def log_ratio(x: float) -> float:
        return float(special.logsumexp(weight_K + (count_K * x - count_K**2 / 2) / spread**2))

    def above(epsilon: float) -> float:
        """The larger of the two directions' deltas at epsilon, minus ``delta``."""
        reach = 40 * spread + turns
        ends = log_ratio(-reach), log_ratio(reach)
        joined = absent = 0.0
        if epsilon < ends[1]:
            x = optimize.brentq(lambda x: log_ratio(x) - epsilon, -reach, reach) if epsilon > ends[0] else -reach
            tails_K = np.exp(weight_K) * stats.norm.sf((x - count_K) / spread)
            joined = float(tails_K.sum()) - math.exp(epsilon) * float(stats.norm.sf(x / spread))
        if -epsilon > ends[0]:
            x = optimize.brentq(lambda x: log_ratio(x) + epsilon, -reach, reach)
            tails_K = np.exp(weight_K) * stats.norm.cdf((x - count_K) / spread)
            absent = float(stats.norm.cdf(x / spread)) - math.exp(epsilon) * float(tails_K.sum())
        return max(joined, absent) - delta

    if above(0.0) <= 0:
        return 0.0
    if above(LARGEST_EPSILON) >= 0:
        return LARGEST_EPSILON
    return float(optimize.brentq(above, 0.0, LARGEST_EPSILON, xtol=1e-9))


def seen(table: GradientTable, level: float) -> str:
    """Where the attack on gradient canaries worked at this significance level, in words; empty: it did not work."""
    inside, outside = table.score_M[table.inserted_M], table.score_M[~table.inserted_M]
    p_value, area = statistics.rank_sum_p_value(inside, outside), statistics.auc(inside, outside)
    if area is None or p_value is None or not p_value < level:
        return ""
    return f"AUC {area.value:.2f} on the gradient canaries, for whoever saw every step; of the weights alone it was seen nowhere"


def _drawn(table: GradientTable) -> tuple[float, float, float]:
    """Estimated draws of an inserted canary, its standard error and degrees of freedom; zeros if nothing can be estimated."""
    total_I, total_O = table.total_M[table.inserted_M], table.total_M[~table.inserted_M]
    if min(len(total_I), len(total_O)) < 2 or not table.steps:
        return 0.0, 0.0, 0.0
    turns, rate = table.steps / table.bands, table.bands * table.sampling_rate
    noise, draws = turns * table.noise**2, turns * rate * (1 - rate)
    square_I = max(float(total_I.var(ddof=1)), noise + draws) / len(total_I)
    square_O = max(float(total_O.var(ddof=1)), noise) / len(total_O)
    square = square_I + square_O
    freedom = square**2 / (square_I**2 / (len(total_I) - 1) + square_O**2 / (len(total_O) - 1))
    return float(total_I.mean() - total_O.mean()), math.sqrt(square), freedom


_ARRAYS = {"inserted": "inserted_M", "score": "score_M", "squares": "squares_M", "total": "total_M"}
COLUMNS = {*_ARRAYS, "steps", "pairs"}
"""Columns of gradient.parquet: fields of ``GradientTable``."""
OPTIONAL = ("weights",)
"""Columns that exist only if the weights before the first step were kept."""


def write_gradient(table: GradientTable, path: Path) -> None:
    """Writes the table atomically; floats read back exactly."""
    import pyarrow
    from pyarrow import parquet

    rows = len(table.inserted_M)
    columns = {name: getattr(table, attribute) for name, attribute in _ARRAYS.items()}
    columns |= {} if table.weights_M is None else {"weights": table.weights_M}
    columns |= {name: np.full(rows, getattr(table, name), dtype=np.int64) for name in ("steps", "pairs")}
    content = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), content)
    write_whole(path, content.getvalue())


def read_gradient(
    path: Path, sampling_rate: float, noise: float, coefficients: tuple[float, ...] = ()
) -> GradientTable:
    """Reads what ``write_gradient`` wrote for a run with this q, this noise and these coefficients of banded noise.

    Raises:
        ConfigError: The file is missing, damaged or not a table of gradient canaries.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with open(path, "rb") as file:  # pyarrow cannot open a path that is not UTF-8
            read = parquet.read_table(file, use_threads=False)
        if not COLUMNS <= set(read.column_names) <= {*COLUMNS, *OPTIONAL} or not read.num_rows:
            raise ValueError("other columns")
        floats = [*list(_ARRAYS)[1:], *(name for name in OPTIONAL if name in read.column_names)]
        score_M, squares_M, total_M, *weights = (read[name].cast(pyarrow.float64()).to_numpy() for name in floats)
        if not all(np.isfinite(column).all() for column in (score_M, squares_M, total_M, *weights)):
            raise ValueError("no number")
        if (squares_M < 0).any():
            raise ValueError("no square")
        if any(column.null_count for column in read.columns) or not pyarrow.types.is_boolean(read["inserted"].type):
            raise ValueError("no coin")
        inserted_M = read["inserted"].to_numpy(zero_copy_only=False)
        counted = [read[name].cast(pyarrow.int64()).unique().to_pylist() for name in ("steps", "pairs")]
        ((steps,), (pairs,)) = counted  # the same in every row
        numbers = steps, pairs, sampling_rate, noise, coefficients
        return GradientTable(inserted_M, score_M, squares_M, total_M, *numbers, *weights)
    except (OSError, pyarrow.ArrowException, KeyError, IndexError, ValueError, TypeError):
        raise ConfigError(f"{path}: is missing, or not a table of gradient canaries. Run dpllm audit again.") from None
