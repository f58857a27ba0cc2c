"""Randomised response for preference labels; ``run.subject`` reads them for training.

Comes in: pairs with true labels. Goes out: a file of the same pairs, with each label flipped by a coin, and a record. Coins and
the number of flips are not stored.
"""

from __future__ import annotations

import json
import secrets
import time
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError, DataError, Refused
from dpllm.files import alone, scratch, write_json, write_whole
from dpllm.ledger import Claim, Ledger, RunRequest, open_ledger
from dpllm.ledger.budgets import reserve_all
from dpllm.ledger.records import ANY, HASH_BYTES, fingerprint
from dpllm.ledger.values import LABELS, OPEN, label_account
from dpllm.privacy.events import PureDP, number
from dpllm.privacy.parts import added
from dpllm.privacy.releases import Below, flip_probability, flipped
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.run.subject import randomised, record_of
from dpllm.statement.released import LabelRecord
from dpllm.text import data
from dpllm.text.layouts import FIELDS, Row

RECIPE = {"model.name_or_path": "none", "data.format": "preference", "train.objective": "dpo"}  # around the data
_FIELDS, _DELTA = FIELDS["preference"], 1e-9  # delta only for the ledger's total: the event has none


def randomize(
    config: RunConfig, epsilon: float, output: Path, below: Below = secrets.randbelow, *, again: bool = False
) -> LabelRecord:
    """Flips each label at random once, writes pairs and record, and charges the account of these labels.

    The new file has only the prompt, answers and unit of a row: a score or a rating would reveal the label.

    Args:
        config: The recipe: pairs, unit, most labels of a unit (``data.max_examples_per_unit``), ledger.
        epsilon: Epsilon of one label, above 0.001 and at most 50.
        output: The new file, of JSON lines; the record is next to it.
        below: Uniform random integers, see ``privacy.releases.flipped``.
        again: Draw even if some of these labels were drawn before, at the full cost again.

    Raises:
        ConfigError: ``output`` exists.
        DataError: The pairs cannot be read, or one unit has more labels.
        Refused: Some of these labels were drawn before, or the budget does not admit the draw; nothing is spent.

    Guarantee:
        The new file is epsilon-differentially private under a change of one label, and max_labels epsilon under a change of all
        labels of one unit; delta is 0. Prompts, answers and units are unchanged and not protected.
    """
    number(
        "--epsilon", epsilon, 1e-3, 50.0
    )  # below, labels are nearly coins, and the debiased loss divides by almost 0
    with alone(output, output.with_name(f".{output.name}.lock")), scratch() as cache:
        if output.suffix != ".jsonl":
            raise ConfigError(f"--output {output}: must be a file of JSON lines. Type a name that ends with .jsonl.")
        if existing := next((path for path in (output, record_of(output)) if path.exists()), None):
            raise ConfigError(f"{existing}: exists already, and would be lost. Type another --output.")
        table = _checked_table(config.data, cache)
        with open_ledger(config.privacy.ledger) as ledger:  # type: ignore[union-attr]
            claim = _charge(ledger, config, table, epsilon, again)
            unit, max_labels = config.data.unit, config.data.max_examples_per_unit or 1
            text = "".join(_flipped(row, unit, epsilon, below) for row in table.rows).encode()
            record = LabelRecord.pick(
                {},
                schema_version=1,
                mechanism="randomised response",
                neighbouring_relation="label_changed",
                epsilon=epsilon,
                probability=flip_probability(epsilon),
                unit=unit,
                max_labels=max_labels,
                unit_epsilon=max_labels * epsilon,
                dataset=claim.dataset,
                entry=claim.entry,
                date=time.strftime("%Y-%m-%d", time.gmtime()),
                file_sha256=sha256_of(text).hexdigest(),
            ).with_account(added(*ledger.account(claim.dataset).events()))
            # The record first: without one, the labels would be taken for true ones.
            write_json(record_of(output), record.to_json(), mode=0o600)
            write_whole(output, text, mode=0o600)
            ledger.finish(claim.entry, "completed")
            return record


def _checked_table(settings: DataConfig, cache: Path) -> data.Table:
    if (previous := randomised(settings)) is not None:
        raise Refused(
            f"{previous}: its labels were randomised already ({record_of(previous).name} is next to it), and the loss could not "
            "correct for two flips. Train on it as it is."
        )
    if settings.unit in _FIELDS:
        raise ConfigError(f"--unit {settings.unit}: is a text, and the label decides which one. Name another column.")
    table = data.load_table(settings.train, settings, settings.train_split, cache)
    if settings.unit != "example" and sum(map(len, data.group_rows(table, settings))) < len(table.rows):
        raise DataError(
            f"{table.name}: one {settings.unit} has more than --max-labels {settings.max_examples_per_unit} labels, which cost "
            "more than would be stated. Raise --max-labels, or drop rows."
        )
    for position, row in enumerate(table.rows, start=1):
        turns = [turn for field in _FIELDS if isinstance(row.parts[field], list) for turn in row.parts[field]]
        if not all(isinstance(turn.get("content") or "", str) for turn in turns):
            raise DataError(
                f"{table.location(position)} has a message whose content is not text and could reveal a label. Drop the row."
            )
    return table


def _charge(ledger: Ledger, config: RunConfig, table: data.Table, epsilon: float, again: bool) -> Claim:
    records = fingerprint(table.parts(), _FIELDS, ledger.records.label_key(), pairs_whole=True)
    if config.data.unit == "example" and len(records.hashes) // HASH_BYTES < records.num_records:
        raise DataError(
            f"{table.name}: has some pairs twice, so their label would be flipped twice for one payment. Drop them, or type "
            "--unit and --max-labels."
        )
    event = PureDP((config.data.max_examples_per_unit or 1) * epsilon)
    request = RunRequest(event, _DELTA, 1, config.data.unit, "label_changed", "randomize-labels")
    accounts = ledger.records.overlaps(records, ANY) or [data.dataset_name(config.data)]
    name = label_account(config.privacy.dataset or accounts[0])
    try:
        claim = reserve_all(ledger, name, [request], records=records, once=not again)[0]
    except Refused as error:
        if error.reason == "again":
            raise _already_drawn(ledger, table.name, error.dataset, event) from None
        if error.reason not in ("overlap", "renamed"):
            raise
        raise Refused(
            f"{table.name}: some of these labels belong to {error.dataset} in the ledger, and would get a second account. To "
            f"charge them to the same people, type --dataset {error.dataset.removeprefix(LABELS)!r}.",
            dataset=error.dataset,
            reason=error.reason,
        ) from None
    ledger.charge(claim.entry, 1)
    return claim


def _already_drawn(ledger: Ledger, table: str, dataset: str, event: PureDP) -> Refused:
    account = ledger.account(dataset)
    spent, unit = added(*account.events()), account.runs[0].reservation.unit
    note = (
        "" if all(run.state not in OPEN for run in account.runs) else "One draw never ended, and its file may exist. "
    )
    return Refused(
        f"{table}: some of these labels were randomised before ({dataset} in the ledger). {note}Another draw costs epsilon "
        f"{event.epsilon:g} more for one {unit}, {spent + event.epsilon:g} in all, since two files reveal a label better than "
        "one. Train on the earlier file, or type --again to pay for another.",
        dataset=dataset,
        reason="labels_again",
    )


def _flipped(row: Row, unit: str, epsilon: float, below: Below) -> str:
    prompt, *sides = (_plain(row.parts[field]) for field in _FIELDS)
    if flipped(epsilon, below):
        sides.reverse()
    owner = {} if unit == "example" else {unit: row.unit}
    return json.dumps({**owner, "prompt": prompt, "chosen": sides[0], "rejected": sides[1]}, default=str) + "\n"


def _plain(text: Any) -> Any:
    """Keeps only role and content of messages: a score or a weight would reveal the label."""
    return [{key: turn.get(key) for key in ("role", "content")} for turn in text] if isinstance(text, list) else text
