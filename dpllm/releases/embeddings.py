"""Clusters of private texts, and classifiers of them, by their vectors from a public encoder: cost, reservation, then the draws.

Comes in: the recipe, whose model is the encoder, what is asked, an epsilon. Goes out: an ``Offer``, as of ``describe``; of one,
a folder with describe.json, vectors.safetensors and README.md; of such a folder, the label of each row of a file.
Must not draw noise (``privacy.embedded``), nor run a model (``model.reading``).

Guarantee:
    That of ``privacy.embedded``, and of ``releases.describe``: each round is charged before it is drawn, and a crash leaves all
    charged. A unit's vector is the mean of its rows' vectors, and follows from them alone: texts are cut to data.max_length
    tokens, read at a public width, and less a centre and projected by public texts and constants. Refusals follow from settings
    and the public number of units. What a value that is not declared, or is missing, counts as is ``other``.
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
"""Of an encoder's vocabulary that name clusters; and how many texts, of how many of them, the centre is the mean of."""
ROUNDS = 5
"""Of k-means, each of which costs."""
MOST_DELTA = 1e-5
"""A larger one makes no release less noisy."""
NAMED_BY = 3
"""Words in the name of a cluster."""


@dataclass(frozen=True)
class Asked:
    """What is asked for: ``clusters``, or the ``values`` of a ``column``.

    Attributes:
        clusters: How many; 0 for a classifier.
        column: That is predicted.
        values: Its declared ones; others count as other.
    """

    clusters: int = 0
    column: str = ""
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses what nothing could be asked by, with a ConfigError."""
        if bool(self.clusters) == bool(self.column) or bool(self.column) != bool(self.values):
            raise ConfigError(
                "clusters and a classifier have folders of their own. Type --clusters K, or --predict COLUMN --values A,B."
            )
        if self.clusters and not 2 <= self.clusters <= 99:
            raise ConfigError(f"--clusters {self.clusters}: is 2 to 99. Type such a number.")
        if self.column and not (len({*self.values, OTHER, ""}) - 2 == len(self.values) and 2 <= len(self.values) <= 99):
            raise ConfigError(
                "--values: have to be declared, because values read from the data are outside the guarantee. Type two to 99 "
                f"distinct ones, none of them {OTHER!r}, as in --values yes,no."
            )

    @property
    def kind(self) -> Kind:
        """Which of the two."""
        return "clusters" if self.clusters else "classifier"


@contextlib.contextmanager
def offered(
    config: RunConfig, request: Asked, epsilon: float, delta: float | str | None, *, create: bool
) -> Iterator[Offer]:
    """What clusters or a classifier would cost, and how exact they would be; spends nothing. See ``describe.offered``.

    Raises:
        ConfigError: More clusters than the public number of units bears, an unsuitable epsilon.
        Refused: The encoder was tuned on these data, or cannot be read in batches.
    """
    config, columns = without_evaluation(config), [request.column] if request.column else []
    with opened(config, delta, columns, max_delta=MOST_DELTA, create=create) as source:
        source.refuse_tuned(config)
        if (config.data.max_examples_per_unit or 1) > embedded.MOST_ROWS:
            raise ConfigError(
                f"--max-examples-per-unit: products of over {embedded.MOST_ROWS:,} rows would not be added exactly. Type fewer."
            )
        units = config.data.public_size or len(source.units)  # as many under zero_out, whoever is missing
        rounds = embedded.event_of(request.kind, 1.0, ROUNDS).count
        sigma = calibrate_noise_multiplier(epsilon, min(source.delta, MOST_DELTA), 1.0, rounds, config.data.relation)
        sigma = max(sigma, embedded.least_noise(units))
        if sigma > embedded.MOST_NOISE:
            raise ConfigError(
                f"--epsilon {epsilon:g} takes noise of {sigma:,.0f} units, which would drown everything. Raise it."
            )
        size = DIMENSIONS[request.kind]
        note = f"A classifier needs well above {sigma * size * math.sqrt(size):,.0f} units; there are {units:,}."
        if request.clusters:
            smallest = embedded.least_size(sigma, size)
            note = f"A cluster moves if it has {smallest:,} units or more, of {units:,}."
            if request.clusters > (most := max(1, units // smallest)):
                raise ConfigError(
                    f"{units:,} units are too few for {request.clusters} clusters at epsilon {epsilon:g}: one below {smallest:,} "
                    f"would hide in the noise. Type a larger --epsilon{f', or --clusters {most} or less' if most > 1 else ''}."
                )
        job, versions = _Job(config, request, source, sigma), processes.versions()
        software = {name: versions[name] for name in ("torch", "transformers")}
        statistics = source.statistics(config, [job.release(units)], software)
        yield Offer(statistics, source.outlook(statistics), (note,), source, job.read, [job.draw], job.write)


class Encoder:
    """Texts to vectors, by a public model."""

    def __init__(self, model: ModelConfig, max_length: int) -> None:
        """Loads a model that reads so many tokens of a text.

        Raises:
            ConfigError: It cannot be found, brings code along, has no vocabulary, or no row of it can be read beside others.
            Refused: Its 8-bit products couple rows.
        """
        # As whoever applies what is released loads it, wherever and from whichever recipe.
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
        self._width = min(max_length, positions - 2 - around if positions else max_length)  # a start, and padding
        first, second, empty = self._tokenizer(["one", "two", ""], add_special_tokens=False)["input_ids"]
        if first in (second, empty):
            raise ConfigError(
                f"{model.name_or_path}: its tokenizer reads all words alike, so texts of one length would be the same. Restore "
                "its tokenizer.json."
            )
        try:
            self.of_public(["one"])
        except (ValueError, RuntimeError, TypeError) as error:
            raise ConfigError(
                f"{model.name_or_path}: cannot read rows beside each other ({type(error).__name__}), so it is no encoder for "
                "this. Use another."
            ) from None

    def of_rows(self, rows: Groups, fields: Sequence[str], around: Callable[[Floats], Floats]) -> Floats:
        """Shape (R, P): of private rows, each alone, at a public width and height."""
        embedder, parts_RP = self._embedder(self._width), []
        for start in range(0, len(rows), embedder.height):
            tell("Reading texts", start, len(rows))
            part = rows[start : start + embedder.height]
            texts = [" ".join(text_of(row.parts[field]) for field in fields) for [row] in part]
            parts_RP.append(around(embedder.vectors(texts)))
        return np.concatenate(parts_RP)

    def of_public(self, texts: Sequence[str]) -> Floats:
        """Shape (R, D): of public texts, at the width of the longest."""
        longest = max(map(len, self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]))
        return self._embedder(max(1, min(longest, self._width))).vectors(texts)

    def _embedder(self, width: int) -> Embedder:
        return Embedder(self._model, self._tokenizer, width, self._pooling)

    def around(self, dimensions: int) -> Projection:
        """Centred on the mean of texts of random words of its vocabulary."""
        mixed, vocabulary = random.Random(0), self.words()
        texts = [" ".join(mixed.choices(vocabulary, k=MIXED_WORDS)) for _ in range(MIXED)]
        return Projection(self.of_public(texts).mean(axis=0), dimensions)

    def words(self) -> list[str]:
        """Common words of its vocabulary, which is public, in its order."""
        tokens = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        initial = [token[1:] for token in tokens if token[:1] in ("\u0120", "\u2581")]  # after a space
        # WordPiece marks the others, by letters that are none.
        common = [
            word for word in initial or tokens if len(word) > 3 and word.isascii() and word.isalpha() and word.islower()
        ]
        if len(common) < 2:
            raise ConfigError(
                "the encoder's vocabulary has no whole words in small letters, to centre on and to name clusters by. Use another."
            )
        return common[:WORDS]


class _Job:
    def __init__(self, config: RunConfig, request: Asked, source: Opened, sigma: float) -> None:
        self._config, self._asked, self._source, self._sigma = config, request, source, sigma

    def release(self, units: int) -> Json:
        """All of it that is known before it is drawn."""
        config, request = self._config, self._asked
        declared = {"encoder": names.public_name(config.model.name_or_path), "units": units}
        declared |= {"max_length": config.data.max_length, "dimensions": DIMENSIONS[request.kind]}
        declared |= {"clusters": request.clusters} if request.clusters else {"values": request.values}
        statistic = f"classifier of {request.column}" if request.column else "clusters of texts"
        return {"statistic": statistic, "declared": declared, **embedded.figures(request.kind, self._sigma, ROUNDS)}

    def read(self) -> None:
        """The vector and the label of each row, of which the last is other; private."""
        source, request = self._source, self._asked
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
        request, rows_RP, units_R = self._asked, self._rows_RP, self._units_R
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
        # What all clusters, or all words, have in common would name each of them alike.
        apart_KP, apart_RP = centres_KP - centres_KP.mean(axis=0), self._words_RP - self._words_RP.mean(axis=0)
        nearest_KR = np.argsort(-apart_KP @ unit_length(apart_RP).T, axis=1, kind="stable")
        descriptions = [", ".join(self._words[index] for index in row[:NAMED_BY]) for row in nearest_KR]
        return [f"{number:02} {text}" for number, text in enumerate(descriptions, 1)]

    def write(self, output: Path, released: Statistics) -> None:
        with whole_directory(output) as part:
            write_whole(part / VECTORS, self._file)
            write_json(part / RECORD, released.to_json())
            write_whole(part / CARD, page(released))


def classify(folder: Path, source: str, encoder: str | None) -> Iterator[str | None]:
    """The label or cluster of each row of a file, glob, directory or Hub id; None for one without text.

    Args:
        folder: As ``Offer.release`` wrote it.
        source: The rows.
        encoder: Where the encoder lies, if not where describe.json names it.

    Raises:
        ConfigError: The folder is damaged, or of another encoder.
        DataError: The rows have no text.
    """
    release = Statistics.pick(read_json(folder / RECORD)).releases[0]
    centre_D, vectors = read_vectors(folder / VECTORS, release)
    declared, sizes = release.declared, release.value or {}
    labels = [*declared.values, OTHER] if declared.values else sorted(sizes)
    if not labels or sorted(labels) != sorted(sizes):
        raise ConfigError(f"{folder}: is not as it was released. Type dpllm verify {folder}, which says why.")
    model = ModelConfig(name_or_path=encoder or str(declared.encoder))
    try:
        reader = Encoder(model, declared.max_length or 2)
    except ConfigError as error:
        advice = " If it was a local folder, type --model DIR." if encoder is None else ""
        raise ConfigError(f"{error}{advice}") from error
    if reader.digest != release.encoder or reader.of_public(["a"]).shape[1] != len(centre_D):
        raise ConfigError(
            f"{model.name_or_path}: has other weights, configuration or vocabulary than the encoder of {folder}, so its "
            f"vectors mean something else. Type --model with the place of that {declared.encoder}."
        )
    with scratch() as cache:
        config = DataConfig(train=source)
        table = data.load_table(config.train, config, config.train_split, cache)
        around = Projection(centre_D, int(declared.dimensions or 1))
        read_RP = reader.of_rows(each_row(table.rows), FIELDS[table.format], around)
    if declared.clusters:
        chosen = embedded.nearest(embedded.lattice(read_RP), vectors)
    else:
        chosen = embedded.scores(read_RP, vectors).argmax(axis=1)
    for read_P, index in zip(read_RP, chosen, strict=True):
        yield labels[index] if read_P.any() else None
