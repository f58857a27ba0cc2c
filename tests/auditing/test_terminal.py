"""An audit on a terminal of 80 columns: every cell on one line, and the rows of the card."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from dpllm.auditing import terminal
from dpllm.statement import audit_rows
from dpllm.statement.audit import parse_audit

AUDITS = sorted(Path(__file__).parents[2].glob("model_cards/**/audit.json"))


@pytest.mark.parametrize("path", AUDITS, ids=lambda path: path.parts[-3])
def test_no_cell_wraps_at_80_columns(path: Path) -> None:
    report = parse_audit(json.loads(path.read_text()), path.name)
    texts = []
    for width in (80, 300):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(terminal.table(report))
        lines = console.export_text().splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("planted once"))
        texts.append([line.replace("─", "").split() for line in lines[start:] if line.strip()])
    assert texts[0] == texts[1]
    assert "calibrated" in [line[0] for line in texts[0] if line]
    assert ["Mean", "exposure", "(bits)"] in [line[:3] for line in texts[0]]


@pytest.mark.parametrize("path", AUDITS, ids=lambda path: path.parts[-3])
def test_screen_and_card_tell_the_same_rows(path: Path) -> None:
    report = parse_audit(json.loads(path.read_text()), path.name)
    card = (path.parents[1] / "README.md").read_text()
    attacks = audit_rows.attacks(sorted(report.attacks.items())).rows
    secrets = audit_rows.secrets(report.exposure, report.extraction).rows
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal.table(report))
    shown = console.export_text()
    assert all(f"| {' | '.join(row)} |" in card for row in [*attacks, *secrets])
    assert all(cell in shown for row in attacks for cell in row[:-1])  # numbers of canaries stand below
    assert all(cell in shown for row in secrets for cell in row)
