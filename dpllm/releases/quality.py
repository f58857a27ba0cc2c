"""Quality and leakage of a synthetic data set: figures that may be published, and figures that stay private.

Comes in: synthetic rows, and a ``Comparison``, which ``of_run`` makes for the model of a run. Goes out: ``Quality``, a function
of those rows, released statistics and data that are declared public; JSON for a private folder. Must not know how rows are
written.

A figure is public if everything that it reads besides the synthetic rows is declared public.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from dpllm.card.synthetic import Quality, public_sides, reads
from dpllm.errors import DpllmError
from dpllm.files import write_json
from dpllm.privacy.releases import Statistic
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.recipe.names import public_name
from dpllm.releases.asked import exact_values
from dpllm.releases.leaks import MOST_ROWS, WORDS, grams, spread, text_of, words
from dpllm.run.directory import RunDir
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import Statistics
from dpllm.text import layouts
from dpllm.text.data import Table, each_row, value_name
from dpllm.text.layouts import FIELDS, Format, Row
from dpllm.text.prompts import read_same

Figures = dict[str, float | None]
Tell = Callable[[str], None]
"""Called with each message about a figure that could not be measured."""
SYNTHETIC, TRAINING, EVALUATION = "synthetic", "training", "evaluation"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LEARNED = 5000
"""Maximum number of rows from which a classifier learns."""
MOST_CODES = 200
"""Number of the most common codes of a side whose shares are shown: verify refuses a record with thousands of them."""
FOLDER = "synthetic-quality"
"""Folder in private/."""


@dataclass(frozen=True)
class Side:
    """Rows of one kind: texts, numbers of tokens as in training, and values of control columns."""

    texts: list[str]
    lengths: list[float]
    labels: dict[str, list[str]]


@dataclass(frozen=True)
class Comparison:
    """Data with which synthetic rows are compared.

    Attributes:
        data: The recipe's data section.
        tokenizer: Counts tokens.
        declared: Sides that may be published, with the names of ``synthetic.declared_sides``.
        released: Statistics that were released.
        tables: Side -> real rows, if they are available.
        missing: Messages about unavailable rows, with the reason; ``read`` adds to them.
    """

    data: DataConfig
    tokenizer: Any
    declared: set[str]
    released: Statistics | None
    tables: dict[str, Table] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def read(self, side: str, load: Callable[[], Table]) -> None:
        """Reads the rows of a side, or stores the reason for the failure in ``missing``."""
        try:
            self.tables[side] = load()
        except (DpllmError, OSError) as error:
            self.missing.append(f"{side} rows: {error}")


def report(rows: Sequence[dict[str, str]], comparison: Comparison, folder: Path, tell: Tell) -> Quality:
    """Runs ``measure``, and writes all figures, private ones too, to quality.json in a private folder."""
    public, private = measure(rows, comparison)
    write_json(folder / "quality.json", {"public": public.to_json(), **private}, mode=0o600)
    for line in private["not_measured"]:
        tell(line)
    return public


def of_run(run: RunDir, config: RunConfig, statement: PrivacyRecord) -> Comparison:
    """The comparison for rows of a run's model: the run's data, if they are available.

    A side is declared public only if both the recipe and the privacy statement declare it.
    """
    from transformers import AutoTokenizer

    declared = public_sides(statement) - ({EVALUATION} if not config.data.eval_public else set())
    tokenizer = AutoTokenizer.from_pretrained(run.export, trust_remote_code=False)
    comparison = Comparison(config.data, tokenizer, declared, statement.statistics)
    comparison.read(TRAINING, lambda: read_same(run.rows, config.data, "training", run.private / "cache"))
    comparison.read(EVALUATION, lambda: read_same(run.rows, config.data, "evaluation", run.private / "cache"))
    return comparison


def public_shares(run: RunDir, data: DataConfig) -> dict[tuple[str, ...], float]:
    """Counts of each combination of control values in training rows, which the caller knows to be public."""
    table = read_same(run.rows, data, "training", run.private / "cache")
    return dict(Counter(tuple(value_name(row.codes.get(column)) for column in data.control) for row in table.rows))


def measure(rows: Sequence[dict[str, str]], comparison: Comparison) -> tuple[Quality, dict[str, Any]]:
    """Measures synthetic rows.

    Args:
        rows: Rows with the columns of the format and those of data.control.
        comparison: The data to compare with.

    Returns:
        The publishable part; and the private part: ``figures`` by name, and ``not_measured``, messages about data that are
        missing or cannot be read, which change no other figure.

    Guarantee:
        The first part is a function of ``rows``, ``comparison.released``, the recipe and the tokenizer; and of real rows only if
        ``comparison.declared`` has their side.
    """
    data = comparison.data
    fmt: Format = next((fmt for fmt, fields in FIELDS.items() if rows and {*fields} <= rows[0].keys()), "text")
    coded = []
    for row in rows:  # as load_table makes rows
        values = [value_name(row.get(column)) for column in data.control]
        coded.append(Row(row, codes=row, line=layouts.code_line(data.control, values) if data.control else ""))
    tables = {SYNTHETIC: Table("the synthetic rows", coded, fmt), **comparison.tables}
    sides = {name: _side(table, data, comparison.tokenizer) for name, table in tables.items()}
    figures = _released(comparison.released, data.control) | _repeated(sides)
    for name, side in sides.items():
        figures |= _described(name, side)
    for column in data.control:
        figures |= _learned(sides, column)
    public = {name: value for name, value in figures.items() if reads(name) <= comparison.declared}
    private = {name: value for name, value in figures.items() if name not in public}
    sources = {TRAINING: data.train, EVALUATION: data.eval}
    sources_read = [
        public_name(source) for name, source in sources.items() if source and name in sides.keys() & comparison.declared
    ]
    quality = Quality(figures=public, evaluation=", ".join(sources_read) or None)
    return quality, {"figures": private, "not_measured": comparison.missing}


def _side(table: Table, data: DataConfig, tokenizer: Any) -> Side:
    rows = [table.rows[number] for number in spread(len(table.rows), MOST_ROWS)]
    lengths = list(exact_values(Statistic("lengths"), each_row(rows), table, data, tokenizer))
    labels = {column: [value_name(row.codes.get(column)) for row in rows] for column in data.control}
    return Side([text_of(row.parts, table.format) for row in rows], lengths, labels)


def _released(released: Statistics | None, columns: Sequence[str]) -> Figures:
    figures: Figures = {}
    for release in released.releases if released else ():
        if release.value and release.declared.quantile and release.statistic.endswith(" of token lengths"):
            figures[f"tokens, quantile {release.declared.quantile:g}: released"] = next(iter(release.value.values()))
        elif release.value and columns and release.statistic == layouts.shares_of(columns):
            total = max(1, sum(max(0, count) for count in release.value.values()))
            common = Counter(release.value).most_common(MOST_CODES)
            figures |= {f"share of {value}: released": max(0, count) / total for value, count in common}
    return figures


def _described(name: str, side: Side) -> Figures:
    figures: Figures = {f"rows: {name}": len(side.texts)}
    for q in QUANTILES:
        figures[f"tokens, quantile {q:g}: {name}"] = float(np.quantile(side.lengths, q)) if side.lengths else None
    codes = Counter(map(layouts.SEPARATOR.join, zip(*side.labels.values(), strict=True)))
    return figures | {
        f"share of {code}: {name}": count / codes.total() for code, count in codes.most_common(MOST_CODES)
    }


def _learned(sides: Mapping[str, Side], column: str) -> Figures:
    """Train on synthetic, test on real (TSTR); train on as many real rows (TRTR); predict the most common value."""
    synthetic, train, evaluation = (sides.get(name) for name in (SYNTHETIC, TRAINING, EVALUATION))
    if synthetic is None or evaluation is None:
        return {}
    truth = evaluation.labels[column]
    majority = [max(sorted(set(truth)), key=truth.count, default="")] * len(truth)
    figures = _accuracy(f"{column} by the commonest value", majority, truth)
    figures |= _accuracy(f"{column} by TSTR", _predict(synthetic, column, len(synthetic.texts), evaluation), truth)
    if train:
        figures |= _accuracy(f"{column} by TRTR", _predict(train, column, len(synthetic.texts), evaluation), truth)
    return figures


def _predict(learned: Side, column: str, max_words: int, test: Side) -> list[str] | None:
    """Predictions of logistic regression on TF-IDF of words and word pairs, from at most ``max_words`` rows; None: no rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    numbers = spread(len(learned.texts), min(max_words, LEARNED))
    texts, labels = ([side[number] for number in numbers] for side in (learned.texts, learned.labels[column]))
    if len(set(labels)) < 2 or not test.texts:
        return [labels[0]] * len(test.texts) if labels else None
    # Every text has the empty feature (): without any feature there would be an error.
    features = TfidfVectorizer(analyzer=lambda text: {(), *grams(words(text), 1), *grams(words(text), 2)})
    model = make_pipeline(features, LogisticRegression(max_iter=1000)).fit(texts, labels)
    return list(map(str, model.predict(test.texts)))


def _accuracy(name: str, predicted: Sequence[str] | None, truth: Sequence[str]) -> Figures:
    """Accuracy with 95% limits by Clopper and Pearson."""
    if not predicted or not truth:
        return {f"{name}: accuracy": None}
    correct, total = sum(map(operator.eq, predicted, truth)), len(truth)
    return {
        f"{name}: accuracy": correct / total,
        f"{name}: accuracy, low": 1 - _upper_percent(total - correct, correct),
        f"{name}: accuracy, high": _upper_percent(correct, total - correct),
    }


def _upper_percent(events: int, non_events: int) -> float:
    return float(special.betaincinv(events + 1, non_events, 0.975)) if non_events else 1.0


def _repeated(sides: Mapping[str, Side]) -> Figures:
    """Shares of synthetic rows that repeat words of real rows; an equal number of held-out rows is the control."""
    figures: Figures = {}
    of_rows = [grams(words(text), WORDS) for text in sides[SYNTHETIC].texts]
    real = {f"any {name} row": sides[name].texts for name in (EVALUATION, TRAINING) if name in sides}
    if len(real) == 2:
        train, evaluation = sides[TRAINING].texts, sides[EVALUATION].texts
        real["equally many training rows"] = [train[number] for number in spread(len(train), len(evaluation))]
    for name, texts in real.items():
        runs = {run for text in texts for run in grams(words(text), WORDS)}
        repeats = sum(not runs.isdisjoint(row_grams) for row_grams in of_rows)
        figures[f"with {WORDS} words of {name}"] = repeats / len(of_rows) if of_rows else None
    return figures
