"""Reservations: the budget cannot be overspent, by nobody and in no order, and every step is charged once."""

import os
import shutil
import threading
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from ledger_stores import DELTA, EVENT, TERMS, Place, budget, cost_of, outputs, request, reserve, room_for, start

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Ledger, admission, budgets, store
from dpllm.privacy.accounting import dp_sgd_event


def test_every_state_of_a_run_counts_in_full(ledger: Ledger):
    budgets.set_budget(ledger, "notes", room_for(4))
    for status, steps in (("completed", 4), ("interrupted", 1), ("refused", 0)):
        claim = reserve(ledger)
        for step in range(1, steps + 1):
            ledger.charge(claim.entry, step)
        ledger.finish(claim.entry, status)
    reserve(ledger)
    assert ledger.spent("notes") == cost_of(4)
    with pytest.raises(BudgetExceeded):
        reserve(ledger)
    assert [run.state for run in ledger.runs("notes")] == ["completed", "interrupted", "refused", "reserved"]


def test_a_reservation_remembers_what_it_was_made_of(ledger: Ledger, place: Place):
    claim = reserve(ledger)
    assert claim.epsilon == cost_of(1)
    ledger.charge(claim.entry, 1)
    with place.open() as again:
        assert again.run(claim.entry).steps == 1
        assert again.run(claim.entry).reservation == claim
        assert again.run(claim.entry).event == EVENT
        assert again.head() == ledger.head()
    with pytest.raises(FrozenInstanceError):
        claim.num_steps = 100


def test_datasets_do_not_share_a_budget(ledger: Ledger):
    names = ["a", "b", "Robert'); DROP TABLE entries;--", "100 % öffentlich?"]
    for dataset in names:
        budgets.set_budget(ledger, dataset, room_for(1))
        reserve(ledger, dataset)
        with pytest.raises(BudgetExceeded):
            reserve(ledger, dataset)
    assert ledger.datasets() == sorted(names)
    assert [entry.kind for entry in ledger.history("a")] == ["budget", "reserve"]
    assert len(ledger.history()) == 2 * len(names)


def test_epsilons_of_different_units_or_relations_never_add(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(100.0))
    reserve(ledger, "free")
    budgets.import_run(ledger, "old", event=EVENT, run="x", by="alice", reason="paper", **TERMS)
    for dataset in ("notes", "free", "old"):
        for other in ({"unit": "visit"}, {"relation": "add_or_remove_one"}):
            with pytest.raises(Refused, match="another quantity"):
                reserve(ledger, dataset, **other)
            terms = {**TERMS, **other}
            with pytest.raises(Refused, match="another quantity"):
                budgets.import_run(ledger, dataset, event=EVENT, run="x", by="a", reason="b", **terms)
    with pytest.raises(Refused, match="another quantity"):
        budgets.set_budget(ledger, "free", budget(100.0, unit="visit"))
    assert ledger.head()["count"] == 3


def test_without_a_budget_runs_are_charged_without_limit_and_count_when_one_is_set(ledger: Ledger):
    assert ledger.spent("notes") == 0.0
    assert ledger.used("notes") is None
    reserve(ledger, delta=1e-6)
    reserve(ledger, delta=DELTA)
    assert ledger.spent("notes") == cost_of(2)
    assert ledger.spent("notes", 1e-8) == cost_of(2, 1e-8)
    budgets.set_budget(ledger, "notes", budget(0.2))
    assert ledger.used("notes") > 1
    with pytest.raises(BudgetExceeded):
        reserve(ledger)


def test_no_run_reserves_more_steps_than_its_event_pays_for(ledger: Ledger):
    for num_steps in (5, -1):
        with pytest.raises(ConfigError):
            reserve(ledger, num_steps=num_steps)
    for num_steps in (2.0, True):  # of which no process could read the entry again
        with pytest.raises(ConfigError, match="integers"):
            reserve(ledger, num_steps=num_steps)
    with pytest.raises(Refused, match="no finite epsilon"):
        reserve(ledger, event=dp_sgd_event(0.02, 1e-6, 4))
    for name in ("", " ", "a\nb", "a\x00b", "\udcff"):
        with pytest.raises(ConfigError, match="dataset name"):
            reserve(ledger, name)
    assert ledger.head()["count"] == 0


def test_steps_are_charged_one_by_one_and_never_beyond_the_reservation(ledger: Ledger):
    entry = reserve(ledger).entry
    with pytest.raises(ConfigError, match="integers"):
        ledger.charge(entry, 1.0)  # its entry could not be read again either
    assert ledger.run(entry).steps == 0
    for wrong in (0, 2, -1):
        with pytest.raises(Refused):
            ledger.charge(entry, wrong)
    for step in (1, 2, 3, 4):
        ledger.charge(entry, step)
        with pytest.raises(Refused, match=f"step {step} "):
            ledger.charge(entry, step)
    assert ledger.run(entry).steps == 4
    with pytest.raises(Refused, match="reserved 4 steps"):
        ledger.charge(entry, 5)
    assert ledger.run(entry).steps == 4


def test_steps_that_are_set_back_are_found(ledger: Ledger, place: Place):
    budgets.set_budget(ledger, "notes", budget(8.0))
    claim = reserve(ledger, event=dp_sgd_event(1.0, 400.0, 100), num_steps=100)
    for step in range(1, 53):
        ledger.charge(claim.entry, step)
    assert ledger.verify() == []
    place.edit("UPDATE progress SET steps = 49")
    with place.open() as again:
        assert "contradicts the steps" in again.verify()[0]
        with pytest.raises(Refused, match="changed by something other than dpllm"):
            again.reconcile(claim.entry, "bob", "gone")


def test_a_run_of_many_steps_leaves_few_entries(ledger: Ledger):
    claim = reserve(ledger, event=dp_sgd_event(1.0, 400.0, 200), num_steps=200)
    for step in range(1, 201):
        ledger.charge(claim.entry, step)
    assert len(ledger.history()) < 25
    assert ledger.run(claim.entry).state == "running"
    ledger.finish(claim.entry, "completed")
    assert ledger.run(claim.entry).state == "completed"


def test_interrupted_runs_go_on_and_finished_ones_do_not(ledger: Ledger):
    entry, other = reserve(ledger).entry, reserve(ledger).entry
    ledger.charge(entry, 1)
    ledger.finish(entry, "interrupted")
    ledger.charge(entry, 2)
    ledger.finish(entry, "completed")
    for step in (2, 3):
        with pytest.raises(Refused, match="is completed"):
            ledger.charge(entry, step)
    with pytest.raises(Refused):
        ledger.finish(entry, "interrupted")
    with pytest.raises(Refused):
        ledger.reconcile(entry, "alice", "again")
    ledger.charge(other, 1)
    commits = [e.facts for e in ledger.history("notes") if e.kind == "commit" and e.facts["entry"] == entry]
    said = [(1, "running"), (1, "interrupted"), (2, "running"), (2, "completed")]
    assert [(c["steps"], c["status"]) for c in commits] == said


def test_reconciling_needs_a_name_and_a_reason_and_stops_a_run_that_is_alive(ledger: Ledger, place: Place):
    entry = reserve(ledger).entry
    with place.open() as alive:
        alive.charge(entry, 1)
        for by, reason in (("", "why"), ("alice", " ")):
            with pytest.raises(ConfigError, match="--by NAME --reason WHY"):
                ledger.reconcile(entry, by, reason)
        closed = ledger.reconcile(entry, "alice", "the machine is gone")
        assert (closed.state, closed.steps) == ("reconciled", 1)
        with pytest.raises(Refused, match="is reconciled"):
            alive.charge(entry, 2)
        with pytest.raises(Refused, match="is reconciled"):
            alive.finish(entry, "completed")
    with pytest.raises(Refused):
        ledger.reconcile(entry, "alice", "again")
    assert ledger.spent("notes") == cost_of(1)


def test_a_reservation_of_another_ledger_is_unknown(ledger: Ledger, tmp_path):
    with Ledger(tmp_path / "other.sqlite") as other:
        entry = reserve(other).entry
    reserve(ledger)
    uses = (
        lambda: ledger.charge(entry, 1),
        lambda: ledger.run(entry).steps,
        lambda: ledger.run(entry),
        lambda: ledger.finish(entry, "refused"),
        lambda: ledger.reconcile(entry, "alice", "gone"),
    )
    for use in uses:
        with pytest.raises(ConfigError, match="no reservation"):
            use()


@pytest.fixture
def meanwhile(place: Place, monkeypatch):
    """Lets a rival enter something while the next reservation is composed."""

    def lets(enter):
        refusal, done = admission.refusal, []

        def slow(*arguments, **options):
            answer = refusal(*arguments, **options)
            if not done:
                done.append(True)
                with place.open() as rival:
                    enter(rival)
            return answer

        monkeypatch.setattr(admission, "refusal", slow)
        return done

    return lets


MEANWHILE = {
    "run": reserve,
    "import": lambda rival: budgets.import_run(
        rival, "notes", event=EVENT, run="x", by="bob", reason="meanwhile", **TERMS
    ),
    "final run": lambda rival: reserve(rival, final=True),
    "budget": lambda rival: budgets.set_budget(rival, "notes", budget(0.01)),
}


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("what", MEANWHILE)
def test_whatever_is_entered_during_the_composition_is_seen(ledger: Ledger, meanwhile, what: str, final: bool):
    """Also by a final reservation, whose exact total holds for what comes first and alone."""
    if what != "budget":
        budgets.set_budget(ledger, "notes", room_for(1))
    done = meanwhile(MEANWHILE[what])
    with pytest.raises(BudgetExceeded):
        reserve(ledger, final=final)
    assert done
    assert len(ledger.runs("notes")) == (1 if "run" in what else 0)


def test_a_name_that_is_derived_meanwhile_charges_the_parent(ledger: Ledger, meanwhile):
    budgets.set_budget(ledger, "notes", budget(8.0))
    meanwhile(lambda rival: reserve(rival, "sub", derived_from="notes"))
    assert reserve(ledger, "sub").dataset == "notes"
    assert [run.reservation.dataset for run in ledger.runs("notes")] == ["notes", "notes"]
    assert ledger.datasets() == ["notes"]


def test_two_processes_resuming_one_run_share_no_step(ledger: Ledger, place: Place):
    total = 100
    entry = reserve(ledger, event=dp_sgd_event(1.0, 50.0, total), num_steps=total).entry
    code = """
with open_ledger(location) as ledger:
    for step in range(ledger.run(arguments[0]).steps + 1, 101):
        try:
            ledger.charge(arguments[0], step)
        except Refused:
            break
        print(step)
"""
    charged = [int(line) for item in outputs([start(place, code, entry) for _ in range(2)]) for line in item.split()]
    assert sorted(charged) == list(range(1, ledger.run(entry).steps + 1))
    assert ledger.run(entry).steps == total


def test_a_crashed_run_stays_charged_and_can_be_resumed(ledger: Ledger, place: Place):
    budgets.set_budget(ledger, "notes", room_for(1))
    code = """
ledger = open_ledger(location)
entry = reserve_all(ledger, "notes", [claim])[0].entry
ledger.charge(entry, 1)
print(entry, flush=True)
os._exit(9)
"""
    worker = start(place, code)
    entry = worker.communicate()[0].strip()
    assert worker.returncode == 9
    assert ledger.spent("notes") == cost_of(1)
    assert ledger.run(entry).steps == 1
    with pytest.raises(BudgetExceeded):
        reserve(ledger)
    with pytest.raises(Refused):
        ledger.charge(entry, 1)
    ledger.charge(entry, 2)
    assert ledger.verify() == []


def test_a_crash_while_writing_leaves_nothing_half_done(ledger: Ledger, place: Place):
    code = """
ledger = open_ledger(location)
with ledger.chain.writing():
    ledger.chain.append("exception", "notes", {"by": "a", "reason": "half"})
    os._exit(9)
"""
    assert start(place, code).wait() == 9
    assert ledger.head()["count"] == 0
    reserve(ledger)
    assert ledger.verify() == []


def test_a_failure_while_writing_leaves_nothing_half_done(ledger: Ledger):
    reserve(ledger)
    before = ledger.head()

    def fails():
        with ledger.chain.writing():
            ledger.chain.append("exception", "new", {"by": "a", "reason": "b"})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert ledger.head() == before
    assert ledger.datasets() == ["notes"]
    reserve(ledger)
    assert ledger.verify() == []


def test_refusals_are_counted_once_and_looking_counts_nothing(ledger: Ledger):
    budgets.set_budget(ledger, "notes", room_for(1))
    reserve(ledger)
    ledger.outlook("notes", [request()])
    ledger.verify()
    assert ledger.refusals() == {}
    for _ in range(2):
        with pytest.raises(BudgetExceeded), ledger.counting(), ledger.counting():
            reserve(ledger)
    with pytest.raises(Refused), ledger.counting():
        reserve(ledger, unit="visit")
    with pytest.raises(ConfigError), ledger.counting():
        reserve(ledger, num_steps=5)
    ledger.count_refusal("letters", "over_budget")
    counted = {("letters", "over_budget"): 1, ("notes", "other_unit"): 1, ("notes", "over_budget"): 2}
    assert ledger.refusals() == counted


def test_a_ledger_that_cannot_count_still_refuses(ledger: Ledger, place: Place):
    place.raw("DROP TABLE refusals")
    with pytest.raises(Refused, match="first"), ledger.counting():
        raise Refused("first", dataset="notes", reason="over_budget")


def test_outlook_says_what_reserve_would(ledger: Ledger):
    outlook = ledger.outlook("notes", [request()])
    assert outlook.budget is outlook.used is outlook.refusal is None
    assert (outlook.spent, outlook.after) == (0.0, cost_of(1))
    assert "no budget limits it" in str(outlook)
    budgets.set_budget(ledger, "notes", room_for(2))
    assert ledger.outlook("notes", [request()] * 3).refusal is not None
    outlook = ledger.outlook("notes", [request()])
    assert (outlook.used, outlook.could_follow, outlook.spent) == (0.0, 1, None)
    assert outlook.used_after == pytest.approx(0.4, abs=1e-4)
    assert str(outlook).endswith("used, 40% with this run; 1 more like it fits")
    exact = ledger.outlook("notes", [request(final=True)])
    assert (exact.used, exact.spent, exact.after, exact.refusal) == (None, 0.0, cost_of(1), None)
    assert "it is final" in str(exact)
    head = ledger.head()
    for _ in range(2):
        reserve(ledger)
    outlook = ledger.outlook("notes", [request()])
    with pytest.raises(BudgetExceeded) as refusal:
        reserve(ledger)
    assert outlook.refusal == str(refusal.value) == str(outlook.error)
    assert str(outlook).endswith("this run is refused")
    assert ledger.head()["count"] == head["count"] + 2
    assert "another quantity" in ledger.outlook("notes", [request(unit="visit")]).refusal


@pytest.mark.parametrize("what", ["deleted", "replaced", "moved"])
def test_a_step_is_not_charged_to_a_file_that_is_no_longer_there(tmp_path: Path, what: str) -> None:
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    with Ledger(path) as ledger:
        claim = reserve(ledger)
        ledger.charge(claim.entry, 1)
        shutil.copy(path, copy)
        if what == "deleted":
            path.unlink()
        elif what == "moved":
            path.rename(tmp_path / "elsewhere.sqlite")
        else:
            os.replace(copy, path)
        with pytest.raises(Refused, match="deleted, moved or replaced"):
            ledger.charge(claim.entry, 2)
        if what == "moved":
            (tmp_path / "elsewhere.sqlite").rename(path)
            ledger.charge(claim.entry, 2)


# --- nobody waits without end, neither for the lock nor for rivals that are quicker ---


def test_whoever_waits_gets_the_lock_from_one_who_takes_it_again_and_again(tmp_path: Path) -> None:
    path, held, done = tmp_path / "ledger.sqlite", threading.Event(), threading.Event()

    def greedy() -> None:
        with Ledger(path) as book:
            while not done.is_set():
                with book.store.write():
                    held.set()
                    time.sleep(0.02)

    with Ledger(path) as patient:
        rival = threading.Thread(target=greedy)
        rival.start()
        try:
            waits = []
            for _ in range(10):
                held.clear()
                held.wait(10)
                began = time.monotonic()
                with patient.store.write():
                    waits.append(time.monotonic() - began)
        finally:
            done.set()
            rival.join()
    assert sorted(waits)[5] < 1.0


def test_a_lock_that_is_never_free_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.2)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as one, Ledger(path) as other, one.store.write(), pytest.raises(ConfigError, match="locked"):
        reserve(other)


def test_rivals_that_are_always_quicker_do_not_outdate_a_reservation_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = admission.refusal, 0
    with Ledger(tmp_path / "ledger.sqlite") as book, Ledger(tmp_path / "ledger.sqlite") as rival:

        def refusal(*arguments: object, **options: object) -> str | None:
            nonlocal calls
            calls += 1
            if calls < 20 and not book.store._db.in_transaction:  # type: ignore[union-attr]
                monkeypatch.setattr(admission, "refusal", real)
                reserve(rival)
                monkeypatch.setattr(admission, "refusal", refusal)
            return real(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(admission, "refusal", refusal)
        reserve(book)
        assert calls == 2
        assert len(book.runs("notes")) == 2
