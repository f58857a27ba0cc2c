"""Kinds of release, each as one value: its record, what follows from it, and what nobody can compute; models, clusters, labels.

Comes in: nothing. Goes out: ``Artifact`` values, all of which ``dpllm verify`` checks with one function; those of rows that a
model wrote are in ``synthetic`` and ``inference``. Must not know how anything is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dpllm.card import card
from dpllm.files import BLOCK, CARD
from dpllm.privacy import banded
from dpllm.privacy.events import Event
from dpllm.records import Json
from dpllm.statement import privacy_record, tradeoff_figure
from dpllm.statement.lineage import PromisedEvent
from dpllm.statement.privacy_record import CRYPTOGRAPHIC, SCHEMA_VERSION, Composed, Lattice, Lineage, PrivacyRecord
from dpllm.statement.released import RECORD, VECTORS, Embedded, LabelRecord, Statistics, page

Stated = TypeVar("Stated")


@dataclass(frozen=True)
class Front:
    """The part of a README.md's front matter that follows from the record."""

    due: Json  # required; privacy.sha256 is of the record's file
    free: frozenset[str]  # keys that the author sets; other keys are refused
    perhaps: Json = field(default_factory=dict)  # optional
    never: frozenset[str] = frozenset()  # tags that would claim a guarantee that is not given


@dataclass(frozen=True)
class Promise:
    """What a release promises, and the ledger entry and totals that belong to it."""

    terms: PromisedEvent | None = None
    """Event, delta and all fields that follow from them; None: nothing is promised or was attempted."""
    words: str = "what it says goes together"
    whole: Event | None = None
    """Event for the ``limits`` of attackers; None: the event of the terms."""
    most: float = math.inf
    """Largest epsilon by RDP; a larger one protects nobody, and the accountant would take minutes."""
    reason: str | None = None
    """Why there is no guarantee; None: there is one."""
    units: int = 1
    """Public number of units, without canaries."""
    lattice: Lattice | None = None
    """Lattice to which noise was rounded."""
    steps: int = 0
    """Steps taken, for which its ledger entry must have been charged."""
    composed: Composed | None = None
    """What the ledger stated about it."""
    lineage: Lineage | None = None
    statistics: Statistics | None = None
    """Statistics that were released with it, or alone."""


@dataclass(frozen=True)
class Artifact(Generic[Stated]):
    """One kind of release; ``Stated`` is the type of its facts."""

    kind: str
    sources: tuple[str, ...]
    """JSON files that contain the facts, the record first; everything else follows from them, or is only asserted."""
    version: int
    """Version of the record's schema."""
    read: Callable[..., Stated]
    """JSON of the sources -> facts; raises ``NotAStatement`` if they do not follow the schema."""
    again: str
    """What to do if files are wrong."""
    promise: Callable[[Stated], Promise] = lambda _: Promise()
    rules: Callable[[Stated], Mapping[str, bool]] = lambda _: {}
    """Rules of the facts: problem -> whether the rule holds."""
    files: Callable[[Stated], Mapping[str, str | None]] | None = None
    """SHA-256 of all files except README.md and the record; None for a kind without its own folder."""
    due: Callable[[Stated], Collection[str]] | None = None
    """Names that ``files`` must have; None: any that ``dpllm.files.unknown`` accepts."""
    front: Callable[[Stated], Front] | None = None
    parts: Callable[[Stated], Mapping[str, str]] | None = None
    """Marked parts of README.md."""
    whole: Callable[[Stated], Mapping[str, str]] = lambda _: {}
    """Texts of other files that are rendered from the facts, by name."""
    asserted: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a line -> fields that cannot be computed from the published files, and why."""


SAID = ("dataset", "date", "delta", "software", *(f"releases.*.{name}" for name in ("statistic", "value", "entry")))
"""Fields of statistics that nobody can compute."""
DRAWN = "the author's word that they were drawn from these data, by a mechanism that knew no other noise"
OF_LABELS = ("dataset", "date", "entry", "unit", "account_epsilon")
"""Such fields of a draw of labels."""
FLIPPED = "the author's word on whose labels these are, and that each was flipped once, by a coin that nobody knows"


_OF_AUTHOR = {"library_name", "pipeline_tag", "tags", "license", "license_name", "license_link", "language", "datasets"}
"""Keys of the front matter that dpllm writes without comparing them; and two that the Hub requires for a custom licence."""


def model_rules(statement: PrivacyRecord) -> dict[str, bool]:
    """Rules of a statement: problem -> whether the rule holds; figures that follow from the event are checked elsewhere.

    Every Plan checks itself that its event follows from N, batch, steps, noise and unit.
    """
    plan, steps, files = statement.plan, statement.steps, statement.files
    released = "adapter weights" if "adapter_model.safetensors" in files else "model weights"
    provided = {
        "there are no weights": any(name.endswith(".safetensors") for name in files),
        f"the released files are {released}": statement.merged_from is not None or statement.released == released,
        "steps.taken is more than planned": steps.taken <= steps.planned,
        "steps.lost is more than taken": (steps.lost or 0) <= steps.taken,
        "a completed run took other steps than planned": statement.status != "completed"
        or steps.taken == steps.planned,
        "the figure shows a guarantee, and there is none": statement.guarantee or tradeoff_figure.FILE not in files,
        "the figure of the guarantee is missing": not statement.guarantee or tradeoff_figure.FILE in files,
    }
    if plan is not None:
        coefficients = plan.coefficients
        provided |= {
            "coefficients are not the best of any schedule": not coefficients
            or banded.near_best(coefficients, plan.num_steps),
            "steps.planned is not the Plan's num_steps": steps.planned == plan.num_steps,
            "epsilon is above target_epsilon": plan.epsilon <= plan.target_epsilon,
        }
    if randomness := statement.randomness:
        secure = randomness.generator == CRYPTOGRAPHIC
        provided[f"randomness.secure_noise is not true of {randomness.generator}"] = randomness.secure_noise == secure
    return provided


def _promise(statement: PrivacyRecord) -> Promise:
    plan, summary = statement.plan, "no Plan is stated"
    if plan is not None:
        turns = " of groups in turn, with banded noise" if plan.coefficients else ""
        sizes = f"N {plan.dataset_size}, batch {plan.expected_batch_size}, {plan.num_steps} steps"
        summary = f"{plan.definition}, {plan.trust_model}, DP-SGD over Poisson samples{turns}; {sizes} and noise give the event"
    return Promise(
        plan,
        summary,
        reason=None if statement.guarantee else statement.reason,
        units=plan.dataset_size - plan.canary_slots if plan else 1,
        lattice=statement.randomness.lattice if statement.randomness else None,
        # The best of several runs is charged as one release: the number of steps would reveal the number of runs.
        steps=1 if plan and plan.best_of else statement.steps.taken,
        composed=statement.composed,
        lineage=statement.lineage,
        statistics=statement.statistics,
    )


def _front(record: PrivacyRecord) -> Front:
    base = record.base_model
    return Front(
        {"privacy": card.matter(record)},
        frozenset(_OF_AUTHOR),
        perhaps={"base_model": base.name if base.revision else None},
        never=frozenset() if record.guarantee else frozenset(card.DP_TAGS),
    )


MODEL = Artifact(
    kind="model",
    sources=(BLOCK,),
    version=SCHEMA_VERSION,
    read=privacy_record.read,
    again="Restore privacy.json from where the model was published, or write the card again: dpllm card RUN.",
    promise=_promise,
    rules=model_rules,
    files=lambda record: record.files,
    front=_front,
    parts=card.render,
    whole=lambda record: {tradeoff_figure.FILE: tradeoff_figure.figure(record.plan)} if record.guarantee else {},
    asserted={
        "training": (
            "optimizer clipping max_grad_norm neighbouring_relation randomness coefficients target_epsilon status "
            "steps.taken steps.lost",
            "the author's word that these steps ran with this sampler, this clipping and noise from the operating system",
        ),
        "data": (
            "unit dataset data_public expected_batch_size dataset_size max_examples_per_unit",
            "the author's word on the training data and on what a unit is; of N and batch, only the ratio enters epsilon",
        ),
        "circumstances": (
            "base_model software hardware date recipe_digest accountant.version cross_check.version deviations",
            "the author's word on where, when, from what and with which versions it ran",
        ),
        "deployment": (
            "deployment",
            "the author's word on who publishes this, for what, and who decided on epsilon and why",
        ),
        "words": ("not_covered tuning contact template reason", "free text, which cannot be computed"),
        "values of statistics": (" ".join(f"statistics.{name}" for name in SAID), DRAWN),
        "labels: coins": (" ".join(f"labels.{name}" for name in OF_LABELS), FLIPPED),
    },
)
"""A model: weights with the statement of their run."""


EMBEDDED = Artifact(
    kind="clusters or a classifier",
    sources=(RECORD,),
    version=1,
    read=Embedded.checked,
    again="Restore the folder from where it was published.",
    promise=lambda shown: Promise(units=shown.releases[0].declared.units or 0, statistics=shown),
    files=lambda shown: {VECTORS: shown.releases[0].vectors},
    due=lambda _: (VECTORS,),
    whole=lambda shown: {CARD: page(shown)},
    asserted={
        "values of statistics": (" ".join((*SAID, "releases.*.vectors")), DRAWN),
        "author's word": (
            "unit max_examples_per_unit neighbouring_relation releases.*.declared releases.*.encoder",
            "that the numbers are of so many units, and of texts that this encoder read",
        ),
    },
)
"""A folder of clusters, or of a classifier."""
LABELS = Artifact(
    kind="labels",
    sources=("labels.json",),
    version=1,
    read=LabelRecord.checked,
    again="Take the record of the time when the labels were randomised, and write the card again: dpllm card RUN.",
    rules=lambda shown: {"account_epsilon is not stated": shown.account_epsilon is not None},
    asserted={"labels: coins": (" ".join(OF_LABELS), FLIPPED)},
)
"""The record of a file of flipped labels."""
