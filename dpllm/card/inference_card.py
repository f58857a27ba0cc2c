"""The card of texts that were written by private inference: front matter that the Hub reads, and what one unit can lose.

Comes in: a folder with data/train.jsonl, a recipe for license, language and title, the record. Goes out: README.md and
inference.json. Must not read the private data, nor quote a row.
"""

from __future__ import annotations

from pathlib import Path

from dpllm.card import card, dataset_card
from dpllm.files import CARD, sha256, write_whole
from dpllm.recipe.config import RunConfig
from dpllm.records import Json
from dpllm.statement import formatting, inference
from dpllm.statement.inference import RECORD, Inference
from dpllm.statement.synthetic import ROWS

PARTS = ("inference",)
_MAIN = ("delta", "unit", "neighbouring_relation", "dataset")


def write_inference_card(directory: Path, config: RunConfig, record: Inference) -> Path:
    """Writes the card and the record of rows that lie in a folder.

    Args:
        directory: Holds data/train.jsonl, and nothing else but a former card.
        config: Whose card.license, card.language and card.title are shown.
        record: As ``state.inferred`` makes it; its ``files`` are computed here.

    Returns:
        The path of README.md.

    Raises:
        ConfigError: A text of record or recipe holds a marker.
    """
    record = record.model_copy(update={"files": {ROWS: sha256(directory / ROWS)}})
    text = dataset_card.whole_page(config, front_matter(record), render(record), s=record)
    write_whole(directory / RECORD, card.dump_statement(record.to_json()))
    write_whole(directory / CARD, text)
    return directory / CARD


def render(record: Inference) -> dict[str, str]:
    """The marked part of the card: Markdown, which differs wherever two records differ.

    Raises:
        ConfigError: See ``card.filled``.
    """
    epsilon, most, digest = inference.epsilon(record), inference.recognised(record), card.digest(record.to_json())
    given = {"w": formatting, "s": record, "epsilon": epsilon, "most": most, "digest": digest}
    return card.filled(PARTS, lambda: given | dataset_card.tables(record.quality))


def front_matter(record: Inference) -> Json:
    """The front matter of the card, but for license and language, which are the author's."""
    block = record.to_json()
    main = {"guarantee": True, **{name: block[name] for name in _MAIN}, "epsilon": inference.epsilon(record)}
    main |= {"record": RECORD, "sha256": card.digest(block)}
    return dataset_card.loadable(record.columns, main, guarantee=True)
