"""audit.json reads back as it was written, a damaged one is refused by its field, and a terminal shows the card's rows."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from cards import audit
from jsonschema import Draft202012Validator
from rich.console import Console

from dpllm.auditing import terminal
from dpllm.errors import ConfigError
from dpllm.statement import audit_rows
from dpllm.statement.audit import parse_audit, read_audit, schema

PUBLISHED = sorted(Path(__file__).parents[2].glob("model_cards/*/export/audit/audit.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parents[2].name)
def test_a_published_audit_reads_back_as_it_was_written(path: Path) -> None:
    value = json.loads(path.read_text())
    assert json.dumps(read_audit(path).to_json(), sort_keys=True) == json.dumps(value, sort_keys=True)
    Draft202012Validator(schema()).validate(value)


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        ("epsilon_lower_bound.value", "x"), ("epsilon_lower_bound.alpha", 1.5), ("claim.epsilon", True),
        ("claim.more", 1), ("attacks.ratio.auc", 1.01), ("exposure.1.inserted", 2.5), ("controls.words.succeeds", 1),
        ("canaries.commitment", None), ("canaries.kind", "x"), ("verdict", "fine"), ("published", 1),
        ("schema_version", 3), ("schema_version", 5), ("surplus", {}),
    ],
)  # fmt: skip
def test_a_damaged_audit_is_refused_in_one_line_that_names_the_field(tmp_path: Path, place: str, bad: Any) -> None:
    value = copy.deepcopy(audit())
    parse_audit(value, "audit.json")
    *inside, last = place.split(".")
    part = value
    for name in inside:
        part = part[name]
    part[last] = bad
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"or of another version of dpllm\. Run dpllm audit again") as refused:
        read_audit(path)
    assert f"{path}: {place}: " in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Draft202012Validator(schema()).is_valid(value)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("digits", {}),
        ("digits", {"digits": 8, "tokens": 4}),
        ("random_tokens", {"digits": 8}),
        ("random_tokens", {"tokens": 4, "place": "prompt"}),
        ("new_tokens", {"tokens": 4}),
    ],
)
def test_settings_of_canaries_are_those_of_their_kind(kind: str, own: dict[str, Any]) -> None:
    """Of others a card would say "secrets of None digits"."""
    canaries = audit()["canaries"]
    shared = {name: canaries["settings"][name] for name in ("groups", "references")}
    strange = {**canaries, "kind": kind, "settings": {**shared, **own}}
    with pytest.raises(ConfigError, match=f"canaries: .*kind {kind} has other settings"):
        parse_audit(audit(canaries=strange), "audit.json")


def recorded(width: int) -> Console:
    return Console(width=width, record=True, file=io.StringIO())


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parents[2].name)
def test_no_cell_wraps_at_80_columns(path: Path) -> None:
    report = parse_audit(json.loads(path.read_text()), path.name)
    texts = []
    for width in (80, 300):
        console = recorded(width)
        console.print(terminal.table(report))
        lines = console.export_text().splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("planted once"))
        texts.append([line.replace("─", "").split() for line in lines[start:] if line.strip()])
    assert texts[0] == texts[1]
    assert "calibrated" in [line[0] for line in texts[0] if line]
    assert ["Mean", "exposure", "(bits)"] in [line[:3] for line in texts[0]]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parents[2].name)
def test_screen_and_card_tell_the_same_rows(path: Path) -> None:
    report = parse_audit(json.loads(path.read_text()), path.name)
    card = (path.parents[1] / "README.md").read_text()
    attacks = audit_rows.attacks(sorted(report.attacks.items())).rows
    secrets = audit_rows.secrets(report.exposure, report.extraction).rows
    console = recorded(300)
    console.print(terminal.table(report))
    shown = console.export_text()
    assert all(f"| {' | '.join(row)} |" in card for row in [*attacks, *secrets])
    assert all(cell in shown for row in attacks for cell in row[:-1])  # numbers of canaries stand below
    assert all(cell in shown for row in secrets for cell in row)


@pytest.mark.parametrize(
    ("attempts", "words"), [(None, "never"), (1234.0, "1,234"), (5e6, "5e+06"), (2e12, "over 1e12")]
)
def test_the_screen_says_how_many_samples_show_a_secret(attempts: float | None, words: str) -> None:
    report = json.loads(PUBLISHED[0].read_text())
    first = next(iter(report["sampling"].values()))
    first["all_tokens"]["median_attempts"]["inserted"] = attempts
    console = recorded(300)
    console.print(terminal.table(parse_audit(report, "audit.json")))
    assert f"{words};" in console.export_text()
