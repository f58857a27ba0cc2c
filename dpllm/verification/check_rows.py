"""Checks rows that a model wrote: each line is a row as its record describes.

Comes in: a folder of rows. Goes out: checks. That a mechanism drew these rows from the data is asserted, since nobody can compute
it. Stores no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpllm.card.artifact import MODEL
from dpllm.card.inference import Inference
from dpllm.card.synthetic import MODEL_CARD, ROWS, DataSet, Written, codes
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.text import layouts
from dpllm.verification.values import (
    Check,
    Published,
    Wrong,
    asserted,
    parsed,
    read_bytes,
    read_text,
    regular,
    verified,
)

OF_MODEL = "model: "
"""Prefix of the checks of the model that wrote a data set."""
MOST_LINE, MOST_ROWS = 2**22, 5_000_000
"""Bytes of a line and number of rows in data/train.jsonl; five million rows take half a minute."""


def of_model(folder: Published[DataSet]) -> Iterator[Check]:
    """Checks rows by a tuned model."""
    yield _rows(folder, folder.record.record, folder.record.codes)


def current(folder: Published[DataSet]) -> Iterator[Check]:
    """Compares run/ with the run's current card."""
    if folder.run is None:
        return
    for name, exported in folder.record.files.items():
        if read_bytes(folder.run.export / exported) != read_bytes(folder.directory / name):
            raise Wrong(f"{name} is not the run's current {exported}. {folder.again}")
    yield verified("run", "run/ holds the card and the statement that the run has now, byte for byte.")


def model_of(folder: Published[DataSet]) -> Published[PrivacyRecord]:
    """The model that wrote the rows, as far as run/ contains it."""
    data = folder.record
    hashes = {exported: data.record.files.get(name, "") for name, exported in data.files.items()}
    page, run = read_text(folder.directory / MODEL_CARD), folder.directory / "run"
    return Published(MODEL, run, data.statement, page, folder.run, folder.ledger, hashes)


def of_inference(folder: Published[Inference]) -> Iterator[Check]:
    """Checks rows by private inference, and the number of units that voted."""
    record = folder.record
    yield _rows(folder, record, codes(record, record.statistics))
    units = record.texts * record.batch_size
    sizes = f"{record.texts:,} disjoint batches of {record.batch_size:,} are {units:,} units, of {record.num_units:,}"
    if record.neighbouring_relation == "zero_out":
        yield verified("batches", f"{sizes}.")
    else:
        yield asserted("batches", f"{sizes} that were declared, not counted.")


def _rows(folder: Published[Any], record: Written, codes: set[str] | None) -> Check:
    """Checks that each line is one row, with the stated columns of text in order and with released codes."""
    columns, number = list(record.columns), 0
    with regular(folder.directory / ROWS) as file:
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if number > min(record.rows, MOST_ROWS) or len(line) > MOST_LINE:
                raise Wrong(
                    f"line {number} of {ROWS} exceeds the stated rows, {MOST_ROWS:,} or {MOST_LINE:,} bytes. {folder.again}"
                )
            try:
                row = parsed(line, len(columns))
            except ValueError:
                row = {}
            is_row = list(row) == columns and all(isinstance(value, str) for value in row.values())
            code = layouts.SEPARATOR.join(str(row.get(column, "")) for column in record.control)
            if not is_row or not (codes is None or code in codes):
                raise Wrong(
                    f"line {number} of {ROWS} is not text in {', '.join(columns)}, as asked for. {folder.again}"
                )
    if number != record.rows:
        raise Wrong(f"{ROWS} has {number:,} rows, but {record.rows:,} are stated. {folder.again}")
    return verified("rows", f"{number:,}, each with {', '.join(columns)}.")
