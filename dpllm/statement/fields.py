"""The parts of a privacy statement that are no promise: frozen, typed, and closed to fields that nobody reads.

Goes out: types, of which ``dpllm.statement.privacy_record`` makes the statement. Must not know how it is made, worded or checked.
"""

from __future__ import annotations

from typing import Literal

from dpllm.privacy.accounting import StoredEvent
from dpllm.records import AtLeast1, Between0And1, Count, NotNegative, Number, Positive, Record

Generator = Literal["aes256_ctr", "philox_gpu", "philox"]
CRYPTOGRAPHIC = "aes256_ctr"


class Lattice(Record):
    """Noise and contributions were rounded to one lattice and added exactly."""

    coordinates: AtLeast1
    """How many numbers train."""
    noise_over_max_grad_norm: Positive
    """Standard deviation of the noise over C: the noise multiplier times the sensitivity, rounding counted."""


class Randomness(Record):
    """Where sampling and noise came from."""

    generator: Generator
    """Of noise; keyed by the operating system, but where a user's seed took the guarantee away."""
    secure_noise: bool
    """Whether the generator is cryptographic."""
    lattice: Lattice


class Steps(Record):
    """Logical steps."""

    planned: Count
    """Of the Plan; epsilon is for all of them."""
    taken: Count
    """Executed."""
    lost: AtLeast1 | None = None
    """Of these, how many were lost in a crash and are in no weights; absent where none were."""


class Budget(Record):
    """The budget that was set for the dataset, by a Renyi filter; null: none, it is charged without limit."""

    delta: Between0And1
    """Its delta."""
    epsilon: NotNegative
    """Its epsilon."""
    order: Number
    """Order of its filter."""


class Group(Record):
    """The tuning group of the run, whose runs were fixed together before the first of them; null for a single run."""

    delta: Between0And1
    """Delta of that epsilon."""
    epsilon: NotNegative
    """Epsilon of all of them together."""
    name: str
    """Its name."""
    runs: AtLeast1
    """How many runs it has."""


class Charged(Record):
    """What the ledger said of the run, and of all runs on its dataset, when it ended."""

    dataset: str
    """Name of the dataset in the ledger."""
    budget: Budget | None
    spent_epsilon: NotNegative | None
    """Epsilon of all runs together, as if fixed in advance; null where one gives no guarantee or none can be computed."""
    used: NotNegative | None
    """Share of the budget that all runs use, whatever runs come; null without a budget, for a final run, and where none covers
    all."""
    final: bool
    """Whether the first reservation was admitted by its exact total, spent_epsilon, and closed the dataset for good."""
    imported: Count
    """How many entries are for runs made elsewhere, as somebody stated them."""
    entry: str | int
    """This run's entry."""
    group: Group | None


class Composed(Charged):
    """The total over all runs on the dataset, as the ledger had it after this one; null where no ledger kept the run."""

    delta: Number | None
    """Delta of these epsilons."""
    entries: Count
    """Entries of the ledger at that time."""
    head: str
    """Hash of the last of these entries, which fixes all before it."""


class Ancestor(Record):
    """What the privacy statement of an earlier model says."""

    name: str
    """Its name."""
    guarantee: bool
    """Whether it states a guarantee."""
    epsilon: NotNegative | None
    """Its epsilon; null without a guarantee."""
    delta: Number | None
    """Its delta."""
    unit: str | None
    """Its unit."""
    neighbouring_relation: str | None
    """Its relation."""
    event: StoredEvent | None
    """Its accounting event; null where it has none."""
    dataset: str | None
    """Name of the dataset in its ledger."""
    entry: str | int | None
    """Its entry there."""
    files_digest: str | None
    """SHA-256 over the hashes of its files."""
    adapter: bool = False
    """Whether it is an adapter, which training started from; absent where it is a model."""


class ComposedLineage(Record):
    """Guarantee for both together where they used the same dataset; null where none can be stated."""

    epsilon: NotNegative
    """Epsilon."""
    delta: Number
    """Delta."""
    accountant: str
    """What computed it."""


class Lineage(Record):
    """What the base model states about its own training, where it has a privacy statement; null elsewhere."""

    base: Ancestor
    """The base model of this run."""
    ancestors: tuple[Ancestor, ...]
    """The models before it, the latest first; each with the fields of lineage.base."""
    same_dataset: bool
    """Whether base and run used the same dataset."""
    dataset: str | None
    """Name of the common dataset in the ledger; null where there is none."""
    composed: ComposedLineage | None
    reason: str | None
    """Why no composed guarantee is stated; null where one is."""

    @property
    def models(self) -> tuple[Ancestor, ...]:
        """All earlier models, the latest first."""
        return (self.base, *self.ancestors)

    @property
    def mine(self) -> list[Ancestor]:
        """Those that learned the common dataset."""
        return [one for one in self.models if one.dataset is not None and one.dataset == self.dataset]
