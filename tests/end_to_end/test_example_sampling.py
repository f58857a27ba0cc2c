"""Rows drawn and clipped one by one, and a guarantee for all rows of an author: the whole path says so."""

from __future__ import annotations

import tiny
from running import NUM_ROWS, Place, done, rows

from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import read


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
    assert f"N = {people * cap} rows, public" in card
    assert "Rows are drawn and clipped one by one; ε is for all rows of a unit together" in card
    assert "none supports this event" in card
    assert "the gradient of each row" in card
