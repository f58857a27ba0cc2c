"""What is known of a run's training data: how many, whose they are, and what is known of labels that were made private.

Comes in: the recipe, the ledger. Goes out: a ``Subject``, or refusals, which are collected. A loss that takes flipped labels as
true is biased, and labels that are drawn again cost again, so that the record of them has to be named.
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
        """None so far."""
        self.errors: list[DpllmError] = []

    def add(self, error: DpllmError) -> None:
        """One more."""
        if str(error) not in map(str, self.errors):
            self.errors.append(error)

    def attempt(self, call: Callable[..., Value], *arguments: Any, **more: Any) -> Value | None:
        """The value of ``call``; None, and one refusal more, where it refuses."""
        try:
            return call(*arguments, **more)
        except DpllmError as error:
            self.add(error)
            return None


@dataclass(frozen=True)
class Subject:
    """What is known of the training data."""

    num_units: int  # public number of things that are sampled, without canaries: declared or counted
    format: layouts.Format
    dataset: str  # the name in the ledger
    policy: DatasetPolicy | None  # whose they are, what may be done with them; None where that is refused
    digest: str | None = None  # of the rows that were read, which must be trained on; None where they were only counted
    reads: str = ""  # from which columns, in one line
    graph: Graph | None = None  # how much is kept of rows with several owners
    example: str = ""  # how the model sees a row: the first of data that are declared public, else the shape of any
    rows: Rows | None = field(default=None, repr=False)  # None in another process
    labels: Labels | None = None  # of preference pairs, where labels were flipped at the source

    @property
    def resolved(self) -> dict[str, Any]:
        """Keys of the recipe that the data decide."""
        return {"data.format": self.format, "data.label_epsilon": self.labels.epsilon if self.labels else None}


def read_subject(config: RunConfig, cache: Path | None = None) -> Subject:
    """Reads the training data for their number and name, once for many decisions.

    Raises:
        DataError: The training data cannot be read as declared.
        Refused: The ledger does not permit them to be trained on in this way.
    """
    refusals = Refusals()
    with open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as ledger:
        subject = look(config, ledger, refusals, cache)
    if refusals.errors:
        raise refusals.errors[0]
    assert subject is not None
    return subject


def look(config: RunConfig, ledger: Ledger | None, refusals: Refusals, cache: Path | None) -> Subject | None:
    """What is known of the training data, whose rows are kept in ``cache``; None where they cannot be read as units."""
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
    # Where the policy refuses, the declared name is shown: what the ledger holds under it is no secret from its owner.
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
    """Refuses, with a ConfigError, an objective that does not learn from such rows, and canaries that they cannot hold."""
    if not config.objective.learns_from(table.format):
        raise ConfigError(
            f"{table.name}: is {table.reads}, from which train.objective: {config.train.objective} does not learn. Set "
            "train.objective: dpo for pairs of answers and likelihood for anything else, or name other data."
        )
    check_place(config.audit.texts.place, table.format)


def _check_words(config: RunConfig, dataset: str) -> None:
    """Refuses, with a ConfigError, a name or a text that no card can hold, before anything is charged."""
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
    """Where the record of a file of flipped labels lies."""
    return path.with_name(path.name.removesuffix(".jsonl") + SUFFIX)


def randomised(wanted: DataConfig) -> Path | None:
    """The first of the files of training data beside which a record lies."""
    paths = map(Path, expand(wanted.train))
    return next((path for path in paths if record_of(path) != path and record_of(path).exists()), None)


def read_labels(wanted: DataConfig) -> LabelRecord | None:
    """What is known of the labels of a recipe's training data; None where they are as they were given.

    Raises:
        ConfigError: A record lies beside the data and is not named, is damaged, or says another epsilon than the recipe.
        Refused: The data are not those of the record: labels may have been drawn again.
    """
    path = Path(wanted.train) if isinstance(wanted.train, str) else None
    if wanted.label_record is None:
        if (file := randomised(wanted)) is not None:
            raise ConfigError(
                f"data.train {file}: its labels were randomised ({record_of(file).name} lies beside it), and taken as true "
                f"they would teach a weaker preference. Set data.label_record: {record_of(file)}."
            )
        return None
    try:
        record = LabelRecord.checked(read_json(Path(wanted.label_record)))
    except NotAStatement as error:
        raise ConfigError(
            f"data.label_record {wanted.label_record}: {'; '.join(error.problems[:3])}, so that the loss would be biased, and no "
            "card could be written. Restore the record."
        ) from None
    if path is None or not path.is_file() or sha256(path) != record.file_sha256:
        raise Refused(
            f"data.train is not the file that data.label_record {wanted.label_record} is about, so nothing says how often its "
            "labels were flipped, or how many times. Restore the file, or name its own record."
        )
    if wanted.label_epsilon not in (None, record.epsilon):
        raise ConfigError(
            f"data.label_epsilon {wanted.label_epsilon:g} is not the {record.epsilon:g} of data.label_record, with which the "
            "loss would be biased. Remove data.label_epsilon."
        )
    return record


def public_units(data: DataConfig, counted: int, delta: float | str = "auto", name: str = "privacy.delta") -> int:
    """N without canaries: declared, or counted in the data.

    Raises:
        Refused: Over twice as many were counted as are declared, or ``delta`` (called ``name``) is no guarantee for all.
            Neither says how many there are.
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
