"""What the ledger speaks of: budgets, requests, reservations, runs, and the account that the chain holds for a dataset.

Frozen values without behaviour beyond their own arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dpllm.errors import ConfigError
from dpllm.ledger.chain import Entry
from dpllm.privacy import events, renyi
from dpllm.privacy.accounting import Relation
from dpllm.privacy.events import Event

if TYPE_CHECKING:
    from dpllm.privacy.plan import Plan

Gate = Literal["planned", "adaptive"]
State = Literal["reserved", "running", "completed", "interrupted", "refused", "reconciled"]
LABELS = "labels of "  # before the name of a dataset: the account of its labels
OPEN = ("reserved", "running")  # states of a run that is not finished: no step yet; its process charges steps


@dataclass(frozen=True)
class Budget:
    """What all runs on one dataset may spend together, and how that is decided."""

    epsilon: float  # of everything together, > 0
    delta: float  # of everything together; deltas of single runs do not matter here
    unit: str
    relation: Relation
    gate: Gate = "planned"  # planned: a list of runs sealed before the first; adaptive: a Renyi filter
    order: float | None = None  # of the filter; None under planned
    import_delta: float = 0.0  # part of delta that is set aside for imported runs; adaptive only
    by: str = ""  # who set it
    reason: str = ""

    def __str__(self) -> str:
        gate = "planned" if self.gate == "planned" else f"adaptive at order {self.order:g}"
        if self.order == renyi.SUM:
            gate = "adaptive by the sum of epsilons"
        who = f", set by {self.by} ({self.reason})" if self.by else ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} per {self.unit} under {self.relation}, {gate}{who}"


@dataclass(frozen=True)
class RunRequest:
    """One run that asks for its place."""

    event: Event  # all that it will release
    delta: float  # at which it states its own epsilon
    num_steps: int  # logical batches to execute, no more than ``event`` pays for
    unit: str
    relation: Relation
    run: str = ""  # its name, for people
    flaw: str | None = None  # why it gives no guarantee; None: it gives one

    @classmethod
    def of(cls, plan: Plan, run: str = "", num_steps: int | None = None, flaw: str | None = None) -> RunRequest:
        """What a Plan asks for, in all or for some of its steps."""
        steps = plan.schedule.num_steps if num_steps is None else num_steps
        return cls(plan.event_after(steps), plan.delta, steps, plan.unit, plan.neighbouring_relation, run, flaw)


@dataclass(frozen=True)
class Reservation:
    """One run's claim; ``epsilon`` at ``delta`` is what this run costs alone."""

    entry: str
    dataset: str  # the account that is charged: a dataset, or the one from which it derives
    run: str
    num_steps: int
    epsilon: float
    delta: float
    unit: str
    relation: Relation
    extends: str | None = None  # the reservation whose lost steps this one makes up
    gate: Gate | None = None  # by which it was admitted; None without a budget
    group: str | None = None  # the tuning group with whose runs it was fixed; None for a single run
    flaw: str | None = None  # why the run gives no guarantee; None: it gives one, or an earlier version did not say

    @property
    def mark(self) -> int:
        """After how many steps the chain says again how many there were; about twenty times in a run."""
        return max(1, self.num_steps // 20)


@dataclass(frozen=True)
class Run:
    """A reservation and what became of it."""

    reservation: Reservation
    event: Event
    steps: int  # charged so far, each of which may have been released
    state: State
    heartbeat: float  # time of the last charge (or of the reservation), in seconds since the epoch

    @property
    def kept(self) -> Event:
        """What an adaptive gate still counts: the executed part of a reconciled run, all of any other."""
        # An interrupted run may go on, so all of it counts until somebody closes it, after which no step can be charged.
        if self.state != "reconciled" or not events.divisible(self.event):
            return self.event
        return replace(self.event, count=min(self.steps, self.event.count))


@dataclass(frozen=True)
class Sealed:
    """One run of the list that was sealed under the gate ``planned``."""

    event: Event
    num_steps: int


def seal_content(runs: Sequence[Sealed], by: str, reason: str) -> dict[str, Any]:
    """The payload of a seal."""
    listed = [{"event": run.event.to_json(), "num_steps": run.num_steps} for run in runs]
    return {"runs": listed, "by": by, "reason": reason}


@dataclass(frozen=True)
class Account:
    """Everything that decides whether a run fits: one dataset as the chain has it."""

    dataset: str
    budget: Budget | None
    sealed: tuple[Sealed, ...] | None
    runs: tuple[Run, ...]
    imports: tuple[Event, ...]
    # Who permitted training without differential privacy, when and why; also before there was a budget.
    exceptions: tuple[Mapping[str, Any], ...] = ()

    @property
    def permission(self) -> Mapping[str, Any] | None:
        """The last exception that holds: by the owner of the budget, where there is one."""
        valid = [entry for entry in self.exceptions if self.budget is None or entry["by"] == self.budget.by]
        return valid[-1] if valid else None

    def after(self, one: RunRequest) -> Account:
        """The same once such a run is reserved."""
        claim = Reservation("", self.dataset, one.run, one.num_steps, 0.0, one.delta, one.unit, one.relation)
        run, sealed = Run(claim, one.event, 0, "reserved", 0.0), self.sealed or (Sealed(one.event, one.num_steps),)
        return replace(self, runs=(*self.runs, run), sealed=sealed)

    def flaws(self) -> list[str]:
        """Runs that give no guarantee: whatever the others cost, no epsilon covers all runs together."""
        claims = (run.reservation for run in self.runs)
        return [f"run {one.run!r} gives no guarantee: {one.flaw}" for one in claims if one.flaw is not None]

    def deviations(self) -> list[str]:
        """What every later card must say."""
        return [
            *(
                f"training without differential privacy on dataset {self.dataset!r} was permitted by {e['by']} on {e['at'][:10]} "
                f"({e['reason']}); no figure of the ledger covers what was trained that way"
                for e in self.exceptions
            ),
            *(f"on dataset {self.dataset!r}, {flaw}; no figure of the ledger covers it" for flaw in self.flaws()),
        ]

    def events(self) -> list[Event]:
        """What counts where parameters are taken as fixed in advance: every reservation in full, and imports."""
        return [*self.imports, *(run.event for run in self.runs)]

    def groups(self) -> dict[str, list[Run]]:
        """Each tuning group's runs, in the order in which they were fixed."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.reservation.group is not None:
                found.setdefault(run.reservation.group, []).append(run)
        return found


def account_of(dataset: str, entries: Iterable[Entry], progress: Mapping[str, tuple[int, float]]) -> Account:
    """What the links of a dataset, oldest first, say of it; ``progress`` has the steps and the heartbeat of each run."""
    budget, sealed, imports, exceptions, reserved = None, None, [], [], []
    ended: dict[str, tuple[State, int]] = {}
    for entry in entries:
        facts = entry.facts
        if entry.kind == "budget":
            budget = Budget(**_fields(entry, Budget))
        elif entry.kind == "seal":
            sealed = _sealed(entry)
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
        # Of a closed run the chain says how many steps it had; a row beside it could be changed.
        steps = final if state in ("completed", "reconciled") else steps
        runs.append(Run(reservation_of(entry), event_of(entry), steps, state, heartbeat))
    return Account(dataset, budget, sealed, tuple(runs), tuple(imports), tuple(exceptions))


@lru_cache(maxsize=65_536)
def reservation_of(entry: Entry) -> Reservation:
    """What a link of the kind "reserve" claims."""
    return Reservation(**_fields(entry, Reservation))


@lru_cache(maxsize=65_536)
def event_of(entry: Entry) -> Event:
    """What a link of the kind "reserve" or "import" costs."""
    return events.read(entry.facts["event"])


@lru_cache(maxsize=64)
def _sealed(entry: Entry) -> tuple[Sealed, ...]:
    return tuple(Sealed(events.read(run["event"]), run["num_steps"]) for run in entry.facts["runs"])


def _fields(entry: Entry, kind: Any) -> dict[str, Any]:
    facts = {**entry.facts, "dataset": entry.dataset}
    return {name: facts[name] for name in kind.__dataclass_fields__ if name in facts}


@dataclass(frozen=True)
class Outlook:
    """What the ledger holds for a dataset, and would hold after one more run; epsilons are given at ``delta``."""

    dataset: str
    gate: Literal["none", "planned", "adaptive"]  # which of the two figures below decides; none: no budget
    budget: Budget | None
    delta: float
    spent: float  # epsilon of all that is reserved, composed by PLD as if fixed in advance
    after: float  # the same with the run
    filter_spent: float | None  # epsilon that the Renyi filter states for what is reserved; None unless adaptive
    filter_after: float | None
    remaining: float | None  # epsilon that further runs may add: after the run, or as it is where that is refused
    # How many runs could follow it: such ones of an adaptive budget, those that wait of a sealed list; None without a budget.
    could_follow: int | None
    refusal: str | None  # with which words the run would be refused; None if it fits
    reason: str  # in one word, by which refusals are counted

    def __str__(self) -> str:
        """What was spent, and what this run would leave."""
        words = (
            f"{self.dataset} has spent {self.spent:.3f}, and {self.after:.3f} after this run, at delta {self.delta:g}"
        )
        if self.budget is None:
            return f"{words}; no budget limits it"
        return f"{words}; of the budget of {self.budget.epsilon:g}, {self.remaining or 0:.3f} then remains"


def label_account(name: str) -> str:
    """The account of the labels of a dataset, by the name of either."""
    return name if name.startswith(LABELS) else LABELS + name


def check_name(dataset: str) -> None:
    """Refuses a dataset's name that cannot be shown on one line, or not be stored everywhere."""
    if not dataset.strip() or not dataset.isprintable():
        raise ConfigError(
            f"dataset name {dataset!r} is empty or holds characters that cannot be shown. Give it another."
        )


def check_person(what: str, by: str, reason: str) -> None:
    """Refuses what is entered without somebody who answers for it, and a reason."""
    if not (by.strip() and reason.strip()):
        raise ConfigError(f"{what} by a named person with a reason: --by NAME --reason WHY")
