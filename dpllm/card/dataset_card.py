"""The card of a synthetic data set: front matter that the Hub and ``datasets.load_dataset`` read, and where its rows come from.

Comes in: a folder with data/train.jsonl and synthetic.json, and the run whose model wrote the rows. Goes out: README.md, the
run's own card and statement under run/, and their hashes in synthetic.json. Must not read ``private/``, nor quote a row.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from dpllm.card.card import yaml_of
from dpllm.errors import ConfigError
from dpllm.files import BLOCK, CARD, hashes, read_json, sha256, write_whole
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.statement import formatting, privacy_record, section, synthetic
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.synthetic import MODEL_BLOCK, RECORD, ROWS, Synthetic


def write_dataset_card(directory: Path, run: RunDir) -> Path:
    """Writes the card of a data set, and beside it the run's card and statement.

    Args:
        directory: Holds data/train.jsonl and synthetic.json, whose ``files`` are computed here and may be empty.
        run: With its card.

    Returns:
        The path of README.md.

    Raises:
        ConfigError: A file is missing or damaged, there are others, the run has no card or does not show the statistic that
            control codes were drawn from, its model or that statistic is another than the rows come from, or a text of the recipe
            holds a marker.
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
    former = set(hashes(directory)) - synthetic.files(statement)
    if strange := sorted(former - {synthetic.FIGURE}):
        raise ConfigError(
            f"{directory}: {strange[0]} does not belong in a data set, and everything in the folder is published. Move it "
            "elsewhere, then type the command again."
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
    record_text = section.dump_block(record.to_json())
    written: dict[str, str | bytes] = {**of_run, RECORD: record_text, CARD: text}
    for name, content in written.items():
        write_whole(directory / name, content)
    if former:  # the figure of a guarantee that the run has lost
        (directory / synthetic.FIGURE).unlink()
    return directory / CARD


def _check_origin(directory: Path, given: dict[str, Any], record: Synthetic, statement: PrivacyRecord) -> None:
    """Refuses the card of a run that was trained again, or that shows another draw of the shares, since the rows were written."""
    named, before = (given.get("files") or {}).get(MODEL_BLOCK), directory / MODEL_BLOCK
    if named in (None, record.files[MODEL_BLOCK]):
        return
    kept = before.is_file() and sha256(before) == named
    if not kept or synthetic.origin(record, privacy_record.read(read_json(before))) != synthetic.origin(
        record, statement
    ):
        raise ConfigError(
            f"{directory}: other weights, or another release of the shares, wrote these rows than the run's card speaks of, and "
            "its epsilon is not theirs. Put the former run and card back; or remove the folder, and type dpllm synthesize again."
        )


def _page(config: RunConfig, record: Synthetic, statement: PrivacyRecord) -> str:
    """README.md, which reads back as it was written."""
    author: dict[str, Any] = {"license": config.card.license, "language": config.card.language}
    front = yaml_of(DatasetCardData(**author, **synthetic.front_matter(record, statement)))
    parts = synthetic.render(record, statement)
    body = formatting.template("dataset_card.md.j2").render(
        **{name: section.marked(name, part) for name, part in parts.items()},
        w=formatting,
        s=record,
        b=statement,
        title=section.escaped(" ".join((config.card.title or names.last_part(config.output_dir)).split())),
    )
    text = f"---\n{front}\n---\n{body.strip()}\n"
    if section.ambiguous(text) or section.parts(text, synthetic.PARTS) != parts:
        raise ConfigError(
            "the card does not read back as it was written, so nobody could check it: a text of its front matter looks like one "
            "of its parts. Change card.license or card.language."
        )
    return text
