"""A data set goes to a dataset repository, as it was verified, by the same push as a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import hub_stand_in
import pytest
import tiny
from hub_stand_in import Hub
from written_rows import make_data_set, make_run, released

from dpllm.canaries.texts import Canary
from dpllm.card.synthetic import ROWS
from dpllm.errors import Refused
from dpllm.files import BLOCK, read_json
from dpllm.publish import push
from dpllm.recipe.config import DataConfig
from dpllm.releases import leaks
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record
from dpllm.text import prompts
from dpllm.text.data import load_table

NAME = "alice/notes-synthetic"
UNPROTECTED = {"README.md", "synthetic.json", ROWS, "run/README.md", "run/privacy.json"}
"""Files of a data set without guarantee."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_stand_in.running(monkeypatch) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", "clinic-without-privacy")
    return make_data_set(run, run.root / "synthetic", columns=["text"], control=[], shares=None)


def test_exactly_the_verified_files_arrive_and_a_dry_run_contacts_nobody(folder: Path, hub: Hub) -> None:
    assert {file.path for file in push.push(folder, NAME, dry_run=True).files} == UNPROTECTED
    assert not hub.asked
    pushed = push.push(folder, NAME)
    arrived = hub.repositories[f"datasets/{NAME}"].files
    assert arrived == {name: (folder / name).read_bytes() for name in UNPROTECTED} | {".gitattributes": ANY}
    assert any(line.startswith("canary secrets in the rows") for line in pushed.unsearched)


def test_what_does_not_verify_is_refused(folder: Path, hub: Hub) -> None:
    path = folder / ROWS
    path.write_text(path.read_text("utf-8").replace("Seen", "Met"), encoding="utf-8")
    with pytest.raises(Refused, match="does not verify"):
        push.push(folder, NAME)
    assert not hub.asked


def test_a_guarantee_needs_its_ledger(tmp_path: Path, hub: Hub) -> None:
    run = make_run(tmp_path / "run", statistics=released())
    with pytest.raises(Refused, match="--ledger"):
        push.push(make_data_set(run, run.root / "synthetic"), NAME)
    assert not hub.asked


def test_secrets_in_rows_are_counted_and_nothing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = [
        Canary("c00000", 1, "It is", "2026-11-03", inserted=True),
        Canary("c00001", 1, "It is", "8181", inserted=False),
        Canary("c00002", 1, "It is", "8282", inserted=True, rejected="2026-11-03"),
    ]
    monkeypatch.setattr(leaks.canaries, "load", lambda path: SimpleNamespace(canaries=planted))
    run = make_run(folder.parent.parent / "other", "clinic-without-privacy")
    run.private.mkdir()
    run.canaries.write_text("{}")
    statement = privacy_record.read(read_json(run.export / BLOCK))
    assert any("2 of 2 planted and 0 of 1 left out" in line for line in leaks.in_rows(run, folder / ROWS, statement))


NOTE = "Astrid Lindqvist was seen on the {} of May for a fracture of the left wrist."


@pytest.fixture
def run_on_notes(tmp_path: Path) -> RunDir:
    """A run that trained on such notes, which are not declared public."""
    run = make_run(tmp_path / "run")
    tiny.write_rows(tmp_path / "notes.jsonl", [{"prompt": f"Note {n}", "completion": NOTE.format(n)} for n in range(9)])
    data = DataConfig(train=str(tmp_path / "notes.jsonl"))
    prompts.keep_rows(run.rows, data, load_table(data.train, data, "train", tmp_path / "cache"), None)
    return run


def searched(run: RunDir, rows: list[dict[str, str]], *, guarantee: bool = True) -> list[str]:
    tiny.write_rows(run.root / "rows.jsonl", rows)
    statement = privacy_record.read(read_json(run.export / BLOCK)).model_copy(update={"guarantee": guarantee})
    return list(leaks.in_rows(run, run.root / "rows.jsonl", statement))


def test_private_prompts_of_a_data_set_are_refused_and_what_is_covered_is_told(run_on_notes: RunDir) -> None:
    """Of nine rows one may be repeated by chance, which the guarantee covers; most of them are a copy."""
    rows = [{"prompt": f"Public {n}", "completion": f"Somebody came {n} times."} for n in range(9)]
    assert searched(run_on_notes, rows)[-1].endswith("0 of 9 in prompt, 0 of 9 in completion.")
    rows[4]["completion"] = NOTE.format(3).upper()
    assert searched(run_on_notes, rows)[-1].endswith("0 of 9 in prompt, 1 of 9 in completion.")
    for change in ({"prompt": "note  3!"}, {"prompt": NOTE.format(3)}):
        with pytest.raises(Refused, match="1 of 9 in prompt"):
            searched(run_on_notes, [{**rows[0], **change}, *rows[1:]])
    copied = [{"prompt": f"Public {n}", "completion": NOTE.format(n)} for n in range(9)]
    assert "4 of 9 in completion" in searched(run_on_notes, copied[:4] + rows[5:] + rows[:1])[-1]
    with pytest.raises(Refused, match="5 of 9 in completion") as refusal:
        searched(run_on_notes, copied[:5] + rows[5:])
    assert "Astrid" not in str(refusal.value)
    run_on_notes.rows.unlink()
    assert "none was searched for" in searched(run_on_notes, rows)[-1]


def test_rows_without_guarantee_are_searched_as_cards_are(
    run_on_notes: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    config = run_on_notes.load_config()
    data = config.data.model_copy(update={"public": False, "control": [], "format": "auto"})
    monkeypatch.setattr(RunDir, "load_config", lambda run: config.model_copy(update={"data": data}))
    rows = [{"prompt": f"Public {n}", "completion": f"Somebody came {n} times."} for n in range(9)]
    searched(run_on_notes, rows, guarantee=False)
    rows[2]["completion"] += " They say that Lindqvist was seen on the 7 of May for a fracture of something."
    searched(run_on_notes, rows)
    with pytest.raises(Refused, match=r"training text: .* is in rows.jsonl \(row 8\)"):
        searched(run_on_notes, rows, guarantee=False)
