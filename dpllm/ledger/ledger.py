"""The ledger itself: reservations, charges and totals.

Comes in: events and requests. Goes out: accounts, totals or refusals. A run reserves its whole event before the first gradient,
charges every step before it is applied, and finishes with the number of executed steps. admission.py decides what a budget
admits, budgets.py enters what people request, store.py stores the rows. Must not know models or training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import admission
from dpllm.ledger.chain import Chain, Entry, is_bound
from dpllm.ledger.records import Records
from dpllm.ledger.store import Postgres, SQLite, Store, check_place, default_path
from dpllm.ledger.values import (
    Account,
    Budget,
    Claim,
    Outlook,
    Run,
    RunRequest,
    account_of,
    check_person,
    reservation_of,
)
from dpllm.privacy.accounting import Relation, compose, epsilon


def open_ledger(location: str | os.PathLike[str] | None, *, create: bool = True) -> Ledger | None:
    """Opens the ledger that a recipe names: a path, a ``postgresql://`` URL, or None for the file in the user's data directory.

    Without ``create``, a missing file is not made, and the result is None.

    Raises:
        ConfigError: The ledger cannot be opened, or the URL holds a password.
    """
    if isinstance(location, str) and location.startswith(("postgresql://", "postgres://")):
        return Ledger(Postgres(location))
    if isinstance(location, str) and "://" in location:
        raise ConfigError(
            f"privacy.ledger {location!r} is a URL of an unknown kind, so no budget can be kept there. Set a path, or a "
            "postgresql:// URL."
        )
    path = Path(location) if location else default_path()
    if create or os.path.lexists(path):
        return Ledger(path)
    check_place(path)  # fails before anything is loaded
    return None


class Ledger:
    """One open ledger, for one thread; close it or use it in a ``with`` statement."""

    def __init__(self, store: Store | os.PathLike[str] | str) -> None:
        """Opens a ledger; a path is an SQLite file, which is made if absent.

        Raises:
            ConfigError: The file cannot be written, or holds something other than a ledger.
        """
        self.store: Store = SQLite(Path(store)) if isinstance(store, str | os.PathLike) else store
        self.chain = Chain(self.store)
        self.records = Records(self.chain)
        self.location = self.store.location
        self._checked_records = False

    def close(self) -> None:
        """Closes the ledger."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- runs ------------------------------------------------------------------------------------------------------

    def charge(self, entry: str, step: int) -> None:
        """Records that step number ``step``, counted from 1, is about to be applied; this is also the heartbeat.

        Raises:
            Refused: ``step`` is not the next step or was not reserved, or the run is finished.
            ConfigError: This ledger has no such reservation.

        Guarantee:
            If several processes resume one reservation, each step is charged by exactly one of them.
        """
        with self.chain.writing():
            claim, steps = self._unfinished(entry)
            if step != steps + 1:
                raise Refused(
                    f"step {step} of run {claim.run!r} cannot be charged: {steps} steps are charged, and each is "
                    "released once, in order. Another process may be training this run: stop it, "
                    f"and resume from step {steps + 1}."
                )
            if step > claim.num_steps:
                raise Refused(
                    f"run {claim.run!r} reserved {claim.num_steps} steps, so step {step} is not "
                    "paid for. Reserve a new run for more steps."
                )
            # Charged before the step is applied: a crash in between leaves a step charged but not released, not the reverse.
            statement = "UPDATE progress SET steps = ?, updated_at = ? WHERE entry = ?"
            self.store.rows(statement, step, time.time(), entry)
            if step % claim.mark == 0:  # so a count of steps that was set back contradicts the chain
                self.chain.append("commit", claim.dataset, {"entry": entry, "steps": step, "status": "running"})

    def run(self, entry: str) -> Run:
        """A reservation, its event and its state.

        Raises:
            ConfigError: This ledger has no such reservation.
        """
        runs = self.account(self._claim(entry)[0].dataset).runs
        return next(run for run in runs if run.reservation.entry == entry)

    def finish(
        self, entry: str, status: Literal["completed", "interrupted", "refused"], manifest: str | None = None
    ) -> None:
        """Enters the number of executed steps into the chain; "interrupted" runs can be resumed.

        ``manifest`` is a digest of the files that the run wrote. A completed run may complete again with other files, since its
        process may be killed after the entry and before the files are final.

        Raises:
            Refused: The run has already ended in another state.
            ConfigError: This ledger has no such reservation.
        """
        with self.chain.writing():
            claim, steps = self._claim(entry)
            if status != "completed" or self.run(entry).state != "completed":
                self._unfinished(entry)
            elif manifest is None:
                return
            content = {"entry": entry, "steps": steps, "status": status}
            self.chain.append("commit", claim.dataset, content | ({} if manifest is None else {"manifest": manifest}))

    def closed_with(self, entry: str) -> str | None:
        """The last entered digest of a run's files; None if none was entered."""
        ends = self.chain.of(self._claim(entry)[0].dataset, "commit")
        manifests = [end.facts.get("manifest") for end in ends if end.facts["entry"] == entry]
        return next((manifest for manifest in reversed(manifests) if manifest is not None), None)

    def reconcile(self, entry: str, by: str, reason: str) -> Run:
        """Closes a run that will not continue. Its executed steps stay charged.

        A budget's filter gets back the steps that were never executed. A final run stays charged for all its steps, because its
        exact total holds only if the number of steps was fixed in advance.

        Raises:
            Refused: The run is finished already.
            ConfigError: This ledger has no such reservation, or nobody is named.
        """
        check_person("a run is reconciled", by, reason)
        self.refuse_if_tampered()
        with self.chain.writing():
            claim, steps = self._unfinished(entry)
            self.chain.append("reconcile", claim.dataset, {"entry": entry, "steps": steps, "by": by, "reason": reason})
        return self.run(entry)

    def _claim(self, entry: str) -> tuple[Claim, int]:
        rows = self.store.rows("SELECT seq, steps FROM progress WHERE entry = ?", entry)
        link = self.chain.numbered(rows[0][0]) if rows else None
        if link is None or link.kind != "reserve" or link.facts["entry"] != entry:
            raise ConfigError(
                f"ledger {self.location} has no reservation {entry!r}, so its steps cannot be charged. "
                "Set privacy.ledger to the ledger that the run was started with."
            )
        return reservation_of(link), rows[0][1]

    def _unfinished(self, entry: str) -> tuple[Claim, int]:
        claim, steps = self._claim(entry)
        for ended in self.chain.of(claim.dataset, "commit", "reconcile"):
            status = ended.facts.get("status", "reconciled")
            if ended.facts["entry"] == entry and status not in ("interrupted", "running"):
                raise Refused(
                    f"run {claim.run!r} is {status}, so none of its steps can be charged. "
                    "Start a new run, which reserves its own steps."
                )
        return claim, steps

    # --- accounts and totals ---------------------------------------------------------------------------------------

    def account(self, dataset: str) -> Account:
        """The account of ``dataset``, or of the dataset from which it derives; it decides whether a run fits."""
        with self.chain.moment():
            name = self.records.account_name(dataset)
            rows = self.store.rows("SELECT entry, steps, updated_at FROM progress")
            progress = {entry: (steps, heartbeat) for entry, steps, heartbeat in rows}
            return account_of(name, self.chain.of(name), progress)

    def budget(self, dataset: str) -> Budget | None:
        """The current budget of ``dataset`` or of the dataset from which it derives; None if none was set."""
        return self.account(dataset).budget

    def runs(self, dataset: str) -> list[Run]:
        """Each reservation of ``dataset`` and its state, oldest first."""
        return list(self.account(dataset).runs)

    def spent(self, dataset: str, delta: float | None = None, requests: Sequence[RunRequest] = ()) -> float:
        """Epsilon of all reservations, imports and ``requests``, composed by PLD as if fixed in advance.

        ``delta`` is by default the budget's, or else the largest that a run stated.
        """
        account = self.account(dataset)
        events = account.events() + [request.event for request in requests]
        if not events:
            return 0.0
        if delta is None:
            deltas = (run.reservation.delta for run in account.runs)
            delta = account.budget.delta if account.budget else max(deltas, default=1e-5)
        entries = self.chain.of(account.dataset, "budget", "reserve", "import")
        return epsilon(compose(events), delta, requests[0].relation if requests else entries[-1].facts["relation"])

    def used(self, dataset: str) -> float | None:
        """The share of the budget that is used; see ``admission.used``."""
        return admission.used(self.account(dataset))

    def outlook(self, dataset: str, requests: Sequence[RunRequest], derived_from: str | None = None) -> Outlook:
        """The account before and after a reservation, and whether the ledger would admit it. Writes nothing."""
        account = self.account(self.records.charged_to(dataset, derived_from))
        name, budget = account.dataset, account.budget
        delta = budget.delta if budget else max(request.delta for request in requests)
        refusal, reason = None, "over_budget"
        try:
            self.refuse_if_tampered()
            self.same_unit(name, requests[0].unit, requests[0].relation)
            refusal = admission.refusal(account, requests)
        except Refused as error:
            refusal, reason = str(error), error.reason
        final = account.final or any(request.final for request in requests)
        events = [request.event for request in requests]
        is_exact, could_follow = budget is None or final, admission.runs_that_fit(account, *events)
        if could_follow and refusal is None:  # it includes this reservation
            could_follow = 0 if final else could_follow - 1
        return Outlook(
            dataset=name,
            budget=budget,
            final=final,
            used=None if is_exact else admission.used(account),
            used_after=None if is_exact else admission.used(account, *events),
            could_follow=could_follow,
            spent=self.spent(name, delta) if is_exact else None,
            after=self.spent(name, delta, requests) if is_exact else None,
            delta=delta,
            refusal=refusal,
            reason=reason if refusal else "",
        )

    def datasets(self) -> list[str]:
        """Every account: datasets with entries that are charged to themselves."""
        with self.chain.moment():
            return [name for name in self.chain.datasets() if self.records.account_name(name) == name]

    def same_unit(self, dataset: str, unit: str, relation: Relation) -> None:
        """Refuses a unit or relation that differs from the budget, the runs or the imports of ``dataset``."""
        # Only the last budget counts: nothing used a budget that was corrected.
        for entry in [*self.chain.of(dataset, "budget")[-1:], *self.chain.of(dataset, "reserve", "import")]:
            past = entry.facts
            if (past["unit"], past["relation"]) != (unit, relation):
                raise Refused(
                    f"dataset {dataset!r} is accounted per {past['unit']!r} under "
                    f"{past['relation']!r}; epsilon per {unit!r} under {relation!r} is another "
                    "quantity and does not add to it. Set data.unit (--unit), data.owners and "
                    "data.public_size as in its earlier runs.",
                    dataset=dataset,
                    reason="other_unit",
                )

    # --- refusals, which are stored outside the chain ----------------------------------------------------------------

    def refusals(self) -> dict[tuple[str, str], int]:
        """Counts of refusals: (dataset, reason) -> number."""
        rows = self.store.rows("SELECT dataset, reason, number FROM refusals")
        return {(dataset, reason): number for dataset, reason, number in sorted(rows)}

    def count_refusal(self, dataset: str, reason: str) -> None:
        """Counts one refusal."""
        with self.store.write():
            condition = "WHERE dataset = ? AND reason = ?"
            if self.store.rows(f"SELECT 1 FROM refusals {condition}", dataset, reason):
                self.store.rows(f"UPDATE refusals SET number = number + 1 {condition}", dataset, reason)
            else:
                self.store.rows("INSERT INTO refusals VALUES (?, ?, 1)", dataset, reason)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts each refusal that is raised inside."""
        try:
            yield
        except Refused as error:
            if error.reason:
                with suppress(ConfigError):  # a ledger that cannot be written must not hide the refusal
                    self.count_refusal(error.dataset, error.reason)
                error.reason = ""  # so it is counted once
            raise

    # --- the chain -------------------------------------------------------------------------------------------------

    def history(self, dataset: str | None = None) -> list[Entry]:
        """All links of the chain as stored, or those of ``dataset``, oldest first."""
        return [entry for entry in self.chain.stored() if dataset in (None, entry.dataset)]

    def head(self) -> dict[str, Any]:
        """Hash of the last link and number of links; keep a copy where this ledger's writers cannot change it."""
        return self.chain.head()

    def verify(self, head: dict[str, Any] | None = None) -> list[str]:
        """Recomputes the chain, and compares the steps of all runs and the records of all datasets with it.

        Returns:
            The problems, one sentence each; one of them is a chain that no longer contains ``head``, an earlier ``head()``.
        """
        return self.chain.verify(head) or self.records.verify()

    def refuse_if_tampered(self) -> None:
        """Refuses a copied ledger, and a chain or records that anything but dpllm changed; records are checked once."""
        is_bound(self.store)
        self.chain.refuse(self.chain.verify())
        if not self._checked_records:
            self.chain.refuse(self.records.verify())
            self._checked_records = True
