"""A data set that a tuned model wrote: its record synthetic.json, what follows from it and the model's statement, and its card.

Comes in: JSON; a folder with rows and a record, and the run whose model wrote them. Goes out: a typed record, what follows from
it, README.md. Must not know how rows are written or checked, read ``private/``, or quote a row. Files of the folder::

    README.md          the card, whose front matter the Hub and ``datasets.load_dataset`` read
    synthetic.json     this record
    data/train.jsonl   the rows, one JSON object a line
    run/README.md      the card of the model that wrote them, its privacy statement and, with a guarantee, its figure, byte for
    run/privacy.json   byte as in the run's export/
    run/privacy.svg

Epsilon is not repeated here: it follows from run/privacy.json and the statistics that it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dpllm.card import card
from dpllm.card.artifact import Artifact, Front
from dpllm.errors import ConfigError
from dpllm.files import BLOCK, CARD, read_json, sha256, write_whole
from dpllm.privacy.limits import attacker_limits
from dpllm.recipe.config import RunConfig
from dpllm.records import AtLeast1, Count, Json, NotAStatement, Number, Record, Sha256, Share, Text
from dpllm.run.directory import RunDir
from dpllm.statement import formatting, privacy_record, tradeoff_figure
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import BesideRun, Statistics
from dpllm.text import layouts

RECORD, ROWS = "synthetic.json", "data/train.jsonl"
MODEL_CARD, MODEL_BLOCK, FIGURE = f"run/{CARD}", f"run/{BLOCK}", f"run/{tradeoff_figure.FILE}"
PARTS = ("synthetic",)
SIDES = ("synthetic", "released", "training", "evaluation")
"""Sets of rows that figures of quality describe, in names of the form "WHAT: SIDE"."""
_MAIN = ("guarantee", "reason", "delta", "unit", "neighbouring_relation", "dataset")


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


@dataclass(frozen=True)
class DataSet:
    """A synthetic data set and the statement of the model that wrote it."""

    record: Synthetic
    statement: PrivacyRecord

    @classmethod
    def read(cls, record: Json, statement: Json) -> DataSet:
        """Reads synthetic.json and run/privacy.json; raises ``NotAStatement`` if one does not follow its schema."""
        return cls(Synthetic.checked(record), privacy_record.read(statement))

    def to_json(self) -> Json:
        """The content of synthetic.json."""
        return self.record.to_json()

    @property
    def codes(self) -> set[str] | None:
        """Codes that texts may have, see ``codes``; None without a guarantee, as they are not checked then."""
        return codes(self.record, self.statement.statistics) if self.statement.guarantee else None

    @property
    def files(self) -> dict[str, str]:
        """Name in run/ -> name in the run's export/."""
        return of_run(self.statement)


def epsilon(statement: PrivacyRecord) -> float | None:
    """Epsilon of the folder at the run's delta: model, all statistics on its card, and earlier models on the same data.

    None without a guarantee. With earlier models, statistics are added by basic composition: their delta is 0.

    Raises:
        NotAStatement: No such epsilon is stated.
    """
    if statement.plan is None or not statement.guarantee:
        return None
    lineage, released = statement.lineage, statement.statistics
    composed = lineage.composed if lineage else None
    if composed is not None:
        return composed.epsilon + (released.pure if released else 0.0)
    return total(statement.plan.epsilon, released)


def total(alone: float, released: BesideRun | None) -> float:
    """Epsilon of a release that costs ``alone`` together with released statistics.

    Raises:
        NotAStatement: The statistics do not state it.
    """
    together = released.with_run if released else alone
    if together is None:
        raise NotAStatement(["statistics.with_run: is null, so that no epsilon covers the texts"])
    return together


def recognised(statement: PrivacyRecord) -> float | None:
    """The largest share of units that a test of the whole folder can recognise, see ``tradeoff_figure.recognised``.

    None without a guarantee.
    """
    plan, lineage, released, total = statement.plan, statement.lineage, statement.statistics, epsilon(statement)
    if plan is None or total is None:
        return None
    alone = attacker_limits(total, plan.delta)["tpr_at_fpr_0.01"]
    has_lineage = lineage is not None and lineage.composed is not None  # no curve contains its events
    statistics_epsilon = released.pure if released else 0.0
    return min(alone, 1.0 if has_lineage else tradeoff_figure.recognised(plan, statistics_epsilon))


def of_run(statement: PrivacyRecord) -> dict[str, str]:
    """Files of run/: name in the folder -> name in the run's export/."""
    return {f"run/{name}": name for name in (CARD, BLOCK, *([tradeoff_figure.FILE] if statement.guarantee else []))}


def run_of(directory: Path) -> RunDir | None:
    """The run directory that contains a data set; None if there is none."""
    run = RunDir(directory.absolute().parent)
    return run if run.config.is_file() and (run.export / CARD).is_file() else None


def write_dataset_card(directory: Path, run: RunDir) -> Path:
    """Writes the card of a data set, and copies the run's card and statement to run/.

    Args:
        directory: Contains data/train.jsonl and synthetic.json, whose ``files`` are computed here and may be empty.
        run: A run with a card.

    Returns:
        The path of README.md.

    Raises:
        ConfigError: A record is missing or damaged; the run's model, or the statistic from which control codes were drawn, is
            not the one that the rows come from; or a text of the recipe contains a marker.
    """
    stored, statement = read_json(directory / RECORD), privacy_record.read(read_json(run.export / BLOCK))
    copies: dict[str, bytes] = {name: (run.export / file).read_bytes() for name, file in of_run(statement).items()}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in copies.items()}
    record = Synthetic.checked({**stored, "files": {ROWS: sha256(directory / ROWS), **files}})
    _check_origin(directory, stored, record, statement)
    text = whole_page(run.load_config(), record, front_matter(record, statement), render(record, statement))
    written: dict[str, str | bytes] = {**copies, RECORD: card.dump_statement(record.to_json()), CARD: text}
    for name, content in written.items():
        write_whole(directory / name, content)
    if FIGURE not in written:  # the run has lost its guarantee
        (directory / FIGURE).unlink(missing_ok=True)
    return directory / CARD


def _check_origin(directory: Path, stored: Json, record: Synthetic, statement: PrivacyRecord) -> None:
    """Refuses a run that was trained again, or whose card shows another draw of the shares, since the rows were written."""
    named, path = (stored.get("files") or {}).get(MODEL_BLOCK), directory / MODEL_BLOCK
    if named in (None, record.files[MODEL_BLOCK]):
        return
    unchanged = path.is_file() and sha256(path) == named
    if not unchanged or _origin(record, privacy_record.read(read_json(path))) != _origin(record, statement):
        raise ConfigError(
            f"{directory}: these rows come from other weights, or another release of the shares, than the run's card states, so "
            "its epsilon is not theirs. Restore the former run and card; or remove the folder, and type dpllm synthesize again."
        )


def _origin(record: Synthetic, statement: PrivacyRecord) -> object:
    """The inputs of the rows besides public prompts: the weights, and the release that sets the frequencies of codes."""
    weights = {name: digest for name, digest in statement.files.items() if name.endswith(".safetensors")}
    released = statement.statistics.releases if statement.statistics else ()
    return weights, [release for release in released if release.statistic == record.shares]


def whole_page(config: RunConfig, record: Written, front: Json, parts: Mapping[str, str]) -> str:
    """The complete card of rows, with the author's license, language and title.

    Raises:
        ConfigError: A text of the recipe would change how the card is read.
    """
    from huggingface_hub import DatasetCardData  # not needed to verify a data set

    from dpllm.card.card import page

    author: dict[str, Any] = {"license": config.card.license, "language": config.card.language}
    return page("dataset_card.md.j2", DatasetCardData(**author, **front), parts, config, s=record)


def render(record: Synthetic, statement: PrivacyRecord) -> dict[str, str]:
    """The marked part of the card: Markdown, which differs wherever two records differ.

    Raises:
        ConfigError: See ``card.render``.
    """
    return card.filled(
        PARTS,
        lambda: {
            **context(record, epsilon(statement), recognised(statement)),
            "b": statement,
            "t": statement.plan,
            "holds": statement.guarantee,
        },
    )


def context(record: Written, epsilon: float | None, limit: float | None) -> Json:
    """Values for the marked part of a card of rows: epsilon of the whole folder, and the limit on any test."""
    values = {"w": formatting, "s": record, "epsilon": epsilon, "limit": limit, "digest": card.digest(record.to_json())}
    return {**values, **tables(record.quality)}


def tables(quality: Quality | None) -> Json:
    """``beside``: figures that several sides have, by side; ``scores``: all others, with their confidence limits if any."""
    figures: Mapping[str, float | None] = quality.figures if quality else {}
    rows: dict[str, dict[str, float | None]] = {}
    for name, value in figures.items():
        subject, _, side = name.rpartition(": ")
        if side in SIDES:
            rows.setdefault(subject, {})[side] = value
    limits = {name: (f"{name}, low", f"{name}, high") for name in figures}
    limits = {name: both for name, both in limits.items() if figures.keys() >= {*both}}
    shown_names = figures.keys() - {end for both in limits.values() for end in both}
    scores = {
        name: (figures[name], [figures[end] for end in limits.get(name, ())])
        for name in shown_names
        if name.rpartition(": ")[2] not in SIDES
    }
    return {"sides": SIDES, "beside": rows, "scores": scores}


def front_matter(record: Synthetic, statement: PrivacyRecord) -> Json:
    """The front matter of the card without license and language, which are the author's."""
    main, total = card.fields(statement, _MAIN), epsilon(statement)
    main |= {} if total is None else {"epsilon": total}
    main |= {"statement": MODEL_BLOCK, "record": RECORD, "sha256": card.digest(record.to_json())}
    return loadable(record.columns, main, guarantee=statement.guarantee)


def loadable(columns: Sequence[str], privacy: Json, *, guarantee: bool) -> Json:
    """Metadata for the Hub and ``datasets.load_dataset`` of rows with these columns, with the ``privacy`` entry."""
    # Declared as text. Even so, datasets 4 reads a column of dates alone as timestamps and then writes these out as text.
    features = [{"name": column, "dtype": "string"} for column in columns]
    return {
        "tags": ["synthetic", "dpllm", *(["differential-privacy"] if guarantee else [])],
        "task_categories": ["text-generation"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ROWS}]}],
        "dataset_info": {"features": features},
        "privacy": privacy,
    }


def codes(record: Written, released: Statistics | None) -> set[str] | None:
    """Codes by which texts can have been requested; None: any, as there are no control columns."""
    if not record.control:
        return None
    return set(released.positive(record.shares)) if released else set()


def rules_of_rows(record: Written, draws: int, texts: Sequence[str], released: Statistics | None) -> dict[str, bool]:
    """Rules of any such record, of ``draws`` texts in the columns ``texts``: problem -> whether the rule holds."""
    statistics = {release.statistic for release in released.releases} if released else set()
    return {
        "texts are not the rows and what was dropped": record.rows + sum(record.dropped.values()) == draws,
        "a column stands twice": len(set(record.columns)) == len(record.columns),
        f"columns are not those of control and {', '.join(texts)}": record.columns == (*record.control, *texts),
        "shares names no statistic that is shown": record.shares is None or record.shares in statistics,
    }


def _rules(folder: DataSet) -> dict[str, bool]:
    record, statement = folder.record, folder.statement
    texts = ["text"] if record.prompts is None else ["prompt", "completion"]
    name = layouts.shares_of(record.control) if record.control else None
    allowed_shares = {name} if statement.guarantee else {name, None}
    return {
        **rules_of_rows(record, record.attempts, texts, statement.statistics),
        "shares is not the statistic of the control columns": record.shares in allowed_shares,
        f"quality has figures of rows that {MODEL_BLOCK} does not declare public": may_publish(
            record.quality, public_sides(statement)
        ),
    }


def reads(figure: str) -> set[str]:
    """The sides from which a figure of quality is computed, by its name; an unknown figure may use all of them."""
    subject, _, side = figure.rpartition(": ")
    if side in SIDES:
        return {side}
    ends = {" by TSTR": "evaluation", " by the commonest value": "evaluation"}
    ends |= {f" of any {rows} row": rows for rows in ("training", "evaluation")}
    return next(({rows} for end, rows in ends.items() if (subject or figure).endswith(end)), {*SIDES})


def public_sides(statement: PrivacyRecord) -> set[str]:
    """Sides that the model's statement declares public; without a guarantee it has no separate entry for evaluation rows."""
    evaluation = statement.data_public
    if statement.guarantee:
        evaluation = any("evaluation data (declared public)" in line for line in statement.not_covered)
    return declared_sides(statement.data_public, evaluation)


def declared_sides(training: bool, evaluation: bool) -> set[str]:
    """Sides whose exact figures may be published, given whether training (or voting) and evaluation rows are public."""
    public = {"training": training, "evaluation": evaluation}
    return {*SIDES[:2], *(side for side, declared in public.items() if declared)}


def may_publish(quality: Quality | None, declared: set[str]) -> bool:
    """Whether all figures are computed from these sides alone."""
    return all(reads(name) <= declared for name in (quality.figures if quality else ()))


OF_AUTHOR = frozenset({"license", "license_name", "license_link", "language", "pretty_name"})
"""Keys of the front matter that the author sets."""


ARTIFACT = Artifact(
    kind="rows by a model",
    sources=(RECORD, MODEL_BLOCK),
    version=1,
    read=DataSet.read,
    again="Take the folder from where it was published, or write its card again: dpllm card RUN/synthetic.",
    rules=_rules,
    files=lambda folder: folder.record.files,
    due=lambda folder: (ROWS, *folder.files),
    front=lambda folder: Front(front_matter(folder.record, folder.statement), OF_AUTHOR),
    parts=lambda folder: render(folder.record, folder.statement),
    asserted={
        "settings": ("sampling prompts dropped quality date software", "the author's word"),
        "model": (
            "",
            "that weights of this statement wrote these rows, from the prompts and settings that are named, is the author's "
            "word. Weights and audit are verified where the model is published",
        ),
    },
)
"""Rows by a tuned model."""
