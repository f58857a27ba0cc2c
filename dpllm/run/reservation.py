"""What a run has reserved in the ledger, and charges step by step.

Comes in: the decision, the ledger. Goes out: a ``Reservation``, or a refusal that writes nothing. Must not know what a step does.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import Any, Literal

from dpllm.ledger import Ledger, RunRequest, dataset_policy, open_ledger
from dpllm.ledger.admission import comes_to, reserve_all, use_reservation
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.run.promise import Decision, Start
from dpllm.text.data import Rows


@dataclass(frozen=True)
class Reservation:
    """That of one run.

    Without differential privacy, and in other processes than the first, there is no ledger, and calls do nothing.
    """

    entry: str | None = None
    ledger: Ledger | None = None

    def charge(self, step: int) -> None:
        """Writes down that step ``step``, counted from 1, is about to be taken; refuses what was not reserved, or is taken."""
        if self.ledger is not None and self.entry is not None:
            self.ledger.charge(self.entry, step)

    def finish(self, status: Literal["completed", "interrupted"], manifest: str | None = None) -> None:
        """Closes the reservation, with a digest of what was written."""
        if self.ledger is not None and self.entry is not None:
            self.ledger.finish(self.entry, status, manifest)

    def close(self) -> None:
        """Closes the ledger."""
        if self.ledger is not None:
            self.ledger.close()

    def to_json(self, delta: float | None) -> dict[str, Any] | None:
        """What is said of the ledger, at its budget's delta or else this one; None without differential privacy."""
        if self.ledger is None or delta is None or self.entry is None:
            return None
        ledger, claim = self.ledger, self.ledger.run(self.entry).reservation
        account = ledger.account(claim.dataset)
        spent = ledger.spent(claim.dataset, None if account.budget else delta)
        return {
            "dataset": claim.dataset,
            "entry": claim.entry,
            "head": ledger.head(),
            **comes_to(account, spent, claim.group),
        }


def reserve(config: RunConfig, decision: Decision, start: Start, run: RunDir, rows: Rows) -> Reservation:
    """Reserves what a run will spend, or goes on with what was reserved for it.

    Raises:
        BudgetExceeded: The budget has no room for the run.
        Refused: The reservation that was made before is of another run.

    Guarantee:
        What is returned covers every step that the Plan has, and nothing was written if this raises.
    """
    plan = decision.plan
    if plan is None:
        return Reservation()
    policy = decision.policy
    with contextlib.ExitStack() as stack:
        ledger = open_ledger(config.privacy.ledger)  # the first reservation makes the file; a refusal makes none
        assert ledger is not None
        stack.enter_context(ledger)
        if policy.records is None:  # there was no ledger to tell the data by
            policy = dataset_policy.find_policy(config, rows.table, rows.held_out, ledger)
        dataset, parent, records = policy.dataset, policy.derived_from, policy.records
        if decision.resumed is not None:
            entry = decision.resumed.entry
        elif start.entry is not None:
            account, steps = ledger.records.charged_to(dataset, parent), plan.schedule.num_steps
            entry = start.entry
            use_reservation(ledger, entry, dataset=account, event=plan.event, num_steps=steps, records=records)
        else:
            name = f"{run.root.name}-{secrets.token_hex(4)}"
            request = RunRequest.of(plan, name, decision.flaw, final=config.privacy.final)
            entry = reserve_all(ledger, dataset, [request], records=records, derived_from=parent)[0].entry
        stack.pop_all()  # stays open
        return Reservation(entry, ledger)
