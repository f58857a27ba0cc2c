"""A data set that a tuned model wrote: what synthetic.json holds.

Comes in: JSON. Goes out: a typed record, of which the marked part of the data set's card is a function. Must not know how rows
are written or checked. What lies in the folder::

    README.md          the card, whose front matter the Hub and ``datasets.load_dataset`` read
    synthetic.json     this record
    data/train.jsonl   the rows, one JSON object a line
    run/README.md      the card of the model that wrote them, and its privacy statement, byte for byte as in the run's export/
    run/privacy.json

Epsilon is not repeated here: it is that of run/privacy.json, together with the statistics named there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpllm.statement.fields import AtLeast1, Count, Number, Record, Sha256, Share, Text

RECORD, ROWS = "synthetic.json", "data/train.jsonl"


class Sampling(Record):
    """How texts were drawn."""

    engine: Literal["transformers", "vllm"]
    """Which library drew tokens."""
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


class Synthetic(Record):
    """All about one synthetic data set, but for the privacy statement of the model that wrote it."""

    schema_version: Literal[1]
    """Of this record."""
    rows: AtLeast1
    """How many there are."""
    columns: tuple[Text, ...]
    """Of each row, in order."""
    control: tuple[Text, ...]
    """Columns that each text was asked for; empty: none."""
    shares: Text | None
    """Name of the released statistic that says how often each of their values is asked for; null without control."""
    prompts: AtLeast1 | None
    """How many public prompts the texts answer; null: they were written from their beginning, or from control codes."""
    sampling: Sampling
    attempts: AtLeast1
    """How many texts were drawn."""
    dropped: dict[Text, Count]
    """Why a text was not taken -> how many."""
    files: dict[Text, Sha256]
    """SHA-256 of data/train.jsonl, run/README.md and run/privacy.json."""
    quality: Quality | None
    """Null: not measured."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day of the last row, in UTC."""
    software: dict[Text, str]
    """Versions."""
