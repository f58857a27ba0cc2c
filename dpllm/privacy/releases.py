"""Releases with delta 0: noisy statistics, with the epsilon from OpenDP's privacy map, and randomised labels.

Comes in: a statistic (declared values, no data), the maximum rows of a unit, an epsilon. Goes out: a ``Measurement``, which turns
the values of all rows into a release; or coins that flip labels, and their probability. OpenDP (extra ``stats``) draws all noise
of statistics, from the operating system's generator.

Guarantee:
    A release of a ``Measurement`` is (epsilon, 0)-differentially private, with the epsilon of its event, for any two lists of
    values that differ by removing at most ``rows`` values: a unit's rows replaced by nothing, or a unit added or removed.
    Distances, noise and privacy map are OpenDP's, which marks some of them "contrib": not every proof is vetted.

References:
    Ghosh, Roughgarden and Sundararajan 2012, "Universally Utility-Maximizing Privacy Mechanisms" (discrete Laplace). McKenna and
    Sheldon 2020, "Permute-and-Flip: A New Mechanism for Differentially Private Selection". Smith 2011, "Privacy-preserving
    Statistical Estimation with Optimal Convergence Rates" (the score of a quantile).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from dpllm.errors import ConfigError
from dpllm.privacy.events import PureDP

Below = Callable[[int], int]
"""A uniform integer from 0 to its argument, exclusive: ``secrets.randbelow``, or a seeded one in tests."""
MISSED = 0.05  # probability that a release errs by more than its ``error``
OTHER = "other"  # counts rows with a value that was not declared
Kind = Literal["units", "lengths", "quantiles", "shares"]
OPTIONS: dict[Kind, tuple[str, str, str]] = {
    "units": ("", "--units", "number of units with at least one row"),
    "lengths": (
        "CANDIDATES",
        "--lengths 64,128,256,512",
        "quantiles of token lengths, chosen from declared values: 64,128,256 or LOW:HIGH:PARTS",
    ),
    "quantiles": ("COLUMN=CANDIDATES", "--quantiles age=0:120:24", "the same for a column of numbers"),
    "shares": (
        "COLUMN=VALUE,VALUE;...",
        "--shares 'visit=home,clinic;age=old,young'",
        "how many rows have each declared value; with several columns, each combination",
    ),
}
"""Options of ``dpllm describe``: what each takes, an example, its help."""


@dataclass(frozen=True)
class Statistic:
    """One statistic, with its declared values."""

    kind: Kind
    column: str = ""  # of quantiles and shares; shares may have several, separated by ";"
    values: tuple[str, ...] = ()  # of shares
    numbers: tuple[float, ...] = ()  # candidates of a quantile, increasing
    quantile: float = 0.0

    @property
    def name(self) -> str:
        """The statistic in words; public."""
        if self.kind == "units":
            return "number of units"
        of = "token lengths" if self.kind == "lengths" else self.column
        return f"quantile {self.quantile:g} of {of}" if self.quantile else f"shares of {of}"

    def declared(self) -> dict[str, Any]:
        """The declared values, as JSON."""
        fields = {"values": list(self.values), "numbers": list(map(tidy, self.numbers)), "quantile": self.quantile}
        return {name: value for name, value in fields.items() if value}


def tidy(number: float) -> float:
    """A whole number as an int."""
    return int(number) if number.is_integer() else number


@dataclass(frozen=True)
class Measurement:
    """One release, before it is drawn."""

    asked: Statistic
    event: PureDP  # its cost, with OpenDP's epsilon
    mechanism: str  # its name in the literature
    error: float  # 95% error bound; depends only on declared values
    error_of: str  # unit of ``error``, in words
    measure: Any  # OpenDP's measurement

    def to_json(self) -> dict[str, Any]:
        """The record of the release before it is drawn."""
        return {
            "statistic": self.asked.name,
            "declared": self.asked.declared(),
            "mechanism": self.mechanism,
            "event": self.event,
            "error_95": self.error,
            "error_of": self.error_of,
        }

    def release(self, values: Iterable[Any]) -> dict[str, float]:
        """Draws the release once, from the exact values of all rows."""
        statistic, declared = self.asked, frozenset(self.asked.values)
        if statistic.numbers:
            return {f"{statistic.quantile:g}": tidy(draw(self.measure, list(values)))}
        # A row's text is not passed on, unless it was declared.
        noisy = draw(self.measure, [value if value in declared else OTHER for value in values])
        return dict(zip((*statistic.values, OTHER), noisy, strict=True)) if statistic.values else {"units": noisy}


def measurement(statistic: Statistic, rows: int, epsilon: float) -> Measurement:
    """The measurement of a statistic at cost at most `epsilon`, if a unit has at most ``rows`` rows.

    Raises:
        ConfigError: OpenDP is not installed, or has no noise for so small or large an epsilon.
    """
    try:
        from opendp.mod import OpenDPException, binary_search_param, enable_features
    except ImportError:
        raise ConfigError(
            "statistics need OpenDP for their noise, which is not installed. Type: pip install opendp"
        ) from None
    enable_features("contrib")
    rows = 1 if statistic.kind == "units" else rows
    try:
        make = _quantile(statistic) if statistic.numbers else _counted(statistic)
        measure = make(binary_search_param(make, rows, epsilon))  # with the least noise for epsilon
        cost = measure.map(rows)
        return Measurement(statistic, PureDP(cost), *accuracy_of(statistic, rows, cost), measure)
    except (OpenDPException, ValueError, OverflowError) as problem:
        raise ConfigError(
            f"{statistic.name}: OpenDP has no mechanism of epsilon {epsilon:g} for it ({type(problem).__name__}). Give it "
            "another share of epsilon, or declare other values."
        ) from None


def accuracy_of(statistic: Statistic, rows: int, epsilon: float) -> tuple[str, float, str]:
    """Mechanism, ``error`` and ``error_of`` of a release at cost `epsilon`; needs no OpenDP."""
    scale = (1 if statistic.kind == "units" else rows) / epsilon
    if statistic.values or statistic.kind == "units":
        # The noise exceeds this with probability MISSED; as OpenDP's discrete_laplacian_scale_to_accuracy.
        error = scale * math.log(2 / (MISSED * (math.exp(1 / scale) + 1))) + 1
        return "discrete Laplace", error, "rows in each count" if statistic.values else "units"
    # A candidate whose rank error exceeds the best one's by t rows wins only if its exponential noise exceeds t.
    rank = math.floor(10_000 * statistic.quantile) / 10_000  # as OpenDP 0.16 reads it
    error = 2 * max(rank, 1 - rank) * scale * math.log(len(statistic.numbers) / MISSED)
    return "permute-and-flip", error, "rows of rank"


def draw(measure: Any, values: list[Any]) -> Any:
    """Draws a release from exact values; the only place where this happens."""
    return measure(values)


def _counted(wanted: Statistic) -> Callable[[float], Any]:
    """A function from a noise scale to the measurement of a count, or of one count per value."""
    from opendp import domains, measurements, metrics, transformations

    space = domains.vector_domain(domains.atom_domain(T="String")), metrics.symmetric_distance()
    exact = transformations.make_count(*space, TO="i64")
    if wanted.values:
        exact = transformations.make_count_by_categories(*space, list(wanted.values), MO="L1Distance<i64>", TOA="i64")
    space = exact.output_domain, exact.output_metric
    return lambda scale: exact >> measurements.make_laplace(*space, scale=scale)


def _quantile(wanted: Statistic) -> Callable[[float], Any]:
    """A function from a noise scale to the measurement of a quantile."""
    from opendp import domains, measurements, measures, metrics

    space = domains.vector_domain(domains.atom_domain(T="f64", nan=False)), metrics.symmetric_distance()
    return partial(
        measurements.make_private_quantile, *space, measures.max_divergence(), list(wanted.numbers), wanted.quantile
    )


def flip_probability(epsilon: float) -> float:
    """The probability q = 1 / (1 + e^epsilon) with which a label is flipped."""
    return 1 / (1 + math.exp(epsilon))


def flipped(epsilon: float, below: Below = secrets.randbelow) -> bool:
    """Whether one label is flipped: True with probability 1 / (1 + e^epsilon), exactly.

    Args:
        epsilon: Cost of one label, > 0.
        below: From n to a uniform integer in 0..n-1; replace the operating system's only in tests.

    Guarantee:
        The output label is (epsilon, 0)-differentially private under a change of the input label: each output is at most
        e^epsilon times as likely from one input as from the other. Labels are flipped independently, so k labels of one annotator
        cost k epsilon. The rest of a row, its prompt and answers, is not protected.

    References:
        Warner 1965, "Randomized Response". Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy",
        algorithm 1 (the exact coin).
    """
    # A fair coin keeps the label; else it is flipped with probability e^-epsilon, or the draw starts again. So flips and keeps
    # occur in the ratio e^-epsilon to 1.
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
