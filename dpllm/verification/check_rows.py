"""Rows that a model wrote, after training or by private inference: rows and page against their record, and its promise.

Comes in: the folder that ``card.synthetic`` or ``card.inference`` lays out, and a ledger or none. Goes out: checks. Weights are
not here: what of a model's statement needs them or the audit's files is looked at where the model is published. That a mechanism
drew these rows from such data is asserted: nobody can compute it. Opens regular files of bounded size only, follows no link, and
keeps no row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeVar

from dpllm.card import inference, synthetic
from dpllm.card.inference import Inference
from dpllm.card.synthetic import MODEL_BLOCK, MODEL_CARD, ROWS, Synthetic, Written
from dpllm.files import CARD, sha256
from dpllm.privacy import accounting
from dpllm.privacy.limits import attacker_limits_of
from dpllm.records import Json, NotAStatement, Record
from dpllm.run.directory import RunDir
from dpllm.statement.released import Statistics
from dpllm.text import layouts
from dpllm.verification import check_export, check_ledger, check_promise, costs
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
    tried,
    verified,
)

MOST_BYTES, MOST_LINE, MOST_ROWS = 2**32, 2**22, 5_000_000
"""Of data/train.jsonl; five million rows take half a minute."""
MOST_ABOVE = Fraction(1, 10**9)
"""Relative; how far the range of a draw may lie above the exact one."""
OF_MODEL = "model: "
"""Before the names of checks of run/."""
_OF_AUTHOR = {"license", "license_name", "license_link", "language", "pretty_name"}
_AGAIN = "Take the folder from where it was published, or write its card again: dpllm card RUN/synthetic."
_SAID = {
    "writing": "that this model drew the rows, from these prompts, with this clipping and with random numbers of the operating "
    "system, that no unit voted in two texts, and that nothing of it but the rows was kept",
    "data": "dataset, data_public, eval_public, unit, max_examples_per_unit and num_units",
    "circumstances": "prompt, base_model, top_k, reasons for dropping, quality, date, software, hardware and the rest of "
    "not_covered",
}
Opened = TypeVar("Opened")
Stated = TypeVar("Stated", bound=Record)


def readable(name: str, read: Callable[[], Opened]) -> Generator[Check, None, Opened | None]:
    """Whether README.md and the record ``name`` can be read; returns what was read, or None."""
    try:
        opened = read()
    except Wrong as error:
        yield failed("data set", str(error))
        return None
    yield verified("data set", f"README.md and {name} can be read, and the latter follows schema version 1.")
    return opened


def record_of(path: Path, kind: type[Stated], again: str) -> Stated:
    """A record, which follows its schema."""
    try:
        return kind.checked(read_object(path))
    except NotAStatement as error:
        raise Wrong(f"{path.name} does not follow its schema: {'; '.join(error.problems[:3])}. {again}") from None


# What all rows have in common.


def hashed_files(directory: Path, record: Written, due: Sequence[str], again: str, *, strict: bool = False) -> Check:
    """The very files that a folder consists of: the card, and what is ``due``: the record first, then what it has hashes of."""
    names, problems = check_export.regular_files(directory, strict=strict)
    name, *hashed = due
    problems += [f"{name} is missing" for name in sorted({CARD, *due} - set(names))]
    problems += [f"{name} does not belong in a data set" for name in names if name not in (CARD, *due)]
    if wrong := sorted(record.files.keys() ^ set(hashed)):
        problems.append(f"{name} has too many or too few hashes ({listed(wrong)})")
    if problems:
        raise Wrong(f"{listed(problems)}. {again}")
    changed = []
    for name in hashed:
        with regular(directory / name, MOST_BYTES if name == ROWS else None):
            changed += [name] if sha256(directory / name, follow=False) != record.files[name] else []
    if changed:
        raise Wrong(f"{listed(changed)} changed since the card was written. {again}")
    return verified("files", f"SHA-256 of {listed(hashed)}; none missing, none extra.")


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
                    asked is None or layouts.SEPARATOR.join(row.get(code, "") for code in codes) in asked
                )
            except ValueError:
                right = False
            if not right:
                raise Wrong(f"line {number} of {ROWS} is not text in {', '.join(columns)}, as asked for. {again}")
    if number != record.rows:
        raise Wrong(f"{ROWS} has {number:,} rows, but {record.rows:,} are stated. {again}")
    return verified("rows", f"{number:,}, each with {', '.join(columns)}.")


def _asked(record: Written, released: Statistics | None) -> set[str] | None:
    """Codes that texts can have been asked for; None: any, as there is no control."""
    if not record.control:
        return None
    return set(released.positive(record.shares)) if released else set()


def _consistent(record: Written, drawn: int, texts: Sequence[str], released: Statistics | None) -> dict[str, bool]:
    """What any such record says of itself, of so many texts ``drawn`` that stand in the columns ``texts``."""
    shown = {one.statistic for one in released.releases} if released else set()
    return {
        "texts are not the rows and what was dropped": record.rows + sum(record.dropped.values()) == drawn,
        "a column stands twice": len(set(record.columns)) == len(record.columns),
        f"columns are not those of control and {', '.join(texts)}": record.columns == (*record.control, *texts),
        "shares names no statistic that is shown": record.shares is None or record.shares in shown,
    }


def _refuse_broken(rules: Mapping[str, bool], again: str) -> None:
    if wrong := [problem for problem, good in rules.items() if not good]:
        raise Wrong(f"{listed(wrong)}. {again}")


def page(card: str, matter: Json, parts: Mapping[str, str], source: str, again: str) -> Iterator[Check]:
    """A card against the front matter and the marked parts that follow from its record; ``again``: what to do about others."""
    stated = check_export.matter_of(card, matter.keys() | _OF_AUTHOR)
    if wrong := sorted(key for key in matter if not check_export.same(stated.get(key), matter[key])):
        yield failed("front matter", f"{listed(wrong)} do not follow from {source}. {again}")
    else:
        yield verified("front matter", f"follows from {source}; license and language are the author's.")
    yield from check_export.page(card, parts, source, again)


# By a tuned model.


def run_of(directory: Path) -> RunDir | None:
    """The run directory that a data set lies in; None elsewhere."""
    run = RunDir(directory.absolute().parent)
    return run if run.config.is_file() and (run.export / CARD).is_file() else None


def check_synthetic(
    directory: Path, ledger: str | None, of_model: Mapping[str, Callable[[Published], Iterator[Check]]]
) -> Iterator[Check]:
    """All checks of a data set by a tuned model, in a fixed order; ``of_model``: those of the statement in run/."""

    def read() -> tuple[Synthetic, str, Published]:
        record = record_of(directory / synthetic.RECORD, Synthetic, _AGAIN)
        block, page = read_object(directory / MODEL_BLOCK), read_text(directory / MODEL_CARD)
        if (run := run_of(directory)) is not None:
            fit(run.config, run.run)
        model = Published((directory / MODEL_BLOCK).parent, block, page, run, ledger)
        return record, read_text(directory / CARD), model

    if (opened := (yield from readable(synthetic.RECORD, read))) is None:
        return
    record, card, model = opened
    yield from guarded("files", partial(_files, directory, record), model)
    yield from guarded("rows", partial(_rows, directory, record), model)
    yield from guarded("record", partial(_record, record), model)
    yield from guarded("card", partial(_card, card, record), model)
    yield from guarded("run", partial(_run, directory), model)
    for name, look in of_model.items():
        for check in guarded(name, look, model):
            yield replace(check, name=f"{OF_MODEL}{check.name}")
    yield asserted(
        "model",
        "that weights of this statement wrote these rows, from the prompts and settings that are named, is the author's word. "
        "Weights and audit are verified where the model is published.",
    )


def _files(directory: Path, record: Synthetic, model: Published) -> Iterator[Check]:
    copies = synthetic.of_run(model.record)
    model.hashes.update({theirs: record.files.get(name, "") for name, theirs in copies.items()})
    due = [synthetic.RECORD, ROWS, *copies]
    yield hashed_files(directory, record, due, _AGAIN, strict=model.run is not None)


def _rows(directory: Path, record: Synthetic, model: Published) -> Iterator[Check]:
    released, guarantee = model.record.statistics, model.record.guarantee
    yield rows(directory, record, _asked(record, released) if guarantee else None, _AGAIN)


def _record(record: Synthetic, model: Published) -> Iterator[Check]:
    """What synthetic.json says of itself, and of the released statistic that control codes were drawn from."""
    statement, texts = model.record, ["text"] if record.prompts is None else ["prompt", "completion"]
    name = layouts.shares_of(record.control) if record.control else None
    rules = _consistent(record, record.attempts, texts, statement.statistics) | {
        "shares is not the statistic of the control columns": record.shares
        in ({name} if statement.guarantee else {name, None}),
        f"quality has figures of rows that {MODEL_BLOCK} does not declare public": synthetic.may_publish(
            record.quality, synthetic.public_sides(statement)
        ),
    }
    _refuse_broken(rules, _AGAIN)
    asked = f"; {', '.join(record.control)} were asked for as {record.shares} says" if record.shares else ""
    dropped = sum(record.dropped.values())
    yield verified("record", f"{record.attempts:,} texts were drawn and {dropped:,} dropped{asked}.")
    yield asserted("settings", "sampling, prompts, reasons for dropping, quality, date, software: the author's word.")


def _card(card: str, record: Synthetic, model: Published) -> Iterator[Check]:
    """Front matter and marked part of README.md, which follow from synthetic.json and run/privacy.json."""
    matter, parts = synthetic.front_matter(record, model.record), synthetic.render(record, model.record)
    yield from page(card, matter, parts, f"{synthetic.RECORD} and {MODEL_BLOCK}", _AGAIN)


def _run(directory: Path, model: Published) -> Iterator[Check]:
    """run/ against the card that the run has now."""
    if model.run is None:
        return
    for name, theirs in synthetic.of_run(model.record).items():
        if read_bytes(model.run.export / theirs) != read_bytes(directory / name):
            raise Wrong(f"{name} is not the run's current {theirs}. Write the card again: dpllm card RUN/synthetic.")
    yield verified("run", "run/ holds the card and the statement that the run has now, byte for byte.")


# By private inference.


def check_inference(directory: Path, ledger: str | None) -> Iterator[Check]:
    """All checks of texts by private inference, in a fixed order."""

    def read() -> tuple[Inference, str]:
        return record_of(directory / inference.RECORD, Inference, costs.OF_ROWS), read_text(directory / CARD)

    if (opened := (yield from readable(inference.RECORD, read))) is None:
        return
    record, card = opened
    asked = _asked(record, record.statistics)
    yield tried("files", hashed_files, directory, record, [inference.RECORD, ROWS], costs.OF_ROWS)
    yield tried("rows", rows, directory, record, asked, costs.OF_ROWS)
    yield from guarded("record", _sizes, record)
    yield from guarded("promise", _promise, record)
    yield from guarded("ledger", partial(_ledger, ledger), record)
    yield from guarded("card", partial(_card_of_texts, card), record)
    for name, what in _SAID.items():
        yield asserted(name, f"{what}: the word of whoever wrote the rows.")


def _sizes(record: Inference) -> Iterator[Check]:
    """What the record says of itself: rows, columns, texts, and the public sizes."""
    statistics, size, units = record.statistics, record.num_units, record.texts * record.batch_size
    declared = record.neighbouring_relation != "zero_out"
    public = synthetic.declared_sides(record.data_public, record.eval_public)
    rules = _consistent(record, record.texts, ["text"], statistics) | {
        "all batches have more units than there are, so that some would vote twice": declared or units <= size,
        "shares is not the statistic of the control columns": record.shares
        == (layouts.shares_of(record.control) if record.control else None),
        "max_examples_per_unit belongs to another unit": record.unit != "example" or not record.max_examples_per_unit,
        "delta is not below 1/N, so that publishing one record outright would satisfy it": record.delta * size < 1,
        "the prompt has no place {text} for a record": "{text}" in record.prompt,
        "not_covered leaves something out": {*inference.not_covered(record.unit, record.neighbouring_relation)}
        <= {*record.not_covered},
        "statistics are of another dataset": not (statistics and record.composed)
        or record.composed.dataset == statistics.dataset,
        "quality has figures of rows that are not declared public": synthetic.may_publish(record.quality, public),
    }
    _refuse_broken(rules, costs.OF_ROWS)
    dropped = sum(record.dropped.values())
    yield verified("record", f"{record.texts:,} texts were begun and {dropped:,} dropped; delta is below 1/N.")
    sizes = f"{record.texts:,} disjoint batches of {record.batch_size:,} are {units:,} units, of {size:,}"
    if declared:
        yield asserted("batches", f"{sizes} that were declared, not counted.")
    else:
        yield verified("batches", f"{sizes}.")


def _promise(record: Inference) -> Iterator[Check]:
    """The event against C, B, tau and T; epsilon and all beside it against the event."""
    yield tried("event", _event, record)
    # Such a promise protects nobody, and would take minutes.
    if accounting.epsilon(record.event, record.delta, record.neighbouring_relation, "rdp") > costs.LARGE:
        raise Wrong(f"the event costs an epsilon above {costs.LARGE:g}, which is no promise. {costs.OF_ROWS}")
    yield tried("epsilon", check_promise.check_epsilon, record)
    yield tried("cross-check", check_promise.check_cross_check, record)
    yield from guarded("statistics", _statistics, record)
    yield from guarded("lineage", _lineage, record)
    yield tried("limits of attackers", _limits, record)


def _event(record: Inference) -> Check:
    least, event = inference.eta(record), record.event
    if event.count != record.max_new_tokens or not least <= Fraction(event.range) <= least * (1 + MOST_ABOVE):
        raise Wrong(
            f"the event is {event.count} draws of range {event.range:.12g}, but {record.max_new_tokens} tokens are stated, and "
            f"2 C / (B tau) is {float(least):.12g}. {costs.OF_ROWS}"
        )
    return verified("event", f"{event.count} draws of range {event.range:.6g}, which is 2 C / (B tau).")


def _statistics(record: Inference) -> Iterator[Check]:
    if record.statistics is not None:
        yield from check_promise.check_beside(record.statistics, record, record.num_units, True)


def _lineage(record: Inference) -> Iterator[Check]:
    if record.lineage and (record.lineage.same_dataset or record.lineage.composed):
        raise Wrong(f"an earlier model was trained on the same dataset, which is in no total of these. {costs.OF_ROWS}")
    yield from check_promise.lineage_of(record.lineage, record, record.composed)


def _limits(record: Inference) -> Check:
    fresh = attacker_limits_of(inference.whole(record.event, record.statistics), record.neighbouring_relation)
    costs.follows({"limits": record.limits.to_json()}, {"limits": fresh}, record)
    return verified("limits of attackers", "follow from the event, with the statistics.")


def _ledger(ledger: str | None, record: Inference) -> Iterator[Check]:
    if record.composed is not None:
        yield from check_ledger.charged(record.composed, record, record.statistics, 0, ledger)
    elif ledger is not None:
        raise Wrong(f"a ledger was given, but {inference.RECORD} names no entry in any. Ask its author which this is.")
    else:
        yield asserted("ledger", f"{inference.RECORD} names none, so no total over several releases is stated.")


def _card_of_texts(card: str, record: Inference) -> Iterator[Check]:
    yield from page(card, inference.front_matter(record), inference.render(record), inference.RECORD, costs.OF_ROWS)
