"""Units of whole runs: mail, whose rows have several owners, and rows that are drawn one by one for all of an author."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
from running import NUM_ROWS, Place, done, refused, rows

from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import dp_sgd_event, read
from dpllm.privacy.plan import Plan
from dpllm.recipe.config import load_config
from dpllm.run.promise import plan_of

GRAPH = "zero_out_public_graph"
MAIL: dict[str, Any] = {"data.unit": "people", "data.owners": "several", "data.max_examples_per_unit": 1}
PEOPLE = 80


@pytest.fixture
def mail(place: Place) -> Place:
    """Rows of two people each, of whom every third has two."""
    some = [{**row, "people": [f"p{n}", f"p{(n + 40 * (n % 3 == 0)) % PEOPLE}"]} for n, row in enumerate(rows())]
    tiny.write_rows(place.train, [*some, *[{**rows(1)[0], "people": f"p{n}; p{n + 1}"} for n in range(5)]])
    place.write(MAIL)
    return place


def test_a_run_on_mail_says_what_is_protected_and_what_is_public(mail: Place) -> None:
    mail.write({**MAIL, "audit.canaries": {"groups": {1: 20}, "references": 100, "digits": 12}})
    planned = done("plan", mail.recipe, "--json")
    assert json.loads(planned.out)["graph"] == {"rows": 45, "kept": 40, "owners": 54, "most": 1}
    words = " ".join(done("plan", mail.recipe).out.replace("│", " ").split())
    assert "40 of 45, so that each of 54 owners has at most 1" in words
    assert "who wrote to whom is not protected, what was written is" in words
    mail.does("train", "audit", "card")
    plan = mail.json("plan.json")
    assert (plan["neighbouring_relation"], plan["dataset_size"], plan["canary_slots"]) == (GRAPH, 60, 20)
    card = " ".join(mail.card.split())
    for words in ("Who wrote to whom is not protected; what was written is.", "by who has which row, and by no text"):
        assert words in card
    assert "that it was used" not in card
    statement = mail.json("export/privacy.json")
    assert any("who wrote to whom" in line for line in statement["not_covered"])
    done("verify", mail.run)


def test_one_row_each_costs_what_rows_cost_and_more_what_groups_cost(mail: Place) -> None:
    def promised(**changes: Any) -> Plan:
        changes = {f"data.{key}": value for key, value in changes.items()} | {"privacy.noise_multiplier": 2.0}
        mail.write({**MAIL, **changes, "data.train": "rows.jsonl", "train.steps": 20})
        return plan_of(load_config(mail.recipe), 500)

    rows_alone = promised(unit="example", owners="one", max_examples_per_unit=None)
    assert promised().epsilon == rows_alone.epsilon
    assert promised(sampling="example").epsilon == rows_alone.epsilon
    group = promised(sampling="example", max_examples_per_unit=3)
    event = dp_sgd_event(8 / 500, 2.0, 20, group_size=3)
    assert (group.event, group.group_size) == (event, 3)
    assert group.epsilon == epsilon(event, group.delta, "zero_out") > rows_alone.epsilon
    assert epsilon(event, 1e-5, GRAPH) == epsilon(event, 1e-5, "zero_out")
    assert epsilon(dp_sgd_event(1.0, 2.0, 3), 1e-5, GRAPH) == epsilon(dp_sgd_event(1.0, 2.0, 3), 1e-5, "zero_out")


def test_more_rows_of_one_owner_need_a_final_reservation(mail: Place) -> None:
    words = ("--epsilon", 9, "--delta", 1e-3, "--unit", "people", "--reason", "mail", "--by", "a")
    done("ledger", "init", "notes", *words, "--ledger", mail.ledger, "--relation", GRAPH, "--data", mail.train)
    mail.write({**MAIL, "data.max_examples_per_unit": 2, "data.sampling": "example"})
    assert "--final" in refused("train", mail.recipe, code=3)
    done("train", mail.recipe, "--final")
    plan = mail.json("plan.json")
    assert plan["event"]["event"]["group_size"] == 2
    assert plan["epsilon"] == epsilon(read(plan["event"]), plan["delta"], GRAPH)
    mail.does("card", "verify")


def test_another_relation_is_another_account(mail: Place) -> None:
    done("train", mail.recipe)
    alone = ("--data.unit", "example", "--data.owners", "one", "--data.max_examples_per_unit", "null")
    assert "data.owners" in refused("plan", mail.recipe, *alone, code=3)


def test_what_counts_whole_people_is_refused(mail: Place) -> None:
    by_inference = ("--by", "inference", "--rows", 1, "--output", "out")
    for command, *more in (("describe", "--units"), ("synthesize", *by_inference)):
        message = refused(command, mail.recipe, *more, "--epsilon", 1, "--dry-run")
        assert "data.owners: several, and" in message
        assert "set data.owners: one" in message
    mail.write({**MAIL, "audit.canaries": {"groups": {4: 5}, "references": 100}})
    assert "of which only data.max_examples_per_unit (1) rows train" in refused("plan", mail.recipe)


# --- rows drawn and clipped one by one -------------------------------------------------------------------------------


def test_a_run_that_samples_rows_is_accounted_for_units(place: Place) -> None:
    people, cap = 12, 2
    tiny.write_rows(place.train, [{**row, "author": f"p{n % people}"} for n, row in enumerate(rows())])
    place.write({"data.unit": "author", "data.max_examples_per_unit": cap, "data.sampling": "example"})
    done("train", place.recipe)
    plan, record = place.json("plan.json"), place.json("run.json")
    assert NUM_ROWS > people * cap == plan["dataset_size"]
    assert plan["sampling"] == "example"
    step = plan["event"]["event"]
    assert (step["type"], step["group_size"]) == ("poisson_sampled_group", cap)
    assert plan["epsilon"] == epsilon(read(plan["event"]), plan["delta"], plan["neighbouring_relation"]) <= 8.0
    assert plan["cross_check"] is None
    assert record["guarantee"]["holds"]
    done("card", place.run)
    card = " ".join(place.card.split())
    one_by_one = "Rows are drawn and clipped one by one; ε is for all rows of a unit together"
    for words in (
        f"N = {people * cap} rows, public",
        one_by_one,
        "none supports this event",
        "the gradient of each row",
    ):
        assert words in card
