"""A folder of texts that private inference could have written, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from written_rows import MODEL_CARDS, ROWS, released, write_rows

from dpllm.card.inference import Inference, derive, write_inference_card
from dpllm.privacy.events import BoundedRange
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.statement.released import Statistics

Json = dict[str, Any]
CLIP, BATCH, TEMPERATURE, TOKENS = 5.0, 40, 1.25, 24
EVENT = BoundedRange(range=2 * CLIP / (BATCH * TEMPERATURE), count=TOKENS)
FACTS: Json = {
    "rows": len(ROWS),
    "columns": ["visit", "text"],
    "control": ["visit"],
    "shares": "shares of visit",
    "delta": 1e-5,
    "unit": "example",
    "max_examples_per_unit": None,
    "neighbouring_relation": "zero_out",
    "event": EVENT.to_json(),
    "num_units": 700,
    "batch_size": BATCH,
    "clip": CLIP,
    "temperature": TEMPERATURE,
    "top_k": 0,
    "max_new_tokens": TOKENS,
    "texts": 15,
    "dropped": {"not finished": 2, "duplicate": 1},
    "prompt": "Write a note like this one: {text}\nNote:",
    "base_model": {"name": "builtin:tiny", "revision": None, "covered": False},
    "dataset": "builtin:clinic",
    "data_public": False,
    "eval_public": False,
    "composed": None,
    "lineage": None,
    "quality": {"figures": {"share of distinct words: synthetic": 0.5, "rows: synthetic": None}, "evaluation": None},
    "date": "2026-11-23",
    "software": {"dpllm": "0.1.0", "python": "3.12"},
    "hardware": {"device": "NVIDIA H100", "devices": 1, "offline": True, "packages": ["a", "b"]},
}
"""With statistics: 15 batches of 40 are 600 of 700 units, of which 12 gave a row."""


def inferred(**changes: Any) -> Inference:
    """The record of such texts, as whoever wrote them makes it."""
    facts = {**FACTS, **changes}
    return derive(facts, Statistics.pick(released()) if facts["control"] else None)


def recipe(**card: Any) -> RunConfig:
    config = RunDir(MODEL_CARDS / "clinic-epsilon-8").load_config()
    return config.model_copy(update={"card": config.card.model_copy(update=card)})


def make_texts(folder: Path, **changes: Any) -> Path:
    """Rows, record and card."""
    return write_texts(folder, inferred(**changes))


def write_texts(folder: Path, record: Inference, rows: list[Json] = ROWS) -> Path:
    """Rows, a record that may be wrong, and the card that follows from it, as somebody with a motive would."""
    write_rows(folder, [{column: row.get(column, "") for column in record.columns} for row in rows])
    write_inference_card(folder, recipe(), record)
    return folder


def stated(folder: Path) -> Json:
    return dict(json.loads((folder / "inference.json").read_text("utf-8")))
