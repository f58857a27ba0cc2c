"""Models made from models that learned labels of the same people: what their statements say of the account of the labels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from running import Place, as_trained, done, dpllm_
from test_label_runs import trained_on
from test_preference_runs import asked, pairs  # noqa: F401

from dpllm.run.labels import record_of

Json = dict[str, Any]
PLAIN = ("--privacy.enabled", "false", "--data.public", "true", "--audit.canaries", "null")


def drawn(place: Place, name: str, start: int, *more: object) -> Path:
    """Three labels for each of 20 annotators, at epsilon 1.5 each."""
    given = tiny.write_rows(place.root / "data" / f"{name}.jsonl", pairs(60, start))
    output = place.root / "data" / f"{name}.flipped.jsonl"
    told = ("--unit", "who", "--max-labels", "3", "--dataset", "notes", "--ledger", place.ledger)
    done("randomize-labels", given, "--epsilon", "1.5", *told, "--output", output, *more)
    return output


@pytest.fixture
def two(asked: Place) -> tuple[Place, Path]:  # noqa: F811
    """A run on three labels of each annotator, and three others of each; the run's card is written before these are drawn."""
    done("train", asked.recipe, *trained_on(drawn(asked, "first", 0)), *PLAIN)
    done("card", asked.run)
    return asked, drawn(asked, "second", 1000)


def from_first(place: Place, data: Path, *more: object) -> tuple[object, ...]:
    start = ("--model.adapter", place.run / "export", "--output_dir", place.root / "second")
    return "train", place.recipe, *trained_on(data), *PLAIN, *start, *more


def block_of(run: Path) -> Json:
    found: Json = json.loads((run / "export" / "privacy.json").read_text())
    return found


def test_a_model_made_from_a_model_on_labels_of_the_same_people_states_both(two: tuple[Place, Path]) -> None:
    place, data = two
    assert json.loads(record_of(data).read_text())["account_epsilon"] == 9.0
    done(*from_first(place, data))
    second = place.root / "second"
    done("card", second)
    block = block_of(second)
    assert (block["labels"]["unit_epsilon"], block["labels"]["account_epsilon"]) == (4.5, 9.0)
    assert [one["unit_epsilon"] for one in block["labels_before"]] == [4.5]
    assert "labels of notes, whose total" in block["lineage"]["reason"]
    card = (second / "export" / "README.md").read_text()
    assert "ε = 9 for all that its account holds" in card
    assert "`labels of notes` holds ε = 9 for one `who`, 4.5 of it for this draw" in card
    assert f"entry `{block['labels_before'][0]['entry']}`" in card
    shown = done("verify", second).out
    assert re.search(r"verified  labels: ledger: .* charged 4.5 for this draw, and its account holds 9 in all", shown)
    assert "charged exactly this" not in shown
    # The third generation learned nothing of labels, and knows of both draws.
    done("train", place.recipe, *PLAIN, "--data.train", tiny.write_rows(place.root / "third.jsonl", pairs(40, 3000)),
         "--model.adapter", second / "export", "--output_dir", place.root / "third")  # fmt: skip
    done("card", place.root / "third")
    assert [one["account_epsilon"] for one in block_of(place.root / "third")["labels_before"]] == [9.0, 4.5]
    assert "those that taught the models before this one" in (place.root / "third" / "export" / "README.md").read_text()
    assert "0 failed" in done("verify", place.root / "third").out


def test_an_account_that_has_grown_is_not_verified_as_charged_exactly(two: tuple[Place, Path]) -> None:
    """Nor as the total that is stated: the first run's card is of the time before the second draw."""
    place, _ = two
    for path in (place.run, record_of(place.root / "data" / "first.flipped.jsonl")):
        shown = done("verify", path, "--ledger", place.ledger).out
        assert "charged exactly this" not in shown
        assert re.search(r"asserted  labels: ledger: .* charged 4.5 for this draw, .* holds 9 in all", shown)
    # A run that begins now knows it, and plan says it.
    more = (place.recipe, *trained_on(place.root / "data" / "first.flipped.jsonl"), *PLAIN)
    assert "labels of notes holds epsilon 9 for one who" in " ".join(done("plan", *more).out.split())
    done("train", *more, "--overwrite")
    assert place.json("run.json")["labels"]["account_epsilon"] == 9.0


def test_the_same_draw_is_paid_once_and_needs_no_ledger_to_be_added(two: tuple[Place, Path]) -> None:
    """Whoever trains elsewhere has the records and the first model's card."""
    place, data = two
    elsewhere = ("--privacy.ledger", place.root / "elsewhere.sqlite")
    first = place.root / "data" / "first.flipped.jsonl"
    done(*from_first(place, first, *elsewhere))
    record = json.loads((place.root / "second" / "run.json").read_text())
    assert record["labels"]["account_epsilon"] == 4.5
    told = json.loads(record_of(data).read_text())
    record_of(data).write_text(json.dumps({k: v for k, v in told.items() if k != "account_epsilon"}))  # an older version
    done(*from_first(place, data, *elsewhere, "--overwrite"))
    record = json.loads((place.root / "second" / "run.json").read_text())
    assert record["labels"]["account_epsilon"] == 9.0


def test_models_whose_labels_count_other_units_have_no_total(two: tuple[Place, Path]) -> None:
    place, data = two
    told = json.loads(record_of(data).read_text())
    other = {**told, "unit": "team"}
    record_of(data).write_text(json.dumps(other))
    done(*from_first(place, data, "--privacy.ledger", place.root / "elsewhere.sqlite"))
    second = place.root / "second"
    done("card", second)
    assert "account_epsilon" not in block_of(second)["labels"]
    assert "no total of the account is stated" in (second / "export" / "README.md").read_text()
    assert "0 failed" in done("verify", second).out


def forgets_the_first(record: Json) -> None:
    record["labels"]["account_epsilon"] = 4.5


def says_no_total(record: Json) -> None:
    del record["labels"]["account_epsilon"]


def makes_the_first_cheap(record: Json) -> None:
    record["labels_before"][0]["unit_epsilon"] = 0.1


def hides_the_first(record: Json) -> None:
    del record["labels_before"]
    record["labels"]["account_epsilon"] = 4.5


@pytest.mark.parametrize("lie", [forgets_the_first, says_no_total, makes_the_first_cheap, hides_the_first])
def test_a_statement_that_states_less_does_not_verify(
    two: tuple[Place, Path], lie: Callable[[Json], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dpllm.verification.verify as verification

    place, data = two
    done(*from_first(place, data))
    second = place.root / "second"
    record = json.loads((second / "run.json").read_text())
    lie(record)
    (second / "run.json").write_text(json.dumps(record))
    as_trained(second)
    with pytest.MonkeyPatch.context() as patch:  # a card that does not verify is not even written
        patch.setattr(verification, "insist", lambda *given: None)
        done("card", second)
    answer = dpllm_("verify", second)
    assert answer.code == 4
    assert "failed    labels" in answer.out


def test_budgets_of_labels_by_command(asked: Place) -> None:  # noqa: F811
    init = ("ledger", "init", "notes", "--epsilon", "9", "--delta", "1e-6", "--unit", "who", "--reason", "a study")
    told = done(*init, "--relation", "label_changed", "--ledger", asked.ledger).out
    assert "labels of notes: epsilon 9" in told
    drawn(asked, "first", 0)
    drawn(asked, "second", 1000)
    third = tiny.write_rows(asked.root / "third.jsonl", pairs(20, 2000))
    more = ("--epsilon", "0.1", "--unit", "who", "--max-labels", "1", "--dataset", "notes", "--ledger", asked.ledger)
    answer = dpllm_("randomize-labels", third, *more)
    assert (answer.code, answer.err.count("\n")) == (3, 1)
    assert "9 is spent and 0 remains of 9" in answer.err
    assert "Sum of epsilons: 100.0%" in " ".join(done("ledger", "show", "--ledger", asked.ledger).out.split())


def test_a_second_draw_by_command_states_the_sum(asked: Place) -> None:  # noqa: F811
    data = drawn(asked, "first", 0)
    told = ("--epsilon", "1.5", "--unit", "who", "--max-labels", "3", "--dataset", "notes", "--ledger", asked.ledger)
    command = ("randomize-labels", data.with_name("first.jsonl"), *told, "--output", data.with_name("more.jsonl"))
    answer = dpllm_(*command)
    assert answer.code == 3
    assert "costs epsilon 4.5 more for one who, 9 in all" in answer.err
    assert "now holds epsilon 9 for one who" in " ".join(done(*command, "--again").out.split())
