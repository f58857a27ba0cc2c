"""How good a synthetic data set is and what it gives away: figures that may be published, and figures that stay private.

Comes in: rows that were written, and what they are measured ``Beside``, which ``of_run`` finds for the model of a run. Goes out:
``Quality``, a function of those rows, released statistics and data that are declared public; JSON for a private folder. Must not
know how rows are written.

A figure is public where all that it reads beside the synthetic rows is declared public.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.auditing.rates import upper_limit
from dpllm.card.dataset_card import public_sides, reads
from dpllm.errors import DataError, DpllmError
from dpllm.files import read_json, write_json
from dpllm.model import loading
from dpllm.privacy.releases import Statistic
from dpllm.publish.filters import find_details
from dpllm.publish.leaks import MOST_ROWS, WORDS, grams, spread, text_of, words
from dpllm.recipe.config import DataConfig, ModelConfig, RunConfig
from dpllm.recipe.names import public_name
from dpllm.run.directory import RunDir
from dpllm.run.embeddings import Applied
from dpllm.statement.fields import Json
from dpllm.statement.formatting import bound
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import Statistics
from dpllm.statement.synthetic import Quality
from dpllm.text import control
from dpllm.text.asked import exact_values
from dpllm.text.data import Table, load_table, value_name
from dpllm.text.layouts import FIELDS, Format
from dpllm.text.rows import each_row
from dpllm.text.sources import is_here

# A legend of shapes: R resamples, E evaluation rows, K classes, T texts, D numbers of an embedding.

Figures = dict[str, float | None]
Floats = NDArray[np.float64]
Measure = Callable[[Sequence[dict[str, str]], "Beside", Path], Quality]
"""Called with rows before they are published, what they are measured beside, and a folder for what stays private."""
SYNTHETIC, TRAINING, EVALUATION = "synthetic", "training", "evaluation"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
RESAMPLES = 1000
LEARNED = 5000
"""A classifier learns from at most so many rows."""
MOST_CODES = 200
"""So many of the commonest codes of a side have their share shown: with thousands a record would be one that verify refuses."""
FOLDER = "synthetic-quality"
"""In private/, beside the rows of a run without guarantee."""


@dataclass(frozen=True)
class Side:
    """Rows of one kind: texts, tokens of each text as training counts them, and the values of its control columns."""

    texts: list[str]
    lengths: list[float]
    labels: dict[str, list[str]]


@dataclass(frozen=True)
class Beside:
    """What rows are measured beside.

    Attributes:
        data: The recipe's data section.
        tokenizer: Counts tokens.
        declared: Sides that may be published, as ``dataset_card.declared_sides`` names them.
        released: Statistics that were released.
        tables: Real rows by side, as far as they are here.
        missing: What is not here, and why; more is added while measuring.
    """

    data: DataConfig
    tokenizer: Any
    declared: set[str]
    released: Statistics | None
    tables: dict[str, Table] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def read(self, side: str, cache: Path, kept: Json | None = None) -> None:
        """Reads the rows of a side, those that were ``kept`` if somebody noted them; or says why it does not."""
        data, training = self.data, side == TRAINING
        source, split = (data.train, data.train_split) if training else (data.eval, data.eval_split)
        with _told(f"{side} rows", self.missing):
            places = kept["places"] if kept else source
            if not (source and places) or (kept and not is_here(places)):
                raise DataError("not at hand" if source else "the recipe names none")
            table = load_table(places, data, split, cache)
            if kept and table.digest != kept["digest"]:  # another file of that name, whose rows nobody declared public
                raise DataError("the data are not those of the run")
            self.tables[side] = table


def writer(
    embedding: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
    baseline: str | os.PathLike[str] | None = None,
    encoder: str | None = None,
) -> Measure:
    """``measure``, once it is sure that there is such an embedding and baseline, a folder whose encoder may lie elsewhere.

    ``tell`` is called with what could not be measured.

    What is private goes to quality.json in the folder that it is called with.
    """
    if embedding is not None:
        loading.load_tokenizer(ModelConfig(name_or_path=embedding))
    applied = Applied(Path(baseline), encoder) if baseline else None

    def write(rows: Sequence[dict[str, str]], beside: Beside, folder: Path) -> Quality:
        public, private = measure(rows, beside, embedding=embedding, baseline=applied)
        missing = private["not_measured"]
        try:
            write_json(folder / "quality.json", {"public": public.to_json(), **private}, mode=0o600)
        except OSError as error:
            missing = [*missing, f"private figures: {folder} cannot be written ({error.strerror})"]
        for line in missing:
            tell(line)
        return public

    return write


def of_run(run: RunDir, config: RunConfig, statement: PrivacyRecord) -> Beside:
    """What rows are measured beside that the model of a run wrote: its data, as far as they are here.

    Declared public is what both the recipe and its privacy statement say to be.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.export)
    declared = public_sides(statement) - ({EVALUATION} if not config.data.eval_public else set())

    found = Beside(config.data, tokenizer, declared, statement.statistics)
    for side in (TRAINING, EVALUATION):
        with _told(f"{side} rows", found.missing):
            kept = read_json(run.rows).get(side) if run.rows.exists() else None
            found.read(side, run.private / "cache", kept or {"places": None})
    return found


def measure(
    rows: Sequence[dict[str, str]], beside: Beside, *, embedding: str | None = None, baseline: Applied | None = None
) -> tuple[Quality, dict[str, Any]]:
    """Measures rows that were written.

    Args:
        rows: With the columns of the format and those of data.control.
        beside: What else is read.
        embedding: A transformers model, by name or path, whose mean-pooled last states are compared; None: none.
        baseline: A released classifier of a control column, which shows what is known without any text; None: none.

    Returns:
        What may be published, and what may not: ``figures`` by name, and ``not_measured``, which says what is not at hand or
        cannot be read, and changes no figure that does not read it.

    Guarantee:
        The first part is a function of ``rows``, ``beside.released``, ``baseline``, the recipe and the tokenizer; and of real
        rows only where ``beside.declared`` has their side.
    """
    data, missing = beside.data, [*beside.missing]
    fmt: Format = next((fmt for fmt, fields in FIELDS.items() if rows and {*fields} <= rows[0].keys()), "text")
    codes = [[value_name(row.get(column)) for column in data.control] for row in rows]
    lines = [{control.LINE: control.line(data.control, values)} if data.control else {} for values in codes]
    coded = [{**row, **line} for row, line in zip(rows, lines, strict=True)]  # as load_table makes them
    tables = {SYNTHETIC: Table("the synthetic rows", coded, fmt), **beside.tables}
    sides = {name: _side(table, data, beside.tokenizer) for name, table in tables.items()}
    figures = _released(beside.released, data.control) | _replayed(sides)
    parts = [_described(*one, len(rows)) for one in sides.items()]
    for part in parts + [_labels(sides, one) for one in data.control]:
        figures |= part
    with _told(f"Frechet distance by {embedding}", missing):
        figures |= _embedded(sides, embedding) if embedding else {}
    with _told("the classifier without any text", missing):
        figures |= _without_text(baseline, beside, sides) if baseline else {}
    public = {name: value for name, value in figures.items() if reads(name) <= beside.declared}
    private = {name: value for name, value in figures.items() if name not in public}
    sources = {TRAINING: data.train, EVALUATION: data.eval}
    used = [
        public_name(source) for name, source in sources.items() if source and name in sides.keys() & beside.declared
    ]
    quality = Quality(figures=public, evaluation=", ".join(used) or None)
    return quality, {"figures": private, "not_measured": missing}


@contextlib.contextmanager
def _told(what: str, missing: list[str]) -> Iterator[None]:
    """Adds to ``missing`` why ``what`` could not be measured."""
    try:
        yield
    except (DpllmError, OSError) as error:
        missing.append(f"{what}: {error}")


def _side(table: Table, data: DataConfig, tokenizer: Any) -> Side:
    rows = [table.rows[number] for number in spread(len(table.rows), MOST_ROWS)]

    def values(asked: Statistic) -> list[Any]:
        return list(exact_values(asked, each_row(rows), table, data, tokenizer))

    labels = {column: values(Statistic("shares", column)) for column in data.control}
    return Side([text_of(row, table.format) for row in rows], values(Statistic("lengths")), labels)


# --- the rows themselves ---------------------------------------------------------------------------------------------


def _released(released: Statistics | None, columns: Sequence[str]) -> Figures:
    found: Figures = {}
    for one in released.releases if released else ():
        if one.value and one.declared.quantile and one.statistic.endswith(" of token lengths"):
            found[f"tokens, quantile {one.declared.quantile:g}: released"] = next(iter(one.value.values()))
        elif one.value and columns and one.statistic == control.shares_of(columns):
            total = max(1, sum(max(0, count) for count in one.value.values()))
            often = Counter(one.value).most_common(MOST_CODES)
            found |= {f"share of {value}: released": max(0, count) / total for value, count in often}
    return found


def _described(name: str, side: Side, most: int) -> Figures:
    """Lengths, codes and repetition; the latter of as many rows as there are synthetic ones, since it grows with their number."""
    found: Figures = {f"rows: {name}": len(side.texts)}
    for q in QUANTILES:
        found[f"tokens, quantile {q:g}: {name}"] = float(np.quantile(side.lengths, q)) if side.lengths else None
    codes = Counter(map(control.SEPARATOR.join, zip(*side.labels.values(), strict=True)))
    found |= {f"share of {code}: {name}": count / codes.total() for code, count in codes.most_common(MOST_CODES)}
    texts = [side.texts[number] for number in spread(len(side.texts), most)]
    own = [words(text) for text in texts]
    for n in (1, 2, 3):
        runs = [tuple(row[start : start + n]) for row in own for start in range(len(row) - n + 1)]
        found[f"distinct {n}-grams: {name}"] = len(set(runs)) / len(runs) if runs else None
    found[f"exact duplicates: {name}"] = 1 - len(set(texts)) / len(texts) if texts else None
    return found


# --- a label learned from synthetic text -----------------------------------------------------------------------------


def _labels(sides: Mapping[str, Side], column: str) -> Figures:
    """Train on synthetic, test on real; the same from as many real rows (or all); and whether texts have the codes asked for."""
    made, train, held = (sides.get(name) for name in (SYNTHETIC, TRAINING, EVALUATION))
    assert made is not None
    found: Figures = {}
    if held:
        truth = held.labels[column]
        usual = [max(sorted(set(truth)), key=truth.count, default="")] * len(truth)
        found |= _scored(f"{column} by the commonest value", usual, truth)
        found |= _scored(f"{column} by TSTR", _predict(made, column, len(made.texts), held), truth)
    if train:
        found |= _scored(f"{column} as asked", _predict(train, column, LEARNED, made), made.labels[column])
    if train and held:
        real = {f"{column} by TRTR": len(made.texts), f"{column} by TRTR, all rows": LEARNED}
        for name, most in real.items():
            found[f"{name}: rows"] = float(min(most, LEARNED, len(train.texts)))
            found |= _scored(name, _predict(train, column, most, held), truth)
    return found


def _without_text(baseline: Applied, beside: Beside, sides: Mapping[str, Side]) -> Figures:
    """What a classifier that was released before finds on the rows of TSTR: what rows have to beat."""
    column, found = baseline.release.statistic.removeprefix("classifier of "), baseline.statistics
    held = sides.get(EVALUATION)
    if held is None or column not in held.labels:
        raise DataError(f"there are no evaluation rows, or {column} is no column of data.control")
    table = beside.tables[EVALUATION]
    rows = each_row([table.rows[number] for number in spread(len(table.rows), MOST_ROWS)])
    said = [label or "" for label in baseline.labels(rows, FIELDS[table.format])]
    cost = f"epsilon {bound(found.epsilon)} and delta {found.delta:g}"
    return _scored(f"{column} by a classifier of {cost} per {found.unit}, without any text", said, held.labels[column])


def _predict(learned: Side, column: str, most: int, asked: Side) -> list[str] | None:
    """What logistic regression on TF-IDF of words and pairs, learned from so many rows, says; None: there are no rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    numbers = spread(len(learned.texts), min(most, LEARNED))
    texts, labels = ([of[number] for number in numbers] for of in (learned.texts, learned.labels[column]))
    if len(set(labels)) < 2 or not asked.texts:
        return [labels[0]] * len(asked.texts) if labels else None
    # No words at all, which every text has: without a feature there would be an error.
    features = TfidfVectorizer(analyzer=lambda text: {(), *grams(words(text), 1), *grams(words(text), 2)})
    model = make_pipeline(features, LogisticRegression(max_iter=1000)).fit(texts, labels)
    return list(map(str, model.predict(asked.texts)))


def _scored(name: str, predicted: Sequence[str] | None, truth: Sequence[str]) -> Figures:
    """Accuracy with Clopper and Pearson's 95% limits, and the mean F1 of the values that occur with those of a bootstrap."""
    values = sorted({*(predicted or ()), *truth})
    if not predicted or not truth:
        return {f"{name}: {figure}": None for figure in ("accuracy", "macro F1")}
    said_EK, true_EK = (np.array(side)[:, None] == values for side in (predicted, truth))
    hits, total = int((said_EK & true_EK).sum()), len(truth)
    draws_RE = np.random.default_rng(0).multinomial(total, np.full(total, 1 / total), size=RESAMPLES).astype(np.float64)

    def f1(weight_RE: Floats) -> Floats:
        right, sizes = weight_RE @ (said_EK & true_EK), weight_RE @ said_EK + weight_RE @ true_EK
        return np.asarray((2 * right / np.maximum(sizes, 1)).sum(axis=1) / np.maximum((sizes > 0).sum(axis=1), 1))

    low, high = np.quantile(f1(draws_RE), [0.025, 0.975])
    return {
        f"{name}: accuracy": hits / total,
        f"{name}: accuracy, low": 1 - float(upper_limit(total - hits, hits, 0.025)),
        f"{name}: accuracy, high": float(upper_limit(hits, total - hits, 0.025)),
        f"{name}: macro F1": float(f1(np.ones((1, total)))[0]),
        f"{name}: macro F1, low": float(low),
        f"{name}: macro F1, high": float(high),
    }


# --- what the rows give away -----------------------------------------------------------------------------------------


def _replayed(sides: Mapping[str, Side]) -> Figures:
    """Shares of synthetic rows with words in a row, or details, of real ones; held-out rows are the control, of equal number."""
    made, held = sides[SYNTHETIC].texts, sides.get(EVALUATION, Side([], [], {})).texts
    own = [(grams(words(text), WORDS), find_details(text)) for text in made]

    def part(name: str, texts: Sequence[str]) -> Figures:
        runs = {run for text in texts for run in grams(words(text), WORDS)}
        details = {detail for text in texts for detail in find_details(text)}
        hits = {
            f"{WORDS} words": [bool(one & runs) for one, _ in own],
            "a detail": [bool(one & details) for _, one in own],
        }
        return {f"with {what} of {name}": sum(seen) / len(own) if own else None for what, seen in hits.items()}

    found = part("any evaluation row", held) if held else {}
    if TRAINING in sides:
        texts = sides[TRAINING].texts
        found |= part("any training row", texts)
        if held:
            some = [texts[number] for number in spread(len(texts), len(held))]
            found |= part("equally many training rows", some)
    return found


def _embedded(sides: Mapping[str, Side], name: str) -> Figures:
    """Frechet distance of mean-pooled last states to those of evaluation rows, of equally many rows on all sides."""
    import torch
    from transformers import AutoModel

    tokenizer = loading.load_tokenizer(ModelConfig(name_or_path=name))
    model = AutoModel.from_pretrained(loading.source(name), trust_remote_code=False).eval()
    longest = min(512, getattr(model.config, "max_position_embeddings", 512))
    texts = {side: [text for text in one.texts if text.strip()] for side, one in sides.items()}
    fewest = min(len(texts[SYNTHETIC]), len(texts.get(EVALUATION, ())))
    if fewest < 2:
        return {}

    @torch.no_grad()
    def moments(side: str) -> tuple[Floats, Floats]:
        chosen = [texts[side][number] for number in spread(len(texts[side]), fewest)]
        read = (tokenizer(text, truncation=True, max_length=longest, return_tensors="pt") for text in chosen)
        state_TD = np.array([model(**ids).last_hidden_state[0].double().mean(dim=0).numpy() for ids in read])
        return state_TD.mean(axis=0), np.cov(state_TD, rowvar=False)

    mean_D, spread_DD = moments(EVALUATION)

    def distance(side: str) -> float:
        own_D, own_DD = moments(side)
        # The eigenvalues of a product of covariances are real and not negative, but for rounding.
        roots = np.sqrt(np.maximum(np.linalg.eigvals(own_DD @ spread_DD).real, 0)).sum()
        return float(((own_D - mean_D) ** 2).sum() + np.trace(own_DD + spread_DD) - 2 * roots)

    others = [side for side in sides if side != EVALUATION]
    return {f"Frechet distance to evaluation rows: {side}": distance(side) for side in others}
