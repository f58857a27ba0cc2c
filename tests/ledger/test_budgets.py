"""What people enter: budgets once, imports as facts, exceptions by the owner alone."""

from dataclasses import replace
from pathlib import Path

import pytest
from ledger_stores import DELTA, EVENT, TERMS, budget, cost_of, reserve

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Budget, Ledger, admission, budgets
from dpllm.ledger.chain import read_export
from dpllm.ledger.records import fingerprint
from dpllm.privacy import renyi
from dpllm.privacy.accounting import dp_sgd_event, epsilon
from dpllm.privacy.events import Imported, SelfComposed

WHO = {"by": "bob", "reason": "his notebook"}
ELSEWHERE = Imported(0.5, 1e-6)


def test_a_budget_is_set_once(ledger: Ledger):
    assert ledger.budget("notes") is None
    assert ledger.used("notes") is None
    wanted = budgets.set_budget(ledger, "notes", budget(3.0))
    assert wanted == budget(3.0, order=renyi.filter_order(3.0, DELTA))
    assert budgets.set_budget(ledger, "notes", budget(3, by="carol", reason="again")) == wanted
    assert ledger.budget("notes") == wanted
    others = [budget(4.0), budget(3.0, delta=1e-4), budget(3.0, unit="visit")]
    others.append(budget(3.0, relation="add_or_remove_one"))
    budgets.set_budget(ledger, "more", budget(8.0, import_delta=1e-6))
    for other in [*others, budget(4.0, by="carol")]:
        with pytest.raises(Refused, match="has a budget already"):
            budgets.set_budget(ledger, "notes", replace(other, by="carol"))
    with pytest.raises(Refused, match="has a budget already"):
        budgets.set_budget(ledger, "more", budget(8.0, import_delta=2e-6, by="carol"))
    assert ledger.head()["count"] == 2
    assert ledger.used("notes") == 0.0
    content = ledger.history("notes")[0].facts
    assert (content["by"], content["reason"], content["order"]) == ("alice", "study 7", wanted.order)


@pytest.mark.parametrize("use", ["run", "import"])
def test_its_owner_may_correct_a_budget_until_it_is_used(ledger: Ledger, use: str):
    budgets.set_budget(ledger, "notes", budget(3.0, unit="patien"))
    wanted = budgets.set_budget(ledger, "notes", budget(4.0))
    assert wanted == ledger.budget("notes")
    assert [entry.facts["epsilon"] for entry in ledger.history("notes")] == [3.0, 4.0]  # both are on record
    if use == "run":
        reserve(ledger)
    else:
        budgets.import_run(ledger, "notes", event=EVENT, run="x", by="bob", reason="paper", **TERMS)
    with pytest.raises(Refused, match="nobody once a run is reserved or imported"):
        budgets.set_budget(ledger, "notes", budget(5.0))
    assert ledger.budget("notes") == wanted


def test_a_budget_set_again_with_its_data_knows_them(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(3.0))
    records = fingerprint([{"text": f"row {n}"} for n in range(9)], ["text"], ledger.records.key())
    budgets.set_budget(ledger, "notes", budget(3.0), records=records)
    assert ledger.records.known_as(records) == "notes"


NAN, INF = float("nan"), float("inf")
BOUNDLESS = [
    *({"epsilon": value} for value in (0.0, -1.0, NAN, INF)),
    *({"delta": value} for value in (0.0, 1.0, NAN)),
    *({"import_delta": value} for value in (-1e-9, 1e-5, NAN)),
    {"unit": ""},
    {"relation": "replace_one"},
]


@pytest.mark.parametrize("changes", BOUNDLESS, ids=str)
def test_a_budget_that_bounds_nothing_is_refused(ledger: Ledger, changes):
    with pytest.raises(ConfigError):
        budgets.set_budget(ledger, "notes", Budget(**{"epsilon": 3.0, "delta": DELTA, **TERMS, **changes}))
    for name in ("", " ", "a\nb", "\x1b[2J"):
        with pytest.raises(ConfigError):
            budgets.set_budget(ledger, name, budget(3.0))
    assert ledger.head()["count"] == 0


def test_an_import_may_exceed_the_budget(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(0.4, import_delta=1e-6))
    budgets.import_run(ledger, "notes", event=ELSEWHERE, run="x", **TERMS, **WHO)
    assert ledger.spent("notes") == pytest.approx(0.5, abs=0.01)
    assert ledger.used("notes") > 1
    with pytest.raises(BudgetExceeded):
        reserve(ledger)
    assert [entry.kind for entry in ledger.history("notes")] == ["budget", "import"]


def test_an_import_of_known_events_composes_more_tightly(ledger: Ledger):
    for _ in range(3):
        budgets.import_run(ledger, "notes", event=EVENT, run="x", **TERMS, **WHO)
    assert ledger.spent("notes") == cost_of(3) < 3 * cost_of(1)


@pytest.mark.parametrize("changes", [{"by": " "}, {"reason": ""}, {"unit": " "}, {"relation": "replace_one"}], ids=str)
def test_an_import_that_says_nothing_is_refused(ledger: Ledger, changes):
    with pytest.raises(ConfigError):
        budgets.import_run(ledger, "notes", **{"event": EVENT, "run": "x", **TERMS, **WHO, **changes})
    assert ledger.head()["count"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v | {"kind": "x"}, lambda v: v | {"version": 3},
        lambda v: {key: part for key, part in v.items() if key != "head"}, lambda v: v | {"head": 3},
        lambda v: v | {"head": {"hash": "x"}}, lambda v: v | {"entries": 3}, lambda v: v | {"entries": [{}]},
        lambda v: v | {"progress": []},
    ],
)  # fmt: skip
def test_what_is_no_export_is_one_clear_error(tmp_path: Path, damage):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        reserve(ledger)
        value = ledger.chain.export()
    assert len(read_export(value, tmp_path)) == 1
    with pytest.raises(ConfigError, match="is not an export of a ledger"):
        read_export(damage(value), tmp_path)


def test_imported_delta_is_set_aside_from_a_budget(ledger: Ledger):
    order = budgets.set_budget(ledger, "notes", budget(8.0, import_delta=2e-6)).order
    whole = renyi.allowance(8.0, DELTA - 2e-6, order)
    assert admission.filter_left(ledger.account("notes")) == renyi.Fit(order, whole)
    budgets.import_run(ledger, "notes", event=ELSEWHERE, run="x", **TERMS, **WHO)
    pure = replace(ELSEWHERE, delta=0.0)
    assert ledger.used("notes") == pytest.approx(renyi.rdp(pure, order) / whole)
    reserve(ledger)
    budgets.import_run(ledger, "notes", event=replace(ELSEWHERE, delta=1.1e-6), run="x", **TERMS, **WHO)
    with pytest.raises(BudgetExceeded, match="set aside"):
        reserve(ledger)
    assert ledger.used("notes") == INF
    budgets.set_budget(ledger, "strict", budget(8.0))
    budgets.import_run(ledger, "strict", event=ELSEWHERE, run="x", **TERMS, **WHO)
    with pytest.raises(BudgetExceeded, match="set aside"):
        reserve(ledger, "strict")


def test_a_late_budget_sets_aside_what_was_imported(ledger: Ledger):
    budgets.import_run(ledger, "notes", event=ELSEWHERE, run="x", **TERMS, **WHO)
    with pytest.raises(Refused, match="leaves nothing"):
        budgets.set_budget(ledger, "notes", budget(8.0, delta=1e-6))
    fixed_budget = budgets.set_budget(ledger, "notes", budget(8.0))
    assert fixed_budget.import_delta == 1e-6
    assert admission.filter_allowance(fixed_budget) == renyi.allowance(8.0, DELTA - 1e-6, fixed_budget.order)
    reserve(ledger)
    assert budgets.set_budget(ledger, "notes", budget(8.0)) == fixed_budget


def test_what_no_renyi_divergence_bounds_leaves_a_late_budget_nothing(ledger: Ledger):
    reserve(ledger, event=dp_sgd_event(0.02, 4.0, 5, 3), num_steps=5)
    budgets.set_budget(ledger, "notes", budget(8.0))
    assert ledger.used("notes") == INF
    with pytest.raises(BudgetExceeded, match="no Renyi divergence"):
        reserve(ledger)


def test_only_the_owner_of_a_budget_excepts_it_from_privacy(ledger: Ledger):
    assert not ledger.account("notes").permission
    budgets.set_budget(ledger, "notes", budget(3.0))
    with pytest.raises(Refused, match="'alice', and nobody else"):
        budgets.except_from_privacy(ledger, "notes", "bob", "I want to")
    for by, reason in (("", "x"), ("alice", " ")):
        with pytest.raises(ConfigError):
            budgets.except_from_privacy(ledger, "notes", by, reason)
    assert not ledger.account("notes").permission
    budgets.except_from_privacy(ledger, "notes", "alice", "the baseline")
    assert ledger.account("notes").permission
    assert [(e["by"], e["reason"]) for e in ledger.account("notes").exceptions] == [("alice", "the baseline")]


def test_an_exception_from_before_the_budget_is_remembered_and_permits_nothing(ledger: Ledger):
    budgets.except_from_privacy(ledger, "notes", "bob", "quick, before she sets one")
    assert ledger.account("notes").permission
    budgets.set_budget(ledger, "notes", budget(3.0))
    assert not ledger.account("notes").permission
    assert len(ledger.account("notes").exceptions) == 1  # what was trained meanwhile is in every card


def test_what_is_entered_for_a_derived_dataset_is_entered_for_its_parent(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(8.0))
    with pytest.raises(BudgetExceeded):
        reserve(ledger, "sub", derived_from="notes", event=dp_sgd_event(1.0, 0.5, 4))
    reserve(ledger, "sub", derived_from="notes")
    assert ledger.records.account_name("sub") == "notes"
    with pytest.raises(Refused, match="derives from 'notes'"):
        budgets.set_budget(ledger, "sub", budget(8.0))
    budgets.import_run(ledger, "sub", event=EVENT, run="x", **TERMS, **WHO)
    with pytest.raises(Refused, match="nobody else may"):
        budgets.except_from_privacy(ledger, "sub", "bob", "x")
    assert ledger.budget("notes") == ledger.budget("sub")
    assert ledger.datasets() == ["notes"]
    assert ledger.spent("sub") == ledger.spent("notes") == epsilon(SelfComposed(2, EVENT), DELTA, "zero_out")
