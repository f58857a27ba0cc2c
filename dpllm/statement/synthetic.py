"""A data set that a tuned model wrote: what synthetic.json holds, and what of its card follows from that.

Comes in: JSON. Goes out: a typed record; the marked part and the front matter of the data set's card, which are functions of it
and of the model's privacy statement. Must not know how rows are written or checked. What lies in the folder::

    README.md          the card, whose front matter the Hub and ``datasets.load_dataset`` read
    synthetic.json     this record
    data/train.jsonl   the rows, one JSON object a line
    run/README.md      the card of the model that wrote them, its privacy statement and, with a guarantee, its figure, byte for
    run/privacy.json   byte as in the run's export/
    run/privacy.svg

Epsilon is not repeated here: it is that of run/privacy.json, together with the statistics named there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dpllm.files import BLOCK, CARD
from dpllm.privacy.privacy_loss import attacker_limits
from dpllm.statement import formatting, section, tradeoff_figure
from dpllm.statement.fields import AtLeast1, Count, NotAStatement, Number, Record, Sha256, Share, Text
from dpllm.statement.privacy_record import AttackLimits, PrivacyRecord

Json = dict[str, Any]

RECORD, ROWS = "synthetic.json", "data/train.jsonl"
MODEL_CARD, MODEL_BLOCK, FIGURE = f"run/{CARD}", f"run/{BLOCK}", f"run/{tradeoff_figure.FILE}"
PARTS = ("synthetic",)
SIDES = ("synthetic", "released", "training", "evaluation")
"""What figures of quality are of: "WHAT: SIDE"."""
_MAIN = ("guarantee", "reason", "delta", "unit", "neighbouring_relation", "dataset")


class Sampling(Record):
    """How texts were drawn."""

    engine: Literal["transformers"]
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
    """Name of the released statistic that says how often each of their values is asked for; null without control, and without a
    guarantee, where they are asked for as often as the training rows have them."""
    prompts: AtLeast1 | None
    """How many public prompts the texts answer; null: they were written from their beginning, or from control codes."""
    sampling: Sampling
    attempts: AtLeast1
    """How many texts were drawn: each became a row or was dropped."""
    dropped: dict[Text, Count]
    """Why a text was not taken -> how many."""
    files: dict[Text, Sha256]
    """SHA-256 of data/train.jsonl and of all in run/."""
    quality: Quality | None
    """Null: not measured."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day of the last row, in UTC."""
    software: dict[Text, str]
    """Versions."""


def read(value: object) -> Synthetic:
    """A record, checked.

    Raises:
        NotAStatement: It does not keep to the schema.
    """
    try:
        return Synthetic.model_validate_json(json.dumps(value, allow_nan=False))
    except ValidationError as error:
        raise NotAStatement.of(error) from None


def origin(record: Synthetic, statement: PrivacyRecord) -> object:
    """What rows are a function of, beside public prompts: the weights, and the release that says how often to ask for codes."""
    weights = {name: digest for name, digest in statement.files.items() if name.endswith(".safetensors")}
    released = statement.statistics.releases if statement.statistics else ()
    return weights, [one for one in released if one.statistic == record.shares]


def epsilon(statement: PrivacyRecord) -> float | None:
    """What the folder costs at the run's delta: the model, all statistics on its card, and the models before it on the same data.

    None without a guarantee. With earlier models the statistics, whose delta is 0, are added by basic composition.
    """
    if statement.terms is None or not statement.guarantee:
        return None
    lineage, released = statement.lineage, statement.statistics
    if lineage is not None and lineage.composed is not None:
        return lineage.composed.epsilon + sum(one.event.epsilon for one in (released.releases if released else ()))
    return released.with_run if released else statement.terms.epsilon


def of_run(statement: PrivacyRecord) -> dict[str, str]:
    """What lies in run/: its name in the folder, and in the run's export/."""
    return {f"run/{name}": name for name in (CARD, BLOCK, *([tradeoff_figure.FILE] if statement.guarantee else []))}


def files(statement: PrivacyRecord) -> set[str]:
    """All that lies in the folder."""
    return {CARD, RECORD, ROWS, *of_run(statement)}


def render(record: Synthetic, statement: PrivacyRecord) -> dict[str, str]:
    """The marked part of the card: Markdown, which differs wherever two records differ.

    Raises:
        ConfigError: See ``section.render``.
    """
    return section.filled(PARTS, lambda: _context(record, statement))


def reads(figure: str) -> set[str]:
    """The sides that a figure of quality is computed from, by its name; what nobody here names so may read all."""
    what, _, side = figure.rpartition(": ")
    if side in SIDES:
        return {side, "evaluation"} if what.startswith("Frechet distance") else {side}
    ends = {" by TSTR": "evaluation", " by the commonest value": "evaluation", " as asked": "training"}
    ends |= {f" of any {rows} row": rows for rows in ("training", "evaluation")}
    return next(({rows} for end, rows in ends.items() if (what or figure).endswith(end)), {*SIDES})


def public_sides(statement: PrivacyRecord) -> set[str]:
    """Those that the model's statement declares public; without a guarantee it does not say so of evaluation rows alone."""
    public, holds = statement.data_public, statement.guarantee
    told = any("evaluation data (declared public)" in line for line in statement.not_covered) if holds else public
    return {*SIDES[:2], *["training"] * public, *["evaluation"] * told}


def _context(record: Synthetic, statement: PrivacyRecord) -> Json:
    total, terms = epsilon(statement), statement.terms
    if statement.guarantee and (total is None or terms is None):
        raise ValueError("a guarantee without its epsilon")
    limits = AttackLimits.pick(dict(attacker_limits(total, terms.delta))) if total is not None and terms else None
    return {
        "w": formatting,
        "s": record,
        "b": statement,
        "t": terms,
        "holds": statement.guarantee,
        "epsilon": total,
        "limits": limits,
        "digest": section.digest(record.to_json()),
        "sides": SIDES,
        **_tables(record.quality.figures if record.quality else {}),
    }


def _tables(figures: Mapping[str, float | None]) -> Json:
    """``beside``: what several sides have, and the figure of each side; ``scores``: the others, with limits if they have any."""
    beside: dict[str, dict[str, float | None]] = {}
    for name, value in figures.items():
        what, _, side = name.rpartition(": ")
        if side in SIDES:
            beside.setdefault(what, {})[side] = value
    limits = {name: (f"{name}, low", f"{name}, high") for name in figures}
    limits = {name: both for name, both in limits.items() if figures.keys() >= {*both}}
    left = figures.keys() - {end for both in limits.values() for end in both}
    scores = {
        name: (figures[name], [figures[end] for end in limits.get(name, ())])
        for name in left
        if name.rpartition(": ")[2] not in SIDES
    }
    return {"beside": beside, "scores": scores}


def front_matter(record: Synthetic, statement: PrivacyRecord) -> Json:
    """The front matter of the card, but for license and language, which are the author's."""
    block, total = statement.to_json(), epsilon(statement)
    main = {name: block[name] for name in _MAIN if name in block}
    main |= {} if total is None else {"epsilon": total}
    # Declared as text. Of a column that holds nothing but dates, datasets 4 makes time stamps all the same, written out as text.
    features = [{"name": column, "dtype": "string"} for column in record.columns]
    return {
        "tags": ["synthetic", "dpllm", *(["differential-privacy"] if statement.guarantee else [])],
        "task_categories": ["text-generation"],
        "size_categories": [_size(record.rows)],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ROWS}]}],
        "dataset_info": {"features": features},
        "privacy": {**main, "statement": MODEL_BLOCK, "record": RECORD, "sha256": section.digest(record.to_json())},
    }


def _size(rows: int) -> str:
    """The Hub's word for a number of rows."""
    steps = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
    place = next((n for n in range(len(steps)) if rows < 10 ** (3 + n)), len(steps))
    if place == len(steps):
        return f"n>{steps[-1]}"
    return f"{steps[place - 1]}<n<{steps[place]}" if place else f"n<{steps[0]}"
