"""A synthetic data set: its card from synthetic.json and the model's statement, its rows, and that statement by itself.

Comes in: the folder that ``statement.synthetic`` lays out, and the run directory around it where there is one. Goes out: checks.
The weights are not here: what of the statement needs them or the audit's files is looked at where the model is published. Opens
regular files of bounded size only, follows no link, and keeps no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from dpllm.card import dataset_card
from dpllm.files import CARD, sha256
from dpllm.records import Json, NotAStatement
from dpllm.run.directory import RunDir
from dpllm.statement import synthetic
from dpllm.statement.synthetic import MODEL_BLOCK, MODEL_CARD, RECORD, ROWS, Synthetic, Written
from dpllm.text import control
from dpllm.verification import check_export
from dpllm.verification.values import (
    Check,
    Published,
    Wrong,
    asserted,
    failed,
    fit,
    guarded,
    listed,
    parsed,
    read_bytes,
    read_object,
    read_text,
    regular,
    verified,
)

MOST_BYTES, MOST_LINE, MOST_ROWS = 2**32, 2**22, 5_000_000
"""Of data/train.jsonl; five million rows take half a minute."""
_OF_AUTHOR = {"license", "license_name", "license_link", "language", "pretty_name"}
Found = TypeVar("Found")
OF_MODEL = "model: "
"""Before the names of checks of run/."""
_AGAIN = "Take the folder from where it was published, or write its card again: dpllm card RUN/synthetic."


@dataclass(frozen=True)
class DataSet:
    """What lies in the folder.

    Attributes:
        directory: The folder.
        record: synthetic.json.
        card: README.md.
        model: run/, which has the statement of the model that wrote the rows, and the run directory where it is at hand.
    """

    directory: Path
    record: Synthetic
    card: str
    model: Published


def run_of(directory: Path) -> RunDir | None:
    """The run directory that a data set lies in; None elsewhere."""
    run = RunDir(directory.absolute().parent)
    return run if run.config.is_file() and (run.export / CARD).is_file() else None


def check(
    directory: Path, ledger: str | None, of_model: Mapping[str, Callable[[Published], Iterator[Check]]]
) -> Iterator[Check]:
    """All checks of a data set, in a fixed order; ``of_model``: those of the statement in run/."""

    def of_run(look: Callable[[Published], Iterator[Check]]) -> Callable[[DataSet], Iterator[Check]]:
        return lambda found: (replace(one, name=f"{OF_MODEL}{one.name}") for one in look(found.model))

    steps = [*_CHECKS, *((f"{OF_MODEL}{name}", of_run(look)) for name, look in of_model.items()), ("model", _said)]
    yield from of_folder(RECORD, lambda: _read(directory, ledger), steps)


def of_folder(
    name: str, look: Callable[[], Found], steps: Sequence[tuple[str, Callable[[Found], Iterator[Check]]]]
) -> Iterator[Check]:
    """Whether README.md and the record ``name`` can be read, and if so each step."""
    try:
        found = look()
    except Wrong as error:
        yield failed("data set", str(error))
        return
    yield verified("data set", f"README.md and {name} can be read, and the latter follows schema version 1.")
    for step, check in steps:
        yield from guarded(step, check, found)


def record_of(path: Path, read: Callable[[Json], Found], again: str) -> Found:
    """A record, which follows its schema."""
    stated = read_object(path)
    try:
        return read(stated)
    except NotAStatement as error:
        raise Wrong(f"{path.name} does not follow its schema: {'; '.join(error.problems[:3])}. {again}") from None


def _said(found: DataSet) -> Iterator[Check]:
    yield asserted(
        "model",
        "that weights of this statement wrote these rows, from the prompts and settings that are named, is the author's word. "
        "Weights and audit are verified where the model is published.",
    )


def _read(directory: Path, ledger: str | None) -> DataSet:
    record = record_of(directory / RECORD, synthetic.read, _AGAIN)
    block, page = read_object(directory / MODEL_BLOCK), read_text(directory / MODEL_CARD)
    if (run := run_of(directory)) is not None:
        fit(run.config, run.run)
    model = Published((directory / MODEL_BLOCK).parent, block, page, run, ledger)
    return DataSet(directory, record, read_text(directory / CARD), model)


def _files(found: DataSet) -> Iterator[Check]:
    """The very files that the folder consists of, with the stated hashes."""
    names, problems = check_export.regular_files(found.directory, strict=found.model.run is not None)
    of_run = synthetic.of_run(found.model.record)
    hashed = [ROWS, *of_run]
    found.model.hashes.update(
        {name: found.record.files.get(mine, "") for mine, name in of_run.items() if mine in names}
    )
    yield hashed_files(found.directory, names, problems, found.record.files, [RECORD, *hashed], _AGAIN)


def hashed_files(
    directory: Path, names: list[str], problems: list[str], stated: Mapping[str, str], due: Sequence[str], again: str
) -> Check:
    """The files of a folder, and problems with them, against what is ``due``: the record first, then what it has hashes of."""
    record, *hashed = due
    problems = problems + [f"{name} is missing" for name in sorted({CARD, *due} - set(names))]
    problems += [f"{name} does not belong in a data set" for name in names if name not in (CARD, *due)]
    if wrong := sorted(stated.keys() ^ set(hashed)):
        problems.append(f"{record} has too many or too few hashes ({listed(wrong)})")
    if problems:
        raise Wrong(f"{listed(problems)}. {again}")
    changed = []
    for name in hashed:
        with regular(directory / name, MOST_BYTES if name == ROWS else None):
            changed += [name] if sha256(directory / name, follow=False) != stated[name] else []
    if changed:
        raise Wrong(f"{listed(changed)} changed since the card was written. {again}")
    return verified("files", f"SHA-256 of {listed(hashed)}; none missing, none extra.")


def _rows(found: DataSet) -> Iterator[Check]:
    yield rows(found.directory, found.record, _asked(found), _AGAIN)


def rows(directory: Path, record: Written, asked: set[str] | None, again: str) -> Check:
    """Each line is one row, with the stated columns in their order, which hold text, and codes that could be asked for."""
    columns, codes, number = list(record.columns), record.control, 0
    with regular(directory / ROWS, MOST_BYTES) as file:
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if number > min(record.rows, MOST_ROWS) or len(line) > MOST_LINE:
                raise Wrong(
                    f"line {number} of {ROWS} exceeds the stated rows, {MOST_ROWS:,} or {MOST_LINE:,} bytes. {again}"
                )
            try:
                row = parsed(line, len(columns))
                right = list(row) == columns and all(isinstance(v, str) for v in row.values())
                right = right and (
                    asked is None or control.SEPARATOR.join(row.get(code, "") for code in codes) in asked
                )
            except ValueError:
                right = False
            if not right:
                raise Wrong(f"line {number} of {ROWS} is not text in {', '.join(columns)}, as asked for. {again}")
    if number != record.rows:
        raise Wrong(f"{ROWS} has {number:,} rows, but {record.rows:,} are stated. {again}")
    return verified("rows", f"{number:,}, each with {', '.join(columns)}.")


def _asked(found: DataSet) -> set[str] | None:
    if not found.record.control or not found.model.record.guarantee:
        return None  # anything, since nothing that was released says it
    released = found.model.record.statistics
    return set(released.positive(found.record.shares)) if released else set()


def _record(found: DataSet) -> Iterator[Check]:
    """What synthetic.json says of itself, and of the released statistic that control codes were drawn from."""
    record, statement = found.record, found.model.record
    released = {one.statistic for one in statement.statistics.releases} if statement.statistics else set()
    dropped = sum(record.dropped.values())
    name = control.shares_of(record.control) if record.control else None
    rules = {
        "attempts are not the rows and what was dropped": record.rows + dropped == record.attempts,
        "a column stands twice": len(set(record.columns)) == len(record.columns),
        "columns are not those of control, prompts and text": record.columns
        == (*record.control, *(("text",) if record.prompts is None else ("prompt", "completion"))),
        "shares is not the statistic of the control columns": record.shares
        in ({name} if statement.guarantee else {name, None}),
        f"quality has figures of rows that {MODEL_BLOCK} does not declare public": dataset_card.may_publish(
            record.quality, dataset_card.public_sides(statement)
        ),
        "shares names no statistic on the model's card": record.shares is None or record.shares in released,
    }
    if wrong := [problem for problem, good in rules.items() if not good]:
        raise Wrong(f"{listed(wrong)}. {_AGAIN}")
    asked = f"; {', '.join(record.control)} were asked for as {record.shares} says" if record.shares else ""
    yield verified("record", f"{record.attempts:,} texts were drawn and {dropped:,} dropped{asked}.")
    yield asserted("settings", "sampling, prompts, reasons for dropping, quality, date, software: the author's word.")


def _page(found: DataSet) -> Iterator[Check]:
    """Front matter and marked part of README.md, which follow from synthetic.json and run/privacy.json."""
    of = found.record, found.model.record
    yield from page(
        found.card, dataset_card.front_matter(*of), dataset_card.render(*of), f"{RECORD} and {MODEL_BLOCK}", _AGAIN
    )


def page(card: str, matter: Json, parts: Mapping[str, str], source: str, again: str) -> Iterator[Check]:
    """A card against the front matter and the marked parts that follow from its record; ``again``: what to do about others."""
    stated = check_export.matter_of(card, matter.keys() | _OF_AUTHOR)
    if wrong := sorted(key for key in matter if not check_export.same(stated.get(key), matter[key])):
        yield failed("front matter", f"{listed(wrong)} do not follow from {source}. {again}")
    else:
        yield verified("front matter", f"follows from {source}; license and language are the author's.")
    yield from check_export.page(card, parts, source, again)


def _run(found: DataSet) -> Iterator[Check]:
    """run/ against the card that the run has now."""
    if (run := found.model.run) is None:
        return
    for mine, name in synthetic.of_run(found.model.record).items():
        if read_bytes(run.export / name) != read_bytes(found.directory / mine):
            raise Wrong(f"{mine} is not the run's current {name}. Write the card again: dpllm card RUN/synthetic.")
    yield verified("run", "run/ holds the card and the statement that the run has now, byte for byte.")


_CHECKS: tuple[tuple[str, Callable[[DataSet], Iterator[Check]]], ...] = (
    ("files", _files),
    ("rows", _rows),
    ("record", _record),
    ("card", _page),
    ("run", _run),
)
