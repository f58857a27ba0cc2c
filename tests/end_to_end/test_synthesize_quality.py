"""``dpllm synthesize`` joined to the rest: its folder verifies and loads, and quality is measured without losing rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from published import edit, failing
from running import Place, contents, done, dpllm_, refused

import dpllm
from dpllm.publish.synthesize import RECORD, ROWS
from dpllm.releases import quality
from dpllm.run.directory import RunDir

Json = dict[str, Any]
FEW = ("--rows", 9, "--max-new-tokens", 8, "--keep-unfinished", "--seed", 3)


@pytest.fixture
def run(finished: Place, tmp_path: Path) -> Path:
    """With canaries, and with evaluation rows that are declared public."""
    return Path(shutil.copytree(finished.run, tmp_path / "run"))


def of(output: Path) -> Json:
    return dict(json.loads((output / RECORD).read_text()))


def test_what_is_written_verifies_and_loads(run: Path, tmp_path: Path) -> None:
    import datasets

    done("synthesize", run, *FEW)
    answer = done("verify", run / "synthetic", "--json")
    assert {check["status"] for check in json.loads(answer.out)["checks"]} <= {"verified", "asserted"}
    loaded = datasets.load_dataset(str(run / "synthetic"), cache_dir=str(tmp_path / "cache"))
    lines = (run / "synthetic" / ROWS).read_text().removesuffix("\n").split("\n")
    assert list(loaded["train"]) == [json.loads(line) for line in lines]


def test_public_figures_are_on_the_card_and_the_others_in_private(run: Path) -> None:
    answer = done("synthesize", run, *FEW)
    record, folder = of(run / "synthetic"), run / "private" / quality.FOLDER
    private, figures = json.loads((folder / "quality.json").read_text()), record["quality"]["figures"]
    assert private["public"] == record["quality"]
    assert (private["not_measured"], answer.err) == ([], "")
    assert (figures["rows: synthetic"], figures["rows: evaluation"]) == (9, 8)
    assert "| rows | 9 |  |  | 8 |" in (run / "synthetic" / "README.md").read_text()
    assert "rows: training" in private["figures"]
    assert not any("training" in name for name in figures)
    assert str(folder) in answer.out


def test_no_quality_measures_nothing(run: Path) -> None:
    before = contents(run / "private")
    done("synthesize", run, *FEW, "--no-quality")
    assert of(run / "synthetic")["quality"] is None
    assert contents(run / "private") == before


def test_what_is_not_at_hand_is_told_and_costs_no_other_figure(
    run: Path, finished: Place, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    done("synthesize", run, *FEW, "--output", tmp_path / "all")
    edit(RunDir(run).rows, str(finished.train), str(tmp_path / "gone" / finished.train.name))
    errors = done("synthesize", run, *FEW, "--output", tmp_path / "few").err
    assert "not measured: training rows: the training data are not where the run read them" in errors
    assert of(tmp_path / "few")["quality"] == of(tmp_path / "all")["quality"]
    private = json.loads((run / "private" / quality.FOLDER / "quality.json").read_text())
    assert private["not_measured"] == [line.removeprefix("not measured: ") for line in errors.splitlines()]
    recwarn.clear()
    dpllm.synthesize(run, 9, tmp_path / "python", max_new_tokens=8, keep_unfinished=True, seed=3)
    missing = "training rows: the training data are not where the run read them"
    assert any(missing in str(warning.message) for warning in recwarn)
    assert contents(tmp_path / "python") == contents(tmp_path / "few")


def test_a_failure_of_quality_loses_no_row(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Mock(side_effect=RuntimeError)
    with monkeypatch.context() as patch:
        patch.setattr(quality, "measure", fails)
        with pytest.raises(RuntimeError):
            dpllm_("synthesize", run, *FEW)
    monkeypatch.setattr("dpllm.publish.generate.sample", fails)
    done("synthesize", run, *FEW, "--no-quality")  # nothing is drawn again


def test_a_recipe_that_is_edited_afterwards_decides_nothing(run: Path, tmp_path: Path) -> None:
    """Declared public, exact figures of everybody's rows would stand on a card, and it would verify."""
    done("synthesize", run, *FEW, "--output", tmp_path / "before")
    path, before = run / "config.yaml", contents(run)
    text = path.read_text()
    for old, new in (("  public: false", "  public: true"), ("eval_public: true", "eval_public: false")):
        assert old in text
        path.write_text(text.replace(old, new))
        for command in (("synthesize", run, *FEW), ("card", run), ("push", run, "a/b", "--dry-run"), ("audit", run),
                        ("merge", run), ("generate", run), ("compare", run, run.parent / "other")):  # fmt: skip
            if command[0] == "compare":
                shutil.copytree(run, command[2], dirs_exist_ok=True)
            message = refused(*command, code=3)
            assert f"{path}: was changed after the run" in message or command[0] == "push"
        assert failing(run) == {"run", "ledger", "labels"}  # what reads the recipe
    path.write_text(text.replace("license: null", "license: mit"))
    done("card", run)
    path.write_text(text)
    done("card", run)
    assert contents(run) == before
