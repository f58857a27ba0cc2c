"""What a run has to know of training labels that ``releases.labels`` made private.

Comes in: the data section of a recipe. Goes out: the record beside a file of flipped labels, or a refusal.
"""

from __future__ import annotations

from pathlib import Path

from dpllm.errors import ConfigError, Refused
from dpllm.files import read_json, sha256
from dpllm.recipe.config import DataConfig
from dpllm.records import NotAStatement
from dpllm.statement.released import LabelRecord
from dpllm.text.sources import expand

SUFFIX = ".labels.json"


def record_of(path: Path) -> Path:
    """Where the record of a file of flipped labels lies."""
    return path.with_name(path.name.removesuffix(".jsonl") + SUFFIX)


def randomised(wanted: DataConfig) -> Path | None:
    """The first of the files of training data beside which a record lies."""
    paths = map(Path, expand(wanted.train))
    return next((path for path in paths if record_of(path) != path and record_of(path).exists()), None)


def read_labels(wanted: DataConfig) -> LabelRecord | None:
    """What is known of the labels of a recipe's training data; None where they are as they were given.

    Raises:
        ConfigError: A record lies beside the data and is not named, is damaged, or says another epsilon than the recipe.
        Refused: The data are not those of the record: labels may have been drawn again.
    """
    path = Path(wanted.train) if isinstance(wanted.train, str) else None
    if wanted.label_record is None:
        if (file := randomised(wanted)) is not None:
            raise ConfigError(
                f"data.train {file}: its labels were randomised ({record_of(file).name} lies beside it), and taken as true "
                f"they would teach a weaker preference. Set data.label_record: {record_of(file)}."
            )
        return None
    try:
        record = LabelRecord.checked(read_json(Path(wanted.label_record)))
    except NotAStatement as error:
        raise ConfigError(
            f"data.label_record {wanted.label_record}: {'; '.join(error.problems[:3])}, so that the loss would be biased, and no "
            "card could be written. Restore the record."
        ) from None
    if path is None or not path.is_file() or sha256(path) != record.file_sha256:
        raise Refused(
            f"data.train is not the file that data.label_record {wanted.label_record} is about, so nothing says how often its "
            "labels were flipped, or how many times. Restore the file, or name its own record."
        )
    if wanted.label_epsilon not in (None, record.epsilon):
        raise ConfigError(
            f"data.label_epsilon {wanted.label_epsilon:g} is not the {record.epsilon:g} of data.label_record, with which the "
            "loss would be biased. Remove data.label_epsilon."
        )
    return record
