"""A place where records vote: data, a model, a ledger; for tests of ``dpllm synthesize --by inference``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
from running import done

from dpllm.ledger import Ledger

Json = dict[str, Any]
TOKENS, ROWS = 5, 3


class Place:
    """Forty rows of twenty people, a model of random weights, a ledger."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root, self.base, self.ledger, self.output = root, base, root / "ledger.sqlite", root / "rows"
        self.data = root / "notes.jsonl"
        rows = [{"text": tiny.sentence(n), "owner": f"p{n // 2}", "visit": ("home", "ward")[n % 2]} for n in range(40)]
        tiny.write_rows(self.data, rows)

    def words(self, *more: object) -> tuple[object, ...]:
        options = (
            "--model",
            self.base,
            "--epsilon",
            8,
            "--rows",
            ROWS,
            "--max-new-tokens",
            TOKENS,
            "--keep-unfinished",
        )
        places = ("--ledger", self.ledger, "--output", self.output, "--dataset", "notes")
        return ("synthesize", self.data, "--by", "inference", *options, *places, "--data.max_length", 24, *more)

    def rows(self) -> list[Json]:
        return [json.loads(line) for line in self.data.read_text("utf-8").splitlines()]

    def record(self) -> Json:
        return json.loads((self.output / "inference.json").read_text("utf-8"))

    def draft(self) -> Path:
        return self.root / ".rows.draft.jsonl"

    def runs(self) -> list[Any]:
        with Ledger(self.ledger) as ledger:
            return ledger.runs("notes")


def shares_of(place: Place) -> tuple[object, ...]:
    """Options that ask for texts by visit."""
    file = place.root / "describe.json"
    options = ("--epsilon", 2, "--shares", "visit=home,ward", "--output", file, "--ledger", place.ledger)
    done("describe", place.data, *options, "--dataset", "notes")
    return ("--data.control", "[visit]", "--describe", file)
