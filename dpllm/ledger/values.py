"""What the ledger speaks of: budgets, requests, reservations, runs, and the account that the chain holds for a dataset.

Frozen values without behaviour beyond their own arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dpllm.errors import ConfigError
from dpllm.ledger.chain import Entry, canonical
from dpllm.privacy.accounting import Event, Relation

if TYPE_CHECKING:
    from dpllm.privacy.plan import Plan

Gate = Literal["planned", "adaptive"]
State = Literal["reserved", "running", "completed", "interrupted", "refused", "reconciled"]
# Of these, a step is one release. What was imported or selected ran elsewhere, and no count of steps says how much of it.
ONE_RELEASE = ("gaussian", "adaptive_clipping", "poisson_sampled", "poisson_sampled_group")
ACCOUNT_KINDS = ("budget", "gate", "seal", "reserve", "commit", "reconcile", "import")  # entries that make an account


@dataclass(frozen=True)
class Budget:
    """What all runs on one dataset may spend together, and how that is decided.

    Attributes:
        epsilon: Of everything together, > 0.
        delta: The same for everything together; deltas of single runs do not matter here.
        unit: The privacy unit.
        relation: The neighbouring relation.
        gate: planned (a list of runs sealed before the first) or adaptive (a Renyi filter).
        order: Of the filter; None under planned.
        late: By an earlier version: the order was chosen when results of this dataset were known already, from eight fixed
            ones, each of which has an equal part of delta.
        import_delta: Part of delta that is set aside for imported runs; adaptive only.
        by: Who set it.
        reason: Why.
    """

    epsilon: float
    delta: float
    unit: str
    relation: Relation
    gate: Gate = "planned"
    order: float | None = None
    late: bool = False
    import_delta: float = 0.0
    by: str = ""
    reason: str = ""

    def __str__(self) -> str:
        gate = "planned" if self.gate == "planned" else f"adaptive at order {self.order:g}"
        who = f", set by {self.by} ({self.reason})" if self.by else ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} per {self.unit} under {self.relation}, {gate}{who}"


@dataclass(frozen=True)
class RunRequest:
    """One run that asks for its place.

    Attributes:
        event: All that it will release.
        delta: At which it states its own epsilon.
        num_steps: Logical batches to execute, no more than ``event`` pays for.
        unit: The privacy unit.
        relation: The neighbouring relation.
        run: Its name, for people.
    """

    event: Event
    delta: float
    num_steps: int
    unit: str
    relation: Relation
    run: str = ""

    @classmethod
    def of(cls, plan: Plan, run: str = "", num_steps: int | None = None) -> RunRequest:
        """What a Plan asks for, in all or for some of its steps."""
        steps = plan.schedule.num_steps if num_steps is None else num_steps
        return cls(plan.event_after(steps), plan.delta, steps, plan.unit, plan.neighbouring_relation, run)


@dataclass(frozen=True)
class Reservation:
    """One run's claim; ``epsilon`` at ``delta`` is what this run costs alone.

    Attributes:
        dataset: The account that is charged: a dataset, or the one from which it derives.
        extends: The reservation whose lost steps this one makes up.
        gate: By which gate it was admitted; None without a budget.
        group: The tuning group with whose runs it was fixed; None for a single run.
    """

    entry: str
    dataset: str
    run: str
    num_steps: int
    epsilon: float
    delta: float
    unit: str
    relation: Relation
    config_hash: str | None = None
    extends: str | None = None
    gate: Gate | None = None
    group: str | None = None


@dataclass(frozen=True)
class Run:
    """A reservation and what became of it.

    Attributes:
        steps: Charged so far, each of which may have been released.
        heartbeat: Time of the last charge (or of the reservation), in seconds since the epoch.
    """

    reservation: Reservation
    event: Event
    steps: int
    state: State
    heartbeat: float

    @cached_property
    def text(self) -> str:
        """The event as JSON."""
        return canonical(self.event)

    @cached_property
    def kept(self) -> str:
        """The event that an adaptive gate still counts, as JSON: the executed part of a reconciled run, all of any other."""
        divisible = self.event["type"] == "self_composed" and self.event["event"]["type"] in ONE_RELEASE
        if self.state != "reconciled" or not divisible:
            return self.text
        return canonical({**self.event, "count": min(self.steps, int(self.event["count"]))})


@dataclass(frozen=True)
class Sealed:
    """One run of the list that was sealed under the gate ``planned``."""

    event: Event
    num_steps: int

    @cached_property
    def key(self) -> tuple[str, int]:
        """Equal for two runs that are the same."""
        return canonical(self.event), self.num_steps


def seal_content(runs: Sequence[Sealed], by: str, reason: str) -> dict[str, Any]:
    """The payload of a seal."""
    return {"runs": [asdict(run) for run in runs], "by": by, "reason": reason}


@dataclass(frozen=True)
class Account:
    """Everything that decides whether a run fits: one dataset as the chain has it."""

    dataset: str
    budget: Budget | None
    sealed: tuple[Sealed, ...] | None
    runs: tuple[Run, ...]
    imports: tuple[Event, ...]

    def events(self) -> list[Event]:
        """What counts where parameters are taken as fixed in advance: every reservation in full, and imports."""
        return [*self.imports, *(run.event for run in self.runs)]

    def groups(self) -> dict[str, list[Run]]:
        """The runs of each tuning group, in the order in which they were fixed."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.reservation.group is not None:
                found.setdefault(run.reservation.group, []).append(run)
        return found


def account_of(dataset: str, entries: Iterable[Entry], progress: Mapping[str, tuple[int, float]]) -> Account:
    """What the chain says of a dataset.

    Args:
        dataset: Its name.
        entries: Links of the dataset, oldest first.
        progress: Steps and time of the last one, for every reservation that has not ended.
    """
    budget, sealed, imports, reserved = None, None, [], []
    ended: dict[str, tuple[State, int]] = {}
    for entry in entries:
        facts = entry.facts
        if entry.kind in ("budget", "gate"):
            budget = Budget(**_fields(entry, Budget))
        elif entry.kind == "seal":
            sealed = _sealed(entry)
        elif entry.kind == "import":
            imports.append(facts["event"])
        elif entry.kind == "reserve":
            reserved.append(entry)
        elif entry.kind in ("commit", "reconcile"):
            ended[facts["entry"]] = (facts.get("status", "reconciled"), facts["steps"])
    runs = []
    for entry in reserved:
        steps, heartbeat = progress.get(entry.facts["entry"], (0, 0.0))
        state, final = ended.get(entry.facts["entry"], ("running" if steps else "reserved", steps))
        # Of a closed run the chain says how many steps it had; a row beside it could be changed.
        steps = final if state in ("completed", "reconciled") else steps
        runs.append(_run(entry, steps, state, heartbeat))
    return Account(dataset, budget, sealed, tuple(runs), tuple(imports))


@lru_cache(maxsize=65_536)
def reservation_of(entry: Entry) -> Reservation:
    """What a link of the kind "reserve" claims."""
    return Reservation(**_fields(entry, Reservation))


@lru_cache(maxsize=65_536)  # so that the text of an event is made once
def _run(entry: Entry, steps: int, state: State, heartbeat: float) -> Run:
    return Run(reservation_of(entry), entry.facts["event"], steps, state, heartbeat)


@lru_cache(maxsize=64)
def _sealed(entry: Entry) -> tuple[Sealed, ...]:
    return tuple(Sealed(run["event"], run["num_steps"]) for run in entry.facts["runs"])


def _fields(entry: Entry, kind: Any) -> dict[str, Any]:
    facts = {**entry.facts, "dataset": entry.dataset}
    return {name: facts[name] for name in kind.__dataclass_fields__ if name in facts}


@dataclass(frozen=True)
class Outlook:
    """What the ledger holds for a dataset, and would hold after one more run.

    Attributes:
        gate: none (no budget), planned or adaptive: which of the two figures below decides.
        delta: At which epsilons are given.
        spent: Epsilon of all that is reserved, composed by PLD as if fixed in advance.
        after: The same with the run.
        filter_spent: Epsilon that the Renyi filter states for what is reserved; None unless adaptive.
        filter_after: The same with the run.
        refusal: With which words the run would be refused; None if it fits.
        reason: In one word, by which refusals are counted.
    """

    dataset: str
    gate: Literal["none", "planned", "adaptive"]
    budget: Budget | None
    delta: float
    spent: float
    after: float
    filter_spent: float | None
    filter_after: float | None
    refusal: str | None
    reason: str


def check_name(dataset: str) -> None:
    """Makes sure that a dataset's name can be shown on one line, and stored anywhere.

    Raises:
        ConfigError: It is empty or holds control characters.
    """
    if not dataset.strip() or not dataset.isprintable():
        raise ConfigError(
            f"dataset name {dataset!r} is empty or holds characters that cannot be shown. Give it another."
        )


def check_person(what: str, by: str, reason: str) -> None:
    """Makes sure that somebody answers for what is entered.

    Raises:
        ConfigError: Nobody is named, or no reason is given.
    """
    if not (by.strip() and reason.strip()):
        raise ConfigError(f"{what} by a named person with a reason: --by NAME --reason WHY")
