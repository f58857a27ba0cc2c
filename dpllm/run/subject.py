"""The facts about a run's training data: how many units, which dataset, and the record of randomised labels.

Comes in: the recipe, the ledger. Goes out: a ``Subject``, or refusals, which are collected. A loss that takes randomised labels
as true is biased, and labels that are drawn again cost again, so the recipe has to name their record.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpllm.canaries.texts import check_place
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import read_json, scratch, sha256
from dpllm.ledger import Ledger, dataset_policy, open_ledger
from dpllm.ledger.dataset_policy import DatasetPolicy
from dpllm.progress import tell
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.records import NotAStatement
from dpllm.statement import section
from dpllm.statement.released import LabelRecord, Labels
from dpllm.text import data, layouts, rendering
from dpllm.text.data import Rows
from dpllm.text.owners import Graph
from dpllm.text.sources import expand

SUFFIX = ".labels.json"
Value = TypeVar("Value")


class Refusals:
    """Collects refusals, each message once."""

    def __init__(self) -> None:
        """Starts without refusals."""
        self.errors: list[DpllmError] = []

    def add(self, error: DpllmError) -> None:
        """Adds a refusal, unless its message is there already."""
        if str(error) not in map(str, self.errors):
            self.errors.append(error)

    def attempt(self, call: Callable[..., Value], *arguments: Any, **keywords: Any) -> Value | None:
        """The value of ``call``; None if it refuses, and the refusal is added."""
        try:
            return call(*arguments, **keywords)
        except DpllmError as error:
            self.add(error)
            return None


@dataclass(frozen=True)
class Subject:
    """Facts about the training data."""

    num_units: int  # public number of sampled units (or rows), without canaries: declared or counted
    format: layouts.Format
    dataset: str  # the name in the ledger
    policy: DatasetPolicy | None  # the dataset and what may be done with it; None if that was refused
    digest: str | None = None  # of the rows read, which must be the ones trained on; None if they were only counted
    reads: str = ""  # columns that are read, in one line
    graph: Graph | None = None  # how many rows with several owners are kept
    example: str = ""  # how the model sees a row: the first row of public data, else only the layout
    rows: Rows | None = field(default=None, repr=False)  # None in another process
    labels: Labels | None = None  # of preference pairs with randomised labels

    @property
    def resolved(self) -> dict[str, Any]:
        """Keys of the recipe that the data determine."""
        return {"data.format": self.format, "data.label_epsilon": self.labels.epsilon if self.labels else None}


def read_subject(config: RunConfig, cache: Path | None = None) -> Subject:
    """Reads the facts about the training data, once for many decisions.

    Raises:
        DataError: The training data cannot be read as declared.
        Refused: The ledger does not permit training on them in this way.
    """
    refusals = Refusals()
    with open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as ledger:
        subject = look(config, ledger, refusals, cache)
    if refusals.errors:
        raise refusals.errors[0]
    assert subject is not None
    return subject


def look(config: RunConfig, ledger: Ledger | None, refusals: Refusals, cache: Path | None) -> Subject | None:
    """Facts about the training data, whose rows are kept in ``cache``; None if they cannot be read as units."""
    with scratch() if cache is None else contextlib.nullcontext(cache) as where:
        tell("Reading data.train")
        table = refusals.attempt(data.load_table, config.data.train, config.data, config.data.train_split, where)
        if table is None:
            return None
        held_out = refusals.attempt(data.load_held_out, config.data, where)
        refusals.attempt(_check_objective, config, table)
        labels = refusals.attempt(read_labels, config.data)
        policy = refusals.attempt(dataset_policy.find_policy, config, table, held_out, ledger)
        units = refusals.attempt(data.sampled_rows, table, config.data)
    if units is None:
        return None
    delta = config.privacy.delta if config.privacy.enabled else "auto"
    refusals.attempt(public_units, config.data, len(units), delta)
    fmt = table.format
    # If the policy refuses, the declared name is shown: the ledger's owner may know what it holds under that name.
    name = policy.dataset if policy else config.privacy.dataset or data.dataset_name(config.data)
    refusals.attempt(_check_words, config, name)
    return Subject(
        config.data.public_size or len(units),
        fmt,
        name,
        policy,
        table.digest,
        table.reads,
        units.graph,
        rendering.example(table.rows[0], fmt, config.data.template)
        if config.data.public
        else rendering.shape(fmt, config.data.control, config.data.template),
        Rows(table, units, held_out),
        labels.public() if labels else None,
    )


def _check_objective(config: RunConfig, table: data.Table) -> None:
    """Refuses, with a ConfigError, an objective that does not learn from this format, and canaries that do not fit it."""
    if not config.objective.learns_from(table.format):
        raise ConfigError(
            f"{table.name}: is {table.reads}, from which train.objective: {config.train.objective} does not learn. Set "
            "train.objective: dpo for pairs of answers and likelihood for anything else, or name other data."
        )
    check_place(config.audit.texts.place, table.format)


def _check_words(config: RunConfig, dataset: str) -> None:
    """Refuses, with a ConfigError, a name or text that no card can hold, before anything is charged."""
    published = names.publishable(config)
    outside = (
        dataset,
        published.output_dir,
        published.model.name_or_path,
        published.card.title,
        published.card.description,
    )
    marks = re.search("<!-- /?dpllm:", json.dumps([dataset, published.model_dump(mode="json")]))
    if marks or any(section.HIDING.search(f" {text or ''}") for text in outside):
        raise ConfigError(
            f"a text in the recipe, or the name of the data ({dataset!r}), holds a mark of a card's parts, HTML that could hide "
            "them, or style= or class=, with which no card would verify. Change it, or type --privacy.dataset NAME."
        )


def record_of(path: Path) -> Path:
    """The path of the record of a file of randomised labels."""
    return path.with_name(path.name.removesuffix(".jsonl") + SUFFIX)


def randomised(settings: DataConfig) -> Path | None:
    """The first training file with a record next to it."""
    paths = map(Path, expand(settings.train))
    return next((path for path in paths if record_of(path) != path and record_of(path).exists()), None)


def read_labels(settings: DataConfig) -> LabelRecord | None:
    """The record of a recipe's randomised labels; None if labels are not randomised.

    Raises:
        ConfigError: The record next to the data is not named, is damaged, or states another epsilon than the recipe.
        Refused: The record is of other data: labels may have been drawn again.
    """
    path = Path(settings.train) if isinstance(settings.train, str) else None
    if settings.label_record is None:
        if (file := randomised(settings)) is not None:
            raise ConfigError(
                f"data.train {file}: its labels were randomised ({record_of(file).name} is next to it); taken as true, they "
                f"would teach a weaker preference. Set data.label_record: {record_of(file)}."
            )
        return None
    try:
        record = LabelRecord.checked(read_json(Path(settings.label_record)))
    except NotAStatement as error:
        raise ConfigError(
            f"data.label_record {settings.label_record}: {'; '.join(error.problems[:3])}, so the loss would be biased, and no "
            "card could be written. Restore the record."
        ) from None
    if path is None or not path.is_file() or sha256(path) != record.file_sha256:
        raise Refused(
            f"data.train is not the file that data.label_record {settings.label_record} is about, so nothing says how often its "
            "labels were flipped, or how many times. Restore the file, or name its own record."
        )
    if settings.label_epsilon not in (None, record.epsilon):
        raise ConfigError(
            f"data.label_epsilon {settings.label_epsilon:g} is not the {record.epsilon:g} of data.label_record, with which the "
            "loss would be biased. Remove data.label_epsilon."
        )
    return record


def public_units(data: DataConfig, counted: int, delta: float | str = "auto", name: str = "privacy.delta") -> int:
    """N without canaries: as declared, or as counted in the data.

    Raises:
        Refused: The count is more than twice the declared number, or ``delta`` (called ``name``) is too large for the count.
            Neither message reveals the count.
    """
    if (declared := data.public_size) is None:
        return counted
    if counted > 2 * declared:
        raise Refused(
            f"data.public_size {declared:,} is wrong: data.train holds more than twice as many units (rows, with sampling: "
            "example), so a delta below its 1/N could publish one person's record outright. Declare about as many as there are."
        )
    if not isinstance(delta, str) and delta * counted >= 1:
        raise Refused(
            f"{name} {delta:g} is not below 1/N of the units in data.train, which are more than data.public_size: a mechanism "
            f"that publishes one person's record outright would satisfy it. Set {name} to auto."
        )
    return declared
