"""Steps that were charged stay charged: the chain follows them, so that setting a run back shows."""

from __future__ import annotations

import pytest
from ledger_stores import Place, adaptive, reserve

from dpllm.errors import Refused
from dpllm.ledger import Ledger, budgets
from dpllm.privacy.accounting import dp_sgd_event


def test_steps_that_are_set_back_are_found(ledger: Ledger, place: Place):
    budgets.set_budget(ledger, "notes", adaptive(8.0))
    claim = reserve(ledger, event=dp_sgd_event(1.0, 400.0, 100), num_steps=100)
    for step in range(1, 53):
        ledger.charge(claim.entry, step)
    assert ledger.verify() == []
    place.edit("UPDATE progress SET steps = 49")
    with place.open() as again:
        assert "contradicts the steps" in again.verify()[0]
        with pytest.raises(Refused, match="changed by something other than dpllm"):
            again.reconcile(claim.entry, "bob", "gone")


def test_a_run_of_a_thousand_steps_leaves_few_entries(ledger: Ledger):
    claim = reserve(ledger, event=dp_sgd_event(1.0, 400.0, 1000), num_steps=1000)
    for step in range(1, 1001):
        ledger.charge(claim.entry, step)
    assert len(ledger.history()) < 25
    assert ledger.run(claim.entry).state == "running"
    ledger.finish(claim.entry, "completed")
    assert ledger.run(claim.entry).state == "completed"
