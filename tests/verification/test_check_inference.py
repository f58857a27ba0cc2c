"""Texts by private inference verify as they lie there; every change of them is seen, or printed as the author's word."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from published import endless_is_found_soon, failing
from written_rows import ROWS, write_rows
from written_texts import EVENT, inferred, make_texts, stated, write_texts

from dpllm.card.inference import Inference
from dpllm.ledger import Ledger, RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import BoundedRange
from dpllm.statement.run_files import LedgerRecord
from dpllm.statement.state import composed
from dpllm.verification.values import MOST
from dpllm.verification.verify import verify

Json = dict[str, Any]
ALONE = {"control": [], "shares": None, "columns": ["text"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("made") / "texts")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "texts"))


def forged(folder: Path, **changes: Any) -> Path:
    """The whole folder anew around a changed record, as somebody with a motive would."""
    return write_texts(folder, Inference.checked({**stated(folder), **changes}))


def test_it_verifies_as_it_was_made(made: Path) -> None:
    results = {check.name: check.status for check in verify(made).checks}
    assert "failed" not in results.values()
    computed = ("files", "rows", "record", "batches", "epsilon", "cross-check", "statistics")
    computed += ("limits of attackers", "front matter", "inference in README.md")
    assert {results[name] for name in computed} == {"verified"}
    said = ("writing", "data", "circumstances", "ledger", "values of statistics", "text of the author")
    assert {results[name] for name in said} == {"asserted"}


def test_without_control_it_verifies_without_statistics_and_per_unit_too(tmp_path: Path) -> None:
    assert failing(make_texts(tmp_path / "a", **ALONE)) == set()
    folder = make_texts(tmp_path / "b", **ALONE, unit="author", max_examples_per_unit=3)
    assert failing(folder) == set()
    assert "the column author stands for one person" in (folder / "README.md").read_text("utf-8")


def test_n_that_was_declared_bounds_no_batches_and_is_said_to_be_declared(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "a", **ALONE, neighbouring_relation="add_or_remove_one", num_units=500)
    results = {check.name: check for check in verify(folder).checks}
    assert not verify(folder).failed
    assert results["batches"].status == "asserted"
    assert "declared" in results["batches"].detail
    assert "as declared, not counted" in (folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["inference.json", "README.md", "data/train.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "link", "giant"])
def test_a_file_without_end_is_a_failed_check_soon(folder: Path, name: str, kind: str) -> None:
    endless_is_found_soon(folder, name, kind, MOST["train.jsonl"])


# Everything consistently.

OF_EVENT = {"epsilon", "cross-check", "statistics", "limits of attackers"}
SMALLER = {"type": "bounded_range", "range": EVENT.range / 2, "count": EVENT.count}
UNKNOWN = dict.fromkeys(("epsilon", "delta", "unit", "neighbouring_relation", "event", "entry", "files_digest"))
LEARNED = {"base": {"name": "m", "guarantee": False, "dataset": "builtin:clinic", **UNKNOWN}, "ancestors": []}
LEARNED |= {"same_dataset": True, "dataset": "builtin:clinic", "composed": None, "reason": "none"}
CONSISTENT: dict[str, tuple[Json, set[str]]] = {
    "a smaller range": ({"event": SMALLER}, {"record", *OF_EVENT}),
    "fewer draws": ({"event": {**EVENT.to_json(), "count": 12}}, {"record", *OF_EVENT}),
    "a larger B": ({"batch_size": 41}, {"record"}),
    "a larger tau": ({"temperature": 1.5}, {"record"}),
    "a larger T": ({"max_new_tokens": 25}, {"record"}),
    "a smaller epsilon": ({"epsilon": 1.9}, {"epsilon"}),
    "a larger delta": ({"delta": 1e-4}, {"epsilon", "cross-check", "statistics"}),
    "a delta of 1/N": ({"delta": 1 / 700}, {"record", "epsilon", "cross-check", "statistics"}),
    "more units than there are": ({"num_units": 599}, {"record"}),
    "more texts than batches": ({"texts": 18, "dropped": {"duplicate": 6}}, {"record"}),
    "no second accountant": ({"cross_check": None}, {"cross-check"}),
    "a smaller limit": ({"limits": {"auc": 0.6, "gdp_mu": 0.5, "tpr_at_fpr_0.001": 0.002, "tpr_at_fpr_0.01": 0.02}},
                        {"limits of attackers"}),
    "rows": ({"rows": 11, "texts": 14}, {"rows"}),
    "a row too few": ({"rows": 13, "dropped": {"duplicate": 2}}, {"rows"}),
    "dropped": ({"dropped": {}}, {"record"}),
    "a column too many": ({"columns": ["visit", "text", "more"]}, {"record"}),
    "a column twice": ({"columns": ["visit", "text", "text"]}, {"rows", "record"}),
    "their order": ({"columns": ["text", "visit"]}, {"record"}),
    "codes that are denied": ({"control": [], "shares": None}, {"record"}),
    "shares without control": ({"control": []}, {"record"}),
    "control without shares": ({"shares": None}, {"rows", "record"}),
    "no statistics": ({"statistics": None}, {"rows", "record", "limits of attackers"}),
    "a prompt without a record": ({"prompt": "Write a note."}, {"record"}),
    "another unit": ({"unit": "author"}, {"record", "statistics"}),
    "less that is not covered": ({"not_covered": ["nothing"]}, {"record"}),
    "another relation": ({"neighbouring_relation": "add_or_remove_one"}, {"statistics"}),
    "rows of one unit": ({"max_examples_per_unit": 3}, {"record"}),
    "an exact figure": ({"quality": {"figures": {"with 8 words of any training row": 0.1}, "evaluation": None}}, {"record"}),
    "an exact figure of evaluation rows": ({"quality": {"figures": {"rows: evaluation": 3}, "evaluation": "e"}}, {"record"}),
    "an exact figure of other public rows": ({"quality": {"figures": {"visit by TSTR: accuracy": 0.9}, "evaluation": "e"},
                                              "data_public": True}, {"record"}),
    "a model that learned the same data": ({"lineage": LEARNED}, {"record", "lineage"}),
    "another accountant": ({"accountant": {"name": "mine", "version": "1", "interval": 1e-4}}, {"epsilon"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSISTENT)
def test_a_record_that_contradicts_itself_the_rows_or_the_event_is_found(folder: Path, name: str) -> None:
    changes, expected = CONSISTENT[name]
    result = [check for check in verify(forged(folder, **changes)).checks if check.status == "failed"]
    assert {check.name for check in result} == expected
    assert not [check for check in result if "privacy.json" in check.detail or "dpllm card" in check.detail]


@pytest.mark.parametrize(
    ("range_", "expected"),
    [(0.2, set()), (0.19999999999999998, {"record"}), (0.2 * (1 + 5e-10), set()), (0.2 * (1 + 2e-9), {"record"})],
)
def test_the_range_of_a_draw_is_not_below_the_exact_one_nor_far_above(
    tmp_path: Path, range_: float, expected: set[str]
) -> None:
    event = {"type": "bounded_range", "range": range_, "count": EVENT.count}
    assert failing(make_texts(tmp_path / "a", event=event)) == expected


@pytest.mark.parametrize("public", ["data_public", "eval_public"])
def test_exact_figures_of_rows_that_are_declared_public_are_allowed(folder: Path, public: str) -> None:
    name = {"data_public": "with 8 words of any training row", "eval_public": "visit by TSTR: macro F1"}[public]
    changes = {"quality": {"figures": {name: 0.1}, "evaluation": "builtin:more"}, public: True}
    assert failing(forged(folder, **changes)) == set()
    assert failing(forged(folder, **{**changes, public: False})) == {"record"}


@pytest.mark.parametrize("value", ["school", "other", ""])
def test_a_code_that_the_released_counts_do_not_name_is_found(folder: Path, value: str) -> None:
    assert failing(write_texts(folder, inferred(), [{**ROWS[0], "visit": value}, *ROWS[1:]])) == {"rows"}


def test_a_number_in_a_row_is_found(folder: Path) -> None:
    write_rows(folder, [{**ROWS[0], "text": 1}, *ROWS[1:]])
    assert failing(folder) == {"files", "rows"}


def test_an_event_that_would_take_hours_is_refused_soon(folder: Path) -> None:
    event = {"type": "bounded_range", "range": 100.0, "count": 10_000}
    started = time.process_time()
    assert "promise" in failing(forged(folder, event=event))
    assert time.process_time() - started < 10


def test_what_another_version_of_the_accountant_states_is_compared_with_room(folder: Path) -> None:
    accountant = {**stated(folder)["accountant"], "version": "0.1"}
    exact = epsilon(EVENT, 1e-5, "zero_out")
    assert failing(forged(folder, accountant=accountant, epsilon=exact * (1 + 1e-5))) == set()
    assert failing(forged(folder, accountant=accountant, epsilon=exact * 0.99)) == {"epsilon"}


def charged(place: Path, event: BoundedRange = EVENT) -> Json:
    """``composed`` of texts that a new ledger was charged for."""
    claim = RunRequest(event=event, delta=1e-5, unit="example", relation="zero_out", num_steps=event.count, run="texts")
    with Ledger(place) as ledger:
        entry = reserve_all(ledger, "notes", [claim])[0].entry
        facts = {
            "dataset": "notes",
            "entry": entry,
            "head": ledger.head(),
            "spent_epsilon": ledger.spent("notes", 1e-5),
        }
    facts |= {"budget": None, "used": None, "final": False, "imported": 0, "group": None}
    return composed(LedgerRecord.pick(facts), 1e-5).to_json()


def test_the_total_is_compared_with_the_ledger(tmp_path: Path) -> None:
    total = charged(tmp_path / "ledger.sqlite")
    folder = make_texts(tmp_path / "a", **ALONE, dataset="notes", composed=total)
    results = {check.name: check.status for check in verify(folder, ledger=str(tmp_path / "ledger.sqlite")).checks}
    assert "failed" not in results.values()
    assert {results["ledger"], results["ledger: entry"]} == {"verified"}
    assert {check.name: check.status for check in verify(folder).checks}["ledger"] == "asserted"
    forged(folder, composed={**total, "spent_epsilon": total["spent_epsilon"] * 1.1})
    assert failing(folder, ledger=str(tmp_path / "ledger.sqlite")) == {"ledger"}
    forged(folder, composed={**total, "spent_epsilon": total["spent_epsilon"] * 0.9})
    assert failing(folder) == {"ledger"}


@pytest.mark.parametrize("other_event", [BoundedRange(EVENT.range / 2, EVENT.count), BoundedRange(EVENT.range, 23)])
def test_an_entry_of_another_event_pays_for_no_texts(tmp_path: Path, other_event: BoundedRange) -> None:
    total = charged(tmp_path / "ledger.sqlite", other_event)
    total["spent_epsilon"] = epsilon(EVENT, 1e-5, "zero_out")
    folder = make_texts(tmp_path / "a", **ALONE, dataset="notes", composed=total)
    assert failing(folder) == set()
    checks = verify(folder, ledger=str(tmp_path / "ledger.sqlite")).checks
    (failed,) = (check.detail for check in checks if check.status == "failed")
    assert "reserved for an event other" in failed


def test_a_ledger_that_the_record_does_not_name_is_no_evidence(folder: Path, tmp_path: Path) -> None:
    charged(tmp_path / "ledger.sqlite")
    assert failing(folder, ledger=str(tmp_path / "ledger.sqlite")) == {"ledger"}


def test_statistics_of_another_dataset_are_found(tmp_path: Path) -> None:
    assert failing(make_texts(tmp_path / "a", composed=charged(tmp_path / "ledger.sqlite"))) == {"record"}
