"""What a run spends is in the ledger before the step is taken, and what a budget admits; a copy of the data cannot escape it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from running import STEPS, Json, Place, calls, charged, contents, done, dpllm_, refused, rows, train_until

from dpllm.ledger import Ledger
from dpllm.privacy.engine import StepEngine

TERMS = ("--delta", "1e-3", "--reason", "a test", "--by", "Ada")


def init(place: Place, *arguments: object, epsilon: float = 8.0) -> None:
    done("ledger", "init", "notes", "--ledger", place.ledger, "--epsilon", epsilon, *TERMS, *arguments)


def refused_uncharged(place: Place, *arguments: object) -> str:
    before = place.head()
    message = refused("train", place.recipe, *arguments, code=3)
    assert place.head() == before
    return message


def another(place: Place, name: str) -> tuple[str, Path]:
    return "--output_dir", place.root / name


def test_a_final_run_takes_the_whole_budget_and_none_follows(place: Place) -> None:
    place.write({"privacy.epsilon": 8.0})
    init(place, "--data", place.train)
    assert "type --final" in refused_uncharged(place)
    done("train", place.recipe, "--final")
    done("card", place.run)
    ledger_record = place.json("run.json")["ledger"]
    assert (ledger_record["final"], ledger_record["used"]) == (True, None)
    assert 7.9 < ledger_record["spent_epsilon"] <= 8
    assert "the exact total of what was fixed in advance" in place.card
    assert "0 failed" in done("verify", place.run, "--ledger", place.ledger).out
    for more in ((), ("--final",), ("--privacy.epsilon", 0.1)):
        assert "closed for good" in refused_uncharged(place, *more, *another(place, "second"))
    with Ledger(place.ledger) as book:
        assert book.refusals() == {("notes", "over_budget"): 4}
        assert book.verify(ledger_record["head"]) == []
    done("ledger", "import", "notes", "--epsilon", 1, "--ledger", place.ledger, "--by", "Ada", "--reason", "found")
    shown = " ".join(done("ledger", "show", "--ledger", place.ledger).out.split())
    assert "which exceeds the budget" in shown  # a fact is not refused


def test_rows_drawn_one_by_one_need_a_final_run(place: Place) -> None:
    tiny.write_rows(place.train, [{**row, "who": f"p{number % 30}"} for number, row in enumerate(rows())])
    place.write({"data.sampling": "example", "data.unit": "who", "data.max_examples_per_unit": 8})
    init(place, "--data", place.train, "--unit", "who", epsilon=20.0)
    assert "knows no Renyi divergence" in refused_uncharged(place)
    done("train", place.recipe, "--final")


@pytest.mark.parametrize("more", [{"privacy.fit_budget": True}, {"privacy.final": True}], ids=str)
def test_resuming_keeps_noise_and_reservation(place: Place, more: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    init(place)
    place.write({"train.checkpoint_every": 1, **more})
    train_until(monkeypatch, 3, place.recipe)
    before = place.json("plan.json")
    done("train", place.recipe, "--resume")
    assert place.json("plan.json") == before
    assert [run.steps for run in place.runs()] == [STEPS]


def test_a_subset_or_an_extended_copy_charges_its_parent_and_cannot_hide(place: Place) -> None:
    init(place, "--data", place.train)
    subset, extended = place.root / "subset.jsonl", place.root / "extended.jsonl"
    tiny.write_rows(subset, rows(20))
    tiny.write_rows(extended, rows(90))
    for path in (subset, extended):
        place.write()
        message = refused_uncharged(place, "--data.train", path, "--privacy.dataset", path.stem)
        assert "shares records with" in message
        assert "privacy.derived_from: notes" in message
        # One run of the whole budget, refused or not, is too much for two.
        derived = {"privacy.dataset": path.stem, "privacy.derived_from": "notes"}
        place.write({"data.train": str(path), **derived, "privacy.epsilon": 2.0})
        done("train", place.recipe, *another(place, path.stem))
        record = json.loads((place.root / path.stem / "run.json").read_text())
        assert record["ledger"]["dataset"] == "notes"
    with Ledger(place.ledger) as book:
        assert book.records.account_name("subset") == "notes"
        assert len(book.runs("notes")) == 2
        assert book.datasets() == ["notes"]


@pytest.mark.parametrize("public", [True, False])
def test_training_without_privacy_on_budgeted_data_needs_an_exception_of_the_owner(place: Place, public: bool) -> None:
    init(place, "--data", place.train)
    baseline = ("--privacy.enabled", "false", "--data.public", str(public).lower())
    message = refused_uncharged(place, *baseline)
    assert "dpllm ledger except notes" in message
    assert dpllm_("plan", place.recipe, *baseline).code == 3
    exception = ("ledger", "except", "notes", "--ledger", place.ledger, "--reason", "baseline for the paper")
    assert dpllm_(*exception, "--by", "Eve").code == 3  # the budget is Ada's
    done(*exception, "--by", "Ada")
    done("train", place.recipe, *baseline, *another(place, "baseline"))
    done("train", place.recipe, "--privacy.epsilon", 2)
    for run in ("baseline", "run"):  # it is in every later record, and so in every later card
        record = json.loads((place.root / run / "run.json").read_text())
        assert any("permitted by Ada" in note and "baseline for the paper" in note for note in record["deviations"])
    done("card", place.run)
    assert "permitted by Ada" in place.card


def test_no_fingerprint_leaves_the_ledger(place: Place) -> None:
    init(place, "--data", place.train)
    done("train", place.recipe, "--final")
    with Ledger(place.ledger) as book:
        prints = [digest for (digest,) in book.store.rows("SELECT fingerprint FROM records")]
        secrets = [book.records.key().hex(), *prints]
    exported = done("ledger", "export", "--ledger", place.ledger).out
    for name, data in {**contents(place.run), "export": exported.encode()}.items():
        assert not any(secret.encode() in data for secret in secrets), name


def test_an_error_in_a_step_leaves_a_record_and_the_charge(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    train_until(monkeypatch, 1, place.recipe)
    record = place.json("run.json")
    assert (record["status"], record["guarantee"]["holds"]) == ("interrupted", False)
    assert "RuntimeError" in record["guarantee"]["reason"]
    assert charged(place) == (1, 1)


def test_every_step_is_charged_before_it_is_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch, StepEngine, "step", lambda *_: charged(place)[1])
    done("train", place.recipe)
    assert seen == [1, 2, 3, 4]


def test_overwriting_keeps_what_was_spent_even_in_the_run_directory(place: Place) -> None:
    inside = Place(place.run, place.base)  # its ledger lies in the run directory
    place.write({"privacy.ledger": str(inside.ledger), "output_dir": str(place.run)})
    done("train", place.recipe)
    with Ledger(inside.ledger) as ledger:
        first = ledger.spent("notes")
    outlook = done("plan", place.recipe, "--output_dir", place.root / "second").out
    assert f"epsilon {first:.4f} at delta" in " ".join(outlook.replace("│", " ").split())
    done("train", place.recipe, "--overwrite")
    assert charged(inside)[0] == 2
    with Ledger(inside.ledger) as ledger:
        assert ledger.spent("notes") > first
    assert place.json("run.json")["ledger"]["spent_epsilon"] > first


@pytest.mark.parametrize("part", ["private", "export", "private/deeper"])
def test_a_ledger_where_a_new_run_would_delete_it_is_refused(place: Place, part: str) -> None:
    assert "Keep it elsewhere" in refused("train", place.recipe, "--privacy.ledger", place.run / part / "ledger.sqlite")
    assert not place.run.exists()
