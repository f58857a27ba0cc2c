"""Tuning groups: all runs of a sweep have their place before the first one starts, or none has."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_stores import DELTA, budget, request, reserve

from dpllm.cli.ledger import totals
from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Ledger, RunRequest, budgets
from dpllm.ledger.admission import group_total
from dpllm.ledger.budgets import reserve_all, use_reservation
from dpllm.ledger.chain import verify_export
from dpllm.ledger.records import fingerprint
from dpllm.privacy import renyi
from dpllm.privacy.accounting import compose, dp_sgd_event, epsilon

EVENTS = [dp_sgd_event(1.0, sigma, 4) for sigma in (60.0, 40.0, 30.0)]
GROUP = "tuning-1"


def wanted(count: int = 3) -> list[RunRequest]:
    return [request(event=event, run=f"tuning-1/{number}") for number, event in enumerate(EVENTS[:count])]


def reserve_group(book: Ledger, runs: list[RunRequest] | None = None, dataset: str = "notes", group: str = GROUP):
    return reserve_all(book, dataset, wanted() if runs is None else runs, group=group)


def limited_to(*events) -> float:
    """The epsilon of a budget that these fill."""
    low, high = 0.01, 50.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        order = renyi.filter_order(middle, DELTA)
        fits = sum(renyi.rdp(event, order) for event in events) <= renyi.allowance(middle, DELTA, order)
        low, high = (low, middle) if fits else (middle, high)
    return high


def cost(*events) -> float:
    return epsilon(compose(list(events)), DELTA, "zero_out")


@pytest.mark.parametrize("limited", [False, True])
def test_each_run_has_its_place_and_the_group_its_total(ledger: Ledger, limited: bool):
    if limited:
        budgets.set_budget(ledger, "notes", budget(3.0))
    claims = reserve_group(ledger)
    assert [claim.run for claim in claims] == ["tuning-1/0", "tuning-1/1", "tuning-1/2"]
    assert {claim.group for claim in claims} == {"tuning-1"}
    assert [run.reservation for run in ledger.account("notes").groups()["tuning-1"]] == claims
    assert ledger.spent("notes", DELTA) == pytest.approx(cost(*EVENTS))
    total = group_total(ledger.account("notes"), "tuning-1")
    assert total == {"name": "tuning-1", "runs": 3, "epsilon": pytest.approx(cost(*EVENTS)), "delta": DELTA}
    assert ledger.verify() == []
    assert verify_export(ledger.chain.export()) == []
    assert any("Tuning group tuning-1: 3 runs fixed together, 0 completed" in line for line in totals(ledger, "notes"))


def test_a_group_is_fixed_once_and_a_single_run_has_none(ledger: Ledger):
    claim = reserve(ledger)
    assert claim.group is None
    assert ledger.account("notes").groups() == {}
    assert "group" not in ledger.history("notes")[-1].facts
    reserve_group(ledger, wanted(2))
    with pytest.raises(ConfigError, match="has its runs already"):
        reserve_group(ledger, wanted()[2:])


@pytest.mark.parametrize("final", [False, True])
def test_a_budget_that_admits_two_of_three_refuses_all(ledger: Ledger, final: bool):
    of = cost if final else limited_to
    budgets.set_budget(ledger, "notes", budget((of(*EVENTS[:2]) + of(*EVENTS)) / 2))
    before = ledger.head()
    runs = [replace(item, final=final) for item in wanted()]
    with pytest.raises(BudgetExceeded, match="the exact total would be" if final else "these 3 runs would use"):
        reserve_group(ledger, runs)
    assert ledger.head() == before
    assert ledger.account("notes").runs == ()
    assert len(reserve_group(ledger, runs[:2])) == 2


def test_a_run_takes_its_place_once_and_for_itself_alone(ledger: Ledger):
    first, second, _ = reserve_group(ledger)
    taken = {"dataset": "notes", "event": EVENTS[0], "num_steps": 4}
    assert use_reservation(ledger, first.entry, **taken) == first
    for other in ({"event": EVENTS[1]}, {"num_steps": 3}, {"dataset": "others"}):
        with pytest.raises(Refused, match="was made for other data, noise"):
            use_reservation(ledger, first.entry, **{**taken, **other})
    ledger.charge(first.entry, 1)
    with pytest.raises(Refused, match="is running after 1 of 4 steps"):
        use_reservation(ledger, first.entry, **taken)
    ledger.reconcile(second.entry, "alice", "no longer wanted")
    with pytest.raises(Refused, match="is reconciled"):
        use_reservation(ledger, second.entry, dataset="notes", event=EVENTS[1], num_steps=4)
    with pytest.raises(ConfigError, match="no reservation"):
        use_reservation(ledger, "f" * 16, **taken)


def test_a_run_takes_its_place_for_the_records_it_was_reserved_for(ledger: Ledger):
    def records(word: str):
        return fingerprint([{"text": f"{word} {row}"} for row in range(40)], ("text",), ledger.records.key())

    first, *_ = reserve_all(ledger, "notes", wanted(), group=GROUP, records=records("theirs"))
    taken = {"dataset": "notes", "event": EVENTS[0], "num_steps": 4}
    with pytest.raises(Refused, match="no longer holds the records"):
        use_reservation(ledger, first.entry, **taken, records=records("others"))
    assert use_reservation(ledger, first.entry, **taken, records=records("theirs")) == first


def test_groups_that_race_for_one_budget_never_exceed_it(tmp_path: Path):
    path, limit = tmp_path / "ledger.sqlite", limited_to(*EVENTS[:2] * 3, EVENTS[0])
    with Ledger(path) as book:
        budgets.set_budget(book, "notes", budget(limit))

    def attempt(number: int) -> int:
        with Ledger(path) as own:
            try:
                return len(reserve_group(own, wanted(2), group=f"race-{number}"))
            except BudgetExceeded:
                return 0

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(attempt, range(8)))
    with Ledger(path) as book:
        runs = book.account("notes").runs
        assert sorted(got) == [0] * 5 + [2] * 3  # whole groups
        assert len(runs) == 6
        assert book.used("notes") <= 1
        assert {len(group) for group in book.account("notes").groups().values()} == {2}


@given(
    limits=st.floats(0.05, 1.5),
    sigmas=st.lists(st.sampled_from([25.0, 40.0, 80.0]), min_size=1, max_size=4),
    final=st.booleans(),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_admitted_fits_the_budget(tmp_path: Path, limits: float, sigmas: list[float], final: bool):
    with Ledger(tmp_path / f"{uuid.uuid4().hex}.sqlite") as book:
        budgets.set_budget(book, "notes", budget(limits))
        events = [dp_sgd_event(1.0, sigma, 4) for sigma in sigmas]
        fits = (cost(*events) if final else limited_to(*events)) <= limits
        try:
            reserve_group(book, [request(event=event, final=final) for event in events])
        except BudgetExceeded:
            assert not fits
            assert book.account("notes").runs == ()
        else:
            assert fits
            assert book.spent("notes") <= limits
