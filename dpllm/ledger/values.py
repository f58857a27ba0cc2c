"""Values of the ledger: budgets, requests, reservations, runs, and the account that the chain holds for a dataset.

Frozen values without behaviour beyond their own arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger.chain import Entry
from dpllm.privacy import events
from dpllm.privacy.accounting import Relation
from dpllm.privacy.events import Event

if TYPE_CHECKING:
    from dpllm.privacy.plan import Plan

State = Literal["reserved", "running", "completed", "interrupted", "refused", "reconciled"]
LABELS = "labels of "  # prefix of a dataset's name, which gives the account of its labels
OPEN = ("reserved", "running")  # states of an unfinished run: before its first step; while it charges steps


@dataclass(frozen=True)
class Budget:
    """The limit of all runs on one dataset together, adaptive ones included, by a Renyi filter at one order."""

    epsilon: float  # total, > 0
    delta: float  # total; deltas of single runs do not matter here
    unit: str
    relation: Relation
    import_delta: float = 0.0  # part of delta that is set aside for imported runs
    order: float | None = None  # order of the filter; None in a request: it follows from epsilon, delta and relation
    by: str = ""  # who set it
    reason: str = ""

    def __str__(self) -> str:
        owner = f", set by {self.by} ({self.reason})" if self.by else ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} per {self.unit} under {self.relation}{owner}"


@dataclass(frozen=True)
class RunRequest:
    """A request to reserve one run."""

    event: Event  # everything that it will release
    delta: float  # delta at which it states its own epsilon
    num_steps: int  # logical batches to execute, at most as many as ``event`` pays for in all parts
    unit: str
    relation: Relation
    run: str = ""  # name of the run, for people
    flaw: str | None = None  # why it gives no guarantee; None if it gives one
    final: bool = False  # request admission by the exact total, which closes the account for good
    parts: int = 1  # disjoint sets of units, each of which takes part in one ``event``

    @classmethod
    def of(cls, plan: Plan, run: str = "", flaw: str | None = None, *, final: bool = False) -> RunRequest:
        """The request of a Plan."""
        steps = plan.schedule.num_steps
        return cls(plan.event, plan.delta, steps, plan.unit, plan.neighbouring_relation, run, flaw, final)


@dataclass(frozen=True)
class Claim:
    """The reservation of one run; ``epsilon`` at ``delta`` is the cost of this run alone."""

    entry: str
    dataset: str  # the account that is charged: a dataset, or the one from which it derives
    run: str
    num_steps: int
    epsilon: float
    delta: float
    unit: str
    relation: Relation
    group: str | None = None  # tuning group whose runs were reserved together; None for a single run
    flaw: str | None = None  # why the run gives no guarantee; None if it gives one
    final: bool = False  # it was admitted by its exact total, and closed the account for good

    @property
    def mark(self) -> int:
        """Steps between two entries of the step count in the chain; there are about twenty entries per run."""
        return max(1, self.num_steps // 20)


@dataclass(frozen=True)
class Run:
    """A reservation and its state."""

    reservation: Claim
    event: Event
    steps: int  # charged so far, each of which may have been released
    state: State
    heartbeat: float  # time of the last charge (or of the reservation), in seconds since the epoch

    @property
    def counted_event(self) -> Event:
        """The event for the filter: the executed part of a reconciled run, the whole event of any other."""
        # An interrupted run may continue, so it counts in full until somebody closes it; then no step can be charged.
        if self.state != "reconciled" or not events.divisible(self.event):
            return self.event
        return replace(self.event, count=min(self.steps, self.event.count))


@dataclass(frozen=True)
class Account:
    """One dataset according to the chain: everything that decides whether a run fits."""

    dataset: str
    budget: Budget | None
    runs: tuple[Run, ...]
    imports: tuple[Event, ...]
    # Who permitted training without differential privacy, when and why; including before a budget was set.
    exceptions: tuple[Mapping[str, Any], ...] = ()

    @property
    def final(self) -> bool:
        """Whether the first reservation closed the account for good."""
        return any(run.reservation.final for run in self.runs)

    @property
    def used(self) -> bool:
        """Whether anything was ever reserved or imported, whatever its state."""
        return bool(self.runs or self.imports)

    @property
    def permission(self) -> Mapping[str, Any] | None:
        """The last valid exception; if there is a budget, only its owner's exceptions are valid."""
        valid = [entry for entry in self.exceptions if self.budget is None or entry["by"] == self.budget.by]
        return valid[-1] if valid else None

    def flaws(self) -> list[str]:
        """Runs without a guarantee; with one of them, no epsilon covers all runs together."""
        claims = (run.reservation for run in self.runs)
        return [f"run {claim.run!r} gives no guarantee: {claim.flaw}" for claim in claims if claim.flaw is not None]

    def deviations(self) -> list[str]:
        """Deviations that every later card must state."""
        return [
            *(
                f"training without differential privacy on dataset {self.dataset!r} was permitted by {e['by']} on {e['at'][:10]} "
                f"({e['reason']}); no figure of the ledger covers what was trained that way"
                for e in self.exceptions
            ),
            *(f"on dataset {self.dataset!r}, {flaw}; no figure of the ledger covers it" for flaw in self.flaws()),
        ]

    def events(self) -> list[Event]:
        """The events to compose as if fixed in advance: every reservation in full, and imports."""
        return [*self.imports, *(run.event for run in self.runs)]

    def groups(self) -> dict[str, list[Run]]:
        """The runs of each tuning group, in the order of their reservations."""
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.reservation.group is not None:
                groups.setdefault(run.reservation.group, []).append(run)
        return groups


def account_of(dataset: str, entries: Iterable[Entry], progress: Mapping[str, tuple[int, float]]) -> Account:
    """The account that a dataset's links, oldest first, describe; ``progress`` maps a run to its steps and heartbeat."""
    budget, imports, exceptions, reserved = None, [], [], []
    ended: dict[str, tuple[State, int]] = {}
    for entry in entries:
        facts = entry.facts
        if entry.kind == "budget":
            budget = Budget(**_fields(entry, Budget))
        elif entry.kind == "import":
            imports.append(event_of(entry))
        elif entry.kind == "exception":
            exceptions.append(facts)
        elif entry.kind == "reserve":
            reserved.append(entry)
        elif entry.kind in ("commit", "reconcile"):
            ended[facts["entry"]] = ("reconciled" if entry.kind == "reconcile" else facts["status"], facts["steps"])
    runs = []
    for entry in reserved:
        steps, heartbeat = progress.get(entry.facts["entry"], (0, 0.0))
        state, final = ended.get(entry.facts["entry"], ("running" if steps else "reserved", steps))
        # The steps of a closed run are those of the chain: a row outside it could be changed.
        steps = final if state in ("completed", "reconciled") else steps
        runs.append(Run(reservation_of(entry), event_of(entry), steps, state, heartbeat))
    return Account(dataset, budget, tuple(runs), tuple(imports), tuple(exceptions))


@lru_cache(maxsize=65_536)
def reservation_of(entry: Entry) -> Claim:
    """The claim of a link of kind "reserve"."""
    return Claim(**_fields(entry, Claim))


@lru_cache(maxsize=65_536)
def event_of(entry: Entry) -> Event:
    """The event of a link of kind "reserve" or "import"."""
    return events.read(entry.facts["event"])


def _fields(entry: Entry, kind: Any) -> dict[str, Any]:
    facts = {**entry.facts, "dataset": entry.dataset}
    return {name: facts[name] for name in kind.__dataclass_fields__ if name in facts}


@dataclass(frozen=True)
class Outlook:
    """The account of a dataset before and after one more reservation."""

    dataset: str
    budget: Budget | None
    final: bool  # the reservation asks to be final, or the account is closed by a final one
    used: float | None  # share of the budget that is used; None without a budget, and if ``final``
    used_after: float | None  # the same with the reservation
    could_follow: int | None  # number of further equal reservations that would fit; None without a budget
    # Epsilon of all reservations at ``delta``, composed by PLD as if fixed in advance; None if ``used`` is not None.
    spent: float | None
    after: float | None  # the same with the reservation
    delta: float
    refusal: str | None  # message of the refusal; None if the reservation fits
    reason: str  # one word, by which refusals are counted

    @property
    def error(self) -> Refused | None:
        """The refusal as an error; None if the reservation fits."""
        if self.refusal is None:
            return None
        kind = BudgetExceeded if self.reason == "over_budget" else Refused
        return kind(self.refusal, dataset=self.dataset, reason=self.reason)

    def __str__(self) -> str:
        """The used share or epsilon, before and after the reservation."""
        if self.budget is not None and self.used is not None:
            words = f"{self.dataset}: {used_in_words(self.used, self.budget)}"
            if self.refusal is not None or self.used_after is None:
                return f"{words}; this run is refused"
            fit = "fits" if self.could_follow == 1 else "fit"
            return f"{words}, {percent(self.used_after)} with this run; {self.could_follow} more like it {fit}"
        words = f"{self.dataset}: epsilon {self.spent:.4f} at delta {self.delta:g}, {self.after:.4f} with this run"
        if self.refusal is not None:
            return f"{words}, which is refused"
        if self.final:
            return f"{words}, exactly; it is final, so that none can follow"
        return f"{words}, if all is fixed in advance; no budget limits it"


def percent(share: float) -> str:
    """A share of a budget in percent, with three digits; a share above 1 is never rounded down to 100%."""
    if math.isinf(share):
        return "more than all"
    return f"{math.ceil(1000 * share) / 10 if share > 1 else float(f'{100 * share:.3g}'):g}%"


def used_in_words(share: float, budget: Budget) -> str:
    """The used share of a budget, in words."""
    return f"{percent(share)} of epsilon {budget.epsilon:g} used"


def label_account(name: str) -> str:
    """The account of a dataset's labels; ``name`` is the dataset or that account."""
    return name if name.startswith(LABELS) else LABELS + name


def check_name(dataset: str) -> None:
    """Refuses a dataset name that is blank or cannot be printed on one line."""
    if not dataset.strip() or not dataset.isprintable():
        raise ConfigError(
            f"dataset name {dataset!r} is empty or holds characters that cannot be shown. Give it another."
        )


def check_person(action: str, by: str, reason: str) -> None:
    """Refuses an entry without a named person and a reason."""
    if not (by.strip() and reason.strip()):
        raise ConfigError(f"{action} by a named person with a reason: --by NAME --reason WHY")
