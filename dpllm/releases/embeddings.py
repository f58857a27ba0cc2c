"""Clusters and classifiers of private texts, from vectors of a public encoder: cost, reservation, then the draws.

Comes in: the recipe, whose model is the encoder, a request, an epsilon. Goes out: an ``Offer``, as in ``describe``; from an
offer, a folder with describe.json, vectors.safetensors and README.md; from such a folder, the label of each row of a file.
Must not draw noise (``privacy.embedded``) or run a model (``model.reading``).

Guarantee:
    That of ``privacy.embedded`` and of ``releases.describe``: each round is charged before it is drawn, and a crash leaves all
    charged. A unit's vector is the mean of its rows' vectors and depends on them alone: texts are cut to data.max_length tokens,
    read at a public width, centred and projected with public texts and constants. Refusals depend only on settings and the
    public number of units. A missing or undeclared value counts as ``other``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import transformers

from dpllm.errors import ConfigError
from dpllm.files import CARD, read_json, scratch, whole_directory, write_json, write_whole
from dpllm.model import loading, processes
from dpllm.model.reading import Embedder
from dpllm.privacy import embedded
from dpllm.privacy.accounting import calibrate_noise_multiplier
from dpllm.privacy.embedded import DIMENSIONS, Floats, Kind, Projection, unit_length
from dpllm.privacy.releases import OTHER
from dpllm.progress import tell
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, ModelConfig, RunConfig
from dpllm.records import Json
from dpllm.releases.asked import text_of
from dpllm.releases.describe import Charge, Offer, Opened, opened, without_evaluation
from dpllm.statement.released import RECORD, VECTORS, Statistics, page, read_vectors
from dpllm.text import data
from dpllm.text.data import Groups, each_row, value_name
from dpllm.text.layouts import FIELDS

WORDS, MIXED, MIXED_WORDS = 400, 200, 16
"""Vocabulary words that may name clusters; texts whose mean is the centre; words in each of these texts."""
ROUNDS = 5
"""Rounds of k-means; each one costs."""
MOST_DELTA = 1e-5
"""A larger delta does not reduce the noise."""
NAMED_BY = 3
"""Words in the name of a cluster."""


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for ``clusters``, or for a classifier of the ``values`` of a ``column``.

    Attributes:
        clusters: Number of clusters; 0 for a classifier.
        column: The column to predict.
        values: Its declared values; all others count as other.
    """

    clusters: int = 0
    column: str = ""
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses, with a ConfigError, a request that is incomplete or out of range."""
        if bool(self.clusters) == bool(self.column) or bool(self.column) != bool(self.values):
            raise ConfigError(
                "clusters and a classifier need separate folders. Type --clusters K, or --predict COLUMN --values A,B."
            )
        if self.clusters and not 2 <= self.clusters <= 99:
            raise ConfigError(f"--clusters {self.clusters}: is not from 2 to 99. Type such a number.")
        if self.column and not (len({*self.values, OTHER, ""}) - 2 == len(self.values) and 2 <= len(self.values) <= 99):
            raise ConfigError(
                "--values: must be declared, because values read from the data are outside the guarantee. Type two to 99 "
                f"distinct ones, none of them {OTHER!r}, as in --values yes,no."
            )

    @property
    def kind(self) -> Kind:
        """Clusters or a classifier."""
        return "clusters" if self.clusters else "classifier"


@contextlib.contextmanager
def offered(
    config: RunConfig, request: EmbeddingRequest, epsilon: float, delta: float | str | None, *, create: bool
) -> Iterator[Offer]:
    """The cost and accuracy of clusters or a classifier; spends nothing. See ``describe.offered``.

    Raises:
        ConfigError: The public number of units is too small for the clusters, or epsilon is unsuitable.
        Refused: The encoder was tuned on these data, or cannot be read in batches.
    """
    config, columns = without_evaluation(config), [request.column] if request.column else []
    with opened(config, delta, columns, max_delta=MOST_DELTA, create=create) as source:
        source.refuse_tuned(config)
        if (config.data.max_examples_per_unit or 1) > embedded.MOST_ROWS:
            raise ConfigError(
                f"--max-examples-per-unit: products of over {embedded.MOST_ROWS:,} rows cannot be added exactly. Type fewer."
            )
        units = config.data.public_size or len(source.units)  # under zero_out, neighbours have the same number
        rounds = embedded.event_of(request.kind, 1.0, ROUNDS).count
        sigma = calibrate_noise_multiplier(epsilon, min(source.delta, MOST_DELTA), 1.0, rounds, config.data.relation)
        sigma = max(sigma, embedded.least_noise(units))
        if sigma > embedded.MOST_NOISE:
            raise ConfigError(
                f"--epsilon {epsilon:g} takes noise of {sigma:,.0f} units, which would drown all signal. Raise it."
            )
        size = DIMENSIONS[request.kind]
        note = f"A classifier needs well above {sigma * size * math.sqrt(size):,.0f} units; there are {units:,}."
        if request.clusters:
            smallest = embedded.least_size(sigma, size)
            note = f"A cluster moves if it has {smallest:,} units or more, of {units:,}."
            if request.clusters > (limit := max(1, units // smallest)):
                raise ConfigError(
                    f"{units:,} units are too few for {request.clusters} clusters at epsilon {epsilon:g}: one below {smallest:,} "
                    f"would hide in the noise. Type a larger --epsilon{f', or --clusters {limit} or less' if limit > 1 else ''}."
                )
        job, versions = _Job(config, request, source, sigma), processes.versions()
        software = {name: versions[name] for name in ("torch", "transformers")}
        statistics = source.statistics(config, [job.release(units)], software)
        yield Offer(statistics, source.outlook(statistics), (note,), source, job.read, [job.draw], job.write)


class Encoder:
    """Maps texts to vectors by a public model."""

    def __init__(self, model: ModelConfig, max_length: int) -> None:
        """Loads a model; it will read at most ``max_length`` tokens of each text.

        Raises:
            ConfigError: It cannot be found, needs its own code, has no vocabulary, or cannot read several rows at once.
            Refused: Its 8-bit products couple rows.
        """
        # The same settings for everyone who applies the release, whatever the recipe.
        model = model.changed({"dtype": "float32", "quantization": None})
        self._tokenizer = loading.load_tokenizer(model)
        self._pooling = loading.pooling_of(model)
        kind = transformers.AutoModel if self._pooling else transformers.AutoModelForCausalLM
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = loading.load_base(model, device, kind=kind).eval()
        loading.check_outliers(self._model)
        loading.check_vocabulary(self._model, self._tokenizer)
        self.digest = loading.digest(self._model, self._tokenizer, self._pooling)
        positions = loading.positions(self._model)
        around = self._tokenizer.num_special_tokens_to_add() if self._pooling else 0
        self._width = min(max_length, positions - 2 - around if positions else max_length)  # minus start and padding
        first, second, empty = self._tokenizer(["one", "two", ""], add_special_tokens=False)["input_ids"]
        if first in (second, empty):
            raise ConfigError(
                f"{model.name_or_path}: its tokenizer reads all words alike, so texts of one length would look the same. Restore "
                "its tokenizer.json."
            )
        try:
            self.of_public(["one"])
        except (ValueError, RuntimeError, TypeError) as error:
            raise ConfigError(
                f"{model.name_or_path}: cannot read several rows at once ({type(error).__name__}), so it cannot be the encoder. "
                "Use another."
            ) from None

    def of_rows(self, rows: Groups, fields: Sequence[str], around: Callable[[Floats], Floats]) -> Floats:
        """Vectors of private rows, (R, P): each row by itself, at a public width and height."""
        embedder, parts_RP = self._embedder(self._width), []
        for start in range(0, len(rows), embedder.height):
            tell("Reading texts", start, len(rows))
            part = rows[start : start + embedder.height]
            texts = [" ".join(text_of(row.parts[field]) for field in fields) for [row] in part]
            parts_RP.append(around(embedder.vectors(texts)))
        return np.concatenate(parts_RP)

    def of_public(self, texts: Sequence[str]) -> Floats:
        """Vectors of public texts, (R, D), at the width of the longest text."""
        longest = max(map(len, self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]))
        return self._embedder(max(1, min(longest, self._width))).vectors(texts)

    def _embedder(self, width: int) -> Embedder:
        return Embedder(self._model, self._tokenizer, width, self._pooling)

    def around(self, dimensions: int) -> Projection:
        """The projection that is centred on the mean of texts of random vocabulary words."""
        mixed, vocabulary = random.Random(0), self.words()
        texts = [" ".join(mixed.choices(vocabulary, k=MIXED_WORDS)) for _ in range(MIXED)]
        return Projection(self.of_public(texts).mean(axis=0), dimensions)

    def words(self) -> list[str]:
        """Common words of the public vocabulary, in its order."""
        tokens = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        initial = [token[1:] for token in tokens if token[:1] in ("\u0120", "\u2581")]  # after a space
        # WordPiece marks pieces inside a word instead, with characters that are not letters.
        common = [
            word for word in initial or tokens if len(word) > 3 and word.isascii() and word.isalpha() and word.islower()
        ]
        if len(common) < 2:
            raise ConfigError(
                "the encoder's vocabulary has no lower-case words, which centre texts and name clusters. Use another."
            )
        return common[:WORDS]


class _Job:
    def __init__(self, config: RunConfig, request: EmbeddingRequest, source: Opened, sigma: float) -> None:
        self._config, self._request, self._source, self._sigma = config, request, source, sigma

    def release(self, units: int) -> Json:
        """The fields of the release that are known before it is drawn."""
        config, request = self._config, self._request
        declared = {"encoder": names.public_name(config.model.name_or_path), "units": units}
        declared |= {"max_length": config.data.max_length, "dimensions": DIMENSIONS[request.kind]}
        declared |= {"clusters": request.clusters} if request.clusters else {"values": request.values}
        statistic = f"classifier of {request.column}" if request.column else "clusters of texts"
        return {"statistic": statistic, "declared": declared, **embedded.figures(request.kind, self._sigma, ROUNDS)}

    def read(self) -> None:
        """Computes the private vector and label of each row; the last label is other."""
        source, request = self._source, self._request
        encoder = Encoder(self._config.model, self._config.data.max_length)
        around = encoder.around(DIMENSIONS[request.kind])
        self._centre_D, self._digest, self._words = around.centre_D, encoder.digest, encoder.words()
        self._words_RP = around(encoder.of_public(self._words)) if request.clusters else None
        rows = source.units.each_alone()
        self._rows_RP = encoder.of_rows(rows, FIELDS[source.table.format], around)
        self._units_R = np.repeat(np.arange(len(source.units)), [len(unit) for unit in source.units])
        numbers = {value: number for number, value in enumerate(request.values)}
        self._labels_R = np.array(
            [numbers.get(value_name(row.codes.get(request.column)), len(numbers)) for [row] in rows], dtype=np.int64
        )

    def draw(self, charge: Charge) -> Json:
        request, rows_RP, units_R = self._request, self._rows_RP, self._units_R
        if request.clusters:
            sizes, vectors = embedded.k_means(rows_RP, units_R, request.clusters, self._sigma, ROUNDS, charge)
            names = self._named(vectors)
        else:
            names = [*request.values, OTHER]
            sizes, vectors = embedded.ada_ssp(rows_RP, self._labels_R, units_R, len(names), self._sigma, charge)
        self._file = safetensors.numpy.save({"centre": self._centre_D, "vectors": np.ascontiguousarray(vectors)})
        return {
            "value": dict(zip(names, map(int, sizes), strict=True)),
            "vectors": hashlib.sha256(self._file).hexdigest(),
            "encoder": self._digest,
        }

    def _named(self, centres_KP: Floats) -> list[str]:
        assert self._words_RP is not None
        # Without the means, which all clusters and all words share, and which would give clusters similar names.
        centred_KP, centred_RP = centres_KP - centres_KP.mean(axis=0), self._words_RP - self._words_RP.mean(axis=0)
        nearest_KR = np.argsort(-centred_KP @ unit_length(centred_RP).T, axis=1, kind="stable")
        descriptions = [", ".join(self._words[index] for index in row[:NAMED_BY]) for row in nearest_KR]
        return [f"{number:02} {text}" for number, text in enumerate(descriptions, 1)]

    def write(self, output: Path, released: Statistics) -> None:
        with whole_directory(output) as part:
            write_whole(part / VECTORS, self._file)
            write_json(part / RECORD, released.to_json())
            write_whole(part / CARD, page(released))


def classify(folder: Path, source: str, encoder: str | None) -> Iterator[str | None]:
    """The label or cluster of each row of a file, glob, directory or Hub id; None for a row without text.

    Args:
        folder: A folder of ``Offer.release``.
        source: The rows.
        encoder: Path of the encoder, if it differs from the one in describe.json.

    Raises:
        ConfigError: The folder is damaged, or the encoder is another.
        DataError: The rows have no text.
    """
    release = Statistics.pick(read_json(folder / RECORD)).releases[0]
    centre_D, vectors = read_vectors(folder / VECTORS, release)
    declared, sizes = release.declared, release.value or {}
    labels = [*declared.values, OTHER] if declared.values else sorted(sizes)
    if not labels or sorted(labels) != sorted(sizes):
        raise ConfigError(f"{folder}: differs from what was released. Type dpllm verify {folder}, which says why.")
    model = ModelConfig(name_or_path=encoder or str(declared.encoder))
    try:
        reader = Encoder(model, declared.max_length or 2)
    except ConfigError as error:
        advice = " If it was a local folder, type --model DIR." if encoder is None else ""
        raise ConfigError(f"{error}{advice}") from error
    if reader.digest != release.encoder or reader.of_public(["a"]).shape[1] != len(centre_D):
        raise ConfigError(
            f"{model.name_or_path}: has other weights, configuration or vocabulary than the encoder of {folder}, so its "
            f"vectors mean something else. Type --model with the path of that {declared.encoder}."
        )
    with scratch() as cache:
        config = DataConfig(train=source)
        table = data.load_table(config.train, config, config.train_split, cache)
        around = Projection(centre_D, int(declared.dimensions or 1))
        rows_RP = reader.of_rows(each_row(table.rows), FIELDS[table.format], around)
    if declared.clusters:
        indices = embedded.nearest(embedded.lattice(rows_RP), vectors)
    else:
        indices = embedded.scores(rows_RP, vectors).argmax(axis=1)
    for row_P, index in zip(rows_RP, indices, strict=True):
        yield labels[index] if row_P.any() else None
