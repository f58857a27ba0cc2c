"""Tuning groups: all runs of a sweep have their place before the first one starts, or none has."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_stores import DELTA, budget, request, reserve
from ledger_stores import adaptive as adaptive_at

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Ledger, RunRequest, admission, budgets
from dpllm.ledger.chain import verify_export
from dpllm.ledger.records import fingerprint
from dpllm.ledger.reserving import Group, group_total, reserve_all, use_reservation
from dpllm.ledger.tables import totals
from dpllm.ledger.values import Sealed
from dpllm.privacy import renyi
from dpllm.privacy.accounting import compose, dp_sgd_event, stated

ORDER = 64.0
EVENTS = [dp_sgd_event(1.0, sigma, 4) for sigma in (60.0, 40.0, 30.0)]
GROUP = Group("tuning-1", "alice")


def adaptive(value: float):
    return adaptive_at(value, order=ORDER)


def wanted(count: int = 3) -> list[RunRequest]:
    return [request(event=event, run=f"tuning-1/{number}") for number, event in enumerate(EVENTS[:count])]


def reserve_group(book: Ledger, runs: list[RunRequest] | None = None, dataset: str = "notes", group: Group = GROUP):
    return reserve_all(book, dataset, wanted() if runs is None else runs, group=group)


def divergence(event) -> float:
    return admission.divergence(event, ORDER)


def filtered(rho: float) -> float:
    """The epsilon of a budget that allows just so much."""
    return renyi.to_epsilon(rho, DELTA, ORDER)


def cost(*events) -> float:
    return stated(compose(list(events)), DELTA, "zero_out")[0]


@pytest.mark.parametrize("gate", [None, "planned", "adaptive"])
def test_each_run_has_its_place_and_the_group_its_total(ledger: Ledger, gate: str | None):
    if gate:
        budgets.set_budget(ledger, "notes", budget(3.0) if gate == "planned" else adaptive(3.0))
    claims = reserve_group(ledger)
    assert [claim.run for claim in claims] == ["tuning-1/0", "tuning-1/1", "tuning-1/2"]
    assert {claim.group for claim in claims} == {"tuning-1"}
    assert {claim.gate for claim in claims} == {gate}
    assert [run.reservation for run in ledger.account("notes").groups()["tuning-1"]] == claims
    assert ledger.spent("notes", DELTA) == pytest.approx(cost(*EVENTS))
    found = group_total(ledger.account("notes"), "tuning-1")
    assert found == {"name": "tuning-1", "runs": 3, "epsilon": pytest.approx(cost(*EVENTS)), "delta": DELTA}
    assert ledger.verify() == []
    assert verify_export(ledger.chain.export()) == []
    assert any("Tuning group tuning-1: 3 runs fixed together, 0 completed" in line for line in totals(ledger, "notes"))


def test_a_single_run_has_no_group(ledger: Ledger):
    claim = reserve(ledger)
    assert claim.group is None
    assert ledger.account("notes").groups() == {}
    assert "group" not in ledger.history("notes")[-1].facts


@pytest.mark.parametrize("gate", ["planned", "adaptive"])
def test_a_budget_that_admits_two_of_three_refuses_all(ledger: Ledger, gate: str):
    limit = (cost(*EVENTS[:2]) + cost(*EVENTS)) / 2
    if gate == "adaptive":
        limit = filtered(sum(map(divergence, EVENTS)) - divergence(EVENTS[2]) / 2)
    budgets.set_budget(ledger, "notes", budget(limit) if gate == "planned" else adaptive(limit))
    before = ledger.head()
    with pytest.raises(BudgetExceeded, match="these 3 runs request"):
        reserve_group(ledger)
    assert ledger.head() == before
    assert ledger.account("notes").runs == ()
    assert ledger.account("notes").sealed is None
    assert len(reserve_group(ledger, wanted(2))) == 2


def test_a_planned_budget_seals_the_group_as_its_list(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(3.0))
    reserve_group(ledger)
    assert [run.event for run in ledger.account("notes").sealed or ()] == EVENTS
    assert ledger.history("notes")[1].facts["by"] == "alice"
    with pytest.raises(BudgetExceeded, match="is spent"):
        reserve(ledger, event=EVENTS[0])
    with pytest.raises(BudgetExceeded, match="is spent"):
        reserve_group(ledger, group=Group("tuning-2", "alice"))


def test_a_sealed_list_must_hold_the_group(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(3.0))
    budgets.seal(ledger, "notes", [Sealed(event, 4) for event in EVENTS[:2]], "alice", "plan")
    with pytest.raises(
        BudgetExceeded, match=r"does not hold 1 of these 3 runs, or not as often \(q 1, sigma 30, 4 steps\)"
    ):
        reserve_group(ledger)
    with pytest.raises(BudgetExceeded, match="does not hold 1 of these 2 runs"):  # it is there once
        reserve_group(ledger, [wanted()[0], wanted()[0]])
    assert ledger.account("notes").runs == ()
    assert len(reserve_group(ledger, wanted(2))) == 2
    assert admission.pending(ledger.account("notes")) == []


def test_a_group_is_fixed_once(ledger: Ledger):
    reserve_group(ledger, wanted(2))
    with pytest.raises(ConfigError, match="has its runs already"):
        reserve_group(ledger, wanted()[2:])


def test_other_units_refuse_the_whole_group(ledger: Ledger):
    reserve(ledger, "notes")
    with pytest.raises(Refused, match="accounted per"):
        reserve_group(ledger, [replace(one, unit="visit") for one in wanted()])
    assert len(ledger.account("notes").runs) == 1


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


def test_lost_steps_of_a_group_are_not_made_up(ledger: Ledger):
    """What all runs come to stands on the cards of those that are finished."""
    first, *_ = reserve_group(ledger)
    before = ledger.head()
    with pytest.raises(Refused, match=r"one of tuning group 'tuning-1'.*cannot be made up"):
        reserve(ledger, event=EVENTS[0], extends=first.entry)
    assert ledger.head() == before


def test_groups_that_race_for_one_budget_never_exceed_it(tmp_path: Path):
    path, limit = tmp_path / "ledger.sqlite", filtered(3.5 * sum(map(divergence, EVENTS[:2])))
    with Ledger(path) as book:
        budgets.set_budget(book, "notes", adaptive(limit))

    def attempt(number: int) -> int:
        with Ledger(path) as own:
            try:
                return len(reserve_group(own, wanted(2), group=Group(f"race-{number}", "alice")))
            except BudgetExceeded:
                return 0

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(attempt, range(8)))
    with Ledger(path) as book:
        runs = book.account("notes").runs
        assert sorted(got) == [0] * 5 + [2] * 3  # whole groups
        assert len(runs) == 6
        assert (admission.filter_epsilon(book.account("notes")) or 0) <= limit
        assert {len(group) for group in book.account("notes").groups().values()} == {2}


@given(
    limits=st.floats(0.05, 1.5),
    sigmas=st.lists(st.sampled_from([25.0, 40.0, 80.0]), min_size=1, max_size=4),
    gate=st.sampled_from(["planned", "adaptive"]),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_admitted_fits_the_budget(tmp_path: Path, limits: float, sigmas: list[float], gate: str):
    with Ledger(tmp_path / f"{uuid.uuid4().hex}.sqlite") as book:
        budgets.set_budget(book, "notes", budget(limits) if gate == "planned" else adaptive(limits))
        runs = [request(event=dp_sgd_event(1.0, sigma, 4), run=str(number)) for number, sigma in enumerate(sigmas)]
        try:
            reserve_group(book, runs)
        except BudgetExceeded:
            assert book.account("notes").runs == ()
            if gate == "planned":
                assert cost(*(one.event for one in runs)) > limits
        else:
            assert book.spent("notes") <= limits
            if gate == "adaptive":
                assert (admission.filter_epsilon(book.account("notes")) or 0) <= limits * (1 + 1e-9)
