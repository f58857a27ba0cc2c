"""What a budget admits: runs in any order by its filter, or one reservation that is final; and what refusals say."""

import math
import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_stores import DELTA, EVENT, TERMS, Place, budget, cost_of, request, reserve

from dpllm.cli.ledger import totals
from dpllm.errors import BudgetExceeded, Refused
from dpllm.ledger import Ledger, admission, budgets
from dpllm.ledger.admission import account_totals
from dpllm.ledger.budgets import reserve_all
from dpllm.ledger.values import Account, Claim, Run
from dpllm.privacy import renyi
from dpllm.privacy.accounting import compose, dp_sgd_event, epsilon
from dpllm.privacy.events import Imported, PureDP, SelfComposed
from dpllm.privacy.parts import imported_delta

RUN = dp_sgd_event(0.02, 0.8, 150)  # the reference run: epsilon 2.96 alone
ROWS = dp_sgd_event(0.02, 4.0, 5, 3)  # of data.sampling: example, whose Renyi divergence nobody knows
WHO = {"by": "bob", "reason": "paper"}


def test_the_filter_admits_as_many_runs_as_fit_and_says_so(ledger: Ledger):
    fixed_budget = budgets.set_budget(ledger, "notes", budget(8.0))
    assert fixed_budget.order == renyi.filter_order(8.0, DELTA)
    assert math.floor(8.0 / epsilon(RUN, DELTA, "zero_out")) == 2  # sums of epsilons
    admitted, wanted = 0, [request(event=RUN, num_steps=150)]
    share = renyi.rdp(RUN, fixed_budget.order) / renyi.allowance(8.0, DELTA, fixed_budget.order)
    while (seen := ledger.outlook("notes", wanted)).refusal is None:
        assert seen.used == pytest.approx(admitted * share)
        assert seen.used_after == pytest.approx((admitted + 1) * share)
        reserve(ledger, event=RUN, num_steps=150)
        admitted += 1
        assert seen.could_follow == math.floor(1 / share) - admitted
        assert ledger.used("notes") == pytest.approx(seen.used_after)
        assert ledger.used("notes") <= 1
    assert admitted == math.floor(1 / share) > 2
    with pytest.raises(BudgetExceeded) as refusal:
        reserve(ledger, event=RUN, num_steps=150)
    assert str(refusal.value) == seen.refusal
    assert seen.could_follow == 0


def test_final_is_advised_where_a_run_fits_only_as_the_last_one(ledger: Ledger):
    exact = epsilon(RUN, DELTA, "zero_out")
    for name, value, advised in (("fits", exact + 0.1, True), ("no", exact - 0.1, False)):
        budgets.set_budget(ledger, name, budget(value))
        with pytest.raises(BudgetExceeded) as refusal:
            reserve(ledger, name, event=RUN, num_steps=150)
        assert ("type --final" in str(refusal.value)) is advised
    budgets.import_run(ledger, "fits", event=PureDP(1e-3), run="x", **TERMS, **WHO)
    with pytest.raises(BudgetExceeded) as refusal:
        reserve(ledger, "fits", event=RUN, num_steps=150)
    assert "--final" not in str(refusal.value)


@lru_cache
def own_divergence(q: float, sigma: float, order: float) -> float:
    """Renyi divergence of one Poisson-sampled Gaussian sum, the larger of both directions, by quadrature."""
    x = np.linspace(-40 * sigma, 40 * sigma + 1, 100_001)
    zero = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    mixed = zero + np.logaddexp(math.log1p(-q) if q < 1 else -np.inf, math.log(q) + (2 * x - 1) / (2 * sigma**2))
    both = []
    for p, r in ((mixed, zero), (zero, mixed)):
        exponent = order * p + (1 - order) * r
        top = exponent.max()
        both.append((top + math.log(np.trapezoid(np.exp(exponent - top), x))) / (order - 1))
    return max(both)


def own_pure(value: float, order: float) -> float:
    """Renyi divergence of randomised response."""
    p = 1 / (1 + math.exp(-value))
    return math.log(p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)) / (order - 1)


@pytest.mark.parametrize(("value", "delta", "noise"), [(8.0, 1e-5, 1.0), (1.0, 1e-6, 8.0)])
def test_random_adaptive_sequences_stay_below_the_budget_by_an_accountant_of_their_own(
    tmp_path_factory, value: float, delta: float, noise: float, seed: int
):
    """200 admissions: runs, groups, statistics; some closed early; each chosen after seeing what became of those before."""
    draw = random.Random(f"{seed} {value}")
    with Ledger(tmp_path_factory.mktemp("budget") / "ledger.sqlite") as ledger:
        order = budgets.set_budget(ledger, "notes", budget(value, delta=delta)).order
        own_allowance = value - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)
        own = {}  # entry -> by the test's own accountant
        admitted = refused = 0
        for _ in range(1_000):
            if admitted >= 200 and refused:
                break
            left = (own_allowance - sum(own.values())) / own_allowance
            if draw.random() < 0.2:
                event, steps = PureDP((0.05 if left > 0.5 else 0.01) / noise), 1
                price = own_pure(event.epsilon, order)
            else:
                # The more is left, the more is asked for: a choice by what came before.
                q, sigma = draw.choice([(1.0, 60.0 * noise), (0.02, 2.0 * noise), (0.1, 4.0 * noise)])
                one = own_divergence(q, sigma, order)
                most = draw.choice([0.002, 0.01, 0.02]) * max(left, 0.01) * own_allowance / one
                steps = 2 ** max(0, math.floor(math.log2(most)))  # few events, which the accountant is asked for once
                event, price = dp_sgd_event(q, sigma, steps), steps * one
            if not admitted % 20 and refused < 3:
                event, steps, price = dp_sgd_event(1.0, 0.3, 4), 4, math.inf
            wanted = [request(event=event, num_steps=steps, delta=delta)] * draw.choice([1, 1, 1, 2])
            try:
                claims = reserve_all(ledger, "notes", wanted)
            except BudgetExceeded:
                refused += 1
                continue
            admitted += len(claims)
            own |= {claim.entry: price for claim in claims}
            assert sum(own.values()) <= own_allowance * (1 + 1e-9)
            if draw.random() < 0.1 and steps > 1:
                ledger.charge(claims[0].entry, 1)
                ledger.reconcile(claims[0].entry, "alice", "stopped")
                own[claims[0].entry] = price / steps
        assert admitted >= 200
        assert refused
        assert ledger.used("notes") == pytest.approx(sum(own.values()) / own_allowance, rel=0.02)
        assert sum(own.values()) > 0.5 * own_allowance  # so that a filter that admits twice as much would be seen


def test_what_a_closed_run_gave_back_is_the_chains_to_say(ledger: Ledger, place: Place):
    """Its counter of steps lies beside the chain, where it could be set to none."""
    budgets.set_budget(ledger, "notes", budget(8.0))
    claim = reserve(ledger, event=RUN, num_steps=150)
    for step in (1, 2):
        ledger.charge(claim.entry, step)
    ledger.reconcile(claim.entry, "alice", "crashed")
    used = ledger.used("notes")
    place.edit("UPDATE progress SET steps = 0")
    (run,) = ledger.runs("notes")
    assert run.steps == 2
    assert ledger.used("notes") == used


def test_reconciling_gives_back_what_never_ran_unless_it_was_final(ledger: Ledger):
    for dataset in ("notes", "fixed"):
        budgets.set_budget(ledger, dataset, budget(8.0))
        claim = reserve(ledger, dataset, event=RUN, num_steps=150, final=dataset == "fixed")
        for step in range(1, 31):
            ledger.charge(claim.entry, step)
        before = ledger.used(dataset)
        ledger.reconcile(claim.entry, "alice", "crashed")
        assert ledger.spent(dataset) == epsilon(RUN, DELTA, "zero_out")
        if dataset == "notes":
            assert ledger.used(dataset) == pytest.approx(before / 5)
        else:
            with pytest.raises(BudgetExceeded, match="closed for good"):
                reserve(ledger, dataset)


def _closed(event, steps: int, num_steps: int = 0) -> Run:
    claim = Claim("e", "notes", "a", num_steps, 1.0, DELTA, "patient", "zero_out")
    return Run(claim, event, steps, "reconciled", 0.0)


def test_what_ran_elsewhere_is_never_given_back():
    imported = Imported(3.0, 0.0)
    for inside in (imported, compose([EVENT, imported])):
        event = SelfComposed(2, inside)
        assert _closed(event, 0).counted_event == event
    assert _closed(RUN, 30, 150).counted_event == dp_sgd_event(0.02, 0.8, 30)
    assert _closed(RUN, 10**6, 150).counted_event == RUN


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    runs=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([2.0, 5.0, 9.0]), st.floats(0, 1)), max_size=8),
    order=st.sampled_from([2.0, 3.2, 8.0]),
)
def test_the_filter_counts_no_less_than_every_executed_step(runs, order):
    closed = tuple(_closed(dp_sgd_event(0.1, s, n), int(n * part), n) for n, s, part in runs)
    account = Account("notes", budget(8.0, order=order), closed, ())
    executed = compose([dp_sgd_event(0.1, s, int(n * part)) for n, s, part in runs])
    assert admission.filter_spent(account, order) == pytest.approx(renyi.rdp(executed, order), rel=1e-12)
    held = replace(account, runs=tuple(replace(run, state="interrupted") for run in closed))
    whole = compose([dp_sgd_event(0.1, s, n) for n, s, _ in runs])
    assert admission.filter_spent(held, order) == pytest.approx(renyi.rdp(whole, order), rel=1e-12)


def test_delta_hidden_in_a_runs_event_is_not_free(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(8.0))
    hidden = compose([EVENT, Imported(0.0, 0.5)])
    with pytest.raises(Refused):
        reserve(ledger, event=hidden, delta=0.9)
    assert imported_delta(hidden) == 0.5
    assert admission.used(ledger.account("notes"), hidden) == math.inf


def test_a_budget_that_comes_after_runs_counts_them_at_an_order_of_its_own(ledger: Ledger):
    reserve(ledger, event=RUN, num_steps=150)
    fixed_budget = budgets.set_budget(ledger, "notes", budget(8.0, order=3.7))
    assert fixed_budget.order == renyi.filter_order(8.0, DELTA) != 3.7  # nobody chooses it
    assert fixed_budget == ledger.budget("notes")
    assert budgets.set_budget(ledger, "notes", budget(8.0, order=5.1)) == fixed_budget
    left = renyi.allowance(8.0, DELTA, fixed_budget.order) - renyi.rdp(RUN, fixed_budget.order)
    assert admission.filter_left(ledger.account("notes")) == renyi.Fit(fixed_budget.order, left)


def test_a_final_run_that_costs_exactly_the_budget_fits_at_the_budgets_own_delta(ledger: Ledger):
    budgets.set_budget(ledger, "a", budget(cost_of(1)))
    assert reserve(ledger, "a", final=True).final
    budgets.set_budget(ledger, "b", budget(math.nextafter(cost_of(1), 0)))
    with pytest.raises(BudgetExceeded, match="the exact total would be epsilon"):
        reserve(ledger, "b", final=True)
    budgets.set_budget(ledger, "c", budget((cost_of(1, 1e-8) + cost_of(1)) / 2, delta=1e-8))
    with pytest.raises(BudgetExceeded):
        reserve(ledger, "c", delta=1e-3, final=True)
    assert ledger.runs("b") == ledger.runs("c") == []


def test_a_budget_too_small_for_the_filter_admits_a_final_run_alone(ledger: Ledger):
    fixed_budget = budgets.set_budget(ledger, "notes", budget(0.05))
    assert admission.filter_allowance(fixed_budget) <= 0
    tiny = dp_sgd_event(1.0, 400.0, 4)
    with pytest.raises(BudgetExceeded, match="type --final"):
        reserve(ledger, event=tiny)
    assert ledger.used("notes") == 0
    reserve(ledger, event=tiny, final=True)


@pytest.mark.parametrize("limited", [True, False])
def test_a_final_reservation_closes_the_account_for_good(ledger: Ledger, limited: bool):
    if limited:
        budgets.set_budget(ledger, "notes", budget(100.0))
    wanted = [request(run=name, final=name == "a") for name in "ab"]
    claims = reserve_all(ledger, "notes", wanted, group="g")  # one asks, and the group is
    assert [claim.final for claim in claims] == [True, True]
    head = ledger.head()
    for _ in range(2):
        for changes in ({}, {"final": True}, {"event": dp_sgd_event(1.0, 4000.0, 1), "num_steps": 1}):
            with pytest.raises(BudgetExceeded, match="closed for good by run 'a'"):
                reserve(ledger, **changes)
            with pytest.raises(BudgetExceeded, match="closed for good by run 'a'"):
                reserve(ledger, "part", derived_from="notes", **changes)
        with pytest.raises(BudgetExceeded, match="closed for good"):
            reserve_all(ledger, "notes", [request(run="c"), request(run="d")], group="h")
        outlook = ledger.outlook("notes", [request()])
        assert (outlook.final, outlook.used, outlook.spent, bool(outlook.refusal)) == (True, None, cost_of(2), True)
        if ledger.head() == head:
            for claim in claims:  # what becomes of them changes nothing
                ledger.reconcile(claim.entry, "alice", "never ran")
    with pytest.raises(Refused):
        budgets.set_budget(ledger, "notes", budget(200.0))
    assert len(ledger.runs("notes")) == 2


@pytest.mark.parametrize("before", ["reserved", "completed", "refused", "reconciled", "import", "derived"])
def test_nothing_is_final_after_any_run_or_import(ledger: Ledger, before: str):
    budgets.set_budget(ledger, "notes", budget(100.0))
    if before == "import":
        budgets.import_run(ledger, "notes", event=EVENT, run="x", **TERMS, **WHO)
    elif before == "derived":
        reserve(ledger, "part", derived_from="notes")
    else:
        claim = reserve(ledger)
        if before in ("completed", "refused"):
            ledger.finish(claim.entry, before)
        if before == "reconciled":
            ledger.reconcile(claim.entry, "alice", "never ran")
    head = ledger.head()
    with pytest.raises(BudgetExceeded, match="only the first reservation may be final"):
        reserve(ledger, final=True)
    with pytest.raises(BudgetExceeded, match="only the first reservation may be final"):
        reserve_all(ledger, "notes", [request(run="a", final=True), request(run="b")], group="g")
    assert ledger.head() == head
    reserve(ledger)  # in any order they may go on


def test_what_is_imported_after_a_final_run_is_entered_and_shown_as_exceeding(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(cost_of(1)))
    claim = reserve(ledger, final=True)
    assert "exactly" in totals(ledger, "notes")[0]
    budgets.import_run(ledger, "notes", event=EVENT, run="x", **TERMS, **WHO)
    assert ledger.spent("notes") == cost_of(2) > ledger.budget("notes").epsilon
    stated = account_totals(ledger.account("notes"), ledger.spent("notes"), claim.group)
    assert (stated["final"], stated["used"], stated["spent_epsilon"], stated["imported"]) == (True, None, cost_of(2), 1)
    assert "exactly" not in totals(ledger, "notes")[0]


def test_an_event_without_renyi_divergence_is_admitted_as_final_alone(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(8.0))
    with pytest.raises(BudgetExceeded, match=r"knows no Renyi divergence.*type --final") as refusal:
        reserve(ledger, event=ROWS, num_steps=5)
    assert "data.sampling: unit" in str(refusal.value)
    reserve(ledger)
    with pytest.raises(BudgetExceeded, match="use other data"):
        reserve(ledger, event=ROWS, num_steps=5)
    budgets.set_budget(ledger, "others", budget(8.0))
    reserve(ledger, "others", event=ROWS, num_steps=5, final=True)
