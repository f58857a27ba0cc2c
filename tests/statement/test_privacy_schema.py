"""The privacy statement as a record: closed, documented, and kept to by every statement that is written or published."""

import importlib
import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cards import Json, audit, config, described, plan, record, render_card
from jsonschema import Draft202012Validator
from published import Where, changed, containers, get, without
from pydantic import TypeAdapter, ValidationError
from test_card_states import STATES

from dpllm.card import card
from dpllm.errors import ConfigError
from dpllm.privacy.plan import Plan
from dpllm.records import NotAStatement
from dpllm.statement import privacy_record
from dpllm.statement.privacy_record import Ancestor, Steps
from dpllm.statement.released import ReleaseEvent

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
reference: Any = importlib.import_module("reference")
DOCS = [ROOT / "docs" / "concepts" / "card.md", ROOT / "docs" / "howto" / "regulators.md"]
PUBLISHED = sorted((ROOT / "model_cards").glob("*/export/privacy.json"))
SCHEMA = privacy_record.schema()
MAPS = {"files", "software", "hardware", "attacks", "exposure", "extraction", "groups", "weights", "accountants"}
WRONG_EVENTS = ["gaussian", 1, [], {}, {"type": "free"}, {"type": "gaussian", "noise_multiplier": 0.0}]


@pytest.fixture(scope="module")
def block() -> Json:
    return render_card(config(), plan(), record(), audit(), statistics=described())[1]


def objects(block: Json) -> list[Where]:
    """Where a mapping of a block stands, but for the event, which is free, and what lists hold."""
    places = (at for at in containers(block) if isinstance(get(block, at), dict))
    return [at for at in places if not any(item == "event" or isinstance(item, int) for item in at)]


def problems(block: object) -> list[str]:
    try:
        privacy_record.read(block)
    except NotAStatement as error:
        return error.problems
    return []


def test_the_schema_is_a_schema_and_the_templates_ship_with_the_package() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    templates = resources.files("dpllm.statement").joinpath("templates")
    assert {f"{name}.md.j2" for name in ("banner", "card", "macros", "privacy")} <= {
        path.name for path in templates.iterdir()
    }


def test_every_field_is_described_and_every_object_closed() -> None:
    for name, part in SCHEMA["$defs"].items():
        assert part["additionalProperties"] is False, name
        for key, field in part["properties"].items():
            whole = {**reference.resolved(SCHEMA["$defs"], field)[0], **field}
            assert whole.get("description", "").endswith("."), f"{name}.{key}"


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parts[-3])
def test_every_published_statement_is_valid_and_written_back_byte_for_byte(path: Path) -> None:
    text = path.read_text("utf-8")
    statement = privacy_record.read(json.loads(text))
    assert card.dump_statement(statement.to_json()) == text
    Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_a_field_too_many_or_too_few_or_a_value_of_another_type_is_a_problem(block: Json) -> None:
    optional = {("merged_from",), ("statistics",), ("template",), ("plan", "canary_commitment"), ("plan", "audit")}
    optional |= {("audit", "epsilon_lower_bound", "slope")}
    optional |= {
        ("audit", "canaries", "settings", "digits")
    }  # which the schema cannot ask of one kind; the reader does
    for at in objects(block):
        name = "../odd key" if at[-1:] == ("attacks",) else "Unknown"
        assert problems(changed(block, at, lambda value, more=name: {**value, more: {}})), at
        for key in get(block, at):
            free = (at[-1:] and at[-1] in MAPS) or (*at, key) in optional
            assert free or problems(changed(block, at, lambda value, gone=key: without(value, gone))), (*at, key)
            assert key == "event" or problems(changed(block, (*at, key), lambda _: {"": [{}]})), (*at, key)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"guarantee": False}, "reason"), ({"guarantee": "true"}, "guarantee"), ({"guarantee": 1}, "the block"),
        ({"reason": "none"}, "reason"), ({"schema_version": 1}, "schema_version"),
        ({"schema_version": 4.0}, "the block"), ({"epsilon": -1}, "epsilon"), ({"sampling": None}, "sampling"),
        ({"audit": [1]}, "audit"), ({"epsilon": True}, "epsilon"), ({"delta": 0}, "delta"),
        ({"base_model": {"name": "a", "revision": None, "covered": True}}, "base_model.covered"),
        ({"files": {"a": "not a hash"}}, "files.a"), ({"not_covered": []}, "not_covered"),
    ],
)  # fmt: skip
def test_what_no_card_may_say_is_a_problem(block: Json, change: Json, place: str) -> None:
    problem_list = problems({**block, **change})
    assert any(line.startswith(place) for line in problem_list), problem_list
    with pytest.raises(ConfigError, match="schema"):
        privacy_record.read({**block, **change})


def test_terms_without_a_guarantee_stand_under_attempted_alone(block: Json) -> None:
    attempted = STATES["broken assumption"].card()[1]
    assert problems(attempted) == []
    assert problems({**attempted, "epsilon": 3.0})
    assert problems({**block, "attempted": attempted["attempted"]})
    assert problems({key: value for key, value in attempted.items() if key != "reason"})


def test_a_stranger_s_value_is_a_problem_and_no_traceback() -> None:
    for value in (None, 3, "text", [], {}, {"guarantee": None}, {"guarantee": True}, {"files": "x" * 10_000}):
        problem_list = problems(value)
        assert problem_list
        assert all(len(line) < 300 for line in problem_list)


def test_the_documentation_maps_items_to_fields_that_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    known = {name for name, _, _ in reference.privacy_fields()}
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_<>]+)*)`", rows))
    fields_named = {name for name in named if name.split(".")[0] in {field.split(".")[0] for field in known}}
    assert len(fields_named) > 35
    assert fields_named <= known


def test_half_a_character_is_written_as_a_question_mark() -> None:
    assert Steps.pick({}, planned=1, taken=1) == Steps(planned=1, taken=1)
    assert privacy_record.BaseModelName.pick({}, name="caf\udce9", revision=None, covered=False).name == "caf?"


@pytest.mark.parametrize("event", [*WRONG_EVENTS, None, {"type": "gaussian", "noise_multiplier": 1.0}])
def test_an_event_of_no_steps_is_no_plan(event: Any) -> None:
    with pytest.raises(NotAStatement, match="event"):
        Plan.pick(plan(event=event))


@pytest.mark.parametrize("epsilon", [0, 0.0, -0.0, -1.0, True, None, "1"])
def test_no_release_is_free(epsilon: Any) -> None:
    read = TypeAdapter(ReleaseEvent).validate_python
    assert read({"type": "pure_dp", "epsilon": 5e-324}).epsilon > 0
    with pytest.raises(ValidationError):
        read({"type": "pure_dp", "epsilon": epsilon})


@pytest.mark.parametrize("event", WRONG_EVENTS)
def test_what_is_no_event_is_none_of_an_earlier_run(event: Any) -> None:
    known = {**dict.fromkeys(Ancestor.model_fields), "name": "m", "guarantee": False, "adapter": True}
    assert Ancestor.pick(known).event is None
    with pytest.raises(NotAStatement, match="event"):
        Ancestor.pick({**known, "event": event})
