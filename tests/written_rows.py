"""A published run whose card shows the shares of a column, and a data set that its model could have written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dpllm.card.card import rendered
from dpllm.card.synthetic import write_dataset_card
from dpllm.files import write_json
from dpllm.privacy.accounting import compose, epsilon
from dpllm.privacy.events import read
from dpllm.run.directory import RunDir
from dpllm.text.layouts import shares_of

Json = dict[str, Any]
MODEL_CARDS = Path(__file__).parents[1] / "model_cards"
SHARES = shares_of(["visit"])
COST = {"type": "pure_dp", "epsilon": 0.25}
ROWS = [{"visit": ("home", "ward")[n % 2], "text": f"Seen on 2026-11-{n + 1:02d}."} for n in range(12)]


def released() -> Json:
    """describe.json about the embedded notes."""
    release = {
        "statistic": SHARES,
        "declared": {"values": ["home", "ward"]},
        "mechanism": "discrete Laplace",
        "event": COST,
    }
    release |= {
        "error_95": 12.45176013694037,
        "error_of": "rows in each count",
        "value": {"home": 300, "ward": 280, "other": 2},
    }
    return {
        "dataset": "builtin:clinic",
        "unit": "example",
        "max_examples_per_unit": 1,
        "neighbouring_relation": "zero_out",
        "epsilon": epsilon(compose([read(COST)]), 1e-9, "zero_out"),
        "delta": 1e-9,
        "date": "2026-11-23",
        "software": {"dpllm": "0.1.0", "opendp": "0.16.0"},
        "releases": [{**release, "entry": "0a1b"}],
    }


def record(**changes: Any) -> Json:
    sampling = {"engine": "transformers", "temperature": 1.0, "top_p": 0.95, "max_new_tokens": 128, "seed": 7}
    return {
        "schema_version": 1,
        "rows": len(ROWS),
        "columns": ["visit", "text"],
        "control": ["visit"],
        "shares": SHARES,
        "prompts": None,
        "sampling": sampling,
        "attempts": 15,
        "dropped": {"not finished": 2, "duplicate": 1},
        "files": {},
        "quality": {"figures": {"share of distinct words: synthetic": 0.5, "MAUVE": None}, "evaluation": None},
        "date": "2026-11-23",
        "software": {"dpllm": "0.1.0"},
        **changes,
    }


def make_run(to: Path, name: str = "clinic-epsilon-8", statistics: Json | None = None) -> RunDir:
    run = RunDir(Path(shutil.copytree(MODEL_CARDS / name, to)))
    if statistics is not None:
        write_json(run.describe, statistics)
    for file, text in rendered(run).items():
        (run.export / file).write_text(text, encoding="utf-8")
    return run


def write_rows(folder: Path, rows: list[Json]) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data" / "train.jsonl").write_text(lines, encoding="utf-8")


def make_data_set(run: RunDir, folder: Path, **changes: Any) -> Path:
    columns = record(**changes)["columns"]
    write_rows(folder, [{column: row[column] for column in columns} for row in ROWS])
    (folder / "synthetic.json").write_text(json.dumps(record(**changes)), encoding="utf-8")
    write_dataset_card(folder, run)
    return folder
