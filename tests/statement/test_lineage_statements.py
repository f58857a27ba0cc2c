"""What a run owes to the model that it starts from: composition, refusals, exceptions, ancestors."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger, RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy import accounting
from dpllm.privacy.events import Imported
from dpllm.privacy.plan import Plan
from dpllm.recipe.config import RunConfig
from dpllm.run import base_model
from dpllm.run.promise import plan_of
from dpllm.statement import lineage
from dpllm.statement.lineage import Base
from dpllm.statement.privacy_record import Ancestor, ComposedLineage, Lineage

Json = dict[str, Any]
DELTA = 1e-4


def recipe(**sections: Json) -> RunConfig:
    promised = {"noise_multiplier": 1.0, "epsilon": 50.0, "delta": DELTA, "dataset": "notes"}
    steps = {"steps": 20, **sections.pop("train", {})}
    return tm.recipe(privacy={**promised, **sections.pop("privacy", {})}, train=steps, **sections)


@cache
def plan(sigma: float = 1.0, steps: int = 20) -> Plan:
    return plan_of(recipe(privacy={"noise_multiplier": sigma}, train={"steps": steps}), 100)


def statement(**changes: Any) -> Ancestor:
    made = plan()
    terms = {"epsilon": made.epsilon, "delta": DELTA, "event": made.event, "unit": made.unit}
    origin = {"name": "parent", "dataset": "notes", "entry": "aa" * 8, "files_digest": "0c" * 32}
    relation = {"neighbouring_relation": made.neighbouring_relation}
    return Ancestor.pick({"guarantee": True, **terms, **relation, **origin, **changes})


def unprotected(**changes: Any) -> Ancestor:
    nothing = dict.fromkeys(("epsilon", "delta", "unit", "neighbouring_relation", "event", "entry"))
    return statement(guarantee=False, **{**nothing, **changes})


def base(*before: Ancestor, **changes: Any) -> Base:
    return Base(statement(**changes), before)


def settle(parent: Base | None, config: RunConfig | None = None, **changes: Any) -> Lineage:
    terms: Json = {"dataset": "notes", "derived_from": None, "book": None, "plan": plan(), **changes}
    result = lineage.compose_with_base(parent, config or recipe(), **terms)
    assert Lineage.pick(result.to_json()) == result
    return result


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as made:
        yield made


def reserve(book: Ledger) -> str:
    asked = RunRequest(event=plan().event, delta=DELTA, num_steps=20, run="parent", unit="example", relation="zero_out")
    return reserve_all(book, "notes", [asked])[0].entry


def test_without_a_block_there_is_no_lineage() -> None:
    assert lineage.compose_with_base(None, recipe(), dataset="notes", derived_from=None, book=None, plan=plan()) is None
    assert lineage.why_not(None) is None
    assert lineage.deviations(None) == []


def test_the_same_dataset_is_composed_by_pld_at_the_delta_of_the_run() -> None:
    made = plan(sigma=1.5, steps=30)
    record = settle(base(), plan=made)
    both = accounting.epsilon(accounting.compose([plan().event, made.event]), DELTA, "zero_out")
    accountant = f"dp-accounting PLD {accounting.versions()['version']}"
    assert record.composed == ComposedLineage(epsilon=both, delta=DELTA, accountant=accountant)
    assert max(made.epsilon, plan().epsilon) < both < made.epsilon + plan().epsilon
    assert (record.same_dataset, record.dataset, record.reason) == (True, "notes", None)
    assert lineage.why_not(record) is None
    assert lineage.deviations(record) == []


@settings(max_examples=6, deadline=None, derandomize=True)
@given(generations=st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=3))
def test_each_generation_on_the_same_data_costs_more(generations: list[float]) -> None:
    """Two ancestors with the same noise count twice: nothing is composed once that was spent twice."""
    own = plan()
    parents = [statement(event=plan(sigma).event, epsilon=plan(sigma).epsilon) for sigma in generations]
    record = settle(Base(parents[0], tuple(parents[1:])))
    shorter = settle(Base(parents[0], tuple(parents[1:-1]))).composed.epsilon
    total = record.composed.epsilon
    assert own.epsilon < total <= own.epsilon + sum(parent.epsilon for parent in parents) + 1e-3
    assert total > shorter or len(parents) == 1


def test_three_generations_compose_over_those_on_the_same_data_only() -> None:
    grandparent, stranger = statement(name="first"), statement(name="other", dataset="letters")
    record = settle(base(stranger, grandparent))
    expected = accounting.epsilon(accounting.compose([plan().event] * 3), DELTA, "zero_out")
    assert record.composed.epsilon == expected
    assert [parent.name for parent in (record.base, *record.ancestors)] == ["parent", "other", "first"]
    through = settle(base(grandparent, dataset="letters"))
    assert through.same_dataset
    assert through.composed.epsilon == settle(base()).composed.epsilon


UNCOMPOSED: dict[str, tuple[Base, Json]] = {
    "different datasets": (base(dataset="letters"), {}),
    "neighbouring relation (patient_id, zero_out; here example": (base(unit="patient_id"), {}),
    "neighbouring relation (example, add_or_remove_one; here": (base(neighbouring_relation="add_or_remove_one"), {}),
    "no finite epsilon": (base(event=Imported(1.0, 0.5)), {}),
    "seeded by the user": (base(), {"insecure_seed": 3}),
    "does not say what it released": (base(statement(name="first", event=None)), {}),
}


@pytest.mark.parametrize("reason", UNCOMPOSED)
def test_what_cannot_be_composed_says_why(reason: str) -> None:
    parent, privacy = UNCOMPOSED[reason]
    record = settle(parent, recipe(privacy=privacy))
    same = reason != "different datasets"
    assert (record.composed, record.same_dataset, record.dataset) == (None, same, "notes" if same else None)
    assert reason in record.reason


def test_a_base_without_a_guarantee_on_other_data_is_named_and_taints_nothing_else() -> None:
    record = settle(Base(unprotected(dataset="letters"), ()))
    assert lineage.why_not(record) is None
    (note,) = lineage.deviations(record)
    assert "parent, from which this model was made, states no differential privacy guarantee" in note
    assert "about this run's own training data, and only as far as they are not among those" in note


@pytest.mark.parametrize("place", ["base", "ancestor"])
def test_no_guarantee_for_data_that_an_unprotected_base_was_trained_on(place: str) -> None:
    bad = unprotected(name="leaky")
    parent = Base(bad, ()) if place == "base" else base(bad, dataset="letters")
    record = settle(parent)
    assert record.composed is None
    assert "no guarantee" in record.reason
    why = lineage.why_not(record)
    assert "leaky" in why
    assert "without a guarantee" in why


def test_without_privacy_nothing_is_promised_together() -> None:
    off = recipe(privacy={"enabled": False}, data={"public": True})
    record = settle(base(), off, plan=None)
    assert (record.same_dataset, record.composed) == (True, None)
    assert "this run gives no guarantee" in record.reason


def test_derived_data_are_their_parents_whichever_ledger_holds_the_runs_before(book: Ledger, tmp_path: Path) -> None:
    parent = base(entry=reserve(book))
    with Ledger(tmp_path / "other.sqlite") as other:
        result = [settle(parent, book=where) for where in (book, other, None)]
    assert result[0].composed is not None
    assert result[0] == result[1] == result[2]
    record = settle(base(entry=reserve(book)), dataset="notes-2027", derived_from="notes", book=book)
    assert record.dataset == "notes"
    assert record.composed
    assert settle(base(), dataset="notes-2027", derived_from="notes").same_dataset


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "dpllm merge RUN"),
        (("run.json", "export/model.safetensors"), "is a run directory and not a whole model"),
    ],
)
def test_an_adapter_and_a_run_directory_are_no_base(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        base_model.of_base(recipe(model={"name_or_path": str(tmp_path)}))


def test_a_model_without_a_block_has_no_lineage(tmp_path: Path) -> None:
    for text in (None, "# A model", "---\nlicense: mit\n---\n# A model", "---\nprivacy: good\n---\n"):
        if text is not None:
            (tmp_path / "README.md").write_text(text)
        assert base_model.of_base(recipe(model={"name_or_path": str(tmp_path)})) is None
    assert base_model.of_base(recipe(model={"name_or_path": "builtin:tiny"})) is None
    assert base_model.of_base(recipe(model={"name_or_path": "nobody/nothing"})) is None  # no network here
    assert base_model.of_base(recipe(model={"name_or_path": "nobody/nothing"}), fetch=False) is None


def test_a_card_whose_block_was_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nprivacy:\n  guarantee: true\n---\n# A model")
    with pytest.raises(Refused, match=r"privacy\.json is missing"):
        base_model.of_base(recipe(model={"name_or_path": str(tmp_path)}))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"guarantee": NaN}', "[" * 100_000, '{"guarantee": true, "files": {}}', "\xff"]
)
def test_a_damaged_block_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "privacy.json").write_text(text, encoding="latin-1")
    with pytest.raises(Refused, match="is not a privacy block"):
        base_model.of_base(recipe(model={"name_or_path": str(tmp_path)}))
