"""A data set that a tuned model wrote: what synthetic.json holds, and what it and the model's privacy statement say together.

Comes in: JSON. Goes out: a typed record. Must not know how rows are written or checked, nor the card. What lies in the folder::

    README.md          the card, whose front matter the Hub and ``datasets.load_dataset`` read
    synthetic.json     this record
    data/train.jsonl   the rows, one JSON object a line
    run/README.md      the card of the model that wrote them, its privacy statement and, with a guarantee, its figure, byte for
    run/privacy.json   byte as in the run's export/
    run/privacy.svg

Epsilon is not repeated here: it is that of run/privacy.json, together with the statistics named there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpllm.files import BLOCK, CARD
from dpllm.privacy.limits import attacker_limits
from dpllm.records import AtLeast1, Count, Number, Record, Sha256, Share, Text
from dpllm.statement import tradeoff_figure
from dpllm.statement.privacy_record import PrivacyRecord

RECORD, ROWS = "synthetic.json", "data/train.jsonl"
MODEL_CARD, MODEL_BLOCK, FIGURE = f"run/{CARD}", f"run/{BLOCK}", f"run/{tradeoff_figure.FILE}"


class Sampling(Record):
    """How texts were drawn."""

    engine: Literal["transformers"]
    temperature: Annotated[float, Field(ge=0)]
    """By which logits were divided; 0: the likeliest token each time."""
    top_p: Share
    """Only the likeliest tokens that together have this probability."""
    max_new_tokens: AtLeast1
    """A text has at most so many."""
    seed: Count | None
    """Decides everything random; null: the operating system did."""


class Quality(Record):
    """Figures that depend on the rows, released statistics and public data alone."""

    figures: dict[Text, Number | None]
    """Name -> value; null where there was nothing to compute it from."""
    evaluation: Text | None
    """The public data that some are computed on; null: none."""


class Written(Record):
    """What is said of all rows that a model wrote."""

    schema_version: Literal[1]
    rows: AtLeast1
    """How many there are."""
    columns: tuple[Text, ...]
    """Of each row, in order."""
    control: tuple[Text, ...]
    """Columns that each text was asked for; empty: none."""
    shares: Text | None
    """Name of the released statistic that says how often each of their values is asked for; null without control, and without a
    guarantee, where they are asked for as often as the training rows have them."""
    dropped: dict[Text, Count]
    """Why a text did not become a row -> how many."""
    files: dict[Text, Sha256]
    """SHA-256 of data/train.jsonl and of all in run/."""
    quality: Quality | None
    """Null: not measured."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day of the last row, in UTC."""
    software: dict[Text, str]
    """Versions of dpllm, Python and the packages that the result depends on."""


class Synthetic(Written):
    """All about one synthetic data set, but for the privacy statement of the model that wrote it."""

    prompts: AtLeast1 | None
    """How many public prompts the texts answer; null: they were written from their beginning, or from control codes."""
    sampling: Sampling
    attempts: AtLeast1
    """How many texts were drawn: each became a row or was dropped."""


def read(value: object) -> Synthetic:
    """A record, checked.

    Raises:
        NotAStatement: It does not keep to the schema.
    """
    return Synthetic.checked(value)


def epsilon(statement: PrivacyRecord) -> float | None:
    """What the folder costs at the run's delta: the model, all statistics on its card, and the models before it on the same data.

    None without a guarantee. With earlier models, statistics are added (basic composition): their delta is 0.
    """
    if statement.plan is None or not statement.guarantee:
        return None
    lineage, released = statement.lineage, statement.statistics
    if lineage is not None and lineage.composed is not None:
        return lineage.composed.epsilon + (released.pure if released else 0.0)
    return released.with_run if released else statement.plan.epsilon


def recognised(statement: PrivacyRecord) -> float | None:
    """The largest share of units that any test of the whole folder recognises, see ``tradeoff_figure.recognised``.

    None without a guarantee.
    """
    plan, lineage, released, total = statement.plan, statement.lineage, statement.statistics, epsilon(statement)
    if plan is None or total is None:
        return None
    alone = attacker_limits(total, plan.delta)["tpr_at_fpr_0.01"]
    before = lineage is not None and lineage.composed is not None  # whose events are in no curve
    beside = released.pure if released else 0.0
    return min(alone, 1.0 if before else tradeoff_figure.recognised(plan, beside))


def of_run(statement: PrivacyRecord) -> dict[str, str]:
    """What lies in run/: its name in the folder, and in the run's export/."""
    return {f"run/{name}": name for name in (CARD, BLOCK, *([tradeoff_figure.FILE] if statement.guarantee else []))}


def files(statement: PrivacyRecord) -> set[str]:
    """All that lies in the folder."""
    return {CARD, RECORD, ROWS, *of_run(statement)}
