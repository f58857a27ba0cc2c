"""Models made from models that learned labels of the same people: what their statements say of the account of the labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tiny
from running import Place, done, refused
from test_label_runs import trained_on
from test_preference_runs import asked, pairs  # noqa: F401

from dpllm.run.subject import record_of

Json = dict[str, Any]
PLAIN = ("--privacy.enabled", "false", "--data.public", "true", "--audit.canaries", "null")


def drawn(place: Place, name: str, start: int, *more: object) -> Path:
    """Three labels for each of 20 annotators, at epsilon 1.5 each."""
    pairs_file = tiny.write_rows(place.root / "data" / f"{name}.jsonl", pairs(60, start))
    output = place.root / "data" / f"{name}.flipped.jsonl"
    options = ("--unit", "who", "--max-labels", "3", "--dataset", "notes", "--ledger", place.ledger)
    done("randomize-labels", pairs_file, "--epsilon", "1.5", *options, "--output", output, *more)
    return output


def trained(place: Place, run: Path, *more: object) -> Json:
    """A run with a card that verifies; its block."""
    done("train", place.recipe, *PLAIN, "--output_dir", run, *more)
    done("card", run)
    block: Json = json.loads((run / "export" / "privacy.json").read_text())
    return block


def test_models_on_labels_of_the_same_people_state_all_of_them(asked: Place) -> None:  # noqa: F811
    first, second, third = (asked.root / name for name in ("run", "second", "third"))
    old = drawn(asked, "first", 0)
    trained(asked, first, *trained_on(old))
    assert "charged exactly this" in done("verify", first).out
    new = drawn(asked, "second", 1000)
    assert json.loads(record_of(new).read_text())["account_epsilon"] == 9.0
    # The first card is of the time before the second draw.
    for path in (first, record_of(old)):
        shown = done("verify", path, "--ledger", asked.ledger).out
        assert "charged exactly this" not in shown
        assert re.search(r"asserted  labels: ledger: .* charged 4.5 for this draw, .* holds 9 in all", shown)

    block = trained(asked, second, *trained_on(new), "--model.adapter", first / "export")
    assert (block["labels"]["unit_epsilon"], block["labels"]["account_epsilon"]) == (4.5, 9.0)
    assert [item["unit_epsilon"] for item in block["labels_before"]] == [4.5]
    assert "different datasets" in block["lineage"]["reason"]  # their labels have one account, whose total is stated
    card = (second / "export" / "README.md").read_text()
    assert "ε = 9 for all that its account holds" in card
    assert "`labels of notes` holds ε = 9 for one `who`, 4.5 of it for this draw" in card
    assert f"entry `{block['labels_before'][0]['entry']}`" in card
    shown = done("verify", second).out
    assert re.search(r"verified  labels: ledger: .* charged 4.5 for this draw, and its account holds 9 in all", shown)
    assert "charged exactly this" not in shown

    # A third one learns nothing of labels, and knows of both draws.
    data = tiny.write_rows(asked.root / "third.jsonl", pairs(40, 3000))
    block = trained(asked, third, "--data.train", data, "--model.adapter", second / "export")
    assert "labels" not in block
    assert [item["account_epsilon"] for item in block["labels_before"]] == [9.0, 4.5]
    assert "those that taught the models before this one" in (third / "export" / "README.md").read_text()
    assert "0 failed" in done("verify", third).out


def test_budgets_of_labels_by_command(asked: Place) -> None:  # noqa: F811
    init = ("ledger", "init", "notes", "--epsilon", "9", "--delta", "1e-6", "--unit", "who", "--reason", "a study")
    output = done(*init, "--relation", "label_changed", "--ledger", asked.ledger).out
    assert "labels of notes: epsilon 9" in output
    drawn(asked, "first", 0)
    drawn(asked, "second", 1000)
    third = tiny.write_rows(asked.root / "third.jsonl", pairs(20, 2000))
    more = ("--epsilon", "0.1", "--unit", "who", "--max-labels", "1", "--dataset", "notes", "--ledger", asked.ledger)
    message = refused("randomize-labels", third, *more, code=3)
    assert "100% of epsilon 9 used, and this run would use another 1.11%" in message
    assert "100% of epsilon 9 used" in " ".join(done("ledger", "show", "--ledger", asked.ledger).out.split())


def test_a_second_draw_by_command_states_the_sum(asked: Place) -> None:  # noqa: F811
    data = drawn(asked, "first", 0)
    options = ("--epsilon", "1.5", "--unit", "who", "--max-labels", "3", "--dataset", "notes", "--ledger", asked.ledger)
    command = ("randomize-labels", data.with_name("first.jsonl"), *options, "--output", data.with_name("more.jsonl"))
    assert "costs epsilon 4.5 more for one who, 9 in all" in refused(*command, code=3)
    assert "now holds epsilon 9 for one who" in " ".join(done(*command, "--again").out.split())
