"""Rows by private inference: figures of their quality, the same rows from Python, and who is read beside whom."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
import switching
import tiny
from running import calls, done, dpllm_, refused
from voting import ROWS, TOKENS, Json, Place, shares_of

import dpllm
from dpllm.card import synthetic
from dpllm.cli import _parser
from dpllm.errors import ConfigError
from dpllm.model.reading import Reader
from dpllm.publish.synthesize import SynthesisRequest
from dpllm.recipe.config import OF_MODEL
from dpllm.releases import inference, quality
from dpllm.releases.inference_budget import InferenceRequest


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Place:
    return Place(tmp_path, base)


@pytest.mark.parametrize("public", ["data.public", "data.eval_public", None])
def test_figures_of_quality_are_public_only_where_all_that_they_read_is(place: Place, public: str | None) -> None:
    held = [{"text": tiny.sentence(n + 90), "visit": ("home", "ward")[n % 2]} for n in range(12)]
    held_out = tiny.write_rows(place.root / "held.jsonl", held)
    declared = (f"--{public}", "true") if public else ()
    answer = done(*place.words(*shares_of(place), "--data.eval", held_out, *declared))
    file = place.root / "rows-private" / "quality.json"
    assert (answer.err, str(file.parent) in answer.out, file.stat().st_mode & 0o077) == ("", True, 0)
    private, record = json.loads(file.read_text("utf-8")), place.record()
    public_figures, private_figures = record["quality"]["figures"], private["figures"]
    assert private["public"] == record["quality"]
    allowed = {"data.public": {"training"}, "data.eval_public": {"evaluation"}, None: set()}[public]
    assert all(synthetic.reads(name) <= {"synthetic", "released", *allowed} for name in public_figures)
    assert not any(synthetic.reads(name) <= {"synthetic", "released", *allowed} for name in private_figures)
    both = {**public_figures, **private_figures}
    rows = (public_figures["rows: synthetic"], both["rows: training"], both["rows: evaluation"])
    assert rows == (record["rows"], 40, 12)
    assert {"visit by TSTR: accuracy", "visit by TRTR: accuracy", "share of home: released"} <= both.keys()
    assert "with 8 words of any training row" in both
    assert ("visit by TSTR: accuracy" in public_figures) == (public == "data.eval_public")
    assert ("with 8 words of any training row" in public_figures) == (public == "data.public")
    assert f"| rows | {record['rows']} |" in (place.output / "README.md").read_text("utf-8")
    done("verify", place.output, "--ledger", place.ledger)


def test_a_failure_of_quality_loses_no_token(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Mock(side_effect=RuntimeError)
    with monkeypatch.context() as patch:
        patch.setattr(quality, "measure", fails)
        with pytest.raises(RuntimeError):
            dpllm_(*place.words())
    monkeypatch.setattr(inference._Job, "_next", fails)  # nothing is drawn again
    done(*place.words("--data.eval", "absent.jsonl", "--no-quality"))
    assert place.record()["quality"] is None
    assert not (place.root / "rows-private").exists()
    assert len(place.runs()) == 1


@pytest.mark.parametrize("wrong", ["absent", "the records", "of a budget"])
def test_evaluation_rows_that_a_run_refuses_are_refused_while_that_is_free(place: Place, wrong: str) -> None:
    """Declared public, exact figures of private rows would stand on a card, and it would verify."""
    held = place.root / "held.jsonl"
    if wrong == "the records":
        held.write_bytes(place.data.read_bytes())
    elif wrong == "of a budget":
        tiny.write_rows(held, [{"text": tiny.sentence(n + 90)} for n in range(40)])
        who = ("--by", "ada", "--reason", "test", "--unit", "example", "--ledger", place.ledger)
        done("ledger", "init", "others", "--data", held, "--epsilon", 1, "--delta", 1e-3, *who)
    options = ("--data.eval", held, "--data.eval_public", "true")
    refused(*place.words(*options), code=2 if wrong == "absent" else 3)
    assert not place.ledger.exists() or place.runs() == []


@pytest.mark.parametrize("kind", ["data", "recipe", "rows"])
def test_python_writes_what_the_command_writes(place: Place, kind: str) -> None:
    model: Json = {"model": str(place.base)}
    recipe: Json = {"model": {"name_or_path": str(place.base)}, "data": {"train": str(place.data)}}
    recipe |= {"train": {"steps": 1}, "output_dir": str(place.root / "none")}
    source, more = {"data": (place.data, model), "recipe": (recipe, {}), "rows": (place.rows(), model)}[kind]
    settings: Json = {"epsilon": 8, "max_new_tokens": TOKENS, "keep_unfinished": True, "data.max_length": 24}
    settings |= {"unit": "owner", "max_examples_per_unit": 2, "dataset": "notes", "ledger": str(place.ledger), **more}
    settings |= {"by": "inference", "quality": kind == "recipe"}
    assert dpllm.synthesize(source, ROWS, place.output, **settings) == place.output
    made = place.record()
    assert (made["rows"], made["unit"], made["num_units"], made["max_new_tokens"]) == (ROWS, "owner", 20, TOKENS)
    assert (made["quality"] is not None) == (kind == "recipe")
    assert [item.event.to_json() for item in place.runs()] == [made["event"]]
    assert not dpllm.verify(place.output, ledger=str(place.ledger)).failed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"seed": 3}, "seed"), ({"by": "votes"}, "votes"), ({"epsilon": None}, "epsilon"), ({"model": None}, "model")],
)
def test_python_refuses_what_the_command_refuses(place: Place, wrong: Json, message: str) -> None:
    settings = {"by": "inference", "model": str(place.base), "epsilon": 8.0, "ledger": str(place.ledger), **wrong}
    settings = {name: value for name, value in settings.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        dpllm.synthesize(place.data, ROWS, place.output, **settings)
    assert not place.ledger.exists()


def test_the_requests_are_what_the_command_takes() -> None:
    """An option that nobody passes on would be lost silently."""
    known = vars(_parser().parse_args(["synthesize", "data", "--rows", "1"]))
    others = {"command", "call", "source", "by", "output", "json", "no_quality", "final", "dry_run", *OF_MODEL}
    named = {field.name for request in (SynthesisRequest, InferenceRequest) for field in fields(request)}
    assert named == known.keys() - others


# --- a model whose longest row would decide about the others: Phi-3's longrope -----------------------------------------

LONG = 16


def test_before_anything_is_paid_records_are_read_alone_where_the_end_of_a_text_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prompt is read as it always was, and so are the three tokens behind it. A mutant knows nothing of T."""
    made = calls(monkeypatch, Reader, "__init__", lambda reader, *_, **__: reader)
    paid = calls(
        monkeypatch, inference._Job, "reserve", lambda job, _: (job.reader.height, len(job.source.ledger.runs("notes")))
    )
    for name, after in (("plain", 500), ("long", 0)):
        folder = tmp_path / name
        folder.mkdir()
        model = switching.model("longrope", after or made[0]._width + LONG - 4)
        model.save_pretrained(folder / "model")
        tiny.tokenizer(chat_template=None).save_pretrained(folder / "model")
        place = Place(folder, folder / "model")
        done(*place.words("--max-new-tokens", LONG, "--rows", 1, "--batch", 4))
        assert place.record()["max_new_tokens"] == LONG
    assert paid == [(5, 0), (1, 0)]
    assert len(made) == 2


def test_one_reader_that_was_checked_reads_behind_lines_of_all_lengths(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: one for each length, checked once it has been paid; the width of the first line."""
    checked = calls(monkeypatch, Reader, "lower_in_company")
    more = shares_of(place)
    line_of = {"ward": "ward ward ward ", "home": "home "}
    monkeypatch.setattr("dpllm.text.layouts.code_line", lambda _, values: line_of[values[0]])
    done(*place.words(*more, "--rows", 4))
    assert len(checked) == 1
