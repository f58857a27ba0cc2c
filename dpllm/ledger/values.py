"""What the ledger speaks of: budgets, reservations, runs, and what a run would do to a budget.

Frozen values without behaviour beyond their own arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from dpllm.errors import ConfigError
from dpllm.ledger.chain import canonical
from dpllm.privacy.accounting import Event, Relation

Gate = Literal["planned", "adaptive"]
# Of these, a step is one release. What was imported or selected ran elsewhere, and no count of steps says how much of it.
ONE_RELEASE = ("gaussian", "adaptive_clipping", "poisson_sampled", "poisson_sampled_group")
State = Literal["reserved", "running", "completed", "interrupted", "refused", "reconciled"]


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
        text: The event in canonical JSON, where the ledger has it at hand.
    """

    reservation: Reservation
    event: Event
    steps: int
    state: State
    heartbeat: float
    text: str = ""

    def kept(self) -> str:
        """The event that an adaptive gate still counts, as JSON: the executed part of a reconciled run, all of any other."""
        divisible = self.event["type"] == "self_composed" and self.event["event"]["type"] in ONE_RELEASE
        if self.state != "reconciled" or not divisible:
            return self.whole()
        return canonical({**self.event, "count": min(self.steps, int(self.event["count"]))})

    def whole(self) -> str:
        """The event as JSON."""
        return self.text or canonical(self.event)


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
