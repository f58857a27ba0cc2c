"""The parts of a privacy statement: frozen, typed, and closed to fields that nobody reads.

Goes out: types, of which ``dpllm.statement.privacy_record`` makes the statement. Must not know how it is made, worded or checked.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from dpllm.errors import ConfigError
from dpllm.privacy.clipping_functions import Clipping
from dpllm.statement.stored_events import Event, RunEvent

Json = dict[str, Any]

_MOST_PROBLEMS, _LONGEST = 20, 100
Generator = Literal["aes256_ctr", "philox_gpu", "philox"]
CRYPTOGRAPHIC = "aes256_ctr"
DEFINITION = "(epsilon, delta)-differential privacy"


def _as_given(value: Any, check: Any) -> Any:
    """A number as it stands in the file: 1 is not written back as 1.0."""
    check(value)
    return value


_GIVEN = WrapValidator(_as_given)
Number = Annotated[float, _GIVEN]
NotNegative = Annotated[float, Field(ge=0), _GIVEN]
Positive = Annotated[float, Field(gt=0), _GIVEN]
Share = Annotated[float, Field(ge=0, le=1), _GIVEN]
Between0And1 = Annotated[float, Field(gt=0, lt=1), _GIVEN]
Count = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Value = TypeVar("_Value")
ByCopies = dict[Annotated[str, Field(pattern=r"^[0-9]+$")], _Value]
"""By how often each canary was planted."""


class NotAStatement(ConfigError):
    """A value that is no privacy statement.

    Attributes:
        problems: What in it the schema does not allow, one line each.
    """

    def __init__(self, problems: list[str]) -> None:
        """Names the first few."""
        self.problems = problems
        super().__init__(
            f"the privacy statement does not keep to its schema ({'; '.join(problems[:3])}), so no reader could rely on its "
            "fields. It is damaged, or of another version of dpllm: type dpllm card RUN to write it anew, or read it with that."
        )

    @classmethod
    def of(cls, error: ValidationError, *, tag: bool = False) -> Self:
        """Where values are wrong, and why; none is quoted.

        Args:
            error: What pydantic says.
            tag: Whether its places begin with the kind of statement.
        """
        lines = []
        for one in error.errors(include_url=False)[:_MOST_PROBLEMS]:
            place = ".".join(map(str, one["loc"][tag:])) or "the block"
            place = "guarantee" if one["type"].startswith("union_tag") else place
            lines.append(f"{place[:_LONGEST]}: {one['msg'][:_LONGEST]}")
        return cls(lines)


class Record(BaseModel):
    """A part of the statement: immutable, closed to other fields, and no value of another type is taken for one."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    @classmethod
    def pick(cls, source: Json, **given: Any) -> Self:
        """The fields of this part out of a larger JSON object.

        Args:
            source: Holds them, and others that are left out.
            given: Fields that stand elsewhere or are worded otherwise: JSON values, or parts.

        Raises:
            NotAStatement: One of them is missing, or holds what no statement may say.
        """
        names = {field.alias or name for name, field in cls.model_fields.items()}
        mine = {name: value for name, value in {**source, **given}.items() if name in names}
        try:
            # Half a character, of a name that is no UTF-8, is written as a question mark.
            return cls.model_validate_json(
                json.dumps(mine, default=lambda part: part.to_json(), ensure_ascii=False).encode(errors="replace")
            )
        except ValidationError as error:
            raise NotAStatement.of(error) from None

    @classmethod
    def checked(cls, value: object) -> Self:
        """All of a JSON value as this part, or NotAStatement."""
        try:
            return cls.model_validate_json(json.dumps(value, allow_nan=False))
        except ValidationError as error:
            raise NotAStatement.of(error) from None

    def to_json(self) -> Json:
        """What was given, in the order of the fields; what was left out stays out."""
        copy: Json = json.loads(json.dumps(self.model_dump(exclude_unset=True, by_alias=True, warnings=False)))
        return copy


class Banded(Record):
    """How noise reaches back and groups take turns; absent where the noise of each step is independent of the others'."""

    bands: AtLeast1
    """b: how many groups there are, one of which has its turn in a step, and how many steps the noise of one is spread over."""
    coefficients: tuple[Number, ...]
    """First column of the strategy matrix C, whose noise is C^-1 times independent noise; its squares add up to at most 1."""
    group_rate: Share
    """Probability that a member of the group whose turn it is joins a step: b times the sampling rate."""


class Drawn(Record):
    """How many take part in a step."""

    sampling_rate: Annotated[float, Field(gt=0, le=1), _GIVEN]
    """Probability of each coin, expected_batch_size / dataset_size; with groups, over the draw of the groups too."""
    expected_batch_size: AtLeast1
    """Expected number in a step, and the public divisor of the sum."""
    dataset_size: AtLeast1
    """N, the public number of what is sampled, canary slots included."""
    canary_slots: Count
    """How many of the N are reserved for the audit's canaries."""


class Sampling(Drawn):
    """Who takes part in a step."""

    scheme: Literal["poisson", "cyclic_poisson"]
    """How: poisson, an independent coin for each; cyclic_poisson, for each of the group whose turn it is."""
    of: Literal["unit", "example"]
    """What is drawn and clipped as a whole: unit, or example for single rows."""
    implemented_as_accounted: Literal[True]
    """The sampler that ran is the one that epsilon is computed for."""


class Lattice(Record):
    """Noise and contributions were rounded to one lattice and added exactly."""

    coordinates: AtLeast1
    """How many numbers train."""
    noise_over_max_grad_norm: Positive
    """Standard deviation of the noise over C: the noise multiplier times the sensitivity, rounding counted."""


class Randomness(Record):
    """Where sampling and noise came from."""

    generator: Generator
    """Of noise, keyed by the operating system; ``philox``, of version 0.1.0, of sampling too."""
    secure_noise: bool
    """Whether the generator is cryptographic."""
    lattice: Lattice


class Accountant(Record):
    """What computed epsilon."""

    interval: Positive
    """Discretisation of the privacy loss."""
    name: str
    """Name."""
    version: str
    """Version."""


class CrossCheck(Record):
    """A second accountant's epsilon for the same event; null where none knows it."""

    epsilon: NotNegative
    """Its epsilon."""
    name: str
    """Name."""
    version: str
    """Version."""


class MechanismLimits(Record):
    """What no membership test can exceed, from every (epsilon, delta) of the event at once."""

    auc: Share | None
    """Largest area under the ROC curve."""
    gdp_mu: NotNegative | None
    """Smallest mu of a Gaussian mechanism with at least the delta of this event wherever it is at least 1e-10; a summary."""
    tpr_at_fpr_0_001: Share | None = Field(alias="tpr_at_fpr_0.001")
    """Largest true-positive rate at a false-positive rate of 0.1%."""
    tpr_at_fpr_0_01: Share | None = Field(alias="tpr_at_fpr_0.01")
    """Largest true-positive rate at a false-positive rate of 1%."""


class Promise(Record):
    """What plan.json and the statement say alike: the promise, its event, and what accountants say of it."""

    epsilon: NotNegative
    """Privacy loss of the run, an upper bound in full precision."""
    delta: Between0And1
    """Slack of the definition; far below 1/N."""
    unit: Text
    """Whom the guarantee protects: example (one row of the data), or the name of the column that says whose row it is."""
    max_examples_per_unit: AtLeast1 | None
    """Most rows that one unit may bring; null where each row is a unit."""
    neighbouring_relation: Literal["zero_out", "add_or_remove_one"]
    """How two datasets differ between which the guarantee holds: zero_out (one unit's data replaced by nothing, N unchanged) or
    add_or_remove_one."""
    clipping: Clipping
    """The clipping function."""
    max_grad_norm: Positive
    """C, the L2 norm to which the gradient of each thing that is sampled is clipped."""
    noise_multiplier: Positive
    """Standard deviation of the noise over C."""
    accountant: Accountant
    cross_check: CrossCheck | None
    accountants: dict[Annotated[str, Field(pattern=r"^[a-z]+$")], NotNegative | None] | None = None
    """Epsilon by each accountant that knows the event."""
    limits: MechanismLimits | None = None
    curve: tuple[tuple[Number, Number | None], ...] | None = None
    """Pairs of delta and the epsilon certified at it, null where none is."""
    event: RunEvent
    """The mechanism as a value, from which epsilon can be computed again."""


class Terms(Promise):
    """What is promised: everything that is needed to compute epsilon again."""

    definition: Literal["(epsilon, delta)-differential privacy"]
    """Which definition epsilon and delta belong to."""
    holds_for: Literal["run"]
    """What epsilon is about: this run alone; composed has the total over the runs on the dataset."""
    trust_model: Literal["central"]
    """Who saw the data: central means whoever ran the training did, and everybody else sees what is released."""
    mechanism: Literal["dp-sgd", "dp-bandmf"]
    """What released the weights; dp-bandmf is DP-SGD with banded noise."""
    optimizer: Literal["adamw", "sgd"]
    """What the noised sums were given to."""
    banded: Banded | None = None
    sampling: Sampling
    without_amplification: NotNegative | None
    """Epsilon at the same delta if batches had come from shuffling, rounded up to four digits; null where none can be stated."""
    randomness: Randomness
    trade_off: tuple[tuple[Share, Share], ...] | None = None
    """Pairs of a false-positive rate and the largest true-positive rate of any membership test, in 4 digits."""

    @property
    def group_size(self) -> int:
        """How many of what is sampled may belong to one unit."""
        return (self.max_examples_per_unit or 1) if self.sampling.of == "example" else 1


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
    event: Event | None
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
