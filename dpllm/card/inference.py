"""Texts written by private inference: their record inference.json, what follows from its facts, and the card.

Comes in: facts, statistics; a folder with rows and a recipe for license, language and title. Goes out: a typed record, README.md.
Must not know how texts are written or checked, read the private data, or quote a row. Files of the folder::

    README.md          the card, whose front matter the Hub and ``datasets.load_dataset`` read
    inference.json     this record
    data/train.jsonl   the rows, one JSON object a line

Nothing was trained. For each text, each record of a batch of units is put into its own prompt, and their clipped votes draw one
token after another: ``max_new_tokens`` draws of range 2 C / (B tau). Batches are disjoint, so all texts cost as much as one.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dpllm.card import card, synthetic
from dpllm.card.artifact import DRAWN, SAID, Artifact, Front, Promise
from dpllm.card.synthetic import ROWS, Written, total
from dpllm.files import CARD, sha256, write_whole
from dpllm.privacy import accounting, events
from dpllm.privacy.accounting import Accountant, CrossCheck, compose, stored
from dpllm.privacy.events import Event
from dpllm.privacy.limits import MechanismLimits, attacker_limits, attacker_limits_of
from dpllm.privacy.plan import ACCOUNTANT
from dpllm.recipe.config import RunConfig
from dpllm.records import AtLeast1, Between0And1, Count, Json, NotNegative, Positive, Text
from dpllm.statement import formatting, lineage
from dpllm.statement.privacy_record import BaseModelName, Composed, Lineage
from dpllm.statement.released import BesideRun, Statistics
from dpllm.statement.state import beside_run
from dpllm.text import layouts

RECORD, PARTS = "inference.json", ("inference",)
MOST_ABOVE = Fraction(1, 10**9)
"""Relative; how far the range of a draw may exceed the exact one."""
MOST_EPSILON = 500.0
"""By RDP: a larger epsilon protects nobody, and an accountant would take minutes."""
_MAIN = ("delta", "unit", "neighbouring_relation", "dataset")
BoundedRange = Annotated[
    events.BoundedRange, *stored(lambda event: isinstance(event, events.BoundedRange) and event.count > 0)
]
"""The event of one text or more, drawn token by token."""


class Inference(Written):
    """All about one data set that was written by private inference."""

    epsilon: NotNegative
    """Of the texts alone, an upper bound in full precision."""
    delta: Between0And1
    """Slack of the definition; far below 1/N."""
    unit: Text
    """Whom the guarantee protects: example (one row of the data), or the name of the column that says whose row it is."""
    max_examples_per_unit: AtLeast1 | None
    """Most rows that one unit may bring; null where each row is a unit."""
    neighbouring_relation: Literal["zero_out", "add_or_remove_one"]
    """How two datasets differ between which the guarantee holds."""
    event: BoundedRange
    """The mechanism as a value, from which epsilon can be computed again."""
    accountant: Accountant
    cross_check: CrossCheck | None
    limits: MechanismLimits
    """Of texts and statistics together."""
    num_units: AtLeast1
    """N, the public number of units; with add_or_remove_one as somebody declared it."""
    batch_size: AtLeast1
    """B, how many units vote for each token of a text, and the public divisor of the sum of their votes."""
    clip: Positive
    """C: a vote moves each logit by at most so much, up or down."""
    temperature: Positive
    """tau, by which the mean of the votes is divided before a token is drawn."""
    top_k: Count
    """Candidates are so many tokens, the likeliest behind the public prompt; 0: all."""
    max_new_tokens: AtLeast1
    """T: a text has at most so many."""
    texts: AtLeast1
    """How many were begun, each by a batch of its own, which never draws again."""
    prompt: Text
    """The public template in which each record stood, at {text}; the public prompt has nothing there."""
    base_model: BaseModelName
    dataset: str
    """Public name of the data: as the ledger knows them, or the last part of where they lay."""
    data_public: bool
    """Whether whoever wrote the rows declares the data public."""
    eval_public: bool
    """The same of evaluation rows, beside which quality may have been measured."""
    composed: Composed | None
    lineage: Lineage | None
    """What the base model states of its own training; where that was on the same data, the total of both."""
    statistics: BesideRun | None
    """Those whose shares were asked for; with_run is epsilon of the texts and them together."""
    not_covered: Annotated[tuple[str, ...], Field(min_length=1)]
    """Every property, and every access to data, that the guarantee is not about."""
    hardware: dict[Text, str | bool | int | float | tuple[str, ...]]
    """Where the model read the records, without names of machines."""


def derive(facts: Json, released: Statistics | None) -> Inference:
    """The record of texts written by inference; computes epsilon and everything that follows from the event.

    Args:
        facts: Fields of ``Inference``: JSON values, events or records. Derived fields, ``schema_version`` and, before the rows
            are written, ``files`` may be missing; without ``not_covered`` the record has the lines that always hold.
        released: The statistics whose shares set the frequencies of codes; None without control columns.

    Raises:
        NotAStatement: A fact is not allowed in a record.
        Refused: No finite epsilon can be stated.
    """
    event, delta, relation = facts["event"], facts["delta"], facts["neighbouring_relation"]
    event = event if isinstance(event, Event) else events.read(event)
    epsilon = accounting.epsilon(event, delta, relation)
    record = Inference.pick(
        {
            "not_covered": [*not_covered(facts["unit"], relation), *lineage.deviations(facts["lineage"])],
            "files": {},
            **facts,
        },
        schema_version=1,
        epsilon=epsilon,
        accountant={**accounting.versions(), "name": ACCOUNTANT, "interval": accounting.FINE_INTERVAL},
        cross_check=accounting.cross_check(event, delta, relation, epsilon),
        limits=attacker_limits_of(whole(event, released), relation),
        statistics=None,
    )
    return record if released is None else record.model_copy(update={"statistics": beside_run(released, record, True)})


def not_covered(unit: str, relation: str) -> tuple[str, ...]:
    """Limits of every guarantee of texts by inference."""
    lines = formatting.template("inference_not_covered.txt.j2").render(
        unit=unit, neighbouring_relation=relation, visible=formatting.visible
    )
    return tuple(lines.strip().splitlines())


def eta(record: Inference) -> Fraction:
    """The exact range of a draw: one unit moves the mean of the votes by at most C / B in each coordinate."""
    return 2 * Fraction(record.clip) / (record.batch_size * Fraction(record.temperature))


def whole(event: Event, released: Statistics | None) -> Event:
    """The event of the texts together with the statistics that set the frequencies of codes."""
    return event if released is None else compose([event, released.event()])


def epsilon(record: Inference) -> float:
    """Epsilon of texts and statistics together, at the record's delta; see ``synthetic.total``."""
    return total(record.epsilon, record.statistics)


def recognised(record: Inference) -> float:
    """The largest share of units that a test of the whole release can recognise at a false-positive rate of 1%."""
    limit = record.limits.tpr_at_fpr_0_01
    return min(attacker_limits(epsilon(record), record.delta)["tpr_at_fpr_0.01"], 1.0 if limit is None else limit)


def write_inference_card(directory: Path, config: RunConfig, record: Inference) -> Path:
    """Writes the card and the record of the rows in a folder.

    Args:
        directory: Contains data/train.jsonl, and nothing else except an older card.
        config: Provides card.license, card.language and card.title.
        record: A result of ``derive``; its ``files`` are computed here.

    Returns:
        The path of README.md.

    Raises:
        ConfigError: A text of record or recipe contains a marker.
    """
    record = record.model_copy(update={"files": {ROWS: sha256(directory / ROWS)}})
    text = synthetic.whole_page(config, record, front_matter(record), render(record))
    write_whole(directory / RECORD, card.dump_statement(record.to_json()))
    write_whole(directory / CARD, text)
    return directory / CARD


def render(record: Inference) -> dict[str, str]:
    """The marked part of the card: Markdown, which differs wherever two records differ.

    Raises:
        ConfigError: See ``card.filled``.
    """
    return card.filled(PARTS, lambda: synthetic.context(record, epsilon(record), recognised(record)))


def front_matter(record: Inference) -> Json:
    """The front matter of the card without license and language, which are the author's."""
    block = record.to_json()
    main = {"guarantee": True, **{name: block[name] for name in _MAIN}, "epsilon": epsilon(record)}
    main |= {"record": RECORD, "sha256": card.digest(block)}
    return synthetic.loadable(record.columns, main, guarantee=True)


def _rules(record: Inference) -> dict[str, bool]:
    statistics, min_range, event = record.statistics, eta(record), record.event
    max_range = min_range * (1 + MOST_ABOVE)
    counted, lineage = record.neighbouring_relation == "zero_out", record.lineage
    shares = layouts.shares_of(record.control) if record.control else None
    public = synthetic.declared_sides(record.data_public, record.eval_public)
    return {
        **synthetic.rules_of_rows(record, record.texts, ["text"], statistics),
        f"the event is {event.count} draws of range {event.range:.12g}, but {record.max_new_tokens} tokens are stated, and "
        f"2 C / (B tau) is {float(min_range):.12g}": event.count == record.max_new_tokens
        and min_range <= Fraction(event.range) <= max_range,
        "all batches have more units than there are, so that some would vote twice": not counted
        or record.texts * record.batch_size <= record.num_units,
        "shares is not the statistic of the control columns": record.shares == shares,
        "max_examples_per_unit belongs to another unit": record.unit != "example" or not record.max_examples_per_unit,
        "delta is not below 1/N, so that publishing one record outright would satisfy it": record.delta
        * record.num_units
        < 1,
        "the prompt has no place {text} for a record": "{text}" in record.prompt,
        "not_covered leaves something out": {*not_covered(record.unit, record.neighbouring_relation)}
        <= {*record.not_covered},
        "statistics are of another dataset": not (statistics and record.composed)
        or record.composed.dataset == statistics.dataset,
        "quality has figures of rows that are not declared public": synthetic.may_publish(record.quality, public),
        "an earlier model was trained on the same dataset, which is in no total of these": lineage is None
        or not (lineage.same_dataset or lineage.composed),
    }


def _promise(record: Inference) -> Promise:
    return Promise(
        record,
        f"{record.texts:,} texts were begun, range and number of draws follow from C, B, tau and T, and delta is below 1/N",
        whole=whole(record.event, record.statistics),
        most=MOST_EPSILON,
        units=record.num_units,
        composed=record.composed,
        lineage=record.lineage,
        statistics=record.statistics,
    )


_WORD = "the word of whoever wrote the rows"
ARTIFACT = Artifact(
    kind="rows by inference",
    sources=(RECORD,),
    version=1,
    read=Inference.checked,
    again="Restore inference.json from where the rows were published, or write them anew.",
    promise=_promise,
    rules=_rules,
    files=lambda record: record.files,
    due=lambda _: (ROWS,),
    front=lambda record: Front(front_matter(record), synthetic.OF_AUTHOR),
    parts=render,
    asserted={
        "writing": (
            "",
            "that this model drew the rows, from these prompts, with this clipping and with random numbers of the operating "
            f"system, that no unit voted in two texts, and that nothing of it but the rows was kept: {_WORD}",
        ),
        "data": ("dataset data_public eval_public unit max_examples_per_unit num_units", _WORD),
        "circumstances": (
            "prompt base_model top_k dropped quality date software hardware not_covered accountant.version cross_check.version",
            f"reasons for dropping, the rest of not_covered, and where the rows were written: {_WORD}",
        ),
        "values of statistics": (" ".join(f"statistics.{name}" for name in SAID), DRAWN),
    },
)
"""Rows by private inference."""
