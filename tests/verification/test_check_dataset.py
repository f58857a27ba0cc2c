"""A synthetic data set verifies as it lies there, and no change of it does, nor a stranger's file that never ends."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from published import carry, edit, endless_is_found_soon, failing, read
from written_rows import ROWS, make_data_set, make_run, record, released, write_rows

from dpllm.card.synthetic import run_of, write_dataset_card
from dpllm.cli import main
from dpllm.run.directory import RunDir
from dpllm.verification.values import MOST
from dpllm.verification.verify import verify

Json = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("made") / "run", statistics=released())
    return make_data_set(run, run.root / "synthetic")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """As a stranger has it, without its run."""
    return Path(shutil.copytree(made, tmp_path / "a" / "b" / "set"))


def again(folder: Path, **changes: Any) -> None:
    """The whole card anew around a changed record or statement, as somebody with a motive would."""
    (folder / "synthetic.json").write_text(json.dumps(record(**changes)), encoding="utf-8")
    run = RunDir(folder.parent / "run")
    if not run.root.exists():
        make_run(run.root, statistics=released())
        for name in ("README.md", "privacy.json"):
            shutil.copy(folder / "run" / name, run.export / name)
    write_dataset_card(folder, run)


def test_it_verifies_in_its_run_and_without_it(made: Path, folder: Path) -> None:
    results = {check.name: check for check in verify(made).checks}
    assert [name for name, check in results.items() if check.status == "failed"] == []
    assert results["run"].status == "verified"
    assert results["model"].status == "asserted"
    alone = {check.name: check.status for check in verify(folder).checks}
    assert "failed" not in alone.values()
    assert "run" not in alone
    expected = (
        "files",
        "rows",
        "record",
        "front matter",
        "synthetic in README.md",
        "model: epsilon",
        "model: statistics",
    )
    assert {alone[name] for name in expected} == {"verified"}


def test_without_a_guarantee_it_verifies_and_claims_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clinic-without-privacy")
    folder = make_data_set(run, tmp_path / "set", columns=["text"], control=[], shares=None)
    assert failing(folder) == set()
    edit(folder / "README.md", "- dpllm\n", "- dpllm\n- differential-privacy\n")
    assert failing(folder) == {"front matter"}


def test_a_card_that_was_written_anew_is_seen(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made.parent, tmp_path / "run"))
    edit(run / "export" / "README.md", "## Use", "## How to use")
    assert failing(run / "synthetic") == {"run"}


CONSISTENT: dict[str, tuple[Json, set[str]]] = {
    "rows": ({"rows": 11, "attempts": 14}, {"rows"}),
    "a row too few": ({"rows": 13, "attempts": 16}, {"rows"}),
    "columns": ({"columns": ["visit", "note"]}, {"rows", "record"}),
    "their order": ({"columns": ["text", "visit"]}, {"rows", "record"}),
    "attempts": ({"attempts": 14}, {"record"}),
    "control that rows do not have": ({"control": ["age"], "columns": ["visit", "text"]}, {"rows", "record"}),
    "prompts that rows do not have": ({"prompts": 3}, {"record"}),
    "codes that are denied": ({"control": [], "shares": None}, {"record"}),
    "shares without control": ({"control": []}, {"record"}),
}


@pytest.mark.parametrize("name", CONSISTENT)
def test_a_record_that_contradicts_the_rows_or_itself_is_found(folder: Path, name: str) -> None:
    changes, expected = CONSISTENT[name]
    again(folder, **changes)
    assert failing(folder) == expected


@pytest.mark.parametrize("value", ["school", "other", ""])
def test_a_code_that_the_released_counts_do_not_name_is_found(folder: Path, value: str) -> None:
    write_rows(folder, [{**ROWS[0], "visit": value}, *ROWS[1:]])
    again(folder)
    assert failing(folder) == {"rows"}


@pytest.mark.parametrize("what", ["another file", "a code that nobody asked for"])
def test_the_card_of_a_folder_that_would_not_verify_is_not_written(made: Path, tmp_path: Path, what: str) -> None:
    folder = Path(shutil.copytree(made.parent, tmp_path / "run")) / "synthetic"
    if what == "another file":
        (folder / "data" / "notes.jsonl").write_text("private")
    else:
        write_rows(folder, [{**ROWS[0], "visit": "school"}, *ROWS[1:]])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["card", str(folder)]) == 3
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    write_rows(folder, ROWS)
    (folder / "data" / "notes.jsonl").unlink(missing_ok=True)
    assert main(["card", str(folder)]) == 0


@pytest.mark.parametrize("named", [True, False])
def test_shares_that_the_card_does_not_show_are_found(folder: Path, named: bool) -> None:
    block = read(folder / "run")
    block["statistics"]["releases"][0]["statistic"] = "shares of age"
    carry(folder / "run", block)
    (folder / "run" / "privacy.svg").unlink()
    stated = json.loads((folder / "synthetic.json").read_text("utf-8"))
    stated["shares"] = stated["shares"] if named else None
    stated["files"] |= {f"run/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in (folder / "run").iterdir()}
    (folder / "synthetic.json").write_text(json.dumps(stated), encoding="utf-8")
    assert {"rows", "record"} <= failing(folder)


def test_a_smaller_epsilon_told_everywhere_is_found(folder: Path) -> None:
    block = read(folder / "run")
    block["statistics"]["with_run"] /= 2
    carry(folder / "run", block)
    (folder / "run" / "privacy.svg").unlink()
    again(folder)
    assert failing(folder) == {"model: statistics"}


EXACT = {
    "share of home: training": "training",
    "with 8 words of any training row": "training",
    "rows: evaluation": "evaluation",
    "visit by TSTR: accuracy, low": "evaluation",
    "with 8 words of any evaluation row": "evaluation",
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("public", ["training", "evaluation"])
def test_exact_figures_of_rows_that_are_not_declared_public_are_found(folder: Path, name: str, public: str) -> None:
    block = read(folder / "run")
    block["data_public"] = public == "training"
    if public == "training":
        block["not_covered"] = [item.replace("(declared", "(not declared") for item in block["not_covered"]]
    carry(folder / "run", block)
    (folder / "run" / "privacy.svg").unlink()
    again(folder, quality={"figures": {name: 0.29404, "share of home: synthetic": 0.5}, "evaluation": None})
    assert failing(folder) - {"model: figure"} == (set() if EXACT[name] == public else {"record"})


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b'{"visit": "a", "visit": "b", "text": "c"}', b'{"visit": "a", "text": 1}',
     b'{"visit": "a", "text": "\xff"}', b""],
    ids=["nested", "two keys", "a number", "no UTF-8", "empty"],
)  # fmt: skip
def test_a_line_that_is_no_row_is_one_failed_check(folder: Path, line: bytes) -> None:
    lines = [json.dumps(row).encode() for row in ROWS[:-1]]
    (folder / "data" / "train.jsonl").write_bytes(b"\n".join([*lines, line, b""]))
    assert failing(folder) == {"files", "rows"}


@pytest.mark.parametrize(
    "name", ["synthetic.json", "README.md", "data/train.jsonl", "run/README.md", "run/privacy.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "giant"])
def test_a_file_without_end_is_a_failed_check_soon(folder: Path, name: str, kind: str) -> None:
    endless_is_found_soon(folder, name, kind, MOST["train.jsonl"])


def test_a_run_that_lost_its_guarantee_since_leaves_rows_that_verify_without_one(tmp_path: Path) -> None:
    """An audit may contradict it later: the card says so then, and the rows are still those of the released shares."""
    run = make_run(tmp_path / "run", statistics=released())
    folder = make_data_set(run, run.root / "synthetic")
    block = read(run.export)
    block["statistics"]["with_run"] = None
    attempted = block.pop("plan")
    carry(run.export, {**block, "guarantee": False, "reason": "a test", "attempted": attempted})
    write_dataset_card(folder, run)
    assert "without a differential privacy guarantee" in (folder / "README.md").read_text("utf-8")
    assert not failing(folder) & {"files", "rows", "record", "front matter", "synthetic in README.md", "run"}


def test_the_run_is_found_from_where_its_data_set_lies_and_from_nowhere_else(made: Path, tmp_path: Path) -> None:
    run = made.parent
    assert run_of(made) == RunDir(run)
    assert run_of(run / "private" / "synthetic") is None
    assert run_of(tmp_path / "set") is None
