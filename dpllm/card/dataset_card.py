"""The card of a synthetic data set: front matter that the Hub and ``datasets.load_dataset`` read, and where its rows come from.

Comes in: a folder with data/train.jsonl and synthetic.json, and the run whose model wrote the rows. Goes out: README.md, the
run's own card and statement under run/, and their hashes in synthetic.json. Must not read ``private/``, nor quote a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm.card import card
from dpllm.errors import ConfigError
from dpllm.files import BLOCK, CARD, read_json, sha256, write_whole
from dpllm.recipe.config import RunConfig
from dpllm.records import Json
from dpllm.run.directory import RunDir
from dpllm.statement import formatting, privacy_record, synthetic
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.synthetic import MODEL_BLOCK, RECORD, ROWS, Quality, Synthetic

PARTS = ("synthetic",)
SIDES = ("synthetic", "released", "training", "evaluation")
"""What figures of quality are of: "WHAT: SIDE"."""
_MAIN = ("guarantee", "reason", "delta", "unit", "neighbouring_relation", "dataset")


def write_dataset_card(directory: Path, run: RunDir) -> Path:
    """Writes the card of a data set, and beside it the run's card and statement.

    Args:
        directory: Holds data/train.jsonl and synthetic.json, whose ``files`` are computed here and may be empty.
        run: With its card.

    Returns:
        The path of README.md.

    Raises:
        ConfigError: A file is missing or damaged, the run has no card or does not show the statistic that control codes were
            drawn from, its model or that statistic is another than the rows come from, or a text of the recipe holds a marker.
    """
    given = read_json(directory / RECORD)
    block = run.export / BLOCK
    statement = privacy_record.read(read_json(block)) if block.is_file() else None
    copied = synthetic.of_run(statement) if statement else {}
    if not statement or not all(
        path.is_file() for path in (directory / ROWS, *map(run.export.joinpath, copied.values()))
    ):
        raise ConfigError(
            f"{directory}: {ROWS}, or the card in {run.export}, is missing, so nothing says what the rows come from. Type "
            f"dpllm card {run.root}, and then dpllm synthesize {run.root}."
        )
    of_run = {mine: (run.export / name).read_bytes() for mine, name in copied.items()}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in of_run.items()}
    record = synthetic.read({**given, "files": {ROWS: sha256(directory / ROWS), **files}})
    shown = {one.statistic for one in statement.statistics.releases} if statement.statistics else set()
    if (record.shares is not None or (record.control and statement.guarantee)) and record.shares not in shown:
        raise ConfigError(
            f"{directory}: rows were asked for by {record.shares or 'the training rows'}, which the run's card does not show, so "
            f"that its cost would be in no epsilon. Type dpllm card {run.root} --describe FILE first, or write the rows anew."
        )
    _check_origin(directory, given, record, statement)
    text = _page(run.load_config(), record, statement)
    record_text = card.dump_statement(record.to_json())
    written: dict[str, str | bytes] = {**of_run, RECORD: record_text, CARD: text}
    for name, content in written.items():
        write_whole(directory / name, content)
    if synthetic.FIGURE not in synthetic.files(statement):  # of a guarantee that the run has lost
        (directory / synthetic.FIGURE).unlink(missing_ok=True)
    return directory / CARD


def _check_origin(directory: Path, given: dict[str, Any], record: Synthetic, statement: PrivacyRecord) -> None:
    """Refuses the card of a run that was trained again, or that shows another draw of the shares, since the rows were written."""
    named, before = (given.get("files") or {}).get(MODEL_BLOCK), directory / MODEL_BLOCK
    if named in (None, record.files[MODEL_BLOCK]):
        return
    kept = before.is_file() and sha256(before) == named
    if not kept or _origin(record, privacy_record.read(read_json(before))) != _origin(record, statement):
        raise ConfigError(
            f"{directory}: other weights, or another release of the shares, wrote these rows than the run's card speaks of, and "
            "its epsilon is not theirs. Put the former run and card back; or remove the folder, and type dpllm synthesize again."
        )


def _origin(record: Synthetic, statement: PrivacyRecord) -> object:
    """What rows are a function of, beside public prompts: the weights, and the release that says how often to ask for codes."""
    weights = {name: digest for name, digest in statement.files.items() if name.endswith(".safetensors")}
    released = statement.statistics.releases if statement.statistics else ()
    return weights, [one for one in released if one.statistic == record.shares]


def _page(config: RunConfig, record: Synthetic, statement: PrivacyRecord) -> str:
    return whole_page(config, front_matter(record, statement), render(record, statement), s=record)


def whole_page(config: RunConfig, front: Json, parts: Mapping[str, str], **given: Any) -> str:
    """The card of rows around its marked parts, with the author's license, language and title.

    Raises:
        ConfigError: A text of the recipe makes another card of it.
    """
    from huggingface_hub import DatasetCardData  # which whoever verifies a data set need not have

    author: dict[str, Any] = {"license": config.card.license, "language": config.card.language}
    return card.page("dataset_card.md.j2", DatasetCardData(**author, **front), parts, config, **given)


def render(record: Synthetic, statement: PrivacyRecord) -> dict[str, str]:
    """The marked part of the card: Markdown, which differs wherever two records differ.

    Raises:
        ConfigError: See ``card.render``.
    """
    return card.filled(PARTS, lambda: _context(record, statement))


def _context(record: Synthetic, statement: PrivacyRecord) -> Json:
    total, terms = synthetic.epsilon(statement), statement.plan
    if statement.guarantee and (total is None or terms is None):
        raise ValueError("a guarantee without its epsilon")
    return {
        "w": formatting,
        "s": record,
        "b": statement,
        "t": terms,
        "holds": statement.guarantee,
        "epsilon": total,
        "most": synthetic.recognised(statement),
        "digest": card.digest(record.to_json()),
        **tables(record.quality),
    }


def tables(quality: Quality | None) -> Json:
    """``beside``: what several sides have, and the figure of each side; ``scores``: the others, with limits if they have any."""
    figures: Mapping[str, float | None] = quality.figures if quality else {}
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
    return {"sides": SIDES, "beside": beside, "scores": scores}


def front_matter(record: Synthetic, statement: PrivacyRecord) -> Json:
    """The front matter of the card, but for license and language, which are the author's."""
    main, total = card.fields(statement, _MAIN), synthetic.epsilon(statement)
    main |= {} if total is None else {"epsilon": total}
    main |= {"statement": MODEL_BLOCK, "record": RECORD, "sha256": card.digest(record.to_json())}
    return loadable(record.columns, main, guarantee=statement.guarantee)


def loadable(columns: Sequence[str], privacy: Json, *, guarantee: bool) -> Json:
    """What the Hub and ``datasets.load_dataset`` read: of rows with these columns, and the ``privacy`` entry."""
    # Declared as text. Of a column that holds nothing but dates, datasets 4 makes time stamps all the same, written out as text.
    features = [{"name": column, "dtype": "string"} for column in columns]
    return {
        "tags": ["synthetic", "dpllm", *(["differential-privacy"] if guarantee else [])],
        "task_categories": ["text-generation"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ROWS}]}],
        "dataset_info": {"features": features},
        "privacy": privacy,
    }


def reads(figure: str) -> set[str]:
    """The sides that a figure of quality is computed from, by its name; what nobody here names so may read all."""
    what, _, side = figure.rpartition(": ")
    if side in SIDES:
        return {side}
    ends = {" by TSTR": "evaluation", " by the commonest value": "evaluation"}
    ends |= {f" of any {rows} row": rows for rows in ("training", "evaluation")}
    return next(({rows} for end, rows in ends.items() if (what or figure).endswith(end)), {*SIDES})


def public_sides(statement: PrivacyRecord) -> set[str]:
    """Those that the model's statement declares public; without a guarantee it does not say so of evaluation rows alone."""
    public, holds = statement.data_public, statement.guarantee
    told = any("evaluation data (declared public)" in line for line in statement.not_covered) if holds else public
    return declared_sides(public, told)


def declared_sides(training: bool, evaluation: bool) -> set[str]:
    """Those whose exact figures may be published, where the rows trained on or voted with, and evaluation rows, are public."""
    return {*SIDES[:2], *["training"] * training, *["evaluation"] * evaluation}


def may_publish(quality: Quality | None, declared: set[str]) -> bool:
    """Whether all figures read nothing but these sides."""
    return all(reads(name) <= declared for name in (quality.figures if quality else ()))
