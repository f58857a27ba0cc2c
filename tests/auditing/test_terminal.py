"""An audit on a terminal of 80 columns: every cell on one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from dpllm.auditing import terminal
from dpllm.auditing.record import parse_audit

AUDITS = sorted(Path(__file__).parents[2].glob("model_cards/**/audit.json"))


@pytest.mark.parametrize("path", AUDITS, ids=lambda path: path.parts[-3])
def test_no_cell_wraps_at_80_columns(path: Path) -> None:
    report = parse_audit(json.loads(path.read_text()), path.name)
    texts = []
    for width in (80, 300):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(terminal.table(report))
        lines = console.export_text().splitlines()
        start = next(number for number, line in enumerate(lines) if "planted" in line and "allowed" in line)
        end = next(number for number, line in enumerate(lines) if line.startswith("chance:"))
        texts.append([line.split() for line in lines[start + 2 : end] if line.strip()])
    assert texts[0] == texts[1]
    assert ["told", "apart", "(AUC)", "once"] in [line[:4] for line in texts[0]]
