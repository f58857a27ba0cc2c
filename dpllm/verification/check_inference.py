"""Texts by private inference: rows and page against inference.json, and its promise from the event that it states.

Comes in: the folder that ``statement.inference`` lays out, and a ledger or none. Goes out: checks. That this mechanism drew these
rows from such data is asserted: nobody can compute it from what is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from dpllm.card import dataset_card, inference_card
from dpllm.files import CARD
from dpllm.privacy import accounting
from dpllm.privacy.limits import attacker_limits_of
from dpllm.statement import inference, state
from dpllm.statement.inference import RECORD, Inference
from dpllm.statement.synthetic import ROWS
from dpllm.text import control
from dpllm.verification import check_dataset, check_export, check_ledger, check_promise, costs
from dpllm.verification.values import (
    Check,
    Wrong,
    asserted,
    guarded,
    listed,
    read_text,
    tried,
    verified,
)

MOST_ABOVE = Fraction(1, 10**9)
"""Relative; how far the range of a draw may lie above the exact one."""
_AGAIN = costs.OF_ROWS
_SAID = {
    "writing": "that this model drew the rows, from these prompts, with this clipping and with random numbers of the operating "
    "system, that no unit voted in two texts, and that nothing of it but the rows was kept",
    "data": "dataset, data_public, eval_public, unit, max_examples_per_unit and num_units",
    "circumstances": "prompt, base_model, top_k, reasons for dropping, quality, date, software, hardware and the rest of "
    "not_covered",
}


class Folder(NamedTuple):
    """What lies in it, and where its ledger is."""

    directory: Path
    record: Inference
    card: str
    ledger: str | None


def check(directory: Path, ledger: str | None) -> Iterator[Check]:
    """All checks of such a folder, in a fixed order."""

    def look() -> Folder:
        record = check_dataset.record_of(directory / RECORD, inference.read, _AGAIN)
        return Folder(directory, record, read_text(directory / CARD), ledger)

    yield from check_dataset.of_folder(RECORD, look, _CHECKS)


def _author(found: Folder) -> Iterator[Check]:
    for name, what in _SAID.items():
        yield asserted(name, f"{what}: the word of whoever wrote the rows.")


def _rows(found: Folder) -> Iterator[Check]:
    record, (names, problems) = found.record, check_export.regular_files(found.directory, strict=False)
    due = [RECORD, ROWS]
    yield tried("files", check_dataset.hashed_files, found.directory, names, problems, record.files, due, _AGAIN)
    released = record.statistics
    asked = (set(released.positive(record.shares)) if released else set()) if record.control else None
    yield tried("rows", check_dataset.rows, found.directory, record, asked, _AGAIN)


def _record(found: Folder) -> Iterator[Check]:
    """What the record says of itself: rows, columns, texts, and the public sizes."""
    record, dropped, shown = found.record, sum(found.record.dropped.values()), found.record.statistics
    released = [one.statistic for one in shown.releases] if shown else []
    shares = control.shares_of(record.control) if record.control else None
    declared, size, units = (
        record.neighbouring_relation != "zero_out",
        record.num_units,
        record.texts * record.batch_size,
    )
    charged = record.composed.dataset if record.composed else None
    rules = {
        "texts are not the rows and what was dropped": record.rows + dropped == record.texts,
        "all batches have more units than there are, so that some would vote twice": declared or units <= size,
        "columns are not those of control and text": record.columns == (*record.control, "text"),
        "a column stands twice": len(set(record.columns)) == len(record.columns),
        "shares is not the statistic of the control columns": record.shares == shares,
        "shares is not among the statistics": shares is None or shares in released,
        "max_examples_per_unit belongs to another unit": record.unit != "example" or not record.max_examples_per_unit,
        "delta is not below 1/N, so that publishing one record outright would satisfy it": record.delta * size < 1,
        "the prompt has no place {text} for a record": "{text}" in record.prompt,
        "not_covered leaves something out": {*state.not_covered(record.unit, record.neighbouring_relation)}
        <= {*record.not_covered},
        "statistics are of another dataset": not shown or charged in (None, shown.dataset),
        "quality has figures of rows that are not declared public": dataset_card.may_publish(
            record.quality, dataset_card.declared_sides(record.data_public, record.eval_public)
        ),
    }
    if wrong := [problem for problem, good in rules.items() if not good]:
        raise Wrong(f"{listed(wrong)}. {_AGAIN}")
    yield verified("record", f"{record.texts:,} texts were begun and {dropped:,} dropped; delta is below 1/N.")
    sizes = f"{record.texts:,} disjoint batches of {record.batch_size:,} are {units:,} units, of {size:,}"
    told = asserted if declared else verified
    yield told("batches", f"{sizes} that were declared, not counted." if declared else f"{sizes}.")


def _promise(found: Folder) -> Iterator[Check]:
    """The event against C, B, tau and T; epsilon and all beside it against the event."""
    record = found.record
    yield tried("event", _event, record)
    # Such a promise protects nobody, and would take minutes.
    if accounting.epsilon(record.event, record.delta, record.neighbouring_relation, "rdp") > costs.LARGE:
        raise Wrong(f"the event costs an epsilon above {costs.LARGE:g}, which is no promise. {_AGAIN}")
    yield tried("epsilon", check_promise.check_epsilon, record)
    yield tried("cross-check", check_promise.check_cross_check, record)
    yield from guarded("statistics", _statistics, record)
    yield from guarded("lineage", _lineage, record)
    yield tried("limits of attackers", _limits, record)


def _statistics(record: Inference) -> Iterator[Check]:
    if record.statistics is not None:
        yield from check_promise.check_beside(record.statistics, record, record.num_units, True)


def _lineage(record: Inference) -> Iterator[Check]:
    if (before := record.lineage) and before.same_dataset and before.composed is None:
        raise Wrong(f"earlier models were trained on the same dataset, but no total is stated. {_AGAIN}")
    yield from check_promise.lineage_of(before, record, record.composed)


def _event(record: Inference) -> Check:
    least, event = inference.eta(record), record.event
    if event.count != record.max_new_tokens or not least <= Fraction(event.range) <= least * (1 + MOST_ABOVE):
        raise Wrong(
            f"the event is {event.count} draws of range {event.range:.12g}, but {record.max_new_tokens} tokens are stated, and "
            f"2 C / (B tau) is {float(least):.12g}. {_AGAIN}"
        )
    return verified("event", f"{event.count} draws of range {event.range:.6g}, which is 2 C / (B tau).")


def _limits(record: Inference) -> Check:
    name = "limits of attackers"
    if record.limits is None:
        return asserted(name, "none are stated besides those that follow from epsilon and delta.")
    fresh = attacker_limits_of(inference.whole(record.event, record.statistics), record.neighbouring_relation)
    costs.follows({"limits": record.limits.to_json()}, {"limits": fresh}, record)
    return verified(name, "follow from the event, with the statistics.")


def _ledger(found: Folder) -> Iterator[Check]:
    record = found.record
    if record.composed is not None:
        yield from check_ledger.charged(record.composed, record, record.statistics, 0, found.ledger)
    elif found.ledger is not None:
        raise Wrong(f"a ledger was given, but {RECORD} names no entry in any. Ask its author which this is.")
    else:
        yield asserted("ledger", f"{RECORD} names none, so no total over several releases is stated.")


def _page(found: Folder) -> Iterator[Check]:
    record = found.record
    yield from check_dataset.page(
        found.card, inference_card.front_matter(record), inference_card.render(record), RECORD, _AGAIN
    )


_CHECKS: tuple[tuple[str, Callable[[Folder], Iterator[Check]]], ...] = (
    ("rows", _rows),
    ("record", _record),
    ("promise", _promise),
    ("ledger", _ledger),
    ("card", _page),
    ("author's word", _author),
)
