"""Whatever is forged in a release of any kind is a failed check, or stands in the table of its kind as asserted."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forging import Subject, is_said, survivors, unseen_files, unseen_lines, unseen_values
from published import failing, verify_without_torch
from safetensors.numpy import save
from test_check_labels import draw
from written_rows import MODEL_CARDS, make_data_set, make_run, released
from written_texts import make_texts

from dpllm.card import inference, synthetic
from dpllm.card.artifact import DRAWN, EMBEDDED, LABELS, MODEL, SAID, Artifact, Promise
from dpllm.card.card import dump_statement
from dpllm.files import hashes
from dpllm.privacy import embedded
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import PureDP
from dpllm.statement import released as statistics
from dpllm.statement.released import Embedded, LabelRecord
from dpllm.verification import verify as verifying

NOT_HERE = ("composed", "cross_check.epsilon")
"""Lines of their own call them asserted: without the ledger, and without torch."""
BY_ANY_VERSION = {"epsilon": 3e-3, "delta": 0.1}


def make_clusters(folder: Path, kind: embedded.Kind = "clusters", classes: int = 2, size: int = 16) -> Path:
    """A folder that ``dpllm describe`` could have released."""
    folder.mkdir(parents=True)
    due = embedded.figures(kind, 1.5, 3)
    vectors = save({"centre": np.zeros(8), "vectors": np.ones((classes, size))})
    (folder / statistics.VECTORS).write_bytes(vectors)
    declared = {"encoder": "builtin:tiny", "max_length": 16, "dimensions": size, "clusters": classes, "units": 40}
    one = {**due, "event": due["event"].to_json(), "statistic": "clusters of texts", "entry": "0a1b"}
    one |= {"declared": declared, "value": {"01 pain": 21.0, "02 letter": 18.0}, "encoder": "a" * 64}
    one |= {"vectors": hashlib.sha256(vectors).hexdigest()}
    facts = {**released(), "schema_version": 1, "dataset": "notes", "unit": "who", "max_examples_per_unit": 4}
    cost = {"epsilon": epsilon(due["event"], 1e-3, "zero_out"), "delta": 1e-3}
    record = Embedded.checked({**facts, **cost, "software": {"dpllm": "0.1.0"}, "releases": [one]})
    (folder / statistics.RECORD).write_text(dump_statement(record.to_json()), encoding="utf-8")
    (folder / "README.md").write_text(statistics.page(record), encoding="utf-8")
    return folder


def make_labels(folder: Path) -> Path:
    """The record of a file of flipped labels, which lies beside it."""
    folder.mkdir(parents=True)
    (folder / "pairs.jsonl").write_text("{}\n", encoding="utf-8")
    digest = hashlib.sha256(b"{}\n").hexdigest()
    record = LabelRecord.checked({**draw().with_account().to_json(), "schema_version": 1, "file_sha256": digest})
    (folder / "pairs.labels.json").write_text(json.dumps(record.to_json()), encoding="utf-8")
    return folder


def subjects(root: Path) -> dict[str, Subject]:
    run = make_run(root / "run", statistics=released())
    of_labels = replace(LABELS, sources=("pairs.labels.json",))
    unprotected = shutil.copytree(MODEL_CARDS / "clinic-without-privacy" / "export", root / "baseline")
    return {
        "model": Subject(MODEL, run.export, said=NOT_HERE),
        "model without privacy": Subject(MODEL, unprotected),
        "rows by a model": Subject(synthetic.ARTIFACT, make_data_set(run, root / "synthetic")),
        "rows by inference": Subject(inference.ARTIFACT, make_texts(root / "texts"), steps={"delta": 1e-6}),
        "clusters": Subject(EMBEDDED, make_clusters(root / "clusters"), steps=BY_ANY_VERSION),
        "labels": Subject(of_labels, make_labels(root / "labels")),
    }


KINDS = ("model", "model without privacy", "rows by a model", "rows by inference", "clusters", "labels")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return subjects(tmp_path_factory.mktemp("releases"))


@pytest.mark.parametrize("kind", KINDS)
def test_it_verifies_as_it_was_made(made: dict[str, Subject], kind: str) -> None:
    subject = made[kind]
    assert failing(subject.folder / "pairs.labels.json" if kind == "labels" else subject.folder) == set()


def test_torch_is_not_needed(made: dict[str, Subject]) -> None:
    verify_without_torch(*(made[kind].folder for kind in ("model", "rows by a model", "rows by inference")))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("clusters", "labels")])
def test_every_value_of_the_record_is_seen_in_its_texts(made: dict[str, Subject], kind: str) -> None:
    assert list(unseen_values(made[kind])) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "labels"])
def test_every_line_that_follows_from_the_record_is_compared(made: dict[str, Subject], kind: str) -> None:
    assert list(unseen_lines(made[kind])) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "labels"])
def test_every_file_is_compared(made: dict[str, Subject], kind: str) -> None:
    assert list(unseen_files(made[kind])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_computed_again_or_stands_in_the_table_as_asserted(made: dict[str, Subject], kind: str) -> None:
    subject = made[kind]
    release = replace(subject.opened(), hashes=hashes(subject.folder, ("README.md", *subject.artifact.sources)))
    assert {field for field in survivors(subject, release) if not is_said(subject, field)} == set()


@pytest.mark.parametrize("step", ["front matter", "marked parts", "files", "record", "promise", "statistics"])
def test_a_step_that_is_left_out_lets_a_forgery_through(
    made: dict[str, Subject], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = made["rows by inference"]
    monkeypatch.setattr(verifying, "COMMON", tuple(pair for pair in verifying.COMMON if pair[0] != step))
    of_files = [*unseen_values(subject), *unseen_lines(subject), *unseen_files(subject)]
    assert of_files or {field for field in survivors(subject, subject.opened()) if not is_said(subject, field)}


def test_a_statistic_pays_for_no_vectors(tmp_path: Path) -> None:
    """Its epsilon is that of counts; whatever numbers lie beside it would be free."""
    folder = make_clusters(tmp_path / "clusters")
    record = json.loads((folder / statistics.RECORD).read_text("utf-8"))
    vectors = save({"centre": np.zeros(1), "vectors": np.ones((1, 3))})
    (folder / statistics.VECTORS).write_bytes(vectors)
    [one] = released()["releases"]
    record["releases"] = [{**one, "vectors": hashlib.sha256(vectors).hexdigest(), "encoder": "a" * 64}]
    record |= {"epsilon": epsilon(PureDP(0.25), record["delta"], "zero_out"), "max_examples_per_unit": 1}
    (folder / statistics.RECORD).write_text(dump_statement(record), encoding="utf-8")
    assert "statistics" in failing(folder)


def test_a_new_kind_needs_its_artifact_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A histogram as a file: everything that other kinds share is checked of it, too."""
    kind = Artifact(
        kind="histogram",
        sources=("histogram.json",),
        version=1,
        read=Embedded.checked,
        again="Take it from where it was published.",
        promise=lambda shown: Promise(units=1000, statistics=shown),
        files=lambda _: {},
        due=lambda _: (),
        whole=lambda shown: {"README.md": f"# {shown.releases[0].words()}\n"},
        asserted={
            "values of statistics": (" ".join((*SAID, "max_examples_per_unit", "unit", "neighbouring_relation")), DRAWN)
        },
    )
    monkeypatch.setitem(verifying._FOLDERS, "histogram.json", kind)
    monkeypatch.setitem(verifying.OWN, "histogram", ())
    record = Embedded.checked({**released(), "schema_version": 1})
    (tmp_path / "histogram.json").write_text(dump_statement(record.to_json()), encoding="utf-8")
    (tmp_path / "README.md").write_text(kind.whole(record)["README.md"], encoding="utf-8")
    assert failing(tmp_path) == set()
    subject = Subject(kind, tmp_path, steps=BY_ANY_VERSION)
    assert {field for field in survivors(subject, subject.opened()) if not is_said(subject, field)} == set()
    (tmp_path / "README.md").write_text("# none\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    assert failing(tmp_path) == {"README.md", "files"}
