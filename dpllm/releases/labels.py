"""Preference labels made private at the source; ``run.subject`` reads them again for training.

Comes in: pairs whose labels are true. Goes out: a file of the same pairs, of which each label was flipped by a coin, and a
record. Coins and the number of flips are kept nowhere.
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
_FIELDS, _DELTA = FIELDS["preference"], 1e-9  # of the ledger's figure alone: the event has none


def randomize(
    config: RunConfig, epsilon: float, output: Path, below: Below = secrets.randbelow, *, again: bool = False
) -> LabelRecord:
    """Flips each label once, writes pairs and record, and charges the account of these labels.

    Of a row, the new file has its prompt, its answers and its unit: a score or a rating would tell the label.

    Args:
        config: Whose pairs, of which unit with at most how many labels (``data.max_examples_per_unit``), and which ledger.
        epsilon: Of one label, above 0.001 and at most 50.
        output: The new file, of JSON lines; its record lies beside it.
        below: As of ``labels.flipped``.
        again: Also where some of these labels were drawn before, which costs as much once more.

    Raises:
        ConfigError: ``output`` is there already.
        DataError: The pairs cannot be read, or one unit has more labels.
        Refused: A draw of some of these labels was begun before, or the ledger has no room; nothing is spent.

    Guarantee:
        The new file is epsilon-differentially private under a change of one label, and max_labels epsilon under a change of all
        labels of one unit; delta is 0. Prompts, answers and units are as they were, and are not protected.
    """
    number(
        "--epsilon", epsilon, 1e-3, 50.0
    )  # below, labels are coins, and the debiased loss divides by next to nothing
    with alone(output, output.with_name(f".{output.name}.lock")), scratch() as cache:
        if output.suffix != ".jsonl":
            raise ConfigError(f"--output {output}: is a file of JSON lines. Type a name that ends with .jsonl.")
        if existing := next((path for path in (output, record_of(output)) if path.exists()), None):
            raise ConfigError(f"{existing}: is there already, and would be lost. Type another --output.")
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
            write_json(
                record_of(output), record.to_json(), mode=0o600
            )  # first: a file without it would be taken as true
            write_whole(output, text, mode=0o600)
            ledger.finish(claim.entry, "completed")
            return record


def _checked_table(settings: DataConfig, cache: Path) -> data.Table:
    if (previous := randomised(settings)) is not None:
        raise Refused(
            f"{previous}: its labels were randomised already ({record_of(previous).name} lies beside it): the loss could not "
            "know that they were flipped twice. Train on it as it is."
        )
    if settings.unit in _FIELDS:
        raise ConfigError(
            f"--unit {settings.unit}: is a text, and which one it is follows from the label. Name another column."
        )
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
                f"{table.location(position)} has a message whose content is no text, which could tell a label. Drop the row."
            )
    return table


def _charge(ledger: Ledger, config: RunConfig, table: data.Table, epsilon: float, again: bool) -> Claim:
    records = fingerprint(table.parts(), _FIELDS, ledger.records.label_key())
    if config.data.unit == "example" and len(records.hashes) // HASH_BYTES < records.num_records:
        raise DataError(
            f"{table.name}: some pairs stand there twice, and their label would be flipped twice for one payment. Drop them, or "
            "type --unit and --max-labels."
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
            f"{table.name}: some of these labels are of {error.dataset} in the ledger, and elsewhere they would have a second "
            f"account. To charge them to the same people, type --dataset {error.dataset.removeprefix(LABELS)!r}.",
            dataset=error.dataset,
            reason=error.reason,
        ) from None
    ledger.charge(claim.entry, 1)
    return claim


def _already_drawn(ledger: Ledger, table: str, dataset: str, event: PureDP) -> Refused:
    account = ledger.account(dataset)
    held, unit = added(*account.events()), account.runs[0].reservation.unit
    died = "" if all(run.state not in OPEN for run in account.runs) else "One never ended, and its file may be there. "
    return Refused(
        f"{table}: some of these labels were randomised before ({dataset} in the ledger). {died}Another draw costs epsilon "
        f"{event.epsilon:g} more for one {unit}, {held + event.epsilon:g} in all, since two files tell a label better than "
        "one. Train on the file of that time, or type --again to pay for another.",
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
    """Of messages, who says what: a score or a weight of one would tell the label."""
    return [{key: turn.get(key) for key in ("role", "content")} for turn in text] if isinstance(text, list) else text
