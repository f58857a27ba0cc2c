"""What a statement says of the account of its labels, against the draws that taught the models before it and against a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpllm.ledger import Ledger, RunRequest, budgets
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.events import Imported, PureDP
from dpllm.privacy.releases import flip_probability
from dpllm.records import NotAStatement
from dpllm.statement import lineage
from dpllm.statement.released import Labels
from dpllm.verification import check_released
from dpllm.verification.values import Wrong
from dpllm.verification.verify import verify

NOTES = "labels of notes"


def draw(entry: str = "aa", **changes: Any) -> Labels:
    """Three labels of epsilon 1.5 for one annotator."""
    settings = {"epsilon": 1.5, "max_labels": 3, "unit": "who", "dataset": NOTES, "entry": entry, **changes}
    settings.setdefault("unit_epsilon", settings["epsilon"] * settings["max_labels"])
    settings.setdefault("probability", flip_probability(settings["epsilon"]))
    return Labels.pick(
        settings, mechanism="randomised response", neighbouring_relation="label_changed", date="2026-11-26"
    )


def total(own: Labels, *before: Labels, held: float = 0.0) -> float | None:
    return own.with_account(held, before).account_epsilon


def test_draws_of_one_account_add_up_and_one_that_is_used_twice_is_paid_once() -> None:
    assert total(draw()) == 4.5
    assert total(draw("bb"), draw()) == 9.0
    assert total(draw(), draw()) == 4.5
    assert total(draw("bb"), draw(), draw("cc"), draw()) == 13.5
    assert total(draw("bb"), draw(dataset="labels of others")) == 4.5


def test_the_largest_total_that_anybody_knows_is_stated() -> None:
    assert total(draw(), held=9.0) == 9.0
    assert total(draw("bb"), draw(account_epsilon=20.0)) == 20.0
    assert total(draw(account_epsilon=20.0), held=9.0) == 20.0


def test_units_that_are_counted_otherwise_have_no_total() -> None:
    assert total(draw("bb", account_epsilon=4.5), draw(unit="team")) is None
    assert total(draw("bb"), draw(unit="team", dataset="labels of others")) == 4.5


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"account_epsilon": total} for total in (0.0, -1.0, float("inf"), "9", 4.0)
        ),  # a number, and not below this draw
        *({"unit_epsilon": 0.1}, {"unit_epsilon": 4.6}, {"unit": "example"}, {"probability": 0.2}),
    ],
)
def test_a_draw_whose_figures_are_not_those_of_its_epsilon_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises((NotAStatement, ValueError)):
        draw(**wrong)


def said(own: Labels | None, *before: Labels, ledger: Path | None = None) -> list[str]:
    record = SimpleNamespace(labels=own, labels_before=before)
    result: Any = SimpleNamespace(record=record, run=None, ledger=str(ledger) if ledger else None, again="")
    return [f"{item.status} {item.name}: {item.detail}" for item in check_released.of_model(result)]


def test_a_statement_that_states_less_is_wrong() -> None:
    for own, *before in (
        (draw(),),  # states no total
        (draw("bb", account_epsilon=4.5), draw()),  # forgets the first
        (draw("bb"), draw()),  # says no total
        (draw("bb", account_epsilon=9.0), draw(account_epsilon=13.5)),
        (draw("bb", account_epsilon=9.0), draw(unit="team")),  # adds up what is counted otherwise
    ):
        with pytest.raises(Wrong):
            said(own, *before)


def test_a_statement_that_states_all_is_right() -> None:
    for own, *before in (
        (draw(account_epsilon=4.5),),
        (draw("bb", account_epsilon=9.0), draw(account_epsilon=4.5)),
        (draw("bb", account_epsilon=30.0), draw()),
        (draw("bb"), draw(unit="team")),
        (None, draw()),
    ):
        assert not [line for line in said(own, *before) if "failed" in line]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "l.sqlite"


def paid(book: Path, cost: float = 4.5) -> str:
    with Ledger(book) as ledger:
        claim = reserve_all(ledger, NOTES, [RunRequest(PureDP(cost), 1e-9, 1, "who", "label_changed")])[0]
        ledger.charge(claim.entry, 1)
        return claim.entry


def of_ledger(own: Labels, book: Path) -> str:
    return said(own, ledger=book)[-1]


def test_what_the_ledger_holds_beside_this_draw_is_said(book: Path) -> None:
    first = draw(paid(book))
    alone = "verified labels: ledger: l.sqlite charged exactly this"
    assert of_ledger(first.with_account(), book).startswith(alone)
    second = draw(paid(book))
    for unsaid in (first, second):
        with pytest.raises(Wrong):
            of_ledger(unsaid, book)
    for less in (first.with_account(),):
        assert of_ledger(less, book).startswith("asserted labels: ledger: l.sqlite charged 4.5 for this draw")
        assert "holds 9 in all, more than is stated" in of_ledger(less, book)
    for all_of_it in (first.with_account(9.0), second.with_account(9.0)):
        assert of_ledger(all_of_it, book).startswith("verified labels: ledger")
        assert "holds 9 in all, as is stated" in of_ledger(all_of_it, book)


def test_less_than_the_account_held_when_labels_were_drawn_is_wrong(book: Path) -> None:
    """What came later is not known to whoever wrote the statement; what came before is."""
    paid(book, 2.0)
    with Ledger(book) as ledger:
        who = {"run": "x", "unit": "who", "relation": "label_changed", "by": "ann", "reason": "elsewhere"}
        budgets.import_run(ledger, NOTES, event=Imported(1.0, 0.0), **who)
    own = draw(paid(book))
    with pytest.raises(Wrong, match=r"7\.5 at the time; 6\.5 is stated"):
        of_ledger(own.with_account(6.5), book)
    assert "as is stated" in of_ledger(own.with_account(7.5), book)


def test_a_run_takes_the_total_of_its_ledger_where_that_holds_the_draw(book: Path) -> None:
    """An account of this name in another ledger is somebody else's."""
    own = draw(paid(book))
    paid(book)
    with Ledger(book) as ledger:
        for known, due in ((own, 9.0), (draw("other"), 4.5)):
            labels_record = lineage.of_labels(known, None, ledger)
            assert labels_record is not None
            assert labels_record.account_epsilon == due
    assert lineage.of_labels(None, None, None) is None


def test_a_number_that_no_computation_takes_is_a_failed_check(tmp_path: Path) -> None:
    record = {**draw().with_account().to_json(), "schema_version": 1, "file_sha256": "a" * 64, "max_labels": 10**400}
    (tmp_path / "pairs.labels.json").write_text(json.dumps(record), encoding="utf-8")
    [check] = verify(tmp_path / "pairs.labels.json").checks
    assert (check.name, check.status) == ("card", "failed")
